"""A process group of `torch.distributed` whose messages go by MPI."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from shardwise.comm.transport.mpi import BACKEND
from shardwise.comm.transport.mpi.algorithms import Line, land, name_of, room_for
from shardwise.comm.transport.mpi.library import Session
from shardwise.comm.transport.mpi.mpi_work import MpiWork
from shardwise.comm.transport.mpi.progress_thread import Operation, Requests, Steps
from shardwise.errors import CommError

Tensor = torch.Tensor
_TAGS_OF_A_CALL = 4
"""Two for the steps of a collective, one for the user's messages; see `_collective_tag` and `_message_tag`."""


_Base: Any = dist.ProcessGroup  # its methods have overloads that are not used


class MpiProcessGroup(_Base):
    """All collectives of torch for dense CPU tensors of any dtype.

    A group written in Python replaces torch's own, so there is no other backend beside it. Methods take the arguments
    of those of `torch.distributed.ProcessGroup`. Each returns at once.
    """

    def __init__(self, session: Session, line: Line, timeout: datetime.timedelta) -> None:
        super().__init__(line.rank, line.size)
        self._session = session
        self._line = line
        self._timeout_seconds = timeout.total_seconds()
        self._num_calls = 0
        self._most_calls = session.num_tags // _TAGS_OF_A_CALL
        self._name = self._description = ""

    # -- what torch asks of a group ---------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802
        return BACKEND

    def size(self) -> int:
        return self._line.size

    def rank(self) -> int:
        return self._line.rank

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    @property
    def supports_coalescing(self) -> bool:
        return False

    @property
    def group_name(self) -> Any:
        return self._name

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    @property
    def group_desc(self) -> str:
        return self._description

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    def setGroupDesc(self, name: str) -> None:  # noqa: N802
        self._description = name

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc

    def _set_default_timeout(self, timeout: datetime.timedelta) -> None:
        self._timeout_seconds = timeout.total_seconds()

    set_timeout = _set_default_timeout

    def shutdown(self) -> None:
        """The communicator is kept: freeing it would be collective."""

    def abort(self) -> None:
        """Operations under way are left alone, and MPI will not be finalized."""
        self._session.break_off()

    # -- collectives ------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None) -> MpiWork:
        op, several = _op(opts), _several(tensors)
        steps = [partial(self._line.all_reduce, one, op) for one in several]
        return self._collect("all_reduce", steps, several, several)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Any, opts: Any = None) -> MpiWork:
        op, several = _op(opts), _several(tensors)
        steps = [partial(self._line.all_reduce, one, op, root=opts.rootRank) for one in several]
        return self._collect("reduce", steps, several, several)

    def broadcast(self, tensors: Any, opts: Any = None) -> MpiWork:
        several = _several(tensors)
        root = opts.rootRank if hasattr(opts, "rootRank") else int(opts or 0)
        steps = [lambda _, one=one: self._line.broadcast(one, root) for one in several]
        return self._collect("broadcast", steps, several, several)

    def allgather(self, outs: Any, ins: Any, opts: Any = None) -> MpiWork:  # noqa: ARG002
        steps = [self._gathering(out, one) for out, one in zip(outs, ins, strict=True)]
        return self._collect("all_gather", steps, [*ins, *(one for out in outs for one in out)], outs)

    allgather_coalesced = allgather

    def all_gather_single(self, out: Tensor, source: Tensor, opts: Any = None) -> MpiWork:
        return self.all_gather_single_coalesced([out], [source], opts)

    def all_gather_single_coalesced(self, outs: Any, ins: Any, opts: Any = None) -> MpiWork:  # noqa: ARG002
        room = [room_for(out) for out in outs]
        steps = [
            self._gathering(one.view(-1).tensor_split(self.size()), source)
            for one, source in zip(room, ins, strict=True)
        ]
        return self._collect("all_gather", steps, [*outs, *ins], outs, partial(_copy_out, outs, room))

    def reduce_scatter(self, outs: Any, ins: Any, opts: Any = None) -> MpiWork:
        op = _op(opts)
        steps = [partial(self._line.reduce_scatter, out, parts, op) for out, parts in zip(outs, ins, strict=True)]
        return self._collect("reduce_scatter", steps, [*outs, *(one for parts in ins for one in parts)], outs)

    def reduce_scatter_single(self, out: Tensor, source: Tensor, opts: Any = None) -> MpiWork:
        return self.reduce_scatter_single_coalesced([out], [source], opts)

    def reduce_scatter_single_coalesced(self, outs: Any, ins: Any, opts: Any = None) -> MpiWork:
        op = _op(opts)
        steps = [
            partial(self._line.reduce_scatter, out, one.detach().contiguous().view(-1).tensor_split(self.size()), op)
            for out, one in zip(outs, ins, strict=True)
        ]
        return self._collect("reduce_scatter", steps, [*outs, *ins], outs)

    def all_to_all_single(
        self,
        out: Tensor,
        source: Tensor,
        out_sizes: Any,
        in_sizes: Any,
        opts: Any = None,  # noqa: ARG002
    ) -> MpiWork:
        room = room_for(out)
        arrived = room.split_with_sizes(list(out_sizes)) if out_sizes else room.tensor_split(self.size())
        dense = source.contiguous()
        sent = dense.split_with_sizes(list(in_sizes)) if in_sizes else dense.tensor_split(self.size())
        steps = [partial(self._line.swap, arrived, sent)]
        return self._collect("all_to_all", steps, [out, source], [out], partial(_copy_out, [out], [room]))

    def alltoall(self, outs: Any, ins: Any, opts: Any = None) -> MpiWork:  # noqa: ARG002
        return self._collect("all_to_all", [partial(self._line.swap, outs, ins)], [*outs, *ins], outs)

    def gather(self, outs: Any, ins: Any, opts: Any = None) -> MpiWork:
        root, nothing = opts.rootRank, [None] * self.size()
        arrived = outs[0] if self.rank() == root else nothing
        sent = [ins[0] if rank == root else None for rank in range(self.size())]
        steps = [partial(self._line.swap, arrived, sent)]
        return self._collect("gather", steps, [*ins, *(one for out in outs for one in out)], outs)

    def scatter(self, outs: Any, ins: Any, opts: Any = None) -> MpiWork:
        root, nothing = opts.rootRank, [None] * self.size()
        sent = ins[0] if self.rank() == root else nothing
        arrived = [outs[0] if rank == root else None for rank in range(self.size())]
        steps = [partial(self._line.swap, arrived, sent)]
        return self._collect("scatter", steps, [*outs, *(one for parts in ins for one in parts)], outs)

    def barrier(self, opts: Any = None) -> MpiWork:  # noqa: ARG002
        return self._collect("barrier", [lambda _: self._line.barrier()], [], [])

    # -- messages ---------------------------------------------------------------------------------------

    def send(self, tensors: Any, rank: int, tag: int = 0) -> MpiWork:
        def steps(one: Tensor) -> Steps:
            requests = Requests()
            self._line.send(requests, one.detach().contiguous(), rank, self._message_tag(tag))
            yield requests

        return self._work(f"send to rank {rank}", [steps(one) for one in tensors], tensors, tensors)

    def recv(self, tensors: Any, rank: int, tag: int = 0) -> MpiWork:
        room = [room_for(one) for one in tensors]

        def steps(one: Tensor) -> Steps:
            requests = Requests()
            self._line.receive(requests, one, rank, self._message_tag(tag))
            yield requests

        finish = partial(_copy_out, tensors, room)
        return self._work(f"recv from rank {rank}", [steps(one) for one in room], tensors, tensors, finish, source=rank)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> MpiWork:  # noqa: ARG002
        raise CommError("The mpi4py backend receives from a rank that is named: give recv or irecv its src.")

    # names in torch before 2.13
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # -- inside -----------------------------------------------------------------------------------------

    def _gathering(self, arrived: Sequence[Tensor], own: Tensor) -> Callable[[int], Steps]:
        return partial(self._line.swap, arrived, [own] * self.size())

    def _collect(
        self,
        verb: str,
        calls: Sequence[Callable[[int], Steps]],
        tensors: Sequence[Tensor],
        result: Any,
        finish: Callable[[], None] | None = None,
    ) -> MpiWork:
        """Run collectives one after the other; each has a tag, which is the same on all ranks."""
        return self._work(verb, [call(self._collective_tag()) for call in calls], tensors, result, finish)

    def _collective_tag(self) -> int:
        self._num_calls += 1
        return self._num_calls % self._most_calls * _TAGS_OF_A_CALL

    def _message_tag(self, tag: int) -> int:
        if not 0 <= tag < self._most_calls:
            raise CommError(
                f"tag={tag} is not within 0 and {self._most_calls - 1}, which is what MPI has room for here."
            )
        return tag * _TAGS_OF_A_CALL + 2

    def _work(
        self,
        verb: str,
        steps: Sequence[Steps],
        tensors: Sequence[Tensor],
        result: Any,
        finish: Callable[[], None] | None = None,
        source: int = -1,
    ) -> MpiWork:
        for tensor in tensors:
            if tensor.device.type != "cpu" or tensor.layout != torch.strided:
                raise CommError(
                    f"{verb} of a tensor on {tensor.device} ({tensor.layout}): the mpi4py backend moves dense tensors "
                    f"of the host, and no other backend can be beside it. Copy it there first."
                )
        future: Future[Any] = Future()

        def on_end(error: BaseException | None) -> None:
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))

        deadline = time.monotonic() + self._timeout_seconds

        def late() -> None:
            if time.monotonic() > deadline:
                self._session.break_off()
                raise CommError(
                    f"Rank {self.rank()} waited {self._timeout_seconds:g} s in {verb} of group {self._name!r} "
                    f"({self.size()} ranks): not all of them came to it."
                )

        operation: Operation = self._session.progress.start(_all(steps, finish), on_end=on_end, late=late)
        return MpiWork(self._session.progress, operation, future, result, source)


def _all(steps: Sequence[Steps], finish: Callable[[], None] | None) -> Steps:
    for one in steps:
        yield from one
    if finish is not None:
        finish()


def _several(tensors: Any) -> list[Tensor]:
    return list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]


def _op(opts: Any) -> str:
    return name_of(getattr(opts, "reduceOp", opts) if opts is not None else dist.ReduceOp.SUM)


def _copy_out(tensors: Sequence[Tensor], room: Sequence[Tensor]) -> None:
    for tensor, filled in zip(tensors, room, strict=True):
        land(filled, tensor)
