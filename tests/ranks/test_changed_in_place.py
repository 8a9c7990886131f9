"""What a layer returns may be changed in place, as in plain PyTorch, also where its product is a function of ours:
`nn.ReLU(inplace=True)`, `x += y`, `x[mask] = value`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from twins import work_on_ranks

import shardwise as sw
from shardwise.errors import ModelError
from shardwise.testing import run_ranks
from tests.in_stages import optimizer_of, plain, race

Tensor = torch.Tensor
WIDTH = 8


class Block(nn.Module):
    """Its input, which a stage may begin with, and the outputs of all of its layers are changed in place."""

    def __init__(self, kernel: int = 1) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, kernel, padding=kernel // 2)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x *= 0.5
        hidden = self.up(x)
        hidden[mask] = 0.25
        back = self.down(self.relu(hidden))
        back += x
        conv = self.conv(back.transpose(1, 2))
        conv -= 0.1
        return x + conv.transpose(1, 2)


class Net(nn.Module):
    def __init__(self, kernel: int = 1) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(4, WIDTH), nn.ModuleList(Block(kernel) for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        hidden = self.first(x)
        for block in self.blocks:
            hidden = block(hidden, mask)
        logits = self.head(hidden)
        logits /= 2
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def drawn(num_steps: int = 2, parts: int = 4) -> list[list[dict[str, Tensor]]]:
    numbers = torch.Generator().manual_seed(1)

    def batch() -> dict[str, Tensor]:
        x, y = torch.randn(2, 6, 4, generator=numbers), torch.randint(3, (2, 6), generator=numbers)
        return {"x": x, "y": y, "mask": torch.rand(2, 6, generator=numbers) > 0.7}

    return [[batch() for _ in range(parts)] for _ in range(num_steps)]


def itself(loss: Any) -> Tensor:
    found: Tensor = loss
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1"])
def test_in_pipeline_stages(schedule: str) -> None:
    """Under zb-h1 linear layers put the gradients of their weights aside."""
    race(net(), drawn(), loss_fn=itself, pipeline={"schedule": schedule})


PATTERNS = {"blocks.*.up": "column", "blocks.*.down": "row", "first": "column_gathered"}


@pytest.mark.parametrize("sequence", [False, True])
def test_over_tensor_parallel_ranks(sequence: bool) -> None:
    """With whole sequences, and with parts of them, where columns have a product of their own."""
    model, data = net(), drawn()
    tensor = {"plan": PATTERNS, "sequence": sequence}
    plan = {"preset": "zero1", "mesh": {"dp": 1, "tp": 2}, "accumulate": 4, "tensor": tensor}

    def work(engine: sw.Engine) -> tuple[list[float], dict[str, Tensor]]:
        return [float(engine.train_step(parts)) for parts in data], engine.state_dict()

    losses, _, params = plain(model, data, itself)
    for ours, state in work_on_ranks(2, work, plan, model, optimizer_of):
        assert ours == pytest.approx(losses, rel=1e-5)
        for name, expected in params.items():
            torch.testing.assert_close(state[name], expected, rtol=1e-4, atol=1e-5, msg=name)


def test_a_convolution_over_the_tokens_of_one_rank_is_refused() -> None:
    """Unlike one that reads a token for each, such as that of the test above."""
    replicas, batch = [Net(kernel=3) for _ in range(2)], drawn()[0][0]
    plan = {"preset": "zero1", "mesh": {"dp": 1, "tp": 2}, "tensor": {"plan": PATTERNS, "sequence": True}}

    def rank(world: sw.World) -> None:
        mine = replicas[world.rank]
        with sw.shard(mine, plan, optimizer=optimizer_of(mine), world=world) as engine:
            engine(**batch)

    with pytest.raises(ModelError, match=r"blocks.0.conv computes conv1d over 6 tokens, of which .* 3"):
        run_ranks(2, rank)
