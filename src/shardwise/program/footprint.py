"""What a program will hold on one rank: bytes at rest by kind, and the peak of what comes and goes.

These are promises: the runtime counts the same bytes (`engine.memory()`), and a test holds the two together. A backward
takes all the memory for its gradients at its beginning here; the runtime takes it when the first one comes.
Activations are the model's own: they are counted where a rehearsal says what they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.errors import ProgramError
from shardwise.placement import WIDTH, Dtype, Span
from shardwise.program.action import AFTER_STEP, Action, Block, Moment, Program
from shardwise.program.activations import Activations, Mark
from shardwise.program.build import backward_makes, fills_grad, reduce_due
from shardwise.program.effects import Buffer, Effect, adds_in_place
from shardwise.program.matrix_exchange import at, matrix_exchanges
from shardwise.program.spec import FlatSpec, UnitSpec

NUM_KEPT_BLOCKS = 2
"""Blocks of shared memory that wait, with their pages, for the next gradients to be sent from where they lie. As many
are used in turn: one is filled while another is read."""


@dataclass(frozen=True)
class Footprint:
    """Bytes on one rank.

    `param`, `optim` (states and master weights) and `grad` rest between steps or wait for one; `working`
    is what the peak holds beyond them: gathered parameters, gradients on their way, copies for the wire.

    Where `activations` are counted, `grad` and `working` too are what is held at the one moment when everything
    together is most, which is at `peak_at` or on the way to it from the moment before, and `working` has blocks that
    only wait to be used again; `process` is an allowance for what no tensor shows. Else there is neither.
    """

    param: int
    grad: int
    optim: int
    working: int
    activations: int | None = None
    process: int = 0
    peak_at: Moment | None = None

    @property
    def by_kind(self) -> dict[str, int]:
        """Bytes that add up to `total`; without `activations` and `process` where they are not counted."""
        kinds = {"param": self.param, "grad": self.grad, "optim": self.optim, "working": self.working}
        if self.activations is None:
            return kinds
        return {**kinds, "activations": self.activations, "process": self.process}

    @property
    def total(self) -> int:
        return sum(self.by_kind.values())


def footprint(
    units: Sequence[UnitSpec],
    micro_batch: Program,
    step: Program,
    *,
    states_per_param: int = 2,
    num_micro_batches: int = 1,
    coordinate: Mapping[str, int] | None = None,
    activations: Activations | None = None,
    stages: Sequence[tuple[Program, Activations]] = (),
) -> Footprint:
    """What one step, `micro_batch` as often as gradients are accumulated and then `step`, holds on each rank.

    `states_per_param`: tensors of the parameter's size that the optimizer keeps (Adam: 2), where a flat buffer does
    not say how it is updated. Ranks differ where it does: the figures are those of the rank at `coordinate` of the
    mesh, or else the most that any rank holds. `activations` are those of a rehearsal with the order of `micro_batch`.
    Under a pipeline `stages` are the passes of a micro-batch through each stage of the rank, in place of both.
    """
    passes = stages or ((micro_batch, activations),)
    activations = passes[0][1]
    flats = [flat for unit in units for flat in unit.flats]
    param = sum(flat.num_bytes(flat.table.param.shard, flat.table.param.dtype) for flat in flats)
    optim = sum(_optim_bytes(flat, states_per_param, coordinate) for flat in flats if flat.trainable)
    grad = sum(flat.grad_bytes for flat in flats if flat.trainable)
    clock = _Walk(units, coordinate)
    clock.kept = _kept_bytes(flats) if activations is not None and activations.on_cpu else 0
    for _ in range(min(2, num_micro_batches)):  # all later ones hold what the second holds
        for program, counted in passes:
            for block, mark in zip(program, _marks(program, counted), strict=True):
                clock.walk(block, mark)
    for block in step:
        clock.walk(block)
    grad_buffers = sum(flat.grad_bytes for flat in flats if flat.trainable and flat.keeps_grad_buffer)
    if activations is None:
        return Footprint(param, grad, optim, max(0, grad_buffers + clock.peak - grad))
    working = clock.peak - clock.peak_grad - clock.peak_activations
    grad, process = grad_buffers + clock.peak_grad, activations.process_bytes
    return Footprint(param, grad, optim, working, clock.peak_activations, process, clock.peak_at)


def _kept_bytes(flats: Sequence[FlatSpec]) -> int:
    """What ranks of one host keep on the CPU for gradients that are sent; promises do not depend on where ranks run.

    Where parameters come and go nothing is kept through a forward.
    """
    if not all(flat.resident for flat in flats):
        return 0
    sent = [flat for flat in flats if flat.trainable and reduce_due(flat) and not fills_grad(flat)]
    return sum(sorted(flat.numel * WIDTH[flat.table.wire] for flat in sent)[-NUM_KEPT_BLOCKS:])


def _marks(micro_batch: Program, activations: Activations | None) -> tuple[Mark | None, ...]:
    """For each block the mark of its moment."""
    if activations is None:
        return (None,) * len(micro_batch)
    moments = [str(block.moment) for block in micro_batch]
    told = [str(mark.moment) for mark in activations.marks]
    if moments != told:
        raise ProgramError(f"The activations are those of another order: {told}, and not {moments}.")
    return activations.marks


def _optim_bytes(flat: FlatSpec, states_per_param: int, coordinate: Mapping[str, int] | None) -> int:
    states = 0 if flat.updates else states_per_param
    copies = states + (0 if flat.master_is_param else 1)
    return copies * flat.num_bytes(flat.table.optim.shard, flat.table.optim.dtype) + _state_bytes(flat, coordinate)


def _state_bytes(flat: FlatSpec, coordinate: Mapping[str, int] | None) -> int:
    """What the parameters' own updates say is kept for the range at `coordinate`, or for the range with the most."""
    shard = flat.table.optim.shard
    mine = flat.layout.span(shard, coordinate or dict.fromkeys(flat.layout.order, 0))
    kept: dict[int, int] = {}
    for placed in flat.updates if flat.numel else ():
        first, last = placed.span.start // mine.numel, max(0, placed.span.stop - 1) // mine.numel
        for place in range(first, last + 1) if coordinate is None else (mine.start // mine.numel,):
            here = Span(place * mine.numel, (place + 1) * mine.numel)
            span = placed.span.overlap(here).within(placed.span)
            kept[place] = kept.get(place, 0) + placed.update.states.num_bytes(span, flat.table.optim.dtype)
    return max(kept.values(), default=0)


@dataclass(frozen=True, slots=True)
class _Lying:
    """What lies in one buffer: so many bytes, of gradients in `dtype`."""

    num_bytes: int
    dtype: Dtype = "fp32"
    is_kept: bool = False
    """Whether in memory that stays from step to step (`keeps_grad_buffer`), which is no part of what comes and goes."""


_AT_REST: tuple[Buffer, ...] = ("param", "master")
_SENT: tuple[str, ...] = ("fresh", "sum")
_WAITING: tuple[str, ...] = ("grad", "due")


class _Walk:
    """Adds and takes away the bytes that each action brings and frees, and remembers the peak."""

    def __init__(self, units: Sequence[UnitSpec], coordinate: Mapping[str, int] | None) -> None:
        self._flats = {flat.name: flat for unit in units for flat in unit.flats}
        self._by_unit = {unit.name: unit.flats for unit in units}
        self._coordinate = coordinate
        self._matrix_exchanges = matrix_exchanges(tuple(self._flats.values()))
        self._live: dict[tuple[str, str], _Lying] = {}
        """By flat buffer and buffer; `next sum` is one that is on its way from another."""
        self._source: dict[tuple[str, Buffer], Buffer] = {}
        """Of what is on its way, what it is made of."""
        self._taken: set[str] = set()
        """The flat buffers in whose kept memory something lies."""
        self.kept = 0
        """Bytes that stay for gradients that are sent, whether any are or not."""
        self._num_live = self._num_sent = self._num_waiting = 0
        """Bytes that live, and those of them that are gradients to be sent or that wait."""
        self.peak = 0
        self.peak_grad = 0
        self.peak_activations = 0
        self.peak_at: Moment | None = None
        self._activations = 0
        self._moment: Moment | None = None

    def walk(self, block: Block, mark: Mark | None = None) -> None:
        moment = self._moment = block.moment
        if mark is not None:
            self._look(mark.peak_bytes)
            self._activations = mark.live_bytes
        for action in block.actions:
            if action.flat in self._flats:
                self._act(self._flats[action.flat], action)
        if (moment.edge, moment.phase) == ("before", "backward"):
            for flat in self._by_unit[moment.unit]:
                self._leave_gradients(flat)
        if moment == AFTER_STEP:
            for name, buffer in list(self._live):
                if buffer in (*_SENT, *_WAITING):
                    self._drop(name, buffer)
            self._taken.clear()

    def _leave_gradients(self, flat: FlatSpec) -> None:
        """As a backward leaves them: in the dtype of the wire, or as they rest if nothing travels."""
        left = backward_makes(flat)
        if flat.trainable and (flat.name, left) not in self._live:
            dtype = flat.table.wire if left == "fresh" else flat.table.grad.dtype
            num_bytes = flat.numel * WIDTH[dtype]
            is_kept = fills_grad(flat) and self._takes_kept(flat, num_bytes, dtype)
            self._hold(flat.name, left, _Lying(num_bytes, dtype, is_kept))

    def _act(self, flat: FlatSpec, action: Action) -> None:
        effect, name = action.effect, flat.name
        if effect.waits is not None:
            self._arrive(name, effect, effect.waits)
            return
        if effect.makes == "sum":
            self._add_up(flat, action)
        elif effect.makes is not None and effect.makes not in _AT_REST:
            if (name, effect.makes) not in self._live:
                self._hold(name, effect.makes, _Lying(self._num_bytes(flat, effect.makes)))
            for buffer in effect.consumes:
                self._source[name, effect.makes] = buffer
        if effect.makes != "sum":
            for buffer in effect.scratch:
                self._hold(name, buffer, _Lying(self._num_bytes(flat, buffer)))
        for buffer in effect.frees if effect.awaited or not effect.scratch else (*effect.frees, *effect.scratch):
            self._drop(name, buffer)

    def _num_bytes(self, flat: FlatSpec, buffer: Buffer) -> int:
        """Of a buffer that has one size, whatever brings it."""
        match buffer:
            case "full":
                return flat.full_bytes
            case "held":
                return flat.num_bytes(flat.table.held.shard, flat.table.held.dtype)
        over = self._matrix_exchanges[flat.name]
        place = None if self._coordinate is None else over.place(self._coordinate)
        match buffer:
            case "given":
                return at(over.given_bytes, place)
            case "matrix":
                return at(over.whole_bytes, place)
            case "staging":
                return at(over.taken_bytes, place)
            case "work":
                return over.work_bytes(place)
        raise ProgramError(f"{flat.name}: how large its {buffer} is depends on what makes it.")

    def _add_up(self, flat: FlatSpec, action: Action) -> None:
        """One step of a reduction: what it makes, and what arrives and is cast to be sent meanwhile."""
        effect, name, wire = action.effect, flat.name, flat.table.wire
        source: Buffer = "sum" if (name, "sum") in self._live else effect.reads[0]
        lying = self._live.get((name, source), _Lying(0, flat.table.grad.dtype))
        dtype = lying.dtype if action.dtype == "-" else action.dtype
        numel = lying.num_bytes // WIDTH[lying.dtype]
        own = numel // flat.mesh.size(action.over) if effect.cuts else numel
        if effect.sends:
            copies = 1 if lying.dtype == wire else 2
            staged = numel - own if effect.cuts else numel
            self._hold(name, "staging", _Lying(copies * staged * WIDTH[wire], wire))
        num_bytes, is_in_place = (
            own * WIDTH[dtype],
            adds_in_place(effect, is_same_dtype=lying.dtype == dtype, is_kept=lying.is_kept),
        )
        if effect.cuts or not is_in_place:
            is_kept = lying.is_kept if is_in_place else self._takes_kept(flat, num_bytes, dtype)
            self._hold(name, "next sum", _Lying(num_bytes, dtype, is_kept))
        self._source[name, "sum"] = source

    def _arrive(self, name: str, effect: Effect, made: Buffer) -> None:
        """What was on its way is there: what it is made of goes, or is the same memory."""
        for buffer in effect.frees:
            self._drop(name, buffer)
        source = self._source.pop((name, made), None)
        if (name, "next sum") in self._live and made == "sum" and source is not None:
            self._drop(name, source)
            self._rename(name, "next sum", made)
        elif made == "sum" and source is not None:
            self._rename(name, source, made)
        elif source is not None:
            self._drop(name, source)
        if effect.keeps is not None and (name, effect.keeps) in self._live:  # added to that
            self._drop(name, made)
        elif effect.keeps is not None:
            self._rename(name, made, effect.keeps)

    def _takes_kept(self, flat: FlatSpec, num_bytes: int, dtype: Dtype) -> bool:
        """Whether that can lie in the memory that stays: there is such, this is all of it, and nothing lies there."""
        fits = (num_bytes, dtype) == (flat.grad_bytes, flat.table.grad.dtype)
        if not flat.keeps_grad_buffer or not fits or flat.name in self._taken:
            return False
        self._taken.add(flat.name)
        return True

    def _hold(self, name: str, buffer: str, lying: _Lying) -> None:
        self._drop(name, buffer)
        self._live[name, buffer] = lying
        self._count(buffer, lying, 1)
        self._look(self._activations)

    def _drop(self, name: str, buffer: str) -> None:
        lying = self._live.pop((name, buffer), None)
        if lying is not None:
            self._count(buffer, lying, -1)

    def _rename(self, name: str, old: str, new: str) -> None:
        """It is the same memory."""
        lying = self._live.get((name, old))
        if lying is not None and old != new:
            self._drop(name, old)
            self._live[name, new] = lying
            self._count(new, lying, 1)

    def _count(self, buffer: str, lying: _Lying, sign: int) -> None:
        if not lying.is_kept:
            self._num_live += sign * lying.num_bytes
            self._num_sent += sign * lying.num_bytes if buffer in _SENT else 0
            self._num_waiting += sign * lying.num_bytes if buffer in _WAITING else 0

    def _look(self, activations: int) -> None:
        """Whether this is the most so far, beside so many bytes of activations."""
        held = self._num_live + max(0, self.kept - self._num_sent) + activations
        if held > self.peak:
            self.peak, self.peak_activations, self.peak_at = held, activations, self._moment
            self.peak_grad = self._num_waiting
