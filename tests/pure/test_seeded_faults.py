"""Seeded faults keep up with the source: each is still there to be put in, and so are the tests that have to catch it.

Whether they do catch it is what `make mutations` shows, which takes far longer.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.mutations.__main__ import ROOT, SOURCE, FaultError, files_of, seeded, sources_in
from tests.mutations.faults import FAULTS, Fault
from tests.mutations.swapping import is_inside_functions

SOURCES = sources_in(SOURCE)


def why_not(fault: Fault) -> str:
    """Why it cannot be put into one place, inside of a function; or what tests are to catch it is not known."""
    try:
        path, text = seeded(fault, SOURCES)
        files_of(fault.tests, ROOT / "tests")
    except FaultError as error:
        return str(error)
    return "" if is_inside_functions(SOURCES[path], text) else f"{path} runs it when it is imported"


def test_each_can_be_put_into_one_place() -> None:
    assert {fault.name: why for fault in FAULTS if (why := why_not(fault))} == {}


def test_there_are_enough_with_names_of_their_own() -> None:
    assert len(FAULTS) >= 60
    assert [name for name, number in Counter(fault.name for fault in FAULTS).items() if number > 1] == []


def test_text_that_is_gone_or_there_twice_is_found() -> None:
    fault = Fault("area", "what", "old", "new", ())
    here, there = Path("here.py"), Path("there.py")
    assert seeded(fault, {here: "an old line", there: ""}) == (here, "an new line")
    for sources in ({here: ""}, {here: "old old"}, {here: "old", there: "old"}):
        with pytest.raises(FaultError, match="times"):
            seeded(fault, sources)


@pytest.mark.parametrize(
    ("text", "is_inside"),
    [
        ("def f():\n    return {}\n", True),
        ("class C:\n    @property\n    def f(self):\n        return {}\n", True),
        ("SIZE = {}\n", False),
        ("class C:\n    size: int = {}\n", False),
        ("def f(size={}):\n    return size\n", False),
    ],
)
def test_a_fault_that_cannot_be_put_into_a_running_module_is_found(text: str, is_inside: bool) -> None:
    assert is_inside_functions(text.format(1), text.format(2)) is is_inside
