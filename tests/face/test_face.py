"""The public face, as text: a change to it is a line in a diff, made on purpose.

Write the snapshots anew with

    python tests/face/test_face.py
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path

import pytest

import shardwise
from shardwise.cli.main import main
from shardwise.config import schema_table

SNAPSHOTS = Path(__file__).parent / "snapshots"


def exported_names() -> str:
    """What `from shardwise import ...` offers."""
    return "".join(f"{name}\n" for name in sorted(shardwise.__all__))


def command_help() -> str:
    """What `shardwise --help` prints."""
    page = io.StringIO()
    with contextlib.redirect_stdout(page):
        main(["--help"])
    return page.getvalue()


def plan_fields() -> str:
    """Every field of a plan: path, type, default."""
    rows = schema_table()
    path_width = max(len(path) for path, _, _ in rows)
    type_width = max(len(words) for _, words, _ in rows)
    return "".join(f"{path:<{path_width}}  {words:<{type_width}}  {default!r}\n" for path, words, default in rows)


FACES: dict[str, Callable[[], str]] = {
    "exported_names.txt": exported_names,
    "shardwise_help.txt": command_help,
    "plan_fields.txt": plan_fields,
}


@pytest.mark.parametrize("name", FACES)
def test_the_face_is_as_recorded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    shown, recorded = FACES[name](), (SNAPSHOTS / name).read_text()
    assert shown == recorded, f"{name} changed; if on purpose: python tests/face/test_face.py"


def test_no_snapshot_is_left_over() -> None:
    assert {file.name for file in SNAPSHOTS.iterdir()} == set(FACES)


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "100")
        for name, face in FACES.items():
            (SNAPSHOTS / name).write_text(face())
