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


@cache
def python() -> str:
    """What to start in the place of `sys.executable`, with a script or `-m` and a module.

    The first call starts the server, which lives as long as this process. Where forks cannot be minded, it is
    `sys.executable`.
    """
    if not hasattr(os, "pidfd_open"):
        return sys.executable
    folder = Path(tempfile.mkdtemp(prefix="warm-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    socket, stand_in = folder / "socket", folder / "python"
    words = [sys.executable, "-S", "-E", str(HERE / "client.py"), str(socket)]
    stand_in.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    stand_in.chmod(0o755)
    server = subprocess.Popen(
        [sys.executable, str(HERE / "server.py"), str(socket), str(stand_in)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    atexit.register(server.kill)
    wait_until(lambda: socket.exists() or server.poll() is not None)
    assert server.poll() is None, "the server of forked processes did not start"
    return str(stand_in)
