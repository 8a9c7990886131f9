"""A save or a resume that makes no sense raises a clear error on all ranks. Changes of the folder are survived."""

from __future__ import annotations

import copy
import functools
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from twins import adamw, sgd, work_on_ranks

import shardwise as sw
from shardwise.checkpoint import Keep, checkpoints_in, folder, saver, snapshot, write
from shardwise.checkpoint.index_schema import read_index
from shardwise.errors import CheckpointError, ConfigError, StateError
from shardwise.system.disk import page_buffers
from shardwise.testing import run_ranks
from tests import inside
from tests.patience import PATIENCE
from tests.thorough import sampled


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5))


def on_ranks(num_ranks: int, work: Callable[[sw.Engine], Any], make: Any = build, optimizer: Any = adamw) -> list[Any]:
    return work_on_ranks(num_ranks, work, "zero3", make, optimizer)


def step(engine: sw.Engine, num_steps: int = 1) -> None:
    for _ in range(num_steps):
        engine.backward(engine(torch.ones(2, 6)).square().sum())
        engine.step()


def values(engine: sw.Engine) -> dict[str, torch.Tensor]:
    return {entry.key: entry.tensor.detach().clone() for entry in inside.entries(engine)}


def refused(kind: type[Exception], words: str, work: Callable[[], object]) -> str:
    with pytest.raises(kind, match=words) as caught:
        work()
    return str(caught.value)


# -- the folder ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("what", ["folder", "lock"])
def test_what_was_removed_is_made_again(what: str, wait: bool, tmp_path: Path) -> None:
    run = tmp_path / "run"

    def work(engine: sw.Engine) -> None:
        step(engine)
        engine.save(run)
        engine.world.barrier()
        if engine.world.rank == 0:
            shutil.rmtree(run) if what == "folder" else (run / ".lock").unlink()
        engine.world.barrier()
        step(engine)
        engine.save(run, wait=wait)
        engine.wait_for_save()
        assert (run / ".lock").exists()
        engine.world.barrier()

    on_ranks(2, work)
    assert list(checkpoints_in(run)) == ([2] if what == "folder" else [1, 2])


def test_a_folder_removed_behind_a_save_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 has written its file and note; rank 1 cannot write its own any more. Both raise the same error, soon."""
    run, is_written, go = tmp_path / "run", threading.Event(), threading.Event()
    plain = write.write_text

    def held(path: Path, text: str) -> None:
        if path.name == "rank-00001.json":
            assert go.wait(PATIENCE)
        plain(path, text)
        if path.name == "rank-00000.json":
            is_written.set()

    monkeypatch.setattr(write, "write_text", held)

    def work(engine: sw.Engine) -> str:
        step(engine)
        engine.save(run, wait=False)
        engine.world.barrier()
        if engine.world.rank == 0:
            assert is_written.wait(PATIENCE)
            shutil.rmtree(run)
            go.set()
        message = refused(CheckpointError, "could not be written", engine.wait_for_save)
        step(engine)
        engine.save(run)
        return message

    messages = on_ranks(2, work)
    assert "has not grown" not in messages[0]  # by then they would have waited for it
    assert messages[0] == messages[1]
    assert list(checkpoints_in(run)) == [2]


def test_a_place_that_may_not_be_looked_into_is_refused_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On all ranks, not only on rank 0. The folder is not mistaken for an empty one."""
    plain = os.listdir

    def denied(path: Any) -> list[str]:
        if Path(path) == tmp_path:
            raise PermissionError(13, "Permission denied", str(path))
        return plain(path)

    monkeypatch.setattr(folder.os, "listdir", denied)

    def work(engine: sw.Engine) -> str:
        return refused(CheckpointError, "cannot be looked into: .*Permission denied", lambda: engine.resume(tmp_path))

    messages = on_ranks(2, work)
    assert messages[0] == messages[1]


