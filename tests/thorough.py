"""How much of the tests `make test` runs; `make thorough`, which continuous integration runs as well, has the rest."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence

import pytest

THOROUGH = bool(os.environ.get("THOROUGH"))


def drawn(usually: int, thoroughly: int) -> int:
    """How many examples a test draws."""
    return thoroughly if THOROUGH else usually


def one_in(number: int) -> pytest.MarkDecorator:
    """For modules whose tests have many cases: `make test` runs one in `number` of each, `make thorough` the others."""
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
        is_usual = (place + zlib.crc32(test.encode())) % mark.args[0] == 0 or "[" not in item.nodeid
        (later if is_usual == THOROUGH else now).append(item)
    return now, later
