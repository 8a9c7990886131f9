"""Which samples are in which batch: the same for any number of ranks, each once per epoch, shares that hold."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.data import Blend, Draw, Epochs, Sampler
from shardwise.data.sampling import BLOCK_ROWS
from shardwise.errors import ConfigError


def epochs(num_samples: int, batch_rows: int = 1, *, tail: str = "carry", name: str = "s", **more: bool) -> Epochs:
    options = {"shuffle": True, **more}
    return Epochs.of(num_samples, batch_rows, 0, tail=tail, name=name, **options)  # type: ignore[arg-type]


def joined(draws: Sequence[Draw]) -> list[list[int]]:
    return [np.concatenate([getattr(draw, part) for draw in draws]).tolist() for part in ("source", "epoch", "index")]


@given(
    size=st.integers(1, 12), rows_each=st.integers(1, 9), num_samples=st.integers(1, 200), step=st.integers(0, 10**9)
)
def test_shares_in_the_order_of_ranks_are_the_batch(size: int, rows_each: int, num_samples: int, step: int) -> None:
    sampler = Sampler(epochs(num_samples), size * rows_each)
    shares = [sampler.share(step, rank, size) for rank in range(size)]
    assert [len(share) for share in shares] == [rows_each] * size
    assert joined(shares) == joined([sampler.batch(step)])


@given(batch_rows=st.integers(1, 20), num_samples=st.integers(1, 120), num_epochs=st.integers(1, 4))
def test_carry_gives_every_sample_once_per_epoch(batch_rows: int, num_samples: int, num_epochs: int) -> None:
    sampler = Sampler(epochs(num_samples, batch_rows), batch_rows)
    num_steps = -(-num_samples * num_epochs // batch_rows)
    _, epoch, index = (np.array(part) for part in joined([sampler.batch(step) for step in range(num_steps)]))
    for number in range(num_epochs):
        assert sorted(index[epoch == number].tolist()) == list(range(num_samples))


@given(batch_rows=st.integers(1, 20), num_samples=st.integers(1, 120), num_epochs=st.integers(1, 4))
def test_drop_gives_no_sample_twice_and_leaves_out_less_than_a_batch(
    batch_rows: int, num_samples: int, num_epochs: int
) -> None:
    if batch_rows > num_samples:
        with pytest.raises(ConfigError, match=f"s has {num_samples} samples, too few for one batch of {batch_rows}"):
            epochs(num_samples, batch_rows, tail="drop")
        return
    sampler = Sampler(epochs(num_samples, batch_rows, tail="drop"), batch_rows)
    steps_each = num_samples // batch_rows
    for number in range(num_epochs):
        draws = [sampler.batch(step) for step in range(number * steps_each, (number + 1) * steps_each)]
        _, epoch, index = joined(draws)
        assert set(epoch) == {number}
        assert len(set(index)) == len(index) > num_samples - batch_rows


def test_without_shuffling_samples_come_in_their_order() -> None:
    draw = Sampler(epochs(5, shuffle=False), 4).batch(1)
    assert draw.index.tolist() == [4, 0, 1, 2]
    assert draw.epoch.tolist() == [0, 1, 1, 1]


def test_every_epoch_has_another_order() -> None:
    sampler = Sampler(epochs(100), 100)
    assert (sampler.batch(0).index == sampler.batch(1).index).mean() < 0.1


WEIGHTS = st.lists(st.floats(0.01, 100), min_size=1, max_size=6)


@given(weights=WEIGHTS, block=st.integers(0, 10**9))
def test_a_blend_keeps_its_shares_at_every_block(weights: list[float], block: int) -> None:
    blend = Blend.of([epochs(7, name=str(n)) for n in range(len(weights))], weights, seed=0)
    num_rows = block * BLOCK_ROWS
    counts = blend.counts(num_rows)
    assert sum(counts) == num_rows
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - num_rows * weight / sum(weights)) < len(weights) + 1e-6 * num_rows


@given(weights=WEIGHTS, data=st.data())
def test_rows_of_a_blend_read_each_source_in_turn(weights: list[float], data: st.DataObject) -> None:
    """Any split of the rows into steps gives each source's samples one after the other, none twice, none left out."""
    lengths = [data.draw(st.integers(1, 400)) for _ in weights]
    parts = [epochs(length, shuffle=False, name=str(n)) for n, length in enumerate(lengths)]
    blend = Blend.of(parts, weights, seed=data.draw(st.integers(0, 99)))
    batch_rows = data.draw(st.integers(1, 300))
    source, epoch, index = (np.array(p) for p in joined([Sampler(blend, batch_rows).batch(s) for s in range(6)]))
    num_blocks = len(source) // BLOCK_ROWS
    for number, length in enumerate(lengths):
        read = (epoch * length + index)[: num_blocks * BLOCK_ROWS][source[: num_blocks * BLOCK_ROWS] == number]
        assert sorted(read.tolist()) == list(range(len(read)))


def test_a_blend_mixes_within_a_block() -> None:
    blend = Blend.of([epochs(1000, name="a"), epochs(1000, name="b")], [1, 1], seed=0)
    source = blend.draw(np.arange(BLOCK_ROWS)).source
    assert np.bincount(source).tolist() == [128, 128]
    assert 64 < (np.diff(source) != 0).sum() < 192


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_that_is_no_share_is_refused_by_name(weight: float) -> None:
    with pytest.raises(ConfigError, match="weight of code"):
        Blend.of([epochs(5, name="text"), epochs(5, name="code")], [1, weight], seed=0)


@pytest.mark.parametrize(
    ("rows", "size", "message"),
    [
        (16, 3, "16 rows does not divide among 3 ranks.*give 15 or 18"),
        (2, 4, "give 4"),
        (0, 1, "batch_rows=0"),
    ],
)
def test_rows_that_do_not_divide_are_refused(rows: int, size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Sampler(epochs(50), rows).share(0, 0, size)


def test_an_empty_source_an_odd_tail_and_a_negative_step_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"s has no samples\. Give a source"):
        epochs(0)
    with pytest.raises(ConfigError, match="'repeat'"):
        epochs(5, tail="repeat")
    with pytest.raises(ConfigError, match="no step -1"):
        Sampler(epochs(5), 1).batch(-1)
