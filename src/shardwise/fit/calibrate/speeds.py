"""What ranks measure, as they tell it to the process that has started them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
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
    launch_seconds: float
    messages: Sequence[tuple[int, float]]
    exchanges: Sequence[tuple[int, float]] = ()
    device_memory_bytes: int | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)
