"""Parameters that are unfrozen, frozen again or added to the optimizer while a sharded model trains: results equal
those of plain PyTorch."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import CheckpointError, FaultError, ModelError, StateError
from shardwise.testing import run_ranks
from tests.thorough import sampled, thorough_only

STEPS = 8
Build = Callable[[nn.Module], torch.optim.Optimizer]
Act = Callable[[int, nn.Module, torch.optim.Optimizer], None]


def built() -> nn.Sequential:
    """A copy of the model for each rank: ranks are threads, and share a random generator."""
    return copy.deepcopy(MODEL)


def _made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)), nn.Linear(6, 2))


MODEL = _made()


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step))


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adam_of_trained(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=0.02)


def unfreeze(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Unfreeze one block after the other, beginning with the last."""
    if step in (2, 4):
        model[1 if step == 2 else 0].requires_grad_(True)  # type: ignore[index]  # a Sequential


def unfreeze_and_add(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    unfreeze(step, model, optimizer)
    if step in (2, 4):
        block = model[1 if step == 2 else 0]  # type: ignore[index]  # a Sequential
        optimizer.add_param_group({"params": block.parameters(), "lr": 0.01})


def freeze_and_back(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The last block is frozen for two steps, in which another one is unfrozen. Its momentum is kept."""
    unfreeze(step, model, optimizer)
    model[2].requires_grad_(step not in (3, 4))  # type: ignore[index]  # a Sequential


def train(model: nn.Module, optimizer: torch.optim.Optimizer, act: Act, rows: slice, late: bool) -> list[list[float]]:
    """Train, and return the parameters after every step. With `late`, gradients are dropped after the forward."""
    found = []
    for step in range(STEPS):
        act(step, model, optimizer)
        loss = model(batch(step)[rows]).square().mean()
        if late:
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not late:
            optimizer.zero_grad()
        found.append(torch.cat([param.detach().reshape(-1) for param in model.parameters()]).tolist())
    return found


CASES: dict[str, tuple[Build, Act, bool]] = {
    "unfrozen": (momentum, unfreeze, False),
    "unfrozen, gradients dropped late": (momentum, unfreeze, True),
    "added": (adam_of_trained, unfreeze_and_add, False),
    "added, gradients dropped late": (adam_of_trained, unfreeze_and_add, True),
    "frozen and back": (momentum, freeze_and_back, False),
}


PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero3": (2, {"preset": "zero3"}),
    "zero1": (2, {"preset": "zero1"}),
    "offload": (2, {"preset": "offload"}),
    "ddp": (2, {"preset": "ddp"}),
    "zero2": (2, {"preset": "zero2"}),
    "hsdp": (4, {"preset": "hsdp", "mesh": {"node": 2, "local": 2}}),
    "hpz": (4, {"preset": "hpz", "mesh": {"node": 2, "local": 2}}),
    "zero3-offload": (2, {"preset": "zero3-offload"}),
}


def frozen() -> nn.Sequential:
    """A model of which only the last block and the head are trained."""
    model = built()
    model[:2].requires_grad_(False)
    return model


def raced(
    plan: str | dict[str, Any],
    build: Build,
    loop: Callable[[nn.Module, torch.optim.Optimizer, slice, sw.Engine | None], list[Any]],
    num_ranks: int = 2,
) -> None:
    """Require that `loop` has the same results on ranks, which share four rows, as in a plain process."""
    plain = frozen()
    expected = loop(plain, build(plain), slice(0, 4), None)

    def work(world: sw.World) -> list[Any]:
        model, size = frozen(), 4 // world.size
        optimizer = build(model)
        engine = sw.shard(model, plan, optimizer=optimizer, world=world)
        found = loop(model, optimizer, slice(size * world.rank, size * (world.rank + 1)), engine)
        assert not any("_call_impl" in vars(module) for module in model.modules())
        engine.close()
        return found

    for found in run_ranks(num_ranks, work):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-6)


def values(model: nn.Module) -> list[float]:
    return torch.cat([param.detach().reshape(-1) for param in model.parameters()]).tolist()


@sampled
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("case", CASES)
def test_what_is_unfrozen_later_is_trained_as_in_a_plain_loop(case: str, plan: str) -> None:
    build, act, late = CASES[case]
    num_ranks, given = PLANS[plan]

    def loop(
        model: nn.Module, optimizer: torch.optim.Optimizer, rows: slice, engine: sw.Engine | None
    ) -> list[list[float]]:
        found = train(model, optimizer, act, rows, late)
        assert engine is None or engine.num_steps == STEPS
        return found

    raced(given, build, loop, num_ranks)


def one_step(model: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def through_modules(
    model: Any, optimizer: torch.optim.Optimizer, rows: slice, engine: sw.Engine | None
) -> list[list[float]]:
    """The model itself is not called, only its blocks, and a layer within one."""
    found = []
    for step in range(5):
        unfreeze(step, model, optimizer)
        hidden = batch(step)[rows]
        for block in (model[0][0], *model[1:]):
            hidden = block(hidden)
        optimizer.zero_grad()
        hidden.square().mean().backward()
        optimizer.step()
        found.append(values(model))
    return found


def by_closures(
    model: Any, optimizer: torch.optim.Optimizer, rows: slice, engine: sw.Engine | None
) -> list[list[float]]:
    """Memory is planned while the step runs. Other hooks and schedulers run once per step."""
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    found = []
    for step in range(5):
        unfreeze(step, model, optimizer)

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(batch(step)[rows]).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        scheduler.step()
        found.append([*values(model), *(group["lr"] for group in optimizer.param_groups)])
    assert seen == ["before", "after"] * 5
    return found


def in_micro_batches(
    model: Any, optimizer: torch.optim.Optimizer, rows: slice, engine: sw.Engine | None
) -> list[list[float]]:
    """Steps are accumulated, without communication in the first half, and clipped."""
    found = []
    for step in range(5):
        unfreeze_and_add(step, model, optimizer)
        with engine.no_sync() if engine is not None else nullcontext():
            (model(batch(2 * step)[rows]).square().mean() / 2).backward()
        (model(batch(2 * step + 1)[rows]).square().mean() / 2).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        found.append([*values(model), float(norm)])
    return found


def in_whole_steps(
    model: Any, optimizer: torch.optim.Optimizer, rows: slice, engine: sw.Engine | None
) -> list[list[float]]:
    found = []
    for step in range(5):
        unfreeze_and_add(step, model, optimizer)
        if engine is not None:
            engine.train_step(batch(step)[rows], loss_fn=lambda output: output.square().mean())
        else:
            one_step(model, optimizer, batch(step)[rows])
        found.append(values(model))
    return found


def between_backward_and_step(
    model: Any, optimizer: torch.optim.Optimizer, rows: slice, engine: sw.Engine | None
) -> list[list[float]]:
    """The current step does not change parameters that were unfrozen after its backward."""
    found = []
    for step in range(6):
        model(batch(step)[rows]).square().mean().backward()
        unfreeze_and_add(step, model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        found.append(values(model))
    return found


def evaluated_between(
    model: Any, optimizer: torch.optim.Optimizer, rows: slice, engine: sw.Engine | None
) -> list[list[float]]:
    """Evaluation needs no memory for gradients."""
    found = []
    for step in range(5):
        unfreeze(step, model, optimizer)
        with torch.no_grad():
            model(batch(9))
            model[0](batch(9))
        with engine.inference() if engine is not None else torch.no_grad():
            model(batch(9))
        one_step(model, optimizer, batch(step)[rows])
        found.append(values(model))
    return found


def resharded_by_the_loop(
    model: Any, optimizer: torch.optim.Optimizer, rows: slice, engine: sw.Engine | None
) -> list[list[float]]:
    """`reshard` plans the memory too."""
    found = []
    for step in range(6):
        unfreeze_and_add(step, model, optimizer)
        if step in (2, 4) and engine is not None:
            engine.reshard("zero2" if step == 2 else "zero3")
        one_step(model, optimizer, batch(step)[rows])
        found.append(values(model))
    return found


@sampled
@pytest.mark.parametrize(
    ("build", "loop"),
    [
        (momentum, through_modules),
        (momentum, by_closures),
        (adam_of_trained, in_micro_batches),
        (adam_of_trained, in_whole_steps),
        (adam_of_trained, between_backward_and_step),
        (momentum, evaluated_between),
        (adam_of_trained, resharded_by_the_loop),
    ],
)
def test_wherever_the_next_forward_is(build: Build, loop: Any) -> None:
    raced("zero3", build, loop)


@sampled
@pytest.mark.parametrize("plan", [{"activations": {"policy": "recompute"}}, {"compile": "aot_eager"}])
def test_with_what_replaces_forwards(plan: dict[str, Any]) -> None:
    raced({"preset": "zero3", **plan}, adam_of_trained, in_whole_steps)


@thorough_only("it compiles")
@pytest.mark.parametrize("is_wrapped", [True, False])
def test_a_compiler_around_the_model(is_wrapped: bool) -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer, rows: slice, engine: sw.Engine | None) -> list[list[float]]:
        called = model
        if is_wrapped:
            called = torch.compile(model, backend="aot_eager")
        else:
            model.compile(backend="aot_eager")
        found = []
        for step in range(6):
            unfreeze(step, model, optimizer)
            one_step(called, optimizer, batch(step)[rows])
            found.append(values(model))
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a warning that it compiles almost nothing
        raced("zero3", momentum, loop)


def grouped(params: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    return [
        {"params": [param for param in params if param.dim() == 2], "use_muon": True},
        {"params": [param for param in params if param.dim() != 2], "use_muon": False},
    ]


def lamb(model: nn.Module) -> torch.optim.Optimizer:
    return sw.optim.Lamb([param for param in model.parameters() if param.requires_grad], lr=0.01)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    return sw.optim.Muon(grouped([param for param in model.parameters() if param.requires_grad]), lr=0.01)


@sampled
@pytest.mark.parametrize("build", [lamb, muon])
def test_groups_for_optimizers_that_look_at_whole_parameters(build: Build) -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer, rows: slice, engine: sw.Engine | None) -> list[list[float]]:
        found = []
        for step in range(5):
            unfreeze(step, model, optimizer)
            if step in (2, 4):
                params = list(model[1 if step == 2 else 0].parameters())
                for group in grouped(params) if build is muon else [{"params": params}]:
                    optimizer.add_param_group(group)
            one_step(model, optimizer, batch(step)[rows])
            found.append(values(model))
        return found

    raced("zero2", build, loop)


def test_several_optimizers_and_tied_weights() -> None:
    """Each optimizer drops its gradients, before or after the steps."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.body, self.head = nn.Embedding(9, 6), nn.Linear(6, 6), nn.Linear(6, 9, bias=False)
            self.scale = nn.Parameter(torch.ones(9))
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(self.embed(ids))) * self.scale

    torch.manual_seed(1)
    first = Tied()
    first.embed.requires_grad_(False)
    ids = torch.arange(8).reshape(4, 2)

    def work(model: Tied, rows: slice, world: sw.World | None) -> list[float]:
        one = torch.optim.AdamW(model.body.parameters(), lr=0.01)
        other = torch.optim.SGD([model.scale], lr=0.1, momentum=0.9)
        engine = None if world is None else sw.shard(model, "zero3", optimizer=[one, other], world=world)
        for step in range(6):
            if step == 2:
                model.head.requires_grad_(True)
                other.add_param_group({"params": [model.head.weight]})
            if step < 4:
                model(ids[rows]).square().mean().backward()
                one.step()
                other.step()
                one.zero_grad()
                other.zero_grad()
            else:
                for optimizer in (one, other):
                    optimizer.zero_grad()
                    model(ids[rows]).square().mean().backward()
                    optimizer.step()
        found = values(model)
        if engine is not None:
            engine.close()
        return found

    expected = work(copy.deepcopy(first), slice(0, 4), None)
    models = [copy.deepcopy(first) for _ in range(2)]
    for found in run_ranks(2, lambda world: work(models[world.rank], slice(2 * world.rank, 2 * world.rank + 2), world)):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mesh", [{"dp": 1, "tp": 2}, pytest.param({"dp": 2, "tp": 2}, marks=thorough_only("4 ranks"))])
def test_split_layers(mesh: dict[str, int]) -> None:
    torch.manual_seed(2)
    first = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.Linear(8, 4))
    first[:3].requires_grad_(False)
    data = torch.randn(5, 4, 8)

    def trained(model: Any, optimizer: torch.optim.Optimizer, rows: slice) -> None:
        for step in range(5):
            if step in (2, 3):
                layer = model[2 if step == 2 else 0].requires_grad_(True)
                optimizer.add_param_group({"params": layer.parameters(), "lr": 0.02})
            one_step(model, optimizer, data[step][rows])

    plain = copy.deepcopy(first)
    trained(plain, adam_of_trained(plain), slice(0, 4))
    models = [copy.deepcopy(first) for _ in range(4)]

    def work(world: sw.World) -> dict[str, torch.Tensor]:
        model, size = models[world.rank], 4 // mesh["dp"]
        plan = {"preset": "zero3", "mesh": mesh, "tensor": {"plan": {"0": "column", "2": "row"}}}
        optimizer = adam_of_trained(model)
        with sw.shard(model, plan, optimizer=optimizer, world=world) as engine:
            place = engine.mesh.coordinate(world.rank)["dp"]
            trained(model, optimizer, slice(place * size, place * size + size))
            return engine.state_dict()

    for found in run_ranks(mesh["dp"] * mesh["tp"], work):
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def on_ranks(act: Callable[[sw.Engine, Any, torch.optim.Optimizer], Any], build: Build = momentum, **more: Any) -> Any:
    """Run `act` on ranks after a first backward."""

    def work(world: sw.World) -> Any:
        model = frozen()
        optimizer = build(model)
        with sw.shard(model, {"preset": "zero3", **more}, optimizer=optimizer, world=world) as engine:
            engine.backward(engine(batch(0)).square().mean())
            return act(engine, model, optimizer)

    return run_ranks(2, work)


