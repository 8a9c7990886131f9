"""Every preset trains like the plain model: same losses and parameters, and the bytes that its program predicts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from twins import (
    PRESETS_2,
    PRESETS_2X2,
    PRESETS_4,
    Run,
    assert_rounds_like_the_plain_model,
    assert_same,
    batches,
    engine_step,
    ledger_of_a_step,
    plain_run,
    sharded_run,
    three_micro_batches,
    work_on_ranks,
)

import shardwise as sw
from shardwise.optim.precision import verdict
from tests import inside
from tests.models import Transformer
from tests.thorough import each_value, sampled, thorough_only

pytestmark = sampled

ALL = [*PRESETS_2, *PRESETS_4, *PRESETS_2X2, ("zero3", 3, None), ("zero3", 1, None), ("hsdp", 4, None)]
IDS = [f"{name}-{n}{'x2' if mesh else ''}" for name, n, mesh in ALL]
NUM_STEPS = 5
"""The first one is recorded, and the others follow the record."""
CLIP = 0.5


@pytest.fixture(scope="module")
def model() -> Transformer:
    torch.manual_seed(0)
    return Transformer()


@pytest.fixture(scope="module")
def twin(model: Transformer) -> Run:
    return plain_run(model, batches(NUM_STEPS, rows=12), clip=CLIP)


@pytest.mark.parametrize(("preset", "num_ranks", "mesh"), ALL, ids=IDS)
def test_bf16_stays_near_the_plain_model(preset: str, num_ranks: int, mesh: Any, model: Transformer) -> None:
    data = batches(NUM_STEPS, rows=12)
    run = sharded_run(model, data, preset, num_ranks, mesh, precision="bf16")
    assert_rounds_like_the_plain_model(run, model, data, num_ranks=num_ranks, dtype=torch.bfloat16)


@each_value
@pytest.mark.parametrize("shares_memory", [True, False], ids=["shared", "sent"])
@pytest.mark.parametrize(("preset", "num_ranks", "mesh"), ALL, ids=IDS)
def test_trains_like_the_plain_model_and_sends_and_holds_what_the_program_says(
    preset: str, num_ranks: int, mesh: Any, model: Transformer, twin: Run, *, shares_memory: bool
) -> None:
    """What is counted is one more step after training."""

    def count(engine: sw.Engine) -> dict[str, Any]:
        ledger, planned = ledger_of_a_step(engine), inside.program(engine)
        calls = [
            action.verb.replace("agree", "all_reduce")
            for block in (*planned.micro_batch, *planned.step)
            for action in block.actions
            if action.communicates
        ]
        report = engine.memory()
        return {
            "sent": (sum(ledger.sent_bytes.values()), planned.sent_bytes()),
            "calls": (sum(ledger.calls.values()), len(calls)),
            "recordings": inside.programs(engine).num_recordings,
            "report": report,
        }

    data = batches(NUM_STEPS, rows=12)
    run = sharded_run(
        model, data, preset, num_ranks, mesh, after=count, shares_memory=shares_memory, clip_grad_norm=CLIP
    )
    assert_same(run, twin)
    assert run.losses[-1] < run.losses[0]
    sent, promised = run.extra["sent"]
    assert sent == promised
    calls, planned = run.extra["calls"]
    assert calls == planned
    assert run.extra["recordings"] == 1
    report = run.extra["report"]
    for kind in ("param", "grad", "working"):
        assert report.measured[kind] == report.promised[kind], kind
    assert 0.95 <= report.measured["optim"] / report.promised["optim"] <= 1.01  # Adam also counts steps


@pytest.mark.parametrize(("preset", "num_ranks", "mesh"), ALL, ids=IDS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_accumulation_holds_what_was_promised(
    preset: str, num_ranks: int, mesh: Any, precision: str, model: Transformer
) -> None:
    def report(engine: sw.Engine) -> dict[str, Any]:
        return {"report": engine.memory()}

    plan = {"accumulate": 3, "precision": precision}
    run = sharded_run(
        model, batches(2, rows=12), preset, num_ranks, mesh, step=three_micro_batches, after=report, **plan
    )
    held = run.extra["report"]
    for kind in ("param", "grad", "working"):
        assert held.measured[kind] == held.promised[kind], kind


@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero2"])
@pytest.mark.parametrize(
    ("plan", "share"),
    [
        ({}, 1.0),
        ({"precision": "bf16"}, 0.5),
        ({"precision": "bf16", "rows": {"grad": {"dtype": "bf16"}}}, 0.0),
        ({"wire": {"grad": "bf16"}}, 0.5),
    ],
    ids=["fp32", "bf16", "bf16-waiting", "bf16-sent"],
)
def test_gradient_memory_is_kept_between_steps_as_far_as_messages_would_fill_it(
    preset: str, plan: dict[str, Any], share: float, model: Transformer
) -> None:
    """All of it where gradients have one dtype, none where the update reads a wider one."""

    def held(engine: sw.Engine) -> dict[str, Any]:
        return {"between": inside.meter(engine).now["grad"], "report": engine.memory()}

    run = sharded_run(model, batches(3), preset, 2, None, after=held, **plan)
    measured, promised = run.extra["report"].measured, run.extra["report"].promised
    kept = run.extra["between"] / promised["grad"]
    assert share / 2 < kept <= share if share else kept == 0
    of_grads = [sum(held[kind] for kind in ("grad", "working")) for held in (measured, promised)]
    assert 0.75 * of_grads[1] <= of_grads[0] <= of_grads[1]


def test_bf16_gradients_can_travel_wide(model: Transformer) -> None:
    data = batches(5)
    wide = sharded_run(model, data, "zero3", 2, None, precision="bf16", wire={"grad": "fp32"})
    assert_rounds_like_the_plain_model(wide, model, data, num_ranks=2, dtype=torch.bfloat16)


@each_value
@pytest.mark.parametrize("wire", [{"grad": "bf16"}, {"param": "bf16"}, {"grad": "bf16", "param": "bf16"}], ids=str)
@pytest.mark.parametrize(("preset", "num_ranks", "mesh"), PRESETS_2X2, ids=[name for name, _, _ in PRESETS_2X2])
def test_what_is_sent_narrower_than_it_lies_takes_memory_for_its_casts(
    preset: str, num_ranks: int, mesh: Any, wire: dict[str, str], model: Transformer
) -> None:
    """The promise is for steps that follow their program. Passes before them, which are recorded, gather nothing ahead
    and hold less."""
    held: list[tuple[int, int]] = []

    def step(engine: sw.Engine, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
        loss = engine_step(engine, optimizer, batch)
        if engine.world.rank == 0:
            report = engine.memory()
            held.append((report.measured["working"], report.promised["working"]))
        return loss

    sharded_run(model, batches(4), preset, num_ranks, mesh, step=step, wire=wire)
    recorded, followed = held[1], held[-1]
    assert recorded[0] <= recorded[1] == followed[1]
    assert followed[0] == followed[1]


@thorough_only("slow; smaller tests beside it cover the same code")
def test_rows_can_be_edited(model: Transformer) -> None:
    """HSDP with gradients and states sharded over both axes, or with its sum across nodes deferred."""
    mesh = {"node": 2, "local": 2}
    data = batches(6)
    both = {"shard": ["node", "local"]}
    late = {"shard": ["local"], "partial": ["node"]}
    for rows in ({"grad": both, "optim": both}, {"grad": late}):
        run = sharded_run(model, data, "hsdp", 4, mesh, rows=rows)
        assert_same(run, plain_run(model, data))


class WithOdd(nn.Module):
    """A parameter whose gradient is no number, beside others whose gradients are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.odd = nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).square().mean() + 0 * self.odd.sqrt().sum()


