"""What the stages of a pipeline hold on one rank: each stage is rehearsed separately, and micro-batches in flight are
added up.

The input of a stage is the output of the stage before it, of which only shape and dtype matter; these are found by one
forward of each stage in turn. This is also a survey of what stages read of earlier ones (see [Note: a survey] in
`parallel/pipeline/survey.py`): if that is more than the arguments of their first modules, all are rehearsed again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from shardwise.comm import Exchange
from shardwise.errors import ModelError
from shardwise.fit.counted_work import CountedWork
from shardwise.fit.operations import Worked
from shardwise.memory import Unit
from shardwise.parallel.pipeline import StagedModel, StageLayout, StageMessageLayout, WeightGrads, most_under_way
from shardwise.parallel.pipeline.staged_model import NOTHING, Carried, Passing
from shardwise.parallel.pipeline.survey import Found, carried, empty
from shardwise.plan.placement import Dtype
from shardwise.program import Activations
from shardwise.program.in_flight import StageBytes, held_beside, over_schedule
from shardwise.program.schedule import Schedule, schedule_of_calls
from shardwise.runtime import in_backward
from shardwise.runtime.activations import BEHIND_BYTES, Treatments
from shardwise.runtime.rehearsal.live_bytes import LivingBytes
from shardwise.runtime.rehearsal.rehearse import (
    Around,
    Loss,
    Take,
    Work,
    loss_in,
    nothing_around,
    rehearse_work,
)
from shardwise.runtime.rehearsal.twin import Twin
from shardwise.system.own_hooks import hook
from shardwise.system.torch_private import storage_id

Tensor = torch.Tensor


RehearseStage = Callable[[int, StageMessageLayout | None, Carried | None], Found]
"""Rehearses one stage, given the layout of its input and what is carried: `None` to find that out."""


def rehearse_stages(layout: StageLayout, rehearse: RehearseStage) -> None:
    """Rehearse all stages in turn. Raises `ModelError` if one of them cannot be."""
    wanted: set[str] = set()

    def find(stage: int, _: object, arrived: StageMessageLayout | None) -> Found:
        try:
            found = rehearse(stage, arrived, None)
        except ModelError as error:
            return Found(None, frozenset(), why_unknown=str(error))
        wanted.update(found.wanted)
        return found

    known = carried(layout, layout.shares(layout.span), find)
    if wanted or known.why_unknown:
        arrived: StageMessageLayout | None = None
        for stage in range(layout.num_stages):
            arrived = rehearse(stage, arrived, known).handed_over


@dataclass(frozen=True)
class StageRecord:
    """What a rehearsal has found of one micro-batch in one stage; bytes, but for the first two."""

    activations: Activations
    worked: tuple[Worked, ...]
    """What it computes, if that was counted."""
    after_forward: int
    """Held until the backward."""
    aside: int
    """Kept by the first half of a backward for the second. `activations` are those of a first half then, until the end
    of which it is there."""
    halved: frozenset[str]
    """The units some of whose gradients come in the second half."""
    messages: int
    """In flight meanwhile."""
    handed_over: int
    """Sent to the next stage, and `sent_back` to the one before."""
    sent_back: int

    def renamed(self, rename: Callable[[str], str]) -> StageRecord:
        """The same with other names of units and flat buffers."""
        marks = tuple(mark.renamed(rename) for mark in self.activations.marks)
        worked = tuple(replace(one, moment=one.moment._replace(unit=rename(one.moment.unit))) for one in self.worked)
        halved = frozenset(map(rename, self.halved))
        return replace(self, activations=replace(self.activations, marks=marks), worked=worked, halved=halved)


@dataclass(frozen=True)
class RankRecord:
    """What rehearsals have found of all stages of one rank, which follows its row of the `schedule`."""

    schedule: Schedule
    pp_rank: int
    stages: Mapping[int, StageRecord]

    @property
    def activations(self) -> Activations:
        """The activations of all micro-batches of a step, in the order of this rank's schedule."""
        stages = {
            stage: StageBytes(one.activations, one.after_forward, one.aside) for stage, one in self.stages.items()
        }
        halved = frozenset().union(*(one.halved for one in self.stages.values()))
        sent = sum(one.messages for one in self.stages.values())
        found = over_schedule(self.schedule.rows[self.pp_rank], stages, halved, sent)
        of_units = self._beside(lambda one: one.unit_bytes)
        return replace(
            found,
            host_bytes=self._beside(lambda one: one.host_bytes),
            host_heap_bytes=self._beside(lambda one: one.host_heap_bytes),
            disk_bytes=self._beside(lambda one: one.disk_bytes),
            staging_bytes=min(self._beside(lambda one: one.staging_bytes), self._most_behind() + of_units),
            unit_bytes=max((one.activations.unit_bytes for one in self.stages.values()), default=0),
        )

    @property
    def sent_bytes(self) -> int:
        """Bytes of one micro-batch's activations and gradients that this rank sends to neighbouring stages."""
        return sum(one.handed_over + one.sent_back for one in self.stages.values())

    @property
    def message_bytes(self) -> dict[int, int]:
        """By stage, bytes of the activations that it hands over: those that this rank's stages send, and the gradients
        that they send back to the stages before them."""
        last, found = self.schedule.num_stages - 1, dict[int, int]()
        for stage, one in self.stages.items():
            if stage < last:
                found[stage] = one.handed_over
            if one.sent_back:
                found[stage - 1] = one.sent_back
        return found

    @property
    def worked(self) -> tuple[Worked, ...]:
        """What one micro-batch computes in all stages of this rank: forwards in order, then backwards in the opposite
        order."""
        stages = sorted(self.stages.items())
        forwards = [one for _, record in stages for one in record.worked if _is_forward(one)]
        backwards = [one for _, record in reversed(stages) for one in record.worked if not _is_forward(one)]
        return (*forwards, *backwards)

    def _beside(self, there: Callable[[Activations], int]) -> int:
        """The most bytes that forwards of all stages keep on a lower tier at once."""
        held = {stage: there(one.activations) for stage, one in self.stages.items()}
        beside = held_beside(self.schedule, self.pp_rank, held, held)
        return max((held[stage] + others for (_, stage), others in beside.items()), default=0)

    def _most_behind(self) -> int:
        """The most bytes that may wait to be written to a disk, which micro-batches in flight share. Of each of them
        one unit may be read ahead meanwhile: where one ends, that of another comes next."""
        return max(BEHIND_BYTES, *(one.activations.unit_bytes for one in self.stages.values()))


