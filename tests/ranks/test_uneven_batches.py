"""Batches that do not divide evenly among ranks: every sample counts the same, as in a plain loop."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from experts_models import mixture
from torch import nn
from twins import Run, adamw, assert_same, full_params, plain_run, work_on_ranks

import shardwise as sw
from shardwise.errors import StateError
from shardwise.testing import run_ranks
from tests.models import LENGTH, VOCAB, Decoder, Transformer
from tests.thorough import sampled, thorough_only

Tensor = torch.Tensor
STEPS, CLIP = 4, 0.5
ROWS = torch.randint(VOCAB, (50, LENGTH + 1), generator=torch.Generator().manual_seed(1))
Loop = Callable[[sw.Engine, Any, Iterator[Tensor]], float]


def cut(rows: Tensor) -> tuple[Tensor, Tensor]:
    return rows[:, :-1], rows[:, 1:]


def plain(engine: sw.Engine, optimizer: Any, rows: Iterator[Tensor]) -> float:
    """A plain loop that does not call the engine's training methods."""
    losses = []
    for _ in range(engine.plan.accumulate):
        loss = engine.module(*cut(next(rows)))
        (loss / engine.plan.accumulate).backward()
        losses.append(engine.mean(loss.item()))
    optimizer.step()
    optimizer.zero_grad()
    return losses[0] if len(losses) == 1 else math.nan


def with_backward(engine: sw.Engine, _: Any, rows: Iterator[Tensor]) -> float:
    for place in range(engine.plan.accumulate):
        is_last = place == engine.plan.accumulate - 1
        with nullcontext() if is_last else engine.no_sync():
            loss = engine(*cut(next(rows)))
            engine.backward(loss)
    engine.step(is_last=True)
    return engine.mean(loss.item()) if engine.plan.accumulate == 1 else math.nan


def with_iterator(engine: sw.Engine, _: Any, rows: Iterator[Tensor]) -> float:
    loss = engine.train_step(cut(one) for one in rows)
    return engine.mean(loss.item())


def with_list(engine: sw.Engine, _: Any, rows: Iterator[Tensor]) -> float:
    loss = engine.train_step([cut(next(rows)) for _ in range(engine.plan.accumulate)])
    return engine.log({"loss": loss})["loss"]


def with_whole_batch(engine: sw.Engine, _: Any, rows: Iterator[Tensor]) -> float:
    """The engine divides batches that the loader has not divided."""
    return engine.mean(engine.train_step(cut(next(rows))).item())


LOOPS: dict[str, Loop] = {
    loop.__name__: loop for loop in (plain, with_backward, with_iterator, with_list, with_whole_batch)
}


def loader_of(engine: sw.Engine, batch_rows: int, accumulate: int) -> sw.data.Loader:
    return sw.data.Loader(ROWS, batch_rows=batch_rows, world=engine.data_ranks, accumulate=accumulate, steps=STEPS)


def trained(model: nn.Module, num_ranks: int, loop: Loop, batch_rows: int, plan: dict[str, Any]) -> list[Run]:
    models = [copy.deepcopy(model) for _ in range(num_ranks)]

    def rank(world: sw.World) -> Run:
        mine, run = models[world.rank], Run()
        optimizer = adamw(mine)
        with sw.shard(mine, {"clip_grad_norm": CLIP, **plan}, optimizer=optimizer, world=world) as engine:
            accumulate = 1 if loop is with_whole_batch else engine.plan.accumulate
            with loader_of(engine, batch_rows, accumulate) as loader:
                batches = iter(loader)
                for _ in range(STEPS):
                    run.losses.append(loop(engine, optimizer, batches))
                    run.norms.append(engine.gradient_norm or 0.0)
            run.params = engine.state_dict() if engine.mesh.axes != ("dp",) else full_params(engine)
        return run

    return run_ranks(num_ranks, rank, shares_memory=num_ranks != 3)


def twin_of(model: nn.Module, batch_rows: int, **options: Any) -> Run:
    with sw.data.Loader(ROWS, batch_rows=batch_rows, steps=STEPS) as loader:
        return plain_run(model, [cut(rows) for rows in loader], clip=CLIP, **options)


