"""How a model is cut, by what its plan asks for: checked before anything is changed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

from torch import nn

from shardwise.config import Plan
from shardwise.errors import ModelError
from shardwise.placement import Span
from shardwise.tensor.adapters import BASE, dropouts
from shardwise.tensor.forwards import Drawn, OwnHeads, RegionEntry, SequenceEdge, Summed
from shardwise.tensor.loss import CausalLoss
from shardwise.tensor.rules import Cut, by_head, cuts_for, divided, head_of
from shardwise.tensor.shares import AXIS, deal
from shardwise.tensor.split import Split
from shardwise.tensor.styles import STYLES


def split_for(model: nn.Module, plan: Plan, place: int, num_ranks: int, apart: Collection[str] = ()) -> Split:
    """How `model` is cut for the rank at `place` of `num_ranks` along the axis. Modules of the names `apart` are left
    alone by the model's own plan.

    Raises `ConfigError` or `ModelError` for what cannot be cut so, before anything is changed.
    """
    names = {param: name for name, param in model.named_parameters()}
    split = Split(place, num_ranks, names=names, modules=dict(model.named_modules()))
    cuts = cuts_for(model, plan.tensor, apart)
    if plan.tensor.sequence:
        split.blocks = _blocks(cuts)
    for cut in cuts:
        STYLES[cut.style](split, cut)
    if plan.tensor.plan is None:
        from shardwise.tensor.stacked import cut_stacked  # only ranks with split layers load it

        cut_stacked(split, model, apart)
    if plan.tensor.cut_logits:
        split.attributes.append((model, "loss_function", CausalLoss(head_of(model)[1])))
    if split.blocks:
        _cut_sequence(split, cuts)
    _draw_before_adapters(split, cuts)
    heads_of_rank = _dealt_heads(cuts, num_ranks)
    for path, module, argument in by_head(model, plan.tensor):
        _give_own_heads(split, path, module, argument, heads_of_rank)
    for path, module, name in divided(model, plan.tensor):
        split.attributes.append((module, name, _divided(path, name, getattr(module, name), split, heads_of_rank)))
    return split


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


def begin_stages(split: Split, names: Sequence[str]) -> None:
    """Tell the blocks `names`, with which pipeline stages begin, that their ranks have worked on parts of the sequence
    since the first block."""
    last = list(split.modules[split.blocks].children())[-1] if split.blocks else None
    for name in filter(split.receives_part, names):
        block = split.modules[name]
        edge = partial(SequenceEdge, block, is_first=False, is_last=block is last, begins_stage=True)
        split.forwards.append((block, edge))  # the later one counts


def _draw_before_adapters(split: Split, cuts: Sequence[Cut]) -> None:
    """Dropout before an adapter: of a column module it is on what all ranks have, of a row module on each rank's own
    features, and both may come when the base has opened or closed a region."""
    for cut in cuts:
        if cut.wrapper and cut.path == f"{cut.wrapper}.{BASE}":
            for dropout in dropouts(split.modules[cut.wrapper]):
                split.forwards.append((dropout, partial(Drawn, dropout, in_common=cut.style != "row")))


def _give_own_heads(
    split: Split, path: str, module: nn.Module, argument: str, heads_of_rank: dict[str, Sequence[int]]
) -> None:
    if split.blocks:
        raise ModelError(
            f"{path} takes {argument}, which has heads, so tensor.sequence does not know its input. Leave "
            f"tensor.sequence out of the plan."
        )
    sizes = heads_of_rank[path]
    start = sum(sizes[: split.place])
    own = Span(start, start + sizes[split.place])
    split.forwards.append((module, partial(OwnHeads, module, argument=argument, own=own, num_heads=sum(sizes))))


def _dealt_heads(cuts: Sequence[Cut], num_ranks: int) -> dict[str, Sequence[int]]:
    """Heads of each rank, by the attention module that has them."""
    dealt: dict[str, Sequence[int]] = {}
    for cut in cuts:
        if cut.heads is not None and cut.style == "column":
            shares = deal(Cut(cut.path, cut.module, cut.style, 1, cut.heads, cut.groups), cut.heads, num_ranks)
            dealt.setdefault(cut.parent, shares.sizes)
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
