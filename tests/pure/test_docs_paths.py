"""Files and notes that prose names exist: those of the docs' tables, and of docstrings and comments."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "shardwise"
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]
NAMED = re.compile(r"`((?:[\w-]+/)*[\w-]+\.py|(?:[\w-]+/)+)`")
FOLDER = re.compile(r"`((?:[\w-]+/)+[\w*.-]*)`?")
NOTE = re.compile(r"\[Note: (\w[^\]]+)\]")
BEGUN = re.compile(r"(?:^[ \t]*(?:#|\"\"\")?[ \t]*|[.:] )\[Note: ([^\]]+)\](?![.,;:)])", re.MULTILINE)
OF_OTHERS = {"zero_to_fp32.py", "train.py", "FlatParameter"}
"""Files and names of other projects, or of the reader's."""
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
TEXT = re.compile(r'"""[\s\S]*?"""|^[ \t]*#.*', re.MULTILINE)
"""Docstrings and comments, which may be as old as the page."""


def folders_of(row: str) -> list[Path]:
    """Where the files of one row may be: a bare name may follow one with a folder."""
    above = [folder for named in FOLDER.findall(row) for folder in (Path(named), Path(named).parent)]
    return [ROOT, SOURCE, *(top / folder for folder in above for top in (ROOT, SOURCE))]


@pytest.mark.parametrize("page", ["where-a-change-belongs.md", "architecture.md"])
def test_the_files_of_a_table_exist(page: str) -> None:
    """Relative to the root, the package, or the folder of a file named before in the same row."""
    rows = (ROOT / "docs" / page).read_text().splitlines()
    named = [(row, name) for row in rows for name in NAMED.findall(row)]
    assert len(named) > 30
    missing = {name for row, name in named if not any((folder / name).exists() for folder in folders_of(row))}
    assert not missing, f"docs/{page} names files that are not there"


@cache
def files() -> frozenset[str]:
    """All Python files, relative to the root."""
    tops = ("src", "tests", "benchmarks", "examples", "docs")
    return frozenset(path.relative_to(ROOT).as_posix() for top in tops for path in (ROOT / top).rglob("*.py"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_files_that_a_page_names_exist(page: Path) -> None:
    named = {name for name in NAMED.findall(page.read_text()) if name.endswith(".py")} - OF_OTHERS
    assert {name for name in named if not any(f"/{file}".endswith(f"/{name}") for file in files())} == set()


def test_the_names_that_pages_about_the_code_say_are_in_it() -> None:
    """Classes, functions, constants, options: each word of what stands in backquotes, except where it is a path."""
    helpers = [path for path in (ROOT / "tests").rglob("*.py") if not path.name.startswith("test_")]
    files = [*SOURCE.rglob("*.py"), *helpers, ROOT / "Makefile", ROOT / "pyproject.toml"]
    known = set(re.findall(r"\w+", "".join(TEXT.sub("", path.read_text()) for path in files))) | OF_OTHERS
    pages = [ROOT / "docs" / f"{name}.md" for name in ("where-a-change-belongs", "architecture", "decisions")]
    code = [span for page in pages for span in re.findall(r"`([^`]+)`", FENCE.sub("", page.read_text()))]
    spans = [span for span in code if "/" not in span and ".py" not in span]
    named = {name for span in spans for name in re.findall(r"[A-Za-z_]\w{2,}", span)}
    assert len(named) > 100
    assert named - known == set()


def test_notes_that_are_referred_to_exist() -> None:
    """A title with a reference and no note is one that was renamed in one place."""
    texts = [path.read_text() for path in [*SOURCE.rglob("*.py"), *(ROOT / "tests").rglob("*.py"), *PAGES]]
    titles = [" ".join(found.replace("#", " ").split()) for text in texts for found in NOTE.findall(text)]
    begun = {" ".join(found.replace("#", " ").split()) for text in texts for found in BEGUN.findall(text)}
    assert len(begun) > 50
    assert {title for title in titles if title not in begun} == set()
