"""Trains a model in pipeline stages and in a plain loop, and compares them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.parallel.pipeline.sends import Channel
from shardwise.testing import run_ranks

Tensor = torch.Tensor
Batch = dict[str, Any]
LossFunction = Callable[[Any], Tensor] | None

SPLITS: dict[str, dict[str, Any]] = {
    "pp2": {"pp": 2},
    "pp2-dp2-zero3": {"pp": 2, "dp": 2, "preset": "zero3"},
    "pp4": {"pp": 4},
    "interleaved": {"pp": 2, "pipeline": {"schedule": "interleaved"}},
    "zb-h1": {"pp": 2, "preset": "zero2", "pipeline": {"schedule": "zb-h1"}},
}
"""Arguments of `race`, by name."""


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)


def plain(
    model: nn.Module, data: Sequence[Sequence[Batch]], loss_fn: LossFunction
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses and norms of a plain loop by step, and the state at the end. A step has several micro-batches."""
    model, losses, norms = copy.deepcopy(model), [], []
    optimizer = optimizer_of(model)
    for parts in data:
        mean = 0.0
        for part in parts:
            output = model(**part)
            loss = (output.loss if loss_fn is None else loss_fn(output)) / len(parts)
            loss.backward()
            mean += loss.item()
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        norms.append(float(torch.nn.utils.get_total_norm(grads)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean)
    return losses, norms, model.state_dict()


def race(
    model: nn.Module,
    data: Sequence[Sequence[Batch]],
    *,
    loss_fn: LossFunction = None,
    pp: int = 2,
    dp: int = 1,
    look: Callable[[sw.Engine], object] = lambda _: None,
    tolerance: float = 1e-5,
    **plan: Any,
) -> list[Any]:
    """Train on `pp` x `dp` ranks and compare losses, norms and the state at the end. What `look` sees on each rank."""
    num_ranks = pp * dp
    models = [copy.deepcopy(model) for _ in range(num_ranks)]
    full = {"preset": "zero1", "mesh": {"pp": pp, "dp": dp}, "accumulate": len(data[0]) // dp, **plan}

    def rank(world: sw.World) -> Any:
        mine, losses, norms = models[world.rank], [], []
        with sw.shard(mine, full, optimizer=optimizer_of(mine), world=world) as engine:
            for parts in data:
                own = list(parts[engine.data_ranks[0] :: dp])
                losses.append(float(engine.train_step(own, loss_fn=loss_fn)))
                norms.append(float(engine.gradient_norm or 0.0))
            return losses, norms, engine.state_dict(), look(engine)

    losses, norms, params = plain(model, data, loss_fn)
    runs = run_ranks(num_ranks, rank)
    for ours, our_norms, state, _ in runs:
        if dp == 1:  # otherwise it is the loss of this rank's micro-batches
            assert ours == pytest.approx(losses, rel=tolerance)
        assert our_norms == pytest.approx(norms, rel=tolerance)
        assert list(state) == list(params)
        for name, expected in params.items():
            torch.testing.assert_close(state[name], expected, rtol=10 * tolerance, atol=tolerance, msg=name)
    return [seen for *_, seen in runs]


class Messages:
    """Counts the bytes of messages, by kind and by link."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: dict[tuple[str, tuple[int, ...]], int] = {}
        send = Channel.send

        def counted(channel: Channel, tensors: Sequence[Tensor], micro_batch: int) -> None:
            link = channel._kind, tuple(channel._link.ranks)
            self.sent[link] = self.sent.get(link, 0) + sum(tensor.nbytes for tensor in tensors)
            send(channel, tensors, micro_batch)

        monkeypatch.setattr(Channel, "send", counted)

    def of(self, kind: str) -> int:
        return sum(num for (what, _), num in self.sent.items() if what == kind)
