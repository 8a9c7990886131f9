"""Decides from the ranks' reports whether a rank is at fault, or only late. Pure functions.

[Note: late or wrong] A rank may compute for as long as it likes (it saves, evaluates, compiles, sits in a debugger):
the others wait for it, and after a while one of them logs that. It is a fault, which ends the world, if

- two ranks have entered different collectives under the same number of one line (a contradiction, which never heals);
- ranks wait for each other in a circle, each for what another has not entered (a deadlock, which never heals either);
- a rank that others wait for has raised or ended, or its connection broke;
- a rank has kept others waiting for longer than the world's timeout, unless it waits for its disk, which goes on
  reading or writing; or messages that all have sent do not arrive.

[Note: alive behind a broken connection] A connection breaks when its process ends, but also when the network resets it.
If the other rank reports again after that, it lives, so the two are `disconnected` and neither is to blame.

[Note: silence] A rank's last report may be out of date: the process is stopped, or cut off from the board. A rank whose
reports have not come for `SILENT_SECONDS` is late whatever they say: even if it has begun what others wait for, it may
not have sent its part. That alone ends nothing, because the rank may wake up.

[Note: where ways part] Two ranks that took different paths through the model usually wait along different lines, in a
circle, and which ranks are in it is chance. So every report carries the last moments of its rank's pass, and if those
differ, the first difference is reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardwise.comm.watch.fault import Fault
from shardwise.comm.watch.status import Entered, Status
from shardwise.errors import ranks_in_words

Read = Callable[[int], Status | None]
SILENT_SECONDS = 2.0
"""Four times the longest time between two reports."""
_MOST_SHOWN = 8
_MARKS_SHOWN = 2
_ENDED = (
    "Its loop ended before the others': give all ranks equally many batches (drop_last=True, or a sampler that divides "
    "evenly), or let all stop together, once engine.any_rank(is_at_its_end) is true."
)
_ALONE = (
    "If it waits in a barrier of torch's, which is not seen from here, others do alone what all must call: a forward "
    "of one rank is for engine.inference(), and what one saves is given by engine.state_dict(rank_0_only=True)."
)
_SAME = "All ranks must call the same modules, backwards, steps and engine methods, in one order, with the same shapes."


@dataclass(frozen=True)
class Lateness:
    """`status` has not entered what the `waiting` ranks wait for; `None` if that rank has never reported."""

    rank: int
    status: Status | None
    waiting: tuple[Status, ...]

    def is_served(self, timeout_seconds: float, silent_seconds: float) -> bool:
        """Whether the rank's disk goes on reading or writing: however slow that is, it is no fault."""
        late = self.status
        is_moving = late is not None and late.on_disk and late.seconds <= timeout_seconds
        return is_moving and silent_seconds <= SILENT_SECONDS

    def is_elsewhere(self, silent_seconds: float) -> bool:
        """Whether the rank lives and does something that is not ours."""
        return self.status is not None and silent_seconds <= SILENT_SECONDS and not self.status.on_disk

    def text(self, silent_seconds: float) -> str:
        """One line. `silent_seconds`: how long the rank has not reported."""
        waiting = "; ".join(str(status) for status in self.waiting[:_MOST_SHOWN])
        if self.status is None:
            what = f"rank {self.rank} has not been heard of yet"
        elif silent_seconds > SILENT_SECONDS:
            what = f"rank {self.rank} has not been heard of for {silent_seconds:.0f} s (stopped, or cut off): "
            what += str(self.status)
        elif self.status.on_disk:
            what = str(self.status)
        else:
            what = f"{self.status}, for {self.status.seconds:.0f} s"
        return f"{what}. Because of it {waiting}"


@dataclass(frozen=True)
class GoneHost:
    """A host with no rank left, and all `ranks` that were there."""

    name: str
    ranks: tuple[int, ...]

    @property
    def silence(self) -> str:
        return f"nothing is heard of {self.name} ({ranks_in_words(self.ranks)}), which is down or cut off"


@dataclass(frozen=True)
class Circle:
    """Ranks that wait for each other, at one time. It is a fault if it is found again and none has moved."""

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
        divergence = _divergence([*self.statuses, *reports])
        if divergence is not None:
            return divergence.fault()
        ranks = tuple(status.rank for status in self.statuses)
        return _fault(
            "deadlock",
            ranks,
            f"{_capital(ranks_in_words(ranks))} wait for each other, each for what another one has not begun."
            f"{_report_lines(self.statuses)}\n{_SAME}",
            self.statuses[0],
        )


