"""Optimizers that send one bit per element, against plain code that follows the papers for all ranks in one process."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from twins import ledger_of_a_step, params_of, resumed_params, work_on_ranks

import shardwise as sw
import shardwise.integrations.deepspeed as deepspeed
from shardwise.errors import ConfigError, ModelError, StateError
from shardwise.integrations.deepspeed import facade
from shardwise.optim import OneBitAdam, OneBitLamb, ZeroOneAdam
from shardwise.optim.sign_mean import pack, unpack
from shardwise.program import DURING_STEP
from shardwise.program.walk import Walk
from shardwise.testing import fail_at, run_ranks
from tests import inside
from tests.drawing import drawing
from tests.models import Transformer
from tests.thorough import sampled, thorough_only

pytestmark = sampled

Tensor = torch.Tensor
FREEZE = 3
LR, BETAS, EPS, DECAY = 1e-2, (0.9, 0.99), 1e-6, 0.1


class Small(nn.Module):
    """Parameters of which ranges are short, or empty on the last ranks: 35, 7, 21 and 3 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def small() -> Small:
    torch.manual_seed(0)
    return Small()


def data(num_steps: int) -> list[Tensor]:
    numbers = torch.Generator().manual_seed(1)
    return [torch.randn(24, 5, generator=numbers) for _ in range(num_steps)]


