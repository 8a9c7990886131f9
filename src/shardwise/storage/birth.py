"""The first values: the same on every rank, whatever the seeds; then each row where the table says."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import torch
from torch import nn

from shardwise.comm import World
from shardwise.errors import ModelError
from shardwise.storage.unit import Unit


def check_model(model: nn.Module) -> torch.device:
    """The one device of all parameters, or a sentence about what is in the way."""
    by_device: dict[torch.device, str] = {}
    for name, param in model.named_parameters():
        by_device.setdefault(param.device, name)
        if param.is_sparse or param.is_complex():
            raise ModelError(
                f"Parameter {name} is {param.dtype}, {param.layout}; only dense real parameters can be sharded."
            )
    if not by_device:
        raise ModelError("The model has no parameters, so there is nothing to shard.")
    if len(by_device) > 1:
        where = ", ".join(f"{name} on {device}" for device, name in by_device.items())
        raise ModelError(
            f"The model's parameters are on different devices: {where}. Move the model to one with .to(device)."
        )
    device = next(iter(by_device))
    if device.type == "meta":
        raise ModelError(
            "The model is on the meta device, so its parameters have no values yet. "
            "Build it on a real device, or call model.to_empty(device=...) and initialise it."
        )
    return device


def check_same_everywhere(model: nn.Module, world: World) -> None:
    """Raise on every rank, naming the first difference, unless all ranks built the same parameters. All ranks call."""
    mine = [
        [name, list(param.shape), str(param.dtype), param.requires_grad] for name, param in model.named_parameters()
    ]
    mine += [[name, list(buffer.shape), str(buffer.dtype), False] for name, buffer in model.named_buffers()]
    digest = hashlib.sha256(json.dumps(mine).encode()).digest()
    digests = world.exchange(digest)
    if len(set(digests)) == 1:
        return
    theirs = [json.loads(message) for message in world.exchange(json.dumps(mine).encode())]
    odd = next(rank for rank, other in enumerate(theirs) if other != theirs[0])
    raise ModelError(f"The ranks built different models: {_first_difference(theirs[0], theirs[odd], odd)}")


def _first_difference(zero: list[list[object]], other: list[list[object]], rank: int) -> str:
    for one, two in zip(zero, other, strict=False):
        if one != two:
            return (
                f"rank 0 has {one[0]} {one[1]} {one[2]} where rank {rank} has {two[0]} {two[1]} {two[2]}. "
                f"Build the model from the same configuration on all ranks."
            )
    return f"rank 0 has {len(zero)} parameters and buffers, rank {rank} has {len(other)}."


def settle(units: Sequence[Unit], model: nn.Module, world: World) -> None:
    """Give every rank the values of rank 0, unit by unit, and put them where the table says. All ranks call.

    At no time is more than one unit held twice.
    """
    for unit in units:
        for flat in unit.flats:
            whole = flat.collect()
            _from_rank_0(whole, world)
            flat.settle(whole)
    flats = {param for unit in units for flat in unit.flats for param in flat.params}
    left = [param for param in model.parameters() if param not in flats]
    for tensor in (*left, *model.buffers()):
        _from_rank_0(tensor.detach(), world)


def _from_rank_0(tensor: torch.Tensor, world: World) -> None:
    if world.size == 1 or tensor.numel() == 0:
        return
    sent = tensor.contiguous()
    world.collectives(tensor.device).broadcast(sent.view(-1), 0, world.everybody).wait()
    if sent.data_ptr() != tensor.data_ptr():
        tensor.copy_(sent)
