"""The last second of a rank that its launcher ends because another rank is gone."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType

from shardwise.comm.watch.journal import Journal

_SECONDS = 1.5
"""Time for the watchdog to find out which rank is gone. Open MPI kills after two seconds."""


def take_time_to_say_why(journal: Journal) -> None:
    """After a SIGTERM that nothing else handles, keep this process alive for a moment, so that what it waits for can
    raise.

    `mpirun` ends all ranks when one is killed, usually before the others could find out which. If the fault is known at
    the end of that time and has not been raised, it is printed. No effect outside of the main thread.
    """

    def begin(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        threading.Thread(target=end, args=(128 + number,), name="shardwise-end", daemon=True).start()

    def end(code: int) -> None:
        time.sleep(_SECONDS)
        sys.stdout.flush()
        fault = journal.fault
        if fault is not None and fault.ranks != (journal.rank,) and not hasattr(sys, "last_value"):
            print(fault.error(), file=sys.stderr)
        sys.stderr.flush()
        os._exit(code)

    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, begin)
