"""Weights that a job hands to processes that read them while it trains: samplers, servers, evaluations.

    folder/
      version-00000120/     a Hugging Face folder
      version-00000140/
      LATEST.json           names the newest one that is whole
      readers/NAME.json     which version a reader uses

A version appears under its name when all of it is written, and is announced after that, so a rank that is killed in
between leaves readers where they are. No version is deleted that a reader has said it uses. Readers need no rank, no
network and not this library: `vllm serve folder/version-...` or `from_pretrained` read what `LATEST.json` names.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shardwise.checkpoint.write import flush, write_text
from shardwise.comm import World
from shardwise.errors import CheckpointError, ConfigError, ShardwiseError
from shardwise.system.safe_files import inside, is_portable_name, read_json

_LATEST, _READERS = "LATEST.json", "readers"
_FOLDER = re.compile(r"version-(\d{8,19})")
_POLL_SECONDS = 0.2


def folder_of(folder: Path, version: int) -> Path:
    return folder / f"version-{version:08d}"


@dataclass(frozen=True)
class Published:
    """A version of the weights in a folder. `path` has them as a Hugging Face folder."""

    version: int
    path: Path

    def acknowledge(self, reader: str) -> None:
        """Say that `reader` uses this version from now on: a name of its own for every process that reads."""
        if not is_portable_name(reader):
            raise ConfigError(f"acknowledge({reader!r}): give a name of letters, digits, '.', '_' and '-'.")
        home = self.path.parent / _READERS
        home.mkdir(exist_ok=True)
        _write(home / f"{reader}.json", {"version": self.version})


def published(
    folder: str | Path,
    *,
    after: int = -1,
    timeout: float = 0.0,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> Published | None:
    """The newest version that `engine.publish(folder)` has announced, if it is newer than the version `after`.

    For any process, without ranks. Waits up to `timeout` seconds for one, and returns `None` if there is none then.
    Raises `CheckpointError` if what is announced is not there.
    """
    home, ends = Path(folder), clock() + timeout
    while True:
        found = _latest(home)
        if found is not None and found.version > after:
            return found
        left = ends - clock()
        if left <= 0:
            return None
        pause(min(_POLL_SECONDS, left))


def versions_in_use(folder: str | Path) -> dict[str, int]:
    """The version that each reader has acknowledged last, by its name."""
    found = {}
    for path in sorted((Path(folder) / _READERS).glob("*.json")):
        version = read_json(inside(path.parent, path.name)).get("version")
        if isinstance(version, int):
            found[path.stem] = version
    return found


def publish(world: World, folder: Path, version: int, keep: int, write: Callable[[Path], None]) -> None:
    """Let `write` make a folder of weights, and announce it; see `Engine.publish`. All ranks call."""
    _on_rank_0(world, lambda: _check(folder, version, keep))
    write(folder_of(folder, version))
    _on_rank_0(world, lambda: _announce(folder, version, keep))


def _on_rank_0(world: World, work: Callable[[], None]) -> None:
    """All ranks raise what rank 0 meets."""
    refusal = ""
    if world.rank == 0:
        try:
            work()
        except (ShardwiseError, OSError) as error:
            refusal = str(error)
    answer = world.exchange(refusal.encode(errors="backslashreplace"), "publish")[0].decode()
    if answer:
        raise CheckpointError(answer)


def _check(folder: Path, version: int, keep: int) -> None:
    if version < 0 or keep < 1:
        raise ConfigError(f"publish(version={version}, keep={keep}): version is at least 0 and keep at least 1.")
    newest = _latest(folder)
    if newest is not None and version <= newest.version:
        raise CheckpointError(
            f"{folder} has version {newest.version}, and readers look for a higher number than that; {version} is not. "
            f"Pass version=, or give another folder."
        )


def _announce(folder: Path, version: int, keep: int) -> None:
    """Make `version`, which is whole, the newest one. Delete older ones, but for the newest `keep` and those in use."""
    _write(folder / _LATEST, {"version": version, "folder": folder_of(folder, version).name})
    used = set(versions_in_use(folder).values())
    there = sorted(int(one[1]) for path in folder.iterdir() if (one := _FOLDER.fullmatch(path.name)))
    for old in there[:-keep]:
        if old not in used:
            shutil.rmtree(folder_of(folder, old), ignore_errors=True)


def _latest(folder: Path) -> Published | None:
    if not (folder / _LATEST).exists():
        return None
    told = read_json(inside(folder, _LATEST))
    version, path = told.get("version"), inside(folder, told.get("folder"))
    if not isinstance(version, int) or _FOLDER.fullmatch(path.name) is None or not path.is_dir():
        raise CheckpointError(f"{folder / _LATEST} announces {path.name!a:.100}, which is not there.")
    return Published(version, path)


def _write(path: Path, content: dict[str, object]) -> None:
    write_text(path, json.dumps(content) + "\n")
    flush(path.parent)