def loss_of(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return (model(x) - 1).square().mean()


SETTINGS = {"lr": LR, "freeze_step": FREEZE, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}
VAR_FREEZE, LEARNING = 9, (1, 2, 4, 6, 8)
"""Of 0/1 Adam: the steps that learn the variance; the others until then average gradients."""
ZERO_ONE = {"lr": LR, "var_freeze_step": VAR_FREEZE, "var_update_scaler": 2, "betas": BETAS, "eps": EPS}
MAKE = {
    "zero-one": lambda model: ZeroOneAdam(model.parameters(), weight_decay=DECAY, **ZERO_ONE),
    "adam": lambda model: OneBitAdam(model.parameters(), **SETTINGS),
    "lamb": lambda model: OneBitLamb(model.parameters(), **SETTINGS),
}


class Papers:
    """1-bit Adam (arXiv:2102.02888, algorithm 1) and 1-bit LAMB (arXiv:2104.06069, algorithm 2), for N ranks at once,
    with a scale for each parameter, and for each range of its average."""

    def __init__(self, model: nn.Module, num_ranks: int, name: str) -> None:
        self.params, self.num_ranks, self.name = list(model.parameters()), num_ranks, name
        self.model = model
        self.momenta = [torch.zeros_like(param) for param in self.params]
        self.variances = [torch.zeros_like(param) for param in self.params]
        self.fresh = [torch.zeros_like(param) for param in self.params]
        self.coeffs, self.factors = [0.0] * len(self.params), [1.0] * len(self.params)
        self.own = [[torch.zeros(param.numel()) for param in self.params] for _ in range(num_ranks)]
        self.average = [torch.zeros(param.numel()) for param in self.params]
        self.num_steps = 0

    def step(self, parts: Sequence[Tensor]) -> None:
        self.num_steps += 1
        grads = []
        for part in parts:
            self.model.zero_grad()
            loss_of(self.model, part).backward()
            grads.append([param.grad for param in self.params])
        with torch.no_grad():
            for index, of_ranks in enumerate(zip(*grads, strict=True)):
                if of_ranks[0] is not None:  # it is not frozen
                    self._kind_of_step()(index, of_ranks)

    def _kind_of_step(self) -> Callable[[int, Sequence[Tensor]], None]:
        if self.name != "zero-one":
            return self._warm_up if self.num_steps <= FREEZE else self._compressed
        if self.num_steps > VAR_FREEZE:
            return self._compressed
        return self._warm_up if self.num_steps in LEARNING else self._compressed_gradient

    def _compressed_gradient(self, index: int, grads: Sequence[Tensor]) -> None:
        """0/1 Adam (arXiv:2202.06009, algorithm 1) between two steps that learn the variance."""
        sent = [self._sent(grad, rank, index) for rank, grad in enumerate(grads)]
        mean, beta1 = self._averaged(index, sent).view_as(grads[0]), BETAS[0]
        self.momenta[index] = beta1 * self.momenta[index] + (1 - beta1) * mean
        self.params[index] -= LR * self._direction(index)
        if self.num_steps == VAR_FREEZE:  # what was lost of gradients is not added to momenta
            self.average[index].zero_()
            for kept in self.own:
                kept[index].zero_()

    def _warm_up(self, index: int, grads: Sequence[Tensor]) -> None:
        mean, (beta1, beta2) = sum(grads) / self.num_ranks, BETAS
        self.momenta[index] = beta1 * self.momenta[index] + (1 - beta1) * mean
        self.variances[index] = beta2 * self.variances[index] + (1 - beta2) * mean**2
        self.fresh[index] = self.variances[index].clone()
        param, direction = self.params[index], self._direction(index)
        ratio = 1.0
        if self.name == "lamb":
            ratio = min(max(float(param.norm() / direction.norm()), 0.01), 10.0)
            self.coeffs[index] = 0.9 * self.coeffs[index] + 0.1 * ratio
        param -= LR * ratio * direction

    def _compressed(self, index: int, grads: Sequence[Tensor]) -> None:
        before, (beta1, beta2) = self.momenta[index], BETAS
        sent = [self._sent(beta1 * before + (1 - beta1) * grad, rank, index) for rank, grad in enumerate(grads)]
        self.momenta[index] = self._averaged(index, sent).view_as(before)
        direction, ratio = self._direction(index), 1.0
        if self.name == "lamb":
            gradient = (self.momenta[index] - beta1 * before) / (1 - beta1)
            self.fresh[index] = beta2 * self.fresh[index] + (1 - beta2) * gradient**2
            root = self.variances[index].sqrt() + EPS
            factor = float((root / (self.fresh[index].sqrt() + EPS)).max())
            share = min(1.0, float((self.momenta[index] / root).norm() / direction.norm()))
            factor = min(max(factor * share + 1 - share, 0.5), 4.0)
            last = self.factors[index]
            self.factors[index] = min(max(factor, 0.9 * last), 1.1 * last)
            ratio = self.coeffs[index] * self.factors[index]
        self.params[index] -= LR * ratio * direction

    def _direction(self, index: int) -> Tensor:
        return self.momenta[index] / (self.variances[index].sqrt() + EPS) + DECAY * self.params[index]

    def _sent(self, momentum: Tensor, rank: int, index: int) -> Tensor:
        corrected = momentum.view(-1) + self.own[rank][index]
        sent = signs(corrected)
        self.own[rank][index] = corrected - sent
        return sent

    def _averaged(self, index: int, sent: Sequence[Tensor]) -> Tensor:
        corrected = sum(sent) / self.num_ranks + self.average[index]
        width = 8 * math.ceil(corrected.numel() / (8 * self.num_ranks))
        averaged = torch.cat([signs(part) for part in corrected.split(width)])
        self.average[index] = corrected - averaged
        return averaged


def signs(values: Tensor) -> Tensor:
    scale = values.norm() / values.numel() ** 0.5
    return torch.where(values >= 0, scale, -scale)


def fed(engine: sw.Engine, steps: range, *, parts: int = 1) -> list[Any]:
    """Take these steps; returns the gradient norms. Each rank's rows come in `parts` micro-batches."""
    norms = []
    for x in data(steps.stop)[steps.start :]:
        for part in x.chunk(engine.world.size)[engine.world.rank].chunk(parts):
            engine.backward(loss_of(engine, part))
            norm = engine.step()
        norms.append(float(norm))
    return norms


@pytest.mark.parametrize(("name", "num_ranks"), [(name, num) for name in MAKE for num in (2, 3, 4)])
def test_trains_like_the_papers_on_ranks(name: str, num_ranks: int) -> None:
    twin = small()
    papers = Papers(twin, num_ranks, name)
    num_steps = 13 if name == "zero-one" else 8
    for x in data(num_steps):
        papers.step(x.chunk(num_ranks))

    def work(engine: sw.Engine) -> list[Tensor]:
        fed(engine, range(num_steps))
        return params_of(engine)

    every = work_on_ranks(num_ranks, work, "ddp", small, MAKE[name])
    for params in every:
        for mine, other, theirs in zip(params, every[0], twin.parameters(), strict=True):
            assert torch.equal(mine, other), "ranks disagree"
            torch.testing.assert_close(mine, theirs.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("frozen", [{1, 2}, {4, 5}, {1, 2, 3, 4}, {5, 6, 7}], ids=str)
@pytest.mark.parametrize("name", MAKE)
def test_what_is_frozen_for_some_steps_keeps_what_was_not_sent(name: str, frozen: set[int]) -> None:
    """While the variance is learned, after that, and until the last step."""
    twin, num_steps = small(), 13 if name == "zero-one" else 8
    papers = Papers(twin, 3, name)
    for step, x in enumerate(data(num_steps)):
        twin.down.weight.requires_grad_(step not in frozen)
        papers.step(x.chunk(3))

    def work(engine: sw.Engine) -> list[Tensor]:
        for step in range(num_steps):
            engine.module.down.weight.requires_grad_(step not in frozen)
            fed(engine, range(step, step + 1))
        return params_of(engine)

    for params in work_on_ranks(3, work, "ddp", small, MAKE[name]):
        for mine, theirs in zip(params, twin.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs.detach(), rtol=2e-4, atol=2e-5)  # a last bit may be another sign's


def test_on_one_rank_it_is_the_plain_optimizer_and_sends_nothing() -> None:
    twin = small()
    plain = MAKE["adam"](twin)
    for x in data(6):
        plain.zero_grad()
        loss_of(twin, x).backward()
        plain.step()

    def work(engine: sw.Engine) -> list[Tensor]:
        fed(engine, range(6))
        assert "momentum" not in engine.program()
        return params_of(engine)

    (params,) = work_on_ranks(1, work, "ddp", small, MAKE["adam"])
    for mine, theirs in zip(params, twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"node": 2, "local": 2}], ids=["2", "2x2"])
