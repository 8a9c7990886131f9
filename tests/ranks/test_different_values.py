"""Ranks that have built different values: all take rank 0's, and hear of it where these may have been parts."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.errors import ModelError
from shardwise.testing import run_ranks

Build = Callable[[int], nn.Module]


def net(*, parts: int | None = None, mark: str = "", seed: int = 0) -> nn.Sequential:
    """Of the second of two layers a rank has the part `parts` of four, as in a script that splits layers itself."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 2))
    model.codes = nn.Parameter(torch.ones(3).to(torch.float8_e4m3fn), requires_grad=False)
    model.nothing = nn.Parameter(torch.ones(0, 3))
    whole = torch.randn(8, 4)
    if parts is not None:
        model[2].weight.data = whole.chunk(4)[parts].clone()
    if mark:
        setattr(model[2].weight, mark, True)
    return model


def fresh_head(rank: int) -> nn.Module:
    model = net()
    torch.manual_seed(rank)
    model[2] = nn.Linear(4, 2)
    return model


def drawn_by_one(rank: int) -> nn.Module:
    """As where rank 0 has read a file for all."""
    return net(seed=int(rank == 0))


def without_values(rank: int) -> nn.Module:
    with torch.device("cpu" if rank == 0 else "meta"):
        return net()


def sharded(build: Build, num_ranks: int) -> None:
    models = [build(rank) for rank in range(num_ranks)]
    first = {name: value.clone() for name, value in models[0].state_dict().items()}

    def rank(world: sw.World) -> None:
        with sw.shard(models[world.rank], "zero3", world=world) as engine:
            assert all(torch.equal(value.float(), first[name].float()) for name, value in engine.state_dict().items())

    run_ranks(num_ranks, rank)


@pytest.mark.parametrize(
    ("build", "num_ranks", "is_said"),
    [
        (lambda rank: net(parts=rank), 2, True),
        (lambda rank: net(parts=rank // 2), 4, True),
        (fresh_head, 2, True),
        (lambda rank: net(seed=rank), 2, False),
        (lambda rank: net(mark="tensor_model_parallel"), 2, False),
        (drawn_by_one, 3, False),
        (without_values, 2, False),
    ],
    ids=["parts", "parts in two groups", "a head", "seeds", "marked and whole", "read by one", "meta"],
)
def test_values_that_are_overwritten(
    build: Build, num_ranks: int, is_said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "shardwise"):
        sharded(build, num_ranks)
    said = [record.message for record in caplog.records if "different values" in record.message]
    assert len(said) == is_said
    assert all("different values of 2." in one and "the same of 1.weight" in one for one in said)


@pytest.mark.parametrize("mark", ["tensor_model_parallel", "model_parallel"])
def test_marked_parts_are_refused(mark: str) -> None:
    with pytest.raises(ModelError, match=r"2\.weight is marked as a part .*\(" + mark + r"\).*mesh: \{tp: 2\}"):
        sharded(lambda rank: net(parts=rank, mark=mark), 2)


def test_parts_of_other_shapes_are_refused() -> None:
    def build(rank: int) -> nn.Module:
        return nn.Sequential(nn.Embedding(21 - rank, 4), nn.Linear(4, 4))

    with pytest.raises(ModelError, match=r"0\.weight \[21, 4\].*0\.weight \[20, 4\].*not a part on each rank"):
        sharded(build, 2)


class Summed(nn.Linear):
    """Adds up what ranks have, as a layer that is split by its inputs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = super().forward(x)
        dist.all_reduce(y.detach().clone())
        return y


@pytest.mark.parametrize(("kind", "is_said"), [(Summed, True), (nn.Linear, False)])
@pytest.mark.parametrize("preset", ["ddp", "zero3"])
def test_collectives_in_a_forward_give_parts_away(
    kind: type[nn.Linear], is_said: bool, preset: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Where nothing is drawn alike, and once."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # for both threads
    models = []
    for seed in range(2):
        torch.manual_seed(seed)
        models.append(nn.Sequential(nn.LayerNorm(4), kind(4, 4)))

    def rank(world: sw.World) -> None:
        with sw.shard(models[world.rank], preset, world=world) as engine:
            for _ in range(2):
                engine.backward(engine(torch.ones(2, 4)).sum())
                engine.zero_grad()

    with caplog.at_level(logging.WARNING, "shardwise"):
        run_ranks(2, rank)
    said = [record.message for record in caplog.records if "the model's forward calls collectives" in record.message]
    assert len(said) == is_said
    assert all("different values of 1.weight, 1.bias" in one for one in said)
