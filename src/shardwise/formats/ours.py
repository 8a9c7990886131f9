"""Checkpoints of shardwise, whole tensors at a time, without an engine and without ranks.

The only module here that knows how `checkpoint/` lays its files out.
"""

from __future__ import annotations

import platform
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from shardwise.checkpoint import newest
from shardwise.checkpoint.index import INDEX, LATEST, Chunk, File, Index, read_index
from shardwise.checkpoint.save import checksum
from shardwise.errors import CheckpointError
from shardwise.formats.source import BUFFER, PARAM, STATE, Source, Spec, StoredFile
from shardwise.formats.stream import DTYPES, SafetensorsFile, split_by_size
from shardwise.version import __version__

Tensor = torch.Tensor
Tick = Callable[[Spec], None]
FORM = "shardwise"
HUGGING_FACE = "huggingface"
"""A folder in a run: what a model from Hugging Face came with, for the way back."""


def is_ours(path: Path) -> bool:
    """Whether `path` is a checkpoint, or a run folder with one in it."""
    return newest(path) is not None or ((path / LATEST).exists() and any(path.glob("step-*")))


def open_ours(path: Path) -> Source:
    """The checkpoint at `path`, or the newest of the run at `path`."""
    folder = newest(path)
    if folder is None:
        raise CheckpointError(f"{path} has {LATEST}, but no checkpoint: none of its step folders has an {INDEX}.")
    index = read_index(folder)
    store = _Store(folder, index)
    return Source(
        form=FORM,
        path=folder,
        specs=store.specs,
        read=store.read,
        step=index.step,
        num_steps=int(index.state["num_steps"]),
        groups=[_as_torch_has_it(group) for group in index.groups],
        ties=dict(index.ties),
        user=dict(index.state["user"]),
        engine={key: value for key, value in index.state.items() if key not in ("num_steps", "user")},
        facts={"world_size": index.world_size, "layout": index.layout, "versions": index.versions},
        files=tuple(StoredFile(file.name, file.num_bytes) for file in index.files),
        kept=tuple(sorted((folder.parent / HUGGING_FACE).glob("*"))),
        check=lambda: _check(folder, index),
    )


class _Store:
    """Finds the pieces of a tensor and puts them together."""

    def __init__(self, folder: Path, index: Index) -> None:
        self._folder = folder
        self._chunks: dict[tuple[str, str], list[Chunk]] = defaultdict(list)
        for chunk in index.chunks:
            if chunk.kind in (PARAM, BUFFER) or chunk.kind.startswith(STATE):
                self._chunks[chunk.kind, chunk.name].append(chunk)
        kinds = self._kinds_in_files()
        self.specs = tuple(self._spec(kind, name, index, kinds) for kind, name in self._chunks)

    def _kinds_in_files(self) -> dict[tuple[str, str], tuple[torch.dtype, tuple[int, ...]]]:
        """Dtype and shape by file and key, from the heads of the files."""
        found = {}
        for name in dict.fromkeys(chunk.file for chunks in self._chunks.values() for chunk in chunks):
            with _opened(self._folder / name) as file:
                for key in file.keys():  # noqa: SIM118  # a safetensors handle is no mapping
                    head = file.get_slice(key)
                    found[name, key] = (DTYPES[head.get_dtype()], tuple(head.get_shape()))
        return found

    def _spec(self, kind: str, name: str, index: Index, heads: dict[Any, Any]) -> Spec:
        first = self._chunks[kind, name][0]
        if (first.file, first.key) not in heads:
            raise CheckpointError(f"{self._folder / first.file} has no {first.key}; the checkpoint is damaged.")
        dtype, shape = heads[first.file, first.key]
        return Spec(kind, name, shape if _is_whole(first) else tuple(index.shapes[name]), dtype)

    def read(self, spec: Spec) -> Tensor:
        chunks = self._chunks[spec.kind, spec.name]
        if _is_whole(chunks[0]):
            return self._piece(chunks[0]).reshape(spec.shape)
        whole = torch.empty(spec.numel, dtype=spec.dtype)
        missing = spec.numel
        for chunk in chunks:
            whole[chunk.start : chunk.stop] = self._piece(chunk).view(-1)
            missing -= chunk.stop - chunk.start
        if missing:
            raise CheckpointError(f"{self._folder} lacks {missing} elements of {spec.kind} {spec.name}.")
        return whole.view(spec.shape)

    def _piece(self, chunk: Chunk) -> Tensor:
        path = self._folder / chunk.file
        try:
            with _opened(path) as file:
                tensor: Tensor = file.get_tensor(chunk.key)
                return tensor
        except SafetensorError as error:
            raise CheckpointError(f"{path} cannot be read at {chunk.key}: {error}") from error


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; the checkpoint is incomplete.") from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _is_whole(chunk: Chunk) -> bool:
    """Whether a state is kept as it is, and not as a range of its parameter's elements."""
    return chunk.stop == 0


