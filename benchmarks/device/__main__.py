"""`python -m benchmarks.device`: the parts, one after the other, each in a process and with a time limit of its own.

A part that fails or runs out of time does not stop the next. The last lines of the output are the verdict.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.device.page import page_of, verdict_of
from benchmarks.fresh import GRACE_SECONDS, ROOT, environment
from benchmarks.machine import header
from benchmarks.results_file import read_result, write_result


@dataclass(frozen=True)
class Part:
    """A module of this package, and its share of the time."""

    name: str
    share: float
    on_ranks: bool = True
    """Whether it runs on as many ranks as there are GPUs to be used; otherwise it makes its own processes."""


PARTS = (
    Part("offload", 0.14),
    Part("correctness", 0.24, on_ranks=False),
    Part("scripts", 0.16, on_ranks=False),
    Part("calibrated", 0.12, on_ranks=False),
    Part("several_gpus", 0.06),
    Part("speed", 0.20),
    Part("fp8", 0.12),
    Part("codes", 0.04),
    Part("memory", 0.12),
    Part("larger", 0.18),
    Part("gaps", 0.06),
)
"""Most telling first: what was changed since the last run on a GPU, what is right, what is claimed."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device", description="See docs/gpus.md.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default=None, help="default: cuda if there is one")
    parser.add_argument("--nproc", type=int, default=1, help="GPUs to be used (1)")
    parser.add_argument("--seconds", type=float, default=400, help="for everything (400)")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "device")
    parser.add_argument("--parts", default="", help=f"of {','.join(part.name for part in PARTS)}")
    args = parser.parse_args()
    device = args.device or _found()
    chosen = [part for part in PARTS if not args.parts or part.name in args.parts.split(",")]
    if unknown := set(filter(None, args.parts.split(","))) - {part.name for part in PARTS}:
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(part.name for part in PARTS)}")
    if args.nproc == 1:
        chosen = [part for part in chosen if part.name != "several_gpus" or args.parts]
    args.out.mkdir(parents=True, exist_ok=True)
    whole: dict[str, Any] = {**header(), "device": device, "num_gpus": args.nproc, "parts": {}}
    start, shares = time.monotonic(), sum(part.share for part in chosen)
    for part in chosen:
        left = args.seconds - (time.monotonic() - start)
        seconds = max(10.0, left * part.share / shares)
        shares -= part.share
        print(f"--- {part.name}: at most {seconds:.0f} s", flush=True)
        whole["parts"][part.name] = _run(part, device, args.nproc, seconds, args.out)
        write_result(args.out / "device.json", whole)
        (args.out / "device.md").write_text(page_of(whole))
    whole["took_seconds"] = round(time.monotonic() - start, 1)
    write_result(args.out / "device.json", whole)
    print(verdict_of(whole))
    return int(any(part["status"] != "done" or part["errors"] for part in whole["parts"].values()))


def _found() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _run(part: Part, device: str, num_ranks: int, seconds: float, out: Path) -> dict[str, Any]:
    file = out / f"{part.name}.json"
    file.unlink(missing_ok=True)
    begin = [sys.executable]
    if part.on_ranks:
        threads = max(1, (os.cpu_count() or 1) // num_ranks)
        begin += ["-m", "shardwise", "launch", "--nproc", str(num_ranks), "--threads", str(threads)]
    module = ["benchmarks.device.on_ranks", part.name] if part.on_ranks else [f"benchmarks.device.{part.name}"]
    command = [*begin, "-m", *module, "--device", device, "--out", str(file), "--seconds", str(seconds - 5)]
    env = {**environment(on_cpu=device == "cpu"), "PYTHONUNBUFFERED": "1"}
    start = time.monotonic()
    process = subprocess.Popen(command, env=env, cwd=ROOT)
    try:
        status = "done" if process.wait(timeout=seconds) == 0 else f"exit {process.returncode}"
    except subprocess.TimeoutExpired:
        status = f"stopped after {seconds:.0f} s"
        process.terminate()
        try:
            process.wait(timeout=GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return outcome_of(file, status, time.monotonic() - start)


def outcome_of(file: Path, status: str, seconds: float) -> dict[str, Any]:
    """What a part has left in `file`, whether or not it came to its end."""
    told = read_result(file) if file.exists() else {"rows": []}
    errors = [f"{row['name']}: {row['error']}" for row in told["rows"] if "error" in row]
    if told.get("running"):
        errors.append(f"stopped in the middle of {', '.join(told['running'])}")
    return {"status": status, "seconds": round(seconds, 1), "errors": errors, **told}


if __name__ == "__main__":
    sys.exit(main())
