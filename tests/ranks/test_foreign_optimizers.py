"""Optimizers of classes that nothing is known about: pieces for elementwise ones, whole parameters for others."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from twins import MakeOptimizer, batches, full_params, plan_of, share_of, work_on_ranks

import shardwise as sw
from shardwise.errors import ModelError, StateError
from shardwise.testing import run_ranks
from tests.models import Transformer
from tests.thorough import sampled

Tensor = torch.Tensor
NUM_STEPS = 5


class Estimating(torch.optim.Optimizer):
    """Its step size comes from sums over all parameters, as in D-Adaptation (arXiv:2301.07733), and each matrix's
    update is divided by its norm; it keeps a flat copy of each parameter and a state for each row."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "d": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        group = self.param_groups[0]
        params = [param for param in group["params"] if param.grad is not None]
        for param in params:
            state = self.state[param]
            state.setdefault("first", param.flatten().clone())
            state.setdefault("m", torch.zeros_like(param)).lerp_(param.grad, 0.1)
            if param.dim() > 1:
                state.setdefault("rows", torch.zeros(param.shape[0])).add_(param.grad.flatten(1).square().sum(1))
        ways = [(self.state[param]["first"] - param.flatten()) * param.grad.flatten() for param in params]
        moved = sum(float(way.sum()) for way in ways)
        group["d"] = max(group["d"] * 1.05, abs(moved) / sum(float(param.grad.abs().sum()) for param in params))
        for param in params:
            state = self.state[param]
            update = state["m"] / (state["m"].norm() + 1e-3)
            if param.dim() > 1:
                update = update / (state["rows"].sqrt()[:, None] + 1)
            param.sub_(update, alpha=group["lr"] * group["d"] * 10)


class ScheduleFree(torch.optim.Optimizer):
    """SGD of arXiv:2405.15682: `eval()` moves parameters to their average, and `train()` back."""

    def __init__(self, params: Any, lr: float = 0.3, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "training": True})

    @torch.no_grad()
    def _move(self, weight_of: Callable[[float], float], *, training: bool) -> None:
        for group in self.param_groups:
            if group["training"] != training:
                for param in group["params"]:
                    if "z" in self.state[param]:
                        param.lerp_(self.state[param]["z"], weight_of(group["beta"]))
                group["training"] = training

    def eval(self) -> None:
        self._move(lambda beta: 1 - 1 / beta, training=False)

    def train(self) -> None:
        self._move(lambda beta: 1 - beta, training=True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert group["training"]
            group["k"] += 1
            weight = 1 / group["k"]
            for param in group["params"]:
                if param.grad is not None:
                    z = self.state[param].setdefault("z", param.detach().clone())
                    param.lerp_(z, weight)
                    param.add_(param.grad, alpha=group["lr"] * (group["beta"] * (1 - weight) - 1))
                    z.sub_(param.grad, alpha=group["lr"])


class Counting(torch.optim.Optimizer):
    """Elementwise; counts its steps in an attribute, and in a setting that its first step adds."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.3})
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.num_steps += 1
        self.param_groups[0]["taken"] = self.param_groups[0].get("taken", 0) + 1
        assert self.param_groups[0]["taken"] == self.num_steps
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                param.sub_(
                    param.grad.sign() * param.grad.abs().sqrt(), alpha=self.param_groups[0]["lr"] / self.num_steps
                )


def estimating(model: nn.Module) -> torch.optim.Optimizer:
    return Estimating(model.parameters())


def schedule_free(model: nn.Module) -> Any:
    return ScheduleFree(model.parameters())


class Fading(torch.optim.Optimizer):
    """It counts its updates in an attribute, and makes each smaller than the last."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"] / self.count)


def fading(model: nn.Module) -> Any:
    return Fading(model.parameters())


@pytest.fixture(scope="module")
def model() -> Transformer:
    torch.manual_seed(0)
    return Transformer(num_blocks=1)


