"""Methods of one optimizer object that do something else while the optimizer is adopted."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

_KEPT = "_shardwise_methods"


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
