"""A memory budget: the least offload that fits, or a refusal with figures before anything is changed."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from experts_models import mixture
from fake_devices import Devices
from pipelined import unsplit
from twins import adamw, assert_same, batches, plain_run, sharded_run, work_on_ranks

import shardwise as sw
from shardwise.errors import ConfigError, TierError
from shardwise.fit import budget
from shardwise.memory import choose_units, unit_numel
from shardwise.plan import Offload
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import share_of_last
from shardwise.program import plan_step, straight_trace
from shardwise.system.calibration import Calibration, DiskFigures, HostFigures, write_calibration
from shardwise.system.devices import RankDevice
from shardwise.system.disk import SystemCalls
from shardwise.system.heap import FreeHeap
from shardwise.testing import run_ranks
from tests import inside
from tests.models import Decoder, Transformer
from tests.thorough import sampled, thorough_only

pytestmark = sampled

MODEL_BYTES = 42_368 * 4
"""Bytes of the parameters in fp32."""


def model_of() -> Transformer:
    torch.manual_seed(0)
    return Transformer()


def held(engine: sw.Engine) -> dict[str, Any]:
    units = inside.units(engine)
    specs = tuple(unit.spec for unit in units)
    foreseen = plan_step(specs, straight_trace(specs)).footprint(states_per_param=0)
    return {
        "report": engine.memory(),
        "foreseen": foreseen.total,
        "offload": engine.plan.offload,
        "updated": [unit.name for unit in units if unit.flats[0].spec.updates_below],
        "on_disk": [unit.name for unit in units if unit.flats[0].spec.updates_from_disk],
        "below": [unit.name for unit in units if unit.flats[0].spec.rests_on_disk],
        "resting": [unit.name for unit in units if unit.flats[0].spec.tier_of("param") == "host"],
        "on_host": foreseen.host_total,
        "said": str(engine),
    }


def test_nothing_goes_to_the_host_that_need_not() -> None:
    run = sharded_run(model_of(), batches(1), "zero2", 2, None, after=held, budget={"device": "100MiB"})
    assert run.extra["updated"] == []
    assert not run.extra["report"].promised_on_host


class Full:
    """A heap of which half is free."""

    def used_and_free(self) -> tuple[int, int]:
        return 2**25, 2**25

    def resident_bytes(self) -> int:
        return 2**26

    def trim(self) -> None:
        """Nothing changes."""


def test_free_heap_goes_back_where_a_budget_says_that_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nowhere else: page by page it comes again, which took pipelines 8 to 15 % of their time."""
    monkeypatch.setattr("shardwise.sharded.assembly.heap_to_keep_small", lambda: FreeHeap(Full()))

    def num_returns(**asked: Any) -> int:
        run = sharded_run(model_of(), batches(2), "zero2", 2, None, after=lambda one: one.memory(), **asked)
        found: int = run.extra.heap_returns
        return found

    assert num_returns(budget={"device": "100MiB"}) == 2
    assert num_returns() == 0


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


MIXED: dict[str, tuple[str, dict[str, float]]] = {
    "zero2": ("zero2", {"optim": 0.7, "optim_disk": 0.4, "param": 0.3}),
    "zero3": ("zero3", {"optim": 0.7, "optim_disk": 0.4, "param": 0.4, "param_disk": 0.1}),
}


