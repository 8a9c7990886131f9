"""Sequences over several ranks: batches split by tokens, results joined again, means over tokens."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.engine_reports import EngineReports
from shardwise.errors import ConfigError


class EngineSequences(EngineReports):
    """Part of `Engine`."""

    def split_sequence(self, batch: Any, *, documents: torch.Tensor | None = None) -> Any:
        """The tokens of `batch` that this rank computes. All ranks along the mesh's `sp` call, with the same batch.

        `batch` is a dict with `input_ids` or `inputs_embeds`, a tensor, or a list or tuple of tensors; every tensor
        whose dimension 1 has as many entries as there are tokens is split there. `documents`, int `[batch, tokens]`:
        tokens attend only to tokens of the same number.

        In a dict `attention_mask`, `[batch, tokens]`, marks what is not padding, and is removed. For models of
        transformers `position_ids` are added (without a mask, a document begins wherever given ones start over), and
        `labels` are shifted as a causal language model does: `shift_labels`, with `num_items_in_batch` so that the mean
        of the ranks' losses is the loss of the whole sample. If the number of tokens does not divide, a dict is padded
        at the end.

        A model of transformers that is called with a whole batch splits it in this way by itself.

        Without an axis `sp` in the mesh the batch is returned unchanged. Raises `ConfigError` for a batch that is not
        the same on all ranks that share it, or that cannot be split.
        """
        self._require_open()
        if self._sharded.sequence is None:
            if documents is not None:
                raise ConfigError("documents= is for plans that split sequences; on one rank the model masks them.")
            return batch
        return self._sharded.sequence.split(batch, documents)

    def join_sequence(self, part: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """The whole sequences of which this rank has `part`: the inverse of `split_sequence`, for results.

        Dimension `dim` of `part` has this rank's tokens of the batch that was split last, by `split_sequence` or by the
        model; in the result it has as many as that batch had, without the padding at the end. All ranks along the
        mesh's `sp` call, and all get the same tensor. Each of them may run backward on a loss computed from it: the
        gradients count once. Without an axis `sp`, and inside `inference()`, `part` is returned unchanged.

        Raises `ConfigError` for a tensor with another number of tokens, and `StateError` before any batch was split.
        """
        self._require_open()
        return part if self._sharded.sequence is None else self._sharded.sequence.join(part, dim)

    def give_whole_outputs(self, *, tokens: bool = True) -> None:
        """From now on, a model of transformers that is given a whole batch and splits it along `sp` returns whole
        outputs.

        A loss is that of the whole batch, on every rank along `sp`, and outputs with one entry per token in dimension 1
        are joined. Exception: in training, next to a loss of the model's own, logits and hidden states stay in parts
        because they would take too much memory (see `join_sequence`); with `tokens=False` they stay in parts
        everywhere. All ranks call. Without an axis `sp` nothing changes.
        """
        self._require_open()
        self._sharded.progress.whole_outputs.ask(tokens=tokens)

    def mean_over_tokens(self, values: torch.Tensor, counted: torch.Tensor | None = None) -> torch.Tensor:
        """From one value per token of this rank, a scalar whose mean over ranks, as `backward` and `mean` take it, is
        the mean over all tokens that count of this micro-batch, however many are on each rank.

        `values` may be losses with `reduction="none"`; `counted` is a bool tensor of the same shape (default: all
        count). All ranks call that train the same part of the model: all ranks, or under a pipeline those of its last
        stage. If no token counts on any rank, the result is nan, as a plain mean of nothing is.
        """
        self._require_open()
        here = torch.tensor(values.numel(), device=values.device)
        if counted is not None:
            values, here = values.masked_fill(~counted, 0.0), counted.sum()
        weight = self._sharded.progress.weighing.current
        if not weight:  # the rows stand in for none, and so do their tokens
            here = torch.zeros_like(here)
        group = self._sharded.data_group
        share = group.size / self._asking(lambda: self._sharded.data_group.sum(here))
        if weight not in (0.0, 1.0):  # gradients and `mean` are weighed by samples, which tokens replace here
            share = share / weight
        return values.sum() * share.to(values.dtype)
