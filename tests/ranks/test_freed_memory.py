"""Freed memory can be read below Python: this gives NaN and does not crash the process."""

from __future__ import annotations

import gc
import sys
import threading
from pathlib import Path

import pytest
import torch
from twins import assert_same, batches, plain_run, sharded_run, train, work_on_ranks

import shardwise as sw
from shardwise.memory.releasable import Pages, Resized, _System, releasable
from tests import inside
from tests.models import Transformer
from tests.thorough import sampled

CPU = torch.device("cpu")
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets addresses stay while memory goes")
SIZES = [1, 4096, 100_001, 1 << 20, (4 << 20) + 8, (9 << 20) + 4096]


@sampled
@on_linux
@pytest.mark.parametrize("num_bytes", SIZES)
def test_nan_while_it_is_free(num_bytes: int) -> None:
    piece = releasable(num_bytes, CPU)
    assert isinstance(piece, Pages)
    view = piece.tensor[num_bytes // 2 :]
    for value in (1, 2):
        assert piece.tensor.eq(255).all()
        piece.allocate()
        piece.tensor.fill_(value)
        assert view.eq(value).all()
        piece.free()
    assert view.eq(255).all()
    view.zero_()  # lost, and invisible to others
    piece.allocate()
    piece.free()
    assert view.eq(255).all()
    assert releasable(num_bytes, CPU).tensor.eq(255).all()


@on_linux
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_nan_in_every_dtype(dtype: torch.dtype) -> None:
    assert releasable(4096, CPU).tensor.view(dtype).isnan().all()


@on_linux
def test_a_view_keeps_the_addresses() -> None:
    piece = releasable(1 << 20, CPU)
    view = piece.tensor.view(torch.float32)[5:]
    del piece
    gc.collect()
    assert view.isnan().all()


@on_linux
def test_memory_goes_back_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "1000000")
    pieces = [Pages(16 << 20, system) for system in [_System()] for _ in range(4)]
    before = resident_bytes()
    for piece in pieces:
        piece.allocate()
        piece.tensor.fill_(1)
    assert resident_bytes() - before > 60 << 20
    for piece in pieces:
        piece.free()
    assert resident_bytes() - before < 8 << 20


@on_linux
def test_threads_raise_and_free_at_once() -> None:
    failures: list[int] = []

    def work(value: int) -> None:
        pieces = [releasable(65_536 * (1 + index % 3), CPU) for index in range(4)]
        for _ in range(50):
            for piece in pieces:
                piece.allocate()
                piece.tensor.fill_(value)
            if not all(piece.tensor.eq(value).all() for piece in pieces):
                failures.append(value)
            for piece in pieces:
                piece.free()
            if not all(piece.tensor.eq(255).all() for piece in pieces):
                failures.append(value)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_storage_is_resized_where_there_is_nothing_better(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.memory.releasable._pages", lambda: None)
    assert isinstance(releasable(4096, CPU), Resized)
    torch.manual_seed(0)
    model = Transformer(num_blocks=1)
    data = batches(3)
    assert_same(sharded_run(model, data, "zero3", 2, None, shares_memory=False), plain_run(model, data))


@on_linux
def test_a_freed_parameter_reads_as_nan() -> None:
    """As seen by a kernel that takes the address of the storage and checks nothing."""

    def work(engine: sw.Engine) -> bool:
        train(engine, batches(2))
        flats = [flat for unit in inside.units(engine) for flat in unit.flats]
        return all(bool(flat.full.isnan().all()) for flat in flats)

    assert all(work_on_ranks(2, work, "zero3", lambda: Transformer(num_blocks=1), shares_memory=False))


def resident_bytes() -> int:
    text = Path("/proc/self/smaps_rollup").read_text()
    return 1024 * int(next(line.split()[1] for line in text.splitlines() if line.startswith("Anonymous:")))
