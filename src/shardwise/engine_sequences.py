"""Sequences over several ranks: batches split by tokens, what is made of them joined, means over tokens."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.engine_reports import EngineReports
from shardwise.errors import ConfigError


class EngineSequences(EngineReports):
    """Part of `Engine`."""

    def split_sequence(self, batch: Any, *, documents: torch.Tensor | None = None) -> Any:
        """The tokens of `batch` that this rank computes. All ranks along the mesh's `sp` call, with the same batch.

        `batch` is a dict with `input_ids` or `inputs_embeds`, a tensor, or a list or tuple of tensors; whatever has as
        many entries in dimension 1 as there are tokens is cut there. `documents`, int `[batch, tokens]`: tokens see
        only those of the same number.

        In a dict `attention_mask`, `[batch, tokens]`, says what is no padding, and is taken out. For models of
        transformers `position_ids` are added (where given ones begin anew a document begins, unless there is a mask),
        and `labels` shifted as a causal language model does: `shift_labels`, with `num_items_in_batch` so that the mean
        of the ranks' losses is that of the whole sample. Where tokens do not divide, a dict is padded behind.

        A model of transformers that is called with a whole batch splits it by itself, in this way.

        Without an axis `sp` in the mesh the batch comes back as it is. Raises `ConfigError` for a batch that is
        not the same on all ranks that share in it, or that cannot be cut.
        """
        self._require_open()
        if self._sharded.sequence is None:
            if documents is not None:
                raise ConfigError("documents= is for plans that split sequences; on one rank the model masks them.")
            return batch
        return self._sharded.sequence.split(batch, documents)

    def join_sequence(self, part: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """The whole sequences of which this rank has `part`: the inverse of `split_sequence` for what came of it.

        Dimension `dim` of `part` is this rank's tokens of the batch that was split last, by `split_sequence` or by the
        model; the result has as many there as that batch had, padding behind it left out. All ranks along the mesh's
        `sp` call, and all get the same tensor. A loss that each of them works out from it may be sent back: it counts
        once. Without an axis `sp`, and inside `inference()`, `part` comes back as it is.

        Raises `ConfigError` for a tensor of another number of tokens, and `StateError` before any batch was split.
        """
        self._require_open()
        return part if self._sharded.sequence is None else self._sharded.sequence.join(part, dim)

    def give_whole_outputs(self, *, tokens: bool = True) -> None:
        """From now on a model of transformers that is given a whole batch, and splits it along `sp`, returns wholes.

        A loss is that of the whole batch, on every rank along `sp`, and what is by token, in dimension 1, is joined.
        But beside a loss of the model's own, logits and hidden states stay in parts where it is trained, because they
        would take too much memory (see `join_sequence`), and elsewhere if `tokens` is false. All ranks call. Without
        an axis `sp` nothing changes.
        """
        self._require_open()
        self._sharded.progress.whole_outputs.ask(tokens=tokens)

    def mean_over_tokens(self, values: torch.Tensor, counted: torch.Tensor | None = None) -> torch.Tensor:
        """Of one value per token of this rank, a scalar whose mean over ranks is the mean over all tokens that count.

        `values` are such as losses with `reduction="none"`, `counted` is a bool tensor of the same shape (default: all
        count). All ranks along the mesh's axis `sp` call. The mean of each rank's own tokens is the same only if as
        many count on each of them.
        """
        self._require_open()
        if self._sharded.sequence is not None:
            return self._sharded.sequence.mean_over_tokens(values, counted)
        return values.mean() if counted is None else values.masked_fill(~counted, 0.0).sum() / counted.sum()
