"""On one device, by one rank and by several: every feature trains as the plain loop on the same device does."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from one_device import OneDevice
from sequences import Batch as NamedBatch
from sequences import whole_run
from test_all_products import CLIP, llama, micro_batches, mixtral, sgd
from test_all_products import batches as token_batches
from test_sequence_transformers import own_loss
from torch import nn
from twins import (
    Batch,
    MakeOptimizer,
    Run,
    adamw,
    assert_alike,
    assert_as_near,
    at_once,
    batches,
    full_params,
    muon_groups,
    plain_run,
    plan_of,
    ranks_run,
    sharded_run,
    share_of,
)

import shardwise as sw
from shardwise.plan.placement import PRESETS
from tests.models import Transformer
from tests.thorough import sampled

Tensor = torch.Tensor
Step = Callable[[sw.Engine, Batch], Tensor]
REHEARSES = os.environ.get("DEVICE", "cpu") == "cpu"
pytestmark = [pytest.mark.device, *([sampled] if REHEARSES else [])]

GRID = {"node": 2, "local": 2}
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
SHAPES: list[tuple[int, dict[str, int] | None]] = [(1, None), (2, None), (4, None), (4, GRID)]
ON_PRESETS = [
    (preset, num_ranks, mesh)
    for preset, made in PRESETS.items()
    for num_ranks, mesh in SHAPES
    if len(made.axes) == (2 if mesh else 1) or num_ranks == 1
]


def name_of(value: Any) -> str | None:
    if isinstance(value, dict):
        return "x".join(f"{key}{size}" for key, size in value.items())
    return "one-axis" if value is None else None


def model_on(device: OneDevice, *, tied: bool = True) -> Transformer:
    torch.manual_seed(0)
    return Transformer(tied=tied, num_blocks=2).to(device.device)


def data_on(device: OneDevice, num_steps: int = 4, rows: int = 16) -> list[Batch]:
    return [(x.to(device.device), y.to(device.device)) for x, y in batches(num_steps, rows=rows)]


def whole_step(engine: sw.Engine, batch: Batch) -> Tensor:
    loss = engine(*batch)
    engine.backward(loss)
    engine.step()
    return loss


def run_on(
    device: OneDevice,
    model: nn.Module,
    data: Sequence[Batch],
    num_ranks: int,
    plan: Mapping[str, Any],
    make_optimizer: MakeOptimizer = adamw,
    step: Step = whole_step,
) -> Run:
    replicas = [copy.deepcopy(model) for _ in range(num_ranks)]

    def rank(world: sw.World) -> Run:
        replica, run = replicas[world.rank], Run()
        with sw.shard(replica, dict(plan), optimizer=make_optimizer(replica), world=world) as engine:
            for batch in data:
                loss = step(engine, share_of(engine, batch))
                run.losses.append(world.mean(loss.item()))
                run.norms.append(float(engine.gradient_norm or 0.0))
            run.params = full_params(engine)
            report = engine.memory()
            run.extra = {"measured": report.measured, "promised": report.promised}
        return run

    runs = device.run(num_ranks, rank)
    for run in runs[1:]:
        assert run.losses == runs[0].losses
        assert all(torch.equal(param, runs[0].params[name]) for name, param in run.params.items())
    if num_ranks > 1:
        assert device.num_works == device.num_waited
        assert device.num_works.total()
    return runs[0]


def assert_trains_like_the_plain_loop(
    run: Run,
    model: nn.Module,
    data: Sequence[Batch],
    make_optimizer: MakeOptimizer = adamw,
    *,
    num_shares: int,
    clip: float | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Within what rounding does to the plain loop on this device, measured by giving it the rows in another order."""
    twin = plain_run(model, data, make_optimizer, shares=num_shares, clip=clip, dtype=dtype)
    reordered = [(x.flip(0), y.flip(0)) for x, y in data]
    other = plain_run(model, reordered, make_optimizer, shares=1, clip=clip, dtype=dtype)
    for one in (twin, other):
        one.params = {name: param.cpu() for name, param in one.params.items()}
    assert_as_near(run, twin, other)


