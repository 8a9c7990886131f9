"""Folders as users name them: in a plan (of a disk, a run, a profile), and in calls."""

from __future__ import annotations

import os
from pathlib import Path

from shardwise.errors import ConfigError

_KINDS = {
    "disk": ("a folder on a local disk", "/scratch/run"),
    "run": ("a folder for the run's record", "runs/first"),
    "profile.folder": ("a folder for traces", "traces"),
}


def folder_of(text: str, key: str = "disk") -> Path:
    """The folder that a plan's `key` names, with `~` and environment variables replaced by what they stand for on this
    host. It is absolute, because the script may go to another folder before anything is written.

    Raises `ConfigError` if that is no folder.
    """
    if not text.strip():
        kind, example = _KINDS[key]
        raise ConfigError(f"The plan's {key} is an empty text. Name {kind}, such as {example}.")
    place = os.path.expanduser(os.path.expandvars(text))
    if place.startswith("~"):
        raise ConfigError(f"The plan's {key} is {text}, and this host has no such user. Write the folder out.")
    if "$" in place:
        raise ConfigError(
            f"The plan's {key} is {text}, and on this host not all of its variables are set. Set them, or write the "
            f"folder out."
        )
    return Path(os.path.abspath(place))


def given_folder(folder: object) -> Path:
    """The folder that a caller has named, with `~` for a home as in a shell: a folder of that name is not meant.

    Raises `ConfigError` for what names none.
    """
    if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):
        raise ConfigError(f"The folder is {folder!r:.60}; give the name of one, such as 'run/checkpoints'.")
    place = os.path.expanduser(os.fspath(folder))
    if not isinstance(place, str) or place.startswith("~"):
        raise ConfigError(f"The folder is {folder!r:.60}, and this host has no such user. Write it out.")
    return Path(place)
