"""The styles: what of a module is cut, and what it does instead of its own forward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from shardwise.errors import ModelError
from shardwise.placement import Box
from shardwise.tensor.forwards import Column, EmbeddingColumn, LatentAndRotary, Row, Shared, Summed, Vocabulary
from shardwise.tensor.rules import Cut
from shardwise.tensor.shares import AXIS, Shares, deal
from shardwise.tensor.split import Split

LINEAR, CONV1D = "Linear", "Conv1D"
LIKE_LINEAR = ("FalconLinear",)
"""Classes of transformers that are nn.Linear with a forward of their own that computes the same."""
GROUPS = "num_key_value_groups"
"""Queries for each key and value head, in attention modules of transformers."""
ROTARY = "qk_rope_head_dim"
"""Rotary features of a head, in modules of multi-head latent attention of transformers."""


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


def _latent_and_rotary(split: Split, cut: Cut) -> None:
    _linear(cut)
    parent = split.modules[cut.parent]
    num_rotary = getattr(parent, ROTARY, None)
    if type(num_rotary) is not int:
        raise ModelError(
            f"{cut.path} has the style {cut.style}, but {type(parent).__name__} has no attribute {ROTARY}, which says "
            f"how many of its last features are the keys' rotary part. Set it there."
        )
    if split.blocks:
        raise ModelError(
            f"{cut.path} has the style {cut.style}, of which tensor.sequence does not know the input. Leave "
            f"tensor.sequence out of the plan."
        )
    split.forwards.append((cut.module, partial(LatentAndRotary, cut.module, num_rotary=num_rotary)))


STYLES: dict[str, Callable[[Split, Cut], None]] = {
    "column": _column,
    "column_gathered": _column,
    "row": _row,
    "row_scattered": _row,
    "vocabulary": _vocabulary,
    "vocabulary_cut": _vocabulary,
    "embedding_column": _embedding_column,
    "embedding_heads": _embedding_column,
    "mla_kv_a_proj": _latent_and_rotary,
    "summed": _summed,
}


def _linear(cut: Cut) -> tuple[str, torch.Tensor]:
    """Which kind of matrix product a module is, and its weight."""
    module = cut.module
    weight = module._parameters.get("weight")
    if weight is not None and weight.dim() == 2:
        is_plain = type(module).forward is nn.Linear.forward or type(module).__name__ in LIKE_LINEAR
        if isinstance(module, nn.Linear) and is_plain:
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
    parent = split.modules[cut.parent]
    value = getattr(parent, GROUPS, None)
    if type(value) is not int or value % shares.copies:
        raise ModelError(
            f"{cut.path} has {cut.heads} heads for {split.num_ranks} ranks along {AXIS}, and {type(parent).__name__} "
            f"has no attribute {GROUPS} to divide, so that ranks could share a head. Choose a size of {AXIS} that "
            f"divides {cut.heads}."
        )
    if all((one, name) != (parent, GROUPS) for one, name, _ in split.attributes):
        split.attributes.append((parent, GROUPS, value // shares.copies))
