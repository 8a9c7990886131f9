"""The ways of several ranks through one model, as one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from shardwise.program import Moment, Trace, extended, in_order, merged


def trace(*units: str, backwards: Sequence[str] | None = None) -> Trace:
    """Forwards of `units`, and backwards the other way round, unless `backwards` says which."""
    forward = [f"{edge} forward {unit}" for unit in units for edge in ("before", "after")]
    ways = reversed(units) if backwards is None else backwards
    backward = [f"{edge} backward {unit}" for unit in ways for edge in ("before", "after")]
    return tuple(map(Moment.parse, [*forward, *backward]))


def contains(whole: Trace, part: Trace) -> bool:
    left = iter(whole)
    return all(moment in left for moment in part)


@pytest.mark.parametrize(
    ("ways", "wanted"),
    [
        ([trace("emb", "head"), trace("emb", "head")], trace("emb", "head")),
        ([trace("emb", "head"), trace("emb", "eye", "head")], trace("emb", "eye", "head")),
        ([trace("emb", "eye", "head"), trace("emb", "ear", "head")], None),
        ([trace("eye", "emb"), trace("emb"), trace("emb", "head")], trace("eye", "emb", "head")),
        ([trace("emb", "eye", "eye"), trace("emb", "eye")], trace("emb", "eye", "eye")),
    ],
)
def test_contains_every_way(ways: list[Trace], wanted: Trace | None) -> None:
    whole = merged(ways)
    assert all(contains(whole, way) for way in ways)
    assert wanted is None or whole == wanted


def test_ends_are_once_and_after_their_beginnings() -> None:
    """Ranks close backwards together, so each has recorded ends of what began on another."""
    one = trace("emb", "eye", backwards=["eye", "emb"])
    only_ends = (*trace("emb"), Moment.parse("after backward eye"))
    assert in_order(only_ends) == trace("emb")
    late = tuple(map(Moment.parse, ["before backward a", "before backward b", "after backward a", "after backward b"]))
    early = tuple(map(Moment.parse, ["before backward a", "after backward a", "before backward b", "after backward b"]))
    whole = merged([late, early])
    assert [whole.count(moment) for moment in late] == [1, 1, 1, 1]
    assert merged([one, in_order(only_ends)]) == one


def test_a_former_pass_adds_what_it_began() -> None:
    assert extended(trace("emb", "head"), trace("emb", "eye", "head")) == trace("emb", "eye", "head")
    longer = trace("emb", "eye", "head")
    assert extended(longer, trace("emb", "head")) is longer
