"""Ranks with parameters or states on a disk are lost, or their disks fail: the others go on from what is on the disk of
their host, or was copied to that of another one, and end with the results of the unsharded model."""

from __future__ import annotations

import errno
import random
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from broken_disks import BreakingOfOne, SilentOfOne
from split_models import TENSOR, tokens
from torch import nn

import shardwise as sw
from shardwise.comm import World
from shardwise.elastic import copies, layouts, recovery
from shardwise.elastic.copies import CopyMeter
from shardwise.errors import LostStateError, TierError
from shardwise.memory import Copy, DiskMemory, disk_memory
from shardwise.program.buddies import CopyBytes, copy_bytes
from shardwise.program.image_bytes import image_bytes
from shardwise.runtime.activations import activation_offload, on_disk
from shardwise.system.disk import IoQueue, Patience, Removals, SystemCalls, TierFolder, remove_files_beside
from shardwise.testing import plant, run_ranks
from tests import inside
from tests.patience import PATIENCE
from tests.ranks.lost_groups import ROWS, DiesBefore, Layers, race_of
from tests.ranks.test_buddies import HOSTS, HostDiesAt
from tests.ranks.test_lost_ranks import (
    DISK,
    DISKS,
    NUM_RANKS,
    NUM_STEPS,
    PLANS,
    DiesAt,
    Net,
    adamw,
    batches,
    loss_of,
    race,
    update,
)
from tests.ranks.test_lost_ranks_states import compare, one, trained, two
from tests.ranks.test_lost_ranks_table import DiesCopying
from tests.ranks.threads_as_members import Killed, run_members
from tests.thorough import drawn, sampled, thorough_only

Make = Callable[[nn.Module], Sequence[torch.optim.Optimizer]]
AT = 2
"""After how many steps something happens."""
LOOPS = ("engine", "plain", "train_step")


@pytest.fixture(autouse=True)
def same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "_PORTION_BYTES", 4096)
    torch.manual_seed(0)  # Adam turns gradients near 0 into large steps in either direction, depending on rounding


class DiesAtNth:
    """A rank dies before the n-th thing that it does from a step on: an action of its program, or a collective."""

    def __init__(self, nth: int, rank: int = 1) -> None:
        self._nth, self._rank = nth, rank
        self.died = False

    def __call__(self, engine: sw.Engine, member: int) -> None:
        if member != self._rank:
            return
        left = self._nth

        def counted(_: int, num_steps: int, __: str) -> bool:
            nonlocal left
            left -= num_steps >= AT
            if left < 0:
                self.died = True
                raise Killed
            return False

        plant(counted, engine.world)


def lose_rank_1(name: str, dies: Any, folder: Path) -> None:
    void = race(DISKS[name], dies, folder, shares_memory=False)
    assert dies.died
    assert set(void) == {0, 2, 3}


@thorough_only("test_a_rank_dies_before_each_action has the same, at fixed points")
@sampled
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", DISKS)
def test_a_rank_dies_anywhere_with_rows_on_a_disk(name: str, loop: str, tmp_path: Path) -> None:
    for seed in range(drawn(1, 4)):
        draw = random.Random(f"{name} {loop} {seed}")
        dies = DiesAt.drawn(draw)
        race(DISKS[name], dies, tmp_path / str(seed), loop=loop, shares_memory=draw.random() < 0.5)


@sampled
@pytest.mark.parametrize("nth", range(60))
@pytest.mark.parametrize("name", DISKS)
def test_a_rank_dies_before_each_action(name: str, nth: int, tmp_path: Path) -> None:
    """In a step, which has up to 48, and in its commit. In the update of some units, others have been written to their
    second file, and go back to the first."""
    lose_rank_1(name, DiesAtNth(nth), tmp_path)


