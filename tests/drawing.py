"""Random numbers where ranks are threads: torch has one generator for all of them."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

TESTS = str(Path(__file__).parent)
_seed = torch.manual_seed
_one_thread = threading.RLock()
_drawing = threading.local()


@contextlib.contextmanager
def drawing() -> Iterator[None]:
    """Where a rank's thread builds its own model. Outside of threads a seed is enough.

    Seeded threads that draw beside each other get parts of one sequence: models that a test takes for equal differed
    in a few of a thousand runs, which twice looked like a fault of the library.
    """
    with _one_thread:
        _drawing.is_ours = True
        try:
            yield
        finally:
            _drawing.is_ours = False


def seed(value: Any) -> torch.Generator:
    """`torch.manual_seed`, for all tests."""
    is_rank = threading.current_thread() is not threading.main_thread()
    if is_rank and not getattr(_drawing, "is_ours", False):
        caller = sys._getframe(1).f_code.co_filename
        assert not caller.startswith(TESTS), "Threads share random numbers: build before, or `with drawing():`"
    return _seed(value)


def guard() -> None:
    """Let tests that seed in a rank's thread fail, rather than now and then those that it disturbs."""
    torch.manual_seed = seed
