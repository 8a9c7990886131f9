"""Parameters change after a forward without a backward, as when a script only looks at a loss. Values gathered by that
forward must not be used any more."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from twins import Batch, adamw, assert_same, batches, plain_run, sharded_run, work_on_ranks

import shardwise as sw
from shardwise.testing import run_ranks
from tests.models import Hidden, Transformer
from tests.thorough import sampled

PLANS: dict[str, dict[str, Any]] = {
    **{name: {"preset": name} for name in ("ddp", "zero1", "zero3", "zero3-kept", "zero3-offload")},
    "hpz": {"preset": "hpz", "mesh": {"node": 1, "local": 2}},
    "infinity": {"preset": "infinity"},
    "params on disk": {"preset": "infinity", "rows": {"param": {"tier": "disk"}}},
}


def load(engine: sw.Engine, values: dict[str, torch.Tensor]) -> None:
    engine.load_state_dict(values)


def put(engine: sw.Engine, values: dict[str, torch.Tensor]) -> None:
    for name, value in values.items():
        engine.set(name, value)


def edit(engine: sw.Engine, values: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, param in engine.module.named_parameters():
            param.copy_(values[name])


def gather(engine: sw.Engine, values: dict[str, torch.Tensor]) -> None:
    with engine.gathered(write=True):
        for name, param in engine.module.named_parameters():
            param.data.copy_(values[name])


@sampled
@pytest.mark.parametrize("shares_memory", [False, True])
@pytest.mark.parametrize("write", [load, put, edit, gather])
@pytest.mark.parametrize("name", PLANS)
def test_values_written_after_a_forward_without_a_backward(
    name: str, write: Callable[[sw.Engine, dict[str, torch.Tensor]], None], shares_memory: bool, tmp_path: Path
) -> None:
    model, data = Transformer(), batches(4, rows=12)
    halved = {key: 0.5 * value for key, value in model.state_dict().items()}
    plain = copy.deepcopy(model)
    optimizer = adamw(plain)
    for number, batch in enumerate(data):
        if number == 2:
            plain.load_state_dict(halved)
        plain(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    plan = {**PLANS[name], **({"disk": str(tmp_path)} if PLANS[name]["preset"] == "infinity" else {})}

    def work(engine: sw.Engine) -> dict[str, torch.Tensor]:
        for number, batch in enumerate(data):
            if number == 2:
                assert engine(*batch).isfinite()
                write(engine, halved)
            engine.backward(engine(*batch))
            engine.step()
        return engine.state_dict()

    for found in work_on_ranks(2, work, plan, model, shares_memory=shares_memory):
        for key, value in plain.state_dict().items():
            assert torch.allclose(found[key], value, rtol=0, atol=1e-6), key


class Boxed(torch.nn.Module):
    """A block whose output cannot be observed, so that it stays gathered until its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)

    def forward(self, x: Hidden) -> Hidden:
        return Hidden(torch.tanh(self.linear(x.get())))


