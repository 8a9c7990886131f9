"""Error feedback of gradients sent as codes (LoCo, arXiv:2407.04480). The twin rounds, and keeps what is lost, tensor
by tensor."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import split_models
import torch
from test_codes import accumulating
from torch import nn
from twins import (
    MakeOptimizer,
    Run,
    adamw,
    assert_same,
    batches,
    engine_step,
    full_params,
    plan_of,
    sharded_run,
    train_steps,
    work_on_ranks,
)
from wires import (
    adamw_of_gpt,
    assert_same_but_for_flips,
    assert_trains_like,
    learnt,
    race,
    resuming,
    saving_to,
    twin_run,
)

import shardwise as sw
from shardwise.errors import ConfigError, PlacementError
from shardwise.testing import run_ranks
from tests import inside
from tests.models import Block, Transformer
from tests.thorough import sampled, thorough_only

Tensor = torch.Tensor
ROWS = 12
INT4 = {"dtype": "int4", "block": 16}
TWO = {"node": 2, "local": 2}


def fed_back(beta: float = 0.8, reset: int = 1024, **grad: Any) -> dict[str, Any]:
    return {"grad": grad or INT4, "feedback": {"beta": beta, "reset": reset}}


CASES = [
    ("ddp", 2, None, fed_back()),
    ("ddp", 5, None, fed_back(0.5, dtype="int8", block=32)),
    ("zero1", 2, None, fed_back(0)),
    ("zero2", 3, None, fed_back(0.5, reset=2)),
    ("zero3", 2, None, fed_back()),
    ("zero3", 4, TWO, fed_back(0.5) | {"param": {"dtype": "int8", "block": 32}}),
    ("hsdp", 4, TWO, fed_back()),
    ("hpz", 4, TWO, fed_back(0.5, reset=2)),
    ("zero1", 4, TWO, fed_back()),
    ("offload", 2, None, fed_back()),
    ("zero3", 2, None, fed_back(0, dtype="fp8", block=32)),
]
IDS = [f"{preset}-{num}{'x2' if mesh else ''}-{place}" for place, (preset, num, mesh, _) in enumerate(CASES)]


@pytest.fixture(scope="module")
def model() -> Transformer:
    torch.manual_seed(0)
    return Transformer()


@sampled
@pytest.mark.parametrize("shares_memory", [True, False], ids=["shared", "sent"])
@pytest.mark.parametrize(("preset", "num_ranks", "mesh", "wire"), CASES, ids=IDS)
def test_trains_like_a_twin_that_keeps_what_it_loses(
    preset: str, num_ranks: int, mesh: Any, wire: dict[str, Any], model: Transformer, *, shares_memory: bool
) -> None:
    data = batches(4, rows=20 if num_ranks == 5 else ROWS)
    race(model, data, preset, num_ranks, mesh, wire, shares_memory=shares_memory)


def test_the_race_is_lost_without_feedback(model: Transformer) -> None:
    """Without feedback the same run differs by more than the tolerance of the race."""
    data = batches(4, rows=ROWS)
    twin = twin_run(model, data, 2, fed_back())
    with pytest.raises(AssertionError, match="the twin has"):
        assert_trains_like(twin, model, data, "zero3", 2, None, wire={"grad": INT4})


@pytest.mark.parametrize(("preset", "mesh", "share"), [("zero3", None, 1), ("hpz", TWO, 2)])
def test_it_costs_a_share_for_each_rank_of_a_host(preset: str, mesh: Any, share: int, model: Transformer) -> None:
    """Two bytes for each element that a rank makes codes of, in what the plan promises and in what is held."""

    def work(engine: sw.Engine) -> tuple[int, int, int]:
        train_steps(engine, range(2))
        report, flats = engine.memory(), inside.flats(engine)
        counters = report.measured["optim"] - report.promised["optim"]
        assert 0 <= counters < 4 * 60
        coded = sum(flat.spec.numel for flat in flats if flat.losses)
        return report.promised["optim"], sum(one.nbytes for flat in flats for one in flat.losses.values()), coded

    num_ranks = 4 if mesh else 2
    plan: dict[str, Any] = {"preset": preset, "wire": {"grad": INT4}} | ({"mesh": mesh} if mesh else {})
    without, _, _ = work_on_ranks(num_ranks, work, plan, lambda: copy.deepcopy(model))[0]
    promised, kept, numel = work_on_ranks(num_ranks, work, plan | {"wire": fed_back()}, lambda: copy.deepcopy(model))[0]
    assert promised - without == kept == 2 * numel // share > 0


@sampled
@pytest.mark.parametrize(("preset", "mesh"), [("zero3", None), ("ddp", None), ("hsdp", TWO), ("zero1", TWO)])
def test_resumes_exactly(preset: str, mesh: Any, model: Transformer, tmp_path: Path) -> None:
    num_ranks, wire, data = 4 if mesh else 2, fed_back(0.5), batches(5, rows=ROWS)
    whole = sharded_run(model, data, preset, num_ranks, mesh, wire=wire)
    sharded_run(model, data[:2], preset, num_ranks, mesh, after=saving_to(tmp_path), wire=wire)
    run = sharded_run(Transformer(), data[2:], preset, num_ranks, mesh, step=resuming(tmp_path), wire=wire)
    assert run.losses == whole.losses[2:]
    assert all(torch.equal(run.params[name], param) for name, param in whole.params.items())


def test_what_was_lost_is_read_by_as_many_summands_and_begins_at_zero_with_others(
    model: Transformer, tmp_path: Path
) -> None:
    def kept(engine: sw.Engine) -> dict[str, Tensor]:
        return {
            f"{entry.kind}/{entry.name}": entry.tensor.clone()
            for entry in inside.entries(engine)
            if entry.kind.startswith("lost.")
        }

    def save(engine: sw.Engine) -> dict[str, Tensor]:
        train_steps(engine, range(2))
        engine.save(tmp_path)
        return kept(engine)

    def resume(engine: sw.Engine) -> dict[str, Tensor]:
        engine.resume(tmp_path)
        return kept(engine)

    def on(num_ranks: int, work: Any, **plan: Any) -> list[dict[str, Tensor]]:
        settings = {"preset": "zero3", "wire": fed_back(), **plan}
        return work_on_ranks(num_ranks, work, settings, lambda: copy.deepcopy(model))

    saved = on(2, save)
    assert all(one.any() for rank in saved for one in rank.values())
    for before, after in zip(saved, on(2, resume), strict=True):
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], one) for key, one in after.items())
    on_hosts = on(4, resume, mesh=TWO)  # each host's two ranks have halves of what it has lost
    for key, one in saved[1].items():
        halves = [rank[key] for rank in on_hosts[2:]]
        assert torch.equal(torch.cat([half for half in halves if half.numel()]), one)
    assert not any(one.any() for rank in on(3, resume) for one in rank.values())
    (off,) = {len(rank) for rank in on(2, resume, wire={"grad": INT4})}
    assert off == 0


def test_an_overflow_leaves_nothing_behind(model: Transformer) -> None:
    def work(engine: sw.Engine) -> None:
        train_steps(engine, range(2))
        before = full_params(engine)
        x, y = batches(1, rows=2)[0]
        engine.backward(engine(x, y) * (math.inf if engine.world.rank else 1))
        engine.step()
        assert all(torch.equal(one, before[name]) for name, one in full_params(engine).items())
        assert all(one.isfinite().all() for flat in inside.flats(engine) for one in flat.losses.values())
        assert all(math.isfinite(loss) for loss in train_steps(engine, range(2)))

    plan = {"preset": "zero3", "wire": fed_back(), "skip_nonfinite": True}
    work_on_ranks(2, work, plan, lambda: copy.deepcopy(model))


class _NotFinite(torch.autograd.Function):
    """Zero, whose gradient is infinite in one element."""

    @staticmethod
    def forward(ctx: Any, param: Tensor) -> Tensor:
        ctx.save_for_backward(param)
        return param.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (param,) = ctx.saved_tensors
        made = torch.zeros_like(param)
        made.view(-1)[37] = math.inf
        return made


class Spoiling(Block):
    is_bad = False

    def wide(self, x: Tensor) -> Tensor:
        made = super().wide(x)
        return made + _NotFinite.apply(self.up.weight) if self.is_bad else made


class Spoilt(Transformer):
    """The third part of a batch says from which rows comes a gradient with an infinity."""

    def __init__(self) -> None:
        super().__init__(num_blocks=2, block=lambda place, width: Spoiling(width) if place else Block(width))

    def forward(self, x: Tensor, y: Tensor, is_bad: Tensor) -> Tensor:
        self.blocks[1].is_bad = bool(is_bad.any())
        return super().forward(x, y)


@sampled
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("preset", "num_ranks", "mesh", "wire"), [one for one in CASES if one[1] != 5])
def test_a_step_that_is_left_out_forgets_a_block_and_keeps_what_its_other_codes_have_lost(
    preset: str, num_ranks: int, mesh: Any, wire: dict[str, Any], accumulate: int
) -> None:
    """Of one rank's gradient one element is not finite; it does not count among the steps until all is forgotten."""
    torch.manual_seed(0)
    model, bad_steps = Spoilt(), (1, 2)
    data = [(x, y, torch.zeros(len(x), dtype=torch.bool)) for x, y in batches(5, rows=24)]
    for step in bad_steps:
        data[step][2][-1] = True

    def on_rank(engine: sw.Engine) -> Run:
        run, (place, num) = Run(), engine.data_ranks
        for batch in data:
            loss = accumulating(engine, None, tuple(one.chunk(num)[place] for one in batch))
            run.losses.append(engine.mean(loss.item()))
            run.norms.append(engine.gradient_norm or 0.0)
        run.params = full_params(engine)
        return run

    plan = plan_of(preset, mesh, wire=wire, accumulate=accumulate, skip_nonfinite=True)
    runs = work_on_ranks(num_ranks, on_rank, plan, lambda: copy.deepcopy(model))
    twin = twin_run(
        model,
        data,
        num_ranks,
        wire,
        num_near=2 if mesh else 1,
        accumulate=accumulate,
        waits_whole=preset == "zero1",
        skips_nonfinite=True,
    )
    for run in (*runs, twin):
        assert [step for step, norm in enumerate(run.norms) if not math.isfinite(norm)] == list(bad_steps)
        run.norms = [norm for norm in run.norms if math.isfinite(norm)]
    for run in runs:
        (assert_same_but_for_flips if preset == "offload" else assert_same)(run, twin)