@dataclass(frozen=True)
class _Divergence:
    """The first moment of one pass at which ranks differ; see [Note: where ways part]."""

    statuses: tuple[Status, ...]
    there: dict[int, tuple[str, str]]
    """By rank, the moment to which it has come, and its unit."""

    def text(self) -> str:
        """Where, and what helps."""
        ranks: dict[str, list[int]] = {}
        for rank, (moment, _) in sorted(self.there.items()):
            ranks.setdefault(moment, []).append(rank)
        ways = [f"{ranks_in_words(tuple(of_them))} came to '{moment}'" for moment, of_them in ranks.items()]
        diverge = f"Their paths through the model diverge where {', '.join(ways[:-1])} and {ways[-1]}."
        return f"{diverge} If ranks are to call different modules, say paths: by_rank in the plan."

    def fault(self) -> Fault:
        moments = {rank: moment for rank, (moment, _) in self.there.items()}
        blamed = _minority(moments)
        first = next(status for status in self.statuses if status.rank in blamed)
        right = next((unit for rank, (_, unit) in sorted(self.there.items()) if rank not in blamed), "")
        doing = next((status.doing for status in self.statuses if status.rank not in blamed and status.doing), "")
        fault = _fault(
            "contradiction",
            blamed,
            f"{_contradicting(blamed, len(moments))}. {self.text()}{_report_lines(self.statuses)}\n"
            f"{_SAME} Look for what is different on {ranks_in_words(blamed)}.",
            first,
        )
        return replace(fault, unit=right or self.there[first.rank][1] or fault.unit, action=doing or fault.action)


@dataclass
class _Peers:
    """The state of the ranks that one rank waits for."""

    entered: list[Status] = field(default_factory=list)
    late: list[Status] = field(default_factory=list)
    unheard: list[int] = field(default_factory=list)

    def gone(self) -> list[Status]:
        """Ranks that will not come any more."""
        left = [status for status in self.late if status.has_left]
        return left + [status for status in self.entered if status.state == "raised"]

    def held_up(self, silent: Collection[int]) -> list[Status]:
        """Ranks that the others wait for and that wait for none: the `silent` ones first."""
        if not self.late:
            return [status for status in self.entered if status.rank in silent and not status.has_left]
        unheard = [status for status in self.late if status.rank in silent]
        return unheard + [status for status in self.late if status.awaited is None]