class Boxes(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Boxed() for _ in range(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        box = Hidden(x)
        for block in self.blocks:
            box = block(box)
        return (box.get() - y).square().mean()


def boxes() -> tuple[torch.nn.Module, list[Any]]:
    return Boxes(), [(torch.randn(4, 16), torch.randn(4, 16)) for _ in range(4)]


def transformer() -> tuple[torch.nn.Module, list[Any]]:
    return Transformer(), list(batches(4, rows=12))


@sampled
@pytest.mark.parametrize("shares_memory", [False, True])
@pytest.mark.parametrize("build", [transformer, boxes])
@pytest.mark.parametrize("name", PLANS)
def test_a_step_after_a_forward_without_a_backward(
    name: str, build: Callable[[], tuple[torch.nn.Module, list[Any]]], shares_memory: bool, tmp_path: Path
) -> None:
    step_after_a_forward(name, build, shares_memory, tmp_path)


@pytest.mark.parametrize("name", ["zero3", "params on disk"])
def test_a_step_after_a_forward_of_blocks_that_stay_whole(name: str, tmp_path: Path) -> None:
    """They have the values of before in memory, and the program has come to their next gather ahead of the step."""
    step_after_a_forward(name, boxes, False, tmp_path)


def step_after_a_forward(
    name: str, build: Callable[[], tuple[torch.nn.Module, list[Any]]], shares_memory: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, data = build()
    plain = copy.deepcopy(model)
    optimizer = adamw(plain)
    expected = []
    for batch in data:
        plain(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(plain(*batch).item())
    plan = {**PLANS[name], **({"disk": str(tmp_path)} if PLANS[name]["preset"] == "infinity" else {})}

    def work(engine: sw.Engine) -> tuple[dict[str, torch.Tensor], list[float]]:
        losses = []
        for batch in data:
            engine.backward(engine(*batch))
            assert engine(*batch).isfinite()
            engine.step()
            losses.append(engine(*batch).item())
        return engine.state_dict(), losses

    for found, losses in work_on_ranks(2, work, plan, model, shares_memory=shares_memory):
        assert losses == pytest.approx(expected, rel=1e-5)
        for key, value in plain.state_dict().items():
            assert torch.allclose(found[key], value, rtol=0, atol=1e-6), key


def test_an_evaluation_between_a_forward_and_its_backward() -> None:
    """It takes what was held for the backward, which gathers over both axes instead of one."""
    model, data = Transformer(), batches(3)

    def step(engine: sw.Engine, _: torch.optim.Optimizer, batch: Batch) -> torch.Tensor:
        loss = engine(*batch)
        with torch.no_grad():
            assert engine(*batch).isfinite()
        engine.backward(loss)
        engine.step()
        return loss

    mesh = {"node": 2, "local": 2}
    assert_same(sharded_run(model, data, "hpz", 4, mesh, step=step, shares_memory=False), plain_run(model, data))


def test_blocks_whose_backward_cannot_be_seen_stay_whole() -> None:
    model, _ = boxes()
    data = [(torch.randn(4, 16), torch.randn(4, 16)) for _ in range(3)]
    assert_same(sharded_run(model, data, "zero3", 2, None, shares_memory=False), plain_run(model, data))


class Reading(Transformer):
    """From its third call on, it begins with a weight of a block that runs later."""

    num_calls = 0

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        hidden = self.tokens(x) + self.positions.weight[: x.shape[1]]
        if self.num_calls > 2:
            weight = self.blocks[1].up.weight
            hidden = F.linear(F.linear(hidden, weight).tanh(), weight.t())
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


def test_a_block_whose_weight_is_needed_after_its_planned_end_stays_whole() -> None:
    model, data = Reading(), batches(4)
    plain = plain_run(model, data)
    model.num_calls = 0
    assert_same(sharded_run(model, data, "zero3", 2, None, shares_memory=False), plain)


class Table(nn.Module):
    """Returns a part of its parameter beside what it computes, as tables of positions are handed on."""

    def __init__(self, *, is_trained: bool = True) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.linspace(-1, 1, 32).view(8, 4), requires_grad=is_trained)
        self.mix = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return self.mix(x), {"rows": self.rows[: x.shape[0]], "turned": self.rows.t()}


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([Table(), Table(is_trained=False), Table()])
        self.last = Table()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        handed, turned = x, []
        for table in (*self.tables, self.last):
            x, parts = table(x * handed)
            handed = parts["rows"]
            turned.append(parts["turned"])
        return (x * handed).square().mean(), [*turned, self.last.rows[0], self.last.mix.bias.view(2, 2)]


@pytest.mark.parametrize("shares_memory", [False, True])
@pytest.mark.parametrize("preset", ["zero3", "zero2"])
def test_a_view_of_a_parameter_may_be_returned_to_who_uses_it_later(preset: str, shares_memory: bool) -> None:
    model = Tables()

    def losses(replica: nn.Module, world: sw.World | None) -> list[float]:
        optimizer = torch.optim.SGD([param for param in replica.parameters() if param.requires_grad], lr=0.1)
        if world is not None:
            sw.shard(replica, {"preset": preset, "units": {"class": "Table"}}, optimizer=optimizer, world=world)

        def loss_of(x: torch.Tensor) -> torch.Tensor:
            loss, views = replica(x)
            total: torch.Tensor = loss + sum(view.square().mean() for view in views)
            return total

        found = []
        for number in range(3):
            loss_of(torch.full((3, 4), 1.0 + number)).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                found.append(loss_of(torch.ones(3, 4)).item())
        return found

    replicas = [copy.deepcopy(model) for _ in range(2)]
    expected = losses(model, None)
    found = run_ranks(2, lambda world: losses(replicas[world.rank], world), shares_memory=shares_memory)
    assert found == [pytest.approx(expected, rel=1e-5)] * 2


@dataclass(frozen=True)
class Parts:
    out: torch.Tensor
    detached: torch.Tensor


class Keeper(nn.Module):
    """Keeps views of its parameter in attributes, and returns one detached."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 16).view(4, 4))
        self.kept_in: dict[str, Any] = {"list": []}

    def forward(self, x: torch.Tensor) -> Parts:
        self.turned = self.weight.t()
        self.data = self.weight.data
        self.kept_in["list"] = [self.weight.detach()[0], (self.weight[1:3],)]
        return Parts(x @ self.turned, self.weight.detach())


class Keepers(nn.Module):
    """Keeps one of a part of a part, too."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Keeper(), Keeper()])

    def forward(self, x: torch.Tensor) -> list[Parts]:
        self.of_part = self.parts[1].weight.detach().view(-1)
        first = self.parts[0](x)
        return [first, self.parts[1](torch.tanh(first.out))]


@pytest.mark.parametrize("shares_memory", [False, True])
@pytest.mark.parametrize("preset", ["zero3", "zero2"])
def test_views_of_parameters_that_a_forward_keeps_or_detaches_are_copies(preset: str, shares_memory: bool) -> None:
    """They pass gradients on, and have the values of that moment also after the step, as clones have."""
    model = Keepers()

    def kept_by(replica: Any, parts: list[Parts]) -> list[torch.Tensor]:
        found = [replica.of_part, *(one.detached for one in parts)]
        for keeper in replica.parts:
            row, (rows,) = keeper.kept_in["list"]
            found += [keeper.turned, keeper.data, row, rows]
        return found

    def seen(replica: nn.Module, world: sw.World | None) -> list[list[torch.Tensor]]:
        optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
        if world is not None:
            sw.shard(replica, {"preset": preset, "units": {"class": "Keeper"}}, optimizer=optimizer, world=world)
        steps = []
        for number in range(3):
            parts = replica(torch.full((3, 4), 1.0 + number))
            kept = kept_by(replica, parts)
            steps.append([one.detach().clone() for one in kept])
            (parts[1].out.square().mean() + sum(one.square().mean() for one in kept)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if world is not None and preset == "zero3":
                for before, after in zip(steps[-1], kept_by(replica, parts), strict=True):
                    assert torch.equal(before, after)
        return steps

    replicas = [copy.deepcopy(model) for _ in range(2)]
    expected = seen(model, None)
    for found in run_ranks(2, lambda world: seen(replicas[world.rank], world), shares_memory=shares_memory):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
