"""Hosts that are namespaces of this machine, behind a switch, with links of a given rate. Needs root.

The switch is a bridge in a namespace of its own, so nothing of it is seen outside, and all is gone with the
namespaces. Each host has its own network, processes, mounts and name, so that ranks on two of them share no memory.
Links are shaped in both directions by `tc tbf`; there is no delay but that of its queues.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

NETWORK = "10.78.0"
INTERFACE = "eth0"
PORT = 29500
_PREFIX = "swb"
_TOOLS = ("ip", "tc", "unshare")
_QUEUE_SECONDS = 0.05
_BURST_BYTES = 2**18
"""At once: four of the largest packets that a stack hands down in one piece."""


class NetworkError(Exception):
    """A command that failed, in words."""


def obstacle() -> str:
    """Why hosts cannot be made here, in a few words; `""` if they can."""
    if os.geteuid() != 0:
        return "needs root"
    for tool in _TOOLS:
        if shutil.which(tool) is None:
            return f"needs {tool}"
    name = f"{_PREFIX}{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return f"needs network namespaces ({made.stderr.strip()})" if made.returncode else ""


class Hosts:
    """`num_hosts` of them, from 0; number n has the address `10.78.0.{n + 1}`. Use it in a `with`."""

    def __init__(self, num_hosts: int) -> None:
        self.num_hosts = num_hosts
        self._mark = f"{_PREFIX}{os.getpid()}"
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Hosts:
        remove_leftovers()
        try:
            _run("ip", "netns", "add", self._switch)
            self._in_switch("ip", "link", "add", "br0", "type", "bridge")
            self._in_switch("ip", "link", "set", "br0", "up")
            for host in range(self.num_hosts):
                self._add(host)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def address(self, host: int) -> str:
        return f"{NETWORK}.{host + 1}"

    def shape(self, bits_per_second: float | None) -> None:
        """Let every link carry so much each way from now on; `None` for all that the machine can."""
        for host in range(self.num_hosts):
            _shape(bits_per_second, INTERFACE, "ip", "netns", "exec", self._name(host))
            _shape(bits_per_second, f"p{host}", "ip", "netns", "exec", self._switch)

    def link(self, host: int, state: str) -> None:
        """Take a host's cable out of the switch (`down`), or put it back (`up`)."""
        self._in_switch("ip", "link", "set", f"p{host}", state)

    def counters(self, host: int) -> tuple[int, int]:
        """Bytes that a host's interface has sent and received, headers of Ethernet, IP and TCP included."""
        said = _run("ip", "-n", self._name(host), "-s", "-j", "link", "show", INTERFACE)
        stats = json.loads(said)[0]["stats64"]
        return int(stats["tx"]["bytes"]), int(stats["rx"]["bytes"])

    def start(
        self,
        host: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        num_ranks: int = 1,
        out: IO[bytes] | int | None = None,
        folder: Path | None = None,
    ) -> subprocess.Popen[bytes]:
        """Run `command` as `num_ranks` ranks of a job over all hosts, with the variables that torchrun sets.

        They end with the process that is returned, and its status is 1 if any of theirs is not 0.
        """
        variables = {
            "WORLD_SIZE": str(num_ranks * self.num_hosts),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "GROUP_RANK": str(host),
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": INTERFACE,
        }
        lines = [f"hostname host-{host}", "pids="]
        for local in range(num_ranks):
            settings = f"RANK={host * num_ranks + local} LOCAL_RANK={local}"
            lines += [f"env {settings} {shlex.join(command)} &", 'pids="$pids $!"']
        lines += ["status=0", "for pid in $pids; do wait $pid || status=1; done", "exit $status"]
        unshare = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts", "--mount"]
        process = subprocess.Popen(
            ["ip", "netns", "exec", self._name(host), *unshare, "sh", "-c", "\n".join(lines)],
            env={**environment, **variables},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT if out is not None else None,
            cwd=folder,
            start_new_session=True,  # Ctrl-C is for the process that made the hosts, which ends these
        )
        self._processes.append(process)
        return process

    def kill(self, host: int) -> None:
        """End all processes of a host at once, with no chance to say a word."""
        for pid in _processes_of(self._name(host)):
            _kill(pid)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        _remove(self._mark)
        for process in self._processes:
            process.wait()
        self._processes.clear()

    @property
    def _switch(self) -> str:
        return f"{self._mark}-switch"

    def _name(self, host: int) -> str:
        return f"{self._mark}-host{host}"

    def _add(self, host: int) -> None:
        space, port = self._name(host), f"p{host}"
        _run("ip", "netns", "add", space)
        self._in_switch("ip", "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", space)
        self._in_switch("ip", "link", "set", port, "master", "br0", "up")
        for words in (
            f"address add {self.address(host)}/24 dev {INTERFACE}",
            f"link set {INTERFACE} up",
            "link set lo up",
        ):
            _run("ip", "-n", space, *words.split())

    def _in_switch(self, *command: str) -> None:
        _run("ip", "netns", "exec", self._switch, *command)


def remove_leftovers() -> None:
    """What a process that was killed has left behind: namespaces whose owner is gone, and what runs in them."""
    marks = {name.partition("-")[0] for name in _spaces() if name.startswith(_PREFIX)}
    for mark in marks:
        pid = mark.removeprefix(_PREFIX)
        if pid.isdecimal() and not Path("/proc", pid).exists():
            _remove(mark)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM ends what is inside as Ctrl-C does, so that it can clean up."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def folder_for_all() -> Iterator[Path]:
    """One that every host sees."""
    with tempfile.TemporaryDirectory(prefix="shardwise-hosts-") as name:
        yield Path(name)


def _shape(bits_per_second: float | None, interface: str, *where: str) -> None:
    subprocess.run([*where, "tc", "qdisc", "del", "dev", interface, "root"], capture_output=True, check=False)
    if bits_per_second is None:
        return
    limit = _BURST_BYTES + int(bits_per_second / 8 * _QUEUE_SECONDS)
    words = f"tc qdisc add dev {interface} root tbf rate {bits_per_second:.0f}bit burst {_BURST_BYTES} limit {limit}"
    _run(*where, *words.split())


def _remove(mark: str) -> None:
    """The namespaces that begin with `mark`, after what runs in them."""
    spaces = [name for name in _spaces() if name.startswith(f"{mark}-")]
    for name in spaces:
        for pid in _processes_of(name):
            _kill(pid)
    for name in spaces:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _spaces() -> list[str]:
    said = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    return [line.split()[0] for line in said.splitlines() if line.strip()]


def _processes_of(space: str) -> list[int]:
    said = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True, check=False).stdout
    return [int(pid) for pid in said.split()]


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NetworkError(f"{' '.join(command)}: {done.stderr.strip() or f'status {done.returncode}'}")
    return done.stdout
