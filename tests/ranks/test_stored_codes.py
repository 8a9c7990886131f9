"""Frozen matrices that rest as codes. The twin rounds them tensor by tensor, once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from twins import batches, rounded_by, train_steps, work_on_ranks
from wires import assert_trains_like, is_coded, twin_run

import shardwise as sw
from shardwise.errors import ShardwiseError
from shardwise.testing import run_ranks
from tests import inside
from tests.drawing import drawing
from tests.models import Lora, Transformer
from tests.thorough import sampled, thorough_only

Tensor = torch.Tensor
INT8, INT4 = {"dtype": "int8", "block": 32}, {"dtype": "int4", "block": 16}
FP8 = {"dtype": "fp8", "block": 32}
TWO = {"node": 2, "local": 2}
ROWS = 12


def frozen_model() -> Transformer:
    """A base that is frozen but for its first block and what is around it, with adapters in its last one."""
    with drawing():
        torch.manual_seed(0)
        model = Transformer()
        for block in model.blocks[1:]:
            block.requires_grad_(False)
        model.blocks[-1].up = Lora(model.blocks[-1].up)
        model.blocks[-1].qkv = Lora(model.blocks[-1].qkv)
    return model


@pytest.fixture(scope="module")
def model() -> Transformer:
    return frozen_model()


def frozen_matrices(model: torch.nn.Module) -> dict[str, Tensor]:
    every = model.named_parameters()
    return {name: param for name, param in every if not param.requires_grad and is_coded(name, param)}


def through(storage: dict[str, Any], values: Tensor) -> Tensor:
    return rounded_by({**storage, "rests": True})(values.detach())


@sampled
@pytest.mark.parametrize(
    ("preset", "num_ranks", "mesh", "storage"),
    [
        ("ddp", 2, None, INT8),
        ("zero3", 3, None, INT4),
        ("zero3-kept", 2, None, FP8),
        ("hpz", 4, TWO, INT8),
        ("zero2", 1, None, INT4),
        ("offload", 2, None, INT8),
    ],
)
def test_trains_like_a_twin_with_a_rounded_base(
    preset: str, num_ranks: int, mesh: Any, storage: dict[str, Any], model: Transformer
) -> None:
    """And sends and holds what its program says."""
    data = batches(3, rows=ROWS)
    twin = twin_run(model, data, num_ranks, {"frozen": {**storage, "rests": True}})
    settings = {"storage": {"frozen": storage}}
    assert_trains_like(twin, model, data, preset, num_ranks, mesh, kinds=("param", "grad"), **settings)


def test_memory_is_that_of_codes(model: Transformer) -> None:
    """Where every rank has all of it, too; and nothing else is measured than was promised."""

    def param_bytes(engine: sw.Engine) -> int:
        train_steps(engine, range(2))
        report = engine.memory()
        assert report.measured["param"] == report.promised["param"]
        return int(report.measured["param"])

    def taken(**plan: Any) -> int:
        return int(work_on_ranks(2, param_bytes, {"preset": "zero1", **plan}, lambda: copy.deepcopy(model))[0])

    numel = sum(param.numel() for param in frozen_matrices(model).values())
    saved = taken() - taken(storage={"frozen": INT8})
    assert numel * (4 - 1 - 2 / 32) * 0.9 < saved <= numel * (4 - 1 - 2 / 32)  # flat buffers are padded to blocks


def test_what_is_saved_is_plain_and_comes_back(model: Transformer, tmp_path: Any) -> None:
    """On another number of ranks, and without codes, every element is the same."""
    stored: dict[str, Any] = {"preset": "zero3", "precision": "bf16", "storage": {"frozen": INT4}}

    def save(engine: sw.Engine) -> dict[str, Tensor]:
        train_steps(engine, range(1))
        engine.save(tmp_path)
        return engine.state_dict()

    def go_on(engine: sw.Engine) -> tuple[dict[str, Tensor], list[float]]:
        engine.resume(tmp_path)
        return engine.state_dict(), train_steps(engine, range(1, 2))

    saved = work_on_ranks(2, save, stored, lambda: copy.deepcopy(model))[0]
    for name, param in frozen_matrices(model).items():
        assert saved[name].dtype == torch.bfloat16
        assert torch.equal(saved[name], through(INT4, param.bfloat16())), name
    losses = []
    for num_ranks, plan in ((3, stored), (2, {"preset": "ddp", "precision": "bf16"})):
        state, found = work_on_ranks(num_ranks, go_on, plan, lambda: copy.deepcopy(model))[0]
        assert all(torch.equal(state[name], saved[name]) for name in frozen_matrices(model))
        losses.append(found[0])
    assert losses[0] == pytest.approx(losses[1], rel=2**-8)


@thorough_only("moves that tests of reshard make, and edits")
def test_changes_of_plan_and_what_is_set(model: Transformer) -> None:
    """Parts of blocks that come from several ranks are made codes once, together."""
    stored = {"preset": "zero3", "storage": {"frozen": INT4}}
    names = list(frozen_matrices(model))

    def work(engine: sw.Engine) -> None:
        train_steps(engine, range(1))
        engine.reshard(stored)
        expected = {name: through(INT4, param) for name, param in frozen_matrices(model).items()}
        assert all(torch.equal(engine.get(name), values) for name, values in expected.items())
        engine.set(names[0], expected[names[0]] * 3)
        assert torch.equal(engine.get(names[0]), through(INT4, expected[names[0]] * 3))
        before = float(engine(*batches(1, rows=4)[0]).detach())
        engine.reshard({"preset": "ddp"})
        assert torch.equal(engine.get(names[1]), expected[names[1]])
        assert float(engine(*batches(1, rows=4)[0]).detach()) == pytest.approx(before, rel=1e-6)
        train_steps(engine, range(1, 2))

    work_on_ranks(3, work, {"preset": "zero3"}, lambda: copy.deepcopy(model))


@thorough_only("parameters that are unfrozen later")
def test_what_is_unfrozen_trains_on_from_there(model: Transformer) -> None:
    def work(engine: sw.Engine) -> None:
        train_steps(engine, range(1))
        name, before = "blocks.1.up.weight", engine.get("blocks.1.up.weight")
        engine.module.blocks[1].requires_grad_(True)
        train_steps(engine, range(1, 2))
        moved = (engine.get(name) - before).abs().max()
        assert 0 < moved <= 2 * 3e-3  # of AdamW, in one step
        planned = inside.program(engine).micro_batch
        assert {action.flat for block in planned for action in block.actions if action.codes} == {"blocks.2:frozen"}

    work_on_ranks(2, work, {"preset": "zero3", "storage": {"frozen": INT8}}, lambda: copy.deepcopy(model))


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        ({"precision": "fp64"}, "storage.frozen is int8, .* the precision is fp64"),
        ({"wire": {"frozen": "int8"}}, "leave out wire.frozen"),
        ({"offload": {"optim": 1.0, "param": 1.0}}, r"rest on the host, where codes do not\. .*offload\.param: 0"),
        ({"storage": {"frozen": {"block": 64}}}, r"storage\.frozen\.block is given, but no dtype"),
    ],
)
def test_refused(plan: dict[str, Any], why: str, model: Transformer) -> None:
    replica = copy.deepcopy(model)

    def rank(world: sw.World) -> None:
        with pytest.raises(ShardwiseError, match=why):
            sw.shard(replica, {"preset": "zero3", "storage": {"frozen": "int8"}, **plan}, world=world)

    run_ranks(1, rank)
