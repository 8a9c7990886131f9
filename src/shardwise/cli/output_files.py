"""Files that commands write. What is wrong with a name is said before the work, which may take minutes."""

from __future__ import annotations

from pathlib import Path

from shardwise.errors import ConfigError, ShardwiseError


def require_svg(path: Path | None) -> None:
    """Raises `ConfigError` unless a picture can have this name."""
    if path is not None and path.suffix.lower() != ".svg":
        raise ConfigError(f"--picture is {path}; pictures are .svg files.")


def require_absent(path: Path) -> None:
    """Raises `ConfigError` if there is something: a plan may have been edited since it was written."""
    if path.exists():
        raise ConfigError(f"{path} already exists. Name a new file, or remove it.")


def write(path: Path, text: str) -> None:
    """Raises `ShardwiseError` with the reason if that is impossible."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ShardwiseError(f"{path} cannot be written: {error.strerror}.") from error
