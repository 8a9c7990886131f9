"""Translates command lines of `deepspeed` with several hosts to those of `shardwise launch`."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.cli import launch, launch_places
from shardwise.errors import ConfigError, LaunchError
from shardwise.launch.job import Job
from shardwise.launch.places.hosts import parse_host_file
from shardwise.system.safe_files import read_config_text

_LAUNCHERS = {
    "": ["--where", "ssh"],
    "ssh": ["--where", "ssh"],
    "pdsh": ["--where", "ssh"],
    "openmpi": ["--where", "mpi", "--mpi", "openmpi"],
    "mpich": ["--where", "mpi", "--mpi", "mpich"],
    "impi": ["--where", "mpi", "--mpi", "intel"],
}
_ENV_FILE = ".deepspeed_env"


def names_hosts(args: Any) -> bool:
    """Whether the options of `deepspeed` ask for ranks on other hosts: several in the file, or `--force_multi`."""
    if args.hostfile is None or not Path(args.hostfile).is_file():
        return False
    text = _read_text(Path(args.hostfile))
    lines = [line for line in text.splitlines() if line.partition("#")[0].strip()]
    if len(lines) < 2 and not args.force_multi:
        return False
    parse_host_file(text, args.hostfile)  # here, so that an invalid line is reported with its number
    return True


def run_on_hosts(args: Any, job: Job) -> int:
    """Print what would be started, or run it and return the exit status.

    Raises `LaunchError` and `ConfigError` for options that are not supported on other hosts.
    """
    words = words_for_launch(args, deepspeed_env())
    parser = argparse.ArgumentParser(prog="shardwise deepspeed", allow_abbrev=False)
    launch.add_arguments(parser)
    asked = parser.parse_args([*words, *job.command])
    return launch_places.run_elsewhere(launch_places.place_of(asked), asked, job)


def words_for_launch(args: Any, variables: Mapping[str, str]) -> list[str]:
    """The equivalent arguments for `shardwise launch`; `variables` are those of a `.deepspeed_env`."""
    if args.num_gpus > 0 and (args.include or args.exclude):
        raise ConfigError("--num_gpus and --include or --exclude both select devices. Use only one of them.")
    launcher = (args.launcher or "").lower()
    if launcher not in _LAUNCHERS:
        cure = "Use `shardwise launch --where slurm`." if launcher == "slurm" else f"Use one of {_listed()}."
        raise LaunchError(f"deepspeed --launcher {args.launcher} is not supported for the hosts of a file. {cure}")
    words = [*_LAUNCHERS[launcher], "--hostfile", args.hostfile]
    given = {"--include": args.include, "--exclude": args.exclude, "--port": args.master_port}
    given["--nproc"] = args.num_gpus if args.num_gpus > 0 else None
    given["--nodes"] = args.num_nodes if args.num_nodes > 0 else None
    if words[1] == "ssh":
        given |= {"--master-addr": args.master_addr, "--ssh-port": args.ssh_port}
    if launcher not in ("", "pdsh"):
        given["--launcher-args"] = args.launcher_args
    words += [f"{name}={value}" for name, value in given.items() if value]
    words += ["--bind", "cores"] if args.bind_cores_to_rank else []
    words += ["--dry-run"] if args.dry_run else []
    for name, value in variables.items():
        words += ["--env", f"{name}={value}"]
    return words


def notes_on_hosts(args: Any) -> list[str]:
    """Options that have no effect for several hosts here, with the reason."""
    launcher = (args.launcher or "").lower()
    notes = []
    if launcher == "pdsh":
        notes.append("--launcher pdsh: hosts are reached by ssh")
    if launcher in ("", "pdsh") and args.launcher_args:
        notes.append(f"--launcher_args {args.launcher_args!r} are for pdsh; use --launcher ssh to pass them to ssh")
    if args.no_ssh_check:
        notes.append("--no_ssh_check: hosts are always checked before anything starts")
    if _LAUNCHERS.get(launcher, ["", "mpi"])[1] == "mpi":
        notes += [f"--{name} is for ssh" for name in ("master_addr", "ssh_port") if getattr(args, name)]
    return notes


def deepspeed_env(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables of `.deepspeed_env` in this folder or the home folder, or of the file that `DS_ENV_FILE` names.

    Raises `ConfigError` for a line that is not `NAME=VALUE`.
    """
    around = os.environ if environment is None else environment
    named = around.get("DS_ENV_FILE", _ENV_FILE)
    found: dict[str, str] = {}
    for folder in (Path(around.get("HOME", ".")), Path()):  # this folder takes precedence
        file = folder / named
        if not file.is_file():
            continue
        for number, line in enumerate(_read_text(file).splitlines(), start=1):
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            name, equals, value = text.partition("=")
            if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise ConfigError(f"{file}, line {number}: write NAME=VALUE.")
            found[name] = value
    return found


def _read_text(file: Path) -> str:
    try:
        return read_config_text(file)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}.") from error


def _listed() -> str:
    return ", ".join(sorted(filter(None, _LAUNCHERS)))
