"""What each rank does by itself: if it fails on one, all raise, and none waits for another."""

from __future__ import annotations

import pytest

import shardwise as sw
from shardwise.comm.agreed import Failure, agreed
from shardwise.errors import CheckpointError, ConfigError, ModelError
from shardwise.testing import run_ranks


def test_all_know_what_each_has_told() -> None:
    def rank(world: sw.World) -> list[int]:
        with agreed(world, "numbers", CheckpointError) as told:
            told.mine = 10 * world.rank
        return told.by_rank

    assert run_ranks(3, rank) == [[0, 10, 20]] * 3


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ConfigError("no such tp"), ConfigError, "rank 1: no such tp"),
        (CheckpointError("no such \ud800"), ModelError, "rank 1: no such \ud800"),
        (RuntimeError("no memory"), ModelError, r"rank 1: RuntimeError: no memory\."),
        (OSError(28, "No space"), ModelError, "rank 1: .*No space.* Free some space there"),
    ],
)
def test_what_fails_on_one_rank_fails_on_all_as_what_the_first_has_met(
    error: Exception, kind: type[Exception], text: str
) -> None:
    def work(world: sw.World) -> None:
        def worded(failure: Failure) -> str:
            return f"rank {failure.rank}: {failure.text}"

        with agreed(world, "work", ConfigError, ModelError, worded=worded):
            if world.rank == 1:
                raise error
            if world.rank == 2:
                raise KeyError("later")

    def rank(world: sw.World) -> BaseException | None:
        with pytest.raises(kind, match=text) as raised:
            work(world)
        assert type(raised.value) is kind
        return raised.value.__cause__

    causes = run_ranks(3, rank)
    assert causes[:2] == [None, error]
    assert isinstance(causes[2], KeyError)
