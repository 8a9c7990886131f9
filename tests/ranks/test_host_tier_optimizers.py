"""What a loop expects of an optimizer whose states are on the host: one step, as with states anywhere else."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from twins import (
    adamw,
    assert_same,
    batches,
    full_params,
    muon_groups,
    plain_run,
    plan_of,
    sharded_run,
    share_of,
    train,
    work_on_ranks,
)

import shardwise as sw
from shardwise.errors import ModelError
from shardwise.memory import Flat
from shardwise.testing import run_ranks
from tests import inside
from tests.models import Transformer
from tests.thorough import sampled, thorough_only

pytestmark = sampled

Tensor = torch.Tensor
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
ON_DEVICE = {"offload": "zero2", "zero3-offload": "zero3"}


class Counting(torch.optim.Optimizer):
    """SGD whose rate depends on the number of steps that its group has taken, as in schedule-free optimizers."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05, "taken": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            group["taken"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"] / group["taken"])
        return loss


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adamw-fused": lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-5, fused=True),
    "adamw-single": lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-5, foreach=False),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.01, eps=1e-5),
    "nadam": lambda model: torch.optim.NAdam(model.parameters(), lr=1e-3, eps=1e-5),
    "counting": lambda model: Counting(model.parameters()),
    "lion": lambda model: sw.optim.Lion(model.parameters(), lr=1e-4),
    "adamw-bf16": lambda model: sw.optim.AdamW(model.parameters(), lr=1e-3, state_dtype="bf16"),
    "adamw-int8": lambda model: sw.optim.AdamW(model.parameters(), lr=1e-3, state_dtype="int8"),
}


def model_of() -> Transformer:
    torch.manual_seed(0)
    return Transformer(num_blocks=2)


@pytest.mark.parametrize("preset", ON_DEVICE)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_update_on_the_host_is_that_on_the_device_to_the_bit(name: str, preset: str) -> None:
    """The same calls update every piece."""
    model, data = model_of(), batches(3)
    there, here = (
        sharded_run(model, data, which, 2, None, OPTIMIZERS[name], clip_grad_norm=0.5, precision="bf16")
        for which in (preset, ON_DEVICE[preset])
    )
    assert there.losses == here.losses
    assert there.norms == here.norms
    assert all(torch.equal(param, here.params[key]) for key, param in there.params.items())


@pytest.mark.parametrize("preset", ON_DEVICE)
def test_what_an_optimizer_counts_it_counts_once(preset: str) -> None:
    model, data = model_of(), batches(3)

    def taken(engine: sw.Engine) -> dict[str, Any]:
        return {"taken": inside.adopted(engine).groups[0]["taken"]}

    run = sharded_run(model, data, preset, 2, None, OPTIMIZERS["counting"], after=taken)
    assert run.extra["taken"] == 3
    assert_same(run, plain_run(model, data, OPTIMIZERS["counting"]))


