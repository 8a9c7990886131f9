"""The log of an engine's run: the record, trackers, notes of faults, and a timeline of one step.

Every rank has a `RunLog`. `log` exchanges one small message between all ranks: the loop's values, how long the rank's
last steps took and for what, and its memory. Rank 0 writes.

[Note: each step once] If ranks are lost, the values of an iteration that became void are not written. All ranks know
what all have logged, so the next rank 0 can write it, even if the former one died before it had.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.comm import World
from shardwise.comm.regrouping import Membership
from shardwise.comm.weighing import mean_of
from shardwise.fit.replay import Replay, script_of, scripts_of
from shardwise.observe.earlier_run import EarlierRun
from shardwise.observe.log_messages import LogEntry, RankMessage, RankTotals, check_names, numbers_of
from shardwise.observe.profiling import ProfileWindow
from shardwise.observe.record import RunRecord, read_record, warns_if_unwritable
from shardwise.observe.run_files import RECORD
from shardwise.observe.run_notes import Notes, in_words
from shardwise.observe.run_timeline import TIMELINE_STEP, StepTimeline
from shardwise.observe.slowness import SlowWindow
from shardwise.observe.stragglers import LapOfRanks, StragglerWindow
from shardwise.observe.trackers import Tracker, check_trackers, each_while_it_can, open_tracker
from shardwise.observe.unusual import UnitSquare, Unusual, units_in_words, worst_of
from shardwise.plan import Plan
from shardwise.sharded.engine_report import MemoryReport, measured_anew, memory_of
from shardwise.sharded.sharded_model import ShardedModel
from shardwise.sharded.training import Session
from shardwise.system.data_ranks import HANDED_OUT, Part
from shardwise.system.job_folder import RECORD_PATH
from shardwise.system.named_folder import folder_of
from shardwise.system.process_memory import process_memory
from shardwise.system.telemetry import Lap

if TYPE_CHECKING:
    from shardwise.observe.prediction import Prediction

RANKS_EVERY_SECONDS = 1.0
"""Lines about ranks are long for many ranks, so they are written at most this often."""
_TIERS = ("device", "host", "disk")

_log = logging.getLogger("shardwise")


class RunLog:
    """One rank's part of the log of a run. `close()` it."""

    def __init__(self, plan: Plan, world: World) -> None:
        """Raises `ConfigError` for trackers or a profile that are impossible here; opens nothing before `follow`."""
        wanted = plan.trackers or {}
        self._wanted = {str(name): options for name, options in wanted.items()}
        check_trackers(self._wanted, plan.run)
        self._plan, self._world = plan, world
        self.profile = ProfileWindow(plan.profile, plan.run, world.rank, world.device)
        self._folder = None if plan.run is None else folder_of(plan.run, "run")
        self._has_record = self._folder is not None and (plan.trackers is None or "jsonl" in self._wanted)
        self._trackers: list[Tracker] = []
        self._record: RunRecord | None = None
        self._earlier: EarlierRun | None = None
        self._notes: Notes | None = None
        self._is_open = True
        self._sharded: ShardedModel | None = None
        self._device = ""
        self._lr: float | None = None
        self._last_step = self._tokens = 0
        self._has_begun = False
        self._began_after: int | None = None
        self._noted = -1
        self._goes_on = world.is_newcomer
        """Whether steps that were already logged are taken again."""
        self._totals = RankTotals()
        self._ranks_at = 0.0
        self._memory: list[dict[str, Any]] = []
        self._bytes = _Bytes()
        self._timeline = StepTimeline(self._folder, is_made=world.is_newcomer)
        self._slow: SlowWindow | None = None
        self._stragglers: StragglerWindow | None = None
        self._has_stragglers = False
        """Whether the last line about them names any."""
        self._prediction: Prediction | None = None
        self._unusual = Unusual()
        self._last_entry: LogEntry | None = None
        """The last log that counted. See [Note: each step once]."""

    def _open(self, folder: Path) -> None:
        atexit.register(self._end_at_exit)  # not weakly: a script may have dropped the engine, and its record ends, too
        self._notes = Notes(folder, self._world.rank)
        if self._world.rank != 0:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self._earlier = EarlierRun.find(folder)
        self._open_trackers(folder)

    def _open_trackers(self, folder: Path) -> None:
        plan = {name: value for name, value in self._plan.model_dump(mode="json").items() if value is not None}
        config = {"world_size": self._world.size, **plan}
        self._trackers = [
            open_tracker(name, folder, config, options) for name, options in self._wanted.items() if name != "jsonl"
        ]

    # -- steps --------------------------------------------------------------------------------------------

    def follow(self, sharded: ShardedModel) -> None:
        """`sharded` takes the steps from now on: the first one, or another after `reshard`."""
        self._plan = self._plan.with_precision(sharded.plan.precision, "engine")  # auto has been settled
        if self._folder is not None and self._notes is None:
            self._open(self._folder)
        self._sharded, self._bytes, self._slow, self._stragglers = sharded, _Bytes(), None, None
        self._device = str(sharded.parts.sharding.device)
        self._last_step = sharded.progress.num_steps
        self.profile.follow(sharded.parts.timeline, sharded.progress.num_steps)
        self._predict(sharded)
        sharded.progress.on_step[:] = [self._note_step]
        self._world.journal.clock.lap()

    def _predict(self, sharded: ShardedModel) -> None:
        """From the first forward on, on rank 0 of a run that is written down; not again when ranks are lost, because
        the others would wait for it."""
        self._prediction = None
        if self._folder is None or self._world.rank or self._goes_on:
            return
        from shardwise.observe.prediction import Prediction  # only runs with a record load the planner

        self._prediction = Prediction(sharded, self._world)

    def go_on(self, world: World, sharded: ShardedModel) -> None:
        """`sharded` takes the steps from now on, on the ranks of another generation. Their first rank continues the
        record, whose next line has the number of ranks."""
        was_first, self._world = self._world.rank == 0, world
        self._flush_ranks(self._last_step)  # of the former ranks; the new ones have other numbers
        if self._record is not None:
            self._record.close()
            self._record = None
        self._has_begun, self._goes_on = False, True
        self._memory = []
        self._timeline.give_up()  # it belonged to the former model
        if self._folder is not None and world.rank == 0 and not was_first:
            self._open_trackers(self._folder)
        self.follow(sharded)

    def _note_step(self) -> None:
        sharded = self._sharded
        assert sharded is not None
        step = sharded.progress.num_steps
        if step != self._noted + 1:  # the first one here, or the first after a resume
            self._began_after = step - 1
        self._noted = step
        if sharded.parts.optimizer is not None:
            lr = sharded.parts.optimizer.members[0].param_groups[0].get("lr")
            self._lr = float(lr) if lr is not None else None
        self._timeline.note_step(sharded)
        self.profile.note_step(step)

    # -- logging ------------------------------------------------------------------------------------------

    def log(
        self,
        values: Mapping[str, Any],
        kind: str,
        tokens: int,
        samples: int,
        session: Session,
        *,
        mean: bool = True,
    ) -> dict[str, float]:
        """See `Engine.log`."""
        sharded = self._sharded
        assert sharded is not None
        numbers = numbers_of(values)
        if session.is_arriving:
            return numbers
        if not mean and kind != "step":
            if self._world.rank == 0 and not session.was_void():
                self._begin(sharded, sharded.progress.num_steps)
                self._write(LogEntry(kind, sharded.progress.num_steps, numbers, {}, 0))
            return numbers
        is_step = kind == "step"
        lap = self._world.journal.clock.lap() if is_step else Lap(0.0, 0.0, {})
        num_steps = max(1, sharded.progress.num_steps - self._last_step)
        own_values = numbers if mean or self._world.rank == 0 else {}
        own = self._message(sharded, own_values, tokens, samples, lap)
        if is_step:
            self._judge(sharded, own, numbers)
        mine = own.message()
        messages = [
            RankMessage.of(message) for message in session.asking(lambda: self._exchange(mine, is_step=is_step))
        ]
        written = _means(messages, numbers) if mean else messages[0].values
        sharded = self._sharded or sharded  # which may be of another generation by now
        step = sharded.progress.num_steps
        if session.was_void():
            self._last_step = step if is_step else self._last_step
            return written if mean else numbers
        combined = _combined(sharded, self._world.rank, messages, num_steps, self._lr) if is_step else ({}, 0)
        entry = LogEntry(kind, step, written, *combined)
        if self._world.rank == 0:
            self._begin(sharded, step - 1 if is_step else step)
            self._write(entry)
            if is_step:
                self._write_ranks(messages, step)
                self._write_memory(messages, step)
                self._compare(messages[0].lap, step)
                self._watch_stragglers(sharded, messages, step)
        self._last_entry = entry
        if is_step:
            self._note_unusual(messages, step)
            self._look_for_slow(sharded, messages, step)
            self._last_step = step
        return written if mean else numbers

    def _exchange(self, mine: bytes, *, is_step: bool) -> list[str]:
        """The messages of all ranks, by rank."""
        assert self._sharded is not None
        messages = [message.decode() for message in self._world.exchange(mine, "log")]
        if is_step:
            self._timeline.share(self._sharded, self._world)
        return messages

    def _judge(self, sharded: ShardedModel, own: RankMessage, numbers: Mapping[str, float]) -> None:
        """Note in this rank's message what is unusual about its step."""
        norm = sharded.progress.gradient_norm
        own.unusual = self._unusual.loss_in_words(numbers, lambda: _had(sharded))
        own.unusual_norm = self._unusual.norm_in_words(None if norm is None else float(norm))
        own.squares = _squares(sharded) if own.unusual_norm else ()
        sharded.progress.step_losses.clear()

    def _note_unusual(self, messages: list[RankMessage], step: int) -> None:
        """On rank 0: which ranks had unusual losses, and which units an unusual norm is from, which all ranks of an
        island have."""
        if self._world.rank != 0:
            return
        assert self._sharded is not None
        found = [(rank, one.unusual) for rank, one in enumerate(messages) if one.unusual]
        islands: dict[int, dict[int, RankMessage]] = {}
        for rank, one in enumerate(messages):
            islands.setdefault(self._sharded.mesh.island_of(rank), {})[rank] = one
        for island in islands.values():
            told = {rank: one for rank, one in island.items() if one.unusual_norm}
            if not told:
                continue
            rank, units = min(told), ""
            if told.keys() == island.keys():  # a rank that has joined lately knows fewer norms to compare with
                rank, units = units_in_words({rank: one.squares for rank, one in told.items()})
            found.append((rank, told[rank].unusual_norm + (f": {units}" if units else "")))
        for rank, words in found:
            _log.warning("Step %d, rank %d: %s.", step, rank, words)
            if self._record is not None:
                self._record.write("unusual", step=step, rank=rank, words=words)

    def _look_for_slow(self, sharded: ShardedModel, messages: list[RankMessage], step: int) -> None:
        """Report slow ranks, the same on all ranks; a slow rank may be asked to leave."""
        plan, membership = sharded.plan.slow, self._world.membership
        if self._slow is None:
            axes = sharded.mesh.named_sizes
            self._slow = SlowWindow(plan.factor, plan.seconds, axes)
        rows = [{**vars(one.lap), "computing": one.lap.computing} for one in messages]
        spare = self._world.size - membership.least if membership is not None else 0
        for found in self._slow.add(rows, [one.weight for one in messages], max(1, step - self._last_step)):
            leaves, what = _consequence(membership if plan.leave and found.rank is not None else None, spare)
            spare -= leaves
            if self._world.rank == 0:
                _log.warning("%s%s", found.words, what)
                if self._record is not None:
                    self._record.write("slow", step=step, rank=found.rank, words=found.words, leaves=leaves)
            if leaves and membership is not None and found.rank == self._world.rank:
                membership.leave()

    def _watch_stragglers(self, sharded: ShardedModel, messages: list[RankMessage], step: int) -> None:
        """After every window of steps, write down what slow ranks, links and stages cost, and warn of what costs much.
        On rank 0."""
        if len(messages) == 1:
            return
        if self._stragglers is None:
            self._stragglers = StragglerWindow(sharded.plan.slow.steps, sharded.plan.slow.share)
        laps, weights = [one.lap for one in messages], [one.weight for one in messages]
        self._stragglers.add(LapOfRanks(laps, max(1, step - self._last_step), weights))
        if self._stragglers.is_full:
            self._write_stragglers(self._stragglers, sharded, step)

    def _write_stragglers(self, window: StragglerWindow, sharded: ShardedModel, step: int) -> None:
        num_steps = window.num_steps
        try:
            found = window.close(_replay(sharded))
        except Exception as error:  # never into a loop that would train without it
            _log.info("What slow ranks cost is not known: %s", error)
            return
        if self._record is not None and (found or self._has_stragglers):
            self._has_stragglers = bool(found)
            self._record.write("stragglers", step=step, num_steps=num_steps, found=[one.as_json() for one in found])
        for one in window.news(found):
            _log.warning("%s, over %d steps", one, num_steps)

    def _message(
        self, sharded: ShardedModel, numbers: dict[str, float], tokens: int, samples: int, lap: Lap
    ) -> RankMessage:
        """This rank's message."""
        process = process_memory()
        memory = {"process": process.now_bytes, "process_peak": process.peak_bytes}
        tiers = self._bytes.by_tier(sharded) if self._folder is not None and lap.seconds > 0 else {}
        return RankMessage(numbers, int(tokens), int(samples), lap, memory, tiers, sharded.progress.weighing.reported)

    def _write(self, entry: LogEntry) -> None:
        line = {**entry.line, **entry.means}
        if entry.tokens:
            self._tokens += entry.tokens
            line["tokens"] = self._tokens
        if self._record is not None:
            self._record.write(entry.kind, step=entry.step, **line)
        prefix = "" if entry.kind == "step" else f"{entry.kind}/"
        numbers = {f"{prefix}{name}": value for name, value in line.items() if value is not None and name != "time"}
        each_while_it_can(self._trackers, lambda tracker: tracker.log(entry.step, numbers))

    def _write_ranks(self, messages: list[RankMessage], step: int) -> None:
        self._totals.add(messages, max(1, step - self._last_step))
        if time.monotonic() - self._ranks_at >= RANKS_EVERY_SECONDS:
            self._flush_ranks(step)

    def _flush_ranks(self, step: int) -> None:
        if self._record is not None and self._totals.messages:
            rows = self._totals.of_ranks()
            self._record.write("ranks", step=step, time=time.time(), num_steps=self._totals.num_steps, ranks=rows)
        self._totals, self._ranks_at = RankTotals(), time.monotonic()

    def _write_memory(self, messages: list[RankMessage], step: int) -> None:
        """Write promised and held bytes, rank by rank, if they have changed."""
        known = self._memory or [{} for _ in messages]
        rows = [one.tiers or before for one, before in zip(messages, known, strict=True)]
        if self._record is not None and rows != self._memory:
            self._memory = rows
            self._record.write("memory", step=step, ranks=rows)

    def _compare(self, lap: Lap, step: int) -> None:
        """Write what was predicted, and say once how far it is from what is measured."""
        if self._prediction is None:
            return
        num_steps = max(1, step - self._last_step)
        self._prediction.write(self._record, step, num_steps)
        self._foresee_sizes(self._prediction)
        if self._last_step > TIMELINE_STEP:
            found = self._prediction.compare(lap, num_steps, self._timeline.events)
            if found is not None and found.is_large:
                _log.warning("%s", found)

    def _foresee_sizes(self, prediction: Prediction) -> None:
        """Of a job that grows by itself: what a step would take with other numbers of ranks, for its launcher."""
        (written, prediction.written), membership = (prediction.written, None), self._world.membership
        if written is None or membership is None or not membership.most or self._sharded is None:
            return
        from shardwise.fit.other_sizes import seconds_by_size, sizes_up_to

        sharded, (foreseen, num_micro_batches) = self._sharded, written
        axes = sharded.mesh.named_sizes
        try:
            membership.predicted = seconds_by_size(
                foreseen.programs[0],
                foreseen.hardware,
                sharded.mesh,
                sharded.table,
                sizes_up_to(membership.most, axes),
                num_micro_batches=num_micro_batches,
                prefetch_bytes=sharded.plan.prefetch_bytes,
            )
        except Exception as error:  # never into a loop that would train without it
            _log.info("The time of a step with other numbers of ranks is not predicted: %s", error)

    def _begin(self, sharded: ShardedModel, step: int) -> None:
        """Begin the log on rank 0, with the first line. It continues after `step`, or after the last step that was
        taken elsewhere, if that is less."""
        if self._has_begun:
            return
        self._has_begun = True
        after = step if self._goes_on or self._began_after is None else self._began_after
        path = None if self._folder is None or not self._has_record else self._folder / RECORD
        is_of_this_job = self._last_entry is not None
        if path is not None:
            with warns_if_unwritable(path):
                is_of_this_job |= self._register_record(path)
        is_new = after <= 0 and not is_of_this_job
        if is_new and self._earlier is not None:
            with warns_if_unwritable(self._earlier.folder):
                self._earlier.set_aside()
        each_while_it_can(self._trackers, lambda tracker: tracker.begin(after))
        if path is not None:
            with warns_if_unwritable(path):
                self._open_record(path, sharded, after, is_new=is_new)

    def _open_record(self, path: Path, sharded: ShardedModel, step: int, *, is_new: bool) -> None:
        plan = sharded.plan.model_dump(mode="json")
        axes = sharded.mesh.named_sizes
        more = {"mesh": axes, "model": type(sharded.model).__name__, "device": self._device}
        size = self._world.size
        if is_new:
            self._record = RunRecord.start(path, plan=plan, world_size=size, **more)
            return
        self._record = RunRecord.resume(path, step=step, plan=plan, world_size=size, **more)
        record, entry = read_record(path), self._last_entry
        self._tokens = int(max((tokens for _, tokens in record.column("tokens")), default=0))
        if entry is not None and entry.step <= step and not any(entry.is_in(line) for line in record.lines):
            self._write(entry)

    def _register_record(self, path: Path) -> bool:
        """Tell an elastic launcher where the record is, because it writes there who caused a fault; returns whether it
        already knew."""
        membership = self._world.membership
        if membership is None or membership.folder is None:
            return False
        note = membership.folder / RECORD_PATH
        is_known = note.exists()
        note.write_bytes(os.fsencode(path.resolve()))
        return is_known

    # -- the end ------------------------------------------------------------------------------------------

    def rest(self) -> None:
        """The others continue with the record, without this rank, until `go_on`."""
        if self._record is not None:
            self._record.close()
        self._record, self._trackers = None, []

    def _end_at_exit(self) -> None:
        """The engine was not closed."""
        self.close(getattr(sys, "last_value", None))  # the uncaught exception, if there is one

    def leave(self) -> None:
        """Stop logging, because the others continue without this rank, and with the record."""
        self.rest()
        self._has_record = False

    def close(self, error: BaseException | None = None) -> None:
        """Write how the run ended. May be called twice."""
        if not self._is_open:
            return
        self._is_open = False
        atexit.unregister(self._end_at_exit)
        if self._sharded is not None:
            self._sharded.progress.on_step.clear()
        self.profile.close()
        if self._notes is not None:
            if error is not None:
                self._notes.error(error)
            self._notes.close()
        if self._last_entry is not None and self._sharded is not None and self._world.rank == 0:
            self._begin(self._sharded, self._sharded.progress.num_steps)  # if nothing was logged since a loss
        self._flush_ranks(self._last_step)
        if self._stragglers is not None and self._stragglers.says_something and self._sharded is not None:
            self._write_stragglers(self._stragglers, self._sharded, self._last_step)
        if self._record is not None:
            outcome = {"status": "ended"} if error is None else {"status": "failed", "error": in_words(error)}
            self._record.write("end", step=self._last_step, time=time.time(), **outcome)
            self._record.close()
        each_while_it_can(self._trackers, lambda tracker: tracker.close(failed=error is not None))


