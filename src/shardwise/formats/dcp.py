"""Torch's own distributed checkpoints (DCP), written and read without a process group, a tensor at a time.

A folder has `.metadata`, a pickle of torch's `Metadata`, which says which bytes of which `*.distcp` file
hold which chunk of which key; every chunk is a `torch.save` of its own. The keys are those of FSDP2's `get_state_dict`:
`model.NAME`, `optim.state.NAME.KEY`, `optim.param_groups.N.KEY`.

[Note: why not torch's writer] `dcp.save` keeps every tensor of a file until the file is finished
(`_write_files_from_queue` in `torch/distributed/checkpoint/filesystem.py`, 2.13), so a checkpoint as
large as memory could not be written in one process. The layout is torch's; the tests read it with torch's loader.
"""

from __future__ import annotations

import io
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from shardwise.errors import CheckpointError
from shardwise.formats.pickles import as_plain, load_named
from shardwise.formats.source import PARAM, STATE, Source, Spec, stored_files
from shardwise.formats.stream import split_by_size

Tensor = torch.Tensor
Tick = Callable[[Spec], None]
ObjectPath = tuple[str | int, ...]
FORM = "dcp"
METADATA = ".metadata"
MODEL, OPTIM = "model", "optim"
MODEL_ROOTS, OPTIM_ROOTS = (MODEL, "module"), (OPTIM, "optimizer", "optimizers")
VERSION = "1.0.0"


def is_dcp(path: Path) -> bool:
    return (path / METADATA).is_file()


# -- reading --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Names:
    """Where in the keys the model and the optimizer are: `app.model.`, `app.optim.`; empty for a bare state dict."""

    model: str
    optim: str | None


def open_dcp(path: Path) -> Source:
    """The checkpoint in `path`, whatever wrote it: FSDP2, plain `dcp.save`, torchtitan, or `write_dcp`."""
    meta = load_named(path / METADATA, _known_classes())
    if not isinstance(meta, Metadata) or meta.storage_data is None:
        raise CheckpointError(f"{path / METADATA} is not metadata of a distributed checkpoint.")
    store = _Store(path, meta)
    keys = meta.state_dict_metadata
    tensors = {key: one for key, one in keys.items() if isinstance(one, TensorStorageMetadata)}
    objects = [key for key in keys if key not in tensors]
    names = _find_names(keys, meta.planner_data or {})
    homes = {spec: key for key, one in tensors.items() if (spec := _spec(key, one, names)) is not None}
    settings, others = _split_objects(objects, names)
    user, left_out = _plain_objects(store, others, meta)
    known = set(homes.values())
    left_out += [f"tensor {key}" for key in tensors if key not in known]
    ties = _ties(meta, [key for spec, key in homes.items() if not spec.is_state], names)
    num_steps = _num_steps(store, homes)
    step = user.pop("step", num_steps)
    return Source(
        form=FORM,
        path=path,
        specs=tuple(spec for spec in homes if spec.is_state or spec.name not in ties),
        read=lambda spec: store.tensor(homes[spec], spec),
        step=step if isinstance(step, int) else num_steps,
        num_steps=num_steps,
        ties=ties,
        groups=_groups(store, settings),
        user=user["user"] if list(user) == ["user"] and isinstance(user["user"], dict) else user,
        facts={"keys": {"model": names.model, "optim": names.optim}},
        files=stored_files(path),
        left_out=left_out,
    )


def _ties(meta: Metadata, keys: Iterable[str], names: _Names) -> dict[str, str]:
    """Names whose bytes are another's, as `write_dcp` leaves them. Torch itself writes tied weights once for each."""
    first: dict[tuple[str, int], str] = {}
    ties = {}
    for key in keys:
        said = meta.state_dict_metadata[key]
        chunks = said.chunks if isinstance(said, TensorStorageMetadata) else []
        info = meta.storage_data.get(MetadataIndex(key, chunks[0].offsets)) if len(chunks) == 1 else None
        if info is None:
            continue
        home = first.setdefault((info.relative_path, info.offset), key)
        if home != key:
            ties[key.removeprefix(names.model)] = home.removeprefix(names.model)
    return ties


def _num_steps(store: _Store, homes: Mapping[Spec, str]) -> int:
    """How often the optimizer has stepped, by its first parameter's `step`; 0 if it does not count."""
    for spec, key in homes.items():
        if spec.kind == f"{STATE}step" and spec.numel == 1:
            return int(store.tensor(key, spec))
    return 0


