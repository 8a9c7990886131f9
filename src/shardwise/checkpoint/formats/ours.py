"""Reads and writes checkpoints of shardwise as whole tensors, without an engine or ranks.

The only module here that knows the file layout of `checkpoint/`.
"""

from __future__ import annotations

import platform
import shutil
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint import checkpoints_in, newest
from shardwise.checkpoint.document import read_document
from shardwise.checkpoint.folder import LATEST, step_name
from shardwise.checkpoint.formats.source import BUFFER, PARAM, STATE, Source, Spec, StoredFile
from shardwise.checkpoint.formats.stream import SafetensorsFile, split_by_size
from shardwise.checkpoint.index import INDEX, Chunk, File, Index, block_bytes_of
from shardwise.checkpoint.index_schema import RANK, read_index
from shardwise.checkpoint.json_codec import decode, dtype_name, dtype_of, encode
from shardwise.checkpoint.read import Reader
from shardwise.checkpoint.wrappers import named_as
from shardwise.errors import CheckpointError
from shardwise.optim import SCALAR_STATES, WHOLE_STATES
from shardwise.plan.placement import Span
from shardwise.system.checksum import crc32
from shardwise.version import __version__

Tensor = torch.Tensor
Tick = Callable[[Spec], None]
FORM = "shardwise"
HUGGING_FACE = "huggingface"
"""A folder in a run with the other files of a Hugging Face model, for converting back."""


def is_ours(path: Path) -> bool:
    """Whether `path` is a checkpoint, or a run folder with one in it."""
    if (path / INDEX).exists() or checkpoints_in(path):
        return True
    return (path / LATEST).exists() and any(path.glob("step-*"))


def open_ours(path: Path) -> Source:
    """The checkpoint at `path`, or the newest of the run at `path`."""
    folder = newest(path)
    if folder is None:
        raise CheckpointError(f"There is no checkpoint in {path}.")
    index = named_as(read_index(folder))
    state = decode(index.state)  # `read_index` has tried it
    reader = Reader(folder, index)
    return Source(
        form=FORM,
        path=folder,
        specs=tuple(_specs(index)),
        read=lambda spec: _read(reader, spec),
        step=index.step,
        num_steps=int(state.pop("num_steps")),
        groups=[decode(group) for group in index.groups],
        ties=dict(index.ties),
        numbers={name: decode(numbers) for name, numbers in index.numbers.items()},
        user=dict(state.pop("user")),
        engine=state,
        facts={"world_size": index.world_size, "layout": index.layout, "versions": index.versions},
        files=tuple(StoredFile(file.name, file.num_bytes) for file in index.files),
        optimizer=index.optimizer,
        kept=_kept(folder.parent / HUGGING_FACE),
        check=lambda: _check(reader),
        remembered=lambda: _remembered(reader),
    )


