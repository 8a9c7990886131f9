"""Faults of an elastic job in which nobody died: living members whose messages did not reach each other."""

from __future__ import annotations

from shardwise.comm.members import MemberMessage
from shardwise.elastic.causes import Disconnection
from shardwise.launch.elastic.ended_ranks import PendingCause
from shardwise.launch.elastic.rendezvous import Rendezvous


class Disconnections:
    """Has such faults of one attempt classified, and sends the ranks of an excluded host away."""

    def __init__(self, rendezvous: Rendezvous, pending_cause: PendingCause) -> None:
        self._rendezvous, self._pending_cause = rendezvous, pending_cause

    def note(self, message: MemberMessage, now: float) -> None:
        """Look at a message before the rendezvous does: the first report of a fault ends the generation, and those of
        other members, about the same fault, do not count."""
        rendezvous = self._rendezvous
        is_first = rendezvous.state == "formed" and message.generation == rendezvous.generation
        members = tuple(number for number in rendezvous.members if number in message.cut_off)
        if not members or not is_first or message.member not in rendezvous.members:
            return
        cut = Disconnection(
            members,
            ranks=tuple(map(rendezvous.members.index, members)),
            hosts=tuple(rendezvous.processes[number].host for number in members),
            why=message.text.partition("\n")[0],
            step=max(rendezvous.step, message.step),
        )
        cause = self._pending_cause.disconnected(cut, self._can_spare, now)
        if cause.action == "exclude":
            rendezvous.send_away(number for host in cause.hosts for number in self._members_on(host))

    def _can_spare(self, host: str) -> bool:
        return self._rendezvous.can_spare(self._members_on(host))

    def _members_on(self, host: str) -> list[int]:
        processes = self._rendezvous.processes
        return [number for number in self._rendezvous.members if processes[number].host == host]
