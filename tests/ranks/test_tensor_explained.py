"""`explain` of a plan that splits a model: the mesh, what a rank holds, and the bytes sent for activations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from split_models import TENSOR, Transformer, tokens
from test_split_products import CUT, net
from twins import work_on_ranks

import shardwise as sw
from shardwise.cli.main import main
from shardwise.fit.hardware import hardware
from tests import inside
from tests.thorough import sampled, thorough_only

pytestmark = sampled

MODEL = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from split_models import Transformer, tokens

def build():
    return Transformer()

def batch():
    return tokens(0)
"""


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize("preset", ["zero1", "zero3"])
@pytest.mark.parametrize("sequence", [False, True])
def test_explained_bytes_and_memory_are_those_of_a_run(
    preset: str, sequence: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan: dict[str, Any] = {
        "preset": preset,
        "mesh": {"dp": 2, "tp": 2},
        "tensor": {**TENSOR, "sequence": sequence},
    }
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    (tmp_path / "model.py").write_text(MODEL)
    asked = ["explain", str(tmp_path / "plan.json"), "--world", "4", "--optimizer", "adamw"]
    asked += ["--model", f"{tmp_path}/model.py:build", "--batch", f"{tmp_path}/model.py:batch"]
    assert main([*asked, "--json"]) == 0
    promised = json.loads(capsys.readouterr().out)

    def work(engine: sw.Engine) -> tuple[int, int]:
        for _ in range(3):
            engine.backward(engine(tokens(0)))
            engine.step()
        ledger = inside.ledger(engine)
        ledger.clear()
        engine.backward(engine(tokens(0)))
        engine.step()
        return sum(ledger.sent_bytes.values()), engine.memory().measured["param"]

    for sent_bytes, param_bytes in work_on_ranks(
        4, work, plan, Transformer, lambda model: torch.optim.AdamW(model.parameters())
    ):
        assert sent_bytes == promised["sent_bytes_per_step"]
        assert param_bytes == promised["bytes"]["param"]
    assert main(asked) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "tensor parallelism: ranks share samples, and split each layer" in said
    assert "of activations along tp" in said


def test_stages_are_priced_as_they_are_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the rank with the most parameters."""
    plan = {"preset": "zero1", "mesh": {"pp": 2, "tp": 2}, "accumulate": 2, "tensor": CUT}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    text = f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\nfrom test_split_products import net\n"
    (tmp_path / "model.py").write_text(text + "def build():\n    return net(tied=False)\n")
    asked = ["explain", str(tmp_path / "plan.json"), "--world", "4", "--optimizer", "adamw", "--json"]
    assert main([*asked, "--model", f"{tmp_path}/model.py:build"]) == 0
    promised = json.loads(capsys.readouterr().out)["bytes"]["param"]

    def work(engine: sw.Engine) -> int:
        return engine.memory().measured["param"]

    assert promised == max(
        work_on_ranks(4, work, plan, lambda: net(tied=False), lambda model: torch.optim.AdamW(model.parameters()))
    )


def test_the_mesh_without_a_lost_rank_is_shown_and_its_price(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"preset": "ddp", "mesh": {"tp": 4}, "tensor": TENSOR}))
    (tmp_path / "model.py").write_text(MODEL)
    asked = ["explain", str(tmp_path / "plan.json"), "--world", "4", "--model", f"{tmp_path}/model.py:build"]
    assert main([*asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ranks_that_leave"] == 2
    one_rank, one_host, _ = told["losses"]
    assert (one_rank["num_lost"], one_rank["why_restarted"]) == (2, "")
    assert one_rank["read_bytes"] > told["bytes"]["optim"], "all that was in the image of another rank"
    assert one_host["why_restarted"] == "all ranks are on that host"
    assert main([*asked, "--per-host", "2"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "An elastic job goes on with 2 of 4 ranks, on the mesh tp=2, until enough others are there." in said
    assert "one host: the others stand for" in said
    assert "2 ranks are missing until as many join" in said


@pytest.mark.parametrize(("latency_seconds", "num_left"), [(1e-9, 2), (1.0, 1)])
def test_the_fastest_mesh_without_a_lost_rank_is_shown(
    latency_seconds: float, num_left: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"preset": "ddp", "mesh": {"tp": 4}, "tensor": TENSOR}))
    (tmp_path / "model.py").write_text(MODEL.replace("Transformer()", "Transformer(width=256)"))
    known = json.loads(hardware("cpu").model_dump_json())
    known["local"] |= {"latency_seconds": latency_seconds, "bytes_per_second": 1e15, "node_bytes_per_second": None}
    (tmp_path / "hardware.yaml").write_text(json.dumps(known))
    asked = ["explain", str(tmp_path / "plan.json"), "--world", "4", "--time", "--optimizer", "adamw"]
    asked += ["--model", f"{tmp_path}/model.py:build", "--batch", f"{tmp_path}/model.py:batch"]
    asked += ["--hardware", f"{tmp_path}/hardware.yaml"]
    assert main([*asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ranks_that_leave"] == 4 - num_left
    two, one = told["smaller_meshes"]
    assert two.endswith(" on tp=2" if num_left == 2 else " on tp=2 (left out)")
    assert one.endswith(" on tp=1")
    assert main(asked) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"goes on with {num_left} of 4 ranks, on the mesh tp={num_left}, until" in said
    assert f"If no replica group is whole, a step takes {two}; {one}." in said
    days = ["--days", "1", "--runs", "1", "--rank-hours", "0.5", "--device", "cpu", "--per-host", "4", "--json"]
    assert main(["simulate", *[word for word in asked[1:] if word != "--time"], *days]) == 0
    simulated = json.loads(capsys.readouterr().out)
    assert simulated["job"]["numbers"] == ([4, 2, 1] if num_left == 2 else [4, 1])
    assert set(simulated["job"]["seconds_with"]) == {"2", "1"}


def test_meshes_for_which_the_hosts_of_the_hardware_have_no_room_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a job, by explain and by simulate."""
    (tmp_path / "plan.json").write_text(json.dumps({"preset": "ddp", "mesh": {"tp": 4}, "tensor": TENSOR}))
    (tmp_path / "model.py").write_text(MODEL)
    known = json.loads(hardware("cpu").model_dump_json())
    known["host"]["memory_bytes"] = "1KiB"
    (tmp_path / "hardware.yaml").write_text(json.dumps(known))
    asked = [str(tmp_path / "plan.json"), "--world", "4", "--optimizer", "adamw"]
    asked += ["--model", f"{tmp_path}/model.py:build", "--batch", f"{tmp_path}/model.py:batch"]
    asked += ["--hardware", f"{tmp_path}/hardware.yaml"]
    assert main(["explain", *asked, "--time", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert "smaller_meshes" not in told
    assert "on tp=2: 2 of these ranks would hold" in told["losses"][0]["why_restarted"]
    days = ["--days", "1", "--runs", "1", "--rank-hours", "0.5", "--device", "cpu", "--per-host", "4", "--json"]
    assert main(["simulate", *asked, *days]) == 0
    assert json.loads(capsys.readouterr().out)["job"]["recovery"] == "restart"
