"""This process's connections to the launcher of an elastic job, and to those that take over from it."""

from __future__ import annotations

import datetime
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from shardwise.comm.compat import TCPStore
from shardwise.errors import CommError
from shardwise.system.launcher_address import LauncherAddress
from shardwise.system.process_rank import ProcessRank, address_of

_TRY_SECONDS, _ALL_SECONDS = 5.0, 300.0


class LauncherConnection:
    """This process's way to the store of its launcher, and to those of the launchers that take over."""

    def __init__(self, env: Mapping[str, str]) -> None:
        host, port = address_of(env, ProcessRank())
        self._first = LauncherAddress(0, host, port)
        images = env.get("SHARDWISE_IMAGES", "")
        self._folder = Path(images) if images else None
        self._number = -1

    def connect(self) -> TCPStore:
        """The first connection. Raises `CommError` if no launcher answers."""
        deadline = time.monotonic() + _ALL_SECONDS
        while True:
            found = self._address()
            address = found or self._first
            try:
                return self._connected(address, _TRY_SECONDS if found is not None else _ALL_SECONDS)
            except RuntimeError as error:
                if time.monotonic() > deadline or self._address() is None:
                    where = f"{address.host}:{address.port}"
                    raise CommError(f"The launcher does not answer at {where}: {error}.") from error

    def again(self) -> TCPStore | None:
        """A connection to a launcher that has taken over since the last one; `None` if there is none yet."""
        address = self._address()
        if address is None or address.number == self._number:
            return None
        try:
            # torch itself would try a refused connection again, for twice the time that it is given
            with socket.create_connection((address.host, address.port), timeout=_TRY_SECONDS):
                pass
            return self._connected(address, _TRY_SECONDS)
        except (RuntimeError, OSError):  # it has died too
            return None

    @property
    def is_renewed(self) -> bool:
        """Whether another launcher would take over from one that dies."""
        return self._address() is not None

    def _address(self) -> LauncherAddress | None:
        return None if self._folder is None else LauncherAddress.read(self._folder)

    def _connected(self, address: LauncherAddress, seconds: float) -> TCPStore:
        # the timeout is also that of connections which are cloned from it, to a launcher that may be dead by then
        store = TCPStore(
            address.host,
            address.port,
            is_master=False,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=seconds),
        )
        self._number = address.number
        return store
