"""Jobs on several hosts, one of which is lost with its memory: the other ranks continue from their copies of its state,
and end with the results of the unsharded model."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.comm import LinkError, World
from shardwise.comm.transport.background import Background
from shardwise.comm.work import Pending
from shardwise.elastic import copies
from shardwise.elastic.copies import CopyMeter
from shardwise.elastic.session import ElasticSession
from shardwise.errors import ConfigError, StateError
from shardwise.program.buddies import CopyBytes, copy_bytes
from shardwise.testing import plant
from tests import inside
from tests.patience import PATIENCE
from tests.ranks.test_lost_ranks import (
    NUM_RANKS,
    NUM_STEPS,
    PLANS,
    ROWS,
    TIERS,
    Net,
    adamw,
    batches,
    loss_of,
    race,
    trained_alone,
)
from tests.ranks.threads_as_members import Killed, ThreadMembership, is_collective, run_members
from tests.thorough import drawn, sampled, thorough_only

HOSTS = {"2 2": "aabb", "1 2 1": "abbc", "3 1": "aaab", "1 1 1 1": "abcd", "mixed": "abab"}


class HostDiesAt:
    """A member's host dies when the member starts its n-th communication (`deaths`), counted across worlds. `behind`
    counts messages sent in the background instead."""

    def __init__(self, deaths: dict[int, int], behind: dict[int, int] | None = None, *, as_host: bool = True) -> None:
        self.deaths, self.behind, self.as_host = deaths, behind or {}, as_host
        self.num_alone: list[int] = []

    @classmethod
    def drawn(cls, draw: random.Random) -> tuple[HostDiesAt, str]:
        """Any host at any time; and which ranks are on one."""
        hosts = HOSTS["1 2 1" if draw.random() < 0.3 else "2 2"]
        return cls({draw.randrange(NUM_RANKS): draw.randrange(3, 70)}), hosts

    def __call__(self, engine: sw.Engine, member: int) -> None:
        left, left_behind = [self.deaths.get(member, -1)], [self.behind.get(member, -1)]
        membership = engine.world.membership
        assert isinstance(membership, ThreadMembership)
        crowd = membership.crowd

        def die() -> None:
            if self.as_host:
                crowd.kill_host(member)
            else:
                crowd.doomed.add(member)
            raise Killed

        def counted(_: int, __: int, what: str) -> bool:
            if member in crowd.doomed:
                raise Killed
            left[0] -= is_collective(what)
            if left[0] == 0:
                die()
            return False

        def watch(world: World) -> None:
            post = world.transport.send

            def counted_behind(*args: Any, **kwargs: Any) -> Any:
                if member in crowd.doomed:
                    raise LinkError(-1, "this host is gone")
                if args[2] >= 2**30:
                    left_behind[0] -= 1
                    if left_behind[0] == 0:
                        die()
                return post(*args, **kwargs)

            plant(counted, world)
            world.transport.send = counted_behind  # type: ignore[method-assign]

        membership.plant(watch)


@pytest.fixture(autouse=True)
def small_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "_PORTION_BYTES", 512)
    torch.manual_seed(0)  # Adam turns gradients near 0 into large steps in either direction, depending on rounding


CASES = [
    (name, loop, shares) for name in PLANS for loop in ("engine", "plain", "train_step") for shares in (True, False)
]


@sampled
@pytest.mark.parametrize(("name", "loop", "shares_memory"), CASES)
def test_a_host_dies_anywhere(name: str, loop: str, shares_memory: bool, tmp_path: Path) -> None:
    for seed in range(drawn(1, 3)):
        dies, hosts = HostDiesAt.drawn(random.Random(f"{name} {loop} {shares_memory} {seed}"))
        race(PLANS[name], dies, tmp_path / str(seed), loop=loop, shares_memory=shares_memory, hosts=hosts)


SENT = [
    ("zero1", "plain"),
    ("zero2", "engine"),
    ("zero3", "engine"),
    ("zero3-kept", "plain"),
    ("hpz", "train_step"),
    ("offload", "engine"),
    ("zero3-offload", "plain"),
]
"""Plans of which something is copied to another host."""


@sampled
@pytest.mark.parametrize("portion", list(range(3, 43, 2)))
@pytest.mark.parametrize(("name", "loop"), SENT)
def test_a_host_dies_while_its_copies_are_on_their_way(name: str, loop: str, portion: int, tmp_path: Path) -> None:
    void = race({**TIERS, **PLANS}[name], HostDiesAt({}, {1: portion}), tmp_path, loop=loop, hosts=HOSTS["2 2"])
    assert len(void) == 2, "a host was lost"


def test_a_second_host_dies_while_the_others_recover(tmp_path: Path) -> None:
    """Memory of the former layout is given up by then, and the copy of what the second one had is not settled."""
    void = race(PLANS["zero2"], HostDiesAt({0: 33}, {3: 20}), tmp_path, hosts=HOSTS["1 2 1"])
    assert len(void) == 2, "two hosts were lost"


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("portion", list(range(16, 36)))
def test_a_step_is_undone_that_was_void_at_first(portion: int, tmp_path: Path) -> None:
    """When a second host dies, a step that succeeded only at its second attempt is lost, and is taken again."""
    void = race(PLANS["zero2"], HostDiesAt({0: 33}, {3: portion}), tmp_path, hosts=HOSTS["1 2 1"])
    assert len(void) == 2, "two hosts were lost"


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("hosts", ["1 2 1", "3 1", "1 1 1 1", "mixed"])
@pytest.mark.parametrize("name", ["zero2", "zero3", "hsdp", "hpz"])
def test_uneven_hosts(name: str, hosts: str, tmp_path: Path) -> None:
    for seed in range(drawn(1, 3)):
        draw = random.Random(f"{name} {hosts} {seed}")
        last = 2 if hosts in ("1 2 1", "1 1 1 1") else 1  # hosts may die one after the other
        dead = draw.sample([0, 3] if hosts in ("1 2 1", "3 1") else [0, 1], last)
        deaths = {member: 25 + 30 * number + draw.randrange(20) for number, member in enumerate(dead)}
        race(PLANS[name], HostDiesAt(deaths), tmp_path / str(seed), hosts=HOSTS[hosts])


@sampled
@pytest.mark.parametrize("at", [24, 33, 41, 47, 58])
@pytest.mark.parametrize("name", ["zero1", "zero3"])
def test_a_rank_dies_whose_host_lives(name: str, at: int, tmp_path: Path) -> None:
    """The dead rank's image is still on its host, and may be newer than the copy elsewhere."""
    race(PLANS[name], HostDiesAt({2: at}, as_host=False), tmp_path, hosts=HOSTS["2 2"])


