"""Saving in the background, which checkpoints are kept, what an engine remembers, and what a resume restores."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from twins import batches, work_on_ranks

import shardwise as sw
from shardwise.checkpoint import Keep, checkpoints_in, folder, write
from shardwise.checkpoint.index_schema import read_index
from shardwise.checkpoint.snapshot import Snapshot
from shardwise.errors import CheckpointError, ConfigError
from shardwise.testing import run_ranks
from tests import inside
from tests.models import Transformer
from tests.patience import PATIENCE
from tests.thorough import sampled


def start() -> Transformer:
    torch.manual_seed(0)
    return Transformer(num_blocks=1)


def on_ranks(num_ranks: int, work: Callable[[sw.Engine], Any], plan: Any = "zero3") -> list[Any]:
    return work_on_ranks(num_ranks, work, plan, start)


def train(engine: sw.Engine, num_steps: int = 1) -> None:
    for x, y in batches(num_steps):
        engine.backward(engine(x, y))
        engine.step()


def whole(engine: sw.Engine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.state_dict().items()}


class Slow:
    """Delays every write until the event `go` is set, which all ranks share."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        plain = write.write_at

        def held(handle: int, window: memoryview, offset: int) -> bool:
            assert self.go.wait(PATIENCE)
            return plain(handle, window, offset)

        monkeypatch.setattr(write, "write_at", held)


def test_a_background_save_is_of_the_moment_it_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training continues while it is written, without an effect on it. It becomes visible only when it is complete."""
    slow = Slow(monkeypatch)

    def work(engine: sw.Engine) -> None:
        train(engine, 2)
        expected = whole(engine)
        state = {"epochs": [1]}
        engine.save(tmp_path, wait=False, state=state)
        state["epochs"].append(2)
        train(engine, 2)
        assert checkpoints_in(tmp_path) == {}
        engine.world.barrier()
        slow.go.set()
        engine.wait_for_save()
        assert list(checkpoints_in(tmp_path)) == [2]
        resumed = engine.resume(tmp_path)
        assert resumed is not None
        assert resumed.state == {"epochs": [1]}
        there = whole(engine)
        assert all(torch.equal(expected[name], there[name]) for name in expected)

    on_ranks(2, work)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Until this event is set, background saves copy nothing."""
    go = threading.Event()
    plain = Snapshot._copy_rest

    def held(snapshot: Snapshot) -> None:
        assert go.wait(PATIENCE)
        plain(snapshot)

    monkeypatch.setattr(Snapshot, "_copy_rest", held)
    return go


def step_of(engine: sw.Engine) -> None:
    inside.member(engine).step()


def set_a_weight(engine: sw.Engine) -> None:
    engine.set("head.weight", torch.zeros_like(whole(engine)["head.weight"]))


def edit_a_weight(engine: sw.Engine) -> None:
    with engine.gathered("head.weight", write=True), torch.no_grad():
        engine.module.get_parameter("head.weight").zero_()


@sampled
@pytest.mark.parametrize("change", [step_of, set_a_weight, edit_a_weight, lambda engine: engine.load_state_dict(ZEROS)])
@pytest.mark.parametrize("plan", ["zero3", "ddp", {"preset": "zero3", "precision": "bf16"}])
def test_whatever_changes_values_waits_for_the_copy(
    tmp_path: Path, late: threading.Event, plan: Any, change: Callable[[sw.Engine], None]
) -> None:
    """Forward and backward run during the copy. A step, and edits through the engine, wait for it."""
    done: list[bool] = []

    def work(engine: sw.Engine) -> None:
        train(engine, 2)
        expected = whole(engine), engine.optimizer_state_dict()["state"]
        engine.save(tmp_path, wait=False)
        engine.backward(engine(*batches(1)[0]))
        engine.world.barrier()
        threading.Timer(0.1, lambda: (done.append(True), late.set())).start()
        change(engine)
        assert done
        engine.wait_for_save()
        engine.zero_grad()
        assert engine.resume(tmp_path) is not None
        there = whole(engine), engine.optimizer_state_dict()["state"]
        assert all(torch.equal(expected[0][name], there[0][name]) for name in expected[0])
        for number, states in expected[1].items():
            assert all(torch.equal(states[key], there[1][number][key]) for key in states)

    on_ranks(2, work, plan)


ZEROS = {name: torch.zeros_like(value) for name, value in Transformer(num_blocks=1).state_dict().items()}


