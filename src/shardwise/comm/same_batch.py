"""Checks that ranks that share a sample were given the same one.

[Note: how often] Batches on a CPU are all compared: a checksum and a small message. Reading values on a device waits
for everything that is queued there, so of those the first, second, fourth, eighth and so on are compared.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch

from shardwise.comm.line import Line
from shardwise.errors import DataError, some
from shardwise.system.checksum import crc32

Tensor = torch.Tensor
_MOST_NAMED = 4


class BatchCheck:
    """Compares the batches of the ranks of `line`, whose model is on `device`; see [Note: how often]."""

    def __init__(self, line: Line, device: torch.device) -> None:
        self._line = line
        self._reads_all = device.type == "cpu"
        self._num_seen = 0

    @property
    def is_first(self) -> bool:
        """Whether no batch has come yet."""
        return not self._num_seen

    @property
    def is_silent(self) -> bool:
        """Whether the line sends nothing, so that no batch can be compared, nor counts."""
        return self._line.is_silent

    def see(self, tensors: Mapping[str, Tensor], told: bytes = b"") -> list[bytes]:
        """Take the next batch. All ranks of the line call; see `require_same_batch`. Returns what each has `told`, a
        few bytes that go with the word of the batch; nothing if that is not compared."""
        word = self.word_of(tensors)
        if word is None:
            return []
        words = self._line.words(word + told)
        if any(one[: len(word)] != word for one in words):
            require_same_batch(tensors, self._line)
        return [one[len(word) :] for one in words]

    def word_of(self, tensors: Mapping[str, Tensor]) -> bytes | None:
        """Four bytes that are equal for equal batches, of the next batch; `None` if it is not compared."""
        self._num_seen += 1
        if not self._reads_all and self._num_seen & (self._num_seen - 1):
            return None
        digests = json.dumps({name: _digest(tensor) for name, tensor in tensors.items()})
        return crc32(digests.encode()).to_bytes(4, "little")


def require_same_batch(tensors: Mapping[str, Tensor], line: Line) -> None:
    """Raise `DataError` on all ranks of `line` unless their tensors have the same names, shapes, dtypes and values.

    All ranks of the line call. Blocks, and reads the values.
    """
    mine = {name: _digest(tensor) for name, tensor in tensors.items()}
    messages = [json.loads(message) for message in line.exchange(json.dumps(mine).encode())]
    other = next((place for place, theirs in enumerate(messages) if theirs != messages[0]), None)
    if other is None:
        return
    names = [name for name in {**messages[0], **messages[other]} if messages[0].get(name) != messages[other].get(name)]
    raise DataError(
        f"Ranks {line.ranks[0]} and {line.ranks[other]} share each sample along the mesh axis {line.axis!r}, but were "
        f"given different batches: {some(names, _MOST_NAMED)} differ. Deal batches by data axes: "
        f"sw.data.Loader(..., world=engine.data_ranks), or in a loop of your own by engine.data_ranks, which is "
        f"(place, number)."
    )


def _digest(tensor: Tensor) -> str:
    """A short text, equal for equal values of one shape and dtype."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return f"{tensor.dtype} {list(tensor.shape)} {crc32(data)}"
