"""Ulysses: an all-to-all exchanges heads for tokens (Jacobs et al., DeepSpeed-Ulysses, arXiv:2309.14509).

Outside of attention each rank has some tokens with all their heads, inside it has all tokens of some heads. One
all-to-all before attention carries queries, keys and values together, and one after it carries the output. Attention
itself is as on one rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from shardwise.comm import Line
from shardwise.errors import ModelError
from shardwise.parallel.sequence.blocks import Weighing
from shardwise.parallel.sequence.ring import ring_attention
from shardwise.parallel.sequence.token_layout import Layout
from shardwise.parallel.sequence.visibility import Visibility

Tensor = torch.Tensor
MOST_MASKED = 2**24
"""Elements of a mask that is materialized. Above it, masks are made tile by tile in our own attention."""


def ulysses_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    line: Line,
    visibility: Visibility,
    weighing: Weighing,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of this rank's tokens to those of the whole line. All ranks of the line must call.

    `query` is `[batch, heads, local tokens, dim]`; keys and values have as many heads or a divisor of that, and are
    repeated if they are too few for all ranks. The output has the query's shape and dtype, with the last dimension of
    the values. `dropout` is a probability. Raises `ModelError` if the query heads do not divide among the ranks.
    """
    num_heads, num_kv_heads, num_ranks = query.shape[1], key.shape[1], line.num_ranks
    if num_heads % num_ranks:
        raise ModelError(
            f"Ulysses gives each rank some of the heads, and {num_heads} heads do not divide among the {num_ranks} "
            f"ranks of axis {line.axis!r}. Use ring attention (sequence: {{attention: ring}}), or another size of "
            f"{line.axis!r}."
        )
    repeats = num_ranks // math.gcd(num_kv_heads, num_ranks)
    if repeats > 1:
        key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
    query, key, value = _ToHeads.apply(line, layout, query, key, value)  # type: ignore[no-untyped-call]  # torch's own
    out = whole_attention(query, key, value, visibility, weighing, dropout)
    (out,) = _ToTokens.apply(line, layout, out)  # type: ignore[no-untyped-call]  # torch's own
    result: Tensor = out
    return result


def whole_attention(
    query: Tensor, key: Tensor, value: Tensor, visibility: Visibility, weighing: Weighing, dropout: float
) -> Tensor:
    """Attention with all tokens on this rank, by torch's own kernels unless its mask is too large for them."""
    batch, _, num_tokens, _ = query.shape
    shares_heads = key.shape[1] != query.shape[1]
    if visibility.is_plain and weighing.softcap is None:
        return functional.scaled_dot_product_attention(
            query,
            key,
            value,
            dropout_p=dropout,
            is_causal=visibility.is_causal,
            scale=weighing.scale,
            enable_gqa=shares_heads,
        )
    layout = Layout(num_tokens, 1)
    if weighing.softcap is not None and dropout:
        raise ModelError(
            "Attention with a softcap and dropout cannot be split over the sequence. Set its dropout to 0."
        )
    if weighing.softcap is not None or (batch * num_tokens**2 > MOST_MASKED and not dropout):
        return ring_attention(query, key, value, layout, None, visibility, weighing)
    (run,) = layout.runs[0]
    mask = visibility.mask(run, run, query.device)
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, scale=weighing.scale, enable_gqa=shares_heads
    )


class _ToHeads(torch.autograd.Function):
    """`[batch, heads, local tokens, dim]` to `[batch, local heads, tokens, dim]`, several at once."""

    @staticmethod
    def forward(ctx: Any, line: Line, layout: Layout, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.line, ctx.layout = line, layout
        return _to_heads(tensors, line, layout)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *_to_tokens(grads, ctx.line, ctx.layout))


class _ToTokens(torch.autograd.Function):
    """The inverse of `_ToHeads`."""

    @staticmethod
    def forward(ctx: Any, line: Line, layout: Layout, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.line, ctx.layout = line, layout
        return _to_tokens(tensors, line, layout)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *_to_heads(grads, ctx.line, ctx.layout))


def _to_heads(tensors: Sequence[Tensor], line: Line, layout: Layout) -> tuple[Tensor, ...]:
    parts = [tensor.chunk(line.num_ranks, dim=1) for tensor in tensors]
    by_rank = _swapped(parts, [[part[0].shape] * line.num_ranks for part in parts], line)
    return tuple(layout.join(list(arrived), dim=2) for arrived in by_rank)


def _to_tokens(tensors: Sequence[Tensor], line: Line, layout: Layout) -> tuple[Tensor, ...]:
    parts = [[layout.take(tensor, rank, dim=2) for rank in range(line.num_ranks)] for tensor in tensors]
    by_rank = _swapped(parts, [[part[0].shape] * line.num_ranks for part in parts], line)
    return tuple(torch.cat(arrived, dim=1) for arrived in by_rank)


def _swapped(
    parts: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[torch.Size]], line: Line
) -> list[list[Tensor]]:
    """For each tensor the parts from each rank. Everything for one rank is sent as one message."""
    sent = [torch.cat([part[rank].reshape(-1) for part in parts]) for rank in range(line.num_ranks)]
    arrived = line.deal(sent, [message.shape for message in sent])
    split = [torch.split_with_sizes(message, [math.prod(shape[0]) for shape in shapes]) for message in arrived]
    return [
        [split[rank][number].view(shapes[number][rank]) for rank in range(line.num_ranks)]
        for number in range(len(parts))
    ]
