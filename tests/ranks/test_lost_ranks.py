"""Ranks are lost: the others continue with the same step, and end with the results of the unsharded model."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.comm import World
from shardwise.elastic.recovery import Recovery
from shardwise.elastic.state_image import PARAM
from shardwise.elastic.survival import Survival
from shardwise.errors import ConfigError, CorruptionError, FaultError, StateError
from shardwise.observe.run_view import read_run
from shardwise.runtime.step import Step
from shardwise.sharded.sharded_model import ShardedModel
from shardwise.testing import plant
from tests import inside
from tests.patience import PATIENCE
from tests.ranks.threads_as_members import Killed, ThreadMembership, is_collective, run_members
from tests.ranks.twins import normal_batches, rounded_by
from tests.thorough import drawn, sampled, thorough_only

Tensor = torch.Tensor
ROWS, NUM_STEPS, NUM_RANKS = 12, 6, 4
PLANS: dict[str, dict[str, Any]] = {
    **{name: {"preset": name} for name in ("ddp", "zero1", "zero2", "zero3", "zero3-kept")},
    **{name: {"preset": name, "mesh": {"node": 2, "local": 2}} for name in ("hsdp", "hpz")},
}
TIERS: dict[str, dict[str, Any]] = {
    "offload": {"preset": "offload"},
    "zero3-offload": {"preset": "zero3-offload"},
    "a share": {"preset": "zero2", "offload": {"optim": 0.5}},
    "hsdp": {**PLANS["hsdp"], "offload": {"optim": 1.0, "param": 0.5}},
}
DISKS: dict[str, dict[str, Any]] = {
    "infinity": {"preset": "infinity"},
    "params": {"preset": "infinity", "rows": {"param": {"tier": "disk"}}},
    "zero2": {"preset": "zero2", "rows": {"grad": {"tier": "host"}, "optim": {"tier": "disk"}}},
    "a share": {"preset": "zero3", "offload": {"optim": 0.5, "optim_disk": 0.5}},
    "hsdp": {**PLANS["hsdp"], "rows": {"grad": {"tier": "host"}, "optim": {"tier": "disk"}}},
}
"""With rows on a disk, for which `race` names a folder."""
DISK = "disk"
"""The folder below the test's own."""
Plant = Callable[["sw.Engine", int], None]
Make = Callable[[nn.Module], torch.optim.Optimizer]
Loop = Callable[[nn.Module, torch.optim.Optimizer, Tensor, Tensor], Tensor]
"""One iteration of a plain loop; returns the loss."""


class Net(nn.Module):
    """Two tied layers, a frozen one, a norm, and a buffer that counts forwards."""

    def __init__(self, *, frozen: bool = True) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.b.weight = self.a.weight
        self.c, self.norm, self.d = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 8)
        self.c.weight.requires_grad_(not frozen)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            assert isinstance(self.count, Tensor)
            self.count += 1
        result: Tensor = self.d(self.norm(torch.relu(self.c(torch.tanh(self.b(torch.tanh(self.a(x))))))))
        return result


def net(*, frozen: bool = True) -> Net:
    """The same in each test, whichever ran before: where a weight lies between two codes, the last bit of a sum of
    gradients decides which it gets, and what follows differs by more than rounding."""
    torch.manual_seed(0)
    return Net(frozen=frozen)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """With an eps so large that gradients which are only rounding errors, with random signs, have almost no effect."""
    return torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2, eps=1e-3)


def batches() -> list[tuple[Tensor, Tensor]]:
    return normal_batches(NUM_STEPS, (ROWS, 16), (ROWS, 8), seed=0)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return ((output.float() - target) ** 2).mean()


