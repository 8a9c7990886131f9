"""What the stages of a pipeline compute and hold, from what was counted of the whole model. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from shardwise.errors import ModelError
from shardwise.fit.foreseen import Counted, RankUnits
from shardwise.fit.operations import Worked
from shardwise.fit.stage_rehearsal import in_transit
from shardwise.program import END_OF_BACKWARD, Mark, Moment
from shardwise.program.in_flight import StageBytes, over_schedule


def counts_of_ranks(
    ranks: Sequence[RankUnits], places: Sequence[int] | None, whole: Counted, message_bytes: int
) -> list[Counted]:
    """What each of the `ranks` of a pipeline, or of those at some `places`, holds and computes, by the moments of the
    whole model."""
    users: dict[str, set[int]] = {}
    for rank in ranks:
        for name, some in rank.stages_of_units.items():
            users.setdefault(name, set()).update(some)
    stage_of = stages_of([mark.moment for mark in whole.activations.marks], users)
    last = max(op.stage for rank in ranks for op in rank.row)
    num_micro_batches = 1 + max(op.micro_batch for rank in ranks for op in rank.row)
    found = []
    for rank in ranks if places is None else [ranks[place] for place in places]:
        stages, messages = {}, 0
        names_of = {
            stage: {name for name, some in rank.stages_of_units.items() if stage in some}
            for stage in {op.stage for op in rank.row}
        }
        for stage, names in names_of.items():
            marks = _marks_of_stage(whole.activations.marks, stage_of, stage, names)
            forward = [mark for mark in marks if mark.moment.phase == "forward"]
            if not forward:
                raise ModelError(f"Stage {stage} of the pipeline has no unit whose activations are known.")
            given, sent = messages_of(stage, last + 1, message_bytes)
            in_forward, in_backward, left, _ = beside_whole(given, sent)
            held = forward[-1].live_bytes + left
            marks = [_above(mark, in_forward if mark.moment.phase == "forward" else in_backward) for mark in marks]
            factors = {
                one.moment: one.factors_bytes for one, at in zip(whole.worked, stage_of, strict=True) if at == stage
            }
            if any(op.kind == "I" for op in rank.row):
                marks = list(_with_aside(marks, factors))
            messages += in_transit(len(ranks), num_micro_batches, given, sent)
            heap = max(mark.heap_bytes for mark in marks)
            ended = Mark(END_OF_BACKWARD, 0, 0)
            own = replace(whole.activations, marks=(*marks, ended), peak_heap_bytes=heap)
            aside = sum(factors.values())
            stages[stage] = StageBytes(own, held, aside)
        names = set().union(*names_of.values())
        held_by_rank = over_schedule(rank.row, stages, names, messages)
        worked = tuple(
            one if stage in names_of else Worked(one.moment)
            for one, stage in zip(whole.worked, stage_of, strict=True)
            if one.moment.unit in names
        )
        by_stage = {stage: message_bytes for stage in names_of if stage < last}
        found.append(Counted(held_by_rank, {}, 0, worked, by_stage))
    return found


def messages_of(stage: int, num_stages: int, message_bytes: int) -> tuple[int, int]:
    """Bytes that it is given, and that it sends on, of each micro-batch."""
    return message_bytes if stage else 0, message_bytes if stage + 1 < num_stages else 0


def beside_whole(given: int, sent: int) -> tuple[int, int, int, int]:
    """What a stage holds beside what the whole model holds there, in the order of `StagePass.bytes`: what has arrived,
    and what stands for it until a module of this stage takes it, which checkpoints keep; and until its backward has
    ended what it has handed over."""
    return 2 * given, 2 * given + sent, 2 * given, 0


def _with_aside(marks: Sequence[Mark], factors: Mapping[Moment, int]) -> Iterator[Mark]:
    """With what the first half of a backward keeps: the bytes from which gradients of parameters are computed, by the
    moment by which they are there. (Some of them are freed before the peak of their moment.)"""
    aside = 0
    for mark in marks:
        before, after = _above(mark, aside), _above(mark, aside + factors.get(mark.moment, 0))
        yield after._replace(peak_bytes=max(before.peak_bytes, after.live_bytes), peaks=before.peaks)
        aside += factors.get(mark.moment, 0)


def _above(mark: Mark, num_bytes: int) -> Mark:
    """The same with so many bytes more."""
    held = mark.peak_bytes + num_bytes, mark.live_bytes + num_bytes, mark.heap_bytes
    return Mark(mark.moment, *held, mark.peaks_with(num_bytes), mark.awaited, mark.come_bytes)


def stages_of(moments: Sequence[Moment], users: Mapping[str, set[int]]) -> list[int]:
    """In which stage the model is at each moment: units that several stages use (embedding and head in one) are used in
    the one that has come last."""
    stage, found = 0, []
    for moment in moments:
        some = users.get(moment.unit)
        if some and stage not in some:
            later = moment.phase == "forward"
            ahead = [one for one in some if (one > stage) == later]
            stage = (min if later else max)(ahead or some)
        found.append(stage)
    return found


def _marks_of_stage(marks: Sequence[Mark], stage_of: Sequence[int], stage: int, names: set[str]) -> list[Mark]:
    """Those of the units of a stage, above what stages before it hold. Where a unit is also used in another stage, its
    moments there are, here, when this stage begins or ends."""
    found: list[Mark] = []
    below = heap_below = now = heap_now = 0
    for mark, at in zip(marks, stage_of, strict=True):
        is_forward = mark.moment.phase == "forward"
        if at == stage:
            now, heap_now = max(0, mark.live_bytes - below), max(0, mark.heap_bytes - heap_below)
        elif at < stage and is_forward:
            below, heap_below = mark.live_bytes, mark.heap_bytes
        elif at < stage:
            now = heap_now = 0
        if mark.moment.unit in names:
            peak = max(0, mark.peak_bytes - below) if at == stage else now
            peaks, come = (mark.peaks_with(-below), mark.come_bytes) if at == stage else ((), 0)
            found.append(Mark(mark.moment, peak, now, heap_now, peaks, mark.awaited, min(come, now)))
    return found
