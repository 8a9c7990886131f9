"""One rank of a run of `learning` by torch's DDP with its PowerSGD hook, beside which our own factors are raced.

All gradients are in one bucket: see [Note: one bucket] in `islands_peers.py`.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from statistics import mean

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from benchmarks.figures import write_figures
from benchmarks.learning_course import RATE, ROWS, Text, averaged, first_model, is_checkpoint, rate_of

_ALL_MB = 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--factors", "--start", "--seed", "--width", "--steps"):
        parser.add_argument(name, type=int, required=True)
    for name in ("--text", "--out"):
        parser.add_argument(name, type=Path, required=True)
    args = parser.parse_args()
    with write_figures(args.out) as figures:
        dist.init_process_group("gloo")
        figures.update(train(args, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])))
        dist.barrier()  # nobody leaves while another still writes
    dist.destroy_process_group()


def train(args: argparse.Namespace, rank: int, num_ranks: int) -> dict[str, float]:
    """Whole batches are divided among ranks, as `learning` divides them."""
    text, model = Text.of_the_library(args.text), first_model(args.seed, args.width)
    numbers = torch.Generator().manual_seed(args.seed)
    replica = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=_ALL_MB, gradient_as_bucket_view=True)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=args.factors, start_powerSGD_iter=args.start)
    replica.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    losses, checkpoints = [], []
    for number in range(1, args.steps + 1):
        optimizer.param_groups[0]["lr"] = rate_of(number, args.steps)
        optimizer.zero_grad()
        loss = replica(text.batch(numbers, ROWS).chunk(num_ranks)[rank])
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        if is_checkpoint(number, args.steps):
            checkpoints.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    model.load_state_dict(averaged(checkpoints))
    mine = torch.tensor([text.unseen_loss(model, rank, num_ranks), mean(losses[-args.steps // 5 :])])
    dist.all_reduce(mine)
    unseen, trained = (mine / num_ranks).tolist()
    return {"loss": unseen, "loss_in_training": trained, "cpu_seconds": time.process_time()}


if __name__ == "__main__":
    main()
