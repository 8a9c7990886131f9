"""What is computed of several parameters in pipeline stages, where an unsplit model has those of all stages.

[Note: terms of stages] `model.parameters()` are those of this rank's stages. A sum over them in a loss trains as it
should: each rank adds its own terms, and gradients add up. What is no sum does not, such as its root, and neither does
its value. So what is computed of parameters, or of their gradients, is marked with their names (`system/marked.py`),
and what would need the terms of all stages is refused. Terms of one module are whole, and so is what is computed of
them: a penalty for each block. So are their values, which are numbers with the same mark: two of them that are added or
compared, as in a norm of all gradients or the largest of them, would be of this rank's stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, Self

import numpy as np
import torch

from shardwise.errors import StateError
from shardwise.sharded.at_rest import uses
from shardwise.sharded.at_rest.handles import Resting, Whole, source_of
from shardwise.sharded.at_rest.stage_names import InStage, StageNames
from shardwise.system.marked import Marked
from shardwise.system.torch_functions import named
from shardwise.system.torch_private import has_own_memory, tree_leaves, tree_map_only

Tensor = torch.Tensor
_ADDED = named(
    *("add", "sub", "subtract", "rsub", "neg", "negative", "sum", "stack", "cat", "concat", "concatenate", "lerp"),
    *("__add__", "__radd__", "add_", "__sub__", "__rsub__", "sub_", "__neg__", "copy_"),
    *("detach", "clone", "to", "float", "double", "half", "bfloat16", "type", "type_as", "cpu", "cuda", "contiguous"),
    *("view", "reshape", "flatten", "ravel", "unsqueeze", "squeeze", "expand", "expand_as", "requires_grad_", "unbind"),
    *("zeros_like", "ones_like", "empty_like", "isfinite", "isnan", "isinf", "all", "any", "broadcast_tensors"),
    *("size", "dim", "numel", "backward", "register_hook", "retain_grad", "is_floating_point", "__len__", "__repr__"),
    *("__getitem__", "__iter__", "view_as", "__deepcopy__", "tensor_split", "split", "chunk"),
)
"""They add terms up, or keep them apart."""
_SCALED = named(
    *("mul", "multiply", "div", "divide", "true_divide", "mul_", "div_"),
    *("__mul__", "__rmul__", "__truediv__"),
)
"""They scale terms, by what is none."""
_VALUES = named("item", "tolist")
"""They give a number."""
_VALUE = bool | int | float | np.ndarray | Tensor
_OVERWRITES = named("zero_", "fill_", "copy_")
"""Of what a tensor had before, they leave nothing."""


class Terms(NamedTuple):
    """Of which parameters something was computed."""

    stage: StageNames
    names: frozenset[str]

    @classmethod
    def of(cls, own: Sequence[InStage]) -> Terms:
        """Of `own` parameters, of which there is one at least."""
        return cls(own[0].stage, frozenset(one.name for one in own))

    @property
    def are_partial(self) -> bool:
        return self.stage.are_of_several(self.names)

    def refuse(self, doing: str) -> NoReturn:
        """Raise `StateError`: `doing` something with terms of some stages."""
        raise StateError(
            f"{doing} what was computed of {len(self.names)} parameters ({', '.join(sorted(self.names)[:2])}, ...) "
            f"that this rank's pipeline stages have; the model has more, on other ranks. Add a sum over them to the "
            f"loss as it is, which trains all stages. Take norms and values of the whole model from "
            f"engine.gradient_norm, engine.clip_grad_norm_ and engine.state_dict(), called by all ranks: the gradient "
            f"of the root of a sum is that of sum / (2 * root), where root is a number."
        )


class TermOfStage(Marked):
    """A tensor that was computed of parameters of some stages."""

    mark: Terms

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.__repr__ and args[0].mark.are_partial:
            return f"{args[0].plain()!r}, of the parameters of some pipeline stages"
        if all(issubclass(cls, one) for one in types):
            leaves = tree_leaves((args, kwargs))
            terms, written = terms_of(leaves), Written(leaves)
            result = super().__torch_function__(func, types, args, kwargs)
            if terms is not None and func not in uses.METADATA:
                note_taken(terms, result)
                written.note(terms, result)
            elif terms is not None and func in uses.COUNTS and leaves[0].plain().dim():  # a number is not counted
                terms.stage.share.note_counted(*terms.names)
            is_value = type(result) is float and func in _VALUES and isinstance(args[0], cls)
            return NumberOfStage.of(result, args[0].mark) if is_value else result
        if all(issubclass(one, cls | Resting | Whole) for one in types):
            return NotImplemented  # parameters know terms, too, and mark what comes of both
        plain = tree_map_only(cls, cls.plain, (args, dict(kwargs or {})))  # it is added to what knows more
        return func(*plain[0], **plain[1])

    @classmethod
    def _require_right(cls, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        require_own_copies(func, args)
        terms = terms_of(tree_leaves((args, kwargs)))
        if terms is not None and func is Tensor.__float__ and not terms.are_partial:
            raise StateError(
                f"float() is called on what was computed of {next(iter(terms.names))}. Code that makes one tensor of "
                f"such numbers calls it too, as torch.tensor(norms).norm() does, and would get that of this rank's "
                f"pipeline stages. Take .item(); engine.gradient_norm and engine.clip_grad_norm_ are of the whole "
                f"model."
            )
        if terms is None or not terms.are_partial or func in _ADDED or func in uses.METADATA:
            return
        if func in _OVERWRITES and terms_of(args[1:]) is None:
            return
        if getattr(func, "__module__", "").startswith("torch.distributed"):  # a loop that adds up stages by itself
            return
        if func in _SCALED and isinstance(args[0], cls) and not any(isinstance(one, cls) for one in args[1:]):
            return
        terms.refuse(f"{getattr(func, '__name__', func)} is called on")

    @classmethod
    def _completed(
        cls, results: Sequence[Any], func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Sequence[Terms | None]]:
        leaves = tree_leaves((args, kwargs))
        is_sent = getattr(func, "__module__", "").startswith("torch.distributed")
        for leaf in leaves if is_sent else args[:1] if func in _OVERWRITES else ():
            if isinstance(leaf, cls):
                leaf.mark = leaf.mark._replace(names=frozenset())
        marks = [terms_in(one, leaves) for one in results]
        for one, mark in zip(results, marks, strict=True):
            if isinstance(one, cls) and mark is not None:  # changed in place
                one.mark = mark
        return results, marks

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.mark.stage.share.note_taken(self.mark.names)
        return super().__reduce_ex__(protocol)


_MARKED = TermOfStage | Resting | Whole


def note_taken(terms: Terms, result: Any) -> None:
    """Note that a `result` of `terms` carries no mark: a number, an array, a tensor of integers or of truth values."""
    found = [one for one in tree_leaves(result) if not isinstance(one, _MARKED)]
    if any(isinstance(one, _VALUE) and not (isinstance(one, Tensor) and one.is_floating_point()) for one in found):
        terms.stage.share.note_taken(terms.names)


class Written:
    """Tensors of a loop's own among the `leaves` of a call, to which it may write what it computes of parameters."""

    def __init__(self, leaves: Sequence[Any]) -> None:
        own = [leaf for leaf in leaves if type(leaf) in (Tensor, torch.nn.Parameter)]
        # terms are added to it, where gradients are not left out, as for the parameters of an average
        self._is_loss = torch.is_grad_enabled() and any(map(_has_another_gradient, own))
        self._before = [(one, None if one.is_inference() else one._version) for one in own]

    def note(self, terms: Terms, result: Any) -> None:
        """After the call. A tensor that is the whole `result` has become what was computed, under each of its names, as
        `total` in `total.add_(param.norm())`. Others have it in a part, or are written to by another name: `norms[i] =
        param.norm()`, `kept.data.copy_(param)`. Nothing of them can be marked, and it is noted that values were taken.
        """
        for tensor, version in self._before:
            if tensor._version == version if version is not None else tensor is not result:
                continue
            if tensor is result and self._is_loss:
                continue
            if tensor is result and type(tensor) is Tensor and tensor.is_floating_point() and has_own_memory(tensor):
                tensor.__class__ = TermOfStage  # as which it is known under every name
                tensor.mark = terms  # type: ignore[attr-defined]
            else:
                terms.stage.share.note_taken(terms.names)


