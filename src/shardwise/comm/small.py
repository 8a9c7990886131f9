"""Sums of a few numbers, of any length."""

from __future__ import annotations

import torch

from shardwise.comm.collectives import Collectives
from shardwise.comm.group import Group

Tensor = torch.Tensor


def sum_small(vector: Tensor, collectives: Collectives, group: Group) -> Tensor:
    """The sum of the ranks' `vector`, bit for bit the same on all of them; blocks. All ranks of the group call."""
    num_ranks = len(group.ranks)
    padded = vector.new_zeros(-(-vector.numel() // num_ranks) * num_ranks)
    padded[: vector.numel()] = vector
    collectives.all_reduce(padded, padded, group, padded.dtype).wait()
    return padded[: vector.numel()]
