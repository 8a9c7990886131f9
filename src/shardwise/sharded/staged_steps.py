"""Training steps of a model in pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from shardwise.errors import StateError
from shardwise.memory import Unit
from shardwise.parallel.pipeline import Aside, Pipeline, backward_of_weights
from shardwise.program.schedule import Op
from shardwise.runtime.micro_batches import LossFunction, MicroBatch
from shardwise.sharded.sharded_model import ShardedModel

Tensor = torch.Tensor


def through_stages(
    sharded: ShardedModel, pipeline: Pipeline, parts: list[MicroBatch], loss_fn: LossFunction | None
) -> list[Tensor]:
    if sharded.parts.gradients.exist() and sharded.parts.gradients.are_prepared:
        raise StateError(
            "Gradients of a pipeline have been read or clipped, and can get no more now. Take the step, or call "
            "engine.zero_grad(), before the next forward_backward()."
        )
    if sharded.plan.has_activations_on_disk:
        from shardwise.sharded.activation_disk import ask_before_first_step  # only these jobs load it

        ask_before_first_step(sharded, parts[0], loss_fn)
    runner = sharded.parts.runner
    with runner.over_schedule():
        losses = pipeline.train(parts, loss_fn, _StageTrainer(sharded, parts), sharded.parts.timeline)
    if sharded.parts.sequence is not None:
        sharded.parts.sequence.check_was_asked(pipeline.line)
    runner.passes.owes_reductions = True  # what an op has left is found before the step, or the verdict would be early
    return losses


class _StageTrainer:
    """The model's side of pipeline training.

    While the order of units is not known, gradients that ranks keep whole anyway (`ddp`) are accumulated locally, and
    reduced once, in the last backward of each stage; sharded ones are reduced after every backward. The program does
    the same unit by unit.
    """

    def __init__(self, sharded: ShardedModel, parts: Sequence[MicroBatch]) -> None:
        self._sharded = sharded
        self._runner = sharded.parts.runner
        self._parts = parts
        self._micro_batch = 0

    def begin_op(self, op: Op, *, is_last_of_kind: bool) -> None:
        self._micro_batch = op.micro_batch
        self._runner.passes.begin_op(op, is_last=is_last_of_kind)

    def first_half(self, micro_batch: int) -> AbstractContextManager[None]:
        return self._runner.halves.first(micro_batch)

    def backward_of_weights(self, aside: Sequence[Aside]) -> None:
        runner = self._runner
        if self._sharded.progress.scaler is not None:
            runner.passes.note_scaled()
        left: dict[str, list[Aside]] = {}
        for one in aside:
            left.setdefault(runner.halves.unit_of[one.layer.weight], []).append(one)

        def compute(unit: Unit) -> None:
            backward_of_weights(left.pop(unit.name, ()))

        runner.backward_of_weights(compute)
        assert not left, f"gradients of {', '.join(left)} were put aside and not brought"

    def backward(self, loss: Tensor) -> None:
        self._sharded.backward(loss, self._parts[self._micro_batch].weight)

    def backward_through(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        if self._sharded.progress.scaler is not None:
            self._runner.passes.note_scaled()  # the loss was scaled on another stage
        self._runner.backward_through(outputs, gradients)
