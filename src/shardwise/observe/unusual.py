"""Losses and gradients that are not finite, or far above those before: of which rank, samples and unit.

Each rank judges its own loss, as it logs it, and the norm of the step's gradients, which all ranks know. What it finds
goes with the message that ranks exchange when they log, so that a usual step costs nothing. Of an unusual norm each
rank sends its summands, because shards of one unit, and stages of one model, are on several ranks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from shardwise.memory.select import REST

WINDOW = 100
"""Values that one is compared with: the last ones."""
FEWEST = 20
"""With fewer, nothing is called unusual but what is not finite: losses fall steeply at first."""
FACTOR = 8.0
"""Unusual: so many times as far above the median as usual values are from it. Among a million values of a normal
distribution there is one above 5 standard deviations, which are 7.4 of these."""
LEAST_SHARE = 0.05
"""And by at least this share of the median, because the values of a converged run hardly differ."""


class UnitSquare(NamedTuple):
    """A rank's summand of the square of a norm, of one of its flat buffers; `stage` is 0 without a pipeline."""

    stage: int
    unit: str
    square: float


class Usual:
    """The last values of one kind."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=WINDOW)

    def judge(self, value: float) -> str:
        """Why `value` is unusual, as the end of a sentence; empty if it is not."""
        if not math.isfinite(value):
            return "is not finite" if not self._values else f"is {value}, and was {median(self._values):.4g}"
        before = list(self._values)
        self._values.append(value)
        if len(before) < FEWEST:
            return ""
        middle = median(before)
        spread = max(median(abs(one - middle) for one in before), LEAST_SHARE / FACTOR * abs(middle))
        return f"is {value:.4g}, and was {middle:.4g}" if value > middle + FACTOR * spread else ""


class Unusual:
    """Judges one rank's steps."""

    def __init__(self) -> None:
        self._losses: dict[str, Usual] = {}
        self._norms = Usual()

    def loss_in_words(self, values: Mapping[str, float], samples: Callable[[], str]) -> str:
        """What is unusual about the losses of this rank, as a sentence without its subject; empty if nothing is.

        `values` are what it logs, of which those with `loss` in their names are judged; `samples()` is what it had, and
        in which micro-batch.
        """
        found = []
        for name, value in values.items():
            why = self._losses.setdefault(name, Usual()).judge(value) if "loss" in name else ""
            found += [f"its {name} {why}"] if why else []
        had = samples() if found else ""
        return "; ".join([*found, *([had] if had else [])])

    def norm_in_words(self, norm: float | None) -> str:
        """The same for the norm of all gradients."""
        why = "" if norm is None else self._norms.judge(norm)
        return f"the norm of the gradients {why}" if why else ""


def worst_of(losses: Sequence[float]) -> int:
    """Which micro-batch makes a loss unusual: the first whose own is not finite, else that with the largest."""
    broken = next((number for number, loss in enumerate(losses) if not math.isfinite(loss)), None)
    return max(range(len(losses)), key=lambda number: losses[number]) if broken is None else broken


def units_in_words(of_ranks: Mapping[int, Sequence[UnitSquare]]) -> tuple[int, str]:
    """Which units a norm is from, as the end of a sentence, and the first rank that has most of it. `of_ranks` are the
    summands of all ranks, each in the order of the forward.

    What is not finite makes all that comes later in the backward not finite too, so it came up in the last unit of the
    forward that has any. The parameters of no unit (`rest`) are used before the units and after them: what comes up
    after them is in all units.
    """
    units: dict[str, dict[int, float]] = {}
    stages: dict[str, set[int]] = {}
    summands = [(one, rank) for rank, squares in of_ranks.items() for one in squares]
    for one, rank in sorted(summands, key=lambda pair: (pair[0].unit != REST, pair[0].stage)):
        by_rank = units.setdefault(one.unit, {})
        by_rank[rank] = by_rank.get(rank, 0.0) + one.square
        stages.setdefault(one.unit, set()).add(one.stage)
    totals = {unit: sum(by_rank.values()) for unit, by_rank in units.items()}
    broken = [unit for unit, square in totals.items() if not math.isfinite(square)]
    total = sum(totals.values())
    if not total:
        return min(of_ranks, default=0), ""
    if broken and len(broken) == len(units):
        return min(of_ranks), "those of all units, from the loss on"
    unit = broken[-1] if broken else max(totals, key=lambda one: totals[one])
    by_rank = units[unit]
    own_broken = [rank for rank, square in by_rank.items() if not math.isfinite(square)]
    most = min(own_broken) if own_broken else max(by_rank, key=lambda rank: (by_rank[rank], -rank))
    num_stages = len(set().union(*stages.values()))
    where = "" if num_stages == 1 else f" (stage {' and '.join(map(str, sorted(stages[unit])))})"
    if broken:
        return (
            most,
            f"those of {len(broken)} of {len(units)} units, of which {unit}{where} is the first in the backward",
        )
    return most, f"{totals[unit] / total:.0%} of its square is of unit {unit}{where}"
