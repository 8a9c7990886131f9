"""No replica group is whole: those that are left share the work of fewer ranks, and of as many as before when others
have come. test_lost_groups.py has what is the same with groups (there these are `tp alone` and others), and
test_smaller_meshes_of_two_axes.py has groups along two axes."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from sequences import Batch
from small_transformers import llama
from split_models import TENSOR, Transformer, tokens
from test_lost_stages import Counting
from torch import nn
from torch.nn import functional

import shardwise as sw
from shardwise.comm import World
from shardwise.elastic import mesh_choice
from shardwise.errors import ConfigError, SpareError, StateError
from shardwise.fit.budget import Ranks, fit_on_fewer
from shardwise.fit.hardware import hardware
from shardwise.fit.smaller_meshes import PlainModel
from shardwise.optim import vet
from shardwise.parallel.outline import Fit, smaller_meshes
from shardwise.plan import Offload, Plan, load_plan
from shardwise.plan.mesh import Mesh
from tests import inside
from tests.models import Gpt, Mixture
from tests.patience import PATIENCE
from tests.ranks.lost_groups import (
    AXES,
    BOUND,
    NUM_STEPS,
    PRESETS,
    ROWS,
    Deep,
    DiesBefore,
    Layers,
    Sequences,
    Task,
    race,
    trained_alone,
)
from tests.ranks.test_lost_ranks import DiesAt, adamw, assert_same_values, update
from tests.ranks.test_lost_ranks_table import DiesCopying
from tests.ranks.threads_as_members import Crowd, ThreadMembership, run_members
from tests.thorough import sampled, thorough_only

Tensor = torch.Tensor
ALONE = [
    (name, way, loop) for name, axis in AXES.items() if not axis.has_groups for way in axis.ways for loop in axis.loops
]


@thorough_only("the gate has the same with four ranks")
@sampled
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(("axis", "way", "loop"), ALONE)
def test_one_rank_has_the_whole_model_until_another_has_come(
    axis: str, way: str, loop: str, preset: str, tmp_path: Path
) -> None:
    mesh = {axis.partition(" ")[0]: 2}
    sizes = race(axis, preset, DiesAt({0: 60}), tmp_path, way=way, loop=loop, mesh=mesh, num_newcomers=1)
    assert sizes.keys() == {1, 2}
    assert sizes[1][-1] == 2


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("axis", "point"), [(axis, point) for axis in AXES if not AXES[axis].has_groups for point in AXES[axis].points]
)
def test_one_of_two_ranks_dies_before(axis: str, point: str, rank: int, tmp_path: Path) -> None:
    fault = DiesBefore(rank, 2, *AXES[axis].points[point])
    mesh, loop = {axis.partition(" ")[0]: 2}, "joined" if point == "the join" else ""
    sizes = race(axis, "zero1", fault, tmp_path, mesh=mesh, loop=loop)
    assert fault.is_dead
    assert sizes.keys() == {1 - rank}
    assert sizes[1 - rank][-1] == 1


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("axis", ["tp", "pp", "sp", "ep"])
def test_the_rest_of_two_groups_is_one(axis: str, preset: str, rank: int, tmp_path: Path) -> None:
    """Rank 0 dies, and with its group gone another one: of another part, of its own, or the rest of its own group."""
    sizes = race(axis, preset, DiesAt({0: 60, rank: 90}), tmp_path, most_wrong=2)
    assert len(sizes) in (1, 2)
    assert {one[-1] for one in sizes.values()} <= {1, 2}


@sampled
@pytest.mark.parametrize("preset", PRESETS[1:])
@pytest.mark.parametrize("pair", [(0, 3), (1, 2), (0, 2), (1, 3)])
@pytest.mark.parametrize("axis", ["tp", "pp", "sp", "ep"])
def test_both_groups_lose_a_rank_at_once(axis: str, pair: tuple[int, int], preset: str, tmp_path: Path) -> None:
    """Those that are left are a group. If they had the same part, one takes the other part, which is in the images of
    those that are lost."""
    both = threading.Barrier(2)

    class DiesWithTheOther(DiesBefore):
        def __call__(self, engine: Any, member: int) -> None:
            self._engine = engine
            super().__call__(engine, member)

        def _die(self) -> None:
            inside.survival(self._engine).await_copies()  # of the step before
            both.wait(PATIENCE)
            super()._die()

    point = {"tp": "agree * verdict tp *", "pp": "agree * verdict pp *"}.get(axis, "all_reduce of verdict")
    faults = {rank: DiesWithTheOther(rank, 2, point) for rank in pair}

    def plant(engine: Any, member: int) -> None:
        if member in pair:
            faults[member](engine, member)

    sizes = race(axis, preset, plant, tmp_path)
    assert sizes.keys() == {0, 1, 2, 3} - set(pair)
    assert {one[-1] for one in sizes.values()} == {2}


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("axis", ["tp", "pp", "ep"])
def test_a_rank_dies_while_its_state_is_copied(
    axis: str, preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else has its parameters after that step, and the others may have no copy of the step before any more."""
    dies = DiesCopying(monkeypatch)
    sizes = race(f"{axis} alone", preset, dies, tmp_path, mesh={axis: 4})
    assert dies.died
    assert {one[-1] for one in sizes.values()} == {2}


