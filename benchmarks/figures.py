"""How a rank hands its figures to the process that started it: one JSON file each, errors included."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Figures = dict[str, Any]


@contextmanager
def write_figures(folder: Path) -> Iterator[Figures]:
    """Fill the dict; on leaving it is written to `folder`, or in its place what was raised."""
    file = figures_file(folder, int(os.environ.get("RANK", "0")))
    figures: Figures = {}
    try:
        yield figures
    except BaseException as error:
        file.write_text(json.dumps({"error": _in_one_line(error)}))
        raise
    file.write_text(json.dumps(figures))


def read_figures(folder: Path, num_ranks: int) -> list[Figures]:
    """By rank; an empty dict for a rank that wrote nothing."""
    files = [figures_file(folder, rank) for rank in range(num_ranks)]
    return [json.loads(file.read_text()) if file.exists() else {} for file in files]


def figures_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"


def _in_one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__
