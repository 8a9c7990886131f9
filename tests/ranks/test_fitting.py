"""The activation policy is chosen so that a step fits, and the choice is explained; else an error has figures."""

from __future__ import annotations

import copy
import math
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pipelined import batches as stage_batches
from twins import adamw, batches, train

import shardwise as sw
from shardwise.errors import ConfigError, ModelError, StateError
from shardwise.fit.hardware import Host, hardware
from shardwise.fit.search import Evaluated
from shardwise.plan import PolicyName
from shardwise.sharded import fitting
from shardwise.testing import run_ranks
from tests.models import Decoder, Transformer
from tests.thorough import sampled, thorough_only

MIB = 2**20
CPU = hardware("cpu")
FAST = CPU.model_copy(
    update={"host": Host(memory_bytes=2**40, memory_bytes_per_second=1e15, adam_elements_per_second=1e9)}
)


@thorough_only("slow; smaller tests beside it cover the same code")
def test_the_fastest_that_fits_is_taken_and_trains_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest policy that fits is chosen by rehearsal, on hardware where copies cost nothing. Its predicted memory
    is within the limit."""
    model, data = Transformer(), batches(2, rows=32)
    monkeypatch.setattr(fitting, "hardware_here", lambda _: FAST)
    replicas, plain = [copy.deepcopy(model)], [copy.deepcopy(model)]

    def kept(world: sw.World) -> list[float]:
        with sw.shard(plain[world.rank], "zero3", optimizer=adamw(plain[world.rank]), world=world) as engine:
            return train(engine, data)

    def rank(world: sw.World) -> list[float]:
        replica = replicas[world.rank]
        with sw.shard(replica, "zero3", optimizer=adamw(replica), world=world) as engine:
            losses = train(engine, data[:1])
            promise = engine.rehearse(data[0])
            limit = promise.total - 100 * 2**10  # of what copies on the host free, some stays in the heap
            said = engine.fit_activations(data[0], limit)
            assert engine.plan.activations.policy == "offload", said
            lines = said.splitlines()
            assert lines[0].startswith("activations: offload, the fastest of those that fit in ")
            assert [line.split()[0] for line in lines[1:]] == ["keep", "selective", "recompute", "offload"]
            assert lines[1].endswith(": too much")
            assert engine.rehearse(data[0]).total <= limit
            return losses + train(engine, data[1:])

    assert run_ranks(1, rank)[0] == pytest.approx(run_ranks(1, kept)[0], abs=1e-6)


@thorough_only("slow; smaller tests beside it cover the same code")
def test_ranks_agree_on_what_fits_all_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits are the plan's budget or others, for devices, hosts and disks. A refusal changes nothing."""
    found: dict[str, list[Evaluated]] = {
        "keep": [Evaluated(0.0, 90 * MIB), Evaluated(0.0, 120 * MIB)],
        "selective": [Evaluated(3.0, 80 * MIB), Evaluated(5.0, 80 * MIB)],
        "recompute": [Evaluated(6.0, 60 * MIB)] * 2,
        "offload": [Evaluated(4.0, 70 * MIB, host_bytes=60 * MIB)] * 2,
        "disk": [Evaluated(math.inf, 70 * MIB, disk_bytes=60 * MIB)] * 2,
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

            monkeypatch.setattr(fitting, "_rehearsed", lambda *_: mine_of[threading.get_ident()])
            monkeypatch.setattr(fitting, "_room", lambda _: room_of.get(threading.get_ident(), 2**40))
            mine_of[threading.get_ident()] = mine
            assert chosen(200 * MIB) == "keep"
            assert chosen() == "offload", "4 s, where keep is too much for rank 1 and selective takes 5"
            assert chosen(100 * MIB, 59 * MIB) == "selective", "a host holds what both ranks put there"
            assert chosen(65 * MIB) == "recompute"
            before = engine.plan
            with pytest.raises(
                ConfigError, match=r"at least 10.0 MiB more than the 50.0 MiB of .*: keep 120.0 MiB, .*; selective 80"
            ):
                chosen(50 * MIB)
            assert engine.plan == before
            mine_of[threading.get_ident()] = {"disk": mine["disk"]}
            room_of[threading.get_ident()] = 60 * MIB - world.rank
            with pytest.raises(ConfigError, match=rf"{tmp_path} has 60.0 MiB free"):
                chosen()
            room_of[threading.get_ident()] = 60 * MIB
            assert chosen() == "disk"
            train(engine, batches(1))

    mine_of: dict[int, dict[str, Evaluated]] = {}
    room_of: dict[int, int] = {}
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


def pipelined(preset: str, schedule: str, **more: Any) -> dict[str, Any]:
    return {
        "preset": preset,
        "mesh": {"pp": 2, "dp": 1},
        "accumulate": 4,
        "pipeline": {"schedule": schedule},
        **more,
    }


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("policy", ["keep", "recompute", "offload", "disk"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_stages_of_a_pipeline_take_the_same_choice(
    schedule: str, policy: PolicyName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For every policy, predictions and training equal those of an engine whose plan sets this policy."""
    model, data = Decoder(num_blocks=4), stage_batches(2, 8)
    own = fitting._rehearsed
    promises: dict[int, dict[str, Evaluated]] = {}

    def forced(*args: Any) -> dict[PolicyName, Evaluated]:
        """Rehearse all policies, but let only one of them fit."""
        found = own(*args)
        promises[threading.get_ident()] = dict(found)
        return {name: replace(one, device_bytes=0 if name == policy else 2**40) for name, one in found.items()}

    monkeypatch.setattr(fitting, "_rehearsed", forced)

    def trained(fits: bool) -> list[tuple[list[float], dict[str, torch.Tensor], int]]:
        models = [copy.deepcopy(model) for _ in range(2)]

        def rank(world: sw.World) -> tuple[list[float], dict[str, torch.Tensor], int]:
            mine = models[world.rank]
            folder = str(tmp_path / ("fitted" if fits else "asked"))
            plan = pipelined("zero1", schedule, disk=folder, **({} if fits else {"activations": policy}))
            micro_batch = tuple(one[:2] for one in data[0])
            with sw.shard(mine, plan, optimizer=adamw(mine), world=world) as engine:
                if fits:
                    said = engine.fit_activations(micro_batch, "1GiB")
                    assert engine.plan.activations.policy == policy, said
                    promise = promises[threading.get_ident()][policy].device_bytes
                else:
                    promise = engine.rehearse(micro_batch).total
                losses = [engine.train_step(batch).item() for batch in data]
                if policy == "offload":
                    assert engine.memory().measured_on_host["activations"] > 0
                return losses, engine.state_dict(), promise

        return run_ranks(2, rank)

    for fitted, asked in zip(trained(True), trained(False), strict=True):
        assert fitted[0] == asked[0]
        assert fitted[2] == asked[2]
        assert all(torch.equal(fitted[1][name], value) for name, value in asked[1].items())


@thorough_only("slow; smaller tests beside it cover the same code")
def test_stages_that_do_not_fit_are_refused_before_anything_changes() -> None:
    models = [Decoder(num_blocks=4) for _ in range(2)]
    data = stage_batches(1, 8)

    def rank(world: sw.World) -> None:
        mine = models[world.rank]
        with sw.shard(mine, pipelined("zero1", "1f1b"), optimizer=adamw(mine), world=world) as engine:
            micro_batch = tuple(one[:2] for one in data[0])
            with pytest.raises(ConfigError, match=r"With this batch a step takes at least .* keep .*; recompute"):
                engine.fit_activations(micro_batch, 1000)
            assert engine.plan.activations.policy is None
            engine.eval_step(data[0])
            with pytest.raises(StateError, match="has not computed yet; call it before the first step"):
                engine.fit_activations(micro_batch, "1GiB")

    run_ranks(2, rank)
    rules = {"first": {"params": ["blocks.0.*"], "activations": "recompute"}}

    def ruled(world: sw.World) -> None:
        mine = copy.deepcopy(models[world.rank])
        plan = pipelined("zero1", "1f1b", rules=rules)
        with (
            sw.shard(mine, plan, optimizer=adamw(mine), world=world) as engine,
            pytest.raises(ConfigError, match="one policy for all units, and the plan's rule 'first' has"),
        ):
            engine.fit_activations(tuple(one[:2] for one in data[0]), "1GiB")

    models = [Decoder(num_blocks=4) for _ in range(2)]
    run_ranks(2, ruled)


@pytest.mark.parametrize("place", [0, 1])
def test_a_stage_that_cannot_be_rehearsed_is_told_of_on_all_ranks(place: int) -> None:
    """Any stage may fail. The last one sends nothing from which the other stages would learn of it."""
    models = [Decoder(num_blocks=4) for _ in range(2)]
    for model in models:
        model.blocks[3 * place].forward = lambda x: x * float(x.sum())

    def rank(world: sw.World) -> None:
        mine = models[world.rank]
        with (
            sw.shard(mine, pipelined("zero1", "1f1b"), optimizer=adamw(mine), world=world) as engine,
            pytest.raises(ModelError, match="asks for the value"),
        ):
            engine.fit_activations(tuple(one[:2] for one in stage_batches(1, 8)[0]), "1GiB")

    run_ranks(2, rank)
