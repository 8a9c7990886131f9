"""Jobs for the tests of Ray Train: functions that a TorchTrainer runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))


class Summed(nn.Module):
    """Its output is its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return loss_of(self.net, rows)


def batch(step: int, rank: int, size: int) -> torch.Tensor:
    rows = torch.arange(48.0).add(step * 7.0).sin().reshape(8, 6)
    return rows[rank::size]


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return (model(rows) - rows.sum(1, keepdim=True)).square().mean()


def plain(steps: int) -> list[float]:
    """The losses of one process with whole batches."""
    model, losses = net(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        loss = loss_of(model, batch(step, 0, 1))
        losses.append(loss.item())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def trained(config: dict[str, Any]) -> None:
    """A loop that resumes from Ray's checkpoint; one worker raises once if the config says so."""
    from shardwise.errors import FaultError

    try:
        _train(config)
    except FaultError as error:
        Path(config["mark"]).with_suffix(".letter").write_text(str(error))
        raise


def _train(config: dict[str, Any]) -> None:
    import ray.train

    from shardwise.integrations import ray as ours

    context = ray.train.get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    with ours.shard(model, config["plan"], optimizer=optimizer) as engine:
        state = ours.resume(engine)
        losses = [] if state is None else list(state["losses"])
        if state is not None:
            scheduler.load_state_dict(state["scheduler"])
        for step in range(len(losses), config["steps"]):
            loss = loss_of(model, batch(step, rank, size))
            engine.backward(loss)
            engine.clip_grad_norm_(0.5)
            engine.step()
            scheduler.step()
            losses.append(engine.mean(loss.item()))
            mark = Path(config["mark"])
            if step == config.get("fails_at") and rank == 1 and not mark.exists():
                mark.write_text(str(os.getpid()))
                raise ValueError("a bad batch")
            kept = {"losses": losses, "scheduler": scheduler.state_dict()}
            last = losses[-1]
            ours.report(engine, {"loss": last, "losses": losses, "size": size}, state=kept, save=step % 2 == 1)


def rows() -> torch.utils.data.TensorDataset:
    return torch.utils.data.TensorDataset(torch.arange(96.0).sin().reshape(16, 6))


def plain_epochs(epochs: int) -> list[float]:
    """The losses of one process with a data loader."""
    model, losses = net(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(epochs):
        for (batch_rows,) in torch.utils.data.DataLoader(rows(), batch_size=4):
            loss = loss_of(model, batch_rows)
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return losses


def shared(config: dict[str, Any]) -> None:
    """Two workers with a split model, and so with the same batches of a loader; each epoch resumes a checkpoint."""
    from shardwise.integrations import ray as ours

    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with ours.shard(model, config["plan"], optimizer=optimizer) as engine:
        state = ours.resume(engine)
        losses = [] if state is None else list(state["losses"])
        loader = ours.prepare_data_loader(engine, torch.utils.data.DataLoader(rows(), batch_size=4))
        for _ in range(config["epochs"]):
            for (batch_rows,) in loader:
                loss = loss_of(model, batch_rows)
                engine.backward(loss)
                engine.step()
                losses.append(engine.mean(loss.item()))
        numel = sum(param.numel() for param in model.parameters())
        found = {"losses": losses, "numel": numel, "sampler": type(loader.sampler).__name__}
        ours.report(engine, found, state={"losses": losses})


def tokens(step: int) -> torch.Tensor:
    """Four rows with the same number of counted tokens."""
    return torch.randint(1, 61, (4, 12), generator=torch.Generator().manual_seed(step))


def language_model(name: str) -> Any:
    import trainer_jobs

    return trainer_jobs.MODELS[name]()


def plain_language(name: str, steps: int) -> list[float]:
    """The losses of one process with the whole model and whole batches."""
    model, losses = language_model(name), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        loss = model(input_ids=tokens(step), labels=tokens(step)).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def language(config: dict[str, Any]) -> None:
    """Train a language model split by sequence, experts or stages, for `steps` more steps than the checkpoint has."""
    from shardwise.integrations import ray as ours

    model = language_model(config["model"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with ours.shard(model, config["plan"], optimizer=optimizer) as engine:
        state = ours.resume(engine)
        losses = [] if state is None else list(state["losses"])
        place, count = engine.data_ranks
        for step in range(len(losses), len(losses) + config["steps"]):
            rows_here = tokens(step)[place::count]
            batch_here = {"input_ids": rows_here, "labels": rows_here}
            if config["staged"]:
                loss = engine.train_step(batch_here)
            else:
                loss = model(**batch_here).loss
                engine.backward(loss)
                engine.step()
            losses.append(engine.mean(loss.item()))
        numel = sum(param.numel() for param in model.parameters())
        ours.report(engine, {"losses": losses, "numel": numel, "dealt": count}, state={"losses": losses})
