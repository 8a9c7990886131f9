"""Attention over a split sequence, whoever asks for it: what the model says, put into the terms of one method."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from shardwise.comm import Line
from shardwise.errors import ModelError, StateError
from shardwise.sequence.blocks import Weighing
from shardwise.sequence.layout import Layout
from shardwise.sequence.ring import ring_attention
from shardwise.sequence.ulysses import ulysses_attention
from shardwise.sequence.visibility import Visibility

Tensor = torch.Tensor


_graph_task_id: Callable[[], int] = torch._C._current_graph_task_id


@dataclass(frozen=True, eq=False)
class Sample:
    """What is known of the batch whose tokens are computed: where they lie, and which of them belong together."""

    layout: Layout
    documents: Tensor | None = None
    kept: Tensor | None = None
    num_padded: int = 0
    """Of the layout's tokens, those behind that were not in the batch."""

    def goes_with(self, other: Sample) -> bool:
        """Whether attention over the two is split in the same way."""
        plain = self.documents is None is other.documents and self.kept is None is other.kept
        return self is other or (plain and self.layout == other.layout)

    def rows(self, place: int, num: int) -> Sample:
        """Of rows that are cut into `num` micro-batches, those of the one at `place`."""
        documents, kept = (None if one is None else one.chunk(num)[place] for one in (self.documents, self.kept))
        return Sample(self.layout, documents, kept, self.num_padded)


class Asked(NamedTuple):
    """What a model says of one call of attention, besides its tensors. `scale` defaults to 1 / sqrt(dim)."""

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
        """Of the batch that was split last."""
        self.num_calls = 0
        """How often it was asked for."""
        self._going_back: list[Sample] = []
        """Of the forwards that take part in the backward that runs, or ran last, where they differ."""
        self._backward = -1
        """The number that autograd gave to that."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, asked: Asked, *, recomputed: bool) -> Tensor:
        """Like `scaled_dot_product_attention` over the whole sequence, for this rank's tokens.

        `query` is `[batch, heads, local tokens, dim]`; keys may have fewer heads. `recomputed`: in a backward.
        """
        sample = self._sample_of(query, key, recomputed=recomputed)
        self.num_calls += 1
        scale = 1 / math.sqrt(query.shape[-1]) if asked.scale is None else asked.scale
        weighing = Weighing(scale, asked.softcap)
        query, key, value = _in_one_dtype(query, key, value)
        if query.shape[1] % key.shape[1]:
            raise ModelError(f"{query.shape[1]} heads of queries do not divide among {key.shape[1]} heads of keys.")
        visibility = Visibility(asked.is_causal, asked.window, sample.documents, sample.kept)
        dropout, whole = asked.dropout, (sample.layout, self.line, visibility, weighing)
        if self.is_ring and dropout:
            raise ModelError(
                f"Ring attention has no dropout, and this model asks for {dropout:g} in its attention. Set it to 0, or "
                f"use sequence: {{attention: ulysses}}."
            )
        with torch._C.DisableTorchFunction():  # what is computed here is not to be led here again
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

    def go_back(self, sample: Sample) -> None:
        """A gradient of what a forward over `sample` returned is about to be used."""
        backward = _graph_task_id()
        if backward != self._backward:
            self._backward, self._going_back = backward, []
        if not any(sample.goes_with(other) for other in self._going_back):
            self._going_back.append(sample)

    def _recomputed(self) -> Sample | None:
        """Of the forward that is run again in a backward. Whose it is nobody says where several are sent back."""
        if len(self._going_back) > 1:
            raise StateError(
                "A forward is recomputed in a backward that goes through batches of different lengths, documents or "
                "padding, and nobody knows which of them it is of. Call backward for each by itself."
            )
        return self._going_back[0] if self._going_back else self.sample


def _in_one_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """In that of autocast, if it is on."""
    kind = tensors[0].device.type
    if torch.is_autocast_enabled(kind):
        return tuple(tensor.to(torch.get_autocast_dtype(kind)) for tensor in tensors)
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        raise ModelError(f"Queries, keys and values are of {' and '.join(sorted(map(str, dtypes)))}; make them one.")
    return tensors
