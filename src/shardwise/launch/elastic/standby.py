"""The process that takes over when the launcher of an elastic job is killed: `python -m ... FOLDER`.

It waits for the end of its standard input, which only the launcher has open at the other end. A launcher that ends in
order sends a byte first. Until then this process has imported almost nothing: torch is imported when it takes over.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from pathlib import Path

from shardwise.launch.orphans import lock_of
from shardwise.system.job_folder import JOB_LOCK, STANDBY_LOCK

STANDBY = "shardwise.launch.elastic.standby"


def main(folder: Path) -> int:
    """Wait, take over if the launcher was killed, and return the exit status of the job."""
    lock_of(folder / JOB_LOCK, fcntl.LOCK_SH)  # until this process ends
    # one that takes over still has it until its own standby process is there
    lock = lock_of(folder / STANDBY_LOCK, fcntl.LOCK_EX)
    if os.read(sys.stdin.fileno(), 1):
        return 0
    since = time.monotonic()
    from shardwise.launch.elastic.supervise_elastic import take_over

    return take_over(folder, STANDBY, since=since, standby_lock=lock)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