class Watched(Task):
    """Another task, of which it notes what the ranks of each world keep off their devices, and promise there."""

    def __init__(self, task: Task) -> None:
        self.task, self.make = task, task.make
        self.seen: dict[int, set[tuple[Offload, int]]] = {}

    def loss(self, model: nn.Module, step: int) -> Tensor:
        return self.task.loss(model, step)

    def take_step(
        self, loop: str, engine: sw.Engine, optimizer: torch.optim.Optimizer, step: int, place: int, num: int
    ) -> Tensor:
        loss = self.task.take_step(loop, engine, optimizer, step, place, num)
        promised = engine.memory().promised
        held = sum(promised[kind] for kind in promised if kind != "activations")
        self.seen.setdefault(engine.world.size, set()).add((engine.plan.offload, held))
        return loss


@sampled
@pytest.mark.parametrize(
    ("axis", "allowed", "host"),
    [
        ("tp", 120_000, None),
        ("tp", 100_000, None),
        ("pp", 450_000, None),
        ("sp", 400_000, None),
        ("pp", 450_000, 600_000),
    ],
)
def test_one_rank_keeps_to_the_budget_and_two_leave_less(
    axis: str, allowed: int, host: int | None, tmp_path: Path
) -> None:
    """With little room on the host, one rank has states on a disk, and two have none there."""
    budget = {"device": allowed, "host": host, "disk": str(tmp_path / "scratch") if host else None}
    usual = AXES[f"{axis} alone"].ways[AXES[f"{axis} alone"].usual][0]()
    task = Watched(Layers(Deep) if axis == "pp" else usual)
    more: Any = {"mesh": {axis: 2}, "num_newcomers": 1, "not_before": 4, "settings": {"budget": budget}}
    sizes = race(f"{axis} alone", "zero1", DiesAt({0: 60}), tmp_path, task=task, **more)
    assert sizes[1][-1] == 2
    assert all(held <= allowed for seen in task.seen.values() for _, held in seen)
    (both,), (alone,) = ({offload for offload, _ in task.seen[num]} for num in (2, 1))
    assert (both.optim > 0) == (allowed == 100_000), "the one that has come keeps off its device what the other does"
    assert alone.optim > both.optim
    assert (alone.optim_disk > 0) == (host is not None)


SLOW = {"latency_seconds": 1.0, "bytes_per_second": 1e3}