# -- presets --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize(("preset", "num_ranks", "mesh"), ON_PRESETS, ids=name_of)
def test_presets(preset: str, num_ranks: int, mesh: Any, precision: str, device: OneDevice, tmp_path: Path) -> None:
    model, data = model_on(device), data_on(device)
    disk = {"disk": str(tmp_path)} if PRESETS[preset].optim.tier == "disk" else {}
    plan = plan_of(preset, mesh, precision=precision, clip_grad_norm=0.5, **disk)
    run = run_on(device, model, data, num_ranks, plan)
    assert_trains_like_the_plain_loop(run, model, data, num_shares=num_ranks, clip=0.5, dtype=DTYPES[precision])
    for kind in ("param", "grad"):
        assert run.extra["measured"][kind] == run.extra["promised"][kind], kind


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero2", "zero3", "offload"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_accumulation(preset: str, num_ranks: int, precision: str, device: OneDevice) -> None:
    model, data = model_on(device), data_on(device)

    def step(engine: sw.Engine, batch: Batch) -> Tensor:
        losses = []
        for x, y in zip(batch[0].chunk(2), batch[1].chunk(2), strict=True):
            losses.append(engine(x, y))
            engine.backward(losses[-1])
            engine.step()
        return sum(losses[1:], losses[0]) / 2

    plan = {"preset": preset, "accumulate": 2, "precision": precision}
    run = run_on(device, model, data, num_ranks, plan, step=step)
    assert_trains_like_the_plain_loop(run, model, data, num_shares=2 * num_ranks, dtype=DTYPES[precision])


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("preset", ["zero1", "zero3", "zero3-offload"])
@pytest.mark.parametrize("policy", ["recompute", "selective", "offload", "disk"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_activations(
    policy: str, preset: str, num_ranks: int, precision: str, device: OneDevice, tmp_path: Path
) -> None:
    model, data = model_on(device), data_on(device)
    plan = {"preset": preset, "activations": policy, "disk": str(tmp_path), "precision": precision}
    run = run_on(device, model, data, num_ranks, plan)
    assert_trains_like_the_plain_loop(run, model, data, num_shares=num_ranks, dtype=DTYPES[precision])


TIERS: dict[str, dict[str, Any]] = {
    "half of the update": {"preset": "zero2", "offload": {"optim": 0.5}},
    "half of the update, sharded": {"preset": "zero3", "offload": {"optim": 0.5}},
    "parameters on the host": {"preset": "zero3-offload", "rows": {"param": {"tier": "host"}}},
    "parameters on a disk": {"preset": "infinity", "rows": {"param": {"tier": "disk"}}},
    "no prefetch": {"preset": "zero3", "prefetch_bytes": 0},
    "small ones resident": {"preset": "zero3", "resident_below": 100},
    "gradients in fp32": {"preset": "zero2", "wire": {"grad": "fp32"}},
}


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("plan", TIERS.values(), ids=TIERS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_tiers_and_settings(
    plan: dict[str, Any], num_ranks: int, precision: str, device: OneDevice, tmp_path: Path
) -> None:
    model, data = model_on(device), data_on(device)
    disk = {"disk": str(tmp_path)} if plan["preset"] == "infinity" else {}
    run = run_on(device, model, data, num_ranks, {**plan, **disk, "precision": precision})
    assert_trains_like_the_plain_loop(run, model, data, num_shares=num_ranks, dtype=DTYPES[precision])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("preset", "num_ranks", "mesh"),
    [("ddp", 2, None), ("zero1", 4, None), ("zero2", 2, None), ("zero3", 4, GRID), ("hpz", 4, GRID)],
    ids=name_of,
)
def test_codes(preset: str, num_ranks: int, mesh: dict[str, int] | None, precision: str, device: OneDevice) -> None:
    """As ranks on the host train with codes: where these differ, values were rounded otherwise before."""
    wire = {"grad": {"dtype": "int4", "block": 16}, "param": {"dtype": "int8", "block": 32}}
    wire = {"grad": wire["grad"]} if preset == "ddp" else wire
    model, data = model_on(device), data_on(device)
    plan = plan_of(preset, mesh, precision=precision, wire=wire)
    run = run_on(device, model, data, num_ranks, plan)
    on_host = [(x.cpu(), y.cpu()) for x, y in data]
    known = sharded_run(model.cpu(), on_host, preset, num_ranks, mesh, precision=precision, wire=wire)
    assert run.losses == pytest.approx(known.losses, rel=0.01)
    assert run.norms == pytest.approx(known.norms, rel=0.05)
    for kind in ("param", "grad", "working"):
        assert run.extra["measured"][kind] <= run.extra["promised"][kind], kind


# -- optimizers -----------------------------------------------------------------------------------------


def muon(model: nn.Module) -> torch.optim.Optimizer:
    return sw.optim.Muon(muon_groups(model, lr=3e-3, weight_decay=0.0), lr=0.02, iterate_in="fp32")


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adamw": lambda model: sw.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-5),
    "fused adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-5, fused=True),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "nadam": lambda model: torch.optim.NAdam(model.parameters(), lr=3e-3, eps=1e-5),
    "capturable adam": lambda model: torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-5, capturable=True),
    "muon": muon,
    "adafactor": lambda model: sw.optim.Adafactor(model.parameters(), lr=3e-3),
    "lamb": lambda model: sw.optim.Lamb(model.parameters(), lr=3e-3, eps=1e-5),
    "lion": lambda model: sw.optim.Lion(model.parameters(), lr=1e-4),
}


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero3", "zero3-offload"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizers(make: MakeOptimizer, preset: str, num_ranks: int, device: OneDevice) -> None:
    if make is OPTIMIZERS["capturable adam"] and (not device.is_real or "offload" in preset):
        pytest.skip("torch's capturable updates run on devices alone")
    model, data = model_on(device), data_on(device)
    run = run_on(device, model, data, num_ranks, {"preset": preset}, make)
    assert_trains_like_the_plain_loop(run, model, data, make, num_shares=num_ranks)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("preset", ["zero1", "zero3"])
