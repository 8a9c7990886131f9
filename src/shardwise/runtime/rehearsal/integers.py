"""Tensors without bytes, except for small integers, which have values.

[Note: integers] The data that a model branches on is mostly integers: whether a position is masked, whether positions
restart, how long the longest row is. They are small, so token ids, masks and positions keep their values, and code that
reads them gets the answer that it gets in training. (transformers checks whether a tensor is fake, and if so uses masks
that training does not need.) Few floating-point numbers that are computed of integers alone keep them too: positions in
time become integers again. Other floating-point tensors have values only if they are those of a batch, or computed from
these alone, and where a forward is followed for a step that is about to begin: some models look for images that are all
zero. Elsewhere a batch is an example.

What a mask with values selects has as many elements as in training, though these have no values.

[Note: finite values] Models ask whether what they have computed is finite, to clamp it or to end a run. It is, in a
rehearsal: `isfinite(x).all()` and the like have that answer.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from shardwise.system.marked import Marked
from shardwise.system.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UncompiledMode,
    storage_id,
    tree_leaves,
    unset_fake_temporarily,
)

SMALL_NUMEL = 2**22
"""Larger integer tensors (one-hot vectors, a mask for every head) have no values, so that a rehearsal needs no
memory."""
SMALL_FLOAT_NUMEL, FEW_NUMEL = 2**24, 2**16
"""The same for a batch's floating-point tensors, and for those that are computed of integers."""
_aten = torch.ops.aten
_INDEXING = frozenset({_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default})
_NOT_FINITE = frozenset({_aten.isnan.default, _aten.isinf.default, _aten.isposinf.default, _aten.isneginf.default})
_EQUAL, _UNEQUAL = frozenset({_aten.eq.Tensor, _aten.eq.Scalar}), frozenset({_aten.ne.Tensor, _aten.ne.Scalar})
_SUMMARIES = frozenset({*(_aten.all.default, _aten.all.dim), *(_aten.any.default, _aten.any.dim)})
_BOTH = frozenset({_aten.mul.Tensor, _aten.bitwise_and.Tensor, _aten.logical_and.default})
_EITHER = frozenset({_aten.bitwise_or.Tensor, _aten.logical_or.default})
_OPPOSITE = frozenset({_aten.bitwise_not.default, _aten.logical_not.default})
NO_LARGER = frozenset(
    {
        *(_aten.alias.default, _aten.clone.default, _aten.cumsum.default, _aten.detach.default, _aten.neg.default),
        *(_aten.select.int, _aten.slice.Tensor, _aten.squeeze.dim, _aten.unsqueeze.default, _aten.view.default),
        *(
            _aten.add.Tensor,
            _aten.sub.Tensor,
            _aten.mul.Tensor,
            _aten.eq.Scalar,
            _aten.ne.Scalar,
            _aten._to_copy.default,
        ),
        *_SUMMARIES,
        *_OPPOSITE,
    }
)
"""Operations whose result has at most as many elements as their operand, if that is one tensor."""
_SPECIAL = frozenset({_aten.masked_select.default}).union(
    _INDEXING, _NOT_FINITE, _EQUAL, _UNEQUAL, _SUMMARIES, _BOTH, _EITHER, _OPPOSITE
)
"""Operations whose results may be known although what they are given has no values."""