def assert_exact(runs: list[Run], twin: Run) -> None:
    for run in runs:
        if any(map(math.isnan, run.losses)):
            run.losses = twin.losses
        assert_same(run, twin, loss=1e-6, param=1e-5, norm=1e-5)


def transformer() -> nn.Module:
    torch.manual_seed(0)
    return Transformer()


class TestOnDataRanks:
    pytestmark = sampled

    @sampled
    @pytest.mark.parametrize(("batch_rows", "accumulate"), [(8, 1), (8, 2), (8, 4), (2, 1), (7, 2)])
    @pytest.mark.parametrize("preset", ["ddp", "zero1", "zero2", "zero3"])
    @pytest.mark.parametrize("loop", LOOPS)
    def test_every_sample_counts_the_same(self, loop: str, preset: str, batch_rows: int, accumulate: int) -> None:
        """Three ranks, some of which have no sample in a micro-batch, or in the whole step."""
        plan = {"preset": preset, "accumulate": accumulate}
        assert_exact(trained(transformer(), 3, LOOPS[loop], batch_rows, plan), twin_of(transformer(), batch_rows))


@thorough_only("three things at once; the tests beside it have each")
def test_with_partial_gradients_and_two_data_axes() -> None:
    plan = {
        "preset": "hsdp",
        "mesh": {"node": 2, "local": 2},
        "accumulate": 2,
        "rows": {"grad": {"partial": ["node"]}},
    }
    assert_exact(trained(transformer(), 4, with_backward, 9, plan), twin_of(transformer(), 9))


@sampled
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_in_narrow_precisions(precision: str) -> None:
    """Close to the plain model in the same precision."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    loop = with_backward
    runs = trained(transformer(), 3, loop, 8, {"preset": "zero3", "precision": precision})
    twin = twin_of(transformer(), 8, dtype=dtype)
    whole = twin_of(transformer(), 8)
    assert len(runs[0].losses) == STEPS
    for run in runs:
        for ours, theirs, wide in zip(run.losses, twin.losses, whole.losses, strict=True):
            assert abs(ours - theirs) <= 1e-3 * wide
        for ours, theirs in zip(run.norms, twin.norms, strict=True):
            assert abs(ours - theirs) <= 2e-2 * theirs


def test_in_a_pipeline() -> None:
    """Two stages with two data ranks, and micro-batches of different sizes."""
    model = Decoder(tied=True)
    plan = {"preset": "zero2", "mesh": {"pp": 2, "dp": 2}, "accumulate": 3}
    assert_exact(trained(model, 4, with_whole_batch, 7, plan), twin_of(model, 7))


def test_experts_have_the_tokens_of_all_ranks() -> None:
    """Gradients of experts come from tokens of several ranks, so losses must be weighed; unweighed ones are refused."""
    model = mixture()
    plan = {"preset": "zero2", "mesh": {"ep": 2}}
    assert_exact(trained(model, 2, with_backward, 5, plan), twin_of(model, 5))
    with pytest.raises(StateError, match=r"each loss has to be weighed\. Call engine.backward"):
        trained(model, 2, plain, 5, plan)


@thorough_only("slow; smaller tests beside it cover the same code")
def test_even_batches_are_as_they_were() -> None:
    """Bit-identical: a loader that follows the engine changes nothing if all ranks have equally many samples."""
    plan = {"preset": "zero3", "accumulate": 2}
    runs = trained(transformer(), 2, with_iterator, 8, plan)
    others = trained_by_pairs(8, plan)
    for run, other in zip(runs, others, strict=True):
        assert run.norms == other.norms
        assert run.losses == other.losses
        assert all(torch.equal(value, other.params[name]) for name, value in run.params.items())


def trained_by_pairs(batch_rows: int, plan: dict[str, Any]) -> list[Run]:

    def work(engine: sw.Engine) -> Run:
        run = Run()
        pair = tuple(engine.data_ranks)
        with sw.data.Loader(ROWS, batch_rows=batch_rows, world=pair, accumulate=2, steps=STEPS) as loader:  # type: ignore[arg-type]
            batches = iter(loader)
            for _ in range(STEPS):
                run.losses.append(with_iterator(engine, None, batches))
                run.norms.append(engine.gradient_norm or 0.0)
        run.params = full_params(engine)
        return run

    return work_on_ranks(2, work, {"clip_grad_norm": CLIP, **plan}, transformer)