@pytest.mark.parametrize("state_dtype", ["bf16", "int8"])
def test_narrow_states(state_dtype: str, preset: str, num_ranks: int, device: OneDevice) -> None:
    """Codes have blocks, which shards divide otherwise than whole parameters: only nearly the same."""
    model, data = model_on(device), data_on(device, num_steps=8)

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return sw.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-5, state_dtype=state_dtype)

    run, twin = run_on(device, model, data, num_ranks, {"preset": preset}, make), plain_run(model, data, adamw)
    assert run.losses == pytest.approx(twin.losses, rel=2e-2)
    assert run.losses[-1] < run.losses[0]


# -- splits ---------------------------------------------------------------------------------------------

DENSE: list[tuple[str, dict[str, int]]] = [
    ("zero1", {"tp": 2}),
    ("zero3", {"tp": 2}),
    ("zero1", {"pp": 2}),
    ("zero3", {"pp": 2}),
    ("zero2", {"sp": 2}),
    ("zero3", {"sp": 2}),
    ("zero3", {"dp": 2, "tp": 2}),
    ("zero2", {"pp": 2, "dp": 2}),
    ("zero3", {"pp": 2, "tp": 2}),
    ("zero3", {"tp": 2, "sp": 2}),
    ("zero2", {"pp": 2, "sp": 2}),
    ("zero1", {"pp": 4}),
    ("zero3-offload", {"dp": 2, "tp": 2}),
    ("offload", {"pp": 2, "dp": 2}),
]
WITH_EXPERTS: list[tuple[str, dict[str, int]]] = [
    ("zero3", {"ep": 2}),
    ("zero2", {"dp": 2, "ep": 2}),
    ("zero3", {"tp": 2, "ep": 2}),
    ("zero3", {"pp": 2, "ep": 2}),
]


