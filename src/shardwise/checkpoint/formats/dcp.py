"""Reads torch's distributed checkpoints (DCP) without a process group, one tensor at a time.

A folder has a `.metadata` file, which lists the bytes of the `*.distcp` files with each chunk of each key; every chunk
is a separate `torch.save`. The keys are those of FSDP2's `get_state_dict`: `model.NAME`, `optim.state.NAME.KEY`,
`optim.param_groups.N.KEY`.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch

from shardwise.checkpoint.formats.dcp_metadata import (
    METADATA,
    Chunk,
    Location,
    Metadata,
    ObjectPath,
    StoredTensor,
    read_metadata,
)
from shardwise.checkpoint.formats.pickles import as_plain
from shardwise.checkpoint.formats.source import PARAM, STATE, Source, Spec, StoredFile, stored_files
from shardwise.checkpoint.formats.torch_files import load_bytes
from shardwise.errors import CheckpointError
from shardwise.system.safe_files import fill_exactly, inside, open_regular

Tensor = torch.Tensor
FORM = "dcp"
MODEL, OPTIM = "model", "optim"
MODEL_ROOTS, OPTIM_ROOTS = (MODEL, "module"), (OPTIM, "optimizer", "optimizers")
NAMELESS = (
    "the optimizer's states and settings: a plain optimizer.state_dict() numbers parameters and does not name them "
    "(they are {keys}). Save what get_state_dict of torch.distributed.checkpoint.state_dict returns, which has names"
)


def is_dcp(path: Path) -> bool:
    return (path / METADATA).exists()


@dataclass(frozen=True)
class _Names:
    """The key prefixes of the model and the optimizer: `app.model.`, `app.optim.`; empty for a bare state dict."""

    model: str
    optim: str | None

    def in_optim(self, key: str) -> str | None:
        """The rest of `key` after the optimizer's prefix; `None` for other keys."""
        return key.removeprefix(self.optim) if self.optim is not None and key.startswith(self.optim) else None


def open_dcp(path: Path) -> Source:
    """The checkpoint in `path`, written by FSDP2, plain `dcp.save`, torchtitan, or `write_dcp`."""
    meta = read_metadata(path)
    store = _Store(path, meta)
    names = _find_names([*meta.tensors, *meta.objects], meta.paths)
    homes = {spec: key for key, one in meta.tensors.items() if (spec := _spec(key, one, names)) is not None}
    objects = _Objects.of(store, meta, names)
    known = set(homes.values())
    left_out = [*objects.left_out, *(f"tensor {key}" for key in meta.tensors if key not in known)]
    ties = _ties(meta, [key for spec, key in homes.items() if not spec.is_state], names)
    states, num_steps = _States.of(homes, objects), _num_steps(store, homes)
    user = dict(objects.user)
    step = user.pop("step", num_steps)
    return Source(
        form=FORM,
        path=path,
        specs=tuple(spec for spec in homes if (spec in states.specs if spec.is_state else spec.name not in ties)),
        read=lambda spec: store.tensor(homes[spec]),
        step=step if type(step) is int and step >= 0 else num_steps,
        num_steps=num_steps,
        ties=ties,
        groups=states.groups,
        numbers=states.numbers,
        user=_unwrapped(user),
        facts={"keys": {"model": names.model, "optim": names.optim}},
        files=_files(path, meta),
        left_out=[*left_out, *states.left_out],
    )


@dataclass
class _States:
    """The optimizer's states: all of them, or none if some belong to parameters that are not in the checkpoint."""

    specs: set[Spec] = field(default_factory=set)
    groups: list[dict[str, Any]] = field(default_factory=list)
    numbers: dict[str, dict[str, Any]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, homes: Mapping[Spec, str], objects: _Objects) -> _States:
        weights = {spec.name for spec in homes if not spec.is_state}
        groups = _groups(objects.settings)
        strange = _nameless(homes, objects, groups, weights)
        if strange:
            return cls(left_out=[NAMELESS.format(keys=f"{strange[0]} and {len(strange) - 1} more")])
        return cls({spec for spec in homes if spec.is_state and spec.name in weights}, groups, objects.numbers)


