"""Reads files of `torch.save` as data: tensors, numbers and containers, and `Made` for everything else.

A file is a zip archive with `data.pkl` and one uncompressed entry `data/KEY` per storage; before torch 1.6 it was a
sequence of pickles followed by the storages. Tensors are views of the mapped file, so only the pages that are used are
read. See [Note: inert pickles] in `checkpoint/formats/opcodes.py` for why torch's own loader is not used.
"""

from __future__ import annotations

import io
import math
import mmap
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch

from shardwise.checkpoint.formats.opcodes import Made, Name, Outside, read_pickle
from shardwise.errors import CheckpointError
from shardwise.system.safe_files import open_regular

Tensor = torch.Tensor
MAX_DEPTH = 64
MAX_PICKLE_BYTES = 2**29
MAX_EXPANDED = 2**24
"""The most elements of a tensor with more elements than its storage, in which some repeat."""
LEGACY_MAGIC, LEGACY_PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
LOCAL_HEAD_BYTES, LOCAL_SIGNATURE = 30, b"PK\x03\x04"

STORAGES = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
    "torch.ComplexDoubleStorage": torch.complex128,
    "torch.ComplexFloatStorage": torch.complex64,
    "torch.storage.UntypedStorage": torch.uint8,
    "torch.UntypedStorage": torch.uint8,
}
DTYPES = {f"torch.{name}": one for name, one in vars(torch).items() if isinstance(one, torch.dtype)}