def mark_gathers(engine: sw.Engine, at_step: int, is_lost: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """`is_lost[0]` is true while the gathers of the parameters that step `at_step` has updated are started."""
    for mover in inside.runner(engine).gathering._executor.movers.values():
        gather = mover.params.gather_updated

        def gather_or_lose(action: Any, gather: Any = gather) -> None:
            is_lost[0] = engine.num_steps == at_step - 1
            gather(action)
            is_lost[0] = False

        monkeypatch.setattr(mover.params, "gather_updated", gather_or_lose)


class DiesBeforeOthersHaveItsUpdate:
    """A member dies, its host survives: all have committed a step, but no other rank has the updated parameters."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at_step: int) -> None:
        self.at_step, self.monkeypatch = at_step, monkeypatch
        self.has_died = False

    def __call__(self, engine: sw.Engine, member: int) -> None:
        if member != 2:
            return
        session, start, mine, is_lost = inside.session(engine), Background.start, threading.get_ident(), [False]
        assert isinstance(session, ElasticSession)
        share = session.recovery._share_change_wishes
        mark_gathers(engine, self.at_step, is_lost, self.monkeypatch)

        def start_or_lose(background: Background, line: str, steps: Callable[[], None]) -> Any:
            is_mine = is_lost[0] and threading.get_ident() == mine
            return start(background, line, (lambda: None) if is_mine else steps)

        def share_and_die(subject: str, *refusal: str) -> None:
            share(subject, *refusal)
            if engine.num_steps == self.at_step:
                self.has_died = True
                raise Killed

        self.monkeypatch.setattr(Background, "start", start_or_lose)
        self.monkeypatch.setattr(session.recovery, "_share_change_wishes", share_and_die)


@sampled
@pytest.mark.parametrize("shares_memory", [True, False])
@pytest.mark.parametrize("name", ["zero1", "zero2"])
def test_a_rank_dies_before_its_neighbour_has_its_update(
    name: str, shares_memory: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its neighbour can read the image, but not the updated parameters, which were not gathered yet. So all ranks
    return to the previous step."""
    plant = DiesBeforeOthersHaveItsUpdate(monkeypatch, 3)
    race(PLANS[name], plant, tmp_path, shares_memory=shares_memory, hosts=HOSTS["2 2"])
    assert plant.has_died


@pytest.mark.parametrize("survive", ["host", "buddy"])
def test_without_copies_a_step_ends_when_all_have_its_update(survive: str, tmp_path: Path) -> None:
    """Without copies no rank could return to the previous step, so a step ends only when all ranks have its update."""
    models = [Net() for _ in range(NUM_RANKS)]

    def work(world: World, member: int) -> list[bool]:
        own, updating = models[member], []
        with sw.shard(own, {"preset": "zero1", "survive": survive}, optimizer=adamw(own), world=world) as engine:
            for x, y in batches()[:3]:
                rows = slice(member, None, NUM_RANKS)
                engine.backward(loss_of(own(x[rows]), y[rows]))
                engine.step()
                updating.append(any(flat.is_updating for flat in inside.flats(engine)))
        return updating

    results = run_members(NUM_RANKS, work, tmp_path, hosts=HOSTS["2 2"])
    assert all(found == [False, survive == "buddy", survive == "buddy"] for found in results.values())


@sampled
@pytest.mark.parametrize("name", ["ddp", "hsdp"])
def test_nothing_is_sent_where_other_hosts_have_it(name: str, tmp_path: Path) -> None:
    found = metered(PLANS[name], HOSTS["2 2"], tmp_path)
    assert all(meter.num_copies == 0 and report.kept_bytes == 0 for meter, report, _ in found.values())


@sampled
@pytest.mark.parametrize("name", ["zero1", "zero3", "hpz"])
@pytest.mark.parametrize("frozen", [False, True])
def test_copies_cost_what_is_promised(name: str, frozen: bool, tmp_path: Path) -> None:
    for meter, report, promised in metered(PLANS[name], HOSTS["2 2"], tmp_path, frozen=frozen).values():
        assert meter.num_copies == NUM_STEPS + 1, "one as it begins, one behind each step"
        once = promised.sent_once
        slack = 8 * 3 * 64 + 4096  # cells begin at multiples of 64 bytes; step numbers are stored next to them
        per_step = (meter.sent_bytes - once) / meter.num_copies
        assert abs(report.kept_bytes - promised.kept) < 2 * slack
        assert promised.sent * 0.7 - slack < per_step < promised.sent + slack, "the first has no states yet"
        assert meter.received_bytes > 0
        assert meter.seconds > 0


def metered(
    plan: dict[str, Any], hosts: str, folder: Path, *, frozen: bool = True
) -> dict[int, tuple[CopyMeter, sw.MemoryReport, CopyBytes]]:
    models = [Net(frozen=frozen) for _ in range(NUM_RANKS)]

    def work(world: World, member: int) -> tuple[CopyMeter, sw.MemoryReport, CopyBytes]:
        own = models[member]
        engine = sw.shard(own, plan, optimizer=adamw(own), world=world)
        for x, y in batches():
            rank, size = engine.data_ranks
            engine.train_step(x.tensor_split(size)[rank], y.tensor_split(size)[rank], loss_fn=loss_of)
        engine.state_dict()
        inside.survival(engine).await_copies()
        specs = [flat.spec for flat in inside.flats(engine)]
        found = inside.recovery(engine).copy_meter, engine.memory(), copy_bytes(specs, 2, hosts)
        assert engine.copies == (asdict(found[0]) if found[0].num_copies else {})
        engine.close()
        return found

    return run_members(NUM_RANKS, work, folder, hosts=hosts)


@thorough_only("slow; smaller tests beside it cover the same code")
def test_copies_are_in_memory_of_the_process_where_no_other_outlives_it(tmp_path: Path) -> None:
    """On hosts without /dev/shm, copies are in the processes' own memory. The loss of a host is survived."""
    deaths = HostDiesAt({1: 40})

    def without_folder(engine: sw.Engine, member: int) -> None:
        deaths(engine, member)

    begin = ThreadMembership.__init__

    def and_no_folder(self: ThreadMembership, crowd: Any, member: int) -> None:
        begin(self, crowd, member)
        self.folder = None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ThreadMembership, "__init__", and_no_folder)
        race(PLANS["zero3"], without_folder, tmp_path, hosts=HOSTS["2 2"])
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def last_words(plan: dict[str, Any], plant: HostDiesAt, hosts: str, folder: Path) -> set[str]:
    """The error messages of the ranks that cannot continue."""
    models = [Net() for _ in range(NUM_RANKS)]

    def work(world: World, member: int) -> str:
        own = models[member]
        engine = sw.shard(own, plan, optimizer=adamw(own), world=world)
        plant(engine, member)
        try:
            for x, y in batches():
                engine.train_step(x, y, loss_fn=loss_of)
        except StateError as error:
            engine.close(error)
            return str(error)
        raise AssertionError("nobody was lost")

    return set(run_members(NUM_RANKS, work, folder, hosts=hosts).values())


