"""Lists of equal blocks in a model, which do the same if the plan treats them alike."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from shardwise.plan import Plan
from shardwise.runtime.rehearsal import is_small_integers, note_empty, rebind

LEAST = 6
"""Blocks of which it is worth it to look at few."""


@dataclass(frozen=True)
class EqualBlocks:
    """Equal blocks at the end of a list, or all of it: the module that has them, by its name, and how many there are,
    behind the `num_others` at its beginning (DeepSeek-V3 has three without experts)."""

    path: str
    num: int
    num_others: int = 0

    @property
    def _prefix(self) -> str:
        return f"{self.path}." if self.path else ""

    def place_of(self, name: str) -> int | None:
        """Which of the blocks has that unit, module or parameter."""
        return self._place(name, name.removeprefix(self._prefix).partition(".")[0])

    def block_of(self, name: str) -> int | None:
        """Which of the blocks the module with that name is, whole."""
        return self._place(name, name.removeprefix(self._prefix))

    def _place(self, name: str, number: str) -> int | None:
        if not (name.startswith(self._prefix) and number.isdigit()) or int(number) < self.num_others:
            return None
        return int(number) - self.num_others

    def renamed(self, name: str, by: int) -> str:
        """As `moved`, if it is something of a block; otherwise it stays as it is."""
        return name if self.place_of(name) is None else self.moved(name, by)

    def moved(self, unit: str, by: int) -> str:
        """The name of the same unit of the block that is `by` further on."""
        number, dot, rest = unit.removeprefix(self._prefix).partition(".")
        return f"{self._prefix}{int(number) + by}{dot}{rest}"


def equal_blocks(model: nn.Module) -> EqualBlocks | None:
    """The most equal blocks in one list of `model`, if there are some that are worth it."""
    found: EqualBlocks | None = None
    for path, module in model.named_modules():
        least = LEAST if found is None else found.num + 1
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) >= least:
            start = _start_of_equal(list(module))
            if len(module) - start >= least:
                found = EqualBlocks(path, len(module) - start, start)
    return None if found is None or _are_shared(model, found) else found


def _start_of_equal(modules: Sequence[nn.Module]) -> int:
    """From where on all are alike."""
    start = len(modules) - 1
    while start and _are_alike(modules[start - 1], modules[start], start - 1, start):
        start -= 1
    rest = range(start + 1, len(modules))
    are_alike = all(_are_alike(modules[start], modules[place], start, place) for place in rest)
    return start if are_alike else len(modules)


def treats_alike(plan: Plan) -> bool:
    """Whether `plan` says the same of all equal blocks."""
    units = plan.units if isinstance(plan.units, tuple) else ()
    named = [*(plan.tensor.plan or ()), *units]
    names_some = any(word.isdigit() for pattern in named for word in pattern.split("."))
    return not plan.rules and plan.activations.every == 1 and not names_some


def without_values(model: nn.Module) -> nn.Module:
    """A copy whose parameters and buffers are on the meta device and take no memory; but integers, with which models
    look things up, keep their values."""
    memo: dict[int, object] = {}
    for param in model.parameters():
        memo[id(param)] = nn.Parameter(_on_meta(param), param.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach() if is_small_integers(buffer) else _on_meta(buffer)
    note_empty(model, memo)
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


def _are_alike(one: nn.Module, other: nn.Module, *places: int) -> bool:
    """Whether two modules differ in nothing but the values of tensors, and in numbers that are their `places`."""
    if type(one) is not type(other):
        return False
    if not _same_attributes(one, other, places):
        return False
    for kind in ("_parameters", "_buffers"):
        mine, theirs = getattr(one, kind), getattr(other, kind)
        if mine.keys() != theirs.keys() or any(not _same_tensor(mine[name], theirs[name]) for name in mine):
            return False
    mine, theirs = one._modules, other._modules
    return mine.keys() == theirs.keys() and all(
        (a is None and b is None) or (a is not None and b is not None and _are_alike(a, b, *places))
        for a, b in zip(mine.values(), theirs.values(), strict=True)
    )


_OWN = {"_parameters", "_buffers", "_modules"}


def _same_attributes(one: nn.Module, other: nn.Module, places: tuple[int, ...]) -> bool:
    mine, theirs = vars(one), vars(other)
    if mine.keys() != theirs.keys():
        return False
    return all(name in _OWN or _same_value(value, theirs[name], places) for name, value in mine.items())


def _same_value(one: object, other: object, places: tuple[int, ...]) -> bool:
    if one is other:
        return True
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and _same_tensor(one, other)
    if type(one) is not type(other):
        return False
    if type(one) is int and (one, other) == places:
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
