"""Processes for tests that need not import torch: forks of one that has. See `server.py`."""

from __future__ import annotations

import atexit
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from tests.patience import wait_until

HERE = Path(__file__).parent
RANKS_TOO = {"WARM_RANKS": "1"}
"""Environment of a launcher that is to start its ranks so as well."""


_STARTED = "WARM_PYTHON"
"""Environment of a worker: what `python` returned to the process that has started it."""


@cache
def python() -> str:
    """What to start in the place of `sys.executable`, with a script, or `-m` and a module, or `-c` and code.

    The first call starts the server, which lives as long as this process, unless one was started for pytest's workers.
    Where forks cannot be minded, it is `sys.executable`.
    """
    return os.environ.get(_STARTED) or _started()[0]


def python_of_workers() -> str:
    """The same for pytest's workers; `python` in these takes the server that is started with theirs."""
    os.environ[_STARTED], for_workers = _started(for_workers=True)
    return for_workers


def _started(*, for_workers: bool = False) -> tuple[str, str]:
    if not hasattr(os, "pidfd_open"):
        return sys.executable, sys.executable
    folder = Path(tempfile.mkdtemp(prefix="warm-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    sockets, stand_ins = zip(*(_stand_in(folder, name) for name in ("ranks", "workers")), strict=True)
    served = sockets if for_workers else sockets[:1]
    server = subprocess.Popen(
        [sys.executable, str(HERE / "server.py"), sockets[0], stand_ins[0], *served[1:]],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    atexit.register(server.kill)
    wait_until(lambda: all(map(os.path.exists, served)) or server.poll() is not None)
    assert server.poll() is None, "the server of forked processes did not start"
    return stand_ins


def _stand_in(folder: Path, name: str) -> tuple[str, str]:
    """The socket of a server, and what stands for Python and connects to it."""
    socket, stand_in = folder / f"socket-{name}", folder / f"python-{name}"
    words = [sys.executable, "-S", "-E", str(HERE / "client.py"), str(socket)]
    stand_in.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    stand_in.chmod(0o755)
    return str(socket), str(stand_in)