def test_the_program_changes_once_and_is_what_is_sent_and_held(mesh: dict[str, int]) -> None:
    model = Transformer()

    def work(engine: sw.Engine) -> tuple[int, int]:
        sent = []
        for step in range(FREEZE + 3):
            ledger = ledger_of_a_step(engine)
            is_frozen = step >= FREEZE
            actions = [action for block in inside.program(engine).step for action in block.actions]
            assert any(action.subject == "momentum" for action in actions) == is_frozen
            assert ("all_reduce" in engine.program()) == (not is_frozen)
            sent.append(sum(ledger.sent_bytes.values()))
            if step not in (0, 1, FREEZE):  # those are recorded, or agree on settings once
                assert sent[-1] == inside.program(engine).sent_bytes()
                assert sum(ledger.calls.values()) == num_messages(engine)
        report, planned = engine.memory(), inside.program(engine)
        for kind in ("param", "grad", "working"):
            assert report.measured[kind] == report.promised[kind], kind
        assert 0 <= report.measured["optim"] - report.promised["optim"] < 4 * 60, "but for step counters"
        clock = Walk(inside.programs(engine).specs, engine.mesh.coordinate(engine.world.rank))
        for block in planned.step:
            if block.moment == DURING_STEP:
                clock.walk(block)
        assert held_during(engine) == clock.peak
        return sent[FREEZE - 1], sent[-1]

    plan = {"preset": "ddp", "mesh": mesh}
    make = lambda model: OneBitAdam(model.parameters(), lr=1e-3, freeze_step=FREEZE)  # noqa: E731
    every = work_on_ranks(math.prod(mesh.values()), work, plan, lambda: copy.deepcopy(model), make)
    for before, after in every:
        assert after < before / 12


def test_zero_one_adam_sums_gradients_in_ever_fewer_steps() -> None:
    """And sends what the program of each step says."""
    model = Transformer()

    def work(engine: sw.Engine) -> list[int]:
        summed = []
        for step in range(1, VAR_FREEZE + 2):
            ledger = ledger_of_a_step(engine)
            planned = inside.program(engine)
            actions = [action for block in (*planned.micro_batch, *planned.step) for action in block.actions]
            sums = {action.verb for action in actions} & {"all_reduce", "collect"}
            summed += [step] if sums == {"all_reduce"} else []
            if step == VAR_FREEZE + 1:  # the second pass under one plan: the first is recorded
                assert sum(ledger.sent_bytes.values()) == planned.sent_bytes()
        return summed

    make = lambda model: ZeroOneAdam(model.parameters(), **ZERO_ONE)  # noqa: E731
    assert work_on_ranks(2, work, "ddp", lambda: copy.deepcopy(model), make) == [list(LEARNING)] * 2


