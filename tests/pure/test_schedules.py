"""Pipeline schedules: every op once and after what it needs, bubble and memory as their papers say, text both ways."""

from __future__ import annotations

from typing import get_args

import pytest

from shardwise.errors import ConfigError, ProgramError
from shardwise.fit.least_steps import Order, StagePass
from shardwise.plan.schema import ScheduleName
from shardwise.program.in_flight import held_beside
from shardwise.program.schedule import (
    SCHEDULES,
    Op,
    Schedule,
    gpipe,
    interleaved,
    most_in_flight,
    one_f_one_b,
    parse_schedule,
    picture,
    schedule_for,
    schedule_of_calls,
    timed,
    zero_bubble,
)

SIZES = [(ranks, batches) for ranks in range(1, 6) for batches in range(ranks, 13)]
FEW = [(ranks, batches) for ranks in range(2, 9) for batches in range(1, ranks)]
"""Fewer micro-batches than ranks."""


def every_schedule() -> list[Schedule]:
    sizes = SIZES + FEW
    made = [SCHEDULES[name].make(*size) for name in ("gpipe", "1f1b", "zb-h1") for size in sizes]
    return made + [interleaved(p, m, chunks) for p, m in sizes if m % max(1, m // p) == 0 for chunks in (1, 2, 3)]


def idle(schedule: Schedule) -> set[float]:
    """How long the ranks wait, where a forward takes 1 and a backward 2 in each stage."""
    timing = timed(schedule)
    return {timing.length - sum(stop - start for _, start, stop in row) for row in timing.spans}


def test_every_schedule_comes_to_its_end_and_its_text_parses_back() -> None:
    for schedule in every_schedule():
        timing = timed(schedule)
        assert parse_schedule(str(schedule)) == schedule
        num_ops = 2 * schedule.num_stages + (schedule.num_stages - 1 if schedule.name == "zb-h1" else 0)
        assert sum(map(len, timing.spans)) == num_ops * schedule.num_micro_batches


def test_what_an_op_needs_has_ended_before_it_starts() -> None:
    """Asked of the times anew, not of the code that made them."""
    for schedule in every_schedule():
        ends = {op: stop for row in timed(schedule).spans for op, _, stop in row}
        for row in timed(schedule).spans:
            for (kind, batch, stage), start, _ in row:
                if kind == "F" and stage:
                    assert ends[Op("F", batch, stage - 1)] <= start
                if kind in "BI":
                    assert ends[Op("F", batch, stage)] <= start
                    if stage + 1 < schedule.num_stages:
                        (later,) = {Op("B", batch, stage + 1), Op("I", batch, stage + 1)} & ends.keys()
                        assert ends[later] <= start
                if kind == "W":
                    assert ends[Op("I", batch, stage)] <= start


@pytest.mark.parametrize(("ranks", "batches"), SIZES)
def test_the_bubble_is_that_of_theory(ranks: int, batches: int) -> None:
    """All ranks wait alike: (p - 1)(F + B) in GPipe and 1F1B, (p - 1)(F + I - W) in ZB-H1; interleaving divides the
    work of a stage, so that the same count of smaller stages is a smaller share."""
    assert idle(gpipe(ranks, batches)) == idle(one_f_one_b(ranks, batches)) == {3 * (ranks - 1)}
    assert idle(zero_bubble(ranks, batches)) == {ranks - 1}
    assert timed(gpipe(ranks, batches)).bubble == pytest.approx((ranks - 1) / (batches + ranks - 1))
    if batches % ranks == 0:
        for chunks in (1, 2, 3):
            bubble = timed(interleaved(ranks, batches, chunks)).bubble
            assert bubble == pytest.approx((ranks - 1) / (chunks * batches + ranks - 1))


@pytest.mark.parametrize(("ranks", "batches"), SIZES)
def test_activations_in_flight_are_those_of_theory(ranks: int, batches: int) -> None:
    for rank in range(ranks):
        assert most_in_flight(gpipe(ranks, batches), rank) == batches
        assert most_in_flight(one_f_one_b(ranks, batches), rank) == ranks - rank
        assert most_in_flight(zero_bubble(ranks, batches), rank) <= ranks


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_several_stages_of_a_rank_hold_what_the_warm_up_needs_and_no_more(ranks: int, chunks: int) -> None:
    """Of Megatron-LM's schedule: two for each rank behind, and a round of every stage but the last."""
    for rounds in (1, 2, 3):
        made = interleaved(ranks, rounds * ranks, chunks)
        for rank in range(ranks):
            warm_up = (ranks - rank - 1) * 2 + (chunks - 1) * ranks
            assert most_in_flight(made, rank) == min(rounds * ranks * chunks, warm_up + 1)


@pytest.mark.parametrize(("ranks", "batches"), FEW)
def test_few_micro_batches_wait_as_long_as_one_needs_to_go_through_all_stages(ranks: int, batches: int) -> None:
    """Times of `gpipe` and `1f1b` are (p + m - 1)(F + B) for any m; ZB-H1 overlaps no more than it has."""
    assert timed(gpipe(ranks, batches)).length == timed(one_f_one_b(ranks, batches)).length == 3 * (ranks + batches - 1)
    assert timed(zero_bubble(ranks, batches)).length <= 3 * (ranks + batches - 1)
    for rank in range(ranks):
        assert most_in_flight(one_f_one_b(ranks, batches), rank) == min(batches, ranks - rank)


def test_a_small_one_reads_as_in_the_papers() -> None:
    assert str(one_f_one_b(2, 3)) == (
        "1f1b: 2 ranks, 2 stages, 3 micro-batches\nrank 0: F0 F1 B0 F2 B1 B2\nrank 1: F0 B0 F1 B1 F2 B2\n"
    )
    assert str(zero_bubble(2, 3)).splitlines()[1:] == [  # nobody awaits the gradient of the first stage's input
        "rank 0: F0 F1 B0 F2 B1 B2",
        "rank 1: F0 I0 F1 I1 W0 F2 I2 W1 W2",
    ]
    assert picture(one_f_one_b(2, 2)) == ("rank 0 | F0 F1  .  . B0 B0  . B1 B1\nrank 1 |  . F0 B0 B0 F1 B1 B1  .  .\n")


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("rank 0: F0 B0\nrank 1: B0 F0", "rank 0 waits for B0@1|rank 0 waits for B0"),
        ("rank 0: F0\nrank 1: F0 B0", "stage 0 has F of micro-batch 0; it needs F and B"),
        ("rank 0: F0 F0 B0\nrank 1: F0 B0", "rank 0 has F0 twice"),
        ("rank 0: F0@1 B0\nrank 1: F0 B0", "which is not its own"),
        ("rank 0: F0 B0", "has 1 rows for 2 ranks"),
        ("rank 0: F0 X0\nrank 1: F0 B0", "'X0' is not an op of a schedule"),
        ("rank 1: F0 B0\nrank 0: F0 B0", "should begin with 'rank 0:'"),
    ],
)
def test_wrong_schedules_are_refused(rows: str, words: str) -> None:
    with pytest.raises(ProgramError, match=words):
        timed(parse_schedule(f"1f1b: 2 ranks, 2 stages, 1 micro-batches\n{rows}"))


