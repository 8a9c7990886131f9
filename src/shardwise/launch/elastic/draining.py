"""Draining of hosts that are no longer to be used: their ranks leave after their step, then the host is released. If
the job needs ranks that must leave, all ranks are asked to end."""

from __future__ import annotations

import signal
from collections.abc import Callable

from shardwise.launch.elastic.context import Context
from shardwise.launch.elastic.rendezvous import Rendezvous
from shardwise.launch.elastic.workers import HostLeaves


class Draining:
    """The draining hosts of one attempt."""

    def __init__(
        self,
        context: Context,
        rendezvous: Rendezvous,
        end_one: Callable[[int, str], None],
        remember: Callable[[], None],
    ) -> None:
        """`end_one(number, why)` ends a process that is not a member, `remember` writes down what is decided."""
        self._context, self._rendezvous = context, rendezvous
        self._end_one, self._remember = end_one, remember
        self._hosts: set[str] = set()
        """Hosts to be released when their last process has ended."""
        self._waiting: list[set[int]] = []
        """Members that leave as soon as the job has enough others."""

    def begin(self, event: HostLeaves, now: float) -> None:
        """Drain a host. If too few ranks would remain, its ranks stay until others have joined; if the host ends soon,
        the whole job ends."""
        leaving = self._context.slots.leaves(event.host, now, event.num_slots)
        processes = self._rendezvous.processes
        members = {number for number in leaving if processes[number].is_member}
        for number in set(leaving) - members:
            self._end_one(number, f"was not needed: {event.host} {event.why}")
        if not event.num_slots:
            self._hosts.add(event.host)
        can_go = self._rendezvous.can_spare(members)
        what = "."
        if members and event.is_urgent and not can_go:
            self._context.signals.received.append(signal.SIGTERM)
            what = "; the job needs its ranks, so all ranks are told to end."
        elif members:
            self._waiting.append(members)
            are_many = len(members) != 1
            there = f"{len(members)} ranks there leave after their" if are_many else "1 rank there leaves after its"
            what = f": {there} step{'' if can_go else ', as soon as the job has enough others'}."
        self._context.say(f"host {event.host} {event.why}{what}")

    def go_on(self) -> None:
        """Let members leave that can be spared by now, and release hosts without processes. If members must leave that
        cannot be spared, ask all ranks to end."""
        for members in [members for members in self._waiting if self._rendezvous.can_spare(members)]:
            self._waiting.remove(members)
            self._rendezvous.send_away(members)
        if done := [host for host in self._hosts if not self._context.slots.numbers_on(host)]:
            for host in done:
                self._hosts.remove(host)
                self._context.workers.leave(host)
            self._remember()
        if self._rendezvous.requests.needs_end and not self._context.signals.received:
            needed = f"{self._rendezvous.needed} ({self._rendezvous.why_needed})"
            self._context.say(
                f"ranks were asked to end, and the job needs {needed}, so all are asked to end and can save."
            )
            self._context.signals.received.append(signal.SIGTERM)
