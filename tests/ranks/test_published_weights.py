"""Weights that samplers read while a job trains: announced only when they are whole, and never taken away from one that
uses them."""

from __future__ import annotations

import json
import pkgutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from twins import adamw, plan_of, work_on_ranks

import shardwise as sw
from shardwise.checkpoint import published
from shardwise.checkpoint.published import Published, Version, version_folder
from shardwise.comm import PostOffice, ThreadTransport
from shardwise.errors import CheckpointError, ConfigError
from tests import inside
from tests.drawing import drawing
from tests.models import Transformer
from tests.patience import PATIENCE
from tests.ranks.threads_as_members import Killed, run_members
from tests.thorough import sampled

WEIGHTS = "model.safetensors"


def on_ranks(work: Any, mesh: dict[str, int] | None = None) -> list[Any]:
    return work_on_ranks(2, work, plan_of("zero3", mesh), Transformer())


def train(engine: sw.Engine) -> None:
    engine.train_step(tuple(torch.full((4, 6), number) for number in (1, 2)))


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"pp": 2}])
def test_a_reader_follows_training(mesh: dict[str, int], tmp_path: Path) -> None:
    def work(engine: sw.Engine) -> list[Any]:
        seen = []
        for _ in range(3):
            train(engine)
            version = engine.publish(tmp_path, dtype="bf16")
            found = sw.published(tmp_path, after=version - 1)
            assert found is not None
            assert (found.version, sw.published(tmp_path, after=version)) == (version, None)
            stored, state = load_file(found.path / WEIGHTS), engine.state_dict()
            assert all(torch.equal(one, state[name].bfloat16()) for name, one in stored.items())
            seen.append(version)
        return seen

    assert on_ranks(work, mesh) == [[1, 2, 3]] * 2
    assert {path.name for path in tmp_path.glob("version-*")} == {"version-00000002", "version-00000003"}


def versions(folder: Path) -> set[int]:
    return {int(path.name.removeprefix("version-")) for path in folder.glob("version-*")}


def publish(folder: Path, number: int, keep: int = 1) -> None:
    """As the job does, without weights."""
    version_folder(folder, number).mkdir(parents=True)
    Version(folder, number, keep).announce()


def test_what_a_reader_reads_or_uses_stays(tmp_path: Path) -> None:
    publish(tmp_path, 0)
    for number in range(1, 7):
        if number in (2, 4):
            found = sw.published(tmp_path, reader="sampler-0")
            assert found is not None
            assert found.version == number - 1
        publish(tmp_path, number)
        if number == 3:
            Published(1, version_folder(tmp_path, 1)).acknowledge("sampler-0")
        expected = {0: {0}, 1: {1}, 2: {1, 2}, 3: {1, 3}}.get(number, {1, 3, number})
        assert versions(tmp_path) == expected
    assert sw.versions_in_use(tmp_path) == {"sampler-0": 1}, "it has not said that it uses version 3"
    Published(3, version_folder(tmp_path, 3)).acknowledge("sampler-0")
    publish(tmp_path, 7)
    assert versions(tmp_path) == {3, 7}
    assert sw.versions_in_use(tmp_path) == {"sampler-0": 3}
    sw.unpublish(tmp_path)
    assert not list(tmp_path.iterdir())
    assert sw.published(tmp_path) is None
    sw.unpublish(tmp_path / "never")


