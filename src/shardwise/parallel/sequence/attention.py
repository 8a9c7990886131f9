"""Attention over a split sequence, independent of who calls it and of the method (Ulysses or ring)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from shardwise.comm import Line
from shardwise.errors import ModelError, StateError
from shardwise.parallel.sequence.blocks import Weighing
from shardwise.parallel.sequence.ring import ring_attention
from shardwise.parallel.sequence.token_layout import Layout
from shardwise.parallel.sequence.ulysses import ulysses_attention
from shardwise.parallel.sequence.visibility import Visibility
from shardwise.system.torch_private import DisableTorchFunction, graph_task

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class Sample:
    """What is known about a split batch: its layout over the ranks, its documents and its padding.

    `documents` (int) and `kept` (bool, False for padding) are `[batch, tokens]` of the whole sample; see `Visibility`.
    """

    layout: Layout
    documents: Tensor | None = None
    kept: Tensor | None = None
    num_padded: int = 0
    """How many tokens at the end of the layout are padding that was added by the split."""

    def is_attended_like(self, other: Sample) -> bool:
        """Whether attention over the two batches is computed in the same way."""
        plain = self.documents is None is other.documents and self.kept is None is other.kept
        return self is other or (plain and self.layout == other.layout)

    def cloned(self) -> Sample:
        """The same with tensors of its own."""
        documents, kept = (None if one is None else one.clone() for one in (self.documents, self.kept))
        return Sample(self.layout, documents, kept, self.num_padded)

    def rows(self, place: int, num: int) -> Sample:
        """The sample of micro-batch `place`, if the rows are cut into `num` micro-batches."""
        documents, kept = (None if one is None else one.chunk(num)[place] for one in (self.documents, self.kept))
        return Sample(self.layout, documents, kept, self.num_padded)

    def between(self, start: int, stop: int) -> Sample:
        """The sample of some of the rows."""
        documents, kept = (None if one is None else one[start:stop] for one in (self.documents, self.kept))
        return Sample(self.layout, documents, kept, self.num_padded)


class AttentionCall(NamedTuple):
    """The parameters of one attention call, besides its tensors. `scale` defaults to 1 / sqrt(dim)."""

    is_causal: bool
    scale: float | None = None
    dropout: float = 0.0
    window: int | None = None
    softcap: float | None = None


class Attention:
    """The attention of one model whose sequences are split over `line`, by all-to-alls or around a ring."""

    def __init__(self, line: Line, *, is_ring: bool) -> None:
        self.line = line
        self.is_ring = is_ring
        self.sample: Sample | None = None
        """The sample of the batch that was split last."""
        self.num_calls = 0
        """How many calls there were in the last forward."""
        self._in_backward: list[Sample] = []
        """The distinct samples of the forwards in the current backward, or in the last one."""
        self._backward = -1
        """Autograd's graph task id of that backward."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall, *, recomputed: bool) -> Tensor:
        """Like `scaled_dot_product_attention` over the whole sequence, for this rank's tokens. All ranks of the line
        call.

        `query` is `[batch, heads, local tokens, dim]`; keys may have fewer heads. `recomputed`: the call is made in a
        backward.
        """
        sample = self._sample_of(query, key, recomputed=recomputed)
        self.num_calls += 1
        scale = 1 / math.sqrt(query.shape[-1]) if call.scale is None else call.scale
        weighing = Weighing(scale, call.softcap)
        query, key, value = _in_one_dtype(query, key, value)
        if query.shape[1] % key.shape[1]:
            raise ModelError(f"{query.shape[1]} heads of queries do not divide among {key.shape[1]} heads of keys.")
        visibility = Visibility(call.is_causal, call.window, sample.documents, sample.kept)
        dropout, whole = call.dropout, (sample.layout, self.line, visibility, weighing)
        if self.is_ring and dropout:
            raise ModelError(
                f"Ring attention has no dropout, and this model asks for {dropout:g} in its attention. Set it to 0, or "
                f"use sequence: {{attention: ulysses}}."
            )
        with DisableTorchFunction():  # so that attention calls in here are not routed here again
            if self.is_ring:
                out = ring_attention(query, key, value, *whole)
            else:
                out = ulysses_attention(query, key, value, *whole, dropout)
        return out

    def _sample_of(self, query: Tensor, key: Tensor, *, recomputed: bool) -> Sample:
        sample = self._recomputed() if recomputed else self.sample
        if sample is None:
            raise StateError(
                f"This model's sequences are split over the {self.line.num_ranks} ranks of axis {self.line.axis!r}, "
                f"but no batch was. Call batch = engine.split_sequence(batch) before the forward."
            )
        if not query.shape[-2] == key.shape[-2] == sample.layout.num_local:
            raise ModelError(
                f"Attention of {query.shape[-2]} queries to {key.shape[-2]} keys, but engine.split_sequence gave this "
                f"rank {sample.layout.num_local} tokens. Only attention of the batch's tokens to each other can be "
                f"split over {self.line.axis!r}. Generate inside engine.inference(), where a rank has whole sequences."
            )
        return sample

    def note_backward(self, sample: Sample) -> None:
        """Record that the backward has reached the output of a forward over `sample`."""
        backward = graph_task()
        if backward != self._backward:
            self._backward, self._in_backward = backward, []
        if not any(sample.is_attended_like(other) for other in self._in_backward):
            self._in_backward.append(sample)

    def _recomputed(self) -> Sample | None:
        """The sample of the forward that is recomputed in a backward. It is ambiguous if the backward has several."""
        if len(self._in_backward) > 1:
            raise StateError(
                "A forward is recomputed in a backward over batches that differ in length, documents or "
                "padding, so it is unknown which of them it belongs to. Call backward for each separately."
            )
        return self._in_backward[0] if self._in_backward else self.sample


def _in_one_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in one dtype, which is autocast's if it is on."""
    kind = tensors[0].device.type
    if torch.is_autocast_enabled(kind):
        return tuple(tensor.to(torch.get_autocast_dtype(kind)) for tensor in tensors)
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        raise ModelError(f"Queries, keys and values are of {' and '.join(sorted(map(str, dtypes)))}; make them one.")
    return tensors
