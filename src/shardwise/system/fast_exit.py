"""A quick end for a process that has imported torch: it skips Python's last garbage collection.

[Note: the last collection] At exit, Python collects garbage among all objects, several times. With torch imported these
are 300,000 objects: 0.6 s of a core for each rank. `gc.freeze` excludes them. Objects whose reference count drops to
zero are still freed in order; only cycles are not collected, whose `__del__` Python does not guarantee to call at exit
either. Buffered lines of files would be lost, however: the frames of an exception can be in a cycle, and refer to the
script's open files. So these are flushed first.

Extensions made with nanobind look at the very end for what is left of them, and print dozens of lines about it. Triton
3.9 is one, which `torch._dynamo` imports, and so the first optimizer. Where there is one, Python collects as ever.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import itertools


def skip_last_collection() -> None:
    """Skip the last collection of this process. Call it first, so that its exit handler runs last."""
    atexit.register(_end)


def _end() -> None:
    try:
        everything = gc.get_objects()
    except MemoryError:  # a list of some hundred thousand: the process ends as others do, and says what it had to say
        return
    kinds = set(map(type, everything))  # a few thousand
    files = {kind for kind in kinds if issubclass(kind, io.IOBase)}
    for file in itertools.compress(everything, map(files.__contains__, map(type, everything))):
        with contextlib.suppress(Exception):  # closed, or its reader is gone
            file.flush()
    if not any(getattr(kind, "__module__", None) == "nanobind" for kind in kinds):  # that of its functions and types
        gc.freeze()
