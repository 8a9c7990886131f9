"""The gradients of one flat buffer on one rank: as a backward leaves them, reduced, and as the update reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from shardwise.comm import add_to, put_scaled
from shardwise.memory.dtypes import torch_dtype
from shardwise.memory.fresh import FreshGradients, LooseGradients, OwnChunk, OwnPlaces, place
from shardwise.memory.grad_buffer import GradBuffer, Memory, OwnMemory
from shardwise.memory.host_memory import Copied, Copy, HostMemory
from shardwise.plan.placement import Slot, Span
from shardwise.program import Buffer, FlatSpec, fills_grad, reduce_due, stay_as_made
from shardwise.system.even_parts import even_start
from shardwise.system.pages import bring
from shardwise.system.telemetry import ByteMeter
from shardwise.system.torch_private import DisableTorchFunctionSubclass

Tensor = torch.Tensor


class FlatGradients:
    """Holds gradients from a backward to the call that zeroes them.

    A backward leaves them in `fresh`, which is as long as the flat buffer. Once reduced they wait in `grad`, and for
    the update in `due`: this rank's ranges of those two rows. Where nothing sums or moves them they are
    `LooseGradients` from the backward to the update, unless somebody asks for the tensor `due`.

    [Note: sums are not rounded] What one backward leaves is in the dtype that is sent. What several leave before it is
    sent, in a pipeline or inside `no_sync`, is added in that in which gradients wait, which is fp32 beside bf16: eight
    micro-batches that were added in bf16 lost more than the wire does, once for each of them.
    """

    def __init__(
        self,
        spec: FlatSpec,
        slots: Sequence[Slot],
        coordinate: Mapping[str, int],
        meter: ByteMeter,
        device: torch.device,
    ) -> None:
        self.spec = spec
        self.grad_span = spec.layout.span(spec.table.grad.shard, coordinate)
        self.own_memory = OwnMemory(device)
        self.memory: Memory = self.own_memory
        """Memory for what is sent in place."""
        self.fresh: FreshGradients | LooseGradients | None = None
        self.grad: Tensor | None = None
        self._due: Tensor | LooseGradients | None = None
        self.touched_here = [False] * len(slots)
        """Which parameters have a gradient on this rank."""
        self.touched_anywhere = [False] * len(slots)
        """Which have one on any rank, by the last agreement."""
        self._slots = tuple(slots)
        self._meter = meter
        self._device = device
        self.host: HostMemory | None = None
        """Memory for what waits on the host; set before the first backward, if the table has a row there."""
        self._landing: Copy = Copied()
        """The copy of `grad` to the host."""
        self._squares: tuple[Tensor, int, list[Tensor]] | None = None
        """See [Note: squares on the device]: a copy on the host, its version, and what was computed of its source."""
        self._due_span = spec.layout.span(spec.table.optim.shard, coordinate)
        self.have_come = False
        """Whether any gradient has come since this was set to false; used when several backwards are reduced
        together."""
        self.summed: list[Tensor | None] = [None] * len(slots)
        """Gradients that autograd adds to: see [Note: sums by autograd] in `fresh.py`."""
        self._summing: list[Tensor] = []
        """The parameters of which they are the `grad`."""
        self._num_slots = self.num_to_come = len(slots)
        """The number of parameters, and of those whose gradient is still to come in the running backward."""
        self.are_left: Callable[[], bool] = lambda: False
        """Whether the running backward leaves its gradients unreduced, so that those of others are added to them."""
        self._has_come = [False] * len(slots)
        """Which parameters' gradients have come in it."""
        self._copies = [spec.copies_of_due * (1 if slot.box is None else slot.box.copies) for slot in self._slots]
        self.copies_of_due = _copies_of(self._copies, (0, 1), self._slots, self._due_span)
        """Ranges of `due`, each with the number of ranks of the whole mesh that hold its elements. Of summands, see
        [Note: norms of summands] in `program/spec.py`."""
        self.squared_of_due = _copies_of(*_shared_copies(spec, self._copies, coordinate), self._slots, self._due_span)
        """Ranges of `due` whose squares this rank takes, each with the number of ranks that take the same.

        [Note: each takes its share] Ranks along replica axes that have the same sum would each read all of it, and
        divide by their number. Each takes the squares of its share instead: with `ddp` on two ranks of one host (34 M
        parameters, fp32) that was 11 ms of a step, as much as to add the gradients up, and it is the more the more
        ranks there are. Copies along model axes are made by each rank for itself, and may differ in their last bits.
        """
        due_spans = [slot.span.overlap(self._due_span).within(self._due_span) for slot in self._slots]
        self._due_pieces: dict[int, Tensor] = {}
        """Views of `due`, the part of each parameter, once one of them was asked for."""
        self._mine = [index for index, span in enumerate(due_spans) if span.numel]
        self._cuts = _cuts([due_spans[index] for index in self._mine], self._due_span.numel)
        self._prepare()

    def _prepare(self) -> None:
        """How gradients are taken in: cast, averaged over the ranks, each to its place."""
        spec, table = self.spec, self.spec.table
        waiting: tuple[Buffer, ...] = ("grad", "due")
        self._below = frozenset(buffer for buffer in waiting if spec.tier_of(buffer) != "device")
        self._waits_as_fresh = not reduce_due(spec)
        self._wire = torch_dtype(table.grad_wire.dtype)
        self._fresh_dtype = torch_dtype(table.grad.dtype if self._waits_as_fresh else spec.fresh.dtype)
        self._added_dtype = torch.promote_types(self._fresh_dtype, torch_dtype(table.grad.dtype))
        computed = torch_dtype(table.compute)
        is_as_computed = self._fresh_dtype == computed
        is_wide = self._fresh_dtype == torch.promote_types(self._fresh_dtype, computed)
        self._is_widened = self._device.type == "cpu" and is_wide and not is_as_computed
        self._add: Callable[..., object] = Tensor.add_ if is_as_computed else add_to
        self._is_loose = self._device.type == "cpu" and stay_as_made(spec)
        self._unweighed = 1.0
        for axis in spec.mesh.replica_axes:  # experts have seen the tokens of every rank along `split_axes`
            self._unweighed /= spec.mesh.size(axis)
        self.weigh(1.0)
        grad_dtype = torch_dtype(table.grad.dtype)
        self._grad_buffer = (
            GradBuffer(self.grad_span.numel, grad_dtype, self._meter) if spec.keeps_grad_buffer else None
        )
        self._kind_of_due = "grad" if self._grad_buffer is None else "working"
        """How the meter counts `due`: where there is a gradient buffer, anything outside it is temporary."""
        self._fills_grad = fills_grad(spec)
        self._places = [place(slot) for slot in self._slots]
        self._gaps = _gaps(self._slots, spec.numel)
        self._in_fresh = [False] * len(self._slots)
        self.own_span: Span | None = None
        """The chunk that lies where its sum is made, if one does: see [Note: own chunks] in `fresh.py`."""
        self._own_places: OwnPlaces | None = None
        self._kept_fresh: FreshGradients | None = None
        self._used_fresh: FreshGradients | None = None
        """One with freed bytes, for a later backward; see [Note: memory for fresh gradients is used again]."""

    def weigh(self, weight: float) -> None:
        """Set the weight of gradients that come from here on; see [Note: weights] in `comm/weighing.py`."""
        self.end_sums()
        self._scale = self._unweighed * weight
        self._is_scaled = self._scale not in (0.0, 1.0)
        """Whether gradients are multiplied by it: else they are taken as they are, or count for nothing."""
        self._factor = _factor(self._scale, torch_dtype(self.spec.table.compute))

    # -- what a backward leaves -------------------------------------------------------------------------

    def arrive(self, index: int, grad: Tensor, is_last: bool = True) -> bool:
        """Store the gradient of parameter `index` among the fresh ones, cast and averaged over ranks in one pass.

        `is_last`: no further gradient of this parameter comes in this backward. Returns whether all have come.

        [Note: once for each gradient] With small parameters a step spends as long on calls from Python as on sums. So
        this calls nothing but the one operation, of which the plainest is taken: 0.7 us for a copy of 64 elements and
        1.1 for a product, 1.0 for a sum and 1.3 for one with a factor.
        """
        fresh = self.fresh or self._opened_fresh()
        view = fresh.views[index]
        if view is None:
            if isinstance(fresh, LooseGradients):
                fresh.views[index] = self._left(grad)
            else:
                self._take_in_parts(fresh, index, grad)
        elif self._in_fresh[index]:
            if self._is_scaled:
                self._add(view, grad, alpha=self._scale)
            elif self._scale:
                self._add(view, grad)
        else:
            if fresh.is_new:
                bring(view, to_write=True)
            if self._is_widened and self._is_scaled:
                put_scaled(view, grad, self._scale)
            elif self._is_scaled:
                torch.mul(grad, self._factor, out=view)
            elif self._scale:
                view.copy_(grad)
            else:  # a stand-in's gradient counts for nothing, whatever it is: nan times zero is nan
                view.zero_()
        self._in_fresh[index] = self.touched_here[index] = self.have_come = True
        if is_last and not self._has_come[index]:
            self._has_come[index] = True
            self.num_to_come -= 1
        return not self.num_to_come

    def leave(self, index: int, grad: Tensor, param: Tensor) -> bool:
        """Whether `grad`, which has arrived, may be that of `param`, for autograd to add to: see [Note: sums by
        autograd] in `fresh.py`. Only until `end_sums`."""
        if self._scale != 1.0 or not isinstance(self.fresh, LooseGradients) or self.fresh.views[index] is not grad:
            return False
        self.summed[index] = grad
        self._summing.append(param)
        return True

    def count(self, index: int, is_last: bool) -> bool:
        """As `arrive`, of a gradient that autograd has added to that in `summed`."""
        self.have_come = True
        if is_last and not self._has_come[index]:
            self._has_come[index] = True
            self.num_to_come -= 1
        return not self.num_to_come

    def end_sums(self) -> None:
        """Parameters have no `grad` of autograd's any more."""
        with DisableTorchFunctionSubclass():  # at rest `grad` is a property
            for param in self._summing:
                param.grad = None
        self._summing = []
        self.summed[:] = [None] * self._num_slots

    def _take_in_parts(self, fresh: FreshGradients, index: int, grad: Tensor) -> None:
        """Store the gradient of a parameter that lies in two chunks; see [Note: own chunks] in `fresh.py`."""
        parts = fresh.parts(index)
        for view, part in zip(parts, grad.reshape(-1).split_with_sizes([len(one) for one in parts]), strict=True):
            if fresh.is_new and not self._in_fresh[index]:
                bring(view, to_write=True)
            if self._scale == 0.0:
                if not self._in_fresh[index]:
                    view.zero_()
            elif self._in_fresh[index]:
                self._add(view, part, alpha=self._scale)
            else:
                torch.mul(part, self._factor, out=view)

    def _left(self, grad: Tensor) -> Tensor:
        """`grad` itself, as [Note: gradients that stay] has it, unless it has to be another one."""
        if self._scale == 0.0:
            grad = torch.zeros_like(grad)
        elif self._scale != 1.0:
            grad = grad * self._factor
        return grad.to(self._fresh_dtype).contiguous()

    def _opened_fresh(self) -> FreshGradients | LooseGradients:
        """A place for fresh gradients. New memory is undefined, but zero between parameters."""
        if self.fresh is None:
            self.fresh = fresh = self._new_fresh()
            for gap in self._gaps:
                fresh.zero(gap)
            self._meter.hold("grad" if self._waits_as_fresh else "working", self._bytes_of(fresh))
        return self.fresh

    def _bytes_of(self, fresh: FreshGradients | LooseGradients) -> int:
        """Those that are not in the gradient buffer."""
        if fresh is self._kept_fresh:
            return 0
        return fresh.nbytes if isinstance(fresh, LooseGradients) else self.bytes_beside_grad_buffer(fresh.memory)

    def _new_fresh(self) -> FreshGradients | LooseGradients:
        if self._is_loose:
            return LooseGradients(self._places, self.spec.numel, self._fresh_dtype, self._device)
        dtype = self._added_dtype if self.are_left() else self._fresh_dtype
        memory = self.memory if dtype == self._wire else self.own_memory
        if self._grad_buffer is not None and self._fills_grad:
            kept = self._grad_buffer.take(memory)
            if kept is not None:
                self._kept_fresh = self._kept_fresh or FreshGradients(kept, self._places)
                return self._kept_fresh
        used, self._used_fresh = self._used_fresh, None
        if used is not None and used.memory.dtype == dtype:
            used.allocate()
            return used
        memory = self.own_memory if self._waits_as_fresh else memory
        own = None
        if self.own_span is not None and dtype == self._fresh_dtype == self._wire:
            if self._own_places is None or self._own_places.span != self.own_span:
                self._own_places = OwnPlaces.of(self._places, self.own_span)
            own = OwnChunk(self._own_places, self.sum_memory(self.own_span.numel, dtype))
        is_new = own is not None and not self.spec.resident  # else memory is kept from step to step
        return FreshGradients(memory.buffer(self.spec.numel, dtype), self._places, own, is_new=is_new)

    def take_back(self, fresh: FreshGradients) -> None:
        """`fresh` has been summed elsewhere and is no longer read: a later backward uses its memory again."""
        if not self.is_in_grad_buffer(fresh.memory) and fresh.free():
            self._used_fresh = fresh

    def expect_all(self) -> None:
        """A new backward begins: all its gradients are still to come."""
        if self.num_to_come < self._num_slots:
            self.num_to_come = self._num_slots
            self._has_come = [False] * self._num_slots

    def has_fresh(self) -> bool:
        """Whether there are fresh gradients that should have been reduced by now."""
        return self.fresh is not None and not self._waits_as_fresh

    def open_fresh(self) -> FreshGradients:
        """What the backward left, ready to be reduced; zeros if it left nothing here."""
        self._opened_fresh()
        fresh = self.close_fresh()
        assert isinstance(fresh, FreshGradients)
        return fresh

    def fresh_gradients(self) -> list[tuple[Slot, Tensor]]:
        """What has come of a backward that has not been reduced, by parameter."""
        if self.fresh is None:
            return []
        fresh = [(slot, self.fresh.gradient(index)) for index, slot in enumerate(self._slots) if self._in_fresh[index]]
        return [(slot, gradient) for slot, gradient in fresh if gradient is not None]

    def close_fresh(self) -> FreshGradients | LooseGradients | None:
        """What the backward left, with zeros for parameters that it did not reach."""
        if self._summing:
            self.end_sums()
        fresh, self.fresh = self.fresh, None
        if fresh is None:
            return None
        if not all(self._in_fresh):
            for slot, arrived in zip(self._slots, self._in_fresh, strict=True):
                if not arrived:
                    fresh.zero(slot.span)
        self._in_fresh = [False] * len(self._slots)
        self._meter.drop("grad" if self._waits_as_fresh else "working", self._bytes_of(fresh))
        return fresh

    # -- where they wait --------------------------------------------------------------------------------

    def sum_memory(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory for a sum of `numel` elements: the gradient buffer, if it fits and is free."""
        if self._grad_buffer is not None and self._grad_buffer.fits(numel, dtype):
            kept = self._grad_buffer.take(self.own_memory)
            if kept is not None:
                return kept
        return self.own_memory.lasting(numel, dtype)

    def is_in_grad_buffer(self, tensor: Tensor) -> bool:
        """Whether `tensor` lies in the gradient buffer, where sums may be made in place."""
        return self._grad_buffer is not None and self._grad_buffer.has(tensor)

    def bytes_beside_grad_buffer(self, tensor: Tensor) -> int:
        """The bytes of `tensor` that are not in the gradient buffer."""
        kept = self._grad_buffer
        return tensor.nbytes if kept is None or not kept.has(tensor) else 0

    def keep_grad(self, reduced: Tensor, landing: Copy | None) -> None:
        """Add a micro-batch's reduced gradient to the one that waits for the step. `landing` is its copy to the host,
        if it waits there."""
        if self.grad is None:
            self.grad = reduced
            self._landing = landing or Copied()
            self._hold("grad", "grad", reduced)
            return
        self._landing.land()
        if landing is not None:
            landing.land()
        self.grad.add_(reduced)
        self._give_back("grad", reduced)

    def take_grad(self) -> Tensor | None:
        """Hand over what has waited for the step; it is the caller's from here on."""
        if self._waits_as_fresh:
            fresh = self.close_fresh()
            return fresh.memory if isinstance(fresh, FreshGradients) else None
        grad, self.grad = self.grad, None
        if grad is not None:
            self._landing.land()
            self._drop("grad", "grad", grad)
        return grad

    def hand_over(self) -> None:
        """What waits has the form that the update needs: it is due from here on."""
        if not self._is_loose:
            if (grad := self.take_grad()) is not None:
                self.keep_due(grad)
            return
        fresh = self.close_fresh()
        if not isinstance(fresh, LooseGradients):
            return
        if self._due is None:
            self._due = fresh
            self._meter.hold(self._kind_of_due, fresh.nbytes)
            return
        for index, view in enumerate(fresh.views):
            if view is not None and (own := self.due_piece(index)) is not None:
                own.add_(view.view(-1))

    @property
    def has_due(self) -> bool:
        """Whether the update has something to read."""
        return self._due is not None

    @property
    def due(self) -> Tensor | None:
        """What the update reads, in one tensor; `None` if there is nothing. Loose gradients are joined, and what
        `due_piece` has returned of them does not belong to it."""
        if isinstance(self._due, LooseGradients):
            self._due = self._due.joined()
        return self._due

    def due_ranges(self) -> list[tuple[list[Tensor], float]]:
        """What the update reads, apart from zeros between parameters, each with the number of ranks of the whole mesh
        that hold its elements."""
        due = self._due
        if not isinstance(due, LooseGradients):
            return [] if due is None else [([due[span.as_slice]], copies) for span, copies in self.copies_of_due]
        ranges: dict[float, list[Tensor]] = {}
        for copies, own in zip(self._copies, due.views, strict=True):
            if own is not None:
                ranges.setdefault(copies, []).append(own)
        return [(tensors, copies) for copies, tensors in ranges.items()]

    def squared_ranges(self) -> list[tuple[list[Tensor], float]]:
        """As `due_ranges`, of what this rank takes the squares: see [Note: each takes its share]."""
        due = self._due
        if isinstance(due, LooseGradients):
            return self.due_ranges()
        return [] if due is None else [([due[span.as_slice]], copies) for span, copies in self.squared_of_due]

    def keep_due(self, due: Tensor) -> None:
        """Store what the update will read; a second one before the update is added to the first."""
        if self._due is None:
            self._due = due
            self._hold("due", self._kind_of_due, due)
        elif (own := self.due) is not None:
            own.add_(due)
            self._give_back("due", due)

    def note_squares(self, copy: Tensor, source: Tensor) -> None:
        """`copy`, on the host, is being made of `source`, on the device.

        [Note: squares on the device] The norm of all gradients needs the squares of each range of `squared_of_due`.
        The device takes them while it has the gradients: a step of 1.07 G parameters took 1.04 s with the squares taken
        by 16 cores of the host, and 0.65 s since (an H200, docs/gpus.md). Whoever changes the copy afterwards, such as
        a further micro-batch that is added, changes its version, and then the squares are the host's to take.
        """
        dtype = torch.promote_types(source.dtype, torch.float32)
        norms = [torch.linalg.vector_norm(source[span.as_slice], dtype=dtype) for span, _ in self.squared_of_due]
        self._squares = copy, copy._version, [norm.square() for norm in norms]

    def noted_squares(self) -> Sequence[Tensor] | None:
        """Those of `due`, by the ranges of `squared_of_due`, if the device has taken them and they hold still."""
        if self._squares is None:
            return None
        copy, version, squares = self._squares
        return squares if copy is self._due and copy._version == version else None

    def make_due(self) -> None:
        """Make a gradient of zeros for the update to read."""
        dtype, numel = torch_dtype(self.spec.table.due.dtype), self._due_span.numel
        if "due" in self._below:
            self.keep_due(self.require_host().buffer(numel, dtype).zero_())
        else:
            self.keep_due(torch.zeros(numel, dtype=dtype, device=self._device))

    def require_host(self) -> HostMemory:
        """The host's memory; only if the table has a row there."""
        assert self.host is not None
        return self.host

    def _hold(self, buffer: Buffer, kind: str, tensor: Tensor) -> None:
        """Count what lies on the device; `HostMemory` counts its own."""
        if buffer not in self._below and (num_bytes := self.bytes_beside_grad_buffer(tensor)):
            self._meter.hold(kind, num_bytes)

    def _drop(self, buffer: Buffer, kind: str, tensor: Tensor) -> None:
        if buffer not in self._below and (num_bytes := self.bytes_beside_grad_buffer(tensor)):
            self._meter.drop(kind, num_bytes)

    def _give_back(self, buffer: Buffer, tensor: Tensor) -> None:
        """`tensor` is no longer read."""
        if buffer in self._below:
            self.require_host().give_back(tensor)

    def due_piece(self, index: int) -> Tensor | None:
        """This rank's elements of the gradient of parameter `index`, as the update reads them; `None` if there is
        none."""
        due = self._due
        if isinstance(due, LooseGradients):
            own = due.views[index]
            return due.made(index).view(-1) if own is None else own.view(-1)
        return None if due is None else self._pieces_of(due)[index]

    def due_pieces(self, indices: Sequence[int]) -> list[Tensor | None]:
        """The same for several, each of which has a gradient on some rank: see [Note: once for each gradient]. Where it
        is others alone that a backward has reached, this rank's summands are zeros."""
        if self._due is None:
            self.make_due()
        due = self._due
        if isinstance(due, LooseGradients) or due is None:
            return [self.due_piece(index) for index in indices]
        return list(map(self._pieces_of(due).__getitem__, indices))

    def _pieces_of(self, due: Tensor) -> dict[int, Tensor]:
        if not self._due_pieces:  # all in one call: a slice takes as long as many of them
            self._due_pieces = dict.fromkeys(range(len(self._slots)), due[:0])
            self._due_pieces.update(zip(self._mine, due.split_with_sizes(self._cuts)[1::2], strict=True))
        return self._due_pieces

    def note(self, index: int, *, has_one: bool) -> None:
        """Record for all ranks whether parameter `index` has a gradient, where they know it without an agreement."""
        self.touched_here[index] = self.touched_anywhere[index] = has_one

    def drop(self) -> None:
        """Drop every gradient, wherever it waits."""
        self.close_fresh()
        grad = self.take_grad()
        if grad is not None:
            self._give_back("grad", grad)
        if isinstance(self._due, LooseGradients):
            self._meter.drop(self._kind_of_due, self._due.nbytes)
        elif self._due is not None:
            self._drop("due", self._kind_of_due, self._due)
            self._give_back("due", self._due)
        self._due = None
        self._due_pieces = {}
        self._squares = None
        if self._grad_buffer is not None:
            self._grad_buffer.leave()
        self.touched_here = [False] * len(self._slots)
        self.touched_anywhere = [False] * len(self._slots)

    def let_go(self) -> None:
        """Free all memory, also what is kept for later gradients, of which there will be none."""
        self.drop()
        self._grad_buffer = self._kept_fresh = self._used_fresh = None


def _copies_of(
    copies_of_slots: Sequence[float], share: tuple[int, int], slots: Sequence[Slot], due: Span
) -> tuple[tuple[Span, float], ...]:
    """Of one `share` of `due`, its number and that of all. Neighbouring slots that lie on equally many ranks form one
    range; the zeros between parameters may fall in either."""
    number, num_shares = share
    own = Span(*(even_start(due.numel, num_shares, part) for part in (number, number + 1)))
    found: list[tuple[Span, float]] = []
    for slot, copies in zip(slots, copies_of_slots, strict=True):
        mine = slot.span.overlap(due).within(due).overlap(own)
        if mine.numel and found and found[-1][1] == copies:
            found[-1] = (Span(found[-1][0].start, mine.stop), copies)
        elif mine.numel:
            found.append((mine, copies))
    return tuple(found)


def _shared_copies(
    spec: FlatSpec, copies_of_slots: Sequence[float], coordinate: Mapping[str, int]
) -> tuple[list[float], tuple[int, int]]:
    """What is left of the copies of slots if replicas share in their squares, and this rank's share. Summands are no
    copies."""
    number, num_shares = 0, 1
    for axis in () if spec.table.due.partial else spec.table.axes:
        if axis not in spec.table.optim.shard:
            size = spec.mesh.size(axis)
            number, num_shares = number * size + coordinate[axis], num_shares * size
    return [copies / num_shares for copies in copies_of_slots], (number, num_shares)


def _cuts(spans: Sequence[Span], numel: int) -> list[int]:
    """The sizes of `spans`, which follow each other in `numel` elements, each after that of what lies before it; and
    of what comes last."""
    ends = [0, *(span.stop for span in spans)]
    sizes = [size for end, span in zip(ends, spans, strict=False) for size in (span.start - end, span.numel)]
    return [*sizes, numel - ends[-1]]


def _factor(scale: float, dtype: torch.dtype) -> Tensor | float:
    """The factor for gradients of `dtype`, equal to `scale` to the bit: a tensor if it can represent that exactly.

    For a Python number torch makes a tensor in every call: 2.8 us instead of 1.2 for a gradient of 256 elements. In
    fp32 the number is rounded before it is used anyway; in bf16 and fp16 it is not, and only powers of two are exact.
    """
    factor = torch.tensor(scale, dtype=dtype, device="cpu")
    return factor if dtype == torch.float32 or factor.item() == scale else scale


def _gaps(slots: Sequence[Slot], numel: int) -> list[Span]:
    """The elements between parameters, and after the last. They are sent and summed, so they must be zero."""
    starts = [slot.start for slot in slots[1:]] + [numel]
    gaps = [Span(slot.span.stop, start) for slot, start in zip(slots, starts, strict=True)]
    return [gap for gap in gaps if gap.numel]
