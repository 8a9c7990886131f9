"""The first pages of a rank's file: its offers to its neighbours, which have read them, and a counter of changes.

[Note: one writer] Every cell is written by one rank: an offer by its owner, a read mark by its reader. A cell is
written before the counter is advanced, and read after it; taking the lock in between keeps processors with weak
ordering from reordering these.

[Note: slots that are reused] One tag may have several offers, each for another reader (`all_to_all`). A reader that
looks at them may come upon one that is not for it, has been read, and makes room for the next offer just then. So every
slot has a version, which is odd while its offer is written, and what was read counts if the version is still the same.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import numpy as np

from shardwise.comm.small_messages import SHORT_MESSAGE_BYTES
from shardwise.comm.transport.shm.file import Mapping, whole_pages
from shardwise.comm.transport.shm.futex import Futex

NUM_OFFERS = 128
_FIELDS = 8
_WORD_BYTES = 64
_FREE = -1
TO_ALL = -1


class Offer(NamedTuple):
    """Bytes `start` to `start + num_bytes` of a block, to be read by one rank or by all that know the tag; or a short
    message in the table itself, of which only the slot means something."""

    slot: int
    offset: int
    block_bytes: int
    start: int
    num_bytes: int


def offer_table_bytes(num_ranks: int) -> int:
    return whole_pages(_WORD_BYTES + NUM_OFFERS * (_FIELDS * 8 + SHORT_MESSAGE_BYTES + num_ranks))


class OfferTable:
    """The offers of one rank, seen by their owner or a neighbour. Readers are identified by their index among the
    neighbours."""

    def __init__(self, mapped: Mapping, num_ranks: int, *, is_own: bool) -> None:
        self.changes = Futex(mapped)
        table = np.frombuffer(memoryview(mapped), np.int64, NUM_OFFERS * _FIELDS, _WORD_BYTES)
        self._offers = table.reshape(NUM_OFFERS, _FIELDS)
        start = _WORD_BYTES + table.nbytes
        messages = np.frombuffer(memoryview(mapped), np.uint8, NUM_OFFERS * SHORT_MESSAGE_BYTES, start)
        self._messages = messages.reshape(NUM_OFFERS, SHORT_MESSAGE_BYTES)
        marks = np.frombuffer(memoryview(mapped), np.uint8, NUM_OFFERS * num_ranks, start + messages.nbytes)
        self._marks = marks.reshape(NUM_OFFERS, num_ranks)
        self._tags = self._offers[:, 0]
        self._versions = self._offers[:, 6]
        """See [Note: slots that are reused]."""
        self._fence = threading.Lock()
        if is_own:
            self._tags[:] = _FREE
            self._unused = list(range(NUM_OFFERS))

    # -- what the owner does ----------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        return not self._unused

    def put(
        self,
        tag: int,
        to: int,
        offset: int = 0,
        block_bytes: int = 0,
        start: int = 0,
        num_bytes: int = 0,
        message: bytes = b"",
    ) -> int:
        """Write an offer, or a short `message`. `to` is the index of its reader, or `TO_ALL`."""
        slot = self._unused.pop()
        self._versions[slot] += 1
        self._order()
        self._marks[slot] = 0
        self._offers[slot, 1:6] = (to, offset, block_bytes, start, num_bytes)
        if message:
            self._messages[slot] = np.frombuffer(message, np.uint8)
        self._order()
        self._versions[slot] += 1
        self._tags[slot] = tag
        self.notify()
        return slot

    def is_read(self, slot: int, readers: list[int]) -> bool:
        return all(self._marks[slot, reader] for reader in readers)  # numpy takes longer for a list of them

    def clear(self, slot: int) -> None:
        self._tags[slot] = _FREE
        self._unused.append(slot)

    def notify(self) -> None:
        """Something has changed, here or in what this rank writes elsewhere."""
        with self._fence:  # an increment, possibly by several threads of a rank
            self.changes.advance()

    # -- what a neighbour does --------------------------------------------------------------------------

    def find(self, tag: int, reader: int) -> Offer | None:
        """The offer with this tag that `reader` has not read yet."""
        (slots,) = (self._tags == tag).nonzero()  # np.flatnonzero makes five calls of Python functions
        for slot in slots.tolist():
            version = int(self._versions[slot])
            self._order()
            found, to, *where = self._offers[slot, :6].tolist()
            is_read = bool(self._marks[slot, reader])
            self._order()
            is_same = found == tag and version % 2 == 0 and version == self._versions[slot]
            if is_same and to in (TO_ALL, reader) and not is_read:
                return Offer(slot, *where)
        return None

    def message(self, slot: int) -> bytes:
        """The short message that was found there. It stays until all have marked it."""
        message: bytes = self._messages[slot].tobytes()
        return message

    def mark(self, slot: int, reader: int) -> None:
        """`reader` has finished with it. It has to notify through its own table."""
        self._order()
        self._marks[slot, reader] = 1

    def _order(self) -> None:
        with self._fence:
            pass