def test_latest_without_its_index_names_the_others(tmp_path: Path) -> None:
    def work(engine: sw.Engine) -> str:
        for _ in range(3):
            step(engine)
            engine.save(tmp_path)
        engine.world.barrier()
        if engine.world.rank == 0:
            (tmp_path / "step-00000003/index.json").unlink()
        engine.world.barrier()
        before = values(engine)
        message = refused(CheckpointError, "names step-00000003", lambda: engine.resume(tmp_path))
        assert all(torch.equal(value, values(engine)[key]) for key, value in before.items())
        resumed = engine.resume(tmp_path / "step-00000002")
        assert resumed is not None
        assert resumed.step == 2
        return message

    messages = on_ranks(2, work)
    assert messages[0] == messages[1]
    assert "There are step-00000002, step-00000001. To continue from one of them, give its path: '" in messages[0]
    with pytest.raises(CheckpointError, match="names step-00000003"):
        sw.inspect(tmp_path)


def test_verify_reads_what_the_ranks_remember(tmp_path: Path) -> None:
    path: Path = on_ranks(2, lambda engine: engine.save(tmp_path))[0]
    chunk = next(chunk for chunk in read_index(path).chunks if chunk.key == "rank/1")
    content = bytearray((path / chunk.file).read_bytes())
    content[chunk.offset + 5] ^= 1
    (path / chunk.file).write_bytes(content)
    problems = sw.inspect(path, verify=True).problems
    assert len(problems) == 1
    assert "rank-00001.safetensors is damaged in rank 1" in problems[0]


# -- saves that make no sense ----------------------------------------------------------------------------


def test_gradients_that_wait_are_not_left_behind(tmp_path: Path) -> None:
    """Saving is refused while gradients, computed or assigned, wait for a step."""

    def work(engine: sw.Engine) -> None:
        step(engine)
        engine.backward(engine(torch.ones(2, 6)).sum())
        words = r"Gradients are waiting for a step; take it, or call zero_grad\(\)"
        for wait in (True, False):
            refused(StateError, words, lambda wait=wait: engine.save(tmp_path, wait=wait))  # type: ignore[misc]
        engine.zero_grad()
        engine.save(tmp_path)
        next(engine.module.parameters()).grad = torch.ones_like(next(engine.module.parameters()))
        refused(StateError, words, lambda: engine.save(tmp_path))
        engine.zero_grad()

    on_ranks(2, work)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001"]


def test_gradients_that_no_optimizer_has_do_not_keep_a_checkpoint(tmp_path: Path) -> None:
    """They stay when the optimizer's own are dropped, with or without a step, and no checkpoint has them."""
    models = [nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2)) for _ in range(2)]

    def work(world: sw.World) -> None:
        model = models[world.rank]
        optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
        with sw.shard(model, "zero2", optimizer=optimizer, world=world) as engine:
            for takes_step in (False, True):
                model(torch.ones(2, 6)).sum().backward()
                if takes_step:
                    optimizer.step()
                optimizer.zero_grad()
                assert model[0].weight.grad is not None
                assert model[1].weight.grad is None
                engine.save(tmp_path / str(takes_step))
            refused(StateError, "of parameters that no optimizer has", lambda: engine.reshard("ddp"))
            engine.zero_grad()
            engine.reshard("ddp")

    run_ranks(2, work)


@pytest.mark.parametrize("number", [-1, 1.5, True, "3", 10**20])
def test_a_step_that_is_none(number: Any, tmp_path: Path) -> None:
    def work(engine: sw.Engine) -> None:
        refused(ConfigError, f"step is {number!r}, which is not a number of", lambda: engine.save(tmp_path, number))

    on_ranks(2, work)
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_save_other_steps_are_told(tmp_path: Path) -> None:
    def work(engine: sw.Engine) -> None:
        rank = engine.world.rank
        refused(ConfigError, "step is 5 on rank 0 and 6 on rank 1", lambda: engine.save(tmp_path, 5 + rank))

    on_ranks(2, work)
    assert list(checkpoints_in(tmp_path)) == []


