"""Sums of a few numbers, and messages of any length."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch

from shardwise.comm.collectives import Collectives
from shardwise.comm.group import Group
from shardwise.system.even_parts import round_up
from shardwise.system.torch_private import dispatch_modes, outside_modes, unwatched

Tensor = torch.Tensor
SHORT_MESSAGE_BYTES = 64
"""What a short message takes with its length; longer ones are sent once their lengths are known."""
_SHORT_BYTES = SHORT_MESSAGE_BYTES - 8


@unwatched
def sum_small(vector: Tensor, collectives: Collectives, group: Group, subject: str) -> Tensor:
    """The sum of the ranks' `vector`, bit for bit the same on all of them; blocks. All ranks of the group call."""
    num_ranks = len(group.ranks)
    padded = vector.new_zeros(round_up(vector.numel(), num_ranks))
    padded[: vector.numel()] = vector
    collectives.all_reduce(padded, padded, group, padded.dtype, subject).wait()
    return padded[: vector.numel()]


@unwatched
def exchange(message: bytes, group: Group, gather: Callable[[Tensor], None]) -> list[bytes]:
    """Every rank's `message`, by place. `gather` completes a tensor of which each rank has filled its chunk; blocks.
    Values are read here, which a recording, or fake tensors, would put off or not have."""
    with outside_modes() if dispatch_modes() else nullcontext():
        return _exchanged(message, group, gather)


def _exchanged(message: bytes, group: Group, gather: Callable[[Tensor], None]) -> list[bytes]:
    heads = _rows(len(message).to_bytes(8, "little") + message[:_SHORT_BYTES], SHORT_MESSAGE_BYTES, group)
    gather(heads.view(-1))
    head_bytes = [row.numpy().tobytes() for row in heads]
    lengths = [int.from_bytes(head[:8], "little") for head in head_bytes]
    if max(lengths) > _SHORT_BYTES:
        rows = _rows(message, max(lengths), group)
        gather(rows.view(-1))
        return [row[:length].numpy().tobytes() for row, length in zip(rows, lengths, strict=True)]
    return [head[8 : 8 + length] for head, length in zip(head_bytes, lengths, strict=True)]


def _rows(message: bytes, num_bytes: int, group: Group) -> Tensor:
    rows = torch.zeros(len(group.ranks), num_bytes, dtype=torch.uint8, device="cpu")
    if message:
        rows[group.index, : len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    return rows
