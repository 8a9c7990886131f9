"""Pipelined models against the unsplit one: every schedule and preset, on two and four stages."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from pipelined import Decoder, Told, batches, rows_of, unsplit
from torch import nn
from twins import adamw

import shardwise as sw
from shardwise.testing import run_ranks

Tensor = torch.Tensor
NUM_STEPS, MICRO_BATCHES, CLIP = 3, 4, 0.5
PRESETS = ("ddp", "zero1", "zero2", "zero3", "zero3-kept")


def pipelined(
    model: nn.Module,
    mesh: dict[str, int],
    data: list[tuple[Tensor, Tensor]],
    *,
    shares_memory: bool = True,
    optimizer: Any = adamw,
    **plan: Any,
) -> list[Told]:
    """What every rank says of a run over `data`, which ranks share along data axes."""
    num_ranks = math.prod(mesh.values())
    models = [copy.deepcopy(model) for _ in range(num_ranks)]

    def rank(world: sw.World) -> Told:
        told, mine = Told(), models[world.rank]
        full = {"mesh": mesh, "accumulate": MICRO_BATCHES, "clip_grad_norm": CLIP, **plan}
        with sw.shard(mine, full, optimizer=optimizer(mine), world=world) as engine:
            for x, y in data:
                loss = engine.forward_backward((rows_of(engine, x), rows_of(engine, y)))
                told.losses.append(engine.mean(loss.item()))
                if len(told.losses) == len(data):
                    told.grads = {name: engine.get(name, "grad") for name in told.names_of(model)}
                engine.step()
                told.norms.append(float(engine.gradient_norm or 0.0))
                told.extra.setdefault("recordings", []).append(engine._sharded.runner.programs.num_recordings)
            told.extra["own"] = sorted(name for name, _ in mine.named_parameters())
            told.params = engine.state_dict()
        return told

    return run_ranks(num_ranks, rank, shares_memory=shares_memory)


def assert_same(runs: list[Told], twin: Told, tolerance: float = 1e-5) -> None:
    for run in runs:
        assert run.losses == pytest.approx(twin.losses, rel=tolerance)
        assert run.norms == pytest.approx(twin.norms, rel=tolerance)
        assert list(run.params) == list(twin.params)
        assert run.grads.keys() == twin.grads.keys()
        for name, expected in (*twin.params.items(), *twin.grads.items()):
            found = run.grads[name] if expected is twin.grads.get(name) else run.params[name]
            assert (found is None) == (expected is None), name
            if expected is not None:
                torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize("preset", PRESETS)
def test_two_stages_with_every_preset_inside(preset: str, schedule: str) -> None:
    torch.manual_seed(0)
    model = Decoder(tied=True)
    data = batches(NUM_STEPS, 16)
    runs = pipelined(model, {"pp": 2, "dp": 2}, data, preset=preset, pipeline={"schedule": schedule})
    assert_same(runs, unsplit(model, data, clip=CLIP))
    for run in runs:  # what the first step has recorded is followed from the second on
        assert run.extra["recordings"][1:] == run.extra["recordings"][1:2] * (NUM_STEPS - 1)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("tied", [False, True])
def test_four_stages(schedule: str, tied: bool) -> None:
    torch.manual_seed(0)
    model = Decoder(tied=tied)
    data = batches(NUM_STEPS, 8)
    runs = pipelined(model, {"pp": 4}, data, preset="zero1", pipeline={"schedule": schedule}, shares_memory=False)
    assert_same(runs, unsplit(model, data, clip=CLIP))
    held = [set(run.extra["own"]) for run in runs]
    shared = held[0] & held[3]
    assert shared == ({"tokens.weight"} if tied else set())
    assert set.union(*held) == {name for name, _ in model.named_parameters()}
    assert sum(map(len, held)) == len(set.union(*held)) + tied
