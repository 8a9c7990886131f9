"""Hosts that are namespaces of this machine: a network, processes, a name and mounts of their own, and a real sshd."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO

PORT = 2222
UNTIL_WE_END = ("setpriv", "--pdeathsig", "KILL", "--")
"""Before a command: the kernel ends it with the process that started it, however that ends."""
OWN_PROCESSES = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts", "--mount")
_MOST_CLUSTERS = 100


@cache
def obstacle() -> str:
    """Why hosts cannot be made here; `""` if they can."""
    if os.geteuid() != 0:
        return "needs root"
    for tool in ("/usr/sbin/sshd", "ssh", "ip", "unshare", "setpriv"):
        if shutil.which(tool) is None:
            return f"needs {tool} (make test-cluster installs it)"
    probe = f"swtest-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", probe], capture_output=True, check=False)
    if made.returncode:
        return f"needs network namespaces ({made.stderr.strip()})"
    made = subprocess.run([*OWN_PROCESSES, "hostname", "probe"], capture_output=True, text=True, check=False)
    return f"needs namespaces of processes, names and mounts ({made.stderr.strip()})" if made.returncode else ""


class Cluster:
    """Hosts by name; the n-th one has the address `10.77.NUMBER.n`. Several clusters may be there at the same time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.addresses: dict[str, str] = {}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._number, self._mine = _a_number()
        self.network = f"10.77.{self._number}"
        self._bridge = f"swtest{self._number}"

    def open(self) -> None:
        """Keys, and the network between hosts."""
        folder = self.folder
        self._remove_all()  # of whoever had the number, and was killed
        for name in ("key", "other", "host"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name))
        (folder / "authorized").write_text((folder / "key.pub").read_text())
        (folder / "none").write_text("")
        _run("ip", "link", "add", self._bridge, "type", "bridge")
        _run("ip", "address", "add", f"{self.network}.254/24", "dev", self._bridge)
        _run("ip", "link", "set", self._bridge, "up")
        Path("/run/sshd").mkdir(exist_ok=True)

    def add(self, name: str, *mounts: str, keys: str = "authorized", has_sshd: bool = True) -> str:
        """A host, for which the `mounts` (arguments of `mount`) are made first; returns its address."""
        number = len(self.addresses) + 1
        address = self.addresses[name] = f"{self.network}.{number}"
        space, cable = self._space(name), self._cable(number)
        _run("ip", "netns", "add", space)
        _run("ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", space)
        _run("ip", "link", "set", cable, "master", self._bridge, "up")
        for words in ("address add {a}/24 dev eth0", "link set eth0 up", "link set lo up"):
            _run("ip", "-n", space, *words.format(a=address).split())
        if not has_sshd:
            return address
        config = self.folder / f"sshd-{name}"
        config.write_text(
            f"Port {PORT}\nListenAddress {address}\nHostKey {self.folder}/host\nPidFile none\n"
            f"UsePAM no\nStrictModes no\n"
            f"AuthorizedKeysFile {self.folder}/{keys}\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n"
            f"PermitRootLogin prohibit-password\n"
        )
        mounting = "".join(f"mount {words}\n" for words in mounts)
        with (self.folder / f"sshd-{name}.log").open("wb") as log:
            self._processes.append(self.start(name, f"{mounting}/usr/sbin/sshd -D -e -f {config}", log))
        self._await(name, address)
        return address

    def start(self, name: str, script: str, log: IO[bytes], **variables: str) -> subprocess.Popen[bytes]:
        """A shell script on a host, with processes, mounts and a name of its own. To kill it ends all of them."""
        # the shell is their init: it has to wait, so that what is orphaned does not stay a zombie
        lines = f"hostname {name}\n{script} &\nwait $!"
        command = [*UNTIL_WE_END, *self.within(name), *OWN_PROCESSES, "sh", "-ec", lines]
        return subprocess.Popen(command, env=os.environ | variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def within(self, name: str) -> list[str]:
        """Before a command: it is in the network of a host."""
        return ["ip", "netns", "exec", self._space(name)]

    def link(self, name: str, state: str) -> None:
        """Take a host's cable out (`down`), or put it in (`up`)."""
        _run("ip", "link", "set", self._cable(list(self.addresses).index(name) + 1), state)

    def ip(self, name: str, *words: str) -> None:
        _run("ip", "-n", self._space(name), *words)

    def options(self) -> list[str]:
        """What `shardwise launch` needs to know of these hosts' sshd."""
        known = self.folder / "known"
        key = " ".join((self.folder / "host.pub").read_text().split()[:2])
        known.write_text("".join(f"[{address}]:{PORT} {key}\n" for address in self.addresses.values()))
        ours = f"-F none -o UserKnownHostsFile={known} -o StrictHostKeyChecking=yes"
        return ["--ssh-port", str(PORT), "--identity", str(self.folder / "key"), f"--launcher-args={ours}"]

    def close(self) -> None:
        """End and remove all of it, and see that it is gone."""
        for process in self._processes:
            process.kill()
            process.wait()
        self._remove_all()
        self._mine.close()
        left = [*_namespaces(self._space("")), *_links(self._bridge), *_links(f"sw{self._number}-")]
        left += processes_with(str(self.folder.parent))
        assert not left, f"{left} stay behind"

    def _space(self, name: str) -> str:
        return f"swtest{self._number}-{name}"

    def _cable(self, number: int) -> str:
        return f"sw{self._number}-{number}"

    def _remove_all(self) -> None:
        # a namespace goes with its last process, which may take a while: its link and its name go now
        for link in [*_links(f"sw{self._number}-"), *_links(self._bridge)]:
            subprocess.run(["ip", "link", "del", link], capture_output=True, check=False)
        for space in _namespaces(self._space("")):
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)

    def _await(self, name: str, address: str) -> None:
        deadline = time.monotonic() + 20
        while True:
            probe = ["ssh-keyscan", "-T", "2", "-p", str(PORT), address]
            if subprocess.run(probe, capture_output=True, check=False).stdout:
                return
            log = (self.folder / f"sshd-{name}.log").read_text()
            assert time.monotonic() < deadline, f"sshd of {name} does not answer: {log}"
            time.sleep(0.1)


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    made = Cluster(folder)
    try:
        made.open()
        yield made
    finally:
        made.close()


def wait_until(is_so: Callable[[], bool], complaint: str, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, complaint
        time.sleep(0.1)


def processes_with(word: str, folder: Path | None = None) -> list[int]:
    """All processes of this machine, hosts included, with `word` on their command line, and at work in `folder`."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if word in (place / "cmdline").read_text() and (folder is None or (place / "cwd").readlink() == folder):
                found.append(int(place.name))
        except (OSError, UnicodeDecodeError):
            continue
    return [pid for pid in found if pid != os.getpid()]


def _a_number() -> tuple[int, socket.socket]:
    """A number that no living process has, and what keeps it ours: a name that goes with its owner."""
    for number in range(_MOST_CLUSTERS):
        mine = socket.socket(socket.AF_UNIX)
        try:
            mine.bind(f"\0shardwise-test-cluster-{number}")
        except OSError:
            mine.close()
        else:
            return number, mine
    raise AssertionError(f"{_MOST_CLUSTERS} clusters are there already")


def _namespaces(beginning: str) -> list[str]:
    said = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=False).stdout
    return [line.split()[0] for line in said.splitlines() if line.startswith(beginning)]


def _links(beginning: str) -> list[str]:
    return [path.name for path in Path("/sys/class/net").glob(f"{beginning}*")]


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
