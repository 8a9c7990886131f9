"""Runs the micro-batches of a step through the stages of this rank, in the order of the schedule."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import torch
from torch import nn

from shardwise.comm import BatchCheck, Line, World, link_between
from shardwise.errors import StateError, some
from shardwise.parallel.pipeline.sends import Channel, most_under_way, sendable
from shardwise.parallel.pipeline.stage_layout import AXIS, Span, StageLayout, few_micro_batches, hooks_of_users
from shardwise.parallel.pipeline.stage_messages import Layout, StageMessage, StageMessageLayout
from shardwise.parallel.pipeline.staged_model import NOTHING, Carried, Passing, StagedModel
from shardwise.parallel.pipeline.weight_grads import Aside, WeightGrads
from shardwise.parallel.pipeline.whole_tensors import AcrossStages
from shardwise.plan.mesh import Mesh
from shardwise.program.schedule import Op
from shardwise.runtime import named_tensors, tensors_in
from shardwise.runtime.dropped_layers import refuse_dropped_layers
from shardwise.runtime.micro_batches import LossFunction, MicroBatch, side_inputs
from shardwise.system.checksum import crc32
from shardwise.system.telemetry import STAGES, Timeline
from shardwise.system.torch_private import DisableTorchFunctionSubclass, forget_cached_parametrizations

if TYPE_CHECKING:
    from shardwise.parallel.pipeline.survey import Surveyor

Tensor = torch.Tensor
Made = TypeVar("Made")
_log = logging.getLogger("shardwise")
_NOTHING = nullcontext()
_IS_TRAINED = attrgetter("requires_grad")


class Trainer(Protocol):
    """Runs backwards: it knows the loss scale, and when each gradient is reduced."""

    def backward(self, loss: Tensor) -> None:
        """Run the backward of a micro-batch's loss."""
        ...

    def begin_op(self, op: Op, *, is_last_of_kind: bool) -> None:
        """Announce that `op` runs next, and whether it is the last of its kind for its stage."""
        ...

    def first_half(self, micro_batch: int) -> AbstractContextManager[None]:
        """A context in which backwards are first halves; see [Note: two halves]."""
        ...

    def backward_through(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Run a stage's backward from the gradients of the outputs that it sent."""
        ...

    def backward_of_weights(self, aside: Sequence[Aside]) -> None:
        """Run the second half of a backward; see [Note: two halves]."""
        ...


class Views(Protocol):
    """Compares what the modules of a stage do with what they would do in an unsplit model."""

    def compared(self, called: nn.Module, pieces: Sequence[str]) -> AbstractContextManager[None]:
        """A context for a forward of `called` that runs `pieces`; see `StageViews`."""
        ...


class Share(NamedTuple):
    """What a forward computes of a call."""

    span: Span | None = None
    """The modules of the stage that run; `None`: all of them."""
    call: Hashable = None
    """What all forwards of the call have in common: if one rank watches one of them, all do."""
    sends_others: bool = False
    """See `Passing`."""
    known: StageMessageLayout | None = None
    """See `Passing`; says nothing of what is computed."""


WHOLE = Share()


@dataclass
class Held:
    """What a forward keeps for its backward: its loss, or those of its outputs for which gradients come back, with
    their layouts, and what it received. A stage of frozen layers before any that are trained keeps nothing."""

    outputs: Sequence[Tensor]
    awaited: Sequence[Layout]
    arrived: StageMessage | None

    @classmethod
    def of(cls, outputs: Sequence[Tensor], sent: StageMessageLayout | None, arrived: StageMessage | None) -> Held:
        """`sent` is the layout of the outputs, unless they are a loss."""
        if sent is None:
            return cls(outputs, (), arrived)
        pairs = [pair for pair in zip(outputs, sent.tensors, strict=True) if pair[1].has_grad]
        answers = arrived is not None and any(layout.has_grad for layout in arrived.layout.tensors)
        kept = arrived if pairs or answers else None
        return cls([one for one, _ in pairs], [layout for _, layout in pairs], kept)


@dataclass
class _Step:
    """The state of one step."""

    parts: Sequence[MicroBatch]
    kinds: Sequence[Hashable]
    carried: Sequence[Carried]
    loss_fn: LossFunction | None
    timeline: Timeline
    held: dict[tuple[int, int], Held] = field(default_factory=dict)
    aside: dict[tuple[int, int], list[Aside]] = field(default_factory=dict)
    losses: list[Tensor] = field(default_factory=list)


class Pipeline:
    """Runs schedules on the stages of this rank. All ranks along the axis call every method, with the same batch."""

    def __init__(self, staged: StagedModel, world: World, mesh: Mesh, device: torch.device) -> None:
        self.staged = staged
        self.layout: StageLayout = staged.layout
        self.across = AcrossStages(staged, world, mesh, device)
        self.pp_rank = mesh.coordinate(world.rank)[AXIS]
        self._line = world.group(mesh, AXIS)
        self._collectives = world.collectives(device)
        self._device = device
        self._batches = BatchCheck(self.line, device)
        self._has_told_waits = self._has_told_hooks = False
        self._forward_seen: Callable[..., Any] | None = None
        self._argument_names: tuple[str, ...] = ()
        self._hooks_before = hooks_of_users(staged.model)
        """Those that `stage_warnings` has seen."""
        self._params: list[nn.Parameter] = []
        self._trained: list[bytes] = []
        """By pipeline rank: a word that is equal as long as the same of its parameters are trained. Loops freeze and
        unfreeze, which decides for which of its outputs a stage gets gradients."""
        from shardwise.parallel.pipeline.auxiliary_losses import LossesAside  # only ranks with a pipeline load them
        from shardwise.parallel.pipeline.on_every_stage import OnEveryStage

        self._losses_aside = LossesAside
        self._on_every_stage = OnEveryStage(staged.model, staged.layout.pieces)
        self.own_numbers: Callable[[], AbstractContextManager[None]] = nullcontext
        """A context in which this rank draws its own random numbers; see `drawing`."""
        self._forms: dict[Hashable, tuple[tuple[int, ...], bool]] = {}
        """The kinds of forwards that have been watched (see `dependence.py`): which arguments each passes on, and
        whether shapes vary."""
        self._shares: dict[tuple[nn.Module, bool], list[tuple[int, Span]]] = {}
        """What runs one after the other in a call of a module, and where its last stage is in two."""
        self.surveyor: Surveyor | None = None
        """Finds what stages read; without it, each gets the arguments of its first module alone."""
        self.views: Views | None = None
        """Looks at the first forward of each stage, if layers are split by a plan of a user's own."""
        self.watched_weights: Callable[[], AbstractContextManager[object]] | None = None
        """Makes a context for those forwards, if layers are split; see `WeightsUsed`."""
        self._surveys = staged.surveys
        if world.membership is not None:  # else these stages are new on all ranks
            self._surveys.agree(self.exchange)
        self._row = self.layout.schedule.rows[self.pp_rank]
        self._last = {(op.kind, op.stage): index for index, op in enumerate(self._row)}
        """The last op of each kind and stage."""
        is_halved = any(op.kind == "I" for op in self._row)
        self._weights = WeightGrads(staged.own_modules()) if is_halved else None
        self._last_stage = len(self.layout.stages) - 1
        channel = partial(
            Channel,
            collectives=self._collectives,
            host=world.collectives(torch.device("cpu")),
            device=device,
            most_under_way=most_under_way(self.layout.num_ranks),
        )
        self.forward_to: dict[int, Channel] = {}
        """By stage of this rank: where it sends its outputs, and whence its inputs come (`forward_from`)."""
        self.forward_from: dict[int, Channel] = {}
        self._backward_to: dict[int, Channel] = {}
        self._backward_from: dict[int, Channel] = {}
        for stage in range(self._last_stage):
            lower, upper = (self._line.ranks[self.layout.pp_rank_of(one)] for one in (stage, stage + 1))
            up = link_between(AXIS, lower, upper, world.rank, f"{stage}>{stage + 1}")
            down = link_between(AXIS, upper, lower, world.rank, f"{stage + 1}>{stage}")
            if world.rank == lower:
                self.forward_to[stage] = channel(up, "activation")
                self._backward_from[stage] = channel(down, "gradient")
            if world.rank == upper:
                self.forward_from[stage + 1] = channel(up, "activation")
                self._backward_to[stage + 1] = channel(down, "gradient")

    def drawing(self) -> AbstractContextManager[None]:
        """A context for forwards. Stages differ in how many random numbers they draw in training, and draw their own;
        outside, all ranks of a pipeline draw the same, for the batches that they share (masks, augmentation)."""
        return self.own_numbers() if self.staged.model.training else nullcontext()

    def exchange(self, message: bytes) -> list[bytes]:
        """The messages of all ranks along the pipeline, by pipeline rank; blocks."""
        return self._collectives.exchange(message, self._line, "stages")

    @property
    def line(self) -> Line:
        """The ranks of the pipeline, with the collectives between them."""
        return Line(self._collectives, self._line)

    @property
    def last_place(self) -> int:
        """The pipeline rank with the last stage."""
        return self.layout.pp_rank_of(self._last_stage)

    def place_of_output(self, called: nn.Module) -> int:
        """The pipeline rank on which a call of `called` ends."""
        stage, _ = self.layout.shares(self.staged.extents[called])[-1]
        return self.layout.pp_rank_of(stage)

    @property
    def argument_names(self) -> tuple[str, ...]:
        """What the model's forward calls its arguments. To look at a function takes a hundred calls of others."""
        forward = self.staged.model.forward
        if self._forward_seen is not forward:
            self._forward_seen, self._argument_names = forward, tuple(signature(forward).parameters)
        return self._argument_names

    @property
    def row(self) -> tuple[Op, ...]:
        """This rank's operations in a step, in order."""
        return self._row

    @property
    def has_computed(self) -> bool:
        """Whether a batch has gone through the stages: the same on all ranks of the pipeline."""
        return bool(self._forms)

    @property
    def halved_params(self) -> set[nn.Parameter] | None:
        """The parameters whose gradients come in the second half of a backward; `None` if the schedule has no halves:
        see [Note: two halves] in `weight_grads.py`."""
        return None if self._weights is None else self._weights.params

    def attach(self) -> None:
        """Replace the model's forward, and those of linear layers if the schedule splits backwards."""
        self.staged.attach()
        if self._weights is not None:
            self._weights.attach()

    def release(self) -> None:
        self.staged.release()
        if self._weights is not None:
            self._weights.release()

    def tell_hooks(self) -> None:
        """Say once, when training begins, when the hooks run that have been put on modules of these stages."""
        if self._has_told_hooks:
            return
        self._has_told_hooks = True
        new = [name for hook, name in hooks_of_users(self.staged.model).items() if hook not in self._hooks_before]
        if new:
            _log.warning(
                "Hooks on %s run only where these modules' pipeline stages are, here on rank %d, and once for each "
                "micro-batch, of which a call of the model has several. What they collect is of these.",
                some(list(dict.fromkeys(new))),
                self._line.ranks[self.pp_rank],
            )

    def _tell_waits(self) -> None:
        """Say once that ranks wait, if a step has few micro-batches: a loop that calls the model has none of these."""
        is_first = not (self._has_told_waits or self._line.ranks[0] or self.pp_rank)
        self._has_told_waits = True
        if is_first and (found := few_micro_batches(self.layout.schedule)):
            _log.warning("%s", found)

    def train(
        self, parts: Sequence[MicroBatch], loss_fn: LossFunction | None, trainer: Trainer, timeline: Timeline
    ) -> list[Tensor]:
        """Run forward and backward of all micro-batches; returns their losses, on every rank."""
        self._tell_waits()
        self.tell_hooks()
        self.require_whole()
        self.check_same_batch(parts)
        step = self._step(parts, loss_fn, timeline)
        with self.cleared_on_error(), self.drawing(), self._collectives.journal.calling():
            for index, op in enumerate(self._row):
                trainer.begin_op(op, is_last_of_kind=index == self._last[op.kind, op.stage])
                following = self._row[index + 1] if index + 1 < len(self._row) else None
                if op.kind == "F":
                    self._forward(op, step, following)
                elif op.kind == "W":
                    self._look_ahead(following, step)
                    self._timed(op, step, "", trainer.backward_of_weights, step.aside.pop((op.stage, op.micro_batch)))
                else:
                    self._backward(op, step, trainer, following)
            return self._finish(step)

    def evaluate(
        self, parts: Sequence[MicroBatch], loss_fn: LossFunction | None, begin_stage: Callable[[Hashable], None]
    ) -> list[Tensor]:
        """The losses of all micro-batches, on every rank; runs forwards only, in the order of the schedule."""
        self.require_whole()
        with torch.no_grad(), self.cleared_on_error(), self.drawing():
            step = self._step(parts, loss_fn, Timeline())
            for op in self._row:
                if op.kind == "F":
                    begin_stage(op.stage)
                    self._forward(op, step, None)
                    step.held.clear()
            begin_stage(None)
            return self._finish(step)

    def _step(self, parts: Sequence[MicroBatch], loss_fn: LossFunction | None, timeline: Timeline) -> _Step:
        names = self.argument_names
        parts = [part if part.names == names else replace(part, names=names) for part in parts]
        kinds = [self.kind_of(part) for part in parts]
        carried = [self.carried_for(part, loss_fn, is_whole=part.compute is not None) for part in parts]
        return _Step(parts, kinds, carried, loss_fn, timeline)

    def carried_for(
        self,
        part: MicroBatch,
        loss_fn: LossFunction | None = None,
        called: nn.Module | None = None,
        *,
        is_whole: bool,
        is_split: bool = False,
    ) -> Carried:
        """The results that later stages read in forwards on micro-batches of this form; see [Note: a survey].

        All ranks of the pipeline call. `is_whole`: of the model, or of `called`, all that it returns is wanted, and not
        the loss alone. `is_split`: what comes after the last blocks runs by itself.
        """
        called = called or self.staged.model
        if self.surveyor is None or type(called).forward is nn.Sequential.forward:  # a chain, and nothing else
            return NOTHING
        shares = self._shares.get((called, is_split))
        if shares is None:
            shares = self._shares[called, is_split] = self.layout.shares(self.staged.extents[called], is_split=is_split)
        if len(shares) == 1:
            return NOTHING
        form = self._form(part, loss_fn, called, is_whole=is_whole, is_split=is_split)
        if form not in self._surveys.carried:
            self._require_all_layers()
            self._surveys.carried[form] = self.surveyor.survey(part, loss_fn, shares, called, is_whole=is_whole)
        return self._surveys.carried[form]

    def _form(
        self, part: MicroBatch, loss_fn: LossFunction | None, called: nn.Module, *, is_whole: bool, is_split: bool
    ) -> Hashable:
        """What decides on the results that forwards read."""
        return called, is_whole, is_split, loss_fn is None, self.staged.model.training, part.form

    def _require_all_layers(self) -> None:
        if self.staged.model.training:
            refuse_dropped_layers(self.staged.model, "a pipeline stage needs those with which it begins")

    def mixing_in(self, whole: MicroBatch, rows: Sequence[int], called: nn.Module) -> str:
        """Why a call of `called` cannot be split into parts with so many samples each: how its blocks mix samples, or
        which of its tensors is every sample's; "" if it can, or if that cannot be seen. All ranks of the pipeline
        call."""
        form = called, self.staged.model.training, torch.is_grad_enabled(), whole.form
        if self.surveyor is not None and form not in self._surveys.mixing:
            self._surveys.mixing[form] = self._mixing_seen(self.surveyor, whole, rows, called)
        return self._surveys.mixing.get(form, "")

    def _mixing_seen(self, surveyor: Surveyor, whole: MicroBatch, rows: Sequence[int], called: nn.Module) -> str:
        from shardwise.runtime.rehearsal import resized, unlikely_size  # only loops of one's own load it

        given = whole.args, whole.kwargs
        other = unlikely_size(given)
        shares = self.layout.shares(self.staged.extents[called], is_split=True)

        def surveyed(*kept: Tensor) -> Carried:
            args, kwargs = resized(given, 0, sum(rows), other, kept=set(map(id, kept)))
            part = replace(whole, args=args, kwargs=kwargs)
            return surveyor.survey(part, None, shares, called, is_whole=True, num_samples=other)

        self._require_all_layers()
        found = surveyed()
        if not found.why_unknown and not found.mixing:
            # Parts have other numbers of samples than the whole, too: what is read of one is read of all.
            form = self._form(whole, None, called, is_whole=True, is_split=True)
            self._surveys.carried.setdefault(form, found)
        if found.why_unknown:
            for name, tensor in side_inputs(whole, sum(rows), min(rows)).items():
                if not surveyed(tensor).why_unknown:
                    return f"{name}, {list(tensor.shape)}, is that of all samples, of which there are as many"
            if not self.carried_for(whole, called=called, is_whole=True, is_split=True).why_unknown:
                return f"with another number of them the call fails ({found.why_unknown})"
        return found.mixing

    # -- one op -----------------------------------------------------------------------------------------

    def _forward(self, op: Op, step: _Step, following: Op | None) -> None:
        _, batch, stage = op
        part, kind = step.parts[batch], step.kinds[batch]
        arrived = None
        if stage:
            arrived = self._timed(op, step, "wait ", self.arrived, stage, kind, batch)
        self._look_ahead(following, step)
        outputs, sent = self._timed(op, step, "", self._trained_through, op, part, arrived, step)
        if sent is None:
            step.losses.append(outputs[0].detach())
        else:
            self.forward_to[stage].send_with_layout(outputs, sent, kind, batch)
        step.held[stage, batch] = Held.of(outputs, sent, arrived)

    def arrived(self, stage: int, kind: Hashable, number: int) -> StageMessage:
        """What `stage`, which is not the first, receives for micro-batch `number` of this kind; waits for it."""
        channel = self.forward_from[stage]
        layout = channel.layout(kind)
        return StageMessage(channel.receive(layout.tensors, number), layout).expecting_gradients()

    def send_back(self, stage: int, gradients: Sequence[Tensor], number: int) -> None:
        """Send the gradients of what `stage` has received for micro-batch `number` to the stage before."""
        self._backward_to[stage].send(gradients, number)

    def gradients(self, stage: int, held: Held, number: int) -> list[Tensor]:
        """The gradients of what `stage`, which is not the last, has sent for micro-batch `number`; waits for them."""
        gradients = self._backward_from[stage].receive(held.awaited, number)
        self.forward_to[stage].was_answered(number)
        return gradients

    def _trained_through(
        self, op: Op, part: MicroBatch, arrived: StageMessage | None, step: _Step
    ) -> tuple[Sequence[Tensor], StageMessageLayout | None]:
        """The forward of a stage: its outputs and their layout, or the loss."""

        def forward() -> Any:
            if op.stage == self._last_stage:
                return (part.loss_by(self.staged.model, step.loss_fn),)
            if part.compute is not None:
                return self.staged.until_handed_over(partial(part.compute, part.given))
            return self.staged.model(*part.args, **part.kwargs)

        batch, to = op.micro_batch, self.forward_to.get(op.stage)
        share = Share(known=None if to is None else to.known(step.kinds[batch]))
        return self.through(op.stage, batch, part, arrived, forward, share=share, carried=step.carried[batch])

    def through(
        self,
        stage: int,
        number: int,
        part: MicroBatch,
        arrived: StageMessage | None,
        forward: Callable[[], Any],
        *,
        called: nn.Module | None = None,
        share: Share = WHOLE,
        carried: Carried = NOTHING,
    ) -> tuple[Any, StageMessageLayout | None]:
        """What `forward` returns for a micro-batch in a stage, with its layout if it is to be sent.

        The first forward of each kind is watched; for `called` see `StagedModel.running`.
        """
        called = called or self.staged.model
        span = share.span
        form = (called, stage, *share[:3], self.staged.model.training, torch.is_grad_enabled(), part.form)
        known = self._forms.get(form)
        sends, varies = (None, False) if known is None else known
        first, last = self.staged.span_of(stage) if span is None else span
        is_new, is_last = sends is None, self.staged.ends(called, last)
        pieces = self.layout.pieces[first : last + 1]
        losses = self._losses_aside(self.staged.named_modules_of(stage)) if is_new and not is_last else None
        with (
            self._on_every_stage.during(number, is_first=first == self.staged.first_here(called), is_watched=is_new),
            self.staged.running(
                stage,
                arrived,
                called=called,
                is_watched=is_new,
                passing=Passing(sends, share.sends_others, carried, known=share.known, varies=varies),
                span=span,
            ),
            _NOTHING if self.views is None or not is_new else self.views.compared(called, pieces),
            _NOTHING if self.watched_weights is None or not is_new else self.watched_weights(),
        ):
            forget_cached_parametrizations()  # each forward here has a backward of its own
            outputs = forward()
            if is_new:
                self.staged.require_own(outputs)
            if losses is not None:
                losses.require_none(outputs)
            sent = None if is_last else self.staged.handed_over
        if sent is not None:  # accelerate wraps forwards so that their outputs are in fp32
            outputs = [one.to(known.dtype) for one, known in zip(outputs, sent.tensors, strict=True)]
        if is_new:
            self._forms[form] = ((), False) if sent is None else (sent.arguments, sent.varies)
        return outputs, sent

    def pass_over(self, part: MicroBatch, called: nn.Module) -> None:
        """A call runs none of this rank's stages: what ranks compare after watched forwards, this one does too."""
        form = (called, None, WHOLE, self.staged.model.training, torch.is_grad_enabled(), part.form)
        with self._on_every_stage.during(0, is_first=True, is_watched=form not in self._forms):
            self._forms[form] = (), False

    def _backward(self, op: Op, step: _Step, trainer: Trainer, following: Op | None) -> None:
        _, batch, stage = op
        held = step.held.pop((stage, batch))
        gradients: list[Tensor] = []
        if stage < self._last_stage:
            gradients = self._timed(op, step, "wait ", self.gradients, stage, held, batch)
        self._look_ahead(following, step)
        self._timed(op, step, "", self._sent_back, op, step, trainer, held, gradients)
        if held.arrived is not None:
            self.send_back(stage, held.arrived.gradients(), batch)

    def _sent_back(self, op: Op, step: _Step, trainer: Trainer, held: Held, gradients: Sequence[Tensor]) -> None:
        """The backward of a stage, or its first half if `op` is one."""
        with self.staged.running(op.stage, held.arrived, is_backward=True):
            if op.kind == "I" and self._weights is not None:
                with self._first_half(op, step, trainer, self._weights):
                    self._backward_from_end(op, trainer, held, gradients)
            else:
                self._backward_from_end(op, trainer, held, gradients)

    def _backward_from_end(self, op: Op, trainer: Trainer, held: Held, gradients: Sequence[Tensor]) -> None:
        if op.stage == self._last_stage:
            trainer.backward(held.outputs[0])
        else:
            trainer.backward_through(held.outputs, gradients)

    def _timed(self, op: Op, step: _Step, what: str, work: Callable[..., Made], *args: Any) -> Made:
        """What `work(*args)` returns, with a timeline entry such as `F0@1`, or `wait F0@1` for the wait before it."""
        if not step.timeline.is_on:
            return work(*args)
        with step.timeline.during(STAGES, f"{what}{op.kind}{op.micro_batch}@{op.stage}"):
            return work(*args)

    @contextmanager
    def _first_half(self, op: Op, step: _Step, trainer: Trainer, weights: WeightGrads) -> Iterator[None]:
        with trainer.first_half(op.micro_batch), weights.put_aside() as aside:
            yield
        step.aside[op.stage, op.micro_batch] = aside

    def _look_ahead(self, op: Op | None, step: _Step) -> None:
        """Begin to receive the input of `op`, if its size is known."""
        if op is None:
            return
        kind, batch, stage = op
        if kind == "F" and stage and (layout := self.forward_from[stage].known(step.kinds[batch])):
            self.forward_from[stage].expect(layout.tensors, batch)
        held = step.held.get((stage, batch))
        if kind in "BI" and stage < self._last_stage and held is not None:
            self._backward_from[stage].expect(held.awaited, batch)

    def kind_of(self, part: MicroBatch) -> Hashable:
        """A key that is equal for micro-batches of which a stage's outputs have one layout; see [Note: layouts]."""
        trained = tuple(self._trained) if torch.is_grad_enabled() else ()
        return self.staged.model.training, torch.is_grad_enabled(), trained, _looks_of(part), part.form

    def require_whole(self) -> None:
        if self.staged.gathers_in_calls:
            raise StateError(
                "Inside engine.inference() that does not keep all parameters of a pipeline, they are whole only in "
                "calls of the model. Leave it before steps and engine.eval_step(), or give it more keep_bytes."
            )

    def check_same_batch(self, parts: Sequence[MicroBatch]) -> None:
        """Raise unless all ranks of the pipeline were given the same batch; and learn which parameters each trains."""
        named = {
            f"micro-batch {number}, {name}": tensor
            for number, part in enumerate(parts)
            for name, tensor in named_tensors(part.args, part.kwargs).items()
        }
        if not self._params:
            self._params = list(self.staged.model.parameters())
        with DisableTorchFunctionSubclass():
            flags = bytes(map(_IS_TRAINED, self._params))
        self._trained = self._batches.see(named, crc32(flags).to_bytes(4, "little")) or self._trained

    # -- the end of a step ------------------------------------------------------------------------------

    def end_forwards(self) -> None:
        """All micro-batches have passed through the stages of this rank: nothing is on its way any more."""
        for channel in self.channels():
            channel.wait_for_sends()
        self._on_every_stage.compare(self.exchange)
        self._on_every_stage.forget()

    def from_place(self, place: int, layouts: Sequence[Layout], tensors: Sequence[Tensor]) -> list[Tensor]:
        """The `tensors` of pipeline rank `place`, on all ranks of the pipeline, which know their layouts."""
        if self.pp_rank != place:
            tensors = [torch.empty(one.shape, dtype=one.dtype, device=self._device) for one in layouts]
        root = self._line.ranks[place]
        for tensor in tensors:
            if tensor.numel():
                sent = sendable(tensor.detach().contiguous().view(-1))
                self._collectives.broadcast(sent, root, self._line, "outputs").wait()
        return list(tensors)

    def _finish(self, step: _Step) -> list[Tensor]:
        self.end_forwards()
        losses = torch.zeros(len(step.parts), dtype=torch.float32, device=self._device)
        root = self._line.ranks[self.last_place]
        if step.losses:
            losses = torch.stack([loss.reshape(()).float() for loss in step.losses])
        self._collectives.broadcast(losses, root, self._line, "loss").wait()
        return list(losses.unbind())

    @contextmanager
    def cleared_on_error(self) -> Iterator[None]:
        """A context after which, if it raises, messages on their way are dropped."""
        try:
            yield
        except BaseException:
            for channel in self.channels():
                channel.abandon()
            raise

    def channels(self) -> Iterator[Channel]:
        for channels in (self.forward_to, self.forward_from, self._backward_to, self._backward_from):
            yield from channels.values()


def _looks_of(part: MicroBatch) -> Hashable:
    """A key that is equal for micro-batches with inputs of equal shapes and dtypes."""

    def looks(value: Any) -> Hashable:
        if isinstance(value, Tensor):
            return ((tuple(value.shape), value.dtype),)
        return tuple((tuple(one.shape), one.dtype) for one in tensors_in(value))

    return looks(part.args), tuple((key, looks(value)) for key, value in part.kwargs.items())
