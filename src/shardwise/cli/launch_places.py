"""The options of `shardwise launch` about where ranks run, and what becomes of them elsewhere than on this machine."""

from __future__ import annotations

import argparse
import os
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError, LaunchError
from shardwise.job_token import VARIABLE, new_token
from shardwise.launch.hosts.gather import what_is_sent
from shardwise.launch.hosts.run import run_ssh
from shardwise.launch.job import Job
from shardwise.launch.places import k8s, mpi, slurm, ssh
from shardwise.launch.places.forwarding import forwarded
from shardwise.launch.places.hosts import Host, Share, choose, parse_host_file, parse_hosts, shares
from shardwise.launch.places.k8s_run import run_k8s

PLACES = ("local", "ssh", "slurm", "mpi", "k8s")
# Which options mean something where; what is given in vain is refused.
_ONLY = {
    "hosts": ("ssh", "mpi"),
    "hostfile": ("ssh", "mpi"),
    "include": ("ssh", "mpi"),
    "exclude": ("ssh", "mpi"),
    "nodes": ("ssh", "mpi", "slurm", "k8s"),
    "env": ("ssh", "mpi", "slurm", "k8s"),
    "env_prefix": ("ssh", "mpi", "slurm", "k8s"),
    "chdir": ("ssh", "mpi", "slurm"),
    "python": ("ssh", "mpi", "slurm"),
    "launcher_args": ("ssh", "mpi", "slurm"),
    "master_addr": ("ssh",),
    "ssh_port": ("ssh",),
    "identity": ("ssh",),
    "rsync": ("ssh",),
    "mpi": ("mpi",),
    "name": ("slurm", "k8s"),
    "gpus_per_node": ("slurm", "k8s"),
    "time": ("slurm",),
    "save_before_end": ("slurm",),
    "no_requeue": ("slurm",),
    "image": ("k8s",),
    "kind": ("k8s",),
    "namespace": ("k8s",),
    "queue": ("k8s",),
    "secret": ("k8s",),
    "claim": ("k8s",),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The names are those of DeepSpeed, torchrun and horovodrun, where these have one."""
    option = parser.add_argument_group("where ranks run (docs/launching.md)").add_argument
    option("--where", choices=PLACES, help="default: ssh if hosts are named, else this machine")
    option("-H", "--hosts", metavar="LIST", help="ssh, mpi: hosts and their ranks: gpu1:4,gpu2:4")
    option("--hostfile", type=Path, metavar="FILE", help="ssh, mpi: lines `host slots=4`")
    option("--include", metavar="LIST", help="ssh, mpi: of these only host1@host2:0,1")
    option("--exclude", metavar="LIST", help="ssh, mpi: all but host1@host2:0,1")
    option("--nodes", "--num_nodes", "--nnodes", type=int, metavar="N", help="hosts to ask for, or the first N named")
    option("--env", "-x", action="append", metavar="NAME[=V]", help="a variable that ranks elsewhere get")
    option("--env-prefix", action="append", metavar="P", help="all variables that begin so, besides NCCL_, HF_ ...")
    option("--chdir", metavar="DIR", help="ssh, mpi, slurm: where ranks run (default: this path)")
    option("--python", metavar="PATH", help="ssh, mpi, slurm: the interpreter there (default: this path)")
    option(
        "--launcher-args", "--launcher_args", metavar="ARGS", help="more options for ssh, mpirun, or sbatch and srun"
    )
    option("--master-addr", "--master_addr", metavar="A", help="ssh: the first host, as the others reach it")
    option("--ssh-port", "--ssh_port", type=int, metavar="P", help="ssh: the port of sshd")
    option("--identity", type=Path, metavar="FILE", help="ssh: the key")
    option("--rsync", action="store_true", help="ssh: copy this directory to --chdir on each host first")
    option("--mpi", choices=mpi.FAMILIES, help="mpi: whose mpirun (default: asked)")
    option("--name", help="slurm, k8s: the name of the job (default: the script's)")
    option("--gpus-per-node", type=int, metavar="N", help="slurm, k8s: GPUs to ask for")
    option("--time", metavar="T", help="slurm: the time limit")
    option("--save-before-end", type=int, metavar="S", help="slurm: when ranks are told to save (default: 120)")
    option("--no-requeue", action="store_true", help="slurm: no new start after the time is over")
    option("--image", help="k8s: what pods run")
    option("--kind", choices=k8s.KINDS, help="k8s: what to make (default: job)")
    option("--namespace", help="k8s (default: default)")
    option("--queue", help="k8s: of Kueue")
    option("--secret", action="append", metavar="NAME", help="k8s: a secret whose entries become variables")
    option("--claim", action="append", metavar="NAME:PATH", help="k8s: a volume claim, and where it is mounted")


def place_of(args: argparse.Namespace) -> str:
    """Where ranks are to run. Raises `ConfigError` for options that mean nothing there."""
    names_hosts = any(getattr(args, name) is not None for name in ("hosts", "hostfile"))
    place: str = args.where or ("ssh" if names_hosts else "local")
    if place == "local" and args.nodes == 1:
        args.nodes = None  # as people type it for DeepSpeed
    for name, places in _ONLY.items():
        if getattr(args, name) and place not in places:
            option = "--" + name.replace("_", "-")
            if place == "local":
                raise LaunchError(
                    f"{option} is about other hosts than this one. Say which with --hosts, or see --where."
                )
            raise ConfigError(f"{option} means nothing with --where {place}; it is for {' and '.join(places)}.")
    return place


def run_elsewhere(place: str, args: argparse.Namespace, job: Job) -> int:
    """Print the plan, or carry it out, and return the exit status."""
    if args.python:
        job = replace(job, python=args.python)
    job.check_numbers()
    environment = forwarded(os.environ, args.env or (), args.env_prefix or ())
    if place in ("mpi", "slurm"):  # by ssh each attempt has its own; manifests for Kubernetes are for all to read
        environment = dict(sorted({VARIABLE: new_token(), **environment}.items()))
    return {"ssh": _ssh, "mpi": _mpi, "slurm": _slurm, "k8s": _k8s}[place](args, job, environment)


def _ssh(args: argparse.Namespace, job: Job, environment: dict[str, str]) -> int:
    settings = ssh.SshSettings(
        directory=args.chdir or os.getcwd(),
        port=args.ssh_port,
        identity=args.identity,
        options=_words(args.launcher_args),
        address=args.master_addr or "",
        copies=args.rsync,
        python_path=os.environ.get("PYTHONPATH", ""),
    )
    plan = ssh.plan_ssh(job, _shares(args), settings, environment)
    if args.dry_run:
        print(plan.text())
        if args.rsync:
            print(what_is_sent())
        return 0
    return run_ssh(plan)


def _mpi(args: argparse.Namespace, job: Job, environment: dict[str, str]) -> int:
    if args.nproc is None and not args.hosts and not args.hostfile:
        raise ConfigError("How many ranks? Give --nproc 4, or hosts with --hosts gpu1:4,gpu2:4.")
    plan = mpi.plan_mpi(
        job,
        _shares(args) if args.hosts or args.hostfile else [Share(Host("localhost"), 0, job.nproc)],
        args.mpi or mpi.find_family(),
        environment,
        directory=args.chdir or "",
        bind=args.bind,
        arguments=_words(args.launcher_args),
    )
    if args.dry_run:
        print(plan.text())
        return 0
    return mpi.run_mpi(plan)


def _slurm(args: argparse.Namespace, job: Job, environment: dict[str, str]) -> int:
    request = slurm.SlurmRequest(
        nodes=args.nodes or 1,
        name=args.name or _name_of(job),
        time=args.time or "",
        gpus_per_node=args.gpus_per_node or 0,
        save_seconds=120 if args.save_before_end is None else args.save_before_end,
        requeue=not args.no_requeue,
        bind=args.bind,
        arguments=_words(args.launcher_args),
    )
    if "SLURM_JOB_ID" in os.environ:
        step = slurm.plan_srun(job, request, environment, os.environ)
        if args.dry_run:
            print(step.text())
            return 0
        return slurm.run_srun(step)
    log_dir = str(args.log_dir) if args.log_dir else ""
    batch = slurm.plan_sbatch(job, request, environment, args.chdir or os.getcwd(), log_dir)
    if args.dry_run:
        print(batch.text())
        return 0
    if args.log_dir:
        args.log_dir.mkdir(parents=True, exist_ok=True)  # Slurm does not, and says nothing
    number = slurm.run_sbatch(batch, environment)
    print(f"shardwise: submitted as job {number}; `squeue -j {number}` shows it, `scancel {number}` ends it.")
    return 0


def _k8s(args: argparse.Namespace, job: Job, environment: dict[str, str]) -> int:
    claims = [claim.partition(":") for claim in args.claim or ()]
    request = k8s.PodRequest(
        image=args.image or "",
        nodes=args.nodes or 1,
        kind=args.kind or "job",
        name=args.name or _name_of(job),
        namespace=args.namespace or "default",
        gpus_per_node=args.gpus_per_node or 0,
        queue=args.queue or "",
        secrets=tuple(args.secret or ()),
        claims={name: path for name, _, path in claims},
    )
    # what happens to be set here is for all to read there: only what is named goes along
    named = {name: environment[name] for name in (word.partition("=")[0] for word in args.env or ())}
    prefixed = {name: v for name, v in environment.items() if name.startswith(tuple(args.env_prefix or ()))}
    plan = k8s.plan_k8s(job, request, named | prefixed)
    if args.dry_run:
        print(plan.text())
        return 0
    return run_k8s(plan)


def _shares(args: argparse.Namespace) -> list[Share]:
    hosts = _hosts(args)
    if args.nodes is not None:
        if not 1 <= args.nodes <= len(hosts):
            raise ConfigError(f"--nodes is {args.nodes}, and {len(hosts)} hosts are named.")
        hosts = hosts[: args.nodes]
    return shares(hosts, args.nproc)


def _hosts(args: argparse.Namespace) -> list[Host]:
    if args.hosts and args.hostfile:
        raise ConfigError("--hosts and --hostfile both name the hosts. Give one of them.")
    if args.hosts:
        return choose(parse_hosts(args.hosts), args.include, args.exclude)
    if not args.hostfile:
        raise ConfigError(f"--where {args.where} needs hosts: --hosts gpu1:4,gpu2:4, or --hostfile FILE.")
    try:
        text = args.hostfile.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not a text"
        raise ConfigError(f"--hostfile {str(args.hostfile)!r} cannot be read: {why}.") from error
    return choose(parse_host_file(text, str(args.hostfile)), args.include, args.exclude)


def _words(text: Any) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text or ""))
    except ValueError as error:
        raise ConfigError(f"--launcher-args {text!r} is not a command line: {error}.") from error


def _name_of(job: Job) -> str:
    """A name that Slurm and Kubernetes take, from the script's."""
    stem = job.command[0].rpartition(".")[2] if job.is_module else Path(job.command[0]).stem
    return re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:50].strip("-") or "shardwise"
