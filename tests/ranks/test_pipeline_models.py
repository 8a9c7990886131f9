"""What pipelines support: kinds of models, losses, precisions, frozen parts, recomputation."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from pipelined import batches
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from twins import Run, assert_alike, normal_batches, plain_run, work_on_ranks

import shardwise as sw
from shardwise.parallel.pipeline.staged_model import _same_hooks, _Slot
from shardwise.parallel.pipeline.weight_grads import WeightGrads, backward_of_weights
from shardwise.testing import run_ranks
from tests.models import VOCAB, WIDTH, Block, Decoder
from tests.thorough import sampled, thorough_only

pytestmark = sampled

Tensor = torch.Tensor
NUM_STEPS = 3


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.5)


def run(model: nn.Module, data: Any, *, loss_fn: Any = None, num_ranks: int = 2, **plan: Any) -> list[Run]:
    """Take steps on `data`, whose items are (batch, target)."""

    def work(engine: sw.Engine) -> Run:
        found = Run()
        for batch, target in data:
            found.losses.append(engine.train_step(batch, target, loss_fn=loss_fn).item())
            found.norms.append(float(engine.gradient_norm or 0.0))
        found.params, found.extra = engine.state_dict(), engine.num_steps
        return found

    full = {"preset": "zero1", "mesh": {"pp": num_ranks}, "accumulate": 4, **plan}
    return work_on_ranks(num_ranks, work, full, model, sgd)


def twin_of(model: nn.Module, data: Any, *, loss_fn: Any = None) -> Run:
    def forward(model: nn.Module, item: tuple[Any, Any]) -> Tensor:
        batch, target = item
        output = (
            model(**batch) if isinstance(batch, dict) else model(*batch) if isinstance(batch, tuple) else model(batch)
        )
        return output if loss_fn is None else loss_fn(output, target)

    return plain_run(model, data, sgd, forward=forward, whole_state=True)


def assert_equal(runs: list[Run], twin: Run, tolerance: float = 1e-5) -> None:
    for one in runs:
        assert list(one.params) == list(twin.params)
        assert_alike(one, twin, tolerance, of_all=False)


def regression(num_steps: int = NUM_STEPS) -> list[tuple[Tensor, Tensor]]:
    return normal_batches(num_steps, (8, 8), (8, 4), seed=3)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_plain_sequential_with_a_loss_of_its_own(num_ranks: int) -> None:
    """A cut may be at modules without parameters. These belong to the stage that runs them."""
    model = nn.Sequential(
        nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 12), nn.Tanh(), nn.LayerNorm(12), nn.Linear(12, 4), nn.Tanh()
    )
    data = regression()
    assert_equal(run(model, data, loss_fn=F.mse_loss, num_ranks=num_ranks), twin_of(model, data, loss_fn=F.mse_loss))


class TwoHeads(nn.Module):
    """Modules outside of any list, called in an order of their own, with keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(12, 4)
        self.first = nn.Linear(8, 16)
        self.middle = nn.Linear(16, 12)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.last(torch.tanh(self.middle(input=torch.tanh(self.first(x) * scale))))


def test_stages_that_the_plan_lists_in_the_order_of_the_forward() -> None:
    model = TwoHeads()
    data = [({"x": x, "scale": 2.0}, y) for x, y in regression()]
    runs = run(model, data, loss_fn=F.mse_loss, pipeline={"stages": [["first"], ["middle", "last"]]})
    assert_equal(runs, twin_of(model, data, loss_fn=F.mse_loss))


@pytest.mark.parametrize("frozen", ["tokens", "blocks", "head"])
@pytest.mark.parametrize(("preset", "schedule"), [("ddp", "1f1b"), ("zero3", "gpipe"), ("zero2", "zb-h1")])
def test_frozen_parts(frozen: str, preset: str, schedule: str) -> None:
    """A stage with nothing to train takes part as well."""
    model = Decoder(num_blocks=2)
    for name, param in model.named_parameters():
        param.requires_grad = not name.startswith(frozen)
    if frozen == "tokens":
        for param in model.blocks[0].parameters():
            param.requires_grad = False
    data = [(batch, None) for batch in batches(NUM_STEPS, 8)]
    stages = [["tokens", "blocks.0"], ["blocks.1", "norm", "head"]]
    assert_equal(
        run(model, data, preset=preset, pipeline={"stages": stages, "schedule": schedule}), twin_of(model, data)
    )


