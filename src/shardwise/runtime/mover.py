"""The moves of one flat buffer: memory on one side, collectives on the other.

For every action of a program that concerns one flat buffer there is the method `verb_subject`, which does what
`program/effects.py` says of it. Those that make or drop the whole buffer may be asked twice: a buffer that is whole
already is not gathered again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

import torch

from shardwise.comm import Communicator, Group, Work
from shardwise.errors import CommError, ProgramError, TierError
from shardwise.placement import Axes, Span
from shardwise.program import Action, adds_in_place, reduce_due, step_gradients
from shardwise.runtime.reduction import Reduction, staging_bytes
from shardwise.storage import ABSENT, GATHERING, READY, DiskRead, Flat, torch_dtype

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
        self._chunks_of_full: dict[tuple[Axes, str], Sequence[Tensor]] = {}
        self._spread: Axes = ()
        self._arriving: Work | None = None
        self._outgoing: Tensor | None = None
        """On the host, the cast of what was updated there, while it is fetched."""
        self._reduction: Reduction | None = None
        self._chain = reduce_due(flat.spec)
        self.waits_where_due = flat.spec.trainable and not step_gradients(flat.spec)
        """Whether gradients wait just as the update needs them, so that nothing moves at the step."""

    def method(self, action: Action) -> Callable[[], None]:
        """What does `action`: its verb and subject say which method it is."""
        method: Callable[[Action], None] | None = getattr(self, f"{action.verb}_{action.subject}", None)
        if method is None:
            raise ProgramError(f"'{action}' is not something a runtime can do.")
        return partial(method, action)

    # -- parameters, in a pass ----------------------------------------------------------------------------

    def gather_param(self, action: Action) -> None:
        """Start to make `full` whole over one axis, from what rests."""
        self._gather(action.over, self.flat.param, self.flat.spec.table.param.shard)

    def fetch_param(self, _: Action) -> None:
        """Start to bring what rests on the host, or on a disk, to its place in `full`."""
        flat = self.flat
        if flat.state is not ABSENT:
            return
        self._spread = flat.spec.table.param.shard
        flat.allocate_full()
        part = self._part_of_full(self._spread)
        if flat.spec.rests_on_disk:
            self._arriving = flat.read_rows(part)
        else:
            self._arriving = flat.reading = flat.host.fetch(part, flat.param)

    def gather_held(self, action: Action) -> None:
        """The same from what is held; from what rests, if nothing is."""
        if self.flat.held is not None:
            self._gather(action.over, self.flat.held, self.flat.spec.table.held.shard)
        else:
            self.gather_param(action)

    def wait_range(self, _: Action) -> None:
        """A larger range of `full` is there."""
        if self.flat.spec.rests_on_disk and isinstance(self._arriving, DiskRead):
            self._wait_for_all_disks(self._arriving)
        self._wait_arriving()

    def _wait_for_all_disks(self, read: DiskRead) -> None:
        """Before ranks give each other what they have read: if a disk of any of them failed, all raise `TierError`."""
        why = ""
        try:
            read.wait()
        except TierError as error:
            why = str(error)
        for axis in self.flat.spec.table.axes:
            said = self._collectives.exchange(json.dumps(why).encode(), self._groups[axis], self._gathering)
            why = next((text for text in map(json.loads, said) if text), "")
        if why:
            raise TierError(why)

    def free_full(self, _: Action) -> None:
        self.flat.free_full()

    def slice_held(self, _: Action) -> None:
        self.flat.hold()

    def wait_full(self, _: Action | None = None) -> None:
        """`full` is whole, if it was on its way, and what was held of it is free."""
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving = None
        if self.flat.state is GATHERING and not self._spread:
            if self.flat.shared is not None:
                self.flat.shared.wait_closed()
            self.flat.state = READY
            self.flat.free_held()

    def _gather(self, axis: str, source: Tensor, shard: Axes) -> None:
        flat = self.flat
        if flat.is_whole and not flat.owes_free:
            return
        if flat.is_whole:  # ranks that have let it go count on this one's part; what comes is what is there
            flat.owes_free = False
            self._spread = shard
            flat.state = GATHERING
        if flat.state is GATHERING and axis not in self._spread:
            return
        if flat.state is ABSENT:
            self._spread = shard
            flat.allocate_full()
            if flat.shared is None:
                self._part_of_full(shard).copy_(source)
        for other in reversed(flat.spec.table.order):
            if other == axis:
                break
            if other in self._spread:  # nothing was held, so what rests is gathered, over more axes
                self._gather_over(other)
                self._wait_arriving()
        self._gather_over(axis)

    def _gather_over(self, axis: str) -> None:
        spread = self._spread = tuple([other for other in self._spread if other != axis])
        gathered, group = self._part_of_full(spread), self._groups[axis]
        if self.flat.shared is not None:  # it is there already
            self._count_read(gathered, group)
            return
        chunks = self._chunks_of_full.get((spread, axis))
        if chunks is None:
            chunks = self._chunks_of_full[spread, axis] = gathered.chunk(len(group.ranks))
        self._arriving = self._collectives.all_gather(gathered, group, self._name, chunks)

    def _count_read(self, gathered: Tensor, group: Group) -> None:
        """What the others read of this rank's, as if it had been sent: ranks that differ are told of it as then."""
        self._journal.mark(self._gathering, is_of_part=True)
        ledger, num_ranks = self._collectives.ledger, len(group.ranks)
        ledger.called("gather", group.axis)
        ledger.sent("gather", group.axis, (num_ranks - 1) * (gathered.nbytes // num_ranks))

    def _wait_arriving(self) -> None:
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving = None

    # -- parameters, after an update ----------------------------------------------------------------------

    def cast_param(self, _: Action) -> None:
        self.flat.accept_master()

    def cast_outgoing(self, _: Action) -> None:
        """What has been updated on the host, as it is to travel."""
        master, dtype = self.flat.require_master(), torch_dtype(self.flat.spec.table.param.dtype)
        self._outgoing = self.flat.host.buffer(master.numel(), dtype)
        self.flat.copy_master(self._outgoing)

    def fetch_outgoing(self, _: Action) -> None:
        """Start to bring that to where parameters rest."""
        assert self._outgoing is not None
        self._bring(self._outgoing)

    def fetch_updated(self, _: Action) -> None:
        """The same of what has been updated as it is."""
        master = self.flat.require_master()
        if self.flat.on_disk(master) is not None:
            self._outgoing = self.flat.host.buffer(master.numel(), master.dtype)
            self.flat.copy_master(self._outgoing)
        self._bring(master if self._outgoing is None else self._outgoing)

    def _bring(self, source: Tensor) -> None:
        span = self.flat.optim_span.within(self.flat.param_span)
        self._arriving = self.flat.reading = self.flat.host.fetch(self.flat.param[span.start : span.stop], source)

    def gather_updated(self, action: Action) -> None:
        """Start to bring updated parameters to where they rest, from the ranks that updated them."""
        table = self.flat.spec.table
        if not self._spread:
            self._spread = table.optim.shard
        self._spread = tuple(other for other in self._spread if other != action.over)
        span = self.flat.spec.layout.span(self._spread, self._coordinate).within(self.flat.param_span)
        resting = self.flat.param[span.start : span.stop]
        self._arriving = self._collectives.all_gather(resting, self._groups[action.over], self._name)
        if set(self._spread) == set(table.param.shard):
            self._spread = ()

    def wait_updated(self, _: Action) -> None:
        """A larger range of what rests is up to date."""
        self._wait_arriving()
        self._let_outgoing_go()

    def wait_param(self, _: Action) -> None:
        self._wait_arriving()
        self._let_outgoing_go()

    def _let_outgoing_go(self) -> None:
        outgoing, self._outgoing = self._outgoing, None
        if outgoing is not None:
            self.flat.host.give_back(outgoing, self.flat.reading)

    # -- gradients: `grad` from what a backward left, `due` in the step from what has waited for it ----------

    def reduce_scatter_grad(self, action: Action) -> None:
        """Start to sum over one axis; each rank gets its part."""
        reduction, group = self._sum(action), self._groups[action.over]
        source, dtype = reduction.current, self._dtype_of(action, reduction)
        numel, flat = source.numel() // len(group.ranks), self.flat
        is_kept, is_same_dtype = flat.grads.is_in_grad_buffer(source), source.dtype == dtype
        if adds_in_place(action.effect, is_same_dtype=is_same_dtype, is_kept=is_kept):
            out = source[group.index * numel : (group.index + 1) * numel]
        else:
            out = flat.grads.sum_memory(numel, dtype)
        chunks = reduction.chunks(len(group.ranks))
        work = self._collectives.reduce_scatter(out, source, group, self._wire, self._name, chunks)
        reduction.start(out, work, staging_bytes(action, source, len(group.ranks), self._wire))

    def all_reduce_grad(self, action: Action) -> None:
        """Start to sum over one axis; each rank gets all of it."""
        reduction, group = self._sum(action), self._groups[action.over]
        source, dtype = reduction.current, self._dtype_of(action, reduction)
        is_kept, is_same_dtype = self.flat.grads.is_in_grad_buffer(source), source.dtype == dtype
        can_stay = is_kept or not self._collectives.is_buffer_scarce
        if can_stay and adds_in_place(action.effect, is_same_dtype=is_same_dtype, is_kept=is_kept):
            out = source
        else:
            out = self.flat.grads.sum_memory(source.numel(), dtype)
        work = self._collectives.all_reduce(out, source, group, self._wire, self._name)
        reduction.start(out, work, staging_bytes(action, source, len(group.ranks), self._wire))

    def cast_grad(self, action: Action) -> None:
        reduction = self._sum(action)
        reduction.finish(reduction.current.to(self._dtype_of(action, reduction)))

    def evict_grad(self, action: Action) -> None:
        """Start to bring a sum to the host."""
        reduction, host = self._sum(action), self.flat.host
        out = host.buffer(reduction.current.numel(), reduction.current.dtype)
        reduction.leave(out, host.evict(out, reduction.current))

    def slice_due(self, action: Action) -> None:
        """Every rank has the sum, and updates its own part."""
        reduction, group = self._sum(action), self._groups[action.over]
        reduction.finish(reduction.current.chunk(len(group.ranks))[group.index].clone())

    reduce_scatter_due, all_reduce_due, cast_due = reduce_scatter_grad, all_reduce_grad, cast_grad
    evict_due = evict_grad

    def wait_sum(self, _: Action) -> None:
        """A sum over some of the axes is there."""
        if self._reduction is not None:
            self._reduction.wait()

    def wait_grad(self, _: Action) -> None:
        """The gradient of one more backward waits for the step."""
        if self._reduction is not None:
            reduction = self._reduction
            self.flat.grads.keep_grad(self._ended(reduction), reduction.landing)

    def wait_due(self, _: Action) -> None:
        """The update can read its gradient."""
        if self._reduction is not None:
            reduction = self._reduction
            due = self._ended(reduction)
            reduction.land()
            self.flat.grads.keep_due(due)

    def _sum(self, action: Action) -> Reduction:
        """What gradients have been summed to so far; at first, where the action's subject has them from."""
        if self._reduction is None:
            self._reduction = self._of_backward() if action.subject == "grad" else self._of_waiting()
        return self._reduction

    def _of_backward(self) -> Reduction:
        fresh = self.flat.grads.open_fresh()
        return Reduction(fresh.memory, self.flat, fresh)

    def _of_waiting(self) -> Reduction:
        source = self.flat.grads.take_grad()
        if source is None:  # no backward reached this buffer here, but others may wait for our part
            numel, dtype = self.flat.grads.grad_span.numel, torch_dtype(self.flat.spec.table.grad.dtype)
            source = self.flat.grads.sum_memory(numel, dtype).zero_()
        return Reduction(source, self.flat, None)

    def _dtype_of(self, action: Action, reduction: Reduction) -> torch.dtype:
        return torch_dtype(action.dtype) if action.dtype != "-" else reduction.current.dtype

    def _ended(self, reduction: Reduction) -> Tensor:
        """What a reduction has come to, once its last step is done."""
        reduction.wait()
        self._reduction = None
        reduction.release()
        return reduction.current

    def finish_reduction(self) -> None:
        """Bring a reduction that the program left under way to its end."""
        while self._reduction is not None:
            started = self._reduction.num_started
            if started == len(self._chain):
                self.wait_grad(self._chain[-1])
            else:
                self.wait_sum(self._chain[started])
                self.method(self._chain[started])()

    def keep_due(self) -> None:
        """Where gradients wait as the update needs them, nothing moves."""
        grad = self.flat.grads.take_grad()
        if grad is not None:
            self.flat.grads.keep_due(grad)

    def abandon(self) -> None:
        """Wait for whatever is on its way and forget it. What will never come has been complained about already."""
        if self._arriving is not None:
            with suppress(CommError, TierError):
                self._arriving.wait()
            self._arriving = None
        if self.flat.disk is not None:
            self.flat.disk.abandon_reads()
        if self._reduction is not None:
            with suppress(CommError):
                self._reduction.wait()
            self._reduction.release()
            if self._reduction.landing is not None:
                self.flat.host.give_back(self._reduction.current, self._reduction.landing)
            self._reduction = None
        self._spread = ()
        if self.flat.state is GATHERING:
            self.flat.state = READY

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
