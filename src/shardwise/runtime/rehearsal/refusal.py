"""Errors for models that cannot be rehearsed, with the responsible line of the model."""

from __future__ import annotations

import traceback

from torch import nn

from shardwise.errors import ModelError
from shardwise.system.torch_private import DataDependentOutputException, DynamicOutputShapeException
from shardwise.system.whose_code import whose

WITHOUT_BATCH = (
    "leave the batch away, and activations will not be counted; or, where a plan is searched for, name a preset"
)


def refusal(error: Exception, model: nn.Module, instead: str = "") -> ModelError:
    """The `ModelError` for an exception of `model` on tensors without values. `instead`: what else can be done."""
    name, place = type(model).__name__, _place(error)
    or_else = f"; or {instead}" if instead else ""
    if isinstance(error, DataDependentOutputException):
        return ModelError(
            f"{name} cannot be rehearsed: {place} asks for the value of a tensor, and in a rehearsal tensors have "
            f"shapes but no values. Decide there by shapes, or by a Python value that the model is given{or_else}."
        )
    if isinstance(error, DynamicOutputShapeException):
        return ModelError(
            f"{name} cannot be rehearsed: at {place} the values of a tensor decide how large another one is "
            f"({error.func}), and in a rehearsal tensors have no values. Select by a mask or a fixed number of "
            f"elements there{or_else}."
        )
    return ModelError(
        f"{name} could not be rehearsed on this batch: at {place} {type(error).__name__}: {error}. In a rehearsal "
        f"tensors have shapes but no values. See whether the model itself takes this batch"
        f"{f'; if it does, {instead}' if instead else ''}."
    )


def _place(error: Exception) -> str:
    """The innermost line of the user's code: `model.py:12, in forward, "if x.sum() > 0:"`."""
    frames = traceback.extract_tb(error.__traceback__)
    last = next((frame for frame in reversed(frames) if whose(frame.filename) == "the user's"), None)
    if last is None:
        return "a place outside of any forward,"
    return f"{last.filename}:{last.lineno}, in {last.name}, {last.line!r},"
