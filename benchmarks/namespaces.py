"""Hosts that are namespaces of this machine, behind a switch, with links of a given rate. Needs root.

Each host has its own network, processes, mounts and name, so that ranks on two of them share no memory. Links are
shaped in both directions by `tc tbf`, and have no delay but that of its queues; or, with a delay, by `tc tbf` on their
way out and by a relay (`relay.py`), which is the switch then, on their way in. `tests/cluster` puts sshd on them.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO

from benchmarks.relay import MTU

NETWORK = "10.78.0"
INTERFACE = "eth0"
PORT = 29500
UNTIL_WE_END = ("setpriv", "--pdeathsig", "KILL", "--")
"""Before a command: the kernel ends it with the thread that started it, however that ends."""
OWN_PROCESSES = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts", "--mount")
_PREFIX = "swb"
_TOOLS = ("ip", "tc", "unshare", "setpriv")
_QUEUE_SECONDS = 0.05
_SPACES = Path("/run/netns")
_ROOT = Path(__file__).parents[1]
_BURST_BYTES = 2**18
"""At once: four of the largest packets that a stack hands down in one piece."""


class NetworkError(Exception):
    """A command that failed, in words."""


@cache
def obstacle(tools: Iterable[str] = _TOOLS) -> str:
    """Why hosts cannot be made here, in a few words; `""` if they can."""
    if os.geteuid() != 0:
        return "needs root"
    for tool in tools:
        if shutil.which(tool) is None:
            return f"needs {tool}"
    name = f"{_PREFIX}{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    if made.returncode:
        return f"needs network namespaces ({made.stderr.strip()})"
    made = subprocess.run([*OWN_PROCESSES, "hostname", "probe"], capture_output=True, text=True, check=False)
    return f"needs namespaces of processes, names and mounts ({made.stderr.strip()})" if made.returncode else ""


class Network:
    """Hosts by name; the n-th one has the address `NETWORK.n`. To `close` it ends what runs there."""

    def __init__(self, mark: str, network: str, *, reached_from_here: bool) -> None:
        """Names of all that is made begin with `mark`, which has up to 11 letters. The switch is a bridge: of this
        machine if hosts are to be `reached_from_here`, which is `NETWORK.254` then; else in a namespace of its own, so
        that nothing of it is seen outside, and several may have the same `network`."""
        self.mark, self.network = mark, network
        self.addresses: dict[str, str] = {}
        self._is_here = reached_from_here
        self._processes: list[subprocess.Popen[bytes]] = []

    def open(self) -> None:
        """The switch."""
        self._remove()  # of whoever had the mark, and was killed
        if not self._is_here:
            _run("ip", "netns", "add", f"{self.mark}-switch")
        self._at_switch("ip", "link", "add", self.mark, "type", "bridge")
        if self._is_here:
            _run("ip", "address", "add", f"{self.network}.254/24", "dev", self.mark)
        self._at_switch("ip", "link", "set", self.mark, "up")

    def add(self, name: str) -> str:
        """A host, with its cable in the switch; returns its address."""
        number = len(self.addresses) + 1
        address = self.addresses[name] = f"{self.network}.{number}"
        space, cable = self._space(name), self._cable(name)
        _run("ip", "netns", "add", space)
        self._at_switch("ip", "link", "add", cable, "type", "veth", "peer", "name", INTERFACE, "netns", space)
        self._at_switch("ip", "link", "set", cable, "master", self.mark, "up")
        for words in (f"address add {address}/24 dev {INTERFACE}", f"link set {INTERFACE} up", "link set lo up"):
            self.ip(name, *words.split())
        return address

    def within(self, name: str) -> list[str]:
        """Before a command: it is in the network of a host."""
        return ["ip", "netns", "exec", self._space(name)]

    def ip(self, name: str, *words: str) -> str:
        """What `ip` says on a host."""
        return _run("ip", "-n", self._space(name), *words)

    def link(self, name: str, state: str) -> None:
        """Take a host's cable out of the switch (`down`), or put it back (`up`)."""
        self._at_switch("ip", "link", "set", self._cable(name), state)

    def shape(self, bits_per_second: float | None) -> None:
        """Let every link carry so much each way from now on; `None` for all that the machine can."""
        for name in self.addresses:
            _shape(bits_per_second, INTERFACE, *self.within(name))
            _shape(bits_per_second, self._cable(name), *self._switch())

    def counters(self, name: str) -> tuple[int, int]:
        """Bytes that a host's interface has sent and received, headers of Ethernet, IP and TCP included."""
        stats = json.loads(self.ip(name, "-s", "-j", "link", "show", INTERFACE))[0]["stats64"]
        return int(stats["tx"]["bytes"]), int(stats["rx"]["bytes"])

    def start(
        self,
        name: str,
        script: str,
        environment: Mapping[str, str],
        *,
        out: IO[bytes] | int | None = None,
        folder: Path | None = None,
    ) -> subprocess.Popen[bytes]:
        """A shell script on a host, with processes, mounts and a name of its own. To kill it ends all of them.

        The shell is their init: the script has to wait for what it starts, or what is orphaned stays a zombie.
        """
        shell = [*UNTIL_WE_END, *self.within(name), *OWN_PROCESSES, "sh", "-ec", f"hostname {name}\n{script}"]
        process = subprocess.Popen(
            shell,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT if out is not None else None,
            cwd=folder,
            start_new_session=True,  # Ctrl-C is for the process that made the hosts, which ends these
        )
        self._processes.append(process)
        return process

    def kill(self, name: str) -> None:
        """End all processes of a host at once, with no chance to say a word."""
        for pid in _processes_of(self._space(name)):
            _kill(pid)

    def close(self) -> None:
        """End and remove all of it."""
        for process in self._processes:
            process.kill()
        self._remove()
        for process in self._processes:
            process.wait()
        self._processes.clear()

    def left(self) -> list[str]:
        """Namespaces and links that are there."""
        links = [path.name for path in Path("/sys/class/net").iterdir()]
        return [name for name in (*_spaces(), *links) if self._is_mine(name)]

    def _remove(self) -> None:
        # a namespace goes with its last process, which may take a while: its link and its name go now
        for name in self.left():
            if Path("/sys/class/net", name).exists():
                subprocess.run(["ip", "link", "del", name], capture_output=True, check=False)
        _remove(self.mark)

    def _is_mine(self, name: str) -> bool:
        return name == self.mark or name.startswith(f"{self.mark}-")

    def _space(self, name: str) -> str:
        return f"{self.mark}-{name}"

    def _cable(self, name: str) -> str:
        return f"{self.mark}-{list(self.addresses).index(name) + 1}"

    def _switch(self) -> list[str]:
        return [] if self._is_here else ["ip", "netns", "exec", f"{self.mark}-switch"]

    def _at_switch(self, *command: str) -> None:
        _run(*self._switch(), *command)


