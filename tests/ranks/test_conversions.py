"""Modules that are converted before units are chosen, and the first of them: `nn.SyncBatchNorm` takes the rows of all
ranks, trains like one process on whole batches, and its checkpoints are the plain model's."""

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
from twins import Batch, Tensor, adamw, assert_same, batches, plain_run, sharded_run

import shardwise as sw
from shardwise.cli.main import main
from shardwise.errors import ConfigError, ModelError
from shardwise.memory import choose_units
from shardwise.parallel.batch_norm import SyncBatchNorm
from shardwise.parallel.conversions import convert
from shardwise.plan import load_plan
from shardwise.testing import run_ranks
from tests import inside
from tests.ranks.test_lost_ranks import DiesAt, Net, race
from tests.thorough import sampled, thorough_only

WIDTH = 16


class Normed(nn.Module):
    """Linear layers, without biases that a batch norm would cancel, and batch norms between them."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(67, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH, **settings), nn.Tanh())
            for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, 67)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.embed(x).flatten(0, 1)
        for block in self.blocks:
            hidden = block(hidden)
        return nn.functional.cross_entropy(self.head(hidden), y.flatten())


def plain(**settings: Any) -> Normed:
    """Its batch norms see whole batches where there is one process."""
    torch.manual_seed(0)
    return Normed(**settings)


def synced(**settings: Any) -> Normed:
    """The same model, as scripts for DDP make it."""
    model = nn.SyncBatchNorm.convert_sync_batchnorm(plain(**settings))
    assert isinstance(model, Normed)
    return model


def running(engine: sw.Engine) -> dict[str, Any]:
    return {name: buffer.clone() for name, buffer in engine.module.named_buffers()}


@sampled
@pytest.mark.parametrize("settings", [{}, {"momentum": None}, {"affine": False}], ids=str)
@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize(
    ("preset", "num_ranks", "mesh"),
    [
        ("zero3", 2, None),
        ("ddp", 3, None),
        ("zero1", 4, {"node": 2, "local": 2}),
        ("hsdp", 4, {"node": 2, "local": 2}),
        ("zero2", 1, None),
    ],
)
def test_batch_norms_over_all_ranks_train_like_one_process_on_whole_batches(
    preset: str, num_ranks: int, mesh: Any, activations: str, settings: dict[str, Any]
) -> None:
    data = batches(5, rows=12)
    run = sharded_run(synced(**settings), data, preset, num_ranks, mesh, after=running, activations=activations)
    assert_same(run, plain_run(plain(**settings), data))
    twin = plain(**settings)
    optimizer = adamw(twin)
    for x, y in data:
        optimizer.zero_grad()
        twin(x, y).backward()
        optimizer.step()
    for name, buffer in twin.named_buffers():
        assert torch.allclose(run.extra[name], buffer, rtol=1e-4, atol=1e-5), name


def test_ranks_with_different_numbers_of_rows_are_one_batch() -> None:
    """Their weights are applied to losses, because a backward brings gradients of the other ranks' losses."""
    model, data = synced(), batches(4, rows=9)
    shares = {0: slice(0, 2), 1: slice(2, 9)}

    def rank(world: sw.World) -> dict[str, Tensor]:
        mine = copy.deepcopy(model)
        optimizer = adamw(mine)
        with sw.shard(mine, "zero3", optimizer=optimizer, world=world) as engine:
            for x, y in data:
                part = shares[world.rank]
                engine.weigh(len(x[part]), of=len(x))
                engine.backward(engine(x[part], y[part]))
                engine.step()
            return engine.state_dict()

    twin = plain_run(plain(), data)
    for state in run_ranks(2, rank):
        for name, param in twin.params.items():
            torch.testing.assert_close(state[name], param, rtol=0, atol=1e-5)


def test_checkpoints_are_those_of_the_plain_model_both_ways(tmp_path: Path) -> None:
    model = synced()

    def rank(world: sw.World) -> dict[str, Tensor]:
        mine = copy.deepcopy(model)
        optimizer = adamw(mine)
        with sw.shard(mine, "zero3", optimizer=optimizer, world=world) as engine:
            x, y = batches(1)[0]
            engine.backward(engine(x, y))
            engine.step()
            engine.save(tmp_path)
            return engine.state_dict()

    state = run_ranks(2, rank)[0]
    plain().load_state_dict(state)  # raises if a name or a shape is not the plain model's

    other = plain()

    def resume(world: sw.World) -> dict[str, Tensor]:
        mine = copy.deepcopy(other)
        optimizer = adamw(mine)
        with sw.shard(mine, "zero1", optimizer=optimizer, world=world) as engine:
            assert engine.resume(tmp_path) is not None
            return engine.state_dict()

    for name, value in run_ranks(3, resume)[0].items():
        assert torch.equal(value, state[name]), name