class DiesAt:
    """A rank dies when it starts its n-th communication of any kind, counted across worlds."""

    def __init__(self, deaths: dict[int, int]) -> None:
        self.deaths = deaths

    @classmethod
    def drawn(cls, draw: random.Random) -> DiesAt:
        """One rank dies at any time, or two do."""
        deaths = {draw.randrange(NUM_RANKS): draw.randrange(3, 60)}
        if draw.random() < 0.4:
            deaths[draw.choice([one for one in range(NUM_RANKS) if one not in deaths])] = draw.randrange(3, 60)
        return cls(deaths)

    def __call__(self, engine: sw.Engine, member: int) -> None:
        if member not in self.deaths:
            return
        membership, left = engine.world.membership, [self.deaths[member]]
        assert isinstance(membership, ThreadMembership)

        def counted(_: int, __: int, what: str) -> bool:
            left[0] -= is_collective(what)
            if left[0] <= 0:
                raise Killed
            return False

        membership.plant(partial(plant, counted))


def trained_alone(
    model: nn.Module, make: Make, *, clip: float | None, scheduled: bool
) -> tuple[list[float], nn.Module]:
    plain = copy.deepcopy(model)
    optimizer = make(plain)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) if scheduled else None
    losses = []
    for x, y in batches():
        loss = loss_of(plain(x), y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), clip)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses, plain


def race(
    plan: dict[str, Any],
    plant: Plant,
    folder: Path,
    *,
    loop: str | Loop = "engine",
    model: nn.Module | None = None,
    make: Make = adamw,
    shares_memory: bool = True,
    bound: float = 2e-6,
    hosts: Sequence[str] = (),
    alone: Callable[..., tuple[list[float], nn.Module]] = trained_alone,
    dies_of: type[Exception] | tuple[()] = (),
) -> dict[int, int]:
    """Train on threads, some of which die as `plant` decides, or because they raise what they may `dies_of`. Returns
    the number of void iterations of each surviving member."""
    folder.mkdir(exist_ok=True)
    plan = {**plan, "disk": str(folder / DISK)} if plan in DISKS.values() else plan
    model = net() if model is None else model
    clip, scheduled = plan.get("clip_grad_norm"), loop == "plain"
    losses, plain = alone(model, make, clip=clip, scheduled=scheduled)
    models = [copy.deepcopy(model) for _ in range(NUM_RANKS)]

    def work(world: World, member: int) -> tuple[dict[int, float], dict[str, Tensor], int, int]:
        own = models[member]
        optimizer = make(own)
        engine = sw.shard(own, plan, optimizer=optimizer, world=world)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) if scheduled else None
        plant(engine, member)
        found: dict[int, float] = {}
        state: dict[str, Tensor] = {}
        here = -1, -1
        while engine.num_steps < NUM_STEPS or not state:
            if engine.num_steps == NUM_STEPS:  # a rank that dies now may take the last step with it
                state = engine.state_dict()
                continue
            step, began_in = engine.num_steps, engine.world.generation
            state = {}
            x, y = (whole.tensor_split(engine.data_ranks[1])[engine.data_ranks[0]] for whole in batches()[step])
            engine.weigh(len(x), ROWS)
            loss = step_of(loop, engine, optimizer, x, y)
            if scheduler is not None:
                scheduler.step()
            if engine.num_steps > step:
                before, here = here, (began_in, engine.world.generation)  # they differ where one dies in the commit
                if engine.num_steps == NUM_STEPS and here == before:
                    assert_memory_as_promised(engine)
                assert not engine.any_rank(False)
                found[step] = engine.mean(loss.item())
        result = found, state, engine.num_void, engine.world.size
        engine.close()
        return result

    def work_or_die(world: World, member: int) -> tuple[dict[int, float], dict[str, Tensor], int, int]:
        try:
            return work(world, member)
        except dies_of as error:
            raise Killed from error

    results = run_members(NUM_RANKS, work_or_die, folder, shares_memory=shares_memory, hosts=hosts)
    if isinstance(plant, DiesAt):
        assert results.keys().isdisjoint(plant.deaths), "a rank that was to die has not come that far"
    for found, state, _, size in results.values():
        assert size == len(results)
        assert sorted(found) == list(range(NUM_STEPS))
        wrong = [step for step in found if abs(found[step] - losses[step]) > bound * abs(losses[step])]
        assert len(wrong) <= NUM_RANKS - size, "only the loss that a rank took with it may be missing from a mean"
        assert_same_values(state, plain, bound, num_calls=plan.get("accumulate", 1))
    left = [path for path in folder.rglob("*") if path.is_file() and not is_lock_beside_nothing(path, plan)]
    if hosts:  # what is on a host that has no rank any more stays there
        gone = set(hosts) - {hosts[member] for member in results}
        of_gone = {f"shardwise-rank-{member}" for member, host in enumerate(hosts) if host in gone}
        left = [path for path in left if not {path.parent.name, path.name.partition(".")[0]} & (gone | of_gone)]
    assert not left, "images of a job that has ended"
    return {member: result[2] for member, result in results.items()}


