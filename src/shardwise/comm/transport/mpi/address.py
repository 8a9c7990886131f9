"""The store of ranks started by MPI: rank 0 opens a store, and sends its address to the others by MPI.

No address or port has to be configured. The store is the same as under other launchers, and so are the board of faults,
torch's own groups and the startup barrier.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from shardwise.comm.compat import TCPStore
from shardwise.comm.transport.mpi.library import Session
from shardwise.comm.transport.mpi.progress_thread import Steps
from shardwise.comm.watch.liveness import host_identity
from shardwise.errors import CommError
from shardwise.system.job_token import new_token

_TAG, _MOST_BYTES = 29_513, 16_384
_SECONDS_TO_ANSWER = 2
_MARK = "shardwise/mpi-mark"
_NO_INVITATION = (
    "What rank 0 sent by MPI is not the address of its store. Do all ranks have the same version of shardwise?"
)
_log = logging.getLogger("shardwise")


@dataclass(frozen=True)
class Invitation:
    """What rank 0 sends to the others. `mark` names a key of its store; `token` is the job's, unless the environment
    has one, and is never in the store."""

    addresses: tuple[str, ...]
    port: int
    host: str
    mark: str
    token: str

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Invitation:
        """Raises `CommError` for anything else."""
        try:
            found = dict(json.loads(data))
            invitation = cls(tuple(found.pop("addresses")), **found)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise CommError(f"{_NO_INVITATION} ({error}).") from error
        texts = (*invitation.addresses, invitation.host, invitation.mark, invitation.token)
        if not all(isinstance(text, str) for text in texts) or type(invitation.port) is not int:
            raise CommError(f"{_NO_INVITATION}.")
        return invitation


def invite(session: Session, addresses: Sequence[str], port: int) -> Invitation:
    """Send all others the address at which rank 0 listens. Returns at once."""
    invitation = Invitation(tuple(addresses), port, host_identity(), secrets.token_hex(16), new_token())
    data = bytearray(invitation.to_bytes())
    assert len(data) <= _MOST_BYTES, "a host has few addresses"
    world = session.mpi.COMM_WORLD
    for rank in range(1, session.size):
        session.progress.start(_sending(world, data, rank), is_message=True)
    return invitation


def invited(session: Session, deadline: float, patience_seconds: float) -> Invitation:
    """Rank 0's invitation; warns while it does not come. Raises `CommError` at the deadline."""
    data = bytearray(_MOST_BYTES)

    def steps() -> Steps:
        yield [session.mpi.COMM_WORLD.Irecv([data, session.mpi.BYTE], 0, _TAG)]

    operation = session.progress.start(steps())
    session.progress.wait(operation, _Patience(session.rank, deadline, patience_seconds).look)
    return Invitation.from_bytes(bytes(data).rstrip(b"\0"))


def connect(invitation: Invitation, size: int, timeout: datetime.timedelta, deadline: float) -> tuple[TCPStore, str]:
    """A connection to rank 0's store, and its address. Raises `OSError` if none of its addresses answers."""
    is_near = invitation.host == host_identity()
    addresses = ["127.0.0.1"] if is_near else invitation.addresses
    while True:
        for address in addresses:
            with contextlib.suppress(OSError, RuntimeError):
                with contextlib.closing(socket.create_connection((address, invitation.port), _SECONDS_TO_ANSWER)):
                    pass
                store = TCPStore(
                    address, invitation.port, size, is_master=False, timeout=timeout, wait_for_workers=False
                )
                if store.check([f"{_MARK}/{invitation.mark}"]):  # otherwise it is a different store at this address
                    return store, f"{address}:{invitation.port}"
        if time.monotonic() > deadline:
            raise OSError(
                f"rank 0 announced by MPI that it listens at port {invitation.port} of {', '.join(addresses)}, and "
                f"none answers; set MASTER_ADDR on rank 0 to an address that the others reach"
            )
        time.sleep(0.1)


def confirm(store: TCPStore, invitation: Invitation) -> None:
    """Rank 0 calls this before the others connect."""
    store.set(f"{_MARK}/{invitation.mark}", "here")


def addresses_to_send(env: Mapping[str, str], *, is_local: bool) -> list[str]:
    """Those of rank 0's host that it sends to the others: MASTER_ADDR, or else all; `is_local` if the others are on it,
    too."""
    if address := env.get("MASTER_ADDR", ""):
        return [address]
    return ["127.0.0.1"] if is_local else addresses_of_this_host()


def addresses_of_this_host() -> list[str]:
    """Addresses at which others may reach this host: those that its name resolves to first, then those of its
    interfaces."""
    found: list[str] = []
    with contextlib.suppress(OSError):
        found += [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    stats = psutil.net_if_stats()
    for name, entries in psutil.net_if_addrs().items():
        if name in stats and stats[name].isup:
            found += [entry.address for entry in entries if entry.family == socket.AF_INET]
    return [address for address in dict.fromkeys(found) if not address.startswith("127.")] or ["127.0.0.1"]


def _sending(world: Any, data: bytearray, rank: int) -> Steps:
    yield [world.Isend(data, rank, _TAG)]


class _Patience:
    """Warns from time to time that rank 0 has not come."""

    def __init__(self, rank: int, deadline: float, patience_seconds: float) -> None:
        self._rank = rank
        self._deadline = deadline
        self._began = time.monotonic()
        self._warn_after = patience_seconds

    def look(self) -> None:
        now = time.monotonic()
        if now > self._deadline:
            raise CommError(
                f"Rank {self._rank} waited {now - self._began:.0f} s for rank 0, which did not come to World.join(). "
                f"All ranks that mpirun starts have to call it."
            )
        if now - self._began > self._warn_after:
            self._warn_after *= 2
            _log.warning(
                "Rank %d waits for rank 0, which has not come to World.join() yet, for %.0f s.",
                self._rank, now - self._began,
            )  # fmt: skip
