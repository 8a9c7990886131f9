"""What the engine does around calls of a model in pipeline stages by a loop of one's own: see
`parallel/pipeline/loop_calls.py`."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import nn

from shardwise.comm import Line
from shardwise.errors import StateError
from shardwise.parallel.pipeline import Pipeline
from shardwise.parallel.pipeline.loop_calls import LoopCalls
from shardwise.program.schedule import Op
from shardwise.runtime.micro_batches import MicroBatch
from shardwise.sharded.sharded_model import ShardedModel

Tensor = torch.Tensor


def answer_calls(sharded: ShardedModel, pipeline: Pipeline) -> None:
    """Let the model be called as an unsplit one is, until its hooks are removed."""
    outputs = sharded.progress.whole_outputs

    def sends_all(trains: bool) -> bool:
        return outputs.in_training if trains else outputs.with_tokens

    calls = LoopCalls(pipeline, _Trainer(sharded), sharded.parts.timeline, sends_all)
    pipeline.staged.take_calls(calls.answer)


class _Trainer:
    """The model's side of calls that are trained."""

    def __init__(self, sharded: ShardedModel) -> None:
        self._sharded = sharded
        self._is_scaled = False
        """Whether the running backward is that of a scaled loss; on every stage the loop scales it."""
        self._num_backwards = 0

    @property
    def num_passes(self) -> int:
        return self._sharded.parts.runner.passes.num_over_calls

    def require_possible(self, called: nn.Module) -> None:
        if self._sharded.parts.sequence is not None and called is not self._sharded.model:
            raise StateError(
                f"{type(called).__name__} is a part of the {type(self._sharded.model).__name__} that is sharded, whose "
                f"calls split sequences along sp. Call that, or leave sp out of the mesh."
            )
        if self._sharded.plan.has_activations_on_disk:
            raise StateError(
                "A model in pipeline stages with activations on a disk cannot be called by itself, because ranks ask "
                "for room before a step. Use engine.train_step(batch), or keep activations elsewhere."
            )

    def note_parts(self, whole: MicroBatch, parts: Sequence[MicroBatch], rows: Sequence[int]) -> None:
        if self._sharded.parts.sequence is not None:
            self._sharded.parts.sequence.note_parts(whole, parts, rows)

    def end_forwards(self, line: Line) -> None:
        self._sharded.parts.runner.end_ops_of_call()
        if self._sharded.parts.sequence is not None:
            self._sharded.parts.sequence.check_was_asked(line)

    def begin_call(self, num: int) -> int:
        if self._are_set_to_none():
            self._sharded.zero_grad()
        return self._sharded.parts.runner.begin_call(num)

    def begin_op(self, op: Op, *, is_last_of_kind: bool) -> None:
        self._sharded.parts.runner.passes.begin_op(op, is_last=is_last_of_kind)

    def begin_backward(self) -> None:
        self._require_unprepared()
        passes = self._sharded.parts.runner.passes
        self._is_scaled = passes.current.is_scaled
        self._num_backwards = passes.num_backwards
        self._sharded.parts.runner.begin_backward_of_call()
        if self._sharded.progress.weighing.current != 1.0 and not passes.current.is_weighed:
            raise StateError(
                "Ranks have different numbers of samples, and a pipeline weighs losses, so each has to be weighed. "
                "Call engine.backward(loss) in the place of loss.backward()."
            )

    def _require_unprepared(self) -> None:
        """Raise where gradients that have been brought to the update would have to be added to. A loop may drop them
        after the forward, as Lightning does, but no later."""
        gradients = self._sharded.parts.gradients
        if self._are_set_to_none():
            gradients.zero()
        elif gradients.exist() and gradients.are_prepared:
            raise StateError(
                "Gradients of a pipeline have been read or clipped, or a step has used them, and can get no more now. "
                "Take the step, and call zero_grad(), before the next backward."
            )

    def _are_set_to_none(self) -> bool:
        """Whether gradients were prepared, and each was set to None since, as `model.zero_grad()` does."""
        gradients, flats = self._sharded.parts.gradients, self._sharded.parts.flats
        is_prepared = gradients.exist() and gradients.are_prepared
        return is_prepared and not any(gradients.has(flat, index) for flat in flats for index in range(len(flat.slots)))

    def backward_through(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        runner = self._sharded.parts.runner
        if self._is_scaled:
            runner.passes.note_scaled()
        runner.backward_through(outputs, gradients)

    def end_call(self) -> None:
        runner = self._sharded.parts.runner
        runner.end_call()
        if self._is_scaled and runner.passes.num_calls:  # the same loss may have come from other calls
            runner.passes.note_scaled()
        runner.passes.num_backwards = self._num_backwards + 1  # for a loop, which counts its own
        runner.passes.owes_reductions = True  # what an op has left is found before the step

    def fail(self) -> None:
        self._sharded.parts.runner.fail_schedule()

    def begin_evaluation_of(self, stage: Hashable) -> None:
        self._sharded.parts.runner.begin_evaluation_of(stage)
