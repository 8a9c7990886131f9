"""How much of the tests `make test` runs. `make thorough` has more, of which continuous integration runs what a change
touches, and `make exhaustive`, before a release, the rest. What races time is in none of these: `make soak` runs it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

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
    now = [item for item in items if not _wanted().isdisjoint(_shares(item.get_closest_marker))]
    if _SHARE == MUTATIONS:
        now.sort(key=lambda item: "test" not in _shares(item.get_closest_marker))
    chosen = {item.nodeid for item in now}
    return now, [item for item in items if item.nodeid not in chosen]


def keep_wanted(metafunc: pytest.Metafunc, choosers: dict[Path, Chooser]) -> None:
    """Of the cases of a test, keep those that are run now, or one, as without any it would be a test without
    parameters. pytest has made no item of them yet, and would make three times as many as `make test` runs. Later it
    also numbers the values of each parameter by case.

    `choosers` are those of the files: the tests of each must be given in their order, whatever is run now.
    """
    cases = [
        case
        for case in metafunc._calls
        if _mark(metafunc, case, "sampled") is not None and _mark(metafunc, case, "soak") is None
    ]
    if cases:
        for case, share in zip(cases, _shares_of_sampled(metafunc, cases, choosers), strict=True):
            case.marks.append(pytest.mark.share(share).mark)
    wanted = [case for case in metafunc._calls if not _wanted().isdisjoint(_shares(partial(_mark, metafunc, case)))]
    metafunc._calls[:] = wanted or metafunc._calls[:1]


def _wanted() -> set[str]:
    return {"test", "thorough"} if _SHARE == MUTATIONS else {_SHARE}


def _mark(metafunc: pytest.Metafunc, case: Any, name: str) -> pytest.Mark | None:
    own = (mark for mark in case.marks if isinstance(mark, pytest.Mark) and mark.name == name)
    return next(own, None) or metafunc.definition.get_closest_marker(name)


def _shares_of_sampled(metafunc: pytest.Metafunc, cases: Sequence[Any], choosers: dict[Path, Chooser]) -> list[str]:
    """Where each case of a test that is sampled is run."""
    values = [_values(case) for case in cases]
    sampled_by = _mark(metafunc, cases[0], "sampled")
    assert sampled_by is not None
    if sampled_by.kwargs.get("each_value", False):
        first = set(with_every_value(values))
    else:
        chooser = choosers.setdefault(metafunc.definition.path, Chooser())
        first = set(chooser.some(values, 1 + len(cases) // _CASES_PER_ONE_MORE))
    # Takes longer than the first choice (0.4 of 0.7 s, in each worker): only where it decides what is run.
    second = set() if _SHARE == "test" else set(with_every_value(values, first))
    late = [_mark(metafunc, case, "thorough_only") is not None for case in cases]
    return [
        ("thorough" if late[place] else "test") if place in first else "thorough" if place in second else "exhaustive"
        for place in range(len(cases))
    ]


def _values(case: Any) -> dict[str, str]:
    """The values of a case's parameters, in words. Those without words of their own, such as functions, are told apart
    by their places."""
    texts = {name: repr(value) for name, value in case.params.items()}
    return {name: f"#{case.indices[name]}" if " at 0x" in text else text for name, text in texts.items()}


def _shares(marked: Callable[[str], pytest.Mark | None]) -> tuple[str, ...]:
    """Where a test, or a case of one, is run, given its mark of each name; the cases of one that is sampled have one
    that says it."""
    if (share := marked("share")) is not None:
        return (share.args[0],)
    if marked("soak") is not None:
        return ("soak",)
    shares = ("test", "thorough", "exhaustive", "soak") if marked("varies") is not None else ("test",)
    if marked("thorough_only") is not None:
        shares = "thorough", "exhaustive", *shares[3:]
    return shares[:1] if marked("sampled") is not None else shares
