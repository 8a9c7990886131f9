"""Registers our process groups with torch, and creates the communicators under them."""

from __future__ import annotations

import zlib
from functools import cache
from typing import Any

import torch.distributed as dist

from shardwise.comm.transport.mpi import BACKEND
from shardwise.comm.transport.mpi.algorithms import Line
from shardwise.comm.transport.mpi.library import Session, session
from shardwise.comm.transport.mpi.process_group import MpiProcessGroup
from shardwise.errors import CommError

_NUM_TAGS = 32_767


@cache
def register() -> None:
    """Let `torch.distributed` create groups of the backend `mpi4py`, for CPU tensors."""
    dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])


def ranks_communicator(found: Session, rank: int, size: int) -> Any:
    """A separate communicator of all ranks, numbered as in torch. All ranks call."""
    if size != found.size:
        raise CommError(
            f"The process group has {size} ranks, but MPI started {found.size}: messages by MPI need a process group "
            f"of all that mpirun started."
        )
    return found.progress.call(lambda: found.mpi.COMM_WORLD.Split(0, rank))


def _create(options: Any, _: Any = None) -> MpiProcessGroup:
    """Create one of torch's groups. Its ranks call, in the same order on all of them."""
    found = session()
    store, rank, size = options.store, int(options.group_rank), int(options.group_size)
    store.set(f"mpi/{rank}", str(found.rank))
    ranks = [int(store.get(f"mpi/{other}")) for other in range(size)]
    if len(set(ranks)) < size:
        raise CommError(
            f"The group of {size} ranks has {len(set(ranks))} of MPI's. Start all of its processes with one mpirun, "
            f"that of the MPI which mpi4py finds."
        )
    tag = zlib.crc32(f"{options.group_id} {ranks}".encode()) % _NUM_TAGS

    def make() -> Any:
        world = found.mpi.COMM_WORLD
        return world.Create_group(world.Get_group().Incl(ranks), tag)

    return MpiProcessGroup(found, Line(found.progress.call(make), rank, size), options.timeout)
