"""What the kernel tells has names that are any bytes: of processes, which it cuts after 15, and of mapped files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.system import heap
from shardwise.system.machine import is_stopped
from shardwise.system.process_memory import process_memory

NAME = Path("/proc/self/comm")
pytestmark = pytest.mark.skipif(not NAME.exists(), reason="needs Linux")


@pytest.fixture
def cut_name() -> Iterator[None]:
    """This process is called as a script of this name is, which ends within a letter."""
    before = NAME.read_bytes()
    NAME.write_bytes("ü".encode() * 8)
    yield
    NAME.write_bytes(before)


@pytest.mark.usefixtures("cut_name")
def test_a_process_whose_name_is_cut_within_a_letter() -> None:
    with pytest.raises(UnicodeDecodeError):
        Path("/proc/self/status").read_text(encoding="utf-8")
    assert process_memory().now_bytes > 0
    assert not is_stopped(os.getpid())


def test_a_mapped_file_whose_path_is_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maps = tmp_path / "maps"
    maps.write_bytes(b"4000-5000 r-xp 0 0:0 1  /home/J\xf6rg/lib.so\n6000-7000 rw-p 0 0:0 0  [heap]\n")
    monkeypatch.setattr(heap, "MAPS", maps)
    assert heap._start_of_heap() == 0x6000
