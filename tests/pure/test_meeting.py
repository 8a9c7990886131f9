"""Where ranks meet if rank 0 has the store: one may come while an earlier world's is still there, and ends."""

from __future__ import annotations

import time
from typing import Any

import pytest

from shardwise.comm.bootstrap import LATER_SECONDS, meet_at
from shardwise.errors import CommError

LOST = RuntimeError("Failed to recv, got 0 bytes. Connection was likely closed.")


class Stores:
    """Stores at one address, one after the other, in each of which a meeting ends as `ends` says."""

    def __init__(self, *ends: Any) -> None:
        self.ends = list(ends)
        self.deadlines: list[float] = []

    def open(self, *, deadline: float, is_host: bool) -> Any:
        self.deadlines.append(deadline)
        return f"store {len(self.deadlines)}, {'mine' if is_host else 'of rank 0'}"

    def meet(self, _: Any, *, is_host: bool) -> int:
        end = self.ends.pop(0)
        if isinstance(end, Exception):
            raise end
        return int(end)


def test_a_store_that_ends_is_looked_for_once_more_for_some_seconds() -> None:
    stores, before = Stores(LOST, 1), time.monotonic()
    assert meet_at(stores.open, stores.meet, before + 600, is_host=False) == ("store 2, of rank 0", 1)
    first, second = stores.deadlines
    assert first == before + 600
    assert before + LATER_SECONDS <= second <= time.monotonic() + LATER_SECONDS


@pytest.mark.parametrize(
    ("is_host", "ends"),
    [(False, [LOST, LOST]), (True, [LOST]), (False, [CommError("Rank 1 and rank 2 contradict each other.")])],
)
def test_otherwise_its_end_is_the_end(is_host: bool, ends: list[Exception]) -> None:
    stores = Stores(*ends)
    with pytest.raises(RuntimeError) as raised:
        meet_at(stores.open, stores.meet, time.monotonic() + 600, is_host=is_host)
    assert raised.value is ends[-1]
    assert len(stores.deadlines) == len(ends)


def test_no_longer_than_ranks_wait_for_each_other() -> None:
    stores = Stores(LOST, 1)
    with pytest.raises(RuntimeError, match="Failed to recv"):
        meet_at(stores.open, stores.meet, time.monotonic() + 1, is_host=False)
