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


def exchange(
    message: bytes,
    group: Group,
    gather: Callable[[Tensor], None],
    swap: Callable[[bytes], list[bytes]] | None = None,
) -> list[bytes]:
    """Every rank's `message`, by place. `gather` completes a tensor of which each rank has filled its chunk; blocks. So
    does `swap`, if there is one, with `SHORT_MESSAGE_BYTES` of each rank.
    """
    head = len(message).to_bytes(8, "little") + message[:_SHORT_BYTES].ljust(_SHORT_BYTES, b"\0")
    heads = _gathered(head, SHORT_MESSAGE_BYTES, group, gather) if swap is None else swap(head)
    lengths = [int.from_bytes(one[:8], "little") for one in heads]
    if max(lengths) > _SHORT_BYTES:
        whole = _gathered(message, max(lengths), group, gather)
        return [one[:length] for one, length in zip(whole, lengths, strict=True)]
    return [one[8 : 8 + length] for one, length in zip(heads, lengths, strict=True)]


@unwatched
def _gathered(message: bytes, num_bytes: int, group: Group, gather: Callable[[Tensor], None]) -> list[bytes]:
    """Values are read here, which a recording, or fake tensors, would put off or not have."""
    with outside_modes() if dispatch_modes() else nullcontext():
        rows = _rows(message, num_bytes, group)
        gather(rows.view(-1))
        return [row.numpy().tobytes() for row in rows]


def _rows(message: bytes, num_bytes: int, group: Group) -> Tensor:
    rows = torch.zeros(len(group.ranks), num_bytes, dtype=torch.uint8, device="cpu")
    if message:
        rows[group.index, : len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    return rows
