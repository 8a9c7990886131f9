"""The text: Python's own standard library, found on this machine. Nothing is downloaded.

The batch of step N is a pure function of (seed, N). Every rank draws the whole batch's places and takes
its own contiguous share of them, so one process and sixteen train on the same bytes in the same order.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

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


@dataclass(frozen=True)
class Batches:
    """`rows` pieces of `text`, each `context` bytes long, drawn anew for every step."""

    text: Tensor
    rows: int
    context: int
    seed: int

    def batch(self, step: int, rank: int, world: int) -> tuple[Tensor, Tensor]:
        """This rank's bytes and the bytes that follow them: int64 `[rows / world, context]` each."""
        if self.rows % world:
            raise ConfigError(f"{self.rows} rows do not divide among {world} ranks. Give a multiple: --batch.")
        if len(self.text) <= self.context:
            raise ConfigError(f"A text of {len(self.text)} bytes has no piece of {self.context} and one more.")
        draw = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        starts = torch.randint(len(self.text) - self.context, (self.rows,), generator=draw)
        share = self.rows // world
        mine = starts[rank * share : (rank + 1) * share]
        pieces = self.text[mine[:, None] + torch.arange(self.context + 1)].long()
        return pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()


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
