"""A model cut along the tensor-parallel axis: worked out and checked first, then carried out in place."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from shardwise.config import Plan
from shardwise.errors import ModelError
from shardwise.placement import Box, Span
from shardwise.tensor.forwards import Column, EmbeddingColumn, Forward, Row, Shared, Summed, Vocabulary
from shardwise.tensor.line import Line
from shardwise.tensor.regions import Regions
from shardwise.tensor.rules import Cut, cuts_for, divided

AXIS = "tp"
Make = Callable[[Line, Regions], Forward]


@dataclass(frozen=True)
class Shares:
    """How a dimension of `size` is dealt to ranks: `ranges` by place, one per fused part. `copies` neighbours have the
    same, where there are more ranks than what may not be cut in two."""

    size: int
    ranges: tuple[tuple[Span, ...], ...]
    copies: int = 1

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(sum(span.numel for span in own) for own in self.ranges)


@dataclass
class Split:
    """What becomes of one model. Nothing has been changed for it yet.

    `boxes` are the parts of this rank of the parameters that are cut; `forwards` and `attributes` are set by
    `carry_out`.
    """

    place: int
    num_ranks: int
    boxes: dict[nn.Parameter, Box] = field(default_factory=dict)
    forwards: list[tuple[nn.Module, Make]] = field(default_factory=list)
    attributes: list[tuple[nn.Module, str, int | None]] = field(default_factory=list)
    names: dict[nn.Parameter, str] = field(default_factory=dict)
    modules: dict[str, nn.Module] = field(default_factory=dict)
    cut_by: dict[nn.Parameter, str] = field(default_factory=dict)
    """The module that cuts each parameter, for sentences."""

    def carry_out(self, line: Line, regions: Regions) -> None:
        for module, name, value in self.attributes:
            setattr(module, name, value)
        for module, make in self.forwards:
            module.__dict__["forward"] = make(line, regions)


def split_for(model: nn.Module, plan: Plan, place: int, num_ranks: int) -> Split:
    """How `model` is cut for the rank at `place` of `num_ranks` along the axis.

    Raises `ConfigError` or `ModelError` for what cannot be cut so, before anything is changed.
    """
    names = {param: name for name, param in model.named_parameters()}
    split = Split(place, num_ranks, names=names, modules=dict(model.named_modules()))
    for cut in cuts_for(model, plan.tensor):
        _STYLES[cut.style](split, cut)
    heads_of_rank = _dealt_heads(model, plan, num_ranks)
    for path, module, name in divided(model, plan.tensor):
        split.attributes.append((module, name, _divided(path, name, getattr(module, name), split, heads_of_rank)))
    return split


def deal(cut: Cut, size: int, num_ranks: int) -> Shares:
    """How the features of a module are dealt: whole heads, as even as can be."""
    if size % cut.parts:
        raise ModelError(f"{cut.path} has {size} features, which are not {cut.parts} matrices of one size.")
    part = size // cut.parts
    units = cut.heads or part
    if part % units:
        raise ModelError(f"{cut.path} has {part} features, which do not make {units} heads.")
    groups = cut.groups or units
    copies = 1
    if cut.heads is not None and groups >= num_ranks and units % groups == 0:
        places = _even(groups, num_ranks, units // groups)
    elif units < num_ranks and cut.heads is not None:
        if num_ranks % units:
            raise ModelError(
                f"{cut.path} has {units} heads for {num_ranks} ranks along {AXIS}, and neither divides the other. "
                f"Choose a size of {AXIS} that divides {units}, or that it divides."
            )
        copies = num_ranks // units
        places = [Span(rank // copies, rank // copies + 1) for rank in range(num_ranks)]
    elif cut.heads is not None and groups < num_ranks and units % num_ranks:
        raise ModelError(
            f"{cut.path} has {units} heads with {groups} of keys and values for {num_ranks} ranks along {AXIS}, which "
            f"does not divide {units}. Choose a size of {AXIS} that does."
        )
    else:
        if units < num_ranks:
            raise ModelError(
                f"{cut.path} has {units} features for {num_ranks} ranks along {AXIS}; leave it out of tensor.plan."
            )
        places = _even(units, num_ranks, 1)
    each = part // units
    ranges = tuple(
        tuple(Span(start + own.start * each, start + own.stop * each) for start in range(0, size, part))
        for own in places
    )
    return Shares(size, ranges, copies)


def _even(units: int, num_ranks: int, times: int) -> list[Span]:
    """`units` dealt to ranks in order, the first ones get one more; each counts for `times`."""
    least, more = divmod(units, num_ranks)
    starts = [rank * least + min(rank, more) for rank in range(num_ranks + 1)]
    return [Span(start * times, stop * times) for start, stop in itertools.pairwise(starts)]


# -- styles -----------------------------------------------------------------------------------------------


def _column(split: Split, cut: Cut) -> None:
    kind, weight = _linear(cut)
    out_dim = 1 if kind == CONV1D else 0
    shares = deal(cut, weight.shape[out_dim], split.num_ranks)
    gathers = cut.style != "column"
    if gathers and (cut.parts > 1 or shares.copies > 1):
        raise ModelError(
            f"{cut.path} is of {cut.parts} parts, or has heads for some ranks only; its style must be column."
        )
    _cut_param(split, cut, "weight", out_dim, shares)
    _cut_param(split, cut, "bias", 0, shares)
    shared = Shared(out_dim, [own[0] for own in shares.ranges], shares.size) if shares.copies > 1 else None
    module, sizes = cut.module, shares.sizes
    split.attributes.append((module, "nf" if kind == CONV1D else "out_features", sizes[split.place]))
    split.forwards.append(
        (module, lambda line, regions: Column(module, line, regions, sizes, gathers=gathers, shared=shared))
    )
    if shared is not None:
        _regroup(split, cut, shares)


def _row(split: Split, cut: Cut) -> None:
    kind, weight = _linear(cut)
    in_dim = 0 if kind == CONV1D else 1
    shares = deal(cut, weight.shape[in_dim], split.num_ranks)
    if shares.copies > 1:
        raise ModelError(f"{cut.path} has fewer heads than there are ranks along {AXIS}; choose a smaller {AXIS}.")
    _cut_param(split, cut, "weight", in_dim, shares)
    module, sizes, scatters = cut.module, shares.sizes, cut.style == "row_scattered"
    split.attributes.append((module, "nx" if kind == CONV1D else "in_features", sizes[split.place]))
    split.forwards.append(
        (
            module,
            lambda line, regions: Row(module, line, regions, sizes, scatters=scatters, is_conv1d=kind == CONV1D),
        )
    )


def _vocabulary(split: Split, cut: Cut) -> None:
    module = cut.module
    if not isinstance(module, nn.Embedding):
        _column(split, Cut(cut.path, module, "column_gathered"))
        return
    _check_embedding(cut, module)
    shares = deal(Cut(cut.path, module, cut.style), module.weight.shape[0], split.num_ranks)
    _cut_param(split, cut, "weight", 0, shares)
    own = shares.ranges[split.place][0]
    pad = module.padding_idx
    split.attributes.append((module, "num_embeddings", own.numel))
    is_here = pad is not None and own.start <= pad < own.stop
    split.attributes.append((module, "padding_idx", pad - own.start if pad is not None and is_here else None))
    split.forwards.append((module, lambda line, regions: Vocabulary(module, line, regions, own)))


def _embedding_column(split: Split, cut: Cut) -> None:
    module = cut.module
    if not isinstance(module, nn.Embedding):
        raise ModelError(f"{cut.path} is a {type(module).__name__}; the style embedding_column is for embeddings.")
    _check_embedding(cut, module)
    shares = deal(cut, module.weight.shape[1], split.num_ranks)
    _cut_param(split, cut, "weight", 1, shares)
    split.attributes.append((module, "embedding_dim", shares.sizes[split.place]))
    sizes = shares.sizes
    gathers = cut.style == "embedding_column"
    split.forwards.append(
        (module, lambda line, regions: EmbeddingColumn(module, line, regions, sizes, gathers=gathers))
    )


def _summed(split: Split, cut: Cut) -> None:
    module = cut.module
    if any(True for _ in module.children()):
        raise ModelError(
            f"{cut.path} has modules in it; the style summed is for one that has parameters of its own alone."
        )
    split.forwards.append((module, lambda line, regions: Summed(module, line, regions)))


_STYLES: dict[str, Callable[[Split, Cut], None]] = {
    "column": _column,
    "column_gathered": _column,
    "row": _row,
    "row_scattered": _row,
    "vocabulary": _vocabulary,
    "embedding_column": _embedding_column,
    "embedding_heads": _embedding_column,
    "summed": _summed,
}


# -- what they have in common -----------------------------------------------------------------------------

LINEAR, CONV1D = "Linear", "Conv1D"
GROUPS = "num_key_value_groups"
"""Queries for each key and value head, in attention modules of transformers."""


def _linear(cut: Cut) -> tuple[str, torch.Tensor]:
    """Which kind of matrix product a module is, and its weight."""
    module = cut.module
    weight = module._parameters.get("weight")
    if weight is not None and weight.dim() == 2:
        if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
            return LINEAR, weight
        if type(module).__name__ == CONV1D and hasattr(module, "nf"):
            return CONV1D, weight
    raise ModelError(
        f"{cut.path} is a {type(module).__name__}, and the style {cut.style} is for nn.Linear, and Conv1D of "
        f"transformers. Name the linear modules in it, or leave it out of tensor.plan."
    )


def _check_embedding(cut: Cut, module: nn.Embedding) -> None:
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        raise ModelError(
            f"{cut.path} is an embedding with max_norm, scale_grad_by_freq or sparse, which look at all of it at once; "
            f"leave it out of tensor.plan, or build it without."
        )


def _cut_param(split: Split, cut: Cut, name: str, dim: int, shares: Shares) -> None:
    """Note this rank's part of a parameter, which another module may have too."""
    param = cut.module._parameters.get(name)
    if param is None:
        return
    place = split.place % shares.copies
    box = Box.cut(tuple(param.shape), dim, shares.ranges[split.place], shares.copies, place)
    known = split.boxes.setdefault(param, box)
    if known != box:
        raise ModelError(
            f"{split.names[param]} is used by {split.cut_by[param]} and by {cut.path}, which cut it differently: "
            f"{known} and {box} of {list(param.shape)}. Give both the same style, such as vocabulary."
        )
    split.cut_by.setdefault(param, cut.path)