@pytest.mark.parametrize(
    ("build", "preset", "mesh"),
    [*((llama, *case) for case in DENSE), *((mixtral, *case) for case in WITH_EXPERTS)],
    ids=lambda value: getattr(value, "__name__", None) or name_of(value),
)
def test_splits(build: Callable[[], nn.Module], preset: str, mesh: dict[str, int], device: OneDevice) -> None:
    model = build().to(device.device)
    data: list[NamedBatch] = [
        {name: value.to(device.device) for name, value in batch.items()} for batch in token_batches()[:4]
    ]
    num_micro = micro_batches(mesh)
    twin = whole_run(model, data, loss_of=own_loss, shares=num_micro, clip=CLIP, make_optimizer=sgd)
    plan: dict[str, Any] = {"preset": preset, "mesh": mesh, "accumulate": num_micro, "clip_grad_norm": CLIP}
    twin.params = {name: param.cpu() for name, param in twin.params.items()}
    for run in ranks_run(model, data, plan, sgd, train=at_once(), run=device.run):
        for one in (run, twin):
            one.grads = [{name: grad.cpu() for name, grad in grads.items()} for grads in one.grads]
        assert_alike(run, twin)


# -- a run's other calls --------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("preset", ["ddp", "zero3", "zero3-offload"])
def test_inference(preset: str, num_ranks: int, device: OneDevice) -> None:
    model, data = model_on(device), data_on(device, num_steps=1)
    with torch.no_grad():
        expected = model.logits(data[0][0])
    replicas = [copy.deepcopy(model) for _ in range(num_ranks)]

    def rank(world: sw.World) -> list[Tensor]:
        replica = replicas[world.rank]
        with sw.shard(replica, preset, optimizer=adamw(replica), world=world) as engine:
            with engine.inference(), torch.no_grad():
                seen = [replica.logits(data[0][0]) for _ in range(1 + world.rank)]
            whole_step(engine, share_of(engine, data[0]))
        return seen

    for seen in device.run(num_ranks, rank):
        for logits in seen:
            torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(("first", "later"), [("zero3", "ddp"), ("ddp", "zero3-offload"), ("offload", "zero3")])
@pytest.mark.parametrize("fused", [False, True])
def test_saving_resuming_and_another_plan(
    first: str, later: str, num_ranks: int, fused: bool, device: OneDevice, tmp_path: Path
) -> None:
    """A checkpoint of one plan goes on under another, and so does a live engine."""
    model, data = model_on(device), data_on(device, num_steps=6)
    replicas = [[copy.deepcopy(model) for _ in range(num_ranks)] for _ in range(2)]

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1, eps=1e-5, fused=fused)

    def rank(world: sw.World) -> tuple[list[float], list[float]]:
        model, again = (copies[world.rank] for copies in replicas)
        with sw.shard(model, first, optimizer=make(model), world=world) as engine:
            for batch in data[:3]:
                whole_step(engine, share_of(engine, batch))
            engine.save(tmp_path)
            engine.reshard({"preset": later})
            live = [engine.mean(whole_step(engine, share_of(engine, batch)).item()) for batch in data[3:]]
        with sw.shard(again, later, optimizer=make(again), world=world) as engine:
            assert engine.resume(tmp_path) is not None
            resumed = [engine.mean(whole_step(engine, share_of(engine, batch)).item()) for batch in data[3:]]
        return live, resumed

    twin = plain_run(model, data, make, shares=num_ranks)
    for live, resumed in device.run(num_ranks, rank):
        assert live == pytest.approx(twin.losses[3:], rel=1e-5)
        assert resumed == pytest.approx(twin.losses[3:], rel=1e-5)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("preset", ["ddp", "zero3", "offload"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_compiled_units(preset: str, precision: str, device: OneDevice) -> None:
    """Torch 2.11 warns in its own compiler: of `torch.jit.script_method`, and of the gradient of a tensor that is no
    leaf, which it hides by other means than a filter. As errors both end the compilation."""
    if not device.is_real:
        pytest.skip("tests/ranks/test_compile.py compiles on CPUs")
    model, data = model_on(device), data_on(device)
    plan = {"preset": preset, "precision": precision, "compile": "inductor"}
    run, twin = run_on(device, model, data, 1, plan), plain_run(model, data, dtype=DTYPES[precision])
    assert run.losses == pytest.approx(twin.losses, rel=1e-4 if precision == "fp32" else 2e-2)
