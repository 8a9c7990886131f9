"""How much of the tests `make test` runs. `make thorough`, which continuous integration runs as well, has more, and
`make exhaustive`, before a release, the rest."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence

import pytest

THOROUGH = bool(os.environ.get("THOROUGH"))
_SHARE = {"": "test", "1": "thorough", "all": "exhaustive"}[os.environ.get("THOROUGH", "")]
_MOST_TURNS = 2
"""Of the turns that `make test` leaves out, `make thorough` has at most so many."""


def drawn(usually: int, thoroughly: int) -> int:
    """How many examples a test draws."""
    return thoroughly if THOROUGH else usually


def one_in(number: int) -> pytest.MarkDecorator:
    """For modules whose tests have many cases: `make test` runs one in `number` of each, `make thorough` up to twice
    as many others."""
    return pytest.mark.one_in(number)


def divided(items: Sequence[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Which of `items` are run now, and which the other time."""
    counts: dict[str, int] = {}
    now, later = [], []
    for item in items:
        mark = item.get_closest_marker("one_in")
        if mark is None:
            now.append(item)
            continue
        test = item.nodeid.partition("[")[0]
        place, counts[test] = counts.get(test, 0), counts.get(test, 0) + 1
        turn = (place + zlib.crc32(test.encode())) % mark.args[0] if "[" in item.nodeid else 0
        share = "test" if turn == 0 else "thorough" if turn <= _MOST_TURNS else "exhaustive"
        (now if share == _SHARE else later).append(item)
    return now, later
