"""What becomes of activations is chosen so that a step fits, for a reason that is said, or refused with figures."""

from __future__ import annotations

import copy
import threading
from pathlib import Path

import pytest
import torch
from twins import Transformer, adamw, batches, train

import shardwise as sw
from shardwise import fitting
from shardwise.calibration import Calibration, HostFigures
from shardwise.errors import ConfigError
from shardwise.fitting import Choice
from shardwise.testing import run_ranks

MIB = 2**20
FAST = Calibration("here", {}, HostFigures(1e15, 1e9, 1, ""))


def test_the_cheapest_that_fits_is_taken_and_trains_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what a rank rehearses, by a calibration in which copies cost nothing; what is promised then fits."""
    torch.manual_seed(0)
    model, data = Transformer(), batches(2, rows=32)
    monkeypatch.setattr(fitting, "read_calibration", lambda: FAST)
    replicas, plain = [copy.deepcopy(model)], [copy.deepcopy(model)]

    def kept(world: sw.World) -> list[float]:
        with sw.shard(plain[world.rank], "zero3", optimizer=adamw(plain[world.rank]), world=world) as engine:
            return train(engine, data)

    def rank(world: sw.World) -> list[float]:
        replica = replicas[world.rank]
        with sw.shard(replica, "zero3", optimizer=adamw(replica), world=world) as engine:
            losses = train(engine, data[:1])
            promise = engine.rehearse(data[0])
            limit = promise.total - 300 * 2**10
            said = engine.fit_activations(data[0], limit)
            assert engine.plan.activations.policy == "offload", said
            lines = said.splitlines()
            assert lines[0].startswith("activations: offload, the cheapest of those that fit in ")
            assert [line.split()[0] for line in lines[1:]] == ["keep", "selective", "recompute", "offload"]
            assert lines[1].endswith(": too much")
            assert engine.rehearse(data[0]).total <= limit
            return losses + train(engine, data[1:])

    assert run_ranks(1, rank)[0] == pytest.approx(run_ranks(1, kept)[0], abs=1e-6)


def test_ranks_agree_on_what_fits_all_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the plan's budget or other limits, of devices, hosts and disks; and a refusal changes nothing."""
    found: dict[str, list[Choice]] = {
        "keep": [Choice(90 * MIB, 0, 0, 0.0), Choice(120 * MIB, 0, 0, 0.0)],
        "selective": [Choice(80 * MIB, 0, 0, 3.0), Choice(80 * MIB, 0, 0, 5.0)],
        "recompute": [Choice(60 * MIB, 0, 0, 6.0), Choice(60 * MIB, 0, 0, 6.0)],
        "offload": [Choice(70 * MIB, 30 * MIB, 0, 4.0), Choice(70 * MIB, 30 * MIB, 0, 4.0)],
        "disk": [Choice(70 * MIB, 0, 30 * MIB, None), Choice(70 * MIB, 0, 30 * MIB, None)],
    }
    replicas = [Transformer() for _ in range(2)]

    def rank(world: sw.World) -> None:
        replica = replicas[world.rank]
        mine = {name: choices[world.rank] for name, choices in found.items()}
        plan = {"preset": "zero3", "disk": str(tmp_path), "budget": {"device": "100MiB", "host": "1GiB"}}
        with sw.shard(replica, plan, optimizer=adamw(replica), world=world) as engine:

            def chosen(*limits: int) -> object:
                engine.fit_activations(batches(1)[0], *limits)
                return engine.plan.activations.policy

            monkeypatch.setattr(fitting, "_rehearsed", lambda *_: (mine_of[threading.get_ident()], {}))
            mine_of[threading.get_ident()] = mine
            assert chosen(200 * MIB) == "keep"
            assert chosen() == "offload", "4 s, where keep is too much for rank 1 and selective takes 5"
            assert chosen(100 * MIB, 59 * MIB) == "selective", "a host holds what both ranks put there"
            assert chosen(65 * MIB) == "recompute"
            before = engine.plan
            with pytest.raises(
                ConfigError, match=r"at least 10.0 MiB more than the 50.0 MiB of .*: keep 120.0 MiB; sel"
            ):
                chosen(50 * MIB)
            assert engine.plan == before
            mine_of[threading.get_ident()] = {"disk": mine["disk"]}
            assert chosen() == "disk"
            train(engine, batches(1))

    mine_of: dict[int, dict[str, Choice]] = {}
    run_ranks(2, rank)


def test_without_a_limit_there_is_nothing_to_fit() -> None:
    def rank(world: sw.World) -> None:
        replica = Transformer()
        with (
            sw.shard(replica, "zero3", optimizer=adamw(replica), world=world) as engine,
            pytest.raises(ConfigError, match=r"Say how much each device may hold: fit_activations\(batch, '10GiB'\)"),
        ):
            engine.fit_activations(batches(1)[0])

    run_ranks(1, rank)
