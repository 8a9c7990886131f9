"""A pipeline without most of its ranks, which tells of one that has them.

[Note: short pipelines] A stage takes longer to rehearse the more modules the model has, on whichever stage they are: a
rank copies what stands for those of others. Of the ranks that have nothing but equal blocks most do the same, so those
beyond the first few are left out, and their blocks with them. What a rank that is left out would have done, two that
are there show (see [Note: alike stages] in `alike_stages.py`). Each rank is then counted over its own row of the whole
schedule. A pipeline is rehearsed with all of its ranks where two did not do the same, where a stage reads results of
others than the one before it, and where every stage has some parameter; and so is one whose model does something
outside of blocks that depends on their number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from torch import nn

from shardwise.fit.alike_stages import FewStages, StageKinds
from shardwise.fit.stage_rehearsal import RankRecord, StageRecord, StageRehearsal
from shardwise.parallel.pipeline import StageLayout
from shardwise.parallel.pipeline.stage_layout import params_between

SHOWN = 3
"""Stages of a kind that are kept: the first may have fewer stand-ins before it than the two that are to do the same."""


@dataclass(frozen=True)
class ShortPipeline:
    """What is rehearsed for the pipeline `whole`: the `layout` of a `model` with fewer blocks, with stages of these
    `kinds`."""

    whole: StageLayout
    firsts: Mapping[int, int]
    """By stage of `whole`, its first block."""
    model: nn.Module
    layout: StageLayout
    kinds: StageKinds
    stage_of: Mapping[int, int]
    """By stage of `whole`, the one that tells of it."""
    left_out: frozenset[int]
    """Stages of `whole`."""

    @classmethod
    def of(
        cls, model: nn.Module, with_blocks: Callable[[int], nn.Module], kinds: StageKinds, layout: StageLayout
    ) -> ShortPipeline | None:
        """For a whole `model`, of which `with_blocks` makes one with few blocks; `None` if no rank can be left out."""
        blocks = kinds.blocks
        places = [[blocks.block_of(name) for name in stage] for stage in layout.stages] if blocks is not None else []
        own = [[place for place in stage if place is not None] for stage in places]
        if blocks is None or list(chain(*own)) != list(range(blocks.num)) or layout.guests:
            return None
        if params_between(dict(model.named_modules(remove_duplicate=False)), layout.pieces):
            return None
        kept, numbers = list[int](), Counter[object]()
        for pp_rank in range(layout.num_ranks):
            stages = layout.at(pp_rank)
            of_rank = [kinds.kinds.get(stage) for stage in stages]
            if None in of_rank or min(numbers[kind] for kind in of_rank) < SHOWN:
                kept.append(pp_rank)
                numbers.update(of_rank if None not in of_rank else ())
        if len(kept) == layout.num_ranks:
            return None
        chunks = range(layout.num_stages // layout.num_ranks)
        sources = [chunk * layout.num_ranks + pp_rank for chunk in chunks for pp_rank in kept]
        return cls._of_stages(with_blocks, kinds, layout, own, sources, len(kept))

    @classmethod
    def _of_stages(
        cls,
        with_blocks: Callable[[int], nn.Module],
        kinds: StageKinds,
        layout: StageLayout,
        own: Sequence[Sequence[int]],
        sources: Sequence[int],
        num_ranks: int,
    ) -> ShortPipeline:
        """With those stages of the whole, in their order."""
        blocks, num = kinds.blocks, 0
        assert blocks is not None
        stages: list[tuple[str, ...]] = []
        firsts: dict[int, int] = {}
        last_of: dict[object, int] = {}
        for short, stage in enumerate(sources):
            firsts[short] = num
            by = num - own[stage][0] if own[stage] else 0
            stages.append(tuple(blocks.renamed(name, by) for name in layout.stages[stage]))
            num += len(own[stage])
            if all(one in kinds.kinds for one in layout.at(layout.pp_rank_of(stage))):
                last_of[kinds.kinds[stage]] = short
        kept = {stage: short for short, stage in enumerate(sources)}
        return cls(
            layout,
            {stage: some[0] for stage, some in enumerate(own) if some},
            with_blocks(num),
            replace(layout, stages=tuple(stages), num_ranks=num_ranks),
            StageKinds(
                replace(blocks, num=num),
                {short: kinds.kinds[stage] for short, stage in enumerate(sources) if stage in kinds.kinds},
                firsts,
            ),
            kept | {stage: last_of[kinds.kinds[stage]] for stage in range(layout.num_stages) if stage not in kept},
            frozenset(range(layout.num_stages)) - kept.keys(),
        )

    def is_told_by(self, few: FewStages) -> bool:
        """Whether what has been rehearsed tells of the stages that are left out."""
        return few.hands_over_the_same and all(few.shows(self.stage_of[stage]) for stage in self.left_out)

    def rank(self, few: FewStages, pp_rank: int) -> tuple[RankRecord, StageRehearsal, Mapping[int, Mapping[str, int]]]:
        """As `FewStages.rank`, of a rank of the whole."""
        stages = self.whole.at(pp_rank)
        records = {stage: self._record(few, stage) for stage in stages}
        sent = {stage: few.sent_by(self.stage_of[stage]) for stage in stages}
        alike = few.rehearsal(self.layout.pp_rank_of(self.stage_of[stages[0]]))
        return RankRecord(self.whole.schedule, pp_rank, records), alike, sent

    def _record(self, few: FewStages, stage: int) -> StageRecord:
        short = self.stage_of[stage]
        return self.kinds.moved(few.record(short), self.firsts.get(stage, 0) - self.kinds.firsts[short])
