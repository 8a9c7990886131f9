"""A folder that appears when it is complete, and leaves nothing when it does not."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from shardwise.checkpoint.folder import read_note
from shardwise.checkpoint.formats.drafts import remove_draft
from shardwise.checkpoint.write import leave_refusal


def test_a_rank_that_still_writes_leaves_nothing_of_a_removed_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = tmp_path / ".writing-version-1"
    draft.mkdir()
    (draft / "rank-0.bin").write_bytes(b"0")
    rmdir = os.rmdir

    def rmdir_after_a_note(*args: object, **options: object) -> None:
        leave_refusal(draft / "rank-1.bin", OSError("no space is left"))
        rmdir(*args, **options)

    monkeypatch.setattr(os, "rmdir", rmdir_after_a_note)
    remove_draft(draft)
    assert not list(tmp_path.iterdir())
    remove_draft(draft)  # rank 0's thread and its caller may both do so


@pytest.mark.parametrize("fits", [True, False])
def test_a_full_disk_leaves_a_note(fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where the note does not fit: without one the other ranks wait for minutes."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write_nothing(path: Path, _: str) -> None:
        path.touch()
        raise full

    if not fits:
        monkeypatch.setattr(Path, "write_text", write_nothing)
    leave_refusal(tmp_path / "rank-1.bin", full)
    assert [path.name for path in tmp_path.iterdir()] == ["rank-1.json"]
    note = read_note(tmp_path, "rank-1.bin")
    assert note is not None
    assert ("Free some space" if fits else f"Is the file system of {tmp_path.parent} full?") in note["error"]
