"""What readers of a run show: where a step's time goes, the state of the run, and the pages."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from shardwise.cli.main import main
from shardwise.cli.print_run import page, sparkline
from shardwise.cli.top import follow
from shardwise.launch.elastic.job_notes import FolderNotes
from shardwise.observe import RunRecord, read_record
from shardwise.observe.charts import thinned, ticks
from shardwise.observe.html_report import html_report
from shardwise.observe.run_view import RunReader, read_run
from shardwise.observe.slowness import judge
from shardwise.system.job_folder import RECORD_PATH
from shardwise.system.telemetry import StepClock, write_trace
from tests.patience import wait_until
from tests.thorough import drawn, varies

LOADS = json.loads
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class TestStepClock:
    def test_a_step_is_computing_waiting_and_what_lies_between(self) -> None:
        now = Clock()
        clock = StepClock(now)
        now.now += 1  # data
        clock.work()
        now.now += 2  # forward, of which half a second waits
        clock.wait("dp", 0.5)
        now.now += 3  # backward
        clock.rest()
        now.now += 0.25  # between
        clock.work()
        now.now += 1  # update
        clock.rest()
        now.now += 4  # a barrier, while nothing computes
        clock.wait("world", 4)
        now.now += 0.5  # logging
        lap = clock.lap()
        assert lap.seconds == 11.75
        assert lap.idle == 1 + 0.25 + 0.5
        assert lap.waited == {"dp": 0.5, "world": 4}
        assert lap.waiting == 4.5
        assert lap.computing == 5.5

    def test_waiting_for_a_disk_is_neither_computing_nor_idle(self) -> None:
        now = Clock()
        clock = StepClock(now)
        clock.work()
        now.now += 1
        with clock.waiting_for_disk():
            assert clock.is_on_disk
            now.now += 2
        assert not clock.is_on_disk
        clock.rest()
        now.now += 0.5
        with clock.waiting_for_disk():
            now.now += 4  # a checkpoint that is read between steps
        lap = clock.lap()
        assert (lap.seconds, lap.computing, lap.idle, lap.disk) == (7.5, 1, 0.5, 6)
        assert clock.lap().disk == 0

    def test_laps_follow_each_other_without_a_gap(self) -> None:
        now = Clock()
        clock = StepClock(now)
        clock.work()
        now.now += 1
        clock.lap()
        now.now += 2  # still computing
        clock.rest()
        now.now += 1
        second = clock.lap()
        now.now += 5
        third = clock.lap()
        assert (second.seconds, second.computing, second.idle) == (3, 2, 1)
        assert (third.seconds, third.computing, third.idle, third.waited) == (5, 0, 5, {})

    def test_asked_twice_it_says_the_same(self) -> None:
        now = Clock()
        clock = StepClock(now)
        for _ in range(2):
            clock.rest()
            now.now += 1
        clock.work()
        clock.work()
        now.now += 1
        assert clock.lap().idle == pytest.approx(2)


PLAN = {"preset": "zero3", "run": "here"}


def rows(*busy: tuple[float, float, float]) -> list[dict[str, Any]]:
    """Of each rank its seconds computing, idle and waiting along dp."""
    return [
        {
            "seconds": sum(one),
            "computing": one[0],
            "idle": one[1],
            "waiting": one[2],
            "waited": {"dp": one[2]},
            "process": 2**28,
            "process_peak": 2**29,
        }
        for one in busy
    ]


@pytest.mark.parametrize(
    ("times", "mesh", "slow", "words"),
    [
        (((1, 0, 1), (2, 0, 0), (1, 0, 1)), {"dp": 3}, [1], "waits 50% of a step for rank 1 along dp"),
        (((1, 0.1, 2), (1, 2, 0.1), (1, 0.1, 2)), {"dp": 3}, [1], "waits 65% of a step for rank 1 along dp"),
        (((1, 0, 0.5), (1, 0, 0.5)), {"dp": 2}, [], "waits 33% of a step for messages along dp"),
        (((1, 0, 0.01), (1, 0, 0.01)), {"dp": 2}, [], "computes"),
        (((0.1, 1, 0),), {}, [], "between steps (data, logging, saving)"),
        # rank 0 is along dp with rank 2, which is as fast; the slow one is along tp
        (((1, 0, 1), (2, 0, 0), (1, 0, 1), (1, 0, 1)), {"dp": 2, "tp": 2}, [1], "waits 50% of a step for messages"),
    ],
)
def test_who_is_slow_and_who_waits(
    times: tuple[tuple[float, float, float], ...], mesh: dict[str, int], slow: list[int], words: str
) -> None:
    verdicts = judge(rows(*times), mesh)
    assert [one.rank for one in verdicts if one.is_slow] == slow
    assert verdicts[0].words.startswith(words)
    if slow:
        why = "computes 2.0 times" if times[1][0] == 2 else "is between steps (data, logging, saving) 20.0 times"
        assert verdicts[1].words == f"slow: {why} as long as others"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Of a process that is not there any more; one that lives, where a test says so."""
    folder = tmp_path / "run"
    with RunRecord.start(folder / "record.jsonl", plan=PLAN, world_size=2, mesh={"dp": 2}, model="GPT") as record:
        for step in range(1, 41):
            record.write("step", step=step, loss=4 / step, seconds=0.5, tokens_per_second=2e3, norm=1.0, lr=0.1)
        record.write("validation", step=40, loss=0.2)
        record.write("ranks", step=40, ranks=rows((0.1, 0, 0.4), (0.5, 0, 0)))
        kinds = {"device": {"param": 4096}, "host": {"optim": 2**20}, "disk": {}}
        record.write("memory", step=40, ranks=[{"promised": kinds, "measured": kinds, "replicated": {}}] * 2)
    return folder


