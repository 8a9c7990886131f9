"""Logits that are split by vocabulary, as a tensor that has the shape of the whole.

[Note: cut logits] A head of the style `vocabulary_cut` leaves each rank of a line with a part of the vocabulary. If
that part were a plain tensor, every operator would accept it, and `logsumexp`, `argmax` or an entropy would be
silently wrong. So it is wrapped, as torch's DTensor does it: `CutLogits` has the shape of all logits, and every
operator, in backwards too, means what it means for all of them. Those that each entry goes through by itself, and
views, compute on the part and communicate nothing. Those that read along the vocabulary send a number or two per row.
Any other operator gathers the logits, which is right and costs what it is meant to avoid, so the first one of each
kind is logged. What would need the memory of the whole (`data_ptr`, a write to chosen words) raises `ModelError`.

No write is lost. A view that the part has too shares its memory, and is a view of the logits to autograd. One that it
lacks (`logits[..., 3]`, `logits.view(-1)`) has to be a copy: a `GatheredView`, which reads like any tensor and refuses
writes. An array of numpy is a copy as well, and read-only.

Gradients are those of a loss that all ranks of the line compute alike.
"""

# ruff: noqa: ARG001  # functions in place of torch's, and of its operators, have one signature each

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from shardwise.comm import Line
from shardwise.errors import ModelError
from shardwise.parallel.tensor.functions import apply, gather_from, own_words, reduce_from, scatter_to
from shardwise.parallel.tensor.loss_of_parts import cross_entropy_of_parts, require_words
from shardwise.plan.placement import Span
from shardwise.system.torch_functions import bound, num_indexed, operator_name
from shardwise.system.torch_private import (
    DisableTorchFunctionSubclass,
    refuse_address,
    tree_leaves,
    tree_map,
    written_by,
)
from shardwise.system.units import format_bytes

Tensor = torch.Tensor
aten = torch.ops.aten
_log = logging.getLogger("shardwise")
_CURE = (
    "Call shardwise.tensor.full_tensor(logits) first, or give the head the style vocabulary, without tensor.cut_logits."
)
_CURE_OF_WORDS = (
    "Use torch.where(mask, value, logits) or logits.masked_fill(mask, value) with a mask of the vocabulary. Or: "
    + _CURE
)


