"""Runs modules of this package on hosts: by ssh, or by any program that takes a host and a command."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwise.cli.rank_words import RESULT
from shardwise.system.import_path import python_path
from shardwise.system.units import format_bytes

SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10"
HERE = ("sh", "-c", 'exec sh -c "$1"')
"""In the place of ssh: runs the command on this host."""


@dataclass(frozen=True)
class Remote:
    """How to run a command on a host: `shell` takes the host and the command, `python` is the interpreter there."""

    shell: tuple[str, ...]
    python: str = field(default_factory=lambda: sys.executable)
    timeout_seconds: float = 30.0

    def start(self, host: str, *words: str) -> subprocess.Popen[str]:
        """Run a module of this package there, with this process's import path."""
        settings = ["env", f"PYTHONPATH={python_path()}", "OMP_NUM_THREADS=1"]
        forwarded = [name for name in os.environ if name.startswith("NCCL_") or name == "GLOO_SOCKET_IFNAME"]
        settings += [f"{name}={os.environ[name]}" for name in forwarded]
        command = shlex.join([*settings, self.python, "-m", *words])
        call, pipe = [*self.shell, host, command], subprocess.PIPE
        # a login script may print anything
        return subprocess.Popen(call, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, errors="replace")


def run_ranks(
    hosts: Sequence[str], remote: Remote, address: str, port: int, module: str, more: Sequence[Sequence[str]] = ()
) -> Any:
    """Run `module` on each host as one of as many ranks, which meet at `address` of the first; return what rank 0 says
    after `RESULT`, from JSON, or an error text.

    Its arguments are `RANK NUM ADDRESS PORT SECONDS`, and those of its rank in `more`. Ends all processes.
    """
    num, started = str(len(hosts)), time.monotonic()
    last = (*more, *[()] * len(hosts))
    processes = [remote.start(hosts[0], module, "0", num, address, str(port), str(remote.timeout_seconds), *last[0])]
    watch = threading.Timer(remote.timeout_seconds, _kill, (processes,))
    watch.start()
    try:
        port_text = _line_after("PORT ", processes[0])
        if not port_text.isdigit():
            return f"{hosts[0]}: {_last_line(processes[0])}"
        for rank, host in enumerate(hosts[1:], start=1):
            here = (str(rank), num, address, port_text, str(remote.timeout_seconds))
            processes.append(remote.start(host, module, *here, *last[rank]))
        result = _line_after(RESULT, processes[0])
        if result:
            return json.loads(result)
        is_late = time.monotonic() - started >= remote.timeout_seconds
        ended = list(zip(hosts, processes, strict=True))
        failed = [(host, one) for host, one in ended if one.wait() > 0]  # by themselves; others wait for these
        if is_late and not failed:
            return f"no connection to {address}:{port_text} within {remote.timeout_seconds:.0f} s"
        return "; ".join(f"{host}: {_last_line(one)}" for host, one in failed or ended)
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


def format_links(names: Sequence[str], rows: Sequence[Mapping[str, float]]) -> str:
    """The eight slowest links. A row has the numbers of both ends, bytes per second (`rate`), seconds (`latency`)."""
    links = [
        f"{names[int(row['from'])]} to {names[int(row['to'])]} {format_bytes(row['rate'])}/s, "
        f"{row['latency'] * 1e6:.0f} us"
        for row in sorted(rows, key=lambda row: row["rate"])
    ]
    return "; ".join(links[:8])
