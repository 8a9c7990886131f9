"""Save, stop and resume: results equal those of a run that never stopped. A damaged checkpoint is refused by name."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from twins import PRESETS_2, PRESETS_2X2, full_params, plan_of, train_steps, work_on_ranks

import shardwise as sw
from shardwise.checkpoint.index import Index
from shardwise.checkpoint.index_schema import read_index
from shardwise.errors import CheckpointError, ConfigError
from tests import inside
from tests.models import Transformer
from tests.thorough import sampled

pytestmark = sampled

CASES = [*PRESETS_2, *PRESETS_2X2, ("zero3", 3, None)]
IDS = [f"{name}-{n}{'x2' if mesh else ''}" for name, n, mesh in CASES]


def start(precision: str = "fp32") -> nn.Module:
    torch.manual_seed(0)
    model = Transformer(tied=True)
    model.blocks[0].up.weight.requires_grad_(False)
    model.register_buffer("seen", torch.zeros(3))
    return model


def on_ranks(num_ranks: int, work: Callable[[sw.Engine], Any], plan: dict[str, Any]) -> list[Any]:
    return work_on_ranks(num_ranks, work, plan, start)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("preset", "num_ranks", "mesh"), CASES, ids=IDS)
def test_resume_is_bit_exact(preset: str, num_ranks: int, mesh: Any, precision: str, tmp_path: Path) -> None:
    plan = plan_of(preset, mesh, precision=precision)

    def goes_on(engine: sw.Engine) -> Any:
        train_steps(engine, range(3))
        engine.save(tmp_path, state={"data": 3})
        return train_steps(engine, range(3, 6)), full_params(engine)

    def resumed(engine: sw.Engine) -> Any:
        loaded = engine.resume(tmp_path)
        assert loaded is not None
        assert (loaded.step, loaded.state, engine.num_steps) == (3, {"data": 3}, 3)
        return train_steps(engine, range(3, 6)), full_params(engine)

    losses, params = on_ranks(num_ranks, goes_on, plan)[0]
    late, resumed_params = on_ranks(num_ranks, resumed, plan)[0]
    assert late == losses
    assert all(torch.equal(params[name], resumed_params[name]) for name in params)


def test_another_world_can_read_it(tmp_path: Path) -> None:
    """Each rank reads the elements it needs, whichever rank wrote them."""

    def write(engine: sw.Engine) -> Any:
        train_steps(engine, range(4))
        engine.save(tmp_path)
        return full_params(engine), train_steps(engine, range(4, 6))

    def read(engine: sw.Engine) -> Any:
        assert engine.resume(tmp_path) is not None
        return full_params(engine), train_steps(engine, range(4, 6))

    params, losses = on_ranks(2, write, {"preset": "zero3"})[0]
    for num_ranks, plan in [(1, {"preset": "ddp"}), (4, {"preset": "hpz", "mesh": {"node": 2, "local": 2}})]:
        read_params, read_losses = on_ranks(num_ranks, read, plan)[0]
        assert all(torch.equal(params[name], read_params[name]) for name in params)
        assert read_losses == pytest.approx(losses, rel=1e-6)


def test_generators_go_on_where_they_were(tmp_path: Path) -> None:
    def draw() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    def work(engine: sw.Engine) -> Any:
        engine.save(tmp_path)
        expected = draw()
        draw()
        engine.resume(tmp_path)
        assert draw() == expected

    on_ranks(1, work, {"preset": "zero3"})


def test_nothing_there_changes_nothing(tmp_path: Path) -> None:
    def work(engine: sw.Engine) -> Any:
        assert engine.resume(tmp_path / "none") is None
        return train_steps(engine, range(2))

    assert on_ranks(2, work, {"preset": "zero2"})[0]


def test_the_latest_is_taken_and_a_draft_never(tmp_path: Path) -> None:
    def work(engine: sw.Engine) -> Any:
        train_steps(engine, range(1))
        engine.save(tmp_path)
        train_steps(engine, range(2))
        engine.save(tmp_path)
        engine.save(tmp_path)  # saving the same step again replaces it
        if engine.world.rank == 0:
            (tmp_path / ".writing-step-00000009").mkdir()
            (tmp_path / "step-00000008").mkdir()
        engine.world.barrier()
        resumed = engine.resume(tmp_path)
        assert resumed is not None
        engine.world.barrier()
        if engine.world.rank == 0:
            (tmp_path / "latest").unlink()  # as after a crash in the very first save
        engine.world.barrier()
        again = engine.resume(tmp_path)
        assert again is not None
        return resumed.step, again.step

    assert on_ranks(2, work, {"preset": "zero1"}) == [(3, 3)] * 2
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000001", "step-00000003", "step-00000008"]


def everything(engine: sw.Engine) -> dict[str, torch.Tensor]:
    """Copies of this rank's pieces, states and buffers."""
    return {entry.key: entry.tensor.detach().clone() for entry in inside.entries(engine)}


def saved(folder: Path) -> Path:
    def work(engine: sw.Engine) -> Any:
        train_steps(engine, range(1))
        return engine.save(folder)

    path: Path = on_ranks(2, work, {"preset": "zero3"})[0]
    return path


def flip(path: Path) -> None:
    content = bytearray((path / "rank-00001.safetensors").read_bytes())
    content[-7] ^= 4
    (path / "rank-00001.safetensors").write_bytes(content)


def rewritten(path: Path, change: Callable[[Index], None]) -> None:
    """Change an index, and write it with a matching checksum."""
    index = read_index(path)
    change(index)
    (path / "index.json").write_text(index.to_json())


def reshape(path: Path) -> None:
    rewritten(path, lambda index: index.shapes.update({"blocks.0.up.weight": [32, 128]}))


