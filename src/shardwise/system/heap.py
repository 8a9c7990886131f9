"""The heap of a process on a CPU: which blocks lie in it, and what is free between them.

[Note: the heap does not shrink] Under the launcher's settings glibc takes blocks below `HEAP_BLOCK_BYTES` from one
heap, and larger ones from the system, to which they return. The heap can return nothing below a live block, and there
always is one near its top: it stays as large as it has been. A GPT of 34 M parameters in bf16, whose blocks of
activations have 512 KiB, held 57 MiB of free heap at the end of its backward, beside all of its gradients; in fp32,
with blocks of 1 MiB, none.

[Note: free heap is returned] Larger blocks, too, are taken from the heap where a free part of it has room for them.
When they are freed, smaller ones come to lie in the hole, and the next larger block needs another one: step by step the
heap grows, to 48 MiB of free pages beside 148 that were in use, of a rank of two stages with four micro-batches in
flight. `malloc_trim` gives whole free pages back wherever they lie, and they come again one page fault at a time: in
two stages (`bench pipeline`, `light`, on an AMD EPYC) 11,000 in a step of 1F1B, where there are 5,500 without, and
16,500 for 5,700 with interleaved stages, for 20 and 32 ms of 286 and 311 of processor time. So it is done where a
budget says that memory is short, and nowhere else: those schedules took 1.11 and 1.18 of the time of torch's where they
take 1.00 and 0.97. It is called where it is worth most, at the end of a forward, when activations are most, and only if
more than `LEAST_BYTES` are free. (Also at the end of a backward, beyond what the next forward takes: twice as many
bytes returned, and the peak no lower.) How many are resident, the kernel is asked (`mincore`, 0.05 ms for a heap of 90
MiB), and only if glibc counts so many free bytes (0.01 ms). docs/planner-accuracy.md has what came of it.

[Note: ranks of other launchers] The launcher's settings of malloc are read when a process starts. Under `torchrun` or
`python script.py` glibc has its defaults: it keeps freed blocks of up to 32 MiB, and so do we
(`memory/releasable.py`). Ranks of two stages that held 137 and 229 MiB under our launcher held 203 and 265 under
torchrun, and 132 and 241 with the thresholds set by `mallopt` (for the caches of threads there is no such call). A step
took 21 and 7 % more processor time with them, for 96,000 and 37,000 page faults instead of 7,000 and 6,000; so that,
too, is done where a budget says that memory is short.

[Note: blocks of a backward] Most blocks that a backward takes are freed again before it ends: gradients, of activations
and of parameters, which are copied to where they are summed. Under the launcher's settings each of 1 MB or more came
from the system, page by page: of 78,000 page faults in a step of a GPT of 34 M parameters (`ddp`, fp32, two ranks of a
virtual Xeon) 50,900. So in a backward blocks below `LARGE_BLOCK_BYTES` come from the heap, one after the other in the
same place (3,700), and behind it the heap's end goes back to where it was, at once; what is free below stays. Peaks are
as before (731 MiB, 729; `zero3` 414, 410), because nothing of this is there in a forward, and what outlives a backward,
sums of gradients, has pages of its own.

Tried, and not kept: to leave the heap as it is. Then activations of the next forward come to lie in it, their memory
stays when they are freed, and the peak is at the end of the backward, at 883 MiB instead of 729. Blocks of 16 MB, too:
glibc does not find one with torch's alignment room in the hole of another one of the same size (`zero3` 445, 410). And
where gradients stay in the tensors that autograd has made ([Note: gradients that stay] in `memory/fresh.py`) they would
lie in the heap behind the backward.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Mapping
from functools import cache
from mmap import PAGESIZE
from pathlib import Path
from typing import Protocol

HEAP_BLOCK_BYTES = 1_000_000
MOST_KEPT_BYTES = 32 << 20
"""The size up to which glibc raises its threshold by itself, as blocks are freed."""
LARGE_BLOCK_BYTES = 8 << 20
"""From which on a backward takes blocks from the system, too."""
KEPT_END_BYTES = 2**30
"""Of the end of the heap, free bytes that stay with the process."""
M_MXFAST, M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = 1, -1, -2, -3  # malloc.h
_TOP_PAD_BYTES = 128 << 10
"""What glibc keeps at the end of the heap by default when it returns the rest."""
_ROUNDED_BYTES = 2 << 20
"""With the tunable `hugetlb=1` it grows and shrinks by multiples of this."""
_LEAST_CHUNK_BYTES = 64
"""A little more than what it keeps there in any case: one byte too many would leave another 2 MiB."""
_LOOKED_BYTES = 128 << 10
"""When a block from 64 KiB is freed, glibc looks whether so much is free at the end that it is to be returned."""
CHOSEN_BY = "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"
LEAST_BYTES = 4 << 20
"""Of free pages, up to which nothing is returned."""
MAPS = Path("/proc/self/maps")


def heap_bytes(num_bytes: int) -> int:
    """Those of a block of `num_bytes` that come from the heap: all or none."""
    return num_bytes if num_bytes < HEAP_BLOCK_BYTES else 0


class Heap(Protocol):
    """Of a process."""

    def used_and_free(self) -> tuple[int, int]:
        """Bytes of its blocks, and between them."""
        ...

    def resident_bytes(self) -> int:
        """In pages that it has of the system."""
        ...

    def trim(self) -> None:
        """Return whole pages between its blocks."""
        ...


class GrowingHeap(Protocol):
    """Of a process, whose end moves."""

    @property
    def end(self) -> int:
        """The address of its end."""
        ...

    def map_from(self, num_bytes: int) -> None:
        """Take blocks of so many bytes, and larger ones, from the system, unless there is room for them here."""
        ...

    def shrink_to(self, end: int) -> bool:
        """Return what is free at its end, beyond `end`; whether that was all."""
        ...


class FreeHeap:
    """Returns free pages of a process's heap; see [Note: free heap is returned]."""

    def __init__(self, heap: Heap) -> None:
        self._heap = heap
        self.num_returns = self.returned_bytes = 0

    def after_forward(self) -> None:
        """Activations are most. Other threads may allocate and free meanwhile."""
        used, free = self._heap.used_and_free()
        if free <= LEAST_BYTES:
            return
        before = self._heap.resident_bytes()
        if before - used <= LEAST_BYTES:
            return
        self._heap.trim()
        self.num_returns += 1
        self.returned_bytes += max(0, before - self._heap.resident_bytes())


