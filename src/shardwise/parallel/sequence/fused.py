"""Attention between some queries and some keys by torch's fused kernels, where they return the logsumexp.

[Note: parts] A fused kernel returns, with its output, the logsumexp of each row's scores. So results over parts of the
keys can be merged as in [Note: tiles] in `blocks.py`, and from the output and logsumexp over all keys its backward
computes the gradients of a part. A kernel accepts a rectangle in which everything is visible, or a square with a causal
mask. Parts of a sequence that have equal lengths and keep the order of the sequence on each rank consist of these: a
rank's own keys form the square, and of any other keys a run of queries sees all or none.

Everything else (windows, documents, padding, softcaps, values of another width) is computed tile by tile. So are
tensors on devices whose kernels are not known here, and bf16 and fp16 on the CPU, where torch's kernel is slower: on an
AMD EPYC with torch 2.13 it takes 1.2 times as long as the tiles, while in fp32 the tiles take 2.1 times as long as the
kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch

from shardwise.parallel.sequence.blocks import Gradients, Queries, Weighing, wide
from shardwise.parallel.sequence.token_layout import Run
from shardwise.parallel.sequence.visibility import Visibility

Tensor = torch.Tensor
Runs = Sequence[Run]
_HALVES = (torch.bfloat16, torch.float16)
_MOST_HEAD_DIM = 256


class Attending(Protocol):
    """The interface of `Queries`: queries that see keys part by part."""

    def attend(self, key: Tensor, value: Tensor, query_runs: Runs, key_runs: Runs, visibility: Visibility) -> None: ...

    def result(self) -> tuple[Tensor, Tensor]: ...


class Part(NamedTuple):
    """Queries and keys by their positions on this rank, with or without a causal mask."""

    queries: slice
    keys: slice
    is_causal: bool


def attending(query: Tensor, key: Tensor, value: Tensor, weighing: Weighing, visibility: Visibility) -> Attending:
    """The queries, ready to attend to keys shaped like `key`: fused if there is a kernel, else tiled."""
    if is_fused(query, value, weighing, visibility):
        return FusedQueries(query, weighing.scale)
    return Queries(query, key.shape[1], weighing, value.shape[-1])


def is_fused(query: Tensor, value: Tensor, weighing: Weighing, visibility: Visibility) -> bool:
    """Whether there is a kernel for these inputs; the same on all ranks, and in forward and backward."""
    dim = query.shape[-1]
    if not visibility.is_plain or weighing.softcap is not None or value.shape[-1] != dim:
        return False
    if query.device.type == "cuda":
        return query.dtype in _HALVES and dim % 8 == 0 and dim <= _MOST_HEAD_DIM
    return query.device.type == "cpu" and query.dtype not in _HALVES


def parts(query_runs: Runs, key_runs: Runs, *, is_causal: bool) -> Iterator[Part]:
    """The visible parts of one step of a ring. Runs are those of a `Layout`."""
    query_at, key_at = list(_places(query_runs)), list(_places(key_runs))
    if not is_causal or tuple(query_runs) == tuple(key_runs):
        yield Part(slice(0, query_at[-1].stop), slice(0, key_at[-1].stop), is_causal)
        return
    found: list[Part] = []
    for at, queries in zip(query_at, query_runs, strict=True):
        seen = [place for place, keys in zip(key_at, key_runs, strict=True) if keys.stop <= queries.start]
        if not seen:
            continue
        part = Part(at, slice(seen[0].start, seen[-1].stop), is_causal=False)
        if found and found[-1].keys == part.keys and found[-1].queries.stop == at.start:
            part = part._replace(queries=slice(found.pop().queries.start, at.stop))
        found.append(part)
    yield from found


def _places(runs: Runs) -> Iterator[slice]:
    at = 0
    for run in runs:
        yield slice(at, at + run.numel)
        at += run.numel


class FusedQueries:
    """As `Queries`, for queries `[batch, heads, tokens, dim]`."""

    def __init__(self, query: Tensor, scale: float) -> None:
        self.query = query
        self.scale = scale
        self._sum: Tensor | None = None
        self._log_sum: Tensor | None = None

    def attend(self, key: Tensor, value: Tensor, query_runs: Runs, key_runs: Runs, visibility: Visibility) -> None:
        """As `Queries.attend`. The first keys must be the queries' own, so that every query sees one."""
        heads = self.query.shape[1]
        for part in parts(query_runs, key_runs, is_causal=visibility.is_causal):
            query = self.query[:, :, part.queries]
            keys, values = (_for_heads(tensor[:, :, part.keys], heads) for tensor in (key, value))
            self._add(part, *_forward(query, keys, values, part.is_causal, self.scale))

    def _add(self, part: Part, out: Tensor, log_sum: Tensor) -> None:
        if self._sum is None or self._log_sum is None:
            self._sum, self._log_sum = out.to(wide(out.dtype)), log_sum
            return
        before, summed = self._log_sum[:, :, part.queries], self._sum[:, :, part.queries]
        together = torch.logaddexp(before, log_sum)
        summed.mul_((before - together).exp_()[..., None])
        summed.addcmul_(out.to(summed.dtype), (log_sum - together).exp_()[..., None])
        before.copy_(together)

    def result(self) -> tuple[Tensor, Tensor]:
        """The output, and the logsumexp of each row's scores, `[batch, heads, tokens]`."""
        assert self._sum is not None, "nobody has seen anything"
        assert self._log_sum is not None
        return self._sum, self._log_sum