@pytest.mark.parametrize("preset", ON_DEVICE)
def test_hooks_closures_and_schedulers_see_one_step(preset: str) -> None:
    model, data = model_of(), batches(3)
    seen: list[str] = []

    def plain(make_seen: list[str], engine_of: Callable[[nn.Module, torch.optim.Optimizer], Any], mine: Any) -> Any:
        replica = mine
        optimizer = adamw(replica)
        engine = engine_of(replica, optimizer)
        optimizer.register_step_pre_hook(lambda *_: make_seen.append("before"))
        optimizer.register_step_post_hook(lambda *_: make_seen.append("after"))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for batch in data:
            x, y = share_of(engine, batch) if engine is not None else batch

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                make_seen.append("closure")
                optimizer.zero_grad()
                loss: Tensor = replica(x, y)
                loss.backward()
                return loss

            optimizer.step(closure)
            scheduler.step()
        return engine

    twin = copy.deepcopy(model)
    plain(seen, lambda *_: None, twin)
    replicas = [copy.deepcopy(model) for _ in range(2)]

    def rank(world: sw.World) -> tuple[list[str], dict[str, Tensor]]:
        mine: list[str] = []

        def engine_of(replica: nn.Module, optimizer: torch.optim.Optimizer) -> sw.Engine:
            return sw.shard(replica, preset, optimizer=optimizer, world=world)

        engine = plain(mine, engine_of, replicas[world.rank])
        params = full_params(engine)
        engine.close()
        return mine, params

    for mine, params in run_ranks(2, rank):
        assert mine == seen
        for name, param in twin.named_parameters():
            torch.testing.assert_close(params[name], param.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("preset", ON_DEVICE)
def test_an_overflow_in_fp16_changes_nothing(preset: str) -> None:
    """The ranks agree on the overflow before any unit is updated."""
    model, data = model_of(), batches(2)
    replicas = [copy.deepcopy(model) for _ in range(2)]

    def rank(world: sw.World) -> None:
        plan = plan_of(preset, None, precision="fp16", loss_scale={"initial": 2.0**8})
        with sw.shard(replicas[world.rank], plan, optimizer=adamw(replicas[world.rank]), world=world) as engine:
            engine.backward(engine(*share_of(engine, data[0])))
            engine.step()
            before = full_params(engine)
            loss = engine(*share_of(engine, data[1]))
            engine.backward(loss * (float("inf") if world.rank == 1 else 1.0))
            norm = engine.step()
            assert norm is not None
            assert not math.isfinite(norm)
            assert all(torch.equal(param, before[name]) for name, param in full_params(engine).items())
            engine.backward(engine(*share_of(engine, data[1])))
            engine.step()
            assert not all(torch.equal(param, before[name]) for name, param in full_params(engine).items())
            assert engine.num_steps == 2

    run_ranks(2, rank)


@pytest.mark.parametrize("preset", ON_DEVICE)
def test_parameters_without_a_gradient_are_left_alone(preset: str) -> None:
    class Partly(Transformer):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            hidden = self.blocks[0](self.tokens(x) + self.positions.weight[: x.shape[1]])
            return nn.functional.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), y.flatten())

    torch.manual_seed(0)
    model, data = Partly(num_blocks=2), batches(3)
    run = sharded_run(model, data, preset, 2, None)
    assert_same(run, plain_run(model, data))
    untouched = dict(model.named_parameters())["blocks.1.up.weight"]
    assert torch.equal(run.params["blocks.1.up.weight"], untouched)


