"""From the ends of processes to the cause in the launcher's report and in the run record."""

from __future__ import annotations

import json
import signal
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from shardwise.data import Loader, Mixture
from shardwise.elastic.causes import Classifier
from shardwise.launch.elastic.changes import Change, change_report
from shardwise.launch.elastic.ended_ranks import BeforeJoining, EndedRanks
from shardwise.launch.elastic.job_notes import FolderNotes, OomKills
from shardwise.launch.outcome import Outcome
from shardwise.launch.worker import _record
from shardwise.observe import read_record
from shardwise.observe.record import RunRecord
from shardwise.system.data_ranks import HANDED_OUT, DataRanks
from shardwise.system.job_folder import BAD_BATCH, LEFT_OUT, RECORD_PATH


def outcome(rank: int, exit_code: int, summary: str = "", **more: Any) -> Outcome:
    return Outcome(rank, exit_code, None, summary=summary, recorded=bool(summary), **{"time": 0.0, **more})


def test_a_cause_is_in_the_report_and_in_the_record(tmp_path: Path) -> None:
    record = RunRecord.start(tmp_path / "record.jsonl", plan={}, world_size=4)
    (tmp_path / RECORD_PATH).write_text(str(tmp_path / "record.jsonl"))
    events = tmp_path / "memory.events"
    events.write_text("low 0\noom 0\noom_kill 0\n")
    oom_kills = OomKills(events)
    ended_ranks = EndedRanks(Classifier(), FolderNotes(tmp_path))
    assert ended_ranks.classify(4, 7) is None

    events.write_text("low 0\noom 1\noom_kill 1\n")
    ended_ranks.add(outcome(2, -signal.SIGKILL), 2, 7, ran_out=oom_kills.has_risen())
    assert not oom_kills.has_risen()
    ended_ranks.add(outcome(0, 1, "shardwise.errors.FaultError: Rank 2 is gone", time=1.0), 0, 7)
    first = ended_ranks.classify(4, 7)
    assert first is not None
    assert "ran out of memory" in first.evidence
    ended_ranks.add(outcome(1, 1, "ValueError: nan\nin two lines", batch="it had samples 4, 5 of source"), 1, 8)
    ended_ranks.classify(3, 8)
    ended_ranks.add(outcome(0, 1, "ValueError: nan", batch="it had samples 4, 5 of source"), 0, 8)
    second = ended_ranks.classify(2, 8)
    assert second is not None
    assert (second.kind, second.action) == ("data", "stop")
    ended_ranks.add(outcome(3, -signal.SIGKILL), 3, 9, "kept the others waiting for more than 3 s")
    record.write("step", step=9, loss=1.0)

    lines = read_record(tmp_path / "record.jsonl").lines
    assert [(line["kind"], line["step"], line.get("cause")) for line in lines] == [
        ("fault", 7, "node"),
        ("fault", 8, "node"),
        ("fault", 8, "data"),
        ("step", 9, None),
    ]
    third = ended_ranks.classify(2, 9)
    assert third is not None
    assert (third.kind, third.action) == ("network", "retry")
    text = change_report(Change((), {}, 0, 0, 2, 9, 0.1, 0, "0 of 3"), second)
    assert "Cause: data: Rank 0 raised ValueError: nan, as rank 1 had at the same step" in text
    assert "It had samples 4, 5 of source." in text
    record.close()


def test_an_error_of_all_ranks_is_reported_at_the_end() -> None:
    ended_ranks = EndedRanks(Classifier(), FolderNotes(None))
    ended_ranks.add(outcome(0, 1, "KeyError: 'labels'"), 0, 3)
    verdict = ended_ranks.classify_all([outcome(rank, 1, "KeyError: 'labels'") for rank in range(2)], 3)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("code", (0, 1))


class Engine:
    data_ranks = (1, 3)
    num_steps = num_void = 0

    def weigh(self, samples: int, of: float) -> None: ...

    def follow(self, reader: object) -> None: ...

    def begin_to_read(self) -> None: ...

    def reading(self) -> AbstractContextManager[None]:
        return nullcontext()


def test_an_exception_is_recorded_with_the_samples(tmp_path: Path) -> None:
    engine = Engine()
    sources = Mixture({"a": range(5), "b": range(5)})
    with Loader(sources, batch_rows=8, steps=3, world=DataRanks.of(engine.data_ranks, engine)) as loader:
        for _ in loader:
            if loader.step == 2:
                break
        rows = loader.draw(1)
        assert HANDED_OUT.text().endswith("rows 3 to 5 of the batch of step 1")
        _record(str(tmp_path / "error.json"), ValueError("nan"), "")
    batch = json.loads((tmp_path / "error.json").read_text())["message"]["extraInfo"]["batch"]
    assert batch.startswith("it had samples ")
    named = [int(number) for number in "".join(c if c.isdigit() else " " for c in batch.partition(", rows")[0]).split()]
    assert sorted(named) == sorted(rows.index[3:6].tolist())


def test_a_bad_batch_is_left_out_where_the_plan_says_so(tmp_path: Path) -> None:
    (tmp_path / BAD_BATCH).write_text("skip")
    ended_ranks = EndedRanks(Classifier(), FolderNotes(tmp_path))
    words = "shardwise.errors.DataError: Sample 7 of source cannot be read"
    ended_ranks.add(outcome(2, 1, words, batch="it had samples 7, 9 of source"), 2, 5)
    verdict = ended_ranks.classify(4, 5)
    assert verdict is not None
    assert (verdict.kind, verdict.action) == ("data", "skip")
    assert "samples 7, 9 of source" in verdict.evidence
    assert json.loads((tmp_path / LEFT_OUT).read_text()) == [5]
    ended_ranks.add(outcome(1, -signal.SIGKILL), 1, 6)
    ended_ranks.classify(3, 6)
    assert json.loads((tmp_path / LEFT_OUT).read_text()) == [5], "nobody's batch"
    ended_ranks.add(outcome(1, 1, words), 1, 8)
    ended_ranks.classify(2, 8)
    assert json.loads((tmp_path / LEFT_OUT).read_text()) == [5, 8]


def test_what_all_raise_before_they_join_is_not_tried_again(tmp_path: Path) -> None:
    missing = "ModuleNotFoundError: No module named 'x'"
    before = BeforeJoining(EndedRanks(Classifier(), FolderNotes(tmp_path)))
    assert before.failed(5, outcome(0, 1, missing), [4, 5, 6]) is None
    assert before.failed(7, outcome(0, 1, missing), [4, 5, 6, 7]) is None  # a replacement
    assert before.failed(4, outcome(0, 1, missing), [4, 5, 6, 7, 8]) is None
    cause = before.failed(6, outcome(0, 1, missing), [4, 5, 6, 7, 8])
    assert cause is not None
    assert (cause.kind, cause.action, cause.ranks) == ("code", "stop", (0, 1, 2))


def test_what_only_some_raise_before_they_join_is_tried_again(tmp_path: Path) -> None:
    before = BeforeJoining(EndedRanks(Classifier(), FolderNotes(tmp_path)))
    assert before.failed(0, outcome(0, 1, "ImportError: a"), [0, 1]) is None
    assert before.failed(1, outcome(1, 1, "ImportError: b"), [0, 1]) is None
    before = BeforeJoining(EndedRanks(Classifier(), FolderNotes(tmp_path)))
    assert before.failed(0, outcome(0, -signal.SIGKILL), [0, 1]) is None
    assert before.failed(1, outcome(1, -signal.SIGKILL), [0, 1]) is None
