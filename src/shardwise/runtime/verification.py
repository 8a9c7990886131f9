"""Takes and compares the checksums of verified steps: see [Note: what a checksum can show] in
`program/verification.py`.

[Note: three messages] Every verified step exchanges a few bytes: one hash for all rows that the same ranks have copies
of, and whether a sum has changed. Only if hashes differ, or one has changed, do ranks exchange hashes of single rows,
and of the rows that differ the sums of single tensors, which name the tensor.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch

from shardwise.comm import Exchange
from shardwise.errors import CorruptionError, ranks_in_words
from shardwise.memory import Flat
from shardwise.memory.tensor_checksum import checksum
from shardwise.optim import AdoptedOptimizer
from shardwise.plan.mesh import Mesh
from shardwise.program import Action
from shardwise.program.effects import Subject
from shardwise.program.verification import FLAG_BYTES, RECORD_BYTES, parting_axes, resting_rows, rests_as_master
from shardwise.runtime.corruption import Finding, Report, Where, culprits, judge

Tensor = torch.Tensor
_HASH_BYTES = RECORD_BYTES // 2
_WORDS = {
    "param": "parameter",
    "master": "master weights of",
    "due": "gradient of",
    "full": "gathered parameter",
    "gradient": "gradient of",
}
_MOST_NAMED = 4

Row = tuple[str, Subject]
"""A flat buffer's name and the subject of the checksum."""


@dataclass(frozen=True)
class Sums:
    """The sums of one row's tensors, on its device, and when the row was written last, as far as torch knows."""

    tensors: tuple[tuple[str, str], ...]
    """The name of each parameter, and the key of its state or the row."""
    values: tuple[Tensor, ...]
    """int64, one per tensor and without dimensions, each on its tensor's device."""
    versions: tuple[tuple[int, int, int], ...]

    def read(self) -> list[int]:
        """On a device, with one wait for all."""
        values = list(self.values)
        for device in {value.device for value in values if value.device.type != "cpu"}:
            there = [place for place, value in enumerate(values) if value.device == device]
            for place, value in zip(there, torch.stack([values[place] for place in there]).cpu(), strict=True):
                values[place] = value
        return [int(value) for value in values]


