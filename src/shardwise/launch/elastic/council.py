"""Who the members of the next generation are: decided by the launcher, from what members say and who has died.

Plain state that is told what happens and answers with news; no process, no store, no clock of its own.

A generation is *entered* when it was announced, *formed* when all its members have said that they are in, and *over*
when one of them died or met a fault. Then the council gathers: each member that lives says that it is ready (so its
main thread has left the old generation), and with the last of them the next one is announced. Where changes are wanted
and nobody died, all get ready by themselves, at one step boundary, and nothing has to be over for that.

[Note: where somebody comes in] After a death members stand wherever it met them, and one that is new cannot take up
there what they do. Members that say so (`lets_in`) meet alone, and are told with it that changes are wanted: so all get
ready once more at the next place where somebody can come in. Too few of them do so too, and wait there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from shardwise.comm.members import News, Said
from shardwise.launch.elastic.people import Loss, Person

State = Literal["gathering", "entering", "formed", "lost"]
STOPPED_SECONDS = 0.5
"""A member that the system has stopped and that does not answer is given up after so long."""
DYING_SECONDS = 2
"""One that has raised gets so long to say so, and to end."""
SILENT_SECONDS = 30
"""One that runs, but whose thread for news does not."""
_MOST_VAIN = 5


@dataclass
class Council:
    """`least` members are needed to go on, and no more than `most` are let in.

    `can_grow` says whether more processes are to be expected. What has to be done is found in `news` and `kills`, which
    the caller empties.
    """

    least: int
    most: int
    can_grow: Callable[[], bool]
    is_stopped: Callable[[int], bool] = lambda _: False
    people: dict[int, Person] = field(default_factory=dict)
    state: State = "gathering"
    generation: int = -1
    members: tuple[int, ...] = ()
    """Of the generation that was announced last, by rank."""
    formed: int = -1
    """The last one that all its members have entered."""
    former: tuple[int, ...] = ()
    """Its members, by rank."""
    step: int = 0
    news: list[News] = field(default_factory=list)
    kills: list[tuple[int, str]] = field(default_factory=list)
    """Whom to end, and why."""
    losses: list[Loss] = field(default_factory=list)
    """Since the last generation was formed."""
    num_left: int = 0
    """Since then, because they have asked to."""
    num_new: int = 0
    """In the generation that was announced last, of those that were not in the one before it."""
    why_lost: str = ""
    _since: float = 0.0
    _num_vain: int = 0
    _wanted: int = -1

    # -- what happens -----------------------------------------------------------------------------------

    def started(self, number: int) -> None:
        self.people[number] = Person(number)

    def died(self, number: int, text: str, now: float) -> None:
        """A process has ended, or raised; `text` says how."""
        person = self.people[number]
        was_needed = person.is_alive and person.is_member and not person.is_done
        person.is_alive, person.is_dying_since = False, None
        if was_needed:
            rank = self.members.index(number)
            if not person.is_leaving:
                known = self.former.index(number) if number in self.former else rank
                self.losses.append(Loss(number, known, text, self.formed, now))
            self._break_off((number,), f"Rank {rank} of {len(self.members)} is gone: it {text}.", now)
        self._decide(now)

    def finished(self, number: int, now: float) -> None:
        """A process has ended with 0."""
        person = self.people[number]
        if person.is_alive and person.is_member:
            person.is_done = True
        person.is_alive, person.is_dying_since = False, None
        self._decide(now)

    def hear(self, said: Said, now: float) -> None:
        person = self.people[said.member]
        if said.kind in ("done", "raised"):
            self._publish(News("bye", self.generation, (said.member,)))
        if not person.is_alive:  # held for dead, and it has come back
            if said.kind in ("here", "ready"):
                self._turn_away((said.member,), _HELD_FOR_DEAD)
            return
        person.patience_seconds = said.patience_seconds
        match said.kind:
            case "here":
                person.is_here, person.pid = True, said.pid
            case "heard":
                person.heard = said.generation, said.text
            case "opened":
                person.opened = max(person.opened, said.generation)
            case "ready":
                self._get_ready(person, said, now)
            case "leaving":
                person.is_leaving = True
            case "done":
                person.is_done = True
            case "raised":  # the others are told at once, and go on when its process has ended
                self.step = max(self.step, said.step)
                self.died(said.member, f"raised {said.text}", now)
                person.is_dying_since = now
                return
        self._decide(now)

    def tick(self, now: float) -> None:
        """Time has passed: give up whoever does not answer."""
        for person in self.people.values():
            if person.is_dying_since is not None and now - person.is_dying_since > DYING_SECONDS:
                self._give_up(person, "raised, and did not end")
        if self.state == "lost" or not self.members:
            return
        living, is_entering = self._living(), self.state == "entering"
        late = [one for one in living if (one.opened < self.generation if is_entering else one.ready is None)]
        if self.state == "formed" and len(late) == len(living):
            return  # they train
        expected = self.generation, "over" if self.state == "gathering" else "entering"
        for person in late:
            seconds = now - self._since
            is_silent = person.heard != expected or self.state == "formed"
            if is_silent and seconds > STOPPED_SECONDS and self.is_stopped(person.pid):
                self._give_up(person, "was stopped, and did not answer")
            elif person.heard != expected and seconds > SILENT_SECONDS:
                self._give_up(person, f"did not answer for {SILENT_SECONDS} s")
            elif seconds > person.patience_seconds + SILENT_SECONDS:
                self._give_up(person, f"did not come to the others for {seconds:.0f} s")

    def stop(self, why: str) -> None:
        """The job is not to go on."""
        self._end(why)

    # -- what follows -----------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether a generation is being made, so that every millisecond counts."""
        waits = self.state == "gathering" and not self._must_wait()  # for somebody who is to come
        return self.state in ("gathering", "entering") and bool(self.members) and not waits

    @property
    def is_ending(self) -> bool:
        """Whether members have come to the end of the script, so that nobody new is needed."""
        return any(person.is_done for person in self.people.values())

    @property
    def is_awaited(self) -> bool:
        """Whether somebody is to come, or waits: to be looked at more often."""
        return any(person.is_alive and not person.is_member for person in self.people.values())

    def _living(self) -> list[Person]:
        """Of the generation announced last those that are still to be counted on, by rank."""
        people = [self.people[number] for number in self.members]
        return [person for person in people if person.is_alive and not person.is_done]

    def _get_ready(self, person: Person, said: Said, now: float) -> None:
        if said.generation != self.generation or not person.is_member:
            return
        if self.state == "formed" and all(one.ready is None for one in self._living()):
            self._since = now
        person.ready = said
        self.step = max(self.step, said.step)
        if not said.text:
            return
        for number in said.blames:
            if (blamed := self.people.get(number)) is not None and blamed.is_alive and number != said.member:
                self._give_up(blamed, f"kept the others waiting for more than {said.patience_seconds:g} s")
        self._break_off((), said.text, now)

    def _give_up(self, person: Person, text: str) -> None:
        self.kills.append((person.number, text))

    def _break_off(self, lost: Iterable[int], text: str, now: float) -> None:
        """The generation is over: whoever waits in it is to wake, and to get ready for the next."""
        if self.state in ("entering", "formed"):
            gone = tuple(lost)
            self._num_vain += self.state == "entering" and not gone
            self.state, self._since = "gathering", now
            self._publish(News("over", self.generation, gone, text=text))

    def _decide(self, now: float) -> None:
        if self.state == "entering":
            self._form()
        if self.state == "formed":
            self._call_for_changes()
        if self.state in ("gathering", "formed"):
            self._announce(now)

    def _form(self) -> None:
        if all(person.opened >= self.generation for person in self._living()) and self._living():
            self.state, self._num_vain = "formed", 0
            self.formed, self.former = self.generation, self.members
            self._call_for_changes()  # before: who enters knows it
            self._publish(News("formed", self.generation))

    def _call_for_changes(self) -> None:
        room = self.most - len(self._living())
        is_too_few = len(self._living()) < self.least
        waits = any(person.waits for person in self.people.values()) or is_too_few
        comes = room > 0 and not self.is_ending and waits
        leaves = any(person.is_leaving for person in self._living())
        if (comes or leaves) and self._wanted != self.generation:
            self._wanted = self.generation
            self._publish(News("wanted", self.generation))

    def _others(self) -> list[Person]:
        """Who lives and is not of the generation announced last."""
        return [person for person in self.people.values() if person.is_alive and not person.is_member]

    def _must_wait(self) -> bool:
        """Whether somebody has to get ready, to end or to come before the next generation."""
        living = self._living()
        if any(person.ready is None for person in living) or (self.state == "formed" and not living):
            return True
        if any(person.is_dying_since is not None for person in self.people.values()):
            return True
        # the first generation is that of all who were started
        return not (self.former or self.is_ending or all(person.is_here for person in self._others()))

    def _announce(self, now: float) -> None:
        """The next generation, if everybody is ready for it."""
        if self._must_wait():
            return
        self._let_go([person for person in self._living() if person.is_leaving])
        staying = self._living()
        lets_in = all(person.ready is None or person.ready.lets_in for person in staying)
        others = [person for person in self._others() if person.waits][: max(0, self.most - len(staying))]
        coming = others if lets_in else []
        can_come = not self.is_ending and self.can_grow()
        if self.former and not staying:
            if not self.is_ending:
                self._end("Nobody is left who knows how far the training has come.")
        elif self._num_vain > _MOST_VAIN:
            self._end("The ranks could not meet again, though none of them died.")
        elif len(staying) + len(coming) >= self.least or (can_come and not lets_in):
            self._enter([person.number for person in (*staying, *coming)], now)
        elif not can_come:
            left = f"{len(staying)} rank{' is' if len(staying) == 1 else 's are'} left"
            self._end(f"{left}, and the job needs {self.least} (--elastic).")

    def _let_go(self, leaving: list[Person]) -> None:
        """Those who have asked to leave."""
        for person in leaving:
            person.is_alive = False
            self.num_left += 1
        self._turn_away([person.number for person in leaving], "This rank has asked to leave, and the others go on.")

    def _end(self, why: str) -> None:
        self.state, self.why_lost = "lost", why
        self._publish(News("end", self.generation, text=why))

    def _enter(self, members: list[int], now: float) -> None:
        for person in self.people.values():
            person.is_member, person.ready = person.number in members, None
        self.num_new = sum(number not in self.former for number in members)
        self.generation, self.members = self.generation + 1, tuple(members)
        self.state, self._since = "entering", now
        self._publish(News("entering", self.generation, self.members, self.former))

    def _turn_away(self, members: Iterable[int], text: str) -> None:
        if numbers := tuple(members):
            self._publish(News("out", self.generation, numbers, text=text))

    def _publish(self, news: News) -> None:
        self.news.append(news)


_HELD_FOR_DEAD = (
    "The others have held this rank for dead and go on without it. It can come back only as a new process, which the "
    "launcher starts by itself."
)
