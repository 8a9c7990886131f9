"""Parameters without values yet, and other tensors on their memory: their metadata can be read, but they refuse to be
computed with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from shardwise.errors import StateError
from shardwise.system.torch_private import TENSOR_ATTRIBUTES, DisableTorchFunctionSubclass

Tensor = torch.Tensor

_SET_DATA = TENSOR_ATTRIBUTES["data"].__set__
_READS_MEMORY = {"data", "T", "mT", "H", "mH", "real", "imag"}
_HARMLESS = {
    *("size", "stride", "storage_offset", "numel", "nelement", "dim", "ndimension", "element_size", "__len__"),
    *("is_floating_point", "is_complex", "is_contiguous", "is_signed", "get_device", "untyped_storage", "type"),
    *("requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "__hash__", "is_inference"),
    "_has_compatible_shallow_copy_type",
}


class _WithoutValues(Tensor):
    """Refuses what needs values."""

    WHY = ""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if _changes_nothing(func, args, kwargs or {}):
            return args[0]
        if not _is_harmless(func):
            raise StateError(f"{_as_written(func)} needs the values of {cls.WHY}")
        with DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Deferred(_WithoutValues, nn.Parameter):
    """A parameter from `deferred_init`, until `shard` turns the same object into an `nn.Parameter` again."""

    WHY = (
        "a parameter that was built inside deferred_init and has none yet. Do it inside `with deferred_init():`, or "
        "after shardwise.shard(model, plan)."
    )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # untyped in torch
        return f"Parameter {list(self.shape)} {self.dtype}, deferred"


class DeferredView(_WithoutValues):
    """A view, or another tensor on the memory of a deferred parameter, that has outlived `deferred_init`. It stays
    without values: `shard` gives the parameter other memory."""

    WHY = (
        "a tensor that shares the memory of a parameter built inside deferred_init, as a view, .data or .detach() do. "
        "It will never have any. Take it from the parameter again after shardwise.shard(model, plan), or .clone() it "
        "inside `with deferred_init():`."
    )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # likewise
        return f"Tensor {list(self.shape)} {self.dtype}, a view of a deferred parameter"


def defer(tensor: Tensor) -> None:
    """Make `tensor`, the same object, refuse to be computed with."""
    tensor.__class__ = Deferred if isinstance(tensor, nn.Parameter) else DeferredView


def undefer(param: Tensor) -> None:
    param.__class__ = nn.Parameter


def is_deferred(param: Tensor) -> bool:
    """Whether `param` has no values yet."""
    return isinstance(param, Deferred)


def _changes_nothing(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether it is a conversion to the parameter's own device and dtype, such as a module's `to()` does."""
    if func == _SET_DATA:
        return args[0] is args[1]
    if func is not Tensor.to:
        return False
    with DisableTorchFunctionSubclass():
        alike = torch.empty(0, dtype=args[0].dtype, device=args[0].device)
        return alike.to(*args[1:], **kwargs) is alike


def _is_harmless(func: Callable[..., Any]) -> bool:
    name = func.__name__
    if name in ("__get__", "__set__", "__delete__"):
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        return attribute not in _READS_MEMORY
    return name in _HARMLESS


def _as_written(func: Callable[..., Any]) -> str:
    owner = getattr(getattr(func, "__self__", None), "__name__", "")
    return f".{owner}" if func.__name__ in ("__get__", "__set__") else f"{func.__name__}()"