def test_ranks_that_save_into_other_folders_are_told(tmp_path: Path) -> None:
    """As those do that name theirs by the time of day."""

    def work(engine: sw.Engine) -> None:
        own = tmp_path / str(engine.world.rank)
        refused(ConfigError, "folder is '.*0' on rank 0 and '.*1' on rank 1", lambda: engine.save(own))

    on_ranks(2, work)
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_folder_of_checkpoints_does_not_begin_anew(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"

    def work(engine: sw.Engine) -> None:
        assert engine.resume(tmp_path) is None
        engine.world.barrier()
        if engine.world.rank == 0:
            file.touch()
            (tmp_path / "run" / "step-00000007").mkdir(parents=True)
        engine.world.barrier()
        refused(CheckpointError, "is a file", lambda: engine.resume(file))
        refused(CheckpointError, "model folder of Hugging Face.*shardwise convert", lambda: engine.resume(tmp_path))
        refused(CheckpointError, "not a whole checkpoint", lambda: engine.resume(tmp_path / "run" / "step-00000007"))
        assert engine.resume(tmp_path / "run") is None

    on_ranks(2, work)


def test_metrics_are_numbers_or_tensors_of_one(tmp_path: Path) -> None:
    def work(engine: sw.Engine) -> None:
        loss = engine(torch.ones(2, 6)).sum()
        engine.save(tmp_path, metrics={"loss": loss, "best": 3, "rate": torch.tensor([0.5])}, keep=Keep(best="loss"))
        for wrong in (torch.ones(2), "low", None, [1.0]):
            metrics: Any = {"loss": wrong}
            save = functools.partial(engine.save, tmp_path, 7, metrics=metrics)
            refused(ConfigError, r"metrics\['loss'\] is a", save)

    on_ranks(2, work)
    assert list(checkpoints_in(tmp_path)) == [0]
    metrics = read_index(tmp_path / "step-00000000").metrics
    assert (metrics["best"], metrics["rate"], type(metrics["loss"])) == (3.0, 0.5, float)


def test_keys_keep_their_order(tmp_path: Path) -> None:
    state = {"zebra": 1, "ant": {"z": 1, "a": 2}, "map": {3: "c", 1: "a"}}

    def work(engine: sw.Engine) -> None:
        engine.save(tmp_path, state=state)
        resumed = engine.resume(tmp_path)
        assert resumed is not None
        assert resumed.state == state
        assert [list(resumed.state), list(resumed.state["ant"]), list(resumed.state["map"])] == [
            ["zebra", "ant", "map"],
            ["z", "a"],
            [3, 1],
        ]

    on_ranks(2, work)


def test_a_state_too_deep_to_be_read_again_is_refused(tmp_path: Path) -> None:
    deep: Any = 1
    for _ in range(120):
        deep = [deep]

    def work(engine: sw.Engine) -> None:
        refused(ConfigError, "state nests more than 90", lambda: engine.save(tmp_path, state={"x": deep}))

    on_ranks(2, work)


@pytest.mark.parametrize("wait", [True, False])
def test_what_fails_after_a_checkpoint_is_there_says_so(
    wait: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise PermissionError(13, "Permission denied", "step-00000000")

    monkeypatch.setattr(folder, "thin_out", fails)

    def work(engine: sw.Engine) -> str:
        def save() -> None:
            engine.save(tmp_path, wait=wait, keep=Keep(last=1))
            engine.wait_for_save()

        return refused(CheckpointError, "is written, but older ones .* could not be removed", save)

    messages = on_ranks(2, work)
    assert messages[0] == messages[1]
    assert "could not be written" not in messages[0]
    assert list(checkpoints_in(tmp_path)) == [0]


def test_a_latest_that_cannot_be_written_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = write.write_text

    def full(path: Path, text: str) -> None:
        if path.name == "latest":
            raise OSError(28, "No space left on device")
        plain(path, text)

    monkeypatch.setattr(folder, "write_text", full)

    def work(engine: sw.Engine) -> None:
        message = refused(
            CheckpointError, "is written, but .*latest could not be updated", lambda: engine.save(tmp_path)
        )
        assert "resume('" in message
        assert engine.resume(tmp_path / "step-00000000") is not None

    on_ranks(2, work)


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("where", ["sized", "take", "remembered"])
def test_a_failure_of_one_rank_is_everybodys(
    where: str, wait: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If one rank fails between two agreements, all raise its error, and none waits for it."""
    plain_sized, plain_take = page_buffers.Stage.sized, snapshot.Snapshot.take
    armed = threading.Event()

    def is_rank_1() -> bool:
        return armed.is_set() and threading.current_thread().name == "rank 1"

    def sized(stage: page_buffers.Stage, num_bytes: int) -> torch.Tensor:
        if where == "sized" and is_rank_1():
            raise MemoryError("not that much")
        return plain_sized(stage, num_bytes)

    def take(taken: snapshot.Snapshot) -> None:
        if where == "take" and is_rank_1():
            raise RuntimeError("not that much")
        plain_take(taken)

    class Thing:
        def state_dict(self) -> dict[str, Any]:
            if where == "remembered" and is_rank_1():
                raise ValueError("not that much")
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    monkeypatch.setattr(page_buffers.Stage, "sized", sized)
    monkeypatch.setattr(snapshot.Snapshot, "take", take)

    def work(engine: sw.Engine) -> str:
        engine.remember(thing=Thing())
        step(engine)
        armed.set()
        engine.world.barrier()

        def save() -> None:
            engine.save(tmp_path, wait=wait)
            engine.wait_for_save()

        if where == "take" and wait:
            save()
            return ""
        message = refused(CheckpointError, "not that much", save)
        engine.world.barrier()
        armed.clear()
        engine.save(tmp_path, wait=wait)
        engine.wait_for_save()
        return message

    messages = on_ranks(2, work)
    assert messages[0] == messages[1]
    assert list(checkpoints_in(tmp_path)) == [1]
    assert not list(tmp_path.glob(".writing-*"))


def test_a_rank_that_died_behind_a_save_is_noticed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process is gone and will write no note. Ranks that wait for it detect this without a message."""
    plain = saver.Writer.me

    def me() -> saver.Writer:
        mine = plain()
        return saver.Writer(mine.place, 2**22 + 1, mine.began) if threading.current_thread().name == "rank 1" else mine

    monkeypatch.setattr(saver.Writer, "me", me)

    def work(engine: sw.Engine) -> None:
        if engine.world.rank == 1:
            inside.saver(engine)._write_behind = lambda *_: None
        engine.save(tmp_path, wait=False)
        refused(CheckpointError, r"rank 1 ended \(killed\?\) before it had finished its file", engine.wait_for_save)

    on_ranks(2, work)
    assert list(checkpoints_in(tmp_path)) == []


# -- another optimizer, another model --------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": adamw,
    "Adam": lambda model: torch.optim.Adam(model.parameters()),
    "SGD": sgd,
    "Momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "Lion": lambda model: sw.optim.Lion(model.parameters()),
    "our AdamW": lambda model: sw.optim.AdamW(model.parameters()),
    "our narrow AdamW": lambda model: sw.optim.AdamW(model.parameters(), state_dtype="bf16"),
    "Adafactor": lambda model: sw.optim.Adafactor(model.parameters()),
    "Adagrad": lambda model: torch.optim.Adagrad(model.parameters()),
}
ADAMS = {"AdamW", "Adam", "our AdamW", "our narrow AdamW"}


@pytest.mark.parametrize("wrote", OPTIMIZERS)
@sampled
def test_another_optimizers_states_are_refused(wrote: str, tmp_path: Path) -> None:
    """Optimizers with the same states can use each other's. Settings, such as momentum, come from the checkpoint."""

    def first(engine: sw.Engine) -> None:
        step(engine)
        engine.save(tmp_path)

    on_ranks(2, first, optimizer=OPTIMIZERS[wrote])
    for reads, make in OPTIMIZERS.items():
        is_alike = wrote == reads or {wrote, reads} <= {"SGD", "Momentum"} or {wrote, reads} <= ADAMS

        def second(engine: sw.Engine, is_alike: bool = is_alike) -> str:
            for num_steps in (0, 1):
                step(engine, num_steps)
                before = values(engine)
                if is_alike:
                    assert engine.resume(tmp_path) is not None
                    step(engine)
                    continue
                message = refused(
                    CheckpointError, "was written with another optimizer", lambda: engine.resume(tmp_path)
                )
                after = values(engine)
                assert before.keys() == after.keys()
                assert all(torch.equal(before[key], after[key]) for key in before)
                step(engine)
            return "" if is_alike else message

        messages = on_ranks(2, second, optimizer=make)
        if not is_alike:
            names = [type(OPTIMIZERS[name](build())).__name__ for name in (wrote, reads)]
            assert f"{names[0]} kept" in messages[0]
            assert f"this engine has {names[1]}" in messages[0]
            assert "--weights-only" in messages[0]


def tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6, bias=False))
    model[1].weight = model[0].weight
    return model


