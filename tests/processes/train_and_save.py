"""Run by `test_checkpoint_processes.py`: trains a model with dropout, saves every step, resumes if there is something.

    train_and_save.py FOLDER STEPS [--wait] [--start-file PATH]

Prints, from rank 0, one line per step: its number, the loss of every rank, and a digest of all parameters and states.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

import shardwise as sw


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)
    with sw.World.join() as world:
        seed = 100 + world.rank
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, args.width), nn.Dropout(0.3), nn.GELU(), nn.Linear(args.width, 8))
        torch.manual_seed(seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 5], gamma=0.5)
        with sw.shard(model, {"preset": "zero3", "units": ["0", "3"]}, optimizer=optimizer, world=world) as engine:
            engine.remember(scheduler=scheduler)
            resumed = engine.resume(args.folder)
            if resumed is not None and world.rank == 0:
                print(f"resumed {resumed.step}", flush=True)
            while engine.num_steps < args.steps:
                loss = step(engine)
                scheduler.step()
                engine.save(args.folder, wait=args.wait, keep=sw.Keep(last=args.last))
                report(engine, loss)
                time.sleep(args.pause)


def step(engine: sw.Engine) -> torch.Tensor:
    """Every generator has its say."""
    noise = random.random() + float(np.random.rand()) + torch.rand(4, 32)
    loss: torch.Tensor = engine(noise).square().mean()
    engine.backward(loss)
    engine.step()
    return loss


def report(engine: sw.Engine, loss: torch.Tensor) -> None:
    losses = [message.decode() for message in engine.world.exchange(loss.item().hex().encode())]
    digest = hashlib.sha256()
    for name, _ in engine.module.named_parameters():
        for what in ("param", "exp_avg", "exp_avg_sq"):
            value = engine.get(name, what)
            assert value is not None
            digest.update(value.numpy().tobytes())
    if engine.world.rank == 0:
        print(engine.num_steps, *losses, digest.hexdigest(), flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--wait", action="store_true")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--last", type=int, default=100)
    parser.add_argument("--pause", type=float, default=0.0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
