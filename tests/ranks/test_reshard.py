"""A live engine changes its plan: nothing is lost, only missing data is sent, and training equals the twin's."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from typing import Any

import pytest
import torch
from allocations import Allocations
from torch import nn
from twins import Batch, Run, adamw, assert_same, batches, engine_step, full_params, plain_run, work_on_ranks

import shardwise as sw
import shardwise.optim  # its tables are not counted
from shardwise.checkpoint import TrainingState
from shardwise.comm.transport import staging
from shardwise.errors import ConfigError, StateError
from shardwise.testing import InjectedError, run_ranks
from tests import inside
from tests.models import Transformer
from tests.ranks.twins import assert_same_bits, moments_of
from tests.thorough import sampled, thorough_only

pytestmark = sampled

TWO = {"node": 2, "local": 2}
PLANS: dict[str, dict[str, Any]] = {
    "ddp": {"preset": "ddp"},
    "zero1": {"preset": "zero1"},
    "zero3": {"preset": "zero3"},
    "zero3-kept by class": {"preset": "zero3-kept", "units": {"class": "Linear"}},
    "hsdp": {"preset": "hsdp", "mesh": TWO},
    "hpz": {"preset": "hpz", "mesh": TWO, "units": {"min_numel": 3000}},
    "zero2 clipped": {"preset": "zero2", "clip_grad_norm": 0.5},
}


def start() -> Transformer:
    torch.manual_seed(0)
    model = Transformer(tied=True)
    model.blocks[0].up.weight.requires_grad_(False)
    return model


def rounds(engine: sw.Engine, data: list[Batch]) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for x, y in data:
        rows = x.shape[0] // engine.world.size
        mine = slice(engine.world.rank * rows, (engine.world.rank + 1) * rows)
        loss = engine_step(engine, adamw(nn.Linear(1, 1)), (x[mine], y[mine]))
        losses.append(engine.mean(loss.item()))
        norms.append(engine.gradient_norm or 0.0)
    return losses, norms


CLIPPED = "zero2 clipped"
ORDERS = [
    [*PLANS, "ddp"],
    ["hpz", "hsdp", "zero1", "zero3-kept by class", "ddp", "zero3", "hpz"],
]


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize("names", ORDERS, ids=["-".join(order[:2]) for order in ORDERS])
def test_one_run_through_many_plans(names: list[str]) -> None:
    """Three steps with each plan: every change keeps all tensors bit by bit, and training equals the twin's."""
    names = [name for name in names if name != CLIPPED]
    data = batches(3 * len(names))
    replicas = [start() for _ in range(4)]

    def rank(world: sw.World) -> Run:
        optimizer = adamw(replicas[world.rank])
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
        run = Run()
        with sw.shard(replicas[world.rank], PLANS[names[0]], optimizer=optimizer, world=world) as engine:
            for index, name in enumerate(names):
                if index:
                    before = moments_of(engine)
                    engine.reshard(PLANS[name])
                    assert_same_bits(before, moments_of(engine))
                    assert engine.num_steps == 3 * index
                losses, norms = rounds(engine, data[3 * index : 3 * index + 3])
                run.losses += losses
                run.norms += norms
                memory = engine.memory()
                assert memory.measured["param"] == memory.promised["param"]
                assert memory.measured["optim"] <= memory.promised["optim"] + 4 * 100  # a step counter per parameter
            assert optimizer.param_groups[0] is scheduler.optimizer.param_groups[0]
            run.params = full_params(engine)
        return run

    runs = run_ranks(4, rank)
    assert_same(runs[0], plain_run(start(), data))


@thorough_only("slow; smaller tests beside it cover the same code")
def test_precision_there_and_back() -> None:
    """Master weights do not change; computations use their cast. Back in fp32, the first losses are those of fp32."""
    replicas = [start() for _ in range(2)]
    data = batches(4)

    def rank(world: sw.World) -> None:
        with sw.shard(replicas[world.rank], "zero3", optimizer=adamw(replicas[world.rank]), world=world) as engine:
            rounds(engine, data[:2])
            before = moments_of(engine)
            x, y = data[2]
            with torch.no_grad():
                loss = engine(x, y).item()
            engine.reshard({"preset": "zero2", "precision": "bf16"})
            trained = {key: value for key, value in before.items() if key[0] != "blocks.0.up.weight"}
            assert_same_bits(trained, {key: value for key, value in moments_of(engine).items() if key in trained})
            assert next(engine.module.parameters()).dtype == torch.bfloat16
            with torch.no_grad():
                assert engine(x, y).item() == pytest.approx(loss, rel=2e-2)
            engine.reshard("zero1")
            assert_same_bits(trained, {key: value for key, value in moments_of(engine).items() if key in trained})
            with torch.no_grad():
                assert engine(x, y).item() == pytest.approx(loss, rel=1e-3)  # the frozen one was bf16 in between
            engine.reshard({"preset": "zero3", "precision": "bf16"})
            losses, _ = rounds(engine, data[2:])
            assert losses[0] == pytest.approx(loss, rel=2e-2)

    run_ranks(2, rank)


