"""Steps that raise, gradients that are not reduced yet, engines opened and closed: nothing is left behind."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from twins import PRESETS_2, PRESETS_2X2, Batch, assert_same, batches, plain_run, plan_of, sharded_run, work_on_ranks

import shardwise as sw
from shardwise.errors import StateError
from tests import inside
from tests.models import Transformer
from tests.thorough import sampled, thorough_only

pytestmark = sampled

Tensor = torch.Tensor
CASES = [*PRESETS_2, *PRESETS_2X2]
IDS = [f"{name}-{n}" for name, n, _ in CASES]


@pytest.fixture(params=CASES, ids=IDS)
def case(request: pytest.FixtureRequest) -> tuple[str, int, Any]:
    return request.param


@pytest.fixture
def model() -> Transformer:
    torch.manual_seed(0)
    return Transformer(tied=True)


class Fragile(Exception):
    pass


class Break(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise Fragile


class Breaking(Transformer):
    where = ""

    def logits(self, x: Tensor) -> Tensor:
        hidden = self.tokens(x) + self.positions.weight[: x.shape[1]]
        for index, block in enumerate(self.blocks):
            if index == 1 and self.where == "forward":
                raise Fragile
            hidden = block(hidden)
            if index == 1 and self.where == "backward":
                hidden = Break.apply(hidden)
        return self.head(self.norm(hidden))


@pytest.mark.parametrize("where", ["forward", "backward", "evaluation"])
def test_a_step_that_raises_leaves_the_engine_usable(case: tuple[str, int, Any], where: str) -> None:
    """In the first step, which is recorded, and in later ones, which follow the program."""
    model = Breaking(tied=True)
    count = {"steps": 0}

    def step(engine: sw.Engine, _: torch.optim.Optimizer, batch: Batch) -> Tensor:
        for _ in range(2):
            engine.module.where = "backward" if where == "backward" else "forward"
            with pytest.raises(Fragile), torch.set_grad_enabled(where != "evaluation"):
                engine.backward(engine(*batch))
            engine.module.where = ""
        loss = engine(*batch)
        engine.backward(loss)
        engine.step()
        assert inside.meter(engine).now["working"] == 0
        count["steps"] += 1
        return loss

    data = batches(4)
    assert_same(sharded_run(model, data, *case, step=step), plain_run(model, data))
    assert count["steps"] == 4 * case[1]


class Stumbling(torch.optim.AdamW):
    raises = False

    def step(self, closure: Any = None) -> Any:
        if self.raises:
            raise Fragile
        return super().step(closure)


@pytest.mark.parametrize("way", ["engine", "optimizer"])
def test_an_update_that_raises_leaves_the_groups_and_the_gradients(case: tuple[str, int, Any], way: str) -> None:
    """After the error, the groups list the model's parameters again, and the same step can be repeated."""

    def step(engine: sw.Engine, optimizer: torch.optim.Optimizer, batch: Batch) -> Tensor:
        assert isinstance(optimizer, Stumbling)
        take = engine.step if way == "engine" else optimizer.step
        loss = engine(*batch)
        engine.backward(loss)
        optimizer.raises = True
        with pytest.raises(Fragile):
            take()
        optimizer.raises = False
        assert_lists_params(optimizer, engine.module)
        take()
        assert_lists_params(optimizer, engine.module)
        optimizer.zero_grad()
        return loss

    torch.manual_seed(0)
    model, data = Transformer(tied=True), batches(3)
    assert_same(sharded_run(model, data, *case, stumbling, step=step), plain_run(model, data, stumbling))


def stumbling(model: nn.Module) -> torch.optim.Optimizer:
    return Stumbling(model.parameters(), lr=1e-2)


