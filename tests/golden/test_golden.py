"""The program of every preset is, line by line, what it was."""

from __future__ import annotations

import difflib

import pytest
from refresh import FOLDER, REFRESH, texts

from shardwise.program import parse, render

GOLDEN = texts()


@pytest.mark.parametrize("file_name", sorted(GOLDEN))
def test_the_program_is_what_it_was(file_name: str) -> None:
    path = FOLDER / file_name
    known = path.read_text(encoding="utf-8") if path.exists() else ""
    if known != GOLDEN[file_name]:
        lines = difflib.unified_diff(
            known.splitlines(), GOLDEN[file_name].splitlines(), f"golden/{file_name}", "now", lineterm=""
        )
        pytest.fail("\n".join([*lines, f"If this is meant: {REFRESH}"]), pytrace=False)


def test_no_golden_text_is_of_a_preset_that_is_gone() -> None:
    assert {path.name for path in FOLDER.glob("*.txt")} == set(GOLDEN)


@pytest.mark.parametrize("file_name", sorted(GOLDEN))
def test_the_text_parses_back(file_name: str) -> None:
    program = parse(GOLDEN[file_name])
    assert parse(render(program)) == program


def test_the_guide_quotes_what_is_so() -> None:
    guide = (FOLDER.parent.parent / "docs" / "programs.md").read_text(encoding="utf-8")
    quoted = guide.split("```\n")[1]
    for part in quoted.split("...\n"):
        assert part in GOLDEN["zero3.txt"]
