"""The text: Python's own standard library, found on this machine. Nothing is downloaded."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shardwise.data import PackedRows
from shardwise.errors import ConfigError

SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"}
VALIDATION_SHARE = 0.05


@dataclass(frozen=True)
class Corpus:
    """Two texts, uint8 `[num_bytes]` each, split by file: no file is in both."""

    train: Tensor
    validation: Tensor

    @classmethod
    def of_folder(cls, folder: Path, max_bytes: int) -> Corpus:
        """The `*.py` below `folder` in sorted order, up to `max_bytes`; a file's name decides its side."""
        train, validation = bytearray(), bytearray()
        for name in sorted(_python_files(folder)):
            room = max_bytes - len(train) - len(validation)
            side = validation if _is_validation(name) else train
            side += (folder / name).read_bytes()[:room]
        if not train or not validation:
            raise ConfigError(
                f"{folder} has too few *.py files to learn from and to validate on. "
                f"Give a folder with more of them: --text FOLDER."
            )
        return cls(torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(validation, dtype=torch.uint8))


def pieces(text: Tensor, context: int) -> PackedRows:
    """Of every place in `text` the `context` bytes there and the one that follows them: int64 `[context + 1]` each."""
    return PackedRows([text.numpy()], row_tokens=context + 1, stride=1)


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
