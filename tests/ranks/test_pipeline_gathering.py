"""Inside `engine.inference()`, ranks of pipelines that do not keep all parameters of their stages gather them in calls.
Results are those of the unsplit model, also if pipelines make different numbers of calls."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pipelined import batches
from test_pipeline_inference import Wrapped, decode, from_inside, generate, plan_of, race
from test_pipeline_transformers import build
from torch import nn
from twins import work_on_ranks

import shardwise as sw
from shardwise.errors import DataError, StateError
from shardwise.testing import run_ranks
from tests import inside
from tests.models import Decoder
from tests.patience import PATIENCE
from tests.thorough import sampled, thorough_only

Mesh = dict[str, int]
KEEP = {"none": 0, "some": 20_000}
PAIRS: Mesh = {"pp": 2, "dp": 2}


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("keep", KEEP)
@pytest.mark.parametrize(
    ("kind", "preset", "mesh", "changes"),
    [
        ("llama", "zero3", PAIRS, {}),
        ("gpt2", "zero3", PAIRS, {"pipeline": {"schedule": "interleaved"}}),
        ("llama", "zero3", {"dp": 2, "pp": 2}, {}),
        ("gpt2", "zero3", {"pp": 2, "dp": 3}, {}),
        ("gpt2", "zero3-kept", {"pp": 4, "dp": 2}, {}),
        ("llama", "zero3", {"pp": 2, "dp": 2, "tp": 2}, {}),
        ("llama", "zero3", {"pp": 2, "dp": 2, "tp": 2}, {"tensor": {"sequence": True}}),
        ("llama", "zero3", {"pp": 2, "sp": 2}, {}),
        ("gemma2", "zero3", PAIRS, {}),
        ("mixtral", "zero3", PAIRS, {}),
    ],
    ids=str,
)
def test_pipelines_generate_different_numbers_of_tokens(
    kind: str, preset: str, mesh: Mesh, changes: dict[str, Any], keep: str
) -> None:
    race(build(kind), plan_of(mesh, preset, **changes), generate, KEEP[keep])


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize(
    ("kind", "preset", "mesh"),
    [
        ("llama", "hpz", {"pp": 2, "node": 2, "local": 2}),
        ("llama", "hsdp", {"pp": 2, "node": 2, "local": 2}),
        ("mixtral", "zero3", {"pp": 2, "ep": 2}),
    ],
    ids=str,
)
def test_pipelines_generate_equally_many_tokens(kind: str, preset: str, mesh: Mesh) -> None:
    race(build(kind), plan_of(mesh, preset), lambda model, _: generate(model), 0)


@sampled
@pytest.mark.parametrize("use", [decode, lambda model, place: None if place else decode(model)], ids=["all", "one"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_logits_of_a_loop_of_ones_own(kind: str, use: Callable[[nn.Module, int], Any]) -> None:
    race(build(kind), plan_of(PAIRS, "zero3"), use, 0)


def test_a_module_that_has_all_stages_is_called() -> None:
    race(Wrapped(Wrapped(Decoder())), plan_of(PAIRS, "zero3"), lambda model, _: from_inside(model), 0)


@sampled
@pytest.mark.parametrize("mesh", [PAIRS, {"pp": 2}], ids=str)
@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_parameters_on_the_host_or_a_disk_stream(kind: str, tier: str, mesh: Mesh, tmp_path: Path) -> None:
    rows = {"param": {"tier": tier}, "optim": {"tier": tier}, "grad": {"tier": "host"}}
    race(build(kind), plan_of(mesh, "zero3", rows=rows, disk=str(tmp_path)), generate)


@thorough_only("slow; smaller tests beside it cover the same code")
def test_fewer_bytes_are_held() -> None:
    """No more than promised, and nothing afterwards; then training goes on."""
    start = Decoder(num_blocks=8)
    models = [copy.deepcopy(start) for _ in range(4)]
    data = batches(2, 8)

    def rank(world: sw.World, keep_bytes: int | None, trained: nn.Module) -> tuple[int, int, int, float]:
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        with sw.shard(trained, plan_of(PAIRS, "zero3"), optimizer=optimizer, world=world) as engine:
            sharding = inside.sharding(engine)
            promised = engine.inference_bytes(keep_bytes)
            with engine.inference(keep_bytes):
                for x, _ in data:
                    trained(x)
            peak, now = sharding.meter.peak["working"], sharding.meter.now["working"]
            (x, y), *_ = data
            return peak, now, promised, engine.train_step((x, y)).item()

    whole = run_ranks(4, lambda world: rank(world, None, copy.deepcopy(start)))
    for (most, _, _, loss), (peak, now, promised, other) in zip(
        whole, run_ranks(4, lambda world: rank(world, 0, models[world.rank])), strict=True
    ):
        assert peak <= promised < most
        assert now == 0
        assert other == loss


def refused(use: Callable[[sw.Engine, int], Any]) -> list[str]:
    """What each of four ranks is told, which share two stages by twos. Afterwards all of them can begin anew."""
    torch.manual_seed(0)
    told = [""] * 4
    all_are_told = threading.Barrier(4)
    (x, _), *_ = batches(1, 3)

    def work(engine: sw.Engine) -> None:
        with pytest.raises((StateError, DataError, ValueError)) as caught, engine.inference(0):
            use(engine, engine.world.rank)
        told[engine.world.rank] = f"{type(caught.value).__name__}: {caught.value}"
        all_are_told.wait(PATIENCE)
        with engine.inference(0):
            engine.module(x)

    work_on_ranks(4, work, plan_of(PAIRS, "zero3"), lambda: Decoder().eval(), None)
    return told


def test_a_rank_that_calls_more_often_than_its_pipeline_is_named_on_all() -> None:
    """Ranks 0 and 2 are one pipeline, 1 and 3 another."""
    (x, _), *_ = batches(1, 3)

    def use(engine: sw.Engine, rank: int) -> None:
        for _ in range(1 + (rank == 2)):
            engine.module(x)

    for told in refused(use):
        assert told.startswith("StateError: Rank 0 has left engine.inference(), and rank 2 of the same pipeline calls")


def test_different_inputs_are_told_to_both_pipelines() -> None:
    data = batches(2, 3)
    told = refused(lambda engine, rank: engine.module(data[rank == 3][0]))
    assert told[0] == told[2]
    assert told[0].startswith("StateError: Ranks 1 and 3 of one pipeline call the model with different inputs")
    assert told[1] == told[3]
    assert told[1].startswith("DataError: Ranks 1 and 3 share each sample")


def test_a_rank_that_fails_between_calls_takes_the_others_along() -> None:
    (x, _), *_ = batches(1, 3)

    def use(engine: sw.Engine, rank: int) -> None:
        for number in range(3):
            if rank == 1 and number == 1:
                raise ValueError("a bad prompt")
            engine.module(x)

    told = refused(use)
    assert told[1] == "ValueError: a bad prompt"
    assert all("Rank 1 left engine.inference() with an error" in told[rank] for rank in (0, 2, 3))


def test_parameters_are_whole_in_calls_only() -> None:
    (x, y), *_ = batches(1, 8)
    for one in refused(lambda engine, _: engine.eval_step((x, y))):
        assert one.startswith("StateError: Inside engine.inference() that does not keep all parameters of a pipeline")
    for one in refused(lambda engine, rank: engine.module.tokens(x) if rank < 2 else engine.module.norm(x.float())):
        assert one.startswith("StateError: Rank 0 calls tokens, and rank 2 of the same pipeline norm")


def test_ranks_of_a_stage_have_to_keep_the_same() -> None:

    def work(engine: sw.Engine) -> None:
        keep_bytes = 100 * (engine.world.rank % 2)
        cure = r"keep_bytes=0 on rank 0 and 100 on rank 1, which have the same stages .* Give both the same"
        with pytest.raises(StateError, match=cure), engine.inference(keep_bytes):
            pass

    work_on_ranks(4, work, plan_of(PAIRS, "zero3"), Decoder, None)
