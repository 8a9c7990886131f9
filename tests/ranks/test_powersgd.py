"""Gradients sent as thin factors, against PowerSGD (arXiv:1905.13727) in one process, and against torch's hook."""

from __future__ import annotations

import copy
import math
import os
import re
import subprocess
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from twins import adamw, ledger_of_a_step, params_of, resumed_params, work_on_ranks

import shardwise as sw
from shardwise.errors import ConfigError, PlacementError
from shardwise.runtime.low_rank import orthonormal
from tests import inside
from tests.models import Transformer
from tests.patience import PATIENCE
from tests.thorough import sampled, thorough_only

pytestmark = sampled

Tensor = torch.Tensor
START = 2


class Small(nn.Module):
    """Two matrices that are sent as factors of 2 columns, a small one that is not, and vectors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.head = nn.Linear(20, 30), nn.Linear(30, 24), nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.down(torch.tanh(self.up(x)))))


class Tied(Small):
    """The first of them is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(20, 30, bias=False)
        self.again.weight = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.again(x)[:, :20])


def drawn_factors() -> dict[str, Tensor]:
    """The first ones of those models, as the default seed draws them."""
    numbers = {name: torch.Generator().manual_seed(zlib.crc32(name.encode())) for name in ("up.weight", "down.weight")}
    sizes = {"up.weight": 20, "down.weight": 30}
    return {name: orthonormal(torch.randn(size, 2, generator=numbers[name])) for name, size in sizes.items()}


def data(num_steps: int) -> list[Tensor]:
    numbers = torch.Generator().manual_seed(1)
    return [torch.randn(24, 20, generator=numbers) for _ in range(num_steps)]


def loss_of(model: Any, x: Tensor) -> Tensor:
    return (model(x) - 1).square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def plan_of(rank: int = 2, start_step: int = START, **more: Any) -> dict[str, Any]:
    return {"preset": "ddp", "powersgd": {"rank": rank, "start_step": start_step}, **more}


def fed(engine: sw.Engine, steps: range) -> None:
    for x in data(steps.stop)[steps.start :]:
        engine.backward(loss_of(engine, x.chunk(engine.world.size)[engine.world.rank]))
        engine.step()


def fed_from(factors: dict[str, Tensor]) -> Callable[[sw.Engine], list[Tensor]]:
    """Seven steps that begin with these factors."""

    def work(engine: sw.Engine) -> list[Tensor]:
        for flat in inside.flats(engine):
            for name, (_, factor) in flat.kept_factors().items():
                factor.copy_(factors[name])
        fed(engine, range(7))
        return params_of(engine)

    return work


class Paper:
    """The gradients of N ranks at once, as the paper sums them."""

    def __init__(self, model: nn.Module, num_ranks: int, rank: int, factors: dict[str, Tensor]) -> None:
        self.model, self.num_ranks, self.rank = model, num_ranks, rank
        self.factors = factors
        self.unsent: list[dict[str, Tensor]] = [{} for _ in range(num_ranks)]
        self.num_steps = 0

    def set_gradients(self, parts: Sequence[Tensor]) -> None:
        grads: list[dict[str, Tensor]] = []
        for part in parts:
            self.model.zero_grad()
            loss_of(self.model, part).backward()
            grads.append({name: param.grad.clone() for name, param in self.model.named_parameters()})
        for name, param in self.model.named_parameters():
            of_ranks = [grad[name] for grad in grads]
            is_sent_whole = self.num_steps < START or name not in self.factors
            param.grad = sum(of_ranks) / self.num_ranks if is_sent_whole else self._approximated(name, of_ranks)
        self.num_steps += 1

    def _approximated(self, name: str, grads: Sequence[Tensor]) -> Tensor:
        own = [grad + kept.get(name, 0) for grad, kept in zip(grads, self.unsent, strict=True)]
        rows = orthonormal(sum(matrix @ self.factors[name] for matrix in own))
        cols = sum(matrix.T @ rows for matrix in own) / self.num_ranks
        mean = rows @ cols.T
        for kept, matrix in zip(self.unsent, own, strict=True):
            kept[name] = matrix - mean
        self.factors[name] = orthonormal(cols)
        return mean


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_trains_like_the_paper_on_ranks(num_ranks: int) -> None:
    start = {name: torch.randn(size, 2) for name, size in (("up.weight", 20), ("down.weight", 30))}
    start = {name: orthonormal(matrix) for name, matrix in start.items()}

    every = work_on_ranks(num_ranks, fed_from(start), plan_of(), Small, sgd)
    twin = Small()
    paper, optimizer = Paper(twin, num_ranks, 2, dict(start)), sgd(twin)
    for x in data(7):
        paper.set_gradients(x.chunk(num_ranks))
        optimizer.step()
    for params in every:
        for mine, other, theirs in zip(params, every[0], twin.parameters(), strict=True):
            assert torch.equal(mine, other), "ranks disagree"
            torch.testing.assert_close(mine, theirs.detach(), rtol=1e-4, atol=1e-5)


