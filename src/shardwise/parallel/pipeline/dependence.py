"""Which results of a forward depend on the values of certain tensors, followed from operation to operation.

A stage computes its forward from stand-ins for the outputs of earlier stages. Nobody may use their values; shape, dtype
and device are right. Only gradients would tell otherwise, and only if there are any. So in the first forward of each
kind every operation is watched: what it computes from a stand-in carries the names of the modules for which that
stands.

[Note: sizes of values] The same shows whether values of a batch decide on shapes: a mask that selects tokens, images
that are left out, lengths that are read. Then stages tell each other the shapes of each message ([Note: layouts] in
`sends.py`). Where values of activations decide, as in experts that select their tokens, it stays within a module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from shardwise.parallel.pipeline.watched_names import FINITE, OWN, Names
from shardwise.runtime import argument_tensors
from shardwise.system.torch_private import DisableTorchFunctionSubclass, TorchDispatchMode, storage_id

Tensor = torch.Tensor
_NOTHING: Names = frozenset()
_NUMBER = "aten::_local_scalar_dense"
_MASKS = (torch.bool, torch.uint8)
_OVERWRITING = ("aten::copy_", "aten::fill_", "aten::zero_")
_READING = (_NUMBER, "aten::equal", "aten::is_nonzero")
"""Operations whose result is a Python number."""
_LISTING = (Tensor.tolist, Tensor.numpy, Tensor.__array__)
"""The same, of all elements, without an operation."""
_FINITENESS = (
    *(torch.isnan, torch.isinf, torch.isfinite, torch.isposinf, torch.isneginf),
    *(Tensor.isnan, Tensor.isinf, Tensor.isfinite, Tensor.isposinf, Tensor.isneginf),
)
"""Checks of which Python may read the result: stand-ins pass them, and the stage that has the values checks these."""


class Dependence(TorchDispatchMode):
    """Follows tensors that were given to `mark`, by their storage. `on_read` is called with their names if Python reads
    a value that depends on them."""

    supports_higher_order_operators = True

    def __init__(self, on_read: Callable[[Names], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._on_read = on_read
        self.batch_decides_sizes = False
        """See [Note: sizes of values]."""
        self._names: dict[int, tuple[StorageWeakRef, Names]] = {}
        """By address of a storage. The weak reference prevents another storage from getting that address."""

    def mark(self, tensor: Tensor, name: str) -> None:
        self._set(tensor, self.names(tensor) | {name})

    def names(self, value: object) -> Names:
        """The names on which tensors in `value` depend: a nest of lists, tuples and dicts."""
        if not self._names:
            return _NOTHING
        found = (self._names.get(address) for address in map(_address, argument_tensors(value)) if address is not None)
        return _NOTHING.union(*(one[1] for one in found if one is not None))

    def __torch_dispatch__(
        self,
        func: Any,  # an operator, with its schema
        types: Sequence[type],  # torch's signature
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = str(getattr(getattr(func, "_schema", None), "name", ""))
        names = self.names((args, kwargs))
        read = _NOTHING
        if name in _READING:
            read = frozenset(one for one in names if one != OWN and not one.startswith(FINITE))
        if read:
            self._on_read(read)
        if _decide_sizes(func, name, args):
            self.note_sizes(_deciding(name, args))
        result = func(*args, **kwargs)
        short = name.rpartition("::")[2]
        if names and not (short.endswith("_like") or short.startswith("new_")):
            for tensor in (*argument_tensors(result), *_written(func, args, kwargs)):
                self._set(tensor, names)
        if name in _OVERWRITING and _is_whole(args[0]):
            self._set(args[0], self.names((args[1:], kwargs)))
        return result

    def note_sizes(self, deciding: object) -> None:
        """The values of these tensors may decide on shapes."""
        self.batch_decides_sizes |= not self.names(deciding)

    def note_check(self, result: object) -> None:
        """`result` says whether values are finite, and nothing else of them."""
        for tensor in argument_tensors(result):
            names = self.names(tensor)
            self._set(tensor, frozenset(one if one == OWN else FINITE + one.removeprefix(FINITE) for one in names))

    def _set(self, tensor: Tensor, names: Names) -> None:
        address = _address(tensor)
        if address is None:
            return
        if names:
            with DisableTorchFunctionSubclass():
                kept = StorageWeakRef(tensor.untyped_storage())
            self._names[address] = (kept, names)
        else:
            self._names.pop(address, None)


class FunctionsOfValues(TorchFunctionMode):
    """Tells a `Dependence` which tensors only say whether values are finite, and which are made lists."""

    def __init__(self, dependence: Dependence) -> None:
        super().__init__()
        self._dependence = dependence

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],  # torch's signature
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _LISTING and not args[0].is_floating_point():
            self._dependence.note_sizes(args[0])
        if func in _FINITENESS:
            self._dependence.note_check(result)
        return result


def _decide_sizes(func: Any, name: str, args: Sequence[Any]) -> bool:
    """Whether values of tensors decide on the shape of what an operation returns, or become an integer."""
    if name == _NUMBER:
        return not (args[0].is_floating_point() or args[0].dtype == torch.bool)
    if torch.Tag.dynamic_output_shape not in getattr(func, "tags", ()):
        return False
    return name != "aten::index" or any(one is not None and one.dtype in _MASKS for one in args[1])


def _deciding(name: str, args: Sequence[Any]) -> object:
    """The arguments whose values do."""
    return args[1] if name in ("aten::index", "aten::masked_select") else args


def _address(tensor: Tensor) -> int | None:
    """Of the storage; `None` for a tensor without one."""
    try:
        with DisableTorchFunctionSubclass():  # parameters at rest, and logits that are split, would hide theirs
            return storage_id(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):
        return None


def _is_whole(tensor: Tensor) -> bool:
    """Whether the tensor is all of its storage."""
    return _address(tensor) is not None and tensor.nbytes == tensor.untyped_storage().nbytes()


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The arguments that an operator writes to, which it need not return (such as running statistics)."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from argument_tensors(args[place] if place < len(args) else kwargs.get(argument.name))
