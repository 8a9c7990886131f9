"""Errors for models that cannot be rehearsed, with the responsible line of the model."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch
from torch import nn

from shardwise import errors
from shardwise.errors import ModelError
from shardwise.system.torch_private import DataDependentOutputException, DynamicOutputShapeException

WITHOUT_ONE = (
    "leave the batch away, and activations will not be counted; or, where a plan is searched for, name a preset."
)
LIBRARY_FOLDERS = (Path(torch.__file__).parent, Path(errors.__file__).parent)


def refusal(error: Exception, model: nn.Module) -> ModelError:
    """The `ModelError` for an exception of `model` on tensors without values."""
    name, place = type(model).__name__, _place(error)
    if isinstance(error, DataDependentOutputException):
        return ModelError(
            f"{name} cannot be rehearsed: {place} asks for the value of a tensor, and in a rehearsal tensors have "
            f"shapes but no values. Decide there by shapes, or by a Python value that the model is given; or "
            f"{WITHOUT_ONE}"
        )
    if isinstance(error, DynamicOutputShapeException):
        return ModelError(
            f"{name} cannot be rehearsed: at {place} the values of a tensor decide how large another one is "
            f"({error.func}), and in a rehearsal tensors have no values. Select by a mask or a fixed number of "
            f"elements there; or {WITHOUT_ONE}"
        )
    return ModelError(
        f"{name} could not be rehearsed on this batch: at {place} {type(error).__name__}: {error}. In a rehearsal "
        f"tensors have shapes but no values. See whether the model itself takes this batch; if it does, "
        f"{WITHOUT_ONE}"
    )


def _place(error: Exception) -> str:
    """The innermost line outside of torch and shardwise: `model.py:12, in forward, "if x.sum() > 0:"`."""
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if _is_user_code(frame.filename)]
    if not user_frames:
        return "a place outside of any forward,"
    last = user_frames[-1]
    return f"{last.filename}:{last.lineno}, in {last.name}, {last.line!r},"


def _is_user_code(file: str) -> bool:
    path = Path(file)
    return path.is_file() and not any(path.is_relative_to(folder) for folder in LIBRARY_FOLDERS)
