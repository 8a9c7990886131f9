"""Checkpoints of an elastic job that are copied at the same time as its images."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.checkpoint.snapshot import Snapshot
from shardwise.comm import World
from shardwise.elastic.survival import Survival
from tests.patience import PATIENCE
from tests.ranks.threads_as_members import run_members


@pytest.mark.parametrize("preset", ["zero1", "zero3"])
def test_a_shadow_that_follows_while_a_checkpoint_is_copied_is_no_change_by_hand(
    preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The images are updated during the copy, as with any model whose copy takes long. The save must accept this."""
    is_taken, has_followed = threading.Event(), threading.Event()
    copy, take, copy_rest = Survival._copy, Snapshot.take, Snapshot._copy_rest

    def once_taken(self: Survival, step: int) -> None:
        if step == 2:
            assert is_taken.wait(PATIENCE)
        copy(self, step)
        if step == 2:
            has_followed.set()

    def and_tell(self: Snapshot) -> None:
        take(self)
        is_taken.set()

    def once_followed(self: Snapshot) -> None:
        assert has_followed.wait(PATIENCE)
        copy_rest(self)

    monkeypatch.setattr(Survival, "_copy", once_taken)
    monkeypatch.setattr(Snapshot, "take", and_tell)
    monkeypatch.setattr(Snapshot, "_copy_rest", once_followed)
    images, saved = tmp_path / "images", tmp_path / "saved"
    images.mkdir()
    torch.manual_seed(0)
    model = nn.Linear(8, 8)

    def work(world: World, member: int) -> int:
        optimizer = torch.optim.AdamW(model.parameters())
        with sw.shard(model, preset, optimizer=optimizer, world=world) as engine:
            while engine.num_steps < 2:
                engine.backward(engine(torch.ones(2, 8)).sum())
                engine.step()
            engine.save(saved, wait=False)
            engine.wait_for_save()
            return engine.num_steps

    assert run_members(1, work, images) == {0: 2}
    assert (saved / "step-00000002").is_dir()
