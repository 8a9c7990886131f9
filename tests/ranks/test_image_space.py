"""Hosts without memory for images: all ranks raise one error with a remedy, instead of continuing with fewer ranks."""

from __future__ import annotations

import contextlib
import copy
import errno
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.comm import World
from shardwise.elastic import copies, image_space, recovery, survival
from shardwise.elastic.state_image import Directory, Image
from shardwise.errors import StateError
from tests.ranks.lost_groups import AXES, DiesBefore, Layers, race_of
from tests.ranks.threads_as_members import Killed, run_members
from tests.thorough import sampled


def trains(steps: int, dies_at: int = -1, **plan: str) -> Callable[[World, int], str]:
    """A rank's work, which returns the error that it raised. Member 1 dies before step `dies_at`."""
    models = [nn.Linear(16, 16) for _ in range(4)]

    def work(world: World, member: int) -> str:
        model = models[member]
        try:
            optimizer = torch.optim.Adam(model.parameters())
            engine = sw.shard(model, {"preset": "zero3", **plan}, optimizer=optimizer, world=world)
            while engine.num_steps < steps:
                if member == 1 and engine.num_steps == dies_at:
                    raise Killed
                engine.backward(engine(torch.ones(2, 16)).sum())
                engine.step()
        except StateError as error:
            return str(error)
        return ""

    return work


WIDTH, ROOM, ROOM_OF_HOST = 128, 575_000, 700_000
"""Of a model, and bytes for 1.4 images of each of three ranks that have it by `zero3`, and for 1.6 of each of four
ranks that are on two hosts, with copies of the other host's."""


def size_of(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):  # deleted by its rank meanwhile
        return path.stat().st_size
    return 0


