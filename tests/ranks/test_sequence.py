"""Training with sequences split over ranks equals training with whole ones: every preset, also beside data axes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from allocations import Allocations
from fake_devices import Devices
from sequences import Batch, assert_trains_as_whole, batches, mean_loss, split_run, whole_run
from twins import MakeOptimizer, adamw, assert_alike, chunked

import shardwise as sw
from shardwise.optim import Muon
from shardwise.plan.placement import PRESETS
from shardwise.testing import run_ranks
from tests.models import Gpt
from tests.thorough import sampled, thorough_only

pytestmark = sampled

ONE_AXIS = sorted(name for name, one in PRESETS.items() if len(one.axes) == 1 and one.optim.tier != "disk")
SPLIT = {"sp": 2}
BOTH = {"dp": 2, "sp": 2}


def gpt(**how: Any) -> Gpt:
    torch.manual_seed(0)
    return Gpt(**how)


@pytest.mark.parametrize(("mesh", "attention"), [(SPLIT, "ulysses"), (SPLIT, "ring"), (BOTH, "ring")])
@pytest.mark.parametrize("preset", ONE_AXIS)
def test_every_preset_trains_as_the_whole_model(preset: str, mesh: dict[str, int], attention: str) -> None:
    model, data = gpt(), batches(3)
    assert_trains_as_whole(model, data, preset, mesh, sequence={"attention": attention})


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize("preset", ["hsdp", "hpz"])
def test_beside_two_data_axes(preset: str) -> None:
    model, data = gpt(), batches(2)
    assert_trains_as_whole(model, data, preset, {"node": 2, "local": 2, "sp": 2})


@pytest.mark.parametrize("attention", ["ulysses", "ring"])
def test_by_messages_and_with_sp_outermost(attention: str) -> None:
    model, data = gpt(), batches(2)
    mesh, plan = {"sp": 2, "dp": 2}, {"attention": attention}
    assert_trains_as_whole(model, data, "zero3", mesh, sequence=plan, shares_memory=False)


@pytest.mark.parametrize(
    ("preset", "attention", "reentrant"),
    [("zero1", "ring", False), ("zero2", "ulysses", False), ("zero3", "ring", True), ("zero3", "ulysses", True)],
)
def test_with_recomputing_accumulation_and_clipping(preset: str, attention: str, reentrant: bool) -> None:
    model, data = gpt(recomputes=True, reentrant=reentrant), batches(2, rows=8)
    run = split_run(model, data, preset, BOTH, sequence={"attention": attention}, accumulate=2, clip_grad_norm=0.5)
    twin = whole_run(model, data, shares=2, clip=0.5)
    assert min(twin.norms) > 0.5
    assert_alike(run, twin)


@sampled
@pytest.mark.parametrize("attention", ["ring", "ulysses"])
def test_four_ranks_share_in_one_sequence(attention: str) -> None:
    model, data = gpt(), batches(2, rows=1)
    assert_trains_as_whole(model, data, "zero3", {"sp": 4}, sequence={"attention": attention})


@pytest.mark.parametrize("attention", ["ulysses", "ring"])
def test_on_devices(attention: str) -> None:
    model, data = gpt(), batches(2)
    assert_trains_as_whole(model, data, "zero3", SPLIT, sequence={"attention": attention}, run=Devices("late").run)


def muon(model: torch.nn.Module) -> torch.optim.Optimizer:
    matrices = [param for param in model.blocks.parameters() if param.dim() == 2]
    others = [param for param in model.parameters() if all(param is not matrix for matrix in matrices)]
    return Muon([{"params": matrices}, {"params": others, "use_muon": False}], lr=1e-3, iterate_in="fp32")


def lamb(model: torch.nn.Module) -> torch.optim.Optimizer:
    return sw.optim.Lamb(model.parameters(), lr=1e-2, eps=1e-5)


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize("make_optimizer", [muon, lamb])
def test_optimizers_that_look_at_whole_parameters(make_optimizer: MakeOptimizer) -> None:
    """Results equal those over data axes alone."""
    model, data = gpt(), batches(2)
    alone = split_run(model, data, "zero3", {"dp": 1}, make_optimizer=make_optimizer)
    assert_alike(split_run(model, data, "zero3", BOTH, make_optimizer=make_optimizer), alone, tolerance=5e-5)


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize(
    "plan",
    [{"resident_below": 100}, {"rules": {"norms": {"classes": ["LayerNorm"], "rows": {"param": {"shard": []}}}}}],
)
def test_with_other_rows_for_some_parameters(plan: dict[str, Any]) -> None:
    model, data = gpt(), batches(2)
    assert_trains_as_whole(model, data, "zero3-kept", BOTH, **plan)


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize("attention", ["ulysses", "ring"])
def test_in_bf16(attention: str) -> None:
    """The difference from fp32 is about as large as for bf16 on one rank."""
    model, data = gpt(), batches(3)
    wide, one = whole_run(model, data), split_run(model, data, "zero2", {"dp": 1}, precision="bf16")
    run = split_run(model, data, "zero2", BOTH, precision="bf16", sequence={"attention": attention})
    for name in ("losses", "norms"):
        narrow, exact, mine = (torch.tensor(getattr(each, name)) for each in (one, wide, run))
        assert (mine - narrow).abs().max() <= 3 * (narrow - exact).abs().max() + 1e-3
    for name, exact in wide.grads[0].items():
        apart = (one.grads[0][name] - exact).norm()
        assert (run.grads[0][name] - exact).norm() <= 2 * apart + 1e-4, name


def trained(engine: sw.Engine, data: list[Batch]) -> list[float]:
    share, num_shares = engine.data_ranks
    losses = []
    for batch in data:
        loss = mean_loss(engine, engine.split_sequence(chunked(batch, num_shares)[share]))
        engine.backward(loss)
        engine.step()
        losses.append(engine.mean(loss.item()))
    return losses


@thorough_only("slow; smaller tests beside it cover the same code")
def test_checkpoints_move_between_meshes(tmp_path: Path) -> None:
    """One run on meshes that split sequences over four, two and one ranks, with and without data parallelism."""
    model, data = gpt(), batches(8)
    expected = whole_run(model, data).losses
    legs: list[tuple[str, dict[str, int]]] = [("zero3", BOTH), ("zero1", SPLIT), ("hsdp", {"node": 1, "local": 1})]
    losses: list[float] = []
    for leg, (preset, mesh) in enumerate([*legs, ("zero2", {"sp": 4})]):
        replicas = [copy.deepcopy(model) for _ in range(4)]

        def rank(world: sw.World, leg: int = leg, plan: Any = {"preset": preset, "mesh": mesh}) -> list[float]:  # noqa: B006
            replica = replicas[world.rank]  # noqa: B023
            with sw.shard(replica, plan, optimizer=adamw(replica), world=world) as engine:
                assert (engine.resume(tmp_path) is None) == (leg == 0)
                done = trained(engine, data[2 * leg : 2 * leg + 2])
                engine.save(tmp_path)
                return done

        num_ranks = int(torch.tensor(list(mesh.values())).prod())
        losses += run_ranks(num_ranks, rank)[0]
    assert losses == pytest.approx(expected, rel=1e-5)


class Limited(Allocations):
    """A limit for the bytes that a step on this rank may allocate."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__()
        self.limit_bytes = limit_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.peak_bytes > self.limit_bytes:
            raise MemoryError(f"{self.peak_bytes} bytes, of {self.limit_bytes}")
        return result


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize("attention", ["ulysses", "ring"])
def test_a_sequence_that_does_not_fit_one_rank_trains_over_four(attention: str) -> None:
    """The limit is two fifths of what a step allocates on one rank, as counted in torch."""
    num_tokens = 2048
    model = Gpt(tokens=num_tokens, num_blocks=6)
    (batch,) = batches(1, rows=1, tokens=num_tokens)

    def step(world: sw.World, limit_bytes: int, plan: Any) -> tuple[float, int]:
        replica = copy.deepcopy(model)
        with sw.shard(replica, plan, optimizer=torch.optim.SGD(replica.parameters(), lr=0.1), world=world) as engine:
            with Limited(limit_bytes) as allocations:
                (loss,) = trained(engine, [batch])
            return loss, allocations.peak_bytes

    alone = {"preset": "zero3", "mesh": {"dp": 1}}
    split = {"preset": "zero3", "mesh": {"sp": 4}, "sequence": {"attention": attention}}
    ((loss, needed),) = run_ranks(1, lambda world: step(world, 2**60, alone))
    limit = needed * 2 // 5
    with pytest.raises(MemoryError):
        run_ranks(1, lambda world: step(world, limit, alone))
    for other, peak in run_ranks(4, lambda world: step(world, limit, split)):
        assert other == pytest.approx(loss, rel=1e-5)
        assert peak <= limit