def test_the_program_changes_once_and_is_what_is_sent_and_held() -> None:
    model = Transformer()

    def work(engine: sw.Engine) -> tuple[int, int]:
        sent = []
        for step in range(START + 3):
            ledger = ledger_of_a_step(engine)
            assert ("project" in engine.program()) == ("restore" in engine.program()) == (step >= START)
            sent.append(sum(ledger.sent_bytes.values()))
            if step > START + 1:  # the first is recorded, and the second agrees on more
                assert sent[-1] == inside.program(engine).sent_bytes()
        report = engine.memory()
        for kind in ("param", "grad", "working"):
            assert report.measured[kind] == report.promised[kind], kind
        assert 0 <= report.measured["optim"] - report.promised["optim"] < 4 * 60, "but for step counters"
        assert engine.plan.powersgd.start_step == 0
        return sent[START - 1], sent[-1]

    for before, after in work_on_ranks(2, work, plan_of(rank=1), lambda: copy.deepcopy(model), adamw):
        assert after < before / 4


def test_factors_of_all_units_are_two_messages() -> None:
    """And the verdict of the step is a third; torch's hook sends three for each bucket."""
    model = Transformer()

    def work(engine: sw.Engine) -> tuple[int, int]:
        counts = [ledger_of_a_step(engine).calls["all_reduce", "dp"] for _ in range(START + 4)]
        program = engine.program()
        assert program.count("project") == program.count("restore") > 2
        assert program.count("agree") == 1
        return counts[-2], counts[-1]

    assert work_on_ranks(2, work, plan_of(rank=1), lambda: copy.deepcopy(model), adamw) == [(3, 3), (3, 3)]


