"""What an engine tells of its run: the record, trackers, notes of what goes wrong, and a timeline of one step.

Every rank has a `RunLog`. `log` is one small message from each rank to all of them: what the loop says, how long the
rank's last steps took and what for, what memory it holds. Rank 0 writes.
"""

from __future__ import annotations

import atexit
import json
import logging
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardwise.comm import World
from shardwise.comm.generation import RECORD_PATH
from shardwise.config import Plan
from shardwise.monitor import process_memory
from shardwise.monitor.notes import Notes
from shardwise.monitor.record import RunRecord, read_record
from shardwise.monitor.slowness import SlowWindow
from shardwise.monitor.trackers import Tracker, check_trackers, open_tracker
from shardwise.profiling import ProfileWindow
from shardwise.program import render
from shardwise.report import MemoryReport, describe, measured_anew, memory_of
from shardwise.run_told import Since, Told, check_names, numbers_of
from shardwise.sharded_model import ShardedModel
from shardwise.telemetry import Event, Lap, write_trace
from shardwise.weighing import mean_of

RECORD, TIMELINE, PROGRAM = "record.jsonl", "timeline.json", "program.txt"
RANKS_EVERY_SECONDS = 1.0
"""Lines about ranks are long where there are many; they need not come more often."""
TIMELINE_STEP = 3
"""The first steps of a run record and compile; this one is as all others."""
TIMELINE_RANKS = 8
"""So many ranks have their part in the timeline of that step."""
_TIERS = ("device", "host", "disk")

_log = logging.getLogger("shardwise")