def rewrite(run: Path, **process: object) -> None:
    path = run / "record.jsonl"
    first, _, rest = path.read_text().partition("\n")
    path.write_text(json.dumps({**json.loads(first), "process": process}) + "\n" + rest)


def shown(run: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    status = main(["top", str(run), "--once", *options])
    return status, " ".join(capsys.readouterr().out.split())


class TestTop:
    def test_a_run_that_lives(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """This process wrote it, and is there."""
        status, text = shown(run, capsys)
        assert status == 0
        for said in ("running", "step 40", "loss 0.1", "2.0 K tokens/s", "validation 0.2", "slow: computes 5.0 times"):
            assert said in text
        assert "1.0 MiB" in text
        assert "for rank 1" in text

    def test_one_whose_process_is_gone(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        rewrite(run, host=socket.gethostname(), pid=os.getpid(), created=1.0)  # the number is another's now
        status, text = shown(run, capsys)
        assert status == 1
        assert "crashed after step 40" in text

    def test_one_on_another_host(self, run: Path) -> None:
        rewrite(run, host="elsewhere", pid=1, created=1.0)
        view = read_run(run)
        view.lines[-1]["time"] = view.now - 30
        assert view.status == "running"
        view.now += 100
        assert view.status == "silent"
        assert "rank 0 is on another host" in view.status_text

    def test_one_that_failed_and_what_others_saw(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        with (run / "record.jsonl").open("a") as file:
            file.write(json.dumps({"kind": "end", "step": 40, "status": "failed", "error": "ValueError: bad"}) + "\n")
        note = {"time": 1.0, "rank": 1, "level": "error", "text": "FaultError: [rank 0] raised"}
        (run / "notes-rank-1.jsonl").write_text(json.dumps(note) + '\n{"torn')
        status, text = shown(run, capsys)
        assert status == 1
        assert "failed after step 40: ValueError: bad" in text
        assert "rank 1, error: FaultError: [rank 0] raised" in text
        state = json.loads(shown(run, capsys, "--json")[1])
        assert (state["status"], state["step"], state["ranks"][1]["slow"]) == ("failed", 40, True)

    def test_one_that_went_on(self, run: Path) -> None:
        """What its dead predecessor said of its end is not its own."""
        with (run / "record.jsonl").open("a") as file:
            file.write(json.dumps({"kind": "end", "step": 40, "status": "failed", "error": "x"}) + "\n")
        with RunRecord.resume(run / "record.jsonl", step=40, plan=PLAN, world_size=4) as record:
            assert read_run(run).status == "running"
            record.write("end", step=40, status="ended")
        assert read_run(run).status_text == "ended after step 40"

    def test_no_run_is_a_sentence_with_those_below(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["top", str(run.parent)]) == 2
        assert f"There are runs in {run}" in capsys.readouterr().err
        assert main(["report", str(run / "nowhere")]) == 2
        assert "the folder that the plan has as run" in capsys.readouterr().err

    def test_live_until_it_is_over(self, run: Path) -> None:
        class Screen(io.StringIO):
            """The run ends once it has been seen to go on."""

            def write(self, text: str) -> int:
                if "running" in text:
                    rewrite(run, host=socket.gethostname(), pid=os.getpid(), created=1.0)
                return super().write(text)

        screen = Screen()
        assert follow(str(run), 0.01, Console(file=screen, force_terminal=True, width=120)) == "crashed"
        assert "running" in screen.getvalue()
        assert screen.getvalue().index("running") < screen.getvalue().rindex("crashed")

    def test_a_course_in_bars(self) -> None:
        assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
        assert sparkline([3.0]) == "▁"
        assert len(sparkline([float(value) for value in range(1000)])) == 60


ROW = rows((0.1, 0, 0.4))[0]
HEADER = {"kind": "run", "world_size": 2, "plan": PLAN}
STEP = {"kind": "step", "step": 1, "loss": 2.0, "seconds": 0.5, "time": 1.0}


def written(folder: Path, *lines: object, end: str = "\n") -> Path:
    folder.mkdir(exist_ok=True)
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (folder / "record.jsonl").write_bytes(("\n".join(texts) + end).encode(errors="surrogateescape"))
    return folder


def all_commands(run: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The status and the words of `top`, after `--json` and `report` have said the same of the run."""
    shows = shown(run, capsys)
    assert main(["top", str(run), "--json"]) == shows[0]
    capsys.readouterr()
    assert main(["report", str(run)]) == (2 if shows[0] == 2 else 0)
    page = _Page()
    if shows[0] != 2:
        page.feed((run / "report.html").read_text())
        assert not page.open
    capsys.readouterr()
    return shows[0], shows[1] + page.text


def _change(data: st.DataObject, place: Any) -> None:
    """Put any value somewhere into a line."""
    while place:
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if not isinstance(place[key], dict | list) or data.draw(st.booleans()):
            place[key] = data.draw(ANYTHING)
            return
        place = place[key]


class TestOddRuns:
    """Whatever is in a run's folder: it is shown as far as it goes, or refused in one sentence."""

    @pytest.mark.parametrize(
        ("lines", "end", "said"),
        [
            ([HEADER], "\n", "no step has been logged yet"),
            ([{"kind": "run"}, {"kind": "step", "step": 1}], "\n", "step 1"),
            ([HEADER, STEP, '{"kind": "step", "st'], "", "step 1 loss 2"),  # killed in the middle of a line
            ([HEADER, STEP, '{"kind": "ste', {**STEP, "step": 2}], "\n", "step 2 loss 2"),
            ([HEADER, STEP, "\0" * 50], "\n", "One line of the record is damaged"),  # as after a loss of power
            ([HEADER, STEP, "\udcff\udcfe"], "\n", "One line of the record is damaged"),  # bytes that are no text
            ([HEADER, {**STEP, "loss": None}, {**STEP, "step": 2, "loss": 3}], "\n", "3 to 3"),
            ([HEADER, '{"kind": "step", "step": 1, "loss": NaN, "seconds": Infinity}'], "\n", "step 1"),
            ([HEADER, '{"kind": "step", "step": 1, "loss": 1e400, "lr": ' + "9" * 400 + "}"], "\n", "step 1"),
            ([HEADER, {**STEP, "loss": 1.7e308}, {**STEP, "step": 2, "loss": -1.7e308}], "\n", "loss -1.7e+308"),
            ([HEADER, {**STEP, "loss": 5e-324}, {**STEP, "step": 2, "loss": 0}], "\n", "step 2"),
            ([HEADER, "[" * 100_000], "\n", "One line of the record is damaged"),
            ([HEADER, {"kind": "ranks", "step": 1, "ranks": [{"computing": 1}]}], "\n", "of another version"),
            ([HEADER, {"kind": "ranks", "step": 1, "ranks": [ROW]}, STEP], "\n", "waits 80% of a step"),  # of one rank
            ([HEADER, {"kind": "memory", "step": 1, "ranks": [{"promised": {"host": 3}}]}], "\n", "left out"),
            ([HEADER, {"kind": "end", "step": 1, "status": "failed"}], "\n", "failed after step 0"),
            ([{**HEADER, "mesh": [1], "versions": 3, "model": {}, "plan": [], "process": 1}, STEP], "\n", "2 ranks"),
        ],
    )
    def test_a_record(
        self, lines: list[object], end: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        status, text = all_commands(written(tmp_path / "run", *lines, end=end), capsys)
        assert status in (0, 1)
        assert said in text

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (b"", "is empty: the run has not begun to write it"),
            (b'{"kind": "ru', "is empty: the run has not begun to write it"),
            (b'{"kind": "step", "step": 1}\n', "is not a run record"),
            (b"\x89PNG\r\n\x1a\n", "line 1 is damaged"),
            (b"[]\n", "line 1 has no kind and step"),
        ],
    )
    def test_what_is_no_record(
        self, content: bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "record.jsonl").write_bytes(content)
        for verb in ("top", "report"):
            assert main([verb, str(tmp_path)]) == 2
            words = capsys.readouterr().err
            assert said in words
            assert words.count("\n") == 1

    def test_pipes_folders_and_loops_in_a_files_place(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """Nothing waits for a pipe that nobody writes to."""
        record = tmp_path / "record.jsonl"
        for make, said in (
            (lambda: os.mkfifo(record), "is not a regular file"),
            (record.mkdir, "is not a regular file"),
            (lambda: record.symlink_to(record), "There is no run in"),
        ):
            make()
            for verb in ("top", "report"):
                assert main([verb, str(tmp_path)]) == 2
                assert said in capsys.readouterr().err
            record.rmdir() if record.is_dir() else record.unlink()

    def test_files_beside_the_record(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        os.mkfifo(run / "notes-rank-7.jsonl")
        (run / "notes-rank-1.jsonl").write_bytes(b'\xff\n{"time": 1e300, "rank": 1, "level": "error", "text": "far"}\n')
        (run / "timeline.json").mkdir()
        (run / "program.txt").write_text("x" * (2**21 + 1))
        status, text = all_commands(run, capsys)
        assert status == 0
        assert "rank 1, error: far" in text
        assert "timeline.json cannot be read" in text
        assert f"These are the first {2**21}" in text
        (run / "timeline.json").rmdir()
        span = '{"ph": "X", "pid": 0, "cat": "a", "name": "b", "ts": 1e999}'
        for events in ("[" * 100_000, f"[{span}]", "3", '["X"]'):
            (run / "timeline.json").write_text(f'{{"traceEvents": {events}}}')
            assert "timeline.json cannot be read" in all_commands(run, capsys)[1]

    @varies
    def test_any_value_in_any_place(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        texts = (run / "record.jsonl").read_text().splitlines()
        kept = [*texts[:5], *texts[-3:]]

        @settings(max_examples=drawn(30, 600), deadline=None)
        @given(st.data())
        def show(data: st.DataObject) -> None:
            lines = [LOADS(text) for text in kept]
            for line in data.draw(st.lists(st.sampled_from(lines), max_size=3)):
                _change(data, line)
            lines[0]["kind"] = "run"
            assert all_commands(written(run, *lines), capsys)[0] in (0, 1)

        show()

    @pytest.mark.parametrize("kind", ["ranks", "memory", "end", "step", "fault", "resume"])
    def test_a_time_that_is_none(self, kind: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        line = {"kind": kind, "step": 41, "ranks": [], "loss": 2.0}
        for odd in (float("nan"), None, "now", [], 10**400):
            last = json.dumps({**line, "time": odd})
            assert all_commands(written(run, HEADER, STEP, last), capsys)[0] in (0, 1)

    def test_nothing_reaches_the_terminal_but_text(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """Escape sequences, a reversed direction, and the markup of the library that prints."""
        evil = "\x1b]0;title\x07\x1b[31m\x9b2J\u202eabc\r[/none] [bold]"
        memory = {
            "kind": "memory",
            "step": 1,
            "ranks": [{"promised": {evil: {evil: 1}}, "measured": {evil: {evil: 1}}}],
        }
        waits = {**ROW, "computing": 0.01, "waited": {evil: 0.4}}
        header = {**HEADER, "model": evil, "device": evil, "started": evil, "versions": {evil: evil}, "mesh": {evil: 2}}
        header["plan"] = {"preset": evil, evil: evil}
        note = {"time": 1.0, "rank": 1, "level": evil, "text": evil}
        (run / "notes-rank-1.jsonl").write_text(json.dumps(note) + "\n")
        (run / "program.txt").write_text(evil)
        end = {"kind": "end", "step": 1, "status": "failed", "error": evil}
        written(run, header, STEP, {"kind": "ranks", "step": 1, "ranks": [waits, ROW]}, memory, end)
        assert main(["top", str(run), "--once"]) == 1
        assert main(["top", str(run), "--json"]) == 1
        assert main(["report", str(run)]) == 0
        assert main(["inspect", str(run / evil)]) == 2
        told = capsys.readouterr()
        for text in (told.out, told.err, (run / "report.html").read_text()):
            assert not set("\x1b\x07\x9b\u202e\r") & set(text)
        assert "abc[/none] [bold]" in told.out  # the library leaves the \r out

    def test_links_lead_nowhere(self, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """A run's folder may be open to others, and the reader may read, and write, more than they do."""
        secret = tmp_path / "secret"
        secret.write_text('{"time": 1, "rank": 1, "level": "error", "text": "secret"}\n')
        for name in ("program.txt", "timeline.json", "notes-rank-3.jsonl"):
            (run / name).symlink_to(secret)
        assert "secret" not in all_commands(run, capsys)[1].replace(str(secret), "")
        assert "program.txt is a symbolic link" in (run / "report.html").read_text()
        (run / "report.html").unlink()
        (run / "report.html").symlink_to(secret)
        assert main(["report", str(run)]) == 2
        assert "--out FILE" in capsys.readouterr().err
        assert '"secret"' in secret.read_text()
        (run / "report.html").unlink()
        os.mkfifo(run / "report.html")
        assert main(["report", str(run)]) == 2
        kept = run / "record.jsonl"
        kept.rename(tmp_path / "kept.jsonl")
        kept.symlink_to(tmp_path / "kept.jsonl")
        assert main(["top", str(run), "--once"]) == 2
        assert "is a symbolic link" in capsys.readouterr().err
        assert main(["top", str(kept), "--once"]) == 0  # naming the link itself is intended

    def test_a_plan_that_nests(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        deep = '{"a":' * 400 + "1" + "}" * 400
        resume = f'{{"kind": "resume", "step": 1, "plan": {deep}}}'
        assert "One line of the record is damaged" in all_commands(written(run, HEADER, STEP, resume), capsys)[1]

    def test_a_name_that_is_no_text(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        odd = run.rename(run.parent / "run\udcff")
        assert main(["report", str(odd)]) == 0
        assert (odd / "report.html").exists()

    def test_a_process_that_has_ended_but_is_not_collected(self, run: Path) -> None:
        child = subprocess.Popen(["true"])
        created = psutil.Process(child.pid).create_time()
        wait_until(lambda: psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE)
        rewrite(run, host=socket.gethostname(), pid=child.pid, created=created)
        try:
            assert read_run(run).status == "crashed"
        finally:
            child.wait()

    def test_a_process_of_another_container(self, run: Path) -> None:
        rewrite(run, host=socket.gethostname(), pid=1, created=1.0, pid_namespace="pid:[1]")
        assert read_run(run).status == "running"

    def test_ranks_of_an_earlier_generation_are_not_shown(self, run: Path) -> None:
        with RunRecord.resume(run / "record.jsonl", step=40, plan=PLAN, world_size=1) as record:
            assert (read_run(run).ranks(), read_run(run).memory()) == ([], [])
            record.write("ranks", step=41, ranks=[ROW])
            assert len(read_run(run).ranks()) == 1

    def test_slow_ranks_are_shown_however_many_there_are(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        with (run / "record.jsonl").open("a") as file:
            many = rows(*[(0.1, 0, 0.4)] * 99, (0.5, 0, 0))
            file.write(json.dumps({"kind": "ranks", "step": 40, "ranks": many}) + "\n")
        status, text = all_commands(run, capsys)
        assert status == 0
        assert "and 68 more, none of them slow" in text
        assert "99 500 ms" in text
        page = _Page()
        page.feed((run / "report.html").read_text())
        assert "rank 99slow: computes 5.0 times as long as others" in page.text
        assert "and 36 more, none of them slow" in page.text

    def test_ranks_have_their_bytes_of_each_tier(self, run: Path) -> None:
        screen = io.StringIO()
        Console(file=screen, width=120).print(page(read_run(run)))
        heading, first, second = screen.getvalue().splitlines()[5:8]
        assert heading.split() == ["rank", "computing", "waiting", "between", "device", "host", "process"]
        assert "4.0 KiB  1.0 MiB  256.0 MiB" in first
        assert "4.0 KiB  1.0 MiB  256.0 MiB" in second

    def test_a_rank_that_waits_for_its_disk_is_shown(self, run: Path) -> None:
        """In a column of its own; a line whose figure is damaged is left out."""
        one, other = rows((0.1, 0, 0.1), (0.1, 0, 0.05))
        on_disk = [one | {"disk": 0.3, "seconds": 0.5}, other | {"disk": 0.35, "seconds": 0.5}]
        with (run / "record.jsonl").open("a") as file:
            file.write(json.dumps({"kind": "ranks", "step": 40, "ranks": on_disk}) + "\n")
            file.write(json.dumps({"kind": "ranks", "step": 40, "ranks": [one | {"disk": "much"}, other]}) + "\n")
        screen = io.StringIO()
        Console(file=screen, width=160).print(page(read_run(run)))
        text = screen.getvalue()
        assert "computing  waiting  between  for disk" in text
        assert "waits 60% of a step for its disk" in text
        assert "slow: waits for its disk 1.2 times as long as others" in text
        assert "waiting for its disk" in html_report(read_run(run))

    def test_a_page_fits_a_small_terminal(self, run: Path) -> None:
        with (run / "record.jsonl").open("a") as file:
            many = rows(*[(0.1, 0, 0.4)] * 99, (0.5, 0, 0))
            file.write(json.dumps({"kind": "ranks", "step": 40, "ranks": many}) + "\n")
        for height in (24, 40):
            screen = io.StringIO()
            Console(file=screen, width=120, height=height).print(page(read_run(run), height))
            assert len(screen.getvalue().splitlines()) <= height
            assert "slow: computes" in screen.getvalue()

    def test_only_what_is_new_is_read(self, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        reader = RunReader(run)
        assert len(reader.read().steps) == 40
        parsed = []
        monkeypatch.setattr(json, "loads", lambda text, **how: parsed.append(text) or LOADS(text, **how))
        with (run / "record.jsonl").open("a") as file:
            file.write(json.dumps({**STEP, "step": 41}) + '\n{"kind": "step", "step"')
            file.flush()
            assert (reader.read().steps[-1]["step"], len(parsed)) == (41, 1)
            file.write(": 42}\n")
        assert (reader.read().steps[-1]["step"], len(parsed)) == (42, 2)
        with RunRecord.resume(run / "record.jsonl", step=10, plan=PLAN, world_size=2):
            assert reader.read().steps[-1]["step"] == 10

    def test_a_run_resumes_after_damage(self, run: Path, caplog: pytest.LogCaptureFixture) -> None:
        """Rank 0 was killed in the middle of a long line, and then the launcher noted why."""
        with (run / "record.jsonl").open("a") as file:
            file.write('{"kind": "ranks", "step": 40, "ra')
        told = run / RECORD_PATH
        told.write_text(str(run / "record.jsonl"))
        FolderNotes(run).record({"kind": "fault", "step": 40, "cause": "kill", "evidence": "rank 0 was killed"})
        assert "after step 40: kill: rank 0 was killed" in html_report(read_run(run))
        with RunRecord.resume(run / "record.jsonl", step=40, plan=PLAN, world_size=1):
            pass
        assert "damaged lines (1)" in caplog.text
        kinds = [line["kind"] for line in read_record(run / "record.jsonl").lines[-2:]]
        assert kinds == ["fault", "resume"]


class _Page(HTMLParser):
    """Every tag has its end, and nothing is loaded from anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action")]
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


class TestReport:
    def test_a_page_has_it_all_and_needs_nothing(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        trace = [
            {"ph": "X", "cat": "host", "name": "gather h.0 param", "ts": 5.0, "dur": 10.0, "args": {}},
            {"ph": "b", "cat": "units", "name": "forward h.0", "id": "1", "ts": 7.0},
            {"ph": "e", "cat": "units", "name": "forward h.0", "id": "1", "ts": 17.0},
        ]
        write_trace(run / "timeline.json", [trace, trace])
        (run / "program.txt").write_text("before forward h.0\n    gather <h.0>\n")
        assert main(["report", str(run)]) == 0
        assert capsys.readouterr().out.strip() == str(run / "report.html")
        page = _Page()
        page.feed((run / "report.html").read_text())
        assert page.open == []
        assert page.loads == ["data:,"]
        assert "script" not in page.tags
        assert page.tags.count("svg") == 8  # loss, throughput, seconds, norm, lr, ranks, memory, timeline
        for said in ("validation", "forward h.0: 0.010 ms, from 0.002 ms", "gather <h.0>", "slow: computes 5.0 times"):
            assert said in page.text
        assert '"preset": "zero3"' in page.text

    def test_untrusted_text_is_escaped(self, run: Path) -> None:
        evil = "<script>alert(1)</script><img src=http://x.invalid/>"
        note = {"time": 1.0, "rank": 1, "level": evil, "text": evil}
        (run / "notes-rank-1.jsonl").write_text(json.dumps(note) + "\n")
        (run / "program.txt").write_text(evil)
        (run / "timeline.json").write_text(f'{{"traceEvents": "{evil}"}}')
        view = read_run(run)
        view.header |= {"model": evil, "device": evil, "mesh": {evil: 2}, "versions": {evil: evil}}
        view.lines.append({"kind": "end", "step": 40, "status": "failed", "error": evil})
        page = _Page()
        page.feed(html_report(view))
        assert not {"script", "img"} & set(page.tags)
        assert page.loads == ["data:,"]
        assert page.text.count(evil) >= 4

    def test_a_run_that_has_hardly_begun_has_a_page(self, tmp_path: Path) -> None:
        RunRecord.start(tmp_path / "record.jsonl", plan=PLAN, world_size=1).close()
        assert "running" in html_report(read_run(tmp_path))
        with RunRecord.start(tmp_path / "record.jsonl", plan=PLAN, world_size=1) as record:
            record.write("step", step=1, loss=float("nan"))
            record.write("step", step=2, loss=2.0)
        assert "circle" in html_report(read_run(tmp_path))

    @pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-3.2, 17.9), (1e-9, 2e-9), (1e6, 5e6)])
    def test_ticks_are_few_round_and_inside(self, low: float, high: float) -> None:
        marks = ticks(low, high)
        assert 2 <= len(marks) <= 6
        assert all(low <= mark <= high for mark in marks)

    def test_many_points_become_few_means(self) -> None:
        points = [(float(step), 1.0 if step % 2 else 3.0) for step in range(6000)]
        few = thinned(points)
        assert len(few) == 600
        assert {y for _, y in few} == {2.0}
