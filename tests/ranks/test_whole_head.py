"""Code that multiplies with the head's weight by itself, as fused losses do, in a model that is split along `tp`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from twins import work_on_ranks

import shardwise as sw
from shardwise.errors import ModelError
from shardwise.testing import run_ranks
from tests.ranks.split_models import TENSOR, VOCABULARY, Transformer, tokens

Tensor = torch.Tensor
STEPS = 3


class Fused(Transformer):
    """Without its own call of the head."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__(tied=tied)
        if not tied:
            self.head = nn.Linear(24, VOCABULARY + 1)  # parts of different sizes, with a bias

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        with sw.tensor.whole_head(self.head):
            logits = self.norm(x) @ self.head.weight.T
            if self.head.bias is not None:
                logits = logits + self.head.bias
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.parametrize(
    ("tied", "plan"),
    [
        (True, {"preset": "zero3", "mesh": {"dp": 2, "tp": 2}, "tensor": TENSOR}),
        (False, {"preset": "zero1", "mesh": {"dp": 1, "tp": 2}, "tensor": {**TENSOR, "sequence": True}}),
        (False, {"preset": "zero3", "mesh": {"dp": 1, "tp": 2}, "tensor": TENSOR, "activations": "recompute"}),
    ],
)
def test_all_words_are_there_in_a_forward(tied: bool, plan: dict[str, Any]) -> None:
    model = Fused(tied=tied)
    plain = copy.deepcopy(model)
    num_ranks = plan["mesh"]["dp"] * plan["mesh"]["tp"]
    data = [tokens(step).chunk(plan["mesh"]["dp"]) for step in range(STEPS)]

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.5)

    optimizer, expected = sgd(plain), []
    for parts in data:
        losses = [plain(part) for part in parts]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append([loss.item() for loss in losses])

    def work(engine: sw.Engine) -> tuple[int, list[float], dict[str, Tensor]]:
        model = engine.module
        losses = []
        share = engine.data_ranks[0]
        for parts in data:
            loss = model(parts[share])
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return share, losses, engine.state_dict()

    for share, losses, state in work_on_ranks(num_ranks, work, plan, model, sgd):
        assert losses == pytest.approx([by_share[share] for by_share in expected], rel=1e-5)
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=2e-6, msg=name)


def test_a_module_whose_output_stays_split_is_refused() -> None:
    models = [Fused(tied=False) for _ in range(2)]
    plan = {"preset": "zero1", "mesh": {"dp": 1, "tp": 2}, "tensor": TENSOR}

    def of_rank(world: sw.World) -> None:
        model = models[world.rank]
        with (
            sw.shard(model, plan, world=world),
            pytest.raises(ModelError, match="this Linear has the style column"),
            sw.tensor.whole_head(model.blocks[0].up),
        ):
            pass

    run_ranks(2, of_rank)
