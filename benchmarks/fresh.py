"""Fresh processes: every run starts from nothing, in the environment that `shardwise launch` gives all alike."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.figures import Figures, read_figures

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
GRACE_SECONDS = 15


class RunError(Exception):
    """A run that did not end well; one line about it."""


def run_ranks(
    module: str,
    arguments: Sequence[str],
    *,
    num_ranks: int,
    timeout_seconds: float,
    on_cpu: bool = True,
    source: Path = SOURCE,
) -> list[Figures]:
    """Run `python -m module arguments --out FOLDER` on `num_ranks` ranks, a thread each; their figures, by rank. The
    package comes from `source`, all else from this checkout.

    Raises `RunError` if a rank fails, or none has ended after `timeout_seconds`.
    """
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as name:
        folder = Path(name)
        command = [*launcher(num_ranks), "-m", module, *arguments, "--out", name]
        status, said = _run(command, environment(on_cpu=on_cpu, source=source), timeout_seconds)
        figures = read_figures(folder, num_ranks)
    errors = [each["error"] for each in figures if "error" in each]
    if status is None:
        raise RunError(f"not done after {timeout_seconds:.0f} s")
    if status != 0 or not all(figures):
        raise RunError((errors or [*_last_line(said), f"ended with status {status}"])[0])
    return figures


def launcher(num_ranks: int) -> list[str]:
    return [sys.executable, "-m", "shardwise", "launch", "--nproc", str(num_ranks), "--threads", "1"]


def environment(*, on_cpu: bool, source: Path = SOURCE) -> dict[str, str]:
    """This process's, with the checkout importable, and the package from `source`."""
    paths = [str(ROOT), str(source), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    ours = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONWARNINGS": "ignore"}
    if on_cpu:  # DeepSpeed guesses otherwise, and its guess imports more than it has to
        ours["DS_ACCELERATOR"] = "cpu"
    return {**os.environ, **ours}


def _run(command: Sequence[str], env: dict[str, str], timeout_seconds: float) -> tuple[int | None, str]:
    """Status and output; the status is None if time was up, and then nothing is left running."""
    process = subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        said, _ = process.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        _end(process)
        return None, ""
    except BaseException:
        _end(process)
        raise
    return process.returncode, said


def _end(process: subprocess.Popen[str]) -> None:
    """The launcher passes the first signal on to its ranks; the kernel ends them with it if it must be killed."""
    process.terminate()
    try:
        process.communicate(timeout=GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


def _last_line(said: str) -> list[str]:
    return [line.strip() for line in said.splitlines() if line.strip()][-1:]
