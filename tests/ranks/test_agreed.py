"""What each rank does by itself: if it fails on one, all raise, and none waits for another."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

import shardwise as sw
from shardwise.comm.agreed import Failure, agreed
from shardwise.errors import CheckpointError, ConfigError, ModelError
from shardwise.integrations.checkpoint_folders import staged
from shardwise.integrations.lightning_parts.checkpoints import META, written
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


@pytest.mark.parametrize("writer", ["staged", "written"])
def test_a_folder_of_another_library_that_rank_0_cannot_write_fails_on_all(writer: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "full" / META).mkdir(parents=True)  # where a file is to be

    def write(world: sw.World, folder: Path) -> None:
        if writer == "written":
            with written(folder, world, {}):
                return
        with staged(folder, sw.shard(nn.Linear(2, 2), "ddp", world=world)) as draft:
            if world.rank == 0:
                draft.mkdir()
                (draft / META).write_text("new")

    def rank(world: sw.World) -> list[str]:
        said = []
        for folder in (tmp_path / "file" / "in a file", tmp_path / "full"):
            with pytest.raises(CheckpointError) as raised:
                write(world, folder)
            said.append(str(raised.value))
        return said

    first, second = run_ranks(2, rank)
    assert first == second
    assert "in a file" in first[0]
    assert META in first[1]
