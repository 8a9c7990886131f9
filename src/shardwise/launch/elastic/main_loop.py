"""The launcher's main loop for an elastic job.

It waits for an event of a process or host, or a message of a member, passes it to the rendezvous, and carries out the
decisions: it notifies members, starts replacements, or ends the job.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardwise.comm.members import ChannelMemory, LauncherChannel
from shardwise.elastic.causes import Classifier
from shardwise.launch.elastic.changes import change_of, change_report
from shardwise.launch.elastic.context import Context
from shardwise.launch.elastic.disconnections import Disconnections
from shardwise.launch.elastic.draining import Draining
from shardwise.launch.elastic.ended_ranks import BeforeJoining, EndedRanks, PendingCause
from shardwise.launch.elastic.processes import Loss
from shardwise.launch.elastic.rendezvous import Rendezvous
from shardwise.launch.elastic.slots import Slot
from shardwise.launch.elastic.workers import Ended, Event, HostLeaves, HostLost, HostReady
from shardwise.launch.environment import Attempt
from shardwise.launch.job_report import describe_failure
from shardwise.launch.outcome import Outcome
from shardwise.system.job_token import Seal, new_token

_REMEMBERED = (
    "attempt",
    "outcomes",
    "num_killed",
    "why_lost",
    "is_final",
    "_slots",
    "_num_started",
    "_hosts",
    "_reasons",
    "_num_before",
    "_ended_ranks",
    "_pending_cause",
    "_before_joining",
    "_has_reported_cause",
    "_rendezvous",
    "_num_forgotten",
)
"""What a launcher that takes over needs of this one's `ElasticAgent`, besides its channel's memory."""
_BUSY_MILLISECONDS, _STARTING_MILLISECONDS, _IDLE_MILLISECONDS = 1, 10, 50


class ElasticAgent:
    """Runs a job's ranks; `outcomes` are those of the last ranks, by rank."""

    def __init__(self, context: Context, memory: Mapping[str, Any] | None = None) -> None:
        """`memory` is that of a launcher that was killed."""
        self.outcomes: list[Outcome] = []
        self.attempt = -1
        self.num_killed = 0
        self.why_lost = ""
        self.is_final = False
        """Whether the job must not be restarted, since that would not help."""
        self._context = context
        self._workers = context.workers
        self._slots = context.slots
        self._token = context.token or new_token()
        self._num_started = 0
        self._hosts: dict[int, str] = {}
        """The host of each process, by number."""
        self._reasons: dict[int, str] = {}
        """Why the launcher ended processes, by number."""
        self._num_before = context.job.nproc
        """The number of ranks before the last loss."""
        self._ended_ranks = EndedRanks(Classifier(context.elastic.policy), context.workers.notes, context.clock)
        self._pending_cause = PendingCause(self._ended_ranks, context.slots, context.elastic.exclude_seconds)
        self._is_resumed = memory is not None
        if memory is None:
            self._begin()
        else:
            self._resume(memory)

    def _resume(self, memory: Mapping[str, Any]) -> None:
        """Go on where the launcher was killed that had this memory."""
        for name in _REMEMBERED:
            setattr(self, name, memory[name])
        self._context.slots = self._slots
        self._rendezvous.attach(self._can_grow, self._workers.is_stopped)
        self._ended_ranks.attach(self._workers.notes, self._context.clock)
        self._connect(memory["channel"])
        self._rendezvous.taken_over(self._context.clock())
        if self._context.scaling is not None and memory["scaling"] is not None:
            self._context.scaling.go_on(memory["scaling"], self._slots.ready_hosts())
        if memory["signal"] is not None:
            self._context.signals.received.insert(0, memory["signal"])

    def _remember(self) -> None:
        """Write down what is decided: see [Note: what is written down] in `succession.py`."""
        if self._context.succession is not None:
            received, scaling = self._context.signals.received, self._context.scaling
            self._context.succession.keep(
                {
                    **{name: getattr(self, name) for name in _REMEMBERED},
                    "channel": self._channel.memory,
                    "signal": received[0] if received else None,
                    "scaling": None if scaling is None else scaling.state,
                }
            )

    # -- for the supervisor -----------------------------------------------------------------------------

    def run(self) -> bool:
        """Run one attempt to its end; return whether it succeeded. A signal ends it early."""
        if not self._is_resumed:
            self._slots.begin(self._context.clock())
        self._is_resumed = False
        self._start_due(self._context.clock())
        self._act()
        while self._goes_on() and not self._context.signals.received and self._rendezvous.state != "lost":
            self._sleep()
            self._look()
        if self._context.signals.received:
            self._end(self._context.signals.received[0])
            return False
        if self._rendezvous.state == "lost":
            self._end(signal.SIGTERM)
        self._conclude()
        is_well = bool(self.outcomes) and all(outcome.exit_code == 0 for outcome in self.outcomes)
        return self._rendezvous.state != "lost" and is_well

    @property
    def needs_all(self) -> bool:
        """Whether the ranks have reported that if one is lost, all must restart."""
        return self._rendezvous.needs_all

    @property
    def gives_up(self) -> bool:
        """Whether they have reported that one was lost, and that they have nothing to go on from."""
        return self._rendezvous.gives_up

    @property
    def given_up_when(self) -> str:
        """What they were doing then, if they have said so."""
        return self._rendezvous.given_up_when if self.gives_up else ""

    def begin_again(self) -> None:
        """Prepare another attempt, with new processes."""
        self._workers.begin()
        self._begin()

    def close(self) -> None:
        self._workers.close()

    def _goes_on(self) -> bool:
        """Whether processes live, or hosts may come back for the first ones of an attempt."""
        is_first = not self._rendezvous.processes
        return bool(self._workers.living) or (is_first and self._slots.can_come(self._context.clock()))

    # -- processes --------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self.attempt += 1
        elastic = self._context.elastic
        self._has_reported_cause = False
        self._before_joining = BeforeJoining(self._ended_ranks)
        self._rendezvous = Rendezvous(
            elastic.least, elastic.most, can_grow=self._can_grow, is_stopped=self._workers.is_stopped
        )
        self._num_forgotten = 0
        self._connect()

    def _connect(self, memory: ChannelMemory | None = None) -> None:
        """Prepare for the messages of this attempt's processes."""
        seal = Seal(self._token, str(self.attempt))
        self._channel = LauncherChannel(self._context.store, str(self.attempt), seal, memory)
        self._draining = Draining(self._context, self._rendezvous, self._end_one, self._remember)
        self._disconnections = Disconnections(self._rendezvous, self._pending_cause)

    def _start(self, slot: Slot) -> None:
        number, context = self._num_started, self._context
        self._num_started += 1
        attempt = Attempt(
            context.address, context.port, self.attempt, context.job.max_restarts, context.run_id, self._token
        )
        settings = {
            "SHARDWISE_MEMBER": str(number),
            "SHARDWISE_FIRST_ANNOUNCEMENT": str(self._channel.num_announcements),
            "SHARDWISE_ELASTIC": f"{context.elastic.least}:{context.elastic.most}",
        }
        if context.scaling is not None:
            settings["SHARDWISE_AUTOSCALE"] = str(context.elastic.most)
        self._workers.start(number, slot, attempt, settings)
        self._hosts[number] = slot.host
        self._slots.started(number, slot)
        self._rendezvous.started(number, slot.host)
        self._remember()

    def _start_due(self, now: float) -> None:
        while (slot := self._slots.next(now)) is not None:
            self._start(slot)

    def _can_grow(self) -> bool:
        """Whether a process may still join that is not a member yet."""
        processes = self._rendezvous.processes.values()
        is_starting = any(one.is_alive and not one.is_member and not one.is_spare for one in processes)
        return is_starting or self._slots.can_come(self._context.clock())

    # -- the loop ---------------------------------------------------------------------------------------

    def _sleep(self) -> None:
        rendezvous = self._rendezvous
        wait = _BUSY_MILLISECONDS if rendezvous.is_busy else _STARTING_MILLISECONDS
        is_idle = not (rendezvous.is_busy or rendezvous.is_awaited or rendezvous.is_ending)
        self._workers.wait(_IDLE_MILLISECONDS if is_idle else wait)

    def _look(self) -> None:
        """Handle all messages and events since the last call."""
        now = self._context.clock()
        if self._context.succession is not None:
            self._context.succession.tend()
        messages = self._channel.read(list(self._workers.living))
        events = self._workers.events()
        for event in events:
            self._take(event, now)
            self._act()
        for one in messages:
            self._channel.act_on(one)
            self._disconnections.note(one, now)
            self._rendezvous.receive(one, now)
            self._act()
            if self._context.scaling is not None:
                self._context.scaling.hear(one, now)
        self._rendezvous.tick(now)
        self._rendezvous.reconsider(now)
        self._act()
        self._draining.go_on()
        self._act()
        if text := self._pending_cause.overdue(now):
            self._context.say(text)
        if self._context.scaling is not None:
            scaling, before = self._context.scaling, self._context.scaling.state.wanted
            scaling.look(now, self._rendezvous, self._slots.ready_hosts(), self._workers.notes)
            if scaling.state.wanted != before:
                self._remember()
        self._replace_dead(now)

    def _take(self, event: Event, now: float) -> None:
        match event:
            case Ended():
                self._process_ended(event, now)
            case HostLost():
                self._host_lost(event, now)
            case HostReady():
                self._context.say(self._slots.ready(event.host, event.num_slots, now))
            case HostLeaves():
                self._draining.begin(event, now)

    def _process_ended(self, event: Ended, now: float) -> None:
        number, outcome = event.number, event.outcome
        process = self._rendezvous.processes.get(number)
        if process is None:  # of an earlier attempt
            return
        was_alive, was_member = process.is_alive, process.is_member
        if outcome.exit_code == 0:
            self._slots.left(number)
            self._rendezvous.finished(number, now)
            return
        text = self._reasons.get(number) or describe_failure(outcome)
        is_replaced = not (self._rendezvous.is_ending or process.is_leaving or self._rendezvous.needs_all)
        self._slots.died(number, now, is_replaced=is_replaced)
        if was_alive and not was_member and not self._rendezvous.is_ending:
            self._context.say(f"a {'spare' if process.is_spare else 'process that had not joined yet'} {text}.")
            self._classify_before_joining(number, outcome)
        self._num_before = len(self._rendezvous.former)
        self._rendezvous.died(number, text, now)
        if (loss := self._loss_of(number)) is not None:
            reason, host = self._reasons.get(number, ""), self._hosts[number]
            step = self._rendezvous.step
            is_new = outcome.raised and self._rendezvous.is_new(number)  # then it has said how far it was
            self._ended_ranks.add(outcome, loss.rank, step, reason, host=host, ran_out=event.ran_out, is_new=is_new)
        self._remember()

    def _classify_before_joining(self, number: int, outcome: Outcome) -> None:
        """End the job if all its processes raised the same before they joined."""
        if self._rendezvous.generation >= 0:
            return
        cause = self._before_joining.failed(number, outcome, self._rendezvous.processes)
        if cause is not None and cause.action == "stop":
            self._has_reported_cause = self.is_final = True
            self._rendezvous.stop(str(cause))

    def _host_lost(self, event: HostLost, now: float) -> None:
        """Treat all processes of a lost host as dead at once."""
        self._num_before = len(self._rendezvous.former)
        self._slots.lost(event.host, now)
        numbers = [number for number in event.numbers if number in self._rendezvous.processes]
        if not numbers:
            self._context.say(f"host {event.host} is gone ({event.why}). It had no ranks.")
        self._rendezvous.lost(event.host, numbers, event.why, now)
        for number in numbers:
            if (loss := self._loss_of(number)) is not None:
                outcome = self._workers.outcome(number)
                self._ended_ranks.add(outcome, loss.rank, self._rendezvous.step, host=event.host)

    def _loss_of(self, number: int) -> Loss | None:
        return next((loss for loss in self._rendezvous.losses if loss.member == number), None)

    def _replace_dead(self, now: float) -> None:
        """Start replacements, but not while members form a generation: starting a process would slow them down."""
        rendezvous = self._rendezvous
        processes = rendezvous.processes.values()
        if rendezvous.is_ending:
            self._slots.stop()
            for process in processes:
                if process.is_alive and not process.is_member:
                    self._end_one(process.number, "was no longer needed")
        if rendezvous.is_busy and any(process.is_alive and process.is_member for process in processes):
            return
        self._start_due(now)

    def _end_one(self, number: int, why: str) -> None:
        if number in self._workers.living and number not in self._reasons:
            self._reasons[number] = why
            self._workers.end_one(number)

    def _act(self) -> None:
        """Carry out the decisions of the rendezvous."""
        rendezvous = self._rendezvous
        has_formed = self._publish()
        for number, why in rendezvous.kills:
            self._end_one(number, why)
        rendezvous.kills.clear()
        if has_formed:
            self._report_change()

    def _publish(self) -> bool:
        """Publish the rendezvous' announcements. Returns whether one says that a generation was formed."""
        announcements = list(self._rendezvous.announcements)
        if not announcements:
            return False
        for announcement in announcements:
            if announcement.kind == "entering":
                self._classify()
                self._channel.share_reports(announcement.generation, announcement.members, announcement.before)
        self._rendezvous.announcements.clear()
        self._channel.publish(*announcements, first=self._remember)
        return any(announcement.kind == "formed" for announcement in announcements)

    def _classify(self) -> None:
        """Classify the losses before the next generation is entered, so that its members know of a batch to skip, and
        nothing is started on an excluded host."""
        self._pending_cause.classify(self._num_before, self._rendezvous.step, self._context.clock())

    def _report_change(self) -> None:
        """Print one report, once it is known which ranks continue; then delete keys of former generations."""
        rendezvous, now = self._rendezvous, self._context.clock()
        if rendezvous.generation:
            self._classify()
            cause = self._pending_cause.take()
            words = {loss.member: self._channel.last_status(loss.rank, loss.generation) for loss in rendezvous.losses}
            change = change_of(rendezvous, self._slots, words, self._pending_cause.excluded(cause), now)
            if text := change_report(change, cause):
                self._context.say(text)
            if cause is not None and cause.action == "stop":
                self.is_final = True
                rendezvous.stop(str(cause))
        rendezvous.losses.clear()
        rendezvous.num_left = 0
        for generation in range(self._num_forgotten, rendezvous.generation):
            self._channel.forget(generation)
        self._num_forgotten = rendezvous.generation

    def _end(self, number: signal.Signals) -> None:
        """Ask living ranks to end, and kill those that do not."""
        signals, grace = self._context.signals.received, self._context.job.grace_seconds
        passed_on = signal.SIGTERM if number is signal.SIGHUP else number
        if signals:
            self._context.say(
                f"{number.name}: passed on to the ranks, which have {grace:g} s to end; a second signal kills them."
            )
            self._rendezvous.requests.stop_together()
        self._remember()
        already = len(signals)
        self._workers.end_job()
        self._workers.send(passed_on)
        self._remember()
        self._workers.wait_for_end(grace, lambda: self._answer_last() or len(signals) > already)
        self.num_killed = self._workers.kill()
        self._conclude()

    def _answer_last(self) -> bool:
        """Let ranks that regroup while the job ends come to an agreement, so that they can save. Returns false."""
        if self._rendezvous.requests.is_stopping:
            for message in self._channel.read(list(self._workers.living)):
                self._channel.act_on(message)
                if message.kind not in ("leaving", "raised"):
                    self._rendezvous.receive(message, self._context.clock())
            self._publish()
        return False

    def _conclude(self) -> None:
        """Collect the outcomes of the last ranks."""
        rendezvous = self._rendezvous
        self.why_lost = rendezvous.why_lost
        numbers = rendezvous.members or tuple(rendezvous.processes)
        self.outcomes = []
        for rank, number in enumerate(numbers):
            outcome = replace(self._workers.outcome(number), rank=rank)
            words = self._channel.last_status(rank, rendezvous.generation)
            self.outcomes.append(replace(outcome, last_status=words))
        if rendezvous.state == "lost" and not self.is_final and not self._has_reported_cause:
            self._has_reported_cause = True
            for cause in self._pending_cause.at_end(self.outcomes, rendezvous.step):
                self._context.say(f"cause: {cause.kind}: {cause.evidence}")
                self.is_final = self.is_final or cause.action == "stop"
        for number in rendezvous.processes:
            self._context.folder.add_tracebacks(self.attempt, [self._workers.outcome(number)])
        self._workers.close()
