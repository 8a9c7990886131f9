"""What was alive when the allocator had handed out most: the answer to where bytes beyond a promise come from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

NUM_SITES = 14
_OURS = ("shardwise/", "transformers/", "benchmarks/")


def live_at_peak(work: Callable[[], object]) -> list[str]:
    """The largest allocations of `work` that were alive at its peak: size, number and place in the code."""
    torch.cuda.memory._record_memory_history(max_entries=500_000, stacks="python")
    try:
        work()
        torch.cuda.synchronize()
        snapshot: Any = torch.cuda.memory._snapshot()
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    return sites_at_peak(snapshot["device_traces"][torch.cuda.current_device()])


def sites_at_peak(trace: Sequence[dict[str, Any]]) -> list[str]:
    """Pure: events of torch's memory history, as `_snapshot` has them."""
    alive: dict[int, dict[str, Any]] = {}
    held = most = 0
    at_peak: list[dict[str, Any]] = []
    for event in trace:
        if event["action"] == "alloc":
            alive[event["addr"]] = event
            held += event["size"]
            if held > most:
                most, at_peak = held, []  # filled below, only when the peak has passed
        elif event["action"] == "free_completed" and event["addr"] in alive:
            if held == most and not at_peak:
                at_peak = list(alive.values())
            held -= alive.pop(event["addr"])["size"]
    sites: Counter[tuple[str, int]] = Counter((_site(event), event["size"]) for event in at_peak or alive.values())
    largest = sorted(sites.items(), key=lambda one: -one[0][1] * one[1])[:NUM_SITES]
    return [f"{most / 1e6:.1f} MB at the peak", *(f"{n} x {size / 1e6:.2f} MB: {site}" for (site, size), n in largest)]


def _site(event: dict[str, Any]) -> str:
    """The innermost line of ours or of the model; else the innermost of all."""
    frames = event.get("frames") or [{"filename": "unknown", "line": 0, "name": ""}]
    told = next((frame for frame in frames if any(part in frame["filename"] for part in _OURS)), frames[0])
    inner = frames[0]
    name = f"{told['filename'].rpartition('site-packages/')[2]}:{told['line']} {told['name']}"
    return name if inner is told else f"{name}, in {inner['name']}"
