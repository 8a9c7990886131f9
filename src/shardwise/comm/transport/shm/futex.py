"""A number in shared memory at which threads of several processes can wait."""

from __future__ import annotations

import ctypes
import platform
import time
from collections.abc import Callable

from shardwise.comm.transport.shm.file import Mapping

_WRAP = 2**32
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_FUTEX_CALLS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
"""The number of futex(2) by machine: Linux, arch/*/syscall*.tbl."""
_NAP_SECONDS = 2e-4
_EVERYBODY = 2**31 - 1


class _Duration(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _find_futex() -> Callable[..., int] | None:
    if platform.system() != "Linux" or platform.machine() not in _FUTEX_CALLS or ctypes.sizeof(ctypes.c_long) != 8:
        return None
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long
    pointer, number = ctypes.c_void_p, ctypes.c_uint32
    syscall.argtypes = (ctypes.c_long, pointer, ctypes.c_int, number, pointer, pointer, number)
    call = _FUTEX_CALLS[platform.machine()]
    return lambda *args: int(syscall(call, *args, None, 0))


_FUTEX = _find_futex()


class Futex:
    """A 32-bit counter that one rank writes and others wait for. It wraps."""

    def __init__(self, mapped: Mapping) -> None:
        """It has the first four bytes of `mapped`."""
        self._cell = ctypes.c_uint32.from_buffer(mapped)
        self._address = ctypes.addressof(self._cell)

    @property
    def value(self) -> int:
        return self._cell.value

    def advance(self) -> None:
        """Increment it, and wake all that wait."""
        self._cell.value = (self._cell.value + 1) % _WRAP
        self.wake()

    def wake(self) -> None:
        """Wake all that wait, without a change."""
        if _FUTEX is not None:
            _FUTEX(self._address, _FUTEX_WAKE, _EVERYBODY, None)

    def wait_while(self, seen: int, seconds: float) -> None:
        """Return when the value is no longer `seen`, when the time is up, or spuriously."""
        if _FUTEX is not None:
            duration = _Duration(int(seconds), int(seconds % 1 * 1e9))
            _FUTEX(self._address, _FUTEX_WAIT, seen, ctypes.byref(duration))
            return
        until = time.monotonic() + seconds
        while self._cell.value == seen and time.monotonic() < until:
            time.sleep(_NAP_SECONDS)
