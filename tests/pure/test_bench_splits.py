"""What turns of engines come to, and what a timeline says of waiting."""

from __future__ import annotations

import pytest

from benchmarks.pipeline import bubble_of, spans_of, waited
from benchmarks.turns import Turn, standings
from shardwise.program.schedule import one_f_one_b, timed


def test_a_ratio_is_of_one_round_and_the_slower_rank() -> None:
    """Other work made the second round ten times as slow for both."""
    by_rank = [
        [Turn("peer", 0, 2.0, 1.0, 3.0, 0.0), Turn("ours", 0, 1.0, 0.5, 1.0, 0.0)],
        [Turn("peer", 0, 1.5, 1.0, 4.0, 0.7), Turn("ours", 0, 1.2, 0.9, 2.0, 0.8)],
    ]
    later = [[turn._replace(round=1, step_seconds=10 * turn.step_seconds) for turn in own] for own in by_rank]
    peer, ours = standings([[*one, *two] for one, two in zip(by_rank, later, strict=True)], ["peer", "absent"])
    assert (peer.engine, peer.over) == ("peer", {"peer": 1.0})
    assert ours.over == {"peer": pytest.approx(0.6)}
    assert ours.cpu_over == {"peer": pytest.approx(0.5)}
    assert ours.passes_seconds == pytest.approx(0.9)
    assert ours.loss == 0.8  # the last rank has it


def played(costs: dict[str, float]) -> list[dict[str, object]]:
    """The events of a timeline in which each op runs as early as can be."""
    timing = timed(one_f_one_b(2, 8), costs)  # type: ignore[arg-type]
    events: list[dict[str, object]] = []
    for rank, spans in enumerate(timing.spans):
        for op, start, stop in spans:
            name = f"{op.kind}{op.micro_batch}@{op.stage}"
            for edge, at in (("b", start), ("e", stop)):
                events.append({"ph": edge, "cat": "stages", "name": name, "pid": rank, "ts": at})
            events.append({"ph": "b", "cat": "stages", "name": f"wait {name}", "pid": rank, "ts": start - 1})
        events.append({"ph": "X", "cat": "host", "name": "gather", "pid": rank, "ts": 0})
    return events


def test_a_schedule_that_is_played_waits_as_theory_has_it() -> None:
    spans = spans_of(played({"F": 3.0, "B": 5.0}))
    assert bubble_of(spans) == pytest.approx(1 / 9)
    found = waited("shardwise 1f1b", [spans], "light")
    assert found == ("shardwise 1f1b", *[pytest.approx(1 / 9)] * 3)


def test_time_between_ops_is_waiting() -> None:
    assert bubble_of({"0 F0@0": [0.0, 1.0], "1 F0@1": [3.0, 4.0]}) == pytest.approx(0.75)