def _unwrapped(user: dict[str, Any]) -> dict[str, Any]:
    """What the script saved: the single entry "user", as `write_dcp` writes it, or everything."""
    only = user.get("user") if len(user) == 1 else None
    return only if isinstance(only, dict) else user


def _nameless(
    homes: Mapping[Spec, str], objects: _Objects, groups: Sequence[Mapping[str, Any]], weights: set[str]
) -> list[str]:
    """Keys of the optimizer for parameters that are not among the `weights`."""
    states = [key for spec, key in homes.items() if spec.is_state and spec.name not in weights]
    numbers = [f"state {name}" for name in objects.numbers if name not in weights]
    members = [f"parameter {name}" for group in groups for name in _strangers(group, weights)]
    return states + numbers + members


def _files(path: Path, meta: Metadata) -> tuple[StoredFile, ...]:
    """All files, with at least the sizes that the metadata requires."""
    sizes = {file.name: file.num_bytes for file in stored_files(path)}
    locations = [chunk.location for one in meta.tensors.values() for chunk in one.chunks]
    for location in (*locations, *meta.objects.values()):
        sizes[location.file] = max(sizes.get(location.file, 0), location.start + location.num_bytes)
    return tuple(StoredFile(name, sizes[name]) for name in sorted(sizes))


def _ties(meta: Metadata, keys: Iterable[str], names: _Names) -> dict[str, str]:
    """Names that share another's bytes, as `write_dcp` writes them. Torch itself writes tied weights once per name."""
    first: dict[StoredTensor, str] = {}
    ties = {}
    for key in keys:
        if len(meta.tensors[key].chunks) != 1:
            continue
        home = first.setdefault(meta.tensors[key], key)
        if home != key:
            ties[key.removeprefix(names.model)] = home.removeprefix(names.model)
    return ties


def _num_steps(store: _Store, homes: Mapping[Spec, str]) -> int:
    """The optimizer's number of steps, from the first `step` state; 0 if there is none."""
    for spec, key in homes.items():
        if spec.kind == f"{STATE}step" and spec.numel == 1:
            number = float(store.tensor(key).real)
            return int(number) if math.isfinite(number) and number >= 0 else 0
    return 0


class _Store:
    """Reads chunks and objects."""

    def __init__(self, path: Path, meta: Metadata) -> None:
        self._path = path
        self._meta = meta

    def tensor(self, key: str) -> Tensor:
        stored = self._meta.tensors[key]
        for location in {chunk.location.file: chunk.location for chunk in sorted(stored.chunks, key=_end)}.values():
            self._open(key, location).close()  # check that all bytes exist before memory is allocated
        whole = torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
        for chunk in stored.chunks:
            piece = load_bytes(self._bytes(key, chunk.location), f"{self._path / chunk.location.file} at {key}")
            if not isinstance(piece, Tensor) or tuple(piece.shape) != chunk.sizes or piece.dtype != stored.dtype:
                raise CheckpointError(f"{self._path} has a piece of {key} that does not match its metadata.")
            whole[tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))] = piece
        return whole

    def object(self, key: str) -> Any:
        location = self._meta.objects[key]
        return load_bytes(self._bytes(key, location), f"{self._path / location.file} at {key}")

    def _bytes(self, key: str, location: Location) -> bytearray:
        with self._open(key, location) as handle:
            content = bytearray(location.num_bytes)
            fill_exactly(handle, location.start, memoryview(content), self._path / location.file)
        return content

    def _open(self, key: str, location: Location) -> BinaryIO:
        """Open the file of `location`, after checking that it has all its bytes."""
        if location.transforms:
            raise CheckpointError(
                f"{self._path} stores {key} transformed ({', '.join(location.transforms)}), "
                f"which cannot be read. Save it without extensions."
            )
        handle = open_regular(inside(self._path, location.file))
        size = handle.seek(0, os.SEEK_END)
        if location.start + location.num_bytes > size:
            handle.close()
            raise CheckpointError(
                f"{self._path / location.file} has only {size} bytes, without those of {key}; it was truncated."
            )
        return handle


