"""One rank's file as it will lie on disk: a safetensors header, then every tensor's bytes, laid out before writing.

The file format is that of safetensors (https://github.com/huggingface/safetensors, README): eight bytes with the length
of a JSON header, the header, and the tensors without gaps. It is not written by `safetensors.torch.save_file`, because
that holds all bytes twice, cannot write in slices, and cannot take checksums on the way.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from shardwise.checkpoint.content import Content, Entry
from shardwise.checkpoint.index import Chunk, File, block_bytes_of
from shardwise.checkpoint.json_codec import bytes_tensor, dtype_name
from shardwise.errors import CheckpointError
from shardwise.init.safetensors_headers import NAMES
from shardwise.memory import Rows
from shardwise.plan.placement import Box, Span
from shardwise.system.checksum import crc32
from shardwise.system.disk import PAGE
from shardwise.system.even_parts import round_up

WINDOW = 2**24
"""Bytes written at once. Smaller writes cost throughput, as measured; larger ones gain none."""


@dataclass(frozen=True)
class Part:
    """One tensor of the file: elements `span` of `name`, from byte `offset` of the file on."""

    kind: str
    name: str
    span: Span
    dtype: torch.dtype
    num_bytes: int
    offset: int
    shape: tuple[int, ...] | None = None
    """For a separate tensor, which is not made of a parameter's elements."""
    is_hidden: bool = False
    """Whether the model has no view of its memory; see `Entry`."""
    is_narrow: bool = False
    box: Box | None = None
    """The part whose elements `span` counts, if it is not all of `name`."""

    @property
    def key(self) -> str:
        return f"{self.kind}/{self.name}"

    @property
    def in_file(self) -> Span:
        """Its byte range in the file."""
        return Span(self.offset, self.offset + self.num_bytes)


@dataclass(frozen=True)
class Image:
    """What one rank writes: `head`, then `parts`, whose bytes are those of `sources` while there are any."""

    name: str
    head: bytes
    parts: tuple[Part, ...]
    sources: tuple[torch.Tensor, ...]
    """One live, flat tensor per part; none once they have been copied."""
    rows: tuple[Rows | None, ...] = ()
    """For each source, the rows through which it is read if it lies on a disk."""

    @property
    def num_bytes(self) -> int:
        return self.parts[-1].in_file.stop if self.parts else len(self.head)

    @property
    def padded_bytes(self) -> int:
        return round_up(self.num_bytes, PAGE)

    @property
    def has_rows(self) -> bool:
        """Whether any of it lies on a disk."""
        return any(rows is not None for rows in self.rows)

    @property
    def without_sources(self) -> Image:
        """The same image without references to the model's memory."""
        return Image(self.name, self.head, self.parts, ())

    def file(self, head_crc32: int) -> File:
        return File(self.name, self.num_bytes, len(self.head), head_crc32)

    def chunks(self, sums: list[list[int]]) -> list[Chunk]:
        """One chunk per part, with its checksums."""
        return [
            Chunk(
                kind=part.kind,
                name=part.name,
                start=part.span.start if part.shape is None else 0,
                stop=part.span.stop if part.shape is None else 0,
                file=self.name,
                key=part.key,
                dtype=dtype_name(part.dtype),
                offset=part.offset,
                num_bytes=part.num_bytes,
                block_bytes=block_bytes_of(part.num_bytes),
                crc32=own,
                shape=None if part.shape is None else list(part.shape),
                is_narrow=part.is_narrow,
                box=None if part.box is None else part.box.to_json()["ranges"],
            )
            for part, own in zip(self.parts, sums, strict=True)
        ]

    def read(self, start: int, out: torch.Tensor) -> None:
        """Copy the image's bytes from `start` on into `out`, from live memory."""
        window = Span(start, start + out.numel())
        out[max(0, self.num_bytes - start) :].zero_()
        head = Span(0, len(self.head)).overlap(window)
        if head.numel:
            out[head.start - start : head.stop - start].copy_(bytes_tensor(self.head[head.as_slice]))
        for part, source, rows in zip(self.parts, self.sources, self.rows, strict=True):
            common = part.in_file.overlap(window)
            if common.numel:
                here = _bytes_of(source)[common.start - part.offset : common.stop - part.offset]
                there = out[common.start - start : common.stop - start]
                if rows is None:
                    there.copy_(here)
                else:
                    rows.read(here, there)

    def windows(self, stage: torch.Tensor, read: Callable[[int, torch.Tensor], None]) -> Iterator[memoryview]:
        """The file in order. `read`, with the arguments of `Image.read`, fills two windows of `stage` in turn."""
        for number, start in enumerate(range(0, self.padded_bytes, WINDOW)):
            at = number % 2 * WINDOW
            window = stage[at : at + min(WINDOW, self.padded_bytes - start)]
            read(start, window)
            yield memoryview(window.numpy().data)