@sampled
@pytest.mark.parametrize("name", [name for name, _ in SENT])
def test_a_rank_and_its_keeper_are_lost_together(name: str, tmp_path: Path) -> None:
    plan = {**TIERS, **PLANS}[name]
    (said,) = last_words(plan, HostDiesAt({1: 40, 2: 40}), HOSTS["1 1 1 1"], tmp_path)
    assert said.startswith("Ranks 1 and 2 are gone, of which one kept the copy of the other's state, and no whole")
    assert said.endswith("Start again from the last checkpoint.")


@sampled
@pytest.mark.parametrize("name", ["ddp", "hsdp"])
def test_two_hosts_are_lost_together_and_others_have_the_same(name: str, tmp_path: Path) -> None:
    """Nothing is copied where the rows of each rank are on another host anyway."""
    race(PLANS[name], HostDiesAt({1: 40, 2: 40}), tmp_path, hosts=HOSTS["1 1 1 1"])


def test_with_host_alone_a_whole_host_is_not_survived_and_the_cure_is_said(tmp_path: Path) -> None:
    plan = {**PLANS["zero3"], "survive": "host"}
    (said,) = last_words(plan, HostDiesAt({1: 40}), HOSTS["2 2"], tmp_path)
    assert said.endswith("With survive: buddy a whole host may be lost. Start again from the last checkpoint.")


