"""Hosts that are namespaces of this machine (`benchmarks/namespaces.py`), each with a real sshd."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from benchmarks import namespaces
from benchmarks.namespaces import UNTIL_WE_END, Network
from tests.patience import wait_until

__all__ = ["UNTIL_WE_END", "Cluster", "cluster", "obstacle", "processes_with", "wait_until", "words_of"]

PORT = 2222
_MOST_CLUSTERS = 100
_TOOLS = ("/usr/sbin/sshd", "ssh", "ip", "unshare", "setpriv")


def obstacle() -> str:
    """Why hosts cannot be made here; `""` if they can."""
    why = namespaces.obstacle(_TOOLS)
    return f"{why} (make test-cluster installs it)" if why in {f"needs {tool}" for tool in _TOOLS} else why


class Cluster:
    """Hosts by name; the n-th one has the address `10.77.NUMBER.n`. Several clusters may be there at the same time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        number, self._mine = _a_number()
        self._hosts = Network(f"swtest{number}", f"10.77.{number}", reached_from_here=True)
        self.network, self.addresses = self._hosts.network, self._hosts.addresses

    def open(self) -> None:
        """Keys, and the network between hosts."""
        folder = self.folder
        for name in ("key", "other", "host"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name))
        (folder / "authorized").write_text((folder / "key.pub").read_text())
        (folder / "none").write_text("")
        self._hosts.open()
        Path("/run/sshd").mkdir(exist_ok=True)

    def add(self, name: str, *mounts: str, keys: str = "authorized", has_sshd: bool = True) -> str:
        """A host, for which the `mounts` (arguments of `mount`) are made first; returns its address."""
        address = self._hosts.add(name)
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
            self.start(name, f"{mounting}/usr/sbin/sshd -D -e -f {config}", log)
        self._await(name, address)
        return address

    def start(self, name: str, script: str, log: IO[bytes], **variables: str) -> subprocess.Popen[bytes]:
        """A shell script on a host, with processes, mounts and a name of its own. To kill it ends all of them."""
        return self._hosts.start(name, f"{script} &\nwait $!", os.environ | variables, out=log)

    def within(self, name: str) -> list[str]:
        """Before a command: it is in the network of a host."""
        return self._hosts.within(name)

    def link(self, name: str, state: str) -> None:
        """Take a host's cable out (`down`), or put it in (`up`)."""
        self._hosts.link(name, state)

    def ip(self, name: str, *words: str) -> None:
        self._hosts.ip(name, *words)

    def options(self) -> list[str]:
        """What `shardwise launch` needs to know of these hosts' sshd."""
        known = self.folder / "known"
        key = " ".join((self.folder / "host.pub").read_text().split()[:2])
        known.write_text("".join(f"[{address}]:{PORT} {key}\n" for address in self.addresses.values()))
        ours = f"-F none -o UserKnownHostsFile={known} -o StrictHostKeyChecking=yes"
        return ["--ssh-port", str(PORT), "--identity", str(self.folder / "key"), f"--launcher-args={ours}"]

    def put_ssh(self, folder: Path) -> None:
        """Into `folder`, for the front of a PATH: an `ssh` that knows these hosts by their names, as a config would."""
        key = " ".join((self.folder / "host.pub").read_text().split()[:2])
        known = "".join(f"[{address}]:{PORT} {key}\n" for address in self.addresses.values())
        (self.folder / "known-by-name").write_text(known)
        (self.folder / "config").write_text(
            "".join(f"Host {name}\n  HostName {address}\n" for name, address in self.addresses.items())
            + f"Host *\n  Port {PORT}\n  IdentityFile {self.folder}/key\n  IdentitiesOnly yes\n"
            + f"  UserKnownHostsFile {self.folder}/known-by-name\n  StrictHostKeyChecking yes\n"
        )
        ssh = folder / "ssh"
        ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {self.folder}/config "$@"\n')
        ssh.chmod(0o755)

    def close(self) -> None:
        """End and remove all of it, and see that it is gone."""
        self._hosts.close()
        self._mine.close()
        left = [*self._hosts.left(), *processes_with(str(self.folder.parent))]
        assert not left, f"{left} stay behind"

    def _await(self, name: str, address: str) -> None:
        probe = ["ssh-keyscan", "-T", "2", "-p", str(PORT), address]
        log = self.folder / f"sshd-{name}.log"
        wait_until(
            lambda: subprocess.run(probe, capture_output=True, check=False).stdout,
            lambda: f"sshd of {name} does not answer: {log.read_text()}",
        )


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    made = Cluster(folder)
    try:
        made.open()
        yield made
    finally:
        made.close()


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


def words_of(pid: int) -> str:
    """The command line and the environment of a process, as far as they can be read: nothing of one that has ended."""
    found = b""
    for name in ("cmdline", "environ"):
        with suppress(OSError):
            found += (Path("/proc") / str(pid) / name).read_bytes()
    return found.decode(errors="replace")


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


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