@dataclass(frozen=True)
class Cut:
    """How a tensor is cut: along dimension `dim`, into parts of `sizes` for the ranks of `line`."""

    line: Line
    dim: int
    sizes: tuple[int, ...]
    gathered: set[str] = field(compare=False, repr=False, default_factory=set)
    """Operators for which logits have been gathered; each is logged once."""
    sliced_from: Cut | None = field(compare=False, repr=False, default=None)
    """How the tensor is cut of which these words are a range."""

    @property
    def size(self) -> int:
        return sum(self.sizes)

    @property
    def start(self) -> int:
        """The first index of this rank's part."""
        return sum(self.sizes[: self.line.index])

    @property
    def own(self) -> int:
        """The size of this rank's part."""
        return self.sizes[self.line.index]

    @property
    def span(self) -> Span:
        return Span(self.start, self.start + self.own)

    def at(self, dim: int) -> Cut:
        """The same parts along another dimension."""
        return replace(self, dim=dim)

    def part(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's part of a tensor that all ranks have whole."""
        return whole.narrow(dim, self.start, self.own)

    def is_like(self, other: Cut) -> bool:
        return (self.line.ranks, self.sizes) == (other.line.ranks, other.sizes)

    def every(self, tensor: Tensor) -> Tensor:
        """The ranks' tensors of one shape, stacked along a new first dimension."""
        is_bool = tensor.dtype == torch.bool
        sent = (tensor.to(torch.uint8) if is_bool else tensor).unsqueeze(0)
        stacked = self.line.concatenate(sent, 0, [1] * self.line.num_ranks)
        return stacked.bool() if is_bool else stacked


class CutLogits(torch.Tensor):
    """See [Note: cut logits]. All ranks of the line compute with it alike."""

    _local: Tensor
    _cut: Cut

    @staticmethod
    def __new__(cls, local: Tensor, cut: Cut, strides: Iterable[int] | None = None) -> CutLogits:
        shape = list(local.shape)
        shape[cut.dim] = cut.size
        strides = _scaled(local.stride(), cut) if strides is None else list(strides)
        with torch.inference_mode(local.is_inference()):  # which a view of a tensor from outside of it is not
            made = torch.Tensor._make_wrapper_subclass(
                cls, shape, strides=strides, dtype=local.dtype, device=local.device, layout=local.layout
            )
        made._local, made._cut = local, cut
        refuse_address(made)
        return made

    def full_tensor(self) -> Tensor:
        """The whole logits on every rank, a plain tensor; all ranks of the line call. Differentiable."""
        return apply(_Gather, self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # untyped in torch
        """Says which part this rank has; printing sends nothing, because often one rank prints."""
        cut = self._cut
        return (
            f"CutLogits of {list(self.shape)}, of which this rank has {cut.start} to {cut.span.stop} along "
            f"dimension {cut.dim}: {self._local!r}"
        )

    def __tensor_flatten__(self) -> tuple[list[str], Cut]:
        return ["_local"], self._cut

    @staticmethod
    def __tensor_unflatten__(inner: Mapping[str, Tensor], cut: Cut, size: object, stride: Iterable[int]) -> CutLogits:
        return CutLogits(inner["_local"], cut, stride)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        with DisableTorchFunctionSubclass():
            found = _FUNCTIONS.get(func)
            made = NotImplemented if found is None else found(*args, **given)
            return func(*args, **given) if made is NotImplemented else made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub is no class method
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        name = operator_name(func)
        found = _OPERATORS.get(name) or (_pointwise if _is_pointwise(name.removesuffix("_")) else None)
        has_out = any(argument.is_out for argument in func._schema.arguments)
        made = NotImplemented if found is None or has_out else found(func, args, given)
        if made is NotImplemented:
            made = func.decompose(*args, **given)  # in torch.inference_mode, where autograd does not do it
        if made is NotImplemented:
            return _gathered(func, args, given)
        return tree_map(partial(_laid_out, func, args, given), made) if _is_view(func) else made


class GatheredView(torch.Tensor):
    """A view of logits that are split, and that has words in another order than their parts; see [Note: cut logits].

    Its values are a copy. Other views of it are of this class as well, results of other operators are plain tensors.
    """

    _whole: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> GatheredView:
        made = torch.Tensor._make_wrapper_subclass(
            cls, values.shape, strides=values.stride(), dtype=values.dtype, device=values.device, layout=values.layout
        )
        made._whole = values
        refuse_address(made)
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # untyped in torch
        return f"GatheredView({self._whole!r})"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        with DisableTorchFunctionSubclass():
            return _FUNCTIONS_OF_VIEWS.get(func, func)(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub is no class method
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if any(isinstance(leaf, GatheredView) for leaf in written_by(func._schema, args, given)):
            raise ModelError(
                f"{operator_name(func)}() writes to a view of logits that are split by vocabulary over ranks. The view "
                f"is a copy, as no rank has its words alone, so the logits would not change. {_CURE_OF_WORDS}"
            )
        made = func(*tree_map(_values_of, args), **tree_map(_values_of, given))
        return tree_map(_as_view, made) if _is_view(func) else made


def full_tensor(tensor: Tensor) -> Tensor:
    """Logits of a head of the style `vocabulary_cut`, whole on every rank; any other tensor as it is.

    All ranks along `tp` call. Differentiable, for a loss that they all compute.
    """
    return tensor.full_tensor() if isinstance(tensor, CutLogits) else tensor


def own_part(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor, which sends nothing."""
    return tensor._local if isinstance(tensor, CutLogits) else tensor


def cut_logits(local: Tensor, cut: Cut) -> Tensor:
    """Wrap this rank's part. Backward: the part of the gradient."""
    return apply(_Wrap, local, cut)


def part_of(logits: CutLogits) -> Tensor:
    """This rank's part, a plain tensor. Backward: the gradient, wrapped."""
    return apply(_Unwrap, logits)


class _Wrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, cut: Cut) -> Tensor:
        ctx.cut = cut
        return CutLogits(local.detach(), cut)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if isinstance(grad, CutLogits):
            if grad._cut.is_like(ctx.cut) and grad._cut.dim == ctx.cut.dim:
                return part_of(grad), None
            grad = grad.full_tensor()
        return scatter_to(grad, ctx.cut.line, ctx.cut.dim, ctx.cut.sizes), None


class _Unwrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: CutLogits) -> Tensor:
        ctx.cut = logits._cut
        return logits._local.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return cut_logits(grad, ctx.cut)


class _AsView(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, values: Tensor) -> Tensor:
        return GatheredView(values.detach())

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Any:
        return grad


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: CutLogits) -> Tensor:
        ctx.cut = logits._cut
        return _whole(logits)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        cut: Cut = ctx.cut
        return cut_logits(scatter_to(grad, cut.line, cut.dim, cut.sizes), cut)


def _whole(logits: CutLogits) -> Tensor:
    cut = logits._cut
    return cut.line.concatenate(logits._local, cut.dim, cut.sizes)


def _gathered(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Any operator: on whole logits."""
    name = operator_name(func)
    logits = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, CutLogits)]
    if any(isinstance(leaf, CutLogits) for leaf in written_by(func._schema, args, kwargs)):
        raise ModelError(
            f"{name}() writes to logits that are split by vocabulary over ranks, which it cannot do in parts. {_CURE}"
        )
    cut = logits[0]._cut
    if name not in cut.gathered:
        cut.gathered.add(name)
        if cut.line.index == 0:
            _log.warning(
                "%s() needs all logits of a head that leaves them split by vocabulary, so they are gathered: %s on "
                "each rank. Results are right; without such operators the split saves memory.",
                name,
                format_bytes(sum(one.numel() * one.element_size() for one in logits)),
            )
    made = func(*tree_map(_plain, args), **tree_map(_plain, kwargs))
    return tree_map(_as_view, made) if _is_view(func) else made


def _plain(leaf: Any) -> Any:
    return _whole(leaf) if isinstance(leaf, CutLogits) else leaf


def _values_of(leaf: Any) -> Any:
    return leaf._whole if isinstance(leaf, GatheredView) else leaf


def _as_view(leaf: Any) -> Any:
    """A tensor without elements cannot be written to."""
    return GatheredView(leaf) if type(leaf) is Tensor and leaf.numel() else leaf


@cache
def _is_view(func: Any) -> bool:
    """Whether results share memory with an argument that is not written to."""
    return any(made.alias_info is not None and not made.alias_info.is_write for made in func._schema.returns)


def _scaled(strides: Iterable[int], cut: Cut) -> list[int]:
    """Strides that the whole has if a part's are `strides`, and the part has memory of its own."""
    given = list(strides)
    inner = given[cut.dim]
    is_outer = [dim != cut.dim and cut.own > 0 and stride >= inner * cut.own for dim, stride in enumerate(given)]
    return [stride // cut.own * cut.size if outer else stride for stride, outer in zip(given, is_outer, strict=True)]


def _laid_out(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], made: Any) -> Any:
    """A view with the strides that it has on one rank, by which torch decides what `reshape` and `contiguous` copy."""
    if not isinstance(made, CutLogits):
        return made
    on_one_rank = func(*tree_map(_without_values, args), **tree_map(_without_values, kwargs))
    found = next(one for one in tree_leaves(on_one_rank) if one.shape == made.shape)
    return made if made.stride() == found.stride() else CutLogits(made._local, made._cut, found.stride())


def _without_values(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")


# -- entry by entry ----------------------------------------------------------------------------------------

_ALSO_POINTWISE = {"masked_fill", "fill", "copy", "zero", "clone", "_to_copy", "detach", "alias", "lift_fresh"}
_ALSO_POINTWISE |= {"zeros_like", "ones_like", "full_like", "empty_like"}


@cache
def _is_pointwise(name: str) -> bool:
    """Whether torch says that each entry of the result depends on the same entry of the arguments alone."""
    if name in _ALSO_POINTWISE:
        return True
    packet = getattr(aten, name, None)
    overloads = [] if packet is None else [getattr(packet, overload) for overload in packet.overloads()]
    if any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads):
        return False
    if any(torch.Tag.pointwise in overload.tags for overload in overloads):
        return True
    return name.endswith("_backward") and _is_pointwise(name.removesuffix("_backward"))


def _pointwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    logits = [leaf for leaf in leaves if isinstance(leaf, CutLogits)]
    cut, last = logits[0]._cut, logits[0]._cut.dim - logits[0].dim()  # counted from the last, as broadcasting does
    if any(not one._cut.is_like(cut) or one._cut.dim - one.dim() != last for one in logits):
        return NotImplemented
    is_written = func._schema.is_mutable
    if is_written and (not isinstance(args[0], CutLogits) or any(one.dim() > args[0].dim() for one in leaves)):
        return NotImplemented

    def local(leaf: Any) -> Any:
        if isinstance(leaf, CutLogits):
            return leaf._local
        if isinstance(leaf, Tensor) and leaf.dim() >= -last and leaf.shape[last] == cut.size != 1:
            return cut.part(leaf, last)
        return leaf

    made = func(*tree_map(local, args), **tree_map(local, kwargs))
    return args[0] if is_written else tree_map(lambda one: CutLogits(one, cut.at(one.dim() + last)), made)


# -- views -------------------------------------------------------------------------------------------------


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`view`: the vocabulary stays a dimension of its own."""
    logits, shape = args
    if isinstance(shape, torch.dtype):
        return NotImplemented
    shape, cut = list(shape), logits._cut
    if -1 in shape:
        shape[shape.index(-1)] = logits.numel() // max(1, -math.prod(shape))
    behind = math.prod(logits.shape[cut.dim + 1 :])
    places = [at for at, size in enumerate(shape) if size == cut.size and math.prod(shape[at + 1 :]) == behind]
    if not places:
        return NotImplemented
    shape[places[0]] = cut.own
    return CutLogits(func(logits._local, shape), cut.at(places[0]))


def _expand(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    logits, shape = args[0], list(args[1])
    dim = logits._cut.dim - logits.dim()
    if shape[dim] not in (-1, logits._cut.size):
        return NotImplemented
    shape[dim] = -1
    return CutLogits(func(logits._local, shape, **kwargs), logits._cut.at(len(shape) + dim))


def _permute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    logits = args[0]
    order = [dim % logits.dim() for dim in args[1]]
    return CutLogits(func(logits._local, order), logits._cut.at(order.index(logits._cut.dim)))


def _transpose(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    logits = args[0]
    one, two = (dim % logits.dim() for dim in (args[1:] or (0, 1)))
    if logits.dim() < 2:
        return CutLogits(func(logits._local, *args[1:]), logits._cut)
    at = {one: two, two: one}.get(logits._cut.dim, logits._cut.dim)
    return CutLogits(func(logits._local, *args[1:]), logits._cut.at(at))


def _unsqueeze(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    logits, dim = args
    at = logits._cut.dim
    return CutLogits(func(logits._local, dim), logits._cut.at(at + (dim % (logits.dim() + 1) <= at)))


def _squeeze(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    logits = args[0]
    cut = logits._cut
    asked = range(logits.dim()) if len(args) == 1 else [args[1]] if isinstance(args[1], int) else args[1]
    gone = [dim % logits.dim() for dim in asked if logits.shape[dim] == 1 and dim % logits.dim() != cut.dim]
    if cut.size == 1:
        return NotImplemented
    return CutLogits(logits._local.squeeze(tuple(gone)), cut.at(cut.dim - sum(dim < cut.dim for dim in gone)))


def _slice(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of another dimension; or of the vocabulary, of which each rank keeps what it has."""
    given = (*args, *(None, 0, None, None, 1)[len(args) :])
    logits, dim, first, end, step = given
    cut, dim = logits._cut, dim % logits.dim()
    if dim != cut.dim:
        return CutLogits(func(logits._local, dim, first, end, step), cut)
    words = slice(*slice(first, end).indices(cut.size)[:2])
    if step != 1 or words.start >= words.stop:
        return NotImplemented
    own, part = _words(cut, words)
    return CutLogits(logits._local[(*[slice(None)] * dim, own)], part)


def _words(cut: Cut, words: slice) -> tuple[slice, Cut]:
    """What a rank has of a range of words, in its part; and how the range is cut."""
    bounds = [(sum(cut.sizes[:at]), size) for at, size in enumerate(cut.sizes)]
    parts = [[min(max(edge - start, 0), size) for edge in (words.start, words.stop)] for start, size in bounds]
    sizes = tuple(stop - start for start, stop in parts)
    return slice(*parts[cut.line.index]), Cut(cut.line, cut.dim, sizes, cut.gathered, sliced_from=cut)


def _slice_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad, shape, dim, first, end, step = args
    cut, shape, dim = grad._cut, list(shape), dim % len(shape)
    if dim != cut.dim:
        shape[cut.dim] = cut.own
        return CutLogits(func(grad._local, shape, dim, first, end, step), cut)
    if cut.sliced_from is None or cut.sliced_from.size != shape[dim] or step != 1:
        return NotImplemented
    of_all = cut.sliced_from.at(dim)
    own, part = _words(of_all, slice(*slice(first, end).indices(of_all.size)[:2]))
    if part.sizes != cut.sizes:
        return NotImplemented
    shape[dim] = of_all.own
    return CutLogits(func(grad._local, shape, dim, own.start, own.stop, 1), of_all)


def _select(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    logits, dim, index = args
    cut, dim = logits._cut, dim % logits.dim()
    if dim == cut.dim:
        return NotImplemented
    return CutLogits(func(logits._local, dim, index), cut.at(cut.dim - (dim < cut.dim)))


def _select_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad, shape, dim, index = args
    cut, shape, dim = grad._cut, list(shape), dim % len(shape)
    at = cut.dim + (dim <= cut.dim)
    shape[at] = cut.own
    return CutLogits(func(grad._local, shape, dim, index), cut.at(at))


def _divided(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`split` and `unbind`."""
    logits, *rest = args
    is_unbound = func._schema.name == "aten::unbind"
    dim = (rest[-1] if len(rest) == 2 - is_unbound else kwargs.get("dim", 0)) % logits.dim()
    cut = logits._cut
    if dim == cut.dim:
        return NotImplemented
    at = cut.dim - (is_unbound and dim < cut.dim)
    return [CutLogits(one, cut.at(at)) for one in func(logits._local, *rest, **kwargs)]


def _joined(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`cat` and `stack` along another dimension."""
    tensors, dim = args[0], (args[1] if len(args) > 1 else kwargs.get("dim", 0))
    is_stacked = func._schema.name == "aten::stack"
    cut = next(one._cut for one in tensors if isinstance(one, CutLogits))
    if len({one.dim() for one in tensors}) > 1 or any(
        isinstance(one, CutLogits) and (one._cut.dim != cut.dim or not one._cut.is_like(cut)) for one in tensors
    ):
        return NotImplemented
    dim %= tensors[0].dim() + is_stacked
    if dim == cut.dim and not is_stacked:
        return NotImplemented
    parts = [one._local if isinstance(one, CutLogits) else cut.part(one, cut.dim) for one in tensors]
    return CutLogits(func(parts, dim), cut.at(cut.dim + (is_stacked and dim <= cut.dim)))


def _index(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`index`, `index_put` and `index_put_` of rows."""
    logits, indices, *rest = args
    if not isinstance(logits, CutLogits) or any(isinstance(one, CutLogits) for one in indices):
        return NotImplemented
    cut = logits._cut
    taken = sum(1 if one is None else num_indexed(one) for one in indices)
    if cut.dim != logits.dim() - 1 or taken > cut.dim:
        return NotImplemented
    if not rest:
        made = func(logits._local, indices)
        return CutLogits(made, cut.at(made.dim() - 1))
    value = rest[0]
    if isinstance(value, CutLogits):
        value = value._local if value._cut.is_like(cut) and value._cut.dim == value.dim() - 1 else _whole(value)
    if value.dim() and value.shape[-1] == cut.size != 1:
        value = cut.part(value, -1)
    made = func(logits._local, indices, value, *rest[1:])
    return logits if func._schema.is_mutable else CutLogits(made, cut)


# -- along the vocabulary ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Reduced:
    """What a reduction of logits is asked for: its dimensions, all if it names none, and its other arguments."""

    logits: CutLogits
    dims: list[int]
    keepdim: bool
    dtype: torch.dtype | None

    @classmethod
    def asked(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Reduced:
        given = {argument.name: value for argument, value in bound(func, args, kwargs)}
        logits, named = args[0], given.get("dim")
        named = [named] if isinstance(named, int) else list(named or ())
        dims = [dim % logits.dim() for dim in named] or list(range(logits.dim()))
        return cls(logits, dims, bool(given.get("keepdim", False)), given.get("dtype"))

    @property
    def is_of_vocabulary(self) -> bool:
        return self.logits._cut.dim in self.dims

    def of_others(self, made: Tensor) -> Tensor:
        """The result if the vocabulary is not reduced; `made` is that of this rank's part."""
        at = self.logits._cut.dim
        return CutLogits(made, self.logits._cut.at(at if self.keepdim else at - sum(dim < at for dim in self.dims)))


def _reduction(
    reduce: Callable[..., Tensor], combine: Callable[[Tensor], Tensor], *, takes_nothing: bool = True
) -> Callable[..., Any]:
    """An operator that reduces parts by `reduce` and the ranks' stacked results by `combine`. `takes_nothing`: there is
    a result for a part without words."""

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        asked = _Reduced.asked(func, args, kwargs)
        local, cut = asked.logits._local, asked.logits._cut
        if not asked.is_of_vocabulary:
            return asked.of_others(func(local, *args[1:], **kwargs))
        if not (takes_nothing or min(cut.sizes)):
            return NotImplemented
        wide = local if asked.dtype is None else local.to(asked.dtype)
        return combine(cut.every(reduce(wide, asked.dims, keepdim=asked.keepdim)))

    return run


def _summed(stacked: Tensor) -> Tensor:
    return stacked.sum(0, dtype=stacked.dtype)


def _mean(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    asked = _Reduced.asked(func, args, kwargs)
    if not asked.is_of_vocabulary:
        return asked.of_others(func(asked.logits._local, *args[1:], **kwargs))
    total = asked.logits.sum(asked.dims, keepdim=asked.keepdim, dtype=asked.dtype)
    return total / math.prod(asked.logits.shape[dim] for dim in asked.dims)


def _logsumexp(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    made = _reduction(_log_sums, lambda stacked: stacked.logsumexp(0))(func, args, kwargs)
    return made if made is NotImplemented else made.to(args[0].dtype)


def _log_sums(local: Tensor, dims: list[int], *, keepdim: bool) -> Tensor:
    return _wide(local).logsumexp(dims, keepdim=keepdim)


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _arg(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`argmax` and `argmin`: the first of the largest, as on one rank."""
    given = (*args, *(None, None, False)[len(args) :])
    logits, dim, keepdim = given
    dim, keepdim = kwargs.get("dim", dim), kwargs.get("keepdim", keepdim)
    cut = logits._cut
    if dim is None or min(cut.sizes) == 0:
        return NotImplemented
    dim %= logits.dim()
    if dim != cut.dim:
        at = cut.dim - (not keepdim and dim < cut.dim)
        return CutLogits(func(logits._local, dim, keepdim), cut.at(at))
    indices = func(logits._local, dim, True)
    best = func(cut.every(logits._local.gather(dim, indices)), 0, True)
    found = cut.every(indices + cut.start).gather(0, best).squeeze(0)
    return found if keepdim else found.squeeze(dim)


def _softmax(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    logits, dim, half_to_float = args
    cut = logits._cut
    if dim % logits.dim() != cut.dim:
        return CutLogits(func(logits._local, dim, half_to_float), cut)
    wide = _wide(logits._local)
    total = cut.every(_log_sums(wide, [cut.dim], keepdim=True)).logsumexp(0)
    made = wide - total
    made = made if func._schema.name == "aten::_log_softmax" else made.exp_()
    return CutLogits(made if half_to_float else made.to(logits.dtype), cut)


def _softmax_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad, output, dim, dtype = args
    if not isinstance(output, CutLogits):
        return NotImplemented
    cut = output._cut
    if isinstance(grad, CutLogits):
        if grad._cut.dim != cut.dim or not grad._cut.is_like(cut):
            return NotImplemented
        own = grad._local
    else:
        own = cut.part(grad, cut.dim)
    if dim % output.dim() != cut.dim:
        return CutLogits(func(own, output._local, dim, dtype), cut)
    own, made = _wide(own), _wide(output._local)
    is_log = func._schema.name == "aten::_log_softmax_backward_data"
    total = _summed(cut.every((own if is_log else own * made).sum(cut.dim, keepdim=True)))
    found = own - made.exp() * total if is_log else (own - total) * made
    return CutLogits(found.to(dtype), cut)


def _new(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`new_zeros` and its like need no values."""
    return func(args[0]._local, *args[1:], **kwargs)


_OPERATORS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("view", "_unsafe_view"), _view),
    "expand": _expand,
    "permute": _permute,
    **dict.fromkeys(("transpose", "t"), _transpose),
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "slice": _slice,
    "slice_backward": _slice_backward,
    "select": _select,
    "select_backward": _select_backward,
    **dict.fromkeys(("split", "split_with_sizes", "unbind"), _divided),
    **dict.fromkeys(("cat", "stack"), _joined),
    **dict.fromkeys(("index", "index_put", "index_put_"), _index),
    "sum": _reduction(torch.sum, _summed),
    "mean": _mean,
    "amax": _reduction(torch.amax, lambda stacked: stacked.amax(0), takes_nothing=False),
    "amin": _reduction(torch.amin, lambda stacked: stacked.amin(0), takes_nothing=False),
    "all": _reduction(torch.all, lambda stacked: stacked.all(0)),
    "any": _reduction(torch.any, lambda stacked: stacked.any(0)),
    "logsumexp": _logsumexp,
    **dict.fromkeys(("argmax", "argmin"), _arg),
    **dict.fromkeys(("_softmax", "_log_softmax"), _softmax),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), _softmax_backward),
    **dict.fromkeys(("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"), _new),
}


# -- functions whose backward would make whole tensors -----------------------------------------------------


def cross_entropy_of_cut(logits: CutLogits, targets: Tensor, weight: Tensor | None = None, **options: Any) -> Tensor:
    """torch's function with targets that are indices, computed at least in fp32. Raises `ModelError` if the classes are
    another dimension than the vocabulary."""
    cut = logits._cut
    if cut.dim != (logits.dim() > 1) or targets.is_floating_point():
        raise ModelError(
            f"Cross entropy takes logits [N, {cut.size}] and targets that are indices, but got {list(logits.shape)} "
            f"and {list(targets.shape)} of {targets.dtype}. {_CURE}"
        )
    rows = part_of(logits).movedim(cut.dim, -1).flatten(0, -2) if logits.dim() > 1 else part_of(logits).unsqueeze(0)
    made = cross_entropy_of_parts(rows, targets.reshape(-1), cut.line, cut.span, cut.size, weight=weight, **options)
    return made.view(targets.shape) if made.dim() else made


def _cross_entropy(
    logits: Any, targets: Any, weight: Any = None, size_average: Any = None, ignore_index: int = -100, **options: Any
) -> Any:
    is_of_words = _has_parts(logits) and logits._cut.dim == (logits.dim() > 1) and not isinstance(weight, CutLogits)
    legacy = (size_average, options.pop("reduce", None))
    if not is_of_words or isinstance(targets, CutLogits) or targets.is_floating_point() or any(map(_is_given, legacy)):
        return NotImplemented
    return cross_entropy_of_cut(logits, targets, weight, ignore_index=ignore_index, **options).to(logits.dtype)


def _is_given(value: object) -> bool:
    return value is not None


def _nll_loss(
    logits: Any, targets: Any, weight: Any = None, size_average: Any = None, ignore_index: int = -100, **options: Any
) -> Any:
    legacy = (weight, size_average, options.get("reduce"))
    if not _is_last(logits) or logits.dim() != 2 or any(map(_is_given, legacy)):  # [N, vocabulary]
        return NotImplemented
    is_counted = targets != ignore_index
    losses = -pick(logits, targets.masked_fill(~is_counted, 0).unsqueeze(-1)).squeeze(-1)
    losses = losses.masked_fill(~is_counted, 0)
    reduction = options.get("reduction", "mean")
    return losses if reduction == "none" else losses.sum() / (1 if reduction == "sum" else is_counted.sum())


def pick(logits: CutLogits, index: Tensor) -> Tensor:
    """`logits.gather(-1, index)` along the vocabulary, which is the last dimension."""
    cut = logits._cut
    require_words(index, cut.size)
    local, is_here = own_words(index, cut.span)
    return reduce_from(part_of(logits).gather(-1, local).masked_fill(~is_here, 0), cut.line)


def _by_index(logits: Any, dim: int, index: Any, **options: Any) -> Any:
    if not _is_last(logits) or dim % logits.dim() != logits.dim() - 1 or isinstance(index, CutLogits) or options:
        return NotImplemented
    return pick(logits, index)


def _has_parts(logits: Any) -> bool:
    """Whether it is cut, with a part on every rank: a range of words may leave some with nothing."""
    return isinstance(logits, CutLogits) and min(logits._cut.sizes) > 0


def _is_last(logits: Any) -> bool:
    return _has_parts(logits) and bool(logits._cut.dim == logits.dim() - 1)


def _item(logits: Any, index: Any) -> Any:
    """`logits[index]`: rows, a range of words, or single words."""
    places = _places(logits, index)
    if places is None:
        return NotImplemented
    *rows, words = places
    is_view = not any(isinstance(one, Tensor) for one in places)
    if isinstance(words, slice):
        if is_view:
            return NotImplemented
        words = slice(*words.indices(logits.shape[-1])[:2])
        if words.start >= words.stop:
            return NotImplemented
        part, cut = _words(logits._cut, words)
        own = part_of(logits)[(*rows, part)]
        return cut_logits(own, cut.at(own.dim() - 1))
    is_alone = all(isinstance(one, slice) or one is None for one in rows)
    is_together = all(isinstance(one, int) or (isinstance(one, Tensor) and one.dtype != torch.bool) for one in rows)
    if isinstance(words, Tensor) and not (is_alone or is_together):  # where would its dimensions be?
        return NotImplemented
    cut = logits._cut
    wanted = torch.as_tensor(words, device=logits.device)
    wanted = torch.where(wanted < 0, wanted + cut.size, wanted)
    require_words(wanted, cut.size)
    local, is_here = own_words(wanted, cut.span)
    found = reduce_from(part_of(logits)[(*rows, local)].masked_fill(~is_here, 0), cut.line)
    return apply(_AsView, found) if is_view and found.numel() else found


def _places(logits: Any, index: Any) -> list[Any] | None:
    """What an index says of each dimension, `None` for new ones; the last is what it says of the vocabulary. `None` for
    an index of another kind."""
    if not _is_last(logits):
        return None
    given = list(index) if isinstance(index, tuple) else [index]
    given = [torch.as_tensor(one, device=logits.device) if isinstance(one, list | range) else one for one in given]
    if any(isinstance(one, CutLogits | bool) for one in given):
        return None
    taken = sum(num_indexed(one) for one in given)
    rest = [slice(None)] * (logits.dim() - taken)
    at = next((at for at, one in enumerate(given) if one is Ellipsis), None)
    places = [*given, *rest] if at is None else [*given[:at], *rest, *given[at + 1 :]]
    words = places[-1]
    is_range = isinstance(words, slice) and (words.step or 1) == 1
    is_word = isinstance(words, int) or (isinstance(words, Tensor) and words.dtype in (torch.int64, torch.int32))
    return places if is_range or is_word else None


def _set_item(logits: Any, index: Any, value: Any) -> Any:
    """`logits[index] = value` of rows, or of a range of words; others would be written to copies."""
    if isinstance(logits, CutLogits):
        places = _places(logits, index)
        if places is None or not isinstance(places[-1], slice):
            raise ModelError(
                f"Single words of logits that are split by vocabulary over ranks cannot be assigned. {_CURE_OF_WORDS}"
            )
    return NotImplemented


def _top(logits: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:  # torch's
    """`topk` of each part, then of what the ranks have found."""
    if not _is_last(logits) or dim % logits.dim() != logits.dim() - 1 or k > min(logits._cut.sizes):
        return NotImplemented
    cut = logits._cut
    values, indices = part_of(logits).topk(k, -1, largest, True)
    sizes = (k,) * cut.line.num_ranks
    every = gather_from(values, cut.line, -1, sizes)
    places = cut.line.concatenate(indices + cut.start, -1, sizes)
    found, at = every.topk(k, -1, largest, sorted)
    return torch.return_types.topk((found, places.gather(-1, at)))


def _extreme(largest: bool, made: Any) -> Callable[..., Any]:
    def run(logits: Any, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:  # torch's
        if not isinstance(dim, int) or kwargs:
            return NotImplemented
        top = _top(logits, 1, dim, largest)
        if top is NotImplemented:
            return top
        return made(tuple(one if keepdim else one.squeeze(dim) for one in top))

    return run


def _refused(name: str) -> Callable[..., Any]:
    def run(*_: Any, **__: Any) -> Any:
        raise ModelError(f"{name} needs memory, of which logits that are split by vocabulary have none. {_CURE}")

    return run


def _copied(logits: Tensor, memo: dict[int, Any]) -> Tensor:
    """A copy of a line is for rehearsals, in which nothing is sent."""
    copied = logits.detach().clone().requires_grad_(logits.requires_grad)
    memo[id(logits)] = copied
    return copied


def _of_whole(func: Callable[..., Any]) -> Callable[..., Any]:
    """An array is read-only, as a write to this copy would be lost."""

    def run(logits: Tensor, *args: Any, **kwargs: Any) -> Any:
        made = func(_values_of(_plain(logits)), *args, **kwargs)
        if isinstance(made, np.ndarray):
            made.flags.writeable = False
        return made

    return run


_READS = (torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__, torch.Tensor.__reduce_ex__)
_BY_ADDRESS = ("data_ptr", "__dlpack__", "untyped_storage", "storage", "share_memory_")
_MEMORY = {
    **{getattr(torch.Tensor, name): f"{name}()" for name in _BY_ADDRESS},
    torch.Tensor.data.__set__: "Assigning to .data",  # type: ignore[attr-defined]
}
_FUNCTIONS_OF_VIEWS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.__deepcopy__: _copied,
    **{func: _of_whole(func) for func in _READS},
    **{func: _refused(name) for func, name in _MEMORY.items()},
}
_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    functional.cross_entropy: _cross_entropy,
    functional.nll_loss: _nll_loss,
    **dict.fromkeys((torch.gather, torch.Tensor.gather), _by_index),
    torch.Tensor.__getitem__: _item,
    torch.Tensor.__setitem__: _set_item,
    **dict.fromkeys((torch.topk, torch.Tensor.topk), _top),
    **dict.fromkeys((torch.max, torch.Tensor.max), _extreme(True, torch.return_types.max)),
    **dict.fromkeys((torch.min, torch.Tensor.min), _extreme(False, torch.return_types.min)),
    **_FUNCTIONS_OF_VIEWS,
}
