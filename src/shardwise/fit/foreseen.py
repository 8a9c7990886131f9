"""One step of a model under a plan, foreseen on one process: the programs of its ranks, what they hold, send, compute.

The model is only rehearsed on fake tensors; its parameters may be on the meta device.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from shardwise.comm import Group, Line
from shardwise.errors import ModelError
from shardwise.fit.alike_stages import FewStages, StageKinds
from shardwise.fit.budget import choices_by_pp_rank, of_params
from shardwise.fit.clock import RankProgram
from shardwise.fit.counted_work import CountedWork
from shardwise.fit.operations import Worked
from shardwise.fit.short_pipeline import ShortPipeline
from shardwise.fit.stage_rehearsal import RankRecord, StageRehearsal, rehearse_stages
from shardwise.memory import LabelledTable, Unit, UnitChoice, choose_units, make_units, unit_specs
from shardwise.optim import hidden_matrices
from shardwise.parallel.conversions import Converted, check_plan, conversions_of, convert
from shardwise.parallel.experts import AXIS as EXPERTS
from shardwise.parallel.experts import EXPERT_LOAD, expert_split, loaded
from shardwise.parallel.model_axes import boxes_for, rows_for, sequence_parts, split_of
from shardwise.parallel.outline import Outline, outline
from shardwise.parallel.pipeline import AXIS as PIPELINE
from shardwise.parallel.pipeline import StagedModel, StageLayout, stage_layout
from shardwise.parallel.sequence import rehearsed_by
from shardwise.parallel.tensor import AXIS, Regions
from shardwise.plan import Plan
from shardwise.plan.mesh import SEQUENCE_AXIS, Mesh
from shardwise.plan.placement import WIDTH, Table, table_for
from shardwise.program import Activations, StepProgram, Trace, UnitSpec, Update, plan_step, update_by
from shardwise.program.schedule import Op
from shardwise.program.step_program import PrefetchBytes
from shardwise.runtime.activations import treatments_for
from shardwise.runtime.rehearsal import Around, Watch, note_empty, nothing_around, rehearse
from shardwise.system.devices import TorchAccelerator
from shardwise.system.telemetry import Ledger

WithBlocks = Callable[[int], nn.Module]
"""Makes a copy of a model, without values, that has as many of its equal blocks."""


@dataclass(frozen=True)
class Counted:
    """What one rank holds and sends in the forward and backward of one micro-batch, or in a pipeline's schedule.

    `sent_bytes` are those of activations, by mesh axis, of one micro-batch; `tied_bytes` are sent once per step, for
    parameters that other stages have too. `worked` is what is computed, if that was counted; `message_bytes` are those
    of the activations that each stage sends on.
    """

    activations: Activations
    sent_bytes: Mapping[str, int]
    tied_bytes: int = 0
    worked: tuple[Worked, ...] = ()
    message_bytes: Mapping[int, int] = field(default_factory=dict)


def count_step(
    model: nn.Module,
    batch: object,
    plan: Plan,
    mesh: Mesh,
    *,
    expert_load: float = EXPERT_LOAD,
    converted: Converted | None = None,
    counts_work: bool = False,
    on_cpu: bool | None = None,
) -> list[Counted]:
    """For the first rank, or the first of each stage of a pipeline in their order, rehearse `model` on one rank's
    micro-batch. `model` is split in place as the plan says, and of no use afterwards.

    With sequence parallelism the batch is a rank's part. Experts get `expert_load` times an even share of the tokens,
    or the most that their capacity lets all ranks send. Without `converted`, the model's modules are converted first.
    `on_cpu`: whether ranks compute on a CPU; by default, as jobs on this machine do.
    Raises `ModelError` for a model that cannot be rehearsed.
    """
    parts = parts_of(model, plan, mesh, expert_load=expert_load, converted=converted, on_cpu=on_cpu)
    if mesh.has_stages:
        return parts.of_stages(model, batch, counts_work=counts_work)
    return [parts.of_model(model, batch, parts.watching() if counts_work else None)]


def parts_of(
    model: nn.Module,
    plan: Plan,
    mesh: Mesh,
    *,
    expert_load: float = EXPERT_LOAD,
    converted: Converted | None = None,
    on_cpu: bool | None = None,
) -> Parts:
    """What `count_step` rehearses."""
    if converted is None:
        converted = convert(model, conversions_of(plan, model))
        check_plan(converted, plan)
    device = torch.device("cpu") if on_cpu else device_here()
    on_cpu = device.type == "cpu" if on_cpu is None else on_cpu
    return Parts(plan, table_for(plan, mesh), mesh, device, expert_load, converted, on_cpu)


@dataclass(frozen=True)
class RankUnits:
    """The units of one kind of rank. In a pipeline, `row` are its ops, `stages_of_units` says which of its stages use
    which unit, and `holders` which pipeline ranks train a unit that several have."""

    rank: int
    units: tuple[UnitSpec, ...]
    row: tuple[Op, ...] = ()
    stages_of_units: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    holders: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    _steps: dict[tuple[Trace, PrefetchBytes, bool], StepProgram] = field(
        default_factory=dict, compare=False, repr=False
    )

    def with_programs_of(self, other: RankUnits) -> RankUnits:
        """The same; if `other` has the same units, with the programs that are known of it, and will be."""
        return replace(self, _steps=other._steps) if self.units == other.units else self

    def program(self, plan: Plan, counted: Counted, *, checks: bool = True) -> RankProgram:
        """What a clock needs of such a rank, with its work as `count_step` has counted it. `checks` is that of
        `plan_step`."""
        trace, prefetch_bytes = counted.activations.trace, plan.prefetch_bytes
        key = trace, prefetch_bytes, checks
        step = self._steps.get(key)
        if step is None:
            step = self._steps[key] = plan_step(self.units, trace, prefetch_bytes=prefetch_bytes, checks=checks)
        sent, stages = counted.message_bytes, self.stages_of_units
        has_budget = plan.budget.device is not None
        return RankProgram(step, counted.worked, self.rank, self.row, sent, stages, self.holders, has_budget)


def rank_units(
    model: nn.Module,
    plan: Plan,
    mesh: Mesh,
    found: Outline | None = None,
    updates: Mapping[nn.Parameter, Update] | None = None,
    *,
    optimizer: str | None = None,
    on_cpu: bool = True,
) -> list[RankUnits]:
    """Those of the first rank, or of the first of each stage in their order; before `count_step` splits the model.

    `optimizer` is a key of `OPTIMIZERS`; instead, `updates` say how each parameter is updated. `on_cpu`: the ranks will
    run on processors. `found` is the plan's outline, if it is known. Raises `ConfigError` or `ModelError` where
    sharding would refuse the plan.
    """
    updates = updates_of(model, optimizer) if optimizer else updates
    found = found or outline(model, plan, mesh, 0)
    every = [replace(choice, boxes=found.boxes) for choice in found.choices]

    def units(choices: Sequence[UnitChoice]) -> tuple[UnitSpec, ...]:
        return tuple(spec for spec in unit_specs(choices, found.rows, mesh, updates, on_cpu=on_cpu) if spec.flats)

    layout = found.stages
    if layout is None:
        return [RankUnits(0, units(every))]
    ranks, by_stage = [], layout.params_by_stage(model)
    present = layout.params_by_rank(model, by_stage)
    for pp_rank in range(layout.num_ranks):
        own = {stage: by_stage[stage] for stage in layout.at(pp_rank)}
        choices = of_params(every, present[pp_rank])
        stages_of = {
            choice.name: tuple(stage for stage, some in own.items() if not some.isdisjoint(choice.params.values()))
            for choice in choices
        }
        rank, specs = mesh.rank({**dict.fromkeys(mesh.axes, 0), PIPELINE: pp_rank}), units(choices)
        ranks.append(RankUnits(rank, specs, layout.schedule.rows[pp_rank], stages_of, _shared(choices, specs, present)))
    return ranks


def _shared(
    choices: Sequence[UnitChoice], specs: Sequence[UnitSpec], present: Sequence[set[torch.Tensor]]
) -> dict[str, tuple[int, ...]]:
    """The pipeline ranks that train each unit that several have, by what is `present` on each; what they share lies in
    units of its own."""
    trained = {unit.name for unit in specs if any(flat.trainable for flat in unit.flats)}
    holders = {
        one.name: tuple(place for place, params in enumerate(present) if next(iter(one.params.values())) in params)
        for one in choices
        if one.name in trained
    }
    return {name: places for name, places in holders.items() if len(places) > 1}


@dataclass(frozen=True)
class Parts:
    """The first rank's part of a model under a plan, to be rehearsed."""

    plan: Plan
    table: Table
    mesh: Mesh
    device: torch.device
    expert_load: float
    converted: Converted
    on_cpu: bool
    """Whether the ranks compute on a CPU: see [Note: other devices] in `runtime/rehearsal/kernel_memory.py`."""

    def of_model(self, model: nn.Module, batch: object, watch: Watch | None) -> Counted:
        """Without a pipeline. `watch` follows the rehearsal."""
        ledger = Ledger() if watch is None else watch.ledger
        around = self.around(model, ledger)
        units = self.split(model, ledger)
        activations = rehearse(
            model,
            units,
            batch,
            device=self.device,
            compute=self.table.compute,
            around=around,
            treatments=treatments_for(model, choose_units(model, self.plan), self.plan),
            watch=watch,
            on_cpu=self.on_cpu,
        )
        worked = tuple(watch.worked) if isinstance(watch, CountedWork) else ()
        return Counted(activations, _by_axis(ledger), worked=worked)

    def of_stages(
        self,
        model: nn.Module,
        batch: object,
        *,
        counts_work: bool = False,
        as_call: bool = False,
        with_blocks: WithBlocks | None = None,
    ) -> list[Counted]:
        """By pipeline rank: what a schedule holds with one micro-batch, or a loop that calls the model with it.
        `with_blocks`, for a model that does the same outside of its blocks however many there are: see [Note: short
        pipelines]."""
        layout = stage_layout(model, self.plan, self.mesh)
        kinds = StageKinds.of(model, self.plan, layout)
        short = None
        if with_blocks is not None and not (as_call or self.converted.modules):
            short = ShortPipeline.of(model, with_blocks, kinds, layout)
        if short is not None:
            with suppress(ModelError):  # such as of a model that takes its number of blocks from its config
                stages = self._rehearsed(short.model, short.layout, short.kinds, batch, counts_work=counts_work)
                if short.is_told_by(stages):
                    return [_of_rank(*short.rank(stages, pp_rank)) for pp_rank in range(layout.num_ranks)]
        stages = self._rehearsed(model, layout, kinds, batch, counts_work=counts_work, as_call=as_call)
        return [_of_rank(*stages.rank(pp_rank)) for pp_rank in range(layout.num_ranks)]

    def _rehearsed(
        self,
        model: nn.Module,
        layout: StageLayout,
        kinds: StageKinds,
        batch: object,
        *,
        counts_work: bool,
        as_call: bool = False,
    ) -> FewStages:
        ledgers: dict[int, Ledger] = {}

        def made(pp_rank: int) -> StageRehearsal:
            watch = self.watching() if counts_work else None
            ledger = ledgers[pp_rank] = Ledger() if watch is None else watch.ledger
            memo: dict[int, object] = {}
            note_empty(model, memo)
            own = copy.deepcopy(model, memo)
            treatments = treatments_for(own, choose_units(own, self.plan), self.plan)
            treatments.check_stages(own, layout.pieces)
            around, params = self.around(own, ledger), layout.params_at(own, pp_rank)
            split = split_of(own, self.plan, self.mesh, 0, expert_split(own, self.plan, self.mesh, 0))
            parts = sequence_parts(split, self.mesh, layout)
            units = self.split(own, ledger, params)
            staged = StagedModel(own, layout, pp_rank, parts)
            staged.take_from(())  # there is no optimizer; it forgets other stages' parameters, which would be copied
            present = set(own.modules())
            for unit in units:
                unit.sites = [site for site in unit.sites if site in present]
            return StageRehearsal(
                staged,
                units,
                batch,
                self.device,
                self.table.compute,
                treatments=treatments.within(own),
                around=around,
                watch=watch,
                on_cpu=self.on_cpu,
                as_call=as_call,
            )

        stages = FewStages(layout, kinds, made, lambda rank: _by_axis(ledgers[rank]))
        rehearse_stages(layout, stages.rehearse)
        return stages

    def watching(self) -> CountedWork:
        """What counts the work of a rehearsal."""
        return CountedWork(self.mesh.named_sizes)

    def split(self, model: nn.Module, ledger: Ledger, params: set[torch.Tensor] | None = None) -> list[Unit]:
        """The units of `model`, or of some `params` of it. Changes the model in place so that `ledger` counts what it
        sends."""
        plan, mesh = self.plan, self.mesh
        experts = expert_split(model, plan, mesh, 0)
        split = split_of(model, plan, mesh, 0, experts)
        boxes = boxes_for(model, mesh, 0, split, experts)
        rows = rows_for(model, plan, mesh, experts)
        choices = [replace(choice, boxes=boxes) for choice in choose_units(model, plan)]
        choices = choices if params is None else of_params(choices, params)
        specs = unit_specs(choices, rows, mesh, on_cpu=self.on_cpu)
        units = make_units(choices, specs, rows, mesh.coordinate(0), self.device)
        if experts is not None:
            experts.carry_out(self._line(EXPERTS, ledger))
        if split is not None:
            line = self._line(AXIS, ledger)
            split.carry_out(line, Regions(line))
        self.converted.of_copy(model).connect(mesh, lambda axis: self._line(axis, ledger))
        return units

    def around(self, model: nn.Module, ledger: Ledger) -> Around:
        """The context of a twin of `model` while it computes; `model` itself is still whole."""
        has_sequences = SEQUENCE_AXIS in self.mesh.axes and self.mesh.size(SEQUENCE_AXIS) > 1
        over_sequences = rehearsed_by(model, self.plan, self.mesh, ledger) if has_sequences else nothing_around

        @contextmanager
        def around(twin: nn.Module) -> Iterator[None]:
            ledger.clear()  # a repeated rehearsal counts once
            if AXIS in self.mesh.axes and self.on_cpu:
                self._line(AXIS, ledger).all_same(b"")  # each forward in training compares its batch
            with loaded(twin, self.expert_load), over_sequences(twin):
                yield

        return around

    def _line(self, axis: str, ledger: Ledger) -> Line:
        return Line(None, Group(axis, self.mesh.group(0, axis), 0), ledger)


