"""Replaces methods of one optimizer object: `step` in a form that torch's schedulers accept, and others while the
optimizer is adopted."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

Take = Callable[[partial[Any]], Any]
"""Takes a step: is given the call that the loop made, and returns its result."""
_GUARD = "_shardwise_guard"
_KEPT = "_shardwise_methods"
_OPTIMIZER: Any = torch.optim.Optimizer
_HOOKING = _OPTIMIZER.profile_hook_step(lambda: None).__code__
"""The code of the wrapper by which torch calls hooks."""


def is_inside_step(member: torch.optim.Optimizer) -> bool:
    """Called by a step hook: whether it is called for a base class's step, within the step of `member`.

    Torch wraps the `step` of every class of which there is an instance, and each wrapper calls all hooks. Their frames
    tell how many are running: torch calls no hook after a step that raised, so a count would stay.
    """
    frame: FrameType | None = sys._getframe(1)
    num_steps = 0
    while frame is not None:
        num_steps += frame.f_code is _HOOKING and frame.f_locals["args"][0] is member
        frame = frame.f_back
    return num_steps > 1


def replaced_step(member: torch.optim.Optimizer, take: Take) -> types.MethodType:
    """A `step` for `member` that calls `take(step)` with the step that it has now.

    It is a bound method, because a scheduler made later wraps its function, and has the attributes of the step that it
    replaces, so that a scheduler that has wrapped that one recognizes its wrapper.
    """
    before = member.__dict__.get("step")

    @functools.wraps(getattr(member.step, "__func__", member.step))
    def step(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():  # torch.compile(optimizer.step): it communicates, and cannot be traced
            untraced: Any = torch.compiler.disable(taken)
            return untraced(optimizer, *args, **kwargs)
        return taken(optimizer, *args, **kwargs)

    def taken(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        call = types.MethodType(type(optimizer).step, optimizer) if before is None else before
        return take(partial(call, *args, **kwargs))

    return types.MethodType(step, member)


class StepGuard:
    """Knows what a step of `member` calls: `before` it changes anything, and `when_raised` if it raises, because torch
    calls no hook after such a step: its groups would list pieces until the next one, and an update on the host would
    leave its gradients and settings to it.

    A step that calls a closure looks `before` up afterwards, because a forward in the closure may have planned anew,
    and the optimizer is then adopted by another plan's parts.

    A scheduler made later wraps the guarded step. It then stays, and only calls the step, after `release`; the next
    guard of the same optimizer uses it again.
    """

    def __init__(self, member: torch.optim.Optimizer) -> None:
        self._calls: tuple[Callable[[], None], Callable[[], None]] | None = None
        self._before = member.__dict__.get("step")
        self._step = replaced_step(member, partial(_take, member))
        member.__dict__["step"] = self._step

    @classmethod
    def over(cls, member: torch.optim.Optimizer, before: Callable[[], None], when_raised: Callable[[], None]) -> None:
        """Guard the steps of `member` until `release`."""
        guard = cls._of(member)
        if guard is None:
            guard = member.__dict__[_GUARD] = cls(member)
        guard._calls = before, when_raised

    @classmethod
    def call_before(cls, member: torch.optim.Optimizer) -> None:
        """Call the `before` of whoever guards `member` now."""
        guard = cls._of(member)
        if guard is not None and guard._calls is not None:
            guard._calls[0]()

    @classmethod
    def note_raised(cls, member: torch.optim.Optimizer) -> None:
        """Call the `when_raised` of whoever guards `member` now."""
        guard = cls._of(member)
        if guard is not None and guard._calls is not None:
            guard._calls[1]()

    @classmethod
    def release(cls, member: torch.optim.Optimizer) -> None:
        guard = cls._of(member)
        if guard is None:
            return
        guard._calls = None
        if member.__dict__.get("step") is not guard._step:
            return
        del member.__dict__[_GUARD], member.__dict__["step"]
        if guard._before is not None:
            member.__dict__["step"] = guard._before

    @classmethod
    def _of(cls, member: torch.optim.Optimizer) -> StepGuard | None:
        guard = member.__dict__.get(_GUARD)
        return guard if isinstance(guard, cls) else None


def _take(member: torch.optim.Optimizer, step: partial[Any]) -> Any:
    try:
        return step()
    except BaseException:
        StepGuard.note_raised(member)
        raise


class ReplacedMethods:
    """Replaces methods in the object `member` until `release`; `step` has a guard of its own.

    Code may put methods of its own there, too, which wrap what they find. What was there before ours is what `before`
    returns. What was put there since stays, and goes on calling ours: after `release` that is what the method was
    before, and whoever adopts the optimizer next gives the same one its new meaning.
    """

    def __init__(self, member: torch.optim.Optimizer) -> None:
        self._member = member
        self._methods: dict[str, _Method] = {}

    @classmethod
    def of(cls, member: torch.optim.Optimizer) -> ReplacedMethods:
        """Those that wrappers of an earlier adoption still call, or none."""
        kept = member.__dict__.get(_KEPT)
        if not isinstance(kept, cls):
            kept = member.__dict__[_KEPT] = cls(member)
        return kept

    def replace(self, name: str, instead: Callable[..., Any]) -> None:
        """Let `member.name(...)` call `instead(...)`."""
        if name not in self._methods or name not in self._member.__dict__:  # code may have deleted it
            self._methods[name] = _Method(self._member, name)
        self._methods[name].instead = instead

    def before(self, name: str) -> Callable[..., Any]:
        """What the method was before it was replaced, if it was."""
        if name in self._methods:
            return self._methods[name].before
        found: Callable[..., Any] = getattr(self._member, name)
        return found

    def current(self, name: str) -> Callable[..., Any]:
        """What a replaced method calls now, without what code has put around it."""
        return self._methods[name].called

    def is_torchs(self, name: str) -> bool:
        """Whether neither the class nor code that came before us has a method of its own."""
        own = self._methods[name].patch if name in self._methods else self._member.__dict__.get(name)
        return own is None and getattr(type(self._member), name) is getattr(torch.optim.Optimizer, name)

    def release(self) -> None:
        """Take those off that nothing wraps; the others only call what was there before."""
        for method in self._methods.values():
            method.instead = None
        self._methods = {name: method for name, method in self._methods.items() if not method.take_off()}
        if not self._methods:
            self._member.__dict__.pop(_KEPT, None)


class _Method:
    """One method, in the place of `patch` if code had put one there."""

    def __init__(self, member: torch.optim.Optimizer, name: str) -> None:
        self._member, self._name = member, name
        self.patch: Callable[..., Any] | None = member.__dict__.get(name)
        self.before: Callable[..., Any] = getattr(member, name)
        self.instead: Callable[..., Any] | None = None

        @functools.wraps(self.before, updated=())
        def called(*args: Any, **kwargs: Any) -> Any:
            return (self.instead or self.before)(*args, **kwargs)

        self.called = member.__dict__[name] = called

    def take_off(self) -> bool:
        """Returns whether it was the outermost one."""
        if self._member.__dict__.get(self._name) is not self.called:
            return False
        del self._member.__dict__[self._name]
        if self.patch is not None:
            self._member.__dict__[self._name] = self.patch
        return True