def assert_lists_params(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    own = {id(param) for param in model.parameters()}
    assert {id(param) for group in optimizer.param_groups for param in group["params"]} == own


def test_the_rate_after_an_update_on_the_host_that_raised() -> None:
    """Units on the host are updated before the optimizer's own step, each with the current settings of its group."""

    def step(engine: sw.Engine, optimizer: torch.optim.Optimizer, batch: Batch) -> Tensor:
        assert isinstance(optimizer, Stumbling)
        loss = engine(*batch)
        engine.backward(loss)
        optimizer.raises = True
        for group in optimizer.param_groups:
            group["lr"] = 10.0
        with pytest.raises(Fragile):
            optimizer.step()
        optimizer.raises = False
        for group in optimizer.param_groups:
            group["lr"] = 1e-2
        optimizer.step()
        assert_lists_params(optimizer, engine.module)
        optimizer.zero_grad()
        return loss

    torch.manual_seed(0)
    model, data = Transformer(tied=True), batches(3)
    torch.optim.AdamW(model.parameters())  # from now on torch calls hooks in its step too, within that of `Stumbling`
    ours = sharded_run(model, data, "offload", 2, None, stumbling, step=step)
    assert_same(ours, plain_run(model, data, stumbling))


@pytest.mark.parametrize("when", ["before", "after", "never"])
def test_a_guarded_step_beside_schedulers(when: str) -> None:
    """A scheduler may wrap the step before `shard` or after it, and the plan changes with the same optimizer."""
    model = nn.Linear(3, 3)
    optimizer = stumbling(model)

    def schedule() -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns if it no longer finds its wrapper
        scheduler = schedule() if when == "before" else None
        with sw.shard(model, "zero1", optimizer=optimizer) as engine:
            scheduler = schedule() if when == "after" else scheduler
            for plan in ("zero3", "ddp", "zero2"):
                model(torch.ones(2, 3)).sum().backward()
                optimizer.raises = True
                with pytest.raises(Fragile):
                    optimizer.step()
                optimizer.raises = False
                assert_lists_params(optimizer, engine.module)
                optimizer.step()
                optimizer.zero_grad()
                if scheduler is not None:
                    scheduler.step()
                engine.reshard(plan)
            assert depth(optimizer.step) == 2 + (scheduler is not None)  # torch's wrapper, the guard, the scheduler's
        assert depth(optimizer.step) == {"never": 1, "before": 2, "after": 3}[when]


def depth(step: Any) -> int:
    """The number of wrappers around a step."""
    return 1 + depth(step.__wrapped__) if hasattr(step, "__wrapped__") else 0


def test_no_sync(case: tuple[str, int, Any], model: Transformer) -> None:
    """Gradients stay local for two micro-batches, and are summed with the third, or by the step itself. A pass is
    recorded once of each kind."""
    sent: list[int] = []
    last_inside = False

    def num_recordings(engine: sw.Engine) -> dict[str, Any]:
        return {"recordings": inside.programs(engine).num_recordings}

    def step(engine: sw.Engine, _: torch.optim.Optimizer, batch: Batch) -> Tensor:
        parts = list(zip(batch[0].chunk(3), batch[1].chunk(3), strict=True))
        total = torch.zeros(())
        ledger = inside.ledger(engine)
        for index, (x, y) in enumerate(parts):
            before = sum(n for (verb, _), n in ledger.sent_bytes.items() if verb in ("reduce_scatter", "all_reduce"))
            if index < 2 or last_inside:
                with engine.no_sync():
                    loss = engine(x, y) / 3
                    engine.backward(loss)
                after = sum(n for (verb, _), n in ledger.sent_bytes.items() if verb in ("reduce_scatter", "all_reduce"))
                sent.append(after - before)
            else:
                loss = engine(x, y) / 3
                engine.backward(loss)
            total = total + loss.detach()
        engine.step()
        return total

    data = batches(4, rows=12)
    plain = plain_run(model, data)
    for last_inside in (False, True):
        run = sharded_run(model, data, *case, step=step, after=num_recordings)
        assert_same(run, plain)
        assert run.extra["recordings"] == (1 if last_inside else 2)
    assert sent
    assert set(sent) == {0}


@pytest.mark.parametrize("plan", [{"precision": "bf16"}, {"wire": {"grad": "bf16"}}], ids=["precision", "wire"])
@pytest.mark.parametrize("preset", ["ddp", "zero2", "zero3"])
def test_what_no_sync_leaves_is_added_before_it_is_rounded(preset: str, plan: dict[str, Any]) -> None:
    """256 and seven ones are 263, which the wire rounds; added in bf16 they would be 256 each time."""

    def work(engine: sw.Engine) -> float:
        for number in range(8):
            with engine.no_sync() if number < 7 else contextlib.nullcontext():
                engine.backward(engine(torch.full((1, 16), 1.0 if number else 256.0)).sum())
        engine.step()
        return float(engine.state_dict()["weight"].mean())

    def build() -> nn.Module:
        model = nn.Linear(16, 1, bias=False)
        nn.init.zeros_(model.weight)
        return model

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1)

    for stepped in work_on_ranks(2, work, {"preset": preset, **plan}, build, sgd):
        assert stepped == pytest.approx(-263, abs=1)


