"""What micro-batches in flight hold beside the one that is computed."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.program.schedule import OpKind, Schedule


def held_beside(
    schedule: Schedule, rank: int, held: Mapping[int, int], aside: Mapping[int, int]
) -> dict[tuple[OpKind, int], int]:
    """By kind of op and stage, the most bytes that other micro-batches of `rank` hold while it does one of them.

    `held[stage]` are the bytes that a forward leaves for its backward, `aside[stage]` those that the first half of a
    backward (`I`) leaves for the second (`W`).
    """
    alive: dict[tuple[int, int], int] = {}
    most: dict[tuple[OpKind, int], int] = {}
    for kind, batch, stage in schedule.rows[rank]:
        own = alive.pop((stage, batch), 0)
        others = sum(alive.values())
        most[kind, stage] = max(most.get((kind, stage), 0), others)
        if kind in "FI":
            alive[stage, batch] = held[stage] if kind == "F" else min(own, aside[stage])
    return most
