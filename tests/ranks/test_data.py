"""Training with a loader: the same global batches at any world size, also after resuming at another one."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset
from twins import Run, adamw, assert_same, full_params

import shardwise as sw
from shardwise.testing import run_ranks
from tests.models import LENGTH, VOCAB, Transformer
from tests.thorough import sampled, thorough_only

BATCH_ROWS, STEPS = 12, 6


class Rows(Dataset[Tensor]):
    """30 rows of tokens, each int64 `[LENGTH + 1]`."""

    def __init__(self) -> None:
        self.rows = torch.randint(VOCAB, (30, LENGTH + 1), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


class RowStream(IterableDataset[Tensor]):
    """The same rows as a stream, without random access but with a state."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Any:
        begin, self.at = self.at, 0
        rows = Rows()
        for number in range(begin, len(rows)):
            self.at = number + 1
            yield rows[number]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def mixture() -> sw.data.Mixture:
    rows = Rows().rows
    return sw.data.Mixture({"many": rows[:25], "few": rows[25:]}, {"many": 2, "few": 1})


def mask_one(row: Tensor, generator: np.random.Generator) -> Tensor:
    """An augmentation that draws random numbers."""
    row[int(generator.integers(LENGTH))] = 0
    return row


SOURCES = {"map": Rows, "mixture": mixture, "stream": RowStream}


def loader_of(source: str, world: sw.World, accumulate: int = 1) -> sw.data.Loader:
    return sw.data.Loader(
        SOURCES[source](),
        batch_rows=BATCH_ROWS,
        seed=5,
        world=world,
        accumulate=accumulate,
        steps=STEPS,
        samples=sw.data.Samples(transform=mask_one),
    )


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_any_number_of_ranks_sees_the_same_global_batches(source: str, num_ranks: int) -> None:
    def seen(world: sw.World) -> list[Tensor]:
        with loader_of(source, world) as loader:
            return list(loader)

    (whole,) = run_ranks(1, seen)
    shares = run_ranks(num_ranks, seen)
    assert len(whole) == STEPS
    assert all(
        torch.equal(torch.cat(parts), batch) for parts, batch in zip(zip(*shares, strict=True), whole, strict=True)
    )


def train(engine: sw.Engine, loader: Iterable[Tensor], accumulate: int, run: Run, *, most: int = STEPS) -> None:
    """A plain loop over micro-batches; `step` updates after the last one of a step."""
    losses: list[float] = []
    for rows in loader:
        loss = engine(rows[:, :-1], rows[:, 1:])
        engine.backward(loss)
        losses.append(loss.item())
        if engine.step() is not None:
            run.losses.append(engine.mean(sum(losses[-accumulate:]) / accumulate))
            run.norms.append(engine.gradient_norm or 0.0)
        if len(run.losses) == most:
            return


def trained(models: list[nn.Module], source: str, folder: Path, *, accumulate: int = 1, most: int = STEPS) -> list[Run]:
    """Resume from the checkpoint in `folder`, if there is one, train up to `most` more steps, and save."""

    def rank(world: sw.World) -> Run:
        model, run = models[world.rank], Run()
        plan = {"preset": "zero3", "accumulate": accumulate}
        with sw.shard(model, plan, optimizer=adamw(model), world=world) as engine:
            with loader_of(source, world, accumulate) as loader:
                resumed = engine.resume(folder)
                if resumed is not None:
                    loader.load_state_dict(resumed.state["data"])
                train(engine, loader, accumulate, run, most=most)
                engine.save(folder, state={"data": loader.state_dict()})
            run.params = full_params(engine)
        return run

    return run_ranks(len(models), rank)


def replicas(num: int) -> list[nn.Module]:
    torch.manual_seed(0)
    model = Transformer()
    return [copy.deepcopy(model) for _ in range(num)]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(("before", "after"), [((2, 1), (3, 2)), ((4, 3), (1, 1)), ((1, 2), (4, 1))])
@sampled
def test_a_run_goes_on_at_another_world_size_as_if_never_stopped(
    source: str, before: tuple[int, int], after: tuple[int, int], tmp_path: Path
) -> None:
    """`before` and `after` are numbers of ranks and micro-batches; the twin is one rank that never stops."""
    (twin,) = trained(replicas(1), source, tmp_path / "twin")
    first = trained(replicas(before[0]), source, tmp_path / "run", accumulate=before[1], most=2)[0]
    second = trained(replicas(after[0]), source, tmp_path / "run", accumulate=after[1])[0]
    both = Run(losses=first.losses + second.losses, norms=first.norms + second.norms, params=second.params)
    assert len(both.losses) == STEPS
    assert_same(both, twin, loss=1e-5, param=2e-5, norm=1e-4)


@thorough_only("slow; smaller tests beside it cover the same code")
def test_going_on_at_the_same_layout_is_bit_exact(tmp_path: Path) -> None:
    whole = trained(replicas(2), "map", tmp_path / "whole")[0]
    first = trained(replicas(2), "map", tmp_path / "run", most=3)[0]
    second = trained(replicas(2), "map", tmp_path / "run")[0]
    assert first.losses + second.losses == whole.losses
    assert all(torch.equal(param, whole.params[name]) for name, param in second.params.items())