def test_a_save_that_goes_on_in_the_background_has_what_was_lost_until_then(model: Transformer, tmp_path: Path) -> None:
    """A backward changes it while the rest is still being copied."""
    data, wire = batches(4, rows=ROWS), fed_back(0.5)

    def step(engine: sw.Engine, optimizer: torch.optim.Optimizer, batch: Any) -> Tensor:
        if engine.num_steps == 2:
            engine.save(tmp_path, wait=False)
        return engine_step(engine, optimizer, batch)

    whole = sharded_run(model, data, "zero3", 2, None, step=step, wire=wire)
    run = sharded_run(Transformer(), data[2:], "zero3", 2, None, step=resuming(tmp_path), wire=wire)
    assert run.losses == whole.losses[2:]


@thorough_only("several engines each")
@pytest.mark.parametrize("mesh", [{"dp": 2, "tp": 2}, {"pp": 2, "dp": 2}], ids=["tp", "pp"])
def test_beside_splits_of_the_model(mesh: dict[str, int], tmp_path: Path) -> None:
    """What is kept is of the part that a rank has, and resumes exactly."""
    start = split_models.Transformer(width=32)
    replicas = [copy.deepcopy(start) for _ in range(8)]
    settings = {"preset": "zero1", "mesh": mesh, "wire": fed_back()}
    settings |= {"tensor": split_models.TENSOR} if "tp" in mesh else {}

    def rank(world: sw.World, *, resumes: bool) -> list[float]:
        found, replica = [], replicas[world.rank + 4 * resumes]
        with sw.shard(replica, settings, optimizer=adamw(replica), world=world) as engine:
            first = 2 if resumes else 0
            if resumes:
                assert engine.resume(tmp_path) is not None
            for step in range(first, 4):
                if step == 2 and not resumes:
                    engine.save(tmp_path)
                place = engine.mesh.coordinate(world.rank)["dp"]
                found.append(float(engine.train_step([split_models.tokens(step).chunk(2)[place]])))
        return found

    whole = run_ranks(4, lambda world: rank(world, resumes=False))
    again = run_ranks(4, lambda world: rank(world, resumes=True))
    assert [losses[2:] for losses in whole] == again


