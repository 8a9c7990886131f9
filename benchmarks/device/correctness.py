"""The tests of `tests/device`, in as many processes as the cores bear; `test_reports` writes how they go."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.fresh import ROOT
from benchmarks.results_file import read_result, write_result

CORES_PER_PROCESS, MOST_PROCESSES = 2, 8
PLUGINS = ("xdist", "pytest_timeout", "benchmarks.device.test_reports")
SECONDS_TO_END = 5
TESTS_FAILED = 1
"""Pytest's exit status; the rows say which."""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--tests", type=Path, default=ROOT / "tests" / "device")
    args = parser.parse_args()
    num = max(1, min(MOST_PROCESSES, (os.cpu_count() or 1) // CORES_PER_PROCESS))
    start = time.monotonic()
    # Only the plugins that are needed: others that happen to be installed warn, and warnings are errors here.
    command = [sys.executable, "-m", "pytest", "-v", *(word for name in PLUGINS for word in ("-p", name))]
    command += ["-p", "no:cacheprovider"]
    command += ["-n", str(num), "--dist", "worksteal", "--timeout", "60", "--tb=short", "--show-capture=no"]
    command += [f"--told={args.out}", str(args.tests)]
    env = {**os.environ, "DEVICE": args.device, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_NUM_THREADS": "1"}
    stopped: dict[str, str] = {}
    with (args.out.with_suffix(".log")).open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT)
        try:
            process.wait(timeout=args.seconds - SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            stopped = {"status": f"stopped after {args.seconds:.0f} s"}
            process.send_signal(signal.SIGINT)  # upon which pytest ends its log with the tracebacks
            try:
                process.wait(timeout=SECONDS_TO_END - 1)
            except subprocess.TimeoutExpired:
                process.kill()
    told = read_result(args.out) if args.out.exists() else {"rows": [{"name": "pytest", "error": "see the log"}]}
    write_result(args.out, told | stopped | {"took_seconds": time.monotonic() - start})
    print({key: value for key, value in told.items() if key != "rows"})
    return 0 if stopped or process.returncode in (0, TESTS_FAILED) else process.returncode


if __name__ == "__main__":
    sys.exit(main())