class FusedGradients:
    """As `Gradients`, from the output and the logsumexp of `FusedQueries`."""

    def __init__(self, query: Tensor, scale: float, out: Tensor, log_sum: Tensor, grad_out: Tensor) -> None:
        self._query, self._scale = query, scale
        self._out, self._log_sum, self._grad_out = out, log_sum, grad_out.to(out.dtype)
        self.query = torch.zeros_like(query, dtype=wide(query.dtype))

    def add(
        self, key: Tensor, value: Tensor, grads: tuple[Tensor, Tensor], runs: tuple[Runs, Runs], visibility: Visibility
    ) -> None:
        heads = self._query.shape[1]
        for part in parts(*runs, is_causal=visibility.is_causal):
            inputs = [tensor[:, :, part.queries] for tensor in (self._grad_out, self._query)]
            inputs += [_for_heads(tensor[:, :, part.keys], heads) for tensor in (key, value)]
            inputs += [tensor[:, :, part.queries] for tensor in (self._out, self._log_sum)]
            made = _backward(inputs, part.is_causal, self._scale)
            self.query[:, :, part.queries] += made[0]
            for grad, one in zip(grads, made[1:], strict=True):
                by_kv_head = one.view(len(one), grad.shape[1], -1, *one.shape[2:]).to(grad.dtype)
                grad[:, :, part.keys] += by_kv_head.sum(2) if by_kv_head.shape[2] > 1 else by_kv_head[:, :, 0]


def gradients(
    saved: tuple[Tensor, ...], weighing: Weighing, visibility: Visibility, grad_out: Tensor
) -> Gradients | FusedGradients:
    """The object that computes gradients: `saved` are the queries, keys, values, output and logsumexp of the
    forward."""
    query, key, value, out, log_sum = saved
    if is_fused(query, value, weighing, visibility):
        return FusedGradients(query, weighing.scale, out, log_sum, grad_out)
    return Gradients(Queries(query, key.shape[1], weighing, value.shape[-1]), out, log_sum, grad_out)


def _for_heads(tensor: Tensor, num_heads: int) -> Tensor:
    """Keys or values repeated for each query head."""
    repeats = num_heads // tensor.shape[1]
    return tensor if repeats == 1 else tensor.repeat_interleave(repeats, dim=1)


def _forward(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    if query.device.type == "cpu":
        out, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, scale=scale
        )
    else:
        out, log_sum, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, is_causal, scale=scale
        )
    return out, log_sum


def _backward(inputs: Sequence[Tensor], is_causal: bool, scale: float) -> Sequence[Tensor]:
    """Gradients of queries, keys and values. `inputs`: the output's gradient, queries, keys, values, output,
    logsumexp."""
    if inputs[0].device.type == "cpu":
        made: Sequence[Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *inputs, 0.0, is_causal, scale=scale
        )
        return made
    _, query, key, *_ = inputs
    nothing = torch.zeros(2, dtype=torch.uint64, device=query.device)  # seed and offset of dropout, which is unused
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(  # type: ignore[no-any-return]
        *(tensor.contiguous() for tensor in inputs),
        None,
        None,
        query.shape[2],
        key.shape[2],
        0.0,
        is_causal,
        nothing,
        nothing[0],
        scale=scale,
    )
