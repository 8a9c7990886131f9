"""Intercepts `optimizer.step()` of loops that do not call the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch

from shardwise.optim import replaced_step


class TakesStep(Protocol):
    def __call__(self, step: Callable[[], Any], *, is_last: bool) -> Any: ...


class PlainSteps:
    """Replaces each optimizer's `step` by `take(step, is_last=...)`, except for calls made `inside`.

    A scheduler created later wraps the replacement, which therefore stays until `close`.
    """

    def __init__(self, members: Sequence[torch.optim.Optimizer], take: TakesStep) -> None:
        self._take = take
        self._is_inside = False
        self._replaced: list[tuple[torch.optim.Optimizer, Any, Any]] = []
        for member in members:
            before = member.__dict__.get("step")
            wrapped = replaced_step(member, partial(self._step, is_last=member is members[-1]))
            member.__dict__["step"] = wrapped
            self._replaced.append((member, before, wrapped))

    def _step(self, step: Callable[[], Any], *, is_last: bool) -> Any:
        return step() if self._is_inside else self._take(step, is_last=is_last)

    def close(self) -> None:
        """Put back the optimizers' own steps."""
        self._is_inside = True
        for member, before, wrapped in self._replaced:
            if member.__dict__.get("step") is wrapped:
                del member.__dict__["step"]
                if before is not None:
                    member.__dict__["step"] = before
        self._replaced.clear()

    @contextmanager
    def inside(self) -> Iterator[None]:
        before, self._is_inside = self._is_inside, True
        try:
            yield
        finally:
            self._is_inside = before