# -- states that are saved and loaded ---------------------------------------------------------------------


def stepped(engine: sw.Engine, steps: range, act: Act, optimizer: torch.optim.Optimizer) -> None:
    for step in steps:
        act(step, engine.module, optimizer)
        engine.backward(engine(batch(step)).square().mean())
        engine.step()


@sampled
@pytest.mark.parametrize("how", ["resume", "load_optimizer_state_dict", "optimizer.load_state_dict"])
@pytest.mark.parametrize(("build", "act"), [(momentum, unfreeze), (adam_of_trained, unfreeze_and_add)])
def test_states_are_loaded_after_unfreezing_and_before_a_forward(
    how: str, build: Build, act: Act, tmp_path: Path
) -> None:
    def work(world: sw.World) -> tuple[list[float], list[float]]:
        model = frozen()
        optimizer = build(model)
        with sw.shard(model, "zero2", optimizer=optimizer, world=world) as engine:
            stepped(engine, range(4), act, optimizer)
            engine.save(tmp_path)
            weights, states = engine.state_dict(), engine.optimizer_state_dict()
            stepped(engine, range(4, 6), lambda *_: None, optimizer)
            whole = values(model)
        model = frozen()
        optimizer = build(model)
        with sw.shard(model, "zero3", optimizer=optimizer, world=world) as engine:
            act(2, model, optimizer)
            if how == "resume":
                assert engine.resume(tmp_path) is not None
            else:
                engine.load_state_dict(weights)
                (engine.load_optimizer_state_dict if how.startswith("load") else optimizer.load_state_dict)(states)
            stepped(engine, range(4, 6), lambda *_: None, optimizer)
            return whole, values(model)

    for whole, resumed in run_ranks(2, work):
        assert resumed == pytest.approx(whole, abs=1e-6)


