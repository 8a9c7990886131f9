"""Every checkpoint can be read by any preset, world size, unit boundary and precision."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from allocations import Allocations
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from twins import batches, plan_of, train, work_on_ranks

import shardwise as sw
from shardwise.checkpoint.index_schema import read_index
from shardwise.errors import CheckpointError
from shardwise.plan.placement import PRESETS
from shardwise.testing import run_ranks
from tests import inside
from tests.models import Transformer
from tests.thorough import drawn, sampled, thorough_only, varies

IN_MEMORY = sorted(name for name, one in PRESETS.items() if one.optim.tier != "disk")
ROWS = 24  # divisible by 1, 2, 3, 4 and 8 ranks
Tensors = dict[tuple[str, str], torch.Tensor | None]


def model() -> Transformer:
    torch.manual_seed(0)
    made = Transformer(tied=True, num_blocks=2)
    made.blocks[0].up.weight.requires_grad_(False)
    made.register_buffer("seen", torch.arange(3.0))
    return made


def optimizer_of(made: nn.Module) -> torch.optim.Optimizer:
    """Two groups, so that parameters are in another order than in the model."""
    groups = [
        {"params": [param for param in made.parameters() if param.dim() < 2], "weight_decay": 0.0},
        {"params": [param for param in made.parameters() if param.dim() > 1]},
    ]
    return torch.optim.AdamW(groups, lr=3e-3, eps=1e-5)


def on_ranks(num_ranks: int, plan: dict[str, Any], work: Callable[[sw.Engine], Any]) -> list[Any]:
    return work_on_ranks(num_ranks, work, plan, model, optimizer_of)


def whole(engine: sw.Engine) -> Tensors:
    """All parameters, and their moments by parameter name."""
    params = dict(engine.module.named_parameters())
    values = engine.state_dict()
    moments = engine.optimizer_state_dict()["state"]
    groups = inside.adopted(engine).groups
    names = {param: name for name, param in params.items()}
    numbered = enumerate(names[param] for group in groups for param in group["params"])
    found: Tensors = {(name, "param"): values[name] for name in params}
    for number, name in numbered:
        for what in ("exp_avg", "exp_avg_sq"):
            found[name, what] = moments.get(number, {}).get(what)
    return found


def damage(path: Path, place: int = -1) -> None:
    """Flip a bit of the byte at `place`. The last byte belongs to a tensor, except in rank 0's file."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    with path.open("r+b") as file:  # in place: the file itself stays the same
        file.write(content)
    os.utime(path, (1, 1))  # kernels count a file's times in steps, and no time may have passed


def assert_same(one: Tensors, other: Tensors, *, rounded: bool) -> None:
    """Equal bit by bit. Only a frozen parameter, kept in the compute dtype, may have been rounded to bf16."""
    for key, value in one.items():
        there = other[key]
        assert (value is None) == (there is None), key
        if value is None or there is None:
            continue
        is_frozen = key == ("blocks.0.up.weight", "param")
        tolerance = 1e-2 if is_frozen and rounded else 0.0
        assert torch.allclose(value.float(), there.float(), rtol=tolerance, atol=0.0), key


def steps_of(engine: sw.Engine) -> set[float]:
    """The optimizer's step counters on this rank."""
    optimizer = inside.adopted(engine)
    states = [optimizer.state_of(piece) for piece in optimizer.pieces]
    return {float(state["step"]) for state in states if state}


MESHES = {"hsdp": {"node": 2, "local": 2}, "hpz": {"node": 2, "local": 2}}


@thorough_only("slow; smaller tests beside it cover the same code")
@varies
def test_every_preset_reads_every_preset(tmp_path: Path) -> None:
    data = batches(4, rows=ROWS)
    plans = {
        name: {"preset": name, **({"mesh": MESHES[name]} if name in MESHES else {})}
        for name in IN_MEMORY[:: drawn(3, 1)]
    }
    expected = {}
    for name, plan in plans.items():

        def write(engine: sw.Engine, name: str = name) -> Any:
            train(engine, data[:3])
            engine.save(tmp_path / name)
            return whole(engine), train(engine, data[3:])

        expected[name] = on_ranks(4, plan, write)[0]

    def read(engine: sw.Engine) -> None:
        for name, (tensors, losses) in expected.items():
            loaded = engine.resume(tmp_path / name)
            assert loaded is not None
            assert (loaded.step, steps_of(engine)) == (3, {3.0})
            assert_same(tensors, whole(engine), rounded=False)
            assert train(engine, data[3:]) == pytest.approx(losses, rel=1e-6)

    for plan in plans.values():
        on_ranks(4, plan, read)


