"""The launcher's loop for a job whose ranks come and go.

It sleeps until a process ends (by a descriptor that becomes readable then, so it knows within a millisecond) or a
member may have said something, tells the council, and does what follows: news for the members, a process in the place
of a dead one, an end.
"""

from __future__ import annotations

import os
import select
import signal
import time
from dataclasses import replace

from shardwise.comm import is_stopped, last_words
from shardwise.comm.members import ENDING, Post, generation_prefix
from shardwise.elastic.blame import Blame, Judge
from shardwise.job_token import Seal, new_token
from shardwise.launch.echo import Echo
from shardwise.launch.elastic.blaming import Blaming
from shardwise.launch.elastic.budget import Budget
from shardwise.launch.elastic.council import Council
from shardwise.launch.elastic.letters import Change, letter
from shardwise.launch.elastic.people import Loss
from shardwise.launch.elastic.place import Place
from shardwise.launch.environment import Attempt, rank_environment
from shardwise.launch.outcome import Outcome
from shardwise.launch.port import ADDRESS
from shardwise.launch.ranks import Ranks
from shardwise.launch.report import manner

_BUSY_MILLISECONDS, _AWAITED_MILLISECONDS, _CALM_MILLISECONDS = 1, 10, 50


class ElasticAgent:
    """Runs a job's ranks; `outcomes` tells of those that it ended with, by rank."""

    def __init__(self, place: Place) -> None:
        self.outcomes: list[Outcome] = []
        self.attempt = -1
        self.num_killed = 0
        self.why_lost = ""
        self._place = place
        self._job = place.job
        self._token = new_token()
        self._ranks = Ranks()
        self._slots: list[int] = []
        """By number of the process: which of the job's first ranks' places (device, cores) it has."""
        self._reasons: dict[int, str] = {}
        self.is_final = False
        """Whether the job is not to be begun again: that would not help."""
        self._num_before = place.job.nproc
        """Ranks of the generation that was last when one was lost."""
        self._verdict: Blame | None = None
        """On the losses that nobody was told of yet."""
        self._blaming = Blaming(Judge(place.elastic.policy), place.images.folder)
        self._budget = Budget(place.elastic.retries, place.elastic.retry_seconds)
        self._poll = select.poll()
        self._lives: dict[int, int] = {}
        """By number: a descriptor of each process that lives."""
        self._echoes: list[Echo] = []
        self._begin()

    # -- for the supervisor -----------------------------------------------------------------------------

    def run(self) -> bool:
        """One attempt, to its end: whether it ended well. Stops early when a signal has come."""
        for slot in range(self._job.nproc):
            self._start(slot)
        while self._lives and not self._place.signals.received and self._council.state != "lost":
            self._sleep()
            self._look()
        if self._place.signals.received:
            self._end(self._place.signals.received[0])
            return False
        if self._council.state == "lost":
            self._end(signal.SIGTERM)
        self._conclude()
        return self._council.state != "lost" and all(outcome.exit_code == 0 for outcome in self.outcomes)

    def begin_again(self) -> None:
        """Another attempt, of new processes that know nothing of the last one."""
        self._place.images.clear()
        self._begin()

    def close(self) -> None:
        self._ranks.kill()
        for descriptor in self._lives.values():
            os.close(descriptor)
        self._lives.clear()
        for echo in self._echoes:
            echo.close()
        self._echoes.clear()

    # -- processes --------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self.attempt += 1
        elastic = self._place.elastic
        self._has_blamed = False
        self._seal = Seal(self._token, str(self.attempt))
        self._post = Post(self._place.store, str(self.attempt), self._seal)
        self._council = Council(elastic.least, elastic.most, can_grow=self._can_grow, is_stopped=is_stopped)
        self._due: list[tuple[float, int]] = []
        self._num_forgotten = 0

    def _start(self, slot: int) -> None:
        number = len(self._slots)
        files = self._place.folder.files(self.attempt, number)
        environment = self._environment(slot, number, str(files.error))
        pid = self._ranks.start(self._job.rank_command(), os.environ | environment, files)
        self._slots.append(slot)
        self._council.started(number)
        self._lives[number] = os.pidfd_open(pid)
        self._poll.register(self._lives[number], select.POLLIN)
        self._echoes.append(Echo([files]))

    def _environment(self, slot: int, number: int, error_file: str) -> dict[str, str]:
        place, job = self._place, self._job
        attempt = Attempt(ADDRESS, place.port, self.attempt, job.max_restarts, place.run_id, self._token)
        settings = rank_environment(
            slot, job.nproc, attempt, os.environ, threads=job.threads, on_cpu=place.on_cpu, error_file=error_file
        )
        images = {"SHARDWISE_IMAGES": str(place.images.folder)} if place.images.folder is not None else {}
        return {
            **settings,
            **place.bound[slot],
            **images,
            "SHARDWISE_MEMBER": str(number),
            "SHARDWISE_NEWS": str(self._post.num_news),
            "SHARDWISE_ELASTIC": f"{place.elastic.least}:{place.elastic.most}",
            "SHARDWISE_LAUNCHER_PID": str(os.getpid()),
        }

    def _can_grow(self) -> bool:
        """Whether somebody is to come who is not in the council yet."""
        people = self._council.people.values()
        return bool(self._due) or any(person.is_alive and not person.is_member for person in people)

    # -- the loop ---------------------------------------------------------------------------------------

    def _sleep(self) -> None:
        council = self._council
        wait = _BUSY_MILLISECONDS if council.is_busy else _AWAITED_MILLISECONDS
        self._poll.poll(wait if council.is_busy or council.is_awaited or council.is_ending else _CALM_MILLISECONDS)

    def _look(self) -> None:
        """What has happened since, and what follows."""
        now = time.monotonic()
        self._ranks.any_alive()
        said = self._post.read(self._lives)
        for number in [number for number in self._lives if self._ranks.code(number) is not None]:
            self._bury(number, now)
            self._act()
        for one in said:
            self._council.hear(one, now)
            self._act()
        self._council.tick(now)
        self._act()
        self._replace_dead(now)
        for number in self._lives:
            if self._ranks.lingers(number, self._job.grace_seconds):
                self._end_one(number, "raised, and did not end")

    def _bury(self, number: int, now: float) -> None:
        descriptor = self._lives.pop(number)
        self._poll.unregister(descriptor)
        os.close(descriptor)
        self._ranks.kill_one(number)  # its children
        person = self._council.people[number]
        was_alive, was_member = person.is_alive, person.is_member
        outcome = self._ranks.outcome(number)
        if outcome.exit_code == 0:
            self._council.finished(number, now)
            return
        text = self._reasons.get(number) or manner(outcome)
        if was_alive or self._loss_of(number) is not None:
            self._plan_another(number, now)
        if was_alive and not was_member and not self._council.is_ending:
            self._place.say(f"a process that was to become a rank {text}.")
        self._num_before = len(self._council.former)
        self._council.died(number, text, now)
        if (loss := self._loss_of(number)) is not None:
            self._blaming.note(outcome, loss.rank, self._council.step, self._reasons.get(number, ""))

    def _loss_of(self, number: int) -> Loss | None:
        return next((loss for loss in self._council.losses if loss.member == number), None)

    def _plan_another(self, number: int, now: float) -> None:
        """A process in the place of one that has died, if it may be."""
        if self._council.is_ending or self._council.people[number].is_leaving:
            return
        moment = self._budget.ask(self._slots[number], now)
        if moment is not None:
            self._due.append((moment, self._slots[number]))

    def _replace_dead(self, now: float) -> None:
        """But not while those that live are busy with each other: starting one costs them processor time."""
        council = self._council
        if council.is_ending:
            self._due.clear()
            for person in council.people.values():
                if person.is_alive and not person.is_member:
                    self._end_one(person.number, "was not needed any more")
        if council.is_busy and any(person.is_alive and person.is_member for person in council.people.values()):
            return
        for moment, slot in [one for one in self._due if one[0] <= now]:
            self._due.remove((moment, slot))
            self._start(slot)

    def _end_one(self, number: int, why: str) -> None:
        if number in self._lives and number not in self._reasons:
            self._reasons[number] = why
            self._ranks.kill_one(number)

    def _act(self) -> None:
        """What the council has decided."""
        council = self._council
        for news in council.news:
            if news.kind == "entering":
                self._judge()
                self._post.pass_on(news.generation, news.members, news.before)
            self._post.publish(news)
        has_formed = any(news.kind == "formed" for news in council.news)
        council.news.clear()
        for number, why in council.kills:
            self._end_one(number, why)
        council.kills.clear()
        if has_formed:
            self._tell_of_change()

    def _judge(self) -> None:
        """Whose fault the losses were, before anybody enters the next generation: all who do know of a batch to leave
        out."""
        verdict = self._blaming.conclude(self._num_before, self._council.step)
        if self._verdict is None or (verdict is not None and verdict.action == "stop"):
            self._verdict = verdict

    def _tell_of_change(self) -> None:
        """In one letter, once it is known who goes on. Keys that nobody reads any more go after that."""
        council = self._council
        if council.generation:
            words = {loss.member: self._last_words(loss.rank, loss.generation) for loss in council.losses}
            change = Change(
                tuple(council.losses),
                words,
                council.num_left,
                council.num_new,
                len(council.members),
                council.step,
                time.monotonic() - min((loss.at for loss in council.losses), default=0.0),
                len(self._due) + sum(person.is_alive and not person.is_member for person in council.people.values()),
                f"{self._budget.num_used} of {self._budget.retries} within {self._budget.seconds:g} s",
                council.least,
            )
            self._judge()
            verdict, self._verdict = self._verdict, None
            if text := letter(change, verdict):
                self._place.say(text)
            if verdict is not None and verdict.action == "stop":
                self.is_final = True
                council.stop(str(verdict))
        council.losses.clear()
        council.num_left = 0
        for generation in range(self._num_forgotten, council.generation):
            self._post.forget(generation)
        self._num_forgotten = council.generation

    def _last_words(self, rank: int, generation: int) -> str:
        try:
            return last_words(self._place.store, rank, generation_prefix(str(self.attempt), generation), self._seal)
        except RuntimeError:
            return ""

    # -- the end ----------------------------------------------------------------------------------------

    def _end(self, number: signal.Signals) -> None:
        """Ask the ranks that live to end, and kill those that do not."""
        signals = self._place.signals.received
        passed_on = signal.SIGTERM if number is signal.SIGHUP else number
        if signals:
            self._place.say(
                f"{number.name}: passed on to the ranks, which have {self._job.grace_seconds:g} s to end; once more "
                "kills them."
            )
        already = len(signals)
        if self._place.images.folder is not None:  # it is not for single ranks to leave
            (self._place.images.folder / ENDING).touch()
        self._ranks.send(passed_on)
        self._ranks.wait(self._job.grace_seconds, lambda: len(signals) > already)
        self.num_killed = self._ranks.kill()
        self._ranks.kill_children()
        self._conclude()

    def _conclude(self) -> None:
        """What became of the last ranks there were, by rank."""
        council = self._council
        self.why_lost = council.why_lost
        numbers = council.members or tuple(council.people)
        self.outcomes = []
        for rank, number in enumerate(numbers):
            outcome = replace(self._ranks.outcome(number), rank=rank)
            words = self._last_words(rank, council.generation)
            self.outcomes.append(replace(outcome, last_words=words))
        if council.state == "lost" and not self.is_final and not self._has_blamed:
            self._has_blamed = True
            verdict = self._blaming.conclude_all(self.outcomes, council.step)
            if verdict is not None:
                self._place.say(f"blame: {verdict.sort}: {verdict.evidence}")
                self.is_final = verdict.action == "stop"
        for number in council.people:
            self._place.folder.add_tracebacks(self.attempt, [self._ranks.outcome(number)])
        self.close()
