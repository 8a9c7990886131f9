"""How a process that has imported torch ends soon: without looking for garbage a last time.

[Note: the last collection]
Python ends by collecting garbage among all objects, several times. With torch imported these are 300,000:
0.6 s of a core for each rank, when the job is over and others wait for it (8 ranks on 2 cores: 2.5 s). `gc.freeze` hides
them from it. Whatever dies because nothing refers to it any more still dies in order; what is left out are
cycles, whose `__del__` Python does not promise to call at the end either. One thing in them is worth saving,
lines that a file has not written yet: the frames of an exception are such a cycle, and hold the script's files.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io


def end_soon() -> None:
    """Have this process end without the last collection. To be called first: it then happens after all else."""
    atexit.register(_end)


def _end() -> None:
    everything = gc.get_objects()
    # kinds first: a rank has 300,000 things of a few thousand kinds, and to ask a kind is slow
    files = {kind for kind in set(map(type, everything)) if issubclass(kind, io.IOBase)}
    for thing in everything:
        if type(thing) in files:
            with contextlib.suppress(Exception):  # closed, or its reader is gone
                thing.flush()
    gc.freeze()
