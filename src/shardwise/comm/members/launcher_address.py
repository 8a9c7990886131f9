"""Where the store of an elastic job's launcher is: a file in the folder that outlives ranks.

A launcher that takes over has a new store, at another address, and replaces the file; see "When the launcher dies" in
docs/elastic-protocol.md.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from shardwise.comm.compat import TCPStore
from shardwise.errors import CommError
from shardwise.system import plain_data
from shardwise.system.job_folder import LAUNCHER
from shardwise.system.process_rank import ProcessRank, address_of

_TRY_SECONDS, _ALL_SECONDS = 5.0, 300.0


@dataclass(frozen=True)
class LauncherAddress:
    """The address of a launcher's store. `number` is the number of launchers that the job has had before."""

    number: int
    host: str
    port: int

    def write(self, folder: Path) -> None:
        """Tell the ranks that use `folder`. Call it once the store has what they may ask it for."""
        draft = folder / f"{LAUNCHER}.draft"
        draft.write_text(json.dumps(asdict(self)))
        draft.replace(folder / LAUNCHER)

    @classmethod
    def read(cls, folder: Path) -> LauncherAddress | None:
        """The present launcher's, or the last one's; `None` where launchers are not replaced."""
        with contextlib.suppress(OSError, ValueError):
            shape = {"number": int, "host": str, "port": int}
            return cls(**plain_data.read((folder / LAUNCHER).read_bytes(), shape, max_bytes=10_000))
        return None


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