@pytest.mark.parametrize("shares_memory", [True, False], ids=["shared", "sent"])
@pytest.mark.parametrize("case", MIXED)
def test_units_on_different_tiers_train_together(case: str, tmp_path: Path, *, shares_memory: bool) -> None:
    """States of some units are on the device, of others on the host or on disk, and so are some parameters."""
    preset, offload = MIXED[case]
    model, data = model_of(), batches(4, rows=12)
    plan = {"clip_grad_norm": 0.5, "offload": offload, "disk": str(tmp_path)}
    run = sharded_run(model, data, preset, 2, None, after=held, shares_memory=shares_memory, **plan)
    assert_same(run, plain_run(model, data, clip=0.5))
    found = run.extra
    assert len(found["resting"]) > 0
    assert 0 < len(found["on_disk"]) < len(found["updated"]) < 4
    report = found["report"]
    assert report.promised_on_disk == report.measured_on_disk
    steps = 4 * len(list(model.parameters()))  # torch's Adam counts steps in a tensor for each parameter
    for promised, measured in ((report.promised_on_host, report.measured_on_host), (report.promised, report.measured)):
        assert promised["optim"] > 0
        assert 0 <= measured["optim"] - promised["optim"] <= steps
        assert measured["param"] == promised["param"]
    assert report.measured_on_host["buffers"] == report.promised_on_host["buffers"]
    assert not list(tmp_path.iterdir())


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize(("preset", "share", "room"), [("zero3", 0.8, 0.9), ("zero2", 2.2, 0.9), ("zero3", 0.8, 0.66)])
def test_a_disk_takes_what_the_host_has_no_room_for(
    preset: str, share: float, room: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, data = Transformer(num_blocks=8), batches(3)
    device = int(share * 4 * sum(map(torch.numel, model.parameters())))
    alone = sharded_run(model, batches(1), preset, 2, None, after=held, budget={"device": device})
    host = int(room * 2 * alone.extra["on_host"])
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="shardwise"):
        budget = {"device": device, "host": host, "disk": str(tmp_path)}
        run = sharded_run(model, data, preset, 2, None, after=held, budget=budget)
    assert_same(run, plain_run(model, data))
    found, picked = run.extra, run.extra["offload"]
    assert 2 * found["on_host"] <= host
    assert found["foreseen"] <= device
    assert found["updated"] == alone.extra["updated"]
    assert found["on_disk"]
    assert (picked.optim, picked.param) == (alone.extra["offload"].optim, alone.extra["offload"].param)
    said = [message for message in caplog.messages if message.startswith("budget: ")]
    assert len(said) == 1
    assert said[0] in found["said"]
    assert "on a disk" in said[0]
    assert f"in {tmp_path}" in said[0]
    kind = "param_disk" if picked.param_disk else "optim_disk"
    fewer = {**picked.model_dump(), kind: max(0.0, getattr(picked, kind) - 0.12)}
    less = sharded_run(model, batches(1), preset, 2, None, after=held, offload=fewer, disk=str(tmp_path))
    of_kind = "below" if picked.param_disk else "on_disk"
    assert len(less.extra[of_kind]) == len(found[of_kind]) - 1
    assert bool(picked.param_disk) == (room < 0.9)
    assert 2 * less.extra["on_host"] > host


