"""Weights that a job hands to processes that read them while it trains: samplers, servers, evaluations.

    folder/
      version-00000120/     a Hugging Face folder
      version-00000140/
      LATEST.json           names the newest one that is whole, and the oldest that stays
      readers/NAME.json     which version a reader uses, and which it is reading

How a job makes them is in `publishing.py`. A version appears under its name when all of it is written, and is announced
after that, so a rank that is killed in between leaves readers where they are. Readers need no rank, no network and not
this library: `vllm serve folder/version-...` or `from_pretrained` read what `LATEST.json` names. In /dev/shm the folder
is memory that processes of a host share.

[Note: who may delete] No version is deleted that a reader has said it reads or uses. A reader says so first, and looks
in `LATEST.json` after that whether the version still stays; the job writes there first which version is the oldest that
stays, and looks after that what readers have said. So whichever is first, the other one sees it.
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from shardwise.checkpoint.formats.drafts import remove_draft
from shardwise.checkpoint.write import flush, write_text
from shardwise.errors import CheckpointError, ConfigError, said_by
from shardwise.init.safetensors_headers import Stored, read_head
from shardwise.system.named_folder import given_folder
from shardwise.system.safe_files import inside, is_portable_name, read_json

Tensor = torch.Tensor
_LATEST, _READERS = "LATEST.json", "readers"
_VERSION, _READING = "version", "reading"
_FOLDER = re.compile(r"version-(\d{8,19})")
_DRAFTS = ".writing-version-*", ".replaced-version-*"
_POLL_SECONDS = 0.2


def version_folder(folder: Path, version: int) -> Path:
    return folder / f"version-{version:08d}"


# -- for readers ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Published:
    """A version of the weights in a folder. `path` has them as a Hugging Face folder."""

    version: int
    path: Path

    def acknowledge(self, reader: str) -> None:
        """Say that `reader` uses this version from now on: a name of its own for every process that reads. What it used
        before may be deleted."""
        _say(self.path.parent, reader, {_VERSION: self.version})

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name, mapped into memory and not read: pages come when they are used, and from /dev/shm they
        are those that the job has written, without a copy.

        `model.load_state_dict(found.tensors(), assign=True)` makes a model of them. Whoever writes to a tensor gets a
        copy of the page. They stay when the version is deleted. Raises `CheckpointError` for damaged files.
        """
        return mapped_tensors(self.path)


def mapped_tensors(folder: Path) -> dict[str, Tensor]:
    """Those of its safetensors files, mapped into memory; see `Published.tensors`."""
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        mapped = torch.from_file(str(file), shared=False, size=file.stat().st_size, dtype=torch.uint8)
        found |= {name: _mapped(mapped, stored) for name, stored in read_head(file).items()}
    return found


def _mapped(file: Tensor, stored: Stored) -> Tensor:
    values = file[stored.start : stored.start + stored.num_bytes]
    if stored.start % stored.dtype.itemsize:  # files of other writers need not be aligned
        values = values.clone()
    return values.view(stored.dtype).view(stored.shape)


