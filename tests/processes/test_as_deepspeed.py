"""A script written for DeepSpeed, unmodified, under `shardwise launch --as-deepspeed`."""

from __future__ import annotations

import json
import os
import subprocess
import textwrap
from pathlib import Path

import pytest
import torch
from torch.utils.data import DistributedSampler

import warm
from shardwise.integrations.deepspeed.schedules import WarmupDecayLR
from tests.patience import PATIENCE

Finished = subprocess.CompletedProcess[str]
SCRIPT = """
    import argparse
    import json

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
    assert (engine.global_steps, dist.get_world_size()) == (8, 2)
    try:
        from deepspeed.utils import groups
    except ImportError as error:
        print("MISSING", error)
    print("LOSSES" + str(dist.get_rank()), json.dumps(losses))
"""

EXPERTS = """
    import argparse

    import deepspeed
    import torch
    import torch.distributed as dist
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.utils import has_moe_layers, split_params_into_different_moe_groups_for_optimizer

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inward, self.outward = torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)
            self.moe = MoE(8, torch.nn.Linear(8, 8), num_experts=4, ep_size=2, use_rts=False, capacity_factor=0.7)

        def forward(self, x, y):
            out, l_aux, _ = self.moe(torch.tanh(self.inward(x)))
            return torch.nn.functional.mse_loss(self.outward(out), y) + 0.1 * l_aux

    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    args = deepspeed.add_config_arguments(parser).parse_args()
    deepspeed.init_distributed()
    rank = dist.get_rank()
    assert args.local_rank == rank
    data = torch.randn(5, 2, 16, 9, generator=torch.Generator().manual_seed(0))
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Model())
    model, twin = models
    assert has_moe_layers(model) == (True, 4)
    groups = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": "all"})
    engine, *_ = deepspeed.initialize(args=args, model=model, optimizer=torch.optim.SGD(groups, lr=0.1))
    alone = torch.optim.SGD(twin.parameters(), lr=0.1)
    worst = 0.0
    for batch in data:
        loss = engine(batch[rank, :, :8], batch[rank, :, 8:])
        engine.backward(loss)
        engine.step()
        both = [twin(part[:, :8], part[:, 8:]) for part in batch]
        worst = max(worst, abs(loss.item() - both[rank].item()))
        alone.zero_grad()
        (sum(both) / 2).backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        alone.step()
    held = model.moe.deepspeed_moe.experts.weight.shape[0]
    if rank == 0:
        print("WORST", worst, held)
"""


def run(folder: Path, *arguments: str, verb: tuple[str, ...] = ("launch", "--as-deepspeed")) -> Finished:
    command = [warm.python(), "-m", "shardwise", *verb, *arguments]
    environment = os.environ | {"TMPDIR": str(folder)} | warm.RANKS_TOO
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2, "overlap_comm": True}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    return tmp_path


def plain() -> list[list[float]]:
    """Each rank's losses in that script, on one process."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    x, y = torch.randn(32, 8), torch.randn(32, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    schedule = WarmupDecayLR(optimizer, 20, warmup_max_lr=0.01, warmup_num_steps=2)
    shares = [torch.tensor(list(DistributedSampler(range(32), num_replicas=2, rank=rank))) for rank in range(2)]
    losses: list[list[float]] = [[], []]
    for step in range(8):
        rows = [share.repeat(2)[4 * step : 4 * step + 4] for share in shares]
        both = [torch.nn.functional.mse_loss(model(x[part]), y[part]) for part in rows]
        torch.stack(both).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        for own, loss in zip(losses, both, strict=True):
            own.append(loss.item())
    return losses


def test_an_unmodified_script_trains(folder: Path) -> None:
    done = run(folder, "--num_gpus", "2", "train.py", "--deepspeed", "--deepspeed_config", "ds.json")
    assert done.returncode == 0, done.stderr
    for rank, losses in enumerate(plain()):
        said = next(line for line in done.stdout.splitlines() if line.startswith(f"LOSSES{rank} "))
        assert json.loads(said.partition(" ")[2]) == pytest.approx(losses, rel=1e-5)
    assert done.stdout.count("MISSING deepspeed.utils.groups is not supported by shardwise: groups follow from") == 2
    assert "zero_optimization.overlap_comm: not needed" in done.stdout


def test_ranks_share_in_experts_by_deepspeeds_own_command_line(folder: Path) -> None:
    (folder / "experts.py").write_text(textwrap.dedent(EXPERTS))
    (folder / "hosts").write_text("localhost slots=2\n")
    words = ("--hostfile", "hosts", "--launcher", "pdsh", "experts.py", "--deepspeed", "--deepspeed_config", "ds.json")
    done = run(folder, *words, verb=("deepspeed",))
    assert done.returncode == 0, done.stderr
    said = next(line.split() for line in done.stdout.splitlines() if line.startswith("WORST"))
    assert float(said[1]) < 1e-5
    assert said[2] == "2"
    assert "--launcher has no effect" in done.stderr
