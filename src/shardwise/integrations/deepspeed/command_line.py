"""What people type after `deepspeed`, for this host: each option honoured, told to mean nothing, or refused."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError, LaunchError

LOCAL = ("localhost", "127.0.0.1")
_SLOTS = re.compile(r"(?P<host>\S+)\s+slots=(?P<slots>\d+)\s*(#.*)?$")
_REFUSED: dict[str, str] = {
    "no_python": "ranks are processes of Python. Start other programs with torchrun --no-python.",
    "save_pid": "no file has the launcher's number. `$!` of the shell has it.",
    "autotuning": "`budget` in a plan and `shardwise explain` choose before a step is run.",
    "elastic_training": "a job resumes at any number of ranks; `shardwise launch` has --max-restarts.",
    "venv_script": "ranks have the environment of this command. Activate it before.",
    "no_ssh": "it starts one host of several; torchrun on each does that.",
}
_OF_OTHER_HOSTS = ("launcher", "launcher_args", "ssh_port", "no_ssh_check", "force_multi", "master_addr")


@dataclass
class Asked:
    """What a command line comes to."""

    nproc: int | None
    """`None` for one rank for each device."""
    devices: tuple[int, ...] | None = None
    """Those of this host that ranks may use; `None` for all."""
    notes: list[str] = field(default_factory=list)
    """Options that mean nothing here, with the reason."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of DeepSpeed's launcher, and the script behind them."""
    option = parser.add_argument
    option("-H", "--hostfile", metavar="FILE", help="lines `host slots=N`: so many ranks on each, by ssh if several")
    option("-i", "--include", default="", metavar="HOST:0,1", help="the hosts and devices that ranks use")
    option("-e", "--exclude", default="", metavar="HOST:0,1", help="those that they do not")
    option("--num_nodes", type=int, default=-1, metavar="N", help="the first N hosts of the file")
    option("--num_gpus", "--num_accelerators", type=int, default=-1, metavar="N", help="ranks to start on each host")
    option("--master_port", type=int, metavar="P", help="port at which ranks meet (default: a free one)")
    option("--node_rank", type=int, default=-1, help=argparse.SUPPRESS)
    option("--module", action="store_true", help="run a module, as `python -m` does")
    option("--no_local_rank", action="store_true", help="do not give the script --local_rank=N")
    option("--enable_each_rank_log", default="None", metavar="DIR", help="write each rank's output there")
    for name in ("master_addr", "launcher", "launcher_args", "ssh_port", "save_pid", "venv_script", "bind_core_list"):
        is_flag = name == "save_pid"
        option(f"--{name}", help=argparse.SUPPRESS, **({"action": "store_true"} if is_flag else {}))  # type: ignore[arg-type]
    option("--autotuning", default="", help=argparse.SUPPRESS)
    for name in ("no_python", "no_ssh", "no_ssh_check", "force_multi", "elastic_training", "bind_cores_to_rank"):
        option(f"--{name}", action="store_true", help=argparse.SUPPRESS)
    for name in ("min_elastic_nodes", "max_elastic_nodes"):
        option(f"--{name}", type=int, default=-1, help=argparse.SUPPRESS)
    option("--log_level", default="info", help=argparse.SUPPRESS)
    option("-q", "--quiet", action="store_true", help=argparse.SUPPRESS)
    option("command", nargs=argparse.PARSER, metavar="script", help="the script, and its arguments")


def refuse_options(args: Any) -> None:
    """Raise `LaunchError` for what is not supported, on this host and on others."""
    for name, why in _REFUSED.items():
        if getattr(args, name):
            raise LaunchError(f"deepspeed --{name} is not supported: {why}")
    if args.node_rank > 0:
        raise LaunchError(
            f"--node_rank {args.node_rank} starts one of several hosts by hand. Give all of them in --hostfile, or run "
            f"torchrun -m shardwise.integrations.deepspeed script on each."
        )


def understood(args: Any, num_devices: int) -> Asked:
    """What `args` of `add_options` ask for on a host with `num_devices` accelerators.

    Raises `LaunchError` for what is not supported, and `ConfigError` for what contradicts itself.
    """
    if args.num_nodes > 1:
        raise LaunchError(_several(f"--num_nodes {args.num_nodes}"))
    slots = _slots(args.hostfile)
    chosen = _chosen(args, slots or num_devices)
    wanted = args.num_gpus if args.num_gpus > 0 else None
    if wanted is not None and (args.include or args.exclude):
        raise ConfigError("--num_gpus counts devices, and --include and --exclude name them. Give one or the other.")
    asked = Asked(len(chosen) if chosen is not None else wanted or slots)
    if chosen is not None and num_devices:
        asked.devices = chosen
    asked.notes = _notes(args)
    return asked


def _notes(args: Any) -> list[str]:
    given = [name for name in _OF_OTHER_HOSTS if getattr(args, name)]
    notes = [f"--{name} is about other hosts, and ranks start on this one" for name in given]
    if args.bind_core_list:
        notes.append("--bind_core_list: --bind_cores_to_rank divides the cores that this command may use")
    if args.hostfile and not Path(args.hostfile).is_file():
        notes.append(f"--hostfile {args.hostfile} is not there, so this host has the ranks")
    return notes


def _slots(hostfile: str | None) -> int | None:
    """How many ranks a file gives to the one host in it."""
    if hostfile is None or not Path(hostfile).is_file():
        return None
    lines = [line.strip() for line in Path(hostfile).read_text(encoding="utf-8").splitlines()]
    hosts = []
    for line in lines:
        if not line or line.startswith("#"):
            continue
        match = _SLOTS.match(line)
        if match is None:
            raise ConfigError(f"{hostfile}: {line!r} is not a line of a hostfile, such as `localhost slots=4`.")
        hosts.append(int(match["slots"]))
    if len(hosts) != 1:
        raise LaunchError(f"{hostfile} names {len(hosts)} hosts; give one line `localhost slots=N`, or several hosts.")
    return hosts[0]


def _chosen(args: Any, num_slots: int) -> tuple[int, ...] | None:
    """The devices that `--include` or `--exclude` leaves."""
    if args.include and args.exclude:
        raise ConfigError("--include and --exclude are two choices of the same devices. Give one of them.")
    text = args.include or args.exclude
    if not text:
        return None
    if "@" in text:
        raise LaunchError(_several(f"{text!r}"))
    _, is_named, listed = text.partition(":")
    if not re.fullmatch(r"(\d+(,\d+)*)?", listed):
        raise ConfigError(f"{text!r} names no devices; write localhost:0,1.")
    named = tuple(sorted({int(number) for number in listed.split(",") if number}))
    if args.include:
        return named if is_named else tuple(range(num_slots)) or None
    left = tuple(number for number in range(num_slots) if is_named and number not in named)
    if not left:
        raise ConfigError(f"--exclude {text} leaves none of the {num_slots} devices of this host.")
    return left


def _several(what: str) -> str:
    return (
        f"{what} is about several hosts, and nothing says which. Give --hostfile FILE with a line `host slots=N` for "
        f"each."
    )
