"""The bytes that `explain --batch` promises along each model axis, compared with what a step sends."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pipelined
import pytest
import sequences
import torch
from split_models import TENSOR, Transformer, tokens
from torch import nn
from twins import work_on_ranks

import shardwise as sw
from shardwise.cli.main import main
from tests import inside
from tests.models import Decoder, Gpt, Mixture
from tests.thorough import thorough_only

Tensor = torch.Tensor
ROWS = 2

PLANS: dict[str, dict[str, Any]] = {
    "tp": {"preset": "zero1", "mesh": {"dp": 2, "tp": 2}, "tensor": TENSOR, "accumulate": 2},
    "pp": {"preset": "zero1", "mesh": {"pp": 2}, "accumulate": 3},
    "pp, interleaved": {
        "preset": "zero2",
        "mesh": {"pp": 2, "dp": 2},
        "accumulate": 4,
        "pipeline": {"schedule": "interleaved"},
    },
    "sp, ulysses": {"preset": "zero2", "mesh": {"dp": 2, "sp": 2}, "sequence": {"attention": "ulysses"}},
    "sp, ring": {"preset": "zero3", "mesh": {"sp": 4}, "accumulate": 2, "sequence": {"attention": "ring"}},
    "ep": {"preset": "zero3", "mesh": {"dp": 2, "ep": 2}, "accumulate": 2},
}
CORE = ("pp",)


def model_of(kind: str) -> nn.Module:
    match kind.split(",")[0]:
        case "tp":
            return Transformer()
        case "pp":
            return Decoder(tied=True, num_blocks=4)
        case "sp":
            return Gpt()
        case _:
            return Mixture(top_k=4)  # all experts, so that each has an even share of the tokens


def micro_batch_of(kind: str) -> Any:
    """What one rank's model gets in one forward."""
    match kind.split(",")[0]:
        case "tp":
            return (tokens(0, ROWS),)
        case "sp":
            whole = sequences.batches(1, rows=ROWS)[0]
            length = sequences.TOKENS // PLANS[kind]["mesh"]["sp"]
            return {key: whole[key][:, :length].contiguous() for key in ("input_ids", "position_ids")}
        case _:
            return pipelined.batches(1, ROWS)[0]


FILE = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_sent_by_axis import micro_batch_of, model_of

def build():
    return model_of("KIND")

def batch():
    return micro_batch_of("KIND")
"""


def step(engine: sw.Engine, kind: str) -> None:
    """One step in which every forward has a micro-batch of the size that was explained."""
    num = engine.plan.accumulate
    if kind.startswith("pp"):
        engine.train_step(pipelined.batches(1, ROWS * num)[0])
        return
    for _ in range(num):
        if kind.startswith("sp"):
            loss = sequences.mean_loss(engine, engine.split_sequence(sequences.batches(1, rows=ROWS)[0]))
        else:
            loss = engine(*micro_batch_of(kind))
        engine.backward(loss)
        engine.step()


def sent_in_a_step(kind: str) -> list[tuple[int, dict[str, int]]]:
    """For each rank the elements of its parameters, and the bytes that its third step sent, by axis."""
    torch.manual_seed(0)
    first = model_of(kind)
    mesh = PLANS[kind]["mesh"]
    num_ranks = int(torch.tensor(list(mesh.values())).prod())

    def work(engine: sw.Engine) -> tuple[int, dict[str, int]]:
        step(engine, kind)
        step(engine, kind)
        ledger = inside.ledger(engine)
        ledger.clear()
        step(engine, kind)
        sent: Counter[str] = Counter()
        for (verb, line), num_bytes in ledger.sent_bytes.items():
            axis = line.partition(":")[0]  # a link between two stages has a name of its own
            if verb not in ("exchange", "broadcast") or axis == "tp":  # of others, a few short ones are not counted
                sent[axis] += num_bytes
        return engine.rehearse(micro_batch_of(kind)).param, dict(sent)

    return work_on_ranks(num_ranks, work, PLANS[kind], first, lambda model: torch.optim.AdamW(model.parameters()))


@pytest.mark.parametrize(
    "kind", [kind if kind in CORE else pytest.param(kind, marks=thorough_only("others stand for it")) for kind in PLANS]
)
def test_explained_bytes_along_each_axis_are_those_of_a_step(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(PLANS[kind]))
    (tmp_path / "model.py").write_text(FILE.replace("KIND", kind))
    found = sent_in_a_step(kind)
    asked = ["explain", str(tmp_path / "plan.json"), "--world", str(len(found)), "--optimizer", "adamw"]
    asked += ["--model", f"{tmp_path}/model.py:build"]
    counted = [*asked, "--batch", f"{tmp_path}/model.py:batch", "--expert-load", "1"]
    assert main([*counted, "--json"]) == 0
    promised = json.loads(capsys.readouterr().out)
    _, sent = max(found, key=lambda one: one[0])  # explained is the rank with the most parameters
    axis = kind[:2]
    assert promised["activation_bytes_by_axis"].keys() == {axis}
    assert promised["sent_bytes_by_axis"] == sent
    assert promised["sent_bytes_per_step"] == sum(sent.values())
    assert main(counted) == 0
    assert f"of activations along {axis}" in " ".join(capsys.readouterr().out.split())
    assert main(asked) == 0
    assert f"The bytes of activations along {axis} are not included" in " ".join(capsys.readouterr().out.split())
