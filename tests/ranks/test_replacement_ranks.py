"""Replacements of dead ranks: from then on they and the others take the same steps, wherever the others were when a
rank died."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.checkpoint import Held
from shardwise.comm import World
from shardwise.elastic import recovery
from shardwise.elastic.stage_buffers import RanksBuffers
from shardwise.errors import FaultError, StateError
from shardwise.observe import read_record
from shardwise.optim.precision import auto_precision
from shardwise.plan import Plan
from shardwise.sharded.sharded_model import ShardedModel
from shardwise.sharded.state import Former
from shardwise.system.job_folder import RECORD_PATH
from tests.ranks.lost_groups import DiesBefore
from tests.ranks.test_foreign_optimizers import fading
from tests.ranks.test_lost_ranks import (
    NUM_RANKS,
    NUM_STEPS,
    ROWS,
    DiesAt,
    Net,
    adamw,
    assert_same_values,
    batches,
    loss_of,
    trained_alone,
)
from tests.ranks.threads_as_members import Killed, run_members
from tests.ranks.twins import rounded_by
from tests.thorough import drawn, sampled, thorough_only, varies

Point = Callable[[sw.Engine, int, int, str], None]


def nothing(engine: sw.Engine, member: int, step: int, point: str) -> None:
    pass


def take_steps(engine: sw.Engine, member: int, at: Point) -> tuple[dict[int, float], list[int]]:
    """The mean losses, by step, and the sizes of the worlds in which the steps were taken."""
    found: dict[int, float] = {}
    sizes: list[int] = []
    while engine.num_steps < NUM_STEPS:
        step = engine.num_steps
        at(engine, member, step, "begin")
        assert not engine.any_rank(False)
        x, y = (whole.tensor_split(engine.data_ranks[1])[engine.data_ranks[0]] for whole in batches()[step])
        engine.weigh(len(x), ROWS)
        loss = loss_of(engine.module(x), y)
        at(engine, member, step, "forward")
        mean = engine.mean(loss.item())
        at(engine, member, step, "backward")
        engine.backward(loss)
        at(engine, member, step, "step")
        engine.step()
        size = engine.world.size
        at(engine, member, step, "log")
        engine.log({"loss": loss.item()})
        at(engine, member, step, "save")
        if engine.num_steps > step:
            found[step] = mean
            sizes.append(size)
    return found, sizes


def trained(
    folder: Path,
    *,
    plan: dict[str, Any],
    deaths: dict[int, int] | None = None,
    at: Point = nothing,
    num_newcomers: int = 1,
    least: int = 1,
    most_wrong: int = 0,
    bound: float = 2e-6,
    before: Callable[[World], object] = lambda _: None,
) -> list[list[int]]:
    """A loop that communicates at every possible point, and does something `before` it makes its engine. Returns the
    world sizes of the steps of each surviving rank."""
    images, run = folder / "images", folder / "run"
    images.mkdir()
    model = Net()
    models = [copy.deepcopy(model) for _ in range(NUM_RANKS + num_newcomers)]
    losses, plain = trained_alone(model, adamw, clip=None, scheduled=False)
    batch = batches()[0][0].tensor_split(NUM_RANKS)[0]

    def work(world: World, member: int) -> tuple[dict[int, float], dict[str, Any], list[int]]:
        own = models[member]
        try:
            before(world)
            engine = sw.shard(own, {**plan, "run": str(run)}, optimizer=adamw(own), world=world, batch=batch)
        except FaultError as error:  # a rank that joins while another dies may end; the others continue
            raise Killed if member >= NUM_RANKS else error from None
        engine.log({"loss": 0.0}, kind="validation")
        engine.world.barrier()
        DiesAt(deaths or {})(engine, member)
        found, sizes = take_steps(engine, member, at)
        state = engine.state_dict()
        engine.close()
        return found, state, sizes

    results = run_members(NUM_RANKS, work, images, num_newcomers=num_newcomers, least=least)
    assert results
    if "wire" in plan:
        sizes = max((sizes for *_, sizes in results.values()), key=len)
        losses, plain = trained_with_codes(model, sizes, sends_frozen=plan["preset"] == "zero3")
    for found, state, _ in results.values():
        wrong = [step for step, loss in found.items() if loss != pytest.approx(losses[step], rel=1e-5)]
        assert len(wrong) <= most_wrong
        assert_same_values(state, plain, bound=bound)
    steps = [line["step"] for line in read_record(run / "record.jsonl").lines if line["kind"] == "step"]
    assert steps == list(range(1, NUM_STEPS + 1))
    assert [path.name for path in images.iterdir()] == [RECORD_PATH]
    return [sizes for _, _, sizes in results.values()]


def trained_with_codes(model: nn.Module, sizes: Sequence[int], *, sends_frozen: bool) -> tuple[list[float], nn.Module]:
    """Alone, with parameters rounded to 8 bits, and each rank's gradients, of which there are as many as the steps'
    worlds have."""
    plain, rounded, losses = copy.deepcopy(model), rounded_by({"dtype": "int8", "block": 256}), []
    optimizer = adamw(plain)
    for (x, y), size in zip(batches(), sizes, strict=True):
        computed, of_step = copy.deepcopy(plain), 0.0
        with torch.no_grad():
            for param in computed.parameters():
                is_coded = param.dim() > 1 and (param.requires_grad or sends_frozen)
                param.copy_(rounded(param) if is_coded else param)
        optimizer.zero_grad()
        for own_x, own_y in zip(x.tensor_split(size), y.tensor_split(size), strict=True):
            computed.zero_grad()
            loss, share = loss_of(computed(own_x), own_y), len(own_x) / ROWS
            loss.backward()  # type: ignore[no-untyped-call]  # torch's own
            of_step += loss.item() * share
            for master, param in zip(plain.parameters(), computed.parameters(), strict=True):
                if param.grad is not None:
                    sent = rounded(param.grad * share) if param.dim() > 1 else param.grad * share
                    master.grad = sent if master.grad is None else master.grad + sent
        plain.count += 1
        optimizer.step()
        losses.append(of_step)
    return losses, plain


def die_in_the_third_step(engine: sw.Engine, member: int, step: int, now: str) -> None:
    if (member, step, now) == (1, 2, "backward"):
        raise Killed


def test_one_that_comes_waits_for_nobody_before_it_makes_its_engine(tmp_path: Path) -> None:
    """A script that prepares something, such as files that its first rank writes."""

    def prepare(world: World) -> None:
        world.barrier()
        assert not world.any_rank(False)
        assert world.mean(2.0) == 2.0
        sw.load_for_inference(model=nn.Linear(2, 2), world=world)  # to compare with, such as a model before it is tuned

    sizes = trained(tmp_path, plan={"preset": "zero3"}, at=die_in_the_third_step, before=prepare)
    assert {size for found in sizes for size in found} == {NUM_RANKS}


def test_one_that_comes_and_waits_for_others_all_the_same_ends_alone(tmp_path: Path) -> None:
    """They would not call that: it contradicts them, and none of them is at fault."""

    def prepare(world: World) -> None:
        if world.is_newcomer:
            world.exchange(b"", "what others do not ask")

    sizes = trained(tmp_path, plan={"preset": "zero3"}, at=die_in_the_third_step, before=prepare)
    assert {size for found in sizes for size in found} == {NUM_RANKS, NUM_RANKS - 1}


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize("num_newcomers", [0, 1])
@pytest.mark.parametrize("preset", ["zero1", "zero2", "zero3"])
def test_codes_after_a_death_are_those_of_the_ranks_there_are(preset: str, num_newcomers: int, tmp_path: Path) -> None:
    """Of parameters the same, though shards begin elsewhere; of gradients one for each rank, also for one that has come
    in the place of the dead one."""

    def at(engine: sw.Engine, member: int, step: int, now: str) -> None:
        if (member, step, now) == (1, 2, "backward"):
            raise Killed

    plan = {"preset": preset, "wire": {"param": "int8", "grad": "int8"}}
    sizes = trained(tmp_path, plan=plan, at=at, num_newcomers=num_newcomers, most_wrong=1 - num_newcomers, bound=1e-5)
    assert {size for found in sizes for size in found} == ({NUM_RANKS} if num_newcomers else {NUM_RANKS, NUM_RANKS - 1})


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("point", ["begin", "forward", "backward", "step", "log", "save"])
def test_one_that_comes_with_a_death_comes_where_the_others_begin(point: str, tmp_path: Path) -> None:
    def at(engine: sw.Engine, member: int, step: int, now: str) -> None:
        if (member, step, now) == (1, 2, point):
            raise Killed

    sizes = trained(tmp_path, plan={"preset": "zero2"}, at=at)
    assert len(sizes) == NUM_RANKS
    assert all(found == [NUM_RANKS] * len(found) for found in sizes), "it waited already: no step without it"
    assert sorted(map(len, sizes))[0] < sorted(map(len, sizes))[-1] == NUM_STEPS


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("preset", ["zero3", "ddp"])
def test_one_comes_after_a_death_while_another_was_let_in(
    preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is not sharded when the next newcomer gets the learning rates."""
    rebuilt, ranks = recovery.rebuilt, list[int]()

    def or_die(former: Former, plan: Plan, held: Held, world: World, buffers: Sequence[RanksBuffers]) -> ShardedModel:
        ranks.append(world.rank)
        if world.rank == 0 and ranks.count(0) == 2:  # in the world that has let a newcomer in
            raise Killed
        return rebuilt(former, plan, held, world, buffers)

    def at(engine: sw.Engine, member: int, step: int, now: str) -> None:
        if (member, step, now) == (1, 2, "begin"):
            monkeypatch.setattr(recovery, "rebuilt", or_die)
            raise Killed

    trained(tmp_path, plan={"preset": preset}, at=at, num_newcomers=2)
    assert ranks.count(0) >= 3


