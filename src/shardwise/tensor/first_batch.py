"""Checks at the first forward that ranks which share samples were given the same batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from shardwise.comm import Line, require_same_batch
from shardwise.runtime import named_tensors


class FirstBatchCheck:
    """A forward pre-hook of the model, installed on all ranks of the line."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._is_seen = False

    def __call__(self, _: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        if not self._is_seen:
            self._is_seen = True
            require_same_batch(named_tensors(args, kwargs), self._line)