def test_ranks_of_a_host_have_room_for_what_they_hold_and_their_images() -> None:
    """Parameters, gradients and two states, and of all but gradients an image; on several hosts two copies of the
    other's."""
    model = Transformer()
    updates, num_bytes = vet([adamw(model)], model), 4 * sum(param.numel() for param in model.parameters())

    def fitted(room: int, num_local: int, **mesh: int) -> Plan:
        plan = load_plan(AXES["tp"].plan("zero1", mesh=mesh))
        ranks = Ranks(on_cpu=True, num_local=num_local, host_bytes=room)
        return fit_on_fewer(model, plan, Mesh.of(mesh, math.prod(mesh.values())), ranks, updates)

    assert fitted(7 * num_bytes + 4096, 4, tp=1).offload == Offload()
    with pytest.raises(ConfigError, match=r"1 of these ranks would hold .* on a host of .*, without activations"):
        fitted(7 * num_bytes - 4096, 4, tp=1)
    assert fitted(7 * num_bytes, 1, tp=2).offload == Offload(), "of two hosts, each has one rank"
    with pytest.raises(ConfigError, match="1 of these ranks"):
        fitted(6 * num_bytes, 1, tp=2)
    with pytest.raises(ConfigError, match="2 of these ranks"):
        fitted(5 * num_bytes, 2, tp=2)


def no_room(plan: Plan, mesh: Mesh) -> Plan:
    raise ConfigError("there is no room.")


def room_for_two(plan: Plan, mesh: Mesh) -> Plan:
    return plan.with_offload(Offload(optim=0.5)) if mesh.world_size == 2 else no_room(plan, mesh)


def room_for_stages(plan: Plan, mesh: Mesh) -> Plan:
    return plan if mesh.size("pp") == 2 else no_room(plan, mesh)


def test_meshes_that_a_model_can_have() -> None:
    def found(model: nn.Module | None = None, fit: Fit = lambda plan, _: plan, **mesh: int) -> Any:
        plan = load_plan({"preset": "zero1", "mesh": mesh, **({"tensor": TENSOR} if "tp" in mesh else {})})
        of_plan = Mesh.of(mesh, math.prod(mesh.values()))
        return smaller_meshes(model or Transformer(), plan, of_plan, fit)

    assert found(tp=4).meshes == ({"tp": 4}, {"tp": 2}, {"tp": 1})
    assert found(dp=2, tp=3).meshes == ({"dp": 1, "tp": 3}, {"dp": 1, "tp": 1})
    assert found(dp=2, tp=2, fit=no_room).meshes == ({"dp": 1, "tp": 2},)
    assert found(tp=4, fit=room_for_two).meshes == ({"tp": 4}, {"tp": 2})
    assert found(Deep(), pp=4).meshes == ({"pp": 4}, {"pp": 2}, {"pp": 1})
    assert found(Counting(), pp=2).meshes == ({"pp": 2}, {"pp": 1})
    assert found(Gpt(), sp=6).meshes == ({"sp": 6}, {"sp": 3}, {"sp": 2}, {"sp": 1})
    assert found(Mixture(), dp=2, ep=2).meshes == ({"dp": 1, "ep": 2}, {"dp": 1, "ep": 1})
    assert found(Deep(), pp=2, tp=2).meshes == ({"pp": 2, "tp": 2}, {"pp": 1, "tp": 2}, {"pp": 1, "tp": 1})
    assert found(Deep(), pp=2, tp=2).others == ({"pp": 2, "tp": 1},)
    assert found(Deep(), fit=room_for_stages, pp=2, tp=2).meshes == ({"pp": 2, "tp": 2}, {"pp": 2, "tp": 1})
    none = found(tp=2, fit=no_room)
    assert none.meshes == ()
    assert none.why_none.startswith("on tp=1: there is no room")


class WholeBatches(Task):
    """A model of transformers is given them, and splits them by itself."""

    def __init__(self) -> None:
        self.make = llama

    def batch(self, step: int, place: int, num: int) -> Batch:
        ids = tokens(step, ROWS).tensor_split(num)[place]
        return {"input_ids": ids, "labels": ids}

    def loss(self, model: nn.Module, step: int) -> Tensor:
        loss: Tensor = model(**self.batch(step, 0, 1)).loss
        return loss

    def take_step(
        self, loop: str, engine: sw.Engine, optimizer: torch.optim.Optimizer, step: int, place: int, num: int
    ) -> Tensor:
        batch = self.batch(step, place, num)
        if loop == "train_step":  # which repeats it: the whole is there
            return engine.train_step(batch)
        loss: Tensor = engine.module(**batch).loss
        update(loop, engine, optimizer, loss)
        return loss


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize("loop", ["engine", "train_step"])
@pytest.mark.parametrize("preset", ["zero2", "zero3"])
def test_a_model_splits_whole_batches_itself(preset: str, loop: str, tmp_path: Path) -> None:
    fault = DiesBefore(1, 2, *AXES["sp"].points["the forward"])
    more = {"mesh": {"sp": 2}, "loop": loop, "num_newcomers": 1}
    sizes = race("sp alone", preset, fault, tmp_path, task=WholeBatches(), **more)
    assert fault.is_dead
    assert sizes[0][-1] == 2


