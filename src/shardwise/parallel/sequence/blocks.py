"""Attention between some queries and some keys, tile by tile, with the statistics needed to merge several results.

[Note: tiles] The matrix of scores is never materialized: it is computed for `TILE` queries and `TILE` keys at a time,
as in FlashAttention (arXiv:2205.14135). For each query the maximum score, the sum of weights and the weighted sum of
values so far are kept (Milakov and Gimelshein, arXiv:1805.02867), so that results over other keys, for example from
another rank, can be added in any order and the end result is exact. Arithmetic is in fp32, or in fp64 for fp64 inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from shardwise.parallel.sequence.token_layout import Run
from shardwise.parallel.sequence.visibility import Visibility

Tensor = torch.Tensor
TILE = 512


class Tile(NamedTuple):
    """Queries and keys, by their positions on this rank and by their token numbers."""

    query_at: slice
    key_at: slice
    queries: Run
    keys: Run


class Weighing(NamedTuple):
    """How products of queries and keys become scores: multiplied by `scale`, then softcapped to at most `softcap`."""

    scale: float
    softcap: float | None = None


class Scores(NamedTuple):
    """Scores `[batch, kv heads, rows, keys]`, the scaled queries and the keys behind them, and the derivative of the
    softcap."""

    scores: Tensor
    queries: Tensor
    keys: Tensor
    slope: Tensor | None


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of accumulators."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def tiles(query_runs: Sequence[Run], key_runs: Sequence[Run], visibility: Visibility) -> Iterator[Tile]:
    """The tiles in which any query sees any key; all tiles of some queries are consecutive."""
    key_tiles = list(_split(key_runs))
    for query_at, queries in _split(query_runs):
        for key_at, keys in key_tiles:
            if not visibility.sees_nothing(queries, keys):
                yield Tile(query_at, key_at, queries, keys)


def _split(runs: Sequence[Run]) -> Iterator[tuple[slice, Run]]:
    at = 0
    for run in runs:
        for start in range(run.start, run.stop, TILE):
            part = Run(start, min(start + TILE, run.stop))
            yield slice(at, at + part.numel), part
            at += part.numel


class Queries:
    """Queries `[batch, heads, tokens, dim]`, several for each of `num_kv_heads` key heads, with their running softmax.

    Rows are the queries of one key head, `[batch, num_kv_heads, heads per kv head, tokens, ...]`.
    """

    def __init__(self, query: Tensor, num_kv_heads: int, weighing: Weighing, value_dim: int) -> None:
        self.scale = weighing.scale
        self.softcap = weighing.softcap
        self.dtype = wide(query.dtype)
        self.query = _by_kv_head(query, num_kv_heads)
        rows = self.query.shape[:-1]
        self._largest = query.new_full(rows, -torch.inf, dtype=self.dtype)
        self._weight = query.new_zeros(rows, dtype=self.dtype)
        self._sum = query.new_zeros((*rows, value_dim), dtype=self.dtype)

    def scores(self, tile: Tile, key: Tensor, visibility: Visibility) -> Scores:
        """The masked scores of one tile."""
        query = self.query[:, :, :, tile.query_at].to(self.dtype).flatten(2, 3) * self.scale
        keys = key[:, :, tile.key_at].to(self.dtype)
        scores, slope = query @ keys.transpose(-1, -2), None
        if self.softcap is not None:
            bent = scores.div_(self.softcap).tanh_()
            slope = 1 - bent.square()
            scores = bent.mul_(self.softcap)
        mask = visibility.mask(tile.queries, tile.keys, scores.device)
        if mask is not None:
            by_head = scores.view(*scores.shape[:2], -1, tile.queries.numel, tile.keys.numel)
            by_head.masked_fill_(~mask[:, :, None], -torch.inf)
        return Scores(scores, query, keys, slope)

    def attend(
        self, key: Tensor, value: Tensor, query_runs: Sequence[Run], key_runs: Sequence[Run], visibility: Visibility
    ) -> None:
        """Add the attention to these keys, `[batch, kv heads, tokens, dim]`."""
        for tile in tiles(query_runs, key_runs, visibility):
            scores = self.scores(tile, key, visibility).scores
            values = value[:, :, tile.key_at].to(self.dtype)
            before = self._largest[:, :, :, tile.query_at].flatten(2, 3)
            largest = torch.maximum(before, scores.amax(-1))
            known = largest.masked_fill(largest == -torch.inf, 0.0)  # rows that have seen no key yet
            weights = scores.sub_(known[..., None]).exp_()
            fades = (before - known).exp_()
            shape = self._largest[:, :, :, tile.query_at].shape
            self._largest[:, :, :, tile.query_at] = largest.view(shape)
            self._weight[:, :, :, tile.query_at] *= fades.view(shape)
            self._weight[:, :, :, tile.query_at] += weights.sum(-1).view(shape)
            self._sum[:, :, :, tile.query_at] *= fades.view(shape)[..., None]
            self._sum[:, :, :, tile.query_at] += (weights @ values).view(*shape, -1)

    def result(self) -> tuple[Tensor, Tensor]:
        """The output `[batch, heads, tokens, dim]`, and the logsumexp of each row's scores. Both are zero for rows that
        have seen no key; with the 0 the backward gives all their masked scores a weight of exp(-inf).

        The object is finished afterwards, because the sums are divided in place.
        """
        is_blind = self._weight == 0
        out = self._sum.div_(self._weight.masked_fill_(is_blind, 1.0)[..., None])
        log_sum = self._largest.add_(self._weight.log_())
        return out.flatten(1, 2), log_sum.masked_fill_(is_blind, 0.0)


class Gradients:
    """Gradients of queries, and of keys and values as they arrive, from that of an output `[batch, heads, tokens,
    dim]`."""

    def __init__(self, queries: Queries, out: Tensor, log_sum: Tensor, grad_out: Tensor) -> None:
        self._queries = queries
        num_kv_heads = queries.query.shape[1]
        self._log_sum = log_sum
        self._grad_out = _by_kv_head(grad_out, num_kv_heads)
        self._delta = _by_kv_head((grad_out.to(queries.dtype) * out.to(queries.dtype)).sum(-1), num_kv_heads)
        self.query = torch.zeros_like(queries.query, dtype=queries.dtype)

    def add(
        self,
        key: Tensor,
        value: Tensor,
        grads: tuple[Tensor, Tensor],
        runs: tuple[Sequence[Run], Sequence[Run]],
        visibility: Visibility,
    ) -> None:
        """Add the gradients of these keys and values to `grads`, which have their shapes, and that of the queries to
        `query`.

        `runs` are those of the queries and of the keys.
        """
        queries, (grad_key, grad_value) = self._queries, grads
        for tile in tiles(*runs, visibility):
            scores, query, keys, slope = queries.scores(tile, key, visibility)
            values = value[:, :, tile.key_at].to(queries.dtype)
            grad_out = self._grad_out[:, :, :, tile.query_at].to(queries.dtype).flatten(2, 3)
            weights = scores.sub_(self._log_sum[:, :, :, tile.query_at].flatten(2, 3)[..., None]).exp_()
            grad_value[:, :, tile.key_at] += weights.transpose(-1, -2) @ grad_out
            grad_scores = grad_out @ values.transpose(-1, -2)
            grad_scores.sub_(self._delta[:, :, :, tile.query_at].flatten(2, 3)[..., None]).mul_(weights)
            if slope is not None:
                grad_scores.mul_(slope)
            grad_key[:, :, tile.key_at] += grad_scores.transpose(-1, -2) @ query
            grad_query = (grad_scores @ keys).mul_(queries.scale)
            mine = self.query[:, :, :, tile.query_at]
            mine += grad_query.view(mine.shape)


def _by_kv_head(tensor: Tensor, num_kv_heads: int) -> Tensor:
    """`[batch, heads, ...]` as `[batch, kv heads, heads per kv head, ...]`."""
    return tensor.reshape(len(tensor), num_kv_heads, -1, *tensor.shape[2:])
