"""Checks whether ranks can communicate on this machine: two processes add two numbers over loopback.

This is the parent; each rank runs `loopback_rank.py`. On Linux they are forks, so that one import of torch serves all
three: that takes a second or two, and far longer on a busy machine.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, Protocol

from shardwise.cli.rank_words import STARTED
from shardwise.system.import_path import python_path

NUM_RANKS = 2
RANK_PROGRAM = (sys.executable, "-m", "shardwise.cli.loopback_rank")
_NOT_CONNECTED = "the two processes did not connect in time"


@dataclass(frozen=True)
class LoopbackResult:
    """The result: `trouble` is empty if the sum was right."""

    seconds: float
    trouble: str = ""
    is_late: bool = False
    """Whether the processes did not even start in time, which says nothing about the network."""


class Process(Protocol):
    """What is needed of `subprocess.Popen`."""

    returncode: int | None

    def poll(self) -> int | None: ...

    def kill(self) -> None: ...

    def wait(self) -> int: ...


class Fork:
    """A rank that begins with the modules of this process, among them torch."""

    def __init__(self, rank: int, folder: str, timeout_seconds: float, sink: IO[bytes]) -> None:
        arguments = (rank, folder, timeout_seconds, sink.fileno())
        self._process = multiprocessing.get_context("fork").Process(target=_run_rank, args=arguments)
        self._process.start()
        self.returncode: int | None = None

    def poll(self) -> int | None:
        self.returncode = self._process.exitcode
        return self.returncode

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> int:
        self._process.join()
        return self.poll() or 0


def _run_rank(rank: int, folder: str, timeout_seconds: float, sink: int) -> None:
    for descriptor in (1, 2):
        os.dup2(sink, descriptor)
    sys.stdout = sys.stderr = open(sink, "w", closefd=False)  # noqa: SIM115 until the process ends
    module = importlib.import_module("shardwise.cli.loopback_rank")
    sys.exit(module.run_rank(rank, Path(folder), timedelta(seconds=timeout_seconds)))


def run_loopback(timeout_seconds: float, program: Sequence[str] | None = None) -> LoopbackResult:
    """Start both ranks, wait for both, and leave none running. They run `program`; without one they are forks of this
    process, which has imported torch, where the system can do that."""
    if program is None and sys.platform != "linux":
        program = RANK_PROGRAM
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="shardwise-doctor-") as folder:
        outputs = [Path(folder) / f"rank{rank}" for rank in range(NUM_RANKS)]
        ranks: list[Process] = []
        try:
            for rank, output in enumerate(outputs):
                with output.open("wb") as sink:
                    if program is None:
                        ranks.append(Fork(rank, folder, timeout_seconds, sink))
                        continue
                    command = [*program, str(rank), folder, str(timeout_seconds)]
                    ranks.append(subprocess.Popen(command, stdout=sink, stderr=sink, env=_environment()))
            trouble = _wait(ranks, outputs, started + timeout_seconds)
            num_started = sum((Path(folder) / f"{STARTED}{rank}").exists() for rank in range(NUM_RANKS))
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    if trouble == _NOT_CONNECTED and num_started < NUM_RANKS:
        return LoopbackResult(
            time.monotonic() - started, f"two processes did not start within {timeout_seconds:g} s", True
        )
    return LoopbackResult(time.monotonic() - started, trouble)


def _wait(ranks: Sequence[Process], outputs: list[Path], deadline: float) -> str:
    while any(process.poll() is None for process in ranks):
        failed = [rank for rank, process in enumerate(ranks) if process.poll()]
        if failed:
            break
        if time.monotonic() > deadline:
            return _NOT_CONNECTED
        time.sleep(0.02)
    for rank, process in enumerate(ranks):
        if process.poll():
            lines = outputs[rank].read_text(errors="replace").strip().splitlines()
            return f"rank {rank} ended with status {process.returncode}: {lines[-1] if lines else 'no output'}"
    return ""


def _environment() -> dict[str, str]:
    """The environment, in which children import this same package."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()}
