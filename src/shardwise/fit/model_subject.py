"""A PyTorch model as the subject of a search: rehearsed on fake tensors for each way to split it, as `explain` does.

What a rehearsal finds depends on how the model is split and its activations are treated, and not on where parameters
lie or how many ranks copy them; so a few rehearsals serve many candidates. The model itself is only read.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from shardwise.errors import ConfigError, ModelError
from shardwise.fit.candidates import Candidate, Size
from shardwise.fit.foreseen import Counted, RankUnits, count_step, rank_units
from shardwise.fit.hardware import Hardware
from shardwise.fit.search import Evaluated
from shardwise.fit.step_time import step_time
from shardwise.fit.work import Operation, Worked
from shardwise.memory import in_own_precision
from shardwise.plan import Plan, PolicyName, PrecisionName
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import mesh_for
from shardwise.program import END_OF_BACKWARD, Footprint, Mark, Update
from shardwise.program.in_flight import StageBytes, over_schedule
from shardwise.runtime.micro_batches import MicroBatch
from shardwise.runtime.rehearsal import rebind
from shardwise.system.torch_private import tree_leaves, tree_map_only

OPTIMISM = 0.9
"""Of the bytes and FLOPs of one sample: a larger micro-batch may take a little less for each of them."""
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
    _counted: dict[object, list[Counted] | ModelError | ConfigError] = field(default_factory=dict)
    _between: dict[object, Counted | None] = field(default_factory=dict)
    _sizes: dict[tuple[PolicyName, PrecisionName | None], Size] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.base = in_own_precision(self.base, self.model)
        self.rows_of_batch = rows_of(self.batch)

    def size(self, policy: PolicyName, precision: PrecisionName | None) -> Size:
        key = policy, precision
        if key not in self._sizes:
            rows = self.rows_of_batch
            candidate = Candidate("ddp", (("dp", 1),), rows, 1, policy, precision=precision)
            mesh = candidate.mesh
            plan = candidate.plan(_plain(self.base))
            (units,) = rank_units(self.model, plan, mesh, updates=self.updates, on_cpu=self.on_cpu)
            (counted,) = self._count(candidate, plan)
            flats = [flat for unit in units.units for flat in unit.flats]
            operations = [one for worked in counted.worked for one in worked.operations if one.flops]
            seconds = sum(one.flops / self.hardware.peak(one.dtype) for one in operations)
            self._sizes[key] = Size(
                numel=sum(flat.numel for flat in flats),
                trained_numel=sum(flat.numel for flat in flats if flat.trainable),
                largest_unit_numel=max(sum(flat.numel for flat in unit.flats) for unit in units.units),
                num_blocks=max(1, sum(_is_block(unit.name) for unit in units.units)),
                num_states=self.num_states,
                flops_seconds=OPTIMISM * seconds / rows,
                row_bytes=OPTIMISM * max(mark.peak_bytes for mark in counted.activations.marks) / rows,
            )
        return self._sizes[key]

    def evaluate(self, candidate: Candidate) -> Evaluated:
        """From rehearsals of two sizes of micro-batches, without a pipeline: see [Note: derived counts]."""
        plan = candidate.plan(self.base)
        mesh = mesh_for(plan, candidate.world_size, self.hardware.ranks_per_node)
        ranks = rank_units(self.model, plan, mesh, updates=self.updates, on_cpu=self.on_cpu)
        counted = self._derived(candidate)
        if len(ranks) > 1:
            counted = _of_stages(ranks, counted[0], self._message_bytes(candidate))
        is_exact = len(ranks) == 1 and candidate.rows in self._rehearsed_rows
        return self._evaluated(candidate, plan, mesh, ranks, counted, is_exact=is_exact)

    def confirm(self, candidate: Candidate) -> Evaluated:
        """From a rehearsal of just this: the step that `shard` would plan."""
        plan = candidate.plan(self.base)
        mesh = mesh_for(plan, candidate.world_size, self.hardware.ranks_per_node)
        ranks = rank_units(self.model, plan, mesh, updates=self.updates, on_cpu=self.on_cpu)
        return self._evaluated(candidate, plan, mesh, ranks, self._count(candidate, plan), is_exact=True)

    def _evaluated(
        self,
        candidate: Candidate,
        plan: Plan,
        mesh: Mesh,
        ranks: Sequence[RankUnits],
        counted: Sequence[Counted],
        *,
        is_exact: bool,
    ) -> Evaluated:
        """What the fullest rank holds, and how long the step takes."""
        sent = {stage: num_bytes for one in counted for stage, num_bytes in one.message_bytes.items()}
        counted = [replace(one, message_bytes=sent) for one in counted]
        programs = [units.program(plan, one) for units, one in zip(ranks, counted, strict=True)]
        held = [
            program.step.footprint(
                states_per_param=self.num_states, num_micro_batches=plan.accumulate, activations=one.activations
            )
            for program, one in zip(programs, counted, strict=True)
        ]
        num_local = min(candidate.world_size, self.hardware.ranks_per_node)
        time = step_time(programs, self.hardware, mesh, num_micro_batches=plan.accumulate, num_states=self.num_states)
        return Evaluated(
            seconds=time.timeline.step_seconds,
            device_bytes=max(one.total for one in held),
            host_bytes=num_local * max(map(_on_host, held)),
            disk_bytes=num_local * max(map(_on_disk, held)),
            parts=time.breakdown,
            mfu=time.timeline.mfu,
            is_exact=is_exact,
        )

    @property
    def _rehearsed_rows(self) -> tuple[int, int]:
        return self.rows_of_batch, 2 * self.rows_of_batch

    def _derived(self, candidate: Candidate) -> list[Counted]:
        """Without a pipeline, for any size of a micro-batch."""
        sizes = tuple((axis, 1 if axis == "pp" else size) for axis, size in candidate.sizes)
        first, second = self._rehearsed_rows
        one = replace(candidate, sizes=sizes, accumulate=1, schedule="1f1b", chunks=1, rows=first)
        two = replace(one, rows=second)
        if candidate.rows == second:
            return self._count(two, two.plan(self.base))
        (few,) = self._count(one, one.plan(self.base))
        if candidate.rows == first:
            return [few]
        (more,) = self._count(two, two.plan(self.base))
        key = _key(one), candidate.rows
        if key not in self._between:
            self._between[key] = between(few, more, (candidate.rows - first) / (second - first))
        found = self._between[key]
        if found is not None:
            return [found]
        exact = replace(one, rows=candidate.rows)
        return self._count(exact, exact.plan(self.base))

    def _message_bytes(self, candidate: Candidate) -> int:
        """Of the activations of one micro-batch that a stage sends on."""
        sizes = tuple((axis, 2 if axis == "pp" else size) for axis, size in candidate.sizes)
        two = replace(
            candidate, sizes=sizes, schedule="1f1b", chunks=1, accumulate=2, rows=self.rows_of_batch, policy="keep"
        )
        found = self._count(two, two.plan(self.base))
        most = max((num_bytes for one in found for num_bytes in one.message_bytes.values()), default=0)
        return most * candidate.rows // self.rows_of_batch

    def _count(self, candidate: Candidate, plan: Plan) -> list[Counted]:
        """Of one micro-batch, on as few ranks as have the same parts."""
        key = _key(candidate)
        found = self._counted.get(key)
        if found is None:
            try:
                found = self._rehearsed(candidate, plan)
            except (ModelError, ConfigError) as error:
                found = error
            self._counted[key] = found
        if isinstance(found, ModelError | ConfigError):
            raise found
        return found

    def _rehearsed(self, candidate: Candidate, plan: Plan) -> list[Counted]:
        sizes = {axis: size if axis in SPLITTING else 1 for axis, size in candidate.sizes}
        mesh = Mesh(tuple(sizes), tuple(sizes.values()))
        small = plan.model_copy(update={"mesh": sizes})
        batch = with_rows(self.batch, candidate.rows, self.rows_of_batch, candidate.size("sp"))
        return count_step(without_values(self.model), batch, small, mesh, counts_work=True)


SPLITTING = ("tp", "pp", "sp", "ep")
"""Axes along which ranks compute different things."""


def _key(candidate: Candidate) -> object:
    """What a rehearsal depends on."""
    stages = candidate.size("pp")
    of_stages = (candidate.schedule, candidate.chunks, candidate.accumulate) if stages > 1 else ()
    split = tuple((axis, size) for axis, size in candidate.sizes if axis in SPLITTING and size > 1)
    return split, of_stages, candidate.rows, candidate.policy, candidate.precision


# [Note: derived counts] A rehearsal takes a second or more, and a search would need hundreds. But what a model computes
# and holds is affine in the samples of a micro-batch (what belongs to the batch, and what does not), so that two
# rehearsals tell of all sizes; where they have different operations they do not, and another one is made. And a stage
# of a pipeline does what the whole model does between the same moments: its marks lie above what stages before it hold.
# What a search proposes is rehearsed as it is before it is believed (`confirm`).


def between(few: Counted, more: Counted, share: float) -> Counted | None:
    """At `share` of the way from one count to another, or beyond; `None` if they are not alike."""
    marks, others = few.activations.marks, more.activations.marks
    if [mark.moment for mark in marks] != [mark.moment for mark in others]:
        return None
    worked = []
    known: dict[tuple[int, int], Operation] = {}
    for first, second in zip(few.worked, more.worked, strict=True):
        parts = []
        for some, same in (
            (first.operations, second.operations),
            (first.recomputed, second.recomputed),
            (first.weights, second.weights),
        ):
            if len(some) != len(same) or any(
                (a.kind, len(a.shape), len(a.allocated_bytes)) != (b.kind, len(b.shape), len(b.allocated_bytes))
                for a, b in zip(some, same, strict=True)
            ):
                return None
            parts.append(tuple(_operation(a, b, share, known) for a, b in zip(some, same, strict=True)))
        worked.append(Worked(first.moment, *parts))
    one, other = few.activations, more.activations
    held = replace(
        one,
        marks=tuple(
            Mark(
                a.moment,
                _at(a.peak_bytes, b.peak_bytes, share),
                _at(a.live_bytes, b.live_bytes, share),
                _at(a.heap_bytes, b.heap_bytes, share),
            )
            for a, b in zip(marks, others, strict=True)
        ),
        process_bytes=_at(one.process_bytes, other.process_bytes, share),
        host_bytes=_at(one.host_bytes, other.host_bytes, share),
        disk_bytes=_at(one.disk_bytes, other.disk_bytes, share),
        staging_bytes=_at(one.staging_bytes, other.staging_bytes, share),
        unit_bytes=_at(one.unit_bytes, other.unit_bytes, share),
        peak_heap_bytes=_at(one.peak_heap_bytes, other.peak_heap_bytes, share),
    )
    sent = {axis: _at(num, more.sent_bytes.get(axis, num), share) for axis, num in few.sent_bytes.items()}
    return Counted(held, sent, few.tied_bytes, tuple(worked))


def _at(few: float, more: float, share: float) -> int:
    return max(0, round(few + (more - few) * share))


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


MESSAGES_IN_FLIGHT = 4
"""Of each stage: the next ones from either side, and copies of those sent to both."""


def _of_stages(ranks: Sequence[RankUnits], whole: Counted, message_bytes: int) -> list[Counted]:
    """What each rank of a pipeline holds and computes, by the moments of the whole model."""
    found = []
    last = max(op.stage for rank in ranks for op in rank.row)
    for rank in ranks:
        stages = {}
        of_stage = {
            stage: {name for name, some in rank.stages_of_units.items() if stage in some}
            for stage in {op.stage for op in rank.row}
        }
        for stage, names in of_stage.items():
            marks = [mark for mark in whole.activations.marks if mark.moment.unit in names]
            forward = [mark for mark in marks if mark.moment.phase == "forward"]
            if not forward:
                raise ModelError(f"Stage {stage} of the pipeline has no unit whose activations are known.")
            below = forward[0].live_bytes
            own = tuple(
                replace(
                    mark,
                    peak_bytes=max(0, mark.peak_bytes - below),
                    live_bytes=max(0, mark.live_bytes - below),
                    heap_bytes=0,
                )
                for mark in marks
            )
            own = (*own, Mark(END_OF_BACKWARD, 0, 0))
            held = max(0, forward[-1].live_bytes - below) + message_bytes
            stages[stage] = StageBytes(replace(whole.activations, marks=own), held, held)
        names = set().union(*of_stage.values())
        in_transit = MESSAGES_IN_FLIGHT * message_bytes * len(of_stage)
        held_by_rank = over_schedule(rank.row, stages, names, in_transit)
        worked = tuple(one for one in whole.worked if one.moment.unit in names)
        sent = {stage: message_bytes for stage in of_stage if stage < last}
        found.append(Counted(held_by_rank, {}, 0, worked, sent))
    return found


def _plain(base: Plan) -> Plan:
    """Without what only some meshes can have."""
    return base.model_copy(update={"mesh": None})


def _is_block(name: str) -> bool:
    """Whether a unit is one of a list of blocks."""
    return any(word.isdigit() for word in name.split("."))


def _on_host(held: Footprint) -> int:
    return 0 if held.host is None else held.host.total


def _on_disk(held: Footprint) -> int:
    return 0 if held.disk is None else held.disk.total


def without_values(model: nn.Module) -> nn.Module:
    """A copy whose parameters and buffers are on the meta device and take no memory."""
    memo: dict[int, object] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        there = tensor.detach().to("meta")
        is_param = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(there, tensor.requires_grad) if is_param else there
    copied = copy.deepcopy(model, memo)
    rebind(copied, memo)
    return copied


def rows_of(batch: object) -> int:
    """The samples of a micro-batch: the first dim of its first tensor. Raises `ConfigError` without one."""
    for leaf in _leaves(batch):
        if leaf.dim():
            return leaf.shape[0]
    raise ConfigError("The batch has no tensor with a dim for samples, so its size is unknown. Give one.")


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
