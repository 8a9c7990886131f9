"""The training step of a decoder-only transformer, from its shapes: units, programs and schedules, as a clock takes
them. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from shardwise.errors import ConfigError
from shardwise.fit.clock import RankProgram, Timeline, time_ranks
from shardwise.fit.hardware import Hardware
from shardwise.fit.operations import UnitWork
from shardwise.fit.transformer import Execution, Layers, Transformer
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import PRESETS, Dtype, Place, Table, Wire
from shardwise.program import (
    FlatSpec,
    StepProgram,
    UnitSpec,
    plan_step,
    straight_trace,
)
from shardwise.program.schedule import schedule_for
from shardwise.program.whole_schedule import schedule_trace, straight_passes
from shardwise.system.even_parts import round_up

PRESET_OF_STAGE: Mapping[int, str] = {0: "ddp", 1: "zero1", 2: "zero2", 3: "zero3"}


@dataclass(frozen=True)
class Job:
    """A model, how a micro-batch of it is computed, and how ranks share it.

    `dp` counts the ranks that read different batches, those of `ep` among them. `zero` is the stage of ZeRO; at stage
    0 to 1 gradients are summed once for all micro-batches, in the step, unless `overlaps`. `num_chunks`: stages on each
    rank of a pipeline. `offloads`: optimizer states and gradients are on the host, which updates.
    """

    model: Transformer
    how: Execution
    dp: int = 1
    pp: int = 1
    num_chunks: int = 1
    num_micro_batches: int = 1
    zero: int = 0
    overlaps: bool = False
    offloads: bool = False
    wide_grads: bool = False
    """Whether gradients are sent in fp32; `narrow_grads`: whether they wait for the step in the compute dtype."""
    narrow_grads: bool = False
    rests_wide: bool = False
    """Whether parameters rest in fp32 alone, and are converted where they are gathered, so that there is no other
    master weight: PyTorch's FSDP (`MixedPrecision` in torch.distributed.fsdp)."""

    @property
    def world_size(self) -> int:
        return self.dp * self.pp * self.how.tp * self.how.cp

    @property
    def num_sequences(self) -> int:
        """Of a step, on all ranks."""
        return self.dp * self.num_micro_batches * self.how.micro_batch

    @property
    def ep(self) -> int:
        """The data-parallel part of `how.ep`: experts may be spread over the ranks of tp and sp too (Megatron)."""
        within = {"tp": self.how.tp, "sp": self.how.cp}
        others = math.prod(within.get(axis, 1) for axis in self.how.expert_axis.split("+"))
        return max(1, self.how.ep // others)

    @cached_property
    def mesh(self) -> Mesh:
        """Ranks in the order of Megatron: tp varies fastest, then sp, ep, dp, and pp slowest."""
        sizes = {"pp": self.pp, "dp": self.dp // self.ep, "ep": self.ep, "sp": self.how.cp, "tp": self.how.tp}
        return Mesh(tuple(sizes), tuple(sizes.values()))

    @cached_property
    def layers(self) -> Layers:
        return Layers(self.model, self.how)

    @cached_property
    def table(self) -> Table:
        """That of parameters which all replicas share."""
        mesh, dtype = self.mesh, self.how.dtype
        name = PRESET_OF_STAGE[self.zero]
        if self.offloads:
            name = "zero3-offload" if self.zero == 3 else "offload"
        preset = PRESETS[name].over(mesh)
        resting: Dtype = dtype if self.narrow_grads else "fp32"
        grad = replace(preset.grad, dtype=resting)
        if self.zero == 0 and not self.overlaps:
            grad = Place(partial=mesh.replica_axes, dtype=resting)
        if self.zero == 1 and self.overlaps:
            grad = Place(dtype=resting) if self.pp > 1 else grad
            if self.num_micro_batches == 1:
                grad = Place(shard=mesh.replica_axes, dtype=resting)
        return Table(
            axes=mesh.replica_axes,
            param=replace(preset.param, dtype=dtype),
            held=replace(preset.held, dtype=dtype),
            grad=grad,
            optim=replace(preset.optim, dtype="fp32"),
            compute=dtype,
            grad_wire=Wire("fp32" if self.wide_grads else dtype),
            step=preset.optim.tier if preset.optim.tier == "host" else "device",
        ).on(mesh)


@dataclass(frozen=True)
class Stage:
    """A part of the model that is computed in one go: `num_layers` layers, of which `num_expert_layers` have experts,
    perhaps with the embedding before and the head behind them."""

    num_layers: int
    num_expert_layers: int
    has_embedding: bool
    has_head: bool


def stages_of(job: Job) -> list[Stage]:
    """Layers over the stages of a pipeline, as evenly as possible.

    Where layers do not divide but would with the embedding and the head as two more, these count as layers (Megatron's
    account_for_embedding_in_pipeline_split and its counterpart for the loss; Llama 3, arXiv:2407.21783, section 3.3.2).
    Where they do not either, the head counts as so many layers as compute as much: 61 layers of DeepSeek-V3 lie on 16
    stages as 15 times 4 and 1 (`Et*4|(t*4|)*14tmL` in Megatron-Bridge's recipes).
    """
    model, count = job.model, job.pp * job.num_chunks
    before = behind = 0
    if model.num_layers % count:
        before = int((model.num_layers + 2) % count == 0)
        behind = before or _layers_of_head(job)
    places = before + model.num_layers + behind
    if count > places:
        raise ConfigError(f"{count} stages need as many layers, but the model has {model.num_layers}.")
    dense = model.num_layers - model.num_expert_layers
    stages, first = [], 0
    for number in range(count):
        last = first + places // count + (number < places % count)
        begin, end = min(model.num_layers, max(0, first - before)), min(model.num_layers, last - before)
        with_experts = max(0, end - max(begin, dense)) if model.experts is not None else 0
        stages.append(Stage(end - begin, with_experts, number == 0, number == count - 1))
        first = last
    return stages


def _layers_of_head(job: Job) -> int:
    layer = job.layers.layer(with_experts=job.model.experts is not None)
    return math.ceil(job.layers.head().flops / layer.flops)


class Parts:
    """Units of one rank, and their work by name."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.units: list[UnitSpec] = []
        self.work: dict[str, UnitWork] = {}
        self.of_stage: dict[int, list[UnitSpec]] = {}

    def add(self, stage: int, name: str, shared: int, expert: int, work: UnitWork) -> None:
        flats = [self._flat(name, shared, self.job.table)] if shared else []
        if expert:
            table = self.job.table
            for axis in self.job.how.expert_axis.split("+"):
                table = table.without(axis)
            flats.append(self._flat(f"{name}:experts", expert, table))
        unit = UnitSpec(name, tuple(flats))
        self.units.append(unit)
        self.of_stage.setdefault(stage, []).append(unit)
        self.work[name] = work

    def _flat(self, name: str, numel: int, table: Table) -> FlatSpec:
        parts = math.prod(self.job.mesh.size(axis) for axis in table.order)
        padded = round_up(numel, parts * 8)
        return FlatSpec(name, padded, 1, table, self.job.mesh, overlaps_compute=self.job.overlaps)


def _add_stage(parts: Parts, number: int, stage: Stage) -> None:
    """The units of one stage: layers one by one where each is gathered or reduced on its own, else as one."""
    job, layers = parts.job, parts.job.layers
    if stage.has_embedding:
        parts.add(number, "embedding", layers.vocab_params(), 0, layers.embedding())
    apart = job.zero == 3 or (job.overlaps and job.dp > 1 and job.pp == 1)
    kinds = [(False, stage.num_layers - stage.num_expert_layers), (True, stage.num_expert_layers)]
    for with_experts, count in kinds:
        if not count:
            continue
        work, params = layers.layer(with_experts=with_experts), layers.dense_params(with_experts=with_experts)
        expert = layers.expert_params() if with_experts else 0
        each = 1 if apart else count
        for place in range(0, count, each):
            name = f"{'experts' if with_experts else 'layers'}{number}.{place}"
            parts.add(number, name, params * each, expert * each, work if each == 1 else work.times(each))
    if stage.has_head:
        model = job.model
        for place in range(model.predicts_more):  # with the head and the embedding that there are
            params = layers.dense_params(with_experts=model.experts is not None) + 2 * model.hidden**2
            parts.add(number, f"further{place}", params, layers.expert_params(), layers.predicting_more())
        is_shared = job.model.tied and stage.has_embedding
        numel = job.model.hidden if is_shared else layers.vocab_params()
        parts.add(number, "head", numel, 0, layers.head())


def rank_programs(job: Job) -> list[RankProgram]:
    """The program of one rank of each stage of the pipeline, in order; a single one without a pipeline."""
    stages, ranks = stages_of(job), parts_of_ranks(job)
    if job.pp == 1:
        units = tuple(ranks[0].units)
        return [RankProgram(_planned(units, straight_trace(units)), ranks[0].work)]
    name = "interleaved" if job.num_chunks > 1 else "1f1b"
    schedule = schedule_for(name, job.pp, job.num_micro_batches, job.num_chunks)
    sent = dict.fromkeys(range(len(stages)), job.layers.row_bytes)
    programs = []
    for place, (row, parts) in enumerate(zip(schedule.rows, ranks, strict=True)):
        step = _planned(tuple(parts.units), schedule_trace(row, straight_passes(row, parts.of_stage)))
        rank = job.mesh.rank({"pp": place, "dp": 0, "ep": 0, "sp": 0, "tp": 0})
        of_units = {unit.name: (number,) for number, units in parts.of_stage.items() for unit in units}
        programs.append(RankProgram(step, parts.work, rank, row, sent, of_units))
    return programs


def parts_of_ranks(job: Job) -> list[Parts]:
    """Units and work of one rank of each stage of the pipeline."""
    stages, ranks = stages_of(job), [Parts(job) for _ in range(job.pp)]
    for number, stage in enumerate(stages):
        _add_stage(ranks[number % job.pp], number, stage)
    return ranks


def _planned(units: tuple[UnitSpec, ...], trace: Sequence[object]) -> StepProgram:
    return plan_step(units, tuple(trace))  # type: ignore[arg-type]


def time_job(job: Job, hardware: Hardware) -> Timeline:
    """A step of `job` on `hardware`, which is given with the ranks of a node."""
    return timed(rank_programs(job), job, hardware)


def timed(programs: Sequence[RankProgram], job: Job, hardware: Hardware) -> Timeline:
    return time_ranks(programs, hardware, job.mesh, num_micro_batches=job.num_micro_batches, keeps_events=False)


def step_seconds(job: Job, hardware: Hardware) -> float:
    """Seconds of a step of `job`, as `time_job` finds them, in less time for long schedules."""
    return step_seconds_of(job, lambda one: time_job(one, hardware).step_seconds)


def step_seconds_of(job: Job, seconds: Callable[[Job], float]) -> float:
    """Seconds of a step, where `seconds` are those of a job of fewer micro-batches, or of `job` itself.

    [Note: long schedules] Once the pipeline is full, each further round of micro-batches takes as long as the one
    before. So schedules of many rounds are timed at one and at two rounds, and what the second adds counts for all
    others.
    """
    few, more = (replace(job, num_micro_batches=count * job.pp) for count in (1, 2))
    if job.pp == 1 or job.num_micro_batches <= more.num_micro_batches:
        return seconds(job)
    one, two = seconds(few), seconds(more)
    return two + (two - one) * (job.num_micro_batches - more.num_micro_batches) / job.pp


__all__ = ["Job", "Stage", "rank_programs", "stages_of", "step_seconds", "step_seconds_of", "time_job"]