@pytest.mark.parametrize("rows", [{}, {"param": {"tier": "host"}}], ids=["states", "params"])
def test_whole_tensors_checkpoints_and_other_plans(rows: dict[str, Any], tmp_path: Path) -> None:
    """Tensors on the host are read, written, saved, loaded and moved like any others."""
    model, data = model_of(), batches(6)
    replicas = [copy.deepcopy(model) for _ in range(4)]
    expected = plain_run(model, data)

    def rank(world: sw.World) -> tuple[list[float], dict[str, Tensor]]:
        plan = plan_of("zero3-offload", None, rows=rows)
        losses = []

        def train(engine: sw.Engine, batch: Any) -> None:
            loss = engine(*share_of(engine, batch))
            engine.backward(loss)
            engine.step()
            losses.append(world.mean(loss.item()))

        replica = replicas[world.rank]
        engine = sw.shard(replica, plan, optimizer=adamw(replica), world=world)
        train(engine, data[0])
        name = "blocks.0.up.weight"
        value, moment = engine.get(name), engine.get(name, "exp_avg")
        assert value is not None
        engine.set(name, value)
        assert torch.equal(engine.get(name), value)
        assert moment is not None
        engine.set(name, 2 * moment, "exp_avg")
        assert torch.equal(engine.get(name, "exp_avg"), 2 * moment)
        engine.set(name, moment, "exp_avg")
        state, optimizer_state = engine.state_dict(), engine.optimizer_state_dict()
        train(engine, data[1])
        engine.load_state_dict(state)
        engine.load_optimizer_state_dict(optimizer_state)
        losses.pop()
        train(engine, data[1])
        engine.reshard("zero2")
        train(engine, data[2])
        engine.reshard(plan)
        train(engine, data[3])
        engine.save(tmp_path / "run")
        engine.close()
        other = replicas[2 + world.rank]
        engine = sw.shard(other, {"preset": "zero1", "offload": {"optim": 0.5}}, optimizer=adamw(other), world=world)
        assert engine.resume(tmp_path / "run") is not None
        for batch in data[4:]:
            train(engine, batch)
        params = full_params(engine)
        engine.close()
        return losses, params

    for losses, params in run_ranks(2, rank):
        assert losses == pytest.approx(expected.losses, rel=1e-5)
        for name, param in expected.params.items():
            torch.testing.assert_close(params[name], param, rtol=1e-5, atol=1e-5)


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize("preset", ["zero3-offload", "offload"])
def test_generation_rehearsal_and_timelines(preset: str, tmp_path: Path) -> None:
    """Also with parameters on the host."""
    model, data = model_of(), batches(3)
    expected = plain_run(model, data)
    plan = plan_of(preset, None, rows={"param": {"tier": "host"}})

    def work(engine: sw.Engine) -> None:
        replica = engine.module
        for number, batch in enumerate(data):
            x, y = share_of(engine, batch)
            rehearsed = engine.rehearse((x, y))
            assert rehearsed.host is not None
            assert rehearsed.activations
            with engine.timeline(tmp_path / "step.json"):
                loss = engine(x, y)
                engine.backward(loss)
                engine.step()
            assert engine.world.mean(loss.item()) == pytest.approx(expected.losses[number], rel=1e-5)
            twin = copy.deepcopy(model)
            twin.load_state_dict(engine.state_dict())
            for keep_bytes in (None, 0):
                with engine.inference(keep_bytes):
                    torch.testing.assert_close(replica.logits(x), twin.logits(x), rtol=1e-5, atol=1e-5)
            with torch.no_grad():
                torch.testing.assert_close(engine(x, y), twin(x, y), rtol=1e-5, atol=1e-5)
        assert "updated on the host" in str(engine)
        assert "on the host" in str(engine.memory())

    work_on_ranks(2, work, plan, model)
    names = {event["name"] for event in json.loads((tmp_path / "step.json").read_text())["traceEvents"]}
    assert {"update blocks.0 master", "wait blocks.0 grad"} <= names
    assert any(name.startswith("fetch blocks.0 param host fp32") for name in names)


SHARES = [
    ("zero2", {"optim": 0.5}),
    ("zero3", {"optim": 0.5, "param": 0.3}),
    ("zero1", {"optim": 0.3}),
    ("ddp", {"optim": 1.0, "param": 1.0}),
]


@pytest.mark.parametrize(("preset", "share"), SHARES, ids=[name for name, _ in SHARES])
def test_a_share_of_the_units(preset: str, share: dict[str, float]) -> None:
    model, data = model_of(), batches(4)

    def report(engine: sw.Engine) -> dict[str, Any]:
        updated = [unit.name for unit in inside.units(engine) if unit.flats[0].spec.updates_below]
        return {"report": engine.memory(), "updated": updated, "num_units": len(inside.units(engine))}

    run = sharded_run(model, data, preset, 2, None, after=report, offload=share, clip_grad_norm=0.5)
    assert_same(run, plain_run(model, data, clip=0.5))
    report_of = run.extra["report"]
    for kind in ("param", "grad", "working"):
        assert report_of.measured[kind] <= report_of.promised[kind], kind
    assert report_of.measured_on_host["buffers"] == report_of.promised_on_host["buffers"]
    there, here = report_of.promised_on_host["optim"], report_of.promised["optim"]
    assert there >= share["optim"] * (there + here)
    assert (len(run.extra["updated"]) == run.extra["num_units"]) == (share["optim"] == 1)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    """Muon in fp32, since bf16 would enlarge small differences."""
    groups = muon_groups(model, lr=1e-3)
    return sw.optim.Muon(groups, lr=0.01, iterate_in="fp32")


