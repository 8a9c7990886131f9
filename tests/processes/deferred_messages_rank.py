"""Run by `test_deferred_messages.py`: ranks that send each other tensors, by torch, while they build a model."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
with sw.deferred_init():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    if rank == 1:
        model[0].weight.data.fill_(7)
    dist.broadcast(model[0].weight.data, 1)
    dist.all_reduce(model[0].bias.data, async_op=True).wait()
    gathered = [torch.zeros(1) for _ in range(2)]
    dist.all_gather(gathered, torch.tensor([float(rank)]))
    told: list[Any] = [None] * 2
    dist.all_gather_object(told, rank)
    sent = torch.full((2,), rank + 1.0)
    dist.send(sent, 1) if rank == 0 else dist.recv(sent, 0)
    dist.barrier()
    facts = [[float(one) for one in gathered], told, sent.tolist()]
    theirs = nn.Linear(3, 2)
    for param in theirs.parameters():  # rank 0 comes by all its values, rank 1 by none
        dist.send(param.data, 1) if rank == 0 else dist.recv(torch.empty_like(param), 0)
kept = [name for name, param in model.named_parameters() if param.untyped_storage().nbytes()]
num_kept: list[Any] = [None] * 2
dist.all_gather_object(num_kept, sum(param.untyped_storage().nbytes() > 0 for param in theirs.parameters()))
world = sw.World.join()
state = sw.shard(model, "zero3", world=world).state_dict()
state |= {f"theirs.{name}": value for name, value in sw.shard(theirs, "zero3", world=world).state_dict().items()}
if rank == 0:
    print("TOLD", json.dumps([facts, kept, num_kept, {name: value.tolist() for name, value in state.items()}]))