@pytest.mark.parametrize(
    ("name", "sizes", "words"),
    [
        ("1f2b", (2, 4, 1), "no pipeline schedule '1f2b'. Did you mean '1f1b'"),
        ("gpipe", (2, 4, 2), "has one stage for each rank, but virtual_stages is 2"),
        ("interleaved", (2, 5, 2), "in equal rounds of 2 or more, one for each pipeline rank, but accumulate is 5"),
    ],
)
def test_sizes_that_a_schedule_cannot_have_are_refused(name: str, sizes: tuple[int, int, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        schedule_for(name, *sizes)


def test_a_plan_may_name_every_schedule() -> None:
    assert set(get_args(ScheduleName)) == set(SCHEDULES)


@pytest.mark.parametrize(("schedule", "num_chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1)])
def test_what_is_held_beside_an_op_follows_from_the_order(schedule: str, num_chunks: int) -> None:
    """Stage s leaves 10 to the power of s bytes, so that sums tell the stages apart."""
    num_ranks, num_micro_batches = 2, 6
    made = schedule_for(schedule, num_ranks, num_micro_batches, num_chunks)
    left = {stage: 10**stage for stage in range(made.num_stages)}
    for rank in range(num_ranks):
        beside = held_beside(made, rank, left, left)
        most = max(total + left[stage] for (_, stage), total in beside.items())
        counts = most_in_flight(made, rank)
        assert sum(map(int, str(most))) == counts
        if num_chunks == 1:
            assert beside["F", rank] == (counts - 1) * left[rank]
    assert held_beside(made, 0, left, dict.fromkeys(left, 0))["F", 0] <= held_beside(made, 0, left, left)["F", 0]


@pytest.mark.parametrize(("schedule", "num_chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 3), ("zb-h1", 1)])
def test_a_bound_holds_what_a_schedule_does(schedule: str, num_chunks: int) -> None:
    """On each rank, whose stages differ: while an op goes on, beside its own peak, and with its rank's share."""
    num_ranks, num_micro_batches = 4, 8
    made = schedule_for(schedule, num_ranks, num_micro_batches, num_chunks)
    held = {stage: 10 + stage % 5 * (stage % 3 + 1) for stage in range(made.num_stages)}
    aside = {stage: num + 2 * stage - 3 for stage, num in held.items()}
    largest = {stage: max(num, aside[stage]) for stage, num in held.items()}
    passes = [StagePass(2.0, 4.0, 1.0, 0.0, num + 3, num + 5, num, aside[stage]) for stage, num in held.items()]
    peaks = {"F": 3, "B": 5, "I": 0, "W": 0}
    shares = [1.0 + rank / 8 for rank in range(num_ranks)]
    order = Order.of(schedule, num_ranks, num_micro_batches, num_chunks)
    loads = {load.share: load.activations for load in order.loads(passes, shares)}
    for rank, share in enumerate(shares):
        beside = held_beside(made, rank, held, aside)
        own = {"F": held, "B": held, "I": largest, "W": aside}
        most = max(others + own[kind][stage] + peaks[kind] for (kind, stage), others in beside.items())
        assert loads[share] == most
    longest = max(run.seconds for run in order.runs(passes, shares, num_micro_batches))
    assert longest <= timed(made, lambda op: {"F": 2.0, "B": 4.0, "I": 3.0, "W": 1.0}[op.kind]).length
    assert longest > num_micro_batches * num_chunks * 6.0


@pytest.mark.parametrize("aside", [7, 1000])
def test_a_first_half_leaves_what_it_puts_aside(aside: int) -> None:
    """Of three micro-batches on the second rank: what the first half leaves is less than what the forward did, or more
    where activations are computed again."""
    beside = held_beside(zero_bubble(2, 3), 1, {1: 100}, {1: aside})
    assert beside == {("F", 1): aside, ("I", 1): aside, ("W", 1): aside}


def test_calls_of_a_loop() -> None:
    """All parts of a call go through a stage, and back, before the next call."""
    calls = schedule_of_calls(2, 4, num_calls=2, num_parts=2)
    timed(calls)
    assert str(calls).splitlines()[1:] == [
        "rank 0: F0@0 F1@0 F0@2 F1@2 B0@2 B1@2 B0@0 B1@0 F2@0 F3@0 F2@2 F3@2 B2@2 B3@2 B2@0 B3@0",
        "rank 1: F0@1 F1@1 F0@3 F1@3 B0@3 B1@3 B0@1 B1@1 F2@1 F3@1 F2@3 F3@3 B2@3 B3@3 B2@1 B3@1",
    ]
    assert most_in_flight(calls, 0) == 4