def _kept(folder: Path) -> tuple[Path, ...]:
    """Regular files to copy when the checkpoint is converted; links are skipped, because they may lead anywhere."""
    found = sorted(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else []
    return tuple(path for path in found if path.is_file() and not path.is_symlink())


def _specs(index: Index) -> Iterator[Spec]:
    """One spec per tensor, however many chunks it has; the ranks' own memories are not tensors."""
    firsts: dict[tuple[str, str], Chunk] = {}
    for chunk in index.chunks:
        if chunk.kind in (PARAM, BUFFER) or chunk.kind.startswith(STATE):
            firsts.setdefault((chunk.kind, chunk.name), chunk)
    for (kind, name), chunk in firsts.items():
        shape = index.shapes[name] if chunk.shape is None else chunk.shape
        plain = firsts[PARAM, name] if chunk.is_narrow else chunk  # other formats have no narrow states
        yield Spec(kind, name, tuple(shape), dtype_of(plain.dtype))


def _read(reader: Reader, spec: Spec) -> Tensor:
    """Read a tensor, comparing each byte with its checksum. Files are only open meanwhile."""
    with reader:
        whole = reader.whole(spec.kind, spec.name)
        if whole is not None:
            return reader.tensor(whole)
        reads = reader.reads(spec.kind, spec.name, Span(0, spec.numel))
        for read in reads:  # check file sizes before memory is allocated
            reader.check_file(reader.file_of(read))
        out = torch.empty(spec.numel, dtype=spec.dtype, device="cpu")
        for read in reads:
            reader.fill(read, out)
        return out.view(spec.shape)


def _remembered(reader: Reader) -> dict[str, Any]:
    with reader:
        document = read_document(reader, 0)
    return {} if document is None else document.objects


def _check(reader: Reader) -> Iterator[str]:
    """An error for each file that was changed since it was written, and for each rank whose memories cannot be read.

    Bytes of tensors are checked when they are read.
    """
    damaged = set()
    for file in reader.index.files:
        try:
            with reader:
                reader.check_file(file)
        except CheckpointError as error:
            damaged.add(file.name)
            yield str(error)
    for chunk in reader.index.chunks:
        if chunk.kind == RANK and chunk.file not in damaged:
            try:
                with reader:
                    read_document(reader, int(chunk.name))
            except CheckpointError as error:
                yield str(error)


def shards_of(source: Source, max_bytes: int) -> dict[str, list[Spec]]:
    """The tensors of each file, in their shapes there: flat, so that a rank can read a range."""
    laid = [replace(spec, shape=(spec.numel,)) for spec in source.specs]
    return {f"part-{number:05d}.safetensors": run for number, run in enumerate(split_by_size(laid, max_bytes))}


def checkpoint_name(source: Source) -> str:
    return step_name(source.step)


def write_ours(source: Source, run: Path, max_bytes: int, tick: Tick) -> None:
    """Write a run folder with one checkpoint, in files of at most `max_bytes`."""
    folder = run / checkpoint_name(source)
    folder.mkdir()
    originals = {spec.key: spec for spec in source.specs}
    shapes = {spec.name: spec.shape for spec in source.weights}
    files, chunks = [], []
    for name, specs in shards_of(source, max_bytes).items():
        with SafetensorsFile(folder / name, {spec.key: spec for spec in specs}) as file:
            for spec in specs:
                tensor = source.read(originals[spec.key]).reshape(spec.shape)
                file.write(spec.key, tensor)
                chunks.append(_chunk(name, originals[spec.key], shapes, file.offset(spec.key), tensor))
                tick(spec)
        files.append(_file(folder / name))
    (folder / INDEX).write_text(_index(source, shapes, files, chunks).to_json())
    read_index(folder)  # raises if the result could not be resumed from
    (run / LATEST).write_text(folder.name)
    if source.kept:
        (run / HUGGING_FACE).mkdir()
        for path in source.kept:
            shutil.copy(path, run / HUGGING_FACE / path.name)


def _chunk(file: str, spec: Spec, shapes: dict[str, tuple[int, ...]], offset: int, tensor: Tensor) -> Chunk:
    content = memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    size = block_bytes_of(len(content))
    is_whole = _stays_whole(spec, shapes)
    return Chunk(
        kind=spec.kind,
        name=spec.name,
        start=0,
        stop=0 if is_whole else spec.numel,
        file=file,
        key=spec.key,
        dtype=dtype_name(spec.dtype),
        offset=offset,
        num_bytes=len(content),
        block_bytes=size,
        crc32=[crc32(content[start : start + size]) for start in range(0, len(content), size)],
        shape=list(spec.shape) if is_whole else None,
    )


def _stays_whole(spec: Spec, shapes: dict[str, tuple[int, ...]]) -> bool:
    """Whether it is a state that is not made of its parameter's elements. Some are such even where they have its
    shape."""
    is_other = spec.kind.removeprefix(STATE) in SCALAR_STATES | WHOLE_STATES
    return spec.is_state and (is_other or spec.shape != shapes[spec.name])


def _file(path: Path) -> File:
    with path.open("rb") as file:
        length = file.read(8)
        head = length + file.read(int.from_bytes(length, "little"))
    return File(path.name, path.stat().st_size, len(head), zlib.crc32(head))


def _index(source: Source, shapes: dict[str, tuple[int, ...]], files: list[File], chunks: list[Chunk]) -> Index:
    state: dict[str, Any] = {**source.engine, "num_steps": source.num_steps, "user": source.user}
    return Index(
        step=source.step,
        world_size=1,
        layout=f"whole tensors, converted from {source.form}",
        state=encode(state),
        shapes={name: list(shape) for name, shape in shapes.items()},
        groups=[encode(group) for group in source.groups],
        ties=source.ties,
        versions={"shardwise": __version__, "torch": torch.__version__, "python": platform.python_version()},
        numbers={name: encode(numbers) for name, numbers in source.numbers.items()},
        files=files,
        chunks=chunks,
        optimizer=source.optimizer,
    )
