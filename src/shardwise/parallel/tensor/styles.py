"""The styles of `tensor.plan`: which parameters of a module are split, and which forward it gets."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwise.errors import ModelError
from shardwise.parallel.tensor.forwards import (
    MULTIPLY_SPLIT,
    Column,
    EmbeddingColumn,
    LatentAndRotary,
    Row,
    SharedHeads,
    SummedGrads,
    VocabularyEmbedding,
)
from shardwise.parallel.tensor.model_split import ModelSplit
from shardwise.parallel.tensor.partition import AXIS, Partition, partition
from shardwise.parallel.tensor.rules import SplitModule
from shardwise.plan.placement import Box

LINEAR, CONV1D = "Linear", "Conv1D"
LIKE_LINEAR = ("FalconLinear",)
"""Classes of transformers derived from nn.Linear with their own, equivalent forward."""
GROUPS = "num_key_value_groups"
"""The attribute of attention modules of transformers with the number of query heads per key and value head."""
ROTARY = "qk_rope_head_dim"
"""The attribute of modules of multi-head latent attention with the number of rotary features of a head."""


def _column(split: ModelSplit, target: SplitModule) -> None:
    kind, weight = _linear(target)
    out_dim = 1 if kind == CONV1D else 0
    shares = partition(target, weight.shape[out_dim], split.num_ranks)
    _require_whole_blocks(target, shares)
    gathers, is_cut, is_alone = (
        target.style == "column_gathered",
        target.style == "vocabulary_cut",
        target.style != "column",
    )
    if is_alone and (target.parts > 1 or shares.copies > 1):
        raise ModelError(
            f"{target.path} has {target.parts} fused parts, or fewer heads than there are ranks; its style must be "
            f"column."
        )
    if not gathers:
        split.outputs[target.path] = shares
    _split_param(split, target, "weight", out_dim, shares)
    _split_param(split, target, "bias", 0, shares)
    shared = SharedHeads(out_dim, [own[0] for own in shares.ranges], shares.size) if shares.copies > 1 else None
    module, sizes, on_sequence = target.module, shares.sizes, split.is_on_sequence(target)
    is_entered = on_sequence and split.parent_enters(target)
    split.attributes.append((module, "nf" if kind == CONV1D else "out_features", sizes[split.index]))
    split.forwards.append(
        (
            module,
            lambda line, regions: Column(
                module,
                line,
                regions,
                sizes=sizes,
                gathers=gathers,
                is_cut=is_cut,
                shared=shared,
                on_sequence=on_sequence,
                is_entered=is_entered,
                is_alone=is_alone,
            ),
        )
    )
    if shared is not None:
        _regroup(split, target, shares)


def _row(split: ModelSplit, target: SplitModule) -> None:
    kind, weight = _linear(target)
    in_dim = 0 if kind == CONV1D else 1
    shares = partition(target, weight.shape[in_dim], split.num_ranks)
    _require_whole_blocks(target, shares)
    if shares.copies > 1:
        raise ModelError(f"{target.path} has fewer heads than there are ranks along {AXIS}. Choose a smaller {AXIS}.")
    _split_param(split, target, "weight", in_dim, shares)
    module, sizes, scatters = target.module, shares.sizes, target.style == "row_scattered"
    on_sequence = split.is_on_sequence(target)
    split.attributes.append((module, "nx" if kind == CONV1D else "in_features", sizes[split.index]))
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


def _vocabulary(split: ModelSplit, target: SplitModule) -> None:
    module = target.module
    if not isinstance(module, nn.Embedding):
        style = "column_gathered" if target.style == "vocabulary" else target.style
        _column(split, SplitModule(target.path, module, style))
        return
    _check_embedding(target, module)
    shares = partition(SplitModule(target.path, module, target.style), module.weight.shape[0], split.num_ranks)
    _split_param(split, target, "weight", 0, shares)
    own = shares.ranges[split.index][0]
    pad = module.padding_idx
    split.attributes.append((module, "num_embeddings", own.numel))
    is_here = pad is not None and own.start <= pad < own.stop
    split.attributes.append((module, "padding_idx", pad - own.start if pad is not None and is_here else None))
    split.forwards.append((module, lambda line, regions: VocabularyEmbedding(module, line, regions, own)))


def _embedding_column(split: ModelSplit, target: SplitModule) -> None:
    module = target.module
    if not isinstance(module, nn.Embedding):
        raise ModelError(f"{target.path} is a {type(module).__name__}; the style embedding_column is for embeddings.")
    _check_embedding(target, module)
    shares = partition(target, module.weight.shape[1], split.num_ranks)
    _split_param(split, target, "weight", 1, shares)
    split.attributes.append((module, "embedding_dim", shares.sizes[split.index]))
    sizes = shares.sizes
    gathers = target.style == "embedding_column"
    split.forwards.append(
        (module, lambda line, regions: EmbeddingColumn(module, line, regions, sizes, gathers=gathers))
    )


def _summed(split: ModelSplit, target: SplitModule) -> None:
    module = target.module
    if any(True for _ in module.children()):
        raise ModelError(
            f"{target.path} has child modules; the style summed is for modules that have only parameters of their own."
        )
    split.forwards.append((module, lambda line, regions: SummedGrads(module, line, regions)))


def _latent_and_rotary(split: ModelSplit, target: SplitModule) -> None:
    _linear(target)
    parent = split.modules[target.parent]
    num_rotary = getattr(parent, ROTARY, None)
    if type(num_rotary) is not int:
        raise ModelError(
            f"{target.path} has the style {target.style}, but {type(parent).__name__} has no attribute {ROTARY} with "
            f"the number of its last features that are the keys' rotary part. Set it there."
        )
    if split.blocks:
        raise ModelError(
            f"{target.path} has the style {target.style}, which tensor.sequence does not support. Leave "
            f"tensor.sequence out of the plan."
        )
    split.forwards.append((target.module, partial(LatentAndRotary, target.module, num_rotary=num_rotary)))


STYLES: dict[str, Callable[[ModelSplit, SplitModule], None]] = {
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


def _linear(target: SplitModule) -> tuple[str, torch.Tensor]:
    """Whether a module is like nn.Linear or like Conv1D, and its weight."""
    module = target.module
    weight = module._parameters.get("weight")
    if weight is not None and weight.dim() == 2:
        is_plain = type(module).forward is nn.Linear.forward or hasattr(module, MULTIPLY_SPLIT)
        is_plain = is_plain or type(module).__name__ in LIKE_LINEAR
        if isinstance(module, nn.Linear) and is_plain:
            return LINEAR, weight
        if type(module).__name__ == CONV1D and hasattr(module, "nf"):
            return CONV1D, weight
    kind = type(module).__name__
    if kind in ("Linear", CONV1D):  # another library's, such as peft's
        kind = f"{type(module).__module__}.{kind}"
    raise ModelError(
        f"{target.path} is a {kind}, but the style {target.style} is for nn.Linear and transformers' "
        f"Conv1D. Name the linear modules in it, or leave it out of tensor.plan."
    )


def _require_whole_blocks(target: SplitModule, shares: Partition) -> None:
    """Raise `ModelError` if a part of a layer that multiplies in 8 bits has a size that kernels do not take, or a part
    of a block, whose other elements would have to be known for its scale."""
    if not hasattr(target.module, MULTIPLY_SPLIT):
        return
    recipe: Any = target.module.recipe
    spans = [span for own in shares.ranges for span in own]
    odd = next((one for one in spans if one.start % recipe.multiple or one.numel % recipe.multiple), None)
    if odd is not None:
        raise ModelError(
            f"{target.path} multiplies in fp8, {recipe.name}, whose parts begin and end at multiples of "
            f"{recipe.multiple}, but {AXIS} gives a rank the features {odd.start} to {odd.stop} of {shares.size}. Add "
            f"{target.path} to fp8.skip, or choose another size of {AXIS}."
        )


def _check_embedding(target: SplitModule, module: nn.Embedding) -> None:
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        raise ModelError(
            f"{target.path} is an embedding with max_norm, scale_grad_by_freq or sparse, which need the whole "
            f"embedding. Leave it out of tensor.plan, or build it without these options."
        )


def _split_param(split: ModelSplit, target: SplitModule, name: str, dim: int, shares: Partition) -> None:
    """Record this rank's part of a parameter, which other modules may share."""
    param = target.module._parameters.get(name)
    if param is None:
        return
    number = split.index % shares.copies
    box = Box.split(tuple(param.shape), dim, shares.ranges[split.index], shares.copies, number)
    known = split.boxes.setdefault(param, box)
    if known != box:
        raise ModelError(
            f"{split.names[param]} is used by {split.split_by[param]} and by {target.path}, which split it "
            f"differently: {known} and {box} of {list(param.shape)}. Give both the same style, such as vocabulary."
        )
    split.split_by.setdefault(param, target.path)


def _regroup(split: ModelSplit, target: SplitModule, shares: Partition) -> None:
    """If several ranks hold the same key and value head, each has fewer query heads per key and value head."""
    parent = split.modules[target.parent]
    value = getattr(parent, GROUPS, None)
    if type(value) is not int or value % shares.copies:
        raise ModelError(
            f"{target.path} has {target.heads} heads for {split.num_ranks} ranks along {AXIS}, and ranks cannot share "
            f"a head, because {type(parent).__name__} has no attribute {GROUPS} to divide. Choose a size of {AXIS} "
            f"that divides {target.heads}."
        )
    if all((one, name) != (parent, GROUPS) for one, name, _ in split.attributes):
        split.attributes.append((parent, GROUPS, value // shares.copies))
