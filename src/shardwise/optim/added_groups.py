"""Parameter groups that are added to an optimizer after its model was sharded, as gradual unfreezing does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.errors import ModelError
from shardwise.memory import Flat
from shardwise.optim.piece import Piece, homes_of
from shardwise.optim.probe import updates_of
from shardwise.plan.placement import Span
from shardwise.program import Update


@dataclass(frozen=True)
class GroupAdded:
    """How its parameters are updated, and pieces of them without any elements: there is no memory for states yet."""

    updates: Mapping[nn.Parameter, Update]
    pieces: Sequence[Piece]


def added_group(
    member: torch.optim.Optimizer,
    add: Callable[[dict[str, Any]], object],
    param_group: dict[str, Any],
    flats: Sequence[Flat],
    pieces: Sequence[Piece],
    members: Sequence[torch.optim.Optimizer],
) -> GroupAdded:
    """Add a group by `add` to `member`, one of `members` with these `pieces`, whose groups list parameters now.

    Raises `ModelError` for parameters that the model does not have or an optimizer has already, and what `updates_of`
    raises; nothing has been changed then.
    """
    described = _described(param_group)
    homes = homes_of(flats)
    owned = {piece.param for piece in pieces}
    add(param_group)
    group = member.param_groups[-1]
    try:
        for param in group["params"]:
            if param not in homes:
                raise ModelError(
                    f"A parameter group with {described} was added after shard(), and its parameter of "
                    f"shape {list(param.shape)} is not one of the model's. Give it to another optimizer."
                )
            if param in owned:
                flat, index = homes[param]
                raise ModelError(
                    f"{flat.slots[index].name} was added to an optimizer, and another one of this model updates it "
                    f"already. Give each parameter to one."
                )
        updates = updates_of(member, [group])
        others = [other for other in members if other is not member]
        theirs = [update for other in others for update in updates_of(other, other.param_groups).values()]
        if any(update.looks_further for update in updates.values()) and any(one.looks_further for one in theirs):
            raise ModelError(
                f"A parameter group with {described} was added, for which {type(member).__name__} looks at whole "
                f"parameters, as another optimizer of this model does already. Put it into a group of that one."
            )
    except BaseException:
        member.param_groups.pop()
        raise
    return GroupAdded(updates, [_empty(*homes[param]) for param in group["params"]])


def _empty(flat: Flat, index: int) -> Piece:
    slot = flat.slots[index]
    return Piece(slot.name, slot.shape, Span(0, 0), nn.Parameter(torch.empty(0, device=flat.device)), flat, index)


def _described(group: Mapping[str, Any]) -> str:
    settings = [f"{key}={value}" for key, value in group.items() if key != "params"]
    return ", ".join(settings) or "the default settings"
