"""The stages of a model for a search: which modules and how many elements each has, whatever else splits the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import nn

from shardwise.fit.candidates import Candidate
from shardwise.memory import UnitChoice, choose_units
from shardwise.parallel.pipeline import StageLayout, stage_layout
from shardwise.plan import Plan
from shardwise.program.schedule import schedule_of


@dataclass(frozen=True)
class Stages:
    """The stages of a pipeline: in which of them each unit is, and by stage their elements, and how many are blocks."""

    layout: StageLayout
    users: Mapping[str, set[int]]
    numel: Sequence[int]
    num_trained: Sequence[int]
    blocks: Sequence[int]

    @classmethod
    def of(cls, model: nn.Module, units: Sequence[UnitChoice], layout: StageLayout) -> Stages:
        by_stage = layout.params_by_stage(model)
        users = {
            unit.name: {stage for stage, own in enumerate(by_stage) if not own.isdisjoint(unit.params.values())}
            for unit in units
        }
        numel = [sum(param.numel() for param in own) for own in by_stage]
        num_trained = [sum(one.numel() for one in own if one.requires_grad) for own in by_stage]
        of_blocks = [some for name, some in users.items() if is_block(name)]
        blocks = [sum(stage in some for some in of_blocks) for stage in range(layout.num_stages)]
        return cls(layout, users, numel, num_trained, blocks)

    @cached_property
    def shares(self) -> list[float]:
        """By rank: elements, or trained ones if these are fewer, as a share of what the average rank has."""
        num_ranks = self.layout.num_ranks
        shares = [1.0] * num_ranks
        for sizes in (self.numel, self.num_trained):
            mean = sum(sizes) / num_ranks
            for rank in range(num_ranks) if mean else ():
                shares[rank] = min(shares[rank], sum(sizes[rank::num_ranks]) / mean)
        return shares


@dataclass
class StageCuts:
    """The stages of `model`, which is only read, by number and schedule."""

    model: nn.Module
    base: Plan
    ranks_per_node: int
    _known: dict[tuple[int, int, str], Stages] = field(default_factory=dict, init=False)
    _cut: dict[int, Stages] = field(default_factory=dict, init=False)
    """By their number."""

    def of(self, candidate: Candidate) -> Stages:
        """The stages of a model, however it is split otherwise. Where the plan does not list them, they depend on their
        number, and on nothing else of a schedule."""
        num_ranks = candidate.size("pp")
        key = num_ranks, candidate.chunks, candidate.schedule
        if key not in self._known:
            plan, mesh = replace(candidate, accumulate=num_ranks).placed(self.base, self.ranks_per_node)
            is_cut = self.base.pipeline.stages == "auto" and self.base.compile is None
            alike = self._cut.get(num_ranks * candidate.chunks) if is_cut else None
            if alike is None:
                alike = Stages.of(self.model, self._choices, stage_layout(self.model, plan, mesh))
                self._cut[num_ranks * candidate.chunks] = alike
            layout = replace(alike.layout, num_ranks=num_ranks, schedule=schedule_of(plan, num_ranks))
            self._known[key] = replace(alike, layout=layout)
        return self._known[key]

    @cached_property
    def _choices(self) -> list[UnitChoice]:
        return choose_units(self.model, self.base)


def is_block(name: str) -> bool:
    """Whether a unit is one of a list of blocks."""
    return any(word.isdigit() for word in name.split("."))
