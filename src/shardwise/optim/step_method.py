"""Replaces `optimizer.step` of one optimizer, in a form that torch's schedulers accept."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch

Take = Callable[[Callable[[], Any]], Any]
"""Takes a step: is given the call that the loop made, and returns its result."""
_GUARD = "_shardwise_guard"


def replaced_step(member: torch.optim.Optimizer, take: Take) -> types.MethodType:
    """A `step` for `member` that calls `take(step)` with the step that it has now.

    It is a bound method, because a scheduler made later wraps its function, and has the attributes of the step that it
    replaces, so that a scheduler that has wrapped that one recognizes its wrapper.
    """
    before = member.__dict__.get("step")

    @functools.wraps(getattr(member.step, "__func__", member.step))
    def step(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if before is not None:
            return take(lambda: before(*args, **kwargs))
        return take(lambda: type(optimizer).step(optimizer, *args, **kwargs))

    return types.MethodType(step, member)


class StepGuard:
    """Calls `when_raised` if a step of `member` raises: torch calls no hook after such a step.

    A scheduler made later wraps the guarded step. It then stays, and only calls the step, after `release`; the next
    guard of the same optimizer uses it again.
    """

    def __init__(self, member: torch.optim.Optimizer) -> None:
        self._when_raised: Callable[[], None] | None = None
        self._before = member.__dict__.get("step")
        self._step = replaced_step(member, self._take)
        member.__dict__["step"] = self._step

    @classmethod
    def over(cls, member: torch.optim.Optimizer, when_raised: Callable[[], None]) -> None:
        """Guard the steps of `member` until `release`."""
        guard = member.__dict__.get(_GUARD)
        if not isinstance(guard, cls):
            guard = member.__dict__[_GUARD] = cls(member)
        guard._when_raised = when_raised

    @classmethod
    def release(cls, member: torch.optim.Optimizer) -> None:
        guard = member.__dict__.get(_GUARD)
        if not isinstance(guard, cls):
            return
        guard._when_raised = None
        if member.__dict__.get("step") is not guard._step:
            return
        del member.__dict__[_GUARD], member.__dict__["step"]
        if guard._before is not None:
            member.__dict__["step"] = guard._before

    def _take(self, step: Callable[[], Any]) -> Any:
        try:
            return step()
        except BaseException:
            if self._when_raised is not None:
                self._when_raised()
            raise
