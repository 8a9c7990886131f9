"""Training steps as a loop calls for them: micro-batches forward and backward, with or without a pipeline, and the
update. Evaluation and inference, which have no update."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from shardwise.errors import StateError, TierError
from shardwise.optim.precision import Norm
from shardwise.plan import Plan
from shardwise.plan.mesh import TENSOR_AXIS
from shardwise.runtime import argument_tensors, keeps_all
from shardwise.runtime.activations import Treatments
from shardwise.runtime.micro_batches import LossFunction, MicroBatch, mean_loss, micro_batches
from shardwise.sharded.sharded_model import ShardedModel
from shardwise.sharded.state import reshard

if TYPE_CHECKING:
    from shardwise.checkpoint import Loaded
    from shardwise.parallel.sequence import SequenceParallel

T = TypeVar("T")
Tensor = torch.Tensor


class Session:
    """What the calls of a loop come to, on one rank: whole steps, and the parts of steps that loops call themselves.

    This one is for jobs that end when a rank is lost: nothing is caught, and each step counts. That of a job whose
    ranks may be lost or join has the same methods: `elastic/session.py`.
    """

    is_arriving = False
    """Whether this rank has joined others, and not begun a step yet: they have made the exchanges of this part of the
    loop before, and nobody answers it."""

    def __init__(self, sharded: ShardedModel) -> None:
        self.sharded = sharded
        """The model under its present plan, in the present world."""
        self.loaders_of_others: dict[int, Any] = {}
        """Where the loaders of those ranks are that this one has joined, by number; `None` where one has gone there."""
        self._batches_seen: set[Hashable] = set()
        """The sizes of batches that were split into micro-batches."""
        self._answer_calls()

    def _answer_calls(self) -> None:
        """Let a model in stages be called by a loop of one's own."""
        if self.sharded.parts.pipeline is not None:
            from shardwise.sharded.staged_calls import answer_calls  # only ranks with a pipeline load it

            answer_calls(self.sharded, self.sharded.parts.pipeline)

    @property
    def num_steps(self) -> int:
        """See `Engine.num_steps`."""
        return self.sharded.progress.num_steps

    @property
    def num_void(self) -> int:
        """See `Engine.num_void`."""
        return self.sharded.progress.num_void

    @property
    def sequence(self) -> SequenceParallel | None:
        """By which the loop's present batch is divided along `sp`, if it is."""
        return self.sharded.parts.sequence

    def inference(self, keep_bytes: int | None) -> AbstractContextManager[None]:
        """See `Engine.inference`."""
        return inference(self.sharded, keep_bytes)

    def changing(self) -> AbstractContextManager[None]:
        """Inside, all ranks change parameters or states together."""
        return nullcontext()

    def was_void(self) -> bool:
        """Whether the last step was abandoned because a rank was lost."""
        return False

    # -- steps ----------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, weight: float | None = None) -> None:
        """`weight` overrides that of this micro-batch: see `ShardedModel.backward`."""
        self.sharded.backward(loss, weight)

    def step(self, is_last: bool | None = None) -> Norm | None:
        """See `Engine.step`."""
        return self.sharded.step(is_last)

    def clip(self, max_norm: float, norm_type: float) -> Norm:
        """See `Engine.clip_grad_norm_`."""
        return self.sharded.parts.gradients.clip(max_norm, norm_type)

    def train(self, batch: Any, target: Any, loss_fn: LossFunction | None) -> Tensor:
        """See `Engine.train_step`."""
        loss = self.forward_backward(batch, target, loss_fn)
        self.step()
        return loss

    def forward_backward(
        self, batch: Any, target: Any, loss_fn: LossFunction | None, compute: Callable[[Any], Tensor] | None = None
    ) -> Tensor:
        """See `Engine.forward_backward`."""
        self._plan_memory()
        sharded = self.sharded
        _require_whole_step(sharded)
        names = () if sharded.parts.pipeline is None else sharded.parts.pipeline.argument_names
        parts = micro_batches(batch, target, sharded.plan.accumulate, sharded.progress.weighing, names)
        self._require_by_samples(batch, parts)
        if compute is not None:
            _require_computable(sharded)
            parts = [replace(part, compute=compute) for part in parts]
        self._before_micro_batches(parts)
        if sharded.recomputes:
            self._verify_gradients(parts[0], loss_fn)
            sharded = self.sharded  # others may have been lost meanwhile
        if self.sequence is not None:
            self.sequence.note_micro_batches(batch, parts)
        if sharded.parts.pipeline is not None:
            from shardwise.sharded.staged_steps import through_stages  # only ranks with a pipeline load it

            losses = through_stages(sharded, sharded.parts.pipeline, parts, loss_fn)
        else:
            losses = [self._trained(part, loss_fn) for part in parts]
        sharded.progress.micro_steps.are_all_run = True
        sharded.progress.note_losses(losses, tuple(part.rows for part in parts if part.rows is not None))
        return mean_loss(losses, parts)

    def _require_by_samples(self, batch: Any, parts: Sequence[MicroBatch]) -> None:
        """Raise `ConfigError` if `parts` have cut what is every sample's."""
        rows = [one.shape[0] for one in argument_tensors(batch) if one.dim()]
        if len(parts) < 2 or isinstance(batch, list | Iterator) or len(rows) < 2:
            return
        form = tuple((tuple(one.shape), one.dtype) for one in argument_tensors(batch))
        if form not in self._batches_seen:
            self._batches_seen.add(form)
            from shardwise.sharded.side_inputs import require_by_samples  # only batches of several tensors ask

            require_by_samples(self.sharded, batch, rows[0], rows[0] // len(parts))

    def _verify_gradients(self, first: MicroBatch, loss_fn: LossFunction | None) -> None:
        from shardwise.sharded.recomputation import verify_gradients  # only plans that say so load it

        verify_gradients(self.sharded, first, loss_fn)
        self.sharded.has_recomputed = True

    def _before_micro_batches(self, parts: Sequence[MicroBatch]) -> None:
        """Those of a step are known."""

    def _mean(self, losses: list[Tensor], parts: list[MicroBatch]) -> Tensor:
        """Of the micro-batches of a step, which are remembered."""
        self.sharded.progress.losses = tuple(loss.reshape(()) for loss in losses)
        return mean_loss(losses, parts)

    def evaluate(self, batch: Any, target: Any, loss_fn: LossFunction | None) -> Tensor:
        """See `Engine.eval_step`."""
        sharded = self.sharded
        with torch.no_grad():
            parts = micro_batches(batch, target, sharded.plan.accumulate, sharded.progress.weighing)
            if self.sequence is not None:
                self.sequence.note_micro_batches(batch, parts)
            if sharded.parts.pipeline is not None:
                begin = sharded.parts.runner.begin_evaluation_of
                return self._mean(sharded.parts.pipeline.evaluate(parts, loss_fn, begin), parts)
            return self._mean([part.loss(sharded.model(*part.args, **part.kwargs), loss_fn) for part in parts], parts)

    def _trained(self, part: MicroBatch, loss_fn: LossFunction | None) -> Tensor:
        loss = part.loss_by(self.sharded.model, loss_fn)
        self.backward(loss, part.weight)
        return loss.detach()

    def _plan_memory(self) -> None:
        """Before the first forward of a step: see [Note: unfrozen later] in `sharded/unfreezing.py`."""
        self.sharded.progress.replan()

    def splitting(self, split: Callable[[], T]) -> T:
        """The result of `split`, which divides the batch of a forward to come among ranks that compare it."""
        return split()

    def computing(self, work: Callable[[], T]) -> T:
        """The result of `work`, which computes a loss from what forwards have returned, also with other ranks."""
        return work()

    def in_iteration(
        self,
        work: Callable[[], T],
        *,
        void: Callable[[], T],  # noqa: ARG002
        alone: Callable[[], T] | None = None,  # noqa: ARG002
        is_small: bool = True,  # noqa: ARG002
    ) -> T:
        """The result of `work`, which needs what other ranks have in this iteration: a sum for such a loss, a gradient.
        That of `void` where none is to be had. Between two steps see `asking`, where `alone` is that of `void` if it is
        not given."""
        return work()

    # -- between steps --------------------------------------------------------------------------------------

    def asking(
        self,
        work: Callable[[], T],
        *,
        alone: Callable[[], T] | None = None,  # noqa: ARG002  # here and below: for jobs that may lose ranks
        is_small: bool = True,  # noqa: ARG002
    ) -> T:
        """The result of `work`, an exchange between ranks outside of a step.

        `alone` is called instead on a rank that is arriving. A result that `is_small` can be sent again to a rank that
        a fault has kept from it.
        """
        return work()

    def leaves_out(self, change: str) -> bool:  # noqa: ARG002
        """Whether a `change` by hand has no effect at present: see [Note: changes after a void step] in
        `elastic/session.py`."""
        return False

    def before_change(self) -> None:
        """The loop is about to change parameters or states by hand, on all ranks."""

    def resume(self, folder: Path, read: Callable[[], Loaded | None]) -> Loaded | None:  # noqa: ARG002
        """See `Engine.resume`. `read` fills this rank from a checkpoint in `folder`, if there is one."""
        return read()

    def reshard(self, plan: Plan) -> TierError | None:
        """See `Engine.reshard`. Returns what it is to raise then, in effect as the new plan is. All ranks call."""
        self.sharded, lost = reshard(self.sharded, plan)
        return lost

    def treat(self, plan: Plan, treatments: Treatments) -> None:
        """See `ShardedModel.treat`. All ranks call."""
        self.sharded.treat(plan, treatments)

    # -- what it costs, and the end -------------------------------------------------------------------------

    @property
    def bytes_for_survival(self) -> tuple[int, int, int]:
        """Of images of this rank's state, of copies that it keeps for others, and of both on its disk."""
        return 0, 0, 0

    @property
    def cost_of_copies(self) -> dict[str, float]:
        """See `Engine.copies`."""
        return {}

    def finish_updates(self) -> None:
        """Wait until this rank has what others have updated last, and what other islands have sent."""
        self.sharded.settle_islands()
        self.sharded.parts.runner.gathering.finish_updates()

    def close(self, error: BaseException | None = None) -> None:
        """The loop has come to its end, or to `error`."""


def _require_whole_step(sharded: ShardedModel) -> None:
    if sharded.is_between_micro_batches:
        raise StateError(
            "train_step() runs all micro-batches of a step, but engine.backward() has been called for some of this one "
            "already. Finish those and call engine.step(), or forget them with engine.zero_grad()."
        )


def _require_computable(sharded: ShardedModel) -> None:
    """Raise `StateError` for plans under which a loss cannot come from `compute_loss`."""
    if sharded.plan.verify.gradients is not None:
        raise StateError(
            "verify.gradients sends micro-batches to other ranks, which have no compute_loss for them. Give "
            "forward_backward() a loss_fn, or leave verify.gradients out of the plan."
        )
    if sharded.parts.pipeline is not None and sharded.plan.has_activations_on_disk:
        raise StateError(
            "Pipeline stages with activations on a disk rehearse a step before the first, for which compute_loss says "
            "too little. Give forward_backward() a loss_fn, or keep activations elsewhere."
        )


def inference(sharded: ShardedModel, keep_bytes: int | None) -> AbstractContextManager[None]:
    """See `Engine.inference`."""
    if sharded.parts.pipeline is None:
        return _inference_of_all_layers(sharded, keep_bytes)
    from shardwise.sharded.inference_in_stages import inference_in_stages  # only ranks with a pipeline load it

    return inference_in_stages(sharded, sharded.parts.pipeline, keep_bytes)


@contextmanager
def _inference_of_all_layers(sharded: ShardedModel, keep_bytes: int | None) -> Iterator[None]:
    """Inference without a pipeline. If layers are split, the ranks that have their parts go on with the random numbers
    of the first, or they would sample different tokens."""
    from shardwise.parallel.tensor import Generators  # here: only to generate
    from shardwise.parallel.tensor.forwards import whole_sequences
    from shardwise.sharded.inference_checks import paged_caches_refused, require_same_budget

    if not keeps_all(sharded.parts.runner.units, 0):
        told = sharded.world.exchange(json.dumps(keep_bytes).encode(), "inference")
        require_same_budget(dict(enumerate(map(json.loads, told))))
    with ExitStack() as stack:
        stack.enter_context(sharded.inference(keep_bytes))
        stack.enter_context(whole_sequences([sharded.model]))
        if TENSOR_AXIS in sharded.mesh.model_axes:
            group = sharded.world.group(sharded.mesh, TENSOR_AXIS)
            Generators(sharded.world.rank_device, group.index).synchronize(sharded.world, group)
            stack.enter_context(paged_caches_refused(sharded.model, TENSOR_AXIS))
        yield