@pytest.mark.parametrize("what", ["state", "shard"])
def test_a_change_by_hand_before_the_copy_is_refused(tmp_path: Path, late: threading.Event, what: str) -> None:
    """A checkpoint might contain half of the change, so none is written. Earlier ones stay, and training continues."""

    def work(engine: sw.Engine) -> str:
        train(engine)
        late.set()
        engine.save(tmp_path)
        train(engine)
        engine.world.barrier()
        late.clear()
        engine.world.barrier()
        engine.save(tmp_path, wait=False)
        optimizer = inside.adopted(engine)
        piece = next(piece for piece in optimizer.pieces if piece.span.numel)
        with torch.no_grad():
            (piece.tensor if what == "shard" else optimizer.state_of(piece)["exp_avg"]).mul_(2)
        late.set()
        with pytest.raises(CheckpointError) as caught:
            engine.wait_for_save()
        train(engine)
        resumed = engine.resume(tmp_path)
        assert resumed is not None
        assert resumed.step == 1
        return str(caught.value)

    messages = on_ranks(2, work)
    assert messages[0] == messages[1]
    assert "was changed by hand while it was being copied" in messages[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001"]


def test_what_the_model_shows_may_change_at_once(tmp_path: Path, late: threading.Event) -> None:
    """Loops clamp and average parameters by hand, also in ways that torch does not count. These writes wait."""

    def work(engine: sw.Engine) -> None:
        train(engine)
        expected = whole(engine)
        engine.save(tmp_path, wait=False)
        late.set()
        for param in engine.module.parameters():  # waits for the copy, whichever way it is written to
            param.data.clamp_(-0.001, 0.001)
        engine.wait_for_save()
        assert engine.resume(tmp_path) is not None
        there = whole(engine)
        assert all(torch.equal(expected[name], there[name]) for name in expected)

    on_ranks(2, work, "ddp")


def test_a_file_that_cannot_be_opened_does_not_hold_up_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(path: Path, flags: int) -> tuple[int, bool]:
        raise PermissionError(13, "Permission denied", str(path))

    def work(engine: sw.Engine) -> None:
        train(engine)
        engine.save(tmp_path, wait=False)
        train(engine)
        with pytest.raises(CheckpointError, match="Permission denied"):
            engine.wait_for_save()
        train(engine)

    monkeypatch.setattr(write, "open_direct", closed)
    on_ranks(2, work)


def test_a_relative_folder_is_that_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the loop goes to another folder before the file is written; the same name is another folder then."""
    monkeypatch.chdir(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    slow = Slow(monkeypatch)

    def work(engine: sw.Engine) -> None:
        train(engine)
        path = engine.save("kept", wait=False)
        engine.world.barrier()
        os.chdir(elsewhere)
        slow.go.set()
        engine.wait_for_save()
        assert path == tmp_path / "kept" / "step-00000001"
        assert engine.save("kept") == elsewhere / "kept" / "step-00000001"

    on_ranks(2, work)
    for kept in (tmp_path / "kept", elsewhere / "kept"):
        assert list(checkpoints_in(kept)) == [1]
        assert not (kept / ".lock").exists(), "and both are free again"


def test_saves_queue_up_one_deep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second save waits for the first. Both are good, and memory for one is enough."""
    slow = Slow(monkeypatch)

    def work(engine: sw.Engine) -> int:
        train(engine)
        engine.save(tmp_path, wait=False)
        memory = inside.saver(engine)._stage._memory.data_ptr()
        threading.Timer(0.2, slow.go.set).start()
        train(engine)
        engine.save(tmp_path, wait=False)
        assert slow.go.is_set()
        assert inside.saver(engine)._stage._memory.data_ptr() == memory
        return 0

    on_ranks(2, work)  # the engine closes, and so waits for the second
    assert list(checkpoints_in(tmp_path)) == [1, 2]


@sampled
@pytest.mark.parametrize("surfaces", ["save", "resume", "wait_for_save", "close"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_behind_the_back_comes_to_light(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, surfaces: str, rank: int
) -> None:
    """The next call that concerns checkpoints raises the same error on all ranks. The earlier checkpoint stays."""
    plain = write.write_at

    def full(handle: int, window: memoryview, offset: int) -> bool:
        if os.readlink(f"/proc/self/fd/{handle}").endswith(f"rank-{rank:05d}.safetensors") and armed.is_set():
            raise OSError(28, "No space left on device")
        return plain(handle, window, offset)

    armed = threading.Event()
    monkeypatch.setattr(write, "write_at", full)
    messages: dict[int, str] = {}

    def work(engine: sw.Engine) -> None:
        train(engine)
        engine.save(tmp_path)
        engine.world.barrier()
        armed.set()
        train(engine)
        engine.save(tmp_path, wait=False)
        train(engine)
        if surfaces == "close":
            try:
                engine.close()
            except CheckpointError as error:
                messages[engine.world.rank] = str(error)
            return
        calls = {"save": lambda: engine.save(tmp_path), "resume": lambda: engine.resume(tmp_path)}
        with pytest.raises(CheckpointError) as caught:
            calls.get(surfaces, engine.wait_for_save)()
        messages[engine.world.rank] = str(caught.value)
        engine.world.barrier()
        armed.clear()
        resumed = engine.resume(tmp_path)
        assert resumed is not None
        assert resumed.step == 1
        train(engine)
        engine.save(tmp_path)

    on_ranks(2, work)
    assert "step-00000002 could not be written" in messages[0]
    assert "No space left" in messages[0]
    if surfaces == "close":
        assert 0 in messages  # rank 0 learns of every rank's failure, others of their own
    else:
        assert messages[0] == messages[1]
        assert str(tmp_path) in messages[0]
    assert not list(tmp_path.glob(".writing-*"))
    assert 1 in checkpoints_in(tmp_path)


def test_a_rank_that_never_finishes_is_named(tmp_path: Path) -> None:
    """Rank 1 never writes its file, while the others' files exist. Rank 0 gives up after a while, and names rank 1."""

    def work(engine: sw.Engine) -> None:
        train(engine)
        inside.saver(engine)._timeout_seconds = 0.3
        if engine.world.rank == 1:
            inside.saver(engine)._write_behind = lambda *_: None
        engine.save(tmp_path, wait=False)
        with pytest.raises(
            CheckpointError, match="rank 1 has not finished its file, and the file has not grown for 300 ms"
        ):
            engine.wait_for_save()

    on_ranks(2, work)
    assert checkpoints_in(tmp_path) == {}


def test_a_disk_without_room_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 50 * 1024

    def work(engine: sw.Engine) -> None:
        train(engine)
        engine.save(tmp_path)
        engine.world.barrier()
        if engine.world.rank == 0:
            monkeypatch.setattr(folder.shutil, "disk_usage", lambda _: Usage)
        engine.world.barrier()
        train(engine)
        with pytest.raises(CheckpointError, match=r"takes 1\.\d MiB, but its file system has 50\.0 KiB free"):
            engine.save(tmp_path, wait=False)

    on_ranks(2, work)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001"]


def test_what_is_kept(tmp_path: Path) -> None:
    """Over two runs: the second one reads the metrics of the first from its checkpoints."""
    losses = [5.0, 1.0, 4.0, 3.0, 2.0, 6.0, 7.0]
    keep = Keep(last=2, every=4, best="loss")

    def work(engine: sw.Engine) -> None:
        for step in steps:
            engine.save(tmp_path, step=step, keep=keep, metrics={"loss": losses[step]}, wait=step % 2 == 0)

    steps = range(1, 4)
    on_ranks(2, work)
    assert list(checkpoints_in(tmp_path)) == [1, 2, 3]
    steps = range(4, 7)
    on_ranks(2, work)
    assert list(checkpoints_in(tmp_path)) == [1, 4, 5, 6]
    assert read_index(tmp_path / "step-00000005").metrics == {"loss": 6.0}
    assert (tmp_path / "latest").read_text() == "step-00000006"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_folder_of_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)

    def work(engine: sw.Engine) -> None:
        assert engine.save("~/kept") == tmp_path / "home" / "kept" / "step-00000000"
        assert engine.resume("~/kept") is not None
        engine.save_pretrained("~/model", dtype="bfloat16", max_file_bytes="1GiB")  # type: ignore[arg-type]
        engine.publish("~/weights")
        assert sw.published("~/weights") is not None
        for call in (engine.save, engine.resume, engine.claim, engine.save_pretrained, engine.publish):
            for wrong in (None, "", 5):
                with pytest.raises(ConfigError, match=r"The folder is .*; give the name of one"):
                    call(wrong)  # type: ignore[operator]
            with pytest.raises(ConfigError, match="no such user"):
                call("~nobody-of-that-name/kept")  # type: ignore[operator]

    on_ranks(2, work)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["home"]


def test_weights_in_a_dtype_that_is_none(tmp_path: Path) -> None:
    def work(engine: sw.Engine) -> None:
        engine.save_pretrained(tmp_path / "model", dtype=torch.bfloat16)  # type: ignore[arg-type]
        wrong = (
            ({"dtype": "bf61"}, "dtype is 'bf61'. Did you mean 'bf16'"),
            ({"max_file_bytes": "x"}, "size of a file"),
        )
        for setting, words in wrong:
            with pytest.raises(ConfigError, match=words):
                engine.save_pretrained(tmp_path / "other", **setting)  # type: ignore[arg-type]

    on_ranks(2, work)


def test_a_checkpoint_that_is_named_and_missing_begins_no_new_run(tmp_path: Path) -> None:
    def work(engine: sw.Engine) -> None:
        assert engine.resume(tmp_path / "none") is None
        engine.save(tmp_path / "kept", step=3)
        with pytest.raises(CheckpointError, match=r"There is no checkpoint .*step-00000004\. There are step-00000003"):
            engine.resume(tmp_path / "kept" / "step-00000004")

    on_ranks(2, work)


@pytest.mark.parametrize("keep", [Keep(best="lss"), Keep(last=1, best="lss", largest=True)])
def test_nothing_is_removed_while_the_best_cannot_be_known(
    keep: Keep, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def work(engine: sw.Engine) -> None:
        for step in (1, 2, 3):
            engine.save(tmp_path, step=step, keep=keep, metrics={"loss": 1.0 / step})
        found.append(list(checkpoints_in(tmp_path)))
        engine.save(tmp_path, step=4, keep=keep, metrics={"lss": 1.0})

    found: list[list[int]] = []
    on_ranks(2, work)
    assert found[0] == [1, 2, 3]
    assert f"keep=Keep(best='lss'): no checkpoint in {tmp_path} has that metric, but 'loss', so none is" in caplog.text
    assert list(checkpoints_in(tmp_path)) == [4]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"keep": 3}, r"keep is 3; write it as in keep=sw\.Keep\(last=3\)\."),
        ({"keep": 0}, "keep is 0; write it"),
        ({"state": [1]}, r"state is \[1\]; write it as in state="),
        ({"metrics": 0.5}, "metrics is 0.5; write it as in metrics="),
    ],
)
def test_arguments_of_a_save_are_checked_before_anything_is_written(
    wrong: dict[str, Any], words: str, tmp_path: Path
) -> None:
    def work(engine: sw.Engine) -> None:
        engine.save(tmp_path, step=1)
        with pytest.raises(ConfigError, match=words):
            engine.save(tmp_path, step=2, **wrong)

    on_ranks(2, work)
    assert list(checkpoints_in(tmp_path)) == [1]


