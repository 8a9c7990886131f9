"""Carries out `--autoscale` (`launch/autoscale.py`): shows the policy what there is, and asks the place of the job for
as many slots as it wants.

Ranks come and go as without it: a slot that comes gets a process, one that goes is drained.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial

from shardwise.comm.members import MemberMessage, Pace
from shardwise.errors import ShardwiseError
from shardwise.launch.autoscale import PATIENCE, Patience, Policy, Rate, Seen, Sizes, State, decide
from shardwise.launch.elastic.job_notes import Notes
from shardwise.launch.elastic.place import Place
from shardwise.launch.elastic.rendezvous import Rendezvous
from shardwise.launch.job import Elastic
from shardwise.launch.job_report import say
from shardwise.plan.replica_groups import group_size

_LOOK_SECONDS = 1.0
_AGAIN_SECONDS = 15.0
"""After a refusal."""


class Asking:
    """Asks a place in a thread: for the last number only, and again after a refusal, which is said once."""

    def __init__(self, place: Place, say: Callable[[str], None], again_seconds: float = _AGAIN_SECONDS) -> None:
        self.place = place
        self._say, self._again_seconds = say, again_seconds
        self._changed = threading.Condition()
        self._request: tuple[int, Collection[str]] | None = None
        self._is_over = False
        self._complaint = ""
        self._thread = threading.Thread(target=self._run, name="shardwise-scaling", daemon=True)
        self._thread.start()

    def ask(self, num_slots: int, hosts: Collection[str]) -> None:
        with self._changed:
            self._request = num_slots, hosts
            self._changed.notify()

    def close(self) -> None:
        """What is being asked for now is not waited for."""
        with self._changed:
            self._is_over = True
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._request is not None or self._is_over)
                request, self._request = self._request, None
            if self._is_over or request is None:
                return
            try:
                self.place.ask(*request)
                self._complaint = ""
            except ShardwiseError as error:
                self._complain(str(error))
                with self._changed:
                    self._changed.wait_for(lambda: self._request is not None or self._is_over, self._again_seconds)
                    self._request = self._request or request

    def _complain(self, why: str) -> None:
        if why != self._complaint:
            self._say(f"the number of ranks cannot be changed: {why} This is tried again.")
        self._complaint = why


class Scaling:
    """The policy of one job at work. Used by the launcher's main loop."""

    def __init__(
        self,
        policy: Policy,
        sizes: Callable[[int], Sizes],
        asking: Asking,
        say: Callable[[str], None],
        utc: Callable[[], datetime],
        *,
        wanted: int,
        patience: Patience = PATIENCE,
    ) -> None:
        """`sizes` are the possible ones for a size of replica groups; `wanted` ranks are asked for already."""
        self.state = State(wanted)
        self._policy, self._sizes, self._asking, self._say, self._utc = policy, sizes, asking, say, utc
        self._patience = patience
        self._rate: Rate | None = None
        self._predicted: dict[int, float] = {}
        self._look_at = 0.0
        self._obstacle = ""

    def go_on(self, state: State, hosts: Collection[str]) -> None:
        """Take over from a launcher that was lost, which may not have asked yet for what it had decided."""
        self.state = state
        self._asking.ask(state.wanted, tuple(hosts))

    def hear(self, message: MemberMessage, now: float) -> None:
        """What a member has sent."""
        if message.kind == "pace":
            pace = Pace.from_text(message.text)
            self._rate = Rate(pace.size, 1 / pace.step_seconds, pace.error, now)
            self._predicted.update(pace.predicted)

    def look(self, now: float, rendezvous: Rendezvous, hosts: Collection[str], notes: Notes) -> None:
        """Ask for more or fewer slots, if the policy says so now. Call it often."""
        if now < self._look_at or rendezvous.state != "formed" or rendezvous.is_ending:
            return
        self._look_at = now + _LOOK_SECONDS
        sizes = self._sizes(group_size(rendezvous.axes))
        sizes = replace(sizes, least=max(sizes.least, rendezvous.fitting))
        if obstacle := _obstacle(rendezvous, sizes):
            self._hold(obstacle)
            return
        room = self._asking.place.room
        seen = Seen(now, self._utc(), len(rendezvous.members), self._rate, self._predicted, room)
        before, self.state = self.state, decide(self._policy, sizes, self.state, seen, self._patience)
        if self.state.wanted == before.wanted:
            return
        wanted, many = self.state.wanted, f"{self.state.wanted} rank{'' if self.state.wanted == 1 else 's'}"
        self._say(f"autoscale: {many} instead of {before.wanted}: {self.state.why}.")
        line = {"kind": "scale", "step": rendezvous.step, "time": time.time(), "ranks": seen.size, "wanted": wanted}
        notes.record({**line, "why": self.state.why})
        self._asking.ask(wanted, tuple(hosts))

    def close(self) -> None:
        self._asking.close()

    def _hold(self, obstacle: str) -> None:
        if obstacle != self._obstacle:
            self._say(f"autoscale: the number of ranks stays: {obstacle}.")
        self._obstacle = obstacle


def scaling_of(elastic: Elastic, place: Place, wanted: int, unit: int) -> Scaling:
    """What carries out the policy of `elastic` at a `place` that has been asked for `wanted` slots, and gives a
    multiple of `unit`. `close()` it."""
    assert elastic.autoscale is not None
    return Scaling(
        elastic.autoscale,
        partial(Sizes.of, elastic.least, elastic.most, unit),
        Asking(place, say),
        say,
        partial(datetime.now, UTC),
        wanted=wanted,
    )


def _obstacle(rendezvous: Rendezvous, sizes: Sizes) -> str:
    """Why the size cannot be changed at all; empty if it can."""
    if rendezvous.needs_all:
        return "a rank of this job cannot join or leave without a restart of all (docs/elastic.md)"
    if sizes.are_none:
        return (
            f"--elastic {sizes.least}:{sizes.most} has no multiple of {sizes.unit}, which are whole hosts of whole "
            f"replica groups"
        )
    return ""