def flat_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """A sum, as ranks have unlike numbers of tokens that count."""
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def test_a_part_of_a_batch_is_not_taken_for_the_whole(tmp_path: Path) -> None:
    """`train_step` repeats a step with what it was given; here nobody has the other half of it."""
    task, fault = Sequences(), DiesBefore(1, 2, *AXES["sp"].points["the forward"])
    models = [task.make() for _ in range(2)]

    def work(world: World, member: int) -> str:
        own = models[member]
        plan = AXES["sp"].plan("zero1", mesh={"sp": 2})
        engine = sw.shard(own, plan, optimizer=adamw(own), world=world)
        fault(engine, member)

        def train() -> None:
            for step in range(NUM_STEPS):  # not by engine.num_steps, and nothing is weighed
                batch = engine.split_sequence(task.batches[step])
                engine.train_step((batch["input_ids"], batch["position_ids"]), batch["labels"], loss_fn=flat_loss)

        with pytest.raises(StateError) as caught:
            train()
        engine.close()
        return str(caught.value)

    (said,) = run_members(2, work, tmp_path).values()
    assert fault.is_dead
    assert "train_step has only this rank's part of its batch, which was split over 2" in said


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("preset", ["zero1", "zero3"])
@pytest.mark.parametrize("point", ["message of activation 0", "broadcast of loss", "exchange of read"])
def test_a_rank_dies_in_an_evaluation_in_stages(point: str, preset: str, tmp_path: Path) -> None:
    """The one that is left evaluates again, with all stages."""
    torch.manual_seed(3)
    task = Layers()
    model = task.make()
    losses, plain = trained_alone(task, model)
    models = [copy.deepcopy(model) for _ in range(3)]
    fault = DiesBefore(1, 2, point)

    def work(world: World, member: int) -> tuple[list[float], dict[str, Tensor]]:
        own, found = models[member], []
        optimizer = adamw(own)
        engine = sw.shard(own, AXES["pp"].plan(preset, mesh={"pp": 2}), optimizer=optimizer, world=world)
        while engine.num_steps < NUM_STEPS:
            step = engine.num_steps
            task.take_step("train_step", engine, optimizer, step, *engine.data_ranks)
            if engine.num_steps == step:
                continue
            if engine.num_steps == 2:
                fault(engine, member)
            if engine.num_steps < NUM_STEPS:
                found.append(engine.eval_step(tokens(engine.num_steps, ROWS)).item() - losses[engine.num_steps])
        state = engine.state_dict()
        engine.close()
        return found, state

    results = run_members(2, work, tmp_path, num_newcomers=1)
    assert fault.is_dead
    assert results.keys() == {0, 2}
    for member, (found, state) in results.items():
        assert_same_values(state, plain, BOUND)
        assert all(abs(one) < 10 * BOUND or (math.isnan(one) and member == 2) for one in found)


class SlowToWake(threading.Condition):
    """The thread "member 3" goes on after its first wait only when it `may_go_on`."""

    def __init__(self) -> None:
        super().__init__()
        self.is_waiting, self.may_go_on, self.has_waited = threading.Event(), threading.Event(), False

    def wait(self, timeout: float | None = None) -> bool:
        is_slow = threading.current_thread().name == "member 3" and not self.has_waited
        if is_slow:
            self.has_waited = True
            self.is_waiting.set()
        woke = super().wait(timeout)
        if is_slow:
            self.release()
            assert self.may_go_on.wait(PATIENCE)
            self.acquire()
        return woke


