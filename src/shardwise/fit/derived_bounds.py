"""Bounds of candidates from what is rehearsed so far, mostly of others: what a search prunes with. See also
`least_steps.py`.

[Note: derived bounds] Of ranks along `tp`, twice as many do at least half each. What they hold is affine in their
inverse, as far as a part of it is split and the rest is not; so two numbers of them tell of more, but for what only
split models have, for which there is `OPTIMISM`, if one of the two is 1. A peak is the largest of several such
numbers, so that more ranks hold at least what two others say. Of samples, fewer do and hold at least as much for
each, and more take at least as long together, hold as much for each but for what does not depend on them (`OPTIMISM`
again), and move as much. A bound for each treatment, number of ranks and of samples then costs two rehearsals of a
treatment instead of two for each number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import add

import numpy as np

from shardwise.fit.candidates import SPLITTING, Candidate, Load, Size
from shardwise.fit.clock import seconds_alone
from shardwise.fit.counts_by_stage import beside_whole, messages_of, stages_of
from shardwise.fit.foreseen import Counted
from shardwise.fit.hardware import Hardware
from shardwise.fit.least_steps import Alone, Least, Numbers, Order, Record, Run, StagePass
from shardwise.fit.operations import COPYING, Operations, Worked, without
from shardwise.fit.rehearsals import Rehearsals, of_model, rehearsal_key
from shardwise.fit.stage_cuts import StageCuts
from shardwise.fit.stage_rehearsal import in_transit
from shardwise.plan import PolicyName, PrecisionName
from shardwise.plan.mesh import STAGE_AXIS
from shardwise.program import Moment
from shardwise.program.schedule import SCHEDULES
from shardwise.system.even_parts import divisors

OPTIMISM = 0.9
"""Of the bytes and FLOPs of one sample: a larger micro-batch may take a little less for each of them."""
CLOSE = 0.98
"""Of the bytes that two split models tell of a third: allocators round small blocks up."""
WITHIN = tuple(axis for axis in SPLITTING if axis != STAGE_AXIS)
"""Axes along which layers themselves are split."""
Sharing = tuple[tuple[str, int, int], ...]
"""Such an axis, how many ranks it has, and how far apart they are."""
LEFT_BYTES = 4
"""Of a trained element that a backward on a device reads and writes at least, to put its gradient in its place."""


@dataclass(frozen=True)
class _Known:
    """What has been rehearsed, or will be, without stages, for a candidate; the `share` of it that one of its ranks
    computes at least, the same on `fewer` ranks if that is known too, and seconds of a micro-batch that come on top."""

    whole: Candidate
    share: float = 1.0
    fewer: Candidate | None = None
    again: float = 0.0


@dataclass(frozen=True)
class _Unpriced:
    """What was counted, for bounds: equal blocks have computed the same, which is priced once."""

    record: Record
    different: Sequence[Worked]
    places: Numbers

    @classmethod
    def of(cls, counted: Counted, known: dict[tuple[Moment, ...], tuple[Moment, ...]]) -> _Unpriced:
        """Moments that are `known` are the same object, because it takes long to compare them."""
        different = {id(one.operations): one for one in counted.worked}
        place_of = {operations: place for place, operations in enumerate(different)}
        places = np.array([place_of[id(one.operations)] for one in counted.worked])
        record = Record.of(counted.activations.marks, [one.factors_bytes for one in counted.worked])
        record = replace(record, moments=known.setdefault(record.moments, record.moments))
        return cls(record, list(different.values()), places)


@dataclass
class DerivedBounds:
    """`least` of a `Subject`, whose `rehearsals` and stages (`cuts`) these are. `size` is that of a `Subject`, and
    `unit_bytes` are those of a unit's gradients, at most."""

    rehearsals: Rehearsals
    cuts: StageCuts
    hardware: Hardware
    size: Callable[[PolicyName, PrecisionName | None], Size]
    unit_bytes: Callable[[PrecisionName | None], int]
    _known: dict[object, list[_Known]] = field(default_factory=dict, init=False)
    """What tells of a candidate without stages, by its key, until something more is rehearsed."""
    _num_told: int = field(default=0, init=False)
    """How many rehearsals there were then."""
    _least: dict[object, Least] = field(default_factory=dict, init=False)
    _known_passes: dict[object, list[StagePass]] = field(default_factory=dict, init=False)
    _records: dict[object, Record] = field(default_factory=dict, init=False)
    _unpriced: dict[int, _Unpriced] = field(default_factory=dict, init=False)
    """By the identity of what was counted."""
    _moments: dict[tuple[Moment, ...], tuple[Moment, ...]] = field(default_factory=dict, init=False)
    _known_stage_of: dict[tuple[int, int], Numbers] = field(default_factory=dict, init=False)
    """By the identity of what is in `_moments`, and the number of stages."""
    _known_alone: dict[object, tuple[Alone, Operations]] = field(default_factory=dict, init=False)
    """By the identity of operations, which are kept alive, and who communicates."""

    def least(self, candidate: Candidate, *, itself: bool = False) -> Least:
        """See [Note: least steps]. Whatever a treatment of activations does, it computes what keeping them does; and of
        twice as many ranks along `tp` each computes and holds at least half, and sends as much. Where a candidate's own
        split and treatment have not been rehearsed, such others tell. With `itself`, its treatment is rehearsed on the
        fewest ranks along `tp` first, for the usual number of samples; and where that is known, as it is."""
        whole = of_model(candidate)
        if itself and not self.rehearsals.is_derived(whole):
            near = next((one for one in self._nearer(whole) if not self.rehearsals.is_rehearsed(one)), None)
            self.rehearsals.derived(candidate) if near is None else self.rehearsals.count(near)
        known = self._known_now.get(rehearsal_key(whole))
        if known is None:
            known = self._known_now[rehearsal_key(whole)] = self._known_of(whole)
        stages = candidate.size("pp")
        of_stages = (stages, candidate.chunks, candidate.schedule, candidate.parts) if stages > 1 else ()
        alike = candidate.policy, candidate.rows, of_stages, _sharing(candidate), candidate.accumulate
        key = tuple((self._key_of(one.whole), one.fewer is not None) for one in known), alike
        if key not in self._least:
            self._least[key] = Least.of_all([self._least_of(candidate, one) for one in known])
        return self._least[key]

    def _key_of(self, whole: Candidate) -> object:
        """Of what is counted of it, or derived."""
        return rehearsal_key(whole), self.rehearsals.is_rehearsed(whole)

    @property
    def _known_now(self) -> dict[object, list[_Known]]:
        if self._num_told != self.rehearsals.num_made:
            self._num_told = self.rehearsals.num_made
            self._known.clear()
        return self._known

    def _nearer(self, whole: Candidate) -> Iterator[Candidate]:
        """What tells of it beforehand, if it is rehearsed, from far to near: its treatment on fewer ranks along `tp`,
        of the usual number of samples; and on as many, if samples are what is derived."""
        sizes, first = [whole.size("tp")], self.rehearsals.rows_of_size
        while sizes[-1] > 1:
            sizes.append(sizes[-1] // _smallest_prime(sizes[-1]))
        is_counted = whole.rows in (first, 2 * first) or (self.rehearsals.first_is_apart and whole.rows < first)
        for size in reversed(sizes[1:-1] if is_counted else sizes[:-1]):
            yield replace(_along_tp(whole, size), rows=first)

    def _known_of(self, whole: Candidate) -> list[_Known]:
        """What tells of it: a rehearsal of its own split and treatment; or else of its treatment on fewer ranks along
        `tp`, of as many samples or of those that `size` has rehearsed, and of activations that are kept."""
        kept = replace(whole, policy="keep")
        if whole == kept or self.rehearsals.base.activations.policy is not None or self.rehearsals.is_derived(whole):
            return [self._on_fewer_ranks(whole, 2)]
        again = self.size(whole.policy, whole.precision).flops_seconds
        again -= self.size("keep", whole.precision).flops_seconds
        again = max(0.0, again) * whole.rows / (whole.size("tp") * whole.size("sp"))
        found = [replace(self._on_fewer_ranks(kept, 2), again=again)]
        some = (replace(whole, rows=rows) for rows in (whole.rows, self.rehearsals.rows_of_size))
        treated = (self._on_fewer_ranks(one, 1) for one in some)
        derived = (one for one in treated if self.rehearsals.is_derived(one.whole))
        best = max(derived, key=lambda one: one.share, default=None)
        return found if best is None else [*found, best]

    def _on_fewer_ranks(self, whole: Candidate, fewest: int) -> _Known:
        """The same on as many ranks along `tp` as have been rehearsed, or on a number of them that has to be: a prime
        one, or 1 if that is the `fewest`."""
        there = whole
        while not self.rehearsals.is_derived(there):
            fewer = _along_tp(there, there.size("tp") // _smallest_prime(there.size("tp")))
            if fewer == there or fewer.size("tp") < fewest:
                break
            there = fewer
        if there == whole:
            return _Known(whole)
        fewer = _along_tp(there, there.size("tp") // _smallest_prime(there.size("tp")))
        tells = fewer != there and self.rehearsals.is_derived(there) and self.rehearsals.is_derived(fewer)
        return _Known(there, there.size("tp") / whole.size("tp"), fewer if tells else None)

    def _least_of(self, candidate: Candidate, found: _Known) -> Least:
        known = found.whole
        passes = self._passes(candidate, found)
        stages, accumulate = candidate.size("pp"), candidate.accumulate
        if stages == 1:
            run = Run(accumulate * (passes[0].seconds + found.again), accumulate * passes[0].messages)
            most = max(passes[0].forward_bytes, passes[0].backward_bytes)
            least = Least((run,), (Load(1.0, most, passes[0].held_bytes),))
        else:
            least = self._least_in_stages(candidate, passes, found.again)
        is_own = known.rows == candidate.rows and found.share == 1
        if known.policy != candidate.policy or candidate.parts:  # what is held is another matter
            return replace(least, loads=(), is_own=is_own and known.policy == candidate.policy)
        if is_own and candidate.rows < self.rehearsals.rows_of_size and not self.rehearsals.is_rehearsed(known):
            loads = (Load(one.share, OPTIMISM * one.activations, OPTIMISM * one.between) for one in least.loads)
            least = replace(least, loads=tuple(loads))
        return replace(least, is_own=is_own)

    def _least_in_stages(self, candidate: Candidate, passes: Sequence[StagePass], again: float) -> Least:
        stages, accumulate = candidate.size("pp"), candidate.accumulate
        whole = sum(one.seconds for one in passes) + again
        waiting = whole / stages * (accumulate + candidate.least_waiting)
        if candidate.parts:
            return Least((Run(waiting),))
        rounds = min(accumulate, 2 * stages)
        order = Order.of(candidate.schedule, stages, rounds, candidate.chunks)
        shares, runs = self.cuts.of(candidate).shares, order.runs(passes, self.cuts.of(candidate).shares, accumulate)
        last, message_bytes = len(passes) - 1, self.rehearsals.message_bytes(candidate)
        messages = [messages_of(stage, last + 1, message_bytes) for stage in (0, 1, last)]  # others are as the second
        beside = [beside_whole(*one) for one in messages]
        sent = [in_transit(stages, accumulate, *one) for one in messages]
        kinds = [0, *[1] * (last - 1), 2]
        with_messages = [
            one.holding(*map(add, one.bytes, beside[kind])) for one, kind in zip(passes, kinds, strict=True)
        ]
        in_flight = [sum(sent[kinds[stage]] for stage in own) for own in order.stages]
        return Least((Run(waiting), *runs), order.loads(with_messages, shares, in_flight))

    def _passes(self, candidate: Candidate, known: _Known) -> list[StagePass]:
        """Of each stage of `candidate`, at least: see [Note: derived bounds]."""
        stages = candidate.size("pp")
        splits = stages > 1 and SCHEDULES[candidate.schedule].splits_backward
        of_stages = _sharing(candidate), stages, candidate.chunks, splits
        of_known = self._key_of(known.whole), known.share, known.fewer is not None
        key = of_known, candidate.rows, of_stages
        if key not in self._known_passes:
            passes = self._counted_passes(candidate, known.whole, known.share, splits=splits)
            if known.share < 1 or known.whole.rows != candidate.rows:
                held = [[known.share * num for num in one.bytes] for one in passes]
                more = candidate.rows / known.whole.rows
                if known.fewer is not None:
                    fewer = self._counted_passes(candidate, known.fewer, known.share, splits=splits)
                    here, there, before = (1 / one.size("tp") for one in (candidate, known.whole, known.fewer))
                    beyond = (here - there) / (there - before)
                    close = CLOSE if known.fewer.size("tp") > 1 and more <= 1 else OPTIMISM
                    for mine, one, other in zip(held, passes, fewer, strict=True):
                        affine = [num + beyond * (num - less) for num, less in zip(one.bytes, other.bytes, strict=True)]
                        mine[:] = map(max, mine, (close * num for num in affine))
                approximate = OPTIMISM * more if more > 1 or candidate.rows < self.rehearsals.rows_of_size else 1.0
                of_unit = self.unit_bytes(candidate.precision) if more > 1 else 0.0
                for mine in held:
                    gradients = min(mine[1], of_unit)
                    mine[:] = [approximate * num for num in mine]
                    mine[1] += gradients - approximate * gradients
                passes = [one.holding(*mine) for one, mine in zip(passes, held, strict=True)]
            self._known_passes[key] = passes
        return self._known_passes[key]

    def _counted_passes(self, candidate: Candidate, known: Candidate, share: float, *, splits: bool) -> list[StagePass]:
        """Of each stage of `candidate`, from what was counted of `known`, of which a rank computes a `share`."""
        stages, more, sharing = candidate.size("pp"), candidate.rows / known.rows, _sharing(candidate)
        (found,) = self.rehearsals.derived(known, approximately=True)
        key = id(found), share, more, sharing, splits  # which is kept: as it was counted, or derived
        if key not in self._records:
            if id(found) not in self._unpriced:
                self._unpriced[id(found)] = _Unpriced.of(found, self._moments)
            unpriced = self._unpriced[id(found)]
            alone = [self._alone(one, share, more, sharing, splits=splits) for one in unpriced.different]
            self._records[key] = unpriced.record.priced(alone, unpriced.places)
        num_trained = [self._num_trained] if stages == 1 else self.cuts.of(candidate).num_trained
        bytes_left = LEFT_BYTES / (candidate.size("tp") * candidate.size("ep"))
        leaving = [
            0.0 if self.hardware.is_processor else self.hardware.flat_seconds(bytes_left * num) for num in num_trained
        ]
        record = self._records[key]
        return record.passes(self._stage_of(candidate, record.moments), leaving)

    def _stage_of(self, candidate: Candidate, moments: tuple[Moment, ...]) -> Numbers:
        """In which stage of `candidate` a model is at each moment, which is the same for many treatments."""
        if candidate.size("pp") == 1:
            return np.zeros(len(moments), int)
        key = id(moments), candidate.size("pp") * candidate.chunks
        if key not in self._known_stage_of:
            self._known_stage_of[key] = np.array(stages_of(moments, self.cuts.of(candidate).users))
        return self._known_stage_of[key]

    def _alone(self, worked: Worked, share: float, more: float, sharing: Sharing, *, splits: bool) -> Alone:
        """What was counted for fewer ranks along `tp`, of which a rank does a `share`, and for other micro-batches than
        those with `more` times as many samples; as two halves if a schedule `splits` backwards."""
        key = id(worked.operations), share, more, sharing, splits
        if key not in self._known_alone:
            hardware = self.hardware
            ranks = {axis: range(0, size * stride, stride) for axis, size, stride in sharing}

            few = min(1.0, more)  # larger micro-batches take at least as long

            from_heap = worked.moment.phase != "forward"  # which takes less time, and may be so

            def seconds_of(operations: Operations) -> tuple[float, float]:
                computing, by_axis = seconds_alone(operations, hardware, ranks.__getitem__, from_heap=from_heap)
                return few * share * computing, few * sum(by_axis.values())

            later = seconds_of(worked.weights)[0] if splits else 0.0
            now, messages = seconds_of(without(worked.operations, worked.weights) if splits else worked.operations)
            moved, rows = dict.fromkeys(COPYING, 0.0), more * OPTIMISM if more > 1 else more
            for one in worked.operations:
                if one.copies:
                    moved[one.kind] += share * rows * hardware.host_copy_seconds(one.num_bytes)
            alone = Alone(now + messages + later, messages, later, moved["evict"], moved["fetch"])
            self._known_alone[key] = alone, worked.operations
        return self._known_alone[key][0]

    @cached_property
    def _num_trained(self) -> int:
        return sum(param.numel() for param in self.rehearsals.model.parameters() if param.requires_grad)


def _along_tp(whole: Candidate, size: int) -> Candidate:
    sizes = tuple((axis, size if axis == "tp" else num) for axis, num in whole.sizes)
    return whole if sizes == whole.sizes else replace(whole, sizes=sizes)


def _smallest_prime(number: int) -> int:
    """The smallest one that divides it; 1 for 1."""
    return (*divisors(number), 1)[1]


def _sharing(candidate: Candidate) -> Sharing:
    """Those of its axes that have several ranks."""
    found, stride = [], 1
    for axis, size in reversed(candidate.sizes):
        if axis in WITHIN and size > 1:
            found.append((axis, size, stride))
        stride *= size
    return tuple(reversed(found))