@thorough_only("slow; smaller tests beside it cover the same code")
def test_with_host_alone_a_rank_may_be_lost_while_its_host_lives(tmp_path: Path) -> None:
    plan = {**PLANS["zero3"], "survive": "host"}
    race(plan, HostDiesAt({1: 40}, as_host=False), tmp_path, hosts=HOSTS["2 2"])


def test_on_one_host_a_buddy_is_refused_with_the_cure(tmp_path: Path) -> None:
    def work(world: World, member: int) -> str:
        model = Net()
        with pytest.raises(ConfigError) as refused:
            sw.shard(model, {"preset": "zero1", "survive": "buddy"}, optimizer=adamw(model), world=world)
        return str(refused.value)

    said = set(run_members(2, work, tmp_path).values())
    assert said == {
        "survive: buddy is not possible: all ranks are on one host, and copies go to another. Choose survive: host, or "
        "remove it: then copies are made as soon as a second host joins."
    }


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("portion", [17, 20, 21, 25, 27, 28, 29, 35])
@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("follows", [False, True])
def test_no_batch_is_left_out_or_comes_twice_where_a_step_is_undone(
    follows: bool, asks: bool, portion: int, tmp_path: Path
) -> None:
    """With a loader that follows the engine, and with a loop that passes its own batches to `train_step`."""
    _, plain = trained_alone(start := Net(), adamw, clip=None, scheduled=False)
    models = [copy.deepcopy(start) for _ in range(NUM_RANKS)]
    samples = [(batches()[step][0][row], batches()[step][1][row]) for step in range(NUM_STEPS) for row in range(ROWS)]

    def work(world: World, member: int) -> tuple[dict[str, torch.Tensor], int]:
        own = models[member]
        engine = sw.shard(own, PLANS["zero2"], optimizer=adamw(own), world=world)
        HostDiesAt({}, {1: portion})(engine, member)
        if follows:
            order = sw.data.Samples(shuffle=False)
            loader = sw.data.Loader(
                samples, batch_rows=ROWS, world=engine.data_ranks, steps=NUM_STEPS, samples=order, workers=0
            )
            for x, y in loader:
                engine.backward(loss_of(own(x), y))
                engine.step()
                engine.mean(0.0)
        else:
            for x, y in batches():
                engine.train_step(x, y, loss_fn=loss_of)  # the same on all ranks, so that a lost share changes nothing
                if asks:
                    engine.mean(0.0)
        inside.survival(engine).await_copies()
        result = engine.state_dict(), engine.num_steps
        engine.close()
        return result

    results = run_members(NUM_RANKS, work, tmp_path, hosts=HOSTS["2 2"])
    assert len(results) == 2
    for state, num_steps in results.values():
        assert num_steps == NUM_STEPS
        for name, value in plain.state_dict().items():
            assert (state[name] - value).abs().max() <= 2e-6 * max(1.0, value.abs().max()), name


