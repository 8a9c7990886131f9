"""What a loop holds of a split sequence: this rank's part of batches, and of what models return for them.

[Note: parts of a sequence] A loop that shifts labels by `labels[:, 1:]` after the split leaves out a token for each
rank, or pairs wrong ones; one that pools, or sums by sample, has those of a part. No error would follow. So parts are
marked (`system/marked.py`) as long as their dimension 1 is the rank's tokens, and functions that mix those are refused,
as in a model: [Note: along tokens] in `mixing.py`. A mean of losses is one over the rank's own tokens, which is right
if as many count on each: labels and masks are known of all ranks, so that others are refused, also those that a loop
takes by itself: `losses[mask].mean()`, `(losses * mask).sum() / mask.sum()`. The engine computes with plain tensors
(`unmarked`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional

from shardwise.errors import ModelError
from shardwise.parallel.sequence.token_layout import Layout
from shardwise.system.marked import Marked
from shardwise.system.torch_functions import named
from shardwise.system.torch_private import (
    TENSOR_ATTRIBUTES,
    tree_flatten,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
)

Tensor = torch.Tensor
_MEANS = frozenset({functional.cross_entropy, functional.nll_loss})
_ROWS = frozenset({Tensor.__getitem__, Tensor.unbind, torch.unbind, Tensor.select, torch.select, Tensor.squeeze})
"""What gives rows of a batch by themselves."""
_IGNORED = -100
_COMPARED = named("eq", "ne", "lt", "le", "gt", "ge", "not_equal", "greater", "less", "greater_equal", "less_equal")
_COMBINED = named(
    *("logical_and", "logical_or", "logical_not", "logical_xor", "bitwise_and", "bitwise_or", "bitwise_not"),
    *("mul", "multiply", "sub", "add", "div", "divide", "true_divide", "pow", "isin", "clamp", "clamp_min", "where"),
    *("masked_fill", "clamp_max", "clip", "minimum", "maximum", "exp", "log", "log1p", "sqrt", "square", "abs", "neg"),
    *("sigmoid", "remainder", "floor_divide", "__truediv__", "__pow__", "__mod__", "__floordiv__"),
    *("__and__", "__or__", "__invert__", "__mul__", "__rmul__", "__rsub__", "__sub__", "__add__", "__radd__"),
)
_CONVERTED = named("to", "type", "type_as", "float", "double", "half", "bfloat16", "long", "int", "bool", "byte")
_ELEMENTWISE = _COMPARED | _COMBINED | _CONVERTED
"""Of labels and masks they give masks: those of all ranks, of what is known of all ranks."""
_REARRANGED = named(
    *("view", "reshape", "flatten", "ravel", "contiguous", "detach", "clone", "unsqueeze", "squeeze", "view_as", "cpu"),
    *("transpose", "swapaxes", "t", "permute", "movedim", "unflatten", "__getitem__", "expand", "reshape_as"),
) | {TENSOR_ATTRIBUTES[name].__get__ for name in ("T", "mT", "data")}
_COUNTS = named("sum", "count_nonzero", "nansum")
_SELECTS = named("masked_select", "__getitem__")
_AVERAGES = named("mean", "nanmean", "median", "var", "std")
_LOSSES = named(
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "gaussian_nll_loss", "poisson_nll_loss"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits", "cosine_embedding_loss"),
)
_DIVISIONS = named(
    "div", "divide", "true_divide", "div_", "divide_", "__truediv__", "__itruediv__", "__div__", "__idiv__"
)
_DIVIDES_BY_FIRST = named("reciprocal", "__rtruediv__", "__rdiv__")
_NUMBERS = named("item", "tolist", "__float__", "__int__", "__index__", "numpy", "__array__")


@dataclass(frozen=True)
class Tokens:
    """What a marked tensor has of a split sequence."""

    num_local: int
    dim: int | None = 1
    """The dimension that is the tokens; `None` if there is one entry for each of them somehow."""
    whole: Tensor | None = None
    """Of labels and masks that a split has cut: those of all ranks, which `layout` divides."""
    layout: Layout | None = None

    def counts(self, mask_of: Callable[[Tensor], Tensor] | None = None) -> tuple[float, ...]:
        """How many entries count on each rank: those of a mask, or of that which `mask_of` makes of labels. Nothing
        where it is not known, or this is no mask."""
        if self.whole is None or self.layout is None or self.whole.device.type != "cpu":
            return ()  # elsewhere counting would wait for the device in each step
        mask = self.whole if mask_of is None else mask_of(self.whole)
        if not (mask.is_floating_point() or mask.dtype == torch.bool) and mask.numel() and int(mask.max()) > 1:
            return ()
        return tuple(float(self.layout.take(mask, rank).sum()) for rank in range(self.layout.num_ranks))


@dataclass(frozen=True)
class Counted:
    """What a tensor has that comes of counting a rank's tokens."""

    by_rank: tuple[float, ...]
    """How many count on each rank."""
    are_entries: bool
    """Whether the tensor has an entry for each of them; if not, it is their number."""

    @property
    def is_even(self) -> bool:
        return len(set(self.by_rank)) <= 1