@pytest.mark.parametrize("end", [sw.Engine.unshard, sw.Engine.close])
def test_modules_stay_the_users_own_and_are_plain_again_afterwards(end: Callable[[sw.Engine], None]) -> None:
    model = synced()
    before = list(model.modules())
    params = list(model.parameters())

    def rank(world: sw.World) -> str:
        mine = copy.deepcopy(model) if world.rank else model
        engine = sw.shard(mine, "ddp", world=world)
        kinds = {type(module) for module in mine.modules() if isinstance(module, nn.SyncBatchNorm)}
        assert kinds == {SyncBatchNorm}
        said = str(engine)
        end(engine)
        assert {type(one) for one in mine.modules() if isinstance(one, nn.SyncBatchNorm)} == {nn.SyncBatchNorm}
        assert not any("lines" in vars(one) for one in mine.modules())
        return said

    said = run_ranks(2, rank)[0]
    assert "batch norms over the rows of all ranks: blocks.0.1 and 2 more" in said
    assert all(one is other for one, other in zip(before, model.modules(), strict=True))
    assert all(one is other for one, other in zip(params, model.parameters(), strict=True))


@thorough_only("slow; smaller tests beside it cover the same code")
def test_a_changed_plan_and_inference_keep_batch_norms_right() -> None:
    """After reshard they sum along the new mesh; inside inference() ranks run at their own pace, and nothing is
    sent."""
    model, data = synced(), batches(4, rows=12)

    def step(engine: sw.Engine, _: torch.optim.Optimizer, batch: Batch) -> Tensor:
        if engine.num_steps == 2:
            engine.reshard({"preset": "zero3", "mesh": {"node": 2, "local": 2}})
            with engine.inference():
                for _ in range(1 + engine.world.rank):
                    engine.module.train()
                    before = running(engine)
                    engine(*batch)
                    for name, buffer in engine.module.named_buffers():
                        buffer.copy_(before[name])
        loss: Tensor = engine(*batch)
        engine.backward(loss)
        engine.step()
        return loss

    run = sharded_run(model, data, "zero1", 4, None, step=step)
    assert_same(run, plain_run(plain(), data))


@pytest.mark.parametrize(
    ("plan", "change", "error", "message"),
    [
        ({"compile": "eager"}, None, ConfigError, r"blocks\.0\.1 sums over ranks"),
        ({}, "group", ModelError, r"blocks\.0\.1 is a SyncBatchNorm over a process group"),
        ({"mesh": {"dp": 3}}, None, ConfigError, "makes 3 ranks"),
    ],
)
def test_a_refusal_leaves_the_model_as_it_was(
    plan: dict[str, Any], change: str | None, error: type[Exception], message: str
) -> None:
    model = synced()
    if change:
        model.blocks[0][1].process_group = object()

    def rank(world: sw.World) -> None:
        mine = copy.deepcopy(model)
        with pytest.raises(error, match=message):
            sw.shard(mine, {"preset": "zero3", **plan}, world=world)
        assert {type(one) for one in mine.modules()} == {type(one) for one in model.modules()}

    run_ranks(1, rank)


class Halves:
    """A conversion that stores weights in half the bytes, and so not what a checkpoint of the plain model has."""

    what, communicates = "layers in bf16", False

    def takes(self, path: str, module: nn.Module) -> bool:
        return isinstance(module, nn.Linear)

    def convert(self, module: nn.Module) -> Callable[[], object]:
        module.to(torch.bfloat16)
        return lambda: module.to(torch.float32)

    def connect(self, module: nn.Module, lines: Any) -> None:
        raise AssertionError("nothing is sent")


class Doubles(Halves):
    """A conversion that changes the class alone, by which units are then chosen."""

    what = "layers twice"

    def convert(self, module: nn.Module) -> Callable[[], object]:
        module.__class__ = Double
        return lambda: setattr(module, "__class__", nn.Linear)

    def notes(self) -> tuple[str, ...]:
        return ("and one note",)


