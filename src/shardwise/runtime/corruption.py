"""Which rank has wrong bits, judged from the checksums of all ranks. Pure.

[Note: whom to believe] Ranks that hold the same part of a row must have the same sums. If most of them agree, the
others are wrong. If there is no majority, as with two copies, the one is wrong whose sum has changed since the end of
the last step, when nothing could have written it. If neither has, they have differed for longer, and it is one of them.

A sum that changed on one rank, and on no other that holds the same tensor, is wrong even if nobody has a copy. If it
changed on all that hold it, code between the steps has written the tensor (`parameter.data.clamp_()` in a loop): that
is no fault.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

GRADIENT = "gradient"
"""The row of what a rank has computed from a micro-batch, which another one has computed again."""


@dataclass(frozen=True, slots=True)
class Where:
    """A tensor of one row of a flat buffer. `row` is a subject of the program, for a state its key, or `GRADIENT`."""

    flat: str
    row: str
    tensor: str


@dataclass(frozen=True)
class Report:
    """One rank's sums, by the part that it holds (the same word on ranks that hold the same) and the tensor, and those
    of its tensors that have changed since they were last written."""

    sums: Mapping[tuple[str, Where], int] = field(default_factory=dict)
    changed: frozenset[Where] = frozenset()

    def to_json(self) -> dict[str, object]:
        return {
            "sums": [[part, where.flat, where.row, where.tensor, value] for (part, where), value in self.sums.items()],
            "changed": [[where.flat, where.row, where.tensor] for where in sorted(self.changed, key=str)],
        }

    @classmethod
    def from_json(cls, plain: Mapping[str, list[list[str]]]) -> Report:
        sums = {(part, Where(flat, row, tensor)): int(value) for part, flat, row, tensor, value in plain["sums"]}
        return cls(sums, frozenset(Where(*words) for words in plain["changed"]))


@dataclass(frozen=True)
class Finding:
    """Wrong bits of `where` on `ranks`, or if not `is_certain` on one of them. `num_copies` are the ranks that should
    have the same; 1 if it was found by this rank's own sums alone."""

    where: Where
    ranks: tuple[int, ...]
    num_copies: int
    is_certain: bool = True


def judge(reports: Sequence[Report]) -> tuple[Finding, ...]:
    """What is wrong on which ranks; `reports` are by rank. Nothing, if all that has changed was written by code."""
    edited = _edited(reports)
    copies: dict[tuple[str, Where], dict[int, int]] = {}
    for rank, report in enumerate(reports):
        for key, value in report.sums.items():
            copies.setdefault(key, {})[rank] = value
    found = []
    for (_, where), by_rank in copies.items():
        changed = {rank for rank in by_rank if where in reports[rank].changed and where not in edited}
        wrong = _wrong(by_rank, changed)
        if wrong is not None:
            found.append(Finding(where, tuple(sorted(wrong[0])), len(by_rank), wrong[1]))
    return tuple(found)


def culprits(findings: Iterable[Finding]) -> tuple[tuple[int, ...], bool]:
    """The ranks that are wrong, and whether that is certain. What is certain of one finding decides about those that
    are not: a rank with a wrong parameter has wrong gradients too."""
    findings = tuple(findings)
    certain = {rank for one in findings if one.is_certain for rank in one.ranks}
    if all(certain & set(one.ranks) for one in findings):
        return tuple(sorted(certain)), True
    return tuple(sorted({rank for one in findings for rank in one.ranks})), False


def _edited(reports: Sequence[Report]) -> frozenset[Where]:
    """Tensors that have changed on every rank that holds any of them."""
    holders: dict[Where, set[int]] = {}
    for rank, report in enumerate(reports):
        for _, where in report.sums:
            holders.setdefault(where, set()).add(rank)
    return frozenset(
        where
        for where, ranks in holders.items()
        if len(ranks) > 1 and all(where in reports[rank].changed for rank in ranks)
    )


def _wrong(by_rank: Mapping[int, int], changed: set[int]) -> tuple[set[int], bool] | None:
    """The wrong ones of ranks with copies, and whether that is certain; `None` if none is."""
    counts = Counter(by_rank.values())
    if len(counts) == 1:  # that all copies changed alike is left to `_edited`
        return (changed, True) if changed else None
    (value, most), *_ = counts.most_common()
    if 2 * most > len(by_rank):
        return {rank for rank, one in by_rank.items() if one != value}, True
    kept = {one for rank, one in by_rank.items() if rank not in changed}
    if changed and len(kept) == 1:
        return changed, True
    return set(by_rank), False