def said_of_budget(caplog: pytest.LogCaptureFixture, **beside_device: Any) -> list[str]:
    """The log lines on how a budget was met, including warnings."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="shardwise"):
        wanted = {"device": int(2.1 * MODEL_BYTES), **beside_device}
        run = sharded_run(model_of(), batches(1), "zero2", 2, None, after=held, budget=wanted)
    assert bool(run.extra["on_disk"]) == ("disk" in beside_device)
    return "\n".join(caplog.messages).splitlines()


@thorough_only("slow; smaller tests beside it cover the same code")
def test_it_says_how_long_a_step_takes_at_least(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The time comes from the machine's calibration. Without one, the log names the commands that measure it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    disk = {"host": 660_000, "disk": str(tmp_path / "states")}
    (unknown,) = [line for line in said_of_budget(caplog, **disk) if "To estimate times" in line]
    assert f"shardwise bench host and shardwise bench disk {tmp_path / 'states'}" in unknown
    slow = DiskFigures(1e4, 1e4, 8, 2**20, True, "2026-11-25")
    file = write_calibration(Calibration("node7", {str(tmp_path): slow}, HostFigures(1e10, 1e9, 1, "2026-11-25")))
    (known,) = [line for line in said_of_budget(caplog, **disk) if "A step takes at least" in line]
    assert "because the disk, which 2 ranks share, is busy for that time (measured on node7)" in known
    file.write_text("{")
    assert any("is not a calibration that can be read" in line for line in said_of_budget(caplog))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "device": (
        {"budget": {"device": 1000}},
        r"each rank still holds .* on its device \(.* too much\).* largest unit is",
    ),
    "host": ({"budget": {"device": 2 * MODEL_BYTES, "host": 1000}}, r"would take .* more than budget.host"),
    "host alone": ({"budget": {"host": 1000}}, "give budget.device too"),
    "host and disk": (
        {"budget": {"device": 2 * MODEL_BYTES, "host": 1000, "disk": "/tmp"}},
        r"would take .* beside the disk: .* more than budget.host. The largest unit is blocks.0",
    ),
    "disk alone": ({"budget": {"device": 1000, "disk": "/tmp"}}, "give budget.host too, or nothing"),
    "two disks": (
        {"budget": {"device": 1000, "host": 1000, "disk": "/tmp"}, "disk": "/var/tmp"},
        "Name one folder",
    ),
    "more than there is": ({"budget": {"device": 1000, "host": "1000TiB"}}, r"of memory: .* less. Allow what there is"),
    "params beyond states": (
        {"preset": "zero3", "offload": {"optim": 0.5, "optim_disk": 0.2, "param": 0.5, "param_disk": 0.5}},
        "only beside their states",
    ),
    "params that are copies": (
        {"offload": {"optim": 0.5, "optim_disk": 0.5, "param": 0.5, "param_disk": 0.5}, "mesh": {"dp": 1}},
        "names no folder",
    ),
    "disk beyond optim": ({"offload": {"optim": 0.2, "optim_disk": 0.5}}, "Make offload.optim 0.5 or more"),
    "offload": ({"budget": {"device": 1000}, "offload": {"optim": 0.5}}, "offload and budget"),
    "states there": (
        {"preset": "offload", "budget": {"device": 1000}},
        "states of all units on the host. Leave out budget, or take a preset with states on the device",
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


@pytest.mark.parametrize("size", ["abc", -1, 1.5, "-1"])
def test_sizes_that_are_none_are_refused(size: Any) -> None:
    model = model_of()
    with sw.shard(model, "zero2", optimizer=adamw(model)) as engine:
        with pytest.raises(ConfigError, match=r"^keep_bytes of inference\(\)"), engine.inference(size):
            pass
        for which in ({"device": size}, {"device": 10**9, "host": size}):
            with pytest.raises(ConfigError, match=r"of fit_activations\(\)"):
                engine.fit_activations(batches(1)[0], **which)


def test_more_than_the_smallest_device_has_is_refused() -> None:
    models = [model_of() for _ in range(2)]
    devices = Devices()
    devices.accelerator.device_bytes = 80 * 2**20

    def rank(world: sw.World) -> str:
        if world.rank == 1:
            world.rank_device = SmallerDevice(world.rank_device)
        model = models[world.rank]
        with pytest.raises(ConfigError) as refused:
            sw.shard(model, {"preset": "zero2", "budget": {"device": "81MiB"}}, optimizer=adamw(model), world=world)
        plan = {"preset": "zero2", "budget": {"device": "40MiB"}}
        sw.shard(model, plan, optimizer=adamw(model), world=world).close()
        return str(refused.value)

    for said in devices.run(2, rank):
        assert "budget.device is 81.0 MiB, and a device of this job has 40.0 MiB of memory: 41.0 MiB less" in said


class SmallerDevice(RankDevice):
    """A rank's device with 40 MiB of memory."""

    def __init__(self, rank_device: RankDevice) -> None:
        super().__init__(rank_device.device, rank_device.accelerator, 1)

    @property
    def memory_bytes(self) -> int | None:
        return 40 * 2**20


def test_a_disk_without_room_is_refused_before_anything_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Transformer(num_blocks=8)
    model_bytes = 4 * sum(map(torch.numel, model.parameters()))
    before = copy.deepcopy(model.state_dict())
    monkeypatch.setattr(SystemCalls, "free_bytes", lambda self, folder: 1000)
    budget = {"device": int(2.2 * model_bytes), "host": int(2.3 * model_bytes), "disk": str(tmp_path / "scratch")}
    with pytest.raises(TierError, match=r"has 1000 B free, and .* are needed: .* too little. Make room there"):
        sw.shard(model, {"preset": "zero2", "budget": budget}, optimizer=adamw(model))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    sw.shard(model, "zero2", optimizer=adamw(model)).close()
    assert not list(tmp_path.glob("scratch/*"))


@pytest.mark.parametrize("rows", [{}, {"param": {"tier": "host"}}], ids=["states", "params"])
def test_stages_of_a_pipeline_update_on_the_host(rows: dict[str, Any]) -> None:
    model, data = Decoder(tied=True), batches(3, 8)
    twin = unsplit(model, data, clip=0.5)
    plan = {"preset": "zero3-offload", "rows": rows, "mesh": {"pp": 2, "dp": 2}, "accumulate": 2, "clip_grad_norm": 0.5}

    def work(engine: sw.Engine) -> tuple[list[float], dict[str, torch.Tensor]]:
        place, _ = engine.data_ranks
        shares = [(x.chunk(2)[place], y.chunk(2)[place]) for x, y in data]
        return [engine.world.mean(engine.train_step(share).item()) for share in shares], engine.state_dict()

    for losses, params in work_on_ranks(4, work, plan, model):
        assert losses == pytest.approx(twin.losses, rel=1e-5)
        for name, value in twin.params.items():
            torch.testing.assert_close(params[name], value, rtol=1e-5, atol=1e-5)


