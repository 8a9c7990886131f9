"""Runs a script like `python script.py ...`, in a process that is already prepared, and tells its frames from those
that led to it."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"


def run_script(command: Sequence[str]) -> None:
    """Run `[-m] script arguments...` in this process."""
    if command[0] == "-m":
        sys.argv = list(command[1:])  # runpy puts the module's file at argv[0]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = list(command)
    if not os.environ.get("PYTHONSAFEPATH"):
        # "-m" had put the current directory there; a script gets the directory it is in
        place = Path(command[0]).resolve()
        sys.path[0] = str(place if place.is_dir() else place.parent)
    runpy.run_path(command[0], run_name="__main__")


def scripts_part(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the script's first line on: what follows the last call of runpy to which only this package
    led. `None` if runpy has found no script, and all of `trace` if it was not asked for one."""
    found = trace
    while trace is not None and (_is_runpys(trace) or _is_ours(trace)):
        if _is_runpys(trace):
            found = trace.tb_next
        trace = trace.tb_next
    return found


def _is_runpys(trace: TracebackType) -> bool:
    return trace.tb_frame.f_globals is vars(runpy)


def _is_ours(trace: TracebackType) -> bool:
    """Some of it may run as `__main__`, so its file tells."""
    return trace.tb_frame.f_code.co_filename.startswith(_PACKAGE)
