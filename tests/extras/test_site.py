"""The docs as a site: every page is in it, every link and anchor leads somewhere, and nothing is fetched."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FETCHED = re.compile(r"""<(?:script|link|img)[^>]+(?:src|href)=["']?(https?://[^"' >]+)""")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_is_built_without_a_warning_and_opens_without_a_network(tmp_path: Path) -> None:
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    assert built.returncode == 0, built.stdout + built.stderr
    pages = {str(path.relative_to(site).with_suffix("")): path.read_text() for path in site.rglob("*.html")}
    sources = {str(path.relative_to(ROOT / "docs").with_suffix("")) for path in (ROOT / "docs").rglob("*.md")}
    assert sources <= pages.keys()
    for name, page in pages.items():
        assert not FETCHED.findall(page), name
    assert "train_step" in pages["reference/engine"]
    assert "reduce_scatter" in pages["programs"]
    assert (site / "pictures" / "table-to-program.svg").is_file()
