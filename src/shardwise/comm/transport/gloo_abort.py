"""Ends the wait for one gloo message. Torch's C++ has a function for that, which it does not show to Python.

The function is called by its exported name. The object is found where pybind11 keeps it, behind the head of the Python
object, and is only used if it says of itself, by its virtual table, that it is what we take it for. A build of torch
that differs in any of this has no such function here, and its waits end when gloo's own timeout does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch
from torch._C._distributed_c10d import Work

_CLASSES = ("N4c10d16ProcessGroupGloo8SendWork", "N4c10d16ProcessGroupGloo8RecvWork")
_TABLE_START = 2 * ctypes.sizeof(ctypes.c_void_p)
"""An object points behind the first two entries of its class's table (Itanium C++ ABI, 2.5.2)."""


def end_wait(work: object) -> bool:
    """Make `work.wait()` return false, now or when it is called. From any thread. Returns whether that is possible.

    The caller keeps `work`, a send or a receive of gloo's, until this returns.
    """
    if type(work) is not Work or not _aborts():
        return False
    address = _pointer_at(id(work) + object.__basicsize__)
    abort = _aborts().get(_pointer_at(address)) if address else None
    if abort is None:
        return False
    abort(address)
    return True


def _pointer_at(address: int) -> int:
    return ctypes.c_void_p.from_address(address).value or 0


@cache
def _aborts() -> dict[int, Callable[[int], None]]:
    """`abort` of each class, by the address in its objects that tells their class."""
    found: dict[int, Callable[[int], None]] = {}
    try:
        library = ctypes.CDLL(torch._C.__file__)  # and what it is linked to
        for name in _CLASSES:
            abort = getattr(library, f"_Z{name}5abortEv")
            abort.argtypes, abort.restype = [ctypes.c_void_p], None
            found[ctypes.addressof(ctypes.c_char.in_dll(library, f"_ZTV{name}E")) + _TABLE_START] = abort
    except (OSError, AttributeError, ValueError):
        return {}
    return found