def _regroup(split: Split, cut: Cut, shares: Shares) -> None:
    """Key and value heads that several ranks have: on each rank fewer queries share one."""
    parent = split.modules[cut.path.rpartition(".")[0]]
    value = getattr(parent, GROUPS, None)
    if type(value) is not int or value % shares.copies:
        raise ModelError(
            f"{cut.path} has {cut.heads} heads for {split.num_ranks} ranks along {AXIS}, and {type(parent).__name__} "
            f"has no attribute {GROUPS} to divide, so that ranks could share a head. Choose a size of {AXIS} that "
            f"divides {cut.heads}."
        )
    if all((one, name) != (parent, GROUPS) for one, name, _ in split.attributes):
        split.attributes.append((parent, GROUPS, value // shares.copies))


def _dealt_heads(model: nn.Module, plan: Plan, num_ranks: int) -> dict[str, Sequence[int]]:
    """Heads of each rank, by the attention module that has them."""
    dealt: dict[str, Sequence[int]] = {}
    for cut in cuts_for(model, plan.tensor):
        if cut.heads is not None and cut.style == "column":
            shares = deal(Cut(cut.path, cut.module, cut.style, 1, cut.heads, cut.groups), cut.heads, num_ranks)
            dealt.setdefault(cut.path.rpartition(".")[0], shares.sizes)
    return dealt


def _divided(path: str, name: str, value: int, split: Split, heads_of_rank: dict[str, Sequence[int]]) -> int:
    """This rank's part of what an attribute counts: by its heads, or evenly."""
    heads = heads_of_rank.get(path)
    if heads is not None and value % sum(heads) == 0:
        return value // sum(heads) * heads[split.place]
    if value % split.num_ranks:
        raise ModelError(
            f"{path}.{name} is {value}, which {split.num_ranks} ranks along {AXIS} do not divide. Choose a size of "
            f"{AXIS} that does, or a model with another number."
        )
    return value // split.num_ranks