class DelayedNetwork(Network):
    """A network whose links have a delay: hosts are connected by a relay, and nothing else reaches them."""

    def __init__(self, mark: str, network: str, delay_seconds: float) -> None:
        super().__init__(mark, network, reached_from_here=False)
        self._delay_seconds = delay_seconds
        self._relay: subprocess.Popen[bytes] | None = None

    def open(self) -> None:
        """Remove what whoever had the mark has left; the relay starts when all hosts are known."""
        self._remove()

    def add(self, name: str) -> str:
        """A host that is connected by `connect`; returns its address."""
        address = self.addresses[name] = f"{self.network}.{len(self.addresses) + 1}"
        _run("ip", "netns", "add", self._space(name))
        return address

    def connect(self) -> None:
        """Connect all hosts. Raises `NetworkError`."""
        hosts = [f"{address}={_SPACES / self._space(name)}" for name, address in self.addresses.items()]
        command = [sys.executable, "-m", "benchmarks.relay", "--delay-ms", str(self._delay_seconds * 1e3)]
        self._relay = subprocess.Popen(
            [*UNTIL_WE_END, *command, "--interface", INTERFACE, *hosts],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=_ROOT,
            start_new_session=True,
        )
        self._processes.append(self._relay)
        self._await_relay()
        for name, address in self.addresses.items():
            for words in (
                f"address add {address}/24 dev {INTERFACE}",
                f"link set {INTERFACE} up mtu {MTU}",
                "link set lo up",
            ):
                self.ip(name, *words.split())

    def link(self, name: str, state: str) -> None:
        """See `Network.link`."""
        self.ip(name, "link", "set", INTERFACE, state)

    def shape(self, bits_per_second: float | None) -> None:
        """See `Network.shape`."""
        for name in self.addresses:
            _shape(bits_per_second, INTERFACE, *self.within(name))
        assert self._relay is not None
        assert self._relay.stdin is not None
        self._relay.stdin.write(f"{bits_per_second or 0}\n".encode())
        self._relay.stdin.flush()
        self._await_relay()

    def _await_relay(self) -> None:
        assert self._relay is not None
        assert self._relay.stdout is not None
        if self._relay.stdout.readline() != b"ok\n":
            raise NetworkError(f"the relay between hosts has ended with status {self._relay.wait()}")

    def close(self) -> None:
        """See `Network.close`."""
        super().close()
        for stream in (self._relay.stdin, self._relay.stdout) if self._relay is not None else ():
            if stream is not None:
                stream.close()


class Hosts:
    """`num_hosts` of them, from 0, for ranks; number n has the address `10.78.0.{n + 1}`. Use it in a `with`."""

    def __init__(self, num_hosts: int, delay_seconds: float = 0.0) -> None:
        """With a delay each packet takes so much longer."""
        self.num_hosts = num_hosts
        mark = f"{_PREFIX}{os.getpid()}"
        self._network = (
            DelayedNetwork(mark, NETWORK, delay_seconds)
            if delay_seconds
            else Network(mark, NETWORK, reached_from_here=False)
        )

    def __enter__(self) -> Hosts:
        remove_leftovers()
        try:
            self._network.open()
            for host in range(self.num_hosts):
                self._network.add(_name(host))
            if isinstance(self._network, DelayedNetwork):
                self._network.connect()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def address(self, host: int) -> str:
        return self._network.addresses[_name(host)]

    def shape(self, bits_per_second: float | None) -> None:
        """See `Network.shape`."""
        self._network.shape(bits_per_second)

    def link(self, host: int, state: str) -> None:
        """See `Network.link`."""
        self._network.link(_name(host), state)

    def counters(self, host: int) -> tuple[int, int]:
        """See `Network.counters`."""
        return self._network.counters(_name(host))

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
        lines = ["pids="]
        for local in range(num_ranks):
            settings = f"RANK={host * num_ranks + local} LOCAL_RANK={local}"
            lines += [f"env {settings} {shlex.join(command)} &", 'pids="$pids $!"']
        lines += ["status=0", "for pid in $pids; do wait $pid || status=1; done", "exit $status"]
        script = "\n".join(lines)
        return self._network.start(_name(host), script, {**environment, **variables}, out=out, folder=folder)

    def kill(self, host: int) -> None:
        """See `Network.kill`."""
        self._network.kill(_name(host))

    def close(self) -> None:
        self._network.close()


def _name(host: int) -> str:
    return f"host-{host}"


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