@thorough_only("test_lost_ranks_table.py has it without a disk")
@sampled
@pytest.mark.parametrize("name", DISKS)
def test_a_rank_dies_while_what_it_has_in_memory_is_copied(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_rank_1(name, DiesCopying(monkeypatch), tmp_path)


@sampled
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", DISKS)
def test_a_host_dies_anywhere_with_its_disk(name: str, loop: str, tmp_path: Path) -> None:
    for seed in range(drawn(1, 3)):
        dies, hosts = HostDiesAt.drawn(random.Random(f"{name} {loop} {seed}"))
        race(DISKS[name], dies, tmp_path / str(seed), loop=loop, hosts=hosts)


@thorough_only("test_a_host_dies_anywhere_with_its_disk has one such moment")
@sampled
@pytest.mark.parametrize("portion", list(range(3, 39, 2)))
@pytest.mark.parametrize("name", ["infinity", "params", "zero2"])
def test_a_host_dies_while_copies_of_its_files_are_on_their_way(name: str, portion: int, tmp_path: Path) -> None:
    void = race(DISKS[name], HostDiesAt({}, {1: portion}), tmp_path, hosts=HOSTS["2 2"])
    assert len(void) == 2, "a host was lost"


@thorough_only("test_lost_groups.py has it, with other axes")
@sampled
@pytest.mark.parametrize("death", [9, 30, 44, 60])
@pytest.mark.parametrize("preset", ["infinity", "zero3"])
def test_another_rank_comes_in_the_place_of_one_with_rows_on_a_disk(preset: str, death: int, tmp_path: Path) -> None:
    """It has a folder of its own beside those of the others, and is filled by them."""
    rows = {"grad": {"tier": "host"}, "optim": {"tier": "disk"}}
    plan = {"preset": preset, "rows": rows, "mesh": {"dp": -1}, "disk": str(tmp_path / "scratch")}
    sizes = race_of(Layers(), plan, DiesAt({2: death}), tmp_path, num_ranks=4, num_newcomers=1, least=4)
    assert sizes.keys() == {0, 1, 3, 4}
    assert all(one[-1] == 4 for one in sizes.values())


OTHERS: dict[str, tuple[dict[str, Any], Make, float]] = {
    "two optimizers": ({}, two, 2e-6),
    "fp16": ({"precision": "fp16", "loss_scale": {"initial": 2.0**24, "hysteresis": 1}}, one, 2e-2),
    "bf16": ({"precision": "bf16"}, one, 2e-2),
    "checksums": ({"disk_checksums": True}, one, 2e-6),
}


@thorough_only("two things at once; the tests beside it have each")
@sampled
@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("deaths", [{1: 40}, {0: 41, 2: 60}, {3: 50}], ids=str)
@pytest.mark.parametrize("case", OTHERS)
@pytest.mark.parametrize("name", ["infinity", "params"])
def test_other_states_on_a_disk(name: str, case: str, deaths: dict[int, int], saves: bool, tmp_path: Path) -> None:
    """A step that has two updates of a file, or none; and files that a checkpoint is written from in the background."""
    edits, make, bound = OTHERS[case]
    plan = {**DISKS[name], "disk": str(tmp_path / "scratch"), **edits}
    images = tmp_path / "images"
    images.mkdir()

    def save(engine: sw.Engine) -> None:
        if saves:
            engine.save(tmp_path / "checkpoints", wait=False)
            if engine.num_steps == NUM_STEPS:
                engine.wait_for_save()

    whole = trained(plan, make, {}, images)[0]
    compare(trained(plan, make, deaths, images, after_step=save), whole, bound)
    assert not list(images.iterdir())
    assert not list((tmp_path / "scratch").iterdir())


# -- disks that fail --------------------------------------------------------------------------------------


class Breaks:
    """The disk of rank 1 breaks after so many steps, for `verb`, with an errno."""

    def __init__(self, disk: BreakingOfOne, verb: str, left: int, code: int = errno.EIO) -> None:
        self._disk, self._verb = disk, verb
        self._left, self._code = left, code

    def __call__(self, engine: sw.Engine, member: int) -> None:
        if member != 1:
            return

        def breaks(_: int, num_steps: int, __: str) -> bool:
            if num_steps == AT and not self._disk.breaks:
                self._disk.breaks, self._disk.left, self._disk.code = self._verb, self._left, self._code
            return False

        plant(breaks, engine.world)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> BreakingOfOne:
    broken = BreakingOfOne()
    monkeypatch.setattr(disk_memory, "TierFolder", partial(TierFolder, calls=broken))
    return broken


FAILS = [
    *(("write", left, code) for left in (0, 2) for code in (errno.EIO, errno.ENOSPC)),
    *(("read", left, errno.EIO) for left in (0, 3)),
]


@sampled
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(("verb", "left", "code"), FAILS)
@pytest.mark.parametrize("name", ["infinity", "params", "zero2"])
def test_a_rank_whose_disk_fails_is_lost(
    name: str, verb: str, left: int, code: int, loop: str, tmp_path: Path, disk: BreakingOfOne
) -> None:
    """What cannot be read is lost with the disk: not even those of its host try, and copies on another one are read."""
    hosts = "aabb" if verb == "read" else ""
    void = race(DISKS[name], Breaks(disk, verb, left, code), tmp_path, loop=loop, hosts=hosts, dies_of=TierError)
    assert disk.breaks == verb
    assert set(void) == {0, 2, 3}
    assert set(void.values()) <= ({1, 2} if hosts else {1}), "also the last one, if its copies were on their way"


def test_the_error_of_a_failing_disk_names_it(tmp_path: Path, disk: BreakingOfOne) -> None:
    told: list[str] = []
    models = [Net() for _ in range(NUM_RANKS)]
    breaks = Breaks(disk, "write", 0, errno.ENOSPC)

    def work(world: World, member: int) -> int:
        own, plan = models[member], {**DISKS["infinity"], "disk": str(tmp_path / "scratch")}
        engine = sw.shard(own, plan, optimizer=adamw(own), world=world)
        breaks(engine, member)
        try:
            while engine.num_steps < NUM_STEPS:
                x, y = batches()[engine.num_steps]
                engine.train_step(x, y, loss_fn=loss_of)
        except TierError as error:
            told.append(str(error))
            raise Killed from error
        engine.close()
        return engine.num_void

    assert set(run_members(NUM_RANKS, work, tmp_path)) == {0, 2, 3}
    (error,) = told
    assert "The disk of rank 1 failed in a step" in error
    assert f"{tmp_path}/scratch/shardwise-rank-1.rows-" in error
    assert "No space left on device (ENOSPC). Make room on that disk, or name another folder." in error
    assert "the others go on without it" in error


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[SilentOfOne]:
    disk = SilentOfOne()
    monkeypatch.setattr(disk_memory, "TierFolder", partial(TierFolder, calls=disk))
    yield disk
    disk.goes_on.set()


@sampled
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("verb", ["write", "read"])
@pytest.mark.usefixtures("every_activation")
@pytest.mark.parametrize("name", ["infinity", "params", "zero2", "activations"])
def test_a_rank_whose_disk_answers_nothing_is_lost(
    name: str, verb: str, loop: str, tmp_path: Path, silent: SilentOfOne
) -> None:
    """It finds that by itself, as it waits."""

    def falls_silent(engine: sw.Engine, member: int) -> None:
        def at(_: int, num_steps: int, __: str) -> bool:
            if num_steps == AT:
                silent.verb = verb
                disk = inside.sharded(engine).disk
                assert disk is not None
                disk.patience.seconds = 0.0
            return False

        if member == 1:
            plant(at, engine.world)

    hosts = "aabb" if verb == "read" else ""
    plan = with_activations("zero1", tmp_path) if name == "activations" else DISKS[name]
    void = race(plan, falls_silent, tmp_path, loop=loop, model=Deep(), hosts=hosts, dies_of=TierError)
    assert set(void) == {0, 2, 3}


def test_a_lost_ranks_disk_that_answers_nothing_is_given_up_and_not_its_readers(
    tmp_path: Path, silent: SilentOfOne
) -> None:
    lost = DiskMemory(tmp_path / "lost", 1, job="1", keeps_versions=True)
    paths = [lost.rows("a", 4096).file.path]
    reader = DiskMemory(tmp_path / "own", 0, queue=IoQueue(1, 4096, Patience("own", PATIENCE)), job="1")
    mine = reader.rows("b", 4096)
    mine.part(0, 0, [16], torch.float32)
    found = reader.rows_of_other("a", paths, 4096)
    silent.verb, found.file.queue.patience.seconds = "read", 0.0
    with pytest.raises(TierError, match=f"^{tmp_path}/lost, the disk of a lost rank, has answered nothing for 0 s"):
        found.read(found.part(0, 0, [16], torch.float32))
    mine.write(mine.part(0, 0, [16], torch.float32), torch.arange(16.0))
    assert mine.read(mine.part(0, 0, [16], torch.float32)).tolist() == list(range(16))
    assert not reader.patience.is_over
    reader.close()
    assert not list((tmp_path / "own").iterdir())
    silent.goes_on.set()
    lost.close()


def test_one_rank_alone_waits_for_a_lost_ranks_disk_that_answers_nothing(
    tmp_path: Path, silent: SilentOfOne, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others do not try again what it could not read."""
    ended: dict[int, Exception] = {}
    models = [Net() for _ in range(NUM_RANKS)]
    monkeypatch.setattr(disk_memory, "Patience", lambda name, _: Patience(name, 0.0))  # for disks of lost ranks

    def work(world: World, member: int) -> None:
        own, plan = models[member], {**DISKS["infinity"], "disk": str(tmp_path / "scratch")}
        engine = sw.shard(own, plan, optimizer=adamw(own), world=world)

        def dies(_: int, num_steps: int, __: str) -> bool:
            if num_steps == AT:
                silent.verb = "read"
                raise Killed
            return False

        if member == 1:
            plant(dies, engine.world)
        try:
            while engine.num_steps < NUM_STEPS:
                x, y = batches()[engine.num_steps]
                engine.train_step(x, y, loss_fn=loss_of)
        except (TierError, LostStateError) as error:
            ended[member] = error
            raise Killed from error

    assert not run_members(NUM_RANKS, work, tmp_path)
    kinds = {member: type(error) for member, error in ended.items()}
    assert kinds == {0: LostStateError, 2: TierError, 3: LostStateError}
    assert f"{tmp_path}/scratch, the disk of a lost rank, has answered nothing" in str(ended[2])
    assert "no whole state is left" in str(ended[0])


def test_nobody_waits_for_the_disk_of_a_lost_rank_that_deletes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    goes_on, asked = threading.Event(), threading.Event()

    def remove(path: Path) -> None:
        asked.set()
        assert goes_on.wait(PATIENCE)
        remove_files_beside(path)

    def at_the_end(removals: Removals, seconds: float) -> list[Path]:
        assert seconds == recovery.REMOVAL_SECONDS
        assert asked.wait(PATIENCE), "some rank of the host deletes them"
        goes_on.set()
        return [*settle(removals, PATIENCE), Path("scratch/rows-7")]

    settle = Removals.settle
    monkeypatch.setattr(layouts, "remove_files_beside", remove)
    monkeypatch.setattr(Removals, "settle", at_the_end)
    void = race(DISKS["infinity"], DiesAt({1: 40}), tmp_path, shares_memory=False)
    assert set(void) == {0, 2, 3}
    assert "could not be deleted, as their disk has failed or answers nothing: scratch/rows-7. The next" in caplog.text


def test_a_rank_without_room_for_more_is_lost_when_another_is(tmp_path: Path, disk: BreakingOfOne) -> None:
    """The ranks that are left have more of the model. One finds no room on its disk, and the others have it."""

    dies = DiesAt({3: 30})

    def die_or_fill(engine: sw.Engine, member: int) -> None:
        dies(engine, member)
        if member == 1:  # files are made as the job begins, and then when a rank is lost
            disk.breaks, disk.code = "reserve", errno.ENOSPC

    void = race(DISKS["infinity"], die_or_fill, tmp_path, dies_of=TierError)
    assert set(void) == {0, 2}


# -- activations on a disk ---------------------------------------------------------------------------------


@pytest.fixture
def every_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    """All activations of a small model go to the disk, and are written at once."""
    monkeypatch.setattr(activation_offload, "SMALL_BYTES", 0)
    monkeypatch.setattr(on_disk, "BEHIND_BYTES", 1)


class Deep(nn.Module):
    """Two blocks, whose activations a plan may treat."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh()) for _ in range(2)
        )
        self.head = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.head(x)
        return result


def with_activations(name: str, folder: Path) -> dict[str, Any]:
    return {**{**PLANS, **DISKS}[name], "activations": "disk", "disk": str(folder / DISK)}


@pytest.mark.usefixtures("every_activation")
@sampled
@pytest.mark.parametrize("loop", [*LOOPS, "averaged"])
@pytest.mark.parametrize("death", range(3, 60, 4))
@pytest.mark.parametrize("name", ["ddp", "zero1", "zero3", "hpz", "infinity", "params"])
def test_a_rank_dies_anywhere_with_activations_on_a_disk(name: str, death: int, loop: str, tmp_path: Path) -> None:
    dies = DiesAt({death % NUM_RANKS: death})
    race(with_activations(name, tmp_path), dies, tmp_path, loop=loop, model=Deep())


@pytest.mark.usefixtures("every_activation")
@sampled
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(("verb", "code"), [("write", errno.EIO), ("write", errno.ENOSPC), ("read", errno.EIO)])
@pytest.mark.parametrize("name", ["ddp", "zero3", "params"])
def test_a_rank_whose_disk_fails_for_its_activations_is_lost(
    name: str, verb: str, code: int, loop: str, tmp_path: Path, disk: BreakingOfOne
) -> None:
    """Where rows are on a disk that cannot be read, another host has copies."""
    hosts = "aabb" if name in DISKS and verb == "read" else ""
    plan = with_activations(name, tmp_path)
    breaks = Breaks(disk, verb, 0, code)
    void = race(plan, breaks, tmp_path, loop=loop, model=Deep(), hosts=hosts, dies_of=TierError)
    assert disk.breaks == verb
    assert set(void) == {0, 2, 3}


class Full(SystemCalls):
    """A disk on which member 1 finds no free byte, once it is full."""

    def __init__(self) -> None:
        self.is_full = False

    def free_bytes(self, folder: Path) -> int:
        is_of_one = threading.current_thread().name == "member 1"
        return 0 if self.is_full and is_of_one else super().free_bytes(folder)


@pytest.mark.usefixtures("every_activation")
def test_a_rank_without_room_for_the_activations_of_more_samples_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a rank is lost, the others have more samples each, and ask for room again."""
    calls, told = Full(), []
    monkeypatch.setattr(disk_memory, "TierFolder", partial(TierFolder, calls=calls))
    failure = DiskMemory.failure

    def telling(disk: DiskMemory, why: str) -> TierError:
        error = failure(disk, why)
        told.append(str(error))
        return error

    monkeypatch.setattr(DiskMemory, "failure", telling)

    def die_or_fill(engine: sw.Engine, member: int) -> None:
        def dies(_: int, num_steps: int, __: str) -> bool:
            if member == 3 and num_steps == AT:
                calls.is_full = True
                raise Killed
            return False

        plant(dies, engine.world)

    void = race(with_activations("zero1", tmp_path), die_or_fill, tmp_path, model=Deep(), dies_of=TierError)
    assert set(void) == {0, 2}
    (error,) = told
    assert re.match(
        rf"The disk of rank 1 failed when room for activations was asked for\. {tmp_path}/disk has 0 B free, and "
        r".* are needed: .* too little\. .* This rank ends; the others go on without it\.",
        error,
    )


class Averaged(Layers):
    """A loop that averages its loss for people before it sends it back."""

    def take_step(
        self, loop: str, engine: sw.Engine, optimizer: torch.optim.Optimizer, step: int, place: int, num: int
    ) -> torch.Tensor:
        batch = tokens(step, ROWS).tensor_split(num)[place]
        engine.weigh(len(batch), ROWS)
        loss: torch.Tensor = engine.module(batch)
        engine.mean(loss.item())
        update(loop, engine, optimizer, loss)
        return loss


@thorough_only("five ranks, for a moment between two of test_a_rank_dies_anywhere_with_activations_on_a_disk")
@pytest.mark.usefixtures("every_activation")
def test_what_a_spare_had_on_its_disk_is_dropped_and_its_backward_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hears of the loss between a forward and its backward, opens its folder anew as it comes back, and then sends
    back what it had computed before."""
    were_dropped: list[bool] = []
    fetch = on_disk._OnDisk.fetch

    def noting(away: on_disk._OnDisk, out: torch.Tensor) -> Copy:
        were_dropped.append(away._is_dropped)
        return fetch(away, out)

    monkeypatch.setattr(on_disk._OnDisk, "fetch", noting)
    plan = {"preset": "zero2", "mesh": {"dp": 2, "tp": 2}, "tensor": TENSOR, "activations": "disk", "disk": "scratch"}
    fault = DiesBefore(0, AT, "gather of weighed mean", nth=2)  # the first is of the step before
    sizes = race_of(Averaged(), plan, fault, tmp_path, loop="plain", num_newcomers=1, least=4)
    assert fault.is_dead
    assert sizes.keys() == {1, 2, 3, 4}
    assert set(were_dropped) == {False, True}
    assert all(one[-1] == 4 for one in sizes.values())


# -- what it costs -----------------------------------------------------------------------------------------


class Counting(SystemCalls):
    """Counts the bytes that are read and written."""

    def __init__(self) -> None:
        self.num_read = self.num_written = 0
        self._lock = threading.Lock()

    def read(self, handle: int, into: memoryview, offset: int) -> int:
        num_bytes = super().read(handle, into, offset)
        with self._lock:
            self.num_read += num_bytes
        return num_bytes

    def write(self, handle: int, data: memoryview, offset: int) -> int:
        num_bytes = super().write(handle, data, offset)
        with self._lock:
            self.num_written += num_bytes
        return num_bytes


@sampled
@pytest.mark.parametrize("name", ["infinity", "params", "zero2", "a share"])
def test_two_versions_take_no_byte_more_to_read_and_write(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []
    for is_elastic in (False, True):
        calls, models = Counting(), [Net() for _ in range(2)]
        monkeypatch.setattr(disk_memory, "TierFolder", partial(TierFolder, calls=calls))

        def work(world: World, member: int = 0, models: list[nn.Module] = models) -> None:
            own, plan = models[world.rank], {**DISKS[name], "disk": str(tmp_path / "scratch")}
            with sw.shard(own, plan, optimizer=adamw(own), world=world) as engine:
                assert (engine.memory().image_bytes_on_disk > 0) == (world.membership is not None)
                for x, y in batches():
                    engine.train_step(x, y, loss_fn=loss_of)

        run_members(2, work, tmp_path) if is_elastic else run_ranks(2, work)
        counts.append((calls.num_read, calls.num_written))
    assert counts[0] == counts[1]
    assert min(counts[0]) > 0


@sampled
@pytest.mark.parametrize("name", ["infinity", "params", "zero2", "a share"])
@pytest.mark.parametrize("hosts", ["", "aabb"])
def test_versions_and_copies_cost_what_is_promised(name: str, hosts: str, tmp_path: Path) -> None:
    models = [Net() for _ in range(NUM_RANKS)]

    def work(world: World, member: int) -> tuple[CopyMeter, sw.MemoryReport, int, CopyBytes]:
        own, plan = models[member], {**DISKS[name], "disk": str(tmp_path / "scratch")}
        with sw.shard(own, plan, optimizer=adamw(own), world=world) as engine:
            for x, y in batches():
                rank, size = engine.data_ranks
                engine.train_step(x.tensor_split(size)[rank], y.tensor_split(size)[rank], loss_fn=loss_of)
            engine.state_dict()
            inside.survival(engine).await_copies()
            specs = [flat.spec for flat in inside.flats(engine)]
            here = inside.sharded(engine).mesh.coordinate(world.rank)
            second = image_bytes(specs, 2, here).on_disk
            return inside.recovery(engine).copy_meter, engine.memory(), second, copy_bytes(specs, 2, hosts or "aaaa")

    for meter, report, second, promised in run_members(NUM_RANKS, work, tmp_path, hosts=hosts).values():
        assert report.image_bytes_on_disk == second + promised.kept_on_disk
        if hosts:
            slack = 8 * 3 * 64 + 4096  # as of copies in memory
            per_step = (meter.sent_bytes - 2 * promised.sent_once) / meter.num_copies
            assert per_step <= promised.sent + slack
            assert meter.sent_bytes >= meter.num_copies * promised.kept_on_disk // 4
