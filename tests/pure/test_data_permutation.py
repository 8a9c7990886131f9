"""Shuffles that are computed: a bijection, another one for every key, spread like a shuffle, and without memory."""

from __future__ import annotations

import itertools
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.data import Permutation
from shardwise.data.randomness import keys, sample_generator
from shardwise.errors import ConfigError


@given(num_items=st.integers(1, 3000), seed=st.integers(0, 2**63), epoch=st.integers(0, 10**6))
def test_every_item_comes_once(num_items: int, seed: int, epoch: int) -> None:
    shuffled = Permutation(num_items, seed, epoch)(np.arange(num_items))
    assert np.array_equal(np.sort(shuffled), np.arange(num_items))


@given(num_items=st.integers(2, 2**62), data=st.data())
def test_items_of_a_huge_set_are_within_it_and_differ(num_items: int, data: st.DataObject) -> None:
    places = data.draw(st.lists(st.integers(0, num_items - 1), min_size=1, max_size=50, unique=True))
    found = Permutation(num_items, seed=1)(np.array(places))
    assert len(set(found.tolist())) == len(places)
    assert found.min() >= 0
    assert found.max() < num_items


def test_one_item_is_what_the_whole_has_at_its_place() -> None:
    shuffle = Permutation(1000, seed=5, epoch=2, source="text")
    whole = shuffle(np.arange(1000))
    assert [shuffle[place] for place in (0, 17, 999)] == whole[[0, 17, 999]].tolist()


@pytest.mark.parametrize("other", [{"seed": 6}, {"epoch": 1}, {"source": "b"}])
def test_another_key_is_another_shuffle(other: dict[str, int | str]) -> None:
    key = {"num_items": 1000, "seed": 5, "epoch": 0, "source": "a"}
    one, two = (Permutation(**k)(np.arange(1000)) for k in (key, {**key, **other}))  # type: ignore[arg-type]
    assert (one == two).mean() < 0.02


def test_all_orders_of_few_items_are_about_as_frequent() -> None:
    """Chi-square over the 24 orders of 4 items; 23 degrees of freedom exceed 57 once in 10,000 times."""
    num = 4800
    seen = Counter(tuple(Permutation(4, seed, 0)(np.arange(4)).tolist()) for seed in range(num))
    expected = num / 24
    assert set(seen) == set(itertools.permutations(range(4)))
    assert sum((count - expected) ** 2 / expected for count in seen.values()) < 57


def test_neighbours_are_torn_apart() -> None:
    """The difference of neighbours in a shuffle of n has mean 0, and mean absolute value n / 3."""
    num_items = 100_000
    gaps = np.diff(Permutation(num_items, seed=3)(np.arange(num_items)))
    assert abs(np.abs(gaps).mean() / num_items - 1 / 3) < 0.01
    assert (gaps == 1).sum() < 10


def test_the_shuffle_never_changes_between_versions() -> None:
    """Runs that were saved depend on these numbers."""
    assert Permutation(10, seed=0)(np.arange(10)).tolist() == [6, 0, 4, 8, 2, 3, 7, 9, 1, 5]
    assert [Permutation(10**12, seed=7, epoch=3, source="web")[place] for place in (0, 1)] == [
        341069061964,
        237375146856,
    ]
    assert sample_generator(0, "source", 0, 0).integers(2**32) == 589443554


def test_a_shuffle_of_a_trillion_takes_no_memory() -> None:
    tracemalloc.start()
    try:
        Permutation(10**12, seed=0)(np.arange(0, 10**12, 10**9))
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_keys_differ_by_purpose_and_place() -> None:
    drawn = [*keys(20, "a", 1).tolist(), *keys(20, "a", 2).tolist(), *keys(20, "a1").tolist()]
    assert len(set(drawn)) == 60
    assert keys(3, "a", 1).tolist() == drawn[:3]


@pytest.mark.parametrize("num_items", [0, -1, 2**62 + 1])
def test_a_size_without_a_shuffle_is_refused(num_items: int) -> None:
    with pytest.raises(ConfigError, match=str(num_items)):
        Permutation(num_items, seed=0)


@pytest.mark.parametrize("place", [-1, 10])
def test_a_place_outside_is_refused(place: int) -> None:
    with pytest.raises(IndexError, match="range"):
        Permutation(10, seed=0)(np.array([place]))
