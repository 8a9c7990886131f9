"""The tests of `tests/device`, in as many processes as the cores bear, and what failed by its first line."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.fresh import ROOT
from benchmarks.results_file import write_result

CORES_PER_PROCESS, MOST_PROCESSES = 2, 8
PLUGINS = ("xdist", "pytest_timeout")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    args = parser.parse_args()
    num = max(1, min(MOST_PROCESSES, (os.cpu_count() or 1) // CORES_PER_PROCESS))
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        # Only the plugins that are needed: others that happen to be installed warn, and warnings are errors here.
        command = [sys.executable, "-m", "pytest", "-q", *(word for name in PLUGINS for word in ("-p", name))]
        command += ["-p", "no:cacheprovider", "-n", str(num), "--dist", "worksteal", "--timeout", "60"]
        command += [f"--junitxml={report}", "--tb=short", "--show-capture=no", str(ROOT / "tests" / "device")]
        env = {**os.environ, "DEVICE": args.device, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_NUM_THREADS": "1"}
        with (args.out.with_suffix(".log")).open("w") as log:
            process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT)
            try:
                process.wait(timeout=args.seconds - 5)
            except subprocess.TimeoutExpired:
                process.terminate()  # pytest writes its report
                try:
                    process.wait(timeout=4)
                except subprocess.TimeoutExpired:
                    process.kill()
        told = told_by(report) if report.exists() else {"rows": [{"name": "pytest", "error": "no report; see the log"}]}
    write_result(args.out, told | {"took_seconds": time.monotonic() - start})
    print({key: value for key, value in told.items() if key != "rows"})
    return process.returncode or 0


def told_by(report: Path) -> dict[str, Any]:
    """What a report in JUnit's format says: counts, and a row for each test that failed."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    rows = []
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        bad = [one for one in case if one.tag in ("failure", "error")]
        kind = "failed" if bad else "skipped" if case.find("skipped") is not None else "passed"
        counts[kind] += 1
        if bad:
            text = bad[0].text or ""
            rows.append({"name": name, "error": bad[0].get("message", "").strip()[:400], "trace": text[-3000:]})
    return {**counts, "rows": rows}


if __name__ == "__main__":
    sys.exit(main())
