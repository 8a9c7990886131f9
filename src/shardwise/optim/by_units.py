"""Steps of a user's optimizer over some of its pieces, where units are updated one after the other.

[Note: steps by units] Whose states are on the host is updated there, a unit at a time, so that parameters go back to
the device while the next unit is updated. Each such update is the optimizer's own `step`, without its hooks, with
gradients on the pieces of that unit alone: any optimizer passes over a parameter whose gradient is `None`. All of them
come before the step that the loop asked for, in which those pieces have no gradient any more. So hooks, schedulers and
closures see one step. What an optimizer keeps in its groups, such as a count of steps, is put back before each of them:
whatever it counts there, it counts once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

Settings = list[dict[str, Any]]
"""What the groups of an optimizer say, parameters aside."""


class StepsByUnits:
    """The steps over single units that come before one step of `member`."""

    def __init__(self, member: torch.optim.Optimizer) -> None:
        self._member = member
        self._before: Settings | None = None
        self._after: Settings | None = None

    def step(self) -> None:
        """Update the pieces that have a gradient now."""
        if self._before is None:
            self._before = _settings_of(self._member)
        else:
            _put(self._member, self._before)
        with _without_hooks(self._member):
            _bare_step(self._member)
        self._after = _settings_of(self._member)

    def hand_over(self) -> None:
        """The step that was asked for begins, from where all others began."""
        if self._before is not None:
            _put(self._member, self._before)

    def end(self) -> None:
        """It is over. Where it had nothing to do, and counted nothing, what the others have counted holds."""
        before, after = self._before, self._after
        self._before = self._after = None
        if before is not None and after is not None and _are_same(before, _settings_of(self._member)):
            _put(self._member, after)


def _bare_step(member: torch.optim.Optimizer) -> None:
    """Without the profiler's entry and the hooks for all optimizers, which torch wraps around it."""
    step = type(member).step
    bare = getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
    bare(member)


@contextmanager
def _without_hooks(member: torch.optim.Optimizer) -> Iterator[None]:
    """Inside, a step calls none; one that calls its base class's would."""
    kept = member._optimizer_step_pre_hooks, member._optimizer_step_post_hooks
    member._optimizer_step_pre_hooks, member._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    try:
        yield
    finally:
        member._optimizer_step_pre_hooks, member._optimizer_step_post_hooks = kept


def _settings_of(member: torch.optim.Optimizer) -> Settings:
    return [{key: value for key, value in group.items() if key != "params"} for group in member.param_groups]


def _put(member: torch.optim.Optimizer, settings: Settings) -> None:
    for group, kept in zip(member.param_groups, settings, strict=True):
        group.update(kept)


def _are_same(one: Settings, other: Settings) -> bool:
    return all(
        mine.keys() == theirs.keys() and all(_is_same(mine[key], theirs[key]) for key in mine)
        for mine, theirs in zip(one, other, strict=True)
    )


def _is_same(one: object, other: object) -> bool:
    if one is other:
        return True
    return not isinstance(one, torch.Tensor) and not isinstance(other, torch.Tensor) and bool(one == other)
