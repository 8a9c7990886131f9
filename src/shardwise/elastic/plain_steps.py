"""Intercepts `optimizer.step()` of loops that do not call the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch

from shardwise.errors import ConfigError
from shardwise.optim import replaced_step
from shardwise.system.torch_functions import caller_within

_HAS_SCALER = (
    "A torch.amp.GradScaler takes the steps of a job that goes on when ranks are lost. Ranks that join would not have "
    "its scale, and a step that is taken again would count in it twice. Leave it out: `precision: fp16` in the plan "
    "scales the loss on all ranks alike, and fp32 and bf16 need no scale."
)


class TakesStep(Protocol):
    def __call__(self, step: Callable[[], Any], *, is_last: bool) -> Any: ...


class PlainSteps:
    """Replaces each optimizer's `step` by `take(step, is_last=...)`, except for calls made `inside`.

    A scheduler created later wraps the replacement, which therefore stays until `close`.
    """

    def __init__(self, members: Sequence[torch.optim.Optimizer], take: TakesStep) -> None:
        self._take = take
        self._is_inside = self._is_checked = False
        self._replaced: list[tuple[torch.optim.Optimizer, Any, Any]] = []
        for member in members:
            before = member.__dict__.get("step")
            wrapped = replaced_step(member, partial(self._step, is_last=member is members[-1]))
            member.__dict__["step"] = wrapped
            self._replaced.append((member, before, wrapped))

    def _step(self, step: partial[Any], *, is_last: bool) -> Any:
        if self._is_inside:
            return step()
        self._require_no_scaler()
        closure = step.args[0] if step.args else step.keywords.get("closure")
        if not callable(closure):
            return self._take(step, is_last=is_last)
        with torch.enable_grad():  # its forward begins the iteration that the step ends
            loss = closure()
        more = {key: value for key, value in step.keywords.items() if key != "closure"}
        found = self._take(partial(step.func, lambda: loss, *step.args[1:], **more), is_last=is_last)
        return loss if found is None else found  # also of a step that is taken again

    def _require_no_scaler(self) -> None:
        """Asked at the first step."""
        caller = None if self._is_checked else caller_within("torch.amp.grad_scaler")
        if caller is not None and caller.f_locals["self"].is_enabled():
            raise ConfigError(_HAS_SCALER)
        self._is_checked = True

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
