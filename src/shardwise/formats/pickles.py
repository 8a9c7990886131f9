"""Reading what others pickled, without running any of it.

[Note: inert pickles] `torch.load(weights_only=True)` knows tensors, numbers and containers, and refuses other classes
by name. For each name that a file asks for we give it a class of our own that only remembers its arguments. So a
DeepSpeed checkpoint is read where DeepSpeed is not installed, and nothing that a file names is ever imported or called.
"""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import IO, Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from shardwise.errors import CheckpointError


class Inert:
    """Stands for an object of a foreign class: its arguments and its attributes, and no behaviour."""

    def __new__(cls, *args: Any, **_: Any) -> Inert:
        made = super().__new__(cls)
        made.__dict__["arguments"] = args
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        pass


def load_inert(path: Path) -> Any:
    """The object in the `torch.save` file `path`, on the CPU, its tensors left on disk until they are used."""
    try:
        if not zipfile.is_zipfile(path):  # as torch wrote before 1.6: no table of contents, so it is read whole
            return torch.load(path, map_location="cpu", weights_only=True)
        names = get_unsafe_globals_in_checkpoint(str(path))
        inert: list[Any] = [(type(name.rpartition(".")[2], (Inert,), {}), name) for name in names]
        with safe_globals(inert):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; the checkpoint is incomplete.") from error
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


class _Named(pickle.Unpickler):
    """An unpickler of the few names that its caller knows."""

    def __init__(self, file: IO[bytes], known: dict[str, Any]) -> None:
        super().__init__(file)
        self._known = known

    def find_class(self, module: str, name: str) -> Any:
        found = self._known.get(f"{module}.{name}")
        if found is None:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which has no place in it")
        return found


def load_named(path: Path, known: dict[str, Any]) -> Any:
    """The object pickled in `path`, made of the classes `known` by their full names, and of nothing else."""
    try:
        with path.open("rb") as file:
            return _Named(file, known).load()
    except (OSError, EOFError, ValueError, TypeError, KeyError, AttributeError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def as_plain(value: Any) -> Any:
    """`value` as JSON can hold it; raises `TypeError` for what it cannot."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [as_plain(item) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: as_plain(item) for key, item in value.items()}
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    raise TypeError(f"{type(value).__name__} is not plain")


def plain_items(values: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Those of `values` that JSON can hold, and the names of the others."""
    plain, others = {}, []
    for key, value in values.items():
        try:
            plain[key] = as_plain(value)
        except TypeError:
            others.append(key)
    return plain, others
