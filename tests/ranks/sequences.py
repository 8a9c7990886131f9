"""A GPT that takes position ids, trained with split sequences and with whole ones."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from twins import MakeOptimizer, adamw

import shardwise as sw
from shardwise.testing import run_ranks
from tests.models import VOCAB

Tensor = torch.Tensor
Batch = dict[str, Tensor]
TOKENS = 16


def batches(num_steps: int, *, rows: int = 4, tokens: int = TOKENS, seed: int = 5) -> list[Batch]:
    numbers = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(0, VOCAB, (rows, tokens + 1), generator=numbers) for _ in range(num_steps)]
    positions = torch.arange(tokens).expand(rows, -1)
    return [{"input_ids": one[:, :-1], "position_ids": positions, "labels": one[:, 1:]} for one in drawn]


def mean_loss(model: Any, batch: Batch) -> Tensor:
    logits = model(batch["input_ids"], batch["position_ids"])
    return functional.cross_entropy(logits.float().flatten(0, 1), batch["labels"].flatten())


@dataclass
class Run:
    """Losses, gradient norms and all gradients of each step; final parameters."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    grads: list[dict[str, Tensor]] = field(default_factory=list)
    params: dict[str, Tensor] = field(default_factory=dict)


def whole_run(
    model: nn.Module,
    data: Sequence[Batch],
    *,
    loss_of: Callable[[Any, Batch], Tensor] = mean_loss,
    accumulate: int = 1,
    clip: float | None = None,
    make_optimizer: MakeOptimizer = adamw,
) -> Run:
    """Train in one process with whole batches, without this library."""
    model = copy.deepcopy(model)
    optimizer, run = make_optimizer(model), Run()
    for batch in data:
        losses = []
        for micro in chunked(batch, accumulate):
            loss = loss_of(model, micro)
            (loss / accumulate).backward()
            losses.append(loss.item())
        run.losses.append(sum(losses) / accumulate)
        run.grads.append(grads_of(model))
        run.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))))
        optimizer.step()
        optimizer.zero_grad()
    run.params = {name: param.detach().clone() for name, param in model.named_parameters()}
    return run


def grads_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.grad.clone() for name, param in model.named_parameters() if param.requires_grad}


def chunked(batch: Batch, parts: int) -> list[Batch]:
    return [{name: value.chunk(parts)[index] for name, value in batch.items()} for index in range(parts)]


def split_run(
    model: nn.Module,
    data: Sequence[Batch],
    preset: str,
    mesh: Mapping[str, int],
    *,
    loss_of: Callable[[Any, Batch], Tensor] = mean_loss,
    shares_memory: bool = True,
    make_optimizer: MakeOptimizer = adamw,
    run: Callable[..., list[Any]] = run_ranks,
    read_grads: Callable[[sw.Engine, nn.Module], dict[str, Tensor]] | None = None,
    **plan: Any,
) -> Run:
    """The same training with every sample split over `sp`, and rows divided over the other axes."""
    num_ranks = int(torch.tensor(list(mesh.values())).prod())
    replicas = [copy.deepcopy(model) for _ in range(num_ranks)]
    settings = {"preset": preset, "mesh": dict(mesh), **plan}

    def rank(world: sw.World) -> Run:
        replica, result = replicas[world.rank], Run()
        with sw.shard(replica, settings, optimizer=make_optimizer(replica), world=world) as engine:
            share, num_shares = engine.data_ranks
            for batch in data:
                losses = []
                for micro in chunked(batch, engine.plan.accumulate):
                    mine = engine.split_sequence(chunked(micro, num_shares)[share])
                    loss = loss_of(engine, mine)
                    engine.backward(loss)
                    losses.append(loss.item())
                result.losses.append(engine.mean(sum(losses) / len(losses)))
                result.grads.append(grads_of(replica) if read_grads is None else read_grads(engine, replica))
                result.norms.append(float(engine.step(is_last=True) or 0.0))
            result.params = {name: value.clone() for name, value in engine.state_dict().items()}
        return result

    kwargs = {"shares_memory": shares_memory} if run is run_ranks else {}
    runs = run(num_ranks, rank, **kwargs)
    for other in runs[1:]:
        assert other.losses == runs[0].losses
        assert other.norms == runs[0].norms
    return runs[0]


def assert_same(run: Run, twin: Run, *, tolerance: float = 1e-5) -> None:
    assert len(run.losses) == len(twin.losses) > 0
    for name in ("losses", "norms"):
        torch.testing.assert_close(
            torch.tensor(getattr(run, name)), torch.tensor(getattr(twin, name)), rtol=tolerance, atol=tolerance
        )
    for step, (mine, other) in enumerate(zip(run.grads, twin.grads, strict=True)):
        assert mine.keys() == other.keys()
        for name, grad in other.items():
            torch.testing.assert_close(
                mine[name], grad, rtol=tolerance, atol=tolerance, msg=lambda text, at=(step, name): f"{at}: {text}"
            )
    for name, param in twin.params.items():
        torch.testing.assert_close(
            run.params[name], param, rtol=tolerance, atol=tolerance, msg=lambda text, at=name: f"{at}: {text}"
        )
