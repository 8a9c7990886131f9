"""The content of a checkpoint as data, for printing or for programs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.checkpoint.formats.forms import open_checkpoint
from shardwise.checkpoint.formats.source import PARAM, STATE, Source, Spec
from shardwise.errors import CheckpointError


@dataclass(frozen=True)
class Inspection:
    """The result of `inspect`. Bytes are those of the tensors; files may be a little larger.

    `bytes_there` has for each file of `source.files` its size on the disk; `None` if it is missing.
    """

    source: Source
    problems: tuple[str, ...]
    is_verified: bool
    bytes_there: tuple[int | None, ...]

    @property
    def num_params(self) -> int:
        """Elements of the parameters, each counted once; with buffers, if the format does not tell them apart."""
        return sum(spec.numel for spec in self.source.specs if spec.kind == PARAM)

    @property
    def bytes_by_kind(self) -> dict[str, int]:
        sums: Counter[str] = Counter()
        for spec in self.source.specs:
            sums[spec.kind.removeprefix(STATE)] += spec.num_bytes
        return dict(sums)

    def as_json(self) -> dict[str, Any]:
        source = self.source
        return {
            "form": source.form,
            "path": str(source.path),
            "step": source.step,
            "num_steps": source.num_steps,
            **source.facts,
            "num_params": self.num_params,
            "bytes": self.bytes_by_kind,
            "tensors": [
                {"kind": one.kind, "name": one.name, "shape": list(one.shape), "dtype": dtype_word(one)}
                for one in source.specs
            ],
            "ties": source.ties,
            "groups": source.groups,
            "user": source.user,
            "files": [
                {"name": file.name, "bytes": file.num_bytes, "bytes_there": there}
                for file, there in zip(source.files, self.bytes_there, strict=True)
            ],
            "left_out": source.left_out,
            "verified": self.is_verified,
            "problems": list(self.problems),
        }


def dtype_word(spec: Spec) -> str:
    return str(spec.dtype).removeprefix("torch.")


def inspect(path: str | Path, *, verify: bool = False, tick: Callable[[Spec], None] = lambda _: None) -> Inspection:
    """The content of the checkpoint at `path`: of shardwise (or its run folder), Hugging Face, DCP or DeepSpeed.

    With `verify` every tensor is read and compared with its checksum if the format has checksums; otherwise tensors are
    not read. `problems` lists what is wrong, including missing or truncated files in either case. Raises
    `CheckpointError` if `path` cannot be read at all. Called by one process, without ranks.
    """
    source = open_checkpoint(Path(path))
    there = tuple(_bytes_there(source.path / file.name) for file in source.files)
    problems = tuple(_problems(source, tick)) if verify else tuple(_odd_files(source, there))
    return Inspection(source, problems, verify, there)


def _bytes_there(path: Path) -> int | None:
    try:
        return path.stat().st_size if path.is_file() else None
    except OSError:
        return None


def _odd_files(source: Source, sizes: tuple[int | None, ...]) -> Iterator[str]:
    for file, there in zip(source.files, sizes, strict=True):
        if there is None:
            yield f"{source.path / file.name} is missing; the checkpoint is incomplete"
        elif there != file.num_bytes:
            yield f"{source.path / file.name} has {there} bytes instead of {file.num_bytes}: truncated or changed"


def _problems(source: Source, tick: Callable[[Spec], None]) -> Iterator[str]:
    if source.check is not None:
        yield from source.check()
    for spec in source.specs:
        try:
            tensor = source.read(spec)
            if tuple(tensor.shape) != spec.shape or tensor.numel() != math.prod(spec.shape):
                yield f"{spec.kind} {spec.name} has shape {list(tensor.shape)} instead of {list(spec.shape)}"
        except CheckpointError as error:
            yield str(error)
        tick(spec)
