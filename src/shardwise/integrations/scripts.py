"""Runs a script like `python script.py ...`, in a process that is already prepared."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path


def run_script(command: Sequence[str]) -> None:
    """Run `[-m] script arguments...` in this process."""
    if command[0] == "-m":
        sys.argv = list(command[1:])
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = list(command)
    if not os.environ.get("PYTHONSAFEPATH"):
        place = Path(command[0]).resolve()
        sys.path[0] = str(place if place.is_dir() else place.parent)
    runpy.run_path(command[0], run_name="__main__")
