"""A model cut along the tensor-parallel axis: worked out and checked first, then carried out in place."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from shardwise.config import Plan
from shardwise.errors import ModelError
from shardwise.placement import Box, Span
from shardwise.tensor.forwards import (
    Column,
    EmbeddingColumn,
    Forward,
    RegionEntry,
    Row,
    SequenceEdge,
    Shared,
    Summed,
    Vocabulary,
)
from shardwise.tensor.line import Line
from shardwise.tensor.loss import CausalLoss
from shardwise.tensor.regions import Regions
from shardwise.tensor.rules import Cut, cuts_for, divided, head_of

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
    attributes: list[tuple[nn.Module, str, object]] = field(default_factory=list)
    names: dict[nn.Parameter, str] = field(default_factory=dict)
    modules: dict[str, nn.Module] = field(default_factory=dict)
    cut_by: dict[nn.Parameter, str] = field(default_factory=dict)
    """The module that cuts each parameter, for sentences."""

    outputs: dict[str, Shares] = field(default_factory=dict)
    """By module, how what it returns is dealt."""
    blocks: str = ""
    """With `tensor.sequence`, the list of the blocks between which a sequence is cut."""

    def is_on_sequence(self, cut: Cut) -> bool:
        """Whether around a module each rank has its part of the sequence."""
        if not self.blocks or not cut.path.startswith(f"{self.blocks}."):
            return False
        if cut.style in ("column_gathered", "vocabulary_cut", "row_scattered"):
            raise ModelError(
                f"{cut.path} has the style {cut.style}, which wants the whole sequence; with tensor.sequence use "
                f"column and row in blocks, or leave tensor.sequence out of the plan."
            )
        return True

    def parent_enters(self, cut: Cut) -> bool:
        """Whether the module around a column module gets the whole sequence, and not just the column module: wherever
        that is not the block itself, since attention looks at the length of its input."""
        return cut.path.removeprefix(f"{self.blocks}.").count(".") > 1

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
    cuts = cuts_for(model, plan.tensor)
    if plan.tensor.sequence:
        split.blocks = _blocks(cuts)
    for cut in cuts:
        _STYLES[cut.style](split, cut)
    if plan.tensor.cut_logits:
        split.attributes.append((model, "loss_function", CausalLoss(head_of(model)[1])))
    if split.blocks:
        _cut_sequence(split, cuts)
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


# -- sequences -------------------------------------------------------------------------------------------


def _blocks(cuts: Sequence[Cut]) -> str:
    """The list of blocks that all pairs of column and row modules are in."""
    lists = {
        ".".join(parts[:depth])
        for cut in cuts
        if cut.style in ("column", "row")
        for parts in [cut.path.split(".")]
        for depth in [next((at for at, part in enumerate(parts) if part.isdecimal()), 0)]
    }
    if len(lists) != 1 or "" in lists:
        raise ModelError(
            f"tensor.sequence needs one list of blocks with all column and row modules, but they are in "
            f"{', '.join(sorted(lists)) or 'none'}. Leave tensor.sequence out of the plan."
        )
    return lists.pop()


def _cut_sequence(split: Split, cuts: Sequence[Cut]) -> None:
    """The edges, and between them where regions begin, and sums of gradients of what is whole on every rank."""
    cut_paths = {cut.path for cut in cuts}
    for parent in dict.fromkeys(
        cut.path.rpartition(".")[0] for cut in cuts if cut.style == "column" and split.parent_enters(cut)
    ):
        module = split.modules[parent]
        for name, child in module.named_children():
            if isinstance(child, nn.Linear) and f"{parent}.{name}" not in cut_paths:
                raise ModelError(
                    f"{parent}.{name} is not cut, but may read the same input as modules that are, and with "
                    f"tensor.sequence its gradients would count for every rank. Cut it too, or leave out "
                    f"tensor.sequence."
                )
        split.forwards.append((module, partial(RegionEntry, module)))
    blocks = list(split.modules[split.blocks].children())
    inside = {path: module for path, module in split.modules.items() if path.startswith(f"{split.blocks}.")}
    for path, module in inside.items():
        if path in cut_paths or not any(param is not None for param in module._parameters.values()):
            continue
        if any(True for _ in module.children()):
            raise ModelError(
                f"{path} has both parameters of its own and modules, so tensor.sequence cannot see which of what it "
                f"computes is of one part of the sequence. Put them into a module, or leave tensor.sequence out."
            )
        split.forwards.append((module, partial(Summed, module)))
    for index in sorted({0, len(blocks) - 1}):
        edges = {"is_first": index == 0, "is_last": index == len(blocks) - 1}
        split.forwards.append((blocks[index], partial(SequenceEdge, blocks[index], **edges)))


# -- styles -----------------------------------------------------------------------------------------------


def _column(split: Split, cut: Cut) -> None:
    kind, weight = _linear(cut)
    out_dim = 1 if kind == CONV1D else 0
    shares = deal(cut, weight.shape[out_dim], split.num_ranks)
    gathers, is_alone = cut.style == "column_gathered", cut.style != "column"
    if is_alone and (cut.parts > 1 or shares.copies > 1):
        raise ModelError(
            f"{cut.path} is of {cut.parts} parts, or has heads for some ranks only; its style must be column."
        )
    if not gathers:
        split.outputs[cut.path] = shares
    _cut_param(split, cut, "weight", out_dim, shares)
    _cut_param(split, cut, "bias", 0, shares)
    shared = Shared(out_dim, [own[0] for own in shares.ranges], shares.size) if shares.copies > 1 else None
    module, sizes, on_sequence = cut.module, shares.sizes, split.is_on_sequence(cut)
    is_entered = on_sequence and split.parent_enters(cut)
    split.attributes.append((module, "nf" if kind == CONV1D else "out_features", sizes[split.place]))
    split.forwards.append(
        (
            module,
            lambda line, regions: Column(
                module,
                line,
                regions,
                sizes=sizes,
                gathers=gathers,
                shared=shared,
                on_sequence=on_sequence,
                is_entered=is_entered,
                is_alone=is_alone,
            ),
        )
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
    on_sequence = split.is_on_sequence(cut)
    split.attributes.append((module, "nx" if kind == CONV1D else "in_features", sizes[split.place]))
    split.forwards.append(
        (
            module,
            lambda line, regions: Row(
                module,
                line,
                regions,
                sizes=sizes,
                scatters=scatters,
                is_conv1d=kind == CONV1D,
                on_sequence=on_sequence,
            ),
        )
    )


def _vocabulary(split: Split, cut: Cut) -> None:
    module = cut.module
    if not isinstance(module, nn.Embedding):
        _column(split, Cut(cut.path, module, "column_gathered" if cut.style == "vocabulary" else cut.style))
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
    "vocabulary_cut": _vocabulary,
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
