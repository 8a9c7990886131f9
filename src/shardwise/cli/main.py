"""`shardwise COMMAND ...`: imports the module of the command, runs it, and returns its exit status.

A command's module has `add_arguments(parser)` and `run(args) -> int`, and may have `EXAMPLES`, the end of its help. No
large package is imported here, so that `shardwise --help` is fast.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import importlib
import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from shardwise.cli.broken_pipe import BROKEN_PIPE_STATUS, discard_output, is_about_output
from shardwise.errors import ShardwiseError, nearest
from shardwise.system.printable import printable
from shardwise.version import __version__

COMMANDS = {
    "launch": ("shardwise.cli.launch", "run a script, one process per rank: here, over ssh, Slurm, MPI or Kubernetes"),
    "deepspeed": ("shardwise.cli.deepspeed", "run a DeepSpeed script, with the options of the `deepspeed` launcher"),
    "accelerate": ("shardwise.cli.accelerate", "run a script, with the options of `accelerate launch`"),
    "horovodrun": ("shardwise.cli.horovodrun", "run a Horovod script, with the options of `horovodrun`"),
    "explain": ("shardwise.cli.explain", "show what a plan does: memory per rank, bytes sent, collectives of one step"),
    "plan": ("shardwise.cli.plan", "choose a plan for a model on given hardware, and say why"),
    "simulate": ("shardwise.cli.simulate", "run a job of weeks in seconds: failures, checkpoints, restarts, goodput"),
    "calibrate": ("shardwise.cli.calibrate", "measure how fast this machine computes, for predictions"),
    "bench": ("shardwise.cli.bench", "measure disks, memory and links of this machine, or run the benchmarks"),
    "inspect": ("shardwise.cli.inspect", "show what a checkpoint contains: shardwise, Hugging Face, DCP or DeepSpeed"),
    "convert": ("shardwise.cli.convert", "convert a checkpoint to another format, or a DeepSpeed config to a plan"),
    "top": ("shardwise.cli.top", "watch a run: loss, throughput, memory, and which rank is slow"),
    "report": ("shardwise.cli.report", "write a run as one HTML page"),
    "doctor": ("shardwise.cli.doctor", "check whether this machine is ready to train, and how to fix what is not"),
}

USAGE_STATUS = 2
INTERRUPTED_STATUS = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 for success, 2 for an error in the arguments or an unsupported
    request, 130 after Ctrl-C, 141 if the reader of the output is gone; other values are the command's own."""
    if argv is None:
        atexit.register(gc.freeze)  # [Note: the last collection] in system/fast_exit.py
    _replace_unprintable_characters()
    try:
        status = _status_of(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return status
    except BrokenPipeError as error:
        if not is_about_output(error):
            raise
        discard_output()
        return BROKEN_PIPE_STATUS


def _replace_unprintable_characters() -> None:
    """Make stdout and stderr replace characters that they cannot encode: file names may contain any bytes, and not
    every terminal uses UTF-8."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            is_utf8 = stream.encoding.lower().replace("-", "") == "utf8"
            stream.reconfigure(errors="backslashreplace" if is_utf8 else "replace")


def _status_of(arguments: list[str]) -> int:
    try:
        return _run(arguments)
    except ShardwiseError as error:
        if os.environ.get("SHARDWISE_TRACEBACK") == "1":
            traceback.print_exc()
        return _refuse(str(error))
    except KeyboardInterrupt:
        return INTERRUPTED_STATUS
    except SystemExit as end:
        if is_about_output(end):
            return BROKEN_PIPE_STATUS
        if end.code is None or isinstance(end.code, int):  # argparse has printed its help, its version or its error
            return end.code or 0
        print(end.code, file=sys.stderr)  # as Python does: a model's script may call sys.exit("why")
        return 1


def _run(arguments: list[str]) -> int:
    if not arguments:
        print(_top_parser().format_help(), end="")
        return USAGE_STATUS
    if arguments[0].startswith("-"):
        _top_parser().parse_args(arguments)
    command, *rest = arguments
    if command not in COMMANDS:
        return _refuse(f"there is no command {command!r}. {nearest(command, COMMANDS)} See shardwise --help.")
    status: int = importlib.import_module(COMMANDS[command][0]).run(command_parser(command).parse_args(rest))
    return status


def command_parser(command: str) -> argparse.ArgumentParser:
    """The parser of what follows a command's name."""
    module_name, summary = COMMANDS[command]
    module = importlib.import_module(module_name)
    parser = _Parser(
        prog=f"shardwise {command}",
        description=_sentence(summary),
        epilog=getattr(module, "EXAMPLES", None),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.add_arguments(parser)
    return parser


class _Parser(argparse.ArgumentParser):
    """Suggests the nearest option or choice for an unknown one."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        known, unknown = self.parse_known_args(args, namespace)
        if unknown:
            option = next((word.partition("=")[0] for word in unknown if word.startswith("-")), "")
            hint = f". {nearest(option, self._option_string_actions)}" if option else ""
            if not option and any("=" in word for word in unknown):  # the shell has made two words of a={b:1,c:2}
                hint = ". Put a value with braces or spaces in quotes: --set 'mesh={dp: 2, tp: 2}'"
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return known

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            raise argparse.ArgumentError(action, f"there is no {value!r}. {nearest(str(value), known)}")


def _top_parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    parser = _Parser(
        prog="shardwise",
        usage="shardwise [--help] [--version] COMMAND ...",
        description="Train PyTorch models that do not fit on one device.",
        epilog="commands:\n"
        + "".join(f"  {command:<{width}}  {summary}\n" for command, (_, summary) in COMMANDS.items())
        + "\n`shardwise COMMAND --help` shows the options of a command.\n"
        + "Set SHARDWISE_TRACEBACK=1 to see the traceback of an error.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"shardwise {__version__}")
    return parser


def _refuse(message: str) -> int:
    print(f"shardwise: {printable(message)}", file=sys.stderr)
    return USAGE_STATUS


def _sentence(summary: str) -> str:
    return summary[0].upper() + summary[1:] + "."
