"""Steps of a user's optimizer over some of its pieces, where units are updated one after the other.

[Note: steps by units] Units whose states are on the host are updated there, one at a time, so that parameters return to
the device while the next unit is updated. Each such update is the optimizer's own `step`, without its hooks, with
gradients only on the pieces of that unit: every optimizer skips parameters whose gradient is `None`. All of them come
before the step that the loop asked for, in which those pieces no longer have gradients. So hooks, schedulers and
closures see one step. Values that an optimizer keeps in its groups, such as a step count, and numbers that
are attributes of it are restored before each of them, so that it counts once. Units for which the optimizer asks for
norms, whole matrices or whole parameters are left to the step that the loop asked for (`updates_by_unit` in
`program/spec.py`).

So nothing has to be undone after an overflow or for a clipped norm. Muon's pieces travel to the device, where products
are fast, and the results back; states never leave the host.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

Settings = list[dict[str, Any]]
"""The optimizer's own numbers, then the settings of its groups, without the parameters."""


class StepsByUnits:
    """The steps over single units that precede one step of `member`."""

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
        """Restore the settings for the step that was asked for, which starts from the same ones as all others."""
        if self._before is not None:
            _put(self._member, self._before)

    def end(self) -> None:
        """The step is over. If it had nothing to do, and counted nothing, keep what the others counted."""
        before, after = self._before, self._after
        self._before = self._after = None
        if before is not None and after is not None and _are_same(before, _settings_of(self._member)):
            _put(self._member, after)


def _bare_step(member: torch.optim.Optimizer) -> None:
    """The step without the profiler entry and the global hooks that torch wraps around it."""
    step = type(member).step
    bare = getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
    bare(member)


@contextmanager
def _without_hooks(member: torch.optim.Optimizer) -> Iterator[None]:
    """Inside, a step calls no hooks, even one that calls its base class's step."""
    kept = member._optimizer_step_pre_hooks, member._optimizer_step_post_hooks
    member._optimizer_step_pre_hooks, member._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    try:
        yield
    finally:
        member._optimizer_step_pre_hooks, member._optimizer_step_post_hooks = kept


def _settings_of(member: torch.optim.Optimizer) -> Settings:
    own = {key: value for key, value in vars(member).items() if type(value) in (int, float)}
    groups = ({key: value for key, value in group.items() if key != "params"} for group in member.param_groups)
    return [own, *groups]


def _put(member: torch.optim.Optimizer, settings: Settings) -> None:
    for container, kept, now in zip((vars(member), *member.param_groups), settings, _settings_of(member), strict=True):
        for key in now.keys() - kept.keys():  # what a first step adds, it has to find missing
            del container[key]
        container.update(kept)


def _are_same(one: Settings, other: Settings) -> bool:
    return all(
        mine.keys() == theirs.keys() and all(_is_same(mine[key], theirs[key]) for key in mine)
        for mine, theirs in zip(one, other, strict=True)
    )


def _is_same(one: object, other: object) -> bool:
    if one is other:
        return True
    return not isinstance(one, torch.Tensor) and not isinstance(other, torch.Tensor) and bool(one == other)