def sgd_of_gpt(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)


@thorough_only("hundreds of steps")
@pytest.mark.parametrize("make_optimizer", [sgd_of_gpt, adamw_of_gpt])
def test_a_language_model_learns_more_of_coarse_codes(make_optimizer: MakeOptimizer) -> None:
    """With a scale for 4096 integers of 4 bits, which cost something without feedback: docs/between-hosts.md."""
    coarse: dict[str, Any] = {"dtype": "int4", "block": 4096}
    wires: tuple[dict[str, Any], ...] = ({}, {"grad": coarse}, {"grad": coarse, "feedback": 0.0})
    exact, without, fed_back = (learnt("zero3", make_optimizer, wire=wire) for wire in wires)
    assert without > exact
    assert fed_back - exact < 0.85 * (without - exact), f"{exact:.4f} in fp32, {without:.4f}, {fed_back:.4f} fed back"


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"wire": {"feedback": 0.8}}, r"wire.feedback is 0.8, but wire.grad.dtype is not given"),
        ({"wire": {"grad": "bf16", "feedback": 0.8}}, r"wire.feedback is 0.8, but wire.grad.dtype is bf16"),
        ({"wire": fed_back(), "precision": "fp16"}, r"wire.feedback is 0.8, and precision is fp16"),
        ({"wire": fed_back(1.0)}, r"wire.feedback.beta is 1"),
        ({"wire": fed_back(reset=0)}, r"wire.feedback.reset is 0"),
    ],
)
def test_refused(plan: dict[str, Any], words: str, model: Transformer) -> None:
    with pytest.raises((ConfigError, PlacementError), match=words):
        sharded_run(model, batches(1), "zero3", 2, plan.pop("mesh", None), **plan)