def trained(model: nn.Module, optimizer: Any, num_ranks: int, steps: range, *, evaluates: bool) -> list[float]:
    """The plain loop, on the ranks' shares of each batch, and the losses of its evaluations."""
    losses = []
    for step, (x, y) in enumerate(batches(steps.stop, rows=12)[steps.start :], steps.start):
        for share in zip(x.chunk(num_ranks), y.chunk(num_ranks), strict=True):
            (model(*share) / num_ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
        if evaluates and step % 2:
            optimizer.eval()
            with torch.no_grad():
                losses.append(model(x, y).item())
            optimizer.train()
    return losses


def train_and_evaluate(engine: sw.Engine, optimizer: Any, steps: range, *, evaluates: bool) -> list[float]:
    losses = []
    for step, batch in enumerate(batches(steps.stop, rows=12)[steps.start :], steps.start):
        engine.backward(engine(*share_of(engine, batch)))
        engine.step()
        if evaluates and step % 2:
            optimizer.eval()
            with torch.no_grad():
                losses.append(engine(*batch).item())
            optimizer.train()
    return losses


def race(model: nn.Module, make: MakeOptimizer, plan: Any, num_ranks: int, *, evaluates: bool = False) -> None:
    """Parameters, states, settings and losses of evaluations are the plain loop's."""
    plain = copy.deepcopy(model)
    optimizer = make(plain)
    losses = trained(plain, optimizer, num_ranks, range(NUM_STEPS), evaluates=evaluates)
    replicas = [copy.deepcopy(model) for _ in range(num_ranks)]

    def rank(world: sw.World) -> tuple[list[float], dict[str, Tensor], dict[str, Any]]:
        own = make(replicas[world.rank])
        with sw.shard(replicas[world.rank], plan, optimizer=own, world=world) as engine:
            evaluated = train_and_evaluate(engine, own, range(NUM_STEPS), evaluates=evaluates)
            return evaluated, full_params(engine), own.state_dict()

    for evaluated, params, state in run_ranks(num_ranks, rank):
        assert evaluated == pytest.approx(losses, rel=1e-5)
        for name, param in plain.named_parameters():
            assert torch.allclose(params[name], param, rtol=0, atol=1e-5), name
        assert_same_states(state, optimizer.state_dict())


def assert_same_states(state: dict[str, Any], twin: dict[str, Any]) -> None:
    assert state["param_groups"] == [
        {key: pytest.approx(value) if isinstance(value, float) else value for key, value in group.items()}
        for group in twin["param_groups"]
    ]
    for number, own in twin["state"].items():
        for key, value in own.items():
            assert state["state"][number][key].shape == value.shape, key
            assert torch.allclose(state["state"][number][key], value, atol=1e-5), key


@sampled
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_whole_parameters_where_ranks_have_them(num_ranks: int, model: Transformer) -> None:
    race(model, estimating, "ddp", num_ranks)


def test_alone_every_plan_has_them_whole(model: Transformer) -> None:
    race(model, estimating, "zero3", 1)


def test_whole_parameters_on_the_host(model: Transformer) -> None:
    host = {"tier": "host"}
    race(model, estimating, {"preset": "ddp", "rows": {"optim": host, "grad": host}}, 2)


@pytest.mark.parametrize("preset", ["zero1", "zero3", "zero3-offload"])
def test_pieces_are_refused_to_those_that_need_more(preset: str, model: Transformer) -> None:
    replicas = [copy.deepcopy(model) for _ in range(2)]

    def rank(world: sw.World) -> str:
        with pytest.raises(ModelError) as caught:
            sw.shard(replicas[world.rank], preset, optimizer=estimating(replicas[world.rank]), world=world)
        return str(caught.value)

    for message in run_ranks(2, rank):
        assert "Estimating is not elementwise: its step calls aten::" in message
        assert "works as it is where each rank updates whole parameters" in message
        assert "tokens.weight is updated in parts, sharded over dp" in message


def test_a_change_of_plan_that_would_cut_them_is_refused(model: Transformer) -> None:
    def work(engine: sw.Engine) -> None:
        with pytest.raises(ModelError, match="Estimating is not elementwise"):
            engine.reshard("zero1")
        engine.reshard({"preset": "ddp", "precision": "bf16"})
        engine.backward(engine(*batches(1)[0]))
        engine.step()

    work_on_ranks(2, work, "ddp", lambda: copy.deepcopy(model), estimating)


@sampled
@pytest.mark.parametrize(
    ("make", "plans"),
    [(estimating, ("ddp", "ddp")), (schedule_free, ("zero3", "zero1")), (schedule_free, ("zero2", "ddp"))],
    ids=["whole", "schedule-free", "schedule-free to ddp"],
)
def test_a_resumed_run_is_the_same(
    make: MakeOptimizer, plans: tuple[str, str], model: Transformer, tmp_path: Path
) -> None:
    plain = copy.deepcopy(model)
    optimizer = make(plain)
    trained(plain, optimizer, 2, range(NUM_STEPS), evaluates=False)
    for plan, steps in zip(plans, (range(3), range(3, NUM_STEPS)), strict=True):
        replicas = [copy.deepcopy(model) for _ in range(2)]

        def rank(
            world: sw.World, plan: str = plan, steps: range = steps, replicas: Any = replicas
        ) -> dict[str, Tensor]:
            own = make(replicas[world.rank])
            with sw.shard(replicas[world.rank], plan, optimizer=own, world=world) as engine:
                if steps.start:
                    engine.resume(tmp_path / "run")
                train_and_evaluate(engine, own, steps, evaluates=False)
                engine.save(tmp_path / "run")
                assert_same_states(own.state_dict(), optimizer.state_dict()) if steps.start else None
                return full_params(engine)

        params = run_ranks(2, rank)[0]
    for name, param in plain.named_parameters():
        assert torch.allclose(params[name], param, rtol=0, atol=1e-5), name


@sampled
@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero2", "zero3", "zero3-offload"])
def test_schedule_free_parameters_are_where_the_plain_loop_has_them(preset: str, model: Transformer) -> None:
    race(model, schedule_free, preset, 3 if preset == "zero3" else 2, evaluates=True)


def test_schedule_free_in_bf16_evaluates_the_average(model: Transformer) -> None:
    """The parameters of the forward follow their fp32 masters in both directions."""
    replicas = [copy.deepcopy(model) for _ in range(2)]

    def rank(world: sw.World) -> None:
        replica = replicas[world.rank]
        optimizer = schedule_free(replica)
        with sw.shard(replica, plan_of("zero2", None, precision="bf16"), optimizer=optimizer, world=world) as engine:
            train_and_evaluate(engine, optimizer, range(NUM_STEPS), evaluates=False)
            before = full_params(engine)
            optimizer.eval()
            averages = full_params(engine)
            assert not torch.equal(averages["tokens.weight"], before["tokens.weight"])
            for name, param in replica.named_parameters():
                assert torch.equal(param, averages[name].to(torch.bfloat16)), name
            optimizer.train()
            for name, param in full_params(engine).items():
                assert torch.allclose(param, before[name], atol=1e-6)

    run_ranks(2, rank)


def test_switching_ends_with_the_engine(model: Transformer) -> None:
    replica = copy.deepcopy(model)
    optimizer = schedule_free(replica)
    with sw.shard(replica, "ddp", optimizer=optimizer) as engine:
        engine.backward(engine(*batches(1)[0]))
        engine.step()
        assert "eval" in vars(optimizer)
    assert "eval" not in vars(optimizer)


@sampled
@pytest.mark.parametrize("preset", ["zero1", "offload", "zero3-offload"])
def test_steps_counted_in_attributes_and_new_settings_are_counted_once(preset: str, model: Transformer) -> None:
    race(model, lambda net: Counting(net.parameters()), preset, 2)


def test_states_are_not_called_sharded_where_nothing_is(model: Transformer) -> None:
    replica = copy.deepcopy(model)
    optimizer = schedule_free(replica)
    with sw.shard(replica, "ddp", optimizer=optimizer) as engine:
        engine.backward(engine(*batches(1)[0]))
        engine.step()
        with pytest.raises(
            StateError, match=r"tokens.weight is kept by .* engine.get\('tokens.weight', 'z'\)"
        ) as caught:
            optimizer.state[replica.tokens.weight]
        assert "sharded" not in str(caught.value)


class WithMethods(torch.optim.SGD):
    """Its methods do more than torch's, as those of optimizers by users often do."""

    num_zeroed = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.num_zeroed += 1
        if self.num_zeroed % 2 == 0:  # gradients of two batches add up
            super().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "num_zeroed": self.num_zeroed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num_zeroed = state_dict["num_zeroed"] + 10
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "num_zeroed"})


