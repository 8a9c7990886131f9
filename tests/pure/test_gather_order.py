"""What ranks foresee of the units that they will need, from what they have used."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.runtime.gather_order import GatherOrder
from tests.thorough import drawn, varies


def having_seen(*calls: list[int], goes_on: bool = True) -> GatherOrder:
    order = GatherOrder(8, goes_on=goes_on)
    for call in calls:
        order.note(call, (), len(call))
    return order


def test_nothing_is_foreseen_of_what_was_never_used_or_only_now() -> None:
    assert having_seen().after(3) == []
    assert having_seen([0, 1, 2]).after(3) == []
    assert having_seen([0, 1, 2]).after(2) == []


def test_the_rest_of_the_call() -> None:
    assert having_seen([0, 1, 2]).after(0) == [1, 2]
    assert having_seen([0, 1, 2], [0, 1, 2]).after(1) == [2]


@pytest.mark.parametrize(("goes_on", "expected"), [(True, [1, 2, 0]), (False, [1, 2])])
def test_the_first_unit_of_the_next_call_too(goes_on: bool, expected: list[int]) -> None:
    order = having_seen([0, 1, 2], [0, 1, 2], goes_on=goes_on)
    order.note([0], (), None)
    assert order.after(0) == expected


def test_what_no_rank_has_used_is_not_foreseen_again() -> None:
    order = having_seen([0, 1, 2, 3])
    order.note([0, 1, 2, 3], {1, 3}, 3)
    assert order.after(0) == [2]


def test_without_calls_it_ends_where_it_began() -> None:
    order = GatherOrder(4, goes_on=True)
    order.note([0, 1, 2, 0, 1, 2, 0], (), None)
    assert order.after(0) == [1, 2, 0]


def test_a_unit_that_is_used_twice_is_followed_by_what_followed_that_use() -> None:
    """A tied embedding."""
    order = having_seen([0, 1, 0, 2], [0, 1, 0, 2])
    order.note([0], (), None)
    assert order.after(0) == [1, 0, 2, 0]
    order.note([1, 0], (), None)
    assert order.after(0) == [2, 0]


@varies
@settings(max_examples=drawn(20, 1000), deadline=None)
@given(call=st.lists(st.integers(0, 7), min_size=2, max_size=12, unique=True), place=st.data())
def test_the_same_call_again_is_foreseen_from_any_unit(call: list[int], place: st.DataObject) -> None:
    at = place.draw(st.integers(0, len(call) - 1))
    order = having_seen(call, call)
    order.note(call[: at + 1], (), None)
    assert order.after(call[at]) == [*call[at + 1 :], call[0]]
