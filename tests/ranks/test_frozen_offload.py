"""Offload and budgets of models with frozen parameters: shares of parameters include them, shares of states do not."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from twins import assert_same, batches, plain_run, sharded_run, work_on_ranks

import shardwise as sw
from shardwise.errors import ConfigError
from shardwise.plan import Offload
from shardwise.plan.placement.offload import Offloaded, UnitNumel
from shardwise.testing import run_ranks
from tests import inside
from tests.models import Lora, Transformer
from tests.thorough import sampled, thorough_only

HOST = {"param": {"tier": "host"}, "grad": {"tier": "host"}, "optim": {"tier": "host"}}


def frozen_but(trained: str, num_blocks: int = 4) -> Transformer:
    """A model of which only the head, the first block, adapters in all blocks, or nothing is trained."""
    torch.manual_seed(0)
    model = Transformer(num_blocks=num_blocks)
    model.requires_grad_(False)
    if trained == "head":
        model.head.requires_grad_(True)
    elif trained == "block":
        model.blocks[0].requires_grad_(True)
    elif trained == "adapters":
        for block in model.blocks:
            block.up = Lora(block.up)
    return model


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    trained = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.AdamW(trained, lr=3e-3, weight_decay=0.1, eps=1e-5)


def placed(engine: sw.Engine) -> dict[str, Any]:
    """The share of all elements kept on each tier, the share of trained ones updated on each tier, and reports."""
    specs = [flat.spec for flat in inside.flats(engine)]
    trained = [spec for spec in specs if spec.trainable]

    def share(tier: str, buffer: Any, of: Any) -> float:
        return sum(spec.numel for spec in of if spec.tier_of(buffer) == tier) / max(1, sum(spec.numel for spec in of))

    return {
        "resting": {tier: share(tier, "param", specs) for tier in ("device", "host", "disk")},
        "updated": {tier: share(tier, "master", trained) for tier in ("device", "host", "disk")},
        "report": engine.memory(),
        "offload": engine.plan.offload,
        "said": str(engine),
    }


def assert_kept(report: sw.MemoryReport) -> None:
    """Each tier holds exactly the predicted bytes of parameters."""
    pairs = [(report.promised, report.measured), (report.promised_on_host, report.measured_on_host)]
    for promised, measured in pairs:
        assert measured.get("param", 0) == promised.get("param", 0)
    assert report.measured_on_disk == report.promised_on_disk


SHARES: dict[str, dict[str, float]] = {
    "all": {"optim": 1.0, "param": 1.0},
    "half": {"optim": 0.5, "param": 0.5},
    "disk": {"optim": 1.0, "param": 0.75, "optim_disk": 0.5, "param_disk": 0.5},
}


@sampled
@pytest.mark.parametrize("rest", ["host", "disk"])
def test_frozen_parameters_leave_and_all_updates_stay(rest: str, tmp_path: Path) -> None:
    """LoRA: the base rests on the host or a disk, and adapters, their states and their update are on the device."""
    model, data = frozen_but("adapters"), batches(3)
    shares = {"param": 1.0, **({"param_disk": 1.0} if rest == "disk" else {})}
    run = sharded_run(model, data, "zero3", 2, None, adamw, after=placed, offload=shares, disk=str(tmp_path))
    assert_same(run, plain_run(model, data, adamw))
    found, params = run.extra, list(model.parameters())
    frozen = sum(one.numel() for one in params if not one.requires_grad) / sum(one.numel() for one in params)
    assert found["updated"] == {"device": 1.0, "host": 0.0, "disk": 0.0}
    assert found["resting"][rest] == pytest.approx(frozen, abs=0.01)
    assert found["resting"]["device"] == pytest.approx(1 - frozen, abs=0.01)
    assert found["report"].promised_on_host.get("optim", 0) == 0
    assert_kept(found["report"])


@pytest.mark.parametrize(
    ("trained", "shares", "words"),
    [
        ("block", {"param": 0.95}, r"of this model 0\.\d+ is frozen\. Make offload.optim 0.95 or more"),
        ("all", {"param": 1.0}, "nothing in this model is frozen. Make offload.optim 1 or more"),
        ("block", {"param": 1.0, "optim": 1.0, "param_disk": 0.95}, "is frozen. Make offload.optim_disk 0.95 or more"),
        ("adapters", {"param": 0.5, "param_disk": 0.6}, "Make offload.param 0.6 or more"),
    ],
)
def test_trained_parameters_do_not_leave_without_their_update(
    trained: str, shares: dict[str, float], words: str, tmp_path: Path
) -> None:
    model = frozen_but(trained)
    if trained == "all":
        model.requires_grad_(True)
    with pytest.raises(ConfigError, match=words):
        sw.shard(model, {"preset": "zero3", "offload": shares, "disk": str(tmp_path)}, optimizer=adamw(model))


@thorough_only("slow; smaller tests beside it cover the same code")
def test_a_budget_leaves_updates_on_the_device_if_frozen_parameters_suffice(tmp_path: Path) -> None:
    """Device, then host: the base goes to the host, and as little of it as necessary to the disk."""
    model, data = frozen_but("adapters", num_blocks=9), batches(2)
    whole = sharded_run(model, batches(1), "zero3", 2, None, adamw, after=placed)
    device = int(0.75 * whole.extra["report"].promised_total)
    run = sharded_run(model, data, "zero3", 2, None, adamw, after=placed, budget={"device": device})
    assert_same(run, plain_run(model, data, adamw))
    found = run.extra
    assert found["offload"].optim == 0.0 < found["offload"].param < 1.0
    assert found["updated"]["device"] == 1.0
    assert "budget: frozen parameters of " in found["said"]
    host = int(0.8 * 2 * sum(found["report"].promised_on_host.values()))
    budget = {"device": device, "host": host, "disk": str(tmp_path)}
    run = sharded_run(model, data, "zero3", 2, None, adamw, after=placed, budget=budget)
    assert_same(run, plain_run(model, data, adamw))
    assert run.extra["resting"]["disk"] > 0
    assert run.extra["updated"]["device"] == 1.0
    assert "but those of" in run.extra["said"]


@sampled
@pytest.mark.parametrize("trained", ["adapters", "head", "block"])
@pytest.mark.parametrize("preset", ["zero3", "zero2"])
@pytest.mark.parametrize("case", SHARES)
def test_a_share_of_parameters_counts_frozen_ones(case: str, preset: str, trained: str, tmp_path: Path) -> None:
    shares = SHARES[case]
    if preset == "zero2":
        shares = {key: share for key, share in shares.items() if key != "param_disk"}
    model, data = frozen_but(trained), batches(3)
    disk = {"disk": str(tmp_path)} if "optim_disk" in shares else {}
    run = sharded_run(model, data, preset, 2, None, adamw, after=placed, offload=shares, **disk)
    assert_same(run, plain_run(model, data, adamw))
    found = run.extra
    resting, updated = found["resting"], found["updated"]
    assert resting["host"] + resting["disk"] >= shares["param"] - 1e-9
    assert resting["disk"] >= shares.get("param_disk", 0.0) - 1e-9
    assert updated["host"] + updated["disk"] >= shares["optim"] - 1e-9
    assert updated["disk"] >= shares.get("optim_disk", 0.0) - 1e-9
    assert (resting["device"] == 0.0) == (shares["param"] == 1.0), "and no more than units as a whole make necessary"
    assert_kept(found["report"])


def test_all_parameters_may_leave_the_device_as_rows_say() -> None:
    """A share of 1 is the same as rows that apply to all units."""
    model, data = frozen_but("head"), batches(1)
    shared = sharded_run(model, data, "zero3", 2, None, adamw, after=placed, offload={"optim": 1.0, "param": 1.0})
    ruled = sharded_run(model, data, "zero3", 2, None, adamw, after=placed, rows=HOST)
    reports = shared.extra["report"], ruled.extra["report"]
    assert reports[0].promised["param"] == reports[1].promised["param"] == 0
    assert reports[0].promised_on_host == reports[1].promised_on_host


@pytest.mark.parametrize("rest", ["host", "disk"])
def test_a_frozen_model_generates_from_where_its_share_rests(rest: str, tmp_path: Path) -> None:
    model, ((x, _),) = frozen_but("nothing"), batches(1)
    expected = model.logits(x)
    shares = {"optim": 1.0, "param": 1.0, **({"optim_disk": 1.0, "param_disk": 1.0} if rest == "disk" else {})}
    plan = {"preset": "zero3", "offload": shares, "disk": str(tmp_path)}

    def work(engine: sw.Engine) -> tuple[torch.Tensor, dict[str, Any]]:
        mine = engine.module
        with engine.inference():
            return mine.logits(x), placed(engine)

    for logits, found in work_on_ranks(2, work, plan, lambda: frozen_but("nothing"), None):
        assert torch.equal(logits, expected)
        assert found["resting"][rest] == 1.0
        assert found["report"].promised["param"] == 0
        assert_kept(found["report"])


@sampled
@pytest.mark.parametrize("trained", ["head", "adapters", "nothing"])
def test_a_budget_counts_frozen_parameters(trained: str) -> None:
    """A budget takes the least offload that fits, and is refused only below what the largest offload keeps."""
    model = frozen_but(trained)

    def promised(world: sw.World, **plan: Any) -> dict[str, Any]:
        mine = copy.deepcopy(model)
        optimizer = adamw(mine) if trained != "nothing" else None
        with sw.shard(mine, {"preset": "zero3", **plan}, optimizer=optimizer, world=world) as engine:
            return placed(engine)

    whole = run_ranks(2, promised)[0]["report"].promised_total
    least = run_ranks(2, lambda world: promised(world, rows=HOST))[0]["report"].promised_total
    assert least < 0.8 * whole
    fitted = run_ranks(2, lambda world: promised(world, budget={"device": least}))[0]
    assert fitted["report"].promised_total <= least
    assert fitted["resting"]["device"] < 1.0
    assert re.search(r"budget: .*parameters of .* rest on the host", fitted["said"])
    assert ("gradients, states and update" in fitted["said"]) == (trained != "nothing")
    half = run_ranks(2, lambda world: promised(world, budget={"device": (least + whole) // 2}))[0]
    assert half["offload"].param < fitted["offload"].param
    with pytest.raises(ConfigError, match=r"with all that can go on the host each rank still holds"):
        run_ranks(2, lambda world: promised(world, budget={"device": least - 1}))


@thorough_only("slow; smaller tests beside it cover the same code")
def test_a_budget_puts_frozen_parameters_on_the_disk(tmp_path: Path) -> None:
    model, data = frozen_but("adapters", num_blocks=9), batches(2)
    ruled = sharded_run(model, batches(1), "zero3", 2, None, adamw, after=placed, rows=HOST)
    device = ruled.extra["report"].promised_total
    alone = sharded_run(model, batches(1), "zero3", 2, None, adamw, after=placed, budget={"device": device})
    host = int(0.8 * 2 * sum(alone.extra["report"].promised_on_host.values()))
    budget = {"device": device, "host": host, "disk": str(tmp_path)}
    run = sharded_run(model, data, "zero3", 2, None, adamw, after=placed, budget=budget)
    assert_same(run, plain_run(model, data, adamw))
    assert run.extra["resting"]["disk"] > 0
    assert 2 * sum(run.extra["report"].promised_on_host.values()) <= host
    assert "but those of" in run.extra["said"]
    assert_kept(run.extra["report"])


def test_shares_are_met_by_any_mixture_of_frozen_and_trained_units() -> None:
    kinds = [UnitNumel(0, 50), UnitNumel(8, 8), UnitNumel(2, 30), UnitNumel(0, 0)]
    shares = [0.0, 0.25, 0.5, 1.0]
    for number in range(4**4):
        sizes = [kinds[number // 4**place % 4] for place in range(4)]
        for optim in shares:
            for param in (one for one in shares if one <= optim):
                for below in (one for one in shares if one <= param):
                    offload = Offload(optim=optim, param=param, optim_disk=below, param_disk=below)
                    assert_met(Offloaded.of(offload, sizes), offload, sizes)


def assert_met(found: Offloaded, offload: Offload, sizes: list[UnitNumel]) -> None:
    trained, total = sum(size.trained for size in sizes), sum(size.all for size in sizes)

    def movable(places: frozenset[int], beside: frozenset[int]) -> int:
        return sum(sizes[place].all - (0 if place in beside else sizes[place].trained) for place in places)

    assert sum(sizes[place].trained for place in found.updated) >= offload.optim * trained
    assert sum(sizes[place].trained for place in found.on_disk) >= offload.optim_disk * trained
    assert movable(found.resting, found.updated) >= offload.param * total
    assert movable(found.resting_on_disk, found.on_disk) >= offload.param_disk * total
    assert found.on_disk <= found.updated
    assert found.resting_on_disk <= found.resting
    assert all(sizes[place].trained for place in found.updated)