def test_what_was_saved_before_unfreezing_is_loaded_after_it(tmp_path: Path) -> None:
    """The states of parameters that were frozen then start anew."""

    def act(engine: sw.Engine, model: Any, optimizer: torch.optim.Optimizer) -> Any:
        engine.step()
        engine.save(tmp_path)
        runs = []
        for _ in range(2):
            model[:2].requires_grad_(False)
            stepped(engine, range(1, 5), unfreeze, optimizer)
            runs.append(values(model))
            engine.resume(tmp_path)
        return runs

    for first, again in on_ranks(act):
        assert again == pytest.approx(first, abs=1e-6)


def test_states_that_were_not_read_are_missed_when_they_matter(tmp_path: Path) -> None:
    def act(engine: sw.Engine, model: Any, optimizer: torch.optim.Optimizer) -> None:
        engine.step()
        stepped(engine, range(2, 4), unfreeze, optimizer)
        engine.save(tmp_path)
        states = engine.optimizer_state_dict()
        for load in (lambda one: one.resume(tmp_path), lambda one: one.load_optimizer_state_dict(states)):
            other = frozen()
            with sw.shard(other, "zero3", optimizer=momentum(other), world=engine.world) as again:
                load(again)
                again.backward(again(batch(4)).square().mean())
                again.step()
                other[1].requires_grad_(True)
                with pytest.raises(StateError, match=r"states of 1\.0\.bias and 1 more .* Unfreeze it before you load"):
                    again(batch(5))
                with pytest.raises(StateError, match="Unfreeze it before you load"):
                    again.reshard("zero2")
                load(again)  # memory is planned before
                again.backward(again(batch(5)).square().mean())
                again.step()

    on_ranks(act)


