"""Results as files: JSON, written anew after every run, so that what is cut off is not lost."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_result(path: Path, result: Mapping[str, Any]) -> Path:
    """Replace the file at `path` in one move."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(json.dumps(result, indent=1) + "\n")
    os.replace(fresh, path)
    return path


def read_result(path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(path.read_text())
    return result