@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero3"])
def test_clipping_by_a_norm_that_is_no_number_leaves_no_gradient_as_it_was(preset: str) -> None:
    """As in plain PyTorch: a step with part of the gradients would go unnoticed."""
    plain, x = WithOdd(), torch.ones(2, 4)
    plain(x).backward()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
    assert all(param.grad is not None and param.grad.isnan().all() for param in plain.parameters())

    def work(engine: sw.Engine) -> list[bool]:
        engine.backward(engine(x))
        engine.step()
        return [bool(value.isnan().all()) for value in engine.state_dict().values()]

    make_optimizer = lambda mine: torch.optim.SGD(mine.parameters(), lr=0.1)  # noqa: E731
    told = work_on_ranks(2, work, {"preset": preset, "clip_grad_norm": CLIP}, plain, make_optimizer)
    assert told == [[True] * 3] * 2


@pytest.mark.parametrize(("preset", "num_ranks", "mesh"), [("ddp", 3, None), ("hsdp", 4, {"node": 2, "local": 2})])
def test_ranks_with_the_same_gradients_share_in_taking_their_squares(
    preset: str, num_ranks: int, mesh: Any, model: Transformer, twin: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each element counts once in the norm, and is read for it by one rank."""
    squared: list[int] = []
    take = verdict.sum_of_squares

    def noting(due: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        squared.append(due.numel())
        return take(due, dtype)

    monkeypatch.setattr(verdict, "sum_of_squares", noting)
    data = batches(NUM_STEPS, rows=12)
    assert_same(sharded_run(model, data, preset, num_ranks, mesh, clip_grad_norm=CLIP), twin)
    numel = sum(param.numel() for param in model.parameters())
    assert numel <= sum(squared) / NUM_STEPS < 1.1 * numel, "beside parameters there are only zeros between them"
