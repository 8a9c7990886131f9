"""Published weights that each rank writes its rows of: files are those of gathered weights, byte for byte, nothing is
gathered, and training goes on meanwhile."""

from __future__ import annotations

import copy
import logging
import math
import pkgutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_transformers import gpt2, llama, mixtral
from torch import nn
from twins import adamw, batches, work_on_mesh

import shardwise as sw
from shardwise.checkpoint import own_rows
from shardwise.checkpoint.draft_notes import Notes
from shardwise.errors import CheckpointError
from tests import inside
from tests.models import Mixture, Transformer
from tests.patience import PATIENCE
from tests.ranks.threads_as_members import run_members
from tests.thorough import sampled

WEIGHTS = "model.safetensors"


def frozen() -> nn.Module:
    """With a part that is not trained, a tied head, and a buffer in files."""
    model = Transformer(tied=True)
    model.blocks[1].requires_grad_(False)
    model.register_buffer("seen", torch.tensor([3, 5]))
    return model


def on_ranks(build: Callable[[], nn.Module], plan: dict[str, Any], work: Callable[[sw.Engine], Any]) -> list[Any]:
    torch.manual_seed(0)
    return work_on_mesh(work, plan, build())


def train(engine: sw.Engine) -> None:
    share, shares = engine.data_ranks
    x, y = (part.chunk(shares)[share] for part in batches(1)[0])
    engine.train_step({"input_ids": x, "labels": x} if hasattr(engine.module, "config") else (x, y))


def sent_by_gathers(engine: sw.Engine) -> int:
    return sum(sent for (verb, _), sent in inside.ledger(engine).sent_bytes.items() if verb == "gather")


HSDP = {"preset": "hsdp", "mesh": {"node": 2, "local": 2}}
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "ddp": (frozen, {"preset": "ddp"}),
    "zero1": (frozen, {"preset": "zero1", "precision": "bf16"}),
    "zero2": (gpt2, {"preset": "zero2"}),
    "zero3": (frozen, {"preset": "zero3"}),
    "zero3 bf16": (llama, {"preset": "zero3", "precision": "bf16"}),
    "hsdp": (frozen, HSDP),
    "frozen as codes": (frozen, {"preset": "zero3", "storage": {"frozen": "int8"}}),
    "host": (frozen, {"preset": "zero3-offload", "precision": "bf16"}),
    "disk": (frozen, {"preset": "infinity", "precision": "bf16"}),
    "tp": (llama, {"preset": "zero3", "mesh": {"dp": 2, "tp": 2}}),
    "tp alone": (gpt2, {"preset": "ddp", "mesh": {"tp": 2}}),
    "pp": (gpt2, {"preset": "zero1", "mesh": {"pp": 2}}),
    "pp and tp": (llama, {"preset": "zero1", "mesh": {"pp": 2, "tp": 2}}),
    "ep": (Mixture, {"preset": "zero3", "mesh": {"ep": 2}}),
    "islands": (Transformer, {"preset": "zero1", "mesh": {"island": 2, "dp": 2}, "islands": {"every": 1}}),
}


@pytest.mark.parametrize("dtype", ["bf16", None])
@pytest.mark.parametrize("case", CASES)
@sampled
def test_files_are_those_of_gathered_weights(case: str, dtype: Any, tmp_path: Path) -> None:
    build, plan = CASES[case]
    if plan["preset"] == "infinity":
        plan = {**plan, "disk": str(tmp_path / "scratch")}

    def work(engine: sw.Engine) -> int:
        train(engine)
        before = sent_by_gathers(engine)
        engine.publish(tmp_path / "weights", dtype=dtype, wait=False)
        sent = sent_by_gathers(engine) - before
        train(engine)
        engine.wait_for_publish()
        engine.publish(tmp_path / "weights", dtype=dtype)
        engine.save_pretrained(tmp_path / "gathered", dtype=dtype)
        return sent

    assert on_ranks(build, plan, work) == [0] * math.prod(plan.get("mesh", {"dp": 2}).values())
    first, second = ((tmp_path / "weights" / f"version-0000000{number}") for number in (1, 2))
    assert (second / WEIGHTS).read_bytes() == (tmp_path / "gathered" / WEIGHTS).read_bytes()
    assert (first / WEIGHTS).read_bytes() != (second / WEIGHTS).read_bytes()
    expected = {path.name for path in (tmp_path / "gathered").iterdir()}
    assert {path.name for path in first.iterdir()} == {path.name for path in second.iterdir()} == expected
    assert {path.name for path in (tmp_path / "weights").iterdir()} == {first.name, second.name, "LATEST.json"}


def test_several_files_have_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.engine._FILE_BYTES", 20_000)

    def work(engine: sw.Engine) -> None:
        engine.publish(tmp_path / "weights", version=1)
        engine.save_pretrained(tmp_path / "gathered", max_file_bytes=20_000)

    on_ranks(frozen, {"preset": "zero3"}, work)
    gathered = {path.name: path.read_bytes() for path in (tmp_path / "gathered").iterdir()}
    assert len(gathered) > 3
    assert {path.name: path.read_bytes() for path in (tmp_path / "weights/version-00000001").iterdir()} == gathered


