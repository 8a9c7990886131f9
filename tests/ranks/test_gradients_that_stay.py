"""Where nothing sums or moves gradients they stay in the tensors that autograd has made, and are those of plain
PyTorch whatever is done to them before the update: see [Note: gradients that stay] in `memory/fresh.py`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from twins import adamw, batches

import shardwise as sw
from shardwise.memory import FlatGradients
from shardwise.testing import run_ranks
from tests import inside
from tests.models import Decoder

Tensor = torch.Tensor
READ, UNUSED, WRITTEN = "norm.weight", "aside.weight", "head.weight"
Send = Callable[[Tensor], None]


class Aside(Decoder):
    """With a parameter that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.aside = nn.Linear(3, 2, bias=False)


def made() -> Aside:
    torch.manual_seed(0)
    return Aside()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, send: Send, *, reads: bool) -> dict[str, Tensor]:
    """Two steps of two backwards, with what loops do to gradients between them; the parameters."""
    params = dict(model.named_parameters())
    for x, y in batches(2):
        send(model(x, y))
        if reads:
            assert params[UNUSED].grad is None
            params[READ].grad.mul_(2)  # type: ignore[union-attr]  # it has one
        send(model(x.flip(0), y.flip(0)))
        if reads:
            params[UNUSED].grad = torch.full_like(params[UNUSED], 0.25)
            params[WRITTEN].grad = None
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach().clone() for name, param in params.items()}


@pytest.mark.parametrize("reads", [False, True], ids=["left alone", "read and written"])
@pytest.mark.parametrize("preset", ["ddp", "zero3"])
def test_gradients_that_stay_are_those_of_plain_pytorch(preset: str, reads: bool) -> None:
    model = made()
    twin = copy.deepcopy(model)
    expected = train(twin, adamw(twin), lambda loss: loss.backward(), reads=reads)

    def rank(world: sw.World) -> dict[str, Tensor]:
        optimizer = adamw(model)
        with sw.shard(model, preset, optimizer=optimizer, world=world) as engine:
            return train(model, optimizer, engine.backward, reads=reads)

    [found] = run_ranks(1, rank)
    for name, value in expected.items():
        # A norm of norms is rounded otherwise than one over all elements.
        torch.testing.assert_close(found[name], value, rtol=2e-6 if reads else 0, atol=1e-7 if reads else 0)


@pytest.mark.parametrize("weight", [1.0, 0.5, 0.0])
def test_they_are_weighed_as_they_come(weight: float) -> None:
    """The first is not what stays then, and one without weight counts for nothing, whatever it is."""
    model = made()
    twin = copy.deepcopy(model)
    [(x, y)] = batches(1)
    (twin(x, y) * weight + twin(y, x)).backward()

    def rank(world: sw.World) -> dict[str, Any]:
        with sw.shard(model, "ddp", optimizer=adamw(model), world=world) as engine:
            inside.sharded(engine).backward(model(x, y) * (1.0 if weight else float("nan")), weight)
            inside.sharded(engine).backward(model(y, x), 1.0)
            return {name: engine.get(name, "grad") for name, _ in model.named_parameters()}

    [found] = run_ranks(1, rank)
    for name, param in twin.named_parameters():
        assert (found[name] is None) == (param.grad is None)
        if param.grad is not None:
            torch.testing.assert_close(found[name], param.grad)


@pytest.mark.parametrize("mesh", [{"dp": 1}, {"pp": 2}])
def test_nothing_is_copied_on_the_way_to_the_update(mesh: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the optimizer is given lies where autograd has put the first gradient of the step."""
    num_ranks = mesh.get("pp", 1)
    models, [(x, y)] = [made() for _ in range(num_ranks)], batches(1)
    first: dict[tuple[FlatGradients, int], int] = {}
    arrive = FlatGradients.arrive

    def noting(grads: FlatGradients, index: int, grad: Tensor, is_last: bool = True) -> bool:
        first.setdefault((grads, index), grad.data_ptr())
        return arrive(grads, index, grad, is_last)

    monkeypatch.setattr(FlatGradients, "arrive", noting)

    def rank(world: sw.World) -> dict[tuple[FlatGradients, int], int]:
        model = models[world.rank]
        plan = {"preset": "ddp", "mesh": mesh, "accumulate": 2}
        with sw.shard(model, plan, optimizer=adamw(model), world=world) as engine:
            engine.forward_backward((x, y))
            engine.clip_grad_norm_(1e9)
            every = [(flat.grads, index) for flat in inside.flats(engine) for index in range(len(flat.slots))]
            due = {(grads, index): grads.due_piece(index) for grads, index in every if (grads, index) in first}
            return {place: piece.data_ptr() for place, piece in due.items() if piece is not None}

    due = [place for found in run_ranks(num_ranks, rank) for place in found.items()]
    assert len(due) == len(first) > 10
    assert dict(due) == first
