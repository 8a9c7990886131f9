"""When free pages of a process's heap are returned, and that they are."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import dataclass, field

import pytest

from shardwise.launch.environment import MALLOC_SETTINGS
from shardwise.sharded.engine_report import MemoryReport
from shardwise.system.heap import LEAST_BYTES, FreeHeap
from tests.patience import PATIENCE

MIB = 1 << 20


@dataclass
class Told:
    """A heap of which a test says what is in it; `trim` returns what is free."""

    used: int = 0
    free: int = 0
    resident: int = 0
    looked: list[str] = field(default_factory=list)

    def used_and_free(self) -> tuple[int, int]:
        return self.used, self.free

    def resident_bytes(self) -> int:
        self.looked.append("resident")
        return self.resident

    def trim(self) -> None:
        self.looked.append("trim")
        self.resident = self.used


@pytest.mark.parametrize(
    ("used", "free", "resident", "returned"),
    [
        (50, 4, 54, 0),  # no more than the least
        (50, 5, 55, 5),
        (150, 40, 154, 0),  # most of it was returned before
        (150, 40, 175, 25),
    ],
)
def test_free_pages_are_returned_if_they_are_more_than_the_least(
    used: int, free: int, resident: int, returned: int
) -> None:
    assert LEAST_BYTES == 4 * MIB
    told = Told(used * MIB, free * MIB, resident * MIB)
    heap = FreeHeap(told)
    heap.after_forward()
    assert (heap.num_returns, heap.returned_bytes) == (bool(returned), returned * MIB)
    assert ("trim" in told.looked) == bool(returned)
    heap.after_forward()
    assert heap.num_returns == bool(returned), "nothing is left to return"


def test_the_kernel_is_not_asked_where_little_is_free() -> None:
    told = Told(100 * MIB, 4 * MIB)
    FreeHeap(told).after_forward()
    assert told.looked == []


def test_a_report_says_how_often_and_how_much() -> None:
    kinds = {"param": 1, "grad": 2, "optim": 3, "working": 4}
    report = MemoryReport(kinds, kinds, kinds, heap_returns=3, heap_returned_bytes=12 * MIB)
    assert str(report).splitlines()[-1].split("  ")[0] == "free heap, returned 3 times"
    assert "12.0 MiB" in str(report)
    assert "heap" not in str(MemoryReport(kinds, kinds, kinds))


OF_A_PROCESS = """
import ctypes
from shardwise.system.heap import FreeHeap, Glibc

heap = Glibc.found()
if heap is None:
    raise SystemExit("not Linux with glibc 2.33")
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
heap.trim()
kept = FreeHeap(heap)
before = heap.used_and_free()[0]
blocks = [libc.malloc(96 << 10) for _ in range(256)]  # below every threshold for mmap
for block in blocks:
    ctypes.memset(block, 1, 96 << 10)
taken = heap.used_and_free()[0] - before
for block in blocks[::2]:
    libc.free(block)
kept.after_forward()
stayed = all(ctypes.string_at(block, 96 << 10) == b"\\1" * (96 << 10) for block in blocks[1::2])
print(taken, kept.num_returns, kept.returned_bytes, stayed)
"""


def test_the_heap_of_a_process() -> None:
    """Every other one of many small blocks is freed: their pages lie between live ones, and are returned. In a process
    of its own: what other threads hold, of tests before this one, counts as used."""
    command = [sys.executable, "-c", OF_A_PROCESS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    if "not Linux" in done.stderr:
        pytest.skip(done.stderr)
    taken, num_returns, returned_bytes, stayed = done.stdout.split()
    assert int(taken) >= 24 * MIB
    assert (num_returns, stayed) == ("1", "True")
    assert int(returned_bytes) >= 10 * MIB


NUM_BLOCKS, BLOCK_BYTES = 7, 1000
KEPT_BYTES = f"""
import ctypes
from shardwise.system.heap import Glibc

heap, libc = Glibc(), ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
before = heap.used_and_free()[0]
for block in [libc.malloc({BLOCK_BYTES}) for _ in range({NUM_BLOCKS})]:
    libc.free(block)