class _Bytes:
    """Bytes that a rank was promised and holds under one plan."""

    def __init__(self) -> None:
        self._report: MemoryReport | None = None
        self._measured_at = -RANKS_EVERY_SECONDS

    def by_tier(self, sharded: ShardedModel) -> dict[str, dict[str, dict[str, int]]]:
        """Bytes promised and measured, by tier and kind; empty if they were measured a moment ago."""
        now = time.monotonic()
        if now - self._measured_at < RANKS_EVERY_SECONDS:
            return {}
        # the promise depends on the program, which is known after the first step
        report = memory_of(sharded) if self._report is None else measured_anew(sharded, self._report)
        self._report, self._measured_at = report, now
        promised = (report.promised, report.promised_on_host, report.promised_on_disk)
        measured = (report.measured, report.measured_on_host, report.measured_on_disk)
        return {
            "promised": dict(zip(_TIERS, promised, strict=True)),
            "measured": dict(zip(_TIERS, measured, strict=True)),
            "replicated": {"device": report.replicated},
        }


def _combined(
    sharded: ShardedModel, rank: int, messages: list[RankMessage], num_steps: int, lr: float | None
) -> tuple[dict[str, Any], int]:
    """Metrics of all ranks together, over the last `num_steps`, and their number of tokens."""
    seconds = max(one.lap.seconds for one in messages)
    shares = sharded.mesh.data_place(rank)[1] / len(messages)
    tokens = round(sum(one.tokens for one in messages) * shares)
    samples = round(sum(one.samples for one in messages) * shares)
    norm = sharded.progress.gradient_norm
    line: dict[str, Any] = {"seconds": seconds / num_steps, "norm": None if norm is None else float(norm)}
    if lr is not None:
        line["lr"] = lr
    if tokens:
        line["tokens_per_second"] = tokens / seconds
    if samples:
        line["samples_per_second"] = samples / seconds
    return {**line, "time": time.time()}, tokens