class PartOfSequence(Marked):
    """This rank's part of a split sequence."""

    mark: Tokens | Counted

    @classmethod
    def _require_right(cls, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if func is Tensor.__setitem__ and (tokens := _tokens_of(args[0])):
            args[0].mark = replace(tokens, whole=None)  # those of other ranks are not known any more
        if func in _MEANS:
            _require_even(func, args, kwargs)
        _require_even_counts(func, args, kwargs)
        marks = {id(one): mark for one in tree_leaves((args, kwargs)) if (mark := _tokens_of(one))}
        known = next((mark for mark in marks.values() if mark.dim is not None), None)
        if known is None:
            return
        from shardwise.parallel.sequence.mixing import CURE, JOINS, mixes  # few jobs need it

        if func in JOINS and all(isinstance(one, cls) for one in tree_leaves(args[:1])):
            return  # a loop puts the parts of several ranks together by itself
        has_tokens = {key for key, mark in marks.items() if mark.dim == known.dim}
        shape = mixes(func, args, kwargs, known.num_local, lambda one: id(one) in has_tokens, known.dim or 0)
        if shape is not None:
            raise ModelError(
                f"{getattr(func, '__name__', func)} is called on a tensor of shape {list(shape)} and mixes its tokens, "
                f"of which each rank of a split sequence has a part. {CURE} Average losses by engine.mean_over_tokens."
            )

    @classmethod
    def _completed(
        cls, results: Sequence[Any], func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Sequence[Tokens | Counted | None]]:
        marks = [_mark_of(one, func, args, kwargs) if isinstance(one, Tensor) else None for one in results]
        for one, mark in zip(results, marks, strict=True):
            if isinstance(one, cls) and isinstance(mark, Tokens):  # changed in place
                one.mark = mark
        return results, marks


def _tokens_of(value: object) -> Tokens | None:
    return value.mark if isinstance(value, PartOfSequence) and isinstance(value.mark, Tokens) else None


def _count_of(value: object) -> Counted | None:
    return value.mark if isinstance(value, PartOfSequence) and isinstance(value.mark, Counted) else None


def _mark_of(
    result: Tensor, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Tokens | Counted | None:
    """What `result` has of the sequence."""
    if (counted := _counted(result, func, args, kwargs)) is not None:
        return counted
    part = next((one for one in tree_leaves((args, kwargs)) if _tokens_of(one)), None)
    mark = _tokens_of(part)
    if part is None or mark is None:
        return None
    of: Tensor = part.plain()
    whole = _whole_of(result, func, args, kwargs, part, mark)
    is_looked_up = result.is_floating_point() and not of.is_floating_point() and result.shape != of.shape
    sizes, dim = result.shape, mark.dim
    if dim is not None and not is_looked_up and result.dim() > dim and sizes[dim] == mark.num_local:
        if sizes[:dim] == of.shape[:dim]:
            return replace(mark, whole=whole)
        if func is Tensor.__getitem__:  # some of the rows
            return Tokens(mark.num_local)
    if dim == 1 and func in _ROWS and result.dim() == of.dim() - 1 and sizes[:1] == (mark.num_local,):
        return Tokens(mark.num_local, dim=0)
    return Tokens(mark.num_local, None, whole, mark.layout) if whole is not None else None


def _whole_of(
    result: Tensor,
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    part: Tensor,
    mark: Tokens,
) -> Tensor | None:
    """What all ranks have of `result`, if that is known of `part`, which is the first of what it was made of."""
    if mark.whole is None or result.numel() != part.numel():
        return None
    if func is Tensor.__getitem__ and args[1] is part and part.dtype != torch.bool:  # weights of classes
        looked_up: Tensor = args[0][mark.whole]
        return looked_up
    if func in _REARRANGED:
        return mark.whole if result.dtype == part.dtype else None
    if func not in _ELEMENTWISE or mark.whole.device.type != "cpu":
        return None
    leaves, form = tree_flatten((tuple(args), dict(kwargs)))
    wholes = []
    for leaf in leaves:
        own = _tokens_of(leaf)
        if own is None and isinstance(leaf, Tensor) and leaf.dim():
            return None
        if own is not None and (own.whole is None or own.dim != mark.dim):
            return None
        wholes.append(leaf if own is None else own.whole)
    given, named_ones = tree_unflatten(wholes, form)
    whole: Tensor = func(*given, **named_ones)
    return whole


def _counted(
    result: Tensor, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Counted | None:
    """What comes of counting tokens: how many a mask has, what a mask has selected, and what is made of these."""
    mask, are_entries = args[0] if args else kwargs.get("input"), False
    if func in _SELECTS:
        index = args[1] if len(args) > 1 else kwargs.get("mask")
        mask, are_entries = index[0] if isinstance(index, tuple) and len(index) == 1 else index, True
    tokens = _tokens_of(mask)
    is_count = (func in _COUNTS and not result.dim()) or (are_entries and getattr(mask, "dtype", None) == torch.bool)
    if tokens is not None and is_count:
        counts = tokens.counts()
        return Counted(counts, are_entries) if counts else None
    tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    of = next((one for one in tensors if _count_of(one)), None)
    mark = _count_of(of)
    if of is None or mark is None:
        return None
    if mark.are_entries:
        return mark if result.dim() and result.shape[0] == of.shape[0] else None
    are_numbers = all(_count_of(one) or not (one.dim() or one.requires_grad) for one in tensors)
    return mark if not result.dim() and are_numbers else None


def mark_cut(part: Tensor, whole: Tensor, layout: Layout) -> Tensor:
    """`part`, which a split has cut from `whole`, marked."""
    is_counted = whole.dim() == 2 or not (whole.is_floating_point() or whole.dtype == torch.bool)
    return PartOfSequence.of(part, Tokens(layout.num_local, 1, whole if is_counted else None, layout))


def mark_output(output: Tensor, layout: Layout) -> Tensor:
    """What a model has returned for its part of a sequence, marked if it has this rank's tokens in dimension 1."""
    if type(output) is not Tensor or output.dim() < 2 or output.shape[1] != layout.num_local:
        return output
    return PartOfSequence.of(output, Tokens(layout.num_local))


def unmarked(value: Any) -> Any:
    """`value` with plain tensors, in new tuples, lists and dicts: what a model is called with."""
    return tree_map_only(PartOfSequence, PartOfSequence.plain, value)


def _require_even(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise if a mean over losses has as many terms as labels count on this rank, and on others others count."""
    given = dict(zip(("input", "target", "weight", "size_average", "ignore_index"), args, strict=False)) | dict(kwargs)
    target, ignored = given.get("target"), given.get("ignore_index", _IGNORED)
    if not isinstance(target, PartOfSequence) or given.get("reduction", "mean") != "mean":
        return
    mark = target.mark
    weight = given.get("weight")

    def counted(labels: Tensor) -> Tensor:
        counts: Tensor = labels != ignored
        return counts if weight is None else counts * weight.detach()[labels.clamp(0, len(weight) - 1)]

    counts = mark.counts(counted) if isinstance(mark, Tokens) else mark.by_rank
    if len(set(counts)) > 1:
        raise ModelError(
            f"{func.__name__} takes the mean over the tokens of this rank that count, and the labels of this batch "
            f"count {_listed(counts)} of them on the ranks along sp: the mean over ranks would not be that "
            f"over tokens. Use reduction='none' and engine.mean_over_tokens(losses, counted)."
        )


def _require_even_counts(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise if a loop averages by itself over the tokens of this rank that count, and on others others count."""
    if getattr(func, "__module__", "").startswith("torch.distributed"):  # a loop that adds up counts by itself
        for one in tree_leaves((args, kwargs)):
            if count := _count_of(one):
                one.mark = Counted((), count.are_entries)
        return
    by = args[0] if args else kwargs.get("input")
    if func in _DIVISIONS:
        by = args[1] if len(args) > 1 else kwargs.get("other")
    averages = func in _AVERAGES or (func in _LOSSES and kwargs.get("reduction", "mean") == "mean")
    if not (averages or func in _DIVISIONS | _DIVIDES_BY_FIRST | _NUMBERS):
        return
    count = _count_of(by)
    if count is None or count.is_even or count.are_entries != averages:
        return
    raise ModelError(
        f"{getattr(func, '__name__', func)} takes the number of tokens of this rank that count, and on the ranks along "
        f"sp these are {_listed(count.by_rank)}: the mean over ranks of what is divided by it would not be that over "
        f"tokens. Average by engine.mean_over_tokens(values, mask), and take numbers of a whole batch from its mask "
        f"before engine.split_sequence."
    )


def _listed(counts: Sequence[float]) -> str:
    return ", ".join(f"{count:g}" for count in counts)