def test_a_second_run_in_the_same_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without resuming it is warned once, and keeps its own last checkpoints, not those of the earlier run's later
    steps; a run that resumes finds the second run's."""

    def work(engine: sw.Engine) -> int | None:
        resumed = engine.resume(tmp_path) if resumes else None
        for step in steps:
            engine.save(tmp_path, step=step, keep=Keep(last=2), state={"run": run})
        return None if resumed is None else resumed.state["run"]

    def warnings() -> list[str]:
        """Beside a load, ranks that wait for each other are warned of as well."""
        return [message for message in caplog.messages if "has checkpoints of an earlier run" in message]

    run, resumes, steps = 1, False, (8, 10)
    on_ranks(2, work)
    assert not warnings()
    run, steps = 2, (2, 4, 6)
    on_ranks(2, work)
    (warning,) = warnings()
    assert "(steps 8 to 10), which this one has not resumed" in warning
    assert list(checkpoints_in(tmp_path)) == [4, 6, 8, 10]
    caplog.clear()
    run, resumes, steps = 3, True, (8, 10, 12)
    assert on_ranks(2, work) == [2, 2]
    assert not warnings()
    assert list(checkpoints_in(tmp_path)) == [10, 12]


class Loader:
    """A loader whose position differs between ranks."""

    def __init__(self, position: int) -> None:
        self.position = position

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, ("a", 1): (2, 3)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["position"] < 0:
            raise ValueError("there is nothing before the start")
        assert state["a", 1] == (2, 3)
        self.position = state["position"]


