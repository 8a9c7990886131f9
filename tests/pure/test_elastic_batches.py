"""DeepSpeed's elastic arithmetic, by figures of its published solver, and what configs that ask for it come to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import ConfigError
from shardwise.integrations.deepspeed.config import read_config
from shardwise.integrations.deepspeed.elastic_batches import Elasticity, elastic_batch, highly_composite


def test_the_defaults_and_a_small_batch_come_to_the_published_figures() -> None:
    shared = elastic_batch(Elasticity(version=0.1))
    assert shared.batch == 1680
    assert len(shared.ranks) == 32
    assert not {9, 11, 13, 16} & set(shared.ranks)
    small = elastic_batch(Elasticity(64, (4,), version=0.1))
    assert (small.batch, small.ranks) == (48, (1, 2, 3, 4, 6, 12))


@pytest.mark.parametrize(("larger", "batch"), [(True, 16), (False, 12)])
def test_of_batches_that_as_many_numbers_of_ranks_can_share_the_preferred_one_is_taken(
    larger: bool, batch: int
) -> None:
    shared = elastic_batch(Elasticity(16, (2, 4, 6), version=0.1, prefer_larger_batch=larger))
    assert (shared.batch, len(shared.ranks)) == (batch, 4)


def test_highly_composite_numbers() -> None:
    assert highly_composite(2520) == [1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520]
    assert highly_composite(10**6)[-1] == 720720

    def num_divisors(number: int) -> int:
        return sum(number % one == 0 for one in range(1, number + 1))

    counts = [num_divisors(number) for number in range(1, 500)]
    assert [n for n in range(1, 500) if counts[n - 1] > max(counts[: n - 1], default=0)] == highly_composite(499)


@given(
    sizes=st.lists(st.integers(1, 16), min_size=1, max_size=4, unique=True),
    limit=st.integers(16, 3000),
    larger=st.booleans(),
)
def test_every_number_of_ranks_that_is_named_can_share_the_batch(sizes: list[int], limit: int, larger: bool) -> None:
    wish = Elasticity(limit, tuple(sizes), version=0.1, prefer_larger_batch=larger)
    shared = elastic_batch(wish)
    assert shared.batch <= limit
    for count in shared.ranks:
        micro = shared.micro_batch(count, sizes, prefer_larger=larger)
        assert micro in sizes
        assert shared.batch % (micro * count) == 0
    rest = set(range(1, limit + 1)) - set(shared.ranks)
    assert not any(shared.batch % (count * size) == 0 for count in rest for size in sizes)


def test_whole_nodes_and_a_number_of_ranks_that_does_not_fit() -> None:
    wish = Elasticity(1000, (2, 4), num_gpus_per_node=8, model_parallel_size=2)
    shared = elastic_batch(wish)
    assert all(count % 4 == 0 for count in shared.ranks)
    assert shared.batch % 4 == 0
    odd = elastic_batch(wish, 7)
    assert (odd.batch, odd.ranks) == (994, (7,))
    with pytest.raises(
        ConfigError, match="cannot be shared by 9 data-parallel ranks; the nearest numbers that can are 8 and 10"
    ):
        elastic_batch(Elasticity(version=0.1)).micro_batch(9, (2, 4, 6))


@pytest.mark.parametrize("num_ranks", [1, 4, 8, 10])
def test_a_config_that_asks_for_it_keeps_the_batch_at_any_number_of_ranks(num_ranks: int) -> None:
    config = {"elasticity": {"enabled": True, "version": 0.1, "max_train_batch_size": 2000, "min_time": 20}}
    reading = read_config(config, world_size=num_ranks)
    assert reading.global_batch == 1680
    assert reading.micro_batch in (2, 4, 6)
    assert reading.plan.get("accumulate", 1) == reading.accumulate


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"micro_batch_sizes": ()}, "at least one size"),
        ({"micro_batch_sizes": (3000,)}, "max_train_batch_size is 2000"),
        ({"min_gpus": 9, "max_gpus": 8}, "9 to 8 ranks"),
        ({"version": 0.3}, "there are 0.1 and 0.2"),
        ({"version": 0.1, "model_parallel_size": 2, "num_gpus_per_node": 2}, "needs version 0.2"),
        ({"num_gpus_per_node": 3, "model_parallel_size": 2}, "not a multiple of model_parallel_size"),
    ],
)
def test_what_cannot_be_meant_is_refused(wish: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Elasticity(**wish)  # type: ignore[arg-type]