class BackwardHeap:
    """Lets backwards take large blocks from the heap; see [Note: blocks of a backward]."""

    def __init__(self, heap: GrowingHeap) -> None:
        self._heap = heap
        self._takes_large = False
        self._end: int | None = None
        """Where the heap ended before the last backward, until it ends there again."""

    def begin(self) -> None:
        """A forward has ended."""
        self._end, self._takes_large = self._heap.end, True
        self._heap.map_from(LARGE_BLOCK_BYTES)

    def end(self) -> None:
        """Its backward is over, or will not come. Call it again later: the last blocks are freed behind the end."""
        if self._takes_large:
            self._takes_large = False
            self._heap.map_from(HEAP_BLOCK_BYTES)
        if self._end is not None and self._heap.shrink_to(self._end):
            self._end = None


def heap_for_backwards() -> BackwardHeap | None:
    """That of this process, if this is its main thread and it has the launcher's settings; else `None`."""
    heap = _of_this_process()
    is_main = threading.current_thread() is threading.main_thread()  # other threads have arenas of their own
    is_launched = os.environ.get("MALLOC_MMAP_THRESHOLD_") == str(HEAP_BLOCK_BYTES)
    is_plain = os.environ.get("MALLOC_TRIM_THRESHOLD_") == str(KEPT_END_BYTES) and not os.environ.get("MALLOC_TOP_PAD_")
    return BackwardHeap(heap) if heap is not None and is_main and is_launched and is_plain else None


def heap_to_keep_small() -> FreeHeap | None:
    """That of this process; `None` where nothing can be returned. Sets glibc's thresholds as the launcher does, if
    nobody has chosen any: see [Note: ranks of other launchers]."""
    heap = _of_this_process()
    if heap is None:
        return None
    if has_defaults(os.environ):
        heap.settle()
    return FreeHeap(heap)


def has_defaults(environ: Mapping[str, str]) -> bool:
    """Whether a process with this environment has glibc's own settings of malloc."""
    return not any(environ.get(name) for name in CHOSEN_BY)