@dataclass
class StageRehearsal:
    """Rehearses the stages of one rank with one micro-batch, or with what a loop calls the model with."""

    staged: StagedModel
    units: Sequence[Unit]
    batch: object
    device: torch.device
    compute: Dtype
    loss: Loss | None = None
    treatments: Treatments | None = None
    around: Around = nothing_around
    """Entered with the copy of a stage while that computes."""
    watch: CountedWork | None = None
    """Counts what each stage computes."""
    on_cpu: bool | None = None
    """As in `rehearse`."""
    as_call: bool = False
    """Whether `batch` is that of a call in a loop of one's own. Its parts leave together what one forward with all of
    them would leave, which is what is rehearsed: what a block needs only while it computes is counted for the whole."""
    _worked: dict[int, tuple[Worked, ...]] = field(default_factory=dict)
    _counted: dict[int, Activations] = field(default_factory=dict)
    _found: dict[int, _Held] = field(default_factory=dict)

    def activations(self, exchange: Exchange) -> Activations:
        """What this rank holds in a step, after rehearsing all its stages.

        All ranks of the pipeline must call; if one cannot rehearse a stage, all raise `ModelError`.
        """

        def rehearse(stage: int, arrived: StageMessageLayout | None, known: Carried | None) -> Found:
            if stage not in self.staged.stages:
                found = Found.of_encoded(exchange(b"{}")[self.staged.layout.pp_rank_of(stage)])
                if found.why_unknown:
                    raise ModelError(f"Stage {stage} of the pipeline cannot be rehearsed: {found.why_unknown}")
                return found
            try:
                found = self.rehearse(stage, arrived, known)
            except ModelError as error:
                exchange(Found(None, frozenset(), why_unknown=str(error)).encoded())
                raise
            exchange(found.encoded())
            return found

        rehearse_stages(self.staged.layout, rehearse)
        return self.rank.activations

    def rehearse(self, stage: int, arrived: StageMessageLayout | None, known: Carried | None) -> Found:
        """Rehearse one stage: what it hands over and reads. `arrived` is the layout of its input; without `known`, what
        is carried is found out."""
        held = self._found[stage] = _Held(carried=known)
        self._counted[stage] = self._rehearsed(stage, arrived, held)
        if self.watch is not None:
            self._worked[stage] = tuple(self.watch.worked)
        return Found(held.handed_over, frozenset(held.wanted))

    def _rehearsed(self, stage: int, arrived: StageMessageLayout | None, held: _Held) -> Activations:
        def prepare(twin: Twin) -> Work:
            staged: StagedModel = twin.copied(self.staged)
            staged.attach()
            if self._has_halves:
                held.watch(WeightGrads(staged.modules_of(stage)).layers)

            def work(take: Take, living: LivingBytes) -> None:
                with self.around(staged.model):
                    self._forward_and_backward(staged, stage, arrived, held, take, living)

            return work

        return rehearse_work(
            prepare,
            self.staged.model,
            self.units,
            self.batch,
            device=self.device,
            compute=self.compute,
            treatments=self.treatments,
            watch=self.watch,
            on_cpu=self.on_cpu,
        )

    def _forward_and_backward(
        self,
        staged: StagedModel,
        stage: int,
        arrived: StageMessageLayout | None,
        held: _Held,
        take: Take,
        living: LivingBytes,
    ) -> None:
        """Of a copied stage, as a pipeline runs them."""
        held.begin(living)
        args, kwargs = take()
        before = living.live_bytes
        given = None if arrived is None else empty(arrived, self.device)
        is_last = stage + 1 == len(staged.layout.stages)
        passing = Passing(carried=held.carried or NOTHING, wanted=held.wanted if held.carried is None else None)
        remaking = nullcontext if self.watch is None else self.watch.paused  # only the first forward is watched
        with staged.running(stage, given, is_watched=True, passing=passing, remaking=remaking):
            output: Any = staged.model(*args, **kwargs)
            outputs: Sequence[Tensor] = ((self.loss or loss_in)(output),) if is_last else output
            del output
            staged.require_own(outputs)
            held.handed_over = None if is_last else staged.handed_over
        del args, kwargs
        held.after_forward = max(0, living.live_bytes - before)
        held.sent_back = 0 if arrived is None else arrived.gradient_bytes
        held.messages = _message_bytes(self.schedule, arrived, held.handed_over)
        with_grads = [one for one in outputs if one.requires_grad]
        if with_grads:
            with staged.running(stage, given, is_backward=True):
                torch.autograd.backward(with_grads, [torch.empty_like(one) for one in with_grads])
        held.aside = living.aside_bytes

    def record(self, stage: int) -> StageRecord:
        """What was found of a stage that was rehearsed."""
        later = WeightGrads(self.staged.own_modules()).params if self._has_halves else set()
        own, found = self.staged.params_of(stage), self._found[stage]
        halved = [unit for unit in self.units if any(param in own and param in later for param in unit.params)]
        others = {param for unit in halved for param in unit.params if param in own and param not in later}
        return StageRecord(
            self._counted[stage],
            self._worked.get(stage, ()),
            found.after_forward,
            found.aside + sum(param.nbytes for param in others if param.requires_grad),  # which wait for those
            frozenset(unit.name for unit in halved),
            found.messages,
            0 if found.handed_over is None else found.handed_over.message_bytes,
            found.sent_back,
        )

    @property
    def rank(self) -> RankRecord:
        """What was found of this rank, after all its stages were rehearsed."""
        records = {stage: self.record(stage) for stage in self._counted}
        return RankRecord(self.schedule, self.staged.pp_rank, records)

    @property
    def schedule(self) -> Schedule:
        layout = self.staged.layout
        if not self.as_call:
            return layout.schedule
        num_calls = min(2, layout.schedule.num_micro_batches)  # from the second on there are gradients meanwhile
        return schedule_of_calls(layout.num_ranks, layout.num_stages, num_calls)

    @property
    def _has_halves(self) -> bool:
        """Whether the backwards of this rank are in two."""
        return any(op.kind == "I" for op in self.schedule.rows[self.staged.pp_rank])