def test_what_an_engine_remembers(tmp_path: Path) -> None:
    """Nested schedulers with integer keys, and each rank's position in a loader. In another world, all get rank 0's."""

    def schedule(engine: sw.Engine) -> torch.optim.lr_scheduler.LRScheduler:
        optimizer = inside.member(engine)
        first = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
        second = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 4, 4])
        return torch.optim.lr_scheduler.SequentialLR(optimizer, [first, second], milestones=[3])

    def go(engine: sw.Engine, scheduler: Any, num_steps: int) -> list[float]:
        rates = []
        for _ in range(num_steps):
            train(engine)
            scheduler.step()
            rates.append(inside.member(engine).param_groups[0]["lr"])
        return rates

    def work(engine: sw.Engine) -> list[float]:
        scheduler, loader = schedule(engine), Loader(10 + engine.world.rank)
        engine.remember(scheduler=scheduler, loader=loader)
        go(engine, scheduler, 4)
        engine.save(tmp_path)
        return go(engine, scheduler, 5)

    def again(engine: sw.Engine) -> tuple[list[float], int]:
        scheduler, loader = schedule(engine), Loader(0)
        engine.remember(scheduler=scheduler, loader=loader)
        assert engine.resume(tmp_path) is not None
        return go(engine, scheduler, 5), loader.position

    rates = on_ranks(2, work)[0]
    assert on_ranks(2, again) == [(rates, 10), (rates, 11)]
    assert on_ranks(3, again) == [(rates, 10)] * 3