class Verification:
    """Carries out the checksums and comparisons of one model's programs on this rank.

    `exchange` is among all ranks of `mesh`. `num_steps()` are the steps taken so far.
    """

    def __init__(
        self,
        flats: Sequence[Flat],
        units: Mapping[str, str],
        optimizer: AdoptedOptimizer | None,
        mesh: Mesh,
        rank: int,
        exchange: Exchange,
        num_steps: Callable[[], int],
    ) -> None:
        """`units`: the name of the unit of each flat buffer."""
        self._flats = {flat.name: flat for flat in flats}
        self._units = units
        self._optimizer = optimizer
        self._rank = rank
        self._coordinate = mesh.coordinate(rank)
        self._exchange = exchange
        self._num_steps = num_steps
        self._taken: dict[Row, Sums] = {}
        self._gathered: dict[str, list[Sums]] = {}
        """Those of whole flat buffers, each time that they were gathered in this step."""
        self._noted: dict[Row, Sums] = {}
        """The sums at the end of the last step, of rows that nothing is known to have written since."""
        self._noted_after = -1
        """The number of that step."""
        self._before_update: tuple[int, dict[Row, Sums]] = -1, {}
        """Both as they were before the last update, which leaves the state before it in copies alone."""
        self._wrong: frozenset[Where] = frozenset()
        """What was found wrong here that had not changed since it was summed before."""
        self._good: int | None = None
        """The number of the last step before whose update all was found well."""

    def take(self, action: Action) -> None:
        """Carry out a `checksum`."""
        flat = self._flats[action.flat]
        if action.subject == "full":
            if flat.shared is None:  # in shared memory nothing is gathered: ranks read the same bits
                self._gathered.setdefault(flat.name, []).append(self._sums(flat, action.subject))
            return
        self._taken[action.flat, action.subject] = self._sums(flat, action.subject)

    def _sums(self, flat: Flat, row: Subject) -> Sums:
        tensors = list(self._tensors(flat, row))
        return Sums(
            tuple((name, key) for name, key, _, _ in tensors),
            tuple(checksum(tensor) for _, _, tensor, _ in tensors),
            tuple((tensor.data_ptr(), _version(tensor), version) for _, _, tensor, version in tensors),
        )

    def note(self) -> None:
        """What was taken is at rest, and has to be the same before the next update. Of what no update writes, the sums
        that were taken first stay: they find what has changed in any step since."""
        for row, sums in self._taken.items():
            known = self._noted.get(row)
            if known is None or known.versions != sums.versions:
                self._noted[row] = sums
        self._taken, self._noted_after = {}, self._num_steps()

    def are_as_noted(self, copies: Mapping[tuple[str, str], Tensor]) -> bool:
        """Whether copies of all that this rank updates, made since the end of the last step, have the sums that were
        taken then. They are given by a parameter's name and `param`, or the key of the state."""
        noted = self._noted
        are_right = not any(where in self._wrong for where, _ in self._sums_at_rest(noted))  # else not to be relied on
        return are_right and self._first_changed(copies, noted) is None and self._are_noted()

    def noted_after(self, num_steps: int) -> dict[tuple[str, str], int]:
        """The sums of what an update writes, as they were taken at the end of step `num_steps`, given likewise; empty
        if none of that step are known."""
        noted = self._noted if num_steps == self._noted_after else {}
        return {
            (where.tensor, "param" if where.row == "master" else where.row): value
            for where, value in self._sums_at_rest(noted)
        }

    def first_changed(self, copies: Mapping[tuple[str, str], Tensor], num_steps: int) -> str:
        """The first of these copies, given likewise, that has another sum than was taken at the end of step
        `num_steps`, in words; empty if all have those, or none of that step are known. An update may have begun since,
        or been made."""
        before, noted = self._before_update
        noted = (noted if num_steps == before else {}) | (self._noted if num_steps == self._noted_after else {})
        found = self._first_changed(copies, noted)
        return "" if found is None else f"{_WORDS.get(found.row, f'state {found.row} of')} {found.tensor}"

    def _first_changed(self, copies: Mapping[tuple[str, str], Tensor], noted: Mapping[Row, Sums]) -> Where | None:
        for where, value in self._sums_at_rest(noted):
            copy = copies.get((where.tensor, "param" if where.row == "master" else where.row))
            if copy is not None and int(checksum(copy)) != value:
                return where
        return None

    def _sums_at_rest(self, noted: Mapping[Row, Sums]) -> Iterator[tuple[Where, int]]:
        """What is `noted` of tensors that only an update writes."""
        for (flat, row), sums in noted.items():
            spec = self._flats[flat].spec
            if row == "param" and spec.trainable and not rests_as_master(spec):
                continue
            for (name, key), value in zip(sums.tensors, sums.read(), strict=True):
                yield Where(flat, key, name), value

    def _are_noted(self) -> bool:
        """Whether the sums of all that this rank updates are known."""
        rows = {(flat.name, row) for flat in self._flats.values() for row in resting_rows(flat.spec)}
        return rows <= self._noted.keys()

    def begin_step(self) -> None:
        """Forget what was gathered in a step that was not taken."""
        self._gathered = {}

    def forget(self, *, is_update: bool) -> None:
        """Tensors are about to be written: by an update all but frozen ones, otherwise any, and then in copies, too."""
        if not is_update:
            self._before_update = -1, {}
        elif self._before_update[0] != self._noted_after:  # else another optimizer's update of the same step
            self._before_update = self._noted_after, self._noted
        kept = (row for row in self._noted if is_update and not self._flats[row[0]].spec.trainable)
        self._noted = {row: self._noted[row] for row in kept}

    def compare(self, _: Action | None = None) -> None:
        """Carry out a `compare`. All ranks call, also one that has no parameters, whose program has no such action.
        Raises `CorruptionError`, on all of them."""
        step = self._num_steps() + 1
        taken, self._taken = self._taken, {}
        gathered, self._gathered = self._gathered, {}
        taken |= {(flat, "full"): sums[0] for flat, sums in gathered.items()}
        values = {row: sums.read() for row, sums in taken.items()}
        changed = frozenset(where for row, sums in taken.items() for where in self._changed(row, sums, values[row]))
        changed |= frozenset(where for flat, sums in gathered.items() for where in _not_always_alike(flat, sums))
        messages = self._exchange(self._first_message(values, has_changed=bool(changed)))
        if not _is_suspicious(messages):
            self._good = step
            return
        findings = judge(self._reports(taken, values, changed))
        if not findings:
            self._good = step
            return
        self._wrong = frozenset(one.where for one in findings if self._rank in one.ranks) - changed
        raise corruption_error(findings, self._units, step, self._good)

    # -- what is summed -----------------------------------------------------------------------------------

    def _tensors(self, flat: Flat, row: Subject) -> Iterator[tuple[str, str, Tensor, int]]:
        """The name of a parameter, the row or the key of the state, this rank's elements, and what else counts their
        changes."""
        match row:
            case "param":
                param = flat.param
                for slot, whole in zip(flat.slots, flat.params, strict=True):
                    mine = slot.span.overlap(flat.param_span)
                    if mine.numel:
                        yield slot.name, row, param[mine.within(flat.param_span).as_slice], _version(whole)
            case "master":
                master = flat.require_master()
                for slot in flat.slots:
                    mine = slot.span.overlap(flat.optim_span)
                    if mine.numel:
                        yield slot.name, row, master[mine.within(flat.optim_span).as_slice], 0
            case "full":
                for slot in flat.slots:
                    yield slot.name, row, flat.full[slot.span.as_slice], 0
            case "due":
                for index, slot in enumerate(flat.slots):
                    piece = flat.grads.due_piece(index)
                    if piece is not None and piece.numel() and flat.grads.touched_anywhere[index]:
                        yield slot.name, row, piece, 0
            case _:
                yield from self._states(flat)

    def _states(self, flat: Flat) -> Iterator[tuple[str, str, Tensor, int]]:
        if self._optimizer is None:
            return
        for piece in self._optimizer.pieces:
            if piece.flat is flat and piece.span.numel:
                for key, value in sorted(self._optimizer.raw_state_of(piece).items()):
                    if isinstance(value, Tensor) and value.numel():
                        yield piece.name, key, value, 0

    # -- what is compared ---------------------------------------------------------------------------------

    def _changed(self, row: Row, sums: Sums, values: Sequence[int]) -> Iterator[Where]:
        """The tensors whose sum has changed although nothing has written them, as far as is known."""
        noted = self._noted.get(row)
        if noted is None or noted.tensors != sums.tensors:
            return
        for (name, key), value, before, version, known in zip(
            sums.tensors, values, noted.read(), sums.versions, noted.versions, strict=True
        ):
            if value != before and version == known:
                yield Where(row[0], key, name)

    def _part(self, row: Row) -> str:
        """The same word on all ranks with the same bits of a row."""
        axes = parting_axes(self._flats[row[0]].spec, row[1])
        return " ".join(f"{axis}={self._coordinate[axis]}" for axis in axes)

    def _first_message(self, values: Mapping[Row, Sequence[int]], *, has_changed: bool) -> bytes:
        by_part: dict[str, list[object]] = {}
        for row, of_row in values.items():
            by_part.setdefault(self._part(row), []).append((row, tuple(of_row)))
        records = [_hash(part) + _hash(rows) for part, rows in sorted(by_part.items())]
        return bytes([has_changed]) + b"".join(records)

    def _reports(
        self, taken: Mapping[Row, Sums], values: Mapping[Row, Sequence[int]], changed: frozenset[Where]
    ) -> list[Report]:
        """Every rank's sums of the rows that differ between ranks, or in which something has changed."""
        hashes = [[self._part(row), *row, _hash(tuple(of_row)).hex()] for row, of_row in values.items()]
        has_changed = {(where.flat, where.row) for where in changed}
        asked = [
            list(row) for row, sums in taken.items() if any((row[0], key) in has_changed for _, key in sums.tensors)
        ]
        messages = self._exchange(json.dumps({"rows": hashes, "asked": asked}).encode())
        plain = [json.loads(message) for message in messages]
        asked_anywhere = {(flat, row) for one in plain for flat, row in one["asked"]}
        seen: dict[tuple[str, str, str], set[str]] = {}
        for one in plain:
            for part, flat, row, value in one["rows"]:
                seen.setdefault((part, flat, row), set()).add(value)
        asked_anywhere |= {(flat, row) for (_, flat, row), found in seen.items() if len(found) > 1}
        mine = Report(
            {
                (self._part(row), Where(row[0], key, name)): value
                for row, sums in taken.items()
                if row in asked_anywhere
                for (name, key), value in zip(sums.tensors, values[row], strict=True)
            },
            changed,
        )
        everyone = self._exchange(json.dumps(mine.to_json()).encode())
        return [Report.from_json(json.loads(message)) for message in everyone]


