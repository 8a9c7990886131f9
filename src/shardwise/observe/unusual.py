"""Losses and gradients that are not finite, or far above those before: of which rank, samples and unit.

Each rank judges its own loss, as it logs it, and the norm of the step's gradients, which all ranks know. What it finds
goes with the message that ranks exchange when they log, so that a usual step costs nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median

WINDOW = 100
"""Values that one is compared with: the last ones."""
FEWEST = 20
"""With fewer, nothing is called unusual but what is not finite: losses fall steeply at first."""
FACTOR = 8.0
"""Unusual: so many times as far above the median as usual values are from it. Among a million values of a normal
distribution there is one above 5 standard deviations, which are 7.4 of these."""
_OF_ALL, _FROM_THE_LOSS, _IS_FIRST = "those of all units", ", from the loss on", " is the first in the backward"
LEAST_SHARE = 0.05
"""And by at least this share of the median, because the values of a converged run hardly differ."""


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

        `values` are what it logs, of which those with `loss` in their names are judged; `samples()` is what it had.
        """
        found = []
        for name, value in values.items():
            why = self._losses.setdefault(name, Usual()).judge(value) if "loss" in name else ""
            found += [f"its {name} {why}"] if why else []
        had = samples() if found else ""
        return "; ".join([*found, *([had] if had else [])])

    def norm_in_words(self, norm: float | None, squares: Callable[[], Sequence[tuple[str, float]]]) -> str:
        """The same for the norm of all gradients, with the units that they are from. See `units_in_words`."""
        why = "" if norm is None else self._norms.judge(norm)
        if not why:
            return ""
        units = units_in_words(squares())
        return f"the norm of the gradients {why}" + (f": {units}" if units else "")


def most_telling(norms: Sequence[tuple[int, str]]) -> list[tuple[int, str]]:
    """Of what each rank says of one norm of all gradients, what tells most: a rank with some units that are not finite
    knows where they begin; where a rank has only such, but another has none, as earlier stages of a pipeline do behind
    the one where they begin, they are not from the loss on."""
    if not norms:
        return []
    rank, words = min(norms, key=lambda one: (_IS_FIRST not in one[1], _OF_ALL not in one[1]))
    if words.endswith(_FROM_THE_LOSS) and not all(_OF_ALL in one for _, one in norms):
        rank, words = max(one for one in norms if _OF_ALL in one[1])  # the last stage that has them
        words = f"{words.removesuffix(_FROM_THE_LOSS)} that rank {rank} has, while another rank has none"
    return [(rank, words)]


def units_in_words(squares: Sequence[tuple[str, float]]) -> str:
    """Which units the gradients are from, as the end of a sentence. `squares` are the squares of norms of what one rank
    has, in the order of the forward.

    What is not finite makes all that comes later in the backward not finite too, so it came up in the last unit of the
    forward that has any.
    """
    by_unit: dict[str, float] = {}
    for unit, square in squares:
        by_unit[unit] = by_unit.get(unit, 0.0) + square
    broken = [unit for unit, square in by_unit.items() if not math.isfinite(square)]
    if broken and len(broken) == len(by_unit):
        return f"{_OF_ALL}{_FROM_THE_LOSS}"
    if broken:
        return f"those of {len(broken)} of {len(by_unit)} units, of which {broken[-1]}{_IS_FIRST}"
    total = sum(by_unit.values())
    if not total:
        return ""
    largest = max(by_unit, key=lambda unit: by_unit[unit])
    return f"{by_unit[largest] / total:.0%} of its square is of unit {largest}"
