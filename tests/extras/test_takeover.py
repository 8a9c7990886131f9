"""Unmodified scripts under `shardwise launch --shardwise`, compared with plain runs."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from rank_processes import begin
from safetensors.torch import load_file

from tests.thorough import sampled

pytestmark = pytest.mark.timeout(300)

SCRIPT = Path(__file__).with_name("finetune.py")
ALIGNMENT = Path(__file__).with_name("alignment.py")
ARGUMENTS = ["--max_steps", "4", "--logging_steps", "1", "--report_to", "none", "--disable_tqdm", "1"]
ACCELERATE = (
    "distributed_type: FSDP\nnum_processes: 2\nuse_cpu: true\nfsdp_config: {fsdp_sharding_strategy: FULL_SHARD}\n"
)


def plain(arguments: list[str], script: str = str(SCRIPT)) -> None:
    """The unmodified script, on the ranks that run this."""
    sys.argv = [script, *arguments]
    os.environ["ACCELERATE_USE_CPU"] = "true"
    runpy.run_path(script, run_name="__main__")


def command(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, "-m", *words], capture_output=True, text=True, timeout=300, check=False, env=environment
    )


def test_an_unmodified_script_is_trained_by_a_plan(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder in (ours, theirs):
        folder.mkdir()
    waited = begin(2, plain, [str(theirs / "told.json"), "--output_dir", str(theirs), *ARGUMENTS])
    (tmp_path / "config.yaml").write_text(ACCELERATE)
    words = ["shardwise", "launch", "--accelerate-config", str(tmp_path / "config.yaml"), str(SCRIPT)]
    done = command(*words, str(ours / "told.json"), "--output_dir", str(ours), *ARGUMENTS)
    assert done.returncode == 0, done.stderr[-3000:]
    waited()
    told, expected = (json.loads((folder / "told.json").read_text()) for folder in (ours, theirs))
    assert told["losses"] == pytest.approx(expected["losses"], abs=1e-5)
    assert len(told["losses"]) == 12
    assert told["arguments"] == ["--output_dir", str(ours), *ARGUMENTS]
    assert all(any("shardwise" in module for module in kind) for kind in told["from"])
    assert not any("shardwise" in module for kind in expected["from"] for module in kind)
    weights = [load_file(folder / "model.safetensors") for folder in (ours, theirs)]
    assert weights[0].keys() == weights[1].keys()
    for name, value in weights[1].items():
        assert (weights[0][name] - value).abs().max() < 1e-5, name


SPLITS: dict[str, tuple[int, int, str]] = {
    # ranks, ranks of DDP, mesh
    "dp": (2, 2, "{dp: 2}"),
    "pp": (2, 1, "{pp: 2}"),
    "pp x dp": (4, 2, "{pp: 2, dp: 2}"),
    "tp": (2, 1, "{tp: 2, dp: -1}"),
    "pp x dp x ep": (8, 4, "{pp: 2, dp: 2, ep: 2}"),
}
METHODS = ("sft", "dpo", "grpo", "grpo-colocated", "online-dpo", "sft-lora")
SHARING = [("grpo", "pp x dp"), ("grpo-colocated", "pp"), ("rloo", "pp"), ("online-dpo", "pp"), ("grpo", "tp")]
"""Whose ranks share prompts."""
IN_STAGES = [("sft-lora", "pp"), ("dpo", "pp x dp")]


@sampled
@pytest.mark.parametrize(
    ("method", "split"), [*((method, "dp") for method in METHODS), *SHARING, *IN_STAGES, ("experts", "pp x dp x ep")]
)
def test_an_unmodified_script_is_trained_by_a_plan_alone(tmp_path: Path, method: str, split: str) -> None:
    ranks, peers, mesh = SPLITS[split]
    ours, theirs = tmp_path / "ours.json", tmp_path / "theirs.json"
    waited = begin(peers, plain, [str(theirs), method], str(ALIGNMENT))
    (tmp_path / "plan.yaml").write_text(f"preset: zero3\nmesh: {mesh}\n")
    words = ["shardwise", "launch", "--nproc", str(ranks), "--shardwise", str(tmp_path / "plan.yaml"), str(ALIGNMENT)]
    done = command(*words, str(ours), method)
    assert done.returncode == 0, done.stderr[-3000:]
    waited()
    told, expected = json.loads(ours.read_text()), json.loads(theirs.read_text())
    assert (told.pop("by_us"), expected.pop("by_us")) == (True, False)
    assert len(told["loss"]) == 3
    for name, values in expected.items():
        assert told[name] == pytest.approx(values, abs=1e-5), name


def test_a_script_without_either_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("preset: zero2\n")
    (tmp_path / "script.py").write_text("import sys, pathlib\nprint(pathlib.Path.__module__, sys.argv[1:], __name__)\n")
    words = [
        "shardwise.integrations.run",
        "--plan",
        str(tmp_path / "plan.yaml"),
        str(tmp_path / "script.py"),
        "-x",
        "1",
    ]
    done = command(*words)
    assert done.stdout == "pathlib ['-x', '1'] __main__\n"
    assert "created no Trainer of transformers or Lightning, and no Accelerator" in done.stderr
    assert done.returncode == 0


def test_a_plan_that_is_none_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("presett: zero2\n")
    (tmp_path / "script.py").write_text("print('it ran')\n")
    for words in (["shardwise", "launch", "--shardwise"], ["shardwise.integrations.run", "--plan"]):
        done = command(*words, str(tmp_path / "plan.yaml"), str(tmp_path / "script.py"))
        assert (done.returncode, done.stdout) == (2, "")
        assert "presett" in done.stderr
