"""Cleanup after tests with threads as ranks, since the next test runs in the same process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """Destroy torch's default process group after each test: threads share it, so no rank can destroy it."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
