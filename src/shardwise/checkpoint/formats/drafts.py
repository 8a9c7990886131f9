"""A folder that appears under its name only when it is complete."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shardwise.checkpoint.write import flush, put_in_place, remove_replaced
from shardwise.errors import CheckpointError, said_by


def refuse_to_overwrite(out: Path) -> None:
    """Raise `CheckpointError` unless `out` is free or an empty folder."""
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise CheckpointError(f"{out} already exists and is not empty. Give another folder, or remove it first.")


@contextmanager
def drafted(out: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A folder beside `out` to write into; it is renamed to `out` at the end, or removed after an error.

    With `overwrite` the existing content stays until then, and is removed.
    """
    if not overwrite:
        refuse_to_overwrite(out)
    draft = out.parent / f".writing-{out.name}"
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir(parents=True)
        yield draft
        swap_in(draft, out)
    except OSError as error:
        raise CheckpointError(f"{out} could not be written: {said_by(error)} What was there is unchanged.") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        remove_replaced(_replaced(out), out)  # Ctrl-C may have come where `swap_in` does so


def remove_draft(draft: Path) -> None:
    """Remove a draft in which other ranks may still write, if it is there.

    It is renamed first. Otherwise a file that appears while others are removed leaves the folder behind; so it finds no
    folder. Of ranks that remove it at once, the last one to do so leaves nothing. Whoever begins the next draft removes
    what a crash leaves, because the name begins the same.
    """
    gone = draft.with_name(f"{draft.name}-removed")
    with suppress(OSError):
        draft.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def swap_in(draft: Path, out: Path) -> None:
    """Let `draft`, a folder beside `out`, appear in its place."""
    flush(draft)
    try:
        put_in_place(draft, out, _replaced(out))
        flush(out.parent)
    finally:
        remove_replaced(_replaced(out), out)


def _replaced(out: Path) -> Path:
    return out.parent / f".replaced-{out.name}"
