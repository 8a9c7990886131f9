"""What the launcher says when ranks have gone or come, in one letter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardwise.elastic.blame import Blame
from shardwise.launch.elastic.people import Loss
from shardwise.launch.report import in_words


@dataclass(frozen=True)
class Change:
    """From one generation to the next."""

    losses: tuple[Loss, ...]
    last_words: Mapping[int, str]
    """Of those lost, by member: what each was doing when it last told the others; `""` if it never did."""
    num_left: int
    """Because they have asked to."""
    num_new: int
    size: int
    """Ranks that go on, those that have come included."""
    step: int
    seconds: float
    """From the first loss until all of them had met again."""
    num_starting: int
    """Processes that start in the place of dead ones."""
    budget: str
    least: int = 0
    """So many are needed to train on."""


def letter(change: Change, verdict: Blame | None = None) -> str:
    """Who died, of what, and where it stood; who goes on, with how many ranks, at which step."""
    lines = []
    for text, ranks in _by_text(change.losses).items():
        lines.append(f"{in_words(ranks, text)}.")
    lines += [f"Last said: {words}." for words in filter(None, change.last_words.values())]
    if verdict is not None:
        lines.append(f"Blame: {verdict}")
        if verdict.action == "stop":
            return " ".join(lines)
    if change.num_left:
        lines.append(f"{_ranks(change.num_left)} left, as asked.")
    if change.num_new:
        lines.append(f"{_ranks(change.num_new)} came.")
    if not lines:
        lines.append("the ranks have met anew.")
    after = f", {change.seconds:.2f} s later" if change.losses else ""
    s = "s" if change.size == 1 else ""
    if change.size < change.least:
        comma = "," if after else ""
        wait = f"wait{s} after step {change.step}{after}{comma} for others: the job needs {change.least} (--elastic)"
        lines.append(f"{_ranks(change.size)} {wait}.")
    else:
        lines.append(f"{_ranks(change.size)} {'goes' if s else 'go'} on after step {change.step}{after}.")
    if change.losses and change.num_starting:
        what = "A process starts" if change.num_starting == 1 else f"{change.num_starting} processes start"
        lines.append(f"{what} in the place of the dead (retries: {change.budget}).")
    elif change.losses:
        lines.append(f"Nobody takes the place of the dead (retries: {change.budget}).")
    return " ".join(lines)


def _by_text(losses: Iterable[Loss]) -> dict[str, list[int]]:
    """Ranks in order, by what became of them."""
    found: dict[str, list[int]] = {}
    for loss in sorted(losses, key=lambda loss: loss.rank):
        found.setdefault(loss.text, []).append(loss.rank)
    return found


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"
