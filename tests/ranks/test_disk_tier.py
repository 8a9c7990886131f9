"""With states and master weights on disk, training equals the plain model's. Each tier holds the predicted bytes."""

from __future__ import annotations

import copy
import ctypes
import mmap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from allocations import Allocations
from torch import nn
from twins import MakeOptimizer, Run, adamw, assert_same, batches, plain_run, sharded_run, train

import shardwise as sw
from shardwise.memory import disk_rows
from shardwise.testing import run_ranks
from tests.models import Transformer
from tests.ranks.twins import assert_same_bits
from tests.thorough import sampled, thorough_only

DISK, HOST = {"tier": "disk"}, {"tier": "host"}
ON_DISK = {"param": DISK, "optim": DISK, "grad": HOST}
NUM_STEPS, CLIP = 4, 0.5
ZERO2 = {"preset": "zero2", "precision": "bf16"}
ROWS: list[tuple[str, int, dict[str, Any]]] = [
    ("infinity", 2, {}),
    ("zero2", 2, {"optim": DISK}),
    ("zero3", 2, {"optim": DISK, "grad": HOST, "param": HOST}),
    ("infinity", 1, {}),
    *((name, 2, ON_DISK) for name in ("infinity", "zero3-kept", "ddp")),
    ("infinity", 1, ON_DISK),
    *((name, 4, ON_DISK) for name in ("hsdp", "hpz")),
    *((name, 2, {"optim": DISK}) for name in ("ddp", "zero1", "zero3-kept")),
    *((name, 4, {"optim": DISK, **rows}) for name in ("hsdp", "hpz") for rows in ({}, {"grad": HOST, "param": HOST})),
]


@pytest.fixture(scope="module")
def model() -> Transformer:
    torch.manual_seed(0)
    return Transformer()


@pytest.fixture(scope="module")
def twin(model: Transformer) -> Run:
    return plain_run(model, batches(NUM_STEPS, rows=12), clip=CLIP)


def report(engine: sw.Engine) -> dict[str, Any]:
    return {"report": engine.memory(), "said": str(engine)}


@sampled
@pytest.mark.parametrize("shares_memory", [True, False], ids=["shared", "sent"])
@pytest.mark.parametrize(("preset", "num_ranks", "rows"), ROWS)
def test_trains_like_the_plain_model_and_holds_what_was_promised(
    preset: str,
    num_ranks: int,
    rows: dict[str, Any],
    model: Transformer,
    twin: Run,
    tmp_path: Path,
    *,
    shares_memory: bool,
) -> None:
    run = sharded_run(
        model,
        batches(NUM_STEPS, rows=12),
        preset,
        num_ranks,
        {"node": 2, "local": 2} if num_ranks == 4 else None,
        after=report,
        shares_memory=shares_memory,
        clip_grad_norm=CLIP,
        rows=rows,
        disk=str(tmp_path),
    )
    assert_same(run, twin)
    held = run.extra["report"]
    assert held.measured["optim"] == held.promised["optim"] == 0
    assert held.measured_on_host == held.promised_on_host
    assert held.measured_on_disk == held.promised_on_disk
    assert bool(held.promised_on_disk.get("param")) == ("param" in rows and rows["param"] == DISK)
    assert sum(held.promised_on_disk.values()) >= 3 * 4 * sum(map(torch.numel, model.parameters())) // num_ranks
    assert "on the disk" in run.extra["said"]
    assert not list(tmp_path.iterdir()), "the folder was given back"


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adamw": adamw,
    "adamw-single": lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-5, foreach=False),
    "adam-amsgrad": lambda model: torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-5, amsgrad=True),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "nadam": lambda model: torch.optim.NAdam(model.parameters(), lr=1e-3, eps=1e-5),
    "lion": lambda model: sw.optim.Lion(model.parameters(), lr=1e-4),
    "ours": lambda model: sw.optim.AdamW(model.parameters(), lr=1e-3),
}