class Recomputed(Block):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


@pytest.mark.parametrize("preset", ["zero1", "zero3"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1"])
def test_recomputed_blocks(preset: str, schedule: str) -> None:
    model = Decoder(num_blocks=3)
    model.blocks = nn.ModuleList(Recomputed(WIDTH) for _ in range(3))
    data = [(batch, None) for batch in batches(NUM_STEPS, 8)]
    assert_equal(run(model, data, preset=preset, pipeline={"schedule": schedule}), twin_of(model, data))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 3e-2), ("fp16", 5e-3)])
def test_narrow_precisions(precision: str, tolerance: float, schedule: str) -> None:
    model = Decoder(tied=True)
    data = [(batch, None) for batch in batches(NUM_STEPS, 8)]
    twin = twin_of(model, data)
    for one in run(model, data, precision=precision, preset="zero3", pipeline={"schedule": schedule}):
        assert one.losses == pytest.approx(twin.losses, rel=tolerance)
        assert one.norms == pytest.approx(twin.norms, rel=tolerance)


def test_gradients_of_weights_wait_for_the_second_half_of_a_backward() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2, bias=False))
    twin = copy.deepcopy(model)
    x = torch.randn(3, 5, 4, requires_grad=True)
    plain = x.detach().clone().requires_grad_()
    twin(plain).square().sum().backward()
    weights = WeightGrads([model])
    weights.attach()
    with weights.put_aside() as aside:
        model(x).square().sum().backward()
    torch.testing.assert_close(x.grad, plain.grad)
    assert [param.grad is None for param in model.parameters()] == [True, True, False, False, True]
    backward_of_weights(aside)
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(param.grad, other.grad)
    model.zero_grad()
    model(x).square().sum().backward()  # outside of `put_aside` it is a whole backward
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(param.grad, other.grad)
    weights.release()
    assert "forward" not in model[0].__dict__


def test_an_overflow_on_one_stage_is_no_step_on_any() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    (x, y), *_ = regression(1)
    runs = run(
        model,
        [(x, y), (x * 1e-3, y * 1e6), (x, y)],
        loss_fn=lambda found, wanted: F.mse_loss(found.float(), wanted),
        precision="fp16",
        loss_scale={"initial": 2.0**10, "hysteresis": 1},
    )
    assert {one.extra for one in runs} == {2}
    assert all(torch.equal(one.params[name], runs[0].params[name]) for one in runs for name in one.params)


def test_buffers_of_a_stage_are_kept_the_same_along_data_axes_and_saved_once(tmp_path: Any) -> None:
    model = nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4)
    )
    (x, y), (other_x, other_y) = regression(2)

    def rank(world: sw.World, mine: nn.Module) -> dict[str, Tensor]:
        plan = {"preset": "zero1", "mesh": {"pp": 2, "dp": 2}, "accumulate": 2}
        with sw.shard(mine, plan, optimizer=torch.optim.SGD(mine.parameters(), lr=0.1), world=world) as engine:
            place = engine.mesh.coordinate(world.rank)["dp"]
            engine.train_step((x, other_x)[place], (y, other_y)[place], loss_fn=F.mse_loss)
            engine.save(tmp_path)
            return engine.state_dict()

    models = [copy.deepcopy(model) for _ in range(4)]
    told = run_ranks(4, lambda world: rank(world, models[world.rank]))
    plain = copy.deepcopy(model)
    for part in x.chunk(2):  # running statistics are those of the first rank's batches
        plain(part)
    for one in told:
        for name in ("1.running_mean", "1.num_batches_tracked", "3.running_var"):
            torch.testing.assert_close(one[name], plain.state_dict()[name], rtol=1e-5, atol=1e-6)
    alone = copy.deepcopy(model)
    with sw.shard(alone, "ddp", optimizer=torch.optim.SGD(alone.parameters(), lr=0.1), world=sw.World.join()) as engine:
        engine.resume(tmp_path)
        assert all(torch.equal(value, told[0][name]) for name, value in engine.state_dict().items())