def _is_forward(worked: Worked) -> bool:
    return worked.moment.phase == "forward"


@dataclass
class _Held:
    """What one micro-batch holds in one stage, in bytes."""

    after_forward: int = 0
    """Held until the backward: what autograd saves, the received input, and the output that is sent."""
    sent_back: int = 0
    """Sent to the previous stage."""
    messages: int = 0
    """Messages in flight meanwhile: the next ones from either side, and copies of those sent to both."""
    handed_over: StageMessageLayout | None = None
    carried: Carried | None = None
    """Results that stages read; `None` to find out which this one wants."""
    wanted: set[str] = field(default_factory=set)
    aside: int = 0
    """Kept by a first half of the backward: inputs of linear layers, and the gradients of their outputs."""
    _living: LivingBytes | None = None
    _inputs: dict[int, list[tuple[int, StorageWeakRef]]] = field(default_factory=dict)
    """The storages of those of linear layers, by the layer's identity. What a backward computes again is freed in the
    forward, so that no reference keeps them."""

    def watch(self, layers: Sequence[nn.Linear]) -> None:
        """Put aside what those of `layers` are given when the gradients of their outputs come, and these: see [Note:
        two halves] in `parallel/pipeline/weight_grads.py`. What a backward computes again is put aside at once, because
        the gradient of a block's last layer comes before that, and it ends there: such a layer returns nothing."""

        def is_deferred(layer: nn.Module) -> bool:
            return torch.is_grad_enabled() and bool(layer.weight.requires_grad)

        def note_input(layer: nn.Module, args: tuple[Any, ...]) -> None:
            if args and is_deferred(layer):
                given = args[0].untyped_storage()
                self._inputs.setdefault(id(layer), []).append((storage_id(given), StorageWeakRef(given)))
                if in_backward():
                    self._keep(storage_id(given))

        def await_gradient(layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if args and is_deferred(layer) and output.requires_grad:
                output.register_hook(partial(self._put_aside, id(layer)))

        for layer in layers:
            layer.register_forward_pre_hook(hook(note_input))
            layer.register_forward_hook(hook(await_gradient))

    def _put_aside(self, layer: int, grad: Tensor) -> None:
        self._keep(storage_id(grad.untyped_storage()))
        for key, given in self._inputs[layer]:
            if not given.expired():
                self._keep(key)

    def _keep(self, key: int) -> None:
        assert self._living is not None
        self._living.put_aside(key)

    def begin(self, living: LivingBytes) -> None:
        self._living = living
        self._inputs.clear()


def _message_bytes(schedule: Schedule, given: StageMessageLayout | None, sent: StageMessageLayout | None) -> int:
    num_bytes = (0 if layout is None else layout.num_bytes for layout in (given, sent))
    return in_transit(schedule.num_ranks, schedule.num_micro_batches, *num_bytes)


def in_transit(num_ranks: int, num_micro_batches: int, given_bytes: int, sent_bytes: int) -> int:
    """Bytes in flight beside an op of a stage that is given so many and sends so many: the next messages from either
    side, a copy of the last outputs sent, and gradients that may not have been sent yet."""
    return (1 + min(most_under_way(num_ranks), num_micro_batches)) * given_bytes + 2 * sent_bytes
