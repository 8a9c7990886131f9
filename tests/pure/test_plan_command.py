"""`shardwise plan`: what it prints and writes, and what is refused, names of files before the search."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.cli.main import main
from shardwise.fit.foreseen import device_here
from shardwise.plan import load_plan

MODEL = """
import torch
from torch import nn
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64)) for _ in range(4)))
    def forward(self, x):
        return self.blocks(x).square().mean()
def batch():
    return torch.ones(4, 64)
def empty():
    return torch.ones(0, 64)
"""


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    (tmp_path / "tiny.py").write_text(MODEL)
    of_model = ["--model", f"{tmp_path}/tiny.py:Model", "--batch", f"{tmp_path}/tiny.py:batch"]
    return ["plan", *of_model, "--axes", "none", "--most", "8", "--hardware", "h100-sxm"]


def test_it_ranks_draws_and_writes_a_plan(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, picture = tmp_path / "plan.yaml", tmp_path / "front.svg"
    assert main([*words, "--world", "8", "--out", str(plan), "--picture", str(picture)]) == 0
    said = capsys.readouterr().out
    assert "the shortest step for 32 samples on h100-sxm" in said
    assert "why not" in said
    assert picture.read_text().startswith("<svg")
    best = load_plan(plan)
    assert main([*words, "--world", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["best"][0]["values"] == best.model_dump(mode="json", exclude_unset=True)
    assert main(["explain", str(plan), "--world", "8", *words[1:5]]) == 0, "the plan is one that can be used"
    capsys.readouterr()
    assert main([*words, "--world", "8", "--out", str(plan)]) == 2
    assert "already exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--world", "0"], "--world is 0"),
        (["--world", "1000000000"], "--world is 1000000000; give at most 2000000"),
        (["--world", "12"], "do not divide --world 12. Give --per-host 6, or another"),
        (["--world", "8", "--per-host", "0"], "--per-host is 0; give at least 1"),
        (["--world", "8", "--rows", "1000000000000000000"], "--rows is 1000000000000000000; give 1 to 1073741824"),
        (["--world", "8", "--micro-batch", "4,-1"], "--micro-batch is '4,-1'; give whole numbers from 1 on"),
        (["--world", "8", "--most", "0"], "--most is 0; give at least 1"),
        (["--world", "8", "--measure", "-1"], "--measure is -1; give at least 0"),
        (["--world", "8", "--hardware", "h100-smx"], "Did you mean 'h100-sxm'"),
        (["--world", "8", "--hardware", "./h100.yaml"], "There is no hardware profile file 'h100.yaml'"),
        (["--world", "8", "--set", "preset=zero4"], "There is no preset 'zero4'. Did you mean 'zero3'?"),
        (["--world", "8", "--optimizer", "adamm"], "Did you mean 'adam"),
        (["--world", "8", "--axes", "pt"], "--axes names 'pt'"),
        (["--world", "8", "--wires", "int4,int9"], "--wires is 'int9'. Did you mean 'int8'?"),
        (["--world", "8", "--precisions", "fp32,bf61"], "--precisions is 'bf61'. Did you mean 'bf16'?"),
        (["--world", "8", "--set", "search.wires=[params=int8]"], "search.wires is 'params=int8'"),
        (["--world", "8", "--rows", "7"], "samples of a step cannot be divided"),
        (["--world", "8", "--rows", "7", "--axes", "tp"], "the 7 samples of a step cannot be divided"),
        (["--world", "8", "--device-memory", "1K"], "No plan fits on 8 ranks"),
        (["--world", "8", "--picture", "a.png"], "pictures are .svg files"),
        (["--world", "8", "--out", "plan.txt"], "a plan is written as .yaml or .json"),
    ],
)
def test_what_is_refused(words: list[str], more: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, *more]) == 2
    assert said in capsys.readouterr().err


def test_plans_for_other_devices_are_not_measured_here(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """What is the fastest on processors says nothing of accelerators, whose list was put in that order."""
    other = "h100-sxm" if device_here().type == "cpu" else "cpu"
    assert main([*words, "--world", "2", "--hardware", other, "--measure", "2"]) == 2
    assert f"and {other} has" in capsys.readouterr().err


def test_precisions_are_tried_if_they_are_asked_for(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--world", "8", "--precisions", "fp32,bf16"]) == 0
    said = capsys.readouterr().out
    assert "precision: bf16" in said, "products take a fifteenth of the time"
    assert "precision fp32: +" in said
    assert main([*words, "--world", "8"]) == 0
    assert "bf16" not in capsys.readouterr().out


@pytest.mark.parametrize("asked", [["--wires", "int4"], ["--set", "search.wires=[int4]"]])
def test_narrow_wires_are_tried_if_they_are_asked_for(
    words: list[str], asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--world", "16", *asked]) == 0
    assert "gradients sent in int4" in capsys.readouterr().out
    assert main([*words, "--world", "16"]) == 0
    assert "sent in" not in capsys.readouterr().out


def test_a_model_in_bf16_is_bounded_as_it_is(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """By the bytes of its own parameters: a plan that just fits was left out as if they had four each."""
    narrow = MODEL.replace("torch.ones(4, 64)", "torch.ones(4, 64, dtype=torch.bfloat16)")
    narrow += "def half():\n    return Model().bfloat16()\n"
    Path(words[2].partition(":")[0]).write_text(narrow)
    words = [*words, "--world", "64", "--json", "--set", "preset=zero2", "--set", "activations.policy=keep"]
    words[2] = words[2].replace(":Model", ":half")
    assert main(words) == 0
    roomy = json.loads(capsys.readouterr().out)["best"][0]
    assert main([*words, "--device-memory", str(roomy["device_bytes"])]) == 0
    assert json.loads(capsys.readouterr().out)["best"][0] == roomy


def test_a_batch_without_samples_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words[4] = words[4].replace(":batch", ":empty")
    assert main([*words, "--world", "8"]) == 2
    assert "tiny.py:empty has no samples" in capsys.readouterr().err


def test_a_batch_of_an_unknown_type_is_refused_by_it(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Such as a dataclass, whose tensors nobody knows."""
    own = "from dataclasses import dataclass\n@dataclass\nclass Pair:\n    x: torch.Tensor\n"
    own += "def pair():\n    return Pair(torch.ones(4, 64))\n"
    file = Path(words[2].partition(":")[0])
    file.write_text(MODEL + own)
    words[4] = words[4].replace(":batch", ":pair")
    assert main([*words, "--world", "8"]) == 2
    said = capsys.readouterr().err
    assert "of type Pair, has no tensor with a dim for samples" in said
    assert "What a Pair holds is not seen: let the model take its tensors" in said