@pytest.mark.parametrize("place", ["before it says so", "after it has said so"])
def test_a_reader_never_gets_what_is_deleted(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the job does between two acts of a reader; see [Note: who may delete]."""
    publish(tmp_path, 1)
    say = published._say

    def meanwhile(*args: Any) -> None:
        monkeypatch.undo()
        if place == "after it has said so":
            say(*args)
        publish(tmp_path, 2)
        publish(tmp_path, 3)
        if place == "before it says so":
            say(*args)

    monkeypatch.setattr(published, "_say", meanwhile)
    found = sw.published(tmp_path, reader="sampler-0")
    assert found is not None
    assert found.path.is_dir()
    assert found.version == 3, "of two that are there it is the newer one"


def test_a_reader_that_comes_while_the_job_deletes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(tmp_path, 1)
    stale = published._latest(tmp_path)
    readers = published._readers
    found = []

    def as_it_was(_: Path) -> Any:
        monkeypatch.undo()
        return stale

    def and_then_comes(home: Path) -> Any:
        """The job has looked who reads what; a reader that has seen version 1 before says that it reads it."""
        seen = readers(home)
        monkeypatch.undo()
        monkeypatch.setattr(published, "_latest", as_it_was)
        found.append(sw.published(tmp_path, reader="sampler-0"))
        return seen

    monkeypatch.setattr(published, "_readers", and_then_comes)
    publish(tmp_path, 2)
    assert [one and one.version for one in found] == [2]


def test_a_version_is_mapped_and_not_read(tmp_path: Path) -> None:
    model = Transformer()
    expected = {name: one.clone() for name, one in model.state_dict().items()}
    with sw.shard(model, "zero1", world=sw.World(0, 1, ThreadTransport(PostOffice(), 0))) as engine:
        engine.publish(tmp_path)
        bytes_of_names = {weight.name: weight.num_bytes for weight in engine.weights().metadata()}
    found = sw.published(tmp_path)
    assert found is not None
    tensors = found.tensors()
    assert {name: one.nbytes for name, one in tensors.items()} == bytes_of_names
    assert len({one.untyped_storage().data_ptr() for one in tensors.values()}) == 1, "one mapping of the file"
    tensors["head.weight"].zero_()
    assert torch.equal(found.tensors()["head.weight"], expected["head.weight"]), "the file is as it was"
    again = found.tensors()
    sw.unpublish(tmp_path)
    fresh = Transformer()
    fresh.load_state_dict(again, assign=True)
    assert all(torch.equal(one, expected[name]) for name, one in fresh.state_dict().items())


ROWS = "shardwise.checkpoint.own_rows._put", "shardwise.checkpoint.published.Version.announce"
NO_SPACE = "no space is left"
GATHERED = "shardwise.checkpoint.formats.hf.HfWriter.write", ROWS[1]
"""What is done for a version: the first of its values, and the last act."""


def gather(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let weights be gathered, as where a rank does not see the folder."""
    place = "shardwise.checkpoint.publishing.Publisher._writers"
    writers = pkgutil.resolve_name(place)
    monkeypatch.setattr(place, lambda self, world, draft, _: writers(self, world, draft, "a test asks for that"))


@pytest.mark.parametrize("places", [ROWS, GATHERED])
def test_a_failure_leaves_readers_where_they_are(
    places: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At whatever point it fails, and whoever is told: this call, the one that waits, the next one, or the end."""
    failing, last = [""], list[str]()
    if places is GATHERED:
        gather(monkeypatch)
    for place in places:
        monkeypatch.setattr(place, unless(lambda place=place: failing[0] == place, pkgutil.resolve_name(place)))

    def work(engine: sw.Engine) -> None:
        def later() -> None:
            engine.publish(tmp_path, version=2, wait=False)
            engine.wait_for_publish()

        def next_time() -> None:
            engine.publish(tmp_path, version=2, wait=False)
            engine.publish(tmp_path, version=3)

        engine.publish(tmp_path, version=1)
        for place in places:
            for ask in (lambda: engine.publish(tmp_path, version=2), later, next_time):
                engine.world.barrier()
                failing[0] = place
                with pytest.raises(CheckpointError, match=r"Version 2 .* the version before") as error:
                    ask()
                said = [one.decode() for one in engine.world.exchange(str(error.value).encode())]
                assert_said(said, is_of_each=place == ROWS[0])
                found = sw.published(tmp_path)
                assert found is not None
                assert found.version == 1
                load_file(found.path / WEIGHTS)
        engine.world.barrier()
        failing[0] = ""
        engine.publish(tmp_path, version=2)
        assert sw.published(tmp_path, after=1) is not None
        engine.world.barrier()
        failing[0] = places[0]
        engine.publish(tmp_path, version=3, wait=False)
        if engine.world.rank == 0 or places is ROWS:
            with pytest.raises(CheckpointError, match=r"Version 3 ") as error:
                engine.close()
            last.append(str(error.value))

    on_ranks(work)
    assert_said(last, is_of_each=places is ROWS)
    assert not list(tmp_path.glob(".*"))


def assert_said(messages: list[str], *, is_of_each: bool) -> None:
    """All say why; where each rank writes, one may find only that the draft went when the other failed."""
    others = [one for one in messages if NO_SPACE not in one]
    assert len(others) < len(messages)
    assert all(is_of_each and "another rank has failed, and the draft is gone" in one for one in others), messages


@pytest.mark.parametrize("places", [ROWS, GATHERED])
@pytest.mark.parametrize("mesh", [{"dp": 2}, {"pp": 2}])
@sampled
def test_a_version_is_written_beside_the_next_steps(
    mesh: dict[str, int], places: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the values after the step that it is of, and nothing waits for the disk before it is asked to. A relative
    folder is that of the call."""
    monkeypatch.setattr("shardwise.checkpoint.own_rows.is_memory", lambda _: False)
    if places is GATHERED:
        gather(monkeypatch)
    monkeypatch.chdir(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    may_write = threading.Event()
    original = pkgutil.resolve_name(places[0])

    def write(*args: Any) -> None:
        assert may_write.wait(PATIENCE)
        original(*args)

    monkeypatch.setattr(places[0], write)

    def work(engine: sw.Engine) -> None:
        train(engine)
        expected = engine.state_dict()
        assert engine.publish(".", wait=False) == 1
        engine.world.barrier()
        monkeypatch.chdir(elsewhere)
        train(engine)
        assert sw.published(tmp_path) is None
        assert not torch.equal(engine.state_dict()["head.weight"], expected["head.weight"])
        engine.world.barrier()
        may_write.set()
        engine.wait_for_publish()
        engine.wait_for_publish()  # there is nothing to wait for any more
        found = sw.published(tmp_path)
        assert found is not None
        assert found.version == 1
        stored = load_file(found.path / WEIGHTS)
        assert stored
        assert all(torch.equal(one, expected[name]) for name, one in stored.items())
        assert engine.publish(tmp_path, wait=False) == 2

    on_ranks(work, mesh)
    assert sw.published(tmp_path, after=1) is not None, "the end waits for what is being written"


def test_what_is_written_at_once_is_never_far_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 holds no more than a tensor that waits, one that is written and one that comes."""
    given, written, behind = [0], [0], [0]
    place = "shardwise.checkpoint.publishing._Gathered.give"
    give, write = pkgutil.resolve_name(place), pkgutil.resolve_name(GATHERED[0])
    gather(monkeypatch)

    def counted_give(*args: Any) -> None:
        given[0] += 1
        behind[0] = max(behind[0], given[0] - written[0])
        give(*args)

    def counted_write(*args: Any) -> None:
        write(*args)
        written[0] += 1

    monkeypatch.setattr(place, counted_give)
    monkeypatch.setattr(GATHERED[0], counted_write)
    on_ranks(lambda engine: engine.publish(tmp_path))
    assert given == written
    assert given[0] > 5
    assert behind[0] <= 3


@pytest.mark.parametrize("rows", [True, False])
def test_a_rank_that_fails_meanwhile_leaves_nothing(
    rows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not rows:
        gather(monkeypatch)

    def work(engine: sw.Engine) -> None:
        engine.publish(tmp_path, version=1)
        engine.world.barrier()
        if engine.world.rank == 1:
            stop(engine, monkeypatch, ZeroDivisionError())
        engine.publish(tmp_path, version=2)

    with pytest.raises(ZeroDivisionError):
        on_ranks(work)
    assert sw.published(tmp_path, after=1) is None
    assert not list(tmp_path.glob(".*"))


def stop(engine: sw.Engine, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Let this rank, which is a thread, raise `error` in the middle of a version."""
    me, rows = threading.current_thread(), pkgutil.resolve_name("shardwise.checkpoint.own_rows.OwnRows.__init__")

    def fails(*_: Any) -> None:
        raise error

    def fails_here(*args: Any) -> None:
        if threading.current_thread() is me:
            raise error
        rows(*args)

    monkeypatch.setattr("shardwise.checkpoint.own_rows.OwnRows.__init__", fails_here)
    monkeypatch.setattr(inside.sharded(engine).parts.access, "_whole", fails)


@pytest.mark.parametrize("rows", [True, False])
@pytest.mark.parametrize("victim", [0, 2])
@sampled
def test_the_others_publish_when_a_rank_is_lost(
    victim: int, rows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not rows:
        gather(monkeypatch)
    images, folder = tmp_path / "images", tmp_path / "weights"
    images.mkdir()

    def work(world: sw.World, member: int) -> None:
        with drawing():
            torch.manual_seed(0)
            model = Transformer()
        with sw.shard(model, "zero3", optimizer=adamw(model), world=world) as engine:
            train(engine)
            if member == victim:
                stop(engine, monkeypatch, Killed())
            engine.publish(folder)
            found, state = sw.published(folder), engine.state_dict()
            assert found is not None
            assert found.version == 1
            assert all(torch.equal(one, state[name]) for name, one in load_file(found.path / WEIGHTS).items())

    assert len(run_members(3, work, images)) == 2
    assert not list(folder.glob(".*"))


def test_what_a_killed_job_leaves_goes(tmp_path: Path) -> None:
    """Drafts, and a version that was whole but never announced."""
    on_ranks(lambda engine: engine.publish(tmp_path, version=4))
    for name in (".writing-version-00000005", ".replaced-version-00000005", "version-00000009"):
        (tmp_path / name).mkdir()
    on_ranks(lambda engine: engine.publish(tmp_path, version=5, keep=1))
    assert {path.name for path in tmp_path.iterdir()} == {"version-00000005", "LATEST.json"}


def unless(fails: Callable[[], bool], original: Callable[..., None]) -> Callable[..., None]:
    def call(*args: Any) -> None:
        if fails():
            raise OSError(NO_SPACE)
        original(*args)

    return call


def test_what_cannot_be_next_is_refused(tmp_path: Path) -> None:
    def work(engine: sw.Engine) -> None:
        engine.publish(tmp_path, version=7)
        with pytest.raises(CheckpointError, match=r"has version 7, and readers look for a higher number .* 7 is not"):
            engine.publish(tmp_path, version=7)
        with pytest.raises(CheckpointError, match="keep at least 1"):
            engine.publish(tmp_path, version=8, keep=0)

    on_ranks(work)


def test_readers_wait_and_do_not_trust_what_is_announced(tmp_path: Path) -> None:
    now, paused = [0.0], []

    def pause(seconds: float) -> None:
        now[0] += seconds
        paused.append(seconds)

    assert sw.published(tmp_path, timeout=0.5, clock=lambda: now[0], pause=pause) is None
    assert sum(paused) == pytest.approx(0.5)
    for folder in ("version-00000009", "../elsewhere", "other", 3, None):
        (tmp_path / "LATEST.json").write_text(json.dumps({"version": 9, "folder": folder}))
        with pytest.raises(CheckpointError):
            sw.published(tmp_path)
    (tmp_path / "version-00000009").mkdir()
    (tmp_path / "LATEST.json").write_text(json.dumps({"version": 9, "folder": "version-00000009"}))
    found = sw.published(tmp_path)
    assert found is not None
    with pytest.raises(ConfigError, match="give one of letters"):
        found.acknowledge("../sampler")
