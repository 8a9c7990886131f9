"""What a rank's report shows of an exception: the script's frames, and none of those that led to it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import pytest

import shardwise.launch.run_script
from shardwise.launch.run_script import run_script, scripts_part


def frames(trace: TracebackType | None) -> list[str]:
    found = []
    while trace is not None:
        found.append(Path(trace.tb_frame.f_code.co_filename).name)
        trace = trace.tb_next
    return found


def raised_by(call: Callable[[], object]) -> TracebackType | None:
    """The traceback of what `call` raises, without the frames of this file."""
    with pytest.raises(Exception) as raised:  # noqa: PT011  # any
        call()
    trace = raised.value.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


@pytest.fixture(autouse=True)
def _kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_the_frames_of_a_script_are_kept(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("raise ValueError")
    script = tmp_path / "script.py"
    script.write_text("import runpy\n\nrunpy.run_path(__file__.replace('script.py', 'helper.py'))\n")
    trace = raised_by(lambda: run_script([str(script)]))
    assert frames(trace)[0] == "run_script.py"
    found = frames(scripts_part(trace))
    assert (found[0], found[-1]) == ("script.py", "helper.py"), "what the script runs itself is its own"


def test_a_script_under_a_runner_of_ours_is_found(tmp_path: Path) -> None:
    """As with `launch --shardwise PLAN`: a module of this package runs the script, wherever it is in there."""
    script = tmp_path / "script.py"
    script.write_text("raise ValueError")
    package = Path(shardwise.launch.run_script.__file__).parents[1]
    runner = compile("run_script([script])", f"{package}{os.sep}somewhere{os.sep}runner.py", "exec")
    trace = raised_by(lambda: exec(runner, {"run_script": run_script, "script": str(script)}))
    assert frames(trace)[:2] == ["runner.py", "run_script.py"]
    assert frames(scripts_part(trace)) == ["script.py"]


def test_what_this_package_raises_before_any_script_is_shown_whole() -> None:
    trace = raised_by(lambda: run_script([]))
    assert frames(scripts_part(trace)) == frames(trace) == ["run_script.py"]


def test_no_frames_are_left_of_a_script_that_is_not_there(tmp_path: Path) -> None:
    assert scripts_part(raised_by(lambda: run_script([str(tmp_path / "none.py")]))) is None
