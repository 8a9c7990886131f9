"""The options of `shardwise launch` for where ranks run, and jobs that do not run on this machine."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import socket
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError, LaunchError
from shardwise.launch.autoscale import Sizes, describe_policy, first_size
from shardwise.launch.elastic.chosen_hosts import ChosenHosts
from shardwise.launch.elastic.host_list import EVERY_SECONDS, hosts_by_script
from shardwise.launch.elastic.place import ListedPlace
from shardwise.launch.hosts.gather import what_is_sent
from shardwise.launch.hosts.run import run_ssh
from shardwise.launch.job import Job
from shardwise.launch.places import k8s, k8s_resizable, mpi, pods, slurm, slurm_hosts, ssh
from shardwise.launch.places.forwarding import forwarded
from shardwise.launch.places.hosts import Host, Share, choose, parse_host_file, parse_hosts, shares
from shardwise.launch.places.k8s_run import run_k8s
from shardwise.launch.places.k8s_scale import ApiServer, ScaledPods, Target
from shardwise.launch.places.slurm_hosts import EVERY_SECONDS as SLURM_SECONDS
from shardwise.launch.places.slurm_more import Allocation, MoreNodes
from shardwise.system.job_token import VARIABLE, new_token
from shardwise.system.safe_files import read_config_text

PLACES = ("local", "ssh", "slurm", "mpi", "k8s", "pods")
# The places where each option applies; elsewhere it is refused.
_PLACES_OF_OPTION = {
    "hosts": ("ssh", "mpi"),
    "hostfile": ("ssh", "mpi"),
    "include": ("ssh", "mpi"),
    "exclude": ("ssh", "mpi"),
    "nodes": ("ssh", "mpi", "slurm", "k8s", "pods"),
    "env": ("ssh", "mpi", "slurm", "k8s"),
    "env_prefix": ("ssh", "mpi", "slurm", "k8s"),
    "chdir": ("ssh", "mpi", "slurm", "pods"),
    "python": ("ssh", "mpi", "slurm"),
    "launcher_args": ("ssh", "mpi", "slurm"),
    "master_addr": ("ssh", "slurm", "pods"),
    "ssh_port": ("ssh",),
    "identity": ("ssh",),
    "rsync": ("ssh",),
    "host_discovery_script": ("ssh",),
    "host_timeout": ("ssh", "slurm", "k8s", "pods"),
    "cooldown": ("ssh", "slurm", "k8s", "pods"),
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
    "service_account": ("k8s",),
    "topology": ("k8s", "pods"),
    "resize": ("pods",),
}

_ELASTIC_OPTIONS = ("host_discovery_script", "host_timeout", "cooldown")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The names are those of DeepSpeed, torchrun and horovodrun, if they have such an option."""
    option = parser.add_argument_group("where ranks run (docs/launching.md)").add_argument
    option("--where", choices=PLACES, help="default: ssh if hosts are named, else local")
    option("-H", "--hosts", metavar="LIST", help="ssh, mpi: hosts and ranks on each, such as gpu1:4,gpu2:4")
    option("--hostfile", type=Path, metavar="FILE", help="ssh, mpi: the same as lines `gpu1 slots=4`")
    option("--include", metavar="LIST", help="ssh, mpi: only these hosts or devices, such as host1@host2:0,1")
    option("--exclude", metavar="LIST", help="ssh, mpi: not these hosts or devices")
    option(
        "--nodes", "--num_nodes", "--nnodes", type=int, metavar="N", help="hosts to request, or the first N of the list"
    )
    option(
        "--env", "-x", action="append", metavar="NAME[=V]", help="set or forward a variable on the hosts; repeatable"
    )
    option(
        "--env-prefix", action="append", metavar="P", help="forward variables that begin with P, besides NCCL_, HF_..."
    )
    option("--chdir", metavar="DIR", help="ssh, mpi, slurm: working directory of ranks (default: this one)")
    option("--python", metavar="PATH", help="ssh, mpi, slurm: Python on the hosts (default: this path)")
    option(
        "--launcher-args", "--launcher_args", metavar="ARGS", help="more options for ssh, mpirun, or sbatch and srun"
    )
    option("--master-addr", "--master_addr", metavar="A", help="ssh: address of the first host, for the other hosts")
    option("--ssh-port", "--ssh_port", type=int, metavar="P", help="ssh: port of sshd")
    option("--identity", type=Path, metavar="FILE", help="ssh: private key")
    option("--rsync", action="store_true", help="ssh: first copy this directory to --chdir on each host")
    option("--mpi", choices=mpi.FAMILIES, help="mpi: implementation (default: that of mpirun)")
    option("--name", help="slurm, k8s: name of the job (default: the script's name)")
    option("--gpus-per-node", type=int, metavar="N", help="slurm, k8s: GPUs to request per host")
    option("--time", metavar="T", help="slurm: time limit")
    option(
        "--save-before-end",
        type=int,
        metavar="S",
        help="slurm: seconds before the time limit at which ranks get SIGTERM, to save (default: 120)",
    )
    option("--no-requeue", action="store_true", help="slurm: do not requeue the job at the time limit")
    option("--image", help="k8s: container image")
    option("--kind", choices=k8s.KINDS, help="k8s: resource to create (default: job)")
    option("--namespace", help="k8s: namespace (default: default)")
    option("--queue", help="k8s: queue of Kueue")
    option("--secret", action="append", metavar="NAME", help="k8s: secret whose entries become variables; repeatable")
    option(
        "--service-account", metavar="NAME", help="k8s: account of the launcher, for --autoscale (default: a new one)"
    )
    option(
        "--topology",
        metavar="LABEL[:N]",
        help="k8s: label of nodes whose value pods should share; with :N and a --queue, each N pods must",
    )
    option("--resize", metavar="KIND/NAME", help="pods: the Job or JobSet of the pods, for --autoscale")
    option("--claim", action="append", metavar="NAME:PATH", help="k8s: volume claim to mount at PATH; repeatable")


