"""What this machine's memory, disks and links were measured to give, and how fast it computes: a file that `shardwise
bench` and `shardwise calibrate` write.

Read by whoever plans with it. It is of one host; figures are bytes and seconds.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from shardwise.errors import CheckpointError, ConfigError
from shardwise.system.safe_files import read_own_text, replaced

_log = logging.getLogger(__name__)
VERSION = 1
MAX_BYTES = 10**6
Figures = TypeVar("Figures")


@dataclass(frozen=True)
class DiskFigures:
    """One folder's disk, with the settings that were best there."""

    read_bytes_per_second: float
    write_bytes_per_second: float
    depth: int
    block_bytes: int
    is_direct: bool
    date: str


@dataclass(frozen=True)
class HostFigures:
    """Host memory: bytes copied (each is read and written), and elements that AdamW updates, in a second.

    The update reads bf16 gradients and writes bf16 parameters, with fp32 masters and moments.
    """

    copy_bytes_per_second: float
    adam_elements_per_second: float
    num_threads: int
    date: str


@dataclass(frozen=True)
class LinkFigures:
    """Bytes a second between two ranks of this host, and between it and one device; 0 where there is none."""

    shared_memory_bytes_per_second: float
    messages_bytes_per_second: float
    to_device_bytes_per_second: float
    from_device_bytes_per_second: float
    date: str


@dataclass(frozen=True)
class Calibration:
    """`disks` by folder; what has not been measured is not there."""

    host: str = ""
    disks: Mapping[str, DiskFigures] = field(default_factory=dict)
    memory: HostFigures | None = None
    links: LinkFigures | None = None
    machine: str = ""
    """The machine that `hardware` is of: see `system/machine.py`."""
    hardware: Mapping[str, Any] | None = None
    """What `shardwise calibrate` has found: a profile, as `fit/hardware.py` reads it."""

    def disk_at(self, folder: Path | str) -> DiskFigures | None:
        """The figures of the disk below `folder`, which is as for `place_of`: of that folder, or else of the nearest
        above it that was measured."""
        named = place_of(folder)
        real = named.resolve()  # where links lead, as folders are measured
        every = (named, *named.parents, real, *real.parents)
        return next((self.disks[str(at)] for at in every if str(at) in self.disks), None)

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Calibration:
        """Raises `ValueError`, `TypeError` or `KeyError` for what is none."""
        content = json.loads(text)
        if content["version"] != VERSION:
            raise ValueError(f"its version is {content['version']}, this shardwise reads {VERSION}")
        disks = {str(folder): _figures(DiskFigures, figures) for folder, figures in content["disks"].items()}
        memory = None if content["memory"] is None else _figures(HostFigures, content["memory"])
        links = None if content["links"] is None else _figures(LinkFigures, content["links"])
        hardware = content.get("hardware")  # files of `shardwise bench` may be older than `shardwise calibrate`
        if hardware is not None and not isinstance(hardware, dict):
            raise ValueError(f"hardware is {hardware!r:.40}")
        return cls(str(content["host"]), disks, memory, links, str(content.get("machine", "")), hardware)


def place_of(folder: Path | str) -> Path:
    """The absolute path of `folder`, which may have `~` and environment variables, as in plans."""
    return Path(os.path.abspath(os.path.expanduser(os.path.expandvars(folder))))


def default_path() -> Path:
    """`~/.cache/shardwise/calibration-HOST.json`, or below `XDG_CACHE_HOME`."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "shardwise" / f"calibration-{socket.gethostname()}.json"


def read_calibration(path: Path | None = None) -> Calibration:
    """What the file at `path` says; an empty one if there is none. Raises `ConfigError` if it cannot be read."""
    path = path or default_path()
    try:
        return Calibration.from_json(read_own_text(path, MAX_BYTES))
    except FileNotFoundError:
        return Calibration(socket.gethostname())
    except (OSError, ValueError, TypeError, KeyError, AttributeError, CheckpointError) as error:
        raise ConfigError(
            f"{path} is not a calibration that can be read ({error}). Remove it, and run shardwise bench disk, host "
            f"and links again."
        ) from error


def readable_calibration() -> Calibration:
    """That of this machine; an empty one, with a warning, if it cannot be read. For whoever only says more with it."""
    try:
        return read_calibration()
    except ConfigError as error:
        _log.warning("%s", error)
        return Calibration(socket.gethostname())


def write_calibration(calibration: Calibration, path: Path | None = None) -> Path:
    """Replace the file in one move."""
    path = path or default_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as draft:
        draft.write_text(calibration.to_json())
    return path


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _figures(kind: type[Figures], content: Mapping[str, Any]) -> Figures:
    """Figures of one kind, each checked to be of its type."""
    values: dict[str, Any] = {}
    for one in fields(kind):  # type: ignore[arg-type]  # each is a dataclass
        value = content[one.name]
        if one.type == "float" and type(value) is int:  # JSON has one kind of number
            value = float(value)
        if type(value).__name__ != one.type or (one.type in ("int", "float") and value < 0):
            raise ValueError(f"{one.name} is {value!r}")
        values[one.name] = value
    return kind(**values)
