"""How fast the ranks of a generation train, as their first rank tells the launcher."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from shardwise.system import plain_data

_SHAPE = {"size": int, "step_seconds": float, "error": float, "predicted": {str: float}}


@dataclass(frozen=True)
class Pace:
    """`size` ranks take `step_seconds` for a step, with a relative standard `error`. `predicted` has seconds of a step
    by the number of ranks, as far as they are predicted."""

    size: int
    step_seconds: float
    error: float
    predicted: Mapping[int, float] = field(default_factory=dict)

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Pace:
        """Raises `ValueError` for anything else."""
        plain: dict[str, Any] = plain_data.read(text, _SHAPE)
        predicted = {int(size): seconds for size, seconds in plain.pop("predicted").items()}
        if not (plain["size"] > 0 and plain["step_seconds"] > 0 and plain["error"] >= 0):
            raise ValueError("it is not a pace")
        if not all(size > 0 and seconds > 0 for size, seconds in predicted.items()):
            raise ValueError("it is not a pace")
        return cls(**plain, predicted=predicted)