def test_what_no_sync_left_is_reduced_before_the_ranks_agree() -> None:
    """Otherwise they would find it then, agree again, and record the next pass."""

    def work(engine: sw.Engine) -> int:
        for batch in batches(3):
            with engine.no_sync():
                engine.backward(engine(*batch))
            engine.step()
        return inside.programs(engine).num_recordings

    assert work_on_ranks(2, work, "zero3", Transformer) == [1, 1]


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("num_optimizers", [1, 2])
def test_gradients_that_went_with_a_backward_that_raised_are_asked_for(set_to_none: bool, num_optimizers: int) -> None:
    """A step is refused until the gradients have been zeroed, in either way, by each of several optimizers."""
    from shardwise.testing import run_ranks

    torch.manual_seed(0)
    start = Breaking(tied=True)
    twin = copy.deepcopy(start)
    x, y = batches(1)[0]

    def optimizers_of(model: nn.Module) -> list[torch.optim.Optimizer]:
        params = list(model.parameters())
        parts = [params] if num_optimizers == 1 else [params[:9], params[9:]]
        return [torch.optim.SGD(part, lr=0.1) for part in parts]

    twin(x, y).backward()
    for optimizer in optimizers_of(twin):
        optimizer.step()
    replicas = [copy.deepcopy(start) for _ in range(2)]

    def rank(world: sw.World) -> dict[str, Tensor]:
        model = replicas[world.rank]
        optimizers = optimizers_of(model)
        engine = sw.shard(model, "zero3", optimizer=optimizers, world=world)
        model(x, y).backward()
        model.where = "backward"
        with pytest.raises(Fragile):
            model(x, y).backward()
        model.where = ""
        for optimizer in optimizers:
            with pytest.raises(StateError, match="A backward raised, and the gradients that waited"):
                optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        model(x, y).backward()
        for optimizer in optimizers:
            optimizer.step()
        return engine.state_dict()

    for state in run_ranks(2, rank):
        for name, param in twin.named_parameters():
            assert torch.allclose(state[name], param.detach(), atol=1e-6), name


@thorough_only("slow; smaller tests beside it cover the same code")
def test_engines_come_and_go_without_a_trace(model: Transformer) -> None:
    """Five engines over one model, one after the other, leave no hooks and no additional tensors."""
    x, y = batches(1)[0]

    def round_trip() -> int:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with sw.shard(model, "zero3", optimizer=optimizer) as engine:
            for _ in range(2):
                engine.backward(engine(x, y))
                engine.step()
            state = engine.state_dict()
        del engine, optimizer
        model.load_state_dict(state)
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    counts = [round_trip() for _ in range(5)]
    assert counts[-1] <= counts[2]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any(param._post_accumulate_grad_hooks for param in model.parameters())


def test_two_engines_in_one_loss(case: tuple[str, int, Any]) -> None:
    """Two models, each with an engine and a plan of its own, trained on the product of their losses."""
    from shardwise.testing import run_ranks

    preset, num_ranks, mesh = case
    torch.manual_seed(0)
    start = [Transformer(), Transformer()]
    data = batches(4)
    twins = copy.deepcopy(start)
    optimizers = [torch.optim.SGD(twin.parameters(), lr=0.1) for twin in twins]
    expected = []
    for x, y in data:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = twins[0](x, y) * twins[1](x, y)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        expected.append(loss.item())
    replicas = [copy.deepcopy(start) for _ in range(num_ranks)]

    def rank(world: sw.World) -> list[float]:
        plans = [plan_of(preset, mesh), "zero2"]
        engines = [
            sw.shard(model, plan, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), world=world)
            for model, plan in zip(replicas[world.rank], plans, strict=True)
        ]
        losses = []
        for x, y in data:
            loss = engines[0](x, y) * engines[1](x, y)
            loss.backward()
            for engine in engines:
                engine.step()
            losses.append(loss.item())
        return losses

    for losses in run_ranks(num_ranks, rank):
        assert losses == pytest.approx(expected, rel=1e-5)


def test_what_an_engine_is_not(model: Transformer) -> None:
    engine = sw.shard(model, "zero3")
    with pytest.raises(StateError, match="cannot be copied"):
        copy.deepcopy(engine)
    with pytest.raises(StateError, match="cannot be pickled"):
        pickle.dumps(engine)
    text = str(engine)
    assert "zero3 on dp=1, rank 0 of 1" in text
    assert "blocks.0" in text
    assert repr(engine) == "<Engine: Transformer, zero3 on dp=1, open>"
    engine.close()
    assert isinstance(engine.module, nn.Module)
