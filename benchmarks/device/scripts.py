"""What users write, on a GPU: loops of other libraries beside the plain loop, the main job, `auto`, samplers, the CLI.

Each script is a job of its own (`script.py`), several at once: they share the device, so nothing is timed here.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from benchmarks.device.script import JOBS
from benchmarks.fresh import ROOT, environment
from benchmarks.results_file import read_result, write_result

AT_ONCE, CORES_PER_JOB = 6, 2
TOLD_LENGTH = 2500
"""Characters kept of what a script that failed has printed."""


@dataclass(frozen=True)
class Script:
    """A command; `{out}` in its words is a folder of its own."""

    name: str
    words: Sequence[str]
    needs: str = ""
    """A module without which it is left out."""


def scripts() -> list[Script]:
    launch = [sys.executable, "-m", "shardwise", "launch", "--nproc", "1"]
    cli = [sys.executable, "-m", "shardwise"]
    example = str(ROOT / "examples" / "stdlib_gpt" / "train.py")
    return [
        Script("the main job", [*launch, example, "--plan", "zero3", "--steps", "30", "--out", "{out}/run"]),
        Script("the main job, offload", [*launch, example, "--plan", "offload", "--steps", "8", "--out", "{out}/run"]),
        *(
            Script(name, [*launch, "-m", "benchmarks.device.script", name, "{out}"], job.needs)
            for name, job in JOBS.items()
        ),
        Script("shardwise doctor", [*cli, "doctor"]),
        Script("shardwise bench links", [*cli, "bench", "links", "--quick", "--calibration", "{out}/c.json"]),
        Script("shardwise bench host", [*cli, "bench", "host", "--quick", "--calibration", "{out}/c.json"]),
    ]


def run(script: Script, out: Path, env: dict[str, str], until: float) -> dict[str, Any]:
    """The row of one script: what it wrote to `row.json` in its folder, or the end of what it printed."""
    if script.needs and importlib.util.find_spec(script.needs) is None:
        return {"name": script.name, "left_out": f"there is no {script.needs} here"}
    if (left := until - time.monotonic()) < 1:
        return {"name": script.name, "left_out": "no time was left"}
    out.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    words = [word.replace("{out}", str(out)) for word in script.words]
    process = subprocess.Popen(
        words, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    try:
        said, _ = process.communicate(timeout=left)
        failed = f"exit {process.returncode}" if process.returncode else ""
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            said, _ = process.communicate(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            said, _ = process.communicate()
        failed = f"stopped after {left:.0f} s"
    (out / "log").write_text(said)
    row: dict[str, Any] = {"name": script.name, "took_seconds": round(time.monotonic() - start, 1)}
    if (file := out / "row.json").exists():
        row |= read_result(file)
    if failed:
        row |= {"error": f"{failed}: {' '.join(said.split())[-240:]}", "trace": said[-TOLD_LENGTH:]}
    elif "apart" not in row:
        row["said"] = said[-TOLD_LENGTH:]
    return row


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    args = parser.parse_args()
    until, rows, lock = time.monotonic() + args.seconds, [], Lock()
    env = environment(on_cpu=args.device == "cpu") | {"OMP_NUM_THREADS": str(CORES_PER_JOB), "HF_HUB_OFFLINE": "1"}
    if args.device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""
    folders = args.out.with_suffix("")

    def one(script: Script) -> None:
        row = run(script, folders / script.name.replace(" ", "-").replace(",", ""), env, until)
        with lock:
            rows.append(row)
            print({key: value for key, value in row.items() if key not in ("trace", "said")}, flush=True)
            write_result(args.out, {"rows": rows})

    several = max(1, min(AT_ONCE, (os.cpu_count() or 1) // CORES_PER_JOB))
    with ThreadPoolExecutor(several) as threads:
        list(threads.map(one, scripts()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