@sampled
@pytest.mark.parametrize("rows", [{}, ON_DISK], ids=["states", "params"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_numbers_are_those_of_the_update_on_the_host(
    name: str, precision: str, rows: dict[str, Any], model: Transformer, tmp_path: Path
) -> None:
    """Bit by bit. In fp16 this includes a step that overflows and changes nothing."""
    scale = {"loss_scale": {"initial": 2.0**40, "hysteresis": 1, "window": 2}} if precision == "fp16" else {}
    plan = {"precision": precision, "clip_grad_norm": CLIP, **scale}
    data = batches(30 if precision == "fp16" else NUM_STEPS, rows=12)
    host = sharded_run(model, data, "zero3-offload", 2, None, OPTIMIZERS[name], **plan)
    disk = sharded_run(model, data, "infinity", 2, None, OPTIMIZERS[name], disk=str(tmp_path), rows=rows, **plan)
    assert (disk.losses, disk.norms) == (host.losses, host.norms)
    assert precision != "fp16" or (float("inf") in disk.norms and disk.norms[-1] < 100)
    for param, values in host.params.items():
        assert torch.equal(disk.params[param], values), param


def everything(engine: sw.Engine) -> dict[str, Any]:
    """Master weights and states, read in every possible way."""
    names = [name for name, _ in engine.module.named_parameters()]
    optimizer = engine.optimizer_state_dict()
    return {
        **{f"param {name}": value for name, value in engine.state_dict().items()},
        **{f"{key} {name}": engine.get(name, key) for name in names for key in ("exp_avg", "exp_avg_sq")},
        **{f"{key} of {number}": value for number, state in optimizer["state"].items() for key, value in state.items()},
    }


def go_through_it(engine: sw.Engine, folder: Path, others: tuple[Any, Any]) -> list[dict[str, Any]]:
    """Train, and read and write states in every way; returns what was read, in order."""
    data = batches(6, rows=12)
    found = []
    train(engine, data[:2])
    found.append(everything(engine))
    engine.save(folder)
    train(engine, data[2:3])
    engine.set("head.weight", torch.full_like(engine.get("head.weight"), 0.25))
    engine.set("head.weight", torch.full_like(engine.get("head.weight"), 0.125), "exp_avg")
    with engine.gathered("norm.weight", write=True):
        engine.module.norm.weight.data.fill_(1.5)
    train(engine, data[3:4])
    found.append(everything(engine))
    whole, states = engine.state_dict(), engine.optimizer_state_dict()
    engine.resume(folder)
    found.append(everything(engine))
    engine.load_state_dict(whole)
    engine.load_optimizer_state_dict(states)
    train(engine, data[4:5])
    found.append(everything(engine))
    for plan in others:
        engine.reshard(plan)
        train(engine, data[5:])
        found.append(everything(engine))
    return found


def locked(descriptor: int, num_bytes: int) -> mmap.mmap:
    mapped = mmap.mmap(descriptor, num_bytes)
    address = torch.frombuffer(mapped, dtype=torch.uint8).data_ptr()
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), 0) == 0
    return mapped


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("rows", [{}, ON_DISK], ids=["states", "params"])
def test_everything_that_reads_and_writes_states(
    rows: dict[str, Any], model: Transformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit-identical to states on the host: access, checkpoints, state dicts, a change of plan and back.

    No file is accessed through its memory mapping: these mappings are protected, and an access would end the process.
    """
    monkeypatch.setattr(disk_rows, "mmap", SimpleNamespace(mmap=locked))
    found = {}
    for name, first in (("host", "zero3-offload"), ("disk", "infinity")):
        folders = {"disk": str(tmp_path / "scratch"), "rows": rows} if name == "disk" else {}
        plan = {"preset": first, "precision": "bf16", **folders}
        replicas = [copy.deepcopy(model) for _ in range(2)]

        def rank(world: sw.World, name: str = name, plan: Any = plan, replicas: Any = replicas) -> Any:
            replica = replicas[world.rank]
            with sw.shard(replica, plan, optimizer=adamw(replica), world=world) as engine:
                return go_through_it(engine, tmp_path / name, ({**plan, "clip_grad_norm": 0.1}, ZERO2, plan))

        found[name] = run_ranks(2, rank)
    for on_host, on_disk in zip(found["host"][1], found["disk"][1], strict=True):
        assert_same_bits(on_disk, on_host)
    assert not list((tmp_path / "scratch").iterdir())


def test_some_parameters_on_a_disk_and_several_optimizers(tmp_path: Path) -> None:
    """A rule keeps some states on disk, next to frozen, tied and unused parameters. Results equal those with all states
    on the device up to rounding."""

    def halves(model: Transformer) -> list[torch.optim.Optimizer]:
        one, other = model.blocks[0], [model.blocks[1], model.tokens, model.positions, model.norm]
        rest = [param for module in other for param in module.parameters()]
        return [
            torch.optim.AdamW([{"params": one.parameters()}, {"params": rest[:3], "lr": 1e-2}], lr=3e-3, eps=1e-5),
            torch.optim.SGD(rest[3:], lr=0.05, momentum=0.9),
        ]

    torch.manual_seed(0)
    model, data = Transformer(tied=True), batches(NUM_STEPS, rows=12)
    model.blocks[2].requires_grad_(False)
    model.blocks[0].register_parameter("unused", torch.nn.Parameter(torch.ones(3)))
    on_disk = {"params": ["blocks.*"], "rows": {"optim": DISK}}
    found = []
    for rules in ({}, {"wide": on_disk}):
        replicas = [copy.deepcopy(model) for _ in range(2)]

        def rank(world: sw.World, rules: Any = rules, replicas: Any = replicas) -> tuple[Any, Any]:
            replica = replicas[world.rank]
            plan = {"preset": "zero3", "rules": rules, "disk": str(tmp_path)}
            with sw.shard(replica, plan, optimizer=halves(replica), world=world) as engine:
                assert bool(engine.memory().promised_on_disk) == bool(rules)
                return train(engine, data), engine.state_dict()

        found.append(run_ranks(2, rank)[0])
    (losses, params), (those, others) = found
    assert losses == pytest.approx(those, rel=1e-6)
    for name, values in params.items():
        assert torch.allclose(values, others[name], rtol=0, atol=1e-5), name


def test_new_states_are_in_memory_one_parameter_at_a_time(tmp_path: Path) -> None:
    """An optimizer creates its states itself, in its first step. Those of a whole unit are never in memory at once."""
    model = nn.Sequential(nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(8))))
    twin = copy.deepcopy(model)
    plain = torch.optim.RAdam(twin.parameters(), lr=0.01, foreach=False)
    x, param_bytes = torch.randn(4, 128), 4 * 128**2

    def rank(world: sw.World) -> None:
        optimizer = torch.optim.RAdam(model.parameters(), lr=0.01, foreach=False)
        plan = {"preset": "infinity", "disk": str(tmp_path), "units": ["0"]}
        with sw.shard(model, plan, optimizer=optimizer, world=world) as engine:
            for number in range(2):
                twin(x).square().mean().backward()
                plain.step()
                plain.zero_grad()
                engine.backward(engine(x).square().mean())
                with Allocations() as allocations:
                    engine.step()
                assert number or allocations.peak_bytes < 6 * param_bytes, "states of all would be 16"
            for name, param in twin.named_parameters():
                assert torch.allclose(engine.get(name), param, atol=1e-6), name

    run_ranks(1, rank)
