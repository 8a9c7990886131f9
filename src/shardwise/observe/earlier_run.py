"""The files of an earlier run in a folder where another run starts anew: they are moved, neither mixed nor lost."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from shardwise.errors import CheckpointError
from shardwise.observe.run_files import FILES, FOLDERS, NOTES
from shardwise.system.safe_files import regular_descriptor

_log = logging.getLogger("shardwise")


@dataclass(frozen=True)
class EarlierRun:
    """What a folder had when this run opened it. Whether it resumes is known later, at its first log."""

    folder: Path
    num_bytes: dict[Path, int]
    """By path."""

    @classmethod
    def find(cls, folder: Path) -> EarlierRun:
        return cls(folder, {path: path.lstat().st_size for path in _files_of(folder)})

    def set_aside(self) -> None:
        """Move it all to `earlier-N` of the folder, a run that `shardwise report` shows. Raises `OSError`."""
        if not self.num_bytes:
            return
        place = next(place for number in count(1) if (place := _made(self.folder / f"earlier-{number}")))
        for path, num_bytes in self.num_bytes.items():
            target = place / path.relative_to(self.folder)
            target.parent.mkdir(exist_ok=True)
            path.rename(target)
            if path.match(NOTES):
                _give_back(target, num_bytes, path)
        _log.warning(
            "%s has an earlier run, which this one does not resume. What it recorded was moved to %s.",
            self.folder,
            place,
        )


def _files_of(folder: Path) -> Iterator[Path]:
    for path in [*(folder / name for name in FILES), *sorted(folder.glob(NOTES))]:
        if path.is_file():
            yield path
    for name in FOLDERS:
        yield from sorted(path for path in (folder / name).glob("*") if path.is_file())


def _made(place: Path) -> Path | None:
    try:
        place.mkdir()
    except FileExistsError:
        return None
    return place


def _give_back(notes: Path, num_bytes: int, path: Path) -> None:
    """Notes after the first `num_bytes` are this run's: a rank may note something before the first log."""
    try:
        descriptor = regular_descriptor(notes, follows_links=False)
    except CheckpointError:  # a link, which was moved as it is
        return
    with os.fdopen(descriptor, "rb") as file:
        file.seek(num_bytes)
        own = file.read()
    if own:
        with path.open("ab") as file:
            file.write(own)
        os.truncate(notes, num_bytes)