def load_file(path: Path) -> Any:
    """The object in the `torch.save` file `path`, on the CPU; its tensors stay on disk until they are used."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            raise CheckpointError(f"{path} is empty; it was not written completely.")
        raw = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
        if file.read(len(LOCAL_SIGNATURE)) == LOCAL_SIGNATURE:
            return _load_archive(file, raw, str(path))
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _load_legacy(content, raw, str(path))


def load_bytes(content: bytearray, where: str) -> Any:
    """The object that `torch.save` wrote to `content`. `where` names it in errors. Tensors are views of `content`."""
    if not content:
        raise CheckpointError(f"{where} is empty; it was not written completely.")
    return _load_archive(io.BytesIO(content), torch.frombuffer(content, dtype=torch.uint8), where)


def _load_archive(file: BinaryIO, raw: Tensor, where: str) -> Any:
    entries = _entries(file, where)
    heads = [name for name in entries if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(heads) != 1 or any(name.endswith("/constants.pkl") for name in entries):
        raise CheckpointError(
            f"{where} was not written by torch.save; TorchScript files and other archives cannot be read."
        )
    root = heads[0].removesuffix("data.pkl")
    order = _content(raw, entries[f"{root}byteorder"], where) if f"{root}byteorder" in entries else None
    if order is not None and bytes(order.tolist()) != b"little":
        raise CheckpointError(f"{where} was written on a big-endian machine, which cannot be read.")
    pickled = _content(raw, entries[heads[0]], where)
    if pickled.numel() > MAX_PICKLE_BYTES:
        raise CheckpointError(f"{where} has {pickled.numel()} bytes that are not tensors, which is too many to read.")
    value, _ = read_pickle(pickled.numpy().tobytes(), where)

    def storage(key: str, num_bytes: int) -> Tensor:
        entry = entries.get(f"{root}data/{key}")
        if entry is None or entry.file_size < num_bytes:
            raise CheckpointError(f"{where} lacks bytes of a tensor (storage {key}); it is damaged.")
        return _content(raw, entry, where)[:num_bytes]

    return _Reviver(storage, where).revive(value)


def _entries(file: BinaryIO, where: str) -> dict[str, zipfile.ZipInfo]:
    try:
        listed = zipfile.ZipFile(file).infolist()
    except (  # errors of zipfile for damaged, truncated or forged archives
        *(zipfile.BadZipFile, NotImplementedError, OSError, EOFError, ValueError, OverflowError),
        *(IndexError, struct.error),
    ) as error:
        raise CheckpointError(f"{where} cannot be read: it is damaged, or was not written completely.") from error
    entries = {entry.filename: entry for entry in listed}
    if len(entries) != len(listed):
        raise CheckpointError(f"{where} has two entries of the same name; it is damaged, or was made to mislead.")
    return entries


def _content(raw: Tensor, entry: zipfile.ZipInfo, where: str) -> Tensor:
    """The bytes of an entry, in place in the archive."""
    if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1 or entry.compress_size != entry.file_size:
        raise CheckpointError(f"{where} has compressed or encrypted entries, which torch does not write.")
    at = entry.header_offset
    local = bytes(raw[at : at + LOCAL_HEAD_BYTES].tolist()) if 0 <= at < raw.numel() else b""
    if len(local) < LOCAL_HEAD_BYTES or not local.startswith(LOCAL_SIGNATURE):
        raise CheckpointError(f"{where} is damaged at {entry.filename!a}.")
    name_bytes, extra_bytes = struct.unpack("<HH", local[26:30])
    start = at + LOCAL_HEAD_BYTES + name_bytes + extra_bytes
    if start + entry.file_size > raw.numel():
        raise CheckpointError(f"{where} ends within {entry.filename!a}; it was truncated.")
    return raw[start : start + entry.file_size]


def _load_legacy(content: mmap.mmap, raw: Tensor, where: str) -> Any:
    """The format before torch 1.6: magic number, protocol, machine, object, keys of storages; then their bytes."""
    at, found = 0, []
    for number in range(5):
        value, at = read_pickle(content, where, at)
        found.append(value)
        if number == 0 and (type(value), value) != (int, LEGACY_MAGIC):
            raise CheckpointError(f"{where} was not written by torch.save.")
    _, protocol, machine, value, keys = found
    if protocol != LEGACY_PROTOCOL or not isinstance(machine, dict) or machine.get("little_endian") is not True:
        raise CheckpointError(f"{where} was written by a version of torch, or on a machine, that is not supported.")
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise CheckpointError(f"{where} is damaged: it does not say which tensors it has.")
    sizes: dict[str, int] = {}
    _Reviver(lambda key, num_bytes: _note(sizes, key, num_bytes), where).revive(value)
    places: dict[str, Tensor] = {}
    for key in keys:
        start = at + 8
        at = start + sizes.get(key, 0)
        if key not in sizes or at > raw.numel():
            raise CheckpointError(f"{where} ends within its tensors; it was truncated.")
        places[key] = raw[start:at]

    def storage(key: str, num_bytes: int) -> Tensor:
        if key not in places or places[key].numel() < num_bytes:
            raise CheckpointError(f"{where} lacks bytes of a tensor (storage {key}); it is damaged.")
        return places[key]

    return _Reviver(storage, where).revive(value)


def _note(sizes: dict[str, int], key: str, num_bytes: int) -> None:
    sizes[key] = max(num_bytes, sizes.get(key, 0))


class _Reviver:
    """Builds tensors, sizes and dtypes from their descriptions, and keeps everything else. Each part is done once.

    `storage` returns the bytes of a storage by its key, or None to leave its tensors out.
    """

    def __init__(self, storage: Callable[[str, int], Tensor | None], where: str) -> None:
        self._storage = storage
        self._where = where
        self._done: dict[int, Any] = {}
        self._kept: list[Any] = []  # keeps objects alive, so that their ids stay valid

    def revive(self, value: Any, depth: int = 0) -> Any:
        if isinstance(value, Name):
            return DTYPES.get(value.full, value)
        if not isinstance(value, dict | list | tuple | Made):
            return value
        if id(value) in self._done:
            return self._done[id(value)]
        if depth > MAX_DEPTH:
            raise CheckpointError(f"{self._where} cannot be read: it is nested deeper than {MAX_DEPTH}.")
        self._kept.append(value)
        revived = self._revived(value, depth + 1)
        self._done[id(value)] = revived
        return revived

    def _revived(self, value: Any, depth: int) -> Any:
        if isinstance(value, dict):
            return {key: self.revive(item, depth) for key, item in value.items()}
        if isinstance(value, list | tuple):
            items = [self.revive(item, depth) for item in value]
            return items if isinstance(value, list) else tuple(items)
        args = value.args
        match value.name:
            case "torch._utils._rebuild_tensor_v2" | "torch._utils._rebuild_tensor" if len(args) >= 4:
                return self._tensor(args[0], args[1], args[2], args[3], None)
            case "torch._utils._rebuild_tensor_v3" if len(args) >= 7:
                return self._tensor(args[0], args[1], args[2], args[3], self.revive(args[6]))
            case "torch._utils._rebuild_parameter" | "torch._utils._rebuild_parameter_with_state" if args:
                return self.revive(args[0], depth)
            case "torch._tensor._rebuild_from_type_v2" if len(args) >= 3 and isinstance(args[0], Name):
                if isinstance(args[2], tuple):
                    return self.revive(Made(args[0].full, args[2]), depth)
            case "torch.Size" if len(args) == 1 and _are_sizes(args[0]):
                return tuple(args[0])
            case "collections.defaultdict":
                return self.revive(value.items, depth)
        made = Made(value.name, self.revive(value.args, depth))
        made.state = self.revive(value.state, depth)
        return made

    def _tensor(self, outside: Any, offset: Any, size: Any, stride: Any, dtype: Any) -> Tensor | None:
        key, held, numel = self._storage_of(outside)
        dtype = held if dtype is None else dtype
        if not isinstance(dtype, torch.dtype) or not _are_sizes(size) or not _are_sizes(stride):
            raise CheckpointError(f"{self._where} describes a tensor in a way that torch does not.")
        num_bytes = numel * held.itemsize
        is_empty = not math.prod(size)
        if len(size) != len(stride) or not _are_sizes((offset,)):
            raise CheckpointError(f"{self._where} describes a tensor in a way that torch does not.")
        last = offset + sum((s - 1) * t for s, t in zip(size, stride, strict=True))
        if not is_empty and (last + 1) * dtype.itemsize > num_bytes:
            raise CheckpointError(f"{self._where} has a tensor of shape {list(size)} that exceeds its storage.")
        if math.prod(size) > max(MAX_EXPANDED, num_bytes // dtype.itemsize):
            raise CheckpointError(f"{self._where} has a tensor of {math.prod(size)} elements over {num_bytes} bytes.")
        content = self._storage(key, num_bytes)
        if content is None:
            return None
        if is_empty:
            return torch.empty(size, dtype=dtype, device="cpu")
        if content.data_ptr() % dtype.itemsize or content.storage_offset() % dtype.itemsize:
            content = content.clone()
        typed = content[: num_bytes // dtype.itemsize * dtype.itemsize].view(dtype)
        return typed.as_strided(size, stride, typed.storage_offset() + offset)

    def _storage_of(self, outside: Any) -> tuple[str, torch.dtype, int]:
        match outside.key if isinstance(outside, Outside) else None:
            case ("storage", Name() as kind, str() as key, _, int() as numel, *views) if numel >= 0:
                if kind.full in STORAGES and views in ([], [None]):
                    return key, STORAGES[kind.full], numel
                raise CheckpointError(f"{self._where} has tensors of {kind.full}, which cannot be read.")
        raise CheckpointError(f"{self._where} describes a tensor in a way that torch does not.")


def _are_sizes(value: Any) -> bool:
    return (
        isinstance(value, tuple | list)
        and len(value) <= 64
        and all(type(one) is int and 0 <= one < 2**62 for one in value)
    )
