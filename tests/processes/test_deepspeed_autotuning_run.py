"""`shardwise deepspeed --autotuning run`: the script is started, ended at its first forward, and started again."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import warm
from shardwise.integrations.deepspeed.autotuning import MICRO, OPTIMAL
from tests.patience import PATIENCE
from tests.thorough import thorough_only

ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
SCRIPT = f"""
import argparse, sys
import deepspeed, torch
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.models import Transformer
parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int)
args = parser.parse_args()
torch.manual_seed(0)
rows = [(torch.randint(67, (6,)), torch.randint(67, (6,))) for _ in range(32)]
engine, _, loader, _ = deepspeed.initialize(args=args, model=Transformer(), training_data=rows)
for step, (x, y) in enumerate(loader):
    engine.backward(engine(x, y))
    engine.step()
print("TRAINED", engine.global_steps, engine.train_micro_batch_size_per_gpu(), engine.zero_optimization_stage())
"""


@thorough_only("slow; smaller tests beside it cover the same code")
def test_run_trains_with_what_was_found(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    section = {"enabled": True, "max_train_micro_batch_size_per_gpu": 4}
    (tmp_path / "ds.json").write_text(json.dumps({**ADAMW, MICRO: "auto", "autotuning": section}))
    words = ["deepspeed", "--autotuning", "run", "--num_gpus", "2", "train.py", "--deepspeed_config", "ds.json"]
    done = subprocess.run(
        [warm.python(), "-m", "shardwise", *words],
        cwd=tmp_path,
        env=os.environ | warm.RANKS_TOO,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "autotuning_results" / OPTIMAL).read_text())
    expected = f"TRAINED {32 // 2 // found[MICRO]} {found[MICRO]} {found['zero_optimization']['stage']}"
    assert done.stdout.count(expected) == 2
    assert done.stdout.count("TRAINED") == 2
