"""Real processes that share in sequences, seeded alike: other masks on each, and resumed bit by bit."""

from __future__ import annotations

from pathlib import Path

from launching import launch

from tests.thorough import thorough_only

SCRIPT = Path(__file__).with_name("split_and_save.py")


@thorough_only("slow; smaller tests beside it cover the same code")
def test_dropout_differs_by_rank_and_resumes(tmp_path: Path) -> None:
    whole = launch(SCRIPT, 2, str(tmp_path / "whole"), "4")
    assert whole.returncode == 0, whole.stderr
    lines = whole.stdout.splitlines()
    assert [line.split()[-2:] for line in lines] == [["2", "1"]] * 4  # masks; generators afterwards
    parts = [launch(SCRIPT, 2, str(tmp_path / "parts"), steps) for steps in ("2", "4")]
    assert "".join(part.stdout for part in parts).splitlines() == lines, parts[-1].stderr
