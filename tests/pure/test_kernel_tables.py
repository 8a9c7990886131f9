"""What the kernel tells has names that are any bytes: of processes, which it cuts after 15, and of mapped files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.observe.profiling import _add_events
from shardwise.system import heap
from shardwise.system.machine import is_stopped
from shardwise.system.process_memory import process_memory
from shardwise.system.telemetry.timeline import TRACKS

NAME = Path("/proc/self/comm")
pytestmark = pytest.mark.skipif(not NAME.exists(), reason="needs Linux")


@pytest.fixture
def cut_name() -> Iterator[None]:
    """This process is called as a script of this name is, which ends within a letter."""
    before = NAME.read_bytes().rstrip(b"\n")  # which is not of the name
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


def test_a_profile_of_a_process_with_such_a_name(tmp_path: Path) -> None:
    """Torch's profiler writes it as it is."""
    profile = tmp_path / "profile.json"
    profile.write_bytes(b'{"traceEvents": [{"name": "process_name", "args": {"name": "t\xc3\n"}}]}')
    _add_events(profile, [{"name": "zero3", "ts": 1.0, "cat": TRACKS[0], "ph": "X"}], rank=0)
    first, *ours = json.loads(profile.read_text(encoding="utf-8"))["traceEvents"]
    assert first["args"]["name"] == "t\ufffd\n"
    assert ours
