"""A training whose numbers are whole, so that sums come to the same bits in whatever order and among however many ranks
they are taken: a sample that is left out or comes twice, and a step that only some take, show for ever.

The gradient of a sample is a multiple of what any number of ranks divides by, learning rate and momentum are powers of
two, and no sum leaves what fp32 has whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import shardwise as sw

NUM_SAMPLES, ROWS, WIDTH, NUM_BLOCKS = 160, 16, 24, 3
MULTIPLE = 120.0
"""Of all numbers of rows that a rank may have: 1 to 6, and 8. `1 / n * MULTIPLE` is rounded to what it should be."""
LEARNING_RATE, MOMENTUM = 0.125, 1.0
Tensor = torch.Tensor


class Samples:
    """Each has a number, a row of whole numbers, and a weight of its own."""

    def __init__(self) -> None:
        numbers = torch.Generator().manual_seed(5)
        self._x = torch.randint(-1, 2, (NUM_SAMPLES, WIDTH), generator=numbers).float()
        self._weight = (torch.randint(0, 2, (NUM_SAMPLES,), generator=numbers) * 2 - 1).float()

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"index": torch.tensor(index), "x": self._x[index], "weight": self._weight[index]}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH))
        self.more = nn.Linear(WIDTH, 4, bias=False)
        nn.init.zeros_(self.more.weight)

    def forward(self, x: Tensor) -> Tensor:
        summed: Tensor = x @ self.weight + self.more(x).sum(-1)
        return summed


class Model(nn.Module):
    """One parameter counts each sample; the others count what is in them. A buffer counts forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Embedding(NUM_SAMPLES, 1)
        nn.init.zeros_(self.seen.weight)
        self.blocks = nn.ModuleList([Block() for _ in range(NUM_BLOCKS)])
        self.register_buffer("count", torch.zeros(()))

    def forward(self, index: Tensor, x: Tensor) -> Tensor:
        if self.training:
            assert isinstance(self.count, Tensor)
            self.count += 1
        result: Tensor = self.seen(index).squeeze(-1)
        for number, block in enumerate(self.blocks):
            result = result + block(x.roll(number, -1).to(block.weight.dtype))
        return result


def loss_of(output: Tensor, weight: Tensor) -> Tensor:
    return (output * (weight * MULTIPLE).to(output.dtype)).mean()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)


def loader(world: Any, accumulate: int) -> sw.data.Loader:
    return sw.data.Loader(Samples(), batch_rows=ROWS, seed=3, world=world, accumulate=accumulate)


def alone(num_steps: int) -> Iterator[tuple[float, dict[str, Tensor]]]:
    """The plain loop in fp64 on whole batches: loss, and parameters after it, of each step."""
    model = Model().double()
    optimizer = optimizer_of(model)
    with loader((0, 1), 1) as batches:
        while num_steps > 0:
            for batch in batches:
                loss = loss_of(model(batch["index"], batch["x"]), batch["weight"])
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]  # torch's own
                optimizer.step()
                yield loss.item(), {name: value.detach().clone() for name, value in model.named_parameters()}
                num_steps -= 1
                if num_steps == 0:
                    break
