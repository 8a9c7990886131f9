"""What a loop holds of a split sequence: this rank's part of batches, and of what models return for them.

[Note: parts of a sequence] A loop that shifts labels by `labels[:, 1:]` after the split leaves out a token for each
rank, or pairs wrong ones; one that pools, or sums by sample, has those of a part. No error would follow. So parts are
marked (`system/marked.py`) as long as their dimension 1 is the rank's tokens, and functions that mix those are refused,
as in a model: [Note: along tokens] in `mixing.py`. A mean of losses is one over the rank's own tokens, which is right
if as many count on each: labels are known of all ranks, so that others are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from shardwise.errors import ModelError
from shardwise.parallel.sequence.token_layout import Layout
from shardwise.system.marked import Marked
from shardwise.system.torch_functions import is_called_by_us
from shardwise.system.torch_private import tree_leaves, tree_map_only

Tensor = torch.Tensor
_MEANS = frozenset({functional.cross_entropy, functional.nll_loss})
_ROWS = frozenset({Tensor.__getitem__, Tensor.unbind, torch.unbind, Tensor.select, torch.select, Tensor.squeeze})
"""What gives rows of a batch by themselves."""
_IGNORED = -100


@dataclass(frozen=True)
class Tokens:
    """What a marked tensor has of a split sequence."""

    num_local: int
    dim: int | None = 1
    """The dimension that is the tokens; `None` if there is one entry for each of them somehow."""
    whole: Tensor | None = None
    """Of integers that a split has cut: those of all ranks, which `layout` divides."""
    layout: Layout | None = None

    def counts(self, ignored: int) -> list[int]:
        """How many entries other than `ignored` each rank has."""
        if self.whole is None or self.layout is None:
            return []
        counted = self.whole != ignored
        return [int(self.layout.take(counted, rank).sum()) for rank in range(self.layout.num_ranks)]


class PartOfSequence(Marked):
    """This rank's part of a split sequence."""

    mark: Tokens

    @classmethod
    def _require_right(cls, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if func in _MEANS:
            _require_even(func, args, kwargs)
        marks = {id(one): one.mark for one in tree_leaves((args, kwargs)) if isinstance(one, cls)}
        known = next((mark for mark in marks.values() if mark.dim is not None), None)
        if known is None:
            return
        from shardwise.parallel.sequence.mixing import CURE, JOINS, mixes  # few jobs need it

        if func in JOINS and all(isinstance(one, cls) for one in tree_leaves(args[:1])):
            return  # a loop puts the parts of several ranks together by itself
        has_tokens = {key for key, mark in marks.items() if mark.dim == known.dim}
        shape = mixes(func, args, kwargs, known.num_local, lambda one: id(one) in has_tokens, known.dim or 0)
        if shape is not None and not is_called_by_us():
            raise ModelError(
                f"{getattr(func, '__name__', func)} is called on a tensor of shape {list(shape)} and mixes its tokens, "
                f"of which each rank of a split sequence has a part. {CURE} Average losses by engine.mean_over_tokens."
            )

    @classmethod
    def _marks_of(
        cls, results: Sequence[Any], func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Tokens | None]:
        of = next(one for one in tree_leaves((args, kwargs)) if isinstance(one, cls))
        return [_mark_of(one, func, of.plain(), of.mark) if isinstance(one, Tensor) else None for one in results]


def _mark_of(result: Tensor, func: Callable[..., Any], of: Tensor, mark: Tokens) -> Tokens | None:
    """What `result`, which `func` has made of `of`, has of the sequence."""
    is_looked_up = result.is_floating_point() and not of.is_floating_point() and result.shape != of.shape
    sizes, dim = result.shape, mark.dim
    if dim is not None and not is_looked_up and result.dim() > dim and sizes[dim] == mark.num_local:
        if sizes[:dim] == of.shape[:dim]:
            return mark
        if func is Tensor.__getitem__:  # some of the rows
            return Tokens(mark.num_local)
    if dim == 1 and func in _ROWS and result.dim() == of.dim() - 1 and sizes[:1] == (mark.num_local,):
        return Tokens(mark.num_local, dim=0)
    is_rearranged = mark.whole is not None and result.dtype == of.dtype and result.numel() == of.numel()
    return Tokens(mark.num_local, None, mark.whole, mark.layout) if is_rearranged else None


def mark_cut(part: Tensor, whole: Tensor, layout: Layout) -> Tensor:
    """`part`, which a split has cut from `whole`, marked."""
    is_counted = not (whole.is_floating_point() or whole.dtype == torch.bool)
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
    target = given.get("target")
    if not isinstance(target, PartOfSequence) or given.get("reduction", "mean") != "mean":
        return
    if target.device.type != "cpu":  # counting would wait for the device in each step
        return
    counts = target.mark.counts(given.get("ignore_index", _IGNORED))
    if len(set(counts)) > 1:
        raise ModelError(
            f"{func.__name__} takes the mean over the tokens of this rank that count, and the labels of this batch "
            f"count {', '.join(map(str, counts))} of them on the ranks along sp: the mean over ranks would not be that "
            f"over tokens. Use reduction='none' and engine.mean_over_tokens(losses, counted)."
        )
