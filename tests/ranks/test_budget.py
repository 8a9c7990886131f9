"""A budget: the least offload that fits, or a refusal with figures before anything is changed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from pipelined import Decoder, unsplit
from twins import Transformer, adamw, assert_same, batches, plain_run, sharded_run

import shardwise as sw
from shardwise.errors import ConfigError
from shardwise.program import plan_step, straight_trace
from shardwise.testing import run_ranks
from tests.thorough import one_in

pytestmark = one_in(2)

MODEL_BYTES = 42_368 * 4
"""Of the parameters, in fp32."""


def model_of() -> Transformer:
    torch.manual_seed(0)
    return Transformer()


def held(engine: sw.Engine) -> dict[str, Any]:
    units = engine._sharded.sharding.units
    specs = tuple(unit.spec for unit in units)
    foreseen = plan_step(specs, straight_trace(specs)).footprint(states_per_param=0)
    return {
        "report": engine.memory(),
        "foreseen": foreseen.total,
        "offload": engine.plan.offload,
        "updated": [unit.name for unit in units if unit.flats[0].spec.updates_below],
        "resting": [unit.name for unit in units if unit.flats[0].spec.tier_of("param") == "host"],
    }


def test_nothing_goes_to_the_host_that_need_not() -> None:
    run = sharded_run(model_of(), batches(1), "zero2", 2, None, after=held, budget={"device": "100MiB"})
    assert run.extra["updated"] == []
    assert not run.extra["report"].promised_on_host


@pytest.mark.parametrize(("preset", "share"), [("zero2", 2.6), ("zero2", 2.1), ("zero3", 2.2), ("zero3", 1.6)])
def test_the_least_that_fits_is_taken(preset: str, share: float) -> None:
    model, data, allowed = model_of(), batches(3), int(share * MODEL_BYTES)
    run = sharded_run(model, data, preset, 2, None, after=held, budget={"device": allowed})
    assert_same(run, plain_run(model, data))
    assert run.extra["updated"]
    assert run.extra["foreseen"] <= allowed
    picked = run.extra["offload"]
    kind = "param" if run.extra["resting"] else "optim"
    less = {"optim": picked.optim, "param": picked.param, kind: max(0.0, getattr(picked, kind) - 0.3)}
    fewer = sharded_run(model, batches(1), preset, 2, None, after=held, offload=less)
    of_kind = "resting" if kind == "param" else "updated"
    assert len(fewer.extra[of_kind]) < len(run.extra[of_kind])
    assert fewer.extra["foreseen"] > allowed


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "device": (
        {"budget": {"device": 1000}},
        r"each rank still holds .* on its device \(.* too much\).* largest unit is",
    ),
    "host": ({"budget": {"device": 2 * MODEL_BYTES, "host": 1000}}, r"would take .* more than budget.host"),
    "host alone": ({"budget": {"host": 1000}}, "say budget.device too"),
    "offload": ({"budget": {"device": 1000}, "offload": {"optim": 0.5}}, "offload and budget"),
    "states there": (
        {"preset": "offload", "budget": {"device": 1000}},
        "take a preset with states on the device",
    ),
    "param beyond optim": ({"offload": {"param": 0.5}}, "Make offload.optim 0.5 or more"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(case: str) -> None:
    plan, words = REFUSED[case]
    model = model_of()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ConfigError, match=words):
        sw.shard(model, {"preset": "zero2", **plan}, optimizer=adamw(model))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    sw.shard(model, "zero2", optimizer=adamw(model)).close()


@pytest.mark.parametrize("rows", [{}, {"param": {"tier": "host"}}], ids=["states", "params"])
def test_stages_of_a_pipeline_update_on_the_host(rows: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, data = Decoder(tied=True), batches(3, 8)
    twin = unsplit(model, data, clip=0.5)
    models = [copy.deepcopy(model) for _ in range(4)]
    plan = {"preset": "zero3-offload", "rows": rows, "mesh": {"pp": 2, "dp": 2}, "accumulate": 2, "clip_grad_norm": 0.5}

    def rank(world: sw.World) -> tuple[list[float], dict[str, torch.Tensor]]:
        mine = models[world.rank]
        with sw.shard(mine, plan, optimizer=adamw(mine), world=world) as engine:
            place, _ = engine.data_ranks
            shares = [(x.chunk(2)[place], y.chunk(2)[place]) for x, y in data]
            return [world.mean(engine.train_step(share).item()) for share in shares], engine.state_dict()

    for losses, params in run_ranks(4, rank):
        assert losses == pytest.approx(twin.losses, rel=1e-5)
        for name, value in twin.params.items():
            torch.testing.assert_close(params[name], value, rtol=1e-5, atol=1e-5)
