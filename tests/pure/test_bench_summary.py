"""What a race's runs come to: medians, ratios within rounds, losses that must agree."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from benchmarks.names import ENGINE_NAMES, SINGLE
from benchmarks.schedule import interleaved
from benchmarks.summary import Run, others_cores_of, races_of, ratios_of, rows_of


def rank(seconds: float, *, loss: float = 2.0, peak: int = 100, sent: float | None = 10.0) -> dict[str, Any]:
    return {
        "step_seconds": [seconds, 9 * seconds, seconds],  # one step that something disturbed
        "cpu_seconds": seconds / 2,
        "peak_bytes": peak,
        "sent_bytes": sent,
        "loss": loss,
    }


def run(engine: str, number: int, seconds: float, *, dtype: str = "fp32", **figures: Any) -> Run:
    return Run("small", dtype, engine, number, ranks=(rank(seconds, **figures),) * 2)


def test_every_engine_runs_once_a_round_and_nobody_is_always_first() -> None:
    turns = list(interleaved(["a", "b", "c"], 4))
    assert Counter(turns) == Counter((number, name) for number in range(4) for name in "abc")
    assert [name for _, name in turns[:9]] == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]


def test_nobody_to_run_is_no_turn() -> None:
    assert list(interleaved([], 3)) == []


def test_a_run_is_its_slowest_and_largest_rank() -> None:
    both = Run("small", "fp32", "ddp", 0, ranks=(rank(1.0, loss=1.0, peak=5, sent=None), rank(2.0, loss=4.0, peak=3)))
    assert (both.seconds, both.cpu_seconds, both.peak_bytes, both.sent_bytes) == (2.0, 1.0, 5, 10.0)
    assert both.loss == 2.5


def test_a_row_is_the_median_of_rounds_and_says_how_far_they_went() -> None:
    runs = [run("ddp", number, seconds) for number, seconds in enumerate([3.0, 1.0, 1.5])]
    (row,) = rows_of(runs, "small", "fp32")
    assert (row.seconds, row.fastest_seconds, row.slowest_seconds, row.rounds) == (1.5, 1.0, 3.0, 3)
    assert (row.over_single, row.loss_off, row.agrees) == (None, None, None)


def test_ratios_are_taken_between_neighbours_in_time() -> None:
    """The machine was four times slower in the last round; that is nobody's doing."""
    runs = [run(SINGLE, number, pace) for number, pace in enumerate([1.0, 1.0, 4.0])]
    runs += [run("fsdp2", number, 3 * pace) for number, pace in enumerate([1.0, 1.0, 4.0])]
    runs += [run("shardwise-zero3", number, 2 * pace, peak=50) for number, pace in [(2, 4.0)]]
    rows = {row.engine: row for row in rows_of(runs, "small", "fp32")}
    assert rows["fsdp2"].over_single == 3.0
    assert rows["shardwise-zero3"].over_single == 2.0
    (ratio,) = ratios_of(runs, "small", "fp32")
    assert (ratio.ours, ratio.peer) == ("shardwise-zero3", "fsdp2")
    assert (ratio.seconds, ratio.cpu_seconds, ratio.peak_bytes) == (1.5, 1.5, 2.0)


@pytest.mark.parametrize(("loss", "agrees"), [(2.0, True), (2.0001, True), (2.001, False), (1.9, False)])
def test_a_loss_must_be_the_one_of_a_process_that_saw_all_data(loss: float, agrees: bool) -> None:
    runs = [run("reference", 0, 1.0), run("ddp", 0, 1.0), run("ddp", 1, 1.0, loss=loss)]
    (row,) = rows_of(runs, "small", "fp32")
    assert row.agrees is agrees
    assert row.loss_off == pytest.approx(abs(loss - 2.0) / 2.0)


def test_bf16_may_differ_by_more_than_fp32() -> None:
    runs = [run("reference", 0, 1.0, dtype="bf16"), run("ddp", 0, 1.0, dtype="bf16", loss=2.008)]
    assert rows_of(runs, "small", "bf16")[0].agrees is True


def test_the_single_process_is_not_held_to_data_that_it_did_not_see() -> None:
    runs = [run("reference", 0, 1.0), run(SINGLE, 0, 1.0, loss=1.0)]
    assert rows_of(runs, "small", "fp32")[0].agrees is None


def test_failed_runs_count_for_nothing_but_are_kept() -> None:
    runs = [Run("small", "fp32", "ddp", 0, error="no"), run("ddp", 1, 1.0), Run("tall", "bf16", "ddp", 0, error="no")]
    assert races_of(runs) == [("small", "fp32"), ("tall", "bf16")]
    assert rows_of(runs, "small", "fp32")[0].rounds == 1
    assert rows_of(runs, "tall", "bf16") == []


def test_what_others_used_is_the_middle_of_all_runs() -> None:
    runs = [Run("small", "fp32", "ddp", 0, error="no", others_cores=cores) for cores in (0.0, 0.1, 1.5)]
    assert others_cores_of(runs) == 0.1
    assert others_cores_of([]) == 0.0


def test_every_engine_of_the_names_can_be_built() -> None:
    from benchmarks.engines import ENGINES

    assert {"reference", *ENGINE_NAMES} == set(ENGINES)
