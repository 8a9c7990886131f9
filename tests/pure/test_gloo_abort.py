"""Torch's abort of a single gloo message: used only on what it is for, and only if this build has it."""

from __future__ import annotations

import datetime
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from shardwise.comm.transport import gloo_abort
from tests.patience import PATIENCE, wait_until


def test_it_is_used_for_nothing_else() -> None:
    assert not gloo_abort.end_wait(object())
    assert not gloo_abort.end_wait(dist.Work())


def test_a_build_without_it_has_no_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(gloo_abort._aborts()) == 2
    monkeypatch.setattr(gloo_abort, "_CLASSES", ("N4c10d4none",))
    assert gloo_abort._aborts.__wrapped__() == {}


def test_it_is_still_the_only_way() -> None:
    """What [Note: why a symbol of C++] says of torch. If one of these fails, waits can end without the symbol."""
    first, second = _group_of_two()
    sent, arrived = torch.ones(8), torch.zeros(8)
    sending, receiving = first.send([sent], 1, 0), second.recv([arrived], 0, 0)
    wait_until(arrived.all)
    assert not receiving.is_completed(), "torch says when a message has arrived: poll instead of waiting"
    receiving.wait()
    sending.wait()
    assert not hasattr(receiving, "abort"), "torch shows Work.abort to Python: call that"
    with pytest.raises(RuntimeError, match="Timed out"):
        second.recv([arrived], 0, 1).wait(datetime.timedelta(milliseconds=1))
    with pytest.raises(RuntimeError):  # if not: a timeout of one wait leaves connections open, so give every wait one
        second.recv([arrived], 0, 2).wait()


def _group_of_two() -> list[dist.ProcessGroupGloo]:
    """A gloo group of two ranks, both in this process."""
    store, options = dist.HashStore(), dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = datetime.timedelta(seconds=PATIENCE)

    def member(rank: int) -> dist.ProcessGroupGloo:
        return dist.ProcessGroupGloo(store, rank, 2, options)

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(member, range(2)))
