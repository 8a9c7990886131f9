"""The part of a training step between two updates: micro-batches forward and backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from shardwise.errors import StateError
from shardwise.micro_batches import LossFunction, MicroBatch, mean_loss, micro_batches
from shardwise.pipeline import Aside, Pipeline, backward_of_weights
from shardwise.program.schedule import Op
from shardwise.sharded_model import ShardedModel
from shardwise.storage import Unit
from shardwise.tensor import AXIS as TENSOR_AXIS
from shardwise.tensor import Generators
from shardwise.tensor.forwards import whole_sequences

Tensor = torch.Tensor


def forward_backward(sharded: ShardedModel, batch: Any, target: Any, loss_fn: LossFunction | None) -> Tensor:
    """See `Engine.forward_backward`."""
    require_whole_step(sharded)
    parts = micro_batches(batch, target, sharded.plan.accumulate, sharded.progress.weighing)
    if sharded.sequence is not None:
        sharded.sequence.note_micro_batches(batch, parts)
    if sharded.pipeline is not None:
        return _through_stages(sharded, sharded.pipeline, parts, loss_fn)
    mean = mean_loss([_trained(sharded, part, loss_fn) for part in parts], parts)
    sharded.progress.micro_steps.are_all_run = True
    return mean


def require_whole_step(sharded: ShardedModel) -> None:
    """Raise `StateError` between the micro-batches of a loop."""
    if sharded.is_between_micro_batches:
        raise StateError(
            "train_step() runs all micro-batches of a step, but engine.backward() has been called for some of this one "
            "already. Finish those and call engine.step(), or forget them with engine.zero_grad()."
        )


def _through_stages(
    sharded: ShardedModel, pipeline: Pipeline, parts: list[MicroBatch], loss_fn: LossFunction | None
) -> Tensor:
    if sharded.gradients.exist() and sharded.gradients.are_prepared:
        raise StateError(
            "Gradients of a pipeline have been read or clipped, and can get no more now. Take the step, or call "
            "engine.zero_grad(), before the next forward_backward()."
        )
    if sharded.plan.has_activations_on_disk:
        from shardwise.activation_room import ask_before_first_step  # only these jobs load it

        ask_before_first_step(sharded, parts[0], loss_fn)
    runner = sharded.runner
    with runner.over_schedule():
        mean = pipeline.train(parts, loss_fn, _StageTrainer(sharded, parts), sharded.timeline)
    if sharded.sequence is not None:
        sharded.sequence.check_was_asked(pipeline.line)
    runner.passes.owes_reductions = True  # what an op has left is found before the step, or the verdict would be early
    sharded.progress.micro_steps.are_all_run = True
    return mean


class _StageTrainer:
    """The model's side of pipeline training.

    While the order of units is not known, gradients that ranks keep whole anyway (`ddp`) are accumulated locally, and
    reduced once, in the last backward of each stage; sharded ones are reduced after every backward. The program does
    the same unit by unit.
    """

    def __init__(self, sharded: ShardedModel, parts: Sequence[MicroBatch]) -> None:
        self._sharded = sharded
        self._parts = parts
        self._micro_batch = 0
        self._reduces = sharded.runner.passes.reduces
        self._reduces_each = bool(sharded.table.grad.shard)

    def begin_op(self, op: Op, *, is_last_of_kind: bool) -> None:
        self._micro_batch = op.micro_batch
        reduces = self._reduces and op.kind != "F" and (self._reduces_each or is_last_of_kind)
        self._sharded.runner.passes.begin_op(op, reduces=reduces)

    def first_half(self, micro_batch: int) -> AbstractContextManager[None]:
        return self._sharded.runner.halves.first(micro_batch)

    def backward_of_weights(self, aside: Sequence[Aside]) -> None:
        runner = self._sharded.runner
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
        runner = self._sharded.runner
        if self._sharded.progress.scaler is not None:
            runner.passes.note_scaled()  # the loss was scaled on another stage
        pairs = [pair for pair in zip(outputs, gradients, strict=True) if pair[0].requires_grad]
        if pairs:
            torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
        else:  # nothing of this stage is trained, but it still counts as a backward
            runner.end_of_backward()


def evaluate(sharded: ShardedModel, batch: Any, target: Any, loss_fn: LossFunction | None) -> Tensor:
    """See `Engine.eval_step`."""
    with torch.no_grad():
        parts = micro_batches(batch, target, sharded.plan.accumulate, sharded.progress.weighing)
        if sharded.sequence is not None:
            sharded.sequence.note_micro_batches(batch, parts)
        if sharded.pipeline is not None:
            return sharded.pipeline.evaluate(parts, loss_fn, sharded.runner.begin_evaluation_of)
        return mean_loss([part.loss(sharded.model(*part.args, **part.kwargs), loss_fn) for part in parts], parts)


def inference(sharded: ShardedModel, keep_bytes: int | None) -> AbstractContextManager[None]:
    """See `Engine.inference`."""
    if sharded.pipeline is None:
        return _inference_of_all_layers(sharded, keep_bytes)
    from shardwise.inference_in_stages import inference_in_stages  # only ranks with a pipeline load it

    return inference_in_stages(sharded, sharded.pipeline, keep_bytes)


@contextmanager
def _inference_of_all_layers(sharded: ShardedModel, keep_bytes: int | None) -> Iterator[None]:
    """Inference without a pipeline. If layers are split, the ranks that have their parts go on with the random numbers
    of the first, or they would sample different tokens."""
    with sharded.inference(keep_bytes), whole_sequences([sharded.model]):
        if TENSOR_AXIS in sharded.mesh.model_axes:
            group = sharded.world.group(sharded.mesh, TENSOR_AXIS)
            Generators(sharded.world.rank_device, group.index).synchronize(sharded.world, group)
        yield


def _trained(sharded: ShardedModel, part: MicroBatch, loss_fn: LossFunction | None) -> Tensor:
    loss = part.loss(sharded.model(*part.args, **part.kwargs), loss_fn)
    sharded.backward(loss, part.weight)
    return loss.detach()
