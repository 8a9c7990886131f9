"""What the ranks' reports come to: is a rank at fault, or only late? Pure functions of what they say.

[Note: late or wrong] A rank that computes may do so for as long as it likes (it saves, evaluates, compiles, sits in a
debugger): others wait for it, and after a while somebody says so. It is a fault, and the end of the world, if

- two ranks have entered different collectives under one number of one line (a contradiction: it never heals);
- ranks wait for each other in a circle, each for what another has not entered (a deadlock: nor does that);
- a rank that others wait for has raised or ended, or its connection broke and it is heard of no more;
- a rank has kept others waiting for longer than the world's timeout.

[Note: silence] What a rank said last may be long over: it is stopped, or cut off from the board. A rank whose reports
have not come for `SILENT_SECONDS` is late, whatever they say: even one that has begun what others wait for may not
have sent its part. That alone ends nothing, for it may be woken up.

[Note: where ways part] Two ranks that have come through the model in different ways wait along different lines as a
rule, in a circle, and which ranks are in it is chance. So every report has the last moments of its rank's pass, and
where those differ, the first difference is what is told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardwise.comm.fault import Fault
from shardwise.comm.status import Entered, Status

Read = Callable[[int], Status | None]
SILENT_SECONDS = 2.0
"""Four times as long as the longest time between two reports."""
_MOST_TOLD = 8
_MARKS_TOLD = 2
_SAME = "All ranks must call the same modules, backwards, steps and engine methods, in one order, with the same shapes."


@dataclass(frozen=True)
class Lateness:
    """`status` has not entered what `waiting` ranks wait for; `None` if it was never heard of."""

    rank: int
    status: Status | None
    waiting: tuple[Status, ...]

    def text(self, silent_seconds: float) -> str:
        """One line; `silent_seconds` is for how long the rank has not been heard of."""
        waiting = "; ".join(str(status) for status in self.waiting[:_MOST_TOLD])
        if self.status is None:
            what = f"rank {self.rank} has not been heard of yet"
        elif silent_seconds > SILENT_SECONDS:
            what = f"rank {self.rank} has not been heard of for {silent_seconds:.0f} s (stopped, or cut off): "
            what += str(self.status)
        else:
            what = f"{self.status}, for {self.status.seconds:.0f} s"
        return f"{what}. Because of it {waiting}"


@dataclass(frozen=True)
class GoneHost:
    """A host of which nothing is left, and all `ranks` that were there."""

    name: str
    ranks: tuple[int, ...]

    @property
    def silence(self) -> str:
        return f"nothing is heard of {self.name} ({_ranks(self.ranks)}), which is down or cut off"


@dataclass(frozen=True)
class Circle:
    """Ranks that wait for each other, at one time. A fault if it is found again and none has moved."""

    statuses: tuple[Status, ...]

    @property
    def places(self) -> tuple[tuple[int, object], ...]:
        return tuple(sorted((status.rank, status.awaited) for status in self.statuses))

    @property
    def beats(self) -> dict[int, int]:
        return {status.rank: status.beat for status in self.statuses}

    @property
    def concerned(self) -> tuple[int, ...]:
        """The ranks of the circle, and all that any of them waits for."""
        ranks = {rank for status in self.statuses if status.awaited is not None for rank in status.awaited[2]}
        return tuple(sorted(ranks.union(status.rank for status in self.statuses)))

    def fault(self, reports: Sequence[Status] = ()) -> Fault:
        """`reports` are those of the ranks concerned, as far as there are any."""
        parting = _parting([*self.statuses, *reports])
        if parting is not None:
            return parting.fault()
        return _fault(
            "deadlock",
            tuple(status.rank for status in self.statuses),
            f"{_capital(_ranks(tuple(status.rank for status in self.statuses)))} wait for each other, each for what "
            f"another one has not begun.{_told(self.statuses)}\n{_SAME}",
            self.statuses[0],
        )


@dataclass(frozen=True)
class _Parting:
    """The first moment of one pass at which ranks have come to different ones; see [Note: where ways part]."""

    statuses: tuple[Status, ...]
    there: dict[int, tuple[str, str]]
    """By rank, the moment to which it has come and its unit."""

    def text(self) -> str:
        """A sentence."""
        ranks: dict[str, list[int]] = {}
        for rank, (moment, _) in sorted(self.there.items()):
            ranks.setdefault(moment, []).append(rank)
        ways = [f"{_ranks(tuple(of_them))} came to '{moment}'" for moment, of_them in ranks.items()]
        return f"Their ways through the model part where {', '.join(ways[:-1])} and {ways[-1]}."

    def fault(self) -> Fault:
        moments = {rank: moment for rank, (moment, _) in self.there.items()}
        blamed = _minority(moments)
        first = next(status for status in self.statuses if status.rank in blamed)
        right = next((unit for rank, (_, unit) in sorted(self.there.items()) if rank not in blamed), "")
        doing = next((status.doing for status in self.statuses if status.rank not in blamed and status.doing), "")
        fault = _fault(
            "contradiction",
            blamed,
            f"{_who_contradicts(blamed, len(moments))}. {self.text()}{_told(self.statuses)}\n"
            f"{_SAME} Look for what is different on {_ranks(blamed)}.",
            first,
        )
        return replace(fault, unit=right or self.there[first.rank][1] or fault.unit, action=doing or fault.action)


@dataclass
class _Peers:
    """How the ranks that one rank waits for have fared."""

    entered: list[Status] = field(default_factory=list)
    late: list[Status] = field(default_factory=list)
    unheard: list[int] = field(default_factory=list)

    def gone(self) -> list[Status]:
        """Those who will not come any more."""
        left = [status for status in self.late if status.has_left]
        return left + [status for status in self.entered if status.state == "raised"]

    def held_up(self, silent: Collection[int]) -> list[Status]:
        """Those whom the others wait for, and who wait for nobody: the `silent` first."""
        if not self.late:
            return [status for status in self.entered if status.rank in silent and not status.has_left]
        unheard = [status for status in self.late if status.rank in silent]
        return unheard + [status for status in self.late if status.awaited is None]


def judge(
    mine: Status, read: Read, silence: Callable[[int], float] = lambda _: 0.0
) -> Fault | Circle | Lateness | None:
    """Follow who waits for whom, beginning with `mine`; `None` if all is on its way.

    `silence` says for how many seconds nothing new was read of a rank.
    """
    path = [mine]
    while (awaited := path[-1].awaited) is not None:
        line, number, ranks = awaited
        peers = _ask(path[-1], line, number, ranks, read)
        clash = contradiction([path[-1], *peers.entered, *peers.late], line)
        if clash is not None:
            return clash
        if gone := peers.gone():
            return departure(gone[0], [path[-1], *peers.entered, *peers.late])
        silent = {status.rank for status in (*peers.late, *peers.entered) if silence(status.rank) > SILENT_SECONDS}
        together = [status for status in peers.entered if status.awaited == awaited and status.rank not in silent]
        waiting = (path[-1], *together)
        if peers.unheard:
            return Lateness(peers.unheard[0], None, waiting)
        if held_up := peers.held_up(silent):
            return Lateness(held_up[0].rank, held_up[0], waiting)
        if not peers.late:
            return None
        following = peers.late[0]
        ranks_before = [seen.rank for seen in path]
        if following.rank in ranks_before:
            return Circle(tuple(path[ranks_before.index(following.rank) :]))
        path.append(following)
    return None


def _ask(waiting: Status, line: str, number: int, ranks: Sequence[int], read: Read) -> _Peers:
    peers = _Peers()
    for rank in ranks:
        if rank == waiting.rank:
            continue
        status = read(rank)
        if status is None:
            peers.unheard.append(rank)
        elif status.count(line) < number:
            peers.late.append(status)
        else:
            peers.entered.append(status)
    return peers


def contradiction(statuses: Sequence[Status], line: str) -> Fault | None:
    """A fault if two of the ranks have entered different collectives under one number of `line`."""
    tags: dict[int, dict[int, int]] = {}
    for status in statuses:
        for entered in status.tracks[line].recent if line in status.tracks else ():
            tags.setdefault(entered.number, {})[status.rank] = entered.tag
    clashes = [number for number in tags if len(set(tags[number].values())) > 1]
    if not clashes:
        return None
    number = min(clashes)
    there = {status.rank: status.tracks[line].find(number) for status in statuses if status.rank in tags[number]}
    blamed = _minority(tags[number])
    first = next(status for status in statuses if status.rank in blamed)
    before = f", right after {first.tracks[line].find(number - 1).text}" if number > 1 else ""
    parting = _parting(statuses)
    return _fault(
        "contradiction",
        blamed,
        f"{_who_contradicts(blamed, len(there))} in collective {number} over {line.partition(' ')[0]}{before}."
        f"{_told(statuses, _differences(there))}\n{_line(parting)}"
        f"{_SAME} Look for what is different on {_ranks(blamed)}.",
        first,
    )


def _who_contradicts(blamed: tuple[int, ...], num_ranks: int) -> str:
    if len(blamed) == num_ranks:
        return f"{_capital(_ranks(blamed))} contradict each other"
    return f"{_capital(_ranks(blamed))} contradict{'s' if len(blamed) == 1 else ''} the others"


def _parting(statuses: Sequence[Status]) -> _Parting | None:
    """Where ranks that are in one pass have come to different moments, as far as that is remembered."""
    by_rank = {status.rank: status for status in statuses}
    paths = {rank: status.path for rank, status in by_rank.items()}
    if len({(path.num_passes, path.part) for path in paths.values()}) != 1:
        return None
    start = max(path.start for path in paths.values())
    stop = min(path.start + len(path.moments) for path in paths.values())
    for number in range(start, stop):
        there = {rank: path.moments[number - path.start] for rank, path in paths.items()}
        if len(set(there.values())) > 1:
            return _Parting(tuple(by_rank.values()), there)
    return None


def _line(parting: _Parting | None) -> str:
    return f"{parting.text()}\n" if parting is not None else ""


def _differences(there: dict[int, Entered]) -> dict[int, str]:
    """What each rank has entered; where that reads alike, what else tells them apart."""
    told = dict.fromkeys(there, "there")
    if len({entered.text for entered in there.values()}) > 1:
        pass
    elif len({entered.marks for entered in there.values()}) > 1:
        told = {rank: f"there, after {_first_odd(entered, there.values())}" for rank, entered in there.items()}
    elif len({entered.numel for entered in there.values()}) > 1:
        told = {rank: f"there, of {entered.numel} elements" for rank, entered in there.items()}
    else:
        told = {
            rank: f"there, {entered.num_backwards} backward(s) after the last step" for rank, entered in there.items()
        }
    return {rank: f"has {entered.text} {told[rank]}, and " for rank, entered in there.items()}


def _first_odd(entered: Entered, every: Iterable[Entered]) -> str:
    """The first things that `entered` has marked otherwise than the others."""
    start = 0
    for marks in zip(*(one.marks for one in every), strict=False):
        if len(set(marks)) > 1:
            break
        start += 1
    return ", ".join(entered.marks[start : start + _MARKS_TOLD]) or "nothing else"


def _minority(tags: Mapping[int, object]) -> tuple[int, ...]:
    """The ranks that differ from what most have; all, if there is no such thing."""
    (common, most), *_ = Counter(tags.values()).most_common()
    has_majority = 2 * most > len(tags)
    return tuple(sorted(rank for rank, tag in tags.items() if tag != common or not has_majority))


def departure(gone: Status, others: Sequence[Status]) -> Fault:
    """A rank has raised or ended, and others cannot go on without it."""
    rest = sorted((status for status in others if status.rank != gone.rank), key=lambda status: status.rank)
    return _fault(gone.state, (gone.rank,), f"{_capital(str(gone))}.{_told(rest)}", gone)


def disappearance(rank: int, last: Status | None, why: str, mine: Status, host: GoneHost | None = None) -> Fault:
    """A rank's connection broke, and it has said nothing since; with it those of all ranks of its `host`, if given."""
    seen = f" Last it said: {last}." if last is not None else " It never said anything."
    who = f"Rank {rank} is"
    if host is not None and len(host.ranks) == 1:
        who = f"Rank {rank}, the only one on {host.name}, is"
    elif host is not None:
        who = f"{_capital(_ranks(host.ranks))}, all that were on {host.name}, are"
        seen = f" Last one said: {last}." if last is not None else " None ever said anything."
    its = "their" if who.endswith("are") else "its"
    return _fault(
        "lost",
        host.ranks if host is not None else (rank,),
        f"{who} gone without a word (killed, or {its} machine is cut off).{seen} Found when {mine}: {why}",
        last or Status(rank),
    )


