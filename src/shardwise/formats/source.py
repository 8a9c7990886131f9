"""What any checkpoint is to us, whoever wrote it: tensors that can be read one at a time, and what is known of them.

A reader of a format makes a `Source`, a writer takes one; so readers and writers do not know each other.
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

    A format that does not tell buffers from parameters calls both `param`.
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

    `read` returns the whole tensor of a spec, on the CPU, in the spec's shape and dtype, and raises
    `CheckpointError` if it is not there as promised. `groups` are the optimizer's parameter groups: hyper-parameters,
    and under `params` names, if they are known. `ties` maps further names of a parameter to the one in `specs`.
    `numbers` are states of the optimizer that are no tensors, by parameter and key. `user` is what the training script
    kept, `engine` what our engine did (a loss scale), `facts` what the format says besides, for people. `optimizer` is
    the name of its class, if the format says it. `left_out` has
    sentences about what is in the folder and not in here. `kept` are files to go along: a model's
    configuration, a tokenizer. `check` compares with checksums, where the format has any.
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

    @property
    def weights(self) -> tuple[Spec, ...]:
        """Parameters and buffers."""
        return tuple(spec for spec in self.specs if not spec.is_state)

    @property
    def states(self) -> tuple[Spec, ...]:
        return tuple(spec for spec in self.specs if spec.is_state)

    def without_optimizer(self) -> Source:
        """The weights alone, as the first step of a new run."""
        nothing: dict[str, Any] = {"groups": [], "numbers": {}, "user": {}, "engine": {}, "optimizer": ""}
        return replace(self, specs=self.weights, step=0, num_steps=0, **nothing)


def stored_files(folder: Path) -> tuple[StoredFile, ...]:
    """Every file below `folder`, in order of name."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return tuple(StoredFile(str(path.relative_to(folder)), path.stat().st_size) for path in found)
