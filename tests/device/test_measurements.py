"""Everything that `make device` measures runs on the CPU too, in tiny sizes: a slip in it costs no time on a GPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from benchmarks.device import calibrated, predicted
from benchmarks.device.__main__ import outcome_of
from benchmarks.device.allocations import sites_at_peak
from benchmarks.device.gaps import gaps_of, rates_of
from benchmarks.device.larger import HOST_BYTES, STATE_BYTES, largest
from benchmarks.device.models import TINY
from benchmarks.device.on_ranks import PARTS
from benchmarks.device.page import page_of, verdict_of
from benchmarks.device.rows import Rows
from benchmarks.device.scripts import Script
from benchmarks.device.scripts import run as run_script
from benchmarks.device.speed import num_params_of
from benchmarks.device.test_reports import TestReports
from benchmarks.fresh import ROOT, environment
from shardwise.fit.clock import time_ranks
from shardwise.fit.hardware import hardware
from shardwise.plan.placement import mesh_for
from tests.patience import wait_until
from tests.thorough import thorough_only


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize("part", PARTS)
def test_a_part_runs(part: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # as FSDP2 wants it
    try:
        with sw.World.join(environment={}) as world:
            rows = Rows(tmp_path / f"{part}.json", torch.device("cpu"), 600, world)
            PARTS[part](rows)
    finally:
        dist.destroy_process_group()
    told = json.loads(rows.out.read_text())["rows"]
    assert told
    assert [row for row in told if "error" in row or ("left_out" in row and "DeepSpeed" not in row["name"])] == []
    whole = whole_of({part: {"status": "done", "seconds": 1.0, "errors": [], "rows": told}})
    assert part in page_of(whole)
    assert part in verdict_of(whole)


def whole_of(parts: dict[str, Any]) -> dict[str, Any]:
    machine = {"gpus": [], "cores": 2}
    return {"machine": machine, "versions": {"torch": "2"}, "started": "now", "parts": parts}


def test_a_script_is_a_row_however_it_ends(tmp_path: Path) -> None:
    def row_of(code: str, seconds: float = 60, needs: str = "") -> dict[str, Any]:
        script = Script("one", [sys.executable, "-c", code, "{out}"], needs)
        return run_script(script, tmp_path / "one", dict(os.environ), time.monotonic() + seconds)

    writes = "import sys, pathlib; pathlib.Path(sys.argv[1], 'row.json').write_text('{\"apart\": 0.5}')"
    rows = [
        row_of("print('fine')"),
        row_of("raise ValueError('no such kernel')"),
        row_of("print()", needs="no_such_module"),
        row_of("print()", seconds=0),
        row_of(writes),
    ]
    assert rows[0]["said"] == "fine\n"
    assert "ValueError: no such kernel" in rows[1]["error"]
    assert [row["left_out"] for row in rows[2:4]] == ["there is no no_such_module here", "no time was left"]
    assert rows[4]["apart"] == 0.5
    part = {"status": "done", "seconds": 1.0, "errors": [rows[1]["error"]], "rows": rows}
    assert "2 of 5 run right: one, one" in page_of(whole_of({"scripts": part}))


CALIBRATE = """#!{python}
import pathlib, sys
print("calibrated"), pathlib.Path(sys.argv[-1]).write_text({text!r})
"""


def calibrated_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, seconds: float = 60) -> dict[str, Any]:
    """What the part writes where `shardwise calibrate` is `script`."""
    stand_in, out = tmp_path / "python", tmp_path / "calibrated.json"
    stand_in.write_text(script)
    stand_in.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(stand_in))
        patch.setattr(sys, "argv", ["calibrated", "--device", "cpu", "--out", str(out), "--seconds", str(seconds)])
        assert calibrated.main() == 0
    (row,) = json.loads(out.read_text())["rows"]
    return row


def test_a_calibration_is_a_row_however_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = calibrated_row(tmp_path, monkeypatch, "#!/bin/sh\necho no such device >&2\nexit 3\n")
    assert row["error"] == "exit 3: no such device\n"
    row = calibrated_row(tmp_path, monkeypatch, "#!/bin/sh\nexec sleep 60\n", seconds=0.05)
    assert row["error"].startswith("stopped after")


@thorough_only("rehearses a model twice; the benchmark that it is of runs on GPUs")
def test_measured_steps_stand_beside_those_predicted_by_profile_and_calibration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = hardware("h100-sxm")
    text = json.dumps({"hardware": known.model_dump(mode="json")})
    row = calibrated_row(tmp_path, monkeypatch, CALIBRATE.format(python=sys.executable, text=text))
    assert row["said"] == "calibrated\n"
    programs, seconds, promised = {}, {}, {}
    for name in ("ours zero3", "ours zero3 recompute"):
        programs[name] = plan, program, promised[name] = predicted.program_of(predicted.PLANS[name], TINY)
        clock = time_ranks([program], known.with_ranks(1), mesh_for(plan, 1), num_micro_batches=1)
        seconds[name] = clock.step_seconds
    assert promised["ours zero3 recompute"] < promised["ours zero3"]
    assert seconds["ours zero3 recompute"] > seconds["ours zero3"]

    speed = [
        {"name": "ours zero3, round 1", "seconds": 9.0},
        {"name": "ours zero3, round 2", "seconds": 2 * seconds["ours zero3"], "peak_allocated_bytes": 2**30},
        {"name": "ours zero3 recompute, round 1", "seconds": seconds["ours zero3 recompute"]},
        {"name": "ours ddp, round 1", "error": "out of memory"},
        {"name": "plain, round 1", "seconds": 0.5},
    ]
    result = whole_of({"speed": {"rows": speed}, "calibrated": {"rows": [row]}})
    assert predicted.machines(result | {"machine": {"gpus": ["NVIDIA H200"], "cores": 16}}).keys() == {
        "h200",
        "calibrated",
    }
    shown: list[Any] = []
    (tmp_path / "device.json").write_text(json.dumps(result))
    monkeypatch.setattr(predicted, "PLANS", {name: {"name": name} for name in programs})
    monkeypatch.setattr(predicted, "program_of", lambda values, _: programs[values["name"]])
    monkeypatch.setattr(predicted, "show_figures", lambda *table: shown.append(table))
    monkeypatch.setattr(sys, "argv", ["predicted", str(tmp_path / "device.json")])
    predicted.main()
    ((_, head, rows, _),) = shown
    assert head[2] == "by calibrated, ms"
    assert [(name, by.split()[1], peak) for name, _, by, _, peak in rows] == [
        ("ours zero3", "(-50%)", "1.00"),
        ("ours zero3 recompute", "(+0%)", ""),
    ]


def test_a_failure_is_a_row_and_what_comes_after_it_runs(tmp_path: Path) -> None:
    def fails() -> dict[str, Any]:
        raise ValueError("no such kernel")

    with sw.World.join(environment={}) as world:
        rows = Rows(tmp_path / "rows.json", torch.device("cpu"), 600, world)
        rows.measure("one", fails)
        rows.measure("other", lambda: {"seconds": 1.0})
        rows.measure("long", lambda: {"seconds": 1.0}, needs_seconds=1000)
    one, other, long = json.loads(rows.out.read_text())["rows"]
    assert one["error"] == "ValueError: no such kernel"
    assert other["seconds"] == 1.0
    assert "were left" in long["left_out"]


def kernel(stream: int, start: float, length: float, correlation: int) -> dict[str, Any]:
    args = {"stream": stream, "correlation": correlation}
    return {"cat": "kernel", "name": f"kernel {correlation}", "ts": start, "dur": length, "args": args}


def test_gaps_are_those_of_the_busiest_stream_and_named_by_what_the_host_was_in() -> None:
    launch = {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 12, "dur": 1, "tid": 7}
    trace = [
        kernel(7, 0, 10, 1),
        kernel(7, 30, 10, 2),
        kernel(7, 41, 5, 3),
        kernel(9, 0, 5, 4),
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "ts": 5, "dur": 15, "args": {}},
        {**launch, "args": {"correlation": 2}},
        {"cat": "user_annotation", "name": "step", "ts": 0, "dur": 50, "tid": 7},
        {"cat": "user_annotation", "name": "gather blocks.1 dp", "ts": 11, "dur": 4, "tid": 7},
    ]
    gaps, busy = gaps_of(trace)
    assert [(gap.length, gap.before, gap.during) for gap in gaps] == [
        (20, "kernel 2", "gather blocks.1 dp"),
        (1, "kernel 3", ""),
    ]
    assert busy["whole"] == pytest.approx(46e-6)
    assert busy["computing"] == pytest.approx(25e-6)
    assert busy["copies_not_hidden"] == pytest.approx(10e-6)
    assert gaps_of([]) == ([], {})


def test_rates_of_copies_are_bytes_over_the_time_in_which_one_was_under_way() -> None:
    def copy(way: str, start: float, length: float, num_bytes: int) -> dict[str, Any]:
        return {"cat": "gpu_memcpy", "name": f"Memcpy {way}", "ts": start, "dur": length, "args": {"bytes": num_bytes}}

    trace = [
        copy("HtoD", 0, 10, 400_000),
        copy("HtoD", 5, 15, 600_000),
        copy("DtoH", 100, 2, 100_000),
        kernel(7, 0, 9, 1),
    ]
    assert rates_of(trace) == {"to_device": 50.0, "to_host": 50.0}
    assert rates_of([kernel(7, 0, 9, 1)]) == {}


@pytest.mark.parametrize(
    ("card_gb", "host_gb", "seconds", "billions", "is_larger"),
    [
        (85, 137, 90, 5.84, True),  # an H100 and its host
        (85, 137, 40, 2.9, False),  # no time
        (150, 137, 90, 6.2, False),  # an H200 and the same host
        (25, 137, 90, 1.7, True),
        (85, 20, 90, 0.9, False),
    ],
)
def test_a_model_is_as_large_as_card_and_host_and_time_bear(
    card_gb: float, host_gb: float, seconds: float, billions: float, is_larger: bool
) -> None:
    num_params = num_params_of(largest(int(card_gb * 1e9), int(host_gb * 1e9), seconds))
    assert num_params / 1e9 == pytest.approx(billions, abs=0.18)
    assert (num_params * STATE_BYTES > card_gb * 1e9) == is_larger
    assert num_params * HOST_BYTES < host_gb * 1e9 * 1.05


def test_what_was_alive_at_the_peak() -> None:
    def event(action: str, addr: int, size: int, where: str = "") -> dict[str, Any]:
        frames = [{"filename": where, "line": 3, "name": "f"}] if where else []
        return {"action": action, "addr": addr, "size": size, "frames": frames}

    trace = [
        event("alloc", 1, 4_000_000, "/x/site-packages/transformers/models/llama.py"),
        event("alloc", 2, 6_000_000, "/x/shardwise/memory/flat.py"),
        event("free_completed", 1, 4_000_000),
        event("alloc", 3, 1_000_000, "/x/other.py"),
    ]
    first, *sites = sites_at_peak(trace)
    assert first == "10.0 MB at the peak"
    assert sites[0] == "1 x 6.00 MB: /x/shardwise/memory/flat.py:3 f"
    assert len(sites) == 2


TESTS = """
import signal
import pytest

