"""Torch's abort of a single gloo message: used only on what it is for, and only if this build has it."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from shardwise.comm.transport import gloo_abort


def test_it_is_used_for_nothing_else() -> None:
    assert not gloo_abort.end_wait(object())
    assert not gloo_abort.end_wait(dist.Work())


def test_a_build_without_it_has_no_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo_abort, "_CLASSES", ("N4c10d4none",))
    gloo_abort._aborts.cache_clear()
    try:
        assert gloo_abort._aborts() == {}
    finally:
        monkeypatch.undo()
        gloo_abort._aborts.cache_clear()
    assert len(gloo_abort._aborts()) == 2
