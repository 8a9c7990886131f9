"""What ranks report to each other when they regroup."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.comm import World
from shardwise.comm.regrouping import OF_ENGINE
from shardwise.errors import LostStateError

IMAGES, RECOVERY = "images", "recovery"
"""Subjects of what they exchange after regrouping."""


@dataclass(frozen=True)
class Report:
    """What a rank reports when ranks regroup."""

    begun: int
    """Iterations that it has begun, or prepared (`Iterations.is_prepared`)."""
    ended: int
    """The last iteration that it has ended."""
    made: dict[int, int]
    """By version of the state, the iteration that made it."""
    label: int
    """Its newest complete layout."""
    versions: dict[int, list[int]]
    """By layout, the versions of the state that it has."""
    results: list[tuple[int, int, Any]]
    """Results of calls outside a step: iteration, number, encoded value."""
    num_layouts: int
    """Layouts that it has numbered: one more where it has come further than others in making one."""
    changed: str
    """What of its state has other bits than at the end of the last step, if that is known: empty if none has."""
    choice: list[dict[str, int]] | None
    """The smaller meshes that are to be taken, in order; `None` if it has not heard of a choice."""

    def message(self) -> bytes:
        return OF_ENGINE + json.dumps(self.__dict__).encode()

    @classmethod
    def of(cls, message: bytes) -> Report:
        fields = json.loads(message.removeprefix(OF_ENGINE))
        versions = {int(label): of_layout for label, of_layout in fields.pop("versions").items()}
        made = {int(version): iteration for version, iteration in fields.pop("made").items()}
        results = [(one[0], one[1], one[2]) for one in fields.pop("results")]
        return cls(versions=versions, made=made, results=results, **fields)


def check_agreement(world: World, sent: dict[str, Any], ranks: Sequence[int]) -> None:
    """Check that `ranks` send the same, except for `came`, which is for those that join. All ranks call."""
    received = world.exchange(json.dumps(sent).encode(), RECOVERY)
    others = [json.loads(received[rank]) for rank in ranks]
    if any({**other, "came": None} != {**others[0], "came": None} for other in others):
        raise LostStateError(
            f"The ranks would continue from different states: {others}. Start again from the last checkpoint."
        )
