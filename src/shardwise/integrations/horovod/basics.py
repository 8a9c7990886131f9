"""The part of Horovod's API that does not depend on the framework: `init`, ranks, builds, process sets, timeline."""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

import shardwise as sw
from shardwise.errors import CommError, ConfigError
from shardwise.integrations.horovod.current_session import CURRENT, current_session
from shardwise.integrations.horovod.errors import HorovodInternalError, ProcessSetError
from shardwise.integrations.horovod.messages import WORLD_SET
from shardwise.integrations.horovod.ops import Adasum, Average, Max, Min, Product, Sum
from shardwise.integrations.horovod.process_sets import ProcessSet, assign_numbers, global_process_set
from shardwise.integrations.horovod.session import Session

__all__ = [
    "Adasum",
    "Average",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "barrier",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Connect to the other ranks. All ranks call; further calls do nothing.

    `process_sets` is a list of `ProcessSet`, the same on all ranks; `"dynamic"` is accepted and not needed. `comm` may
    be a `shardwise.World`. Then the session belongs to the calling thread, and the world stays open after `shutdown`:
    with `shardwise.testing.run_ranks`, threads are ranks. Raises `ConfigError` for other kinds of `comm`.
    """
    if CURRENT.get() is not None:
        return
    sets: Sequence[ProcessSet] = () if process_sets is None or process_sets == "dynamic" else list(process_sets)
    if comm is not None and not isinstance(comm, sw.World):
        raise ConfigError(
            "init(comm=...) with ranks or an MPI communicator is not supported. Make process sets of the ranks "
            "instead: hvd.init(process_sets=[hvd.ProcessSet([0, 1])])."
        )
    numbered = {number: one.listed_ranks() for number, one in enumerate(sets, start=1)}
    if comm is not None:
        CURRENT.of_thread.session = Session(comm, numbered)
    else:
        _open_for_process(numbered)
    assign_numbers(sets)


def _open_for_process(process_sets: Mapping[int, Sequence[int]]) -> None:
    world = CURRENT.idle_world if CURRENT.idle_world is not None else sw.World.join()
    CURRENT.idle_world = None  # it is closed if the session cannot be opened
    try:
        CURRENT.of_process = _told(_open_session(world, process_sets))
    except ProcessSetError:
        CURRENT.idle_world = world
        raise
    if not CURRENT.has_exit_handler:
        atexit.register(shutdown)
        CURRENT.has_exit_handler = True


def _open_session(world: sw.World, process_sets: Mapping[int, Sequence[int]]) -> Session:
    """A session of these ranks. In an elastic job: of the surviving ranks, if some are lost meanwhile."""
    while True:
        try:
            return Session(world, process_sets)
        except ProcessSetError:
            raise  # on all ranks, which may call `init` again
        except CommError as error:
            if world.membership is None:
                world.close(error)
                raise
            world = world.membership.regroup(world, b"").world
        except BaseException as error:
            world.close(error)
            raise


def regroup() -> None:
    """In an elastic job: open a session of the surviving and the new ranks. All surviving ranks call.

    Raises `TurnedAwayError` if the others continue without this rank, `ConfigError` if there are process sets, and
    `CommError` if no rank continues.
    """
    session = current_session()
    membership = session.world.membership
    assert membership is not None
    if len(session.sets) > 1:
        raise ConfigError(
            "This job has process sets, and its ranks have changed, so the sets' ranks are not valid any more. Do not "
            "use process sets in elastic jobs."
        )
    CURRENT.of_process = None
    session.abandon()
    CURRENT.of_process = _told(_open_session(membership.regroup(session.world, b"").world, {}))


def _told(session: Session) -> Session:
    """The session, after its ranks were written into the environment, where scripts find them under `horovodrun`."""
    place = session.topology
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    values = (session.rank, session.size, place.local_rank, place.local_size, place.cross_rank, place.cross_size)
    os.environ |= {f"HOROVOD_{name}": str(value) for name, value in zip(names, values, strict=True)}
    return session


def restart() -> None:
    """Replace this rank's session by a new one with the same process sets. All ranks call.

    The new session has no collectives in flight, and unnamed collectives are counted from 1 again.
    """
    session = current_session()
    process_sets = {number: ranks for number, ranks in session.sets.items() if number != WORLD_SET}
    is_of_thread = CURRENT.of_thread.session is session
    shutdown()
    if is_of_thread:
        CURRENT.of_thread.session = Session(session.world, process_sets)
    else:
        _open_for_process(process_sets)


def shutdown() -> None:
    """Leave the job. Collectives for which other ranks wait for this one raise there. `init` may be called again."""
    session, CURRENT.of_thread.session = CURRENT.of_thread.session, None
    if session is not None:
        session.close()
        return
    session, CURRENT.of_process = CURRENT.of_process, None
    if session is None:
        return
    is_broken = session.pending.error is not None
    session.close()
    CURRENT.idle_world = None if is_broken else session.world
    if is_broken:
        session.world.close()


def is_initialized() -> bool:
    return CURRENT.get() is not None


def rank() -> int:
    return current_session().rank


def size() -> int:
    return current_session().size


def local_rank() -> int:
    """This rank's index on its host."""
    return current_session().topology.local_rank


def local_size() -> int:
    return current_session().topology.local_size


def cross_rank() -> int:
    """The index of this rank's host among the hosts that have a rank with the same local rank."""
    return current_session().topology.cross_rank


def cross_size() -> int:
    return current_session().topology.cross_size


def is_homogeneous() -> bool:
    """Whether all hosts have the same number of ranks."""
    return current_session().topology.is_homogeneous


def mpi_threads_supported() -> bool:
    """Whether several threads may call MPI: false, since MPI is not used."""
    current_session()
    return False


def mpi_enabled() -> bool:
    return False


def mpi_built() -> bool:
    return False


def gloo_enabled() -> bool:
    """True: host memory is exchanged between hosts by gloo."""
    return True


def gloo_built() -> bool:
    return True


def nccl_built() -> int:
    """NCCL's version in Horovod's form, such as 22703; 0 without NCCL."""
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available() and torch.cuda.is_available()):
        return 0
    version: tuple[int, ...] = torch.cuda.nccl.version()
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
    """Contribute nothing to the other ranks' all-reduces until they have joined too. Returns the last rank to join.

    Averages still divide by all ranks, as in Horovod. Until all have joined, Adasum and collectives other than
    `allreduce` and `barrier` raise on the other ranks.
    """
    return current_session().join()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return once every rank of the set has called."""
    current_session().barrier(process_set.number())


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Add a process set. All ranks of the job call, with the same ranks."""
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    added.process_set_id = current_session().add_set(added.listed_ranks())
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set. All ranks of the job call. False if it does not exist or is the set of all ranks."""
    number = process_set.process_set_id
    if number is None or number == 0 or number not in current_session().sets:
        return False
    current_session().remove_set(number)
    process_set.process_set_id = None
    return True


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Let rank 0 write a trace to `file_path`, instead of any other. `mark_cycles` is ignored: there are no cycles."""
    current_session().timeline.start(file_path)


def stop_timeline() -> None:
    """Complete and close the trace."""
    current_session().timeline.stop()
