"""Ring attention: keys and values travel around the ranks of a line (Liu, Zaharia and Abbeel, arXiv:2310.01889).

Each rank computes the attention of its queries to the keys that it has while the next ones arrive, and merges the
results (see [Note: tiles] in `blocks.py`, and [Note: parts] in `fused.py`). In the backward keys and values travel
around once more, and one step behind them their gradients, in fp32, until each has returned to its owner. A rank holds
the keys of one other rank at a time.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from shardwise.comm import Line, Passing
from shardwise.parallel.sequence.blocks import Weighing, wide
from shardwise.parallel.sequence.fused import attending, gradients
from shardwise.parallel.sequence.token_layout import Layout, Run
from shardwise.parallel.sequence.visibility import Visibility

Tensor = torch.Tensor


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    line: Line | None,
    visibility: Visibility,
    weighing: Weighing,
) -> Tensor:
    """Attention of this rank's tokens to those of the whole line. All ranks of the line must call.

    `query` is `[batch, heads, local tokens, dim]`; keys and values have as many heads or a divisor of that. With `line`
    None all tokens are on this rank. The output has the query's shape and dtype, with the last dimension of the values.
    """
    out: Tensor = _RingAttention.apply(query, key, value, layout, line, visibility, weighing)  # type: ignore[no-untyped-call]  # torch's own
    return out


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layout: Layout,
        line: Line | None,
        visibility: Visibility,
        weighing: Weighing,
    ) -> Tensor:
        with torch.autocast(query.device.type, enabled=False):
            queries = attending(query, key, value, weighing, visibility)
            ring = _Ring(layout, line)
            travelling = _packed(key, value)
            for step in range(ring.num_ranks):
                coming = ring.pass_on(travelling) if step < ring.num_ranks - 1 else None
                keys, values = _unpacked(travelling, key.shape, value.shape)
                queries.attend(keys, values, ring.own_runs, ring.runs_at(step), visibility)
                travelling = coming.wait() if coming is not None else travelling
            summed, log_sum = queries.result()
            out = summed.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, log_sum)
        ctx.rest = layout, line, visibility, weighing
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once, because recomputation hands out each tensor once
        query, key, value, *_ = saved
        layout, line, visibility, weighing = ctx.rest
        with torch.autocast(query.device.type, enabled=False):
            made = gradients(saved, weighing, visibility, grad_out)
            ring = _Ring(layout, line)
            travelling = _packed(key, value)
            grads = torch.zeros_like(travelling, dtype=wide(query.dtype))
            for step in range(ring.num_ranks):
                coming = ring.pass_on(travelling) if step < ring.num_ranks - 1 else None
                keys, values = _unpacked(travelling, key.shape, value.shape)
                grad_key, grad_value = _unpacked(grads, key.shape, value.shape)
                runs = ring.own_runs, ring.runs_at(step)
                made.add(keys, values, (grad_key, grad_value), runs, visibility)
                travelling = coming.wait() if coming is not None else travelling
                if ring.num_ranks > 1:
                    grads = ring.pass_on(grads).wait()  # they belong to the keys that have just arrived
            grad_key, grad_value = _unpacked(grads, key.shape, value.shape)
        grad_query = made.query.view(query.shape).to(query.dtype)
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), None, None, None, None


class _Ring:
    """Which rank's keys are here at each step."""

    def __init__(self, layout: Layout, line: Line | None) -> None:
        self._layout = layout
        self._line = line
        self.num_ranks = 1 if line is None else line.num_ranks
        self._place = 0 if line is None else line.index
        self.own_runs = layout.runs[self._place]

    def runs_at(self, step: int) -> tuple[Run, ...]:
        """The tokens of the keys that are here at `step`."""
        return self._layout.runs[(self._place - step) % self.num_ranks]

    def pass_on(self, sent: Tensor) -> Passing:
        assert self._line is not None, "a ring of one passes nothing on"
        return self._line.pass_on(sent)


def _packed(key: Tensor, value: Tensor) -> Tensor:
    """Keys and values as one message."""
    return torch.cat([key.reshape(-1), value.reshape(-1)])


def _unpacked(packed: Tensor, key_shape: torch.Size, value_shape: torch.Size) -> tuple[Tensor, Tensor]:
    key, value = torch.split_with_sizes(packed, [math.prod(key_shape), math.prod(value_shape)])
    return key.view(key_shape), value.view(value_shape)
