"""A script of Lightning, on its DDP strategy or on our engine. Its FSDP strategy is refused on CPUs."""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.engines import adamw
from benchmarks.integrations_rank import CLIP, Script

pl: Any = importlib.import_module("lightning.pytorch")


class Module(pl.LightningModule):  # type: ignore[misc]  # it has no types
    """The script's model, and its clock."""

    def __init__(self, script: Script) -> None:
        super().__init__()
        self.net: nn.Module = script.model()
        self._script = script

    def training_step(self, batch: Any, _: int) -> Any:
        """The loss, and its mean over ranks."""
        loss = self.net(**batch).loss
        mean = self.trainer.strategy.reduce(loss.detach().clone(), reduce_op="mean")
        self._script.losses.append(mean.item())
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        """A step is over."""
        self._script.tick()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """That of all forms."""
        return adamw(self.net)


def lightning(ours: bool, sharding: str, script: Script) -> None:
    """`Trainer.fit` without what it writes and shows."""
    num_ranks = int(os.environ["WORLD_SIZE"])
    strategy: Any = "ddp"
    if ours:
        strategy = importlib.import_module("shardwise.integrations.lightning").ShardwiseStrategy(sharding)
    trainer = pl.Trainer(
        accelerator="cpu", devices=num_ranks, strategy=strategy, max_epochs=1, gradient_clip_val=CLIP, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    rows: Any = script.rows(num_ranks)
    trainer.fit(Module(script), DataLoader(rows, batch_size=script.size.batch, shuffle=False))


FORMS = {"lightning": lightning}
