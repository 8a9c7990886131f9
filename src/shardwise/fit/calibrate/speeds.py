"""What ranks measure, as they tell it to the process that has started them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Speeds:
    """What one of `num_ranks` ranks gets of the machine while all work. By dtype, products are (m, n, k, seconds) and
    attention (length, FLOPs, seconds), and memory (bytes, seconds); messages are (bytes of the whole buffer, seconds)
    of all-gathers, and exchanges the same of all-to-alls."""

    num_ranks: int
    products: Mapping[str, Sequence[tuple[int, int, int, float]]]
    attention: Mapping[str, Sequence[tuple[int, float, float]]]
    attention_backward: Mapping[str, Sequence[tuple[int, float, float]]]
    memory: Mapping[str, Sequence[tuple[float, float]]]
    copy_bytes_per_second: float
    """Read and written by a copy in caches; `flat_bytes_per_second` by one of memory that is in none."""
    flat_bytes_per_second: float
    launch_seconds: float
    messages: Sequence[tuple[int, float]]
    exchanges: Sequence[tuple[int, float]] = ()
    device_memory_bytes: int | None = None

    @classmethod
    def fastest(cls, rounds: Sequence[Speeds]) -> Speeds:
        """The least time, or the highest rate, of each figure in rounds of the same measurements."""
        first = rounds[0]
        return replace(
            first,
            products=_least_by_dtype([one.products for one in rounds]),
            attention=_least_by_dtype([one.attention for one in rounds]),
            attention_backward=_least_by_dtype([one.attention_backward for one in rounds]),
            memory=_least_by_dtype([one.memory for one in rounds]),
            copy_bytes_per_second=max(one.copy_bytes_per_second for one in rounds),
            flat_bytes_per_second=max(one.flat_bytes_per_second for one in rounds),
            launch_seconds=min(one.launch_seconds for one in rounds),
            messages=_least([one.messages for one in rounds]),
            exchanges=_least([one.exchanges for one in rounds]),
        )

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def _least(rounds: Sequence[Sequence[tuple[Any, ...]]]) -> list[Any]:
    """Of rows that end with their seconds, each with the least that a round has."""
    return [min(rows, key=lambda row: row[-1]) for rows in zip(*rounds, strict=True)]


def _least_by_dtype(rounds: Sequence[Mapping[str, Sequence[tuple[Any, ...]]]]) -> dict[str, list[Any]]:
    return {dtype: _least([one[dtype] for one in rounds]) for dtype in rounds[0]}