def num_messages(engine: sw.Engine) -> int:
    planned = inside.program(engine)
    actions = [action for block in (*planned.micro_batch, *planned.step) for action in block.actions]
    return sum(action.communicates for action in actions)


def held_during(engine: sw.Engine) -> int:
    """What the exchange of one more step holds at most."""
    meter, step, peaks = inside.meter(engine), inside.runner(engine).step, []
    run = step.during

    def during() -> None:
        before = sum(meter.now.values())
        meter.reset_peak()
        run()
        assert sum(meter.now.values()) == before
        peaks.append(meter.peak_total - before)

    step.during = during
    ledger_of_a_step(engine)
    return sum(peaks)


@pytest.mark.parametrize("name", ["signs", "factors"])
def test_what_leaves_each_host_is_what_the_program_says(name: str) -> None:
    replicas = [small() for _ in range(4)]
    factors = {"preset": "ddp", "powersgd": {"rank": 1, "start_step": 0, "min_rate": 1.0}}

    def rank(world: sw.World) -> tuple[int, list[int]]:
        model = replicas[world.rank]
        optimizer = MAKE["adam"](model) if name == "signs" else torch.optim.SGD(model.parameters(), lr=LR)
        plan = "ddp" if name == "signs" else factors
        with sw.shard(model, plan, optimizer=optimizer, world=world) as engine:
            fed(engine, range(FREEZE + 2))
            inside.ledger(engine).clear()
            fed(engine, range(1))
            crossed = sum(inside.ledger(engine).crossed_bytes.values())
            return crossed, inside.program(engine).sent_by_hosts(engine.mesh, 2)

    every = run_ranks(4, rank, hosts=["a", "a", "b", "b"])
    crossed = [one for one, _ in every]
    assert crossed[0] > 0
    assert [sum(crossed[:2]), sum(crossed[2:])] == every[0][1]


def resumed(
    folder: Path, num_ranks: int, until: int, *, saves_at: int | None = None, name: str = "lamb"
) -> list[Tensor]:
    def work(engine: sw.Engine) -> list[Tensor]:
        return resumed_params(engine, folder, fed, until, saves_at)

    return work_on_ranks(num_ranks, work, "ddp", small, MAKE[name])[0]


@pytest.mark.parametrize(
    ("name", "saves_at"),
    [("lamb", FREEZE - 1), ("lamb", FREEZE), ("lamb", FREEZE + 2), ("zero-one", 5), ("zero-one", 6), ("zero-one", 9)],
)
def test_resume_is_bit_exact_with_what_was_not_sent_yet(name: str, saves_at: int, tmp_path: Path) -> None:
    straight = resumed(tmp_path, 2, saves_at + 4, saves_at=saves_at, name=name)
    again = resumed(tmp_path, 2, saves_at + 4, name=name)
    assert all(torch.equal(one, other) for one, other in zip(straight, again, strict=True))


def test_another_number_of_ranks_resumes_without_what_was_not_sent(tmp_path: Path) -> None:
    straight = resumed(tmp_path, 2, 8, saves_at=6)
    on_three = resumed(tmp_path, 3, 8)
    for one, other in zip(straight, on_three, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=10 * LR)
        assert not torch.equal(one, other)