def test_a_checkpoint_between_the_micro_batches_of_a_step(tmp_path: Path) -> None:
    """It has no gradients: a resumed run begins the step again, and the saving run is not affected."""

    def act(engine: sw.Engine, model: Any, optimizer: torch.optim.Optimizer) -> Any:
        with pytest.raises(StateError, match="Gradients are waiting"):
            engine.save(tmp_path)
        engine.save(tmp_path, without_gradients=True)
        engine.step()
        stepped(engine, range(1, 3), unfreeze, optimizer)
        first = values(model)
        engine.resume(tmp_path)
        stepped(engine, range(3), lambda *_: None, optimizer)
        return first, values(model)

    model = built()
    plain = momentum(model)
    for step in range(3):
        model[:2].requires_grad_(False)
        unfreeze(step, model, plain)
        one_step(model, plain, batch(step))
    for first, again in on_ranks(act):
        assert first == pytest.approx(values(model), abs=1e-6)
        assert len(again) == len(first)


def test_groups_are_in_what_is_saved_before_they_have_memory() -> None:
    def act(engine: sw.Engine, model: Any, optimizer: torch.optim.Optimizer) -> Any:
        engine.step()
        unfreeze_and_add(2, model, optimizer)
        return optimizer.state_dict(), engine.optimizer_state_dict()

    for states in on_ranks(act, adam_of_trained):
        for state in states:
            assert [group["params"] for group in state["param_groups"]] == [[0, 1, 2, 3], [4, 5]]
            assert sorted(state["state"]) == [0, 1, 2, 3]