def test_a_module_without_parameters_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words[2] = words[2].replace(":Model", ":nothing")
    file = Path(words[2].partition(":")[0])
    file.write_text(MODEL + "def nothing():\n    return torch.nn.ReLU()\n")
    assert main([*words, "--world", "8"]) == 2
    assert "ReLU has no parameters, so there is nothing to train or to shard" in capsys.readouterr().err


def test_the_schedule_of_a_plan_is_kept(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """With the stages on each rank that it says, also with a first and a last stage without blocks, as in Llama 3
    405B: 128 stages of 126 blocks on 16 ranks."""
    deep = """
class Deep(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(64, 64)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(14))
        self.last = torch.nn.Linear(64, 64)
    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x).sum()
"""
    Path(words[2].partition(":")[0]).write_text(MODEL + deep)
    words[2] = words[2].replace(":Model", ":Deep")
    words[words.index("none")] = "pp"
    asked = ["--set", "pipeline.schedule=interleaved", "--set", "pipeline.virtual_stages=4", "--micro-batch", "1"]
    assert main([*words, "--world", "8", "--json", *asked, "--set", "mesh.pp=4", "--set", "mesh.dp=2"]) == 0
    for one in json.loads(capsys.readouterr().out)["evaluated"]:
        assert "interleaved of 4" in one["plan"]