def hear_in_commit(engine: sw.Engine, version: int) -> None:
    """Let this rank leave the commit of `version` so late that it hears there of a death after it. The copies of that
    step are not complete, since this rank sends none yet."""
    session = inside.session(engine)
    assert isinstance(session, ElasticSession)
    share = session.recovery._share_change_wishes

    def late(subject: str, refusal: str = "") -> None:
        share(subject, refusal)
        if subject == "commit" and session.recovery.iterations.version == version and engine.num_void == 0:
            raise inside.await_fault(session.recovery.world).error()

    session.recovery._share_change_wishes = late  # type: ignore[method-assign]


@pytest.mark.parametrize("asks", ["always", "if it has taken a step", "if that is not void"])
@pytest.mark.parametrize("loop", ["engine", "plain", "train_step"])
@sampled
def test_a_rank_hears_in_the_commit_that_a_step_is_undone_that_others_have_ended(
    loop: str, asks: str, tmp_path: Path
) -> None:
    """All go on with the same calls, also where the loop asks `engine.num_steps` whether a step was taken, or
    `engine.num_void`."""
    _, plain = trained_alone(start := Net(), adamw, clip=None, scheduled=False)
    models = [copy.deepcopy(start) for _ in range(NUM_RANKS)]
    others_are_on, num_void = threading.Event(), []

    def work(world: World, member: int) -> dict[str, torch.Tensor]:
        own, optimizer = models[member], adamw(models[member])
        engine = sw.shard(own, PLANS["zero2"], optimizer=optimizer, world=world)
        HostDiesAt({})(engine, member)
        assert isinstance(world.membership, ThreadMembership)
        if member == 2:
            hear_in_commit(engine, 3)
        while engine.num_steps < NUM_STEPS:
            step, void = engine.num_steps, engine.num_void
            x, y = batches()[step]  # the same on all ranks, so that a lost share changes nothing
            if loop == "train_step":
                engine.train_step(x, y, loss_fn=loss_of)
            else:
                loss = loss_of(own(x), y)
                engine.backward(loss) if loop == "engine" else loss.backward()
                engine.step() if loop == "engine" else optimizer.step()
                optimizer.zero_grad()
            if member == 3 and engine.num_steps == 3:
                others_are_on.set()
            if member < 2 and engine.num_steps == 3:
                assert others_are_on.wait(PATIENCE)
                world.membership.crowd.kill_host(0)
                raise Killed
            is_void = asks == "if that is not void" and engine.num_void > void
            if asks == "always" or (engine.num_steps > step and not is_void):
                engine.mean(0.0)
        num_void.append(engine.num_void)
        state = engine.state_dict()
        engine.close()
        return state

    results = run_members(NUM_RANKS, work, tmp_path, hosts=HOSTS["2 2"])
    assert num_void == [1, 1]
    for state in results.values():
        for name, value in plain.state_dict().items():
            assert (state[name] - value).abs().max() <= 2e-6 * max(1.0, value.abs().max()), name


