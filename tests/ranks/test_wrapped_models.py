"""A model of transformers inside of a module of one's own (a LightningModule, say): its plans and config are found."""

from __future__ import annotations

import copy

import pytest
import torch
from small_transformers import VOCAB, llama, mixtral
from torch import nn

import shardwise as sw
from shardwise.errors import ModelError
from shardwise.testing import run_ranks


class Wrapper(nn.Module):
    def __init__(self, model: nn.Module, *others: nn.Module) -> None:
        super().__init__()
        self.model, self.others = model, nn.ModuleList(others)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(tokens, labels=tokens, use_cache=False).loss
        return loss


@pytest.mark.parametrize(("axis", "build"), [("tp", llama), ("ep", mixtral)])
def test_it_is_split_as_by_itself(axis: str, build: type[nn.Module]) -> None:
    """Of the layers that are split a rank has a half, and the loss is that of the whole model."""
    torch.manual_seed(0)
    wrapper = Wrapper(build())
    twins = [copy.deepcopy(wrapper) for _ in range(2)]
    tokens = torch.randint(VOCAB, (2, 6))

    def rank(world: sw.World) -> int:
        mine = twins[world.rank]
        plan = {"preset": "ddp", "mesh": {axis: 2} if axis == "ep" else {"dp": 1, axis: 2}}
        with sw.shard(mine, plan, optimizer=torch.optim.SGD(mine.parameters(), lr=0.1), world=world) as engine:
            loss = mine(tokens)
            engine.backward(loss)
            engine.step()
            assert loss.item() == pytest.approx(wrapper(tokens).item(), rel=1e-5)
            return sum(param.numel() for param in mine.parameters())

    whole = sum(param.numel() for param in wrapper.parameters())
    assert all(found < 0.8 * whole for found in run_ranks(2, rank))


def test_of_two_side_by_side_names_do_not_tell_which_is_meant() -> None:
    models = [Wrapper(llama(), llama()) for _ in range(2)]

    def rank(world: sw.World) -> None:
        mine = models[world.rank]
        with pytest.raises(ModelError, match="Wrapper has no tensor-parallel plan of its own"):
            sw.shard(mine, {"preset": "ddp", "mesh": {"dp": 1, "tp": 2}}, world=world)

    run_ranks(2, rank)