def published(
    folder: str | Path,
    *,
    after: int = -1,
    reader: str | None = None,
    timeout: float = 0.0,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> Published | None:
    """The newest version that `engine.publish(folder)` has announced, if it is newer than the version `after`.

    For any process, without ranks. Waits up to `timeout` seconds for one, and returns `None` if there is none then. A
    `reader`, a name of its own for every process that reads, says so of itself: the version is not deleted while it
    loads, nor is the one that it has acknowledged before. Raises `CheckpointError` if what is announced is not there.
    """
    home, ends = given_folder(folder), clock() + timeout
    while True:
        found = _latest(home)
        if found is not None and found.version > after:
            if reader is None or _hold(found, reader):
                return found
            continue  # there is a newer one by now
        left = ends - clock()
        if left <= 0:
            return None
        pause(min(_POLL_SECONDS, left))


def _hold(found: Published, reader: str) -> bool:
    """Say that `reader` is reading it; false if the job may not have seen that in time. See [Note: who may delete]."""
    home = found.path.parent
    _say(home, reader, _told(home, reader) | {_READING: found.version})
    oldest = read_json(inside(home, _LATEST)).get("oldest")
    return not isinstance(oldest, int) or found.version >= oldest


def versions_in_use(folder: str | Path) -> dict[str, int]:
    """The version that each reader has acknowledged last, by its name."""
    return {reader: told[_VERSION] for reader, told in _readers(Path(folder)).items() if _VERSION in told}


def unpublish(folder: str | Path) -> None:
    """Remove all versions from `folder`, and what readers have said. For any process, once no job publishes there: to
    give memory in /dev/shm back. Readers keep tensors that they have mapped."""
    home = Path(folder)
    (home / _LATEST).unlink(missing_ok=True)
    _tidy(home)
    for path in home.glob("version-*") if home.is_dir() else ():
        if _FOLDER.fullmatch(path.name):
            shutil.rmtree(path)
    shutil.rmtree(home / _READERS, ignore_errors=True)


def _readers(home: Path) -> dict[str, dict[str, int]]:
    return {path.stem: _told(home, path.stem) for path in sorted((home / _READERS).glob("*.json"))}


def _told(home: Path, reader: str) -> dict[str, int]:
    path = _file_of(home, reader)
    if not path.exists():
        return {}
    told = read_json(inside(path.parent, path.name))
    return {word: told[word] for word in (_VERSION, _READING) if isinstance(told.get(word), int)}


def _say(home: Path, reader: str, what: Mapping[str, int]) -> None:
    path = _file_of(home, reader)
    path.parent.mkdir(exist_ok=True)
    _write(path, what)


def _file_of(home: Path, reader: str) -> Path:
    if not is_portable_name(reader):
        raise ConfigError(f"{reader!r} is no name of a reader: give one of letters, digits, '.', '_' and '-'.")
    return home / _READERS / f"{reader}.json"


def _latest(home: Path) -> Published | None:
    told = None
    while (home / _LATEST).exists():
        before, told = told, read_json(inside(home, _LATEST))
        version, path = told.get("version"), inside(home, told.get("folder"))
        if isinstance(version, int) and _FOLDER.fullmatch(path.name) is not None and path.is_dir():
            return Published(version, path)
        if told == before:  # otherwise a newer one has been announced, and this one deleted
            raise CheckpointError(
                f"{home / _LATEST} announces {path.name!a:.100}, which is not there: somebody has "
                f"removed it. Publish a version again."
            )
    return None


# -- for the job ------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Version:
    """That of one call of `Engine.publish`, which is repeated if a rank is lost in it. By then it may have been
    announced."""

    folder: Path
    number: int
    keep: int
    has_begun: bool = False
    _draft: Path | None = None

    @property
    def path(self) -> Path:
        return version_folder(self.folder, self.number)

    @property
    def is_out(self) -> bool:
        """Whether it, or a newer one, has been announced."""
        newest = _latest(self.folder)
        return newest is not None and newest.version >= self.number

    def begin(self) -> Path:
        """Where to make a draft of it. What a killed job has left is removed."""
        _tidy(self.folder)
        self._draft = self.folder / f".writing-{self.path.name}-{secrets.token_hex(4)}"
        return self._draft

    def abandon(self) -> None:
        """Remove the draft, on the rank that has begun it."""
        if self._draft is not None:
            remove_draft(self._draft)

    def failure(self, error: BaseException) -> str:
        """What is said when it could not be made, because of `error`."""
        return (
            f"Version {self.number} of the weights could not be published in {self.folder}: {said_by(error)} Readers "
            f"stay with the version before."
        )

    def is_announced(self) -> bool:
        """Whether it has been; raises if it cannot be the next one."""
        if self.number < 0 or self.keep < 1:
            raise ConfigError(
                f"publish(version={self.number}, keep={self.keep}): version is at least 0 and keep at least 1."
            )
        newest = _latest(self.folder)
        if newest is None or newest.version < self.number:
            return False
        if newest.version == self.number and self.has_begun:
            return True
        raise CheckpointError(
            f"{self.folder} has version {newest.version}, and readers look for a higher number than that; "
            f"{self.number} is not. Pass version=, or give another folder."
        )

    def announce(self) -> None:
        """Make it, which is whole, the newest one. Delete others, but for the newest `keep` and those of readers; see
        [Note: who may delete]. A higher number was never announced: a job was killed before it could."""
        there = sorted(int(one[1]) for path in self.folder.iterdir() if (one := _FOLDER.fullmatch(path.name)))
        kept = [number for number in there if number <= self.number][-self.keep :]
        _write(self.folder / _LATEST, {"version": self.number, "folder": self.path.name, "oldest": kept[0]})
        kept += [number for told in _readers(self.folder).values() for number in told.values()]
        for number in there:
            if number not in kept:
                shutil.rmtree(version_folder(self.folder, number), ignore_errors=True)


def _tidy(folder: Path) -> None:
    """Remove what a killed job has left."""
    for pattern in _DRAFTS:
        for path in folder.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def _write(path: Path, content: Mapping[str, object]) -> None:
    write_text(path, json.dumps(content) + "\n")
    flush(path.parent)
