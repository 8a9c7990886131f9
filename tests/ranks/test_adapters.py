"""A frozen base with trainable adapters, as in `peft`: frozen parameters are sharded and have no gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from twins import Run, assert_same, batches, plain_run, sharded_run

import shardwise as sw
from tests.models import WIDTH, Lora, Transformer
from tests.thorough import sampled

pytestmark = sampled

Tensor = torch.Tensor


class Adapted(Transformer):
    """With `needs_grad`, the frozen embedding's output requires gradients, as when fine-tuning with checkpointing."""

    def __init__(self, *, recompute: bool, needs_grad: bool, reentrant: bool = False) -> None:
        super().__init__(recomputes=recompute, reentrant=reentrant)
        self.needs_grad = needs_grad
        self.requires_grad_(False)
        for block in self.blocks:
            block.qkv, block.down = Lora(block.qkv), Lora(block.down)

    def logits(self, x: Tensor) -> Tensor:
        hidden = self.tokens(x) + self.positions.weight[: x.shape[1]]
        if self.needs_grad:
            hidden.requires_grad_()
        return self.logits_of(hidden)


def adamw_of_trainable(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2, eps=1e-5)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("needs_grad", [False, True], ids=["plain input", "leaf input"])
@pytest.mark.parametrize(("preset", "num_ranks"), [("zero3", 2), ("zero3", 4), ("zero2", 3)])
def test_adapters_train_like_the_plain_model(preset: str, num_ranks: int, needs_grad: bool, recompute: bool) -> None:
    model = Adapted(recompute=recompute, needs_grad=needs_grad)
    data = batches(5, rows=12)

    def bytes_of(engine: sw.Engine) -> dict[str, Any]:
        return {"report": engine.memory()}

    run = sharded_run(model, data, preset, num_ranks, None, adamw_of_trainable, after=bytes_of)
    assert_same(run, plain_run(model, data, adamw_of_trainable))
    report = run.extra["report"]
    trainable = 3 * 2 * (WIDTH + 3 * WIDTH + 4 * WIDTH + WIDTH)
    assert report.promised["optim"] < 2 * 4 * trainable  # states of the adapters alone, and these sharded


MICRO_BATCHES = 3


def in_turn(model: nn.Module, batch: tuple[Tensor, Tensor], backward: Any) -> None:
    for x, y in zip(*(part.chunk(MICRO_BATCHES) for part in batch), strict=True):
        backward(model(x, y))


def forwards_first(model: nn.Module, batch: tuple[Tensor, Tensor], backward: Any) -> None:
    for loss in [model(x, y) for x, y in zip(*(part.chunk(MICRO_BATCHES) for part in batch), strict=True)]:
        backward(loss)


def last_first(model: nn.Module, batch: tuple[Tensor, Tensor], backward: Any) -> None:
    parts = zip(*(part.chunk(MICRO_BATCHES) for part in batch), strict=True)
    for loss in reversed([model(x, y) for x, y in parts]):
        backward(loss)


def one_graph(model: nn.Module, batch: tuple[Tensor, Tensor], backward: Any) -> None:
    loss = model(*batch) / 2
    loss.backward(retain_graph=True)
    loss.backward()


CASES = [
    *((order, "zero3", False) for order in (in_turn, forwards_first, last_first, one_graph)),
    *((forwards_first, preset, False) for preset in ("zero2", "hsdp")),
    *((order, "zero3", True) for order in (forwards_first, one_graph)),
]


@pytest.mark.parametrize("trainable", [False, True], ids=["adapters", "all"])
@pytest.mark.parametrize(("order", "preset", "shares_memory"), CASES)
def test_forwards_and_backwards_in_any_order(order: Any, preset: str, shares_memory: bool, trainable: bool) -> None:
    model = Adapted(recompute=False, needs_grad=False)
    if trainable:
        model.requires_grad_(True)
    data = batches(3, rows=12)

    def step(engine: sw.Engine, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> Tensor:
        order(engine.module, batch, lambda loss: (loss / MICRO_BATCHES).backward())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            return engine(*batch)

    mesh = {"node": 2, "local": 1} if preset == "hsdp" else None
    run = sharded_run(model, data, preset, 2, mesh, adamw_of_trainable, step=step, shares_memory=shares_memory)
    twin = plain_run(model, data, adamw_of_trainable)
    assert_same(Run(params=run.params), Run(params=twin.params))


@pytest.mark.parametrize("shares_memory", [True, False], ids=["shared", "messages"])
def test_recomputed_in_an_inner_backward(shares_memory: bool) -> None:
    """Reentrant checkpointing runs a nested backward inside the backward. Training equals the plain model's."""
    model = Adapted(recompute=True, needs_grad=True, reentrant=True)
    data = batches(4, rows=12)
    run = sharded_run(model, data, "zero3", 2, None, adamw_of_trainable, shares_memory=shares_memory)
    assert_same(run, plain_run(model, data, adamw_of_trainable))
