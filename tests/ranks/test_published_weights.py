"""Weights that samplers read while a job trains: announced only when they are whole, and never taken away from one that
uses them."""

from __future__ import annotations

import copy
import json
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from twins import adamw

import shardwise as sw
from shardwise.errors import CheckpointError, ConfigError
from shardwise.testing import run_ranks
from tests.models import Transformer

WEIGHTS = "model.safetensors"


def on_ranks(work: Any, mesh: dict[str, int] | None = None) -> list[Any]:
    torch.manual_seed(0)
    models = [copy.deepcopy(model) for model in [Transformer()] * 2]
    plan: dict[str, Any] = {"preset": "zero3", "mesh": mesh or {"dp": 2}}

    def rank(world: sw.World) -> Any:
        mine: nn.Module = models[world.rank]
        with sw.shard(mine, plan, optimizer=adamw(mine), world=world) as engine:
            return work(engine)

    return run_ranks(2, rank)


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


def test_what_a_reader_uses_stays(tmp_path: Path) -> None:
    def work(engine: sw.Engine) -> None:
        for number in range(5):
            engine.publish(tmp_path, version=number, keep=1)
            found = sw.published(tmp_path)
            if number == 1 and engine.world.rank == 0 and found is not None:
                found.acknowledge("sampler-0")
            engine.world.barrier()

    on_ranks(work)
    assert sw.versions_in_use(tmp_path) == {"sampler-0": 1}
    assert {path.name for path in tmp_path.glob("version-*")} == {"version-00000001", "version-00000004"}


def test_a_failure_leaves_readers_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At whatever point rank 0 ends: while it writes the weights, or before it has announced them."""
    failing = [""]
    for place in ("shardwise.checkpoint.formats.live._write", "shardwise.checkpoint.published._announce"):
        monkeypatch.setattr(place, unless(lambda place=place: failing[0] == place, pkgutil.resolve_name(place)))

    def work(engine: sw.Engine) -> None:
        engine.publish(tmp_path, version=1)
        for place in ("shardwise.checkpoint.formats.live._write", "shardwise.checkpoint.published._announce"):
            engine.world.barrier()
            failing[0] = place
            with pytest.raises(CheckpointError, match="no space is left"):
                engine.publish(tmp_path, version=2)
            found = sw.published(tmp_path)
            assert found is not None
            assert found.version == 1
            load_file(found.path / WEIGHTS)
        engine.world.barrier()
        failing[0] = ""
        engine.publish(tmp_path, version=2)
        assert sw.published(tmp_path, after=1) is not None

    on_ranks(work)


def unless(fails: Callable[[], bool], original: Callable[..., None]) -> Callable[..., None]:
    def call(*args: Any) -> None:
        if fails():
            raise OSError("no space is left")
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
    with pytest.raises(ConfigError, match="give a name of letters"):
        found.acknowledge("../sampler")
