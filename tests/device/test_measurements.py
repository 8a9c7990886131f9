"""Everything that `make device` measures runs on the CPU too, in tiny sizes: a slip in it costs no time on a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from benchmarks.device.allocations import sites_at_peak
from benchmarks.device.correctness import told_by
from benchmarks.device.gaps import gaps_of
from benchmarks.device.on_ranks import PARTS
from benchmarks.device.page import page_of, verdict_of
from benchmarks.device.rows import Rows


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
    assert [row for row in told if "error" in row or "left_out" in row] == []
    whole = whole_of({part: {"status": "done", "seconds": 1.0, "errors": [], "rows": told}})
    assert part in page_of(whole)
    assert part in verdict_of(whole)


def whole_of(parts: dict[str, Any]) -> dict[str, Any]:
    machine = {"gpus": [], "cores": 2}
    return {"machine": machine, "versions": {"torch": "2"}, "started": "now", "parts": parts}


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


def test_what_was_alive_at_the_peak() -> None:
    def event(action: str, addr: int, size: int, where: str = "") -> dict[str, Any]:
        frames = [{"filename": where, "line": 3, "name": "f"}] if where else []
        return {"action": action, "addr": addr, "size": size, "frames": frames}

    trace = [
        event("alloc", 1, 4_000_000, "/x/site-packages/transformers/models/llama.py"),
        event("alloc", 2, 6_000_000, "/x/shardwise/storage/flat.py"),
        event("free_completed", 1, 4_000_000),
        event("alloc", 3, 1_000_000, "/x/other.py"),
    ]
    first, *sites = sites_at_peak(trace)
    assert first == "10.0 MB at the peak"
    assert sites[0] == "1 x 6.00 MB: /x/shardwise/storage/flat.py:3 f"
    assert len(sites) == 2


def test_reports_of_tests_are_read(tmp_path: Path) -> None:
    report = tmp_path / "junit.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="tests.device.test_a" name="one"/>'
        '<testcase classname="tests.device.test_a" name="two">'
        '<failure message="E: not equal">trace</failure></testcase>'
        '<testcase classname="tests.device.test_a" name="three"><skipped/></testcase></testsuite></testsuites>'
    )
    told = told_by(report)
    assert (told["passed"], told["failed"], told["skipped"]) == (1, 1, 1)
    assert told["rows"] == [{"name": "test_a::two", "error": "E: not equal", "trace": "trace"}]
