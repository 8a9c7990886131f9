"""Which parameters are trained, and in which groups, for ranks that join after some were unfrozen.

What the others have unfrozen or added since memory was planned last is left out: a newcomer begins with the iteration
in which they did, and does the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import nn

from shardwise.elastic.layouts import Layout
from shardwise.sharded.sharded_model import ShardedModel
from shardwise.sharded.state import Former

Group = TypeVar("Group")


@dataclass(frozen=True)
class TrainedParams:
    """Names of parameters.

    `planned` have memory for gradients and states in the layout that a newcomer receives; those of them that are frozen
    now are `resting`. `groups` are those of the groups of each optimizer, `None` for groups that are left out.
    """

    planned: list[str]
    resting: list[str]
    groups: list[list[list[str] | None]]

    @classmethod
    def of(cls, sharded: ShardedModel, former: Former | None, layout: Layout) -> TrainedParams:
        """`layout` is the one that newcomers receive; `former` is what remains of `sharded` between two attempts to
        recover."""
        planned = [slot.name for spec, slots in layout.specs if spec.trainable for slot in slots]
        params = dict(sharded.model.named_parameters())
        names = {param: name for name, param in params.items()}
        members: Sequence[torch.optim.Optimizer] = ()
        added: set[nn.Parameter] = set()
        if former is not None:
            members, added = former.optimizers, set(former.added)
        elif sharded.parts.optimizer is not None:
            members, added = sharded.parts.optimizer.members, set(sharded.parts.optimizer.added)

        def listed(group: dict[str, Any]) -> list[str] | None:
            return None if added.intersection(group["params"]) else [names[param] for param in group["params"]]

        groups = [list(map(listed, member.param_groups)) for member in members]
        return cls(planned, [name for name in planned if not params[name].requires_grad], groups)

    @classmethod
    def union(cls, every: Sequence[TrainedParams]) -> TrainedParams:
        """Of the whole model, from ranks with different pipeline stages."""
        optimizers = zip(*(one.groups for one in every), strict=True)
        groups = [
            [None if None in parts else _union(part or () for part in parts) for parts in zip(*of_each, strict=True)]
            for of_each in optimizers
        ]
        return cls(_union(one.planned for one in every), _union(one.resting for one in every), groups)

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def of_known_groups(self, every: Iterable[Group]) -> list[Group]:
        """Those of `every` group of all optimizers that are not left out."""
        known = (names is not None for groups in self.groups for names in groups)
        return [group for group, is_known in zip(every, known, strict=False) if is_known]

    def other_group(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> str:
        """Which group of these `optimizers` of a plain `model` has other parameters than the others', in words; empty
        if all have the same. The others may have added some at the end."""
        names = {param: name for name, param in model.named_parameters()}
        for optimizer, theirs in zip(optimizers, self.groups, strict=True):
            kind = type(optimizer).__name__
            if len(optimizer.param_groups) > len(theirs):
                return f"its {kind} has {len(optimizer.param_groups)} groups, and theirs {len(theirs)}"
            for number, (group, known) in enumerate(zip(optimizer.param_groups, theirs, strict=False)):
                if known is not None and (odd := {names[param] for param in group["params"]} ^ set(known)):
                    return f"group {number} of its {kind} and of theirs do not both have {min(odd)}"
        return ""

    def plan_in(self, model: nn.Module) -> None:
        """Let the parameters of `model` have `requires_grad` as in the layout."""
        planned = set(self.planned)
        for name, param in model.named_parameters():
            param.requires_grad_(name in planned)

    def rest_in(self, model: nn.Module) -> None:
        """Freeze those parameters of `model` that are frozen on the other ranks."""
        resting = set(self.resting)
        for name, param in model.named_parameters():
            if name in resting:
                param.requires_grad_(False)

    def add_groups(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Add the groups that the others' optimizers have, and these do not."""
        params = dict(model.named_parameters())
        for optimizer, groups in zip(optimizers, self.groups, strict=True):
            for names in groups[len(optimizer.param_groups) :]:
                if names is not None:
                    optimizer.add_param_group({"params": [params[name] for name in names]})


def _union(every: Iterable[Iterable[str]]) -> list[str]:
    return list(dict.fromkeys(chain(*every)))
