"""Checks whether processes of this machine can share memory as ranks do."""

from __future__ import annotations

import os
import subprocess
import sys

_WORD = b"shardwise"
_READER = f"import sys; sys.stdout.buffer.write(open(sys.argv[1], 'rb').read({len(_WORD)}))"


def obstacle_to_sharing() -> str:
    """Why another process cannot read an unnamed file of this one; "" if it can."""
    if not hasattr(os, "memfd_create"):
        return "this system has no memfd"
    try:
        descriptor = os.memfd_create("shardwise-doctor")
    except OSError as error:
        return str(error)
    try:
        os.write(descriptor, _WORD)
        place = f"/proc/{os.getpid()}/fd/{descriptor}"
        reader = subprocess.run(
            [sys.executable, "-S", "-c", _READER, place], capture_output=True, check=False, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    finally:
        os.close(descriptor)
    if reader.stdout == _WORD:
        return ""
    lines = reader.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "another process could not read it"
