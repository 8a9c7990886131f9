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

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import groupby

import torch
from torch import nn

from shardwise.errors import ModelError
from shardwise.fit.foreseen import Counted
from shardwise.fit.operations import Operation, Worked
from shardwise.plan import Plan
from shardwise.program import Mark, Moment
from shardwise.runtime.rehearsal import is_small_integers, rebind

FEW = (4, 5, 6)
"""Blocks of a copy; more than four where a block frees what the one before or behind it holds."""
LEAST = 6
"""Of which it is worth it."""


@dataclass(frozen=True)
class EqualBlocks:
    """A list of equal blocks in a model: the module that has them, by its name, and how many there are."""

    path: str
    num: int

    @property
    def _prefix(self) -> str:
        return f"{self.path}." if self.path else ""

    def place_of(self, name: str) -> int | None:
        """Which of the blocks has that unit, module or parameter."""
        number = name.removeprefix(self._prefix).partition(".")[0]
        return int(number) if name.startswith(self._prefix) and number.isdigit() else None

    def moved(self, unit: str, by: int) -> str:
        """The name of the same unit of the block that is `by` further on."""
        number, dot, rest = unit.removeprefix(self._prefix).partition(".")
        return f"{self._prefix}{int(number) + by}{dot}{rest}"


def equal_blocks(model: nn.Module) -> EqualBlocks | None:
    """The longest list of equal blocks in `model`, if there is one that is worth it."""
    found: EqualBlocks | None = None
    for path, module in model.named_modules():
        least = LEAST if found is None else found.num + 1
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) >= least:
            first, *others = module
            if all(_are_alike(first, other, place) for place, other in enumerate(others, start=1)):
                found = EqualBlocks(path, len(module))
    return None if found is None or _are_shared(model, found) else found


def treats_alike(plan: Plan) -> bool:
    """Whether `plan` says the same of all equal blocks."""
    names_some = any(word.isdigit() for pattern in plan.tensor.plan or () for word in pattern.split("."))
    return not plan.rules and plan.activations.every == 1 and not names_some


@dataclass
class FewBlocks:
    """Counts steps of `model`, which is only read, on copies without values and with few of its `blocks`."""

    model: nn.Module
    blocks: EqualBlocks | None
    _copies: dict[int, nn.Module] = field(default_factory=dict)
    _known: dict[object, tuple[int, int] | None] = field(default_factory=dict)
    """By treatment, how many blocks told what more of them do, and which of them is as the one behind it; `None` if
    none did."""
    _is_checked: bool = False
    """Whether what is done outside of blocks has been seen not to depend on their number."""

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
            del blocks[num:]
            self._copies[num] = fewer
        return without_values(self._copies[num])

    def count(self, count: Callable[[nn.Module], Counted], treatment: object = None) -> Counted | None:
        """What `count` would find for the whole model; `None` if copies with few blocks do not tell. How many tell
        depends on the `treatment` of activations."""
        if self.blocks is None:
            return None
        counted = cache(lambda num: count(self.with_blocks(num)))
        try:
            if treatment not in self._known:
                self._known[treatment] = None
                self._known[treatment] = found = self._learnt(self.blocks, counted)
            else:
                found = self._known[treatment]
                found = None if found is None else (found[0] - 1, found[1])  # one less is enough
            if found is None:
                return None
            num, place = found
            return _with_more(self.blocks, counted(num), num, place, self.blocks.num - num)
        except ModelError:  # such as one that takes its number of blocks from its config
            return None

    def _learnt(self, blocks: EqualBlocks, counted: Callable[[int], Counted]) -> tuple[int, int] | None:
        for num in FEW:
            if num >= blocks.num:
                return None
            record = counted(num)
            for place in range(1, num - 2):
                fewer = _with_more(blocks, record, num, place + 1, -1)
                if fewer is None or _with_more(blocks, fewer, num - 1, place, 1) != record:
                    continue
                if not self._is_checked and fewer != counted(num - 1):
                    return None
                self._is_checked = True
                return num, place
        return None


def without_values(model: nn.Module) -> nn.Module:
    """A copy whose parameters and buffers are on the meta device and take no memory; but integers, with which models
    look things up, keep their values."""
    memo: dict[int, object] = {}
    for param in model.parameters():
        memo[id(param)] = nn.Parameter(_on_meta(param), param.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach() if is_small_integers(buffer) else _on_meta(buffer)
    copied = copy.deepcopy(model, memo)
    rebind(copied, memo)
    return copied


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """From what is known of `tensor`, which may have been built inside `deferred_init` and have no values to move."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _are_shared(model: nn.Module, found: EqualBlocks) -> bool:
    """Whether a tensor of one block is also elsewhere."""
    owners: dict[int, set[object]] = {}
    for name, param in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        owners.setdefault(id(param), set()).add(found.place_of(name))
    return any(len(places) > 1 for places in owners.values() if places != {None})


def _are_alike(one: nn.Module, other: nn.Module, place: int) -> bool:
    """Whether two modules differ in nothing but the values of tensors, and in numbers that are their place."""
    if type(one) is not type(other):
        return False
    if not _same_attributes(one, other, place):
        return False
    for kind in ("_parameters", "_buffers"):
        mine, theirs = getattr(one, kind), getattr(other, kind)
        if mine.keys() != theirs.keys() or any(not _same_tensor(mine[name], theirs[name]) for name in mine):
            return False
    mine, theirs = one._modules, other._modules
    return mine.keys() == theirs.keys() and all(
        (a is None and b is None) or (a is not None and b is not None and _are_alike(a, b, place))
        for a, b in zip(mine.values(), theirs.values(), strict=True)
    )


_OWN = {"_parameters", "_buffers", "_modules"}


def _same_attributes(one: nn.Module, other: nn.Module, place: int) -> bool:
    mine, theirs = vars(one), vars(other)
    if mine.keys() != theirs.keys():
        return False
    return all(name in _OWN or _same_value(value, theirs[name], place) for name, value in mine.items())


def _same_value(one: object, other: object, place: int) -> bool:
    if one is other:
        return True
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and _same_tensor(one, other)
    if type(one) is not type(other):
        return False
    if type(one) is int and (one, other) == (0, place):
        return True
    try:
        return bool(one == other)
    except Exception:  # what cannot be compared may differ
        return False


def _same_tensor(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return (one.shape, one.stride(), one.dtype, one.requires_grad) == (
        other.shape,
        other.stride(),
        other.dtype,
        other.requires_grad,
    )


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
    moment = replace(mark.moment, unit=blocks.moved(mark.moment.unit, by)) if by else mark.moment
    shifted = replace(
        mark, moment=moment, peak_bytes=mark.peak_bytes + num_bytes, live_bytes=mark.live_bytes + num_bytes
    )
    return shifted, replace(worked, moment=moment) if by else worked
