"""Profiles a few steps with torch's profiler, with the model's units and the program's actions by name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from shardwise.errors import ConfigError
from shardwise.observe.record import warns_if_unwritable
from shardwise.plan import Profile, load_plan
from shardwise.system.named_folder import folder_of
from shardwise.system.telemetry import Timeline, trace_of

VARIABLE = "SHARDWISE_PROFILE"
"""`10:12` or `10:12:FOLDER`, as `shardwise launch --profile` sets it; takes precedence over the plan."""
MAX_SNAPSHOT_ENTRIES = 1_000_000


def wished(profile: Profile, run: str | None) -> Profile:
    """The profile to make, from the environment or else the plan. Without any folder it goes to `profile`."""
    text = os.environ.get(VARIABLE, "")
    if not text:
        return profile
    first, _, rest = text.partition(":")
    last, _, folder = rest.partition(":")
    if not (first.isdigit() and last.isdigit()):
        raise ConfigError(f"{VARIABLE} is {text!r}; write the first and the last step, and a folder: 10:12:traces.")
    folder = folder or profile.folder or ("profile" if run is None else "")
    told = {"steps": [int(first), int(last)], "folder": folder or None, "memory": profile.memory}
    return load_plan({"profile": told}).profile


class ProfileWindow:
    """Profiles the steps of a plan's `profile`, and writes files such as `rank-0-steps-10-12.json` to its folder."""

    def __init__(self, profile: Profile, run: str | None, rank: int, device: torch.device) -> None:
        """Raises `ConfigError` if there is no folder, or if the device's memory cannot be recorded."""
        profile = wished(profile, run)
        self._steps = profile.steps
        self._rank, self._device = rank, device
        self._timeline: Timeline | None = None
        self._owns_timeline = False
        self._profiler: torch.profiler.profile | None = None
        self._began_after = 0
        self._is_done = self._steps is None
        self._memory = _recorder(device) if profile.memory else None
        if self._steps is None:
            return
        if profile.folder is None and run is None:
            raise ConfigError("profile.steps is given, but no folder for traces; give profile.folder, or run.")
        if profile.memory and self._memory is None:
            raise ConfigError(
                f"profile.memory is true, but torch records no allocator of {device.type}; leave it out there."
            )
        if profile.folder is not None:
            self._folder = folder_of(profile.folder, "profile.folder")
        else:
            self._folder = folder_of(str(run), "run") / "profile"

    def follow(self, timeline: Timeline, num_steps: int) -> None:
        """Take units and actions from `timeline` from now on."""
        self._timeline = timeline
        self.note_step(num_steps)

    def note_step(self, num_steps: int) -> None:
        """Called when `num_steps` steps have been taken."""
        if self._is_done or self._steps is None:
            return
        first, last = self._steps
        if self._profiler is not None and num_steps >= last:
            self._finish(num_steps)
        elif self._profiler is None and first - 1 <= num_steps < last:
            self._begin(num_steps)

    def close(self) -> None:
        """Write what there is, if the run ends inside the window."""
        if self._profiler is not None:
            self._finish(self._began_after)

    def _begin(self, num_steps: int) -> None:
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type != "cpu" and hasattr(torch.profiler.ProfilerActivity, self._device.type.upper()):
            kinds.append(getattr(torch.profiler.ProfilerActivity, self._device.type.upper()))
        self._is_done = True  # unless it begins
        with warns_if_unwritable(f"The profile of rank {self._rank}", Exception):
            profiler = torch.profiler.profile(activities=kinds, acc_events=True)
            profiler.start()
            self._profiler, self._is_done, self._began_after = profiler, False, num_steps
            if self._memory is not None:
                self._memory._record_memory_history(max_entries=MAX_SNAPSHOT_ENTRIES)
            assert self._timeline is not None
            self._owns_timeline = not self._timeline.is_on
            if self._owns_timeline:
                self._timeline.start()

    def _finish(self, num_steps: int) -> None:
        """Stop, and write the files; where that is impossible, steps are trained all the same."""
        assert self._profiler is not None
        assert self._timeline is not None
        profiler, self._profiler, self._is_done = self._profiler, None, True
        events = list(self._timeline.stop() if self._owns_timeline else self._timeline.events)
        name = f"rank-{self._rank}-steps-{self._began_after + 1}-{max(num_steps, self._began_after + 1)}"
        path = self._folder / f"{name}.json"
        try:
            with warns_if_unwritable(path, Exception):
                profiler.stop()
                self._folder.mkdir(parents=True, exist_ok=True)
                profiler.export_chrome_trace(str(path))
                _add_events(path, events, self._rank)
                if self._memory is not None:
                    self._memory._dump_snapshot(str(self._folder / f"{name}-memory.pickle"))
        finally:
            if self._memory is not None:
                self._memory._record_memory_history(enabled=None)


def _recorder(device: torch.device) -> Any:
    """The module that records the allocator of `device`, if torch has one."""
    if device.type == "cpu":
        return None
    memory = getattr(torch.get_device_module(device.type), "memory", None)
    return memory if hasattr(memory, "_record_memory_history") else None


def _add_events(path: Path, events: list[dict[str, Any]], rank: int) -> None:
    """Add the events of units and messages to the profiler's file, as a process of their own beside torch's.

    Torch's microseconds count from a base that the file gives in nanoseconds; ours are of the wall clock.
    """
    # Torch writes the process's name as it is, which may have a line's end, or be cut within a letter.
    trace = json.loads(path.read_text(encoding="utf-8", errors="replace"), strict=False)
    base_us = float(trace.get("baseTimeNanoseconds", 0)) / 1e3
    shifted = [{**event, "ts": event["ts"] - base_us} for event in events]
    for event in trace_of([shifted]):
        if event["name"] == "process_name":
            event["args"] = {"name": f"shardwise, rank {rank}"}
        trace["traceEvents"].append({**event, "pid": f"shardwise {rank}"})
    path.write_text(json.dumps(trace), encoding="utf-8")