def test_right(): pass
def test_wrong(): assert 1 == 2, "one is not two"
def test_left_out(): pytest.skip("no")

@pytest.fixture
def closes_badly():
    yield
    raise ValueError("cannot be closed")

def test_closed(closes_badly): pass
def test_hangs(): signal.pause()
"""


def test_a_run_that_is_killed_has_named_what_failed(tmp_path: Path) -> None:
    """The whole part, killed with its tests in the middle of one."""
    pytest.importorskip("xdist")
    tests, out = tmp_path / "test_some.py", tmp_path / "correctness.json"
    tests.write_text(TESTS)
    command = [sys.executable, "-m", "benchmarks.device.correctness", "--device", "cpu", "--seconds", "600"]
    part = subprocess.Popen(
        [*command, "--out", str(out), "--tests", str(tests)],
        cwd=ROOT,
        env=environment(on_cpu=True),
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_until(lambda: out.exists() and json.loads(out.read_text())["running"] == ["test_some::test_hangs"])
    finally:
        os.killpg(part.pid, signal.SIGKILL)
        part.wait()
    outcome = outcome_of(out, "stopped", 1.0)
    assert [outcome[kind] for kind in ("passed", "failed", "skipped")] == [1, 2, 1]
    wrong, closed, stopped = outcome["errors"]
    assert wrong.startswith("test_some::test_wrong: AssertionError: one is not two")
    assert closed == "test_some::test_closed: ValueError: cannot be closed"
    assert stopped == "stopped in the middle of test_some::test_hangs"
    page = page_of(whole_of({"correctness": outcome}))
    assert "1 passed, 2 failed, 1 skipped" in page
    assert "test_some::test_wrong" in page
    assert "test_some::test_closed" in page


def test_a_crash_is_a_failure_and_no_longer_running(tmp_path: Path) -> None:
    told = TestReports(tmp_path / "told.json")
    told.pytest_runtest_logstart("tests/device/test_a.py::test_one[x]")
    crash = "worker 'gw0' crashed while running 'test_one[x]'"
    told.pytest_runtest_logreport(
        pytest.TestReport("tests/device/test_a.py::test_one[x]", ("", None, ""), {}, "failed", crash, "???")  # type: ignore[arg-type]
    )
    outcome = outcome_of(tmp_path / "told.json", "exit 1", 1.0)
    assert outcome["errors"] == [f"test_a::test_one[x]: {crash}"]
    assert (outcome["failed"], outcome["running"]) == (1, [])