@sampled
@pytest.mark.parametrize("hosts", ["aabbb", "aabba", "aabbc"])
@pytest.mark.parametrize("plan", ["zero1", "zero3", "hpz"])
def test_one_comes_in_the_place_of_a_lost_host(plan: str, hosts: str, tmp_path: Path) -> None:
    """Copies are kept again if the replacement is on another host than the survivors; results are the plain model's."""
    start = Net()
    _, plain = trained_alone(start, adamw, clip=None, scheduled=False)
    models = [copy.deepcopy(start) for _ in hosts]
    deaths = HostDiesAt({0: 40} if hosts[4] != "a" else {2: 40})

    def work(world: World, member: int) -> tuple[dict[str, torch.Tensor], int, tuple[str, ...]]:
        own = models[member]
        engine = sw.shard(own, PLANS[plan], optimizer=adamw(own), world=world)
        if member < NUM_RANKS:
            deaths(engine, member)
        state: dict[str, torch.Tensor] = {}
        while engine.num_steps < NUM_STEPS or not state:
            if engine.num_steps == NUM_STEPS:
                state = engine.state_dict()
                continue
            rank, size = engine.data_ranks
            x, y = (whole.tensor_split(size)[rank] for whole in batches()[engine.num_steps])
            engine.weigh(len(x), ROWS)
            engine.backward(loss_of(own(x), y))
            engine.step()
        inside.survival(engine).await_copies()
        found = state, engine.memory().kept_bytes, engine.world.hosts
        engine.close()
        return found

    results = run_members(NUM_RANKS, work, tmp_path, hosts=hosts, num_newcomers=1)
    assert len(results) == 3
    assert any(kept_bytes for _, kept_bytes, _ in results.values()) == ("c" in hosts)
    for state, _, _ in results.values():
        for name, value in plain.state_dict().items():
            assert (state[name] - value).abs().max() <= 2e-6 * max(1.0, value.abs().max()), name


class DiesBehindItsStep:
    """A member publishes that it has finished a step, and dies before the others have its updated parameters, as when
    the gather takes long."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at_step: int) -> None:
        self.at_step, self.monkeypatch = at_step, monkeypatch

    def __call__(self, engine: sw.Engine, member: int) -> None:
        if member != 1:
            return
        session, send = inside.session(engine), engine.world.transport.send
        assert isinstance(session, ElasticSession)
        share, is_lost = session.recovery._share_change_wishes, [False]
        mark_gathers(engine, self.at_step, is_lost, self.monkeypatch)

        def send_or_lose(tensor: torch.Tensor, rank: int, tag: int) -> Any:
            return Pending([], lambda: None) if is_lost[0] else send(tensor, rank, tag)

        def share_or_die(subject: str, refusal: str = "") -> None:
            if engine.num_steps == self.at_step:
                raise Killed
            share(subject, refusal)

        self.monkeypatch.setattr(engine.world.transport, "send", send_or_lose)
        self.monkeypatch.setattr(session.recovery, "_share_change_wishes", share_or_die)


@sampled
@pytest.mark.parametrize("name", ["zero1", "zero2"])
def test_a_rank_dies_with_what_it_has_updated_on_its_way(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault never interrupts a loop that averages weights between steps, where no step could be repeated."""
    model, plant = Net(), DiesBehindItsStep(monkeypatch, 3)
    _, plain = trained_alone(model, adamw, clip=None, scheduled=False)
    models = [copy.deepcopy(model) for _ in range(NUM_RANKS)]

    def work(world: World, member: int) -> dict[str, torch.Tensor]:
        own = models[member]
        average = torch.optim.swa_utils.AveragedModel(own)
        engine = sw.shard(own, PLANS[name], optimizer=adamw(own), world=world)
        plant(engine, member)
        while engine.num_steps < NUM_STEPS:
            x, y = (
                whole.tensor_split(engine.data_ranks[1])[engine.data_ranks[0]] for whole in batches()[engine.num_steps]
            )
            engine.weigh(len(x), ROWS)
            engine.backward(loss_of(own(x), y))
            engine.step()
            average.update_parameters(own)
        state = engine.state_dict()
        engine.close()
        return state

    results = run_members(NUM_RANKS, work, tmp_path, hosts=HOSTS["1 1 1 1"])
    assert sorted(results) == [0, 2, 3]
    for state in results.values():
        for key, whole in plain.state_dict().items():
            assert (state[key].float() - whole).abs().max() <= 2e-6 * max(1.0, whole.abs().max()), key