NEEDS_WHOLE: dict[str, MakeOptimizer] = {
    "lamb": lambda model: sw.optim.Lamb(model.parameters(), lr=0.01, eps=1e-5),
    "adafactor": lambda model: sw.optim.Adafactor(model.parameters(), beta1=0.9, weight_decay=0.1),
    "muon": muon,
}
PLANS_ON_HOST: dict[str, tuple[str, str, dict[str, Any]]] = {
    "offload": ("offload", "zero2", {}),
    "zero3-offload": ("zero3-offload", "zero3", {}),
    "half of the units": ("zero2", "zero2", {"offload": {"optim": 0.5}}),
}
"""The preset with tensors on the host, the same preset without, and further settings of the former."""


@pytest.mark.parametrize("plan", PLANS_ON_HOST)
@pytest.mark.parametrize("name", NEEDS_WHOLE)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_what_needs_whole_parameters_is_updated_on_the_host_as_on_the_device(
    name: str, plan: str, num_ranks: int
) -> None:
    """The pieces, norms and matrices are the same, and so is their arithmetic."""
    model, data = model_of(), batches(3)
    on_host, on_device, offload = PLANS_ON_HOST[plan]
    for precision in ("fp32", "bf16"):
        settings = {"clip_grad_norm": 0.5, "precision": precision}
        there, here = (
            sharded_run(model, data, preset, num_ranks, None, NEEDS_WHOLE[name], **settings, **beside)
            for preset, beside in ((on_host, offload), (on_device, {}))
        )
        assert there.losses == here.losses
        assert there.norms == here.norms
        assert all(torch.equal(param, here.params[key]) for key, param in there.params.items())


@pytest.mark.parametrize("name", NEEDS_WHOLE)
def test_whole_parameters_on_the_host_stay_within_what_is_promised(name: str) -> None:
    model, data = model_of(), batches(3)
    run = sharded_run(
        model, data, "zero3-offload", 2, None, NEEDS_WHOLE[name], after=lambda engine: {"memory": engine.memory()}
    )
    assert_same(run, plain_run(model, data, NEEDS_WHOLE[name]))
    memory = run.extra["memory"]
    assert memory.measured_on_host["buffers"] == memory.promised_on_host["buffers"]
    assert 0.95 <= memory.measured_on_host["optim"] / memory.promised_on_host["optim"] <= 1.01  # step counters
    for kind in ("param", "grad", "optim", "working"):
        assert memory.measured[kind] <= memory.promised[kind], kind


@pytest.mark.parametrize("name", NEEDS_WHOLE)
def test_what_needs_whole_parameters_is_refused_on_a_disk(name: str, tmp_path: Path) -> None:
    model = model_of()
    before = {key: param.detach().clone() for key, param in model.named_parameters()}
    with pytest.raises(ModelError, match=r"whose states the plan has on a disk, where each unit is updated by itself"):
        sw.shard(model, {"preset": "infinity", "disk": str(tmp_path)}, optimizer=NEEDS_WHOLE[name](model))
    assert all(torch.equal(param, before[key]) for key, param in model.named_parameters())


@pytest.mark.parametrize("preset", ["offload", "zero3-offload"])
def test_what_travels_is_cast_in_the_pass_that_updates(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If all parameters of a unit have gradients, the update also casts them for sending. Results are bit-identical to
    those with a separate cast."""
    model, data = Transformer(), batches(3)
    copies: list[str] = []
    copy_master = Flat.copy_master

    def noted(self: Flat, out: torch.Tensor) -> None:
        copies.append(self.name)
        copy_master(self, out)

    def run() -> dict[str, torch.Tensor]:

        def work(engine: sw.Engine) -> dict[str, torch.Tensor]:
            replica = engine.module
            train(engine, data)
            whole = engine.state_dict()
            with engine.gathered():
                for name, param in replica.named_parameters():
                    assert torch.equal(param.float(), whole[name].bfloat16().float()), name
            return whole

        return work_on_ranks(
            2,
            work,
            {"preset": preset, "precision": "bf16"},
            model,
            lambda replica: torch.optim.AdamW(replica.parameters(), lr=0.01),
        )[0]

    monkeypatch.setattr(Flat, "copy_master", noted)
    fused = run()
    assert not copies
    monkeypatch.setattr("shardwise.optim.host_step.outgoing_of", lambda *_: None)
    apart = run()
    assert copies
    assert all(torch.equal(fused[name], apart[name]) for name in fused)
