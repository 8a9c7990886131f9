"""`optimizer.step()` of loops that know no engine, led past whoever has to know of it."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch


class TakesStep(Protocol):
    def __call__(self, step: Callable[[], Any], *, is_last: bool) -> Any: ...


class PlainSteps:
    """Puts `take(step, is_last=...)` in the place of each optimizer's own `step`, but for those taken `inside`.

    A scheduler that is made afterwards wraps what it finds, and so this stays until `close`.
    """

    def __init__(self, members: Sequence[torch.optim.Optimizer], take: TakesStep) -> None:
        self._take = take
        self._is_inside = False
        self._places: list[tuple[torch.optim.Optimizer, Any, Any]] = []
        for member in members:
            before = member.__dict__.get("step")
            led = types.MethodType(self._led(member.step, is_last=member is members[-1]), member)
            member.__dict__["step"] = led
            self._places.append((member, before, led))

    def _led(self, original: Callable[..., Any], *, is_last: bool) -> Callable[..., Any]:
        """A function that a scheduler can wrap in turn, or finds to be wrapped already."""

        @functools.wraps(getattr(original, "__func__", original))
        def step(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return original(*args, **kwargs)
            return self._take(lambda: original(*args, **kwargs), is_last=is_last)

        return step

    def close(self) -> None:
        """Every step is the optimizer's own again."""
        self._is_inside = True
        for member, before, led in self._places:
            if member.__dict__.get("step") is led:
                del member.__dict__["step"]
                if before is not None:
                    member.__dict__["step"] = before
        self._places.clear()

    @contextmanager
    def inside(self) -> Iterator[None]:
        before, self._is_inside = self._is_inside, True
        try:
            yield
        finally:
            self._is_inside = before