def test_a_budget_is_fitted_again() -> None:
    def act(engine: sw.Engine, model: Any, optimizer: torch.optim.Optimizer) -> Any:
        engine.step()
        before = engine.plan.offload.optim
        model.requires_grad_(True)
        stepped(engine, range(1, 3), lambda *_: None, optimizer)
        return before, engine.plan.offload.optim

    for before, after in on_ranks(act, momentum, preset="zero1", budget={"device": 1800}):
        assert before == 0 < after


# -- what is refused --------------------------------------------------------------------------------------


def test_where_gradients_wait_it_is_refused() -> None:
    def act(engine: sw.Engine, model: Any, optimizer: torch.optim.Optimizer) -> None:
        model[0].requires_grad_(True)
        with pytest.raises(StateError, match=r"0\.0\.bias and 1 more was frozen .* unfreeze after a step"):
            engine(batch(1))
        engine.step()
        engine.backward(engine(batch(1)).square().mean())
        engine.step()

    on_ranks(act)


def test_a_loop_that_adds_to_gradients_is_stopped() -> None:
    def act(engine: sw.Engine, model: Any, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        model[0].requires_grad_(True)
        engine.backward(engine(batch(1)).square().mean())
        with pytest.raises(StateError, match=r"call zero_grad\(\) before you unfreeze"):
            optimizer.step()

    on_ranks(act)


def test_groups_that_cannot_be_added() -> None:
    def act(engine: sw.Engine, model: Any, optimizer: torch.optim.Optimizer) -> None:
        groups = copy.copy(optimizer.param_groups)
        with pytest.raises(ModelError, match=r"with lr=0\.5 .* shape \[3\] is not one of the model's"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "lr": 0.5})
        with pytest.raises(ValueError, match="more than one parameter group"):
            optimizer.add_param_group({"params": model[0].parameters()})
        assert optimizer.param_groups == groups
        engine.step()

    on_ranks(act)


