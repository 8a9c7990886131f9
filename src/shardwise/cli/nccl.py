"""What `doctor` says about NCCL: its version, its network interface, and one all-reduce between GPUs or hosts.

`nccl_rank.py` is the program of each rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardwise.cli.checks import Check
from shardwise.cli.nccl_facts import VARIABLE, matching_interfaces, obstacle
from shardwise.cli.remote import HERE, Remote, format_links, run_ranks
from shardwise.launch.hosts.facts import Interface
from shardwise.system.machine import TorchFacts

SLOW_BETWEEN_GPUS = 2 * 2**30
"""Bytes per second: less than PCI Express 3.0 with four lanes."""
SLOW_BETWEEN_HOSTS = 2**30
MOST_GPUS = 8
_MODULE = "shardwise.cli.nccl_rank"
_SECONDS_PER_PAIR = 2.0
_DEBUG = "Repeat it with NCCL_DEBUG=INFO NCCL_DEBUG_FILE=/tmp/nccl-%h-%p: the files tell which links NCCL tried."


def check_nccl(facts: TorchFacts, found: Sequence[Interface], environ: Mapping[str, str]) -> Check:
    """NCCL's version, and whether the interface that NCCL_SOCKET_IFNAME names is up. Only with GPUs."""
    chosen = environ.get(VARIABLE, "")
    names = sorted({one.name for one in found})
    if chosen and not matching_interfaces(chosen, names):
        cure = f"It names none of {', '.join(names)}: correct it, or unset it."
        return Check("nccl", "fail", f"{VARIABLE}={chosen}", cure)
    used = f"; {VARIABLE}={chosen} is {', '.join(matching_interfaces(chosen, names))}" if chosen else ""
    return Check("nccl", "ok", f"NCCL {facts.nccl or 'of unknown version'}{used}")


def examine_gpus(num_gpus: int, timeout_seconds: float, backend: str = "nccl") -> Iterator[Check]:
    """All-reduce between the GPUs of this machine, one process for each; nothing with fewer than two.

    Tests give gloo as the `backend`: the same processes, on the CPU.
    """
    num = min(num_gpus, MOST_GPUS)
    if num < 2:
        return
    names = [f"GPU {number}" for number in range(num)]
    more = [(str(number), backend) for number in range(num)]
    here = Remote(HERE, timeout_seconds=timeout_seconds + _seconds_of_pairs(num))
    told = run_ranks(names, here, "127.0.0.1", 0, _MODULE, more)
    yield check_all_reduce("nccl between GPUs", names, told, SLOW_BETWEEN_GPUS)


def examine_nccl(
    hosts: Sequence[str], have_gpus: Mapping[str, bool], remote: Remote, port: int, backend: str = "nccl"
) -> Iterator[Check]:
    """All-reduce between `hosts`, by the first GPU of each; nothing if no host has a GPU."""
    without = [host for host in hosts if not have_gpus.get(host)]
    if len(without) == len(hosts):
        return
    name = "nccl between hosts"
    if without:
        cure = "All hosts of a job need GPUs. Run `shardwise doctor` there, or leave these hosts out."
        yield Check(name, "fail", f"no GPU on {', '.join(without)}", cure)
        return
    more = [("0", backend)] * len(hosts)
    remote = replace(remote, timeout_seconds=remote.timeout_seconds + _seconds_of_pairs(len(hosts)))
    told = run_ranks(hosts, remote, hosts[0].rpartition("@")[2], port, _MODULE, more)
    yield check_all_reduce(name, hosts, told, SLOW_BETWEEN_HOSTS)


def check_all_reduce(name: str, ends: Sequence[str], told: Any, slow: float) -> Check:
    """What rank 0 of `nccl_rank` told, or why there is nothing; `slow` in bytes per second."""
    if isinstance(told, str):
        cure = f"{_DEBUG} {VARIABLE} chooses a network."
        return Check(name, "fail", told, cure)
    wrong = obstacle(ends, told["facts"])
    if wrong is not None:
        is_used = any(one["nccl"] for one in told["facts"])  # else all have a torch for the CPU, which is a choice
        return Check(name, "fail" if is_used else "warn", *wrong)
    version, rows = told["facts"][0]["nccl"], told["rows"]
    found = f"NCCL {version}, all-reduce of each pair: {format_links(ends, rows)}"
    if min(row["rate"] for row in rows) < slow:
        cure = (
            f"Slow for these links? {_DEBUG} {VARIABLE} chooses a network; `nvidia-smi topo -m` shows how GPUs are "
            f"connected."
        )
        return Check(name, "warn", found, cure)
    return Check(name, "ok", found)


def _seconds_of_pairs(num: int) -> float:
    """Time to be allowed for connecting and measuring each pair."""
    return num * (num - 1) / 2 * _SECONDS_PER_PAIR
