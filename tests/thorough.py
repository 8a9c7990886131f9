"""How much of the tests `make test` runs. `make thorough` has more, of which continuous integration runs what a change
touches, and `make exhaustive`, before a release, the rest. What races time is in none of these: `make soak` runs it."""

from __future__ import annotations

import os
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest

Test = TypeVar("Test", bound=Callable[..., object])

THOROUGH = bool(os.environ.get("THOROUGH"))
_SHARE = {"": "test", "1": "thorough", "all": "exhaustive", "soak": "soak"}[os.environ.get("THOROUGH", "")]
EXHAUSTIVE = _SHARE == "exhaustive"
SOAK = _SHARE == "soak"


def drawn(usually: int, exhaustively: int) -> int:
    """How many examples a test draws; `make thorough` and `make soak` are halfway between."""
    return {"test": usually, "exhaustive": exhaustively}.get(_SHARE, (usually + exhaustively) // 2)


def one_in(number: int) -> pytest.MarkDecorator:
    """For modules or tests that have many cases: `make test` runs one in `number` of each test's, and at least one;
    `make thorough` as many others. A test's own mark goes before its module's."""
    return pytest.mark.one_in(number)


def varies(test: Test) -> Test:
    """For tests that have no cases of their own and try more in `make thorough`, by `drawn` or `THOROUGH`. hypothesis
    draws the same examples each time, except in `make soak`, which runs these tests as well."""
    return pytest.mark.varies(test)


def thorough_only(why: str) -> pytest.MarkDecorator:
    """For modules or tests that take too long for `make test`."""
    return pytest.mark.thorough_only(why)


def soak(why: str) -> pytest.MarkDecorator:
    """For modules or tests whose outcome depends on when things happen: processes that are killed at arbitrary moments,
    timeouts and delays of real clocks and links, more ranks than cores. A busy machine can make them fail, so they say
    nothing about a single change."""
    return pytest.mark.soak(why)


def divided(items: Sequence[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Which of `items` are run now, and which the other time."""
    numbers = Counter(_test_of(item) for item in items)
    counts: Counter[str] = Counter()
    now, later = [], []
    for item in items:
        shares, mark = _shares(item), item.get_closest_marker("one_in")
        if mark is not None:
            test = _test_of(item)
            place, every = counts[test], min(mark.args[0], numbers[test])
            counts[test] += 1
            if every > 1 and shares != ("soak",):
                # One of each `every` that follow each other, another one each time: or cases of two parameters, of
                # which the inner one has as many values, were all of one value.
                turn = (place + place // every + zlib.crc32(test.encode())) % every
                shares = (shares[0],) if turn == 0 else ("thorough",) if turn == 1 else ("exhaustive",)
        (now if _SHARE in shares else later).append(item)
    return now, later


def _shares(item: pytest.Item) -> tuple[str, ...]:
    """Where a test that is not divided is run."""
    if item.get_closest_marker("soak") is not None:
        return ("soak",)
    if item.get_closest_marker("thorough_only") is not None:
        return ("thorough", "exhaustive")
    return ("test", "thorough", "exhaustive", "soak") if item.get_closest_marker("varies") is not None else ("test",)


def _test_of(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]