def _known_classes() -> dict[str, Any]:
    """All that torch puts into the metadata, by full name."""
    homes = {metadata: metadata.__all__, filesystem: ("_StorageInfo",)}
    known = {f"{home.__name__}.{name}": getattr(home, name) for home, names in homes.items() for name in names}
    encoding = metadata._MEM_FORMAT_ENCODING
    dtypes = {f"torch.{name}": one for name, one in vars(torch).items() if isinstance(one, torch.dtype)}
    return {
        **known,
        **dtypes,
        f"{encoding.__module__}.{encoding.__name__}": encoding,
        "torch.Size": torch.Size,
        "torch.serialization._get_layout": torch.serialization._get_layout,
        "pathlib.PosixPath": Path,
        "pathlib._local.PosixPath": Path,
        "collections.OrderedDict": dict,
    }


class _Store:
    """Reads chunks and objects."""

    def __init__(self, path: Path, meta: Metadata) -> None:
        self._path = path
        self._meta = meta

    def tensor(self, key: str, spec: Spec) -> Tensor:
        whole = torch.empty(spec.shape, dtype=spec.dtype)
        missing = spec.numel
        for chunk in self._chunks(key):
            piece = self._load(MetadataIndex(key, chunk.offsets))
            place = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
            if tuple(piece.shape) != tuple(chunk.sizes):
                raise CheckpointError(f"{self._path} has a piece of {key} that is not as its metadata says.")
            whole[place] = piece
            missing -= piece.numel()
        if missing > 0:
            raise CheckpointError(f"{self._path} lacks {missing} elements of {key}; it is incomplete.")
        return whole

    def _chunks(self, key: str) -> list[ChunkStorageMetadata]:
        said = self._meta.state_dict_metadata[key]
        return said.chunks if isinstance(said, TensorStorageMetadata) else []

    def object(self, key: str) -> Any:
        return self._load(MetadataIndex(key))

    def _load(self, index: MetadataIndex) -> Any:
        info = self._meta.storage_data.get(index)
        if info is None:
            raise CheckpointError(f"{self._path} does not say where {index.fqn} lies; its metadata is incomplete.")
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(
                f"{self._path} keeps {index.fqn} transformed ({', '.join(info.transform_descriptors)}), "
                f"which is not read here; save it without extensions."
            )
        file = self._path / info.relative_path
        try:
            with file.open("rb") as handle:
                handle.seek(info.offset)
                content = io.BytesIO(handle.read(info.length))
            return torch.load(content, map_location="cpu", weights_only=True)
        except FileNotFoundError as error:
            raise CheckpointError(f"{file} is missing; the checkpoint is incomplete.") from error
        except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{file} cannot be read at {index.fqn}: {error}") from error


def _find_names(keys: Iterable[str], paths: Mapping[str, ObjectPath]) -> _Names:
    """By the paths in the nested dict that was saved, `("model", "wte.weight")`, at most two levels down.

    A key whose path is one word was in a bare state dict: `model.wte.weight` is then all of a name.
    """
    whole = [tuple(map(str, paths.get(key, (key,)))) for key in keys]
    optim = _root(whole, OPTIM_ROOTS, lambda rest: rest.startswith(("state.", "param_groups.")))
    model = _root(whole, MODEL_ROOTS, lambda _: True)
    return _Names(model or "", optim)


def _root(paths: list[tuple[str, ...]], words: tuple[str, ...], fits: Callable[[str], bool]) -> str | None:
    """What comes before the names, with a dot behind it; of several candidates the one that most keys have."""
    found = Counter(
        ".".join(path[:depth]) + "."
        for path in paths
        for depth in (1, 2)
        if len(path) > depth and path[depth - 1] in words and fits(".".join(path[depth:]))
    )
    return max(found, key=lambda root: found[root], default=None)


def _spec(key: str, one: TensorStorageMetadata, names: _Names) -> Spec | None:
    shape, dtype = tuple(one.size), one.properties.dtype
    if names.optim is not None and key.startswith(f"{names.optim}state."):
        name, _, state = key.removeprefix(f"{names.optim}state.").rpartition(".")
        return Spec(f"{STATE}{state}", name, shape, dtype) if name else None
    if names.optim is not None and key.startswith(names.optim):
        return None
    return Spec(PARAM, key.removeprefix(names.model), shape, dtype) if key.startswith(names.model) else None


def _split_objects(objects: list[str], names: _Names) -> tuple[dict[str, str], list[str]]:
    """The optimizer's settings, by what comes after `param_groups.`, and all else."""
    root = f"{names.optim}param_groups." if names.optim is not None else None
    settings = {key.removeprefix(root): key for key in objects if root is not None and key.startswith(root)}
    return settings, [key for key in objects if key not in set(settings.values())]


def _plain_objects(store: _Store, keys: list[str], meta: Metadata) -> tuple[dict[str, Any], list[str]]:
    """What the training script kept, nested as it was, and the names of what is not plain data."""
    user: dict[str, Any] = {}
    left_out = []
    for key in keys:
        try:
            value = as_plain(store.object(key))
        except (TypeError, CheckpointError):
            left_out.append(f"{key}, which is not plain data")
            continue
        path = (meta.planner_data or {}).get(key, (key,))
        inner = user
        for part in path[:-1]:
            inner = inner.setdefault(str(part), {})
        inner[str(path[-1])] = value
    return user, left_out


