"""Where processes that this one starts find the package."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

OWN_FOLDER = str(Path(__file__).resolve().parents[2])


def python_path(folders: Iterable[str] = (OWN_FOLDER,)) -> str:
    """A PYTHONPATH that begins with `folders`, by default that of this package, and goes on with this process's own."""
    return os.pathsep.join(filter(None, (*folders, *os.environ.get("PYTHONPATH", "").split(os.pathsep))))
