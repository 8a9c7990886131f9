"""Few cases out of many, that have every value, every pair of values, or every three, that the many have."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

Case = Mapping[str, Hashable]
"""Values by the names of what they are values of."""
_NUM_DRAWN = 20


def covering(values: Mapping[str, Sequence[Hashable]], strength: int, seed: int = 0) -> list[Case]:
    """Cases with a value for each name, so that every combination of values of `strength` names is in one of them.

    Each case begins with a combination that is missing; of several that are drawn with it, the one with most that are
    missing is taken. So there are about as many as the largest `strength` numbers of values multiplied, whatever else
    there is to choose.
    """
    numbers = random.Random(seed)
    order = {name: {value: place for place, value in enumerate(of_name)} for name, of_name in values.items()}
    missing = {
        tuple(zip(names, chosen, strict=True))
        for names in itertools.combinations(values, strength)
        for chosen in itertools.product(*(values[name] for name in names))
    }
    left = sorted(missing, key=lambda some: [(name, order[name][value]) for name, value in some])
    cases = []
    for some in left:
        if some not in missing:
            continue
        fixed = dict(some)
        drawn = [
            {name: fixed[name] if name in fixed else numbers.choice(of_name) for name, of_name in values.items()}
            for _ in range(_NUM_DRAWN)
        ]
        best = max(drawn, key=lambda case: len(combinations(case, strength) & missing))
        missing -= combinations(best, strength)
        cases.append(best)
    return cases


def combinations(case: Case, strength: int) -> set[tuple[tuple[str, Hashable], ...]]:
    return set(itertools.combinations(case.items(), strength))


class Chooser:
    """Chooses among given cases, again and again: always those that have most of what it has not chosen yet."""

    def __init__(self) -> None:
        self._had: Counter[Hashable] = Counter()
        """How often each value, and each pair of values, was chosen."""

    def some(self, cases: Sequence[Case], number: int) -> Iterator[int]:
        """The places of so many of `cases`."""
        left = {place: (combinations(case, 1), combinations(case, 2)) for place, case in enumerate(cases)}
        for _ in range(min(number, len(cases))):
            best = max(left, key=lambda place: self._worth(*left[place]))
            for parts in left.pop(best):
                self._had.update(parts)
            yield best

    def _worth(self, values: Iterable[Hashable], pairs: Iterable[Hashable]) -> tuple[int, int, int]:
        """New values first, then new pairs, then values that were rare."""
        had = [self._had[value] for value in values]
        return had.count(0), sum(not self._had[pair] for pair in pairs), -sum(had)


def with_every_value(cases: Sequence[Case], given: Iterable[int] = ()) -> list[int]:
    """The places of few of `cases` that have, together with the `given` ones, every value that any of them has."""
    values = [combinations(case, 1) for case in cases]
    missing = set().union(*values) - set().union(*(values[place] for place in given))
    chosen = []
    while missing:
        best = max(range(len(cases)), key=lambda place: len(values[place] & missing))
        missing -= values[best]
        chosen.append(best)
    return chosen
