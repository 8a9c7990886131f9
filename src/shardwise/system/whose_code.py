"""Whose code it is.

[Note: whose code] Errors and reports name the line of the user's script, and what it called of this library. Both are
found in the frames, by the folders of their files, as `logging` and `warnings.warn(skip_file_prefixes=...)` find
callers: a rank that hangs in its own loop, or in a loader, calls nothing of ours that could announce where it is, and
where torch calls our hooks there are torch's frames in between. Only the folder of this whole package counts, no file
or function in it. Past 40 frames that takes 4 us, for each collective outside of a program.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Literal

import torch

from shardwise import errors

_OURS, TORCHS = (f"{Path(str(module.__file__)).parent}{os.sep}" for module in (errors, torch))
_OTHERS = (TORCHS, threading.__file__, contextlib.__file__, "<")
"""Between a user's code and ours: torch, threads and contexts, and what has no file."""
_INSTALLED = {"site-packages", "dist-packages"}
"""Where pip, and Debian's own packages, put libraries, whatever their names."""
Whose = Literal["ours", "the user's", "others'"]


@lru_cache(4096)  # asked for dozens of frames at each message between stages
def whose(file_name: str) -> Whose:
    """Whose the code of a file is, by the name that its frames have."""
    if file_name.startswith(_OURS):
        return "ours"
    return "others'" if file_name.startswith(_OTHERS) else "the user's"


def whose_class(kind: type) -> Whose:
    """Whose a class is, by the file of its module. Those without one are Python's own, or typed by the user."""
    module = sys.modules.get(kind.__module__)
    if module is None or kind.__module__ == "__main__":
        return "the user's"
    return whose(getattr(module, "__file__", None) or "<built in>")


def called_by_script(frame: FrameType) -> FrameType | None:
    """What the user's own code called last, from where `frame` came about, such as `model.parameters()`. `None` if it
    is an installed library that called: what is said of a loop is for who can change it."""
    called, caller = frame, frame.f_back
    while caller is not None and whose(caller.f_code.co_filename) != "the user's":
        called, caller = caller, caller.f_back
    is_installed = caller is None or not _INSTALLED.isdisjoint(Path(caller.f_code.co_filename).parts)
    return None if is_installed else called
