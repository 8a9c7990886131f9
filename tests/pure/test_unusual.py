"""What is called an unusual loss or norm, and what is said of it."""

from __future__ import annotations

import math
import random

import pytest

from shardwise.observe.unusual import FEWEST, Unusual, Usual, most_telling, units_in_words


@pytest.mark.parametrize("seed", range(5))
def test_noise_and_learning_are_usual(seed: int) -> None:
    draw = random.Random(seed)
    usual = Usual()
    for step in range(1000):
        value = 2 + 8 * math.exp(-step / 50) + draw.gauss(0, 0.1)
        assert not usual.judge(value), step


@pytest.mark.parametrize("spread", [0.0, 0.01, 0.3])
def test_a_spike_is_not(spread: float) -> None:
    draw = random.Random(0)
    usual = Usual()
    for _ in range(FEWEST):
        assert not usual.judge(draw.gauss(2, spread))
    assert usual.judge(7.0).startswith("is 7, and was ")
    assert not usual.judge(2.0)


def test_the_first_values_are_usual_unless_they_are_not_finite() -> None:
    usual = Usual()
    assert usual.judge(math.nan) == "is not finite"
    assert not usual.judge(1.0)
    assert not usual.judge(100.0)
    assert usual.judge(math.inf) == "is inf, and was 50.5"


def test_samples_are_read_only_for_an_unusual_loss() -> None:
    unusual = Unusual()
    asked: list[int] = []

    def samples() -> str:
        asked.append(1)
        return "it had 3 and 7 of train"

    assert not unusual.loss_in_words({"loss": 1.0, "accuracy": math.nan}, samples)
    assert not asked
    assert unusual.loss_in_words({"loss": math.nan}, samples) == "its loss is nan, and was 1; it had 3 and 7 of train"


def test_the_unit_is_where_the_backward_came_first() -> None:
    nan = math.nan
    assert "blocks.1 is the first" in units_in_words([("blocks.0", nan), ("blocks.1", math.inf), ("head", 1.0)])
    assert units_in_words([("a", nan), ("b", nan)]) == "those of all units, from the loss on"
    assert units_in_words([("a", 1.0), ("b", 8.0), ("b", 1.0)]) == "90% of its square is of unit b"
    assert units_in_words([]) == ""


def test_of_several_ranks_the_one_tells_most_that_has_some_units_which_are_not_finite() -> None:
    """The stages of a pipeline: what is not finite in one is so in all earlier ones."""
    every, some, none = (
        f"the norm of the gradients is nan: {units_in_words(squares)}"
        for squares in (
            [("a", math.nan), ("b", math.nan)],
            [("c", math.nan), ("d", 1.0)],
            [("e", 1.0), ("f", 3.0)],
        )
    )
    assert most_telling([(0, every), (1, some), (2, none)]) == [(1, some)]
    assert most_telling([(0, every), (1, every)]) == [(0, every)]
    ((rank, words),) = most_telling([(0, every), (1, every), (2, none)])
    assert rank == 1
    assert words == "the norm of the gradients is nan: those of all units that rank 1 has, while another rank has none"
    assert most_telling([(0, none), (1, none)]) == [(0, none)]
    assert most_telling([]) == []
