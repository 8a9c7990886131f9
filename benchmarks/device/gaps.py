"""A profiled step: busy time of the compute stream, of copies and of messages, and the largest gaps between kernels."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import shardwise as sw
from benchmarks.device.models import ONE_BILLION, TINY, llama, tokens_of
from benchmarks.device.rows import Rows
from benchmarks.engines import adamw

NUM_GAPS = 10
Event = dict[str, Any]
Span = tuple[float, float]


@dataclass(frozen=True)
class Gap:
    """Time in which the stream with most kernels had none, in microseconds."""

    start: float
    stop: float
    before: str
    """The kernel that came next."""
    during: str
    """What the host was in when the gap ended: the innermost annotation, such as an action of the program."""

    @property
    def length(self) -> float:
        return self.stop - self.start


def gaps_of(events: Sequence[Event]) -> tuple[list[Gap], dict[str, float]]:
    """The largest gaps of a Chrome trace by torch's profiler, and seconds by what was busy. Pure."""
    kernels = [event for event in events if event.get("cat") == "kernel"]
    if not kernels:
        return [], {}
    streams: dict[Any, list[Event]] = {}
    for event in kernels:
        streams.setdefault(event["args"].get("stream"), []).append(event)
    main = max(streams.values(), key=lambda one: sum(event["dur"] for event in one))
    main.sort(key=lambda event: event["ts"])
    launched = {
        event["args"]["correlation"]: event
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    spans = [event for event in events if event.get("cat") == "user_annotation"]
    found, reached = [], main[0]["ts"]
    for event in main:
        if event["ts"] > reached:
            launch = launched.get(event["args"].get("correlation"))
            found.append(Gap(reached, event["ts"], event["name"][:60], _innermost(spans, launch)))
        reached = max(reached, event["ts"] + event["dur"])
    found.sort(key=lambda gap: -gap.length)
    start, stop = main[0]["ts"], reached
    copies = {
        way: _spans(event for event in events if event.get("cat") == "gpu_memcpy" and way in event["name"])
        for way in ("HtoD", "DtoH")
    }
    computing = _spans(main)
    busy = {
        "whole": stop - start,
        "computing": _length(computing),
        "to_device": _length(copies["HtoD"]),
        "to_host": _length(copies["DtoH"]),
        "copies_not_hidden": _length([*copies["HtoD"], *copies["DtoH"], *computing]) - _length(computing),
    }
    return found[:NUM_GAPS], {name: round(value / 1e6, 6) for name, value in busy.items()}


def rates_of(events: Sequence[Event]) -> dict[str, float]:
    """GB/s of the copies in each direction while one was under way, by the bytes that the trace says. Pure."""
    rates = {}
    for name, way in (("to_device", "HtoD"), ("to_host", "DtoH")):
        copies = [event for event in events if event.get("cat") == "gpu_memcpy" and way in event["name"]]
        num_bytes = sum(event["args"].get("bytes", 0) for event in copies)
        if num_bytes:
            rates[name] = round(num_bytes / _length(_spans(copies)) / 1e3, 2)
    return rates


def _innermost(spans: Iterable[Event], launch: Event | None) -> str:
    if launch is None:
        return ""
    holding = [
        span
        for span in spans
        if span["tid"] == launch["tid"] and span["ts"] <= launch["ts"] <= span["ts"] + span["dur"]
    ]
    return min(holding, key=lambda span: span["dur"])["name"] if holding else ""


def _spans(events: Iterable[Event]) -> list[Span]:
    return [(event["ts"], event["ts"] + event["dur"]) for event in events]


def _length(spans: Iterable[Span]) -> float:
    """The total length of spans, counting overlaps once."""
    length, reached = 0.0, float("-inf")
    for start, stop in sorted(spans):
        length += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return length


def traced(step: Callable[[], object], keep: Path | None) -> dict[str, Any]:
    """Profile one step; the trace is kept at `keep`."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = keep or Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    found, busy = gaps_of(events)
    copying = busy.get("to_device", 0.0) + busy.get("to_host", 0.0)
    copied = dict.fromkeys(("HtoD", "DtoH"), 0)
    for event in profile.events():
        for way in copied:
            copied[way] += int(way in event.name)
    return {
        "busy_seconds": busy,
        "copies_hidden": round(1 - busy["copies_not_hidden"] / copying, 4) if copying else None,
        "copies_gb": rates_of(events),
        "num_copies": copied,
        "gaps": [{"us": round(gap.length), "before": gap.before, "in": gap.during} for gap in found],
    }


def one_step(rows: Rows, plan: dict[str, Any], name: str) -> dict[str, Any]:
    size = ONE_BILLION if rows.is_real else TINY
    batch = tokens_of(size, rows.device, rows.world.rank)
    model = llama(size, rows.device)
    with sw.shard(model, {"precision": "bf16", **plan}, optimizer=adamw(model), world=rows.world) as engine:

        def step() -> None:
            engine.backward(engine(**batch).loss)
            engine.step()

        for _ in range(3):
            step()
        with engine.timeline(rows.out.with_name(f"timeline-{name}.json")):
            step()
        return traced(step, rows.out.with_name(f"trace-{name}.json")) if rows.is_real else {}


def run(rows: Rows) -> None:
    for name in ("zero3", "ddp", "offload", "zero3-offload"):
        rows.measure(
            name,
            lambda name=name: one_step(rows, {"preset": name}, name),  # type: ignore[misc]
            needs_seconds=8 if rows.is_real else 0,
        )