def test_a_spare_that_is_slow_to_wake_hears_of_what_it_missed_in_order() -> None:
    """It becomes a spare, and is let in again, before its thread runs. Once, threads as members took it for one that
    had never been a spare, and the others for one that joins."""
    crowd = Crowd(4, None, shares_memory=False)
    crowd.axes, crowd.smaller = {"pp": 4}, ({"pp": 4}, {"pp": 2}, {"pp": 1})
    crowd._changed = slow = SlowToWake()
    heard: dict[int, list[object]] = {1: [], 2: [], 3: []}

    def meet(member: int, *, lets_in: bool = False) -> None:
        try:
            heard[member].append(crowd.meet(member, b"", lets_in=lets_in)[1])
        except SpareError:
            met = crowd.enter(member)
            assert met is not None
            heard[member].append(("spare", met[1]))

    crowd.die(0, has_ended=False)
    with ThreadPoolExecutor() as pool:
        slowly = pool.submit(_named("member 3", meet), 3)
        assert slow.is_waiting.wait(PATIENCE)
        for one in [pool.submit(meet, 1), pool.submit(meet, 2)]:
            one.result(PATIENCE)
        crowd.die(1, has_ended=False)
        meet(2)
        meet(2, lets_in=True)
        slow.may_go_on.set()
        slowly.result(PATIENCE)
    assert heard == {1: [(1, 2)], 2: [(1, 2), (2,), (2, 3)], 3: [("spare", (2, 3))]}


def _named(name: str, work: Callable[[int], None]) -> Callable[[int], None]:
    """`work`, on a thread of that name."""

    def named(member: int) -> None:
        threading.current_thread().name = name
        work(member)

    return named


@sampled
@pytest.mark.parametrize("axis", ["tp alone", "pp alone", "sp alone", "ep alone"])
def test_the_fastest_mesh_is_taken_and_not_the_largest(
    axis: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where sending is slow, one rank alone is. As soon as all are there, they have the mesh of the plan again."""
    cpu = hardware("cpu")
    slow = cpu.model_copy(update={"local": cpu.local.model_copy(update=SLOW)})
    monkeypatch.setattr(mesh_choice, "described_hardware", lambda _: slow)
    caplog.set_level("INFO", "shardwise")
    name = axis.partition(" ")[0]
    more: Any = {"num_newcomers": 1, "least": 1} if axis == "tp alone" else {}
    sizes = race(axis, "zero1", DiesBefore(2, 2, "exchange of commit"), tmp_path, mesh={name: 4}, **more)
    assert f"{name}=2 (left out)" in caplog.text
    found = {size for one in sizes.values() for size in one}
    assert 2 not in found
    assert 1 in found


@sampled
@pytest.mark.parametrize(
    ("rank", "step", "point", "is_known", "size"),
    [
        (0, 1, "exchange of smaller meshes", False, 2),  # nobody else has heard of the choice
        (3, 1, "exchange of smaller meshes", True, 2),  # but those who decide on members have not
        (3, 0, "all_reduce of activations", True, 2),
        *((rank, 1, "exchange of commit", True, 2) for rank in (0, 3)),
        *((rank, 2, "exchange of commit", True, 1) for rank in (0, 3)),
    ],
)
@pytest.mark.parametrize("budget", [None, {"device": 120_000}], ids=["", "budget"])
def test_ranks_and_launcher_have_the_same_choice_whoever_dies_before_it_is_known(
    budget: dict[str, int] | None,
    rank: int,
    step: int,
    point: str,
    is_known: bool,
    size: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mesh_choice, "described_hardware", lambda _: hardware("cpu"))
    monkeypatch.setattr(PlainModel, "seconds", lambda *_, **__: [2.0, 1.0])
    crowds: list[Crowd] = []
    fault = DiesBefore(rank, step, point)

    def plant(engine: sw.Engine, member: int) -> None:
        fault(engine, member)
        assert isinstance(engine.world.membership, ThreadMembership)
        crowds.append(engine.world.membership.crowd)

    settings = {} if budget is None else {"budget": budget}
    sizes = race("tp alone", "zero1", plant, tmp_path, settings=settings)
    assert fault.is_dead
    assert {one[-1] for one in sizes.values()} == {size}
    assert [*crowds[0].smaller] == [{"dp": 1, "tp": num} for num in ((4, 1, 2) if is_known else (4, 2, 1))]
