"""What is noted when an iteration begins."""

from __future__ import annotations

import random

import numpy as np

from shardwise.elastic.loop_state import NumbersOfNumpy

DRAWS = {
    "nothing": lambda: None,
    "a number": np.random.rand,
    "one of two normal numbers": np.random.randn,
    "the same seed again": lambda: np.random.seed(1),
}


def test_the_numbers_of_numpy_are_noted_whatever_was_drawn() -> None:
    """Of two normal numbers that are drawn together the second one is not where the generator is."""
    before, noted, order = np.random.get_state(), NumbersOfNumpy(), random.Random(0)
    try:
        for _ in range(200):
            DRAWS[order.choice(list(DRAWS))]()
            for one, now in zip(noted.now(), np.random.get_state(), strict=True):
                assert np.array_equal(one, now)
    finally:
        np.random.set_state(before)