def rename(path: Path) -> None:
    def change(index: Index) -> None:
        index.shapes["elsewhere"] = index.shapes.pop("blocks.0.up.weight")
        renamed = {"name": "elsewhere", "key": "param/elsewhere"}
        names = index.groups[0]["params"]
        names[names.index("blocks.0.up.weight")] = "elsewhere"
        is_it = [chunk.name == "blocks.0.up.weight" for chunk in index.chunks]
        index.chunks = [
            replace(chunk, **renamed) if it else chunk for chunk, it in zip(index.chunks, is_it, strict=True)
        ]

    rewritten(path, change)


def more(path: Path) -> None:
    rewritten(path, lambda index: index.shapes.update({"head2.weight": [0]}))


def lose_a_chunk(path: Path) -> None:
    def change(index: Index) -> None:
        index.chunks = [chunk for chunk in index.chunks if chunk.name != "norm.weight"]

    rewritten(path, change)


def regroup(path: Path) -> None:
    rewritten(path, lambda index: index.groups.append({"params": []}))


def flip_head(path: Path) -> None:
    content = bytearray((path / "rank-00001.safetensors").read_bytes())
    content[30] ^= 1
    (path / "rank-00001.safetensors").write_bytes(content)


def flip_index(path: Path) -> None:
    text = (path / "index.json").read_text()
    (path / "index.json").write_text(text.replace('"step":1', '"step":7'))


FOREIGN = '{"format": 2, "crc32": 2745614147, "index": {}}'


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "flipped": (flip, "rank-00001.safetensors is damaged in"),
    "flipped head": (flip_head, "rank-00001.safetensors is damaged: the checksum of its header"),
    "flipped index": (flip_index, "index.json is damaged"),
    "missing": (lambda path: (path / "rank-00000.safetensors").unlink(), "rank-00000.safetensors is missing"),
    "lost chunk": (lose_a_chunk, "but what is before ends at"),
    "more tensors": (more, "has a tensor head2.weight that the model does not have"),
    "groups": (regroup, "has 2 parameter groups, this one has 1"),
    "newer format": (lambda path: (path / "index.json").write_text('{"format": 9}'), "written by a newer shardwise"),
    "cut": (lambda path: (path / "rank-00000.safetensors").write_bytes(b"x"), "instead of"),
    "no json": (lambda path: (path / "index.json").write_text("{"), "cannot be read"),
    "old format": (lambda path: (path / "index.json").write_text('{"format": 0}'), "has format 0"),
    "foreign": (lambda path: (path / "index.json").write_text(FOREIGN), "not an index that shardwise wrote"),
    "shape": (reshape, "blocks.0.up.weight with shape [32, 128]"),
    "other model": (rename, "has no tensor blocks.0.up.weight"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_refused_by_name_and_changes_nothing(damage: str, tmp_path: Path) -> None:
    hurt, words = DAMAGE[damage]
    hurt(saved(tmp_path))

    def work(engine: sw.Engine) -> Any:
        scheduler = torch.optim.lr_scheduler.StepLR(inside.member(engine), 2)
        train_steps(engine, range(2))
        scheduler.step()
        before, lr, last = everything(engine), scheduler.get_last_lr(), scheduler.state_dict()
        with pytest.raises(CheckpointError) as caught:
            engine.resume(tmp_path)
        after = everything(engine)
        assert all(torch.equal(before[key], after[key]) for key in before | after)
        assert (engine.num_steps, scheduler.get_last_lr(), scheduler.state_dict()) == (2, lr, last)
        return str(caught.value)

    messages = on_ranks(2, work, {"preset": "zero3"})
    assert words in messages[0]
    assert messages[0] == messages[1]


@pytest.mark.parametrize("kind", ["param", "state.exp_avg_sq"])
def test_damage_found_before_the_first_step_leaves_nothing_behind(kind: str, tmp_path: Path) -> None:
    """A new engine has no optimizer states yet, and a resume that fails does not create any."""
    path = saved(tmp_path)
    index = read_index(path)
    chunk = [chunk for chunk in index.chunks if chunk.kind == kind and chunk.file == "rank-00001.safetensors"][-1]
    content = bytearray((path / chunk.file).read_bytes())
    content[chunk.offset + chunk.num_bytes - 1] ^= 64
    (path / chunk.file).write_bytes(content)

    def work(engine: sw.Engine) -> Any:
        before = everything(engine)
        with pytest.raises(CheckpointError) as caught:
            engine.resume(tmp_path)
        after = everything(engine)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)
        optimizer = inside.adopted(engine)
        assert not any(map(optimizer.state_of, optimizer.pieces))
        return str(caught.value)

    messages = on_ranks(2, work, {"preset": "zero3"})
    assert f"is damaged in {kind} {chunk.name}" in messages[0]
    assert messages[0] == messages[1]


def test_a_failed_save_leaves_the_last_one(tmp_path: Path) -> None:
    path = saved(tmp_path)

    def work(engine: sw.Engine) -> Any:
        train_steps(engine, range(2))
        with pytest.raises(CheckpointError, match="could not be started: rank 0 reports: FileExistsError"):
            engine.save(path / "index.json")
        with pytest.raises(ConfigError, match=r"state\['user'\]\['x'\] is a set, which a checkpoint cannot store"):
            engine.save(tmp_path, state={"x": {1, 2}})
        resumed = engine.resume(tmp_path)
        assert resumed is not None
        return resumed.step

    assert on_ranks(2, work, {"preset": "zero3"}) == [1, 1]


def test_a_model_that_never_trained_can_be_saved(tmp_path: Path) -> None:
    model = start()
    twin = copy.deepcopy(model)
    with sw.shard(model, "zero3") as engine:
        engine.save(tmp_path)
    with sw.shard(twin, "zero3") as engine:
        assert engine.resume(tmp_path) is not None