def untied() -> nn.Module:
    return nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6, bias=False))


def weights_only(model: nn.Module) -> Any:
    return None


def test_a_head_is_not_dropped(tmp_path: Path) -> None:
    """A tied model loads two tensors only if they are equal, and an untied one refuses a tied checkpoint."""

    def write(engine: sw.Engine) -> None:
        engine.save(tmp_path / "other")
        engine.set("1.weight", engine.get("0.weight"))  # type: ignore[arg-type]
        engine.save(tmp_path / "same")

    def read(engine: sw.Engine) -> str:
        before = values(engine)
        words = "1.weight and 0.weight are tied, but .* has different values for them"
        message = refused(CheckpointError, words, lambda: engine.resume(tmp_path / "other"))
        assert all(torch.equal(value, values(engine)[key]) for key, value in before.items())
        assert engine.resume(tmp_path / "same") is not None
        engine.save(tmp_path / "tied")
        return message

    def back(engine: sw.Engine) -> None:
        words = "1.weight and 0.weight are tied, but in the model they are two"
        refused(CheckpointError, words, lambda: engine.resume(tmp_path / "tied"))

    work_on_ranks(2, write, "zero3", untied, weights_only)
    messages = work_on_ranks(2, read, "zero3", tied, weights_only)
    assert messages[0] == messages[1]
    work_on_ranks(2, back, "zero3", untied, weights_only)


