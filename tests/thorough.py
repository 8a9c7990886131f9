"""How much of the tests `make test` runs. `make thorough` has more, of which continuous integration runs what a change
touches, and `make exhaustive`, before a release, the rest. What races time is in none of these: `make soak` runs it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest

from tests.covering import Chooser, with_every_value

Test = TypeVar("Test", bound=Callable[..., object])

MUTATIONS = "mutations"
_SHARE = {"": "test", "1": "thorough", "all": "exhaustive", "soak": "soak", MUTATIONS: MUTATIONS}[
    os.environ.get("THOROUGH", "")
]
THOROUGH = _SHARE not in ("test", MUTATIONS)
EXHAUSTIVE = _SHARE == "exhaustive"
SOAK = _SHARE == "soak"


def drawn(usually: int, exhaustively: int) -> int:
    """How many examples a test draws; `make thorough` and `make soak` are halfway between."""
    return {"test": usually, MUTATIONS: usually, "exhaustive": exhaustively}.get(_SHARE, (usually + exhaustively) // 2)


sampled = pytest.mark.sampled
"""For modules or tests that have many cases. `make test` runs one of each test's, and one more for each 160 that it
has, so chosen that those of one file have as many different values, and pairs of values, as they can. `make thorough`
runs those that add every value of each parameter of each test, and `make exhaustive` all others."""
each_value = pytest.mark.sampled(each_value=True)
"""The same, for the few tests on which all others rest: of these `make test` runs every value of each parameter."""
_CASES_PER_ONE_MORE = 160


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
    """Which of `items` are run now, and which the other time. `make mutations` runs what `make test` does, and then
    what `make thorough` adds."""
    sampled_shares = _shares_of_sampled(items)
    shares = {item.nodeid: sampled_shares.get(item.nodeid) or _shares(item) for item in items}
    wanted = ("test", "thorough") if _SHARE == MUTATIONS else (_SHARE,)
    now = [item for item in items if not set(wanted).isdisjoint(shares[item.nodeid])]
    if _SHARE == MUTATIONS:
        now.sort(key=lambda item: "test" not in shares[item.nodeid])
    chosen = {item.nodeid for item in now}
    return now, [item for item in items if item.nodeid not in chosen]


def _shares_of_sampled(items: Sequence[pytest.Item]) -> dict[str, tuple[str, ...]]:
    """Where cases of tests that are sampled are run."""
    by_file: dict[str, dict[str, list[pytest.Item]]] = {}
    for item in items:
        if item.get_closest_marker("sampled") is not None and _shares(item) != ("soak",):
            test = item.nodeid.partition("[")[0]
            by_file.setdefault(test.partition("::")[0], {}).setdefault(test, []).append(item)
    shares = {}
    for tests in by_file.values():
        chooser = Chooser()
        for of_test in tests.values():
            cases = [_case(item) for item in of_test]
            if _has_each_value(of_test[0]):
                first = set(with_every_value(cases))
            else:
                first = set(chooser.some(cases, 1 + len(cases) // _CASES_PER_ONE_MORE))
            # Takes longer than the first choice (0.4 of 0.7 s, in each worker): only where it decides what is run.
            second = set() if _SHARE == "test" else set(with_every_value(cases, first))
            for place, item in enumerate(of_test):
                own = _shares(item)[0]
                shares[item.nodeid] = (own if place in first else "thorough" if place in second else "exhaustive",)
    return shares


def _has_each_value(item: pytest.Item) -> bool:
    mark = item.get_closest_marker("sampled")
    return mark is not None and mark.kwargs.get("each_value", False)


def _case(item: pytest.Item) -> dict[str, str]:
    """The values of a case's parameters, in words. Those without words of their own, such as functions, are told apart
    by their places."""
    found = getattr(item, "callspec", None)
    if found is None:
        return {}
    texts = {name: repr(value) for name, value in found.params.items()}
    return {name: f"#{found.indices[name]}" if " at 0x" in text else text for name, text in texts.items()}


def _shares(item: pytest.Item) -> tuple[str, ...]:
    """Where a test that is not sampled is run."""
    if item.get_closest_marker("soak") is not None:
        return ("soak",)
    if item.get_closest_marker("thorough_only") is not None:
        return ("thorough", "exhaustive")
    return ("test", "thorough", "exhaustive", "soak") if item.get_closest_marker("varies") is not None else ("test",)
