"""`init` and what can be asked of the job, the same for every framework."""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from typing import Any

import torch

import shardwise as sw
from shardwise.errors import CommError, ConfigError
from shardwise.integrations.horovod.current_session import PROCESS, current_session
from shardwise.integrations.horovod.process_sets import ProcessSet, global_process_set, start_sets
from shardwise.integrations.horovod.session import Session


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Meet the other ranks. All ranks call, once; what comes again is taken for said.

    `process_sets` are `ProcessSet`s that are there from the start, the same on all ranks; `"dynamic"` is taken, and
    not needed. `comm` may be a `shardwise.World`, which is used by the calling thread alone and stays open: with
    `shardwise.testing.run_ranks` threads are ranks of Horovod. Raises `ConfigError` for parts of a job as `comm`.
    """
    if PROCESS.current is not None:
        return
    sets: Sequence[ProcessSet] = () if process_sets is None or process_sets == "dynamic" else list(process_sets)
    if comm is not None and not isinstance(comm, sw.World):
        raise ConfigError(
            "init(comm=...) with ranks or an MPI communicator is not supported here. Make process sets of the ranks "
            "instead: hvd.init(process_sets=[hvd.ProcessSet([0, 1])])."
        )
    listed = [one.listed_ranks() for one in sets]
    if comm is not None:
        PROCESS.own.own = Session(comm, listed)
    else:
        PROCESS.session = _opened(PROCESS.world if PROCESS.world is not None else sw.World.join(), listed)
        if not PROCESS.is_registered:
            atexit.register(shutdown)
            PROCESS.is_registered = True
    start_sets(sets)


def _opened(world: sw.World, process_sets: Sequence[Sequence[int]]) -> Session:
    """A session of these ranks, or in an elastic job of those that are left when some die meanwhile."""
    while True:
        try:
            return Session(world, process_sets)
        except CommError as error:
            if world.membership is None:
                world.close(error)
                raise
            world = world.membership.regroup(world, b"").world
        except BaseException as error:
            world.close(error)
            raise


def regroup() -> None:
    """In an elastic job: meet the ranks that live and those that have come, with a new coordinator. All that live call.

    Raises `TurnedAwayError` where the others go on without this rank, `ConfigError` if there were process sets, and
    `CommError` if nobody goes on.
    """
    session = current_session()
    membership = session.world.membership
    assert membership is not None
    if len(session.sets) > 1:
        raise ConfigError(
            "The ranks of this job change, and it has process sets, which are of the ranks that there were. Leave them "
            "out of elastic jobs."
        )
    PROCESS.session = None
    session.abandon()
    PROCESS.session = _opened(membership.regroup(session.world, b"").world, [])


def shutdown() -> None:
    """Leave. Other ranks that still wait for something from this one raise. `init` may be called again."""
    own, PROCESS.own.own = PROCESS.own.own, None
    if own is not None:
        own.close()
        return
    session, PROCESS.session = PROCESS.session, None
    if session is None:
        return
    is_broken = session.pending.error is not None
    session.close()
    PROCESS.world = None if is_broken else session.world  # ranks that have met need not meet again
    if is_broken:
        session.world.close()


def is_initialized() -> bool:
    return PROCESS.current is not None


def rank() -> int:
    return current_session().rank


def size() -> int:
    return current_session().size


def local_rank() -> int:
    """This rank's number on its host."""
    return current_session().topology.local_rank


def local_size() -> int:
    return current_session().topology.local_size


def cross_rank() -> int:
    """This rank's host, counted among those that have a rank with this one's local rank."""
    return current_session().topology.cross_rank


def cross_size() -> int:
    return current_session().topology.cross_size


def is_homogeneous() -> bool:
    """Whether all hosts have equally many ranks."""
    return current_session().topology.is_homogeneous


def mpi_threads_supported() -> bool:
    """Whether MPI carries collectives, and may be called by several threads: never here."""
    current_session()
    return False


def mpi_enabled() -> bool:
    return False


def mpi_built() -> bool:
    return False


def gloo_enabled() -> bool:
    """True: between hosts, gloo carries what lies on the host."""
    return True


def gloo_built() -> bool:
    return True


def nccl_built() -> int:
    """NCCL's version as Horovod numbers it, such as 22703; 0 without NCCL."""
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available() and torch.cuda.is_available()):
        return 0
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return 10000 * version[0] + 100 * version[1] + version[2]


def ddl_built() -> bool:
    return False


def ccl_built() -> bool:
    return False


def cuda_built() -> bool:
    return torch.version.cuda is not None


def rocm_built() -> bool:
    return torch.version.hip is not None


def join(device: int = -1) -> int:
    """This rank has no more data: until all have called, it contributes nothing to the others' all-reduces.

    Blocks. The rank that was the last to call. Averages still divide by all ranks, as Horovod's do. Other collectives
    of tensors, and Adasum, raise on the others meanwhile.
    """
    return current_session().join()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return once every rank of the set has called."""
    current_session().barrier(process_set.number())


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Make a set of ranks; all ranks call, those outside of it too, with the same ranks."""
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    added.process_set_id = current_session().add_set(added.listed_ranks())
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a set; all ranks call. False if it is that of all ranks, or was not there."""
    number = process_set.process_set_id
    if number is None or number == 0 or number not in current_session().sets:
        return False
    current_session().remove_set(number)
    process_set.process_set_id = None
    return True


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """From now on rank 0 writes a trace, in the place of one that is being written. There are no cycles to mark."""
    current_session().timeline.start(file_path)


def stop_timeline() -> None:
    """End the trace: the file is whole."""
    current_session().timeline.stop()
