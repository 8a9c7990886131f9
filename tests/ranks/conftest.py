"""What tests with threads as ranks leave behind is removed, since the next one runs in the same process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """Threads share torch's default process group, so none of them can destroy it."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
