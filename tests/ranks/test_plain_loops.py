"""Every operation of a plain loop is equal to the plain loop, or refused with a clear error. The docs list which.

Each action of the matrix runs twice among plain steps. `make exhaustive` runs every preset, with shared memory and with
messages; `make thorough` a third of these for each action, `make test` one of some. Random sequences of actions run as
well. Many run in forked children, so that crashes and hangs are reported too; the few of `make test` do not, as the
imports of the children's server would take it as long as the actions.
"""

from __future__ import annotations

import faulthandler
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import forked
import loops_cells
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from loops_matrix import ACTIONS, PLACES, PRESETS, Verdict
from loops_page import page
from loops_verdicts import OPEN, ORDER, REFUSED, REFUSED_WHERE_SHARDED, sentence_of

from tests.thorough import EXHAUSTIVE, THOROUGH, drawn, thorough_only, varies

PAGE = Path(__file__).parents[2] / "docs" / "plain-loops.md"
NAMES = [name for name in ACTIONS if name not in ("step", "evaluate")]
ON_HOST = [("offload", True), ("zero3-offload", False)]


def in_children(call: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    forked.preload("loops_warm")
    return forked.call_each(call, items)


def raced(scripts: list[tuple[tuple[str, ...], str, bool]]) -> list[Verdict]:
    found = in_children(loops_cells.cell, scripts) if THOROUGH else map(loops_cells.cell, scripts)
    return [one if isinstance(one, Verdict) else Verdict("crash", str(one)) for one in found]


def says(words: str, said: str) -> bool:
    """Whether the error message contains `words`. Ranks that did different things contradict or wait for each other."""
    return bool(words) and (words in said or (words == ORDER and "Nothing more can be sent between" in said))


def wrong(verdict: Verdict, names: tuple[str, ...], preset: str) -> str:
    """How a verdict differs from the table; empty if it does not."""

    def words_of(name: str) -> str:
        return sentence_of(name, preset)

    if verdict.kind not in ("equal", "refused"):
        # An error raised by torch itself may contain the message too.
        expected = [words_of(name) for name in names]
        if verdict.kind != "raw" or not any(says(words, verdict.said) for words in expected):
            return str(verdict)
    for name, said in verdict.refused:
        words = words_of(name)
        if not words and ORDER in map(words_of, names) and says(ORDER, said):
            continue  # what one rank did alone is detected when ranks meet next
        if not words:
            return f"{name} was refused: {said}"
        if not says(words, said):
            return f"{name} was refused by other words: {said}"
    if verdict.kind == "refused" and not verdict.refused:
        words = words_of(names[0])
        return "" if says(words, verdict.said) else str(verdict)
    return ""


def places_for(name: str) -> list[tuple[str, bool]]:
    """In `make exhaustive`, every preset with and without shared memory; in `make thorough`, a third of these; else one
    of them, or of two presets that update on the host."""
    if EXHAUSTIVE:
        return PLACES
    some, turn = [*PLACES, *ON_HOST], NAMES.index(name)
    return PLACES[turn % 3 :: 3] if THOROUGH else [some[turn * 3 % len(some)]]


TRIED = NAMES if EXHAUSTIVE else NAMES[::2] if THOROUGH else NAMES[1::24]


def marked(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.xfail(reason=OPEN[name], strict=True)) if name in OPEN else name


@varies
@pytest.mark.parametrize("name", [marked(name) for name in TRIED])
def test_equal_or_refused_by_a_sentence(name: str) -> None:
    script = (name, "step", name, "step", "evaluate")
    places = places_for(name)
    verdicts = raced([(script, preset, shares) for preset, shares in places])
    bad = []
    for (preset, shares), verdict in zip(places, verdicts, strict=True):
        words = sentence_of(name, preset)
        said = wrong(verdict, (name,), preset)
        if not said and words and verdict.kind == "equal":
            said = f"went through, but the table says that it is refused: {words}"
        if said:
            bad.append(f"{preset}, {'common memory' if shares else 'messages'}: {said}")
    assert not bad, "\n".join(bad)


NUM_ORDERS = drawn(5, 60)
TOGETHER = [name for name, one in ACTIONS.items() if one.composes and name not in (*OPEN, *REFUSED_WHERE_SHARDED)]


@thorough_only("slow; smaller tests beside it cover the same code")
@varies
@pytest.mark.timeout(1200)
@given(
    names=st.lists(st.sampled_from(TOGETHER), min_size=3, max_size=8),
    preset=st.sampled_from(PRESETS),
    shares=st.booleans(),
)
@settings(max_examples=NUM_ORDERS, derandomize=True, suppress_health_check=list(HealthCheck))
@example(names=["written_before_backward", "grad_divided"], preset="zero3", shares=False)
@example(names=["buffer_registered", "averaged_model_before"], preset="zero1", shares=True)
def test_operations_in_any_order(names: list[str], preset: str, shares: bool) -> None:
    (verdict,) = raced([((*names, "step", "evaluate"), preset, shares)])
    said = wrong(verdict, tuple(names), preset)
    assert not said, f"{names} under {preset}: {said}"


def test_the_table_knows_its_actions() -> None:
    assert not (REFUSED.keys() | REFUSED_WHERE_SHARDED.keys()) - ACTIONS.keys()
    assert len(NAMES) >= 60


def test_the_page_is_the_table() -> None:
    assert PAGE.read_text() == page(), "python tests/ranks/loops_page.py writes docs/plain-loops.md anew"


@thorough_only("starts the server of the children")
def test_a_crash_of_a_child_says_where() -> None:
    (found,) = in_children(faulthandler._sigsegv, [True])
    assert "SIGSEGV" in str(found)
    assert "in _work" in str(found)
