"""What turns of engines come to, and what a timeline says of waiting."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import hosts_names, integrations, wires
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
    timing = timed(one_f_one_b(2, 8), lambda op: costs[op.kind])
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


def test_a_script_is_compared_with_its_own_form_and_the_plain_loop() -> None:
    def run(system: str, form: str, number: int, seconds: float, loss: float = 2.0) -> dict[str, Any]:
        rank = {"step_seconds": seconds, "cpu_seconds": seconds / 2, "peak_bytes": 100 * seconds, "loss": loss}
        slower = rank | {"step_seconds": 2 * seconds}
        return {"system": system, "form": form, "sharding": "zero3", "round": number, "ranks": [rank, slower]}

    runs = [
        run("plain", "engine", 0, 1.0), run("trainer", "peer", 0, 3.0), run("trainer", "ours", 0, 1.5),
        run("plain", "engine", 1, 2.0), run("trainer", "peer", 1, 4.0), run("trainer", "ours", 1, 2.0, loss=2.5),
    ]  # fmt: skip
    plain, peer, ours = integrations.summary_of(runs)
    assert (plain.seconds_of_peer, peer.seconds_of_peer, peer.peer_loss) == (None, None, None)
    assert (ours.step_seconds, ours.seconds_of_peer, ours.bytes_of_peer) == (3.5, 0.5, 0.5)
    assert (ours.seconds_of_engine, ours.cpu_of_engine, ours.loss, ours.peer_loss) == (1.25, 1.25, 2.0, 2.0)
    assert integrations.missed([plain, peer, ours]) == ["trainer zero3: 1.25 of the plain loop's CPU time."]


def test_what_crosses_is_of_the_host_that_sends_most_and_hidden_is_of_what_a_link_takes() -> None:
    """Two hosts of two ranks: a link of 8 Mbit/s takes 2 s for 2 MB, of which 0.5 lengthen the step."""

    def turns(rank: int) -> list[hosts_names.Turn]:
        sent = [1.5e6, 1.5e6, 2e6, 2e6][rank]
        free = hosts_names.Turn("shardwise-zero3", hosts_names.FREE, 0, 1.0, 0.1, sent, 1e6, 0.85e6, 2.0)
        slow = free._replace(rate=8e6, step_seconds=1.2 + 0.1 * rank)
        peer = slow._replace(engine="fsdp2", sent_bytes=2 * sent, told_bytes=None, step_seconds=3.0)
        return [free, slow, peer._replace(rate=hosts_names.FREE, step_seconds=1.0), peer]

    rows = hosts_names.rows_of([turns(rank) for rank in range(4)], 2, {"shardwise-zero3": [2_000_000, 1_900_000]})
    slow = next(row for row in rows if (row.engine, row.rate) == ("shardwise-zero3", 8e6))
    assert (slow.step_seconds, slow.link_bytes, slow.promised_bytes) == (1.5, 2e6, 2_000_000)
    assert slow.told_bytes == 1.7e6
    assert slow.hidden == pytest.approx(0.75)
    peer = next(row for row in rows if (row.engine, row.rate) == ("fsdp2", 8e6))
    assert peer.hidden == pytest.approx(0.5)
    assert peer.told_bytes is None
    ours = next(one for one in hosts_names.beside(rows) if one["rate"] == 8e6)
    assert (ours["best peer"], ours["step over"], ours["bytes over"]) == ("fsdp2", 0.5, 0.5)
    (wrong,) = {sentence.partition(":")[0] for sentence in hosts_names.faults_of(rows, 1e-3)}
    assert wrong == "shardwise-zero3"  # 2 MB crossed, and 1.7 were told
    off = [row._replace(told_bytes=2e6, loss=row.loss * (1.1 if row.engine == "fsdp2" else 1)) for row in rows]
    off.append(off[0])
    assert {sentence[:5] for sentence in hosts_names.faults_of(off, 1e-3)} == {"fsdp2"}


def test_two_axes_need_several_ranks_on_a_host() -> None:
    alone = hosts_names.engines_for(1, has_deepspeed=False)
    assert "shardwise-zero3" in alone
    assert not [name for name in alone if "hsdp" in name or "hpz" in name or "deepspeed" in name]
    assert len(hosts_names.engines_for(2, has_deepspeed=True)) == 12


def test_codes_beside_bf16() -> None:
    """A step that takes more of one in bf16 than it should is told, and bytes that ranks do not know of."""

    def row(wire: str, seconds: float, link_bytes: float, rate: float = 0.1e9) -> hosts_names.Row:
        return hosts_names.Row(f"shardwise-zero3:{wire}", rate, seconds, 0.1, link_bytes, 4e6, 4e6, None, 2.0)

    good = [row("bf16", 2.0, 4e6), row("codes", 0.7, 1e6)]
    assert wires.faults_of(good, with_bars=True) == []
    assert [line[3] for line in wires.lines_of(good)] == ["", "0.35"]
    assert [line[7] for line in wires.lines_of(good)] == ["", "0.25"]
    slow = [row("bf16", 2.0, 4e6), row("codes", 0.9, 1e6)]
    assert wires.faults_of(slow, with_bars=True) == ["shardwise-zero3:codes at 0.1 Gbit/s: 0.45 of a step in bf16."]
    assert wires.faults_of(slow, with_bars=False) == []
    (wrong,) = wires.faults_of([row("codes", 0.7, 9e6), row("bf16", 2.0, 4e6)], with_bars=True)
    assert "9000000 bytes crossed a link, ranks say 4000000" in wrong
