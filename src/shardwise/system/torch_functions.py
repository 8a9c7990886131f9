"""Torch's functions by name, the dimensions along which a call works, what operators are given, and whose call
it is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch.nn import functional

from shardwise.system.whose_code import TORCHS, whose

Function = Callable[..., Any]


def named(*names: str) -> set[Function]:
    """The functions of these names, and the methods of tensors."""
    owners = (torch, torch.Tensor, functional, torch.linalg)
    return {getattr(owner, name) for name in names for owner in owners if hasattr(owner, name)}


PRODUCTS_OF_TWO = frozenset({*named("matmul", "mm", "bmm", "mv", "einsum"), torch.Tensor.__matmul__})
"""Products of matrices; of several operands, those of `einsum`."""


def dims_of(
    given: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any], place: int, default: int | None = None
) -> list[int]:
    """The dimensions of `given`, the first of `args`, that a call is told to work along by its argument `dim`, which is
    at `place`; none if it works on all elements, or with another tensor."""
    dims = kwargs.get("dim", kwargs.get("dims", args[place] if len(args) > place else default))
    several = dims if isinstance(dims, list | tuple) else [dims]
    return [one % given.dim() for one in several if isinstance(one, int) and not isinstance(one, bool) and given.dim()]


SHAPED_ALONG: Mapping[Function, tuple[int, int | None]] = {
    **dict.fromkeys(named("softmax", "log_softmax", "cumsum", "cumprod", "logcumsumexp", "cummax", "flip"), (1, None)),
    **dict.fromkeys(named("sort", "argsort"), (1, -1)),
    **dict.fromkeys(named("roll"), (2, None)),
    **dict.fromkeys(named("normalize"), (2, 1)),
}
"""Functions that mix along dimensions and leave the shape alone, with the place of that argument, and its default."""


def picks(index: Any, num_dims: int, size: int, dim: int) -> bool:
    """Whether an index of a tensor takes some of the `size` entries of its dimension `dim`."""
    place = 0
    index = index if isinstance(index, tuple) else (index,)
    taken = sum(num_indexed(one) for one in index)
    for one in index:
        if place == dim and one is not None and one is not Ellipsis:
            if isinstance(one, slice):
                return one.indices(size) != (0, size, 1)
            return True
        place += num_dims - taken if one is Ellipsis else num_indexed(one)
        if place > dim:
            return False
    return False


def operator_name(operator: Any) -> str:
    """`add_` of `aten::add_.Tensor`."""
    return str(operator._schema.name.partition("::")[2])


def bound(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """What an operator is given, each value behind its argument in the schema."""
    arguments = operator._schema.arguments
    by_name = {argument.name: argument for argument in arguments}
    return [*zip(arguments, args, strict=False), *((by_name[name], value) for name, value in kwargs.items())]


def num_indexed(entry: Any) -> int:
    """For how many dimensions an entry of an index is; `...` counts as none."""
    if entry is None or entry is Ellipsis:
        return 0
    is_mask = isinstance(entry, torch.Tensor) and entry.dtype in (torch.bool, torch.uint8)
    return entry.dim() if is_mask else 1


def added_up(func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[torch.Tensor, list[int]]]:
    """The operands of one of `PRODUCTS_OF_TWO`, each with its dimensions over which the product adds up."""
    if func is torch.einsum:
        return _added_up_by_einsum(args)
    left = args[0] if args else kwargs.get("input")
    right = next((one for one in (*args[1:2], *map(kwargs.get, ("other", "mat2", "vec"))) if one is not None), None)
    if not (isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor) and left.dim() and right.dim()):
        return []
    return [(left, [left.dim() - 1]), (right, [max(right.dim() - 2, 0)])]


def _added_up_by_einsum(args: Sequence[Any]) -> list[tuple[torch.Tensor, list[int]]]:
    """Those of an equation; nothing for one given by numbers of dimensions."""
    if not args or not isinstance(args[0], str):
        return []
    operands = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
    inputs, arrow, output = args[0].replace(" ", "").partition("->")
    if not arrow:
        output = "".join(letter for letter in inputs if inputs.count(letter) == 1)
    found = []
    for term, operand in zip(inputs.split(","), operands, strict=False):
        before, _, after = term.partition("...")
        places = {letter: place for place, letter in enumerate(before)}
        places |= {letter: operand.dim() - len(after) + place for place, letter in enumerate(after)}
        found.append((operand, [place for letter, place in places.items() if letter not in output]))
    return found


def is_called_by(name: str) -> bool:
    """Whether the call that a tensor's `__torch_function__` is handling is made by a function of this name."""
    frame = _caller()
    return frame is not None and frame.f_code.co_name == name


def is_called_by_torch() -> bool:
    """Whether that call is made by a function of torch's, whoever has called that."""
    frame = _caller()
    return frame is not None and frame.f_code.co_filename.startswith(TORCHS)


def is_called_by_ours() -> bool:
    """Whether that call is made by this library's own code, maybe through a function of torch's, and other than by
    modes that pass it on."""
    return _is_ours(_caller())


def is_dispatched_by_ours() -> bool:
    """The same of the operator that a mode's `__torch_dispatch__` is handling."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _passes_on(frame):
        frame = frame.f_back
    return _is_ours(frame)


def _is_ours(frame: FrameType | None) -> bool:
    while frame is not None and (_passes_on(frame) or whose(frame.f_code.co_filename) == "others'"):
        frame = frame.f_back
    return frame is not None and whose(frame.f_code.co_filename) == "ours"


def _passes_on(frame: FrameType) -> bool:
    """Whether it is a mode's."""
    return frame.f_code.co_name.strip("_") in ("torch_function", "torch_dispatch")


def is_called_within(module: str) -> bool:
    """Whether a function of `module`, by its name, is among those that are running on this thread."""
    return caller_within(module) is not None


def caller_within(module: str) -> FrameType | None:
    """The innermost of these functions."""
    if module not in sys.modules:
        return None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != module:
        frame = frame.f_back
    return frame


def _caller() -> FrameType | None:
    """What has called the innermost `__torch_function__` that is running.

    Nothing but frames tells who it is (torch 2.13): `__torch_function__` and modes get a function and its arguments,
    which are the same from `get_gradient_edge`, which may have a parameter's node, and from code that hooks into it;
    from `distribute_tensor`, whose next call waits for other ranks, and from anybody who detaches. torch sets nothing
    while it calls, and to replace its functions would miss the modules that have imported them before.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name.strip("_") != "torch_function":
        frame = frame.f_back
    while frame is not None and frame.f_code.co_name.strip("_") == "torch_function":
        frame = frame.f_back
    return frame
