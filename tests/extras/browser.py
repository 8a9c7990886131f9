"""A page in headless Chromium: what it logs, and a picture of it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")


def look_at(page: Path, picture: Path) -> list[str]:
    """The lines that `page` logs to its console, and a screenshot in `picture`. Skips without a browser."""
    browser = next(filter(None, map(shutil.which, NAMES)), None)
    if browser is None:
        pytest.skip("needs chromium: apt-get install chromium")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"]
    command += [f"--user-data-dir={picture.parent / 'browser'}", "--host-resolver-rules=MAP * ~NOTFOUND"]
    command += ["--window-size=1000,2400", f"--screenshot={picture}", page.as_uri()]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    return [line for line in run.stderr.splitlines() if "CONSOLE" in line]