def test_only_what_is_missing_travels() -> None:
    """Nothing, if the optimizer's states stay in place; else what ranks lack, each byte once."""
    replicas = [Transformer() for _ in range(4)]
    sizes = [param.numel() for param in replicas[0].parameters()]

    def rank(world: sw.World) -> list[int]:
        model = replicas[world.rank]
        sent = []
        with sw.shard(model, "zero3", optimizer=adamw(model), world=world) as engine:
            rounds(engine, batches(2))
            for plan in ("zero1", "ddp", "zero3"):
                ledger = inside.ledger(engine)
                before = ledger.sent_bytes["all_to_all", "world"]
                engine.reshard(plan)
                sent.append(ledger.sent_bytes["all_to_all", "world"] - before)
        return sent

    sent = run_ranks(4, rank)
    assert [total[0] for total in sent] == [0] * 4
    assert sum(total[1] for total in sent) == 3 * 12 * sum(sizes)  # three ranks lack each of 12 bytes a parameter
    assert [total[2] for total in sent] == [0] * 4


@pytest.mark.parametrize("preset", ["ddp", "zero2", "zero3"])
def test_buffers_of_the_old_plan_wait_for_no_garbage_collection(preset: str) -> None:
    """Neither the flat buffers of the old plan, nor the runner of its programs."""

    def work(engine: sw.Engine) -> list[str]:
        model = engine.module
        rounds(engine, batches(3))
        weight = model.positions.weight
        weight.detach().clone()  # a read of a parameter at rest
        weight.data = weight.data * 2
        loss = engine(*batches(1)[0])
        engine.backward(loss)
        assert weight.grad is not None
        weight.grad = weight.grad * 2
        engine.step()
        del weight, loss
        old = {flat.name: weakref.ref(flat) for flat in inside.flats(engine)}
        old["runner"] = weakref.ref(inside.runner(engine))
        engine.reshard("zero1")
        left = [name for name, known in old.items() if known() is not None]
        engine.world.barrier()  # collection is enabled again when all have looked
        return left

    gc.collect()
    gc.disable()
    try:
        assert work_on_ranks(2, work, preset, Transformer) == [[], []]
    finally:
        gc.enable()


