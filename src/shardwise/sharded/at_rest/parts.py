"""What is computed of a parameter that model axes split, of which a rank has a part.

[Note: part by part] `param.detach() * 2` on a part is that part of the unsplit result; `param.norm()` or `param[0]` is
not. Shapes tell: a function is computed once more without values, on the unsplit shape. A result that has the same
shape there was computed of the part alone, and is refused. Any other is a part itself and marked as one
(`system/marked.py`), so that `param.pow(2).sum()` is refused at the sum. Functions that leave the shape alone, or
return nothing, are known by name (`require_apart`): `param.data[0] = 0` would be the first row of each part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from shardwise.errors import StateError
from shardwise.sharded.at_rest import uses
from shardwise.sharded.at_rest.handles import Resting, Source, Whole, source_of
from shardwise.sharded.at_rest.stage_names import InStage
from shardwise.sharded.at_rest.stage_terms import TermOfStage, Terms
from shardwise.system.marked import Marked
from shardwise.system.torch_functions import SHAPED_ALONG, dims_of, named, picks
from shardwise.system.torch_private import DisableTorchFunctionSubclass, tree_flatten, tree_leaves, tree_unflatten

Tensor = torch.Tensor
_NUMBERS = named("equal", "allclose", "item", "__bool__", "__float__", "__int__", "is_nonzero")
"""They give a number or a truth value of all elements."""
_OF_WHOLE = named("tril", "triu", "tril_", "triu_", "fill_diagonal_")
_LOOKUPS = named("embedding", "embedding_bag")
_AT_INDICES = named("index_fill", "index_add", "index_copy", "scatter", "scatter_add", "scatter_reduce") | named(
    "index_fill_", "index_add_", "index_copy_", "scatter_", "scatter_add_", "scatter_reduce_"
)
_DRAWS = frozenset({"normal_", "uniform_", "random_", "bernoulli_", "exponential_", "cauchy_", "log_normal_"}) | {
    *("geometric_", "kaiming_normal_", "kaiming_uniform_")
}
"""By their names, as those of `torch.nn.init` are called by: each rank would draw the same for its own part."""
_MOVES = named("cpu", "cuda", "to", "pin_memory")
"""They do not change the shape, and a tensor without values cannot be moved."""


class PartOf(NamedTuple):
    """Of which tensor a part was computed, and what the result would be in whole."""

    name: str
    unsplit_shape: tuple[int, ...]
    added_up: Callable[[Tensor], Tensor] | None
    """See `Home.added_up`; `None` for what is no parameter."""
    in_stage: InStage | None
    """See `Source.in_stage`."""


class Part(Marked):
    """A tensor that was computed of a part of a parameter, element by element or along whole dimensions."""

    mark: PartOf

    @classmethod
    def _require_right(cls, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        require_apart(func, args, kwargs)
        leaves = tree_leaves((args, kwargs))
        part = next(one for one in leaves if isinstance(one, cls))
        if func in _NUMBERS and not _is_given_own(leaves, _shape(part)):
            raise _of_part_alone(func, _shape(part), part.mark)

    @classmethod
    def _explain(
        cls, error: RuntimeError, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        refuse_wholes(func, tree_leaves((args, kwargs)), error)

    @classmethod
    def _completed(
        cls, results: Sequence[Any], func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Sequence[PartOf | None]]:
        leaves, form = tree_flatten((tuple(args), dict(kwargs)))
        return completed(results, func, leaves, form)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _of_part_alone("pickle", _shape(self), self.mark)


class _AddedUp(torch.autograd.Function):
    """The sum over all parts, of that over a rank's own, to which the gradient of the whole one goes as it is: all
    ranks go on with the same value."""

    @staticmethod
    def forward(ctx: Any, of_part: Tensor, added_up: Callable[[Tensor], Tensor]) -> Tensor:  # noqa: ARG004
        return added_up(of_part)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return grad, None


def completed(
    results: Sequence[Any], func: Callable[..., Any], leaves: Sequence[Any], form: Any
) -> tuple[Sequence[Any], Sequence[PartOf | None]]:
    """`results` of a function of `leaves`, and what of them is a part of what the unsplit parameters would give. A sum
    in a loss is that over all parts. Raises `StateError` for anything else that was computed of parts alone."""
    nothing: list[PartOf | None] = [None] * len(results)
    splits = [one for one in map(_part_of, leaves) if one is not None]
    if not splits:
        return results, nothing
    part, of = next((one for one in splits if one[1].added_up is not None), splits[0])
    if func in uses.COPIED:
        raise _of_part_alone(func, part, of)
    try:
        with torch.no_grad(), DisableTorchFunctionSubclass():
            args, kwargs = tree_unflatten([_unsplit(leaf) for leaf in leaves], form)
            made = args[0] if func in _MOVES else func(*args, **kwargs)
            expected = [one.shape if isinstance(one, Tensor) else None for one in tree_leaves(made)]
    except NotImplementedError:  # its result depends on values
        given = set(map(id, leaves))
        is_value = any(isinstance(one, Tensor | bool | int | float) and id(one) not in given for one in results)
        if is_value and not _is_given_own(leaves, part):
            raise _of_part_alone(func, part, of) from None
        return results, nothing
    except (RuntimeError, ValueError, TypeError, IndexError):  # it is given other parts too
        is_mixing = any(isinstance(one, Tensor) and one.shape.numel() < math.prod(part) for one in results)
        is_mixing |= any(isinstance(one, bool | int | float) for one in results) and not _is_given_own(leaves, part)
        expected = []
    else:
        pairs = zip(results, expected, strict=False)
        is_mixing = any(isinstance(one, Tensor) and one.shape == other for one, other in pairs)
    is_term = func in uses.SUMS and _has_gradient(results)
    if is_mixing and is_term and of.added_up is not None:
        with DisableTorchFunctionSubclass():
            whole = _AddedUp.apply(results[0], of.added_up)  # type: ignore[no-untyped-call]  # torch's own
        return [whole if of.in_stage is None else TermOfStage.of(whole, Terms.of([of.in_stage]))], nothing
    if is_mixing or (_has_gradient(results) and _has_gradient([one for one in leaves if _part_of(one) is None])):
        raise _of_part_alone(func, part, of)
    if len(expected) != len(results):
        return results, nothing
    return results, [
        of._replace(unsplit_shape=tuple(whole))
        if whole is not None and isinstance(one, Tensor) and one.shape != whole
        else None
        for one, whole in zip(results, expected, strict=True)
    ]


def require_apart(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise `StateError` before a function that gives or writes another value to a part than to the whole, without a
    shape that tells, or before one tells."""
    given = [*args[:1], *kwargs.values()][:1]
    if func in _LOOKUPS:  # with max_norm they write to the weight
        given = [*args[1:2], *kwargs.values()]
    found = next(filter(None, map(_part_of, given)), None)
    if found is None:
        return
    part, of = found
    name = getattr(func, "__name__", "")
    is_mixing = func in _OF_WHOLE or func in _LOOKUPS or name in _DRAWS
    if is_mixing or _is_along_split(func, given[0], part, args, kwargs):
        raise _of_part_alone(func, part, of)
    if name.endswith("_") and not name.endswith("__"):
        leaves, form = tree_flatten((tuple(args), dict(kwargs)))
        completed(given, func, leaves, form)