def corruption_error(
    findings: Sequence[Finding], units: Mapping[str, str], step: int, good: int | None
) -> CorruptionError:
    """The error that all ranks raise before the update of `step`. `units`: the name of the unit of each flat buffer.
    `good` is the last step before whose update the same comparison found nothing."""
    ranks, is_certain = culprits(findings)
    named = "; ".join(map(_in_words, findings[:_MOST_NAMED]))
    if is_certain:
        who = f"{ranks_in_words(ranks).capitalize()} {'has' if len(ranks) == 1 else 'have'} wrong bits: {named}"
    else:
        who = f"One of the ranks {' and '.join(map(str, ranks))} has wrong bits, and nothing tells which: {named}"
    more = f"; and {len(findings) - _MOST_NAMED} more tensors" if len(findings) > _MOST_NAMED else ""
    since = "" if good is None else f" Before the update of step {good} all was well."
    where = findings[0].where
    return CorruptionError(
        f"{who}{more}. No program has written that: memory, a processor or a message has failed. It was found before "
        f"the update of step {step}.{since}\nThat update was not made. Start again from a checkpoint of a time when "
        "all was well, without the machine of that rank (docs/verify.md).",
        ranks=ranks,
        unit=units.get(where.flat, ""),
        tensor=where.tensor,
        row=where.row,
        step=step,
        is_certain=is_certain,
    )