def kept_block_bytes() -> int:
    """The size from which on malloc returns a block that is freed to the system. What freed blocks we keep ourselves
    follows it."""
    threshold = os.environ.get("MALLOC_MMAP_THRESHOLD_", "")
    if threshold.isdecimal():  # glibc, too, ignores others
        return int(threshold)
    heap = _of_this_process()
    return HEAP_BLOCK_BYTES if heap is not None and heap.is_settled else MOST_KEPT_BYTES


def keeps_freed_blocks() -> bool:
    """Whether malloc keeps blocks of any size below `MOST_KEPT_BYTES` once they are freed."""
    return _of_this_process() is not None and kept_block_bytes() >= MOST_KEPT_BYTES


@cache
def _of_this_process() -> Glibc | None:
    return Glibc.found()


class Glibc:
    """The heap of this process, as glibc and the kernel know it.

    Only the main arena is looked at for resident pages, where the thread that computes allocates. Blocks of other
    threads' arenas count as used, so that rather too little is returned than too much.
    """

    def __init__(self) -> None:
        """Raises `AttributeError` or `OSError` where this is not Linux with glibc 2.33 or newer."""
        libc = ctypes.CDLL(None)
        self._mallinfo, self._trim, self._mallopt = libc.mallinfo2, libc.malloc_trim, libc.mallopt
        self._mincore, self._sbrk = libc.mincore, libc.sbrk
        self._mallinfo.restype = _Mallinfo
        self._trim.argtypes = [ctypes.c_size_t]
        self._mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
        self._sbrk.argtypes, self._sbrk.restype = [ctypes.c_ssize_t], ctypes.c_void_p
        self._malloc, self._free = libc.malloc, libc.free
        self._malloc.argtypes, self._malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
        self._free.argtypes = [ctypes.c_void_p]
        self._start = _start_of_heap()
        self.is_settled = False

    @classmethod
    def found(cls) -> Glibc | None:
        """`None` without one."""
        if sys.platform != "linux":
            return None
        try:
            return cls()
        except (AttributeError, OSError):  # musl, or an older glibc
            return None

    def used_and_free(self) -> tuple[int, int]:
        info = self._mallinfo()
        return info.uordblks, info.fordblks

    def resident_bytes(self) -> int:
        num_bytes = self._sbrk(0) - self._start
        pages = ctypes.create_string_buffer(-(-num_bytes // PAGESIZE))
        if self._mincore(self._start, num_bytes, pages):
            return 0  # another thread has just made it smaller
        return PAGESIZE * pages.raw.count(b"\1")

    def trim(self) -> None:
        self._trim(0)

    @property
    def end(self) -> int:
        return int(self._sbrk(0))

    def map_from(self, num_bytes: int) -> None:
        self._mallopt(M_MMAP_THRESHOLD, num_bytes)

    def shrink_to(self, end: int) -> bool:
        """What is free elsewhere stays: see [Note: free heap is returned]."""
        excess = self.end - end
        if excess <= _ROUNDED_BYTES:
            return True
        left = max(0, self._mallinfo().keepcost - excess - _LEAST_CHUNK_BYTES)
        self._mallopt(M_TOP_PAD, left)
        self._mallopt(M_TRIM_THRESHOLD, left)
        self._free(self._malloc(_LOOKED_BYTES))
        self._mallopt(M_TRIM_THRESHOLD, KEPT_END_BYTES)
        self._mallopt(M_TOP_PAD, _TOP_PAD_BYTES)
        return self.end - end <= _ROUNDED_BYTES

    def settle(self) -> None:
        """Set the launcher's thresholds, for blocks that are allocated or freed from here on, by all threads."""
        self.is_settled = True
        for setting, value in ((M_MMAP_THRESHOLD, HEAP_BLOCK_BYTES), (M_TRIM_THRESHOLD, KEPT_END_BYTES), (M_MXFAST, 0)):
            self._mallopt(setting, value)


class _Mallinfo(ctypes.Structure):
    """`struct mallinfo2` of malloc.h."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def _start_of_heap() -> int:
    for line in MAPS.read_text(errors="replace").splitlines():
        if line.endswith("[heap]"):
            return int(line.partition("-")[0], 16)
    raise OSError(f"{os.fspath(MAPS)} has no heap")