def _check(folder: Path, index: Index) -> Iterator[str]:
    """A sentence for each file that is not the one that was written."""
    for file in index.files:
        path = folder / file.name
        if not path.exists():
            yield f"{file.name} is missing"
        elif path.stat().st_size != file.num_bytes:
            yield f"{file.name} has {path.stat().st_size} bytes instead of {file.num_bytes}"
        elif checksum(path) != file.crc32:
            yield f"{file.name} is damaged: its checksum is not the one it was written with"


def _as_torch_has_it(group: dict[str, Any]) -> dict[str, Any]:
    """JSON has no tuples, and torch wants one for `betas`."""
    return {key: tuple(value) if isinstance(value, list) and key != "params" else value for key, value in group.items()}


def step_name(source: Source) -> str:
    return f"step-{source.step:08d}"


def shards_of(source: Source, max_bytes: int) -> dict[str, list[Spec]]:
    """What goes into which file, in the shapes that it has there.

    A parameter, and a state of its shape, lies flat in our files, so that a rank can read a range of it.
    """
    shapes = _shapes(source)
    laid = [
        spec if _stays_whole(spec, shapes) or spec.kind == BUFFER else replace(spec, shape=(spec.numel,))
        for spec in source.specs
    ]
    runs = split_by_size(laid, max_bytes)
    return {f"part-{number:05d}.safetensors": run for number, run in enumerate(runs)}


def write_ours(source: Source, run: Path, max_bytes: int, tick: Tick) -> None:
    """A run folder with one checkpoint in it, in as many files as `max_bytes` asks for."""
    folder = run / step_name(source)
    folder.mkdir()
    originals = {spec.key: spec for spec in source.specs}
    shards = shards_of(source, max_bytes)
    for name, specs in shards.items():
        with SafetensorsFile(folder / name, {spec.key: spec for spec in specs}) as file:
            for spec in specs:
                file.write(spec.key, source.read(originals[spec.key]).reshape(spec.shape))
                tick(spec)
    (folder / INDEX).write_text(_index(source, folder, shards).to_json())
    (run / LATEST).write_text(folder.name)
    if source.kept:
        (run / HUGGING_FACE).mkdir()
        for path in source.kept:
            shutil.copy(path, run / HUGGING_FACE / path.name)


def _index(source: Source, folder: Path, shards: dict[str, list[Spec]]) -> Index:
    shapes = _shapes(source)
    chunks = [
        Chunk(spec.kind, spec.name, 0, 0 if _stays_whole(spec, shapes) else spec.numel, name, spec.key)
        for name, specs in shards.items()
        for spec in specs
    ]
    return Index(
        step=source.step,
        world_size=1,
        layout=f"whole tensors, converted from {source.form}",
        state={**source.engine, "num_steps": source.num_steps, "user": source.user},
        shapes={name: list(shape) for name, shape in shapes.items()},
        groups=source.groups,
        ties=source.ties,
        versions={"shardwise": __version__, "torch": torch.__version__, "python": platform.python_version()},
        files=[File(name, (folder / name).stat().st_size, checksum(folder / name)) for name in shards],
        chunks=chunks,
    )


def _shapes(source: Source) -> dict[str, tuple[int, ...]]:
    return {spec.name: spec.shape for spec in source.weights}


def _stays_whole(spec: Spec, shapes: dict[str, tuple[int, ...]]) -> bool:
    """Whether it is a state that is not made of its parameter's elements. `step` never is, not even for a parameter
    that is a single number too."""
    return spec.is_state and (spec.kind == "state.step" or spec.shape not in (shapes[spec.name], (spec.numel,)))
