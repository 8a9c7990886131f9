"""Checks several hosts before a job: whether they answer and have the same versions, and how fast their links are.

Commands run there by ssh, or by any program that takes a host and a command (`--ssh "ssh -p 2222"`).
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from shardwise.cli.checks import Check
from shardwise.cli.nccl import examine_nccl
from shardwise.cli.remote import Remote, format_links, run_ranks
from shardwise.launch.hosts.problems import Options, connection_problem
from shardwise.system.units import format_seconds

SLOW_LINK = 100 * 2**20
MUCH_SKEW_SECONDS = 1.0
_SSH_OPTIONS = Options(port="--ssh 'ssh -p PORT'", key="--ssh 'ssh -i FILE'")


@dataclass(frozen=True)
class Probe:
    """The answer of one host, or the reason why there is none, with its cure."""

    host: str
    facts: dict[str, Any] = field(default_factory=dict)
    trouble: str = ""
    cure: str = ""


def examine_hosts(hosts: Sequence[str], remote: Remote, folders: Sequence[str], port: int) -> Iterator[Check]:
    """All checks of `hosts`; the others must be able to reach the first."""
    with ThreadPoolExecutor(len(hosts)) as pool:
        probes = list(pool.map(lambda host: probe(host, remote, folders), hosts))
    yield check_reachable(probes)
    answered = [one for one in probes if not one.trouble]
    if len(answered) > 1:
        yield check_same_versions(answered)
    if folders and answered:
        yield check_folders(answered)
    if len(answered) == len(hosts) > 1:
        rows = measure_links(hosts, remote, port)
        yield check_links(hosts, rows)
        if not isinstance(rows, str):
            yield check_skew(hosts, rows)
        have_gpus = {one.host: bool(one.facts.get("gpus")) for one in answered}
        yield from examine_nccl(hosts, have_gpus, remote, port)


def probe(host: str, remote: Remote, folders: Sequence[str]) -> Probe:
    """Get the facts of one host."""
    process = remote.start(host, "shardwise.cli.host_probe", *folders)
    try:
        output, errors = process.communicate(timeout=remote.timeout_seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        cure = connection_problem(None, "", remote.python, _SSH_OPTIONS).cure
        return Probe(host, trouble=f"it did not answer within {remote.timeout_seconds:.0f} s", cure=cure)
    if process.returncode == 0:
        try:
            return Probe(host, json.loads(output.strip().splitlines()[-1]))
        except (ValueError, IndexError):
            return Probe(host, trouble=f"it answered {output.strip()[:60]!r}")
    problem = connection_problem(process.returncode, errors, remote.python, _SSH_OPTIONS)
    return Probe(host, trouble=problem.what, cure=problem.cure)


def check_reachable(probes: Sequence[Probe]) -> Check:
    """Report all hosts that do not answer, in one check."""
    unreachable = [one for one in probes if one.trouble]
    if not unreachable:
        return Check("hosts", "ok", f"reached {', '.join(one.host for one in probes)}")
    found = "; ".join(f"{one.host}: {one.trouble}" for one in unreachable)
    cures = sorted({one.cure for one in unreachable if one.cure})
    cure = " ".join(f"{cure[:1].upper()}{cure[1:]}." for cure in cures)
    return Check("hosts", "fail", found, cure or "Try `ssh HOST true` by hand.")


def check_same_versions(probes: Sequence[Probe]) -> Check:
    """Compare versions: Python's by its first two numbers, all others exactly."""
    names = list(dict.fromkeys(name for one in probes for name in one.facts["versions"]))
    wrong = []
    for name in names:
        found = {one.host: str(one.facts["versions"].get(name, "missing")) for one in probes}
        compared = {version.rpartition(".")[0] if name == "python" else version for version in found.values()}
        if len(compared) > 1 or ("missing" in compared and name != "numpy"):
            wrong.append(f"{name} is " + ", ".join(f"{version} on {host}" for host, version in found.items()))
    if wrong:
        cure = "All ranks of a job need the same versions: install the same everywhere, or use one image."
        return Check("same versions", "fail", "; ".join(wrong), cure)
    first = probes[0].facts["versions"]
    return Check("same versions", "ok", ", ".join(f"{name} {version}" for name, version in first.items()))


def check_folders(probes: Sequence[Probe]) -> Check:
    """Folders that every host should have, such as a mount for checkpoints."""
    missing = [
        f"{folder} on {one.host}" for one in probes for folder, is_there in one.facts["folders"].items() if not is_there
    ]
    if missing:
        return Check("folders", "fail", f"missing or not writable: {', '.join(missing)}", "Mount or create it there.")
    return Check("folders", "ok", f"{', '.join(probes[0].facts['folders'])} on all hosts")


def measure_links(hosts: Sequence[str], remote: Remote, port: int) -> list[dict[str, float]] | str:
    """The results of `between_rank` for every pair of hosts; or an error text."""
    found = run_ranks(hosts, remote, hosts[0].rpartition("@")[2], port, "shardwise.cli.between_rank")
    if isinstance(found, str):
        return found
    rows: list[dict[str, float]] = found
    return rows


def check_links(hosts: Sequence[str], rows: list[dict[str, float]] | str) -> Check:
    if isinstance(rows, str):
        cure = "A firewall may block ports between the hosts: name an open one with --port, or set GLOO_SOCKET_IFNAME."
        return Check("between hosts", "fail", rows, cure)
    if min(row["rate"] for row in rows) < SLOW_LINK:
        cure = "Slow for sharding across hosts. hsdp and hpz gather within a host."
        return Check("between hosts", "warn", format_links(hosts, rows), cure)
    return Check("between hosts", "ok", format_links(hosts, rows))


def check_skew(hosts: Sequence[str], rows: Sequence[dict[str, float]]) -> Check:
    """How far the clocks of any two hosts differ."""
    most = max(rows, key=lambda row: abs(row["skew"]))
    found = f"at most {format_seconds(abs(most['skew']))}, {hosts[int(most['from'])]} and {hosts[int(most['to'])]}"
    if abs(most["skew"]) > MUCH_SKEW_SECONDS:
        cure = "Reports may name the wrong rank as the first to fail: run chrony or systemd-timesyncd on all hosts."
        return Check("clock skew", "warn", found, cure)
    return Check("clock skew", "ok", found)