def _is_suspicious(messages: Sequence[bytes]) -> bool:
    """Whether something has changed on a rank, or hashes of one part differ: the same answer on all ranks."""
    seen: dict[bytes, bytes] = {}
    for message in messages:
        if message[0]:
            return True
        for start in range(FLAG_BYTES, len(message), RECORD_BYTES):
            part, value = message[start : start + _HASH_BYTES], message[start + _HASH_BYTES : start + RECORD_BYTES]
            if seen.setdefault(part, value) != value:
                return True
    return False


def _not_always_alike(flat: str, gathered: Sequence[Sums]) -> Iterator[Where]:
    """Parameters that were not the same each time that they were gathered."""
    first, *others = [one.read() for one in gathered]
    for place, (name, key) in enumerate(gathered[0].tensors):
        if any(other[place] != first[place] for other in others):
            yield Where(flat, key, name)


def _in_words(finding: Finding) -> str:
    where = finding.where
    what = _WORDS.get(where.row, f"state {where.row} of")
    if finding.num_copies == 1:
        return f"{what} {where.tensor}, changed since the last update"
    return f"{what} {where.tensor} on rank {', '.join(map(str, finding.ranks))}, of {finding.num_copies} with copies"


def _hash(value: object) -> bytes:
    return blake2b(repr(value).encode(), digest_size=_HASH_BYTES).digest()


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