class RunLog:
    """One rank's part of the log of a run. `close()` it."""

    def __init__(self, plan: Plan, world: World) -> None:
        """Raises `ConfigError` for trackers or a profile that cannot be had; nothing is opened before `follow`."""
        wanted = plan.trackers or {}
        self._wanted = {str(name): options for name, options in wanted.items()}
        check_trackers(self._wanted, plan.run)
        self._plan, self._world = plan, world
        self.profile = ProfileWindow(plan.profile, plan.run, world.rank, world.device)
        self._folder = None if plan.run is None else Path(plan.run)
        self._has_record = self._folder is not None and (plan.trackers is None or "jsonl" in self._wanted)
        self._trackers: list[Tracker] = []
        self._record: RunRecord | None = None
        self._notes: Notes | None = None
        self._is_open = True
        self._sharded: ShardedModel | None = None
        self._lr: float | None = None
        self._last_step = self._tokens = 0
        self._has_begun = False
        self._began_after: int | None = None
        self._noted = -1
        self._goes_on = world.is_newcomer
        """Whether steps are taken again that were logged before."""
        self._since = Since()
        self._ranks_at = 0.0
        self._memory: list[dict[str, Any]] = []
        self._report: MemoryReport | None = None
        self._measured_at = 0.0
        self._events: list[Event] | None = None
        self._records_step = False
        self._has_timeline = self._folder is None or world.is_newcomer  # the others have theirs, or have given it up
        self._at_exit: Callable[[], None] | None = None
        self._slow: SlowWindow | None = None

    def _open(self, folder: Path) -> None:
        self._at_exit = _closer(weakref.ref(self))
        atexit.register(self._at_exit)
        self._notes = Notes(folder, self._world.rank)
        if self._world.rank != 0:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self._open_trackers(folder)

    def _open_trackers(self, folder: Path) -> None:
        said = {name: value for name, value in self._plan.model_dump(mode="json").items() if value is not None}
        config = {"world_size": self._world.size, **said}
        self._trackers = [
            open_tracker(name, folder, config, options) for name, options in self._wanted.items() if name != "jsonl"
        ]

    # -- steps --------------------------------------------------------------------------------------------

    def follow(self, sharded: ShardedModel) -> None:
        """`sharded` takes the steps from here on: the first one, or another after `reshard`."""
        if self._folder is not None and self._notes is None:
            self._open(self._folder)
        self._sharded, self._report, self._slow = sharded, None, None
        self._last_step = sharded.progress.num_steps
        self.profile.follow(sharded.timeline, sharded.progress.num_steps)
        sharded.progress.on_step[:] = [self._note_step]
        self._world.journal.clock.lap()

    def go_on(self, world: World, sharded: ShardedModel) -> None:
        """`sharded` takes the steps from here on, on the ranks of another generation; their first goes on with the
        record, whose next line says how many there are."""
        was_first, self._world = self._world.rank == 0, world
        self._flush_ranks(self._last_step)  # of the ranks that were there; others come with other numbers
        if self._record is not None:
            self._record.close()
            self._record = None
        self._has_begun, self._goes_on = False, True
        self._memory = []
        if self._records_step and self._sharded is not None:
            self._sharded.timeline.stop()
        self._records_step, self._events, self._has_timeline = False, None, True
        if self._folder is not None and world.rank == 0 and not was_first:
            self._open_trackers(self._folder)
        self.follow(sharded)

    def _note_step(self) -> None:
        sharded = self._sharded
        assert sharded is not None
        step = sharded.progress.num_steps
        if step != self._noted + 1:  # the first one here, or after a checkpoint was resumed
            self._began_after = step - 1
        self._noted = step
        if sharded.optimizer is not None:
            lr = sharded.optimizer.members[0].param_groups[0].get("lr")
            self._lr = float(lr) if lr is not None else None
        if self._records_step:
            self._records_step, self._events = False, sharded.timeline.stop()
        self.profile.note_step(step)

    # -- what is said -------------------------------------------------------------------------------------

    def note(self, values: Mapping[str, Any], kind: str) -> dict[str, float]:
        """A line of rank 0's values, as they are. Sends nothing."""
        sharded = self._sharded
        assert sharded is not None
        numbers, step = numbers_of(values), sharded.progress.num_steps
        if self._world.rank == 0:
            self._begin(sharded, step)
            self._write(kind, step, numbers)
        return numbers

    def log(
        self, values: Mapping[str, Any], kind: str, tokens: int, samples: int, *, mean: bool = True
    ) -> dict[str, float]:
        """See `Engine.log`."""
        sharded = self._sharded
        assert sharded is not None
        numbers = numbers_of(values)
        is_step = kind == "step"
        lap = self._world.journal.clock.lap() if is_step else Lap(0.0, 0.0, {})
        mine = self._told(sharded, numbers if mean else {}, tokens, samples, lap)
        told = [Told.of(message) for message in self._world.exchange(mine.message(), "log")]
        check_names(told)
        means = numbers
        if mean:
            weights = [one.weight for one in told]
            means = {name: mean_of([one.values[name] for one in told], weights) for name in numbers}
        step = sharded.progress.num_steps
        if self._world.rank == 0:
            self._begin(sharded, step - 1 if is_step else step)
            line = self._step_line(sharded, told, means, step) if is_step else means
            self._write(kind, step, line)
            if is_step:
                self._write_ranks(told, step)
                self._write_memory(told, step)
        if is_step:
            self._look_for_slow(sharded, told, step)
        if is_step:
            self._last_step = step
            self._share_timeline(sharded, step)
        return means

    def _look_for_slow(self, sharded: ShardedModel, told: list[Told], step: int) -> None:
        """Name who is slow, on all ranks alike; one that is may be asked to leave."""
        plan, membership = sharded.plan.slow, self._world.membership
        if self._slow is None:
            axes = dict(zip(sharded.mesh.axes, sharded.mesh.sizes, strict=True))
            self._slow = SlowWindow(plan.factor, plan.seconds, axes)
        rows = [{**vars(one.lap), "computing": one.lap.computing} for one in told]
        for found in self._slow.add(rows, [one.weight for one in told], max(1, step - self._last_step)):
            leaves = plan.leave and membership is not None and found.rank is not None
            if self._world.rank == 0:
                _log.warning("%s%s", found.words, "; it is left out" if leaves else "")
                if self._record is not None:
                    self._record.write("slow", step=step, rank=found.rank, words=found.words, leaves=leaves)
            if leaves and membership is not None and found.rank == self._world.rank:
                membership.leave()

    def _told(self, sharded: ShardedModel, numbers: dict[str, float], tokens: int, samples: int, lap: Lap) -> Told:
        """What this rank says."""
        process = process_memory()
        memory = {"process": process.now_bytes, "process_peak": process.peak_bytes}
        tiers = self._tiers(sharded, is_step=lap.seconds > 0)
        return Told(numbers, int(tokens), int(samples), lap, memory, tiers, sharded.progress.weighing.reported)

    def _tiers(self, sharded: ShardedModel, *, is_step: bool) -> dict[str, dict[str, dict[str, int]]]:
        """Bytes promised and measured, by tier and kind; empty where nothing is to be said again so soon."""
        now = time.monotonic()
        if self._folder is None or not is_step or now - self._measured_at < RANKS_EVERY_SECONDS:
            return {}
        # what is promised follows from the program, which is known once a step has been taken
        report = memory_of(sharded) if self._report is None else measured_anew(sharded, self._report)
        self._report, self._measured_at = report, now
        promised = (report.promised, report.promised_on_host, report.promised_on_disk)
        measured = (report.measured, report.measured_on_host, report.measured_on_disk)
        return {
            "promised": dict(zip(_TIERS, promised, strict=True)),
            "measured": dict(zip(_TIERS, measured, strict=True)),
            "replicated": {"device": report.replicated},
        }

    def _step_line(
        self, sharded: ShardedModel, told: list[Told], means: Mapping[str, float], step: int
    ) -> dict[str, Any]:
        """Numbers of all ranks together."""
        num_steps = max(1, step - self._last_step)
        seconds = max(one.lap.seconds for one in told)
        shares = sharded.mesh.data_place(self._world.rank)[1] / len(told)
        tokens = round(sum(one.tokens for one in told) * shares)
        samples = round(sum(one.samples for one in told) * shares)
        norm = sharded.progress.gradient_norm
        line: dict[str, Any] = {"seconds": seconds / num_steps, "norm": None if norm is None else float(norm)}
        if self._lr is not None:
            line["lr"] = self._lr
        if tokens:
            self._tokens += tokens
            line |= {"tokens": self._tokens, "tokens_per_second": tokens / seconds}
        if samples:
            line["samples_per_second"] = samples / seconds
        return {**line, "time": time.time(), **means}

    def _write(self, kind: str, step: int, line: Mapping[str, Any]) -> None:
        if self._record is not None:
            self._record.write(kind, step=step, **line)
        prefix = "" if kind == "step" else f"{kind}/"
        numbers = {f"{prefix}{name}": value for name, value in line.items() if value is not None and name != "time"}
        for tracker in self._trackers:
            tracker.log(step, numbers)

    def _write_ranks(self, told: list[Told], step: int) -> None:
        self._since.add(told, max(1, step - self._last_step))
        if time.monotonic() - self._ranks_at >= RANKS_EVERY_SECONDS:
            self._flush_ranks(step)

    def _flush_ranks(self, step: int) -> None:
        if self._record is not None and self._since.told:
            rows = self._since.of_ranks()
            self._record.write("ranks", step=step, time=time.time(), num_steps=self._since.num_steps, ranks=rows)
        self._since, self._ranks_at = Since(), time.monotonic()

    def _write_memory(self, told: list[Told], step: int) -> None:
        """What was promised and what is held, rank by rank, whenever that is something else than before."""
        known = self._memory or [{} for _ in told]
        rows = [one.tiers or before for one, before in zip(told, known, strict=True)]
        if self._record is not None and rows != self._memory:
            self._memory = rows
            self._record.write("memory", step=step, ranks=rows)

    def _begin(self, sharded: ShardedModel, step: int) -> None:
        """Rank 0 begins with the first thing that is logged, which says what comes after `step`, or after the last step
        that was taken elsewhere, if that is less."""
        if self._has_begun:
            return
        self._has_begun = True
        after = step if self._goes_on or self._began_after is None else self._began_after
        for tracker in self._trackers:
            tracker.begin(after)
        self._open_record(sharded, after)

    def _open_record(self, sharded: ShardedModel, step: int) -> None:
        if not self._has_record or self._folder is None:
            return
        plan = sharded.plan.model_dump(mode="json")
        axes = dict(zip(sharded.mesh.axes, sharded.mesh.sizes, strict=True))
        more = {"mesh": axes, "model": type(sharded.model).__name__, "device": str(sharded.sharding.device)}
        path, size = self._folder / RECORD, self._world.size
        self._tell_launcher(path)
        if step <= 0:
            self._record = RunRecord.start(path, plan=plan, world_size=size, **more)
        else:
            self._record = RunRecord.resume(path, step=step, plan=plan, world_size=size, **more)
            self._tokens = int(max((tokens for _, tokens in read_record(path).column("tokens")), default=0))

    def _tell_launcher(self, path: Path) -> None:
        """Where the record is: an elastic launcher writes there who was to blame for a fault."""
        membership = self._world.membership
        if membership is not None and membership.folder is not None:
            (membership.folder / RECORD_PATH).write_text(str(path.resolve()))

    # -- one step as it went ------------------------------------------------------------------------------

    def _share_timeline(self, sharded: ShardedModel, step: int) -> None:
        """Begin to record at the end of a step, and bring together what has been recorded at a later one's."""
        if self._has_timeline:
            return
        timeline = sharded.timeline
        if self._events is None and not self._records_step and step >= TIMELINE_STEP - 1 and not timeline.is_on:
            timeline.start()
            self._records_step = True
        elif self._events is not None:
            mine = self._events if self._world.rank < TIMELINE_RANKS else []
            told = self._world.exchange(json.dumps(mine).encode(), "timeline")
            self._has_timeline = True
            if self._world.rank == 0 and self._folder is not None:
                write_trace(self._folder / TIMELINE, [json.loads(one) for one in told[:TIMELINE_RANKS]])
                program = sharded.runner.programs.program
                text = f"{describe(sharded)}\n\n{render(program.micro_batch)}{render(program.step)}"
                (self._folder / PROGRAM).write_text(text, encoding="utf-8")

    # -- the end ------------------------------------------------------------------------------------------

    def close(self, error: BaseException | None = None) -> None:
        """Write how it ended. May be called twice."""
        if not self._is_open:
            return
        self._is_open = False
        if self._at_exit is not None:
            atexit.unregister(self._at_exit)
        if self._sharded is not None:
            self._sharded.progress.on_step.clear()
        self.profile.close()
        if self._notes is not None:
            if error is not None:
                self._notes.error(error)
            self._notes.close()
        self._flush_ranks(self._last_step)
        if self._record is not None:
            said = {"status": "ended"} if error is None else {"status": "failed", "error": _in_words(error)}
            self._record.write("end", step=self._last_step, time=time.time(), **said)
            self._record.close()
        for tracker in self._trackers:
            tracker.close(failed=error is not None)


def _closer(log: weakref.ref[RunLog]) -> Callable[[], None]:
    """What ends the log of a script that does not close its engine."""

    def close() -> None:
        alive = log()
        if alive is not None:
            alive.close(getattr(sys, "last_value", None))  # what the interpreter has printed, if it ends by that

    return close


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
