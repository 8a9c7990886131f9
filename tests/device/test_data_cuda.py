"""Batches on their way to a GPU."""

from __future__ import annotations

import pytest
import torch

from shardwise.data import Loader, Workers

pytestmark = [pytest.mark.device, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("pin", [None, False])
def test_batches_arrive_whole(workers: int, pin: bool | None) -> None:
    rows = torch.arange(64 * 1024, dtype=torch.float32).view(64, 1024)
    with Loader(rows, batch_rows=8, workers=Workers(workers, device="cuda", pin=pin)) as loader:
        seen = list(loader)
    assert all(batch.device.type == "cuda" for batch in seen)
    assert torch.equal(torch.cat(seen).sort(dim=0).values.cpu(), rows)


def test_workers_pin_what_is_to_be_copied() -> None:
    with Loader(torch.ones(4), batch_rows=2, workers=Workers(pin=True)) as loader:  # no device: pinned, and left there
        assert all(batch.is_pinned() for batch in loader)
