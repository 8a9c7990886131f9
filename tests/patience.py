"""How long tests wait for what has to come, and how: the one place that looks again and again."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 300.0
"""Seconds. It only ends tests that hang: beside other work, a machine may take minutes for what takes it a second.
pytest's own limit (`timeout` in pyproject.toml) is longer, so that a test can say what it waited for."""
_LOOK_SECONDS = 0.001, 0.05
"""Between two looks, at first and after a while: what is looked at may be a command."""


def wait_until(is_so: Callable[[], object], told: str | Callable[[], object] = "", seconds: float = PATIENCE) -> None:
    """Return once `is_so()`: for what another process or thread does, and nothing here is told of. Where something
    tells, such as an event or a pipe, wait for that. Fails after so many `seconds`, with what is `told`."""
    until, pause = time.monotonic() + seconds, _LOOK_SECONDS[0]
    while not is_so():
        assert time.monotonic() < until, told if isinstance(told, str) else told()
        time.sleep(pause)
        pause = min(1.5 * pause, _LOOK_SECONDS[1])
