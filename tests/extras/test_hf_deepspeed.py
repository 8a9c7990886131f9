"""Scripts of Trainer and Accelerate with their own DeepSpeed options, under `shardwise launch --as-deepspeed`."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rank_processes import begin
from safetensors.torch import load_file

from tests.thorough import sampled

pytestmark = pytest.mark.timeout(300)

SCRIPT = Path(__file__).with_name("deepspeed_finetune.py")
ARGUMENTS = [
    "--max_steps", "4", "--logging_steps", "1", "--report_to", "none", "--disable_tqdm", "1",
    "--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2", "--max_grad_norm", "0.5",
    "--learning_rate", "2e-3", "--weight_decay", "0.0", "--save_steps", "2", "--eval_steps", "2",
    "--eval_strategy", "steps", "--lr_scheduler_type", "cosine", "--load_best_model_at_end", "1",
]  # fmt: skip
AUTO: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
    "csv_monitor": {"enabled": True, "output_path": "nowhere"},
}
"""As in the documentation of Transformers, without a scheduler, and with a monitor."""


def plain(arguments: list[str]) -> None:
    """The script as it stands, without DeepSpeed, on the ranks that run this."""
    sys.argv = [str(SCRIPT), *arguments]
    os.environ["ACCELERATE_USE_CPU"] = "true"
    runpy.run_path(str(SCRIPT), run_name="__main__")


def launched(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **variables}
    return subprocess.run(
        [sys.executable, "-m", "shardwise", "launch", "--as-deepspeed", "--nproc", "2", *words],
        capture_output=True, text=True, timeout=280, check=False, env=environment,
    )  # fmt: skip


@sampled
@pytest.mark.parametrize("splits", [{}, {"sequence_parallel_size": 2}, {"pipeline": {"stages": 2}}], ids=str)
def test_an_unmodified_script_with_its_own_deepspeed_options(tmp_path: Path, splits: dict[str, Any]) -> None:
    """Over split sequences, and in stages, two ranks have the batches of one."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder in (ours, theirs):
        folder.mkdir()
    waited = begin(1 if splits else 2, plain, [str(theirs / "told.json"), "--output_dir", str(theirs), *ARGUMENTS])
    (tmp_path / "ds.json").write_text(json.dumps(AUTO | splits))
    words = [str(SCRIPT), str(ours / "told.json"), "--output_dir", str(ours), *ARGUMENTS]
    done = launched(*words, "--deepspeed", str(tmp_path / "ds.json"))
    assert done.returncode == 0, done.stderr[-3000:]
    waited()
    told, expected = (json.loads((folder / "told.json").read_text()) for folder in (ours, theirs))
    for run in ("whole", "resumed"):
        for figure in ("loss", "grad_norm", "learning_rate", "eval_loss"):
            assert told[run][figure] == pytest.approx(expected[run][figure], abs=1e-5), (run, figure)
    assert len(told["whole"]["loss"]) == 4
    assert Path(told["whole"]["best"]).name == Path(expected["whole"]["best"]).name
    for figure in ("losses", "norms", "rate"):
        assert told["loop"][figure] == pytest.approx(expected["loop"][figure], abs=1e-5), figure
    weights = [load_file(folder / "model.safetensors") for folder in (ours, theirs)]
    assert weights[0].keys() == weights[1].keys()
    for name, value in weights[1].items():
        assert (weights[0][name] - value).abs().max() < 1e-5, name
    assert told["deepspeed"] == str(tmp_path / "ds.json")
    assert (ours / "checkpoint-2" / "shardwise").is_dir()
    assert "zero_optimization.overlap_comm: not needed" in done.stdout
    assert "pipeline" not in done.stdout
    assert (
        "csv_monitor.enabled: available elsewhere; Trainer logs to the trackers set by report_to of TrainingArguments"
        in done.stdout
    )
    assert (
        "csv_monitor.enabled: available elsewhere; accelerator.log writes to the trackers set by log_with"
        in done.stdout
    )
    assert not Path("nowhere").exists()


TUNED = """
import sys
import torch
from transformers import AutoModelForCausalLM, HfArgumentParser, LlamaConfig, Trainer, TrainingArguments
(arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
config = LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=61)
rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 64
trainer = Trainer(AutoModelForCausalLM.from_config(config), arguments, train_dataset=rows)
trainer.train()
print("TRAINED", trainer.state.global_step, arguments.per_device_train_batch_size, trainer.engine.plan.preset)
"""


def test_a_trainer_is_tuned_and_trains_with_what_was_found(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TUNED)
    section = {"enabled": True, "max_train_micro_batch_size_per_gpu": 4, "results_dir": str(tmp_path / "found")}
    section["exps_dir"] = str(tmp_path / "tried")
    config = AUTO | {"zero_optimization": {"overlap_comm": True, "reduce_bucket_size": "auto"}, "autotuning": section}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    words = [
        "--output_dir",
        str(tmp_path),
        "--max_steps",
        "2",
        "--per_device_train_batch_size",
        "1",
        "--report_to",
        "none",
    ]
    words += ["--gradient_accumulation_steps", "2", "--deepspeed", str(tmp_path / "ds.json")]
    done = launched("--autotuning", "run", str(tmp_path / "train.py"), *words)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "found" / "ds_config_optimal.json").read_text())
    micro, stage = found["train_micro_batch_size_per_gpu"], found["zero_optimization"]["stage"]
    assert found["optimizer"]["params"]["lr"] == "auto"
    assert found["train_batch_size"] == 2 * 2 * micro
    assert done.stdout.count(f"TRAINED 2 {micro} {'ddp' if stage == 0 else f'zero{stage}'}") == 2
    assert done.stdout.count("TRAINED") == 2


def test_sections_of_a_config_and_what_contradicts_them(tmp_path: Path) -> None:
    script = SCRIPT.with_name("deepspeed_sections.py")
    done = subprocess.run(
        [sys.executable, "-m", "shardwise.integrations.deepspeed", script, tmp_path / "told.json", tmp_path],
        capture_output=True, text=True, timeout=280, check=False, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads((tmp_path / "told.json").read_text())
    assert len(told["by_config"]) == 5
    for ours, theirs in zip(told["by_config"], told["by_hand"], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-6)
    assert len({rate for _, rate in told["by_config"]}) > 2
    assert "contradict each other: ds optimizer.params.lr=1.0 vs hf learning_rate=0.003" in told["contradiction"]
    assert "zero_optimization.zenflow = " in told["not had"]
    assert told["launched"] == ["zero1", 4, 1]