class Shared(nn.Module):
    """Buffers in which several elements share memory."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)
        self.register_buffer("expanded", torch.full((1,), 3.0).expand(4))
        self.register_buffer("windows", torch.arange(6.0).unfold(0, 3, 1))
        self.register_buffer("turned", torch.arange(6.0).view(2, 3).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def test_buffers_whose_elements_share_memory_come_back(tmp_path: Path) -> None:
    def write(engine: sw.Engine) -> None:
        step(engine)
        engine.save(tmp_path)

    def read(engine: sw.Engine) -> None:
        plain = Shared()
        page_buffers = dict(engine.module.named_buffers())
        for buffer in page_buffers.values():
            buffer.storage_offset()
            buffer.as_strided((1,), (1,)).fill_(-1)
        assert engine.resume(tmp_path) is not None
        for name, buffer in plain.named_buffers():
            assert torch.equal(page_buffers[name], buffer)
        assert page_buffers["expanded"].stride() == (0,)

    on_ranks(2, write, Shared)
    on_ranks(2, read, Shared)

    class Apart(Shared):
        def __init__(self) -> None:
            super().__init__()
            self.expanded = torch.arange(4.0)

    def other(engine: sw.Engine) -> None:
        engine.save(tmp_path / "apart")

    def refuses(engine: sw.Engine) -> None:
        before = values(engine)
        words = "Elements of buffer expanded share memory .* different values"
        refused(CheckpointError, words, lambda: engine.resume(tmp_path / "apart"))
        assert all(torch.equal(value, values(engine)[key]) for key, value in before.items())

    work_on_ranks(2, other, "zero3", Apart, weights_only)
    work_on_ranks(2, refuses, "zero3", Shared, weights_only)


class Scaled(nn.Module):
    """A model with a scalar parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