def overdue(
    late: Lateness | None,
    mine: Status,
    silent_seconds: float,
    timeout_seconds: float,
    *,
    why: str = "",
    host: GoneHost | None = None,
) -> Fault:
    """The world's timeout has passed while this rank waited; `why` nobody can be asked any more. `host` is that of the
    late rank, if nothing is heard of any of its ranks."""
    if late is not None:
        told = late.text(silent_seconds) + (f"; {host.silence}" if host is not None else "")
    elif why:
        told = f"{mine}, and the others cannot be asked: {why}"
    else:
        told = f"{mine}, and all ranks have begun it: the network is stuck"
    ranks = host.ranks if host is not None else (late.rank,) if late is not None else ()
    blamed = late.status if late is not None and late.status is not None else mine
    return _fault("timeout", ranks, f"Timeout of {timeout_seconds:g} s: {told}.", blamed)


def _fault(kind: str, ranks: tuple[int, ...], text: str, blamed: Status) -> Fault:
    return Fault(kind, ranks, text, unit=blamed.unit, action=blamed.doing)


def _told(statuses: Sequence[Status], also: dict[int, str] | None = None) -> str:
    """A line for each rank, indented and ended."""
    ordered = sorted(statuses, key=lambda status: status.rank)
    lines = []
    for status in ordered[:_MOST_TOLD]:
        words = str(status).removeprefix(f"rank {status.rank} ")
        has = (also or {}).get(status.rank, "")
        if status.state == "waiting" and has.startswith(f"has '{status.doing}' there, and"):
            has = ""  # it says so itself
        lines.append(f"\n    rank {status.rank} {has}{words}.")
    if len(ordered) > _MOST_TOLD:
        lines.append(f"\n    And {len(ordered) - _MOST_TOLD} more.")
    return "".join(lines)


def _ranks(ranks: tuple[int, ...]) -> str:
    names = [str(rank) for rank in ranks[:_MOST_TOLD]]
    if len(names) == 1:
        return f"rank {names[0]}"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