def _of_rank(record: RankRecord, alike: StageRehearsal, sent_by: Mapping[int, Mapping[str, int]]) -> Counted:
    """Of one rank of a pipeline: see `FewStages.rank`."""
    sent = Counter({PIPELINE: record.sent_bytes})
    for of_stage in sent_by.values():
        sent.update(of_stage)
    return Counted(record.activations, dict(sent), _tied_bytes(alike), record.worked, record.message_bytes)


def _tied_bytes(rehearsal: StageRehearsal) -> int:
    """Bytes that a rank sends in one step to add up gradients of parameters that other stages have too."""
    holders, total = rehearsal.staged.holders, 0
    for flat in (flat for unit in rehearsal.units for flat in unit.flats if flat.spec.trainable):
        others = len(holders[flat.slots[0].name]) - 1
        table = flat.spec.table
        first = dict.fromkeys(table.axes, 0)
        total += others * flat.spec.layout.span(table.optim.shard, first).numel * WIDTH[table.due.dtype]
    return total


def _by_axis(ledger: Ledger) -> dict[str, int]:
    """Bytes sent, by mesh axis."""
    found: Counter[str] = Counter()
    for (_, axis), num_bytes in ledger.sent_bytes.items():
        found[axis] += num_bytes
    return dict(found)


