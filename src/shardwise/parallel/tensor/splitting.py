"""Decides how a plan splits a model. Everything is checked before anything is changed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial

from torch import nn

from shardwise.errors import ModelError
from shardwise.parallel.tensor.adapters import BASE, dropouts, refuse_prefixes
from shardwise.parallel.tensor.forwards import (
    AdapterDropout,
    OwnHeads,
    RegionEntry,
    SequenceEdge,
    SummedGrads,
)
from shardwise.parallel.tensor.model_split import ModelSplit
from shardwise.parallel.tensor.partition import AXIS, partition
from shardwise.parallel.tensor.rules import SplitModule, divided_attributes, per_head_arguments, targets_for
from shardwise.parallel.tensor.styles import STYLES
from shardwise.plan import Plan
from shardwise.plan.placement import Span


def split_for(model: nn.Module, plan: Plan, index: int, num_ranks: int, excluded: Collection[str] = ()) -> ModelSplit:
    """How `model` is split for the rank at `index` of `num_ranks` along the axis. The model's own plan is not applied
    to modules named in `excluded`.

    Raises `ConfigError` or `ModelError` if the model cannot be split as planned. Changes nothing.
    """
    names = {param: name for name, param in model.named_parameters()}
    refuse_prefixes(model)
    split = ModelSplit(index, num_ranks, names=names, modules=dict(model.named_modules()))
    targets = targets_for(model, plan.tensor, excluded)
    if plan.tensor.sequence:
        split.blocks = _blocks(targets)
    for target in targets:
        STYLES[target.style](split, target)
    if plan.tensor.plan is None:
        from shardwise.parallel.tensor.stacked_experts import split_stacked  # only ranks with split layers load it

        split_stacked(split, model, excluded)
    if split.blocks:
        _split_sequence(split, targets)
    _set_adapter_dropout(split, targets)
    heads_of_rank = _heads_by_rank(targets, num_ranks)
    for path, module, argument in per_head_arguments(model, plan.tensor):
        _give_own_heads(split, path, module, argument, heads_of_rank)
    for path, module, name in divided_attributes(model, plan.tensor):
        split.attributes.append((module, name, _divided_value(path, name, getattr(module, name), split, heads_of_rank)))
    return split


def _blocks(targets: Sequence[SplitModule]) -> str:
    """The list of blocks that contains all pairs of column and row modules."""
    lists = {
        ".".join(parts[:depth])
        for target in targets
        if target.style in ("column", "row")
        for parts in [target.path.split(".")]
        for depth in [next((at for at, part in enumerate(parts) if part.isdecimal()), 0)]
    }
    if len(lists) != 1 or "" in lists:
        raise ModelError(
            f"tensor.sequence needs one list of blocks that contains all column and row modules, but they are in "
            f"{', '.join(sorted(lists)) or 'none'}. Leave tensor.sequence out of the plan."
        )
    return lists.pop()


def _split_sequence(split: ModelSplit, targets: Sequence[SplitModule]) -> None:
    """Add the forwards of `tensor.sequence`: the first and last block, the modules that enter regions, and modules
    whose replicated parameters need their gradients summed."""
    split_paths = {target.path for target in targets}
    for parent in dict.fromkeys(
        target.path.rpartition(".")[0] for target in targets if target.style == "column" and split.parent_enters(target)
    ):
        module = split.modules[parent]
        for name, child in module.named_children():
            if isinstance(child, nn.Linear) and f"{parent}.{name}" not in split_paths:
                raise ModelError(
                    f"{parent}.{name} is not split, but may read the same input as split modules, and with "
                    f"tensor.sequence its gradients would be counted once per rank. Split it too, or leave "
                    f"tensor.sequence out of the plan."
                )
        split.forwards.append((module, partial(RegionEntry, module)))
    blocks = list(split.modules[split.blocks].children())
    inside = {path: module for path, module in split.modules.items() if path.startswith(f"{split.blocks}.")}
    for path, module in inside.items():
        if path in split_paths or not any(param is not None for param in module._parameters.values()):
            continue
        if any(True for _ in module.children()):
            raise ModelError(
                f"{path} has both parameters of its own and child modules, so tensor.sequence cannot tell which of its "
                f"computations are on this rank's part of the sequence. Put the parameters into a child module, or "
                f"leave tensor.sequence out of the plan."
            )
        split.forwards.append((module, partial(SummedGrads, module)))
    for index in sorted({0, len(blocks) - 1}):
        edges = {"is_first": index == 0, "is_last": index == len(blocks) - 1}
        split.forwards.append((blocks[index], partial(SequenceEdge, blocks[index], **edges)))


def begin_stages(split: ModelSplit, names: Sequence[str]) -> None:
    """Let the blocks `names`, the first of each pipeline stage, expect this rank's part of the sequence as input if an
    earlier stage has split it."""
    last = list(split.modules[split.blocks].children())[-1] if split.blocks else None
    for name in filter(split.receives_part, names):
        block = split.modules[name]
        edge = partial(SequenceEdge, block, is_first=False, is_last=block is last, begins_stage=True)
        split.forwards.append((block, edge))  # the later one counts


def _set_adapter_dropout(split: ModelSplit, targets: Sequence[SplitModule]) -> None:
    """Set which generator the dropout before an adapter uses: in a column module its input is the same on all ranks, in
    a row module it is this rank's features. In both, the base may already have entered or left a region."""
    for target in targets:
        if target.wrapper and target.path == f"{target.wrapper}.{BASE}":
            for dropout in dropouts(split.modules[target.wrapper]):
                split.forwards.append((dropout, partial(AdapterDropout, dropout, is_replicated=target.style != "row")))


def _give_own_heads(
    split: ModelSplit, path: str, module: nn.Module, argument: str, heads_of_rank: dict[str, Sequence[int]]
) -> None:
    if split.blocks:
        raise ModelError(
            f"{path} has the argument {argument} with values per head, which tensor.sequence does not support. Leave "
            f"tensor.sequence out of the plan."
        )
    sizes = heads_of_rank[path]
    start = sum(sizes[: split.index])
    own = Span(start, start + sizes[split.index])
    split.forwards.append((module, partial(OwnHeads, module, argument=argument, own=own, num_heads=sum(sizes))))


def _heads_by_rank(targets: Sequence[SplitModule], num_ranks: int) -> dict[str, Sequence[int]]:
    """The number of heads of each rank, by attention module."""
    heads: dict[str, Sequence[int]] = {}
    for target in targets:
        if target.heads is not None and target.style == "column":
            one_per_head = replace(target, parts=1, wrapper="")
            heads.setdefault(target.parent, partition(one_per_head, target.heads, num_ranks).sizes)
    return heads


def _divided_value(path: str, name: str, value: int, split: ModelSplit, heads_of_rank: dict[str, Sequence[int]]) -> int:
    """This rank's value of an attribute that counts heads or features: proportional to its heads, or an even part."""
    heads = heads_of_rank.get(path)
    if heads is not None and value % sum(heads) == 0:
        return value // sum(heads) * heads[split.index]
    if value % split.num_ranks:
        raise ModelError(
            f"{path}.{name} is {value}, which is not divisible by the {split.num_ranks} ranks along {AXIS}. Choose a "
            f"size of {AXIS} that divides it, or change the model."
        )
    return value // split.num_ranks
