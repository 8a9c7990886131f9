"""What ranks along a model axis send each other within a forward or backward: activations, of any shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from shardwise.comm.collectives import Communicator
from shardwise.comm.group import Group
from shardwise.comm.small_messages import SHORT_MESSAGE_BYTES
from shardwise.comm.work import Done, Work
from shardwise.errors import CommError
from shardwise.system.even_parts import round_up
from shardwise.system.telemetry import Ledger
from shardwise.system.torch_private import unwatched

Tensor = torch.Tensor
SUBJECT = "activations"
LEDGER_OF_COPIES = object()
"""In the memo of a deep copy, under the identity of this: a ledger of what copies of lines would send."""


class Line:
    """The ranks along one axis of a mesh, including this one. All of them call every method, in the same order.

    Everything blocks except `pass_on` and the methods that start something. Tensors may have any shape, strides and
    length unless stated otherwise. Sums and concatenations are contiguous, and if all ranks get the same tensor, equal
    to the bit.
    """

    __slots__ = ("_collectives", "_ledger", "group", "on_fault")

    def __init__(self, collectives: Communicator | None, group: Group, ledger: Ledger | None = None) -> None:
        """Without `collectives` nothing is sent, and only shapes are meaningful: for rehearsals. A `ledger` then counts
        what would be sent."""
        self._collectives = collectives
        self._ledger = ledger
        self.group = group
        self.on_fault: Callable[[CommError], None] | None = None
        """Called with a fault between ranks. If it returns, the result is undefined, and nobody may use it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Line:
        """A deep copy of a model is for a rehearsal: a sharded model itself cannot be copied."""
        return Line(None, self.group, self._ledger or memo.get(id(LEDGER_OF_COPIES)))

    @property
    def num_ranks(self) -> int:
        return len(self.group.ranks)

    @property
    def index(self) -> int:
        """This rank's position on the line, counted from 0."""
        return self.group.index

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of the world, in its order."""
        return self.group.ranks

    @property
    def axis(self) -> str:
        return self.group.axis

    @property
    def is_silent(self) -> bool:
        """Whether nothing is sent."""
        return self._collectives is None

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Inside, nothing is sent, and only shapes are meaningful."""
        kept, self._collectives = self._collectives, None
        try:
            yield
        finally:
            self._collectives = kept

    def fall_silent(self) -> None:
        """Send nothing from now on: the world of this line is gone. Graphs that were computed over it may still run
        backward."""
        self._collectives = None

    def _start(self, start: Callable[[Communicator], Work]) -> Work:
        """Start to send, unless this is a rehearsal."""
        if self._collectives is None:
            return Done()
        if self.on_fault is None:
            return start(self._collectives)
        try:
            return _Reporting(start(self._collectives), self.on_fault)
        except CommError as error:
            self.on_fault(error)
            return Done()

    @unwatched
    def exchange(self, message: bytes) -> list[bytes]:
        """Every rank's `message`, in its order."""
        if self._collectives is None:
            return [message] * self.num_ranks
        return self._collectives.exchange(message, self.group, SUBJECT)

    def all_same(self, word: bytes) -> bool:
        """Whether all ranks have passed the same `word`, of a few bytes."""
        return len(set(self.words(word))) == 1

    def words(self, word: bytes) -> list[bytes]:
        """Every rank's `word`, of a few bytes, in its order."""
        self._note("exchange", SHORT_MESSAGE_BYTES)
        return self.exchange(word)

    @property
    def overlaps_compute(self) -> bool:
        """Whether what is started here overlaps with computation: on devices, and between hosts."""
        return self._collectives is not None and self._collectives.overlaps_compute(self.group)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of the ranks' `tensor`, in its dtype."""
        return self.start_sum(tensor).wait()

    @unwatched
    def start_sum(self, tensor: Tensor) -> Started:
        """Start `sum`."""
        numel = tensor.numel()
        padded = round_up(numel, self.num_ranks)
        whole = tensor.new_empty(tensor.shape)  # no view, or torch would not let models write to it
        if padded == numel:
            source = tensor.detach().contiguous().view(-1)
            out = whole.view(-1)
        else:
            source = tensor.new_zeros(padded)
            source[:numel].copy_(tensor.detach().reshape(-1))
            out = torch.empty_like(source)
        work = self._start(lambda by: by.all_reduce(out, source, self.group, source.dtype, SUBJECT))
        self._note("all_reduce", 2 * source.nbytes // self.num_ranks)
        shape = whole.shape
        return Started(work, source, lambda: whole if padded == numel else whole.copy_(out[:numel].view(shape)))

    def concatenate(self, tensor: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        """The ranks' `tensor` concatenated along `dim`; `sizes` has each rank's size there."""
        return self.start_concatenate(tensor, dim, sizes).wait()

    @unwatched
    def start_concatenate(self, tensor: Tensor, dim: int, sizes: Sequence[int]) -> Started:
        """Start `concatenate`."""
        longest = max(sizes)
        first = tensor.detach().movedim(dim, 0)
        full = tensor.new_empty(self.num_ranks, longest, *first.shape[1:])
        own = full[self.index]
        own[: first.shape[0]].copy_(first)
        own[first.shape[0] :].zero_()
        work = self._start(lambda by: by.all_gather(full.view(-1), self.group, SUBJECT))
        self._note("gather", full.nbytes // self.num_ranks)

        def found() -> Tensor:
            parts = [full[index, :size] for index, size in enumerate(sizes)]
            whole = full.flatten(0, 1) if min(sizes) == longest else torch.cat(parts)
            return whole.movedim(0, dim).contiguous()

        return Started(work, full, found)

    def sum_part(self, tensor: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        """This rank's part along `dim` of the sum of the ranks' `tensor`; `sizes` has the size of each rank's part."""
        return self.start_sum_part(tensor, dim, sizes).wait()

    @unwatched
    def start_sum_part(self, tensor: Tensor, dim: int, sizes: Sequence[int]) -> Started:
        """Start `sum_part`."""
        longest = max(sizes)
        parts = tensor.detach().movedim(dim, 0).split_with_sizes(list(sizes))
        source = tensor.new_zeros(self.num_ranks, longest, *parts[0].shape[1:])
        for index, part in enumerate(parts):
            source[index, : part.shape[0]].copy_(part)
        out = torch.empty_like(source[0]).view(-1)
        work = self._start(lambda by: by.reduce_scatter(out, source.view(-1), self.group, out.dtype, SUBJECT))
        self._note("reduce_scatter", out.nbytes)
        own = out.view(longest, *parts[0].shape[1:])[: sizes[self.index]]
        return Started(work, source, lambda: own.movedim(0, dim).contiguous())

    @unwatched
    def largest(self, tensor: Tensor) -> Tensor:
        """The elementwise maximum over the ranks."""
        every = self.concatenate(tensor.reshape(1, -1), 0, [1] * self.num_ranks)
        return every.amax(0).view(tensor.shape)

    @unwatched
    def deal(self, sent: Sequence[Tensor], like: Sequence[torch.Size]) -> list[Tensor]:
        """Send `sent[i]`, one-dimensional, to the rank at position i. Returns what came from each of them,
        one-dimensional, with as many elements as shape `like[i]`.

        This rank's own entry is returned as it is. Where nothing is sent, the others are zeros, and integers are also
        after a fault, unless they have come: numbers by which a caller may allocate.
        """
        own = sent[self.index]
        is_filled = self._collectives is not None and own.is_floating_point()
        make = own.new_empty if is_filled else own.new_zeros
        arrived = [own if index == self.index else make(math.prod(shape)) for index, shape in enumerate(like)]
        self.deal_into(arrived, sent)
        return arrived

    @unwatched
    def deal_into(self, arrived: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
        """`deal` into the memory of `arrived`, each one-dimensional; this rank's own entry is not touched."""
        if self._collectives is not None:
            self._start(lambda by: by.all_to_all(arrived, sent, self.group, SUBJECT)).wait()
        elif self._ledger is not None:
            num_bytes = sum(one.nbytes for index, one in enumerate(sent) if index != self.index)
            self._ledger.sent("all_to_all", self.axis, num_bytes)

    @unwatched
    def pass_on(self, sent: Tensor) -> Passing:
        """Start to send `sent`, one-dimensional, to the next rank, and to receive as much from the previous one."""
        arrived = torch.empty_like(sent)
        if self._collectives is None:
            if self._ledger is not None:
                self._ledger.sent("all_to_all", self.axis, sent.nbytes)
            return Passing(None, sent, arrived)
        nothing = sent.new_empty(0)
        outgoing, incoming = [nothing] * self.num_ranks, [nothing] * self.num_ranks
        outgoing[(self.index + 1) % self.num_ranks] = sent
        incoming[(self.index - 1) % self.num_ranks] = arrived
        work = self._start(lambda by: by.all_to_all(incoming, outgoing, self.group, SUBJECT))
        return Passing(work, sent, arrived)

    def note_call(self, what: str) -> None:
        """Count a call in which nothing is sent, in rehearsals."""
        if self._ledger is not None:
            self._ledger.called(what, self.axis)

    def _note(self, verb: str, chunk_bytes: int) -> None:
        """Count a message of so many bytes to each other rank, in rehearsals."""
        if self._collectives is None and self._ledger is not None:
            self._ledger.sent(verb, self.axis, (self.num_ranks - 1) * chunk_bytes)


class _Reporting:
    """Work that reports a fault."""

    def __init__(self, work: Work, on_fault: Callable[[CommError], None]) -> None:
        self._work = work
        self._on_fault = on_fault

    def wait(self) -> None:
        try:
            self._work.wait()
        except CommError as error:
            self._on_fault(error)


class Started:
    """A sum or a concatenation under way."""

    def __init__(self, work: Work, source: Tensor, found: Callable[[], Tensor]) -> None:
        self._work = work
        self._source: Tensor | None = source  # must live until it has been read
        self._found = found

    @unwatched
    def wait(self) -> Tensor:
        """The result. Call it once."""
        self._work.wait()
        self._source = None
        return self._found()


class Passing:
    """A tensor on its way to the next rank."""

    def __init__(self, work: Work | None, sent: Tensor, arrived: Tensor) -> None:
        self._work = work
        self._sent: Tensor | None = sent  # must live until it has been sent
        self._arrived = arrived

    @unwatched
    def wait(self) -> Tensor:
        """The tensor from the previous rank."""
        if self._work is not None:
            self._work.wait()
        self._sent = None
        return self._arrived
