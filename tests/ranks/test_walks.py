"""The walks of docs/where-a-change-belongs.md go through the code that runs: each file of one that follows something is
called when that happens."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import nn
from twins import adamw

import shardwise as sw
from shardwise.errors import FaultError
from shardwise.testing import run_ranks

PACKAGE = Path(sw.__file__).parent
PAGE = PACKAGE.parents[1] / "docs" / "where-a-change-belongs.md"
FOLLOWED = ("a parameter", "a batch", "why rank 3 hangs")


class Model(nn.Module):
    """Its output is its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).square().mean()


def walks() -> dict[str, tuple[list[str], int]]:
    """By what is followed or added, the files in their order, and how many the page says there are."""
    section = PAGE.read_text().split("## Walks")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| \d+ \| (\d+) \|$", section, re.MULTILINE)
    return {what: (re.findall(r"`([\w/]+\.py)`", files), int(number)) for what, files, number in rows}


def train(world: sw.World) -> None:
    model = Model()
    engine = sw.shard(model, {"preset": "zero3", "units": {"class": "Linear"}}, optimizer=adamw(model), world=world)
    for batch in sw.data.Loader([torch.ones(8)] * 12, batch_rows=3, world=engine.data_ranks, steps=3):
        if engine.num_steps == 2 and world.rank == 1:
            world.barrier()
        engine.train_step(batch)


def files_called() -> set[str]:
    """Of the package, while three ranks train until one does something else."""
    found = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name != "<module>":
            found.add(frame.f_code.co_filename)

    threading.setprofile(note)
    try:
        with pytest.raises(FaultError, match="rank 1"):
            run_ranks(3, train, patience_seconds=0.1)
    finally:
        threading.setprofile(None)
    return {str(Path(name).relative_to(PACKAGE)) for name in found if name.startswith(f"{PACKAGE}/")}


def test_what_is_followed_goes_through_these_files() -> None:
    called = files_called() | {"comm/watch/status_board.py"}  # of processes: threads hand over what they say
    for what in FOLLOWED:
        files, _ = walks()[what]
        assert set(files) - called == set(), f"the walk of {what} names files that it does not come through"


def test_files_are_there_and_counted() -> None:
    assert set(FOLLOWED) < set(walks())
    for files, number in walks().values():
        assert len(files) == number
        assert [name for name in files if not (PACKAGE / name).exists()] == []