def test_a_graph_of_the_old_plan_is_refused_in_a_sentence() -> None:
    model = Transformer()
    x, y = batches(1)[0]
    with sw.shard(model, "zero3", optimizer=adamw(model)) as engine:
        loss = engine(x, y)
        engine.reshard("ddp")
        with pytest.raises(StateError, match="follows another plan now"):
            loss.backward()
        del loss
        engine.backward(engine(x, y))
        engine.step()


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize("hosts", [None, ["a", "b"]], ids=["one-host", "two-hosts"])
def test_the_peak_is_one_unit_more(hosts: list[str] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts all storages of torch that are alive at once on one of two ranks during a change of plan, without the
    staging that sums between hosts leave for later ones: as much as were under way at once, at most 8 MiB."""
    monkeypatch.setattr(staging, "_KEPT_BYTES", 0)
    replicas = [nn.Sequential(*(nn.Linear(64, 64) for _ in range(16))) for _ in range(2)]
    unit_bytes = 3 * 64 * 65 * 4  # with both moments
    whole_bytes = 16 * unit_bytes
    grad_bytes = whole_bytes // 3 if hosts else 0  # on one host they are in shared memory
    from_bytes = {"ddp": whole_bytes + grad_bytes, "zero1": 2 * whole_bytes // 3 + grad_bytes, "zero3": 0}
    plans = ("ddp", "zero3", "ddp", "zero1", "ddp")

    def rank(world: sw.World) -> list[int]:
        model = replicas[world.rank]
        optimizer = torch.optim.AdamW(model.parameters())
        peaks = []
        with Allocations() as allocations:
            engine = sw.shard(model, plans[0], optimizer=optimizer, world=world)
            for plan in plans[1:]:
                for _ in range(2):
                    engine.backward(engine(torch.ones(2, 64)).sum())
                    engine.step()
                allocations.peak_bytes = 0
                engine.reshard(plan)
                peaks.append(allocations.peak_bytes)
            engine.close()
        return peaks

    # Half a unit is sent and half received; as much is in the threads' mail, and again if one rank is a buffer ahead.
    # If the old buffers were kept to the end, half of everything would be added.
    messages_bytes = 2 * unit_bytes
    for peaks in run_ranks(2, rank, hosts=hosts):
        for plan, peak in zip(plans[:-1], peaks, strict=True):
            assert peak <= max(whole_bytes, from_bytes[plan]) + unit_bytes + messages_bytes


def test_freezing_and_thawing_between_plans() -> None:

    def work(engine: sw.Engine) -> None:
        model = engine.module
        rounds(engine, batches(2))
        before = moments_of(engine)
        model.blocks[1].requires_grad_(False)
        model.blocks[0].requires_grad_(True)
        engine.reshard("zero2")
        after = moments_of(engine)
        for name, what in before:
            assert what != "param" or torch.equal(after[name, what], before[name, what]), name
        assert after["blocks.1.up.weight", "exp_avg"] is None
        rounds(engine, batches(2))
        moved = {name: tensor for (name, what), tensor in moments_of(engine).items() if what == "param"}
        assert torch.equal(moved["blocks.1.up.weight"], before["blocks.1.up.weight", "param"])
        assert not torch.equal(moved["blocks.0.up.weight"], before["blocks.0.up.weight", "param"])

    work_on_ranks(2, work, "zero3", start)


def test_a_checkpoint_after_a_change_of_plan(tmp_path: Any) -> None:
    replicas = [start() for _ in range(2)]
    twin = copy.deepcopy(replicas[0])

    def rank(world: sw.World) -> Any:
        model = replicas[world.rank]
        with sw.shard(model, "ddp", optimizer=adamw(model), world=world) as engine:
            rounds(engine, batches(2))
            engine.reshard("zero3")
            rounds(engine, batches(1))
            engine.save(tmp_path)
            return moments_of(engine)

    expected = run_ranks(2, rank)[0]
    with sw.shard(twin, "zero1", optimizer=adamw(twin)) as engine:
        assert engine.resume(tmp_path) is not None
        assert_same_bits(expected, moments_of(engine))


def test_refusals_change_nothing() -> None:
    model = start()
    with sw.shard(model, "zero3", optimizer=adamw(model)) as engine:
        rounds(engine, batches(1))
        before = moments_of(engine)
        x, y = batches(1)[0]
        engine.backward(engine(x, y))
        with pytest.raises(StateError, match="Gradients are waiting"):
            engine.reshard("zero1")
        engine.zero_grad()
        for plan, words in [
            ("zero9", "no preset"),
            ({"units": ["nowhere"]}, "no such module"),
            ({"mesh": {"dp": 3}}, "3"),
        ]:
            with pytest.raises(ConfigError, match=words):
                engine.reshard(plan)
        assert_same_bits(before, moments_of(engine))
        rounds(engine, batches(2))


def test_an_engine_without_an_optimizer() -> None:
    x, y = batches(1)[0]

    def work(engine: sw.Engine) -> None:
        with torch.no_grad():
            loss = engine(x, y)
            for plan in itertools.islice(itertools.cycle(["ddp", "zero3-kept"]), 3):
                engine.reshard(plan)
                assert torch.equal(engine(x, y), loss)

    work_on_ranks(2, work, "zero3", start, None)


def test_a_change_that_fails_half_way_says_why_and_the_engine_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise InjectedError("out of memory, say")

    monkeypatch.setattr(TrainingState, "move_into", fails)
    model = start()
    engine = sw.shard(model, "zero3", optimizer=adamw(model))
    with pytest.raises(InjectedError):
        engine.reshard("zero1")
    assert "zero3" in repr(engine)
    with pytest.raises(StateError, match="failed half-way"):
        engine.step()
    engine.close()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
