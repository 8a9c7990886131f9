"""The text: the code of Python's own standard library, found on this machine. Nothing is downloaded.

Without docstrings and comments: two minutes of a small model are enough for code, not for English beside it.
"""

from __future__ import annotations

import hashlib
import os
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardwise.data import PackedRows
from shardwise.errors import ConfigError

SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"}
SKIPPED_FOLDERS |= {"encodings", "pydoc_data"}  # tables
PROSE = re.compile(
    rb"^[ \t]*[rRbBuU]*(\"\"\"|''')[\s\S]*?\1[ \t]*(?:#.*)?\n"  # strings that begin a line, as docstrings do
    rb"|^[ \t]*#.*\n"
    rb"|[ \t]+#[^'\"\n]*$",  # a comment after code, unless the sign may be in a string
    re.MULTILINE,
)
VALIDATION_SHARE = 0.05


@dataclass(frozen=True)
class Corpus:
    """Two texts, split by file: no file is in both."""

    train: bytes
    validation: bytes

    @classmethod
    def of_folder(cls, folder: Path, max_bytes: int) -> Corpus:
        """The code of the `*.py` below `folder` in sorted order, up to `max_bytes`; a file's name decides its side."""
        train, validation = bytearray(), bytearray()
        for name in sorted(_python_files(folder)):
            room = max_bytes - len(train) - len(validation)
            side = validation if _is_validation(name) else train
            side += code_of((folder / name).read_bytes())[:room]
        if not train or not validation:
            raise ConfigError(
                f"{folder} has too few *.py files to learn from and to validate on. "
                f"Give a folder with more of them: --text FOLDER."
            )
        return cls(bytes(train), bytes(validation))


def code_of(source: bytes) -> bytes:
    """`source` without docstrings and comments, and with two blank lines at most."""
    return re.sub(rb"\n{3,}", b"\n\n\n", PROSE.sub(b"", source))


def pieces(tokens: npt.NDArray[np.integer], context: int) -> PackedRows:
    """Of every place in `tokens` the `context` there and the one that follows them: int64 `[context + 1]` each."""
    return PackedRows([tokens], row_tokens=context + 1, stride=1)


def stdlib_folder() -> Path:
    """Where this Python keeps its own source."""
    return Path(sysconfig.get_path("stdlib"))


def _python_files(folder: Path) -> Iterator[str]:
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
        for name in files:
            if name.endswith(".py"):
                yield (Path(place) / name).relative_to(folder).as_posix()


def _is_validation(name: str) -> bool:
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:4], "big") < VALIDATION_SHARE * 2**32
