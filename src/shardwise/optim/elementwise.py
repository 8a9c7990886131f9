"""Watches whether the operations of an optimizer's step act element by element: see [Note: proof by operations]."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from shardwise.system.torch_private import TorchDispatchMode

Tensor = torch.Tensor
Args = tuple[Any, ...]
Kwargs = Mapping[str, Any] | None

_KEEPS_ORDER = frozenset(
    """alias clone copy copy_ _to_copy detach detach_ lift_fresh view _unsafe_view reshape view_as unsqueeze unsqueeze_
    squeeze view_as_real view_as_complex real imag resolve_conj resolve_neg _conj zeros_like ones_like empty_like
    full_like new_zeros new_ones new_empty new_full new_empty_strided empty zeros ones full empty_strided fill fill_
    zero zero_ masked_fill masked_fill_ _fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adagrad_""".split()  # noqa: SIM905
)
"""Operations without torch's tag `pointwise` whose results have each element from the same element of what they read.
Views of other elements, such as slices and transposed matrices, are not among them."""
_TOGETHER = frozenset({"max", "norm", "powsum", "mm"})
"""Those of `_foreach_` that are not elementwise."""
_LEAVES_TORCH = frozenset({"numpy", "tolist", "data_ptr", "__array__", "__dlpack__", "untyped_storage", "storage"})
"""Methods by which elements can be read without an operation."""


class FoundOperation(Exception):  # noqa: N818  # what a watch has found; not an error
    """The first operation of a step for which it was watched."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class Watch:
    """Inside, `FoundOperation` is raised at the first operation that draws random numbers, or, unless `only_random`, at
    the first on more than one number that is not elementwise. It is raised after the operation has run."""

    def __init__(self, *, only_random: bool = False) -> None:
        methods = [] if only_random else [_Methods()]
        self._modes: list[Any] = [*methods, _Operations(only_random=only_random)]

    def __enter__(self) -> None:
        for mode in self._modes:
            mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)


class _Operations(TorchDispatchMode):
    def __init__(self, *, only_random: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._only_random = only_random

    def __torch_dispatch__(self, func: Any, types: Any, args: Args = (), kwargs: Kwargs = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise FoundOperation(func.name())
        if not self._only_random:
            values = [*args, *(kwargs or {}).values(), result]
            if any(tensor.numel() > 1 for tensor in _tensors(values)) and not _is_elementwise(func, values):
                raise FoundOperation(func.name())
        return result


class _Methods(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Args = (), kwargs: Kwargs = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _LEAVES_TORCH and any(tensor.numel() > 1 for tensor in _tensors(args)):
            raise FoundOperation(f"Tensor.{name}")
        return func(*args, **(kwargs or {}))


def _is_elementwise(func: Any, values: Sequence[Any]) -> bool:
    """Whether `func` is elementwise on these arguments and results."""
    name = func.overloadpacket.__name__
    if func.namespace != "aten":
        return False
    if name.startswith("_foreach_"):
        lists = [tensors for value in values if isinstance(value, list | tuple) and (tensors := _tensors(value))]
        single = name.removeprefix("_foreach_").rstrip("_")
        return single not in _TOGETHER and all(map(_have_one_size, zip(*lists, strict=False)))
    if name == "index_put_":  # x[mask] = number
        mask = [index for index in values[1] if index is not None]
        is_mask = len(mask) == 1 and mask[0].dtype == torch.bool and mask[0].shape == values[0].shape
        return is_mask and values[2].numel() == 1
    if name.startswith("_fused_") and name in _KEEPS_ORDER:
        return True
    return (name in _KEEPS_ORDER or _is_pointwise(func)) and _have_one_size(_tensors(values))


def _is_pointwise(func: Any) -> bool:
    """Whether torch calls it so; a few that work in place lack the tag that their twins have."""
    if torch.Tag.pointwise in func.tags:
        return True
    twin = getattr(torch.ops.aten, func.overloadpacket.__name__.removesuffix("_"), None)
    same = getattr(twin, func._overloadname, None)
    return same is not None and torch.Tag.pointwise in same.tags


def _have_one_size(tensors: Iterable[Tensor]) -> bool:
    """Whether these have as many elements, except for single numbers. Broadcasting would give an element of one tensor
    to several of another."""
    return len({tensor.numel() for tensor in tensors} - {0, 1}) <= 1


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found
