"""What a call of the model in stages returns, from the last stage to all ranks of the pipeline."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from shardwise.errors import ModelError, StateError
from shardwise.parallel.pipeline.caches import is_cache
from shardwise.parallel.pipeline.stage_layout import AXIS
from shardwise.parallel.pipeline.stage_messages import DTYPES, Layout
from shardwise.runtime import tensors_in
from shardwise.system.torch_private import tree_flatten, tree_unflatten, treespec_dumps, treespec_loads

Tensor = torch.Tensor
_CLASS = "class of these fields"
_COLLECTED = ("output_hidden_states", "output_attentions")


def describe(
    output: Any, cache: Any, model: str, tensors: list[Tensor], stays: Callable[[Tensor], bool] = lambda _: False
) -> dict[str, Any]:
    """An output as plain data, apart from its tensors, which are appended to `tensors`; or why it is refused. Of those
    that `stays` says so, only the shape and dtype are told."""
    try:
        output = _opened(output)
    except ModelError as error:
        return {"refused": f"{model} returns {error}"}
    leaves, spec = tree_flatten(output, is_leaf=is_cache)
    plain: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.dtype in DTYPES.values() and leaf.layout is torch.strided:
            if stays(leaf):
                plain.append({"stays": Layout.of(leaf).plain()})
            else:
                plain.append({"tensor": len(tensors)})
                tensors.append(leaf)
        elif leaf is cache or leaf is None or isinstance(leaf, bool | int | float | str):
            plain.append({"cache": True} if leaf is not None and leaf is cache else {"plain": leaf})
        else:
            what = f"a tensor of {leaf.dtype}" if isinstance(leaf, Tensor) else f"a {type(leaf).__name__}"
            return _refused(model, what)
    try:
        shape = treespec_dumps(spec)
    except NotImplementedError:
        return _refused(model, f"a {type(output).__name__}")
    return {"shape": shape, "leaves": plain, "tensors": [Layout.of(one).plain() for one in tensors]}


def _refused(model: str, what: str) -> dict[str, Any]:
    return {
        "refused": f"{model} returns {what}, which the last pipeline stage cannot send to the others. Let it return "
        f"tensors, in tuples, lists, dicts, namedtuples or dataclasses; with transformers, try use_cache=False."
    }


def layouts_in(described: Mapping[str, Any]) -> list[Layout]:
    """The layouts of the tensors that are sent. Raises `ModelError` for an output that is refused."""
    if "refused" in described:
        raise ModelError(described["refused"])
    return [Layout.of_plain(plain) for plain in described["tensors"]]


def rebuilt(described: Mapping[str, Any], cache: Any, tensors: Sequence[Tensor]) -> Any:
    """The output that `describe` has described."""
    leaves: list[Any] = []
    for one in described["leaves"]:
        if "tensor" in one:
            leaves.append(tensors[one["tensor"]])
        elif "stays" in one:
            leaves.append(NotSent.of(Layout.of_plain(one["stays"])))
        else:
            leaves.append(cache if "cache" in one else one["plain"])
    return _closed(tree_unflatten(leaves, treespec_loads(described["shape"])))


def _opened(value: Any) -> Any:
    """`value` with namedtuples and dataclasses, at any depth, as dicts that name their class, for `_closed`."""
    if type(value) in (list, tuple):
        return type(value)(map(_opened, value))
    if type(value) is dict:
        return {key: _opened(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        named = dict(zip(value._fields, value, strict=True))
    elif is_dataclass(value) and not isinstance(value, type | Mapping):  # transformers' outputs are mappings
        named = {one.name: getattr(value, one.name) for one in fields(value)}
    else:
        return value
    kind = type(value)
    place = f"{kind.__module__}:{kind.__qualname__}"
    if _class_at(place) is not kind:
        raise ModelError(
            f"a {kind.__name__}, a class that other ranks cannot find by its name. Define it at the top level of a "
            f"module, outside of functions."
        )
    return {_CLASS: place, **{name: _opened(item) for name, item in named.items()}}


def _closed(value: Any) -> Any:
    """What `_opened` was given."""
    if type(value) in (list, tuple):
        return type(value)(map(_closed, value))
    if type(value) is not dict:
        return value
    items = {key: _closed(item) for key, item in value.items() if key != _CLASS}
    if _CLASS not in value:
        return items
    kind: Any = _class_at(value[_CLASS])
    if kind is None:
        raise ModelError(
            f"The model returns a {value[_CLASS]}, which this rank has not imported. Import it on all ranks."
        )
    if hasattr(kind, "_fields"):
        return kind(**items)
    made = object.__new__(kind)
    for name, item in items.items():
        object.__setattr__(made, name, item)  # as they were, also of a frozen one
    return made


def _class_at(place: str) -> type | None:
    """The namedtuple or dataclass of that module and name; `None` if this process has none. Nothing is imported."""
    module, _, name = place.partition(":")
    try:
        found = attrgetter(name)(sys.modules.get(module))
    except AttributeError:
        return None
    return found if isinstance(found, type) and (is_dataclass(found) or hasattr(found, "_fields")) else None


def refuse_collected(model: nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Raise `ModelError` for a call of a model of transformers that collects something of all layers."""
    config = getattr(model, "config", None)
    for name in _COLLECTED:
        asked = kwargs.get(name)
        if getattr(config, name, False) if asked is None else asked:
            raise ModelError(
                f"{name} collects something of all layers, and a rank of a pipeline has only those of its stages. "
                f"Leave it out of the call, or the axis {AXIS!r} out of the mesh."
            )


class NotSent(Tensor):
    """Stands for a tensor that the last stage has not sent: it has its shape and dtype, and all else raises."""

    @classmethod
    def of(cls, layout: Layout) -> NotSent:
        return torch.empty(layout.shape, dtype=layout.dtype, device="meta").as_subclass(cls)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _OF_SHAPE:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]  # torch's own
        raise _used(next(one for one in tensors_in((args, dict(kwargs or {}))) if isinstance(one, cls)))


def _used(tensor: Tensor) -> StateError:
    return StateError(
        f"A tensor of shape {list(tensor.shape)}, beside a loss, stays on the last pipeline stage: each call would "
        f"send it to all ranks. To compute another loss of it, call the model without labels: what it returns is then "
        f"sent. To look at it, call the model under torch.no_grad()."
    )


_OF_SHAPE = {
    *(Tensor.dim, Tensor.size, Tensor.numel, Tensor.element_size, Tensor.is_floating_point),
    *(Tensor.__len__, Tensor.__repr__),
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "ndim", "nbytes", "itemsize", "requires_grad")),
}
