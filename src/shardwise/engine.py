"""`shard` a model by a plan, and train it as before.

`sharded_model.py` takes the steps. The parts of `Engine` are in `engine_training.py` (whole steps with their
micro-batches), `engine_sequences.py`, `engine_reports.py` (reports for people, from `report.py`), `engine_state.py`
(reading, writing and saving the state of a live engine, through `access.py` and `state.py`) and `engine_in_job.py`
(ranks that are lost or join).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from shardwise.checkpoint import Begun, Saver
from shardwise.checkpoint.codec import decode
from shardwise.comm import World
from shardwise.config import Plan, load_plan
from shardwise.data_ranks import DataRanks
from shardwise.engine_state import PlanLike
from shardwise.engine_training import EngineTraining, arrive, open_log, open_session
from shardwise.errors import CommError, ModelError, StateError
from shardwise.init import Init, Wishes, end_recording
from shardwise.mesh import Mesh
from shardwise.pipeline import PLAIN_LOOP
from shardwise.placement import Table
from shardwise.precision import LossScaler, Norm
from shardwise.report import MemoryReport
from shardwise.sharded_model import Progress, ShardedModel, scaler_for
from shardwise.sharding import lay
from shardwise.state import State, unshard
from shardwise.training import inference
from shardwise.units import bytes_of

__all__ = ["Engine", "MemoryReport", "PlanLike", "shard"]

OneOrSeveral = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


def shard(
    model: nn.Module,
    plan: PlanLike = "zero3",
    *,
    optimizer: OneOrSeveral | None = None,
    world: World | None = None,
    device: torch.device | str | None = None,
    weights: str | Path | None = None,
    strict: bool = True,
    init: Init | None = None,
) -> Engine:
    """Put every tensor of `model` and `optimizer` where `plan` says. All ranks call.

    `model` stays the same object, and its parameters keep their names and shapes. `optimizer` stays the user's own
    object: any elementwise one, or one of `shardwise.optim`, over `model.parameters()`; any other where each rank
    updates whole parameters; a list of several, each with parameters of its own, is accepted too. All ranks start from
    rank 0's values. `plan` is a preset's name, a file, a mapping or a `Plan`. `world` defaults to `World.join()`, and
    is then closed with the engine.

    First values are those of the model. If it was built inside `deferred_init()`, or on the meta device, each rank
    makes only its own part (docs/deferred-init.md). `weights` is a safetensors file, or a folder as written by
    `save_pretrained`, of which each rank reads its own part; names must match unless `strict` is false. `init(module)`
    is called to fill the modules of a model on the meta device. `device` defaults to the model's own, and to this
    rank's for a model without values.

    Raises `ConfigError` for a plan that is impossible on this world, and `ModelError` for a model or optimizer that
    cannot be sharded, or for weights of another model; nothing has been changed then. Raises `CheckpointError` for
    files that cannot be read.
    """
    end_recording()
    loaded = load_plan(plan)
    own_world = world is None
    world = World.join() if world is None else world
    wishes = Wishes(
        device=None if device is None else torch.device(device),
        weights=None if weights is None else Path(weights),
        strict=strict,
        init=init,
    )
    try:
        optimizers = _several(optimizer)
        return Engine(model, loaded, optimizers, world, wishes, owns_world=own_world)
    except BaseException as error:
        if own_world:
            world.close(error)
        raise


def _several(optimizer: OneOrSeveral | None) -> tuple[torch.optim.Optimizer, ...]:
    given = () if optimizer is None else optimizer if isinstance(optimizer, list | tuple) else (optimizer,)
    for one in given:
        if not isinstance(one, torch.optim.Optimizer):
            raise ModelError(
                f"optimizer is a {type(one).__name__}, which is not a torch.optim.Optimizer. Give shard() the "
                f"optimizer itself, or a list of several."
            )
    return tuple(given)


class Engine(EngineTraining):
    """A sharded model. Create one with `shard`, and close it, or use it in a `with`."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        optimizers: Sequence[torch.optim.Optimizer],
        world: World,
        wishes: Wishes,
        *,
        owns_world: bool = False,
    ) -> None:
        self.module = model
        self.world = world
        self._owns_world = owns_world
        self._is_open = True
        self._readers = []
        if plan.patience_seconds is not None:
            world.be_patient(plan.patience_seconds)
        self._run_log = open_log(plan, world)
        if world.is_newcomer and world.membership is not None:
            self._arrive(plan, optimizers, world)
            return
        sharding = lay(model, plan, optimizers, world, wishes)
        self._state = State(Saver(world, pinned=sharding.device.type != "cpu"))
        progress = Progress(scaler=scaler_for(sharding.plan), replan=self._replan)
        self._sharded = ShardedModel(model, optimizers, sharding, world, progress, self._before_change)
        self._sharded.runner.step.close_params()
        self._ask_for_room_first()
        if self._run_log is not None:
            self._run_log.follow(self._sharded)
        self._session = open_session(self, self._sharded, world.membership)

    def _arrive(self, plan: Plan, optimizers: Sequence[torch.optim.Optimizer], world: World) -> None:
        """Join ranks that are training already."""
        self._state = State(Saver(world))
        self._sharded, arrival = arrive(self.module, plan, optimizers, world, self._before_change)
        self._sharded.progress.replan = self._replan
        if self._run_log is not None:
            self._run_log.follow(self._sharded)
        self._state.coming = dict(arrival.loop["objects"])
        self._state.begun = None if arrival.loop["begun"] is None else Begun.of(arrival.loop["begun"])
        theirs = arrival.loop["state"]
        self._state.user_state = None if theirs is None else decode(theirs, "state")
        self._session = open_session(self, self._sharded, world.membership, arrival)

    @property
    def plan(self) -> Plan:
        """The plan in effect; `reshard` changes it."""
        return self._sharded.plan

    @property
    def mesh(self) -> Mesh:
        """The ranks as the plan arranges them."""
        return self._sharded.mesh

    @property
    def data_ranks(self) -> tuple[int, int]:
        """(place, number): which share of every batch this rank reads. Use `sw.data.Loader(...,
        world=engine.data_ranks)`.

        Ranks along a model axis of the mesh share a batch, and read the same one. A loader that is given this pair
        follows the engine: it asks again before each batch, and reports how many samples each rank has (`weigh`).
        """
        return DataRanks.of(self.mesh.data_place(self.world.rank), self)

    def weigh(self, samples: int, of: float) -> None:
        """Declare that this rank has `samples` of the `of` samples that all data ranks have in the next micro-batch.

        If ranks have different numbers of samples, gradients, `mean` and `log` are then means over all samples, with
        equal weights. A rank without samples still has to run some batch; its gradients count nothing. A loader made
        with `world=engine.data_ranks` calls this before each batch; the values hold until the next call. If the
        micro-batches of one step differ in size too, `of` is their mean: the samples of the whole step over all ranks,
        divided by the number of micro-batches. Sends nothing.

        Raises `ConfigError` for impossible numbers.
        """
        self._sharded.progress.weighing.say(samples, of, self.mesh.data_place(self.world.rank)[1])
        self._sharded.weigh()

    @property
    def table(self) -> Table:
        """Where the four kinds of tensor live; rules of the plan may place some parameters differently."""
        return self._sharded.table

    @property
    def num_steps(self) -> int:
        """Optimizer steps taken, including those before a resume."""
        return self._sharded.progress.num_steps if self._session is None else self._session.num_steps

    @num_steps.setter
    def num_steps(self, number: int) -> None:
        self._sharded.progress.num_steps = number

    @property
    def num_void(self) -> int:
        """How many steps were abandoned because a rank was lost; a loader hands out their batches again."""
        return self._sharded.progress.num_void

    @property
    def gradient_norm(self) -> float | None:
        """The global 2-norm of the last step's gradients before clipping; not finite if they overflowed and no step was
        taken.

        `None` before the first step. On a GPU, reading it waits for the device.
        """
        norm = self._sharded.progress.gradient_norm
        return None if norm is None else float(norm)

    @property
    def scaler(self) -> LossScaler | None:
        """The loss scale of fp16; `None` in other precisions."""
        return self._sharded.progress.scaler

    # -- training ---------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward, like `model(...)`."""
        self._require_open()
        return self.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor) -> None:
        """Compute gradients of `loss`, a scalar on every rank, averaged over ranks and over the plan's `accumulate`.
        (`loss.backward()` averages over ranks; a loop that accumulates with it divides the loss, as in plain PyTorch.)
        All ranks call. Raises `StateError` for a model in pipeline stages, which takes `train_step`."""
        self._require_open()
        if self._sharded.pipeline is not None:
            raise StateError(PLAIN_LOOP)
        (self._sharded if self._session is None else self._session).backward(loss)

    def divide_every_backward(self) -> None:
        """From now on divide the gradients of every backward by the plan's `accumulate`, also those of
        `loss.backward()`, which otherwise a loop divides. For loops written for DeepSpeed, which does so. All ranks
        call, before the first backward."""
        self._require_open()
        self._sharded.divide_arriving()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """`loss` times the current loss scale: for a plain loop in fp16, `engine.scale(loss).backward()`.

        In other precisions it is `loss` itself. The step divides the gradients by the scale again.
        """
        self._require_open()
        return self._sharded.scale(loss)

    def step(self, *, is_last: bool | None = None) -> Norm | None:
        """End a micro-batch; after the last one of a step clip if the plan says so, update, and drop the gradients. All
        ranks call.

        The plan's `accumulate`-th call is the last one; `is_last` says otherwise, for steps with fewer micro-batches,
        such as an epoch's last, or more; `backward` divides losses by `accumulate` all the same. However often backward
        is called in a micro-batch, it is this call that ends it.

        Returns the global gradient norm before clipping, or `None` if more micro-batches are to come, so that nothing
        was updated. In fp16, and with `skip_nonfinite` in the plan, the norm is not finite (inf or nan) if a gradient
        was not on some rank: no rank has updated anything then, and in fp16 the loss scale may have been halved. On a
        GPU the norm waits for the device only when it is read (`float(norm)`, `f"{norm:.2f}"`, a comparison); where it
        decides on the step, and on a CPU, it is a float.

        Raises `StateError` without an optimizer, or after a backward that raised.
        """
        self._require_open()
        return (self._sharded if self._session is None else self._session).step(is_last)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Norm:
        """Scale gradients to a global norm of at most `max_norm`; returns the norm before. All ranks call.

        For a plain loop, between `loss.backward()` and `optimizer.step()`. A plan with `clip_grad_norm` does this
        automatically, with the 2-norm. `norm_type` may be any positive number, or `inf`.
        """
        self._require_open()
        if self._session is not None:
            return self._session.clip(max_norm, norm_type)
        return self._sharded.gradients.clip(max_norm, norm_type)

    def zero_grad(self) -> None:
        """Drop all gradients. A step drops them too; this is for gradients that are not to be used. All ranks call."""
        self._sharded.zero_grad()

    # -- gradients that wait -----------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backwards leave gradients on the rank that made them; the next one outside, or the step, sums all.
        All ranks enter.

        Saves communication while gradients are accumulated, and takes the memory of whole gradients, as DDP does. For
        the same at every step: `rows: {grad: {partial: [...]}}` in the plan.
        """
        self._require_open()
        passes = self._sharded.runner.passes
        before, passes.reduces = passes.reduces, False
        try:
            yield
        finally:
            passes.reduces = before

    # -- agreement between ranks ------------------------------------------------------------------------

    def any_rank(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank, the same on all: how ranks decide to stop together. All ranks call."""
        if self._session is not None and self._session.is_arriving:
            return False  # the others have asked already, and gone on
        return self._asking(lambda: self.world.any_rank(flag))

    def mean(self, value: float) -> float:
        """The mean of every rank's `value`, such as a loss to print, the same on all ranks. All ranks call.

        If ranks have different numbers of samples (`weigh`), it is the mean over all samples of the last batch.
        """
        if self._session is not None and self._session.is_arriving:
            return value
        weighing = self._sharded.progress.weighing
        return self._asking(lambda: self.world.mean(value, weighing.reported if weighing.is_used else None))

    def inference(self, keep_bytes: int | str | None = None) -> AbstractContextManager[None]:
        """Inside `with`, each rank runs the model at its own pace, without gradients: `module.generate()`, any method.

        All ranks enter and leave; in between prompts, lengths and the number of calls may differ from rank to rank.
        Parameters are whole inside, in the dtype of the forward, and nothing is sent. With `keep_bytes` (`"2GiB"`, 0)
        only as many units as fit are kept whole; the others are gathered when any rank needs one, which takes as many
        messages as a forward has such units, and the memory of two of them. Ranks of one pipeline make the same calls
        of the model itself, and each gets its output (docs/pipeline.md).

        Raises `ConfigError` for `keep_bytes` that is no number of bytes, and `StateError` inside another `inference`,
        between a forward and its backward, or if ranks with the same pipeline stages have to gather parameters and
        give different `keep_bytes`.
        """
        self._require_open()
        num_bytes = None if keep_bytes is None else bytes_of("keep_bytes of inference()", keep_bytes)
        return inference(self._sharded, num_bytes)

    # -- as an object -----------------------------------------------------------------------------------

    def __repr__(self) -> str:
        state = "open" if self._is_open else "closed"
        return f"<Engine: {type(self.module).__name__}, {self.plan.preset} on {self.mesh}, {state}>"

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise StateError(
            "An engine cannot be copied: it owns its model's memory and its place among the ranks. "
            "Copy the values with engine.state_dict(), or the model before it is sharded."
        )

    def __reduce__(self) -> NoReturn:
        raise StateError("An engine cannot be pickled. Write a checkpoint with engine.save(folder).")

    # -- the end ----------------------------------------------------------------------------------------

    def unshard(self) -> None:
        """Close the engine, and leave a plain model: parameters whole on every rank, modules as before `shard`.

        Parameters are in the precision in which the optimizer keeps them, fp32 by default; gradients and optimizer
        states are dropped. All ranks call, between steps, and each needs memory for the whole model. Raises
        `StateError` in a pipeline.
        """
        self._require_open()
        self._sharded.refuse_stages("unshard()", "Save, then run: shardwise convert CHECKPOINT MODEL --to hf.")
        unshard(self._sharded)
        self.close()

    def close(self, error: BaseException | None = None) -> None:
        """Unhook from model and optimizer. May be called twice. The model's parameters are no longer whole.

        Waits for a checkpoint that is still being written, and raises its error if it failed. With an `error`, as after
        an exception inside `with`, the other ranks raise too, and name it. All ranks call.
        """
        if not self._is_open:
            return
        self._is_open = False
        try:
            self._state.close(self.world.rank)
            if error is None and not self._sharded.is_taken_down:
                # in a job that can lose ranks, one that is lost here has the others end: this rank needs nothing more
                with suppress(*(() if self._session is None else (CommError,))):
                    self._sharded.runner.gathering.finish_updates()
        finally:
            if self._run_log is not None:
                self._run_log.close(error)
            if self._session is not None:
                self._session.close(error)
            self._sharded.unhook()
            if self._sharded.disk is not None:
                self._sharded.disk.close()
            if self._owns_world:
                self.world.close(error)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close(error)
