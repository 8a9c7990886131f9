"""Measures how fast bytes go between ranks of this host, and between the host and a device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.errors import LaunchError
from shardwise.system.devices import Accelerator, RankDevice, TorchAccelerator
from shardwise.system.disk import pages
from shardwise.system.import_path import python_path

NUM_BYTES, QUICK_BYTES = 2**26, 2**22
REPEATS = 7
TIMEOUT_SECONDS = 120
SHARED, MESSAGES, TO_DEVICE, FROM_DEVICE = "shared memory", "messages over loopback", "host to device", "device to host"


@dataclass(frozen=True)
class LinkRow:
    link: str
    num_bytes: int
    bytes_per_second: float


def measure_links(num_bytes: int = NUM_BYTES, tell: Callable[[LinkRow], None] = lambda _: None) -> list[LinkRow]:
    """Between two ranks by shared memory and by messages; to and from this machine's first device, if it has one."""
    rows = []
    for link, shares in ((SHARED, True), (MESSAGES, False)):
        rows.append(LinkRow(link, num_bytes, between_ranks(num_bytes, shares_memory=shares)))
        tell(rows[-1])
    accelerator = TorchAccelerator.found()
    if accelerator is not None:
        for link, rate in zip((TO_DEVICE, FROM_DEVICE), device_rates(accelerator, num_bytes), strict=True):
            rows.append(LinkRow(link, num_bytes, rate))
            tell(rows[-1])
    return rows


def between_ranks(num_bytes: int, *, shares_memory: bool) -> float:
    """Bytes per second that each of two processes receives in an all-gather of `num_bytes` from each."""
    environment = {"SHARDWISE_SHARED_MEMORY": "01"[shares_memory]}
    module = "shardwise.fit.calibrate.link_rank"
    return float(measured_by_ranks(module, 2, [str(num_bytes), str(REPEATS)], environment))


def measured_by_ranks(module: str, num_ranks: int, arguments: Sequence[str], environment: Mapping[str, str]) -> Any:
    """Start ranks that run `module` with a file and `arguments`; returns the JSON value that rank 0 writes to it."""
    with tempfile.TemporaryDirectory(prefix="shardwise-links-") as folder:
        out = Path(folder) / "figure"
        words = ["launch", "--nproc", str(num_ranks), "-m", module, str(out), *arguments]
        done = subprocess.run(
            [sys.executable, "-m", "shardwise", *words],
            env={**os.environ, **environment, "PYTHONPATH": python_path()},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
        if done.returncode or not out.exists():
            lines = done.stderr.strip().splitlines() or ["no word"]
            why = next((line for line in lines if "failed first" in line), lines[-1])
            raise LaunchError(f"{num_ranks} ranks could not be measured: {why} See shardwise doctor.")
        return json.loads(out.read_text())


def device_rates(accelerator: Accelerator, num_bytes: int) -> tuple[float, float]:
    """Bytes per second of copies from pinned host memory to the first device, and back."""
    device = RankDevice.of(accelerator, 0)
    with device.here():
        host = pages(num_bytes, device)[:num_bytes]
        there = torch.empty(num_bytes, dtype=torch.uint8, device=device.device)
        stream = accelerator.current_stream()

        def rate(to: torch.Tensor, of: torch.Tensor) -> float:
            times = []
            for _ in range(REPEATS + 1):
                stream.synchronize()
                started = time.perf_counter()
                to.copy_(of, non_blocking=True)
                stream.synchronize()
                times.append(time.perf_counter() - started)
            return num_bytes / min(times[1:])

        return rate(there, host), rate(host, there)