class Double(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_a_conversion_keeps_names_shapes_dtypes_and_parameters() -> None:
    model = synced()
    with pytest.raises(ModelError, match=r"blocks\.0\.0 to layers in bf16 changes weight\."):
        convert(model, [Halves()])
    assert {param.dtype for param in model.parameters()} == {torch.float32}


def test_units_are_chosen_from_converted_modules() -> None:
    model = synced()
    converted = convert(model, [Doubles()])
    assert str(converted) == "layers twice: blocks.0.0 and 3 more\nand one note\n"
    names = {choice.name for choice in choose_units(model, load_plan({"units": {"class": "Double"}}))}
    assert names >= {"blocks.0.0", "blocks.1.0", "blocks.2.0", "head"}
    converted.undo()
    with pytest.raises(ConfigError, match="no such module"):
        choose_units(model, load_plan({"units": {"class": "Double"}}))


class Chain(nn.Module):
    """The same layers, with the loss outside, as pipelines take it."""

    def __init__(self, model: Normed) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = model.embed, model.blocks, model.head

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x).flatten(0, 1)
        for block in self.blocks:
            hidden = block(hidden)
        result: Tensor = self.head(hidden)
        return result


@thorough_only("slow; smaller tests beside it cover the same code")
def test_the_batch_norms_of_a_stage_take_the_rows_of_the_ranks_that_have_it_too() -> None:
    data, model = batches(4, rows=12), Chain(synced())

    def loss_of(output: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, y.flatten())

    def rank(world: sw.World) -> tuple[list[float], int]:
        mine, losses = copy.deepcopy(model), []
        plan = {"preset": "zero1", "mesh": {"pp": 2, "dp": 2}}
        with sw.shard(mine, plan, optimizer=adamw(mine), world=world) as engine:
            for x, y in data:
                place, num = engine.data_ranks
                loss = engine.train_step(x.chunk(num)[place], y.chunk(num)[place], loss_fn=loss_of)
                losses.append(engine.mean(loss.item()))
            return losses, len(inside.sharding(engine).converted.modules)

    twin = plain_run(plain(), data)
    results = run_ranks(4, rank)
    assert sorted(num for _, num in results) == [1, 1, 2, 2]
    for losses, _ in results:
        assert losses == pytest.approx(twin.losses, rel=1e-6)


class NormedNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.c.bias = None  # the norm would cancel it
        self.norm = nn.SyncBatchNorm(32)


@sampled
@pytest.mark.parametrize("plan", [{"preset": "zero3"}, {"preset": "ddp"}], ids=str)
def test_batch_norms_take_the_rows_of_the_ranks_that_are_left(plan: dict[str, Any], tmp_path: Path) -> None:
    race(plan, DiesAt({1: 23, 3: 60}), tmp_path, model=NormedNet())


MODEL = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_conversions import synced as build
from twins import batches

def batch():
    return batches(1)[0]
"""


@sampled
@pytest.mark.parametrize("mesh", [{"dp": 2}, {"node": 2, "local": 2}], ids=str)
def test_conversions_are_explained_with_what_they_send(
    mesh: dict[str, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    plan, num_ranks = {"preset": "zero3", "mesh": mesh}, math.prod(mesh.values())
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    asked = ["explain", str(tmp_path / "plan.json"), "--world", str(num_ranks), "--optimizer", "adamw"]
    asked += ["--model", f"{tmp_path}/model.py:build", "--batch", f"{tmp_path}/model.py:batch"]
    assert main([*asked, "--json"]) == 0
    promised = json.loads(capsys.readouterr().out)
    assert promised["conversions"] == ["batch norms over the rows of all ranks: blocks.0.1 and 2 more"]
    assert main(asked) == 0
    assert "and checkpoints, are those of the plain model" in " ".join(capsys.readouterr().out.split())
    model = synced()

    def rank(world: sw.World) -> int:
        mine = copy.deepcopy(model)
        with sw.shard(mine, plan, optimizer=adamw(mine), world=world) as engine:
            for _ in range(3):
                engine.backward(engine(*batches(1)[0]))
                engine.step()
            ledger = inside.ledger(engine)
            ledger.clear()
            engine.backward(engine(*batches(1)[0]))
            engine.step()
            return sum(num for (verb, _), num in ledger.sent_bytes.items() if verb != "broadcast")

    assert run_ranks(num_ranks, rank) == [promised["sent_bytes_per_step"]] * num_ranks
