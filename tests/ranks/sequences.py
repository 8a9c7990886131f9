"""A GPT that takes position ids, trained with split sequences and with whole ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from twins import MakeOptimizer, Run, adamw, assert_alike, by_micro_batches, plain_run, ranks_run

import shardwise as sw
from tests.models import VOCAB

Tensor = torch.Tensor
Batch = dict[str, Tensor]
LossOf = Callable[[Any, Batch], Tensor]
TOKENS = 16


def batches(num_steps: int, *, rows: int = 4, tokens: int = TOKENS, seed: int = 5) -> list[Batch]:
    numbers = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(0, VOCAB, (rows, tokens + 1), generator=numbers) for _ in range(num_steps)]
    positions = torch.arange(tokens).expand(rows, -1)
    return [{"input_ids": one[:, :-1], "position_ids": positions, "labels": one[:, 1:]} for one in drawn]


def mean_loss(model: Any, batch: Batch) -> Tensor:
    logits = model(batch["input_ids"], batch["position_ids"])
    return functional.cross_entropy(logits.float().flatten(0, 1), batch["labels"].flatten())


def counted_loss(model: Any, batch: Batch) -> Tensor:
    """Labels of -100 do not count, so ranks have different numbers of labels."""
    losses = functional.cross_entropy(
        model(batch["input_ids"], batch["position_ids"]).flatten(0, 1), batch["labels"].flatten(), reduction="none"
    )
    counted = batch["labels"].flatten() != -100
    return model.mean_over_tokens(losses, counted) if isinstance(model, sw.Engine) else losses[counted].mean()


def whole_run(model: nn.Module, data: Sequence[Batch], *, loss_of: LossOf = mean_loss, **how: Any) -> Run:
    """Train in one process with whole batches, without this library: see `plain_run`."""
    return plain_run(model, data, forward=loss_of, **how)


def own_grads(engine: sw.Engine) -> dict[str, Tensor | None]:
    return {name: param.grad.clone() for name, param in engine.module.named_parameters() if param.requires_grad}


def split_run(
    model: nn.Module,
    data: Sequence[Batch],
    preset: str,
    mesh: Mapping[str, int],
    *,
    loss_of: LossOf = mean_loss,
    make_optimizer: MakeOptimizer = adamw,
    grads_of: Callable[[sw.Engine], dict[str, Tensor | None]] | None = own_grads,
    **plan: Any,
) -> Run:
    """The same training with every sample split over `sp`, and rows divided over the other axes."""

    def loss_of_part(engine: sw.Engine, batch: Batch) -> Tensor:
        return loss_of(engine, engine.split_sequence(batch))

    how = {name: plan.pop(name) for name in ("run", "shares_memory") if name in plan}
    asked = {"preset": preset, "mesh": dict(mesh), **plan}
    train = by_micro_batches(loss_of_part)
    return ranks_run(model, data, asked, make_optimizer, train=train, grads_of=grads_of, **how)[0]


def assert_trains_as_whole(
    model: nn.Module,
    data: Sequence[Batch],
    preset: str,
    mesh: Mapping[str, int],
    *,
    loss_of: LossOf = mean_loss,
    **how: Any,
) -> None:
    """`split_run` has the results of `whole_run`."""
    run = split_run(model, data, preset, mesh, loss_of=loss_of, **how)
    assert_alike(run, whole_run(model, data, loss_of=loss_of))


def train_in_one_call(engine: sw.Engine, batch: Batch, **split: Any) -> Tensor:
    """A step of a model that returns logits; `split` is for `split_sequence`."""
    part = engine.split_sequence(batch, **split)
    labels = part.pop("labels")
    return engine.forward_backward(
        part, labels, loss_fn=lambda out, y: functional.cross_entropy(out.flatten(0, 1), y.flatten())
    )
