"""The numbers with which a rehearsed forward computes, and by which it numbers its samples or tokens.

[Note: numbers of samples] A function that depends on how many samples or tokens there are is right for all of them
alone, not for a part: `x / len(x)`, a capacity of so many tokens, `h / mask.sum()`, `h * math.log(h.shape[1])`. No
shape tells. So a forward is rehearsed with another number of them, and the numbers are compared with which operators
compute: they are the same if they do not depend on it.

[Note: made of numbers] Such numbers also come as tensors (`torch.tensor(len(x))`, `torch.full((8,), len(x))`,
`torch.ones(len(x)).sum()`), and one along samples or tokens may tell them apart: `torch.arange(len(x))`, a list of
numbers, a table made with numpy. So what a forward makes of numbers alone, of no parameter and of nothing in the batch,
is also computed with values. Where it meets something else, its values count as numbers do, and along the samples they
have to be alike, unless they are places: `x[torch.arange(len(x)), last]` is right for a part, too. What has samples
without being made of anything that has, as the first rows of a table, numbers them as well.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from shardwise.runtime.nested import argument_tensors
from shardwise.runtime.rehearsal.integers import SMALL_NUMEL, is_real
from shardwise.system.torch_functions import bound, is_dispatched_by_ours, operator_name
from shardwise.system.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UncompiledMode,
    storage_id,
    tree_map_only,
    unset_fake_temporarily,
)

Tensor = torch.Tensor
_FEW_NUMEL = 2**12
"""The most values of the batch that are compared."""
_CONSTANTS = frozenset({"lift_fresh", "lift_fresh_copy"})
"""What `torch.tensor` makes of Python's numbers."""
_REPEATING = frozenset({"expand", "repeat", "repeat_interleave"})
_PLACES = frozenset({"index", "indices"})