@thorough_only("slow; smaller tests beside it cover the same code")
def test_a_run_that_grows_and_shrinks(tmp_path: Path) -> None:
    """Legs of two steps on 1, 2, 3, 8, 4 and 1 ranks have the losses of one run."""
    data = batches(12, rows=ROWS)
    expected = on_ranks(1, {"preset": "ddp"}, lambda engine: train(engine, data))[0]
    losses: list[float] = []
    for leg, (num_ranks, name) in enumerate(
        [(1, "zero3"), (2, "zero1"), (3, "zero3"), (8, "hpz"), (4, "hsdp"), (1, "ddp")]
    ):
        mesh = {"node": num_ranks // 2, "local": 2} if name in MESHES else None

        def go_on(engine: sw.Engine, leg: int = leg) -> Any:
            assert (engine.resume(tmp_path) is None) == (leg == 0)
            assert engine.num_steps == 2 * leg
            done = train(engine, data[2 * leg : 2 * leg + 2])
            engine.save(tmp_path, wait=False)
            return done

        losses += on_ranks(num_ranks, plan_of(name, mesh), go_on)[0]
    assert losses == pytest.approx(expected, rel=1e-5)


UNITS: list[Any] = ["auto", {"class": "Linear"}, {"min_numel": 3000}, ["blocks.*"], ["blocks.0", "blocks.1.up"]]


@st.composite
def settings_of(draw: Any) -> tuple[int, dict[str, Any]]:
    num_ranks = draw(st.sampled_from([1, 2, 3, 4]))
    name = draw(st.sampled_from(IN_MEMORY))
    plan: dict[str, Any] = {"preset": name, "units": draw(st.sampled_from(UNITS))}
    plan["precision"] = draw(st.sampled_from(["fp32", "bf16"]))
    if name in MESHES or draw(st.booleans()):
        nodes = draw(st.sampled_from([nodes for nodes in (1, 2, 3, 4) if num_ranks % nodes == 0]))
        plan["mesh"] = {"node": nodes, "local": num_ranks // nodes}
    return num_ranks, plan


@thorough_only("slow; smaller tests beside it cover the same code")
@varies
@settings(max_examples=drawn(3, 30), deadline=None)
@given(wrote=settings_of(), reads=settings_of(), wait=st.booleans())
def test_any_to_any(wrote: tuple[int, dict[str, Any]], reads: tuple[int, dict[str, Any]], wait: bool) -> None:
    data = batches(3, rows=ROWS)
    with tempfile.TemporaryDirectory() as folder:

        def write(engine: sw.Engine) -> Any:
            train(engine, data[:2])
            engine.save(folder, state={"seen": (1, "two")}, wait=wait)
            return whole(engine), train(engine, data[2:])

        def read(engine: sw.Engine) -> Any:
            loaded = engine.resume(folder)
            assert loaded is not None
            assert loaded.state == {"seen": (1, "two")}
            return whole(engine), train(engine, data[2:])

        tensors, losses = on_ranks(*wrote, write)[0]
        read_tensors, read_losses = on_ranks(*reads, read)[0]
    precisions = {wrote[1]["precision"], reads[1]["precision"]}
    assert_same(tensors, read_tensors, rounded=precisions != {"fp32"})
    assert read_losses == pytest.approx(losses, rel=1e-6 if precisions == {"fp32"} else 2e-2)


def test_each_rank_reads_and_holds_what_it_needs(tmp_path: Path) -> None:
    """From 2 ranks to 8: optimizer states, which are new, are read once, except for block edges. Parameters are read
    twice, to check and then to fill them. Memory is allocated for the states and a few blocks only."""
    num_layers, layer_bytes = 4, 4 * 1024 * 1024
    needed = 3 * num_layers * layer_bytes // 8

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        made = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(num_layers)))
        return made, torch.optim.AdamW(made.parameters())

    def write(world: sw.World) -> None:
        made, optimizer = build()
        with sw.shard(made, "zero3", optimizer=optimizer, world=world) as engine:
            engine.backward(engine(torch.ones(1, 1024)).sum())
            engine.step()
            engine.save(tmp_path)

    def read(world: sw.World) -> tuple[int, int]:
        made, optimizer = build()
        with sw.shard(made, "zero3", optimizer=optimizer, world=world) as engine, Allocations() as allocations:
            loaded = engine.resume(tmp_path)
            assert loaded is not None
            return loaded.num_bytes_read, allocations.peak_bytes

    run_ranks(2, write)
    assert sum(path.stat().st_size for path in tmp_path.rglob("rank-*")) < 8 * needed * 1.01  # each element once
    for num_bytes_read, peak_bytes in run_ranks(8, read):
        due, held = 4 / 3 * needed, 2 / 3 * needed
        assert due <= num_bytes_read <= due * 1.02 + 2 * 2**16
        assert peak_bytes <= held + 4 * 2**20 + 2**17


