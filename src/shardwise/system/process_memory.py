"""This process's memory according to the operating system.

These are whole-process figures, including Python and torch. The engine counts what a plan predicts tensor by tensor;
these figures show the total cost.
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
    """Resident bytes now, and their peak."""

    now_bytes: int
    peak_bytes: int


def process_memory(status: Path = STATUS) -> ProcessMemory:
    """This process's resident memory. Without /proc, the peak is only what psutil reports."""
    try:
        lines = status.read_text(errors="replace").splitlines()  # a process may have any bytes as its name
    except FileNotFoundError:
        return _from_psutil()
    rows = (line.partition(":") for line in lines)
    kilobytes = {name: int(rest.split()[0]) for name, _, rest in rows if name in STATUS_ROWS}
    if "VmRSS" not in kilobytes:
        return _from_psutil()
    now = kilobytes["VmRSS"] * 1024
    return ProcessMemory(now, max(now, kilobytes.get("VmHWM", 0) * 1024))


def trim() -> bool:
    """Return freed heap to the system, so that a baseline does not include it. False without glibc."""
    try:
        return bool(ctypes.CDLL(None).malloc_trim(0))
    except (AttributeError, OSError, TypeError):  # musl and macOS have no malloc_trim; Windows no CDLL(None)
        return False


class PeakOverBaseline:
    """By how much this process's memory grew above the start of the context.

        with PeakOverBaseline() as memory:
            train()
        print(memory.peak_bytes)

    `exact` is false if the system has no peak that can be reset: then an earlier peak may hide the new one, and
    `peak_bytes` is an upper bound.
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
        """Peak bytes over the baseline: so far, and after the context ends, at its end."""
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