def device_here() -> torch.device:
    """The device on which a job on this machine would compute."""
    found = TorchAccelerator.found()
    return torch.device(found.kind if found is not None else "cpu")


def updates_of(model: nn.Module, optimizer: str) -> dict[nn.Parameter, Update]:
    """How the optimizer with that name updates each parameter."""
    hidden = set(hidden_matrices(model))
    trained = [param for param in model.parameters() if param.requires_grad]
    return {param: update_by(optimizer, tuple(param.shape), is_hidden=param in hidden) for param in trained}


def choices_of(model: nn.Module, plan: Plan, mesh: Mesh) -> list[UnitChoice]:
    """The units of rank 0, which has the most; with a pipeline, of the pipeline rank with the most parameters."""
    by_rank, _ = choices_by_pp_rank(model, plan, mesh)
    return by_rank[largest_pp_rank(model, stage_layout(model, plan, mesh))] if mesh.has_stages else by_rank[0]


def rows_of(model: nn.Module, plan: Plan, mesh: Mesh) -> dict[nn.Parameter, LabelledTable]:
    return rows_for(model, plan, mesh, expert_split(model, plan, mesh, 0))


def largest_pp_rank(model: nn.Module, layout: StageLayout) -> int:
    """The pipeline rank with the most parameters."""
    sizes = [sum(param.numel() for param in params) for params in layout.params_by_rank(model)]
    return sizes.index(max(sizes))
