"""What is called an unusual loss or norm, and what is said of it."""

from __future__ import annotations

import math
import random

import pytest

from shardwise.observe.unusual import FEWEST, UnitSquare, Unusual, Usual, units_in_words, worst_of


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


def test_the_worst_micro_batch_is_the_first_that_is_not_finite_or_has_the_largest_loss() -> None:
    assert worst_of([1.0, 5.0, 2.0]) == 1
    assert worst_of([7.0, math.inf, 1.0, math.nan]) == 1


def ranks(*squares: list[tuple[int, str, float]]) -> dict[int, list[UnitSquare]]:
    return {rank: [UnitSquare(*one) for one in own] for rank, own in enumerate(squares)}


def test_the_unit_is_where_the_backward_came_first() -> None:
    nan = math.nan
    some = ranks([(0, "blocks.0", nan), (0, "blocks.1", math.inf), (0, "head", 1.0)])
    assert units_in_words(some) == (0, "those of 2 of 3 units, of which blocks.1 is the first in the backward")
    assert units_in_words(ranks([(0, "a", nan), (0, "b", nan)])) == (0, "those of all units, from the loss on")
    of_b = units_in_words(ranks([(0, "a", 1.0), (0, "b", 8.0), (0, "b", 1.0)]))
    assert of_b == (0, "90% of its square is of unit b")
    assert units_in_words(ranks([])) == (0, "")


def test_shards_of_all_ranks_count_together() -> None:
    """Of rank 0's shards `a` has most, of all ranks' `b`; and what is not finite may be in one rank's shard alone."""
    shards = ranks([(0, "a", 3.0), (0, "b", 1.0)], [(0, "a", 0.0), (0, "b", 4.0)])
    assert units_in_words(shards) == (1, "62% of its square is of unit b")
    shards = ranks([(0, "a", 3.0), (0, "b", 1.0)], [(0, "a", 1.0), (0, "b", math.inf)])
    assert units_in_words(shards) == (1, "those of 1 of 2 units, of which b is the first in the backward")


def test_what_comes_up_in_a_stage_is_not_finite_in_all_before_it() -> None:
    """Interleaved stages: rank 0 has 0 and 2, rank 1 has 1 and 3."""
    nan = math.nan
    began_in_2 = ranks([(0, "a", nan), (2, "c", nan)], [(1, "b", nan), (3, "d", 1.0)])
    first = "those of 3 of 4 units, of which c (stage 2) is the first in the backward"
    assert units_in_words(began_in_2) == (0, first)
    from_the_loss = ranks([(0, "a", nan)], [(1, "b", nan)])
    assert units_in_words(from_the_loss) == (0, "those of all units, from the loss on")
    tied = ranks([(0, "embed", nan), (0, "a", nan)], [(1, "b", 1.0), (1, "embed", nan)])
    first = "those of 2 of 3 units, of which a (stage 0) is the first in the backward"
    assert units_in_words(tied) == (0, first), "the embedding's comes from the first stage"


def test_the_parameters_of_no_unit_come_before_all_units() -> None:
    """Those of an embedding, which the backward comes to last, and of the head are together."""
    squares = ranks([(0, "h.0", math.nan), (0, "h.1", math.nan), (0, "h.2", 1.0), (0, "rest", math.nan)])
    assert units_in_words(squares)[1].endswith("h.1 is the first in the backward")
    squares = ranks([(0, "h.0", 1.0), (0, "rest", math.nan)])
    assert units_in_words(squares)[1].endswith("those of 1 of 2 units, of which rest is the first in the backward")
