"""Checkpoints of split models list which part of each parameter a rank has, and load into any mesh or one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from split_models import TENSOR, Transformer, tokens
from torch import nn
from twins import work_on_ranks

import shardwise as sw
from shardwise.checkpoint.index_schema import read_index
from shardwise.errors import CheckpointError
from shardwise.testing import run_ranks
from tests.ranks.twins import assert_same_bits
from tests.thorough import sampled, thorough_only

pytestmark = sampled

Tensor = torch.Tensor
MESHES: list[tuple[str, dict[str, int]]] = [
    ("zero3", {"dp": 2, "tp": 2}),
    ("zero1", {"dp": 1, "tp": 4}),
    ("ddp", {"tp": 2, "dp": 2}),
    ("zero2", {"dp": 3}),
    ("zero1", {"dp": 1}),
    ("zero3", {"dp": 1, "tp": 2}),
]


def plan_of(preset: str, mesh: dict[str, int]) -> dict[str, Any]:
    return {"preset": preset, "mesh": mesh, **({"tensor": TENSOR} if "tp" in mesh else {})}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def states_of(engine: sw.Engine) -> dict[str, Tensor]:
    names = [name for name, _ in engine.module.named_parameters()]
    found = dict(engine.state_dict())
    for number, entry in engine.optimizer_state_dict()["state"].items():
        found |= {f"{names[number]} {key}": value for key, value in entry.items()}
    return found


def trained(folder: Path, preset: str, mesh: dict[str, int]) -> dict[str, Tensor]:
    num_ranks = torch.tensor(list(mesh.values())).prod().item()
    torch.manual_seed(0)

    def work(engine: sw.Engine) -> dict[str, Tensor]:
        for step in range(2):
            engine.backward(engine(tokens(step)))
            engine.step()
        engine.save(folder)
        return states_of(engine)

    return work_on_ranks(int(num_ranks), work, plan_of(preset, mesh), Transformer, optimizer_of)[0]


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize("source", MESHES[:4], ids=str)
def test_checkpoints_move_between_products(source: tuple[str, dict[str, int]], tmp_path: Path) -> None:
    expected = trained(tmp_path, *source)
    for preset, mesh in MESHES:
        num_ranks = int(torch.tensor(list(mesh.values())).prod())
        torch.manual_seed(1)
        models = [Transformer() for _ in range(num_ranks)]

        def rank(world: sw.World) -> dict[str, Tensor]:
            model = models[world.rank]  # noqa: B023
            plan = plan_of(preset, mesh)  # noqa: B023
            with sw.shard(model, plan, optimizer=optimizer_of(model), world=world) as engine:
                assert engine.resume(tmp_path) is not None
                found = states_of(engine)
                engine.backward(engine(tokens(7)))
                engine.step()
                engine.save(tmp_path / f"again {preset} {mesh}")  # noqa: B023
                return found

        for found in run_ranks(num_ranks, rank):
            assert_same_bits(found, expected)


def test_the_index_lists_boxes_and_others_read_whole_tensors(tmp_path: Path) -> None:
    expected = trained(tmp_path / "run", "zero3", {"dp": 2, "tp": 2})
    [folder] = (tmp_path / "run").glob("step-*")
    index = read_index(folder)
    boxes = {json.dumps(chunk.box) for chunk in index.chunks if chunk.key == "param/blocks.0.attn.qkv.weight"}
    assert boxes == {
        "[[[0, 12], [24, 36], [48, 60]], [[0, 24]]]",
        "[[[12, 24], [36, 48], [60, 72]], [[0, 24]]]",
    }
    found = sw.inspect(tmp_path / "run")
    shapes = {spec.name: spec.shape for spec in found.source.weights}
    assert shapes["blocks.0.attn.qkv.weight"] == (72, 24)
    sw.convert(tmp_path / "run", tmp_path / "hf", "hf")
    from safetensors.torch import load_file

    whole = load_file(tmp_path / "hf" / "model.safetensors")
    for name, value in whole.items():
        assert torch.equal(value, expected[name]), name


DAMAGES = {
    "overlap": ([[[0, 12], [24, 36], [48, 60]], [[0, 24]]], "overlap|appear twice|incomplete"),
    "other numbers": ([[[0, 12]], [[0, 24]]], "has elements|does not fit|overlap"),
    "out of range": ([[[12, 24], [36, 48], [60, 99]], [[0, 24]]], "no ranges in order"),
    "no dimension": ([[[0, 12]]], "has ranges for 1 dimensions"),
    "backwards": ([[[24, 12], [36, 48], [60, 72]], [[0, 24]]], "no ranges in order"),
    "none": (None, "appear twice|incomplete|has elements"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_boxes_that_cannot_be_are_refused(case: str, tmp_path: Path) -> None:
    box, said = DAMAGES[case]
    trained(tmp_path, "ddp", {"dp": 1, "tp": 2})
    [folder] = tmp_path.glob("step-*")
    index = read_index(folder)
    numbers = [number for number, chunk in enumerate(index.chunks) if chunk.key == "param/blocks.0.attn.qkv.weight"]
    changed = index.chunks[numbers[-1]]
    index.chunks[numbers[-1]] = type(changed)(**{**vars(changed), "box": box})
    (folder / "index.json").write_text(index.to_json())
    with pytest.raises(CheckpointError, match=said):
        read_index(folder)