class NumberOfStage(float):
    """The value of a term that is of one module, and so a whole one. It is a plain number in all else than with another
    of these, and where it is copied or pickled."""

    mark: Terms | None = None
    """`None` for what code makes by calling the class of another one, as `statistics.mean` does."""

    @classmethod
    def of(cls, value: float, mark: Terms) -> Self:
        number = cls(value)
        number.mark = mark
        return number

    def __reduce_ex__(self, protocol: Any) -> Any:
        return float, (float(self),)

    def __deepcopy__(self, memo: dict[int, Any]) -> float:
        return float(self)


def _of_numbers(name: str) -> Callable[..., Any]:
    """The operator of `float`, for numbers that know of which parameters they are."""
    plain = getattr(float, name)

    def operator(self: NumberOfStage, *others: Any) -> Any:
        terms = terms_of([self, *others])
        if terms is None:
            return plain(self, *others)
        if terms.are_partial:
            terms.refuse(f"{name.strip('_')} is called on")
        result = plain(self, *others)
        return NumberOfStage.of(result, terms) if type(result) is float else result

    return operator


for _name in (
    *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__"),
    *("__pow__", "__rpow__", "__neg__", "__pos__", "__abs__", "__lt__", "__le__", "__gt__", "__ge__"),
):
    setattr(NumberOfStage, _name, _of_numbers(_name))