def _groups(store: _Store, settings: Mapping[str, str]) -> list[dict[str, Any]]:
    """The optimizer's groups, of either form that torch writes: by number, or flattened to one for each parameter."""
    by_owner: dict[str, dict[str, Any]] = {}
    for rest, key in settings.items():
        owner, _, setting = rest.rpartition(".")
        by_owner.setdefault(owner, {})[setting] = store.object(key)
    if all(owner.isdecimal() for owner in by_owner):
        return [by_owner[owner] for owner in sorted(by_owner, key=int)]
    groups: list[dict[str, Any]] = []
    for name, values in by_owner.items():
        same = next((group for group in groups if {**group, "params": None} == {**values, "params": None}), None)
        if same is None:
            groups.append({**values, "params": [name]})
        else:
            same["params"].append(name)
    return groups


# -- writing --------------------------------------------------------------------------------------------


@dataclass
class _Said:
    """The metadata as it grows."""

    keys: dict[str, Any] = field(default_factory=dict)
    places: dict[MetadataIndex, _StorageInfo] = field(default_factory=dict)
    paths: dict[str, ObjectPath] = field(default_factory=dict)


class _Draft:
    """A file that chunks go to, and with each a line of the metadata."""

    def __init__(self, file: IO[bytes], name: str, said: _Said) -> None:
        self._file = file
        self._name = name
        self._said = said

    def tensor(self, path: ObjectPath, value: Tensor) -> None:
        key = self._key(path)
        origin = torch.Size([0] * value.dim())
        chunk = ChunkStorageMetadata(origin, value.size())
        self._said.keys[key] = TensorStorageMetadata(TensorProperties(dtype=value.dtype), value.size(), [chunk])
        self._said.places[MetadataIndex(key, origin)] = self._save(value)

    def again(self, path: ObjectPath, other: ObjectPath) -> None:
        """The same tensor under one more key: the same bytes."""
        key, known = self._key(path), self._key(other)
        self._said.keys[key] = self._said.keys[known]
        origin = self._said.keys[known].chunks[0].offsets
        self._said.places[MetadataIndex(key, origin)] = self._said.places[MetadataIndex(known, origin)]

    def object(self, path: ObjectPath, value: Any) -> None:
        key = self._key(path)
        self._said.keys[key] = BytesStorageMetadata()
        self._said.places[MetadataIndex(key)] = self._save(value)

    def _key(self, path: ObjectPath) -> str:
        key = ".".join(map(str, path))
        self._said.paths[key] = path
        return key

    def _save(self, value: Any) -> _StorageInfo:
        start = self._file.tell()
        blob = io.BytesIO()  # torch.save wants a file that begins at 0
        torch.save(value, blob)
        self._file.write(blob.getbuffer())
        return _StorageInfo(self._name, start, self._file.tell() - start)


def files_of(source: Source, max_bytes: int) -> dict[str, list[Spec]]:
    """What goes into which file."""
    runs = split_by_size(source.specs, max_bytes) or [[]]
    return {f"__0_{number}.distcp": run for number, run in enumerate(runs)}


def write_dcp(source: Source, folder: Path, max_bytes: int, tick: Tick) -> None:
    """`source` as FSDP2's users save it: `{"model": ..., "optim": ..., "user": ..., "step": ...}`."""
    aliases: dict[str, list[str]] = {}
    for alias, name in source.ties.items():
        aliases.setdefault(name, []).append(alias)
    said = _Said()
    for number, (name, specs) in enumerate(files_of(source, max_bytes).items()):
        with (folder / name).open("wb") as file:
            draft = _Draft(file, name, said)
            for spec in specs:
                draft.tensor(_path(spec), source.read(spec).contiguous())
                for alias in aliases.get(spec.name, ()) if not spec.is_state else ():
                    draft.again((MODEL, alias), _path(spec))
                tick(spec)
            if number == 0:
                _write_objects(draft, source)
    whole = Metadata(said.keys, said.paths, said.places, StorageMeta(), VERSION)
    (folder / METADATA).write_bytes(pickle.dumps(whole))


def _path(spec: Spec) -> ObjectPath:
    return (OPTIM, "state", spec.name, spec.kind.removeprefix(STATE)) if spec.is_state else (MODEL, spec.name)


def _write_objects(draft: _Draft, source: Source) -> None:
    for name, numbers in source.numbers.items():
        for key, value in numbers.items():
            draft.object((OPTIM, "state", name, key), value)
    for number, group in enumerate(source.groups):
        for key, value in group.items():
            draft.object((OPTIM, "param_groups", number, key), value)
    if source.user:
        draft.object(("user",), source.user)
    draft.object(("step",), source.step)
