"""A script written for DeepSpeed, unmodified, under `shardwise launch --as-deepspeed`."""

from __future__ import annotations

import json
import os
import subprocess
import textwrap
from pathlib import Path

import pytest

import warm

SCRIPT = """
    import argparse

    import deepspeed
    import deepspeed.comm as dist
    import torch
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.runtime.lr_schedules import WarmupDecayLR
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
    from deepspeed.utils import RepeatingLoader, logger

    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    args = deepspeed.add_config_arguments(parser).parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    data = torch.utils.data.TensorDataset(torch.randn(32, 8), torch.randn(32, 1))
    optimizer = DeepSpeedCPUAdam(model.parameters(), lr=0.01)
    schedule = WarmupDecayLR(optimizer, 20, warmup_max_lr=0.01, warmup_num_steps=2)
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=model, optimizer=optimizer, lr_scheduler=schedule, training_data=data
    )
    stream = iter(RepeatingLoader(loader))
    losses = []
    for _ in range(8):
        x, y = (part.to(get_accelerator().current_device_name()) for part in next(stream))
        loss = torch.nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if dist.get_rank() == 0:
        print("LOSSES", losses[0], losses[-1], engine.global_steps, dist.get_world_size())
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [warm.python(), "-m", "shardwise", "launch", "--as-deepspeed", *arguments]
    environment = os.environ | {"TMPDIR": str(folder)} | warm.RANKS_TOO
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100, check=False
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2, "overlap_comm": True}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    return tmp_path


def test_an_unmodified_script_trains(folder: Path) -> None:
    done = run(folder, "--num_gpus", "2", "train.py", "--deepspeed", "--deepspeed_config", "ds.json")
    assert done.returncode == 0, done.stderr
    said = next(line.split() for line in done.stdout.splitlines() if line.startswith("LOSSES"))
    assert float(said[2]) < float(said[1])
    assert said[3:] == ["8", "2"]
    assert "zero_optimization.overlap_comm: not needed" in done.stdout