def terms_of(leaves: Iterable[Any]) -> Terms | None:
    """Of which parameters marked `leaves` were computed."""
    marks = [leaf.mark for leaf in leaves if isinstance(leaf, TermOfStage | NumberOfStage)]
    found = [mark for mark in marks if mark is not None and mark.names]
    return _together(found) if found else None


def _together(some: Sequence[Terms]) -> Terms:
    return some[0]._replace(names=frozenset().union(*(one.names for one in some)))


def terms_in(result: Any, leaves: Sequence[Any], own: Sequence[InStage] = ()) -> Terms | None:
    """Of which parameters a `result` of `leaves`, some of which are `own` parameters, was computed, if of these alone:
    a loss to which terms were added is none."""
    if not isinstance(result, Tensor) or not result.is_floating_point():
        return None
    found = [one for one in (Terms.of(own) if own else None, terms_of(leaves)) if one is not None]
    if not found or any(map(_has_another_gradient, leaves)):
        return None
    return _together(found)


def _has_another_gradient(leaf: Any) -> bool:
    """Whether `leaf` is neither a parameter nor a term of some, and was computed of such as have gradients."""
    return isinstance(leaf, Tensor) and not isinstance(leaf, TermOfStage | Resting | Whole) and leaf.requires_grad


def require_own_copies(func: Callable[..., Any], args: Sequence[Any]) -> None:
    """Raise `StateError` if `func` combines a parameter with a copy of another one: see [Note: pairs of copies] in
    `parallel/pipeline/copies.py`."""
    lists = [one for one in args if isinstance(one, list | tuple)]
    for combined in zip(*lists, strict=False) if len(lists) > 1 else [args]:
        leaves = tree_leaves(combined)
        owners = {owner.name: owner for owner in map(_in_stage, leaves) if owner is not None}
        if len(owners) != 1:
            continue
        ((name, (stage, _)),) = owners.items()
        for leaf in leaves:
            if type(leaf) in (Tensor, torch.nn.Parameter) and (copied := stage.copied(name, leaf)) is not None:
                raise StateError(
                    f"{getattr(func, '__name__', func)} combines {name}, which this rank's pipeline stages have, with "
                    f"a copy of {copied}: model.parameters() are those of this rank's stages, and zip() pairs them "
                    f"with others of a copy of the whole model. Pair them by name: copies = "
                    f"dict(copy.named_parameters()); for name, param in model.named_parameters(): "
                    f"copies[name].lerp_(param.detach(), 0.01). Each rank then has the averages of its stages. A copy "
                    f"that computes, as a target network does, needs those of all: average engine.state_dict(), called "
                    f"by all ranks, in the place of model.named_parameters()."
                )


def _in_stage(leaf: Any) -> InStage | None:
    """The parameter that `leaf` is, stands for, or was computed of alone."""
    if isinstance(leaf, TermOfStage):
        return InStage(leaf.mark.stage, next(iter(leaf.mark.names))) if len(leaf.mark.names) == 1 else None
    return source_of(leaf).in_stage if isinstance(leaf, Resting | Whole) else None