class NumbersUsed(UncompiledMode):
    """Notes the numbers with which operators compute what is no integer, and what numbers samples: see [Note: numbers
    of samples] and [Note: made of numbers]."""

    def __init__(self, num_samples: int, *, also_of_sums: bool = False) -> None:
        """Of what has a dimension of `num_samples`, which may be tokens, or of a multiple, and of what becomes part of
        it: a sum over all tokens may be divided by their number, as a mean is. `also_of_sums`: of everything."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._num_samples = num_samples
        self._also_of_sums = also_of_sums
        self.numbering = ""
        """How samples are numbered first, in words; "" if they are not."""
        self._noted: list[tuple[str, tuple[object, ...]]] = []
        self._values = WeakIdKeyDictionary()
        """What was made of numbers alone: its values."""
        self._data: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        """Storages with values that are the batch's, a model's, or computed of these, by identity."""
        self._numbers = WeakIdKeyDictionary()
        """Integers that number samples."""
        self._within = WeakIdKeyDictionary()
        """Of what has no samples: the numbers with which it was computed, as a hash."""

    def given(self, tensors: Iterable[Tensor]) -> None:
        """Parameters, buffers and batch: what is made of them is made of no numbers alone."""
        for storage in (tensor.untyped_storage() for tensor in tensors if is_real(tensor)):
            self._data[storage_id(storage)] = weakref.ref(storage)

    def __torch_dispatch__(
        self,
        func: Any,  # an operator
        types: Sequence[type],  # torch's signature
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = operator_name(func)
        if not self._is_made_of_numbers(func, name, args, kwargs):
            self._forget_written(func, args, kwargs)
            result = func(*args, **kwargs)
            self._note(func, name, args, kwargs, result)
            return result
        try:
            result = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):  # as torch.ones(n).nonzero()
            values = self._computed(func, args, kwargs)
            if values is None:
                raise
            return values
        made = list(argument_tensors(result))
        if made and not all(map(is_real, made)) and sum(one.numel() for one in made) <= SMALL_NUMEL:
            values = self._computed(func, args, kwargs)
            self._values.update(zip(made, argument_tensors(values), strict=False))
        return result

    # -- what is made of numbers alone -------------------------------------------------------------------

    def _is_made_of_numbers(self, func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        if torch.Tag.nondeterministic_seeded in func.tags:
            return False
        if name in _CONSTANTS or _is_like(name):
            return True
        return all(self._value(one) is not None for one in argument_tensors((args, kwargs)))

    def _value(self, tensor: Tensor) -> Tensor | None:
        """What was made of numbers alone, here or before (by numpy, as a global), with values."""
        if is_real(tensor):
            known = self._data.get(storage_id(tensor.untyped_storage()))
            return tensor if known is None or known() is None else None
        found: Tensor | None = self._values.get(tensor)
        return found

    def _computed(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The result with values, on the CPU; `None` if there is none."""
        is_constant = operator_name(func) in _CONSTANTS

        def with_values(tensor: Tensor) -> Tensor:
            value = self._value(tensor)
            if value is None:  # whose shape alone is taken
                return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            return value.clone() if is_constant else value.cpu()

        with unset_fake_temporarily():
            given, named = tree_map_only(Tensor, with_values, (args, dict(kwargs)))
            named.pop("pin_memory", None)
            if named.get("device") is not None:
                named["device"] = torch.device("cpu")
            try:
                values = func(*given, **named)
            except Exception:  # of an operator that has no values here, whatever it raises; the forward goes on
                return None
            return values.zero_() if "empty" in operator_name(func) else values

    def _forget_written(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """What something else is written into is no longer made of numbers alone, nor are its views."""
        if not func._schema.is_mutable:
            return
        for argument, value in bound(func, args, kwargs):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for tensor in argument_tensors(value):
                values = self._value(tensor)
                if values is None:
                    continue
                written = storage_id(values.untyped_storage())
                views = [one for one, of in self._values.items() if storage_id(of.untyped_storage()) == written]
                for view in views:
                    del self._values[view]
                self.given([tensor])

    # -- what meets something else -----------------------------------------------------------------------

    def _note(self, func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        made = list(argument_tensors(result))
        self.given(made)
        numbers = tuple(self._numbers_in(func, name, args, kwargs, made))
        if any(map(self._has_samples, made)):
            given = list(argument_tensors((args, kwargs)))
            if given and name not in _REPEATING and not any(map(self._has_samples, given)):
                self._note_numbering(f"rows of a table, by {name}", made)
        floating = [one for one in made if one.is_floating_point()]
        if any(self._also_of_sums or self._has_samples(one) for one in floating):
            self._noted.append((name, numbers))
        elif numbers:
            self._within.update((one, hash((name, numbers))) for one in floating)

    def _note_numbering(self, how: str, made: Sequence[Tensor]) -> None:
        """Integers may yet become places."""
        if self.numbering or is_dispatched_by_ours():
            return
        if any(one.is_floating_point() for one in made):
            self.numbering = how
        self._numbers.update((one, True) for one in made)

    def _has_samples(self, tensor: Tensor) -> bool:
        return any(one and one % self._num_samples == 0 for one in tensor.shape)

    def _numbers_in(
        self, func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], made: Sequence[Tensor]
    ) -> Iterator[object]:
        """The numbers in the arguments of an operator that are neither sizes nor places, as such and in tensors."""
        computing, numbering = _computing(func), f"{name} with what numbers them, as torch.arange does"
        picks = bool(args) and isinstance(args[0], Tensor) and self._has_samples(args[0])
        for argument, value in bound(func, args, kwargs):
            if type(value) in (int, float) and argument.name in computing:
                yield value
            if picks and argument.name in _PLACES:
                continue
            for tensor in argument_tensors(value) if isinstance(value, Tensor | list | tuple) else ():
                known = self._value(tensor)
                if known is not None:
                    if is_dispatched_by_ours():  # split attention knows which tokens it has
                        continue
                    if self._tells_apart(known):
                        self._note_numbering(numbering, made)
                    yield _summary(known)
                elif tensor in self._numbers:
                    self._note_numbering(numbering, made)
                elif tensor in self._within:
                    yield self._within[tensor]
                elif is_real(tensor) and tensor.numel() <= _FEW_NUMEL and not self._has_samples(tensor):
                    yield _summary(tensor)

    def _tells_apart(self, values: Tensor) -> bool:
        with unset_fake_temporarily():
            return any(
                size and size % self._num_samples == 0 and not _is_constant(values, dim)
                for dim, size in enumerate(values.shape)
            )

    def difference(self, other: NumbersUsed) -> str:
        """The first operator that another forward has computed with other numbers; "" if there is none, or if that
        forward took another path."""
        if [name for name, _ in self._noted] != [name for name, _ in other._noted]:
            return ""
        pairs = zip(self._noted, other._noted, strict=True)
        # Other values than the numbers of samples may be as many, in one forward and not in the other.
        return next((name for (name, one), (_, another) in pairs if len(one) == len(another) and one != another), "")


def _is_like(name: str) -> bool:
    """Whether an operator takes the shape of what it is given, and no values."""
    return name.startswith("new_") or (name.endswith("_like") and not name.startswith("rand"))


def _summary(values: Tensor) -> object:
    """What tells these values from others: the number, if they are all one, and otherwise a hash. Along a dimension in
    which they are alike, their number does not count."""
    with unset_fake_temporarily():
        for dim in range(values.dim()):
            if values.shape[dim] and _is_constant(values, dim):
                values = values.narrow(dim, 0, 1)
        plain = values.detach().to("cpu", torch.complex128 if values.is_complex() else torch.float64)
        return plain.item() if plain.numel() == 1 else hash((tuple(plain.shape), plain.contiguous().numpy().tobytes()))


def _is_constant(values: Tensor, dim: int) -> bool:
    first = values.narrow(dim, 0, 1)
    return bool(((values == first) | ((values != values) & (first != first))).all())


@lru_cache(None)
def _computing(operator: Any) -> frozenset[str]:
    """The arguments of an operator that may be numbers with which it computes."""
    kinds = ("Tensor", "number", "float")
    return frozenset(one.name for one in operator._schema.arguments if any(kind in str(one.type) for kind in kinds))
