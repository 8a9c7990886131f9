"""The launcher's decision which members the next generation has, from their messages and from deaths.

A plain state machine: its methods are called with events, its decisions are in `announcements` and `kills`. It has no
processes, no store and no clock.

A generation is *entered* when it is announced, *formed* when all its members have reported that they are in, and *over*
when one of them dies or reports a fault. Then the rendezvous gathers: each living member reports that it is ready (its
main thread has left the old generation), and after the last of them the next generation is announced. If members are to
join or leave and none has died, all get ready by themselves at one step boundary, and the generation need not be over.

[Note: where members join] After a death, members may be anywhere in a step, where a new process cannot join. Members
that say so (without `lets_in`) form a generation alone, which announces at once that changes are wanted. So all get
ready again at the next point where processes can join. If they are too few, they do the same, and wait there.

[Note: spares] In a job with replica groups only whole groups go on (`plan/replica_groups.py`). The others of a group
that has lost a rank become spares: living processes that wait to join, like new ones, but only as many as form groups.
Where no group is whole, ranks go on as a smaller one if they can, and all get their parts anew when that can grow.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from shardwise.comm.members import TAKEN_FOR_LOST, Announcement, MemberMessage, meshes_of_text
from shardwise.launch.elastic.processes import Loss, Process, all_ended_well, by_host
from shardwise.launch.job_report import listed
from shardwise.plan.replica_groups import GoingOn, Smaller, going_on, group_size

State = Literal["gathering", "entering", "formed", "lost"]
_MAX_IN_VAIN = 5
_HAS_ASKED = "This rank has asked to leave, and the others continue."
_IS_SPARE = "This rank's replica group has lost a rank, and the others continue without it until it is whole again."
STOPPED_SECONDS = 0.5
"""After this time without an answer, a member that the system has stopped for half of it is given up, whatever it has
heard before. A shorter stop may be that of a tracer, which looks at it."""
DYING_SECONDS = 10
"""How long a member that has raised may take to end."""
SILENT_SECONDS = 30
"""How long a running member may not answer."""


class LeaveRequests:
    """Members that ask to leave: which of them may at the next step boundary, and whether the whole job must end."""

    def __init__(self) -> None:
        self.needs_end = False
        """Whether members that must leave cannot be spared, so that the whole job should be asked to end."""
        self.is_stopping = False
        """Whether the whole job was asked to end: no rank joins or leaves any more."""

    def stop_together(self) -> None:
        """The whole job was asked to end. Members that have asked to leave stay until it does, so that all can save."""
        self.is_stopping = True

    def add(self, process: Process, *, must_go: bool, may_go: bool) -> None:
        """A member asks to leave. One that `must_go`, and cannot be spared, means the end of the job: alone, it could
        not hand its state over."""
        if self.is_stopping or process.is_leaving:
            return
        process.asks_to_leave = True
        self.needs_end = self.needs_end or (must_go and process.is_member and not may_go)

    def decide(self, living: Iterable[Process], may_go: Callable[[Process], bool]) -> None:
        """Decide which `living` members leave at the next step boundary. If the job ends, none does: those that were
        allowed to may be ready for the next generation already, which is to have all."""
        for process in living:  # one by one: each may be the last that can be spared
            if self.needs_end or self.is_stopping:
                process.is_leaving = False
            elif process.asks_to_leave and not process.is_leaving:
                process.is_leaving = may_go(process)


@dataclass
class Rendezvous:
    """`least` members are needed to continue, and at most `most` are admitted. `can_grow` tells whether more processes
    are expected. Decisions are in `announcements` and `kills`, which the caller empties.
    """

    least: int
    most: int
    can_grow: Callable[[], bool]
    is_stopped: Callable[[int, int], bool] = lambda _, __: False
    """Whether the system has stopped a process, by its number and the process id that it has reported."""
    processes: dict[int, Process] = field(default_factory=dict)
    state: State = "gathering"
    generation: int = -1
    members: tuple[int, ...] = ()
    """Members of the generation announced last, by rank."""
    formed: int = -1
    """The last generation that all its members have entered."""
    former: tuple[int, ...] = ()
    """Members of that generation, by rank."""
    step: int = 0
    announcements: list[Announcement] = field(default_factory=list)
    kills: list[tuple[int, str]] = field(default_factory=list)
    """Processes to end, and why."""
    losses: list[Loss] = field(default_factory=list)
    """Members lost since the last generation was formed."""
    num_left: int = 0
    """Members that have left since then, because they had asked to."""
    ended: tuple[int, ...] = ()
    """Ranks of the generation before that had come to the end of their script, though the others train."""
    num_new: int = 0
    """Members of the generation announced last that were not in the one before it."""
    why_lost: str = ""
    needs_all: bool = False
    """Whether members have reported that if one is lost, all must restart."""
    gives_up: bool = False
    """Whether members have reported that one was lost, and that they have nothing to go on from."""
    given_up_when: str = ""
    """What they were doing, if they have said so."""
    axes: Mapping[str, int] = field(default_factory=dict)
    """The axes of the plan's mesh, if ranks train in replica groups."""
    smaller: Smaller = ()
    """Meshes on which ranks train if no replica group is whole."""
    fitting: int = 0
    """The fewest ranks that keep to the plan's budget, as members have reported; 0 if all do."""
    requests: LeaveRequests = field(default_factory=LeaveRequests)
    _since: float = 0.0
    _in_vain: tuple[int, int] = (0, 0)
    """A step, and the generations since it that were over without a lost member."""
    _wanted: int = -1
    _stopped: dict[int, float] = field(default_factory=dict)
    """Members that the others wait for and that the system has stopped, and since when that is seen."""

    # -- what happens -----------------------------------------------------------------------------------

    def started(self, number: int, host: str = "") -> None:
        self.processes[number] = Process(number, host)

    def died(self, number: int, text: str, now: float, *, has_ended: bool = True) -> None:
        """A process has ended, or raised and is about to end; `text` describes how."""
        was_needed = self._was_needed(number, text, now)
        if not has_ended:
            self.processes[number].is_dying_since = now
        if was_needed:
            rank = self.members.index(number)
            self._end_generation((number,), f"Rank {rank} of {len(self.members)} is gone: it {text}.", now)
        self._decide(now)

    def lost(self, host: str, numbers: Iterable[int], text: str, now: float) -> None:
        """A host is lost with all its processes; `text` describes how that is known."""
        gone = [number for number in numbers if self._was_needed(number, text, now, host)]
        if gone:
            ranks = listed(sorted(self.members.index(number) for number in gone))
            self._end_generation(gone, f"Host {host} is gone: {ranks} ({text}).", now)
        self._decide(now)

    def reconsider(self, now: float) -> None:
        """Decide again, since the result of `can_grow` may have changed."""
        if self.state == "gathering":
            self._decide(now)

    def _was_needed(self, number: int, text: str, now: float, host: str = "") -> bool:
        """Note the end of a process, and return whether the others have lost a member with it."""
        process = self.processes[number]
        was_needed = process.is_alive and process.is_member and not process.is_done
        process.is_alive, process.is_dying_since = False, None
        if was_needed and not process.is_leaving:
            rank = self.members.index(number)
            known = self.former.index(number) if number in self.former else rank
            self.losses.append(Loss(number, known, text, self.formed, now, host))
        return was_needed

    def finished(self, number: int, now: float) -> None:
        """A process has ended with 0."""
        process = self.processes[number]
        if process.is_alive and process.is_member:
            process.is_done = True
        process.is_alive, process.is_dying_since, process.has_ended_well = False, None, True
        self._decide(now)

    def receive(self, message: MemberMessage, now: float) -> None:
        process = self.processes[message.member]
        if message.kind in ("done", "raised"):
            self._publish(Announcement("bye", self.generation, (message.member,)))
        if not process.is_alive:  # considered dead, but it has come back
            if message.kind in ("here", "ready"):
                self._turn_away((message.member,), TAKEN_FOR_LOST)
            return
        process.patience_seconds = message.patience_seconds
        match message.kind:
            case "here":
                process.is_here, process.pid = True, message.pid
            case "heard":
                process.heard = message.generation, message.text
            case "opened":
                process.opened = max(process.opened, message.generation)
            case "ready":
                self._note_ready(process, message, now)
            case "leaving":
                if process.is_spare:
                    self._dismiss([process])
                else:
                    self.requests.add(process, must_go=bool(message.text), may_go=self._lets_go(process))
            case "needs_all":
                self.needs_all = True
            case "gives_up":
                self.gives_up, self.given_up_when = True, message.text
            case "groups":
                axes, smaller = meshes_of_text(message.text)
                if axes != self.axes:  # else it is known, and perhaps already which of them are preferred
                    self.axes, self.smaller = axes, smaller
            case "prefers":
                axes, smaller = meshes_of_text(message.text)
                if axes == self.axes:  # else it was said before another plan
                    self.smaller = smaller
            case "least":
                self.fitting = int(message.text)
            case "pace":
                self.step = max(self.step, message.step)
            case "done":
                process.is_done = True
            case "raised":  # the others are told at once, and continue when its process has ended
                self.step = max(self.step, message.step)
                self.died(message.member, f"raised {message.text}", now, has_ended=False)
                return
        self._decide(now)

    def tick(self, now: float) -> None:
        """Give up members that have not answered for too long."""
        for process in self.processes.values():
            if dies_too_long(process, now):
                self._give_up(process, "raised, and did not end")
        late = self._late()
        waits_long = now - self._since > STOPPED_SECONDS / 2
        stopped = [one.number for one in late if waits_long and self.is_stopped(one.number, one.pid)]
        self._stopped = {number: self._stopped.get(number, now) for number in stopped}
        told = self.generation, "over" if self.state == "gathering" else "entering"
        for process in late:
            if now - self._stopped.get(process.number, now) > STOPPED_SECONDS / 2:
                self._give_up(process, "was stopped, and did not answer")
            elif why := too_late(process, now - self._since, has_heard=process.heard == told):
                self._give_up(process, why)

    def _late(self) -> list[Process]:
        """Members that others wait for."""
        if self.state == "lost":
            return []
        living, is_entering = self._living(), self.state == "entering"
        late = [one for one in living if (one.opened < self.generation if is_entering else one.ready is None)]
        return [] if self.state == "formed" and len(late) == len(living) else late  # else all are training

    def taken_over(self, now: float) -> None:
        """Another launcher goes on with this object. A generation that members were entering is over: what they had
        told each other was in the store of the last launcher."""
        self._since, self._stopped = now, {}
        for process in self.processes.values():
            process.is_dying_since = None if process.is_dying_since is None else now
        if self.state == "entering":
            self._end_generation(
                (), "The launcher was killed while the ranks met, and another one has taken over.", now
            )

    def __getstate__(self) -> dict[str, object]:
        """All but what the launcher's process has to give: see `attach`."""
        return {name: value for name, value in self.__dict__.items() if name not in ("can_grow", "is_stopped")}

    def attach(self, can_grow: Callable[[], bool], is_stopped: Callable[[int, int], bool]) -> None:
        """Restore what is not written down."""
        self.can_grow, self.is_stopped = can_grow, is_stopped

    def stop(self, why: str) -> None:
        """End the job."""
        self.state, self.why_lost = "lost", why
        self._publish(Announcement("end", self.generation, text=why))

    def can_spare(self, numbers: Collection[int]) -> bool:
        """Whether enough would remain without these members: other members, and processes that wait to join."""
        staying = [one for one in self._living() if one.number not in numbers and not one.is_leaving]
        waiting = [one.number for one in self.processes.values() if one.waits]
        return len(staying) > 0 and len(self._going_on([one.number for one in staying], waiting).members) >= self.needed

    def is_new(self, number: int) -> bool:
        """Whether this process has joined others, and no step was taken with it."""
        return self.processes[number].joined_after == self.step

    def send_away(self, numbers: Iterable[int]) -> None:
        """Make these members leave at the next step boundary."""
        if staying := tuple(n for n in numbers if self.processes[n].is_alive and not self.processes[n].is_leaving):
            for number in staying:  # counted at once, so that several hosts cannot be drained of too many together
                self.processes[number].is_leaving = True
            self._publish(Announcement("leave", self.generation, staying))

    @property
    def needed(self) -> int:
        """How many ranks are needed to continue."""
        return max(self.least, self.fitting)

    @property
    def why_needed(self) -> str:
        return "--elastic" if self.least >= self.fitting else "the plan's budget"

    # -- what follows -----------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether a generation is being formed, so that every millisecond counts."""
        waits = self.state == "gathering" and not self._must_wait()  # for a process that is starting
        return self.state in ("gathering", "entering") and bool(self.members) and not waits

    @property
    def is_ending(self) -> bool:
        """Whether any member's script has ended, so that no new process is needed."""
        return any(process.is_done for process in self.processes.values())

    @property
    def is_awaited(self) -> bool:
        """Whether a process is starting or waits to join, so that messages are polled more often."""
        return bool(self._others())

    def _living(self) -> list[Process]:
        """Members of the generation announced last that are alive and not done, by rank."""
        members = [self.processes[number] for number in self.members]
        return [process for process in members if process.is_alive and not process.is_done]

    def _lets_go(self, process: Process) -> bool:
        """Whether this member may leave at the next step boundary."""
        return self.is_ending or self.can_spare((process.number,))

    def _note_ready(self, process: Process, message: MemberMessage, now: float) -> None:
        if message.generation != self.generation or not process.is_member:
            return
        if self.state == "formed" and all(one.ready is None for one in self._living()):
            self._since = now
        process.ready = message
        self.step = max(self.step, message.step)
        if not message.text:
            return
        for number in message.at_fault:
            if (blamed := self.processes.get(number)) is not None and blamed.is_alive and number != message.member:
                self._give_up(blamed, f"kept the others waiting for more than {message.patience_seconds:g} s")
        self._end_generation((), message.text, now)

    def _give_up(self, process: Process, text: str) -> None:
        self.kills.append((process.number, text))

    def _end_generation(self, lost: Iterable[int], text: str, now: float) -> None:
        """Declare the generation over: members waiting in it wake up and get ready for the next."""
        if self.state in ("entering", "formed"):
            gone, (step, num) = tuple(lost), self._in_vain
            self._in_vain = self.step, 0 if gone or self.step > step else num + 1
            self.state, self._since = "gathering", now
            self._publish(Announcement("over", self.generation, gone, text=text))

    def _decide(self, now: float) -> None:
        self.requests.decide(self._living(), self._lets_go)
        if self.state == "entering":
            self._form()
        if self.state == "formed":
            self._call_for_changes()
        if self.state in ("gathering", "formed"):
            self._announce(now)

    def _form(self) -> None:
        if all(process.opened >= self.generation for process in self._living()) and self._living():
            self.state = "formed"
            self.formed, self.former = self.generation, self.members
            self.gives_up = False  # others do go on
            self._call_for_changes()  # before "formed", so that members know it when they enter
            self._publish(Announcement("formed", self.generation))

    def _call_for_changes(self) -> None:
        living = self._living()
        coming = [process.number for process in self._coming(len(living))]
        grows = len(self._going_on([process.number for process in living], coming).members) > len(living)
        comes = not self.is_ending and (grows or len(living) < self.needed)
        leaves = any(process.is_leaving for process in living)
        if (comes or leaves) and not self.requests.is_stopping and self._wanted != self.generation:
            self._wanted = self.generation
            self._publish(Announcement("wanted", self.generation))

    def _others(self) -> list[Process]:
        """Living processes that are not in the generation announced last."""
        return [process for process in self.processes.values() if process.is_alive and not process.is_member]

    def _must_wait(self) -> bool:
        """Whether the next generation must wait for a process to get ready, to end or to connect."""
        living = self._living()
        if any(process.ready is None for process in living) or (self.state == "formed" and not living):
            return True
        if any(process.is_dying_since is not None for process in self.processes.values()):
            return True
        # the first generation has all processes that were started
        return not (self.former or self.is_ending or all(process.is_here for process in self._others()))

    def _announce(self, now: float) -> None:
        """Announce the next generation, if all are ready for it."""
        if self._must_wait():
            return
        self._dismiss([process for process in self._living() if process.is_leaving])
        staying = self._living()
        lets_in = all(process.ready is None or process.ready.lets_in for process in staying)
        coming = self._coming(len(staying)) if lets_in else []
        found = self._going_on([one.number for one in staying], [one.number for one in coming])
        can_come = not self.is_ending and self.can_grow()
        least = 1 if self.requests.is_stopping else self.needed
        if self.former and not staying:
            if not self.is_ending:
                self.stop("No rank is left that has the state of the training.")
        elif self._in_vain[1] > _MAX_IN_VAIN:
            self.stop(f"{self._in_vain[1]} times in a row the ranks took no step, though none of them died.")
        elif self.former and not found.members:
            self.needs_all = True
            self.stop("No replica group is whole: the remaining ranks have parts of the state only.")
        elif len(found.members) >= least or (can_come and not lets_in):
            self._enter(found, now)
        elif not can_come:
            self._stop_for_lack(len(found.members))

    def _going_on(self, staying: Sequence[int], waiting: Sequence[int]) -> GoingOn:
        """Who forms the next generation of those that stay and those that wait to join."""
        if group_size(self.axes) == 1 or not self.former:
            return GoingOn(tuple(by_host([*staying, *waiting], self.processes)), ())
        seats = {number: self.former.index(number) for number in staying}
        return going_on(self.axes, len(self.former), seats, waiting, self.smaller)

    def _stop_for_lack(self, num_staying: int) -> None:
        """End the job, which no process can join any more, unless it has ended well before its first generation."""
        if self.generation >= 0 or not all_ended_well(self.processes):
            left = f"{num_staying} rank{' is' if num_staying == 1 else 's are'} left"
            self.stop(f"{left}, and the job needs {self.needed} ({self.why_needed}).")

    def _coming(self, num_staying: int) -> list[Process]:
        """Those that may join the next generation."""
        if self.requests.is_stopping and self.former:
            return []
        return [process for process in self._others() if process.waits][: max(0, self.most - num_staying)]

    def _dismiss(self, leaving: list[Process]) -> None:
        """Dismiss members that have asked to leave."""
        for process in leaving:
            process.is_alive = False
        self.num_left += len(leaving)
        self._turn_away([process.number for process in leaving], _HAS_ASKED)

    def _enter(self, found: GoingOn, now: float) -> None:
        members = found.members
        spares = tuple(number for number in found.spares if self.processes[number].is_member)
        if spares:
            self._publish(Announcement("spare", self.generation, spares, text=_IS_SPARE))
        for process in self.processes.values():
            is_spare = process.number in spares or (process.is_spare and process.number not in members)
            if self.former and process.number in members and not process.is_member:
                process.joined_after = self.step
            process.is_member, process.is_spare, process.ready = process.number in members, is_spare, None
        self.num_new = sum(number not in self.former for number in members)
        self.ended = tuple(rank for rank, number in enumerate(self.former) if self.processes[number].is_done)
        self.generation, self.members = self.generation + 1, members
        self.state, self._since = "entering", now
        hosts = tuple(self.processes[number].host for number in members)
        self._publish(
            Announcement("entering", self.generation, self.members, self.former, hosts=hosts if any(hosts) else ())
        )

    def _turn_away(self, members: Iterable[int], text: str) -> None:
        if numbers := tuple(members):
            self._publish(Announcement("out", self.generation, numbers, text=text))

    def _publish(self, announcement: Announcement) -> None:
        self.announcements.append(announcement)


def dies_too_long(process: Process, now: float) -> bool:
    """Whether it has raised and should have ended by now."""
    return process.is_dying_since is not None and now - process.is_dying_since > DYING_SECONDS


def too_late(process: Process, seconds: float, *, has_heard: bool) -> str:
    """Why it is given up, if the others have waited for it for `seconds`: words that continue "it"; empty if it is not.

    `has_heard` tells whether it has read the announcement that the others follow.
    """
    if not has_heard and seconds > SILENT_SECONDS:
        return f"did not answer for {SILENT_SECONDS} s"
    if seconds > process.patience_seconds + SILENT_SECONDS:
        return f"did not rejoin the others for {seconds:.0f} s"
    return ""