SPLIT: dict[str, dict[str, Any]] = {
    "tp": {"mesh": {"dp": 1, "tp": 2}, "tensor": {"plan": {"blocks.*.up": "column", "blocks.*.down": "row"}}},
    "pp": {"mesh": {"pp": 2, "dp": 1}},
    "ep": {"mesh": {"ep": 2}},
}


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize("preset", ["zero3-kept", "zero3", "ddp"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1"])
def test_a_pipeline_s_budget_is_of_its_whole_schedule(preset: str, schedule: str) -> None:
    """The budget includes what a stage holds between the forwards of later micro-batches and their backwards."""
    models = [Decoder(num_blocks=8) for _ in range(4)]
    plan = {"preset": preset, "mesh": {"pp": 2, "dp": 2}, "accumulate": 6, "pipeline": {"schedule": schedule}}

    def promised(world: sw.World, **more: Any) -> tuple[int, Offload]:
        mine = copy.deepcopy(models[world.rank])
        with sw.shard(mine, {**plan, **more}, optimizer=adamw(mine), world=world) as engine:
            return engine.memory().promised_total, engine.plan.offload

    most = max(total for total, _ in run_ranks(4, promised))
    for share in (1.0, 0.99, 0.9):
        allowed = int(share * most)
        fitted = run_ranks(4, lambda world, device=allowed: promised(world, budget={"device": device}))
        assert max(total for total, _ in fitted) <= allowed
        assert (fitted[0][1] == Offload()) == (share == 1.0), "just enough takes nothing away"


@pytest.mark.parametrize("preset", ["zero3-kept", "zero3", "ddp", "zero1"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1", "gpipe"])
def test_later_micro_batches_hold_what_those_before_them_do(
    preset: str, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prediction is the same for any number of micro-batches, so a budget computes only some of them."""
    with torch.device("meta"):
        model = Decoder(num_blocks=8)
    sizes = {"pp": 4, "dp": 2}
    plan = sw.Plan(preset=preset, mesh=sizes, accumulate=24, pipeline={"schedule": schedule})
    held = set()
    for times in (budget.SETTLED_AFTER, 6):
        monkeypatch.setattr(budget, "SETTLED_AFTER", times)
        search = budget._Search(model, plan, Mesh.of(sizes, 8), budget.Ranks(on_cpu=False, num_local=8), None, 2)
        held.add((search.holds(Offload()), search.holds(Offload(optim=0.5))))
    assert len(held) == 1


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize("axis", SPLIT)
def test_models_that_are_split_have_a_budget(axis: str) -> None:
    """The rank that holds most fits the budget; with one unit less offloaded it would not. Training is unchanged."""
    model: torch.nn.Module = mixture() if axis == "ep" else Decoder()
    data = batches(2, 8)

    def trained(world: sw.World, **more: Any) -> dict[str, Any]:
        mine = copy.deepcopy(models[world.rank])
        plan = {"preset": "zero2", "accumulate": 2, **SPLIT[axis], **more}
        with sw.shard(mine, plan, optimizer=adamw(mine), world=world) as engine:
            place, number = engine.data_ranks
            shares = [(x.chunk(number)[place], y.chunk(number)[place]) for x, y in data]
            losses = [world.mean(engine.train_step(share).item()) for share in shares]
            return {**held(engine), "losses": losses, "params": engine.state_dict()}

    models = [model, copy.deepcopy(model)]
    whole = run_ranks(2, trained)
    allowed = int(0.85 * max(one["foreseen"] for one in whole))
    fitted = run_ranks(2, lambda world: trained(world, budget={"device": allowed}))
    sizes = [unit_numel(unit).trained for unit in choose_units(model, sw.Plan())]
    count = len(share_of_last(sizes, fitted[0]["offload"].optim)) - 1
    share = (sum(sizes[len(sizes) - count :]) - 0.5) / sum(sizes) if count else 0.0
    fewer = run_ranks(2, lambda world: trained(world, offload={"optim": share}))
    assert max(one["foreseen"] for one in fewer) > allowed
    for one, twin in zip(fitted, whole, strict=True):
        assert one["foreseen"] <= allowed
        assert one["losses"] == pytest.approx(twin["losses"], rel=1e-5)
        for name, value in twin["params"].items():
            torch.testing.assert_close(one["params"][name], value, rtol=1e-5, atol=1e-5)
