"""Checks several hosts before a job: whether they answer and have the same versions, and how fast their links are.

Commands run there by ssh, or by any program that takes a host and a command (`--ssh "ssh -p 2222"`).
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.cli.checks import Check
from shardwise.launch.hosts.problems import Options, connection_problem
from shardwise.units import format_bytes, format_seconds

SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10"
SLOW_LINK = 100 * 2**20
MUCH_SKEW_SECONDS = 1.0
_SSH_OPTIONS = Options(port="--ssh 'ssh -p PORT'", key="--ssh 'ssh -i FILE'")


@dataclass(frozen=True)
class Remote:
    """How to run a command on a host: `shell` takes the host and the command, `python` is the interpreter there."""

    shell: tuple[str, ...]
    python: str = field(default_factory=lambda: sys.executable)
    timeout_seconds: float = 30.0

    def start(self, host: str, *words: str) -> subprocess.Popen[str]:
        """Run a module of this package there, with this process's import path."""
        here = str(Path(__file__).resolve().parents[2])
        paths = [here, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        settings = ["env", f"PYTHONPATH={os.pathsep.join(paths)}", "OMP_NUM_THREADS=1"]
        if "GLOO_SOCKET_IFNAME" in os.environ:
            settings.append(f"GLOO_SOCKET_IFNAME={os.environ['GLOO_SOCKET_IFNAME']}")
        command = shlex.join([*settings, self.python, "-m", *words])
        call, pipe = [*self.shell, host, command], subprocess.PIPE
        # a login script may print anything
        return subprocess.Popen(call, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, errors="replace")


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
    address, num = hosts[0].rpartition("@")[2], str(len(hosts))
    started = time.monotonic()
    arguments = (num, address, str(port), str(remote.timeout_seconds))
    processes = [remote.start(hosts[0], "shardwise.cli.between_rank", "0", *arguments)]
    watch = threading.Timer(remote.timeout_seconds, _kill, (processes,))
    watch.start()
    try:
        port_text = _line_after("PORT ", processes[0])
        if not port_text.isdigit():
            return f"{hosts[0]}: {_last_line(processes[0])}"
        for rank, host in enumerate(hosts[1:], start=1):
            here = (str(rank), num, address, port_text, str(remote.timeout_seconds))
            processes.append(remote.start(host, "shardwise.cli.between_rank", *here))
        result = _line_after("RESULT ", processes[0])
        if result:
            rows: list[dict[str, float]] = json.loads(result)
            return rows
        if time.monotonic() - started >= remote.timeout_seconds:
            return f"no connection to {address}:{port_text} within {remote.timeout_seconds:.0f} s"
        ended = [(host, one) for host, one in zip(hosts, processes, strict=True) if one.wait()]
        return "; ".join(f"{host}: {_last_line(one)}" for host, one in ended)
    finally:
        watch.cancel()
        _kill(processes)
        for one in processes:
            one.communicate()


def _line_after(prefix: str, process: subprocess.Popen[str]) -> str:
    """The rest of the next line of output that begins with `prefix`; empty if the output ends without one."""
    assert process.stdout is not None
    lines = (line.removeprefix(prefix).strip() for line in process.stdout if line.startswith(prefix))
    return next(lines, "")


def _kill(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.kill()


def _last_line(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    lines = process.stderr.read().strip().splitlines()
    return lines[-1] if lines else f"it ended with status {process.wait()}"


def check_links(hosts: Sequence[str], rows: list[dict[str, float]] | str) -> Check:
    if isinstance(rows, str):
        cure = "A firewall may block ports between the hosts: name an open one with --port, or set GLOO_SOCKET_IFNAME."
        return Check("between hosts", "fail", rows, cure)
    links = [
        f"{hosts[int(row['from'])]} to {hosts[int(row['to'])]} {format_bytes(row['rate'])}/s, "
        f"{row['latency'] * 1e6:.0f} us"
        for row in sorted(rows, key=lambda row: row["rate"])
    ]
    slowest = min(row["rate"] for row in rows)
    if slowest < SLOW_LINK:
        cure = "Slow for sharding across hosts. hsdp and hpz gather within a host."
        return Check("between hosts", "warn", "; ".join(links[:8]), cure)
    return Check("between hosts", "ok", "; ".join(links[:8]))


def check_skew(hosts: Sequence[str], rows: Sequence[dict[str, float]]) -> Check:
    """How far the clocks of any two hosts differ."""
    most = max(rows, key=lambda row: abs(row["skew"]))
    found = f"at most {format_seconds(abs(most['skew']))}, {hosts[int(most['from'])]} and {hosts[int(most['to'])]}"
    if abs(most["skew"]) > MUCH_SKEW_SECONDS:
        cure = "Reports may name the wrong rank as the first to fail: run chrony or systemd-timesyncd on all hosts."
        return Check("clock skew", "warn", found, cure)
    return Check("clock skew", "ok", found)