def test_ranks_that_disagree() -> None:
    def work(world: sw.World, blocks: tuple[int | None, int | None]) -> None:
        model = frozen()
        with sw.shard(model, "zero3", optimizer=momentum(model), world=world) as engine:
            engine.backward(engine(batch(0)).square().mean())
            engine.step()
            block = blocks[world.rank]
            if block is not None:
                model[block].requires_grad_(True)
            engine.backward(engine(batch(1)).square().mean())

    with pytest.raises(
        StateError, match=r"0\.0\.bias was unfrozen, .* on rank 0 and not on rank 1\. Do so on all ranks"
    ):
        run_ranks(2, lambda world: work(world, (0, 1)))
    with pytest.raises(FaultError, match="contradict each other"):
        run_ranks(2, lambda world: work(world, (0, None)))


def test_other_refusals(tmp_path: Path) -> None:
    def act(engine: sw.Engine, model: Any, optimizer: torch.optim.Optimizer) -> None:
        engine.step()
        engine.save(tmp_path)
        unfreeze_and_add(2, model, optimizer)
        with pytest.raises(
            StateError, match=r"1\.0\.bias and 1 more was frozen .* The next call of the model makes it"
        ):
            sum(param.square().sum() for param in model.parameters())  # the loop's own term, before any forward
        engine(batch(1))
        with pytest.raises(CheckpointError, match=r"has 1 parameter groups, this one has 2\. Give it the same groups"):
            engine.resume(tmp_path)
        optimizer.param_groups = optimizer.param_groups[:1]
        with pytest.raises(StateError, match=r"param_groups was replaced .* Add groups by optimizer\.add_param_group"):
            optimizer.state_dict()

    on_ranks(act, adam_of_trained)


def test_a_pipeline() -> None:
    def work(world: sw.World) -> None:
        model = built()
        for block in (0, 2):  # in both stages
            model[block].requires_grad_(False)
        plan = {"preset": "ddp", "mesh": {"pp": 2}, "accumulate": 2}
        with sw.shard(model, plan, optimizer=momentum(model), world=world) as engine:
            engine.train_step(batch(0), loss_fn=lambda output: output.square().mean())
            model.requires_grad_(True)
            with pytest.raises(
                StateError, match=r"into pipeline stages has no memory .* whatever will be, and freeze it afterwards"
            ):
                engine.train_step(batch(1), loss_fn=lambda output: output.square().mean())

    run_ranks(2, work)