def image_of(name: str, content: Content, documents: Mapping[str, bytes]) -> Image:
    """The file `name` with what this rank writes of `content`, and `documents` by key, such as `rank/0`.

    Raises `CheckpointError` for a dtype that the format does not support.
    """
    sources = [_source(entry) for entry in content.entries if entry.written.numel]
    for key, text in documents.items():
        kind, _, label = key.partition("/")
        sources.append(_Source(kind, label, NO_SPAN, bytes_tensor(text), (len(text),)))
    order: dict[Rows | None, int] = {None: 0}
    for one in (entry.rows for entry in content.entries):
        order.setdefault(one, len(order))
    # So that each tensor starts at a multiple of its element size, and rows of a disk are in the order in which a step
    # updates them.
    sources.sort(key=lambda source: (-source.tensor.element_size(), order[source.rows]))
    head = _head(sources)
    parts, offset = [], len(head)
    for kind, label, span, tensor, shape, is_hidden, is_narrow, box, _ in sources:
        parts.append(Part(kind, label, span, tensor.dtype, tensor.nbytes, offset, shape, is_hidden, is_narrow, box))
        offset += tensor.nbytes
    tensors, rows = (source.tensor for source in sources), (source.rows for source in sources)
    return Image(name, head, tuple(parts), tuple(tensors), tuple(rows))


NO_SPAN = Span(0, 0)


class _Source(NamedTuple):
    kind: str
    name: str
    span: Span
    tensor: torch.Tensor
    """Flat."""
    shape: tuple[int, ...] | None
    is_hidden: bool = False
    is_narrow: bool = False
    box: Box | None = None
    rows: Rows | None = None


def _source(entry: Entry) -> _Source:
    """The part of an entry that this rank writes."""
    tensor = entry.tensor.detach()
    if tensor.dtype not in NAMES or tensor.is_complex():
        raise CheckpointError(f"{entry.key} is {dtype_name(tensor.dtype)}, which safetensors files cannot hold.")
    flat = tensor if tensor.dim() == 1 and tensor.is_contiguous() else tensor.contiguous().reshape(-1)
    if entry.is_whole:
        return _Source(entry.kind, entry.name, NO_SPAN, flat, tuple(tensor.shape), entry.is_hidden, entry.is_narrow)
    if entry.written != entry.span:
        mine = entry.written.within(entry.span)
        flat = flat[mine.as_slice]
    marks = entry.is_hidden, entry.is_narrow
    return _Source(entry.kind, entry.name, entry.written, flat, None, *marks, entry.box, entry.rows)


def _bytes_of(source: torch.Tensor) -> torch.Tensor:
    return source.reshape(-1).view(torch.uint8)


def _head(sources: list[_Source]) -> bytes:
    """The length and the JSON, padded with spaces to a multiple of 64 bytes, as the format allows."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for kind, label, _, tensor, *_ in sources:
        entries[f"{kind}/{label}"] = {
            "dtype": NAMES[tensor.dtype],
            "shape": [tensor.numel()],
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(entries).encode()
    text += b" " * (-(8 + len(text)) % 64)
    return len(text).to_bytes(8, "little") + text


class Sums:
    """The checksums of an image, computed from its bytes in the order in which they are written."""

    def __init__(self, image: Image) -> None:
        regions = [Span(0, len(image.head))]
        regions += [part.in_file for part in image.parts]
        self._blocks = _blocks(regions)
        self._sums: list[list[int]] = [[] for _ in regions]
        self._position = 0
        self._crc32 = 0
        self._block, self._region = next(self._blocks)

    def add(self, window: memoryview) -> None:
        """Add the bytes that follow those of the last call. Bytes after the image are padding, and not summed."""
        start, self._position = self._position, self._position + len(window)
        while self._block is not None:
            common = self._block.overlap(Span(start, self._position))
            self._crc32 = crc32(window[common.start - start : common.stop - start], self._crc32)
            if self._block.stop > self._position:
                return
            self._sums[self._region].append(self._crc32)
            self._crc32 = 0
            self._block, self._region = next(self._blocks, (None, 0))

    @property
    def of_head(self) -> int:
        return self._sums[0][0]

    @property
    def of_parts(self) -> list[list[int]]:
        return self._sums[1:]


def _blocks(regions: list[Span]) -> Iterator[tuple[Span | None, int]]:
    """The ranges with checksums of their own, and the number of the region of each. The first region, the head, is one
    range."""
    for number, region in enumerate(regions):
        size = block_bytes_of(region.numel) if number else region.numel
        for start in range(region.start, region.stop, size):
            yield Span(start, min(start + size, region.stop)), number
