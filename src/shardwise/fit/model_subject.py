"""A PyTorch model as the subject of a search: rehearsed on fake tensors for each way to split it, as `explain` does.

What a rehearsal finds depends on how the model is split and its activations are treated, and not on where parameters
lie or how many ranks copy them; so a few rehearsals serve many candidates. The model itself is only read.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import add

import numpy as np
import torch
from torch import nn

from shardwise.errors import ConfigError, ModelError
from shardwise.fit.budget import Ranks, within_budget
from shardwise.fit.candidates import ON_DEVICE, SCHEDULE, SPLITTING, Candidate, Load, Size
from shardwise.fit.clock import RankProgram, seconds_alone
from shardwise.fit.equal_blocks import treats_alike, without_values
from shardwise.fit.few_blocks import FewBlocks
from shardwise.fit.foreseen import Counted, RankUnits, WithBlocks, count_step, parts_of, rank_units
from shardwise.fit.hardware import Hardware
from shardwise.fit.least_steps import Alone, Least, Numbers, Order, Record, Run, StagePass
from shardwise.fit.operations import COPYING, Operation, Operations, Worked, without
from shardwise.fit.search import Evaluated, Limits
from shardwise.fit.stage_rehearsal import in_transit
from shardwise.fit.step_time import step_time
from shardwise.memory import UnitChoice, choose_units, in_own_precision
from shardwise.parallel.outline import Outline, outline
from shardwise.parallel.pipeline import StageLayout, stage_layout
from shardwise.plan import Budget, Plan, PolicyName, PrecisionName
from shardwise.plan.mesh import STAGE_AXIS, Mesh
from shardwise.plan.placement import WIDTH, mesh_for
from shardwise.program import END_OF_BACKWARD, Awaited, Footprint, Held, Mark, Moment, Update
from shardwise.program.in_flight import StageBytes, over_schedule
from shardwise.program.schedule import SCHEDULES, Op, schedule_of, schedule_of_calls
from shardwise.runtime.activations import treatments_for
from shardwise.runtime.micro_batches import MicroBatch
from shardwise.system.even_parts import divisors
from shardwise.system.torch_private import tree_leaves, tree_map_only

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
Updates = Mapping[nn.Parameter, Update]


@dataclass
class ModelSubject:
    """`model` on `hardware`, which is given with the ranks of a node; `batch` is a micro-batch of one data rank as the
    model is called with, any number of samples of it, along the first dim of its tensors. `num_rows` are the samples of
    a step on all ranks. `updates` say how parameters are updated; without, each has `num_states` of its size."""

    model: nn.Module
    batch: object
    hardware: Hardware
    num_rows: int
    base: Plan
    updates: Updates | None = None
    num_states: int = 2
    on_cpu: bool = True
    disk: str | None = None
    """A folder on a local disk, for states that the host has no room for."""
    varies_rows: bool = True
    """Whether micro-batches of other sizes will be asked for."""
    _counted: dict[object, list[Counted] | ModelError | ConfigError] = field(default_factory=dict)
    _between: dict[object, Counted | None] = field(default_factory=dict)
    _is_tried: bool = False
    _first_is_apart: bool = False
    """Whether the model does other things with `rows_of_batch` samples than with more, such as with a single one."""
    _known: dict[object, list[_Known]] = field(default_factory=dict)
    """What tells of a candidate without stages, by its key, until something more is rehearsed."""
    _least: dict[object, Least] = field(default_factory=dict)
    _known_passes: dict[object, list[StagePass]] = field(default_factory=dict)
    _records: dict[object, Record] = field(default_factory=dict)
    _unpriced: dict[int, _Unpriced] = field(default_factory=dict)
    """By the identity of what was counted."""
    _moments: dict[tuple[Moment, ...], tuple[Moment, ...]] = field(default_factory=dict)
    _known_stage_of: dict[tuple[int, int], Numbers] = field(default_factory=dict)
    """By the identity of what is in `_moments`, and the number of stages."""
    _known_alone: dict[object, tuple[Alone, Operations]] = field(default_factory=dict)
    """By the identity of operations, which are kept alive, and who communicates."""
    _known_stages: dict[tuple[int, int, str], _Stages] = field(default_factory=dict)
    _cut_stages: dict[int, _Stages] = field(default_factory=dict)
    """By their number."""
    _held: dict[Candidate, dict[int, Footprint]] = field(default_factory=dict)
    """What some ranks of a pipeline hold, by their place."""
    _units: dict[tuple[Candidate, Plan], list[RankUnits]] = field(default_factory=dict)
    _outlines: dict[object, Outline] = field(default_factory=dict)
    _sizes: dict[tuple[PolicyName, PrecisionName | None], Size] = field(default_factory=dict)
    _widths: dict[PrecisionName | None, int] = field(default_factory=dict)
    """Bytes of an element that computes."""

    def __post_init__(self) -> None:
        self.base = in_own_precision(self.base, self.model)
        self._few = FewBlocks.of(self.model)
        self.rows_of_batch = rows_of(self.batch)

    def size(self, policy: PolicyName, precision: PrecisionName | None) -> Size:
        key = policy, precision
        if key not in self._sizes:
            rows = self._rows_of_size
            candidate = Candidate(ON_DEVICE[0], (("dp", 1),), rows, 1, policy, precision=precision)
            mesh = candidate.mesh
            plan = candidate.plan(_plain(self.base))
            (units,) = rank_units(self.model, plan, mesh, None, self.updates, on_cpu=self.on_cpu)
            (counted,) = self._count(candidate)
            flats = [flat for unit in units.units for flat in unit.flats]
            self._widths[precision] = max(WIDTH[flat.table.compute] for flat in flats)
            operations = [one for worked in counted.worked for one in worked.operations if one.flops]
            seconds = sum(one.flops / self.hardware.peak(one.dtype) for one in operations)
            moved = [sum(one.num_bytes for one in part.operations if one.kind == "evict") for part in counted.worked]
            self._sizes[key] = Size(
                numel=sum(flat.numel for flat in flats),
                trained_numel=sum(flat.numel for flat in flats if flat.trainable),
                largest_unit_numel=max(sum(flat.numel for flat in unit.flats) for unit in units.units),
                num_blocks=max(1, sum(_is_block(unit.name) for unit in units.units)),
                num_states=self.num_states,
                flops_seconds=OPTIMISM * seconds / rows,
                row_bytes=OPTIMISM * max(mark.peak_bytes for mark in counted.activations.marks) / rows,
                host_row_bytes=OPTIMISM * sum(moved) / rows,
                host_unit_row_bytes=max(moved) / rows,
                between_row_bytes=OPTIMISM * _between_passes(counted.activations.marks) / rows,
                blocks_row_bytes=OPTIMISM * _left_by_blocks(counted.activations.marks) / rows,
            )
        return self._sizes[key]

    def blocks_by_rank(self, candidate: Candidate) -> Sequence[int]:
        blocks, num_ranks = self._stages(candidate).blocks, candidate.size("pp")
        return [sum(blocks[rank::num_ranks]) for rank in range(num_ranks)]

    def check(self, candidate: Candidate) -> None:
        """As `shard` does. Whether attention and experts can be split, only a forward tells."""
        stages, rows = candidate.size("pp"), self.rows_of_batch
        plain = replace(candidate, rows=rows, accumulate=stages, policy="keep", wires=())
        if self.base.pipeline.stages == "auto":
            plain = replace(plain, schedule=SCHEDULE, chunks=1)
        self._outline(plain)
        if candidate.size("sp") * candidate.size("ep") > 1:
            self._derived(plain)

    def least(self, candidate: Candidate, *, itself: bool = False) -> Least:
        """See [Note: least steps]. Whatever a treatment of activations does, it computes what keeping them does; and of
        twice as many ranks along `tp` each computes and holds at least half, and sends as much. Where a candidate's own
        split and treatment have not been rehearsed, such others tell. With `itself`, its treatment is rehearsed on the
        fewest ranks along `tp` first, for the usual number of samples; and where that is known, as it is."""
        whole = _of_model(candidate)
        if itself and not self._is_derived(whole):
            near = next((one for one in self._nearer(whole) if not self._is_rehearsed(one)), None)
            self._derived(candidate) if near is None else self._count(near)
        known = self._known.get(_key(whole))
        if known is None:
            known = self._known[_key(whole)] = self._known_of(whole)
        stages = candidate.size("pp")
        of_stages = (stages, candidate.chunks, candidate.schedule, candidate.parts) if stages > 1 else ()
        alike = candidate.policy, candidate.rows, of_stages, _sharing(candidate), candidate.accumulate
        key = tuple((_key(one.whole), self._is_rehearsed(one.whole), one.fewer is not None) for one in known), alike
        if key not in self._least:
            self._least[key] = Least.of_all([self._least_of(candidate, one) for one in known])
        return self._least[key]

    def _nearer(self, whole: Candidate) -> Iterator[Candidate]:
        """What tells of it beforehand, if it is rehearsed, from far to near: its treatment on fewer ranks along `tp`,
        of the usual number of samples; and on as many, if samples are what is derived."""
        sizes, first = [whole.size("tp")], self._rows_of_size
        while sizes[-1] > 1:
            sizes.append(sizes[-1] // _smallest_prime(sizes[-1]))
        is_counted = whole.rows in (first, 2 * first) or (self._first_is_apart and whole.rows < first)
        for size in reversed(sizes[1:-1] if is_counted else sizes[:-1]):
            yield replace(_along_tp(whole, size), rows=first)

    def _known_of(self, whole: Candidate) -> list[_Known]:
        """What tells of it: a rehearsal of its own split and treatment; or else of its treatment on fewer ranks along
        `tp`, of as many samples or of those that `size` has rehearsed, and of activations that are kept."""
        kept = replace(whole, policy="keep")
        if whole == kept or self.base.activations.policy is not None or self._is_derived(whole):
            return [self._on_fewer_ranks(whole, 2)]
        again = self.size(whole.policy, whole.precision).flops_seconds
        again -= self.size("keep", whole.precision).flops_seconds
        again = max(0.0, again) * whole.rows / (whole.size("tp") * whole.size("sp"))
        found = [replace(self._on_fewer_ranks(kept, 2), again=again)]
        treated = [self._on_fewer_ranks(replace(whole, rows=rows), 1) for rows in (whole.rows, self._rows_of_size)]
        best = max(filter(lambda one: self._is_derived(one.whole), treated), key=lambda one: one.share, default=None)
        return found if best is None else [*found, best]

    def _on_fewer_ranks(self, whole: Candidate, fewest: int) -> _Known:
        """The same on as many ranks along `tp` as have been rehearsed, or on a number of them that has to be: a prime
        one, or 1 if that is the `fewest`."""
        there = whole
        while not self._is_derived(there):
            fewer = _along_tp(there, there.size("tp") // _smallest_prime(there.size("tp")))
            if fewer == there or fewer.size("tp") < fewest:
                break
            there = fewer
        if there == whole:
            return _Known(whole)
        fewer = _along_tp(there, there.size("tp") // _smallest_prime(there.size("tp")))
        tells = fewer != there and self._is_derived(there) and self._is_derived(fewer)
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
        if is_own and candidate.rows < self._rows_of_size and not self._is_rehearsed(known):
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
        shares, runs = self._stages(candidate).shares, order.runs(passes, self._stages(candidate).shares, accumulate)
        last, message_bytes = len(passes) - 1, self._message_bytes(candidate)
        messages = [_messages_of(stage, last + 1, message_bytes) for stage in (0, 1, last)]  # others are as the second
        beside = [_beside_whole(*one) for one in messages]
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
        of_known = _key(known.whole), self._is_rehearsed(known.whole), known.share, known.fewer is not None
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
                approximate = OPTIMISM * more if more > 1 or candidate.rows < self._rows_of_size else 1.0
                of_unit = self._gradient_bytes(candidate) if more > 1 else 0.0
                for mine in held:
                    gradients = min(mine[1], of_unit)
                    mine[:] = [approximate * num for num in mine]
                    mine[1] += gradients - approximate * gradients
                passes = [one.holding(*mine) for one, mine in zip(passes, held, strict=True)]
            self._known_passes[key] = passes
        return self._known_passes[key]

    def _gradient_bytes(self, candidate: Candidate) -> int:
        """Of a unit, at most, which a backward holds whatever the samples. How much of it is split along `tp` differs
        between models."""
        return self.size("keep", candidate.precision).largest_unit_numel * self._widths[candidate.precision]

    def _counted_passes(self, candidate: Candidate, known: Candidate, share: float, *, splits: bool) -> list[StagePass]:
        """Of each stage of `candidate`, from what was counted of `known`, of which a rank computes a `share`."""
        stages, more, sharing = candidate.size("pp"), candidate.rows / known.rows, _sharing(candidate)
        (found,) = self._derived(known, approximately=True)
        key = id(found), share, more, sharing, splits  # which is kept: as it was counted, or derived
        if key not in self._records:
            if id(found) not in self._unpriced:
                self._unpriced[id(found)] = _Unpriced.of(found, self._moments)
            unpriced = self._unpriced[id(found)]
            alone = [self._alone(one, share, more, sharing, splits=splits) for one in unpriced.different]
            self._records[key] = unpriced.record.priced(alone, unpriced.places)
        num_trained = [self._num_trained] if stages == 1 else self._stages(candidate).num_trained
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
            self._known_stage_of[key] = np.array(stages_of(moments, self._stages(candidate).users))
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
    def _choices(self) -> list[UnitChoice]:
        return choose_units(self.model, self.base)

    @cached_property
    def _num_trained(self) -> int:
        return sum(param.numel() for param in self.model.parameters() if param.requires_grad)

    def _stages(self, candidate: Candidate) -> _Stages:
        """The stages of a model, however it is split otherwise. Where the plan does not list them, they depend on their
        number, and on nothing else of a schedule."""
        num_ranks = candidate.size("pp")
        key = num_ranks, candidate.chunks, candidate.schedule
        if key not in self._known_stages:
            plan, mesh = self._placed(replace(candidate, accumulate=num_ranks))
            is_cut = self.base.pipeline.stages == "auto" and self.base.compile is None
            alike = self._cut_stages.get(num_ranks * candidate.chunks) if is_cut else None
            if alike is None:
                alike = _Stages.of(self.model, self._choices, stage_layout(self.model, plan, mesh))
                self._cut_stages[num_ranks * candidate.chunks] = alike
            layout = replace(alike.layout, num_ranks=num_ranks, schedule=schedule_of(plan, num_ranks))
            self._known_stages[key] = replace(alike, layout=layout)
        return self._known_stages[key]

    @property
    def _rows_of_size(self) -> int:
        """Samples of the rehearsals that every treatment of activations has: those of the batch, or twice as many, if
        those of the batch are apart."""
        if self.varies_rows and not self._is_tried:
            self._is_tried = True
            one = Candidate(ON_DEVICE[0], (("dp", 1),), self.rows_of_batch, 1)
            (few,), (more,) = (self._count(replace(one, rows=times * self.rows_of_batch)) for times in (1, 2))
            self._first_is_apart = between(few, more, 0.5) is None
        return self.rows_of_batch * (2 if self._first_is_apart else 1)

    def evaluate(self, candidate: Candidate) -> Evaluated:
        """From rehearsals of two sizes of micro-batches, without a pipeline: see [Note: derived counts]."""
        timed, programs, counted = self._derived_step(candidate)
        return self._with_bytes(timed, candidate, programs, counted, self._held.get(candidate, {}))

    def timed(self, candidate: Candidate) -> Evaluated:
        return self._derived_step(candidate)[0]

    def held(self, candidate: Candidate, enough: int | None = None) -> int:
        """Of the second rank of a pipeline, which also holds what has arrived, of the first, which has most
        micro-batches in flight, and of the last one, which has the loss: a program for each, and no clock."""
        plan, mesh = self._placed(candidate)
        ranks, known, most = self._ranks(candidate, plan, mesh), self._held.setdefault(candidate, {}), 0
        for place in dict.fromkeys((1, 0, len(ranks) - 1)):
            if place not in known:
                counted = self._derived_ranks(candidate, ranks, (place,))
                (program,) = _programs(plan, [ranks[place]], counted)
                known[place] = self._footprint(candidate, program, *counted)
            most = max(most, known[place].total)
            if enough is not None and most > enough:
                break
        return most

    def relieved(self, candidate: Candidate, limits: Limits) -> Candidate:
        """With the least that a budget (`within_budget`) would put off the device, beside what activations take."""
        disk = self.disk if self.hardware.disk is not None and limits.host_bytes is not None else None
        budget = Budget(device=limits.device_bytes, host=limits.host_bytes, disk=disk)
        fullest = candidate.fullest
        plan, mesh = self._placed(fullest)
        counted = self._derived_ranks(fullest, self._ranks(fullest, plan, mesh))
        ranks = Ranks(self.on_cpu, min(candidate.world_size, self.hardware.ranks_per_node))
        fitted = within_budget(
            self.model,
            plan.model_copy(update={"budget": budget}),
            mesh,
            ranks,
            self.updates,
            self.num_states,
            activations=[one.activations for one in counted],
            describes=False,
        )
        offload = fitted.plan.offload
        on_disk = offload.optim_disk > 0 or offload.param_disk > 0
        return replace(candidate, offload=offload, disk=disk if on_disk else None)

    def confirm(self, candidate: Candidate) -> Evaluated:
        """From a rehearsal of just this: the step that `shard` would plan."""
        plan, mesh = self._placed(candidate)
        ranks, counted = self._ranks(candidate, plan, mesh), self._count(candidate)
        programs = _programs(plan, ranks, counted, checks=True)
        timed = self._timed(candidate, plan, mesh, ranks, programs, is_exact=True)
        return self._with_bytes(timed, candidate, programs, counted, {})

    def _placed(self, candidate: Candidate) -> tuple[Plan, Mesh]:
        """Its plan, on the mesh that `shard` would make."""
        plan = candidate.plan(self.base)
        return plan, mesh_for(plan, candidate.world_size, self.hardware.ranks_per_node)

    def _ranks(self, candidate: Candidate, plan: Plan, mesh: Mesh) -> list[RankUnits]:
        """Known for each plan but for its micro-batches, and for its activations unless stages depend on them. Of a
        pipeline only the rows of the schedule depend on the number of micro-batches."""
        num_stages = candidate.size("pp")
        plain = replace(candidate, rows=1, accumulate=1, policy="keep" if num_stages == 1 else candidate.policy)
        key = plain, self.base
        if key not in self._units:
            found = rank_units(self.model, plan, mesh, self._outline(candidate), self.updates, on_cpu=self.on_cpu)
            alike = self._units.get((replace(plain, policy="keep"), self.base), [])
            self._units[key] = [one.with_programs_of(other) for one, other in zip(found, alike, strict=False)] or found
        units = self._units[key]
        if num_stages == 1:
            return units
        schedule = schedule_of(plan, num_stages)
        if candidate.parts:
            schedule = schedule_of_calls(num_stages, schedule.num_stages, min(2, candidate.accumulate))
        return _with_rows(units, schedule.rows)

    def _outline(self, candidate: Candidate) -> Outline:
        """That of its plan. How layers are split, and activations treated, is the same for many."""
        plan, mesh = self._placed(candidate)
        stages = self._stages(candidate).layout if mesh.has_stages else None
        if candidate.size("ep") > 1:  # experts also split the other axes
            return outline(self.model, plan, mesh, 0, stages=stages)
        split = tuple((axis, candidate.size(axis)) for axis in WITHIN), plan.tensor.verify and mesh.has_stages
        like = self._outlines.get((split, candidate.policy))
        if like is None and split in self._outlines:
            like = self._outlines[split]
            like = replace(like, treatments=treatments_for(self.model, like.choices, plan))
        found = outline(self.model, plan, mesh, 0, stages=stages, like=like)
        for alike in (split, (split, candidate.policy)):
            self._outlines.setdefault(alike, found)
        return found

    def _derived_step(self, candidate: Candidate) -> tuple[Evaluated, list[RankProgram], list[Counted]]:
        """How long it takes, and the programs of its ranks with what was counted of each."""
        plan, mesh = self._placed(candidate)
        ranks = self._ranks(candidate, plan, mesh)
        counted = self._derived_ranks(candidate, ranks)
        is_exact = len(ranks) == 1 and self._is_rehearsed(_of_model(candidate))
        programs = _programs(plan, ranks, counted, checks=is_exact)
        return self._timed(candidate, plan, mesh, ranks, programs, is_exact=is_exact), programs, counted

    def _timed(
        self,
        candidate: Candidate,
        plan: Plan,
        mesh: Mesh,
        ranks: Sequence[RankUnits],
        programs: Sequence[RankProgram],
        *,
        is_exact: bool,
    ) -> Evaluated:
        """How long the step takes: see [Note: calls in a search].

        Copies of states beside a step (`survive`) are not in it: on accelerators none are made, as all ranks restart;
        on processors, who gets one depends on which ranks are on which host, which is looked up rank by rank.
        """
        time = step_time(
            _programs(plan, *self._in_parts(candidate, ranks)) if candidate.parts else programs,
            self.hardware,
            mesh,
            num_micro_batches=plan.accumulate,
            num_states=self.num_states,
            keeps_events=False,
        )
        return Evaluated(
            seconds=time.timeline.step_seconds,
            device_bytes=0,
            parts=time.breakdown,
            mfu=time.timeline.mfu,
            is_exact=is_exact,
        )

    def _with_bytes(
        self,
        timed: Evaluated,
        candidate: Candidate,
        programs: Sequence[RankProgram],
        counted: Sequence[Counted],
        known: Mapping[int, Footprint],
    ) -> Evaluated:
        """`timed`, with what the fullest rank holds: what an engine promises, which fits wherever ranks run. Where
        those of a host share memory it is less (`local_size`), and a budget that counted on that would be exceeded by
        the same plan on more hosts. Of some ranks that may be `known`, by their place."""
        held = [
            known.get(place) or self._footprint(candidate, program, one)
            for place, (program, one) in enumerate(zip(programs, counted, strict=True))
        ]
        num_local = min(candidate.world_size, self.hardware.ranks_per_node)
        return replace(
            timed,
            device_bytes=max(one.total for one in held),
            host_bytes=num_local * max(one.host_total for one in held),
            disk_bytes=num_local * max(one.disk_total for one in held),
            process_bytes=max(one.activations.beside_tensors_bytes for one in counted),
        )

    def _footprint(self, candidate: Candidate, program: RankProgram, counted: Counted) -> Footprint:
        return program.step.footprint(
            states_per_param=self.num_states, num_micro_batches=candidate.accumulate, activations=counted.activations
        )

    def _in_parts(self, candidate: Candidate, ranks: Sequence[RankUnits]) -> tuple[list[RankUnits], list[Counted]]:
        """The ranks of a pipeline with the parts of all calls as micro-batches, and what these compute."""
        num_stages = 1 + max(op.stage for rank in ranks for op in rank.row)
        schedule = schedule_of_calls(len(ranks), num_stages, candidate.accumulate, candidate.parts)
        ranks = _with_rows(ranks, schedule.rows)
        return ranks, self._derived_ranks(replace(candidate, rows=-(-candidate.rows // candidate.parts)), ranks)

    def _derived_ranks(
        self, candidate: Candidate, ranks: Sequence[RankUnits], places: Sequence[int] | None = None
    ) -> list[Counted]:
        """Of all `ranks` of a pipeline, or of those at some `places`."""
        counted = self._derived(candidate)
        if len(ranks) == 1:
            return counted
        return _of_stages(ranks, places, counted[0], self._message_bytes(candidate))

    def _derived(self, candidate: Candidate, *, approximately: bool = False) -> list[Counted]:
        """Without a pipeline, for any size of a micro-batch; `approximately` also for those that are apart."""
        whole, first = _of_model(candidate), self._rows_of_size
        is_apart = self._first_is_apart and whole.rows < first and not approximately
        if self._is_rehearsed(whole) or whole.rows in (first, 2 * first) or is_apart:
            return self._count(whole)
        key = _key(whole)
        if key not in self._between:
            (few,), (more,) = (self._count(replace(whole, rows=rows)) for rows in (first, 2 * first))
            self._between[key] = between(few, more, (whole.rows - first) / first)
        found = self._between[key]
        return self._count(whole) if found is None else [found]

    def _is_derived(self, candidate: Candidate) -> bool:
        """Whether what is known tells of it, without another rehearsal."""
        whole, first = _of_model(candidate), self._rows_of_size
        needed = (replace(whole, rows=rows) for rows in (first, 2 * first))
        return self._is_rehearsed(whole) or all(map(self._is_rehearsed, needed))

    def _is_rehearsed(self, candidate: Candidate) -> bool:
        return (_key(candidate), False) in self._counted

    def _message_bytes(self, candidate: Candidate) -> int:
        """Of the activations of one micro-batch that a stage sends on: of two stages, unless the plan lists its own,
        which send the same on any number of ranks along `tp`, unless these have parts of a sequence, or the plan says
        what else is split."""
        kept = replace(candidate, rows=self.rows_of_batch, policy="keep")
        if self.base.pipeline.stages == "auto":
            tensor = self.base.tensor
            few = {"pp": 2} if tensor.sequence or tensor.plan is not None else {"pp": 2, "tp": 1}  # blocks return all
            sizes = tuple((axis, few.get(axis, size)) for axis, size in candidate.sizes)
            kept = replace(kept, sizes=sizes, schedule=SCHEDULE, chunks=1, accumulate=2)
        found = self._count(kept, for_messages=True)
        most = max((num_bytes for one in found for num_bytes in one.message_bytes.values()), default=0)
        return most * candidate.rows // self.rows_of_batch

    def _count(self, candidate: Candidate, *, for_messages: bool = False) -> list[Counted]:
        """Of one micro-batch, on as few ranks as have the same parts; `for_messages`, with as few blocks as have the
        same messages."""
        key = _key(candidate), for_messages
        found = self._counted.get(key)
        if found is None:
            try:
                found = self._rehearsed(candidate, for_messages=for_messages)
            except (ModelError, ConfigError) as error:
                found = error
            if not gc.isenabled():  # a search looks after it: the copies of modules are cycles, and no older than this
                gc.collect(0)
            self._counted[key] = found
            self._known.clear()
            self._held.clear()
        if isinstance(found, ModelError | ConfigError):
            raise found
        return found

    def _rehearsed(self, candidate: Candidate, *, for_messages: bool) -> list[Counted]:
        sizes = {axis: size if axis in SPLITTING else 1 for axis, size in candidate.sizes}
        mesh = Mesh(tuple(sizes), tuple(sizes.values()))
        small = candidate.plan(self.base).model_copy(update={"mesh": sizes})
        batch = with_rows(self.batch, candidate.rows, self.rows_of_batch, candidate.size("sp"))
        tells = not self.on_cpu and candidate.policy != "disk"
        with_blocks = self._few.with_blocks if tells and self._few.is_checked else None

        def count(model: nn.Module, with_blocks: WithBlocks | None = None) -> list[Counted]:
            if not mesh.has_stages:
                return count_step(model, batch, small, mesh, counts_work=not for_messages, on_cpu=self.on_cpu)
            parts = parts_of(model, small, mesh, on_cpu=self.on_cpu)
            is_call = candidate.parts > 0
            return parts.of_stages(model, batch, counts_work=not for_messages, as_call=is_call, with_blocks=with_blocks)

        if self._few.blocks is not None and treats_alike(small):
            if for_messages and small.pipeline.stages == "auto":
                return count(self._few.with_blocks(2 * candidate.size("pp")))
            if tells and candidate.size("pp") == 1:
                split = tuple(axis for axis, size in sizes.items() if size > 1)
                treatment = candidate.policy, candidate.precision
                found = self._few.count(lambda model: count(model)[0], treatment, split)
                if found is not None:
                    return [found]
        return count(without_values(self.model), with_blocks)


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


# [Note: derived bounds] Of ranks along `tp`, twice as many do at least half each. What they hold is affine in their
# inverse, as far as a part of it is split and the rest is not; so two numbers of them tell of more, but for what only
# split models have, for which there is `OPTIMISM`, if one of the two is 1. A peak is the largest of several such
# numbers, so that more ranks hold at least what two others say. Of samples, fewer do and hold at least as much for
# each, and more take at least as long together, hold as much for each but for what does not depend on them (`OPTIMISM`
# again), and move as much. A bound for each treatment, number of ranks and of samples then costs two rehearsals of a
# treatment instead of two for each number of ranks.


def _along_tp(whole: Candidate, size: int) -> Candidate:
    sizes = tuple((axis, size if axis == "tp" else num) for axis, num in whole.sizes)
    return whole if sizes == whole.sizes else replace(whole, sizes=sizes)


def _smallest_prime(number: int) -> int:
    """The smallest one that divides it; 1 for 1."""
    return (*divisors(number), 1)[1]


@dataclass(frozen=True)
class _Stages:
    """The stages of a pipeline: in which of them each unit is, and by stage their elements, and how many are blocks."""

    layout: StageLayout
    users: Mapping[str, set[int]]
    numel: Sequence[int]
    num_trained: Sequence[int]
    blocks: Sequence[int]

    @classmethod
    def of(cls, model: nn.Module, units: Sequence[UnitChoice], layout: StageLayout) -> _Stages:
        by_stage = layout.params_by_stage(model)
        users = {
            unit.name: {stage for stage, own in enumerate(by_stage) if not own.isdisjoint(unit.params.values())}
            for unit in units
        }
        numel = [sum(param.numel() for param in own) for own in by_stage]
        num_trained = [sum(one.numel() for one in own if one.requires_grad) for own in by_stage]
        of_blocks = [some for name, some in users.items() if _is_block(name)]
        blocks = [sum(stage in some for some in of_blocks) for stage in range(layout.num_stages)]
        return cls(layout, users, numel, num_trained, blocks)

    @cached_property
    def shares(self) -> list[float]:
        """By rank: elements, or trained ones if these are fewer, as a share of what the average rank has."""
        num_ranks = self.layout.num_ranks
        shares = [1.0] * num_ranks
        for sizes in (self.numel, self.num_trained):
            mean = sum(sizes) / num_ranks
            for rank in range(num_ranks) if mean else ():
                shares[rank] = min(shares[rank], sum(sizes[rank::num_ranks]) / mean)
        return shares


def _sharing(candidate: Candidate) -> Sharing:
    """Those of its axes that have several ranks."""
    found, stride = [], 1
    for axis, size in reversed(candidate.sizes):
        if axis in WITHIN and size > 1:
            found.append((axis, size, stride))
        stride *= size
    return tuple(reversed(found))


def _of_model(candidate: Candidate) -> Candidate:
    """The same without a pipeline, of one micro-batch."""
    sizes = tuple((axis, 1 if axis == "pp" else size) for axis, size in candidate.sizes)
    return replace(candidate, sizes=sizes, accumulate=1, schedule=SCHEDULE, chunks=1, parts=0)


def _key(candidate: Candidate) -> object:
    """What a rehearsal depends on."""
    stages = candidate.size("pp")
    scheduled = candidate.schedule, candidate.chunks, candidate.accumulate, candidate.parts
    of_stages = scheduled if stages > 1 else ()
    split = tuple((axis, size) for axis, size in candidate.sizes if axis in SPLITTING and size > 1)
    return split, of_stages, candidate.rows, candidate.policy, candidate.precision


# [Note: calls in a search] A loop that calls the model in stages holds what a call of its whole micro-batch holds, and
# from the second call of a step on its gradients beside that: two calls are counted, each as one micro-batch. But it
# takes the time of parts, which pass through the stages one behind the other, so parts are timed. The head, which runs
# once for all of them, is timed with each, so a call takes a little longer than foreseen, by what other ranks wait for
# it, whichever plan it is.


def _with_rows(ranks: Sequence[RankUnits], rows: Sequence[tuple[Op, ...]]) -> list[RankUnits]:
    """The ranks of a pipeline with other ops."""
    return [replace(rank, row=row) for rank, row in zip(ranks, rows, strict=True)]


def _programs(
    plan: Plan, ranks: Sequence[RankUnits], counted: Sequence[Counted], *, checks: bool = False
) -> list[RankProgram]:
    """What a clock needs of each rank, which has to know what all stages send. What is only priced is not checked: what
    is proposed is, as `shard` does."""
    sent = {stage: num_bytes for one in counted for stage, num_bytes in one.message_bytes.items()}
    counted = [replace(one, message_bytes=sent) for one in counted]
    return [units.program(plan, one, checks=checks) for units, one in zip(ranks, counted, strict=True)]


# [Note: derived counts] A rehearsal takes a second or more, and a search would need hundreds. But what a model computes
# and holds is affine in the samples of a micro-batch (what belongs to the batch, and what does not), so that two
# rehearsals tell of all sizes; where they have different operations they do not, and another one is made. Many models
# spare copies with a single sample, whose dim is no dim: then two and four tell of all others. And a stage
# of a pipeline does what the whole model does between the same moments: its marks lie above what stages before it hold.
# What a search proposes is rehearsed as it is before it is believed (`confirm`).


def between(few: Counted, more: Counted, share: float) -> Counted | None:
    """At `share` of the way from one count to another, or beyond; `None` if they are not alike."""
    marks, others = few.activations.marks, more.activations.marks
    if [mark.moment for mark in marks] != [mark.moment for mark in others]:
        return None
    worked = []
    known: dict[tuple[int, int], Operation] = {}
    alike: dict[tuple[int, int], tuple[Operation, ...]] = {}
    """Of equal blocks, which have the same operations, and so are priced once."""
    for first, second in zip(few.worked, more.worked, strict=True):
        parts = []
        for some, same in (
            (first.operations, second.operations),
            (first.recomputed, second.recomputed),
            (first.weights, second.weights),
        ):
            if (id(some), id(same)) in alike:
                parts.append(alike[id(some), id(same)])
                continue
            if len(some) != len(same) or any(
                (a.kind, len(a.shape), len(a.allocated_bytes)) != (b.kind, len(b.shape), len(b.allocated_bytes))
                for a, b in zip(some, same, strict=True)
            ):
                return None
            alike[id(some), id(same)] = tuple(_operation(a, b, share, known) for a, b in zip(some, same, strict=True))
            parts.append(alike[id(some), id(same)])
        every, again, weights = parts
        factors_bytes = _at(first.factors_bytes, second.factors_bytes, share)
        worked.append(Worked(first.moment, every, again, weights, factors_bytes))
    one, other = few.activations, more.activations
    held = replace(
        one,
        marks=tuple(
            Mark(
                a.moment,
                _at(a.peak_bytes, b.peak_bytes, share),
                _at(a.live_bytes, b.live_bytes, share),
                _at(a.heap_bytes, b.heap_bytes, share),
                *_peaks_at(a, b, share),
            )
            for a, b in zip(marks, others, strict=True)
        ),
        process_bytes=_at(one.process_bytes, other.process_bytes, share),
        host_bytes=_at(one.host_bytes, other.host_bytes, share),
        host_heap_bytes=_at(one.host_heap_bytes, other.host_heap_bytes, share),
        disk_bytes=_at(one.disk_bytes, other.disk_bytes, share),
        staging_bytes=_at(one.staging_bytes, other.staging_bytes, share),
        unit_bytes=_at(one.unit_bytes, other.unit_bytes, share),
        peak_heap_bytes=_at(one.peak_heap_bytes, other.peak_heap_bytes, share),
    )
    sent = {axis: _at(num, more.sent_bytes.get(axis, num), share) for axis, num in few.sent_bytes.items()}
    return Counted(held, sent, few.tied_bytes, tuple(worked))


def _at(few: float, more: float, share: float) -> int:
    return max(0, round(few + (more - few) * share))


def _peaks_at(few: Mark, more: Mark, share: float) -> tuple[tuple[Held, ...], Awaited, int]:
    """None where other peaks count with other rows: then all gradients are counted from the start."""
    if few.awaited != more.awaited or [one.awaited for one in few.peaks] != [one.awaited for one in more.peaks]:
        return (), (), 0
    pairs = zip(few.peaks, more.peaks, strict=True)
    peaks = tuple(Held(_at(a.num_bytes, b.num_bytes, share), a.awaited) for a, b in pairs)
    return peaks, few.awaited, _at(few.come_bytes, more.come_bytes, share)


def _operation(few: Operation, more: Operation, share: float, known: dict[tuple[int, int], Operation]) -> Operation:
    key = id(few), id(more)
    if key not in known:
        known[key] = replace(
            few,
            shape=tuple(_at(a, b, share) for a, b in zip(few.shape, more.shape, strict=True)),
            flops=max(0.0, few.flops + (more.flops - few.flops) * share),
            num_bytes=max(0.0, few.num_bytes + (more.num_bytes - few.num_bytes) * share),
            allocated_bytes=tuple(
                _at(a, b, share) for a, b in zip(few.allocated_bytes, more.allocated_bytes, strict=True)
            ),
        )
    return known[key]


def _between_passes(marks: Sequence[Mark]) -> int:
    """Bytes that a forward leaves for its backward."""
    forward = [mark.live_bytes for mark in marks if mark.moment.phase == "forward"]
    return forward[-1] if forward else 0


def _left_by_blocks(marks: Sequence[Mark]) -> int:
    """Bytes that the forwards of all blocks leave for their backwards."""
    left = before = 0
    for mark in marks:
        if mark.moment.phase == "forward" and mark.moment.edge == "after" and _is_block(mark.moment.unit):
            left += mark.live_bytes - before
        before = mark.live_bytes
    return left


def _of_stages(
    ranks: Sequence[RankUnits], places: Sequence[int] | None, whole: Counted, message_bytes: int
) -> list[Counted]:
    """What each of the `ranks` of a pipeline, or of those at some `places`, holds and computes, by the moments of the
    whole model."""
    users: dict[str, set[int]] = {}
    for rank in ranks:
        for name, some in rank.stages_of_units.items():
            users.setdefault(name, set()).update(some)
    stage_of = stages_of([mark.moment for mark in whole.activations.marks], users)
    last = max(op.stage for rank in ranks for op in rank.row)
    num_micro_batches = 1 + max(op.micro_batch for rank in ranks for op in rank.row)
    found = []
    for rank in ranks if places is None else [ranks[place] for place in places]:
        stages, messages = {}, 0
        names_of = {
            stage: {name for name, some in rank.stages_of_units.items() if stage in some}
            for stage in {op.stage for op in rank.row}
        }
        for stage, names in names_of.items():
            marks = _marks_of_stage(whole.activations.marks, stage_of, stage, names)
            forward = [mark for mark in marks if mark.moment.phase == "forward"]
            if not forward:
                raise ModelError(f"Stage {stage} of the pipeline has no unit whose activations are known.")
            given, sent = _messages_of(stage, last + 1, message_bytes)
            in_forward, in_backward, left, _ = _beside_whole(given, sent)
            held = forward[-1].live_bytes + left
            marks = [_above(mark, in_forward if mark.moment.phase == "forward" else in_backward) for mark in marks]
            factors = {
                one.moment: one.factors_bytes for one, at in zip(whole.worked, stage_of, strict=True) if at == stage
            }
            if any(op.kind == "I" for op in rank.row):
                marks = list(_with_aside(marks, factors))
            messages += in_transit(len(ranks), num_micro_batches, given, sent)
            heap = max(mark.heap_bytes for mark in marks)
            ended = Mark(END_OF_BACKWARD, 0, 0)
            own = replace(whole.activations, marks=(*marks, ended), peak_heap_bytes=heap)
            aside = sum(factors.values())
            stages[stage] = StageBytes(own, held, aside)
        names = set().union(*names_of.values())
        held_by_rank = over_schedule(rank.row, stages, names, messages)
        worked = tuple(
            one if stage in names_of else Worked(one.moment)
            for one, stage in zip(whole.worked, stage_of, strict=True)
            if one.moment.unit in names
        )
        by_stage = {stage: message_bytes for stage in names_of if stage < last}
        found.append(Counted(held_by_rank, {}, 0, worked, by_stage))
    return found


def _messages_of(stage: int, num_stages: int, message_bytes: int) -> tuple[int, int]:
    """Bytes that it is given, and that it sends on, of each micro-batch."""
    return message_bytes if stage else 0, message_bytes if stage + 1 < num_stages else 0


def _beside_whole(given: int, sent: int) -> tuple[int, int, int, int]:
    """What a stage holds beside what the whole model holds there, in the order of `StagePass.bytes`: what has arrived,
    and what stands for it until a module of this stage takes it, which checkpoints keep; and until its backward has
    ended what it has handed over."""
    return 2 * given, 2 * given + sent, 2 * given, 0


def _with_aside(marks: Sequence[Mark], factors: Mapping[Moment, int]) -> Iterator[Mark]:
    """With what the first half of a backward keeps: the bytes from which gradients of parameters are computed, by the
    moment by which they are there. (Some of them are freed before the peak of their moment.)"""
    aside = 0
    for mark in marks:
        before, after = _above(mark, aside), _above(mark, aside + factors.get(mark.moment, 0))
        yield after._replace(peak_bytes=max(before.peak_bytes, after.live_bytes), peaks=before.peaks)
        aside += factors.get(mark.moment, 0)


def _above(mark: Mark, num_bytes: int) -> Mark:
    """The same with so many bytes more."""
    held = mark.peak_bytes + num_bytes, mark.live_bytes + num_bytes, mark.heap_bytes
    return Mark(mark.moment, *held, mark.peaks_with(num_bytes), mark.awaited, mark.come_bytes)


def stages_of(moments: Sequence[Moment], users: Mapping[str, set[int]]) -> list[int]:
    """In which stage the model is at each moment: units that several stages use (embedding and head in one) are used in
    the one that has come last."""
    stage, found = 0, []
    for moment in moments:
        some = users.get(moment.unit)
        if some and stage not in some:
            later = moment.phase == "forward"
            ahead = [one for one in some if (one > stage) == later]
            stage = (min if later else max)(ahead or some)
        found.append(stage)
    return found


def _marks_of_stage(marks: Sequence[Mark], stage_of: Sequence[int], stage: int, names: set[str]) -> list[Mark]:
    """Those of the units of a stage, above what stages before it hold. Where a unit is also used in another stage, its
    moments there are, here, when this stage begins or ends."""
    found: list[Mark] = []
    below = heap_below = now = heap_now = 0
    for mark, at in zip(marks, stage_of, strict=True):
        is_forward = mark.moment.phase == "forward"
        if at == stage:
            now, heap_now = max(0, mark.live_bytes - below), max(0, mark.heap_bytes - heap_below)
        elif at < stage and is_forward:
            below, heap_below = mark.live_bytes, mark.heap_bytes
        elif at < stage:
            now = heap_now = 0
        if mark.moment.unit in names:
            peak = max(0, mark.peak_bytes - below) if at == stage else now
            peaks, come = (mark.peaks_with(-below), mark.come_bytes) if at == stage else ((), 0)
            found.append(Mark(mark.moment, peak, now, heap_now, peaks, mark.awaited, min(come, now)))
    return found


def _plain(base: Plan) -> Plan:
    """Without what only some meshes can have."""
    return base.model_copy(update={"mesh": None})


def _is_block(name: str) -> bool:
    """Whether a unit is one of a list of blocks."""
    return any(word.isdigit() for word in name.split("."))


def rows_of(batch: object) -> int:
    """The samples of a micro-batch: the first dim of its first tensor. Raises `ConfigError` without one."""
    for leaf in _leaves(batch):
        if leaf.dim():
            return leaf.shape[0]
    given = (batch.args, batch.kwargs) if isinstance(batch, MicroBatch) else batch
    opaque = next((one for one in tree_leaves(given) if hasattr(one, "__dict__") and not isinstance(one, type)), None)
    inside = ""
    if opaque is not None:
        inside = (
            f" What a {type(opaque).__name__} holds is not seen: let the model take its tensors, in tuples, lists or "
            f"dicts."
        )
    raise ConfigError(
        f"The batch, of type {type(batch).__name__}, has no tensor with a dim for samples, so its size is unknown. "
        f"Give what the model is called with: a tensor, a tuple of arguments, or a dict of keyword arguments.{inside}"
    )


def with_rows(batch: object, rows: int, rows_now: int, num_parts: int = 1) -> object:
    """The same batch with `rows` samples, and with a part of the tokens along the second dim of tensors."""
    lengths: Sequence[int] = [leaf.shape[1] for leaf in _leaves(batch) if leaf.dim() > 1]
    length = lengths[0] if lengths else 0

    def resized(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() and tensor.shape[0] == rows_now:
            tensor = (
                tensor.new_empty((rows, *tensor.shape[1:])) if tensor.is_floating_point() else _repeated(tensor, rows)
            )
        if num_parts > 1 and tensor.dim() > 1 and tensor.shape[1] == length:
            tensor = tensor[:, : length // num_parts]
        return tensor

    if isinstance(batch, MicroBatch):
        args, kwargs = tree_map_only(torch.Tensor, resized, (batch.args, batch.kwargs))
        return MicroBatch(args, kwargs)
    return tree_map_only(torch.Tensor, resized, batch)


def _repeated(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Integers are real: models look things up with them."""
    times = -(-rows // tensor.shape[0])
    return tensor.repeat(times, *[1] * (tensor.dim() - 1))[:rows]


def _leaves(batch: object) -> list[torch.Tensor]:
    given = (batch.args, batch.kwargs) if isinstance(batch, MicroBatch) else batch
    return [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]
