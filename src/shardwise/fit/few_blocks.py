"""A model of many equal blocks, rehearsed as one that has few of them.

[Note: equal blocks] Most of a large model is a list of blocks that do the same, and a rehearsal of all of them finds
the same again and again. So a copy with `FEW` of them is rehearsed. If two inner blocks next to each other have done
the same in it, a further block between them adds what each of them has added, and the record of the model follows.
Whether what is done outside of blocks depends on their number, a second copy with one block less tells, once for a
model. What holds for one treatment of activations holds for it with other samples too, for which that many blocks less
one are enough. Where it does not hold (skips between distant blocks, blocks that free what others hold), the model is
rehearsed as it is. What a process of a CPU keeps in its heap is a peak that may lie elsewhere with more blocks: there,
and for disks, whose staging is limited, models are rehearsed as they are too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import groupby

from torch import nn

from shardwise.errors import ModelError
from shardwise.fit.equal_blocks import EqualBlocks, equal_blocks, treats_alike, without_values
from shardwise.fit.foreseen import Counted, count_step
from shardwise.fit.operations import Operation, Worked
from shardwise.parallel.conversions import Converted
from shardwise.parallel.experts import EXPERT_LOAD
from shardwise.plan import Plan
from shardwise.plan.mesh import Mesh
from shardwise.program import Mark, Moment

FEW = (4, 5, 6)
"""Blocks of a copy; more than four where a block frees what the one before or behind it holds."""


@dataclass
class FewBlocks:
    """Counts steps of `model`, which is only read, on copies without values and with few of its `blocks`."""

    model: nn.Module
    blocks: EqualBlocks | None
    is_checked: bool = False
    """Whether what is done outside of blocks has been seen not to depend on their number."""
    _copies: dict[int, nn.Module] = field(default_factory=dict)
    _known: dict[tuple[object, object], tuple[int, int] | None] = field(default_factory=dict)
    """By treatment and split, how many blocks told what more of them do, and which of them is as the one behind it;
    `None` if none did."""
    _told: dict[object, int] = field(default_factory=dict)
    """By treatment, how many blocks told last; fewer are not tried with another split."""

    @classmethod
    def of(cls, model: nn.Module) -> FewBlocks:
        return cls(model, equal_blocks(model))

    def with_blocks(self, num: int) -> nn.Module:
        """A copy without values that has `num` of the blocks."""
        if num not in self._copies:
            assert self.blocks is not None
            fewer = without_values(self.model)
            blocks = fewer.get_submodule(self.blocks.path)
            assert isinstance(blocks, nn.ModuleList | nn.Sequential)
            del blocks[self.blocks.num_others + num :]
            self._copies[num] = fewer
        return without_values(self._copies[num])

    def count(
        self, count: Callable[[nn.Module], Counted], treatment: object = None, split: object = None
    ) -> Counted | None:
        """What `count` would find for the whole model; `None` if copies with few blocks do not tell. How many tell
        depends on the `treatment` of activations; whether they do, also on how a model is `split`."""
        if self.blocks is None:
            return None
        counted = cache(lambda num: count(self.with_blocks(num)))
        try:
            key = treatment, split
            if key not in self._known:
                self._known[key] = None
                self._known[key] = found = self._learnt(self.blocks, counted, self._told.get(treatment, 0))
                self._told[treatment] = 0 if found is None else found[0]
            else:
                found = self._known[key]
                found = None if found is None else (found[0] - 1, found[1])  # one less is enough
            if found is None:
                return None
            num, place = found
            return _with_more(self.blocks, counted(num), num, place, self.blocks.num - num)
        except ModelError:  # such as one that takes its number of blocks from its config
            return None

    def _learnt(self, blocks: EqualBlocks, counted: Callable[[int], Counted], least: int) -> tuple[int, int] | None:
        for num in (one for one in FEW if one >= least):
            if num >= blocks.num:
                return None
            record = counted(num)
            for place in range(1, num - 2):
                fewer = _with_more(blocks, record, num, place + 1, -1)
                if fewer is None or _with_more(blocks, fewer, num - 1, place, 1) != record:
                    continue
                if not self.is_checked and fewer != counted(num - 1):
                    return None
                self.is_checked = True
                return num, place
        return None


def count_alike(
    model: nn.Module,
    batch: object,
    plan: Plan,
    mesh: Mesh,
    *,
    expert_load: float = EXPERT_LOAD,
    converted: Converted | None = None,
    on_cpu: bool = False,
) -> list[Counted]:
    """As `count_step` with the work, of few of the model's equal blocks where these tell of all. `model` is not split
    yet, and of no use afterwards."""

    def count(one: nn.Module) -> list[Counted]:
        return count_step(
            one, batch, plan, mesh, expert_load=expert_load, converted=converted, counts_work=True, on_cpu=on_cpu
        )

    is_converted = converted is not None and bool(converted.modules)
    if not (mesh.has_stages or is_converted) and tells_of_all(plan, on_cpu=on_cpu):
        found = FewBlocks.of(model).count(lambda fewer: count(fewer)[0])
        if found is not None:
            return [found]
    return count(model)


def tells_of_all(plan: Plan, *, on_cpu: bool) -> bool:
    """Whether a model with few of its equal blocks tells of all of them: see [Note: equal blocks]."""
    return not on_cpu and plan.activations.policy != "disk" and treats_alike(plan)


# -- records ----------------------------------------------------------------------------------------------


def _with_more(blocks: EqualBlocks, counted: Counted, num: int, place: int, times: int) -> Counted | None:
    """What was counted with `num` blocks, with the one at `place` `times` more, or without it (-1); `None` if blocks do
    not follow each other."""
    found = _repeated(blocks, counted, num, place, times)
    if found is None:
        return None
    marks, worked = found
    own = [one for part in counted.worked if blocks.place_of(part.moment.unit) == place for one in part.operations]
    every = [one for part in counted.worked for one in part.operations]
    on_host = sum(int(one.num_bytes) for one in own if (one.kind, one.axis) == ("evict", "host"))
    sent = {}
    for axis, num_bytes in counted.sent_bytes.items():
        of_block, of_all = (sum(map(_sent, (one for one in some if one.axis == axis))) for some in (own, every))
        sent[axis] = num_bytes + round(times * num_bytes * of_block / of_all) if of_all else num_bytes
    had = counted.activations
    host_bytes = had.host_bytes + times * on_host
    activations = replace(
        had,
        marks=marks,
        host_bytes=host_bytes,
        peak_heap_bytes=had.peak_heap_bytes + _most_in_heap(marks) - _most_in_heap(had.marks),
        host_heap_bytes=had.host_heap_bytes * host_bytes // had.host_bytes if had.host_bytes else 0,
    )
    return Counted(activations, sent, worked=worked)


def _most_in_heap(marks: Iterable[Mark]) -> int:
    return max((mark.heap_bytes for mark in marks), default=0)


def _sent(operation: Operation) -> float:
    """What is sent for a message, in proportion to others of the same axis."""
    return operation.num_bytes * (2 if operation.kind == "all_reduce" else 1) if operation.communicates else 0.0


Record = tuple[Mark, Worked | None]


def _repeated(
    blocks: EqualBlocks, counted: Counted, num: int, middle: int, times: int
) -> tuple[tuple[Mark, ...], tuple[Worked, ...]] | None:
    """As `_with_more`, of the block `middle`: its record."""
    marks, worked = counted.activations.marks, counted.worked
    if [mark.moment for mark in marks] != [one.moment for one in worked]:
        return None
    records = list(zip(marks, worked, strict=True))
    runs = [(place, list(run)) for place, run in groupby(records, lambda record: _place(blocks, record[0].moment))]
    order = [place for place, _ in runs if place is not None]
    rising = [("forward", place) for place in range(num)]
    if order != [*rising, *(("backward", place) for _, place in reversed(rising))]:
        return None
    begins = {place: index for index, (place, _) in enumerate(runs) if place is not None}
    for phase in ("forward", "backward"):
        ends = sorted((begins[phase, 0], begins[phase, num - 1]))
        if ends[1] - ends[0] != num - 1:  # something else comes between blocks
            return None
    found: list[Record] = []
    last = 0
    shift = 0
    for place, run in runs:
        is_middle = place is not None and place[1] == middle
        added = run[-1][0].live_bytes - last
        last = run[-1][0].live_bytes
        phase, at = place if place is not None else ("", 0)
        copies = times + 1 if is_middle else 1
        if not copies:
            shift -= added
        for number in range(copies):
            by = 0
            if place is not None and at > middle:
                by = times
            elif is_middle:
                by = number if phase == "forward" else times - number
            if number:
                shift += added
            found += [_shifted(blocks, record, by, shift) for record in run]
    return tuple(mark for mark, _ in found), tuple(one for _, one in found if one is not None)


def _place(blocks: EqualBlocks, moment: Moment) -> tuple[str, int] | None:
    place = blocks.place_of(moment.unit)
    return None if place is None else ("forward" if moment.phase == "forward" else "backward", place)


def _shifted(blocks: EqualBlocks, record: tuple[Mark, Worked], by: int, num_bytes: int) -> Record:
    mark, worked = record
    shifted = mark.renamed(lambda name: blocks.renamed(name, by), num_bytes)
    return shifted, replace(worked, moment=shifted.moment) if by else worked