@pytest.mark.parametrize("kind", ["AdamW", "NAdam", "ASGD", "Rprop", "RMSprop"])
def test_states_of_a_number_come_along_from_a_plain_loop(kind: str, tmp_path: Path) -> None:
    """`shard` keeps them, and so do a checkpoint and a converted copy of it."""
    numbers = torch.Generator().manual_seed(0)
    data = [torch.randn(4, 6, generator=numbers) for _ in range(4)]

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Scaled()
        return model, getattr(torch.optim, kind)(model.parameters(), lr=0.01)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, rows: list[torch.Tensor]) -> None:
        for x in rows:
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()

    twin, twins_own = made()
    train(twin, twins_own, data)
    started = []
    for _ in range(2):
        model, optimizer = made()
        train(model, optimizer, data[:2])
        optimizer.zero_grad()
        started.append((model, optimizer))

    def rank(world: sw.World) -> dict[str, torch.Tensor]:
        model, optimizer = started[world.rank]
        with sw.shard(model, "zero3", optimizer=optimizer, world=world) as engine:
            train(model, optimizer, data[2:3])
            optimizer.zero_grad()
            engine.save(tmp_path / "run")
            world.barrier()
            if world.rank == 0:
                sw.convert(tmp_path / "run", tmp_path / "copy", "shardwise")
            world.barrier()
            assert engine.resume(tmp_path / "copy") is not None
            train(model, optimizer, data[3:])
            return engine.state_dict()

    for state in run_ranks(2, rank):
        for name, value in twin.state_dict().items():
            assert torch.allclose(state[name], value, rtol=1e-5, atol=1e-6), name


def test_a_batch_norm_that_torch_cannot_compute_is_refused_with_the_way_out() -> None:
    def made() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))

    def work(engine: sw.Engine) -> None:
        step(engine)
        narrow = {"preset": "zero2", "precision": "bf16"}
        refused(ConfigError, "Keep its weights in fp32", lambda: engine.reshard(narrow))
        step(engine)

    words = r"1 is a BatchNorm1d, whose .* rules: \{norms: \{classes: \[BatchNorm1d\], precision: fp32\}\}"
    refused(ConfigError, words, lambda: work_on_ranks(2, work, {"preset": "zero3", "precision": "bf16"}, made))
    rules = {"norms": {"classes": ["BatchNorm1d"], "precision": "fp32"}}
    work_on_ranks(2, work, {"preset": "zero3", "precision": "bf16", "rules": rules}, made)


# -- settings of groups that are tensors -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lr", "scales", "found"),
    [
        (torch.tensor(0.5), torch.tensor([1.0, 2.0]), None),
        (torch.tensor([0.5]), torch.tensor([1.0, 2.0]), None),
        (0.5, torch.tensor([1.0, 2.0]), None),
        (0.5, torch.ones(3), r"scales = 'tensor\(\[3., 6.\]\)', but this one has tensor\(\[1., 1., 1.\]\)\. Create"),
        (0.5, torch.tensor(1.0), r"scales = 'tensor\(\[3., 6.\]\)', but this one has 1.0|has tensor\(1.\)"),
    ],
    ids=["tensor", "another-shape-of-one", "number", "longer", "one"],
)
def test_settings_stay_in_the_tensors_or_numbers_that_they_are(
    lr: Any, scales: torch.Tensor, found: str | None, tmp_path: Path
) -> None:
    def make(lr: Any, scales: torch.Tensor) -> Callable[[nn.Module], torch.optim.Optimizer]:
        def optimizer(model: nn.Module) -> torch.optim.Optimizer:
            made = torch.optim.SGD(model.parameters(), lr=copy.deepcopy(lr))
            made.param_groups[0]["scales"] = scales.clone()
            return made

        return optimizer

    def save(engine: sw.Engine) -> None:
        inside.adopted(engine).groups[0]["scales"].mul_(3)
        engine.save(tmp_path)

    def resume(engine: sw.Engine) -> None:
        group = inside.adopted(engine).groups[0]
        had = dict(group)
        if found:
            refused(CheckpointError, found, lambda: engine.resume(tmp_path))
            return
        engine.resume(tmp_path)
        assert group["scales"] is had["scales"]
        assert group["scales"].tolist() == [3.0, 6.0]
        assert type(group["lr"]) is type(had["lr"])
        assert float(group["lr"]) == 0.25

    work_on_ranks(2, save, "ddp", build, make(torch.tensor(0.25), torch.tensor([1.0, 2.0])))
    work_on_ranks(2, resume, "ddp", build, make(lr, scales))
