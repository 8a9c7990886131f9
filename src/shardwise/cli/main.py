"""`shardwise VERB ...`: imports only the module of the verb, and ends with its status.

A verb's module has `add_arguments(parser)` and `run(args) -> int`. Nothing heavy is imported here, so that `shardwise
--help` is fast.
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

from shardwise.cli.broken_pipe import UNREAD_STATUS, is_about_output, let_go
from shardwise.errors import ShardwiseError, nearest
from shardwise.version import __version__

VERBS = {
    "launch": ("shardwise.cli.launch", "run a training script, one process per rank"),
    "deepspeed": ("shardwise.cli.deepspeed", "the same with DeepSpeed's own options, for its scripts"),
    "accelerate": ("shardwise.cli.accelerate", "the same, as it is typed after Accelerate's `accelerate`"),
    "horovodrun": ("shardwise.cli.horovodrun", "the same, as it is typed after Horovod's horovodrun"),
    "explain": ("shardwise.cli.explain", "print the table and the program that a plan becomes"),
    "bench": ("shardwise.cli.bench", "measure disks, memory and links; in a checkout, race the peers"),
    "inspect": ("shardwise.cli.inspect", "print what is in a checkpoint, whoever wrote it"),
    "convert": ("shardwise.cli.convert", "write a checkpoint in another format, or a DeepSpeed config as a plan"),
    "top": ("shardwise.cli.top", "show how a run is doing, live: loss, throughput, memory, which rank is slow"),
    "report": ("shardwise.cli.report", "write a run as one HTML page that needs no network"),
    "doctor": ("shardwise.cli.doctor", "check this machine, and say how to mend what is wrong"),
}

USAGE_STATUS = 2
INTERRUPTED_STATUS = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 done, 2 refused, 130 interrupted, else the verb's own.

    141 if the reader of its output is gone.
    """
    if argv is None:
        atexit.register(gc.freeze)  # [Note: the last collection] in launch/ending.py
    _print_any_text()
    try:
        status = _status_of(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return status
    except BrokenPipeError as error:
        if not is_about_output(error):
            raise
        let_go()
        return UNREAD_STATUS


def _print_any_text() -> None:
    """Let a character that the output cannot have be replaced: names of files need not be text, and not every terminal
    has UTF-8."""
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
    except SystemExit as end:  # argparse has printed its help, its version or its message
        if is_about_output(end):
            return UNREAD_STATUS
        return end.code if isinstance(end.code, int) else 0


def _run(arguments: list[str]) -> int:
    if not arguments:
        print(_top_parser().format_help(), end="")
        return USAGE_STATUS
    if arguments[0].startswith("-"):
        _top_parser().parse_args(arguments)
    verb, *rest = arguments
    if verb not in VERBS:
        return _refuse(f"there is no verb {verb!r}. {nearest(verb, VERBS)} See shardwise --help.")
    module_name, summary = VERBS[verb]
    module = importlib.import_module(module_name)
    parser = _Parser(prog=f"shardwise {verb}", description=_sentence(summary), allow_abbrev=False)
    module.add_arguments(parser)
    status: int = module.run(parser.parse_args(rest))
    return status


class _Parser(argparse.ArgumentParser):
    """Suggests the nearest option or choice for an unknown one."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        known, unknown = self.parse_known_args(args, namespace)
        if unknown:
            option = next((word.partition("=")[0] for word in unknown if word.startswith("-")), "")
            hint = f". {nearest(option, self._option_string_actions)}" if option else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return known

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            raise argparse.ArgumentError(action, f"there is no {value!r}. {nearest(str(value), known)}")


def _top_parser() -> argparse.ArgumentParser:
    width = max(map(len, VERBS))
    parser = _Parser(
        prog="shardwise",
        usage="shardwise [--help] [--version] VERB ...",
        description="Train PyTorch models that do not fit.",
        epilog="verbs:\n"
        + "".join(f"  {verb:<{width}}  {summary}\n" for verb, (_, summary) in VERBS.items())
        + "\n`shardwise VERB --help` tells what a verb takes.\n"
        + "SHARDWISE_TRACEBACK=1 in the environment shows where an error arose.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"shardwise {__version__}")
    return parser


def _refuse(message: str) -> int:
    print(f"shardwise: {message}", file=sys.stderr)
    return USAGE_STATUS


def _sentence(summary: str) -> str:
    return summary[0].upper() + summary[1:] + "."
