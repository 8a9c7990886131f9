"""The Dockerfile by hadolint's rules, and the shell in it by those of ShellCheck, which hadolint includes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
HADOLINT = Path(sys.executable).parent / "hadolint"


def hadolint(text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([HADOLINT, "--no-color", "-"], input=text, capture_output=True, text=True, check=False)


def test_hadolint_has_nothing_to_say() -> None:
    text = (ROOT / "Dockerfile").read_text()
    done = hadolint(text)
    assert done.returncode == 0, done.stdout + done.stderr
    worse = hadolint(text.replace("USER 1000:1000", "USER root"))
    assert worse.returncode != 0
    assert "DL3002" in worse.stdout  # the last user should not be root