def assert_memory_as_promised(engine: sw.Engine) -> None:
    """A rank has no more than the plan promises for the mesh on which it trains now. Called behind the second step on
    it or a later one: until the first one is recorded, the promise is that of an assumed order of units. And before
    anything reads whole tensors."""
    report = engine.memory()
    counts = 8 * sum(1 for _ in engine.module.parameters())  # torch counts steps in tensors of 4 or 8 bytes
    for promised, measured in (
        (report.promised, report.measured),
        (report.promised_on_host, report.measured_on_host),
        (report.promised_on_disk, report.measured_on_disk),
    ):
        more = {kind: measured[kind] - promised[kind] for kind in promised if kind in measured}
        assert all(over <= (counts if kind == "optim" else 0) for kind, over in more.items()), (engine.world.size, more)


def is_lock_beside_nothing(path: Path, plan: dict[str, Any]) -> bool:
    """Whether it is the lock of a rank that may have been lost, and had nothing on the disk with which others would
    remove it: activations have no names."""
    return path.suffix == ".lock" and plan.get("activations") == "disk"


def step_of(loop: str | Loop, engine: sw.Engine, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """One iteration in the way of `loop`; returns this rank's loss."""
    if not isinstance(loop, str):
        return loop(engine.module, optimizer, x, y)
    if loop == "train_step":
        return engine.train_step(x, y, loss_fn=loss_of)
    if loop == "micro-batches":
        return micro_steps(engine, x, y)
    loss = loss_of(engine.module(x), y)
    if loop == "averaged":
        engine.mean(loss.item())
    update(loop, engine, optimizer, loss)
    return loss


def update(loop: str, engine: sw.Engine, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """From a loss to new parameters, by calls of the engine or as a plain loop does."""
    if loop == "engine":
        engine.backward(loss)
        engine.step()
    else:
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        optimizer.step()


def micro_steps(engine: sw.Engine, x: Tensor, y: Tensor) -> Tensor:
    """A step of a loop with the plan's `accumulate`; returns the mean of this rank's losses."""
    num, losses = engine.plan.accumulate, []
    for part, target in zip(x.tensor_split(num), y.tensor_split(num), strict=True):
        engine.weigh(len(part), ROWS / num)
        losses.append(loss_of(engine.module(part), target))
        engine.backward(losses[-1])
        engine.step()
    engine.weigh(len(x), ROWS)  # as the mean of losses counts
    counts = torch.tensor([float(len(part)) for part in x.tensor_split(num)])
    return (torch.stack(losses) * counts).sum() / len(x)


def assert_same_values(state: dict[str, Tensor], plain: nn.Module, bound: float, *, num_calls: int = 1) -> None:
    """`num_calls`: of each rank's model in a step, of which the plain one has one."""
    for name, whole in plain.state_dict().items():
        value = whole * num_calls if name == "count" else whole
        assert (state[name].float() - value).abs().max() <= bound * max(1.0, value.abs().max()), name


CASES = [
    (name, loop, shares) for name in PLANS for loop in ("engine", "plain", "train_step") for shares in (True, False)
]


@sampled
@pytest.mark.parametrize(("name", "loop", "shares_memory"), CASES)
def test_a_rank_dies_anywhere(name: str, loop: str, shares_memory: bool, tmp_path: Path) -> None:
    for seed in range(drawn(1, 2)):
        dies = DiesAt.drawn(random.Random(f"{name} {loop} {shares_memory} {seed}"))
        race(PLANS[name], dies, tmp_path, loop=loop, shares_memory=shares_memory)


def trained_with_codes(model: nn.Module, make: Make, **_: Any) -> tuple[list[float], nn.Module]:
    """Alone, computing with matrices rounded to 8 bits."""
    plain, rounded, losses = copy.deepcopy(model), rounded_by({"dtype": "int8", "block": 256}), []
    optimizer = make(plain)
    for x, y in batches():
        computed = copy.deepcopy(plain)
        with torch.no_grad():
            for param in computed.parameters():
                param.copy_(rounded(param) if param.dim() > 1 else param)
        loss = loss_of(computed(x), y)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        for master, param in zip(plain.parameters(), computed.parameters(), strict=True):
            master.grad = param.grad
        plain.count = computed.count
        optimizer.step()
        losses.append(loss.item())
    return losses, plain


@thorough_only("others die in the same ways without codes")
@pytest.mark.parametrize("death", [9, 26])
@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3", "hpz"])
def test_a_rank_dies_where_codes_are_sent(name: str, death: int, tmp_path: Path) -> None:
    """The others compute with the same rounded parameters, though their shards begin elsewhere."""
    wire = {"param": {"dtype": "int8", "axes": "everywhere"}}
    model = net(frozen=name in ("zero3", "hpz"))  # which send frozen parameters, too
    race({**PLANS[name], "wire": wire}, DiesAt({2: death}), tmp_path, alone=trained_with_codes, model=model)


class DiesInMean:
    """A rank dies where it averages its third loss, before it sends it back."""

    def __init__(self, member: int) -> None:
        self.member = member

    def __call__(self, engine: sw.Engine, member: int) -> None:
        membership, left = engine.world.membership, [3]
        assert isinstance(membership, ThreadMembership)

        def counted(_: int, __: int, what: str) -> bool:
            left[0] -= what.endswith(" of mean") or what.endswith(" of weighed mean")
            if member == self.member and not left[0]:
                raise Killed
            return False

        membership.plant(partial(plant, counted))


@pytest.mark.parametrize("name", ["zero1", "zero3"])
def test_a_graph_of_a_former_world_is_sent_back_without_effect(name: str, tmp_path: Path) -> None:
    """A plain loop averages its loss for people before `loss.backward()`, and hears of the fault there."""
    num_void = race(PLANS[name], DiesInMean(1), tmp_path, loop="averaged")
    assert 1 not in num_void
    assert set(num_void.values()) == {1}


@sampled
@pytest.mark.parametrize(
    ("name", "loop", "shares_memory"),
    [(name, loop, shares) for name in TIERS for loop in ("engine", "plain", "train_step") for shares in (True, False)],
)
def test_a_rank_dies_anywhere_with_rows_on_the_host(name: str, loop: str, shares_memory: bool, tmp_path: Path) -> None:
    draw = random.Random(f"{name} {loop} {shares_memory}")
    deaths = {draw.randrange(NUM_RANKS): draw.randrange(3, 60)}
    race(TIERS[name], DiesAt(deaths), tmp_path, loop=loop, shares_memory=shares_memory)


def test_a_second_death_is_known_at_once_in_the_world_that_there_is_then() -> None:
    """A thread that dies must leave its current world, not its first one; else others would wait in vain."""
    kept: list[World] = []  # as an engine does

    def work(world: World, member: int) -> str:
        if member == 0:
            raise Killed
        with pytest.raises(FaultError):
            world.mean(1.0)
        assert world.membership is not None
        second = world.membership.regroup(world, b"").world
        kept.append(second)
        if member == 1:
            raise Killed
        with pytest.raises(FaultError) as found:
            second.mean(1.0)
        second.part()
        return found.value.kind

    assert run_members(3, work, None) == {2: "raised"}


def test_a_loader_of_ranks_that_may_be_lost_has_to_follow_the_engine() -> None:
    """One that follows nothing would not hand out the batch of a void step again."""

    def work(world: World, member: int) -> int:
        with pytest.raises(ConfigError, match=r"world=engine\.data_ranks"):
            sw.data.Loader(range(8), batch_rows=2, world=world)
        return sw.data.Loader(range(8), batch_rows=2, world=(world.rank, world.size)).size

    assert run_members(2, work, None) == {0: 2, 1: 2}


def test_clipping_accumulation_and_micro_batches(tmp_path: Path) -> None:
    plan = {"preset": "zero2", "accumulate": 2, "clip_grad_norm": 0.1}
    race(plan, DiesAt({0: 30, 3: 45}), tmp_path, loop="train_step")


@sampled
@pytest.mark.parametrize("death", [20, 23, 26, 29, 32, 35, 38, 41])
@pytest.mark.parametrize("name", ["zero1", "zero3"])
def test_micro_batches_of_a_loop_end_with_their_step(name: str, death: int, tmp_path: Path) -> None:
    """A rank dies in any of them: the step is void with its last micro-batch, and the next begins with its first."""
    race({**PLANS[name], "accumulate": 2}, DiesAt({1: death}), tmp_path, loop="micro-batches")


@sampled
@pytest.mark.parametrize("name", [*PLANS, "zero3-offload"])
def test_a_torn_update_is_gone_back_from(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They repeat the step unless they have the same update."""
    is_taken = name in ("ddp", "hsdp")  # each part of the update is made by another rank too
    let_die_updated(monkeypatch, is_taken=is_taken)
    void = race({**TIERS, **PLANS}[name], lambda engine, member: None, tmp_path)
    assert set(void.values()) == {0 if is_taken else 1}


def let_die_updated(monkeypatch: pytest.MonkeyPatch, *, is_taken: bool) -> None:
    """A rank dies after its update, before others know of it. `is_taken`: they have the same update."""
    after_step = ShardedModel.after_step
    updated = threading.Barrier(NUM_RANKS)  # one that has not heard all gradients when the rank dies repeats the step
    noted = threading.Barrier(NUM_RANKS if is_taken else 1)  # and so does one that hears of it at the end of its step

    def or_die(self: ShardedModel, member: torch.optim.Optimizer) -> None:
        is_last = self.world.size == NUM_RANKS and self.progress.num_steps == 3
        if is_last:
            updated.wait(timeout=PATIENCE)
            if self.world.rank == 1:
                noted.wait(timeout=PATIENCE)
                raise Killed
        after_step(self, member)
        if is_last:
            noted.wait(timeout=PATIENCE)

    monkeypatch.setattr(ShardedModel, "after_step", or_die)


@sampled
@pytest.mark.parametrize("shares_memory", [False, True])
@pytest.mark.parametrize("name", ["zero3", "zero1", "ddp"])
def test_a_rank_dies_while_the_others_get_their_parameters_back(
    name: str, shares_memory: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is sharded for a world that has ended already, and must be plain again for the next one."""
    restore_params = Step.restore_params
    lost: list[int] = []

    def or_die(self: Step) -> None:
        journal = self._executor.journal
        if journal.rank == 1 and not lost:
            lost.append(journal.rank)
            raise Killed
        restore_params(self)

    monkeypatch.setattr(Step, "restore_params", or_die)
    race(PLANS[name], DiesAt({0: 40}), tmp_path, loop="plain", shares_memory=shares_memory)
    assert lost


@sampled
@pytest.mark.parametrize("shares_memory", [False, True])
@pytest.mark.parametrize("name", PLANS)
def test_what_was_not_copied_yet_is_found_elsewhere(
    name: str, shares_memory: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank dies while its shadow copy is one step behind. Its live memory has the states, others its parameters."""
    follow, before_change = Survival.follow, Survival.before_change
    behind: dict[int, int] = {}

    def but_not_all(self: Survival, step: int) -> None:
        if "rank2" in self.place.name:
            behind[id(self)] = step
        else:
            follow(self, step)

    def at_the_last_moment(self: Survival) -> None:
        if id(self) in behind:
            follow(self, behind.pop(id(self)))
        before_change(self)

    monkeypatch.setattr(Survival, "follow", but_not_all)
    monkeypatch.setattr(Survival, "before_change", at_the_last_moment)
    race(PLANS[name], DiesAt({2: 45}), tmp_path, shares_memory=shares_memory)


@sampled
@pytest.mark.parametrize("lost", [0, 2])
def test_the_record_says_how_many_go_on(lost: int, tmp_path: Path) -> None:
    run, images = tmp_path / "run", tmp_path / "images"
    images.mkdir()
    models = [Net() for _ in range(NUM_RANKS)]

    def work(world: World, member: int) -> None:
        own = models[member]
        engine = sw.shard(own, {"preset": "zero2", "run": str(run)}, optimizer=adamw(own), world=world)
        while engine.num_steps < NUM_STEPS:
            step = engine.num_steps
            x, y = (whole.tensor_split(engine.data_ranks[1])[engine.data_ranks[0]] for whole in batches()[step])
            engine.weigh(len(x), ROWS)
            loss = loss_of(own(x), y)
            if member == lost and step == 3:
                raise Killed
            engine.backward(loss)
            engine.step()
            if engine.num_steps > step:
                engine.log({"loss": loss.item()}, tokens=ROWS)
        engine.close()

    assert sorted(run_members(NUM_RANKS, work, images)) == [rank for rank in range(NUM_RANKS) if rank != lost]
    view = read_run(run)
    assert view.header["mesh"] == {"dp": NUM_RANKS}
    assert view.mesh == {"dp": NUM_RANKS - 1}
    assert view.last_start["world_size"] == NUM_RANKS - 1
    assert [line["step"] for line in view.steps] == list(range(1, NUM_STEPS + 1))
    assert len(view.ranks()) == len(view.verdicts()) == NUM_RANKS - 1
    assert view.status == "ended"


def flip_a_bit(engine: sw.Engine, *, in_image: bool, in_live: bool = True) -> None:
    """Of the first master weights that this rank has; with `in_image` also of their copy, or of that alone."""
    survival = inside.survival(engine)
    survival.end_copies()
    flat, index = next(
        (flat, index)
        for flat in inside.flats(engine)
        for index in range(len(flat.slots))
        if flat.spec.trainable and flat.master_piece(index)[0].numel()
    )
    tensors = [flat.master_piece(index)[0]] if in_live else []
    if in_image:
        cells = survival.image.directory.cells
        tensors.append(
            survival.image.shadow(
                next(cell for cell in cells if (cell.name, cell.kind) == (flat.slots[index].name, PARAM))
            )
        )
    for tensor in tensors:
        tensor.detach().view(torch.int32).numpy()[0] ^= 1 << 20


def killed_when_left_out(monkeypatch: pytest.MonkeyPatch) -> list[CorruptionError]:
    """A rank that is found to be wrong ends as a process would, from now on. Returns the errors of which it does, as
    they come."""
    wrong: list[CorruptionError] = []
    leave = Recovery.fault_for_others

    def leave_or_die(self: Recovery, error: CorruptionError) -> FaultError:
        try:
            return leave(self, error)
        except CorruptionError:
            wrong.append(error)
            raise Killed from error

    monkeypatch.setattr(Recovery, "fault_for_others", leave_or_die)
    return wrong


@sampled
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("in_image", [False, True])
@pytest.mark.parametrize("name", [*PLANS, "offload", "zero3-offload"])
def test_a_rank_with_wrong_bits_leaves_and_the_step_is_repeated(
    name: str, in_image: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What only it had comes from its image, if that is from before the bit flipped."""
    wrong = killed_when_left_out(monkeypatch)

    def flips(engine: sw.Engine, member: int) -> None:
        def flip(_: int, step: int, what: str) -> bool:
            if (member, step) == (2, 3) and not flipped and "verdict" in what:
                flipped.append(what)
                flip_a_bit(engine, in_image=in_image)
            return False

        flipped: list[str] = []
        membership = engine.world.membership
        assert isinstance(membership, ThreadMembership)
        membership.plant(partial(plant, flip))

    plan = {**TIERS, **PLANS}[name]
    others_have_it = name in ("ddp", "hsdp")
    if in_image and not others_have_it:
        with pytest.raises(StateError, match="no whole state is left"):
            race({**plan, "verify": 1}, flips, tmp_path)
    else:
        assert race({**plan, "verify": 1}, flips, tmp_path) == {0: 1, 1: 1, 3: 1}
    assert [error.ranks for error in wrong] == [(2,)]
