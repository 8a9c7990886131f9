"""Runs tests on a machine that stands still now and then: all their processes are stopped for as long as it takes any
deadline to pass, and go on. A test that fails here reads a clock where it should wait for something.

python -m tests.stopped tests/faults/test_ranks.py -x          # arguments are pytest's
SEED=7 STOPS=3 SECONDS=30 python -m tests.stopped ...          # other moments, at most so many, of so many seconds
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil

_LONGEST_RUN_SECONDS = 6.0
"""Between two stops."""


def main(arguments: list[str]) -> int:
    usual = {"SEED": 0, "STOPS": 10, "SECONDS": 20}
    seed, stops, seconds = (int(os.environ.get(name, number)) for name, number in usual.items())
    chance = random.Random(seed)
    tests = subprocess.Popen([sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments])
    for _ in range(stops):
        with contextlib.suppress(subprocess.TimeoutExpired):
            return tests.wait(chance.uniform(0.0, _LONGEST_RUN_SECONDS))
        with stopped(tests.pid) as number:
            print(f"\n{number} processes stand still for {seconds} s", file=sys.stderr)
            time.sleep(seconds)
    return tests.wait()


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[int]:
    """Inside, a process and all that descend from it are stopped; how many they are. A child that was being started
    meanwhile is found in another look."""
    found: dict[int, psutil.Process] = {}
    process = psutil.Process(pid)
    while new := [one for one in (process, *process.children(recursive=True)) if one.pid not in found]:
        for one in new:
            found[one.pid] = one
            with contextlib.suppress(psutil.NoSuchProcess):
                one.send_signal(signal.SIGSTOP)
    try:
        yield len(found)
    finally:
        for one in reversed(found.values()):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.send_signal(signal.SIGCONT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
