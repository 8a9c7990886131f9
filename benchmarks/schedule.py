"""Who runs when. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

Turn = tuple[int, str]
"""A round, and who runs in it."""


def interleaved(names: Sequence[str], num_rounds: int) -> Iterator[Turn]:
    """All of `names` once a round, A B C B C A C A B: neighbours in time, and nobody always first or last."""
    for number in range(num_rounds):
        start = number % len(names) if names else 0
        for name in (*names[start:], *names[:start]):
            yield number, name