@sampled
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_over_a_state_that_is_there(precision: str, tmp_path: Path) -> None:
    """Resuming into an engine with states restores everything; a damaged checkpoint changes nothing."""
    data = batches(4, rows=ROWS)

    def work(engine: sw.Engine) -> None:
        train(engine, data[:2])
        engine.save(tmp_path / "good", wait=True)
        engine.save(tmp_path / "bad", wait=True)
        saved = whole(engine)
        losses = train(engine, data[2:])
        engine.resume(tmp_path / "good")
        assert_same(whole(engine), saved, rounded=False)
        assert train(engine, data[2:]) == losses
        before = whole(engine)
        if engine.world.rank == 0:
            damage(next((tmp_path / "bad").rglob("rank-00001.safetensors")))
        engine.world.barrier()
        with pytest.raises(CheckpointError, match="is damaged in"):
            engine.resume(tmp_path / "bad")
        assert_same(whole(engine), before, rounded=False)

    on_ranks(2, {"preset": "zero3", "precision": precision}, work)


@pytest.mark.parametrize("is_settled", [False, True])
def test_a_checkpoint_that_changes_after_it_was_checked_is_refused(
    is_settled: bool, tmp_path: Path, monkeypatch: Any
) -> None:
    """Checksums detect it: they are computed a second time if a file is new, or if its times show a write. Resuming
    from an intact checkpoint then restores the model."""
    if is_settled:
        monkeypatch.setattr(import_module("shardwise.checkpoint.transfer"), "SETTLED_SECONDS", -1)
    data, module = batches(2, rows=ROWS), import_module("shardwise.checkpoint.load")
    plain = module.fill

    def after_damage(recipe: Any, reader: Any, optimizer: Any) -> None:
        if "bad" in reader.path.parts:
            last = max(reader.index.chunks, key=lambda chunk: (chunk.kind == "param", chunk.offset))
            damage(reader.path / last.file, last.offset + 5)
        plain(recipe, reader, optimizer)

    def work(engine: sw.Engine) -> None:
        train(engine, data)
        engine.save(tmp_path / "good", wait=True)
        saved = whole(engine)
        engine.save(tmp_path / "bad", wait=True)
        with pytest.raises(CheckpointError, match=r"changed while it was read.*Resume again.*is damaged in"):
            engine.resume(tmp_path / "bad")
        engine.resume(tmp_path / "good")
        assert_same(whole(engine), saved, rounded=False)

    monkeypatch.setattr(module, "fill", after_damage)
    on_ranks(1, {"preset": "zero1"}, work)


def test_copies_share_the_writing(tmp_path: Path) -> None:
    """With `ddp` every rank has everything, and each writes a part of it."""

    def write(engine: sw.Engine) -> None:
        train(engine, batches(1, rows=ROWS))
        engine.save(tmp_path)

    on_ranks(4, {"preset": "ddp"}, write)
    index = read_index(tmp_path / "step-00000001")
    sizes = [file.num_bytes for file in index.files]
    assert max(sizes) < 1.5 * min(sizes)
    elements = sum(chunk.stop - chunk.start for chunk in index.chunks if chunk.kind == "param")
    assert elements == sum(param.numel() for param in model().parameters())
