"""Models that unmodified scripts build while a DeepSpeed config of stage 3 lives: never whole on a rank."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import hf_loading_jobs as jobs
import pytest
import torch
from rank_processes import begin
from transformers import LlamaConfig, LlamaForCausalLM

pytestmark = pytest.mark.timeout(300)

SCRIPT, PEAK = (Path(__file__).with_name(name) for name in ("deepspeed_loading.py", "deepspeed_peak.py"))
ZERO3: dict[str, Any] = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
MIB = 2**20


def plain(arguments: list[str]) -> None:
    """The script as it stands, without DeepSpeed, on the ranks that run this."""
    sys.argv = [str(SCRIPT), *arguments]
    os.environ["ACCELERATE_USE_CPU"] = "true"
    runpy.run_path(str(SCRIPT), run_name="__main__")


def launched(*words: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "shardwise", "launch", "--as-deepspeed", "--nproc", "2", *words],
        capture_output=True, text=True, timeout=280, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def saved(folder: Path, **sizes: Any) -> str:
    torch.manual_seed(7)
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder, max_shard_size="20MB")
    return str(folder)


def test_what_is_built_is_trained_as_what_was_built_whole(tmp_path: Path) -> None:
    """By `from_pretrained` and `from_config`, with embeddings resized, a head that is new, adapters."""
    sizes = runpy.run_path(str(SCRIPT))["SIZES"]
    folder = saved(tmp_path / "model", **sizes)
    waited = begin(2, plain, [str(tmp_path / "theirs.json"), folder])
    (tmp_path / "ds.json").write_text(json.dumps(ZERO3))
    launched(str(SCRIPT), str(tmp_path / "ours.json"), folder, str(tmp_path / "ds.json"))
    waited()
    ours, theirs = (json.loads((tmp_path / name).read_text()) for name in ("ours.json", "theirs.json"))
    assert ours.keys() == theirs.keys()
    assert (set(ours.pop("kinds")), set(theirs.pop("kinds"))) == ({"Deferred"}, {"Parameter"})
    for way, figures in theirs.items():
        assert len(figures) >= 8, way
        assert ours[way] == pytest.approx(figures, abs=1e-5), way


@pytest.mark.parametrize("way", jobs.WAYS)
def test_what_waits_for_its_values_gets_those_of_a_model_built_whole(way: str) -> None:
    """Bit for bit, and as much is drawn; what cannot be read in parts is read whole."""
    waits = jobs.WAYS[way][2]
    assert begin(1, jobs.built_twice, way)()[0] == [{waits}, [], True, True, True, False]


def test_no_rank_has_the_whole_model(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", **runpy.run_path(str(PEAK))["LARGE"].to_diff_dict())
    told = []
    for words in ([folder, "alive"], ["-", "alive"], ["-"]):
        launched(str(PEAK), str(tmp_path / "told.json"), *words)
        told.append(json.loads((tmp_path / "told.json").read_text()))
    from_files, from_config, whole = told
    for ours in (from_files, from_config):
        assert ours["model"] == whole["model"] > 300 * MIB
        assert ours["took"] < 0.6 * ours["model"], "its half of the parameters, and what is being made"
    assert whole["took"] > 0.95 * whole["model"], "so the measurement sees what it should"
    assert from_config["loss"] == pytest.approx(whole["loss"], abs=1e-6)
    batch = torch.arange(8)[None]
    with torch.no_grad():
        expected = LlamaForCausalLM.from_pretrained(folder)(input_ids=batch, labels=batch).loss.item()
    assert from_files["loss"] == pytest.approx(expected, abs=1e-6)