def _replay(sharded: ShardedModel) -> Replay:
    """Of the steps that the engine takes now."""
    pipeline = sharded.parts.pipeline
    if pipeline is not None:
        return Replay(scripts_of(pipeline.layout.schedule, sharded.mesh), sharded.mesh)
    program = sharded.parts.runner.programs.program
    return Replay([script_of(program, sharded.mesh, sharded.plan.accumulate)], sharded.mesh)


def _had(sharded: ShardedModel) -> str:
    """What this rank trained on in the step that has just ended: of several micro-batches the one that makes its loss
    unusual, if their losses are known."""
    losses, num = sharded.progress.step_losses, sharded.plan.accumulate
    if num == 1 or len(losses) != num:
        return HANDED_OUT.of_step()
    worst = worst_of([float(losses[number]) for number in range(num)])
    samples = HANDED_OUT.of_step(Part(worst, num, sharded.progress.step_rows))
    return f"micro-batch {worst} of {num} has {float(losses[worst]):.4g}" + (f": {samples}" if samples else "")


def _squares(sharded: ShardedModel) -> tuple[UnitSquare, ...]:
    """This rank's summands of the norm of the step that has just ended."""
    pipeline = sharded.parts.pipeline
    units = {flat.name: (unit.name, flat.slots[0].name) for unit in sharded.parts.sharding.units for flat in unit.flats}
    found = []
    for flat, square in sharded.parts.verdict.squares():
        unit, first = units[flat]
        found.append(UnitSquare(0 if pipeline is None else pipeline.layout.stage_of(first), unit, square))
    return tuple(found)


def _means(messages: list[RankMessage], names: Collection[str]) -> dict[str, float]:
    check_names(messages)
    weights = [one.weight for one in messages]
    return {name: mean_of([one.values[name] for one in messages], weights) for name in names}


def _consequence(membership: Membership[World] | None, num_spare: int) -> tuple[bool, str]:
    """Whether a slow rank leaves, and what follows, for the log; without a `membership` it was not to leave."""
    if membership is None:
        return False, ""
    if num_spare > 0:
        return True, "; it is left out"
    return False, f"; it stays, because the job needs {membership.least} ranks (--elastic)"
