"""The heap of a process on a CPU: which blocks lie in it, and what is free between them.

[Note: the heap does not shrink] Under the launcher's settings glibc takes blocks below `HEAP_BLOCK_BYTES` from one
heap, and larger ones from the system, to which they return. The heap can return nothing below a live block, and there
always is one near its top: it stays as large as it has been. A GPT of 34 M parameters in bf16, whose blocks of
activations have 512 KiB, held 57 MiB of free heap at the end of its backward, beside all of its gradients; in fp32,
with blocks of 1 MiB, none.

[Note: free heap is returned] Larger blocks, too, are taken from the heap where a free part of it has room for them.
When they are freed, smaller ones come to lie in the hole, and the next larger block needs another one: step by step the
heap grows, to 48 MiB of free pages beside 148 that were in use, of a rank of two stages with four micro-batches in
flight. `malloc_trim` gives whole free pages back wherever they lie, and costs what it takes to get them again, a page
fault for each. So it is called where it is worth most, at the end of a forward, when activations are most, and only if
free pages are more than `FREE_SHARE` of what a step has in use. (Also at the end of a backward, beyond what the next
forward takes: twice as many bytes returned, and the peak no lower.) How many are resident, the kernel is asked
(`mincore`, 0.05 ms for a heap of 90 MiB), and only if glibc counts so many free bytes (0.01 ms).
docs/planner-accuracy.md has what came of it.

By glibc's defaults the heap has most blocks of up to 32 MiB, and nearly all of it is free at some time of a step. There
37,000 page faults a step where 14,000 had been took 7 % of the processor time of `zero2` (GPT of 34 M parameters), and
saved nothing: 917 MB at the peak beside 905, with a load of 8. So it is left alone there. With the launcher's settings
that model has nothing to return: `zero2` and `zero3` took as long with and without, within 5 % that change from run to
run, and as much memory. With thresholds of 4 MB the peak of `zero3` was 698 MB beside 741.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping
from mmap import PAGESIZE
from pathlib import Path
from typing import Protocol

HEAP_BLOCK_BYTES = 1_000_000
FREE_SHARE = 0.2
"""Of the bytes that a step has in use of the heap, beyond those between steps, so many may be free beside them."""
LEAST_BYTES = 4 << 20
"""Of free pages, below which nothing is returned."""
MAPS = Path("/proc/self/maps")


LIMIT = "MALLOC_MMAP_THRESHOLD_"
"""Set where it is known which blocks lie in the heap, as by the launcher."""


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


class FreeHeap:
    """Returns free pages of a process's heap; see [Note: free heap is returned]."""

    def __init__(self, heap: Heap, share: float = FREE_SHARE) -> None:
        """`share`: see `FREE_SHARE`. To be made between steps."""
        self._heap, self._share = heap, share
        self.num_returns = self.returned_bytes = 0
        self._resting = 0
        self.rest()

    def rest(self) -> None:
        """No step is under way."""
        self._resting, _ = self._heap.used_and_free()

    def after_forward(self) -> None:
        """Activations are most. Other threads may allocate and free meanwhile."""
        used, free = self._heap.used_and_free()
        allowed = max(LEAST_BYTES, int(self._share * (used - self._resting)))
        if free <= allowed:
            return
        before = self._heap.resident_bytes()
        if before - used <= allowed:
            return
        self._heap.trim()
        self.num_returns += 1
        self.returned_bytes += max(0, before - self._heap.resident_bytes())


def heap_to_keep_small(*, has_budget: bool, environ: Mapping[str, str] = os.environ) -> FreeHeap | None:
    """That of this process, unless its free pages may stay. With a budget for memory no more than the least stays free
    in it, by whatever settings."""
    heap = Glibc.found()
    if heap is None or not (has_budget or LIMIT in environ):
        return None
    return FreeHeap(heap, share=0.0 if has_budget else FREE_SHARE)


class Glibc:
    """The heap of this process, as glibc and the kernel know it.

    Only the main arena is looked at for resident pages, where the thread that computes allocates. Blocks of other
    threads' arenas count as used, so that rather too little is returned than too much.
    """

    def __init__(self) -> None:
        """Raises `AttributeError` or `OSError` where this is not Linux with glibc 2.33 or newer."""
        libc = ctypes.CDLL(None)
        self._mallinfo, self._trim = libc.mallinfo2, libc.malloc_trim
        self._mincore, self._sbrk = libc.mincore, libc.sbrk
        self._mallinfo.restype = _Mallinfo
        self._trim.argtypes = [ctypes.c_size_t]
        self._mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
        self._sbrk.argtypes, self._sbrk.restype = [ctypes.c_ssize_t], ctypes.c_void_p
        self._start = _start_of_heap()

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
    for line in MAPS.read_text().splitlines():
        if line.endswith("[heap]"):
            return int(line.partition("-")[0], 16)
    raise OSError(f"{os.fspath(MAPS)} has no heap")
