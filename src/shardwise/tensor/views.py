"""Heads that are counted in a forward: found by how it views what is cut, on the first batch, without arithmetic.

[Note: views] A forward with the number of its heads written into it (`x.unflatten(-1, (3, 12, -1))`) takes a part of
the features too, and makes as many heads of it, each narrower: shapes fit, and numbers are wrong. So at the first batch
both the uncut and the cut model run on tensors without bytes, and the views that they take are compared. Of what is cut
by whole heads the outermost dimension of a view counts heads, within each fused part; any other that changes, a token's
or one within a head, is what such a forward does.
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
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import shardwise.errors
from shardwise.comm import Line
from shardwise.errors import ModelError
from shardwise.placement import Dtype
from shardwise.rehearsal import Take, Twin, Work, rehearse_work
from shardwise.storage import Unit
from shardwise.tensor.shares import AXIS

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
    """One that the forward of the module at `path` took."""

    path: str
    source: Shape
    target: Shape


class ViewCheck:
    """Compares the first forward of a model that is cut with that of one that is not, by their views."""

    def __init__(self, model: nn.Module, parts: Collection[int]) -> None:
        """Before the model is cut; `parts` are the numbers of fused matrices in its modules."""
        self._uncut: nn.Module | None = _without_bytes(model)
        self._parts = frozenset(parts)

    def watch(self, model: nn.Module, units: Sequence[Unit], compute: Dtype, line: Line) -> None:
        """Once the model is cut, unless it cannot be copied. The first forward raises `ModelError` on all ranks of
        `line` if they differ."""
        if self._uncut is None:
            return
        device = units[0].flats[0].device

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            handle.remove()
            uncut, self._uncut = self._uncut, None
            if uncut is None:
                return
            uncut.train(module.training)
            said = ""
            try:
                expected = _views(uncut, (), args, kwargs, device, compute)
                said = difference(expected, _views(module, units, args, kwargs, device, compute), self._parts)
            except ModelError:  # a model that asks for values: nobody can say
                pass
            told = [message.decode() for message in line.exchange(said.encode())]
            if any(told):
                raise ModelError(next(message for message in told if message))

        handle = model.register_forward_pre_hook(before, prepend=True, with_kwargs=True)


def difference(expected: Sequence[View], found: Sequence[View], parts: Collection[int]) -> str:
    """What is viewed otherwise than cut features should be, first, in a sentence; "" if nothing is, or nobody can say,
    since the two forwards took other ways. `parts` are the numbers of fused matrices."""
    if [view.path for view in expected] != [view.path for view in found]:
        return ""
    for whole, cut in zip(expected, found, strict=True):
        if not _is_right(whole, cut, parts):
            return (
                f"{whole.path or 'The model'} views {list(whole.source)} as {list(whole.target)}, and what tensor.plan "
                f"cuts along {AXIS}, {list(cut.source)}, as {list(cut.target)}: a number of heads or features is "
                f"written into its forward. Let it come out of the input there, such as x.unflatten(-1, (-1, "
                f"head_dim)), name the attribute that counts it in tensor.divide, or fused matrices by parts."
            )
    return ""


def _is_right(whole: View, cut: View, parts: Collection[int]) -> bool:
    if len(whole.source) != len(cut.source) or len(whole.target) != len(cut.target):
        return False
    for source, target in _groups(whole.source, whole.target):
        before, after = whole.source[source], whole.target[target]
        here, there = cut.source[source], cut.target[target]
        if math.prod(here) != math.prod(there):
            return False  # what was cut of one dimension is missing in another
        changed = [at for at, (one, other) in enumerate(zip(after, there, strict=True)) if one != other]
        if len(before) != 1 or len(after) == 1 or not changed:
            continue
        if before == here or len(changed) > 1 or math.prod(after[: changed[0]]) not in {1, *parts}:
            return False
    return True


def _groups(source: Shape, target: Shape) -> list[tuple[slice, slice]]:
    """The dimensions of a view that belong together: as few as have as many elements on both sides."""
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
                return [(slice(0, len(source)), slice(0, len(target)))]  # with dimensions of no elements
        groups.append((slice(first, at), slice(last, to)))
    return groups


def _views(
    model: nn.Module,
    units: Sequence[Unit],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    device: torch.device,
    compute: Dtype,
) -> list[View]:
    """Those that a forward of `model` takes. Raises `ModelError` for one that asks for values."""
    found: list[View] = []
    num_args, names = len(args), list(kwargs)

    def prepare(twin: Twin) -> Work:
        stack: list[str] = []
        for path, module in twin.model.named_modules():
            module.register_forward_pre_hook(_entering(stack, path), prepend=True)
            module.register_forward_hook(lambda *_: stack.pop() and None, always_call=True)

        def work(take: Take, _: object) -> None:
            found.clear()
            stack.clear()
            given, _none = take()
            with torch.no_grad(), _Log(found, stack):
                twin.model(*given[:num_args], **dict(zip(names, given[num_args:], strict=True)))

        return work

    rehearse_work(prepare, model, units, (*args, *kwargs.values()), device=device, compute=compute)
    return found


def _entering(stack: list[str], path: str) -> Callable[..., None]:
    def enter(*_: object) -> None:
        stack.append(path)

    return enter


class _Log(TorchFunctionMode):
    """Notes views that a model's own code takes: not those of this library between ranks, nor those within torch."""

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


def _without_bytes(model: nn.Module) -> nn.Module | None:
    """A copy whose parameters are on the meta device; `None` of a model that keeps what cannot be copied."""
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
