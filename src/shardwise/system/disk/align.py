"""Offsets in a file that is read and written past the page cache: pure arithmetic on bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shardwise.system.even_parts import round_up
from shardwise.system.units import PAGE as PAGE


def down(num_bytes: int, step: int = PAGE) -> int:
    """The largest multiple of `step` that is at most `num_bytes`."""
    return num_bytes // step * step


def requests(start: int, stop: int, block_bytes: int) -> Iterator[tuple[int, int]]:
    """Bytes `start` to `stop`, cut at multiples of `block_bytes`, so that no request covers parts of two blocks."""
    while start < stop:
        end = min(stop, down(start, block_bytes) + block_bytes)
        yield start, end
        start = end


@dataclass(frozen=True)
class Region:
    """Where something lies in a file: it starts on a page boundary, and the rest of its last page is unused."""

    offset: int
    num_bytes: int

    @property
    def padded_bytes(self) -> int:
        return round_up(self.num_bytes, PAGE)

    @property
    def stop(self) -> int:
        return self.offset + self.padded_bytes


def layout(sizes: Mapping[str, int]) -> dict[str, Region]:
    """A region of one file for each name, one after the other; `sizes` is in bytes."""
    regions: dict[str, Region] = {}
    offset = 0
    for name, num_bytes in sizes.items():
        regions[name] = Region(offset, num_bytes)
        offset = regions[name].stop
    return regions