@pytest.mark.parametrize("changes", ["update", "plan"])
@pytest.mark.parametrize("is_memory", [False, True])
@sampled
def test_training_goes_on_and_whoever_changes_values_waits_for_the_copy(
    is_memory: bool, changes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is copied before somebody waits for it, which is the next update, or change of plan."""
    monkeypatch.setattr(own_rows, "is_memory", lambda _: is_memory)
    may_copy = [threading.Event(), threading.Event()]
    values, wait = own_rows.Row.values, own_rows.OwnRows.wait_for_copy

    def late_values(row: own_rows.Row) -> torch.Tensor:
        if row.is_hidden:
            rank = int(threading.current_thread().name.rpartition("-")[2])
            assert may_copy[rank].wait(PATIENCE)
        return values(row)

    def waits(own: own_rows.OwnRows) -> None:
        may_copy[int(own._file.stem[-1])].set()
        wait(own)

    make = own_rows.OwnRows.make

    def named(own: own_rows.OwnRows) -> None:
        threading.current_thread().name += f"-{own._file.stem[-1]}"
        make(own)

    monkeypatch.setattr(own_rows.Row, "values", late_values)
    monkeypatch.setattr(own_rows.OwnRows, "wait_for_copy", waits)
    monkeypatch.setattr(own_rows.OwnRows, "make", named)

    def work(engine: sw.Engine) -> Any:
        train(engine)
        expected = engine.state_dict()
        engine.publish(tmp_path, wait=False)
        (x, y), rank = batches(1)[0], engine.world.rank
        engine.backward(engine(x, y))
        assert not may_copy[rank].is_set()
        if changes == "update":
            engine.step()
        else:
            engine.zero_grad()
            engine.reshard({"preset": "zero1"})
        assert may_copy[rank].is_set()
        engine.wait_for_publish()
        found = sw.published(tmp_path)
        assert found is not None
        stored = found.tensors()
        assert found.version == 1
        assert all(torch.equal(one, expected[name]) for name, one in stored.items())
        now = engine.state_dict()
        assert torch.equal(now["norm.weight"], expected["norm.weight"]) == (changes == "plan")

    on_ranks(Transformer, {"preset": "zero3", "precision": "fp32" if changes == "plan" else "bf16"}, work)


@pytest.mark.parametrize(
    ("build", "changes", "why"),
    [
        (mixtral, {}, "files have other tensors than the model"),
        (Transformer, {"unseen": True}, "rank 1 does not see"),
    ],
)
def test_where_rows_cannot_be_written_weights_are_gathered(
    build: Any, changes: dict[str, bool], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    is_dir = Path.is_dir

    def sees(path: Path) -> bool:
        return is_dir(path) and not (threading.current_thread().name == "rank 1" and path.name.startswith(".writing"))

    if changes:
        monkeypatch.setattr(Path, "is_dir", sees)

    def work(engine: sw.Engine) -> None:
        for number in (1, 2):
            engine.publish(tmp_path / "weights", version=number)
        engine.save_pretrained(tmp_path / "gathered")

    with caplog.at_level(logging.INFO, "shardwise"):
        on_ranks(build, {"preset": "zero3"}, work)
    assert (tmp_path / "weights/version-00000002" / WEIGHTS).read_bytes() == (
        tmp_path / "gathered" / WEIGHTS
    ).read_bytes()
    said = [record.getMessage() for record in caplog.records if "are gathered to be published" in record.getMessage()]
    assert len(said) == 1
    assert why in said[0]


def test_a_change_by_hand_before_the_copy_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_copy = threading.Event()
    copies = pkgutil.resolve_name("shardwise.checkpoint.own_rows.OwnRows._copies")

    def late(own: own_rows.OwnRows) -> Any:
        assert may_copy.wait(PATIENCE)
        return copies(own)

    monkeypatch.setattr(own_rows.OwnRows, "_copies", late)

    def work(engine: sw.Engine) -> None:
        engine.publish(tmp_path, version=1, wait=False)
        if engine.world.rank == 1:
            piece = next(piece for piece in inside.adopted(engine).pieces if piece.span.numel)
            with torch.no_grad():
                piece.tensor.mul_(2)
        engine.world.barrier()
        may_copy.set()
        with pytest.raises(CheckpointError, match=r"rank 1 reports: .* was changed by hand .* publish\(wait=False\)"):
            engine.wait_for_publish()
        engine.publish(tmp_path, version=2)

    on_ranks(Transformer, {"preset": "zero3", "precision": "bf16"}, work)
    assert {path.name for path in tmp_path.iterdir()} == {"version-00000002", "LATEST.json"}


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_version_that_is_lost_with_a_rank(
    goes_on: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """In a job that goes on, the next version takes its place. Whoever waits for it is told."""
    wait = Notes.wait

    def first_lost(notes: Notes) -> Any:
        monkeypatch.setattr(Notes, "wait", wait)
        wait(notes)
        raise CheckpointError("rank 1 ended (killed?) before it had finished its file.")

    images = tmp_path / "images"
    images.mkdir()

    def work(world: sw.World, _: int) -> None:
        model = models[world.rank]
        with sw.shard(model, "zero3", optimizer=adamw(model), world=world) as engine:
            engine.publish(tmp_path / "weights", version=1)
            world.barrier()
            if world.rank == 0:
                monkeypatch.setattr(Notes, "wait", first_lost)
            engine.publish(tmp_path / "weights", version=2, wait=False)
            if goes_on:
                engine.publish(tmp_path / "weights", version=3)
                return
            with pytest.raises(CheckpointError, match=r"Version 2 .* rank 1 ended .* the version before"):
                engine.wait_for_publish()

    torch.manual_seed(0)
    models = [copy.deepcopy(model) for model in [Transformer()] * 2]
    run_members(2, work, images)
    found = sw.published(tmp_path / "weights")
    assert found is not None
    assert found.version == (3 if goes_on else 1)
    assert "rank 1 ended" in caplog.text
