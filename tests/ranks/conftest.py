"""Around tests with threads as ranks: cleanup, as the next runs in the same process, and what load would log."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from shardwise.system.heap import Glibc


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """Destroy torch's default process group after each test: threads share it, so no rank can destroy it."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(autouse=True, scope="session")
def the_heap_is_no_ranks_own() -> Iterator[None]:
    """Threads share it, and after thousands of tests it has so many free blocks that to count them took a tenth of the
    time of these. Ranks that are processes return what is free, in tests/processes, and tests/pure/test_heap.py says
    when."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Glibc, "found", lambda: None)
        yield


@pytest.fixture(autouse=True)
def a_slow_machine_says_nothing(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """That ranks wait for one is logged after a second, which passes on a machine that does other things. Tests here
    count what else is said, and those of such words are in tests/faults."""

    def is_of_the_test(record: logging.LogRecord) -> bool:
        return record.module not in ("watchdog", "startup_barrier")

    caplog.handler.addFilter(is_of_the_test)  # the handler of all tests
    yield
    caplog.handler.removeFilter(is_of_the_test)
