"""The rows of one part: each is written before the next is measured, so that what is cut off is not lost."""

from __future__ import annotations

import gc
import importlib.util
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.results_file import write_result
from shardwise import World

Row = dict[str, Any]


@dataclass
class Rows:
    """What one part measures. `out` is written by rank 0 after each row."""

    out: Path
    device: torch.device
    seconds: float
    world: World
    started: float = field(default_factory=time.monotonic)
    rows: list[Row] = field(default_factory=list)

    @property
    def is_real(self) -> bool:
        """Whether there is a device; a rehearsal on the CPU takes tiny sizes, and its figures mean nothing."""
        return self.device.type != "cpu"

    @property
    def seconds_left(self) -> float:
        return self.seconds - (time.monotonic() - self.started)

    def measure(self, name: str, work: Callable[[], Mapping[str, Any]], *, needs_seconds: float = 0.0) -> Row:
        """Add a row with what `work` returns, or with its error: a failure does not stop what comes next.

        All ranks call. It is left out, by name, if less than `needs_seconds` are left on rank 0.
        """
        if self.world.any_rank(self.seconds_left < needs_seconds):
            return self._add({"name": name, "left_out": f"{self.seconds_left:.0f} s were left"})
        start = time.monotonic()
        try:
            row = {"name": name, **work()}
        except Exception as error:
            row = {"name": name, "error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-4000:]}
        row["took_seconds"] = round(time.monotonic() - start, 1)
        self.forget()
        return self._add(row)

    def compare_if_installed(self, name: str, module: str, work: Callable[[], Mapping[str, Any]]) -> Row:
        """`measure`, if there is such a module; a row that says so if not."""
        if importlib.util.find_spec(module) is None:
            return self._add({"name": name, "left_out": f"there is no {module} here, nor a wheel of it in wheels/"})
        return self.measure(name, work)

    def forget(self) -> None:
        """Free what the last row left behind."""
        gc.collect()
        if self.is_real:
            torch.cuda.empty_cache()

    def synchronize(self) -> None:
        if self.is_real:
            torch.cuda.synchronize()

    def _add(self, row: Row) -> Row:
        self.rows.append(row)
        if self.world.rank == 0:
            write_result(self.out, {"rows": self.rows, "took_seconds": time.monotonic() - self.started})
            print({key: value for key, value in row.items() if key != "trace"}, flush=True)
        return row