def _is_along_split(
    func: Callable[..., Any], given: Any, part: Sequence[int], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bool:
    """Whether a function works along dimensions of the `given` part that are split, or at indices of them."""
    if func is not Tensor.__setitem__ and func not in SHAPED_ALONG and func not in _AT_INDICES:
        return False
    with DisableTorchFunctionSubclass():
        like, whole = torch.empty(part, device="meta"), _unsplit(given).shape
    split = {dim for dim, (own, all_) in enumerate(zip(part, whole, strict=True)) if own != all_}
    if func is Tensor.__setitem__:
        index = args[1]
        is_own_mask = isinstance(index, Tensor) and index.dtype == torch.bool and _shape(index) == tuple(part)
        return not is_own_mask and any(picks(index, len(part), part[dim], dim) for dim in split)
    dims = dims_of(like, args, kwargs, *SHAPED_ALONG.get(func, (1, None)))
    return not dims or bool(split & set(dims))


def _of_part_alone(func: Callable[..., Any] | str, part: Sequence[int], of: PartOf) -> StateError:
    name = func if isinstance(func, str) else getattr(func, "__name__", func)
    return StateError(
        f"{of.name} is split along a model axis: this rank has {list(part)} of {list(of.unsplit_shape)}, and {name} "
        f"would compute with that part alone. engine.get(name), or engine.get(name, 'grad'), called by all ranks, "
        f"gives the whole tensor, and engine.set(name, value) changes it; engine.clip_grad_norm_ and "
        f"engine.gradient_norm are of the whole model. In a loss, take a sum of the parameter alone, which is the "
        f"whole one's, as in param.pow(2).sum().sqrt()."
    )


def part_of_gradient(gradient: Tensor, source: Source) -> Tensor:
    """`gradient` of the parameter that is `source`, marked if that is a part."""
    if source.unsplit_shape is None or type(gradient) is not Tensor:
        return gradient
    return Part.of(gradient, PartOf(f"the gradient of {source.name}", source.unsplit_shape, None, source.in_stage))


def _has_gradient(tensors: Sequence[Any]) -> bool:
    """Whether a gradient goes to one of the `tensors`, as far as they are some."""
    with DisableTorchFunctionSubclass():
        return any(isinstance(one, Tensor) and one.requires_grad for one in tensors)


def refuse_wholes(func: Callable[..., Any], leaves: Sequence[Any], error: RuntimeError) -> None:
    """Raise `StateError` for the `error` of a function that was given a part together with something as large as the
    unsplit parameter, such as an average of the plain model's parameters."""
    parts = [of for _, of in filter(None, map(_part_of, leaves))]
    wholes = {_shape(one) for one in leaves if isinstance(one, Tensor) and _part_of(one) is None}
    for of in parts:
        if of.unsplit_shape in wholes:
            raise StateError(
                f"{of.name} is split along a model axis, and {getattr(func, '__name__', func)} is given the part of "
                f"this rank with a tensor of the whole shape, {list(of.unsplit_shape)}. model.state_dict() has tensors "
                f"of the unsplit model under the parameters' names, and engine.get({of.name!r}) one of them."
            ) from error


def _part_of(leaf: Any) -> tuple[tuple[int, ...], PartOf] | None:
    """The shape of a part, and of what it is one; `None` for anything else."""
    if isinstance(leaf, Part):
        return _shape(leaf), leaf.mark
    if not isinstance(leaf, Resting | Whole):
        return None
    source = source_of(leaf)
    if source.unsplit_shape is None:
        return None
    added_up = leaf.home().added_up if isinstance(leaf, Resting) else None
    return _shape(leaf), PartOf(source.name, source.unsplit_shape, added_up, source.in_stage)


def _unsplit(leaf: Any) -> Any:
    """A tensor on the meta device in the place of a tensor, of the unsplit shape if it is a part."""
    if not isinstance(leaf, Tensor):
        return leaf
    if isinstance(leaf, Part):
        return torch.empty(leaf.mark.unsplit_shape, dtype=leaf.dtype, device="meta")
    shape = source_of(leaf).unsplit_shape if isinstance(leaf, Resting | Whole) else None
    if shape is None:
        return torch.empty(_shape(leaf), dtype=leaf.dtype, device="meta")
    whole = torch.empty(shape, dtype=leaf.dtype, device="meta")
    return leaf.seen_in(whole) if isinstance(leaf, Whole) else whole


def _is_given_own(leaves: Sequence[Any], part: Sequence[int]) -> bool:
    """Whether there is another tensor of the shape of the `part`: who made it, knows that it is one."""
    others = (one for one in leaves if isinstance(one, Tensor) and _part_of(one) is None)
    return any(_shape(one) == tuple(part) for one in others)


def _shape(tensor: Any) -> tuple[int, ...]:
    with DisableTorchFunctionSubclass():
        return tuple(tensor.size())
