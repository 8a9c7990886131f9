"""The stages of a pipeline, of which few are rehearsed if many do the same.

[Note: alike stages] Most stages of a deep pipeline have nothing but as many equal blocks each, so that a rehearsal of
every one finds the same again, with other names. A rehearsal takes longer the more modules a model has, on whichever
stage they are, so that all of them took minutes for a Llama of 126 blocks in 16 stages. So of each kind stages are
rehearsed until two that follow each other have done the same (before the second stage of a model there may be fewer
stand-ins, which a peak shows). Then all further ones of that kind do, if what comes to them has the same layout. On a
rank that has another stage as well, such as the first one, less stands in for that; so of its stages two show what its
others do. Where no two do the same (blocks that look at their number), or a stage reads results of other stages than
the one before it, each is rehearsed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from shardwise.fit.equal_blocks import EqualBlocks, equal_blocks, treats_alike
from shardwise.fit.stage_rehearsal import RankRecord, StageRecord, StageRehearsal
from shardwise.memory import choose_units
from shardwise.parallel.pipeline import StageLayout, StageMessageLayout
from shardwise.parallel.pipeline.staged_model import Carried
from shardwise.parallel.pipeline.survey import Found
from shardwise.plan import Plan

Kind = frozenset[tuple[str, tuple[str, ...]]]
"""Of a stage: its units, with their parameters, all named as if its first block were the first of all."""


@dataclass(frozen=True)
class StageKinds:
    """Which stages may do the same: `kinds` and `firsts` have those that consist of some of the `blocks`, with the
    number of the first one."""

    blocks: EqualBlocks | None = None
    kinds: Mapping[int, Kind] = field(default_factory=dict)
    firsts: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module, plan: Plan, layout: StageLayout) -> StageKinds:
        """Of a `model` that is whole. The last stage computes the loss as well, so it is of no kind."""
        blocks = equal_blocks(model) if treats_alike(plan) else None
        if blocks is None:
            return cls()
        choices = choose_units(model, plan)
        by_stage = layout.params_by_stage(model)
        kinds, firsts = {}, {}
        for stage in range(1, layout.num_stages - 1):
            places = [blocks.block_of(name) for name in layout.stages[stage]]
            first = places[0]
            if first is None or places != list(range(first, first + len(places))):
                continue
            own = by_stage[stage]
            firsts[stage] = first
            kinds[stage] = frozenset(
                (
                    blocks.renamed(choice.name, -first),
                    tuple(blocks.renamed(name, -first) for name, param in choice.params.items() if param in own),
                )
                for choice in choices
                if not own.isdisjoint(choice.params.values())
            )
        return cls(blocks, kinds, firsts)

    def record(self, record: StageRecord, stage: int, source: int) -> StageRecord:
        """The `record` of stage `source` as that of `stage`."""
        return self.moved(record, self.firsts[stage] - self.firsts[source])

    def moved(self, record: StageRecord, by: int) -> StageRecord:
        """The `record` of a stage as that of one whose blocks are `by` further on."""
        blocks = self.blocks
        assert blocks is not None
        return record.renamed(lambda unit: blocks.renamed(unit, by))

    def returned(self, layout: StageMessageLayout, before: StageMessageLayout, by: int) -> dict[str, Sequence[object]]:
        """What the modules of a stage have returned that was given `before` and hands over `layout`, by their names in
        the stage whose blocks are `by` further on."""
        assert self.blocks is not None
        new = {name: calls for name, calls in layout.returned.items() if name not in before.returned}
        return {self.blocks.renamed(name, by): calls for name, calls in new.items()}


@dataclass
class FewStages:
    """Rehearses the stages of all ranks of a pipeline: see [Note: alike stages]. `made` makes the rehearsal of a rank
    when it is first needed, and `sent` says what a rank's last rehearsal has sent within its layers."""

    layout: StageLayout
    kinds: StageKinds
    made: Callable[[int], StageRehearsal]
    sent: Callable[[int], Mapping[str, int]]
    _ranks: dict[int, StageRehearsal] = field(default_factory=dict)
    _sent: dict[int, Mapping[str, int]] = field(default_factory=dict)
    """By stage."""
    _arrived: dict[int, StageMessageLayout | None] = field(default_factory=dict)
    _found: dict[int, Found] = field(default_factory=dict)
    _records: dict[int, StageRecord] = field(default_factory=dict)
    _rehearsed: dict[object, list[int]] = field(default_factory=dict)
    """The last two stages that were, of all that may do the same."""
    _sources: dict[int, int] = field(default_factory=dict)
    """By stage that was not rehearsed: the one that has done the same."""
    _are_alike: dict[tuple[int, int], bool] = field(default_factory=dict)
    _carries: bool = False
    """Whether results of earlier stages are carried past others."""

    def rehearse(self, stage: int, arrived: StageMessageLayout | None, known: Carried | None) -> Found:
        """As `StageRehearsal.rehearse`, of the rank that has the stage."""
        self._arrived[stage], self._carries = arrived, known is not None
        source = self._source_of(stage) if known is None else None
        if source is None:
            return self._rehearse(stage, arrived, known)
        self._sources[stage] = source
        self._found[stage] = self._taken_over(stage, source)
        return self._found[stage]

    def rank(self, pp_rank: int) -> tuple[RankRecord, StageRehearsal, Mapping[int, Mapping[str, int]]]:
        """What is known of a rank after all stages have been rehearsed; its rehearsal, or that of one which shares the
        same with other stages; and what it sends within its layers, by stage."""
        stages, alike = self.layout.at(pp_rank), self.rehearsal(pp_rank)
        records = {stage: self.record(stage) for stage in stages}
        return RankRecord(alike.schedule, pp_rank, records), alike, {stage: self.sent_by(stage) for stage in stages}

    def record(self, stage: int) -> StageRecord:
        """What is known of a stage."""
        source = self._sources.get(stage)
        return self._records[stage] if source is None else self.kinds.record(self._records[source], stage, source)

    def sent_by(self, stage: int) -> Mapping[str, int]:
        """What its rank sends within its layers for it."""
        return self._sent[self._sources.get(stage, stage)]

    def rehearsal(self, pp_rank: int) -> StageRehearsal:
        """That of a rank, or of one which shares the same with other stages."""
        return self._ranks.get(pp_rank) or next(
            one for rank, one in self._ranks.items() if self._has_blocks_alone(rank)
        )

    @property
    def hands_over_the_same(self) -> bool:
        """Whether all stages have been given the same, and have read nothing of others than the one before."""
        if self._carries:
            return False
        arrived = [self._arrived[stage] for stage in range(1, self.layout.num_stages)]
        return all(one == arrived[0] for one in arrived)

    def shows(self, stage: int) -> bool:
        """Whether two stages of its kind have done the same, as further ones would."""
        some = self._rehearsed.get(self._key(stage), [])
        return len(some) == 2 and self._have_done_the_same(some[0], some[1])

    def _rehearse(self, stage: int, arrived: StageMessageLayout | None, known: Carried | None) -> Found:
        pp_rank = self.layout.pp_rank_of(stage)
        if pp_rank not in self._ranks:
            self._ranks[pp_rank] = self.made(pp_rank)
        rehearsal = self._ranks[pp_rank]
        self._sources.pop(stage, None)
        found = self._found[stage] = rehearsal.rehearse(stage, arrived, known)
        self._records[stage] = rehearsal.record(stage)
        self._sent[stage] = dict(self.sent(pp_rank))
        key = self._key(stage)
        self._rehearsed[key] = [*self._rehearsed.get(key, [])[-1:], stage]
        return found

    def _key(self, stage: int) -> object:
        """What is equal for stages that may do the same."""
        if stage not in self.kinds.kinds:
            return stage
        pp_rank = self.layout.pp_rank_of(stage)
        return self.kinds.kinds[stage], None if self._has_blocks_alone(pp_rank) else pp_rank

    def _has_blocks_alone(self, pp_rank: int) -> bool:
        """Whether a rank has nothing but stages of some kind."""
        return all(stage in self.kinds.kinds for stage in self.layout.at(pp_rank))

    def _source_of(self, stage: int) -> int | None:
        """A stage that has been rehearsed and does the same, if one is known."""
        some = self._rehearsed.get(self._key(stage), [])
        if len(some) < 2 or self._arrived[stage] != self._arrived[some[0]]:
            return None
        return some[0] if self._have_done_the_same(some[0], some[1]) else None

    def _have_done_the_same(self, one: int, other: int) -> bool:
        if (one, other) not in self._are_alike:
            self._are_alike[one, other] = self._compared(one, other)
        return self._are_alike[one, other]

    def _compared(self, one: int, other: int) -> bool:
        """Whether two stages of a kind have done the same, on the same, and have read nothing of others."""
        wanted = self._found[one].wanted | self._found[other].wanted
        same = (self._arrived[one], self._found[one].handed_over, self._sent[one])
        return (
            not wanted
            and same == (self._arrived[other], self._found[other].handed_over, self._sent[other])
            and self.kinds.record(self._records[one], other, one) == self._records[other]
        )

    def _taken_over(self, stage: int, source: int) -> Found:
        """What `stage` hands over. Later stages are told what the modules of all have returned, by name."""
        found, arrived, before = self._found[source], self._arrived[stage], self._arrived[source]
        assert found.handed_over is not None
        assert arrived is not None
        assert before is not None
        by = self.kinds.firsts[stage] - self.kinds.firsts[source]
        returned = {**arrived.returned, **self.kinds.returned(found.handed_over, before, by)}
        return replace(found, handed_over=replace(found.handed_over, returned=returned))
