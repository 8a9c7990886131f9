"""Trains a small model through somebody's wrapper, sharded or not, on the ranks that launched it.

`wrapped.py WRAPPER PRESET FILE`: rank 0 writes to FILE what became of it. PRESET `plain` leaves the model unsharded.
"""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import shardwise as sw
from shardwise.errors import ShardwiseError

NUM_STEPS, ROWS = 4, 2
Losses = list[float]


class Net(nn.Module):
    """With Hugging Face's signature: `labels` in, a dict with the loss out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        output = self.layers(x)
        return {"loss": nn.functional.mse_loss(output, labels), "logits": output}


class Rows(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return NUM_STEPS * ROWS * 2

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = torch.arange(4).float() / 4 + index / 16
        return {"x": x.sin(), "labels": x.sum().view(1)}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def loader(rank: int) -> DataLoader[dict[str, torch.Tensor]]:
    return DataLoader(Rows(), ROWS, sampler=DistributedSampler(Rows(), 2, rank, shuffle=False))


def by_ddp(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, plain: bool) -> None:
    wrapped = nn.parallel.DistributedDataParallel(model)
    for batch in loader(rank):
        wrapped(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()


def by_trainer(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, plain: bool) -> None:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        tempfile.mkdtemp(), per_device_train_batch_size=ROWS, max_steps=NUM_STEPS, use_cpu=True, report_to=[],
        save_strategy="no", logging_steps=1, disable_tqdm=True, lr_scheduler_type="constant", max_grad_norm=1.0,
    )  # fmt: skip
    Trainer(model=model, args=arguments, train_dataset=Rows(), optimizers=(optimizer, None)).train()


def by_accelerate(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, plain: bool) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    prepared, stepped, batches = accelerator.prepare(model, optimizer, DataLoader(Rows(), ROWS))
    for batch in batches:
        accelerator.backward(prepared(**batch)["loss"])
        accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
        stepped.step()
        stepped.zero_grad()


def lightning_by(strategy: str, devices: int) -> Any:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, plain: bool) -> None:
        import lightning

        class Module(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net = model

            def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
                return self.net(**batch)["loss"]

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return optimizer

        how = {"strategy": "ddp", "devices": 2} if plain else {"strategy": strategy, "devices": devices}
        trainer = lightning.Trainer(
            accelerator="cpu", max_steps=NUM_STEPS, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
            gradient_clip_val=1.0, **how,
        )  # fmt: skip
        trainer.fit(Module(), loader(rank))

    return train


WRAPPERS = {
    "ddp": by_ddp,
    "trainer": by_trainer,
    "accelerate": by_accelerate,
    "lightning": lightning_by("auto", 1),
    "lightning-ddp": lightning_by("ddp", 2),
}


def main(wrapper: str, preset: str, file: Path) -> None:
    world = sw.World.join()
    model = Net()
    optimizer = sgd(model)
    engine = None if preset == "plain" else sw.shard(model, preset, optimizer=optimizer, world=world)
    told: dict[str, Any] = {}
    try:
        WRAPPERS[wrapper](model, optimizer, world.rank, engine is None)
    except Exception as error:  # told to the test, which judges it
        told = {"error": type(error).__name__, "is_letter": False, "text": str(error), "trace": traceback.format_exc()}
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, ShardwiseError):
                told |= {"is_letter": True, "text": str(cause)}
            cause = cause.__cause__ or cause.__context__
    else:
        state = model.state_dict() if engine is None else engine.state_dict()
        told = {"state": {name: value.tolist() for name, value in state.items()}}
    if world.rank == 0:
        file.write_text(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
