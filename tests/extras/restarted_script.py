"""A script as people have it, that goes on from its last checkpoint; one of its ranks is killed once.

`restarted_script.py FOLDER LIBRARY DIES_AT`: LIBRARY is transformers or lightning, DIES_AT a step, or -1.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch

NUM_STEPS, SAVE_EVERY = 6, 2


def befall(step: int, dies_at: int) -> None:
    """Kill rank 1 of the first attempt."""
    if (step, os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == (dies_at, "1", "0"):
        os.kill(os.getpid(), signal.SIGKILL)


def by_transformers(folder: Path, dies_at: int) -> tuple[list[float], int]:
    from trainer_jobs import gpt2, rows
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    class Dies(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            befall(state.global_step, dies_at)

    class Starts(TrainerCallback):
        first = -1

        def on_train_begin(self, args, state, control, **_):
            self.first = state.global_step

    saving = {"save_strategy": "steps", "save_steps": SAVE_EVERY, "logging_steps": 1, "report_to": "none"}
    arguments = TrainingArguments(
        str(folder), max_steps=NUM_STEPS, per_device_train_batch_size=2, disable_tqdm=True, use_cpu=True, **saving
    )
    starts = Starts()
    trainer = Trainer(gpt2(), arguments, train_dataset=rows(32), callbacks=[Dies(), starts])
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(folder)))
    return [log["loss"] for log in trainer.state.log_history if "loss" in log], starts.first


def by_lightning(folder: Path, dies_at: int) -> tuple[list[float], int]:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Regression(pl.LightningModule):
        first = -1

        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
            self.losses = []

        def on_train_start(self):
            self.first = self.global_step

        def training_step(self, batch, batch_idx):
            befall(self.global_step, dies_at)
            loss = (self.net(batch) - batch.sum(1, keepdim=True)).square().mean()
            self.losses.append(self.all_gather(loss.detach()).mean().item())
            return loss

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.05)

        def on_save_checkpoint(self, checkpoint):
            checkpoint["losses"] = self.losses

        def on_load_checkpoint(self, checkpoint):
            self.losses = list(checkpoint["losses"])

    data = torch.utils.data.DataLoader(torch.arange(48.0).sin().reshape(12, 4), batch_size=2)
    saving = ModelCheckpoint(folder, save_last=True)  # after each epoch
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_steps=NUM_STEPS, callbacks=[saving], logger=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = Regression()
    trainer.fit(module, data, ckpt_path="last")
    return module.losses, module.first


def main(folder: Path, library: str, dies_at: int) -> None:
    losses, first = {"transformers": by_transformers, "lightning": by_lightning}[library](folder, dies_at)
    if os.environ["RANK"] == "0":
        (folder / "told.json").write_text(json.dumps({"losses": losses, "first": first}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
