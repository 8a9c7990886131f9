"""Ends the wait for one gloo message. Torch's C++ has a function for that, which it does not show to Python.

The function is called by its exported name. The object is found where pybind11 keeps it, behind the head of the Python
object, and is only used if it says of itself, by its virtual table, that it is what we take it for. A build of torch
that differs in any of this has no such function here, and its waits end when gloo's own timeout does.

[Note: why a symbol of C++] Nothing else ends the wait for a message that has begun to travel when its connection breaks
(torch 2.13; `tests/pure/test_gloo_abort.py` says when this changes). Without this, ranks waited for gloo's timeout, ten
minutes by default, and new groups formed up to 30 s late where that was the timeout. What was considered:

- A timeout for each wait: one that passes closes every connection of the group, so a slow peer would be a dead one.
- Pieces of bounded size, and polling instead of waiting: a wait for a piece that has begun is forgotten just the same,
  and `is_completed()` of a message is false until somebody has waited for it, even when all of it has arrived.
- `Work.abort` and `ProcessGroup.abort`: the first is not shown to Python, the second returns and the waits go on.
- A thread for each wait, left behind when it hangs: gloo could still write into a tensor that has been given up.
- TCP of our own: right, and the only way that needs no such symbol, but a second transport to secure, to tune and to
  keep; worth it when gloo has to go for other reasons.
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
