"""Calls of the model itself in a pipeline by a loop of one's own: `loss = model(**batch).loss; loss.backward()`.

[Note: a split call] A loop shows one batch at a time and wants the loss before anything is sent back. So a call splits
its batch along the samples into parts, which pass through the stages one behind the other (GPipe), and returns with one
node of autograd, whose backward runs the backwards of all stages. Its gradients are whatever the loop makes of the
output: a factor on the loss, or a loss of its own.

[Note: one loss] The loss of a batch is rarely the mean of its parts' losses: they may have different numbers of tokens
that count, or compare samples with each other. So what comes after the last stage's blocks (a norm, a head, and the
model's own loss) runs once, on the blocks' outputs for the whole batch. The loss is then that of an unsplit model,
whatever it is, and logits take the memory that they take there. It costs overlap: ranks wait while the head computes.
Weights for the parts' losses would have to be guessed from labels, and differ from model to model.

[Note: several calls] Calls until the step are one pass of the program, each with micro-batches of its own, so a loss
may be made of several. Calls that are never sent back end with the step.

[Note: what is sent] Beside a loss, a training call sends small tensors only; logits stay on the last stage
(`NotSent`). Without a loss in the output, or without gradients, all of it is sent.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.forward_ad import unpack_dual

from shardwise.comm import Line
from shardwise.errors import StateError
from shardwise.parallel.pipeline.caches import cache_in, without_cache
from shardwise.parallel.pipeline.call_outputs import describe, layouts_in, rebuilt, refuse_collected
from shardwise.parallel.pipeline.pipeline import Held, Pipeline, Share
from shardwise.parallel.pipeline.stage_layout import StageLayout, refuse_sums_over_layers
from shardwise.parallel.pipeline.stage_messages import Layout, StageMessage, StageMessageLayout, bytes_of, joined
from shardwise.parallel.pipeline.staged_model import Carried
from shardwise.program.schedule import Op
from shardwise.runtime import refuse_transformed_calls
from shardwise.runtime.micro_batches import MicroBatch, parts_of
from shardwise.runtime.nested import tensors_in
from shardwise.system.graph_nodes import note_stages
from shardwise.system.telemetry import STAGES, Timeline
from shardwise.system.units import format_bytes

Tensor = torch.Tensor
_log = logging.getLogger("shardwise")
SMALL_BYTES = 2**16
"""Tensors up to this size are sent beside a loss."""
MUCH_BYTES = 2**20
"""From here on it is told what calls send."""


class CallTrainer(Protocol):
    """What the engine does around the ops of calls."""

    @property
    def num_passes(self) -> int:
        """How many passes have ended; a call can be sent back in its own only."""
        ...

    def require_possible(self, called: nn.Module) -> None:
        """Raise unless the plan allows calls of this model."""
        ...

    def note_parts(self, whole: MicroBatch, parts: Sequence[MicroBatch], rows: Sequence[int]) -> None:
        """A call of `whole` is that of `parts`, with so many samples each."""
        ...

    def end_forwards(self, line: Line) -> None:
        """All stages, whose ranks are on `line`, have run the forwards of a call."""
        ...

    def begin_call(self, num: int) -> int:
        """A call that trains begins, with `num` micro-batches; the number of the first one in the pass."""
        ...

    def begin_op(self, op: Op, *, is_last_of_kind: bool) -> None:
        """Announce that `op` runs next, and whether it is the last of its kind for its stage in this call."""
        ...

    def begin_backward(self) -> None:
        """The gradients of a call's outputs have come."""
        ...

    def backward_through(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Run a backward from the gradients of `outputs`."""
        ...

    def end_call(self) -> None:
        """The backward of a call has ended."""
        ...

    def fail(self) -> None:
        """A forward or backward of a call has raised."""
        ...

    def begin_evaluation_of(self, stage: Hashable) -> None:
        """Forwards from here on are of this stage, without gradients."""
        ...


@dataclass
class _Call:
    """One call on this rank. Autograd's graph holds it, and what it keeps for its backward."""

    called: nn.Module
    """The model, or one in it that has all stages."""
    parts: Sequence[MicroBatch]
    whole: MicroBatch
    rows: Sequence[int]
    """The samples of each part."""
    kinds: Sequence[Hashable]
    carried: Carried
    form: Hashable
    """Whether it is split, and what decides on how its tail runs: the last stage watches that, and others with it."""
    trains: bool
    first: int = 0
    """The number of its first micro-batch."""
    num_passes: int = 0
    held: dict[tuple[int, int], Held] = field(default_factory=dict)
    """By stage and part."""
    of_blocks: dict[Hashable, StageMessageLayout] = field(default_factory=dict)
    """By kind: what the last stage's blocks hand over to what runs once."""
    arrived: list[StageMessage] = field(default_factory=list)
    """For each part, what came to the last stage, if that has nothing but what runs once for all parts."""
    joined: StageMessage | None = None
    """What runs once for all parts was given."""
    outputs: list[Tensor] = field(default_factory=list)
    """The tensors among what the call returns that have gradients, on the rank with the last stage."""

    def numbered(self, part: int) -> int:
        return self.first + part


class LoopCalls:
    """Answers calls of a model in stages. All ranks of the pipeline make the same ones."""

    def __init__(
        self, pipeline: Pipeline, trainer: CallTrainer, timeline: Timeline, sends_all: Callable[[bool], bool]
    ) -> None:
        """`sends_all(trains)`: whether a call, which trains or not, sends what is large beside its loss."""
        self._pipeline = pipeline
        self._staged = pipeline.staged
        self._trainer = trainer
        self._timeline = timeline
        self._sends_all = sends_all
        self._last = pipeline.layout.num_stages - 1
        self._has_told = self._has_told_mixing = False
        self._blocks, self._tail = self._staged.spans_of_last() if self._last in self._staged.stages else (None, (0, 0))

    def answer(self, called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output of a call of `called`, the model or one in it that has all stages, on every rank of the
        pipeline."""
        pipeline, staged = self._pipeline, self._staged
        refuse_transformed_calls()
        pipeline.require_whole()
        self._trainer.require_possible(called)
        refuse_collected(called, kwargs)
        refuse_sums_over_layers(kwargs, "The call")
        if cache_in(args, kwargs) is not None or kwargs.get("use_cache"):
            raise StateError(
                "The model was called with a cache of keys and values outside of engine.inference(), where pipeline "
                "stages have none. Generate inside of it, or call with use_cache=False."
            )
        whole = MicroBatch(args, without_cache(called, args, kwargs), names=tuple(signature(called.forward).parameters))
        if torch.is_grad_enabled() and any(one.requires_grad for one in tensors_in((whole.args, whole.kwargs))):
            raise StateError(
                "The model was called with a tensor that needs a gradient. Pipeline stages send none back to what the "
                "model is called with: let the model compute it, or call with tensor.detach()."
            )
        if any(unpack_dual(one).tangent is not None for one in tensors_in((whole.args, whole.kwargs))):
            raise StateError(
                "The model was called with a tensor that has a tangent, of forward-mode differentiation. Pipeline "
                "stages pass on none: leave pp out of the mesh."
            )
        pipeline.check_same_batch([whole])
        parts, rows = self._parts_of(whole, called)
        self._trainer.note_parts(whole, parts, rows)
        kinds = [(staged.wholes.index(called), pipeline.kind_of(part)) for part in parts]
        form = len(parts) > 1, whole.form
        carried = pipeline.carried_for(whole, called=called, is_whole=True, is_split=True)
        call = _Call(called, parts, whole, rows, kinds, carried, form, torch.is_grad_enabled())
        if call.trains:
            pipeline.tell_hooks()
            call.first, call.num_passes = self._trainer.begin_call(len(parts)), self._trainer.num_passes
        try:
            with pipeline.cleared_on_error(), pipeline.drawing():
                output = self._forward(call)
                pipeline.end_forwards()
                self._trainer.end_forwards(pipeline.line)
                return self._returned(call, output)
        except BaseException:
            self._trainer.fail()
            raise

    def _parts_of(self, whole: MicroBatch, called: nn.Module) -> tuple[list[MicroBatch], list[int]]:
        """The parts of a call, and how many samples each has: one, if blocks mix samples."""
        parts, rows = parts_of_call(whole, self._pipeline.layout, in_training=self._staged.model.training)
        if len(parts) == 1 or not (mixing := self._pipeline.mixing_in(whole, rows, called)):
            return parts, rows
        if not self._has_told_mixing:
            self._has_told_mixing = True
            _log.warning(
                "A call of the model is not split along its samples, and pipeline stages wait for each other, because "
                "blocks mix them: %s. In engine.train_step they mix those of a micro-batch.", mixing,
            )  # fmt: skip
        return [whole], [sum(rows)]

    # -- forward ----------------------------------------------------------------------------------------

    def _forward(self, call: _Call) -> Any:
        """Run this rank's stages; the output, if it has the last."""
        output = None
        for stage in self._staged.stages:
            for part in range(len(call.parts)):
                self._forward_part(call, stage, part)
            if stage == self._last:
                output = self._forward_whole(call)
        if not call.trains:
            self._trainer.begin_evaluation_of(None)
        return output

    def _forward_part(self, call: _Call, stage: int, part: int) -> None:
        pipeline, number, kind = self._pipeline, call.numbered(part), call.kinds[part]
        arrived = None
        if stage:
            with self._on_timeline(f"wait F{number}@{stage}"):
                arrived = pipeline.arrived(stage, kind, number)
            channel = pipeline.forward_from[stage]
            if part + 1 < len(call.parts) and (layout := channel.known(call.kinds[part + 1])):
                channel.expect(layout.tensors, number + 1)
        if stage == self._last and (self._blocks is None or len(call.parts) == 1):
            assert arrived is not None
            call.arrived.append(arrived)
            return
        self._begin(call, Op("F", number, stage), is_last=part + 1 == len(call.parts))
        inputs = call.parts[part]
        is_last = stage == self._last
        known = call.of_blocks.get(kind) if is_last else pipeline.forward_to[stage].known(kind)
        with self._on_timeline(f"F{number}@{stage}"):
            outputs, sent = pipeline.through(
                stage,
                number,
                inputs,
                arrived,
                lambda: self._staged.model(*inputs.args, **inputs.kwargs),
                called=call.called,
                share=Share(self._blocks if is_last else None, call.form, True, known),
                carried=call.carried,
            )
        assert sent is not None
        if call.trains or is_last:
            call.held[stage, part] = Held.of(outputs, sent, arrived)
        if is_last:
            if not sent.varies:
                sent = replace(sent, returned=call.of_blocks.setdefault(kind, sent).returned)
            call.arrived.append(StageMessage(list(outputs), sent))
        else:
            pipeline.forward_to[stage].send_with_layout(outputs, sent, kind, number)

    def _forward_whole(self, call: _Call) -> Any:
        """See [Note: one loss]."""
        messages, call.arrived = call.arrived, []
        has_blocks = (self._last, 0) in call.held
        span = self._tail if has_blocks else None
        name = self._pipeline.layout.pieces[self._tail[0] if has_blocks else self._staged.span_of(self._last)[0]]
        message = messages[0] if len(messages) == 1 else joined(messages, call.rows, name).expecting_gradients()
        call.joined = message
        op = self._op_of_whole("F", call)
        self._begin(call, op, is_last=True)
        with self._on_timeline(f"F{op.micro_batch}@{op.stage}"):
            output, _ = self._pipeline.through(
                self._last,
                op.micro_batch,
                call.whole,
                message,
                lambda: self._staged.model(*call.whole.args, **call.whole.kwargs),
                called=call.called,
                share=Share(span, call.form),
                carried=call.carried,
            )
        return output

    def _op_of_whole(self, kind: Any, call: _Call) -> Op:
        """What runs once for all parts; beside ops of the last stage's blocks it counts as a stage after it."""
        return Op(kind, call.first, self._last + 1 if (self._last, 0) in call.held else self._last)

    def _begin(self, call: _Call, op: Op, *, is_last: bool) -> None:
        if call.trains:
            self._trainer.begin_op(op, is_last_of_kind=is_last)
        else:
            self._trainer.begin_evaluation_of(("call", op.stage))

    # -- the output -------------------------------------------------------------------------------------

    def _returned(self, call: _Call, output: Any) -> Any:
        """The output as the loop gets it, on every rank."""
        pipeline = self._pipeline
        is_last = pipeline.pp_rank == pipeline.last_place
        tensors: list[Tensor] = []
        told: dict[str, Any] = {}
        if is_last:
            keeps = _loss_of(output) is not None and not self._sends_all(call.trains)
            stays = _is_left if keeps else (lambda _: False)
            told = describe(output, None, type(call.called).__name__, tensors, stays)
            special = next((type(one).__name__ for one in tensors if type(one) is not Tensor), None)
            if call.trains and special:
                told = {
                    "refused": f"The model returns {special}: logits that are split, or not computed yet, and a loss "
                    f"outside of the model has no gradient for them in pipeline stages. Let the model compute its loss "
                    f"(labels), or leave loss: chunked and tensor.cut_logits out of the plan."
                }
        message = pipeline.exchange(json.dumps(told).encode())[pipeline.last_place]
        described: Mapping[str, Any] = json.loads(message)
        layouts = layouts_in(described)
        self._tell_size(layouts)
        tensors = pipeline.from_place(pipeline.last_place, layouts, tensors)
        with_grad = [number for number, layout in enumerate(layouts) if layout.has_grad]
        if call.trains:
            if is_last:
                call.outputs = [tensors[number] for number in with_grad]
            tensors = self._with_node(call, tensors, with_grad)
        return rebuilt(described, None, tensors)

    def _tell_size(self, layouts: Sequence[Layout]) -> None:
        """Say once what a call sends, if that is much."""
        num_bytes = bytes_of(layouts)
        if num_bytes < MUCH_BYTES or self._has_told or self._pipeline.line.ranks[0] or self._pipeline.pp_rank:
            return
        self._has_told = True
        num_others = self._pipeline.layout.num_ranks - 1
        _log.warning(
            "A call of the model sends its outputs, %s, from the last pipeline stage to the other %d. If the model "
            "computes its loss itself, only that is sent.", format_bytes(num_bytes), num_others,
        )  # fmt: skip

    def _with_node(self, call: _Call, tensors: list[Tensor], with_grad: Sequence[int]) -> list[Tensor]:
        """The outputs of a call that trains, of which those that need it have a gradient."""
        if not with_grad:
            self._trainer.end_call()
            return [tensor.detach() for tensor in tensors]
        anchor = torch.zeros((), requires_grad=True, device=tensors[with_grad[0]].device)
        attached = _Stages.apply(self, call, anchor, *(tensors[number].detach() for number in with_grad))  # type: ignore[no-untyped-call]  # torch's own
        note_stages(attached[0].grad_fn)
        tensors = [tensor.detach() for tensor in tensors]
        for number, tensor in zip(with_grad, attached, strict=True):
            tensors[number] = tensor
        return tensors

    # -- backward ---------------------------------------------------------------------------------------

    def backward(self, call: _Call, gradients: Sequence[Tensor | None]) -> None:
        """Run the backwards of this rank's stages. `gradients` are those of the outputs, of which the last stage's
        count; others have none of their own to compare."""
        if call.num_passes != self._trainer.num_passes or not (call.held or call.joined):
            raise StateError(
                "A loss was sent back whose forward is not there any more: it was sent back before, or a step was "
                "taken since. In pipeline stages each call of the model has one backward, before the step."
            )
        self._trainer.begin_backward()
        try:
            with self._pipeline.cleared_on_error():
                for stage in reversed(self._staged.stages):
                    answers = self._backward_whole(call, gradients) if stage == self._last else []
                    for part in range(len(call.parts)):
                        self._backward_part(call, stage, part, answers)
                for channel in self._pipeline.channels():
                    channel.wait_for_sends()
                self._trainer.end_call()
        except BaseException:
            self._trainer.fail()
            raise

    def _backward_whole(self, call: _Call, gradients: Sequence[Tensor | None]) -> list[list[Tensor]]:
        """The gradients of what blocks have returned, or the last stage has received, by part."""
        message, call.joined = call.joined, None
        assert message is not None
        op = self._op_of_whole("B", call)
        self._trainer.begin_op(op, is_last_of_kind=True)
        span = self._tail if (self._last, 0) in call.held else None
        given = [(out, grad) for out, grad in zip(call.outputs, gradients, strict=True) if grad is not None]
        call.outputs = []
        with (
            self._on_timeline(f"B{op.micro_batch}@{op.stage}"),
            self._staged.running(self._last, message, is_backward=True, span=span),
        ):
            self._trainer.backward_through([out for out, _ in given], [grad for _, grad in given])
        of_message = message.gradients()
        if len(call.rows) == 1:
            return [of_message]
        in_parts = [torch.split(grad, list(call.rows)) for grad in of_message]
        return [[grads[part] for grads in in_parts] for part in range(len(call.rows))]

    def _backward_part(self, call: _Call, stage: int, part: int, answers: list[list[Tensor]]) -> None:
        pipeline, number = self._pipeline, call.numbered(part)
        held = call.held.pop((stage, part), None)
        if held is None:  # the last stage is what runs once
            pipeline.send_back(stage, answers[part], number)
            return
        gradients = answers[part] if stage == self._last else []
        if stage < self._last:
            with self._on_timeline(f"wait B{number}@{stage}"):
                gradients = pipeline.gradients(stage, held, number)
        self._trainer.begin_op(Op("B", number, stage), is_last_of_kind=part + 1 == len(call.parts))
        span = self._blocks if stage == self._last else None
        with (
            self._on_timeline(f"B{number}@{stage}"),
            self._staged.running(stage, held.arrived, is_backward=True, span=span),
        ):
            self._trainer.backward_through(held.outputs, gradients)
        if held.arrived is not None:
            pipeline.send_back(stage, held.arrived.gradients(), number)

    def _on_timeline(self, what: str) -> Any:
        return self._timeline.during(STAGES, what)


class _Stages(torch.autograd.Function):
    """The node of a call: its backward is that of all stages."""

    @staticmethod
    def forward(ctx: Any, calls: LoopCalls, call: _Call, anchor: Tensor, *outputs: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG004
        ctx.calls, ctx.call = calls, call
        ctx.set_materialize_grads(False)
        return tuple(one.detach() for one in outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.calls.backward(ctx.call, gradients)
        return (None,) * (3 + len(gradients))


def most_parts(num_samples: int, num_ranks: int) -> int:
    """In how many parts a call of so many samples is split, at most, on so many ranks of a pipeline.

    4 for each rank: there the bubble counts for little, say the authors of GPipe (https://arxiv.org/abs/1811.06965,
    section 2.3). Parts of one sample only up to 2 for each rank, for what calls cost: on 2 ranks, 16 samples of 128
    tokens took 1.04 of the engine's own step in 8 parts and 1.11 in 4, but 8 samples of 64 tokens 1.28 in 8 parts and
    1.12 in 4.
    """
    return min(4 * num_ranks, max(2 * num_ranks, num_samples // 2))


def parts_of_call(whole: MicroBatch, layout: StageLayout, *, in_training: bool) -> tuple[list[MicroBatch], list[int]]:
    """The parts of a call of the model, and how many samples each has. Batch norms see whole batches in training."""
    is_whole = in_training and layout.normalizes_batches
    return parts_of(whole, lambda num_samples: 1 if is_whole else most_parts(num_samples, layout.num_ranks))


def _is_left(tensor: Tensor) -> bool:
    """Whether a tensor beside a loss is not sent: a large one, or logits that are split or not computed yet."""
    return type(tensor) is not Tensor or tensor.nbytes > SMALL_BYTES


def _loss_of(output: Any) -> Tensor | None:
    """The loss that a model has computed itself, if it has: its output, or that output's `loss`."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    return loss if isinstance(loss, Tensor) and loss.numel() == 1 else None
