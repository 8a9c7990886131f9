"""The options of DeepSpeed's launcher on one host: each is honoured, ignored with a note, or refused."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError, LaunchError
from shardwise.system.safe_files import read_config_text

LOCAL = ("localhost", "127.0.0.1")
_SLOTS = re.compile(r"(?P<host>\S++)\s++slots=(?P<slots>[0-9]{1,9})\s*(#.*)?")
_REFUSED: dict[str, str] = {
    "no_python": "ranks must be Python scripts. Start other programs with torchrun --no-python.",
    "save_pid": "the launcher's process number is not written to a file. Use `$!` in the shell.",
    "elastic_training": "use `shardwise launch --elastic`, or --max-restarts: a job resumes on any number of ranks.",
    "venv_script": "ranks inherit the environment of this command. Activate the virtual environment first.",
    "no_ssh": "it starts one host of several. Use torchrun on each of them.",
}
_OTHER_HOSTS = ("launcher", "launcher_args", "ssh_port", "no_ssh_check", "force_multi", "master_addr")


@dataclass
class LocalLaunch:
    """A command line, translated for this host."""

    nproc: int | None
    """The number of ranks; `None` for one rank per device."""
    devices: tuple[int, ...] | None = None
    """The devices that ranks may use; `None` for all."""
    notes: list[str] = field(default_factory=list)
    """Options without effect, with the reason."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of DeepSpeed's launcher, and the script after them."""
    option = parser.add_argument
    option(
        "-H",
        "--hostfile",
        metavar="FILE",
        help="lines `host slots=N`, for N ranks on each host; several use ssh",
    )
    option("-i", "--include", default="", metavar="HOST:0,1", help="hosts and devices to use")
    option("-e", "--exclude", default="", metavar="HOST:0,1", help="hosts and devices not to use")
    option("--num_nodes", type=int, default=-1, metavar="N", help="use the first N hosts of the hostfile")
    option("--num_gpus", "--num_accelerators", type=int, default=-1, metavar="N", help="ranks to start on each host")
    option("--master_port", type=int, metavar="P", help="port for the rendezvous of ranks (default: a free one)")
    option("--node_rank", type=int, default=-1, help=argparse.SUPPRESS)
    option("--module", action="store_true", help="run a module, like `python -m`")
    option("--no_local_rank", action="store_true", help="do not give the script --local_rank=N")
    option("--enable_each_rank_log", default="None", metavar="DIR", help="write each rank's output there")
    for name in ("master_addr", "launcher", "launcher_args", "ssh_port", "save_pid", "venv_script", "bind_core_list"):
        is_flag = name == "save_pid"
        option(f"--{name}", help=argparse.SUPPRESS, **({"action": "store_true"} if is_flag else {}))  # type: ignore[arg-type]
    option(
        "--autotuning",
        default="",
        choices=("tune", "run"),
        help="find ZeRO stage and micro-batch by prediction; `run` then trains with them",
    )
    for name in ("no_python", "no_ssh", "no_ssh_check", "force_multi", "elastic_training", "bind_cores_to_rank"):
        option(f"--{name}", action="store_true", help=argparse.SUPPRESS)
    for name in ("min_elastic_nodes", "max_elastic_nodes"):
        option(f"--{name}", type=int, default=-1, help=argparse.SUPPRESS)
    option("--log_level", default="info", help=argparse.SUPPRESS)
    option("-q", "--quiet", action="store_true", help=argparse.SUPPRESS)
    option("command", nargs=argparse.PARSER, metavar="script", help="the script, and its arguments")


def refuse_options(args: Any) -> None:
    """Raise `LaunchError` for options that are supported neither on one host nor on several."""
    for name, why in _REFUSED.items():
        if getattr(args, name):
            raise LaunchError(f"deepspeed --{name} is not supported: {why}")
    if args.node_rank > 0:
        raise LaunchError(
            f"--node_rank {args.node_rank} is not supported: it starts one of several hosts by hand. List all hosts in "
            f"--hostfile, or run torchrun -m shardwise.integrations.deepspeed script on each."
        )


def local_launch(args: Any, num_devices: int) -> LocalLaunch:
    """Translate `args` of `add_options` for this host, which has `num_devices` accelerators.

    Raises `LaunchError` for unsupported options, and `ConfigError` for contradictory ones.
    """
    if args.num_nodes > 1:
        raise LaunchError(_several(f"--num_nodes {args.num_nodes}"))
    slots = _slots(args.hostfile)
    selected = _selected_devices(args, slots or num_devices)
    wanted = args.num_gpus if args.num_gpus > 0 else None
    if wanted is not None and (args.include or args.exclude):
        raise ConfigError("--num_gpus and --include or --exclude both select devices. Use only one of them.")
    launch = LocalLaunch(len(selected) if selected is not None else wanted or slots)
    if selected is not None and num_devices:
        launch.devices = selected
    launch.notes = _notes(args)
    return launch


def _notes(args: Any) -> list[str]:
    given = [name for name in _OTHER_HOSTS if getattr(args, name)]
    notes = [f"--{name} has no effect, because all ranks are on this host" for name in given]
    if args.bind_core_list:
        notes.append("--bind_core_list has no effect: --bind_cores_to_rank divides the cores available to this command")
    if args.hostfile and not Path(args.hostfile).is_file():
        notes.append(f"--hostfile {args.hostfile} does not exist, so all ranks start on this host")
    return notes


def _text_of(hostfile: str) -> str:
    try:
        return read_config_text(Path(hostfile))
    except OSError as error:
        raise ConfigError(f"--hostfile {hostfile} cannot be read: {error.strerror}.") from error


def _slots(hostfile: str | None) -> int | None:
    """The slots of the only host in `hostfile`; `None` without a file."""
    if hostfile is None or not Path(hostfile).is_file():
        return None
    lines = [line.strip() for line in _text_of(hostfile).splitlines()]
    hosts = []
    for line in lines:
        if not line or line.startswith("#"):
            continue
        match = _SLOTS.fullmatch(line)
        if match is None:
            raise ConfigError(
                f"{hostfile}: {line!r:.100} is not a valid line; write, for example, `localhost slots=4`."
            )
        hosts.append(int(match["slots"]))
    if len(hosts) != 1:
        raise LaunchError(
            f"{hostfile} lists {len(hosts)} hosts. Write one line `localhost slots=N`, or one for each host."
        )
    return hosts[0]


def _selected_devices(args: Any, num_slots: int) -> tuple[int, ...] | None:
    """The devices selected by `--include` or `--exclude`; `None` for all."""
    if args.include and args.exclude:
        raise ConfigError("--include and --exclude both select devices. Use only one of them.")
    text = args.include or args.exclude
    if not text:
        return None
    if "@" in text:
        raise LaunchError(_several(f"{text!r}"))
    _, is_named, listed = text.partition(":")
    if not re.fullmatch(r"(\d+(,\d+)*)?", listed):
        raise ConfigError(f"{text!r} is not a list of devices; write, for example, localhost:0,1.")
    named = tuple(sorted({int(number) for number in listed.split(",") if number}))
    if args.include:
        return named if is_named else tuple(range(num_slots)) or None
    left = tuple(number for number in range(num_slots) if is_named and number not in named)
    if not left:
        raise ConfigError(f"--exclude {text} excludes all {num_slots} devices of this host.")
    return left


def _several(what: str) -> str:
    return (
        f"{what} needs several hosts, but there is no hostfile. Give --hostfile FILE with a line `host slots=N` for "
        f"each host."
    )
