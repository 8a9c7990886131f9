"""Blocks of a rank's file: memory that its neighbours can read in place.

A block is in use as long as a tensor over it lives, or a neighbour has not yet read an offer from it. After that it is
kept, with its pages, for the next request: fresh pages cost several times a copy into warm ones.

[Note: requests of several sizes] In a backward, messages along `sp` and `tp` alternate with gradients of units that are
not equally large. A request takes whatever idle block has room for it, where that block would stay in any case: a small
one, or one of the largest of a rank that keeps some. Else the idle ones are given back before another one is made, so
that no more is held than is counted. When each request had to have about the size of its block, `offload` on two ranks
along `tp` made 18 blocks in a step of two micro-batches and two layers, and each was new pages and a new mapping.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from operator import attrgetter

import numpy as np
import torch

from shardwise.comm.transport.shm.file import Mapping, SharedFile, give_back, whole_pages
from shardwise.program import NUM_KEPT_BLOCKS

Tensor = torch.Tensor
_TINY_BYTES = 2**16
"""Requests of fewer wait for no block, and take the first that is small."""
_SMALL_BYTES = 2**20
"""Blocks of fewer stay. There are as many of them as messages that have not been read."""
_MOST_WASTE = 1.5
"""A larger block that does not stay may be up to this many times larger than requested."""


class Block:
    """Some pages of the file. `pins` counts offers that not all readers have read."""

    def __init__(self, offset: int, mapped: Mapping) -> None:
        self.offset = offset
        self.mapped = mapped
        self.num_bytes = len(mapped)
        self.address = ctypes.addressof(mapped)
        self.pins = 0
        self._array: Callable[[], object | None] = lambda: None
        """A weak reference to what the tensor over it and all its views keep alive."""

    def tensor(self, num_bytes: int) -> Tensor:
        """Its first bytes. The block is in use until this tensor and all its views are gone."""
        array = np.frombuffer(memoryview(self.mapped), np.uint8, num_bytes)
        self._array = weakref.ref(array)
        return torch.from_numpy(array)

    @property
    def has_tensor(self) -> bool:
        return self._array() is not None

    @property
    def is_idle(self) -> bool:
        return self.pins == 0 and self._array() is None


class Arena:
    """The blocks of one rank. The part of the file before `start` has other uses."""

    def __init__(self, file: SharedFile, start: int) -> None:
        self._file = file
        self._end = whole_pages(start)
        self._blocks: list[Block] = []
        self._keeps_largest = False
        """Whether the largest idle blocks stay between steps."""
        self._unused: dict[int, list[int]] = defaultdict(list)
        """Offsets whose pages were given back, by their number of bytes."""

    def take(self, num_bytes: int) -> Tensor:
        """A uint8 tensor of `num_bytes` of undefined content. Raises `OSError` if the system has no more memory."""
        idle = (block for block in self._fitting(num_bytes) if block.is_idle)
        found = next(idle, None) if num_bytes < _TINY_BYTES else _smallest(idle)
        return (found or self._make(num_bytes)).tensor(num_bytes)

    def soon(self, num_bytes: int) -> Block | None:
        """A block that is being read and is worth waiting for instead of creating another one.

        `None` if a block is idle, or there are only few blocks.
        """
        if num_bytes < _TINY_BYTES:
            return None
        fitting = self._fitting(num_bytes)
        if any(block.is_idle for block in fitting):
            return None
        num_large = sum(block.num_bytes >= _TINY_BYTES for block in self._blocks)
        unlent = [block for block in fitting if not block.has_tensor]
        return _smallest(unlent) if num_large >= NUM_KEPT_BLOCKS else None

    def _fitting(self, num_bytes: int) -> list[Block]:
        """Those that have room for it, whether they are idle or not; see [Note: requests of several sizes]."""
        takes_any = self._keeps_largest and num_bytes >= _TINY_BYTES
        longest = math.inf if takes_any else max(_SMALL_BYTES, _MOST_WASTE * num_bytes)
        return [block for block in self._blocks if num_bytes <= block.num_bytes <= longest]

    def rest(self, *, keeps_some: bool) -> None:
        """A step has ended: give back the pages of all idle blocks, or of all but the largest few. Small ones are kept:
        giving back and mapping them again takes longer than what they are used for."""
        self._keeps_largest = keeps_some
        large = [block for block in self._blocks if block.num_bytes >= _SMALL_BYTES and block.is_idle]
        idle = sorted(large, key=lambda block: block.num_bytes)
        for block in idle[:-NUM_KEPT_BLOCKS] if keeps_some else idle:
            self._give_back(block)

    def find(self, tensor: Tensor) -> tuple[Block, int] | None:
        """The block that contains `tensor`, and the byte at which it starts; `None` if it is other memory."""
        address = tensor.data_ptr()
        for block in self._blocks:
            if block.address <= address < block.address + block.num_bytes and block.has_tensor:
                return block, address - block.address
        return None

    def close(self) -> None:
        self._blocks.clear()

    def _make(self, wanted: int) -> Block:
        num_bytes = whole_pages(max(1, wanted))
        if num_bytes >= _SMALL_BYTES:  # the idle ones do not fit, and would only be kept beside it
            for block in [block for block in self._blocks if block.is_idle and block.num_bytes >= _SMALL_BYTES]:
                self._give_back(block)
        unused = self._unused[num_bytes]
        offset = unused.pop() if unused else self._end
        block = Block(offset, self._file.map(offset, num_bytes))
        self._end = max(self._end, offset + num_bytes)
        self._blocks.append(block)
        return block

    def _give_back(self, block: Block) -> None:
        self._blocks.remove(block)
        self._unused[block.num_bytes].append(block.offset)
        give_back(block.mapped)


def _smallest(blocks: Iterable[Block]) -> Block | None:
    return min(blocks, key=attrgetter("num_bytes"), default=None)
