"""Records that survive a crash, a line that tells how it goes, a curve, and memory figures."""

from __future__ import annotations

import io
import json
import math
import sys
from pathlib import Path

import pytest
from rich.console import Console

from shardwise import ShardwiseError
from shardwise.observe import Progress, RunRecord, plot_loss, read_record
from shardwise.observe.plot import smooth
from shardwise.observe.progress import Pace
from shardwise.observe.run_view import read_run
from shardwise.system.process_memory import PeakOverBaseline, process_memory, trim

PLAN = {"preset": "zero3", "precision": "bf16"}


def start(path: Path) -> RunRecord:
    return RunRecord.start(path, plan=PLAN, world_size=2)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "record.jsonl"


class TestRecord:
    def test_a_line_is_there_as_soon_as_it_is_written(self, path: Path) -> None:
        with start(path) as record:
            record.write("step", step=1, loss=5.5)
            assert read_record(path).column("loss") == [(1, 5.5)]

    def test_the_header_says_what_ran(self, path: Path) -> None:
        start(path).close()
        header = read_record(path).header
        assert header["world_size"] == 2
        assert header["plan"] == PLAN
        assert set(header["versions"]) == {"shardwise", "torch", "python"}
        assert "started" in header

    def test_a_start_replaces_an_older_record(self, path: Path) -> None:
        with start(path) as record:
            record.write("step", step=1, loss=5.5)
        start(path).close()
        assert read_record(path).lines == []

    def test_resuming_forgets_what_the_dead_run_did_later(self, path: Path) -> None:
        with start(path) as record:
            for step in (1, 2, 3, 4):
                record.write("step", step=step, loss=5.0 - step)
            record.write("fault", step=4, action="restart")
        with RunRecord.resume(path, step=2, plan=PLAN, world_size=4) as record:
            record.write("step", step=3, loss=0.5)
        read = read_record(path)
        assert read.column("loss") == [(1, 4.0), (2, 3.0), (3, 0.5)]
        assert [line["world_size"] for line in read.lines if line["kind"] == "resume"] == [4]
        assert read.header["world_size"] == 2
        assert [line["step"] for line in read.lines if line["kind"] == "fault"] == [4], "what it died of stays"

    def test_a_torn_last_line_is_left_out_and_gone_after_resuming(self, path: Path) -> None:
        with start(path) as record:
            record.write("step", step=1, loss=4.0)
        with path.open("a") as file:
            file.write('{"kind": "step", "st')
        assert read_record(path).column("loss") == [(1, 4.0)]
        RunRecord.resume(path, step=1, plan=PLAN, world_size=2).close()
        assert [json.loads(line)["kind"] for line in path.read_text().splitlines()] == [
            "run",
            "step",
            "resume",
        ]

    def test_resuming_without_a_record_begins_one(self, path: Path) -> None:
        RunRecord.resume(path, step=7, plan=PLAN, world_size=2).close()
        assert read_record(path).header["kind"] == "run"

    @pytest.mark.parametrize("text", ["", "\0" * 40 + "\n", '{"kind": "step", "step": 1}\n', "no\n{}\n", None])
    def test_what_is_no_record_ends_no_run_that_resumes(
        self, path: Path, text: str | None, caplog: pytest.LogCaptureFixture
    ) -> None:
        path.parent.mkdir()
        if text is None:
            path.mkdir()
        else:
            path.write_text(text)
        with RunRecord.resume(path, step=7, plan=PLAN, world_size=2) as record:
            record.write("step", step=8, loss=4.0)
        assert read_record(path).column("loss") == [(8, 4.0)]
        (aside,) = (one for one in path.parent.iterdir() if one != path)
        assert aside.is_dir() if text is None else aside.read_text() == text
        assert [str(aside) in record.getMessage() for record in caplog.records] == [True]

    def test_a_crash_while_resuming_leaves_the_old_record(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with start(path) as record:
            record.write("step", step=1, loss=4.0)
        monkeypatch.setattr("os.replace", _die)
        with pytest.raises(KeyboardInterrupt):
            RunRecord.resume(path, step=0, plan=PLAN, world_size=2)
        assert read_record(path).column("loss") == [(1, 4.0)]

    def test_numbers_that_are_not_finite_are_null_in_json_and_no_points(self, path: Path) -> None:
        with start(path) as record:
            record.write("step", step=1, loss=math.nan)
            record.write("step", step=2, loss=2.0, norm=None)
        assert read_record(path).lines[0]["loss"] is None
        assert read_record(path).column("loss") == [(2, 2.0)]
        assert read_record(path).column("norm") == []

    def test_the_first_step_since_a_start_does_not_count_for_the_pace(self, path: Path) -> None:
        """It rehearses and compiles: no later step takes as long."""
        with start(path) as record:
            record.write("step", step=1, seconds=5.0, tokens_per_second=1.0)
            assert read_run(path.parent).seconds_per_step == 5.0, "there is no other"
            record.write("step", step=2, seconds=1.0, tokens_per_second=10.0)
            record.write("step", step=3, seconds=2.0, tokens_per_second=5.0)
        with RunRecord.resume(path, step=3, plan=PLAN, world_size=2) as record:
            assert read_run(path.parent).seconds_per_step == 1.5
            record.write("step", step=4, seconds=8.0, tokens_per_second=1.0)
            record.write("step", step=5, seconds=3.0, tokens_per_second=2.0)
        view = read_run(path.parent)
        assert view.seconds_per_step == 2.0
        assert view.throughput() == (26 / 6, "tokens")

    def test_errors_for_files_that_are_no_records(self, path: Path) -> None:
        with pytest.raises(ShardwiseError, match="no run record"):
            read_record(path)
        path.parent.mkdir()
        path.write_text('{"kind": "step", "step": 1}\n')
        with pytest.raises(ShardwiseError, match="first line"):
            read_record(path)
        path.write_text('{"kind": "run"}\nnonsense\n{"kind": "step", "step": 1}\n')
        with pytest.raises(ShardwiseError, match="line 2 is damaged"):
            read_record(path)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def drive(console: Console, clock: Clock, steps: int) -> None:
    with Progress(total=steps, console=console, clock=clock) as progress:
        for step in range(1, steps + 1):
            clock.now += 1.0
            progress.update(step, loss=2.0, tokens=2048, memory_bytes=300 * 2**20)


class TestProgress:
    def test_without_a_terminal_a_line_every_few_seconds_and_one_at_the_end(self) -> None:
        screen = io.StringIO()
        drive(Console(file=screen), Clock(), steps=12)
        lines = screen.getvalue().splitlines()
        assert [line.split("  ")[0] for line in lines] == ["step 5/12", "step 10/12", "step 12/12"]
        assert lines[0] == "step 5/12  loss 2.000  2.0 K tokens/s  300.0 MiB a rank  7.0 s left"
        assert lines[-1].endswith("done")

    def test_on_a_terminal_one_line_that_is_rewritten(self) -> None:
        screen = io.StringIO()
        drive(Console(file=screen, force_terminal=True, width=120), Clock(), steps=3)
        text = screen.getvalue()
        assert "\x1b[2K" in text  # the line is erased before it is drawn anew
        assert text.count("\n") == 1
        assert "step 3/3" in text

    def test_ctrl_c_gives_the_terminal_back(self) -> None:
        screen = io.StringIO()
        console = Console(file=screen, force_terminal=True, width=120)
        with pytest.raises(KeyboardInterrupt), Progress(total=5, console=console):
            raise KeyboardInterrupt
        assert screen.getvalue().rstrip().endswith("\x1b[?25h")  # the cursor is shown again

    def test_a_note_is_a_line_of_its_own(self) -> None:
        screen = io.StringIO()
        with Progress(total=5, console=Console(file=screen, width=20)) as progress:
            progress.note("going on after step 120 of 400 [from here]")
        assert screen.getvalue() == "going on after step 120 of 400 [from here]\n"

    def test_pace_follows_the_last_steps(self) -> None:
        clock = Clock()
        pace = Pace(clock, steps=2)
        for seconds in (10.0, 1.0, 1.0):
            clock.now += seconds
            pace.step(100)
        assert pace.seconds_per_step == 1.0
        assert pace.tokens_per_second == 100.0


class TestPlot:
    def test_a_picture_of_losses_and_validations(self, path: Path) -> None:
        pytest.importorskip("matplotlib")
        with start(path) as record:
            for step in range(1, 31):
                record.write("step", step=step, loss=5.0 / step, tokens=step * 2048)
            record.write("validation", step=30, loss=0.4)
        png = plot_loss(path, path.with_name("loss.png"))
        assert png.read_bytes().startswith(b"\x89PNG")

    def test_a_loss_to_compare_with_is_a_line_with_its_name(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        axes = pytest.importorskip("matplotlib.axes").Axes
        with start(path) as record:
            record.write("step", step=1, loss=5.0, tokens=2048)
        drawn = []
        monkeypatch.setattr(axes, "axhline", lambda _, level, *, label, **_style: drawn.append((level, label)))
        plot_loss(path, path.with_name("loss.png"), {"a bigram model": 3.3333})
        assert drawn == [(3.3333, "a bigram model (3.33)")]

    def test_a_record_without_a_loss_is_refused(self, path: Path) -> None:
        pytest.importorskip("matplotlib")
        start(path).close()
        with pytest.raises(ShardwiseError, match="no step with a loss"):
            plot_loss(path, path.with_name("loss.png"))

    def test_without_matplotlib_the_error_says_what_to_install(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(ShardwiseError, match=r"pip install shardwise\[plot\]"):
            plot_loss(path, path.with_name("loss.png"))

    def test_smoothing_follows_the_start_and_calms_the_rest(self) -> None:
        values = [9.0, 3.0] + [1.0, 2.0] * 50
        smoothed = smooth(values)
        assert smoothed[0] == 9.0
        assert all(1.2 < value < 1.8 for value in smoothed[20:])
        assert len(smoothed) == len(values)


class TestMemory:
    def test_this_process_holds_something(self) -> None:
        memory = process_memory()
        assert 0 < memory.now_bytes <= memory.peak_bytes

    def test_where_there_is_no_proc_psutil_tells(self, tmp_path: Path) -> None:
        assert process_memory(status=tmp_path / "none").now_bytes > 0

    def test_the_peak_over_a_baseline(self) -> None:
        with PeakOverBaseline() as memory:
            block = bytearray(b"x") * 2**26
            del block
        if not memory.exact:
            pytest.skip("this system keeps no peak that can be reset")
        assert 0.9 * 2**26 < memory.peak_bytes < 1.5 * 2**26

    def test_trim_says_whether_it_gave_anything_back(self) -> None:
        assert trim() in (True, False)


def _die(*_: object) -> None:
    raise KeyboardInterrupt