def _end(chunk: Chunk) -> int:
    return chunk.location.start + chunk.location.num_bytes


def _find_names(keys: Iterable[str], paths: Mapping[str, ObjectPath]) -> _Names:
    """From the paths in the nested dict that was saved, such as `("model", "wte.weight")`, at most two levels down.

    A key whose path has one part was in a bare state dict: then `model.wte.weight` is the whole name.
    """
    whole = [tuple(map(str, paths.get(key, (key,)))) for key in keys]
    optim = _root(whole, OPTIM_ROOTS, lambda rest: rest.startswith(("state.", "param_groups.")))
    model = _root(whole, MODEL_ROOTS, lambda _: True)
    return _Names(model or "", optim)


def _root(paths: list[tuple[str, ...]], words: tuple[str, ...], fits: Callable[[str], bool]) -> str | None:
    """The prefix before the names, with a dot at its end; of several candidates the one that most keys have."""
    found = Counter(
        ".".join(path[:depth]) + "."
        for path in paths
        for depth in (1, 2)
        if len(path) > depth and path[depth - 1] in words and fits(".".join(path[depth:]))
    )
    return max(found, key=lambda root: found[root], default=None)


def _spec(key: str, one: StoredTensor, names: _Names) -> Spec | None:
    rest = names.in_optim(key)
    if rest is not None:
        name, _, state = rest.removeprefix("state.").rpartition(".")
        return Spec(f"{STATE}{state}", name, one.shape, one.dtype) if rest.startswith("state.") and name else None
    name = key.removeprefix(names.model)
    return Spec(PARAM, name, one.shape, one.dtype) if key.startswith(names.model) and name else None


@dataclass(frozen=True)
class _Objects:
    """Entries that are not tensors: the optimizer's settings by the key after `param_groups.`, its numeric states, the
    nested data of the training script, and the names of entries that are not plain data."""

    settings: dict[str, Any]
    numbers: dict[str, dict[str, Any]]
    user: dict[str, Any]
    left_out: list[str]

    @classmethod
    def of(cls, store: _Store, meta: Metadata, names: _Names) -> _Objects:
        made = cls({}, {}, {}, [])
        for key in meta.objects:
            try:
                value = store.object(key)
                plain = as_plain(value)
            except (TypeError, CheckpointError):
                made.left_out.append(f"{key}, which is not plain data")
                continue
            kind, _, rest = (names.in_optim(key) or "").partition(".")
            if kind == "param_groups":
                made.settings[rest] = value
            elif kind == "state":
                name, _, state = rest.rpartition(".")
                made.numbers.setdefault(name, {})[state] = plain
            elif not _put(made.user, meta.paths.get(key, (key,)), plain):
                made.left_out.append(f"{key}, whose place is another's")
        return made


def _put(inner: dict[str, Any], path: ObjectPath, value: Any) -> bool:
    """Put `value` into nested dicts; `False` if something else is at its place."""
    for part in path[:-1]:
        found: Any = inner.setdefault(str(part), {})
        if not isinstance(found, dict):
            return False
        inner = found
    return inner.setdefault(str(path[-1]), value) is value


def _strangers(group: Mapping[str, Any], weights: set[str]) -> list[Any]:
    """Parameters of a group that are not the model's."""
    params = group.get("params", [])
    return [one for one in params if one not in weights] if isinstance(params, list) else [params]


def _groups(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The optimizer's groups, from either form that torch writes: by number, or flattened to one per parameter."""
    by_owner: dict[str, dict[str, Any]] = {}
    for rest, value in settings.items():
        owner, _, setting = rest.rpartition(".")
        by_owner.setdefault(owner, {})[setting] = value
    if all(owner.isdecimal() and owner.isascii() and len(owner) < 10 for owner in by_owner):
        return [by_owner[owner] for owner in sorted(by_owner, key=int)]
    groups: list[dict[str, Any]] = []
    for name, values in by_owner.items():
        same = next((group for group in groups if {**group, "params": None} == {**values, "params": None}), None)
        if same is None:
            groups.append({**values, "params": [name]})
        else:
            same["params"].append(name)
    return groups