@sampled
@pytest.mark.parametrize(("point", "not_before"), [("exchange of commit", 0), ("agree * verdict *", 2)])
@pytest.mark.parametrize("counts", ["a scheduler", "the loop", "the optimizer"])
def test_a_step_before_which_one_comes_has_its_own_learning_rate(
    counts: str, point: str, not_before: int, tmp_path: Path
) -> None:
    """Not that of the step before, whose update counts, also if one died in the message that ends it; and on the one
    that comes that of the others."""

    def steps_of(model: nn.Module, optimizer: torch.optim.Optimizer, engine: sw.Engine | None) -> list[int]:
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.6)
        sizes = []
        while (step := len(sizes) if engine is None else engine.num_steps) < NUM_STEPS:
            if counts == "the loop":
                optimizer.param_groups[0]["lr"] = 0.6**step * 1e-2
            rank, num_ranks = (0, 1) if engine is None else engine.data_ranks
            x, y = (whole.tensor_split(num_ranks)[rank] for whole in batches()[step])
            if engine is not None:
                engine.weigh(len(x), ROWS)
            loss_of(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if counts == "a scheduler":
                schedule.step()
            sizes.append(num_ranks)
        return sizes

    def work(world: World, member: int) -> tuple[dict[str, Any], list[int]]:
        own, optimizer = models[member], make(models[member])
        with sw.shard(own, "zero1", optimizer=optimizer, world=world) as engine:
            dies(engine, member)
            sizes = steps_of(own, optimizer, engine)
            return engine.state_dict(), sizes

    dies = DiesBefore(1, 1, point)
    make, plain = fading if counts == "the optimizer" else adamw, Net()
    models = [copy.deepcopy(plain) for _ in range(NUM_RANKS + 1)]
    steps_of(plain, make(plain), None)
    results = run_members(NUM_RANKS, work, tmp_path, num_newcomers=1, not_before=not_before)
    assert dies.is_dead
    assert len(results) == NUM_RANKS
    for state, sizes in results.values():
        assert sizes[-1] == NUM_RANKS
        assert_same_values(state, plain, bound=2e-6)


@thorough_only("slow; smaller tests beside it cover the same code")
def test_one_that_comes_computes_in_the_precision_that_the_others_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have settled `auto`, and its own processor would choose another."""
    monkeypatch.setattr(auto_precision, "bf16_ratio", lambda: 45.0)

    def at(engine: sw.Engine, member: int, step: int, now: str) -> None:
        assert (engine.plan.precision, engine.table.compute) == ("fp32", "fp32")
        if (member, step, now) == (1, 2, "backward"):
            monkeypatch.setattr(auto_precision, "bf16_ratio", lambda: 0.2)
            raise Killed

    sizes = trained(tmp_path, plan={"preset": "zero2", "precision": "auto"}, at=at)
    assert [found[-1] for found in sizes] == [NUM_RANKS] * NUM_RANKS


@thorough_only("slow; smaller tests beside it cover the same code")
def test_one_that_comes_takes_the_plan_that_the_others_have_searched_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plans: dict[int, Plan] = {}

    def at(engine: sw.Engine, member: int, step: int, now: str) -> None:
        plans[member] = engine.plan
        if (member, step, now) == (1, 2, "backward"):
            raise Killed

    sizes = trained(tmp_path, plan={"preset": "auto"}, at=at)
    assert [found[-1] for found in sizes] == [NUM_RANKS] * NUM_RANKS
    assert len(plans) == NUM_RANKS + 1
    assert all(plan.preset == plans[0].preset != "auto" for plan in plans.values())
    said = [record.message for record in caplog.records if record.message.startswith("auto: ")]
    assert len(said) == 1
    assert f"it fits with 1 of {NUM_RANKS} ranks too" in said[0]


@sampled
@pytest.mark.parametrize("preset", ["offload", "zero3-offload"])
def test_one_that_comes_gets_rows_on_the_host(preset: str, tmp_path: Path) -> None:
    def at(engine: sw.Engine, member: int, step: int, now: str) -> None:
        if (member, step, now) == (1, 2, "backward"):
            raise Killed

    sizes = trained(tmp_path, plan={"preset": preset}, at=at)
    assert [found[-1] for found in sizes] == [NUM_RANKS] * NUM_RANKS


@sampled
@pytest.mark.parametrize("point", ["forward", "log"])
def test_too_few_take_no_step_until_one_has_come(point: str, tmp_path: Path) -> None:
    def at(engine: sw.Engine, member: int, step: int, now: str) -> None:
        if (member, step, now) in ((0, 2, point), (3, 3, point)):
            raise Killed

    sizes = trained(tmp_path, plan={"preset": "zero3"}, at=at, num_newcomers=2, least=NUM_RANKS)
    assert len(sizes) == NUM_RANKS
    assert {size for found in sizes for size in found} == {NUM_RANKS}


@thorough_only("slow; smaller tests beside it cover the same code")
@varies
def test_wherever_ranks_die_and_others_come(tmp_path: Path) -> None:
    for number in range(drawn(1, 12)):
        folder = tmp_path / str(number)
        folder.mkdir()
        deaths = {number % 2: 11 + 4 * number, 2: 60 - 3 * number}
        trained(folder, plan={"preset": ("zero3", "ddp")[number % 2]}, deaths=deaths, num_newcomers=2, most_wrong=2)


class LossOf(nn.Module):
    """The loss of rows that contain inputs and targets."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return loss_of(self.net(rows[:, :16]), rows[:, 16:])


@sampled
@pytest.mark.parametrize(("point", "draws"), [("begin", False), ("backward", False), ("begin", True)])
def test_loaders_hand_out_each_batch_to_all_who_are_there(point: str, draws: bool, tmp_path: Path) -> None:
    """Two iterations are void, one with the death and one with the newcomer; their batch is handed out again. With
    `draws`, `train_step` draws the micro-batches."""
    rows = torch.randn(50, 24, generator=torch.Generator().manual_seed(1))
    model, accumulate = LossOf(Net()), 2 if draws else 1
    models = [copy.deepcopy(model) for _ in range(NUM_RANKS + 1)]

    def work(world: World, member: int) -> dict[str, torch.Tensor]:
        own = models[member]
        engine = sw.shard(own, {"preset": "zero2", "accumulate": accumulate}, optimizer=adamw(own), world=world)
        with sw.data.Loader(
            rows, batch_rows=ROWS, world=engine.data_ranks, accumulate=accumulate, steps=NUM_STEPS
        ) as loader:
            batches = iter(loader)
            while engine.num_steps < NUM_STEPS:
                if (member, engine.num_steps, point) == (1, 2, "begin"):
                    raise Killed
                if draws:
                    engine.train_step(batches, loss_fn=lambda told: told)
                    continue
                loss = own(next(batches))
                if (member, engine.num_steps, point) == (1, 2, "backward"):
                    raise Killed
                engine.backward(loss)
                engine.step()
        state = engine.state_dict()
        engine.close()
        return state

    results = run_members(NUM_RANKS, work, tmp_path, num_newcomers=1)
    assert len(results) == NUM_RANKS
    plain = copy.deepcopy(model)
    optimizer = adamw(plain)
    with sw.data.Loader(rows, batch_rows=ROWS, steps=NUM_STEPS) as loader:
        for one in loader:
            loss = plain(one)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch's own
            optimizer.step()
    for state in results.values():
        for name, whole in plain.named_parameters():
            assert (state[name] - whole).abs().max() <= 2e-6 * max(1.0, whole.abs().max()), name


@sampled
@pytest.mark.parametrize("makes", ["one after another", "one for each epoch"])
def test_a_loader_that_is_made_late_goes_where_that_of_the_others_is(makes: str, tmp_path: Path) -> None:
    """A script may read others before, in an evaluation, or have dropped those of former epochs."""
    model, num_batches = Net(), NUM_STEPS if makes == "one after another" else 2
    models = [copy.deepcopy(model) for _ in range(NUM_RANKS + 1)]
    order = sw.data.Samples(shuffle=False)

    def work(world: World, member: int) -> dict[int, set[int]]:
        own = models[member]
        engine = sw.shard(own, "zero2", optimizer=adamw(own), world=world)
        if makes == "one after another":
            evaluated = sw.data.Loader(range(24), batch_rows=ROWS, world=engine.data_ranks)
            assert len(list(evaluated)) == 24 // ROWS
        given: dict[int, set[int]] = {}
        while engine.num_steps < NUM_STEPS:
            loader = sw.data.Loader(range(num_batches * ROWS), batch_rows=ROWS, world=engine.data_ranks, samples=order)
            for numbers in loader:
                if (member, engine.num_steps) == (1, 3):
                    raise Killed
                step, void = engine.num_steps, engine.num_void
                engine.train_step(torch.ones(len(numbers), 16), torch.ones(len(numbers), 8), loss_fn=loss_of)
                if engine.num_steps > step and engine.num_void == void:
                    given[step % num_batches] = given.get(step % num_batches, set()) | set(numbers.tolist())
                if engine.num_steps == NUM_STEPS:
                    break
        engine.close()
        return given

    results = run_members(NUM_RANKS, work, tmp_path, num_newcomers=1)
    assert NUM_RANKS in results
    for given in results.values():
        for number, found in given.items():
            assert found <= set(range(number * ROWS, (number + 1) * ROWS)), (number, found)


class Deeper(Net):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(8, 8)


class Wider(Net):
    def __init__(self) -> None:
        super().__init__()
        self.c, self.norm, self.d = nn.Linear(16, 64), nn.LayerNorm(64), nn.Linear(64, 8)
        self.c.weight.requires_grad_(False)


class Counting(Net):
    def __init__(self) -> None:
        super().__init__()
        self.count = torch.zeros(3)


def fewer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([param for name, param in model.named_parameters() if name.startswith("d.")], lr=1e-2)


def in_two_groups(model: nn.Module) -> torch.optim.Optimizer:
    params = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.AdamW([{"params": params[:1]}, {"params": params[1:]}], lr=1e-2)


ODD: dict[str, tuple[type[Net], Callable[[nn.Module], torch.optim.Optimizer], str]] = {
    "a layer more": (Deeper, adamw, r"parameter more\.bias is only here"),
    "wider": (Wider, adamw, r"parameter c\.bias has the shape \[64\] here and \[32\] there"),
    "a buffer": (Counting, adamw, r"buffer count has the shape \[3\] here and \[\] there"),
    "sgd": (
        Net,
        lambda model: torch.optim.SGD(model.parameters(), lr=1e-2),
        "its optimizers are SGD, and theirs AdamW",
    ),
    "fewer": (Net, fewer, r"group 0 of its AdamW and of theirs do not both have a\.bias"),
    "two groups": (Net, in_two_groups, "its AdamW has 2 groups, and theirs 1"),
    "another version": (Net, adamw, r"it has shardwise .* and torch .*, and they have shardwise 0\.0"),
}


@sampled
@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero3"])
@pytest.mark.parametrize("name", ODD)
def test_one_that_comes_with_something_else_ends_and_the_others_go_on(
    name: str, preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code, or its configuration, was changed while the others train."""
    if name == "another version":
        monkeypatch.setattr(recovery, "versions_here", lambda: "shardwise 0.0")  # what the others send
    build, make, words = ODD[name]
    losses, _ = trained_alone(model := Net(), adamw, clip=None, scheduled=False)
    said: list[str] = []

    def work(world: World, member: int) -> dict[int, float]:
        is_odd = member == NUM_RANKS
        own = build() if is_odd else copy.deepcopy(model)
        try:
            engine = sw.shard(own, preset, optimizer=(make if is_odd else adamw)(own), world=world)
        except StateError as error:
            said.append(str(error))
            raise Killed from None
        DiesAt({1: 20})(engine, member)
        found, _ = take_steps(engine, member, nothing)
        engine.close()
        return found

    results = run_members(NUM_RANKS, work, tmp_path, num_newcomers=1)
    assert sorted(results) == [0, 2, 3]
    for found in results.values():
        assert list(found) == list(range(NUM_STEPS))
        assert list(found.values()) == pytest.approx(losses, rel=1e-5)
    (text,) = said
    assert re.search(words, text), text
    assert "They go on without it." in text
