"""What a program will hold on one rank: bytes at rest by kind, and the peak of what comes and goes.

These are promises: the runtime counts the same bytes (`engine.memory()`), and a test holds the two together. A backward
takes all the memory for its gradients at its beginning here; the runtime takes it when the first one comes.
Activations are the model's own: they are counted where a rehearsal says what they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.errors import ProgramError
from shardwise.placement import WIDTH, Span
from shardwise.program.action import Action, Block, Moment, Program
from shardwise.program.activations import Activations, Mark
from shardwise.program.build import fills_grad, reduce_due
from shardwise.program.handover import Handover, at, handovers
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
) -> Footprint:
    """What one step, `micro_batch` as often as gradients are accumulated and then `step`, holds on each rank.

    `states_per_param`: tensors of the parameter's size that the optimizer keeps (Adam: 2), where a flat buffer does
    not say how it is updated. Ranks differ where it does: the figures are those of the rank at `coordinate` of the
    mesh, or else the most that any rank holds. `activations` are those of a rehearsal with the order of `micro_batch`.
    """
    flats = [flat for unit in units for flat in unit.flats]
    param = sum(flat.num_bytes(flat.table.param.shard, flat.table.param.dtype) for flat in flats)
    optim = sum(_optim_bytes(flat, states_per_param, coordinate) for flat in flats if flat.trainable)
    grad = sum(flat.grad_bytes for flat in flats if flat.trainable)
    clock = _Walk({flat.name: flat for flat in flats}, coordinate)
    clock.kept = _kept_bytes(flats) if activations is not None and activations.on_cpu else 0
    marks = _marks(micro_batch, activations)
    for _ in range(min(2, num_micro_batches)):  # all later ones hold what the second holds
        for block, mark in zip(micro_batch, marks, strict=True):
            clock.walk(block, units, mark)
    for block in step:
        clock.walk(block, units)
    rooms = sum(flat.grad_bytes for flat in flats if flat.trainable and flat.keeps_room)
    if activations is None:
        return Footprint(param, grad, optim, max(0, rooms + clock.peak - grad))
    working = clock.peak - clock.peak_grad - clock.peak_activations
    grad, process = rooms + clock.peak_grad, activations.process_bytes
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


class _Walk:
    """Adds and takes away the bytes that each action brings and frees, and remembers the peak.

    What lies in memory that stays from step to step (`keeps_room`) is no part of it.
    """

    def __init__(self, flats: dict[str, FlatSpec], coordinate: Mapping[str, int] | None) -> None:
        self.flats = flats
        self._coordinate = coordinate
        self._handovers = handovers(tuple(flats.values()))
        self.live: dict[tuple[str, str], int] = {}
        self._taken_rooms: set[str] = set()
        self._housed: set[tuple[str, str]] = set()
        """What lies in such memory."""
        self.steps_left: dict[str, int] = {}
        self.kept = 0
        """Bytes that stay for gradients that are sent, whether any are or not."""
        self.peak = 0
        self.peak_grad = 0
        self.peak_activations = 0
        self.peak_at: Moment | None = None
        self._activations = 0
        self._moment: Moment | None = None

    def walk(self, block: Block, units: Sequence[UnitSpec], mark: Mark | None = None) -> None:
        self._moment = block.moment
        if mark is not None:
            self._look(mark.peak_bytes)
            self._activations = mark.live_bytes
        for action in block.actions:
            if action.flat in self.flats:
                self._act(self.flats[action.flat], action, in_step=block.moment.phase == "step")
        if block.moment.edge == "before" and block.moment.phase == "backward":
            for unit in units:
                if unit.name == block.moment.unit:
                    for flat in unit.flats:
                        self._inbox(flat)
        if block.moment.phase == "step" and block.moment.edge == "after":
            self._consume()

    def _inbox(self, flat: FlatSpec) -> None:
        """Gradients as a backward leaves them: in the dtype of the wire, or as they rest if nothing travels."""
        if flat.trainable:
            waits = not reduce_due(flat)
            dtype = flat.table.grad.dtype if waits else flat.table.wire
            what, num_bytes = "grad" if waits else "inbox", flat.numel * WIDTH[dtype]
            if fills_grad(flat):
                self._hold_where_it_waits(flat, what, num_bytes)
            else:
                self._hold(flat, what, num_bytes)

    def _act(self, flat: FlatSpec, action: Action, *, in_step: bool) -> None:
        match action.verb, action.subject:
            case "gather", _ if not in_step:
                self._hold(flat, "full", flat.full_bytes)
            case "free", "full":
                self._drop(flat, "full")
            case "wait", "full":  # a gather from what was held uses it up
                self._drop(flat, "held")
            case "slice", "held":
                self._hold(flat, "held", flat.num_bytes(flat.table.held.shard, flat.table.held.dtype))
            case (("reduce_scatter" | "all_reduce"), "grad"):
                self._reduce(flat, action, in_step=in_step)
            case "wait", "grad":
                self._reduced(flat, in_step=in_step)
            case _, "update":
                self._hand_over(flat, self._handovers[flat.name], action)

    def _hand_over(self, flat: FlatSpec, over: Handover, action: Action) -> None:
        """Pieces go to the owners of their matrices and come back; `staging` is what messages are made of."""
        place = None if self._coordinate is None else over.place(self._coordinate)
        match action.verb:
            case "collect":
                self._hold(flat, "given", at(over.given_bytes, place))
                self._hold(flat, "whole", at(over.whole_bytes, place))
                self._hold(flat, "staging", at(over.taken_bytes, place))
            case "wait" if (flat.name, "whole") in self.live:
                self._drop(flat, "staging")
            case "orthogonalize":
                self._hold(flat, "work", over.work_bytes(place))
                self._drop(flat, "work")
            case "hand_back":
                self._hold(flat, "staging", at(over.taken_bytes, place))
                self._drop(flat, "whole")
            case "wait":
                self._drop(flat, "staging")
                self._drop(flat, "given")

    def _reduce(self, flat: FlatSpec, action: Action, *, in_step: bool) -> None:
        ranks = flat.mesh.size(action.over)
        source = "reduced" if (flat.name, "reduced") in self.live else "grad" if in_step else "inbox"
        source_dtype = flat.table.grad.dtype if in_step else flat.table.wire
        summed_dtype = source_dtype if action.dtype == "-" else action.dtype
        if source == "reduced":
            source_dtype = summed_dtype
        numel = self.live.get((flat.name, source), 0) // WIDTH[source_dtype]
        copies = 1 if source_dtype == flat.table.wire else 2  # what arrives, and what is cast to be sent
        staged = numel if action.verb == "all_reduce" else (ranks - 1) * (numel // ranks)
        self._hold(flat, "staging", copies * staged * WIDTH[flat.table.wire])
        made = (numel // ranks if action.verb == "reduce_scatter" else numel) * WIDTH[summed_dtype]
        is_in_place = source_dtype == summed_dtype and (flat.name, source) in self._housed
        if is_in_place and action.verb == "reduce_scatter":
            self._housed.add((flat.name, "next"))
            self._hold(flat, "next", made)
        elif action.verb == "reduce_scatter" or source_dtype != summed_dtype:
            self._hold_where_it_waits(flat, "next", made)

    def _reduced(self, flat: FlatSpec, *, in_step: bool) -> None:
        """A step of a reduction is done: what it read goes, what it made is the next step's source."""
        self._drop(flat, "staging")
        if (flat.name, "next") in self.live:
            self._drop(flat, "inbox")
            if in_step:
                self._drop(flat, "grad")
            self._drop(flat, "reduced")
            self._rename(flat, "next", "reduced")
        elif (flat.name, "inbox") in self.live:
            self._rename(flat, "inbox", "reduced")
        if in_step:
            return
        self.steps_left[flat.name] = self.steps_left.get(flat.name) or len(reduce_due(flat))
        self.steps_left[flat.name] -= 1
        if self.steps_left[flat.name] == 0:  # what is through waits, or is added to what waits
            if (flat.name, "grad") in self.live:
                self._drop(flat, "reduced")
            else:
                self._rename(flat, "reduced", "grad")

    def _consume(self) -> None:
        for name, what in list(self.live):
            if what in ("grad", "reduced"):
                self._drop(self.flats[name], what)
        self._taken_rooms.clear()

    def _hold_where_it_waits(self, flat: FlatSpec, what: str, num_bytes: int) -> None:
        """In the memory that stays for gradients, if there is such, if this is all of one and none lies there."""
        if flat.keeps_room and num_bytes == flat.grad_bytes and flat.name not in self._taken_rooms:
            self._taken_rooms.add(flat.name)
            self._housed.add((flat.name, what))
        self._hold(flat, what, num_bytes)

    def _hold(self, flat: FlatSpec, what: str, num_bytes: int) -> None:
        self.live[flat.name, what] = num_bytes
        self._look(self._activations)

    def _look(self, activations: int) -> None:
        """Whether this is the most so far, beside so many bytes of activations."""
        beside = {key: num_bytes for key, num_bytes in self.live.items() if key not in self._housed}
        in_use = sum(num_bytes for (_, what), num_bytes in beside.items() if what in ("inbox", "reduced"))
        held = sum(beside.values()) + max(0, self.kept - in_use) + activations
        if held > self.peak:
            self.peak, self.peak_activations, self.peak_at = held, activations, self._moment
            self.peak_grad = sum(num_bytes for (_, what), num_bytes in beside.items() if what == "grad")

    def _rename(self, flat: FlatSpec, old: str, new: str) -> None:
        """It is the same memory."""
        self.live[flat.name, new] = self.live.pop((flat.name, old), 0)
        if (flat.name, old) in self._housed:
            self._housed.remove((flat.name, old))
            self._housed.add((flat.name, new))

    def _drop(self, flat: FlatSpec, what: str) -> None:
        self.live.pop((flat.name, what), None)
        self._housed.discard((flat.name, what))
