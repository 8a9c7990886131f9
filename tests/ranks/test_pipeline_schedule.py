"""A step of a pipeline follows one program: gathers and reductions are counted, and steps that deviate are compared."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from pipelined import batches, rows_of, some_names, unsplit
from torch import nn
from torch.utils.checkpoint import checkpoint
from twins import Run, adamw, assert_alike

import shardwise as sw
from shardwise.program import parse
from shardwise.testing import run_ranks
from tests import inside
from tests.models import WIDTH, Block, Decoder
from tests.thorough import sampled, thorough_only

pytestmark = sampled

Tensor = torch.Tensor
NUM_STEPS, MICRO_BATCHES, CLIP = 4, 4, 0.5
LATE = {"rows": {"grad": {"shard": [], "partial": ["dp"]}}}
PLANS: dict[str, dict[str, Any]] = {
    "ddp": {"preset": "ddp"},
    "zero1": {"preset": "zero1"},
    "zero2": {"preset": "zero2"},
    "zero3": {"preset": "zero3"},
    "kept": {"preset": "zero3-kept"},
    "kept, reduced once": {"preset": "zero3-kept", **LATE},
    "ruled": {
        "preset": "zero3",
        "rules": {"norms": {"classes": ["LayerNorm"], "rows": {"param": {"shard": []}, "held": {"shard": []}}}},
    },
}
GATHERED_ONCE = ("kept", "kept, reduced once")
REDUCED_ONCE = ("ddp", "zero1", "kept, reduced once")


class Recomputed(Block):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def decoder(*, recomputes: bool) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(tied=True)
    if recomputes:
        blocks = model.blocks
        model.blocks = nn.ModuleList(Recomputed(WIDTH) for _ in blocks)
        model.blocks.load_state_dict(blocks.state_dict())
    return model


def counted(engine: sw.Engine) -> dict[str, Any]:
    """For the last step: what was sent along the data axis, and what the program predicts."""
    ledger, program = inside.ledger(engine), inside.program(engine)
    text = parse(engine.program())
    assert text == (*program.micro_batch, *program.step)
    verbs = ("gather", "reduce_scatter", "all_reduce")
    promised: dict[str, int] = {}
    in_schedule = {"gather": 0, "reduce": 0}
    for block in text:
        for action in block.actions:
            verb = action.verb.replace("agree", "all_reduce")
            if verb in verbs and action.over == "dp":
                promised[verb] = promised.get(verb, 0) + action.sent_bytes
    for block in program.micro_batch:
        for action in block.actions:
            if action.communicates:
                in_schedule["gather" if action.verb == "gather" else "reduce"] += 1
    sent = {verb: ledger.sent_bytes.get((verb, "dp"), 0) for verb in verbs}
    flats = [flat for flat in inside.flats(engine) if not flat.spec.resident]
    report = engine.memory()
    return {
        "sent": {verb: num_bytes for verb, num_bytes in sent.items() if num_bytes},
        "promised": promised,
        "in_schedule": in_schedule,
        "num_gathered": len(flats),
        "num_trained": len(inside.flats(engine)),
        "is_followed": inside.runner(engine).passes._scripts["schedule", True].is_finished(),
        "held": {kind: (report.measured[kind], report.promised[kind]) for kind in ("param", "grad", "working")},
    }


def trained(
    model: nn.Module, data: list[tuple[Tensor, Tensor]], *, shares_memory: bool, each_step: Any = None, **plan: Any
) -> list[Run]:
    mesh = {"pp": 2, "dp": 2}
    models = [copy.deepcopy(model) for _ in range(math.prod(mesh.values()))]

    def rank(world: sw.World) -> Run:
        told, mine = Run(), models[world.rank]
        full = {"mesh": mesh, "accumulate": MICRO_BATCHES, "clip_grad_norm": CLIP, **plan}
        with sw.shard(mine, full, optimizer=adamw(mine), world=world) as engine:
            for step, (x, y) in enumerate(data):
                if each_step is not None:
                    each_step(engine, step)
                inside.ledger(engine).clear()
                loss = engine.forward_backward((rows_of(engine, x), rows_of(engine, y)))
                sent = inside.ledger(engine).sent_bytes.copy()
                told.losses.append(engine.mean(loss.item()))
                if step + 1 == len(data):
                    told.grads = [{name: engine.get(name, "grad") for name in some_names(model)}]
                else:
                    engine.step()
                    told.norms.append(float(engine.gradient_norm or 0.0))
                    told.extra = counted(engine) | {"before": sent}
            engine.step()
            told.norms.append(float(engine.gradient_norm or 0.0))
            told.params = engine.state_dict()
            assert inside.meter(engine).now["working"] == 0
        return told

    return run_ranks(len(models), rank, shares_memory=shares_memory)


def assert_like(twin: Run, runs: list[Run]) -> None:
    for run in runs:
        assert run.params.keys() == twin.params.keys()
        assert_alike(run, twin, of_all=False)


WAYS = [
    (schedule, recomputes) for schedule in ("1f1b", "gpipe", "interleaved", "zb-h1") for recomputes in (False, True)
]
CASES = [(name, *way, (place + number) % 2 == 0) for place, name in enumerate(PLANS) for number, way in enumerate(WAYS)]
"""Every plan with every schedule, with and without recomputation, alternately over shared memory and over messages."""


@pytest.mark.parametrize(("name", "schedule", "recomputes", "shares_memory"), CASES)
def test_a_step_does_what_its_program_says_and_trains_like_the_unsplit_model(
    name: str, schedule: str, *, recomputes: bool, shares_memory: bool
) -> None:
    model, data = decoder(recomputes=recomputes), batches(NUM_STEPS, 16)
    plan = {**PLANS[name], "pipeline": {"schedule": schedule}}
    runs = trained(model, data, shares_memory=shares_memory, **plan)
    assert_like(unsplit(model, data, clip=CLIP), runs)
    for run in runs:
        found = run.extra
        assert found["is_followed"]
        assert found["sent"] == found["promised"]
        if name in GATHERED_ONCE:
            assert found["in_schedule"]["gather"] == found["num_gathered"]
        elif name in ("zero3", "ruled"):
            assert found["in_schedule"]["gather"] > found["num_gathered"]
        if name in REDUCED_ONCE:
            assert found["in_schedule"]["reduce"] == (found["num_trained"] if name == "ddp" else 0)
        else:
            assert found["in_schedule"]["reduce"] == MICRO_BATCHES * found["num_trained"]
        for kind, (measured, promised) in found["held"].items():
            assert measured <= promised, kind


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize("shares_memory", [True, False], ids=["shared", "sent"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "interleaved"])
@pytest.mark.parametrize("name", ["zero3", "kept", "zero2"])
def test_steps_that_are_unlike_the_recorded_one(name: str, schedule: str, *, shares_memory: bool) -> None:
    """Evaluation in between, other shapes, gradients not reduced or not used: later steps follow the program again."""
    model, data = decoder(recomputes=False), batches(6, 16, lengths=(6, 6, 3))
    evaluated: dict[tuple[int, int], float] = {}

    def each_step(engine: sw.Engine, step: int) -> None:
        x, y = data[step]
        mine = rows_of(engine, x), rows_of(engine, y)
        if step in (2, 3):
            evaluated[engine.world.rank, step] = engine.mean(engine.eval_step(mine).item())
        if step == 3:
            with engine.no_sync():
                engine.forward_backward(mine)
            engine.zero_grad()
        if step == 4:
            engine.forward_backward(mine)
            engine.zero_grad()

    plan = {**PLANS[name], "pipeline": {"schedule": schedule}}
    runs = trained(model, data, shares_memory=shares_memory, each_step=each_step, **plan)
    assert_like(unsplit(model, data, clip=CLIP), runs)
    for step in (2, 3):
        values = {round(value, 5) for (_, at), value in evaluated.items() if at == step}
        assert len(values) == 1
        assert values.pop() == pytest.approx(runs[0].losses[step], rel=1e-4)
    assert all(run.extra["sent"] == run.extra["promised"] for run in runs)
