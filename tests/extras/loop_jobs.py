"""Jobs for the tests of loops in pipeline stages: the same few steps by Accelerate, Fabric and Lightning, saved
half-way, or from there on."""

from __future__ import annotations

from typing import Any

import accelerate_jobs
import torch
import trainer_jobs
from fabric_jobs import fabric_of
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_jobs import in_stages, trainer_of, values
from stage_jobs import OwnLoss, padded
from torch import nn
from torch.utils.data import DataLoader

NUM_BATCHES, HALF = 8, 4
"""Of which two make a step."""
Loader = DataLoader[dict[str, torch.Tensor]]


def loader(rows: int, ranks: int, *, is_rest: bool = False) -> Loader:
    """For `ranks` that read batches of so many rows."""
    data = padded(NUM_BATCHES * ranks * rows)
    return DataLoader(data[HALF * ranks * rows :] if is_rest else data, rows)


def made(model: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """With an `eps` beside which rounding does not decide on updates."""
    whole = trainer_jobs.MODELS[model]()
    return whole, torch.optim.AdamW(whole.parameters(), lr=3e-3, eps=1e-3)


def by_accelerate(plan: Any, model: str, ranks: int, folder: str, *, start: str | None = None) -> dict[str, Any]:
    accelerator = accelerate_jobs.made(plan, gradient_accumulation_steps=2)
    batches = loader(2, ranks, is_rest=start is not None)
    net, optimizer, batches, tests = accelerator.prepare(*made(model), batches, DataLoader(padded(16, 1), 2))
    if start is not None:
        accelerator.load_state(start)
    losses, norms = [], []
    for number, batch in enumerate(batches, 1):
        with accelerator.accumulate(net):
            loss = net(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(net.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()[None]).mean().item())
        if number == HALF and start is None:
            accelerator.save_state(f"{folder}/half")
    net.eval()
    with torch.no_grad():
        evaluated = [accelerator.gather(net(**batch).loss[None]).mean().item() for batch in tests]
    state = accelerator.get_state_dict(net)
    kept = {name: value.tolist() for name, value in state.items()} if accelerator.is_main_process else {}
    return {"losses": losses, "norms": norms, "evaluated": evaluated, "state": kept}


def by_fabric(plan: Any, model: str, ranks: int, folder: str, *, start: str | None = None) -> dict[str, Any]:
    fabric = fabric_of(plan)
    net, optimizer = fabric.setup(*made(model))
    batches = fabric.setup_dataloaders(loader(2, ranks, is_rest=start is not None))
    tests = fabric.setup_dataloaders(DataLoader(padded(16, 1), 2))
    state = {"model": net, "optimizer": optimizer}
    if start is not None:
        fabric.load(start, state)
    losses, norms = [], []
    for number, batch in enumerate(batches, 1):
        with fabric.no_backward_sync(net, enabled=number % 2 == 1):
            loss = net(**batch).loss
            fabric.backward(loss / 2)
        losses.append(fabric.all_reduce(loss.detach()).item())
        if number % 2 == 0:
            norms.append(float(fabric.clip_gradients(net, optimizer, max_norm=0.5)))
            optimizer.step()
            optimizer.zero_grad()
        if number == HALF and start is None:
            fabric.save(f"{folder}/half", state)
    net.eval()
    with torch.no_grad():
        evaluated = [fabric.all_reduce(net(**batch).loss).item() for batch in tests]
        whole = fabric.strategy.get_module_state_dict(net.module)
    kept = {name: value.tolist() for name, value in whole.items()}
    return {"losses": losses, "norms": norms, "evaluated": evaluated, "state": kept}


class Language(OwnLoss):
    def __init__(self, model: str) -> None:
        super().__init__(trainer_jobs.MODELS[model]())
        self.norms: list[float] = []
        self.evaluated: list[float] = []

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        engine = in_stages(self)
        if engine is not None:
            self.norms.append(float(engine.clip_grad_norm_(float("inf"))))
        else:
            grads = [param.grad for param in self.parameters() if param.grad is not None]
            self.norms.append(torch.nn.utils.get_total_norm(grads).item())

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.evaluated.append(self.all_gather(self.model(**batch).loss).mean().item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3, eps=1e-3)


def by_lightning(plan: Any, model: str, ranks: int, folder: str, *, start: str | None = None) -> dict[str, Any]:
    """Two epochs, of which the second may begin from a checkpoint of the first."""
    module, tests = Language(model), DataLoader(padded(16, 1), 2)
    kept = ModelCheckpoint(folder, "half-{epoch}", save_top_k=-1)
    trainer = trainer_of(
        plan, folder, max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=0.5, num_sanity_val_steps=0,
        callbacks=[kept],
    )  # fmt: skip
    trainer.fit(module, loader(2, ranks), tests, ckpt_path=start)
    return {"losses": module.losses, "norms": module.norms, "evaluated": module.evaluated, "state": values(module)}