def has_no_space(monkeypatch: pytest.MonkeyPatch, fails: Callable[[Path], bool]) -> None:
    create = Image.create

    def and_fail(path: Path | None, directory: Directory) -> Image:
        if path is not None and fails(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        return create(path, directory)

    monkeypatch.setattr(survival.Image, "create", and_fail)


@pytest.fixture
def has_no_other_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images cannot wait for space."""
    monkeypatch.setattr(recovery, "memory_to_wait_in", lambda _world: 0)


@sampled
@pytest.mark.usefixtures("has_no_other_memory")
@pytest.mark.parametrize("moment", ["at the start", "in the first step", "in recovery"])
def test_all_ranks_raise_where_one_has_no_space(moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Space for one rank's image is refused, while the others have got space for theirs."""
    lock, seen = threading.Lock(), {"layouts": set[str](), "refused": 0}

    def fails(path: Path) -> bool:
        name, number = path.stem.rsplit("-", 1)
        with lock:
            layouts: Any = seen["layouts"]
            layouts.add(name)
            is_due = {
                "at the start": number == "0",
                "in the first step": number == "1",
                "in recovery": len(layouts) > 3,
            }[moment]
            if is_due and not seen["refused"]:
                seen["refused"] = 1
                return True
        return False

    has_no_space(monkeypatch, fails)
    results = run_members(3, trains(4, dies_at=2 if moment == "in recovery" else -1), tmp_path)
    assert seen["refused"] == 1
    assert len(results) == (2 if moment == "in recovery" else 3)
    assert len(set(results.values())) == 1
    said = next(iter(results.values()))
    assert "/dev/shm has no space for the state that must outlive a rank" in said
    assert "--shm-size" in said
    assert "survive: checkpoint" in said
    assert ("All ranks start again from the last checkpoint." in said) == (moment == "in recovery")


def in_little_memory(monkeypatch: pytest.MonkeyPatch, has_room: Callable[[Path], bool]) -> list[Directory]:
    """Refuse images for which, once they are there, a host's memory has no room. Returns what lies in those that wait
    in other memory, as they come."""
    create, lock, waited = Image.create, threading.Lock(), list[Directory]()

    def where_there_is_room(path: Path | None, directory: Directory) -> Image:
        with lock:
            image = create(path, directory)
            if path is None:
                waited.append(directory)
            if path is None or has_room(path):
                return image
        path.unlink()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(survival.Image, "create", where_there_is_room)
    return waited


@pytest.mark.parametrize("hosts", ["", "aabb"])
def test_images_wait_for_the_space_of_old_ones(hosts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of a host has room for its images once and a half. Member 1 dies, another comes in its place, and member 2
    dies, when all images have moved to where others can read them."""
    room = ROOM_OF_HOST if hosts else ROOM
    waited = in_little_memory(monkeypatch, lambda path: sum(map(size_of, path.parent.glob("*.image"))) <= room)

    def work(world: World, member: int) -> torch.Tensor:
        model = models[member]
        optimizer = torch.optim.Adam(model.parameters())
        engine = sw.shard(model, "zero3", optimizer=optimizer, world=world)
        while engine.num_steps < 12:
            if engine.num_steps == {1: 2, 2: 8}.get(member):
                raise Killed
            engine.backward(engine(torch.ones(2, WIDTH)).mean())
            engine.step()
        return engine.get("weight")

    num_ranks = len(hosts) or 3
    plain = nn.Linear(WIDTH, WIDTH)
    models = [copy.deepcopy(plain) for _ in range(num_ranks + 1)]
    folder_hosts = hosts + "b" if hosts else ""
    results = run_members(num_ranks, work, tmp_path, num_newcomers=1, hosts=folder_hosts)
    assert waited
    assert len(results) == num_ranks - 1
    optimizer = torch.optim.Adam(plain.parameters())
    for _ in range(12):
        optimizer.zero_grad()
        plain(torch.ones(2, WIDTH)).mean().backward()
        optimizer.step()
    for weight in results.values():
        torch.testing.assert_close(weight, plain.weight.detach())


JOINS: dict[str, tuple[dict[str, Any], str]] = {
    "zero3": ({"preset": "zero3", "mesh": {"dp": 4}}, "engine"),
    "zero1": ({"preset": "zero1", "mesh": {"dp": 4}}, "engine"),
    "tp x dp": (AXES["tp"].plan("zero1"), "plain"),
    "pp x dp": (AXES["pp"].plan("zero1"), "train_step"),
    "host": ({"preset": "zero3-offload", "mesh": {"dp": 4}}, "train_step"),
}
"""Plans of four ranks, and loops."""


@sampled
@pytest.mark.parametrize("name", JOINS)
@pytest.mark.parametrize("point", ["exchange of commit", "* of verdict"])
@pytest.mark.parametrize("factor", [1.1, 1.45])
def test_ranks_are_lost_and_join_where_old_and_new_images_have_no_room(
    name: str, point: str, factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory has room for `factor` times the images of the first layout: some of the next one, with fewer ranks or with
    one that has joined, wait in other memory."""
    plan, loop = JOINS[name]
    first: dict[str, int] = {}
    """Bytes of the first layout, by the names of its images without their numbers."""

    def has_room(path: Path) -> bool:
        name = path.stem.rsplit("-", 1)[0]
        if len(first) < 4 or name in first:
            first[name] = size_of(path)
            return True
        return sum(map(size_of, path.parent.glob("*.image"))) <= factor * sum(first.values())

    waited = in_little_memory(monkeypatch, has_room)
    fault = DiesBefore(1, 2, point)
    sizes = race_of(Layers(), plan, fault, tmp_path, loop=loop, num_newcomers=1, least=2)
    assert fault.is_dead
    assert waited
    assert sizes.keys() == {0, 2, 3, 4}
    assert all(one[-1] == 4 for one in sizes.values())


@pytest.mark.usefixtures("has_no_other_memory")
@pytest.mark.parametrize("who", ["the one that joins", "one of the others"])
def test_others_go_on_where_there_is_no_space_for_one_that_joins(
    who: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Member 1 dies, member 3 joins and finds no space, or finds that another one has none; it ends alone."""
    lock, newcomer, refused = threading.Lock(), threading.Event(), list[str]()

    def fails(path: Path) -> bool:
        is_newcomers = threading.current_thread().name == "member 3"
        with lock:
            is_due = newcomer.is_set() and is_newcomers == (who == "the one that joins") and not refused
            if is_due:
                refused.append(path.name)
        return is_due

    has_no_space(monkeypatch, fails)
    train = trains(12, dies_at=2)

    def work(world: World, member: int) -> str:
        if member == 3:
            newcomer.set()
        said = train(world, member)
        if member == 3 and said:
            refused.append(said)
            raise Killed
        return said

    results = run_members(3, work, tmp_path, num_newcomers=1)
    assert results == {0: "", 2: ""}
    assert "/dev/shm has no space for the state that must outlive a rank" in refused[1]


@pytest.mark.parametrize("num_lacking", [1, 2])
def test_all_ranks_raise_where_one_has_no_space_for_a_copy(
    num_lacking: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hosts; of the second, which keeps copies of the first one's states, some have no space for them."""
    create, lock, refused = Image.create, threading.Lock(), list[Path]()

    def and_fail(path: Path | None, directory: Directory) -> Image:
        with lock:
            if path is not None and len(refused) < num_lacking:
                refused.append(path)
                raise OSError(errno.ENOSPC, "No space left on device")
        return create(path, directory)

    monkeypatch.setattr(copies, "Image", SimpleNamespace(create=and_fail))
    results = run_members(4, trains(4, survive="buddy"), tmp_path, hosts="aabb")
    assert len(refused) == num_lacking
    assert len(results) == 4
    (said,) = set(results.values())
    assert "has no memory for the copy of rank" in said
    assert "which takes" in said
    assert "survive: host" in said


@pytest.mark.parametrize("factor", [1.5, 2.5])
def test_memory_that_has_no_room_to_recover_in_is_warned_of(
    factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Memory is 1.5 or 2.5 times the size of the images. Recovery needs twice the size: 1.5 gives a warning."""

    def free_bytes(folder: Path) -> int:
        newest, others = (sum(map(size_of, folder.glob(f"*-{number}.image"))) for number in (1, 0))
        return int((factor - 1) * newest) - others

    monkeypatch.setattr(image_space, "_free_bytes", free_bytes)
    with caplog.at_level(logging.WARNING, logger="shardwise"):
        assert set(run_members(3, trains(2), tmp_path).values()) == {""}
    said = [one.getMessage() for one in caplog.records if "too little space for old and new" in one.getMessage()]
    assert len(said) == (1 if factor < 2 else 0)


def test_an_image_that_is_deleted_meanwhile_is_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As bytes of an image, and as free ones, it would pass for room that is not there."""
    for number in (0, 1):
        (tmp_path / f"0-{number}.image").write_bytes(bytes(100))

    def free_bytes(folder: Path) -> int:
        (folder / "0-0.image").unlink(missing_ok=True)
        return 50

    monkeypatch.setattr(image_space, "_free_bytes", free_bytes)
    with caplog.at_level(logging.WARNING, logger="shardwise"):
        image_space.warn_if_scarce(tmp_path, World.join(environment={}))
    assert "images take 100 B on this host, and 50 B are free" in caplog.text