def add_elastic_arguments(option: Callable[..., object]) -> None:
    """Options for the hosts of elastic jobs; `option` is `add_argument` of their group."""
    option(
        "--host-discovery-script",
        metavar="CMD",
        help="ssh: command that prints the present hosts as lines `host:slots`; it is run every second",
    )
    option("--host-timeout", type=float, metavar="S", help="a host that is silent for S seconds is lost (default: 15)")
    option(
        "--cooldown",
        type=float,
        metavar="S",
        help="start nothing for S seconds on a host that has failed (default: 600)",
    )


def place_of(args: argparse.Namespace) -> str:
    """Where ranks run. Raises `ConfigError` for options that have no meaning there."""
    names_hosts = any(getattr(args, name) is not None for name in ("hosts", "hostfile", "host_discovery_script"))
    place: str = args.where or ("ssh" if names_hosts else "local")
    if place == "local" and args.nodes == 1:
        args.nodes = None  # as people type for DeepSpeed
    for name, places in _PLACES_OF_OPTION.items():
        value = getattr(args, name)
        if value is not None and value is not False and place not in places:
            option = "--" + name.replace("_", "-")
            if place == "local":
                raise LaunchError(
                    f"{option} has no effect on this machine alone. Remove it, or name the hosts: --where ssh --hosts "
                    f"a:8,b:8."
                )
            raise ConfigError(f"{option} has no effect with --where {place}; it is for {' and '.join(places)}.")
    for name, least in (("nodes", 1), ("gpus_per_node", 0), ("save_before_end", 0), ("ssh_port", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; give {least} or more.")
    return place


def run_elsewhere(place: str, args: argparse.Namespace, job: Job) -> int:
    """Print the plan, or run it and return the exit status."""
    if args.python:
        job = replace(job, python=args.python)
    environment = forwarded(os.environ, args.env or (), args.env_prefix or ())
    if place == "pods":
        return _pods(args, job)
    if job.elastic is not None and place == "k8s":
        return _k8s(args, job, environment)
    if job.elastic is not None:
        return _elastic_on_hosts(place, args, job, environment)
    if any(getattr(args, name) is not None for name in _ELASTIC_OPTIONS):
        raise ConfigError(
            "--host-discovery-script, --host-timeout and --cooldown are for elastic jobs. Add --elastic MIN:MAX."
        )
    job.check_numbers()
    # By ssh each attempt has its own token, and Kubernetes manifests are readable by others.
    if place in ("mpi", "slurm"):
        environment = dict(sorted({VARIABLE: new_token(), **environment}.items()))
    return {"ssh": _ssh, "mpi": _mpi, "slurm": _slurm, "k8s": _k8s}[place](args, job, environment)


def host_limits(args: argparse.Namespace) -> dict[str, Any]:
    """The limits of an elastic job's hosts, as arguments of `Elastic`. Raises `ConfigError`."""
    given = {"host_timeout_seconds": args.host_timeout, "exclude_seconds": args.cooldown}
    if args.host_timeout is not None and not 1 <= args.host_timeout < 1e6:
        raise ConfigError(f"--host-timeout is {args.host_timeout:g}: give 1 second or more.")
    if args.cooldown is not None and not 0 <= args.cooldown < 1e9:
        raise ConfigError(f"--cooldown is {args.cooldown:g}: give 0 seconds or more.")
    return {name: value for name, value in given.items() if value is not None}


def _ssh(args: argparse.Namespace, job: Job, environment: dict[str, str]) -> int:
    plan = ssh.plan_ssh(job, _shares(args), _settings(args), environment)
    return _show(plan, args) if args.dry_run else run_ssh(plan)


def _elastic_on_hosts(place: str, args: argparse.Namespace, job: Job, environment: dict[str, str]) -> int:
    """Run an elastic job with as many ranks as the hosts have slots, at most the job's maximum."""
    assert job.elastic is not None
    if job.elastic.autoscale is not None:
        return _autoscaled_on_hosts(place, args, job, environment)
    settings, read_hosts, seconds = _settings(args), None, EVERY_SECONDS
    if place == "slurm":
        settings = _settings_in_allocation(args)
        plan: ssh.SshPlan = slurm_hosts.plan_nodes(job, environment, os.environ, settings)
        read_hosts = partial(slurm_hosts.nodes_of, os.environ["SLURM_JOB_ID"])
        seconds = slurm_hosts.EVERY_SECONDS
    else:
        plan = ssh.SshPlan(job, tuple(_shares(args)), settings, environment, slots_per_host=args.nproc)
        if args.hostfile or args.host_discovery_script:
            read_hosts = partial(_hosts, args)
    num_slots, least = plan.num_ranks, job.elastic.least
    if num_slots < least:
        raise ConfigError(
            f"--elastic {least}:{job.elastic.most}: {least} ranks are needed, but the hosts have {num_slots} slots. "
            f"Name more of them, or lower MIN."
        )
    plan = replace(plan, job=replace(job, nproc=min(num_slots, job.elastic.most)))
    plan.check()
    if args.dry_run:
        return _show(plan, args)
    from shardwise.launch.elastic.on_hosts import run_on_hosts  # it needs torch, which takes a second

    return run_on_hosts(plan, read_hosts, seconds)


def _settings_in_allocation(args: argparse.Namespace) -> ssh.SshSettings:
    settings = _settings(args)
    return replace(settings, address=settings.address or os.environ.get("SLURMD_NODENAME") or socket.gethostname())


def _autoscaled_on_hosts(place: str, args: argparse.Namespace, job: Job, environment: dict[str, str]) -> int:
    """The same, with as many ranks as the policy of `--autoscale` says: of a list of hosts some are used, and to an
    allocation of Slurm nodes are added."""
    elastic, now = job.elastic, datetime.now(UTC)
    assert elastic is not None
    policy = elastic.autoscale
    assert policy is not None
    if place == "slurm":
        nodes = slurm_hosts.plan_nodes(job, environment, os.environ, _settings_in_allocation(args))
        sizes, num_slots, seconds = Sizes(elastic.least, elastic.most, job.nproc), nodes.num_ranks, SLURM_SECONDS
        sizes.check()
        first, where = first_size(policy, sizes, num_slots, now), "further jobs of one node each (sbatch)"
        more = MoreNodes(Allocation.of(os.environ, args.gpus_per_node or 0), job.nproc, first)
        source: ListedPlace = more
        plan: ssh.SshPlan = replace(nodes, job_of=more.job_of, shares=nodes.shares[: first // job.nproc])
    else:
        read, seconds = partial(_hosts, args), EVERY_SECONDS
        num_slots, sizes = shares(read(), args.nproc)[-1].ranks.stop, Sizes(elastic.least, elastic.most)
        first, where = first_size(policy, sizes, num_slots, now), "the list of hosts"
        source = ChosenHosts(read, first, args.nproc)
        plan = ssh.SshPlan(job, tuple(shares(source.read())), _settings(args), environment)
    if num_slots < sizes.first:
        raise ConfigError(
            f"--elastic {elastic.least}:{elastic.most}: {sizes.first} ranks are needed, but the hosts have {num_slots} "
            f"slots. Name more of them, or lower MIN."
        )
    plan = replace(plan, job=replace(job, nproc=plan.num_ranks))
    plan.check()
    if args.dry_run:
        print(describe_policy(policy, sizes, first, where))
        return _show(plan, args)
    from shardwise.launch.elastic.on_hosts import run_on_hosts  # it needs torch, which takes a second

    return run_on_hosts(plan, source.read, seconds, source)


def _resized(args: argparse.Namespace, job: Job) -> Target | None:
    """With `--autoscale`, what makes the pods. Raises `ConfigError`."""
    assert job.elastic is not None
    if job.elastic.autoscale is None:
        for option, value in (("--resize", args.resize), ("--topology", args.topology)):
            if value:
                raise ConfigError(f"{option} with --where pods is for --autoscale. Add --autoscale fill, or remove it.")
        return None
    if not args.resize:
        raise ConfigError("--autoscale with --where pods: name what makes the pods, as in --resize job/train-hosts.")
    return Target.of(args.resize)


def _pods(args: argparse.Namespace, job: Job) -> int:
    """Run the launcher in its own pod; the ranks are in other pods."""
    if job.elastic is None:
        raise ConfigError("--where pods is for elastic jobs, since pods come and go. Add --elastic MIN:MAX.")
    slots = args.nproc or 1
    try:
        address = args.master_addr or socket.gethostbyname(socket.gethostname())
    except OSError as error:
        raise ConfigError(
            "The address of this host is unknown. Give one that the pods can reach with --master-addr."
        ) from error
    settings = replace(_settings(args), address=address)
    named = [Host(f"pod-{number}", slots) for number in range(args.nodes or 1)]
    num_ranks = min(slots * len(named), job.elastic.most)
    whole = replace(job, nproc=num_ranks)
    together = k8s_resizable.pods_per_slice(args.topology or "")
    plan = pods.PodsPlan(whole, tuple(shares(named)), settings, {}, slots_per_host=slots, pods_together=together)
    plan.check()
    resized = _resized(args, job)
    if resized is not None:
        Sizes(job.elastic.least, job.elastic.most, plan.unit).check()
    if args.dry_run:
        return _show(plan, args)
    if not os.environ.get(VARIABLE):
        raise ConfigError(
            f"{VARIABLE} is not set. Set it to the same secret here and in the pods, which prove with it that they "
            f"belong to this job."
        )
    from shardwise.launch.elastic.on_pods import run_on_pods  # it needs torch, which takes a second

    place = None if resized is None else ScaledPods(ApiServer.of_pod(os.environ), resized, slots)
    return run_on_pods(plan, os.environ[VARIABLE], place=place)


def _settings(args: argparse.Namespace) -> ssh.SshSettings:
    return ssh.SshSettings(
        directory=args.chdir or os.getcwd(),
        port=args.ssh_port,
        identity=args.identity,
        options=_words(args.launcher_args),
        address=args.master_addr or "",
        copies=args.rsync,
        python_path=os.environ.get("PYTHONPATH", ""),
    )


def _show(plan: ssh.SshPlan, args: argparse.Namespace) -> int:
    print(plan.text())
    if args.rsync:
        print(what_is_sent())
    return 0


def _mpi(args: argparse.Namespace, job: Job, environment: dict[str, str]) -> int:
    if args.nproc is None and not args.hosts and not args.hostfile:
        raise ConfigError("The number of ranks is unknown. Give --nproc 4, or hosts such as --hosts gpu1:4,gpu2:4.")
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
        args.log_dir.mkdir(parents=True, exist_ok=True)  # Slurm does not, and fails silently
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
        service_account=args.service_account or "",
        topology=args.topology or "",
    )
    # The manifest is readable by others, so only variables that were named are included.
    named = {name: environment[name] for name in (word.partition("=")[0] for word in args.env or ())}
    prefixed = {name: v for name, v in environment.items() if name.startswith(tuple(args.env_prefix or ()))}
    plan = k8s.plan_k8s(job, request, named | prefixed)
    if args.dry_run:
        print(plan.text())
        return 0
    return run_k8s(plan)


def _shares(args: argparse.Namespace) -> list[Share]:
    return shares(_hosts(args), args.nproc)


def _hosts(args: argparse.Namespace) -> list[Host]:
    """The hosts to use, from the options, the file or the script as they are now. Raises `ConfigError`."""
    hosts = _named_hosts(args)
    if args.nodes is None:
        return hosts
    if not 1 <= args.nodes <= len(hosts):
        raise ConfigError(f"--nodes is {args.nodes}, but {len(hosts)} hosts are named. Name as many, or fewer nodes.")
    return hosts[: args.nodes]


def _named_hosts(args: argparse.Namespace) -> list[Host]:
    if args.host_discovery_script and (args.hosts or args.hostfile):
        raise ConfigError("--host-discovery-script names the hosts. Remove --hosts and --hostfile.")
    if args.hosts and args.hostfile:
        raise ConfigError("--hosts and --hostfile both name the hosts. Give one of them.")
    if args.host_discovery_script is not None:
        return choose(hosts_by_script(args.host_discovery_script), args.include, args.exclude)
    if args.hosts is not None:
        return choose(parse_hosts(args.hosts), args.include, args.exclude)
    if args.hostfile is None:
        raise ConfigError(f"--where {args.where} needs hosts: --hosts gpu1:4,gpu2:4, or --hostfile FILE.")
    try:
        text = read_config_text(args.hostfile)
    except OSError as error:
        raise ConfigError(f"--hostfile {str(args.hostfile)!r} cannot be read: {error.strerror}.") from error
    return choose(parse_host_file(text, str(args.hostfile)), args.include, args.exclude)


def _words(text: Any) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text or ""))
    except ValueError as error:
        raise ConfigError(f"--launcher-args {text!r} is not a command line: {error}.") from error


def _name_of(job: Job) -> str:
    """The script's name in a form that Slurm and Kubernetes accept."""
    stem = job.command[0].rpartition(".")[2] if job.is_module else Path(job.command[0]).stem
    return re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:50].strip("-") or "shardwise"