class Integers(UncompiledMode):
    """Above a `FakeTensorMode`: runs operations whose inputs and outputs are all small integers, or floating-point
    tensors of a batch and what is computed from them. See [Note: integers], and [Note: finite values].

    Random ones are not run, because a rehearsal draws no numbers.
    """

    def __init__(self, floats: Iterable[torch.Tensor] = ()) -> None:
        """`floats`: the floating-point tensors that have values."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._floats: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        """Storages of floating-point tensors that have values, by identity."""
        self._note(floats)
        self._answers = WeakIdKeyDictionary()
        """Of checks whether something is finite: the one value of all elements."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],  # torch's signature
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _SPECIAL:
            args, result = self._foreseen(func, args, kwargs or {})
            if result is not None:
                return result
        if any(isinstance(one, torch.Tensor) and not self._has_values(one) for one in args):
            if self._answers and args[0] in self._answers and func._schema.is_mutable:  # type: ignore[attr-defined]
                del self._answers[args[0]]
            return func(*args, **(kwargs or {}))  # as most do: nothing more need be looked at
        is_drawn = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        given = list(_tensors((args, kwargs)))
        if is_drawn or not all(map(self._has_values, given)):
            return func(*args, **(kwargs or {}))
        if len(given) == 1 and func in NO_LARGER and given[0].numel() <= FEW_NUMEL:
            return self._run(func, args, kwargs or {})
        try:
            foreseen = func(*args, **(kwargs or {}))
        except (DataDependentOutputException, DynamicOutputShapeException):
            foreseen = None  # depends on the values
        most_floats = SMALL_FLOAT_NUMEL if any(map(_is_inexact, given)) else FEW_NUMEL if given else -1
        if not all(_is_small(one, most_floats) for one in _tensors(foreseen)):
            return foreseen
        return self._run(func, args, kwargs or {})

    def _run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """With values."""
        with unset_fake_temporarily():
            result = func(*args, **kwargs)
        self._note(_tensors(result))
        return result

    def _note(self, tensors: Iterable[torch.Tensor]) -> None:
        for storage in (one.untyped_storage() for one in tensors if _is_inexact(one)):
            self._floats[storage_id(storage)] = weakref.ref(storage)

    def _has_values(self, tensor: torch.Tensor) -> bool:
        if not is_real(tensor) or not _is_inexact(tensor):
            return is_real(tensor)
        known = self._floats.get(storage_id(tensor.untyped_storage())) if self._floats else None
        return known is not None and known() is not None

    def _foreseen(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], torch.Tensor | None]:
        """The arguments of one of the `_SPECIAL` operations, with places instead of masks, and its result if that is
        known in another way than by running it."""
        given = args[0]
        if self._has_values(given):
            return args, None
        if func in _INDEXING:
            return (given, _places(args[1]), *args[2:]), None
        if func is _aten.masked_select.default:
            return args, _selected(given, args[1]) if is_real(args[1]) else None
        answer = self._answer(func, args)
        if answer is None:
            return args, None
        result: torch.Tensor = func(*args, **kwargs)
        if func in _SUMMARIES and is_small_integers(result):
            with unset_fake_temporarily():
                return args, torch.full(result.shape, answer, device=result.device)
        self._answers[result] = answer
        return args, result

    def _answer(self, func: Callable[..., Any], args: tuple[Any, ...]) -> bool | None:
        """What all elements of the result are, if they say whether something is finite."""
        if func in _NOT_FINITE:
            return False
        if func in _EQUAL or func in _UNEQUAL:  # `isfinite(x)` is (x == x) * (x.abs() != inf)
            is_equal = args[1] is args[0]
            is_known = is_equal or (isinstance(args[1], float) and args[1] == math.inf)
            return is_equal == (func in _EQUAL) if is_known else None
        known = [self._answers.get(one) for one in args if isinstance(one, torch.Tensor)] if self._answers else [None]
        if None in known:
            return None
        if func in _OPPOSITE:
            return not known[0]
        return any(known) if func in _EITHER else all(known)


def _places(indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """The indices of an operation, with the places that a mask selects instead of each mask that has values."""
    found: list[torch.Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8) or not index.dim() or not is_real(index):
            found.append(index)
            continue
        with unset_fake_temporarily():
            found += index.nonzero(as_tuple=True)
    return found


def _selected(given: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    with unset_fake_temporarily():
        num = int(mask.expand(torch.broadcast_shapes(given.shape, mask.shape)).sum())
    return given.new_empty(num)


def like(tensor: torch.Tensor, device: torch.device, *, keeps_floats: bool = False) -> torch.Tensor:
    """A copy on `device` with the shape, strides, dtype and `requires_grad` of `tensor`.

    It has values if those are known small integers, or with `keeps_floats` others that are small; otherwise no bytes.
    """
    if is_real(tensor) and _is_small(tensor, SMALL_FLOAT_NUMEL if keeps_floats else -1):
        with unset_fake_temporarily():
            plain = tensor.plain() if isinstance(tensor, Marked) else tensor  # a model computes with plain ones
            return plain.detach().clone().to(device).requires_grad_(tensor.requires_grad)
    dtype = torch.float64 if is_small_integers(tensor) else tensor.dtype  # small integers would be what is in memory
    twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=device).to(tensor.dtype)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(twin, requires_grad=tensor.requires_grad)
    return twin.requires_grad_(tensor.requires_grad)


def _tensors(values: object) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))


def is_real(tensor: torch.Tensor) -> bool:
    return not (isinstance(tensor, FakeTensor) or tensor.is_meta)


def is_small_integers(tensor: torch.Tensor) -> bool:
    return not _is_inexact(tensor) and tensor.numel() <= SMALL_NUMEL


def _is_small(tensor: torch.Tensor, most_floats: int) -> bool:
    return tensor.numel() <= (most_floats if _is_inexact(tensor) else SMALL_NUMEL)


def _is_inexact(tensor: torch.Tensor) -> bool:
    dtype = tensor.dtype
    return dtype.is_floating_point or dtype.is_complex
