"""A checkpoint of any format: tensors that can be read one at a time, and their metadata.

Readers of a format make a `Source` and writers take one, so they do not depend on each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

Tensor = torch.Tensor
PARAM, BUFFER, STATE = "param", "buffer", "state."


@dataclass(frozen=True)
class Spec:
    """A tensor of a source: `kind` is `param`, `buffer` or `state.KEY` of the optimizer; `name` is the parameter's.

    If a format does not distinguish buffers from parameters, both are `param`.
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def key(self) -> str:
        return f"{self.kind}/{self.name}"

    @property
    def is_state(self) -> bool:
        return self.kind.startswith(STATE)


@dataclass(frozen=True)
class StoredFile:
    """A file of a checkpoint, by its name in the folder."""

    name: str
    num_bytes: int


@dataclass
class Source:
    """A checkpoint that is open for reading.

    `read` returns the whole tensor of a spec, on the CPU, in the spec's shape and dtype, and raises `CheckpointError`
    if that is impossible. `groups` are the optimizer's parameter groups: hyper-parameters, and names under `params` if
    known. `ties` maps other names of a parameter to the one in `specs`. `numbers` are optimizer states that are not
    tensors, by parameter and key. `user` is the training script's data, `engine` our engine's (a loss scale), and
    `facts` other information of the format for people. `optimizer` is the name of its class, if known. `left_out` lists
    content of the folder that is not in the source. `kept` are files to copy along: a model's configuration, a
    tokenizer. `check` compares checksums, if the format has any. `remembered` reads the states of the objects that
    rank 0 gave `engine.remember`.
    """

    form: str
    path: Path
    specs: tuple[Spec, ...]
    read: Callable[[Spec], Tensor]
    step: int = 0
    num_steps: int = 0
    groups: list[dict[str, Any]] = field(default_factory=list)
    ties: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, dict[str, Any]] = field(default_factory=dict)
    user: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    optimizer: str = ""
    files: tuple[StoredFile, ...] = ()
    kept: tuple[Path, ...] = ()
    left_out: list[str] = field(default_factory=list)
    check: Callable[[], Iterator[str]] | None = None
    remembered: Callable[[], dict[str, Any]] = dict

    @property
    def weights(self) -> tuple[Spec, ...]:
        """Parameters and buffers."""
        return tuple(spec for spec in self.specs if not spec.is_state)

    @property
    def states(self) -> tuple[Spec, ...]:
        return tuple(spec for spec in self.specs if spec.is_state)

    def without_optimizer(self) -> Source:
        """Only the weights, as the first step of a new run."""
        nothing: dict[str, Any] = {"groups": [], "numbers": {}, "user": {}, "engine": {}, "optimizer": ""}
        return replace(self, specs=self.weights, step=0, num_steps=0, **nothing)


def stored_files(folder: Path) -> tuple[StoredFile, ...]:
    """Every file below `folder`, sorted by name."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return tuple(StoredFile(str(path.relative_to(folder)), path.stat().st_size) for path in found)
