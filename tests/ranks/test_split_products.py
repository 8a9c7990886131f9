"""Pipeline stages with split layers, and data axes: products of pipeline, tensor and data parallelism."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pipelined import batches, rows_of, unsplit
from split_models import TENSOR, Block
from test_pipeline import CLIP, MICRO_BATCHES, assert_same, pipelined
from torch import nn
from twins import adamw, work_on_ranks

import shardwise as sw
from shardwise.testing import run_ranks
from tests.models import WIDTH, Decoder
from tests.thorough import sampled, thorough_only

pytestmark = sampled

NUM_STEPS = 3
CUT = {**TENSOR, "plan": {**TENSOR["plan"], "tokens": "vocabulary"}}
del CUT["plan"]["embed"]
TIED = {**CUT, "plan": {name: style for name, style in CUT["plan"].items() if name != "head"}}

PRODUCTS: list[tuple[str, str, dict[str, int]]] = [
    # preset, schedule, mesh
    ("ddp", "1f1b", {"pp": 2, "tp": 2}),
    ("zero3", "gpipe", {"pp": 2, "tp": 2}),
    ("zero1", "1f1b", {"pp": 2, "dp": 2, "tp": 2}),
    ("zero3", "interleaved", {"pp": 2, "dp": 2, "tp": 2}),
    ("zero2", "zb-h1", {"tp": 2, "dp": 2, "pp": 2}),
    ("ddp", "zb-h1", {"dp": 2, "tp": 2, "pp": 2}),
    ("zero1", "gpipe", {"pp": 4, "tp": 2}),
    ("zero1", "zb-h1", {"pp": 2, "tp": 4}),
    ("zero1", "interleaved", {"tp": 2, "pp": 2}),
    ("zero2", "1f1b", {"pp": 2, "tp": 4}),
    ("zero2", "gpipe", {"dp": 2, "pp": 2, "tp": 2}),
    ("zero3", "1f1b", {"pp": 4, "tp": 2}),
    ("zero3", "zb-h1", {"pp": 2, "dp": 2, "tp": 2}),
    ("zero3-kept", "1f1b", {"pp": 2, "dp": 2, "tp": 2}),
]


class Net(Decoder):
    """A decoder of blocks whose attention uses the heads that its rank has."""

    def __init__(self, *, tied: bool, num_blocks: int = 4) -> None:
        super().__init__(tied=tied, num_blocks=0)
        self.blocks.extend(Block(WIDTH, 4) for _ in range(num_blocks))


def net(*, tied: bool) -> nn.Module:
    torch.manual_seed(0)
    return Net(tied=tied)


@pytest.mark.parametrize(
    ("preset", "schedule", "mesh"),
    PRODUCTS,
    ids=lambda one: "x".join(f"{axis}{size}" for axis, size in one.items()) if isinstance(one, dict) else one,
)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_trains_as_the_unsplit_model(preset: str, schedule: str, mesh: dict[str, int], tied: bool) -> None:
    """With accumulation and clipping; a tied embedding is on the first and on the last stage."""
    model, data = net(tied=tied), batches(NUM_STEPS, 16)
    plan = {"preset": preset, "pipeline": {"schedule": schedule}, "tensor": TIED if tied else CUT}
    runs = pipelined(model, mesh, data, shares_memory=preset != "zero2", **plan)
    assert_same(runs, unsplit(model, data, clip=CLIP))


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_sums_beside_products_in_stages(schedule: str) -> None:
    """Ranks along `tp` are on two hosts, and several micro-batches are between their forward and their backward."""
    model, data = net(tied=False), batches(NUM_STEPS, 16)
    more: dict[str, Any] = {"pipeline": {"schedule": schedule}, "tensor": CUT}
    runs = pipelined(model, {"pp": 2, "tp": 2}, data, preset="zero1", hosts="abab", activations="recompute", **more)
    assert_same(runs, unsplit(model, data, clip=CLIP))


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_parts_of_sequences_between_stages(schedule: str) -> None:
    model, data = net(tied=False), batches(NUM_STEPS, 16)
    tensor = {**CUT, "sequence": True}
    runs = pipelined(model, {"pp": 2, "tp": 2}, data, preset="zero3", tensor=tensor, pipeline={"schedule": schedule})
    assert_same(runs, unsplit(model, data, clip=CLIP))


@thorough_only("slow; smaller tests beside it cover the same code")
def test_lamb_takes_the_norms_of_whole_parameters() -> None:
    def lamb(model: nn.Module) -> torch.optim.Optimizer:
        return sw.optim.Lamb(model.parameters(), lr=0.01)

    model, data = net(tied=True), batches(NUM_STEPS, 16)
    runs = pipelined(model, {"pp": 2, "dp": 2, "tp": 2}, data, preset="zero2", tensor=TIED, optimizer=lamb)
    assert_same(runs, unsplit(model, data, clip=CLIP, make_optimizer=lamb))


@thorough_only("trains many products")
def test_frozen_parts_and_lower_precision() -> None:
    """The first block and the norm are frozen. In bf16, losses are close, and the same on all ranks."""
    model, data = net(tied=False), batches(NUM_STEPS, 16)
    model.blocks[0].requires_grad_(False)
    model.norm.requires_grad_(False)
    mesh = {"pp": 2, "dp": 2, "tp": 2}
    twin = unsplit(model, data, clip=CLIP)
    runs = pipelined(model, mesh, data, preset="zero3", tensor=CUT)
    assert_same(runs, twin)
    narrow = pipelined(model, mesh, data, preset="zero1", tensor=CUT, precision="bf16")
    assert len({tuple(run.losses) for run in narrow}) == 1
    assert narrow[0].losses == pytest.approx(twin.losses, rel=2e-2)


@thorough_only("slow; smaller tests beside it cover the same code")
def test_a_checkpoint_goes_between_products_and_one_process(tmp_path: Any) -> None:
    """Each job resumes from the previous one, takes a step, and saves. Together they train like the twin."""
    model = net(tied=True)
    jobs: list[tuple[str, dict[str, int]]] = [
        ("zero1", {"pp": 2, "dp": 2, "tp": 2}),
        ("zero3", {"dp": 1}),
        ("zero3", {"pp": 2, "tp": 2}),
        ("zero2", {"dp": 2, "tp": 2}),
        ("ddp", {"tp": 2, "pp": 2}),
        ("zero2", {"pp": 2, "dp": 2}),
    ]
    data = batches(len(jobs), 8)
    twin = unsplit(model, data, clip=CLIP)
    losses: list[float] = []
    for (x, y), (preset, mesh) in zip(data, jobs, strict=True):
        num_ranks = math.prod(mesh.values())
        models = [net(tied=True) for _ in range(num_ranks)]
        plan: dict[str, Any] = {"preset": preset, "mesh": mesh, "accumulate": MICRO_BATCHES, "clip_grad_norm": CLIP}
        if "tp" in mesh:
            plan["tensor"] = TIED

        def rank(
            world: sw.World, models: list[nn.Module] = models, plan: dict[str, Any] = plan, x: Any = x, y: Any = y
        ) -> tuple[float, dict[str, torch.Tensor]]:
            mine = models[world.rank]
            with sw.shard(mine, plan, optimizer=adamw(mine), world=world) as engine:
                if losses:
                    assert engine.resume(tmp_path) is not None
                loss = engine.mean(engine.train_step((rows_of(engine, x), rows_of(engine, y))).item())
                engine.save(tmp_path, wait=False)
                return loss, engine.state_dict()

        told = run_ranks(num_ranks, rank)
        losses.append(told[0][0])
    assert losses == pytest.approx(twin.losses, rel=1e-5)
    for _, params in told:
        for name, expected in twin.params.items():
            torch.testing.assert_close(params[name], expected, rtol=1e-5, atol=1e-5, msg=name)


@thorough_only("slow; smaller tests beside it cover the same code")
def test_whole_tensors_are_read_and_written() -> None:
    model = net(tied=True)
    names = [name for name, _ in model.named_parameters()]
    data = batches(1, 8)
    plan = {"preset": "zero2", "mesh": {"pp": 2, "tp": 2}, "accumulate": 2, "tensor": TIED}

    def work(engine: sw.Engine) -> None:
        for name, expected in model.named_parameters():
            assert torch.equal(engine.get(name), expected), name
        engine.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
        engine.set("blocks.3.attn.qkv.weight", model.get_parameter("blocks.3.attn.qkv.weight") * 2)
        for name in names:
            expected = model.get_parameter(name)
            changed = expected * 2 if name == "blocks.3.attn.qkv.weight" else expected + 1
            assert torch.equal(engine.get(name), changed), name
        engine.train_step((data[0][0], data[0][1]))

    work_on_ranks(4, work, plan, lambda: net(tied=True))