@pytest.mark.parametrize("is_patched", [True, False])
@pytest.mark.parametrize("preset", ["ddp", "zero3"])
def test_methods_of_its_own_are_called(preset: str, is_patched: bool) -> None:
    """Those of its class, and those that code has put into the object."""

    def run(world: sw.World | None) -> tuple[list[str], int, list[str], dict[str, Tensor]]:
        model = nn.Linear(3, 2)
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(0.5)
        optimizer = WithMethods(model.parameters(), lr=0.1, momentum=0.9)
        seen: list[str] = []

        def noted(name: str) -> Callable[..., Any]:
            before = getattr(optimizer, name)

            def call(*args: Any) -> Any:
                seen.append(name)
                return before(*args)

            return call

        if is_patched:
            names = ("zero_grad", "state_dict", "load_state_dict")
            optimizer.__dict__.update({name: noted(name) for name in names})
        engine = None if world is None else sw.shard(model, preset, optimizer=optimizer, world=world)
        for _ in range(4):
            model(torch.ones(2, 3)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        params = {name: param.detach().clone() for name, param in model.named_parameters()}
        if engine is not None:
            engine.unshard()
        optimizer.register_step_pre_hook(lambda *_: None)  # torch's own again
        return seen, optimizer.num_zeroed, sorted(optimizer.state_dict()), params

    *told, params = run(None)
    *ours, found = run_ranks(2, run)[0]
    assert ours == told
    for name, value in params.items():
        torch.testing.assert_close(found[name], value)


@pytest.mark.parametrize("is_early", [True, False])
@pytest.mark.parametrize("preset", ["ddp", "zero3"])
def test_a_hook_that_finds_states_by_name_is_given_whole_ones(preset: str, is_early: bool) -> None:
    """As torch advises for states of a model whose parameters were in another order: hooks that were registered before
    sharding, and those registered after it."""

    def by_name(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        (group,) = state["param_groups"]
        places = {name: place for place, name in enumerate(group["param_names"])}
        names = optimizer.param_groups[0]["param_names"]
        states = {place: state["state"][places[name]] for place, name in enumerate(names)}
        return {"state": states, "param_groups": [{**group, "param_names": names}]}

    def build(*, is_reversed: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        with torch.no_grad():
            for number, param in enumerate(model.parameters()):
                param.copy_(torch.linspace(-1, 1, param.numel()).view_as(param) + 0.1 * number)
        named = list(model.named_parameters())
        optimizer = torch.optim.SGD(named[::-1] if is_reversed else named, lr=0.1, momentum=0.9)
        optimizer.register_state_dict_post_hook(lambda _, state: {**state, "own": "kept"})
        return model, optimizer

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
        for _ in range(num_steps):
            model(torch.ones(2, 3)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def run(world: sw.World | None) -> dict[str, Tensor]:
        model, optimizer = build(is_reversed=True)
        if world is not None:
            sw.shard(model, preset, optimizer=optimizer, world=world)
        train(model, optimizer, 2)
        state = copy.deepcopy(optimizer.state_dict())
        assert state["own"] == "kept"
        other, again = build(is_reversed=False)
        if is_early:
            again.register_load_state_dict_pre_hook(by_name)
        if world is not None:
            sw.shard(other, preset, optimizer=again, world=world)
        if not is_early:
            again.register_load_state_dict_pre_hook(by_name)
        other.load_state_dict(model.state_dict())
        again.load_state_dict(state)
        train(other, again, 2)
        return {name: param.detach().clone() for name, param in other.named_parameters()}

    plain = run(None)
    for name, value in run_ranks(2, run)[0].items():
        torch.testing.assert_close(value, plain[name])


def test_schedule_free_is_refused_on_a_disk(model: Transformer, tmp_path: Path) -> None:
    replica = copy.deepcopy(model)
    disk = {"preset": "infinity", "disk": str(tmp_path)}
    with pytest.raises(ModelError, match="moves parameters in train\\(\\) and eval\\(\\)"):
        sw.shard(replica, disk, optimizer=schedule_free(replica))