def test_micro_batches_are_added_up_before_they_are_sent() -> None:
    """Two micro-batches of each step are one of twice the rows, and are sent as one."""

    def work(parts: int) -> list[Tensor]:
        def on_rank(engine: sw.Engine) -> list[Tensor]:
            fed(engine, range(6), parts=parts)
            return params_of(engine)

        return work_on_ranks(2, on_rank, {"preset": "ddp", "accumulate": parts}, small, MAKE["adam"])[0]

    for one, other in zip(work(1), work(2), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_norms_and_clipping_go_by_the_ranks_own_gradients() -> None:
    """No rank knows the norm of the mean. What is reported is the root mean square of the ranks' norms."""

    def work(engine: sw.Engine) -> tuple[float, float, float]:
        fed(engine, range(FREEZE + 1))
        x = data(FREEZE + 2)[-1].chunk(2)[engine.world.rank]
        twin = Small()
        twin.load_state_dict(engine.state_dict())
        loss_of(twin, x).backward()
        own = float(torch.linalg.vector_norm(torch.cat([param.grad.view(-1) for param in twin.parameters()])))
        engine.backward(loss_of(engine, x))
        reported = float(engine.clip_grad_norm_(0.01))
        held = [param.grad for param in engine.module.parameters()]
        clipped = 2 * float(torch.linalg.vector_norm(torch.cat([grad.reshape(-1) for grad in held])))
        with pytest.raises(ConfigError, match="2-norm"):
            engine.clip_grad_norm_(1.0, norm_type=math.inf)
        engine.step()
        return own, reported, clipped

    every = work_on_ranks(2, work, "ddp", small, MAKE["adam"])
    expected = math.sqrt(sum(own**2 for own, _, _ in every) / 2)
    for own, reported, clipped in every:
        assert reported == pytest.approx(expected, rel=1e-5)
        assert clipped == pytest.approx(own * 0.01 / expected, rel=1e-3)


def test_a_step_that_is_left_out_changes_nothing_that_is_kept() -> None:
    def work(engine: sw.Engine) -> None:
        fed(engine, range(FREEZE + 2))
        kept = [entry.tensor.clone() for entry in inside.entries(engine)]
        assert any(entry.kind == "unsent" for entry in inside.entries(engine))
        x = data(1)[0].chunk(2)[engine.world.rank]
        engine.backward(loss_of(engine, x * (math.inf if engine.world.rank else 1)))
        engine.step()
        for before, entry in zip(kept, inside.entries(engine), strict=True):
            assert torch.equal(before, entry.tensor), entry.key
        fed(engine, range(1))
        assert all(torch.isfinite(entry.tensor).all() for entry in inside.entries(engine))

    work_on_ranks(2, work, {"preset": "ddp", "skip_nonfinite": True}, small, MAKE["adam"])


def test_what_is_not_finite_is_seen_by_all_ranks() -> None:
    def work(engine: sw.Engine) -> bool:
        fed(engine, range(FREEZE + 2))
        x = data(1)[0].chunk(2)[engine.world.rank]
        engine.backward(loss_of(engine, x * (math.inf if engine.world.rank else 1)))
        engine.step()
        return all(bool(torch.isfinite(param).all()) for param in params_of(engine))

    assert work_on_ranks(2, work, "ddp", small, MAKE["adam"]) == [False, False]


class Table(nn.Module):
    """An embedding of which no batch has the last rows, beside a branch that only some ranks take."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.branch = nn.Embedding(8, 4), nn.Linear(4, 4)

    def forward(self, tokens: Tensor, *, branches: bool) -> Tensor:
        x = self.rows(tokens)
        return (self.branch(x) if branches else x).square().mean()


@pytest.mark.parametrize("masked", [False, True])
def test_rows_without_gradients_stay_and_a_branch_of_one_rank_is_averaged(masked: bool) -> None:
    def make(model: Table) -> OneBitAdam:
        mask = torch.ones(8, 4)
        mask[2] = 0
        rows = {"params": [model.rows.weight], **({"exp_avg_mask": mask} if masked else {})}
        return OneBitAdam([rows, {"params": list(model.branch.parameters())}], lr=LR, freeze_step=2)

    def work(engine: sw.Engine) -> tuple[Tensor, Tensor, Tensor]:
        tokens = torch.arange(5)
        for step in range(6):
            engine.backward(engine(tokens, branches=step < 2 or engine.world.rank == 1))
            if step == 2:
                before = engine.get("rows.weight").clone()
            engine.step()
        return before, engine.get("rows.weight").clone(), engine.get("branch.weight").clone()

    (before, rows, branch), (_, same_rows, same_branch) = work_on_ranks(2, work, "ddp", Table, make)
    assert torch.equal(rows, same_rows)
    assert torch.equal(branch, same_branch)
    assert torch.equal(rows[5:], Table().rows.weight[5:])
    assert torch.equal(rows[2], before[2]) == masked
    assert not torch.equal(branch, Table().branch.weight)


class Faint(nn.Module):
    """A vector of which the last four elements have gradients of rounding's size, as keys in a fused bias have."""

    def __init__(self) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.linspace(0.5, 1.5, 16))
        self.register_buffer("strengths", torch.tensor([1.0] * 12 + [1e-7] * 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.vector * self.strengths * x.mean()


@pytest.mark.parametrize("name", MAKE)
def test_elements_with_next_to_no_gradient_are_not_moved_by_signs(name: str) -> None:
    """Divided by the root of their variance, a sign would move them by a million rates."""
    make = {
        "zero-one": lambda model: ZeroOneAdam(model.parameters(), **{**ZERO_ONE, "var_freeze_step": FREEZE, "eps": 0}),
        "adam": lambda model: OneBitAdam(model.parameters(), **{**SETTINGS, "weight_decay": 0.0, "eps": 0}),
        "lamb": lambda model: OneBitLamb(model.parameters(), **{**SETTINGS, "weight_decay": 0.0, "eps": 0}),
    }[name]

    def work(engine: sw.Engine) -> tuple[Tensor, Tensor]:
        fed(engine, range(FREEZE))
        before = params_of(engine)[0]
        fed(engine, range(FREEZE, FREEZE + 4))
        return before, params_of(engine)[0]

    before, after = work_on_ranks(2, work, "ddp", Faint, make)[0]
    assert torch.equal(before[12:], after[12:])
    moved = (after - before)[:12].abs()
    assert 0 < moved.min() <= moved.max() < 1


def test_plain_loops_and_loaded_states_change_the_program_too() -> None:
    models = [small(), small()]  # here, as threads share the numbers that are drawn

    def plain(world: sw.World) -> tuple[str, list[Tensor], dict[str, Any]]:
        model = models[world.rank]
        optimizer = MAKE["lamb"](model)
        with sw.shard(model, "ddp", optimizer=optimizer, world=world) as engine:
            for x in data(6):
                loss_of(model, x.chunk(2)[world.rank]).backward()
                optimizer.step()
                optimizer.zero_grad()
            return engine.program(), params_of(engine), optimizer.state_dict()

    def ours(engine: sw.Engine) -> list[Tensor]:
        fed(engine, range(6))
        return params_of(engine)

    program, params, states = run_ranks(2, plain)[0]
    assert "momentum" in program
    for mine, same in zip(params, work_on_ranks(2, ours, "ddp", small, MAKE["lamb"])[0], strict=True):
        assert torch.equal(mine, same)

    def loads(engine: sw.Engine) -> tuple[bool, bool]:
        engine.load_optimizer_state_dict(states)
        before = "momentum" in engine.program()
        fed(engine, range(1))
        return before, "momentum" in engine.program()

    assert work_on_ranks(2, loads, "ddp", small, MAKE["lamb"]) == [(False, True)] * 2


def test_a_first_gradient_after_the_warm_up_is_refused() -> None:
    def work(engine: sw.Engine) -> None:
        for step in range(3):
            engine.backward(engine(torch.arange(5), branches=step == 2))
            engine.step()

    def make(model: Table) -> OneBitAdam:
        return OneBitAdam(model.parameters(), freeze_step=2)

    with pytest.raises(StateError, match=r"shape \(4, 4\) has its first gradient after the warm-up of OneBitAdam"):
        work_on_ranks(2, work, "ddp", Table, make)


@pytest.mark.parametrize("preset", ["zero1", "zero2", "zero3"])
def test_sharded_updates_are_refused(preset: str) -> None:
    with pytest.raises(ModelError, match=r"OneBitAdam averages momenta of whole parameters.*preset ddp"):
        work_on_ranks(2, lambda engine: None, preset, small, MAKE["adam"])


def test_factors_of_gradients_that_nobody_sums_are_refused() -> None:
    plan = {"preset": "ddp", "powersgd": {"rank": 1, "start_step": 9}}
    with pytest.raises(ModelError, match=r"OneBitAdam .* has a gradient that the plan sends as factors \(powersgd\)"):
        work_on_ranks(2, lambda engine: None, plan, small, MAKE["adam"])


def test_a_freeze_step_that_is_none_is_refused() -> None:
    for wrong in (0, -1, 2.5, True):
        with pytest.raises(ConfigError, match="freeze_step is"):
            OneBitAdam(small().parameters(), freeze_step=wrong)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="var_update_scaler is"):
            ZeroOneAdam(small().parameters(), var_update_scaler=wrong)  # type: ignore[arg-type]


def test_two_optimizers_that_look_at_whole_parameters_are_refused() -> None:
    def make(model: Small) -> Any:
        return [
            OneBitAdam(model.up.parameters(), freeze_step=2),
            sw.optim.Lamb(model.down.parameters()),
        ]

    with pytest.raises(ModelError, match="OneBitAdam and Lamb both look at whole parameters"):
        work_on_ranks(2, lambda engine: None, "ddp", small, make)


def test_beside_an_elementwise_optimizer_only_its_own_parameters_are_averaged() -> None:
    def make(model: Small) -> Any:
        return [
            OneBitAdam(model.up.parameters(), lr=LR, freeze_step=2),
            torch.optim.SGD(model.down.parameters(), lr=LR),
        ]

    def work(world: sw.World) -> str:
        with drawing():
            model = small()
        with sw.shard(model, "ddp", optimizer=make(model), world=world) as engine:
            fed(engine, range(5))
            return engine.program()

    for text in run_ranks(2, work):
        assert re.search(r"collect\s+\S+:summands\s+momentum\s+dp\s+uint8", text)
        assert re.search(r"all_reduce\s+\S+\s+grad", text)


def test_a_rank_that_fails_while_it_averages_is_named() -> None:
    replicas = [small() for _ in range(2)]

    def rank(world: sw.World) -> None:
        model = replicas[world.rank]
        with sw.shard(model, "ddp", optimizer=MAKE["adam"](model), world=world) as engine:
            fed(engine, range(6))

    with pytest.raises(Exception, match="rank 1"):
        run_ranks(2, rank, fault=fail_at(rank=1, step=FREEZE + 1, point="hand_back *"))


def test_bits_come_back() -> None:
    bits = torch.rand(8 * 37, generator=torch.Generator().manual_seed(0)) < 0.5
    assert pack(bits).numel() == 37
    assert torch.equal(unpack(pack(bits)), bits)


def test_deepspeeds_names_make_the_same() -> None:
    params = {**SETTINGS, "betas": list(BETAS), "cuda_aware": False, "comm_backend_name": "nccl"}
    config = {"train_micro_batch_size_per_gpu": 12, "optimizer": {"type": "OneBitAdam", "params": params}}

    replicas = [small(), small()]

    def theirs(world: sw.World) -> list[Tensor]:
        engine, optimizer, *_ = deepspeed.initialize(model=replicas[world.rank], config=config, world=world)
        assert type(optimizer) is OneBitAdam
        for x in data(6):
            engine.backward(loss_of(engine, x.chunk(2)[world.rank]))
            engine.step()
        return params_of(engine.shardwise)

    def ours(engine: sw.Engine) -> list[Tensor]:
        fed(engine, range(6))
        return params_of(engine)

    clipped = work_on_ranks(2, ours, {"preset": "ddp", "clip_grad_norm": 1.0}, small, MAKE["adam"])  # their default
    for mine, same in zip(clipped[0], run_ranks(2, theirs)[0], strict=True):
        assert torch.equal(mine, same)
    lamb = facade.OnebitLamb(small().parameters(), None, lr=LR, freeze_step=FREEZE, coeff_beta=0.8)
    assert isinstance(lamb, facade.OnebitLamb)
    assert (type(lamb), lamb.freeze_step, lamb.defaults["coeff_beta"]) == (OneBitLamb, FREEZE, 0.8)
    zero_one = facade.ZeroOneAdam(
        small().parameters(), None, lr=LR, var_freeze_step=9, var_update_scaler=2, local_step_clipper=16
    )
    assert (type(zero_one), zero_one.freeze_step, zero_one.var_update_scaler) == (ZeroOneAdam, 9, 2)


@thorough_only("trains a model twice")
def test_the_loss_stays_close_to_adams() -> None:
    def losses(make: Callable[[nn.Module], torch.optim.Optimizer]) -> float:
        def work(engine: sw.Engine) -> float:
            every = []
            for step in range(120):
                numbers = torch.Generator().manual_seed(step)
                x = torch.randn(64, 5, generator=numbers).chunk(2)[engine.world.rank]
                y = torch.stack([x.sum(1), x.prod(1), x[:, 0] - x[:, 1]], 1)
                loss = (engine(x) - y).square().mean()
                engine.backward(loss)
                engine.step()
                every.append(engine.mean(loss.item()))
            return sum(every[-30:]) / 30

        return work_on_ranks(2, work, "ddp", small, make)[0]

    settings = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.0}
    adam = losses(lambda model: torch.optim.AdamW(model.parameters(), **settings))
    onebit = losses(lambda model: OneBitAdam(model.parameters(), freeze_step=30, **settings))
    assert onebit < 1.1 * adam
