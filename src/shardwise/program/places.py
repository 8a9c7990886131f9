"""What a rank computes between two moments of a program: the places by which its time is counted and shown.

Units that differ by a number count as one place, `forward h.*`, so that a rank's message about its time stays small.
"""

from __future__ import annotations

from shardwise.program.action import Moment
from shardwise.system.telemetry import OTHER
from shardwise.system.telemetry.timeline import alike

MOVES = "casts and copies"
"""What actions do themselves, without waiting for others."""
OPTIMIZER = "the optimizer"
SPANS = {
    "forward": "forward",
    "backward": "backward",
    "backward_input": "backward",
    "backward_weights": "weights",
}
"""By phase, what timelines and places call a unit's computation."""


def place_before(moment: Moment) -> str:
    """The place of what is computed before `moment`, since the moment before it."""
    if moment.phase == "step":
        return OPTIMIZER
    if moment.edge == "after" and moment.unit:
        return f"{SPANS[moment.phase]} {alike(moment.unit)}"
    return OTHER
