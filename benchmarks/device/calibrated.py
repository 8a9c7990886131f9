"""`shardwise calibrate` on this device, with nothing beside it: what the planner then knows of it."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.fresh import ROOT, environment
from benchmarks.results_file import read_result, write_result


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    args = parser.parse_args()
    row: dict[str, object] = {"name": "shardwise calibrate"}
    with tempfile.TemporaryDirectory(prefix="shardwise-device-") as name:
        file = Path(name) / "calibration.json"
        command = [sys.executable, "-m", "shardwise", "calibrate", "--calibration", str(file)]
        env = environment(on_cpu=args.device == "cpu")
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=args.seconds, check=False
            )
            row["said"] = done.stdout[-3000:]
            if done.returncode:
                row |= {"error": f"exit {done.returncode}: {done.stderr[-300:]}", "trace": done.stderr[-4000:]}
            else:
                row["calibration"] = read_result(file)
        except subprocess.TimeoutExpired:
            row["error"] = f"stopped after {args.seconds:.0f} s"
    print(row.get("said", ""), row.get("error", ""))
    write_result(args.out, {"rows": [row]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