def test_an_object_that_refuses_undoes_the_others(tmp_path: Path) -> None:
    def work(engine: sw.Engine) -> None:
        rank = engine.world.rank
        good, bad = Loader(5), Loader(-1 if rank == 1 else 3)
        engine.remember(good=good, bad=bad)
        engine.save(tmp_path)
        good.position, bad.position = 70, 80
        before = whole(engine)
        train(engine)
        trained = whole(engine)
        with pytest.raises(
            CheckpointError,
            match=r"bad\.load_state_dict\(\) refused the state in .* nothing before the start\)\. Give engine",
        ):
            engine.resume(tmp_path)
        assert (good.position, bad.position, engine.num_steps) == (70, 80, 1)
        there = whole(engine)
        assert all(torch.equal(trained[name], there[name]) for name in before)
        engine.remember(newcomer=Loader(0))
        with pytest.raises(CheckpointError, match="has no state for newcomer"):
            engine.resume(tmp_path)

    on_ranks(2, work)


class Counting(torch.optim.Optimizer):
    """An optimizer whose states are a plain number, and a tensor in a dtype of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "betas": (0.5, 0.9), "tensor": torch.tensor(0.25)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                state["count"] = state.get("count", 0) + 1
                state.setdefault("sum", torch.zeros_like(param, dtype=torch.float64)).add_(param.grad)
                param.sub_((state["sum"] * group["lr"] / state["count"]).to(param.dtype))


def test_numbers_stay_numbers_and_dtypes_stay_theirs(tmp_path: Path) -> None:
    models = [nn.Linear(6, 5) for _ in range(2)]

    def rank(world: sw.World) -> None:
        model = models[world.rank]
        optimizer = Counting(model.parameters())
        with sw.shard(model, "zero2", optimizer=optimizer, world=world) as engine:
            for _ in range(3):
                engine.backward(engine(torch.ones(2, 6)).sum())
                engine.step()
            engine.save(tmp_path)
            adopted = inside.adopted(engine)
            expected = [dict(adopted.state_of(piece)) for piece in adopted.pieces]
            optimizer.state.clear()
            group = optimizer.param_groups[0]
            group |= {"lr": 9.0, "betas": (0.0, 0.0)}
            group["tensor"].fill_(9)
            assert engine.resume(tmp_path) is not None
            assert (group["lr"], group["betas"], group["tensor"].item()) == (0.1, (0.5, 0.9), 0.25)
            for piece, state in zip(adopted.pieces, expected, strict=True):
                there = adopted.state_of(piece)
                if piece.span.numel:
                    assert (there["count"], type(there["count"])) == (3, int)
                    assert there["sum"].dtype == torch.float64
                    assert torch.equal(there["sum"], state["sum"])

    run_ranks(2, rank)


def test_buffers_that_ranks_have_for_themselves(tmp_path: Path) -> None:
    """With `sync_buffers: false`, each rank's own buffers are saved and restored. New ranks get rank 0's."""

    def build(value: float) -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model.register_buffer("seen", torch.full((3,), value))
        return model

    def rank(world: sw.World) -> float:
        model = build(-1.0)
        plan = {"preset": "zero3", "sync_buffers": False}
        with sw.shard(model, plan, world=world) as engine:
            if world.size == 2:
                model.seen.fill_(world.rank)
                engine.save(tmp_path)
                model.seen.fill_(9)
            assert engine.resume(tmp_path) is not None
            return float(model.seen[0])

    assert run_ranks(2, rank) == [0.0, 1.0]
    assert run_ranks(3, rank) == [0.0, 1.0, 0.0]
