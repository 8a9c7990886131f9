"""Ranks that share a sample have to be given the same one: checked at the first forward."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import nn

from shardwise.errors import ModelError
from shardwise.runtime.hooks import tensors_in
from shardwise.tensor.line import Line


class SameBatch:
    """A forward pre-hook of the model. All ranks of the line are called; it compares checksums of inputs once."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._is_done = False

    def __call__(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        if self._is_done:
            return
        self._is_done = True
        tensors = list(tensors_in((args, kwargs)))
        shapes = [list(tensor.shape) for tensor in tensors]
        mine = zlib.crc32(str(shapes).encode())
        for tensor in tensors:
            values = tensor.detach().to("cpu", copy=True).contiguous()
            mine = zlib.crc32(values.reshape(-1).view(torch.uint8).numpy().tobytes(), mine)
        told = self._line.told(mine.to_bytes(4, "little"))
        for place, checksum in enumerate(told):
            if checksum != told[0]:
                ranks = self._line.group.ranks
                raise ModelError(
                    f"Ranks {ranks[0]} and {ranks[place]} share each sample along {self._line.group.axis}, but were "
                    f"given different batches. Deal them by data axes: sw.data.Loader(..., world=engine.data_ranks), "
                    f"or in a loop of your own by engine.data_ranks, which is (place, number)."
                )