@pytest.mark.parametrize("other", ["zero1", "zero3"])
@pytest.mark.parametrize(("until", "since"), [(1, 4), (START, 4), (4, 6)])
def test_changes_of_plan_begin_anew_with_the_next_step(other: str, until: int, since: int) -> None:
    """Steps from `until` to `since` send whole gradients, and the factors after them are drawn anew. Another module
    has the weight of the first one, too."""

    def work(engine: sw.Engine) -> list[Tensor]:
        fed(engine, range(until))
        engine.reshard({"preset": other})
        fed(engine, range(until, since))
        engine.reshard(plan_of())
        fed(engine, range(since, 8))
        return params_of(engine)

    every = work_on_ranks(2, work, plan_of(), Tied, sgd)
    twin = Tied()
    paper, optimizer = Paper(twin, 2, 2, drawn_factors()), sgd(twin)
    for step, x in enumerate(data(8)):
        if step == since:
            paper.factors, paper.unsent = drawn_factors(), [{}, {}]
        paper.num_steps = step if not until <= step < since else 0
        paper.set_gradients(x.chunk(2))
        optimizer.step()
    for params in every:
        for mine, theirs in zip(params, twin.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("saves_at", [START, START + 2])
def test_resume_is_bit_exact_with_what_was_not_sent_yet(saves_at: int, tmp_path: Path) -> None:
    def work(engine: sw.Engine) -> list[Tensor]:
        return resumed_params(engine, tmp_path, fed, 7, saves_at)

    straight, again = (work_on_ranks(2, work, plan_of(), Small, sgd)[0] for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(straight, again, strict=True))
    on_three = work_on_ranks(3, work, plan_of(), Small, sgd)[0]
    for one, other in zip(straight, on_three, strict=True):
        torch.testing.assert_close(one, other, rtol=0.2, atol=0.2)


def test_an_overflow_is_left_out_and_leaves_nothing_behind() -> None:
    def work(engine: sw.Engine) -> None:
        fed(engine, range(START + 2))
        before = params_of(engine)
        x = data(1)[0].chunk(2)[engine.world.rank]
        engine.backward(loss_of(engine, x * (math.inf if engine.world.rank else 1)))
        engine.step()
        assert all(torch.equal(one, other) for one, other in zip(before, params_of(engine), strict=True))
        assert all(torch.isfinite(entry.tensor).all() for entry in inside.entries(engine))
        fed(engine, range(2))
        assert not torch.equal(before[0], params_of(engine)[0])
        assert all(torch.isfinite(entry.tensor).all() for entry in inside.entries(engine))

    work_on_ranks(2, work, plan_of(skip_nonfinite=True), Small, sgd)


def test_a_gradient_of_zeros_comes_back_to_life() -> None:
    def work(engine: sw.Engine) -> bool:
        fed(engine, range(START + 1))
        engine.backward(0 * loss_of(engine, data(1)[0].chunk(2)[engine.world.rank]))
        engine.step()
        before = params_of(engine)[0]
        engine.backward(0 * loss_of(engine, data(1)[0].chunk(2)[engine.world.rank]))
        engine.step()
        fed(engine, range(2))
        after = params_of(engine)[0]
        return bool(torch.isfinite(after).all()) and not torch.equal(before, after)

    assert work_on_ranks(2, work, plan_of(), Small, sgd) == [True, True]


def test_an_exact_rank_is_sent_exactly() -> None:
    """With as many columns as the mean has rank, the first factors do not matter, and the ranks together have sent
    everything."""

    def work(engine: sw.Engine) -> tuple[list[Tensor], dict[str, Tensor]]:
        for x in data(4):
            row = x[engine.world.rank : engine.world.rank + 1]
            engine.backward(loss_of(engine, row))
            engine.step()
        kept = [one for flat in inside.flats(engine) for one in flat.kept_factors().items()]
        return params_of(engine), {name: unsent.clone() for name, (unsent, _) in kept}

    exact = work_on_ranks(2, work, {"preset": "ddp"}, Small, sgd)[0][0]
    (params, unsent), (_, others) = work_on_ranks(2, work, plan_of(rank=2, start_step=0), Small, sgd)
    for mine, theirs in zip(params, exact, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)
    assert unsent.keys() == {"up.weight", "down.weight"}
    for name, one in unsent.items():
        largest = float(one.abs().max())
        assert largest > 1e-3
        assert float((one + others[name]).abs().max()) < 1e-2 * largest, "a column that is nearly zero is rounded"


@pytest.mark.parametrize(
    ("plan", "num_ranks", "words"),
    [
        ({"preset": "zero1"}, 2, "powersgd.rank is 1, and grad is partial"),
        ({"preset": "zero3"}, 2, "powersgd.rank is 1, and param is shard"),
        ({"preset": "ddp", "mesh": {"dp": 2, "tp": 2}}, 4, "along a single axis of data parallelism"),
        ({"preset": "ddp", "mesh": {"node": 2, "local": 2}}, 4, "along a single axis of data parallelism"),
        ({"preset": "ddp", "precision": "fp16"}, 2, "whose loss scale changes"),
        ({"preset": "ddp", "wire": {"grad": "bf16"}}, 2, "wire.grad is bf16"),
    ],
)
def test_what_cannot_be_sent_as_factors_is_refused(plan: dict[str, Any], num_ranks: int, words: str) -> None:
    with pytest.raises((ConfigError, PlacementError), match=re.escape(words)):
        work_on_ranks(num_ranks, lambda engine: None, {**plan, "powersgd": 1}, Small, sgd)


HOOKED = """
import os
import sys
import numpy as np
import torch
from test_powersgd import START, Small, data, loss_of, sgd
from torch import distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

rank, store, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", rank=rank, world_size=2, init_method="file://" + store)
model = Small()
ddp = torch.nn.parallel.DistributedDataParallel(model)
state = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=START)
factors = {}


def hook(state, bucket):
    if state.iter == START and not factors:  # the first factors that the hook will draw, in its order
        names = {param: name for name, param in model.named_parameters()}
        numbers = torch.Generator().manual_seed(int(np.random.RandomState(0).randint(1_000_000_000)))
        for param in bucket.parameters():
            if names[param] in ("up.weight", "down.weight"):
                factors[names[param]] = torch.randn(1, param.shape[1], 2, generator=numbers)[0]
    return powerSGD_hook(state, bucket)


ddp.register_comm_hook(state, hook)
optimizer = sgd(model)
for x in data(7):
    optimizer.zero_grad()
    loss_of(ddp, x.chunk(2)[rank]).backward()
    optimizer.step()
torch.save({"params": [param.detach() for param in model.parameters()], "factors": factors}, out + str(rank))
dist.barrier()
dist.destroy_process_group()
os._exit(0)  # a process that took its time to end was aborted in the destructor of a thread of torch's, once
"""


@thorough_only("starts two processes")
def test_trains_like_torchs_hook(tmp_path: Path) -> None:
    folder = Path(__file__).parent
    paths = os.pathsep.join(map(str, (folder, folder.parent.parent, folder.parent.parent / "src")))
    script = [sys.executable, "-c", HOOKED]
    ranks = [
        subprocess.Popen(
            [*script, str(rank), str(tmp_path / "store"), str(tmp_path / "out")],
            env={**os.environ, "PYTHONPATH": paths},
        )
        for rank in range(2)
    ]
    assert [rank.wait(timeout=PATIENCE) for rank in ranks] == [0, 0]
    theirs = torch.load(tmp_path / "out0")

    factors = {name: orthonormal(factor) for name, factor in theirs["factors"].items()}
    ours = work_on_ranks(2, fed_from(factors), plan_of(), Small, sgd)[0]
    for mine, hooked in zip(ours, theirs["params"], strict=True):
        torch.testing.assert_close(mine, hooked, rtol=1e-4, atol=1e-5)
