"""The moves of one flat buffer: memory on one side, collectives on the other.

Each method is one action of the program. Those that make or drop the whole buffer may be asked twice:
a buffer that is whole already is not gathered again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch

from shardwise.comm import Communicator, Group, Work, sum_small
from shardwise.errors import CommError
from shardwise.placement import Axes, Span
from shardwise.program import Action, reduce_due, step_gradients
from shardwise.storage import Flat, FullState, Inbox, torch_dtype

Tensor = torch.Tensor


class Mover:
    """What is on its way for one flat buffer on this rank."""

    def __init__(self, flat: Flat, collectives: Communicator, groups: Mapping[str, Group]) -> None:
        self.flat = flat
        self._collectives = collectives
        self._groups = groups
        self._journal = collectives.journal
        self._name = flat.name
        self._gathering = f"gather of {flat.name}"
        self._coordinate = {axis: group.index for axis, group in groups.items()}
        self._wire = torch_dtype(flat.spec.table.wire)
        self._spans: dict[Axes, Span] = {}
        self._parts_of_full: dict[Axes, Tensor] = {}
        self._spread: Axes = ()
        self._arriving: Work | None = None
        self._reduction: _Reduction | None = None
        self._chain = reduce_due(flat.spec)
        self.waits_where_due = flat.spec.trainable and not step_gradients(flat.spec)
        """Whether gradients wait just as the update needs them, so that nothing moves at the step."""

    # -- parameters -------------------------------------------------------------------------------------

    def gather(self, axis: str, subject: str) -> None:
        """Start to make `full` whole over `axis`, from what rests or what is held."""
        flat = self.flat
        if flat.is_whole:
            return
        if flat.state is FullState.FLYING and axis not in self._spread:
            return
        if flat.state is FullState.ABSENT:
            from_held = subject == "held" and flat.held is not None
            source = flat.held if from_held else flat.param
            assert source is not None
            self._spread = flat.spec.table.held.shard if from_held else flat.spec.table.param.shard
            flat.raise_full()
            if flat.common is None:
                self._part_of_full(self._spread).copy_(source)
        for other in reversed(flat.spec.table.order):
            if other == axis:
                break
            if other in self._spread:  # nothing was held, so what rests is gathered, over more axes
                self._gather_over(other)
                self.wait_full()
        self._gather_over(axis)

    def _gather_over(self, axis: str) -> None:
        self._spread = tuple(other for other in self._spread if other != axis)
        gathered, group = self._part_of_full(self._spread), self._groups[axis]
        if self.flat.common is not None:  # it is there already
            self._count_read(gathered, group)
            return
        self._arriving = self._collectives.all_gather(gathered, group, self._name)

    def _count_read(self, gathered: Tensor, group: Group) -> None:
        """What the others read of this rank's, as if it had been sent: ranks that differ are told of it as then."""
        self._journal.mark(self._gathering)
        ledger, num_ranks = self._collectives.ledger, len(group.ranks)
        ledger.called("gather", group.axis)
        ledger.sent("gather", group.axis, (num_ranks - 1) * (gathered.nbytes // num_ranks))

    def wait_full(self) -> None:
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving = None
        if self.flat.state is FullState.FLYING and not self._spread:
            if self.flat.common is not None:
                self.flat.common.wait_closed()
            self.flat.state = FullState.READY
            self.flat.free_held()

    def gather_param(self, axis: str) -> None:
        """Start to bring updated parameters to where they rest, from the ranks that updated them."""
        table = self.flat.spec.table
        if not self._spread:
            self._spread = table.optim.shard
        self._spread = tuple(other for other in self._spread if other != axis)
        span = self.flat.spec.layout.span(self._spread, self._coordinate).within(self.flat.param_span)
        resting = self.flat.param[span.start : span.stop]
        self._arriving = self._collectives.all_gather(resting, self._groups[axis], self._name)
        if set(self._spread) == set(table.param.shard):
            self._spread = ()

    def wait_param(self) -> None:
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving = None

    def gather_whole(self, whole: Tensor, shard: Axes) -> None:
        """Make `whole`, of which this rank has filled what `shard` gives it, the same on all ranks; blocks."""
        for axis in reversed(self.flat.spec.table.order):
            if axis in shard:
                shard = tuple(other for other in shard if other != axis)
                self._collectives.all_gather(self._spanned(whole, shard), self._groups[axis], self._name).wait()

    def any_rank(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank of this buffer's axes."""
        for axis in self.flat.spec.table.axes:
            flag = b"1" in self._collectives.exchange(b"1" if flag else b"0", self._groups[axis], self._name)
        return flag

    def merged(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """The `facts`, anything JSON can hold, of all ranks of this buffer's axes in one dict; the first one's stay."""
        known = dict(facts)
        for axis in self.flat.spec.table.axes:
            said = self._collectives.exchange(json.dumps(known).encode(), self._groups[axis], self._name)
            known = {key: value for message in reversed(said) for key, value in json.loads(message).items()}
        return known

    # -- gradients --------------------------------------------------------------------------------------

    def mean_over_ranks(self, values: Tensor) -> Tensor:
        """The mean of every rank's `values`, one-dimensional and of one length and dtype; blocks. All ranks call."""
        for axis in self.flat.spec.table.axes:
            group = self._groups[axis]
            values = sum_small(values, self._collectives, group, self._name) / len(group.ranks)
        return values

    def broadcast(self, values: Tensor) -> None:
        """Give all ranks rank 0's `values`, one-dimensional and contiguous, in place; blocks. All ranks call."""
        for axis in self.flat.spec.table.axes if values.numel() else ():
            group = self._groups[axis]
            self._collectives.broadcast(values, group.ranks[0], group, self._name).wait()

    def reduce(self, action: Action, *, in_step: bool) -> None:
        """Start the next step of this buffer's reduction, or cast or slice what it has come to."""
        if self._reduction is None:
            self._reduction = self._first(in_step=in_step)
        reduction = self._reduction
        dtype = torch_dtype(action.dtype) if action.dtype != "-" else reduction.current.dtype
        if action.verb == "cast":
            reduction.finish(reduction.current.to(dtype))
            return
        if action.verb == "slice":  # every rank has the sum, and updates its own part
            group = self._groups[action.over]
            reduction.finish(reduction.current.chunk(len(group.ranks))[group.index].clone())
            return
        group, source = self._groups[action.over], reduction.current
        if action.verb == "reduce_scatter":
            numel = source.numel() // len(group.ranks)
            in_place = source.dtype == dtype and self.flat.is_in_room(source)
            own = slice(group.index * numel, (group.index + 1) * numel)
            out = source[own] if in_place else self.flat.sum_memory(numel, dtype)
            work = self._collectives.reduce_scatter(out, source, group, self._wire, self._name)
        else:
            can_stay = self.flat.is_in_room(source) or not self._collectives.is_buffer_scarce
            out = source if source.dtype == dtype and can_stay else self.flat.sum_memory(source.numel(), dtype)
            work = self._collectives.all_reduce(out, source, group, self._wire, self._name)
        reduction.start(out, work, self._staging_bytes(action, source, group))

    def wait_grad(self, *, in_step: bool, is_last: bool) -> None:
        """Finish a step of the reduction; after the last one its result waits with the flat buffer."""
        reduction = self._reduction
        if reduction is None:
            return
        reduction.wait()
        if is_last:
            self._reduction = None
            reduction.release()
            (self.flat.keep_due if in_step else self.flat.keep_grad)(reduction.current)

    def settle_reduction(self) -> None:
        """Bring a reduction that the program left under way to its end."""
        while self._reduction is not None:
            rest = self._rest_of(self._reduction)
            self.wait_grad(in_step=False, is_last=not rest)
            if rest:
                self.reduce(rest[0], in_step=False)

    def _rest_of(self, reduction: _Reduction) -> tuple[Action, ...]:
        return self._chain[reduction.num_started :]

    def keep_due(self) -> None:
        """Where gradients wait as the update needs them, nothing moves."""
        grad = self.flat.take_grad()
        if grad is not None:
            self.flat.keep_due(grad)

    def abandon(self) -> None:
        """Wait for whatever is on its way and forget it. What will never come has been complained about already."""
        if self._arriving is not None:
            with suppress(CommError):
                self._arriving.wait()
            self._arriving = None
        if self._reduction is not None:
            with suppress(CommError):
                self._reduction.wait()
            self._reduction.release()
            self._reduction = None
        self._spread = ()
        if self.flat.state is FullState.FLYING:
            self.flat.state = FullState.READY

    def _first(self, *, in_step: bool) -> _Reduction:
        inbox = None if in_step else self.flat.open_inbox()
        source = inbox.memory if inbox is not None else self.flat.take_grad()
        if source is None:  # no backward reached this buffer here, but others may wait for our part
            numel, dtype = self.flat.grad_span.numel, torch_dtype(self.flat.spec.table.grad.dtype)
            source = self.flat.sum_memory(numel, dtype).zero_()
        return _Reduction(source, self.flat, inbox)

    def _staging_bytes(self, action: Action, source: Tensor, group: Group) -> int:
        """What the collective holds besides: the others' chunks, and ours if they are cast to be sent.

        For an all-reduce one more chunk, so that the same figure covers a sum that is not made in place.
        """
        copies = 1 if source.dtype == self._wire else 2
        num_chunks = len(group.ranks) - (action.verb != "all_reduce")
        return copies * num_chunks * (source.numel() // len(group.ranks)) * self._wire.itemsize

    def _part_of_full(self, shard: Axes) -> Tensor:
        """What this rank has of `full` under `shard`. Bytes come and go, but the tensor stays, so it is made once."""
        part = self._parts_of_full.get(shard)
        if part is None:
            part = self._parts_of_full[shard] = self._spanned(self.flat.full, shard)
        return part

    def _spanned(self, tensor: Tensor, shard: Axes) -> Tensor:
        span = self._spans.get(shard)
        if span is None:
            span = self._spans[shard] = self.flat.spec.layout.span(shard, self._coordinate)
        return tensor[span.start : span.stop]


class _Reduction:
    """A gradient on its way: what has been summed so far, and the collective that is under way."""

    def __init__(self, source: Tensor, flat: Flat, inbox: Inbox | None) -> None:
        self.current = source
        self._flat = flat
        self._inbox = inbox
        """What `current` is the memory of, as long as it is that of an inbox."""
        self._meter = flat.meter
        self._meter.hold("working", flat.bytes_beside_room(source))
        self._next: Tensor | None = None
        self._work: Work | None = None
        self._staging_bytes = 0
        self._is_replaced = False
        """Whether what is on its way takes the place of `current`, byte for byte."""
        self.num_started = 0

    def start(self, out: Tensor, work: Work, staging_bytes: int) -> None:
        beside = self._flat.bytes_beside_room
        is_alike = (out.numel(), beside(out)) == (self.current.numel(), beside(self.current))
        self._is_replaced = out is self.current or is_alike
        if not self._is_replaced:
            self._meter.hold("working", beside(out))
        self._meter.hold("working", staging_bytes)
        self._next, self._work, self._staging_bytes = out, work, staging_bytes
        self.num_started += 1

    def wait(self) -> None:
        if self._work is None or self._next is None:
            return
        self._work.wait()
        self._meter.drop("working", self._staging_bytes)
        if not self._is_replaced:
            self._meter.drop("working", self._flat.bytes_beside_room(self.current))
            if self._inbox is not None:
                self._flat.take_back(self._inbox)
        self._inbox = None
        self.current, self._next, self._work = self._next, None, None

    def finish(self, cast: Tensor) -> None:
        beside = self._flat.bytes_beside_room
        self._meter.hold("working", beside(cast) - beside(self.current))
        self.current, self._inbox = cast, None
        self.num_started += 1

    def release(self) -> None:
        """From here on whoever takes `current` counts its bytes."""
        self._meter.drop("working", self._flat.bytes_beside_room(self.current))