print(heap.used_and_free()[0] - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="asks glibc's malloc")
def test_small_blocks_that_a_launched_rank_frees_are_free() -> None:
    """By default a thread keeps seven of each size, which glibc counts as used, and does not join with what is free."""
    theirs = {name: value for name, value in os.environ.items() if name not in MALLOC_SETTINGS}
    kept = []
    for settings in ({}, MALLOC_SETTINGS):
        command = [sys.executable, "-c", KEPT_BYTES]
        done = subprocess.run(
            command, env=theirs | settings, capture_output=True, text=True, timeout=PATIENCE, check=True
        )
        kept.append(int(done.stdout))
    by_default, launched = kept
    assert by_default >= NUM_BLOCKS * BLOCK_BYTES
    assert launched < BLOCK_BYTES


SETTLED = """
import ctypes
from shardwise.system.heap import heap_to_keep_small, keeps_freed_blocks

kept = keeps_freed_blocks()
heap_to_keep_small()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]


def mapped():
    "Those of 4 MiB that come from the system, of two that are allocated one after the other."
    from shardwise.system.heap import _Mallinfo

    libc.mallinfo2.restype = _Mallinfo
    found = 0
    for _ in range(2):
        before = libc.mallinfo2().hblks
        block = libc.malloc(4 << 20)
        found += libc.mallinfo2().hblks - before
        libc.free(block)
    return found


print(kept, keeps_freed_blocks(), mapped())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="asks glibc's malloc")
def test_a_budget_has_blocks_returned_whoever_started_the_rank() -> None:
    """By default the second block comes from the heap, to which the threshold for the first has risen."""
    theirs = {name: value for name, value in os.environ.items() if name not in MALLOC_SETTINGS}

    def told(settings: dict[str, str]) -> list[str]:
        command = [sys.executable, "-c", SETTLED]
        environ = theirs | settings
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=PATIENCE, check=True)
        return done.stdout.split()

    assert told({}) == ["True", "False", "2"]
    assert told(MALLOC_SETTINGS) == ["False", "False", "2"]
    chosen = told({"MALLOC_MMAP_THRESHOLD_": str(16 << 20)})
    assert chosen == ["False", "False", "0"], "what a user has set is kept"


BACKWARDS = """
import ctypes
from shardwise.system.heap import _Mallinfo, heap_for_backwards

heap = heap_for_backwards()
if heap is None:
    print("none")
    raise SystemExit
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
libc.mallinfo2.restype = _Mallinfo
libc.sbrk.argtypes, libc.sbrk.restype = [ctypes.c_ssize_t], ctypes.c_void_p


def mapped(num_bytes):
    "Whether a block comes from the system."
    before = libc.mallinfo2().hblks
    block = libc.malloc(num_bytes)
    found = libc.mallinfo2().hblks - before
    libc.free(block)
    return found


def grown():
    return (libc.sbrk(0) - end) >> 20


end = libc.sbrk(0)
told = [mapped(4 << 20)]
heap.begin()
last = [libc.malloc(7 << 20) for _ in range(4)]
told += [mapped(7 << 20), mapped(16 << 20), grown() > 7]
heap.end()  # the last blocks of a backward are still there
told += [mapped(7 << 20), grown() > 7]
for block in last:
    libc.free(block)
heap.end()
told += [grown() <= 2, mapped(7 << 20)]
print(*map(int, told))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="asks glibc's malloc")
def test_a_backward_takes_large_blocks_from_the_heap_which_is_then_as_large_as_before() -> None:
    def told(settings: dict[str, str]) -> str:
        theirs = {name: value for name, value in os.environ.items() if name not in MALLOC_SETTINGS}
        command = [sys.executable, "-c", BACKWARDS]
        environ = theirs | settings
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=PATIENCE, check=True)
        return done.stdout.strip()

    assert told(MALLOC_SETTINGS) == "1 0 1 1 1 1 1 1"
    assert told({}) == "none"
    assert told(MALLOC_SETTINGS | {"MALLOC_MMAP_THRESHOLD_": str(4 << 20)}) == "none", "what a user has set is kept"
