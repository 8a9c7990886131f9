"""The launcher's report about ranks that were lost or have joined."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from shardwise.elastic.causes import Cause
from shardwise.launch.elastic.processes import Loss
from shardwise.launch.elastic.rendezvous import Rendezvous
from shardwise.launch.elastic.slots import Slots
from shardwise.launch.job_report import how_ended, listed


@dataclass(frozen=True)
class Change:
    """What changed from one generation to the next."""

    losses: tuple[Loss, ...]
    last_status: Mapping[int, str]
    """By lost member: the activity that it last published; `""` if it never did."""
    num_left: int
    """Ranks that left because they had asked to."""
    num_new: int
    size: int
    """Ranks of the new generation, new ones included."""
    step: int
    seconds: float
    """From the first loss until the new generation was formed."""
    num_starting: int
    """Replacements being started."""
    budget: str
    least: int = 0
    """Ranks needed to train."""
    excluded: str = ""
    """A sentence about excluded hosts."""
    num_spares: int = 0
    """Living ranks whose replica group has lost others."""
    can_come: bool = False
    """Whether processes will be started as soon as a host has free slots."""
    why_least: str = "--elastic"
    """What needs that many."""
    ended: tuple[int, ...] = ()
    """Ranks that have come to the end of their script, though the others train."""


def change_of(
    rendezvous: Rendezvous, slots: Slots, last_status: Mapping[int, str], excluded: str, now: float
) -> Change:
    """The change to the generation that was just formed."""
    living = [process for process in rendezvous.processes.values() if process.is_alive and not process.is_member]
    num_spares = sum(process.is_spare for process in living)
    return Change(
        tuple(rendezvous.losses),
        last_status,
        rendezvous.num_left,
        rendezvous.num_new,
        len(rendezvous.members),
        rendezvous.step,
        now - min((loss.at for loss in rendezvous.losses), default=0.0),
        slots.num_coming(now) + len(living) - num_spares,
        slots.budget.in_words(),
        rendezvous.needed,
        excluded,
        num_spares=num_spares,
        why_least=rendezvous.why_needed,
        ended=rendezvous.ended,
        can_come=slots.can_come(now),
    )


def change_report(change: Change, cause: Cause | None = None) -> str:
    """Which ranks were lost, how, and during which activity; how many continue, after which step."""
    sentences = list(_lost(change))
    if cause is not None:
        sentences.append(f"Cause: {cause} {change.excluded}".rstrip())
    if cause is None or cause.action != "stop":
        sentences += [*_come_and_gone(change), _going_on(change), *_spares(change), *_replacements(change)]
    return " ".join(sentences)


def _lost(change: Change) -> Iterator[str]:
    for (host, text), ranks in _by_text(change.losses).items():
        yield f"host {host} is gone: {listed(ranks)} ({text})." if host else f"{how_ended(ranks, text)}."
    yield from (f"Last status: {words}." for words in change.last_status.values() if words)
    if change.ended:
        who = how_ended(list(change.ended), "ended with exit status 0")
        yield f"{who}, as at the end of a script, while others train: so no rank joins any more."
    elif not (change.losses or change.num_left or change.num_new):
        yield "the ranks have formed a new group."


def _come_and_gone(change: Change) -> Iterator[str]:
    if change.num_left:
        yield f"{_ranks(change.num_left)} left on request."
    if change.num_new:
        yield f"{_ranks(change.num_new)} joined."


def _going_on(change: Change) -> str:
    s = "s" if change.size == 1 else ""
    after = f"after step {change.step}"
    if change.losses:
        after += f", {change.seconds:.2f} s later"
    if change.size >= change.least:
        return f"{_ranks(change.size)} continue{s} {after}."
    comma = "," if change.losses else ""
    return f"{_ranks(change.size)} wait{s} {after}{comma} for more: the job needs {change.least} ({change.why_least})."


def _spares(change: Change) -> Iterator[str]:
    if change.num_spares:
        what = "1 rank waits as a spare" if change.num_spares == 1 else f"{change.num_spares} ranks wait as spares"
        yield f"{what} until a replica group is complete."


def _replacements(change: Change) -> Iterator[str]:
    if not change.losses:
        return
    if change.num_starting:
        what = "1 replacement starts" if change.num_starting == 1 else f"{change.num_starting} replacements start"
        yield f"{what} (retries: {change.budget})."
    elif change.can_come:
        yield "Replacements start as soon as a host has free slots."
    else:
        yield f"No replacement starts (retries: {change.budget})."


def _by_text(losses: Iterable[Loss]) -> dict[tuple[str, str], list[int]]:
    """Ranks in order, by the host that was lost with them, if one was, and by how they ended."""
    found: dict[tuple[str, str], list[int]] = {}
    for loss in sorted(losses, key=lambda loss: loss.rank):
        found.setdefault((loss.host, loss.text), []).append(loss.rank)
    return found


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"
