"""The moves of one flat buffer's gradients: `grad` is the result of a backward, `due` is reduced during the step from
gradients that have waited.

A reduction casts: it reads the dtype that was sent and makes the row's. A widening cast after it would keep the
rounding that the wide dtype is there to avoid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress

import torch

from shardwise.comm import Communicator, Group, Work
from shardwise.errors import CommError
from shardwise.memory import Flat, torch_dtype
from shardwise.plan.placement import Span, SumOfCodes
from shardwise.program import (
    LEAST_APART_BYTES,
    Action,
    Factored,
    Subject,
    Verb,
    adds_in_place,
    reduce_due,
    step_gradients,
    sums_own_chunk_apart,
)
from shardwise.runtime.codec import Codec, EncodedAllReduce, EncodedReduceScatter, codec_for
from shardwise.runtime.low_rank import FactoredSum, FactorMessages
from shardwise.runtime.reduction import Reduction, staging_bytes

Tensor = torch.Tensor


class GradMover:
    """One flat buffer's gradients on this rank, with at most one reduction under way."""

    def __init__(
        self, flat: Flat, collectives: Communicator, groups: Mapping[str, Group], messages: FactorMessages
    ) -> None:
        self.flat = flat
        self._collectives = collectives
        self._groups = groups
        self._name = flat.name
        self._wire = torch_dtype(flat.spec.table.grad_wire.dtype)
        self._codecs: dict[str, Codec] = {}
        """By the axis along which they are sent."""
        self._reduction: Reduction | None = None
        self._messages = messages
        self._factored_sum: FactoredSum | None = None
        self._chain = reduce_due(flat.spec)
        self.waits_where_due = flat.spec.trainable and not step_gradients(flat.spec)
        """Whether gradients wait in the form that the update needs, so that nothing moves at the step."""
        flat.grads.own_span = self._own_span()

    def _own_span(self) -> Span | None:
        """This rank's chunk of the first sum, if it may lie apart: see [Note: own chunks] in `memory/fresh.py`. It is
        not worth its calls where there is little of it; nor if this rank's summand comes third in a sum or later, and
        would have to be kept until then."""
        spec = self.flat.spec
        if not sums_own_chunk_apart(spec, LEAST_APART_BYTES):
            return None
        group = self._groups[self._chain[0].over]
        if group.index > 1 or not self._collectives.reads_own_apart(group):
            return None
        return Span.nth(group.index, spec.numel // len(group.ranks))

    def moves(self) -> dict[tuple[Verb, Subject], Callable[[Action], None]]:
        """The method for each action on gradients. What reduces the result of a backward reduces `due` alike: `_sum`
        knows where the gradients come from. Made anew for each caller, like `ParamMover.moves`."""
        return {
            ("reduce_scatter", "grad"): self.reduce_scatter_grad,
            ("all_reduce", "grad"): self.all_reduce_grad,
            ("project", "grad"): self.project_grad,
            ("restore", "grad"): self.restore_grad,
            ("cast", "grad"): self.cast_grad,
            ("evict", "grad"): self.evict_grad,
            ("wait", "sum"): self.wait_sum,
            ("wait", "grad"): self.wait_grad,
            ("reduce_scatter", "due"): self.reduce_scatter_grad,
            ("all_reduce", "due"): self.all_reduce_grad,
            ("slice", "due"): self.slice_due,
            ("cast", "due"): self.cast_grad,
            ("evict", "due"): self.evict_grad,
            ("wait", "due"): self.wait_due,
        }

    def reduce_scatter_grad(self, action: Action) -> None:
        """Start a sum over one axis of which each rank gets its part."""
        reduction, group = self._sum(action), self._groups[action.over]
        source, dtype = reduction.current, self._dtype_of(action, reduction)
        numel, flat = source.numel() // len(group.ranks), self.flat
        is_kept, is_same_dtype = flat.grads.is_in_grad_buffer(source), source.dtype == dtype
        if adds_in_place(action.effect, is_same_dtype=is_same_dtype, is_kept=is_kept):
            out = source[group.index * numel : (group.index + 1) * numel]
        else:
            out = flat.grads.sum_memory(numel, dtype) if reduction.own is None else reduction.own
        if action.codes:
            codec = self._codec_along(action.over)
            work: Work = EncodedReduceScatter(codec, self._collectives, out, source, group, self._name)
        else:
            chunks = reduction.chunks(len(group.ranks))
            work = self._collectives.reduce_scatter(out, source, group, self._wire, self._name, chunks)
        reduction.start(out, work, staging_bytes(action, source, len(group.ranks), self._wire))

    def all_reduce_grad(self, action: Action) -> None:
        """Start a sum over one axis of which each rank gets all."""
        reduction, group = self._sum(action), self._groups[action.over]
        source, dtype = reduction.current, self._dtype_of(action, reduction)
        is_kept, is_same_dtype = self.flat.grads.is_in_grad_buffer(source), source.dtype == dtype
        can_stay = is_kept or not self._collectives.is_buffer_scarce
        if can_stay and adds_in_place(action.effect, is_same_dtype=is_same_dtype, is_kept=is_kept):
            out = source
        else:
            out = self.flat.grads.sum_memory(source.numel(), dtype)
        if action.codes:
            codec, way = self._codec_along(action.over), SumOfCodes.parse(action.verb, action.codes)
            work: Work = EncodedAllReduce(codec, way, self._collectives, out, source, group, self._name)
        else:
            work = self._collectives.all_reduce(out, source, group, self._wire, self._name)
        reduction.start(out, work, staging_bytes(action, source, len(group.ranks), self._wire))

    def _codec_along(self, axis: str) -> Codec:
        """Made when first needed, because only then there is memory for what it loses."""
        if axis not in self._codecs:
            codes = self.flat.spec.table.grad_codes
            assert codes is not None
            self._codecs[axis] = codec_for(codes, self.flat.device, self.flat.losses.get(axis))
        return self._codecs[axis]

    def project_grad(self, action: Action) -> None:
        """The first half of a sum whose matrices are sent as factors: those of this buffer join a message."""
        reduction = self._sum(action)
        work = self._factored().project(reduction.current, self._groups[action.over])
        reduction.start(reduction.current, work, Factored(self.flat.spec).num_bytes(action.verb))

    def restore_grad(self, action: Action) -> None:
        """The second half. Each rank gets all of the sum."""
        reduction = self._sum(action)
        source = out = reduction.current
        if not self.flat.grads.is_in_grad_buffer(source) and self._collectives.is_buffer_scarce:
            out = self.flat.grads.sum_memory(source.numel(), source.dtype)
        work = self._factored().restore(source, out, self._groups[action.over])
        reduction.start(out, work, Factored(self.flat.spec).num_bytes(action.verb))

    def _factored(self) -> FactoredSum:
        if self._factored_sum is None:
            assert self.flat.factors is not None
            self._factored_sum = FactoredSum(self.flat, self.flat.factors, self._messages)
        return self._factored_sum

    def cast_grad(self, action: Action) -> None:
        reduction = self._sum(action)
        reduction.finish(reduction.current.to(self._dtype_of(action, reduction)))

    def evict_grad(self, action: Action) -> None:
        """Start to copy a sum to the host. What is due as it comes there has been squared before."""
        reduction, host = self._sum(action), self.flat.host
        out = host.buffer(reduction.current.numel(), reduction.current.dtype)
        landing = host.evict(out, reduction.current)
        if host.is_beside_a_device and (action.subject == "due" or self.waits_where_due):
            self.flat.grads.note_squares(out, reduction.current)
        reduction.leave(out, landing)

    def slice_due(self, action: Action) -> None:
        """Keep this rank's part of a sum that every rank has."""
        reduction, group = self._sum(action), self._groups[action.over]
        reduction.finish(reduction.current.chunk(len(group.ranks))[group.index].clone())

    def wait_sum(self, _: Action) -> None:
        """Wait for a sum over some of the axes."""
        if self._reduction is not None:
            self._reduction.wait()

    def wait_grad(self, _: Action) -> None:
        """Wait for the gradient of a backward, and keep it for the step."""
        if self._reduction is not None:
            reduction = self._reduction
            self.flat.grads.keep_grad(self._ended(reduction), reduction.landing)

    def wait_due(self, _: Action) -> None:
        """Wait for the gradient that the update reads."""
        if self._reduction is not None:
            reduction = self._reduction
            due = self._ended(reduction)
            reduction.land()
            self.flat.grads.keep_due(due)

    def _sum(self, action: Action) -> Reduction:
        """The running reduction; if there is none, a new one from the gradients that the action's subject names."""
        if self._reduction is None:
            self._reduction = self._of_backward() if action.subject == "grad" else self._of_waiting()
        return self._reduction

    def _of_backward(self) -> Reduction:
        fresh = self.flat.grads.open_fresh()
        return Reduction(fresh.memory, self.flat, fresh)

    def _of_waiting(self) -> Reduction:
        source = self.flat.grads.take_grad()
        if source is None:  # no backward reached this buffer here, but other ranks may need our part
            numel, dtype = self.flat.grads.grad_span.numel, torch_dtype(self.flat.spec.table.grad.dtype)
            source = self.flat.grads.sum_memory(numel, dtype).zero_()
        return Reduction(source, self.flat, None)

    def _dtype_of(self, action: Action, reduction: Reduction) -> torch.dtype:
        return torch_dtype(action.dtype) if action.dtype != "-" else reduction.current.dtype

    def _ended(self, reduction: Reduction) -> Tensor:
        """Wait for the last step of a reduction, and return its result."""
        reduction.wait()
        self._reduction = None
        reduction.release()
        return reduction.current

    def finish_reduction(self) -> None:
        """Finish a reduction that the program left under way."""
        while self._reduction is not None:
            started = self._reduction.num_started
            if started == len(self._chain):
                self.wait_grad(self._chain[-1])
            else:
                self.wait_sum(self._chain[started])
                action = self._chain[started]
                self.moves()[action.verb, action.subject](action)

    def keep_due(self) -> None:
        """Hand over gradients that wait in the form that the update needs."""
        self.flat.grads.hand_over()

    def abandon(self) -> None:
        """Wait for the reduction under way and forget it. A `CommError` has been reported already."""
        if self._reduction is None:
            return
        self._messages.forget()
        with suppress(CommError):
            self._reduction.wait()
        self._reduction.release()
        if self._reduction.landing is not None:
            self.flat.host.give_back(self._reduction.current, self._reduction.landing)
        self._reduction = None
