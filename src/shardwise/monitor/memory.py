"""What the operating system says this process holds.

These are whole-process figures, with Python and torch in them. What a plan promised is counted by the
engine, tensor by tensor; here one sees what that costs in the end.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import psutil

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
STATUS_ROWS = ("VmRSS", "VmHWM")
RESET_PEAK = "5"  # proc(5): writing 5 sets VmHWM back to the present VmRSS


@dataclass(frozen=True)
class ProcessMemory:
    """Resident bytes now, and the most there have been."""

    now_bytes: int
    peak_bytes: int


def process_memory(status: Path = STATUS) -> ProcessMemory:
    """This process's resident memory. Where there is no /proc, the peak is only what psutil can tell."""
    try:
        lines = status.read_text().splitlines()
    except FileNotFoundError:
        return _from_psutil()
    rows = (line.partition(":") for line in lines)
    kilobytes = {name: int(rest.split()[0]) for name, _, rest in rows if name in STATUS_ROWS}
    if "VmRSS" not in kilobytes:
        return _from_psutil()
    now = kilobytes["VmRSS"] * 1024
    return ProcessMemory(now, max(now, kilobytes.get("VmHWM", 0) * 1024))


def trim() -> bool:
    """Give freed heap back to the system, so that a baseline is not flattered by it. False without glibc."""
    try:
        return bool(ctypes.CDLL(None).malloc_trim(0))
    except (AttributeError, OSError, TypeError):  # musl and macOS have no malloc_trim; Windows no CDLL(None)
        return False


class PeakOverBaseline:
    """How much more than at the start this process came to hold.

        with PeakOverBaseline() as memory:
            train()
        print(memory.peak_bytes)

    `exact` is false where the system keeps no peak that can be reset: then a peak from before the start
    may hide ours, and `peak_bytes` is an upper bound.
    """

    def __init__(self) -> None:
        self.baseline_bytes = 0
        self.exact = False
        self._final_bytes: int | None = None

    def __enter__(self) -> PeakOverBaseline:
        trim()
        self._final_bytes = None
        self.exact = _reset_peak()
        self.baseline_bytes = process_memory().now_bytes
        return self

    def __exit__(self, *_: object) -> None:
        self._final_bytes = self.peak_bytes

    @property
    def peak_bytes(self) -> int:
        """Bytes over the baseline, at most: so far, and after the `with` what it was at its end."""
        if self._final_bytes is not None:
            return self._final_bytes
        return max(0, process_memory().peak_bytes - self.baseline_bytes)


def _reset_peak() -> bool:
    try:
        CLEAR_REFS.write_text(RESET_PEAK)
    except OSError:
        return False
    return True


def _from_psutil() -> ProcessMemory:
    info = psutil.Process().memory_info()
    return ProcessMemory(info.rss, max(info.rss, getattr(info, "peak_wset", 0)))
