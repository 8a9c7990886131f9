"""This process's connections to the launcher of an elastic job, and to those that take over from it.

[Note: a silent launcher] A question to a store waits for its answer without a limit, and nothing breaks a connection to
a host that has become silent (its cable is out, its system hangs). So a rank does not find out by asking. The process
that has started it does, which hears from the launcher all the time, and writes the address of the next one to a file
on this host. A thread looks at that file, and breaks all connections to launchers that others have taken over from:
whatever waits for them fails, as when a launcher is killed, and follows the next one.
"""

from __future__ import annotations

import contextlib
import datetime
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from shardwise.comm.compat import TCPStore
from shardwise.comm.watch.sockets import Peer, break_connections
from shardwise.errors import CommError
from shardwise.system.launcher_address import LauncherAddress
from shardwise.system.process_rank import ProcessRank, address_of

_TRY_SECONDS, _ALL_SECONDS = 5.0, 300.0
_LOOK_SECONDS = 0.2
"""Between two looks at the file."""
_DYING_SECONDS = 0.05
"""A process that is being killed closes its connections one after the other, and one at which it listens may still be
open when a rank hears that another is closed. What connects there then is closed within milliseconds."""


class LauncherConnection:
    """This process's way to the store of its launcher, and to those of the launchers that take over."""

    def __init__(self, env: Mapping[str, str]) -> None:
        host, port = address_of(env, ProcessRank())
        self._first = LauncherAddress(0, host, port)
        images = env.get("SHARDWISE_IMAGES", "")
        self._folder = Path(images) if images else None
        self._number, self._connected_at = -1, 0.0
        self._peers: dict[int, Peer] = {}
        """By number of a launcher: where connections to its store lead."""

    def connect(self) -> TCPStore:
        """The first connection. Raises `CommError` if no launcher answers."""
        deadline = time.monotonic() + _ALL_SECONDS
        while True:
            found = self._address()
            address = found or self._first
            try:
                return self._connected(address, _ALL_SECONDS if found is None else _TRY_SECONDS)
            except (RuntimeError, OSError) as error:
                if time.monotonic() > deadline or self._address() is None:
                    where = f"{address.host}:{address.port}"
                    raise CommError(f"The launcher does not answer at {where}: {error}.") from error
            time.sleep(_LOOK_SECONDS)

    def again(self) -> TCPStore | None:
        """A new connection to the launcher that is followed now, which may be the last one if only the connection to
        it has broken; `None` while it does not answer, or nobody takes over."""
        address = self._address()
        if address is None:
            return None
        try:
            return self._connected(address, _TRY_SECONDS, dying_seconds=_DYING_SECONDS)
        except (RuntimeError, OSError):  # it has died, and the next one is not there yet
            return None

    def watch(self) -> None:
        """From now on, leave launchers that others have taken over from, in a thread."""

        def look() -> None:
            while True:
                self.leave_the_replaced()
                time.sleep(_LOOK_SECONDS)

        if self.is_followed:
            threading.Thread(target=look, name="shardwise-launcher", daemon=True).start()

    def leave_the_replaced(self) -> None:
        """Break the connections to launchers that others have taken over from: see [Note: a silent launcher]."""
        address, peers = self._address(), dict(self._peers)
        if address is None:
            return
        here = peers.get(address.number)  # which may be where the last one was
        old = [number for number, peer in peers.items() if number < address.number and peer != here]
        if not old or break_connections([peers[number] for number in old]) or self._number <= max(old):
            return
        if time.monotonic() - self._connected_at > _ALL_SECONDS:  # torch tries again, with pauses, but no longer
            for number in old:
                del self._peers[number]

    @property
    def is_followed(self) -> bool:
        """Whether another launcher takes over if this process's dies."""
        return self._address() is not None

    def _address(self) -> LauncherAddress | None:
        return None if self._folder is None else LauncherAddress.read(self._folder)

    def _connected(self, address: LauncherAddress, seconds: float, dying_seconds: float = 0.0) -> TCPStore:
        """A launcher that closes what connects to it, within `dying_seconds`, is not there any more."""
        host = address.host
        if self.is_followed:
            # torch itself would try a refused connection again, for twice the time that it is given
            with socket.create_connection((host, address.port), timeout=_TRY_SECONDS) as probe:
                host = str(probe.getpeername()[0])
                if dying_seconds:
                    _require_open(probe, dying_seconds)
            self._peers[address.number] = host, address.port
        # the timeout is also that of connections which are cloned from it, to a launcher that may be dead by then
        store = TCPStore(
            host,
            address.port,
            is_master=False,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=seconds),
        )
        self._number, self._connected_at = address.number, time.monotonic()
        return store


def _require_open(probe: socket.socket, seconds: float) -> None:
    """Raise `ConnectionError` if the other end closes this connection within `seconds`. A store says nothing first."""
    probe.settimeout(seconds)
    with contextlib.suppress(TimeoutError):
        probe.recv(1)
        raise ConnectionResetError("it was closed")
