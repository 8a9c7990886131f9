"""Patterns of names mean what the standard library says, and cost no more for it."""

from __future__ import annotations

import fnmatch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.system.name_patterns import _with_closed_brackets, matches, matches_by_parts, matches_end


@given(st.text("ab[]!-*?.", max_size=8), st.text("ab[]!-.", max_size=5))
def test_a_pattern_means_what_the_standard_library_says(pattern: str, name: str) -> None:
    assert matches(name, pattern) == fnmatch.fnmatchcase(name, pattern)
    assert matches_end(name, pattern) == (
        fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"*.{pattern}")
    )


def test_brackets_that_nothing_closes_stand_for_themselves() -> None:
    """`fnmatch` would look for the end of each in all of the rest."""
    assert _with_closed_brackets("h[01].[[") == "h[01].[[][[]"
    assert _with_closed_brackets("[!]") == "[[]!]"
    assert _with_closed_brackets("[" * 5000) == "[[]" * 5000
    assert matches("[" * 5000, "[" * 5000)
    assert not matches("h.0", "[" * 5000)


@pytest.mark.parametrize(("name", "is_in"), [("h.0", True), ("h.0.mlp", False), ("h", False), ("x.0", False)])
def test_parts_are_matched_one_by_one(name: str, is_in: bool) -> None:
    assert matches_by_parts(name, "h.*") is is_in
    assert matches_by_parts(name, "h.[0-9]") is is_in
