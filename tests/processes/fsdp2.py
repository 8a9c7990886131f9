"""FSDP2 on two processes: trains and saves as its tutorial does, or goes on from what was converted.

fsdp2.py save FOLDER     three steps, then FOLDER/dcp, and in FOLDER/losses.json the losses of the two after
fsdp2.py load FOLDER     the two steps after FOLDER/converted, whose losses go to FOLDER/loaded.json
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import shardwise as sw


class Model(nn.Module):
    """Of sizes that two does not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(13, 7)
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
        self.head = nn.Linear(7, 13)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(x)
        for block in self.blocks:
            hidden = hidden + block(hidden).tanh()
        return F.cross_entropy(self.head(hidden), (x + 1) % 13)


def build() -> Model:
    torch.manual_seed(5)
    return Model()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-5)


def batch(step: int, rank: int, num_ranks: int) -> torch.Tensor:
    return torch.randint(0, 13, (8,), generator=torch.Generator().manual_seed(step)).chunk(num_ranks)[rank]


def sharded() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model, adamw(model)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for number in steps:
        loss = model(batch(number, dist.get_rank(), 2))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / 2)
    return losses


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    model, optimizer = sharded()
    train(model, optimizer, range(3))
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": states}, checkpoint_id=folder / "dcp")
    losses = train(model, optimizer, range(3, 5))
    if dist.get_rank() == 0:
        sw.convert(folder / "dcp", folder / "run", "shardwise")
        sw.convert(folder / "run", folder / "converted", "dcp")
    dist.barrier()
    model, optimizer = sharded()
    weights, states = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optim": states}, checkpoint_id=folder / "converted")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    again = train(model, optimizer, range(3, 5))
    if dist.get_rank() == 0:
        (folder / "losses.json").write_text(json.dumps({"losses": losses, "again": again}))
    dist.barrier()
    os._exit(0)  # now and then torch aborts while it takes FSDP2's process groups down, and that is not what is tested


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