@thorough_only("slow; smaller tests beside it cover the same code")
def test_first_values_are_those_of_rank_0_whoever_has_the_stage() -> None:
    models = [Decoder(tied=True) for _ in range(3)]
    expected = {name: value.clone() for name, value in models[0].state_dict().items()}

    def rank(world: sw.World) -> dict[str, Tensor]:
        with sw.shard(
            models[world.rank], {"preset": "zero3", "mesh": {"pp": 3}, "accumulate": 3}, world=world
        ) as engine:
            return engine.state_dict()

    for state in run_ranks(3, rank):
        assert list(state) == list(expected)
        assert all(torch.equal(state[name], value) for name, value in expected.items())


def test_a_deferred_model_makes_its_own_stages_alone() -> None:
    torch.manual_seed(5)
    plain = Decoder()
    models = []
    for _ in range(2):
        torch.manual_seed(5)
        with sw.deferred_init():
            models.append(Decoder())

    def rank(world: sw.World) -> tuple[dict[str, Tensor], int]:
        with sw.shard(
            models[world.rank], {"preset": "zero1", "mesh": {"pp": 2}, "accumulate": 2}, world=world
        ) as engine:
            own = sum(param.numel() for param in models[world.rank].parameters())
            return engine.state_dict(), own

    told = run_ranks(2, rank)
    assert sum(own for _, own in told) == sum(param.numel() for param in plain.parameters())
    for state, _ in told:
        assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())


def test_whole_tensors_are_read_and_written_on_whichever_stage_they_are() -> None:
    model = Decoder(tied=True)
    plan = {"preset": "zero2", "mesh": {"pp": 2}, "accumulate": 2}

    def work(engine: sw.Engine) -> None:
        for name, value in model.named_parameters():
            assert torch.equal(engine.get(name), value)
            assert engine.get(name, "exp_avg") is None
        new = torch.arange(VOCAB * WIDTH).reshape(VOCAB, WIDTH) / 1000
        engine.set("tokens.weight", new)
        assert torch.equal(engine.get("tokens.weight"), new)
        assert torch.equal(engine.state_dict()["head.weight"], new)
        engine.train_step(batches(1, 4)[0])
        moment = engine.get("blocks.3.up.weight", "exp_avg")
        assert moment is not None
        assert moment.abs().sum() > 0
        with pytest.raises(sw.errors.ModelError, match=r"no parameter 'blocks\.9\.up\.weight'"):
            engine.get("blocks.9.up.weight")

    work_on_ranks(2, work, plan, model)


@thorough_only("slow; smaller tests beside it cover the same code")
def test_presets_of_two_axes_inside_of_stages() -> None:
    model = Decoder(num_blocks=2)
    data = [(batch, None) for batch in batches(NUM_STEPS, 8)]
    twin = twin_of(model, data)
    for preset in ("hsdp", "hpz"):
        models = [copy.deepcopy(model) for _ in range(8)]

        def rank(world: sw.World) -> list[float]:
            mine = models[world.rank]  # noqa: B023
            plan = {"preset": preset, "mesh": {"pp": 2, "node": 2, "local": 2}, "accumulate": 2}  # noqa: B023
            with sw.shard(mine, plan, optimizer=torch.optim.SGD(mine.parameters(), lr=0.5), world=world) as engine:
                place = world.rank % 4
                return [
                    engine.mean(engine.train_step(tuple(one.chunk(4)[place] for one in batch)).item())
                    for batch, _ in data
                ]

        for losses in run_ranks(8, rank):
            assert losses == pytest.approx(twin.losses, rel=1e-5)


def test_a_hook_that_takes_another_ones_place_is_registered_on_both() -> None:
    """On a module and on what stands for it: their number stays the same then."""
    own: Any = nn.Identity()
    absent: Any = nn.Identity()
    called = []
    before = own.register_forward_hook(lambda *_: called.append("before"))
    with _same_hooks([_Slot("block", {}, "block", own, None, absent)]):
        before.remove()
        own.register_forward_hook(lambda *_: called.append("after"))
    own(torch.ones(1))
    absent(torch.ones(1))
    assert called == ["after", "after"]
