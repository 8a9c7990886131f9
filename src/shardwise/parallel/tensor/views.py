"""Detects hard-coded numbers of heads in a forward, by its views of split tensors on the first batch.

[Note: views] A forward with a hard-coded number of heads (`x.unflatten(-1, (3, 12, -1))`) also accepts a part of the
features, and makes the same number of narrower heads from it: shapes fit, but results are wrong. So at the first batch,
the unsplit and the split model both run on fake tensors, and their views are compared. Features are split by whole
heads, so only the dimension of a view that counts heads (in each fused part) may change. If another one changes, such
as tokens or the size of a head, the number of heads is hard-coded.

Shapes of outputs would not show it: heads of half the width make as many features.
"""

from __future__ import annotations

import copy
import math
import os
import pickle
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import shardwise.errors
from shardwise.comm import Line
from shardwise.errors import ModelError
from shardwise.memory import Unit
from shardwise.parallel.tensor.partition import AXIS
from shardwise.plan.placement import Dtype

if TYPE_CHECKING:
    from shardwise.runtime.rehearsal import Twin

Shape = tuple[int, ...]
_VIEWS = frozenset(
    {
        torch.Tensor.view,
        torch.Tensor.reshape,
        torch.reshape,
        torch.Tensor.unflatten,
        torch.unflatten,
        torch.Tensor.flatten,
        torch.flatten,
    }
)
_TORCH, _OURS = (f"{Path(str(module.__file__)).parent}{os.sep}" for module in (torch, shardwise.errors))


@dataclass(frozen=True)
class View:
    """A view that the forward of the module at `path` took."""

    path: str
    source: Shape
    target: Shape


class ViewCheck:
    """Compares the views in the first forward of a split model with those of the unsplit model."""

    def __init__(self, model: nn.Module, parts: Collection[int]) -> None:
        """Create it before the model is split; `parts` are the numbers of fused matrices in its modules."""
        self._unsplit: nn.Module | None = _on_meta_device(model)
        self._parts = frozenset(parts)

    def watch(self, model: nn.Module, units: Sequence[Unit], compute: Dtype, line: Line) -> Callable[[], None]:
        """Call it after the model is split. The first forward raises `ModelError` on all ranks of `line` if the views
        differ. Does nothing if the model could not be copied. Returns what ends it."""
        if self._unsplit is None:
            return lambda: None
        device = units[0].flats[0].device

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            handle.remove()
            unsplit, self._unsplit = self._unsplit, None
            if unsplit is None:
                return
            unsplit.train(module.training)
            problem = ""
            try:
                expected = _views(unsplit, (), args, kwargs, device, compute)
                problem = difference(expected, _views(module, units, args, kwargs, device, compute), self._parts)
            except ModelError:  # the model reads values, so it cannot be checked
                pass
            problems = [message.decode() for message in line.exchange(problem.encode())]
            if any(problems):
                raise ModelError(next(filter(None, problems)))

        handle = model.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        return handle.remove


def difference(expected: Sequence[View], found: Sequence[View], parts: Collection[int]) -> str:
    """An error message about the first view of split features that is wrong; "" if there is none, or if the forwards
    cannot be compared because they took different paths. `parts` are the numbers of fused matrices."""
    if [view.path for view in expected] != [view.path for view in found]:
        return ""
    for whole, part in zip(expected, found, strict=True):
        if not _is_right(whole, part, parts):
            return (
                f"{whole.path or 'The model'} views {list(whole.source)} as {list(whole.target)}, and the part of it "
                f"that tensor.plan leaves on a rank along {AXIS}, {list(part.source)}, as {list(part.target)}: its "
                f"forward has a hard-coded number of heads or features. Derive it from the input, such as "
                f"x.unflatten(-1, (-1, head_dim)), name the attribute with this number in tensor.divide, or declare "
                f"fused matrices with parts."
            )
    return ""


def _is_right(whole: View, part: View, parts: Collection[int]) -> bool:
    if len(whole.source) != len(part.source) or len(whole.target) != len(part.target):
        return False
    for source, target in _groups(whole.source, whole.target):
        whole_before, whole_after = whole.source[source], whole.target[target]
        part_before, part_after = part.source[source], part.target[target]
        if math.prod(part_before) != math.prod(part_after):
            return False  # another dimension has absorbed the difference
        changed = [at for at, (one, other) in enumerate(zip(whole_after, part_after, strict=True)) if one != other]
        if len(whole_before) != 1 or len(whole_after) == 1 or not changed:
            continue
        is_split = whole_before != part_before
        if not is_split or len(changed) > 1 or math.prod(whole_after[: changed[0]]) not in {1, *parts}:
            return False
    return True


def _groups(source: Shape, target: Shape) -> list[tuple[slice, slice]]:
    """The smallest groups of dimensions with the same number of elements on both sides of a view."""
    groups = []
    at, to = 0, 0
    while at < len(source) and to < len(target):
        first, last = at, to
        here, there = source[at], target[to]
        at, to = at + 1, to + 1
        while here != there:
            if here < there and at < len(source):
                here, at = here * source[at], at + 1
            elif there < here and to < len(target):
                there, to = there * target[to], to + 1
            else:
                return [(slice(0, len(source)), slice(0, len(target)))]  # a dimension has no elements
        groups.append((slice(first, at), slice(last, to)))
    return groups


def _views(
    model: nn.Module,
    units: Sequence[Unit],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: torch.device,
    compute: Dtype,
) -> list[View]:
    """The views that a forward of `model` takes. Raises `ModelError` if it reads values."""
    from shardwise.runtime.micro_batches import MicroBatch
    from shardwise.runtime.rehearsal import rehearse_forward  # only jobs with a plan of their own for tp load it

    found: list[View] = []

    def run(twin: Twin, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        stack: list[str] = []
        for path, module in twin.model.named_modules():
            module.register_forward_pre_hook(_push(stack, path), prepend=True)
            module.register_forward_hook(lambda *_: stack.pop() and None, always_call=True)
        with _RecordViews(found, stack):
            twin.model(*args, **kwargs)

    rehearse_forward(run, model, units, MicroBatch(args, kwargs), device=device, compute=compute)
    return found


def _push(stack: list[str], path: str) -> Callable[..., None]:
    def enter(*_: object) -> None:
        stack.append(path)

    return enter


class _RecordViews(TorchFunctionMode):
    """Records the views that the model's own code takes, but not those in this library or inside torch."""

    def __init__(self, found: list[View], stack: Sequence[str]) -> None:
        super().__init__()
        self._found = found
        self._stack = stack

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],  # torch's signature
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        is_view = func in _VIEWS and isinstance(result, torch.Tensor) and result.is_floating_point()
        if is_view and not _is_called_by_us():
            path = self._stack[-1] if self._stack else ""
            self._found.append(View(path, tuple(args[0].shape), tuple(result.shape)))
        return result


def _is_called_by_us() -> bool:
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    return frame.f_code.co_filename.startswith(_OURS)


def _on_meta_device(model: nn.Module) -> nn.Module | None:
    """A copy whose parameters are on the meta device; `None` for a model that cannot be copied."""
    memo: dict[int, Any] = {
        id(param): nn.Parameter(
            torch.empty(param.shape, dtype=param.dtype, device="meta"), requires_grad=param.requires_grad
        )
        for param in model.parameters()
    }
    try:
        return copy.deepcopy(model, memo)
    except (TypeError, RuntimeError, ValueError, AttributeError, pickle.PickleError):
        return None