def judge(
    mine: Status, read: Read, silence: Callable[[int], float] = lambda _: 0.0
) -> Fault | Circle | Lateness | None:
    """Follow which rank waits for which, starting with `mine`; `None` if nothing is wrong.

    `silence` returns for how many seconds nothing new was read of a rank.
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
    divergence = _divergence(statuses)
    return _fault(
        "contradiction",
        blamed,
        f"{_contradicting(blamed, len(there))} in collective {number} over {line.partition(' ')[0]}{before}."
        f"{_report_lines(statuses, _differences(there))}\n{_line(divergence)}"
        f"{_SAME} Look for what is different on {ranks_in_words(blamed)}.",
        first,
    )


def _contradicting(blamed: tuple[int, ...], num_ranks: int) -> str:
    if len(blamed) == num_ranks:
        return f"{_capital(ranks_in_words(blamed))} contradict each other"
    return f"{_capital(ranks_in_words(blamed))} contradict{'s' if len(blamed) == 1 else ''} the others"


def _divergence(statuses: Sequence[Status]) -> _Divergence | None:
    """Where ranks in the same pass have come to different moments, as far as that is recorded."""
    by_rank = {status.rank: status for status in statuses}
    paths = {rank: status.path for rank, status in by_rank.items()}
    if len({(path.num_passes, path.part) for path in paths.values()}) != 1:
        return None
    start = max(path.start for path in paths.values())
    stop = min(path.start + len(path.moments) for path in paths.values())
    for number in range(start, stop):
        there = {rank: path.moments[number - path.start] for rank, path in paths.items()}
        if len(set(there.values())) > 1:
            return _Divergence(tuple(by_rank.values()), there)
    return None


def _line(divergence: _Divergence | None) -> str:
    return f"{divergence.text()}\n" if divergence is not None else ""


def _differences(there: dict[int, Entered]) -> dict[int, str]:
    """What each rank has entered; if that reads alike, what else distinguishes them."""
    every = list(there.values())
    return {rank: f"has {one.text} there{_distinction(one, every)}, and " for rank, one in there.items()}


def _distinction(entered: Entered, every: Sequence[Entered]) -> str:
    """What distinguishes it from the others, if it is not what all of `every` read like."""
    if len({one.text for one in every}) > 1:
        return ""
    if len({one.marks for one in every}) > 1:
        return f", after {_first_different_marks(entered, every)}"
    if len({one.what for one in every}) > 1:
        return f" ({entered.what})"
    if len({one.numel for one in every}) > 1:
        return f", of {entered.numel} elements"
    return f", {entered.num_backwards} backward(s) after the last step"


def _first_different_marks(entered: Entered, every: Iterable[Entered]) -> str:
    """The first marks of `entered` that differ from those of the others."""
    start = 0
    for marks in zip(*(one.marks for one in every), strict=False):
        if len(set(marks)) > 1:
            break
        start += 1
    return ", ".join(entered.marks[start : start + _MARKS_SHOWN]) or "nothing else"


def _minority(tags: Mapping[int, object]) -> tuple[int, ...]:
    """The ranks that differ from the majority; all, if there is no majority."""
    (common, most), *_ = Counter(tags.values()).most_common()
    has_majority = 2 * most > len(tags)
    return tuple(sorted(rank for rank, tag in tags.items() if tag != common or not has_majority))


def departure(gone: Status, others: Sequence[Status]) -> Fault:
    """The fault for a rank that has raised or ended, so that others cannot go on."""
    rest = sorted((status for status in others if status.rank != gone.rank), key=lambda status: status.rank)
    cure = f"\n{_ENDED}" if gone.state == "ended" else ""
    return _fault(gone.state, (gone.rank,), f"{_capital(str(gone))}.{_report_lines(rest)}{cure}", gone)


def disappearance(rank: int, last: Status | None, why: str, mine: Status, host: GoneHost | None = None) -> Fault:
    """The fault for a rank whose connection broke and that has not reported since; with it all ranks of its `host`, if
    given."""
    seen = f" Last status: {last}." if last is not None else " It never sent a status."
    who = f"Rank {rank} is"
    if host is not None and len(host.ranks) == 1:
        who = f"Rank {rank}, the only one on {host.name}, is"
    elif host is not None:
        who = f"{_capital(ranks_in_words(host.ranks))}, all that were on {host.name}, are"
        seen = f" Last status: {last}." if last is not None else " None ever sent a status."
    its = "their" if who.endswith("are") else "its"
    return _fault(
        "lost",
        host.ranks if host is not None else (rank,),
        f"{who} gone without a word (killed, or {its} machine is cut off).{seen} Found when {mine}: {why}",
        last or Status(rank),
    )


def disconnection(rank: int, why: str, mine: Status) -> Fault:
    """The fault for two ranks whose connection broke though both are alive: see [Note: alive behind a broken
    connection]."""
    pair = min(mine.rank, rank), max(mine.rank, rank)
    who = _capital(ranks_in_words(pair))
    text = f"{who} could not reach each other, though both are alive. {why} Found when {mine}."
    return _fault("disconnected", pair, text, mine)


def unexplained(rank: int, why: str, mine: Status, *, keeper: int | None) -> Fault:
    """The fault for a broken connection to `rank` when the store with the reports is gone, so that nobody knows whether
    that rank was lost or has ended because of another. `keeper` is a rank whose end is why the store is gone."""
    if keeper is None:
        text = f"The connection to rank {rank} broke, and no report can be read. Found when {mine}: {why}"
        return _fault("lost", (), text, mine)
    text = f"Rank {keeper} is gone without a word (killed, or its machine is cut off), and with it the store, which it "
    return _fault("lost", (keeper,), f"{text}keeps. Found when {mine}: {why}", mine)


def overdue(
    late: Lateness | None,
    mine: Status,
    silent_seconds: float,
    timeout_seconds: float,
    *,
    why: str = "",
    host: GoneHost | None = None,
) -> Fault:
    """The fault for a wait longer than the world's timeout. `why`: the reason why other ranks can no longer be asked.
    `host` is that of the late rank, if none of its ranks reports."""
    if late is not None:
        text = late.text(silent_seconds) + (f"; {host.silence}" if host is not None else "")
    elif why:
        text = f"{mine}, and the others cannot be asked: {why}"
    elif mine.awaited is not None:
        ranks = mine.awaited[2]
        text = f"{ranks_in_words(ranks)} could not reach each other, though all are alive"
        text = f"Timeout of {timeout_seconds:g} s: {text}. Found when {mine}, which all have begun."
        return _fault("disconnected", ranks, text, mine)
    else:
        text = str(mine)
    ranks = host.ranks if host is not None else (late.rank,) if late is not None else ()
    blamed = late.status if late is not None and late.status is not None else mine
    cure = f"\n{_ALONE}" if late is not None and late.is_elsewhere(silent_seconds) else ""
    return _fault("timeout", ranks, f"Timeout of {timeout_seconds:g} s: {text}.{cure}", blamed)


def _fault(kind: str, ranks: tuple[int, ...], text: str, blamed: Status) -> Fault:
    return Fault(kind, ranks, text, unit=blamed.unit, action=blamed.doing)


def _report_lines(statuses: Sequence[Status], also: dict[int, str] | None = None) -> str:
    """A line for each rank, indented and ended."""
    ordered = sorted(statuses, key=lambda status: status.rank)
    lines = []
    for status in ordered[:_MOST_SHOWN]:
        words = str(status).removeprefix(f"rank {status.rank} ")
        has = (also or {}).get(status.rank, "")
        if status.state == "waiting" and has.startswith(f"has '{status.doing}' there, and"):
            has = ""  # its status line contains that already
        lines.append(f"\n    rank {status.rank} {has}{words}.")
    if len(ordered) > _MOST_SHOWN:
        lines.append(f"\n    And {len(ordered) - _MOST_SHOWN} more.")
    return "".join(lines)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
