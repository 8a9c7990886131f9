"""The environment variables that scripts read, for ranks that MPI has started."""

from __future__ import annotations

import os
import socket
import time

from shardwise.comm.transport.mpi.address import Invitation, addresses_to_send, invite, invited
from shardwise.comm.transport.mpi.library import checked_session
from shardwise.errors import CommError
from shardwise.system.process_rank import port_in, process_rank_of

_TIMEOUT_SECONDS, _PATIENCE_SECONDS = 600, 10


def as_torchrun_would() -> None:
    """Set RANK and the related variables, where an MPI has started this process and they are not set. Then all ranks
    call.

    Raises `ConfigError` if mpi4py is missing, or belongs to another MPI.
    """
    process = process_rank_of(os.environ)
    if not process.is_mpi or process.size == 1:
        return
    session = checked_session(process)
    is_local = process.local_size == session.size
    if session.rank == 0:
        addresses = addresses_to_send(os.environ, is_local=is_local)
        invitation = invite(session, addresses, port_in(os.environ, 0) or _free_port())
    else:
        invitation = invited(session, time.monotonic() + _TIMEOUT_SECONDS, _PATIENCE_SECONDS)
    settings = {
        "RANK": session.rank,
        "WORLD_SIZE": session.size,
        "LOCAL_RANK": process.local_rank,
        "MASTER_ADDR": _reached(invitation),
        "MASTER_PORT": invitation.port,
        "SHARDWISE_TRANSPORT": "mpi",
    }
    if process.local_size:
        settings["LOCAL_WORLD_SIZE"] = process.local_size
    for name, value in settings.items():
        os.environ.setdefault(name, str(value))


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])


def _reached(invitation: Invitation) -> str:
    """The address to use for rank 0. Nothing listens there yet, so it is the first to which there is a route."""
    for address in invitation.addresses:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((address, 9))
            except OSError:
                continue
            return address
    raise CommError(
        f"There is no way to rank 0 at {', '.join(invitation.addresses)}. Set MASTER_ADDR to an address of its host."
    )
