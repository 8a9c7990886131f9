"""What ranks tell each other when they meet anew."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Told:
    """What a rank tells the others when they regroup."""

    begun: int
    """Iterations that it has begun."""
    taken_in: dict[int, int]
    """By version of the state, the iteration that it came of."""
    label: int
    """Its newest layout that is complete."""
    steps: dict[int, list[int]]
    """By layout, the versions of the state that it has."""
    results: list[tuple[int, int, Any]]
    """What came of calls outside of a step, by iteration and number."""

    def message(self) -> bytes:
        return json.dumps(self.__dict__).encode()

    @classmethod
    def of(cls, message: bytes) -> Told:
        said = json.loads(message)
        steps = {int(label): versions for label, versions in said.pop("steps").items()}
        taken_in = {int(version): iteration for version, iteration in said.pop("taken_in").items()}
        results = [(one[0], one[1], one[2]) for one in said.pop("results")]
        return cls(steps=steps, taken_in=taken_in, results=results, **said)
