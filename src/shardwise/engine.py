"""`shard` a model by a plan, and train it as before.

`Engine` is what a user holds. It checks its calls, and leaves the work to what knows how: steps to
`sharded/sharded_model.py` and `sharded/training.py`, checkpoints and changes of plan to `sharded/state.py`, whole
tensors to `sharded/access.py`, reports for people to `sharded/engine_report.py`, the log of a run to
`observe/run_log.py`, and lost ranks to `elastic/`.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from torch import nn

from shardwise.checkpoint import Begun, Keep, Saver, encode, formats, step_name
from shardwise.checkpoint.json_codec import decode
from shardwise.comm import World
from shardwise.comm.line import LEDGER_OF_COPIES
from shardwise.errors import CommError, ConfigError, ModelError, StateError
from shardwise.init import Init, Wishes, end_recording
from shardwise.optim.precision import LossScaler, Norm
from shardwise.parallel.experts import EXPERT_LOAD
from shardwise.plan import Plan, Profile, Search, load_plan
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import Table
from shardwise.program import Footprint, render
from shardwise.runtime import bytes_inside
from shardwise.runtime.micro_batches import LossFunction
from shardwise.sharded.access import refuse_to_arriving
from shardwise.sharded.engine_report import MemoryReport, describe, memory_of, rehearsed, write_timeline
from shardwise.sharded.sharded_model import Progress, ShardedModel, scaler_for
from shardwise.sharded.sharding import lay
from shardwise.sharded.state import (
    State,
    content,
    gradients_aside,
    put_gradients,
    trained_as_before,
    unshard,
)
from shardwise.sharded.training import Session
from shardwise.system.data_ranks import DataRanks, Reader
from shardwise.system.flags import require_flag, takes_flags
from shardwise.system.named_folder import given_folder
from shardwise.system.units import bytes_of

if TYPE_CHECKING:
    from shardwise.checkpoint import Loaded, Stateful
    from shardwise.checkpoint.published import Published
    from shardwise.checkpoint.publishing import Publisher
    from shardwise.elastic.arrival import Arrival
    from shardwise.observe.mismatch import Mismatch
    from shardwise.observe.run_log import RunLog
    from shardwise.runtime.rehearsal import Loss
    from shardwise.sharded.weights import Names, WeightStream

__all__ = ["Engine", "MemoryReport", "PlanLike", "choose_plan", "shard"]

_log = logging.getLogger("shardwise")

PlanLike = Plan | str | Path | Mapping[str, Any]
OneOrSeveral = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
_FILE_BYTES = 5 * 2**30
PROFILE_VARIABLE = "SHARDWISE_PROFILE"


@takes_flags
def shard(  # noqa: PLR0913  # one for each thing that a job may bring
    model: nn.Module,
    plan: PlanLike = "zero3",
    *,
    optimizer: OneOrSeveral | None = None,
    world: World | None = None,
    device: torch.device | str | None = None,
    weights: str | Path | None = None,
    strict: bool = True,
    init: Init | None = None,
    batch: object = None,
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

    With the plan "auto" (docs/auto.md) the preset, tiers and the treatment of activations are chosen: the fastest
    that fits the devices, or the plan's `budget`. `batch` is then one micro-batch of a rank, as the model is called
    with it, of which only shapes matter.

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
        _require_model(model)
        optimizers = _several(optimizer)
        loaded = _settled(model, loaded, optimizers, world, wishes, batch)
        return Engine(model, loaded, optimizers, world, wishes, owns_world=own_world)
    except BaseException as error:
        if isinstance(error, CommError) and world.membership is not None:
            from shardwise.elastic.survivable import IN_SHARD, give_up  # only these jobs load it

            give_up(error, world, IN_SHARD)
        if own_world:
            world.close(error)
        raise


@takes_flags
def choose_plan(
    model: nn.Module,
    plan: PlanLike = "auto",
    *,
    batch: object,
    optimizer: OneOrSeveral | None = None,
    world: World,
    device: torch.device | str | None = None,
    as_call: bool = False,
) -> Plan:
    """The plan that `shard` would take for `plan` with its preset "auto", and the same arguments; any other is returned
    as it is. Changes nothing. All ranks call, and get the same; rank 0 logs why. Raises as `shard` does.

    `shard` foresees the schedule of `engine.train_step` where the plan has pipeline stages. With `as_call` it is a loop
    of one's own that is foreseen, which calls the model with `batch`. Without stages it changes nothing.
    """
    end_recording()
    _require_model(model)
    wishes = Wishes(device=None if device is None else torch.device(device))
    return _settled(model, load_plan(plan), _several(optimizer), world, wishes, batch, as_call=as_call)


def _settled(
    model: nn.Module,
    plan: Plan,
    optimizers: Sequence[torch.optim.Optimizer],
    world: World,
    wishes: Wishes,
    batch: object,
    *,
    as_call: bool = False,
) -> Plan:
    """`plan`, or what its preset "auto" stands for. A rank that joins others takes theirs."""
    if plan.preset != "auto" and plan.search != Search():
        raise ConfigError(
            f"search is given, but the preset is {plan.preset}, so nothing is searched for. Say what it might choose, "
            f"as in precision: bf16 and wire: {{grad: int8}}, or take preset: auto."
        )
    if plan.preset != "auto" or (world.is_newcomer and world.membership is not None):
        return plan
    from shardwise.sharded.auto import settled  # only these jobs load the planner

    return settled(model, plan, optimizers, world, wishes, batch, as_call=as_call)


def _require_model(model: object) -> None:
    if isinstance(model, nn.Module):
        return
    if isinstance(model, type):
        raise ModelError(f"The model is the class {model.__name__}; give shard() an instance of it.")
    raise ModelError(
        f"The model is a {type(model).__name__}, not an nn.Module. Several models need an engine each, or one "
        f"nn.Module around them, such as an nn.ModuleDict."
    )


def _several(optimizer: OneOrSeveral | None) -> tuple[torch.optim.Optimizer, ...]:
    given = () if optimizer is None else optimizer if isinstance(optimizer, list | tuple) else (optimizer,)
    for one in given:
        if not isinstance(one, torch.optim.Optimizer):
            raise ModelError(
                f"optimizer is a {type(one).__name__}, which is not a torch.optim.Optimizer. Give shard() the "
                f"optimizer itself, or a list of several."
            )
    return tuple(given)


class Engine:
    """A sharded model. Create one with `shard`, and close it, or use it in a `with`.

    What it is: `plan`, `mesh`, `table`, `data_ranks`, `num_steps`, `program()`, `print(engine)`.

    A loop of one's own: call the engine or the model, then `backward` and `step`; `no_sync`, `scale`,
    `clip_grad_norm_`, `zero_grad` and `weigh` where plain PyTorch has them or sums differ. `loss.backward()` and
    `optimizer.step()` do as well.

    Whole steps, pipelines included: `train_step`, `forward_backward`, `eval_step`.

    Between steps: `any_rank`, `mean`, `log`; `inference()` to generate.

    Checkpoints: `save`, `resume`, `remember`; `save_pretrained` for other libraries.

    For samplers: `publish`, `weights`; `mismatch` says how far they are from the trainer.

    Whole tensors of a model in pieces: `get`, `set`, `gathered`, `state_dict`, `load_state_dict` and those of the
    optimizer.

    Sequences over several ranks: `split_sequence`, `join_sequence`, `mean_over_tokens`.

    Memory and time: `memory`, `rehearse`, `fit_activations`, `timeline`.

    Another plan, while it trains: `reshard`. The end: `unshard`, `close`.
    """

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
        self._host = EngineHost(self)
        if plan.patience_seconds is not None:
            world.be_patient(plan.patience_seconds)
        self._run_log = _open_log(plan, world)
        if world.is_newcomer and world.membership is not None:
            self._arrive(plan, optimizers, world)
            return
        sharding = lay(model, plan, optimizers, world, wishes)
        self._state = State(Saver(world, pinned=sharding.device.type != "cpu"))
        progress = Progress(scaler=scaler_for(sharding.plan), replan=self._replan)
        sharded = ShardedModel(model, optimizers, sharding, world, progress, self._before_change)
        sharded.parts.runner.step.take_first_values()
        _ask_for_room_first(sharded)
        if self._run_log is not None:
            self._run_log.follow(sharded)
        self._session = _session_for(self._host, sharded)

    def _arrive(self, plan: Plan, optimizers: Sequence[torch.optim.Optimizer], world: World) -> None:
        """Join ranks that are training already."""
        from shardwise.elastic.arrival import arrive  # only these jobs load it

        self._state = State(Saver(world))
        sharded, arrival = arrive(self.module, plan, optimizers, world, self._before_change)
        sharded.progress.replan = self._replan
        _ask_for_room_first(sharded)
        if self._run_log is not None:
            self._run_log.follow(sharded)
        self._host.receive(arrival)
        self._session = _session_for(self._host, sharded, arrival)

    @property
    def _sharded(self) -> ShardedModel:
        """The model under the present plan, in the present world."""
        return self._session.sharded

    # -- what it is ---------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan in effect; `reshard` changes it."""
        return self._sharded.plan

    @property
    def mesh(self) -> Mesh:
        """The ranks as the plan arranges them."""
        return self._sharded.mesh

    @property
    def table(self) -> Table:
        """Where the four kinds of tensor live; rules of the plan may place some parameters differently."""
        return self._sharded.table

    @property
    def data_ranks(self) -> tuple[int, int]:
        """(place, number): which share of every batch this rank reads. Use `sw.data.Loader(...,
        world=engine.data_ranks)`.

        Ranks along a model axis of the mesh share a batch, and read the same one. A loader that is given this pair
        follows the engine: it asks again before each batch, and reports how many samples each rank has (`weigh`).
        """
        return DataRanks.of(self.mesh.data_place(self.world.rank), self._host)

    @property
    def num_steps(self) -> int:
        """Optimizer steps taken, including those before a resume."""
        return self._session.num_steps

    @num_steps.setter
    def num_steps(self, number: int) -> None:
        self._sharded.progress.num_steps = number

    @property
    def num_void(self) -> int:
        """How many steps were abandoned because a rank was lost; a loader hands out their batches again."""
        return self._session.num_void

    @property
    def gradient_norm(self) -> float | None:
        """The global 2-norm of the last step's gradients before clipping; not finite if they overflowed and no step was
        taken.

        `None` before the first step. On a GPU, reading it waits for the device.
        """
        norm = self._sharded.progress.gradient_norm
        return None if norm is None else float(norm)

    @property
    def losses(self) -> tuple[torch.Tensor, ...]:
        """The losses of the micro-batches of the last `train_step`, `forward_backward` or `eval_step`, in order:
        detached scalars, under a pipeline the same on all its stages. Losses that a loop computes are not among them.
        """
        return self._sharded.progress.losses

    @property
    def scaler(self) -> LossScaler | None:
        """The loss scale of fp16; `None` in other precisions."""
        return self._sharded.progress.scaler

    def program(self) -> str:
        """The program of one step as text: as planned before the first step, as recorded after it."""
        program = self._sharded.parts.runner.programs.program
        return render(program.micro_batch) + render(program.step)

    def __str__(self) -> str:
        """The table, the units, and the bytes of this rank."""
        return describe(self._sharded)

    def __repr__(self) -> str:
        state = "open" if self._is_open else "closed"
        return f"<Engine: {type(self.module).__name__}, {self.plan.preset} on {self.mesh}, {state}>"

    if not TYPE_CHECKING:  # with it, a type checker would take any name for one of the engine's

        def __getattr__(self, name: str) -> NoReturn:
            """Say where it is, if it is the model's: a wrapper such as DistributedDataParallel is a module itself."""
            where = f". It is the model's: engine.module.{name}" if hasattr(self.__dict__.get("module"), name) else ""
            raise AttributeError(f"The engine has no attribute {name!r}{where}.", name=name, obj=self)

    # -- a training loop ----------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward, like `model(...)`."""
        self._require_open()
        return self.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor) -> None:
        """Compute gradients of `loss`, a scalar on every rank, averaged over ranks (those of an island, if there are
        several) and over the plan's `accumulate`. (`loss.backward()` averages over ranks; a loop that accumulates with
        it divides the loss, as in plain PyTorch.) All ranks call; of a model in pipeline stages with what its ranks
        have all computed (docs/pipeline.md)."""
        self._require_open()
        if not isinstance(loss, torch.Tensor):
            raise ModelError(
                f"backward() was given a {type(loss).__name__}, not a loss: a tensor of one element that was computed "
                f"with gradients (before .item()), such as outputs.loss or outputs['loss']."
            )
        self._session.backward(loss)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """`loss` times the current loss scale: for a plain loop in fp16, `engine.scale(loss).backward()`.

        In other precisions it is `loss` itself. The step divides the gradients by the scale again.
        """
        self._require_open()
        return self._sharded.scale(loss)

    @takes_flags
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
        return self._session.step(is_last)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Norm:
        """Scale gradients to a global norm of at most `max_norm`; returns the norm before. All ranks call.

        For a plain loop, between `loss.backward()` and `optimizer.step()`. A plan with `clip_grad_norm` does this
        automatically, with the 2-norm. `norm_type` may be any positive number, or `inf`.
        """
        self._require_open()
        return self._session.clip(max_norm, norm_type)

    def zero_grad(self) -> None:
        """Drop all gradients. A step drops them too; this is for gradients that are not to be used. All ranks call."""
        self._require_open()
        self._sharded.zero_grad()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backwards leave gradients on the rank that made them; the next one outside, or the step, sums all.
        All ranks enter.

        Saves communication while gradients are accumulated, and takes the memory of whole gradients, as DDP does. For
        the same at every step: `rows: {grad: {partial: [...]}}` in the plan.
        """
        self._require_open()
        passes = self._sharded.parts.runner.passes
        before, passes.reduces = passes.reduces, False
        try:
            yield
        finally:
            passes.reduces = before

    def divide_every_backward(self) -> None:
        """From now on divide the gradients of every backward by the plan's `accumulate`, also those of
        `loss.backward()`, which otherwise a loop divides. For loops written for DeepSpeed, which does so. All ranks
        call, before the first backward."""
        self._require_open()
        self._sharded.divide_arriving()

    def weigh(self, samples: int, of: float) -> None:
        """Declare that this rank has `samples` of the `of` samples that all data ranks have in the next micro-batch.

        If ranks have different numbers of samples, gradients, `mean` and `log` are then means over all samples, with
        equal weights. A rank without samples still has to run some batch; its gradients count nothing. A loader made
        with `world=engine.data_ranks` calls this before each batch; the values hold until the next call. If the
        micro-batches of one step differ in size too, `of` is their mean: the samples of the whole step over all ranks,
        divided by the number of micro-batches. Sends nothing.

        Raises `ConfigError` for impossible numbers.
        """
        self._sharded.progress.weighing.announce(samples, of, self.mesh.data_place(self.world.rank)[1])
        self._sharded.weigh()

    # -- whole steps --------------------------------------------------------------------------------------

    def train_step(self, batch: Any, target: Any = None, *, loss_fn: LossFunction | None = None) -> torch.Tensor:
        """One optimizer step: the plan's `accumulate` micro-batches forward and backward, then the update.

        `batch` is what the model is called with: a tensor, a tuple of arguments, or a dict of keyword arguments. Its
        tensors are split along their first dimension into even micro-batches, which all get those without dimensions.
        It may also be a list or iterator of micro-batches of these kinds; of an iterator the next `accumulate` are
        taken. `loss_fn(output)`, or `loss_fn(output, target)` if `target` is given, which is split like the batch,
        computes the loss of a micro-batch; without it the loss is the model's output, or the output's `loss`.

        Returns the mean loss over the micro-batches, a detached scalar, on every rank: that of this rank's own data,
        and under a pipeline the same on all its stages (`engine.mean(loss.item())` is the mean over all data). All
        ranks call; those of one pipeline pass the same batch. Clipping, loss scale and schedule are the plan's; the
        norm is `engine.gradient_norm`.

        Raises `ConfigError` for a batch that cannot be split, and `StateError` between the micro-batches of a loop.
        """
        self._require_open()
        return self._session.train(batch, target, loss_fn)

    def forward_backward(
        self,
        batch: Any,
        target: Any = None,
        *,
        loss_fn: LossFunction | None = None,
        compute_loss: Callable[[Any], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """`train_step` without the update, for a loop that inspects the gradients; `engine.step()` then takes the
        step.

        `compute_loss(micro_batch)`, instead of `target` and `loss_fn`, calls the model itself, exactly once, and
        returns the loss. In pipeline stages every rank calls it, and only on the rank of the last stage does the call
        of the model return; on the others an exception ends it there. It may be called several times for a micro-batch.
        """
        self._require_open()
        if compute_loss is not None and (loss_fn is not None or target is not None):
            raise ConfigError("forward_backward() takes compute_loss, or loss_fn and target, but not both.")
        return self._session.forward_backward(batch, target, loss_fn, compute_loss)

    def eval_step(self, batch: Any, target: Any = None, *, loss_fn: LossFunction | None = None) -> torch.Tensor:
        """The mean loss of `batch` without gradients, a scalar on every rank; arguments and result as in `train_step`.

        The model is called in its current mode: for dropout and batch norms call `model.eval()` before. All ranks call.
        """
        self._require_open()
        return self._session.evaluate(batch, target, loss_fn)

    # -- what ranks say to each other between steps -------------------------------------------------------

    def any_rank(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank, the same on all: how ranks decide to stop together. All ranks call."""
        require_flag("any_rank(", flag)
        return self._session.asking(lambda: self.world.any_rank(flag), alone=lambda: False)

    def mean(self, value: float) -> float:
        """The mean of every rank's `value`, such as a loss to print, the same on all ranks. All ranks call.

        If ranks have different numbers of samples (`weigh`), it is the mean over all samples of the last batch.
        """
        weighing, value = self._sharded.progress.weighing, self._plain(value)
        return self._session.asking(
            lambda: self.world.mean(value, weighing.reported if weighing.is_used else None), alone=lambda: value
        )

    @takes_flags
    def log(
        self,
        values: Mapping[str, Any],
        *,
        kind: str = "step",
        tokens: int = 0,
        samples: int = 0,
        mean: bool = True,
    ) -> dict[str, float]:
        """Log `values` of the step that was just taken: numbers, or tensors of one element, such as a loss.

        All ranks call, with the same names, after each step or now and then; returns the means over all ranks. With
        `run` in the plan rank 0 writes them into the record of the run, with the learning rate, the gradient norm, the
        seconds of a step and how each rank spent them, and passes them to the plan's `trackers`. `tokens` and `samples`
        count what this rank's batches had since the last call; throughput is computed from them. Another `kind`, such
        as `"validation"`, gets lines of its own. Values of a void iteration (`num_void`) are not written. A rank that
        has joined others, and not yet begun an iteration, sends nothing and gets its own numbers back.

        With `mean=False` the values of rank 0 are written as they are, for a loop that has combined them itself: other
        ranks may pass different ones, or none, and each gets its own back. A line of another kind then sends nothing,
        and rank 0 may call alone.

        Raises `ConfigError` for a value that is not a number, or for names that differ from rank to rank.
        """
        self._require_open()
        if self._run_log is None:
            self._run_log = _open_log(self._sharded.plan, self.world, always=True)
            assert self._run_log is not None
            self._run_log.follow(self._sharded)
        return self._run_log.log(self._plain(values), kind, tokens, samples, self._session, mean=mean)

    def _plain(self, given: Any) -> Any:
        """What we compute with, of what a loop gives, which may be a part of a split sequence."""
        return given if self._session.sequence is None else self._session.sequence.plain(given)

    # -- generation and evaluation ------------------------------------------------------------------------

    def inference(self, keep_bytes: int | str | None = None) -> AbstractContextManager[None]:
        """Inside `with`, each rank runs the model at its own pace, without gradients: `module.generate()`, any method.

        All ranks enter and leave; in between prompts, lengths and the number of calls may differ from rank to rank.
        Parameters are whole inside, in the dtype of the forward, and nothing is sent. With `keep_bytes` (`"2GiB"`, 0)
        only as many units as fit are kept whole. The others are gathered when any rank needs one, from the second
        forward on while the one before computes: each once in a forward, with a single small message for all of them.
        `inference_bytes` is the memory for gathered parameters; it is free again afterwards, and modules are in
        training mode, or not, as before. Ranks of one pipeline make the same calls of the model itself, and each gets
        its output (docs/pipeline.md).

        Raises `ConfigError` for `keep_bytes` that is no number of bytes, and `StateError` inside another `inference`,
        between a forward and its backward, or if ranks that have to gather parameters give different `keep_bytes`.
        Inside, `generate_batch` of transformers raises `ModelError` if its cache would not fit a rank's part of the
        model.
        """
        self._require_open()
        return self._session.inference(_budget(keep_bytes))

    def inference_bytes(self, keep_bytes: int | str | None = None) -> int:
        """Bytes of gathered parameters that this rank holds at most inside `inference(keep_bytes)`, on top of its
        shards: of the units that are kept, and of the three largest others. More, if a forward reads parameters of
        several units at once, other than a block's and those of what is around the blocks. Asks nobody."""
        self._require_open()
        return bytes_inside(self._sharded.parts.runner.units, _budget(keep_bytes))

    def mismatch(
        self,
        samples: Mapping[str, torch.Tensor],
        *,
        version: int | None = None,
        alarm: float | None = None,
        rows: int = 8,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        layers: Mapping[str, torch.Tensor] | None = None,
    ) -> Mismatch:
        """How far a sampler's probabilities are from this model's, for the tokens that it has sampled. All ranks call.

        `samples`: `input_ids` `[rows, tokens]` of this rank, of which there may be none; `log_probs` of the same shape,
        the sampler's log-probability of each token given those before it; and `counted`, true where a token was
        sampled, which prompts and padding were not. With padding also `attention_mask`. Ranks that share a copy of the
        model give the same samples. The model is called with `input_ids` and returns `logits`, `rows` rows at a time,
        without dropout. The sampler's settings `temperature`, `top_k` and `top_p` are applied to its logits where they
        were to what the sampler reports. `version` is the step whose weights the sampler had.

        `layers` are what layers of the sampler gave for these samples, `[rows, tokens, features]` by name in their
        order, as `layer_outputs` has them: the result then says how far each is from the trainer's, and where they
        part.

        With `run` in the plan the result is in its record, with kind `mismatch`: the KL, the largest ratio, how many
        steps the sampler was behind, and 1 as `alarm` if the KL is above `alarm` nats a token, of which there is a
        warning too. Raises `ConfigError` for samples or layers of other shapes, or layers that the model does
        not have.
        """
        from shardwise.observe.mismatch import Sampling, check_samples, most_calls, of_all_ranks, totals_of

        self._require_open()
        sampling = Sampling(rows, temperature, top_k, top_p)
        layers = layers or {}
        check_samples(samples, layers)
        num_calls = most_calls(self.world, samples, sampling)
        with self.inference():
            own = totals_of(self.module, samples, sampling, layers, num_calls)
        behind = 0 if version is None else self.num_steps - version
        found = of_all_ranks(self.world, self.data_ranks[0], own, behind, list(layers))
        is_alarming = alarm is not None and not found.kl <= alarm
        if self.plan.run:
            values = {"kl": found.kl, "largest_ratio": found.largest_ratio, "steps_behind": behind}
            self.log(values | {"alarm": int(is_alarming)}, kind="mismatch", mean=False)
        if is_alarming and self.world.rank == 0:
            _log.warning("The sampler does not agree with the trainer after step %d: %s.", self.num_steps, found)
        return found

    # -- checkpoints --------------------------------------------------------------------------------------

    def claim(self, folder: str | Path) -> None:
        """Take the right to write into `folder` now, as the first `save` would. All ranks call.

        For a job that writes files of its own beside its checkpoints: raises `CheckpointError` on all ranks if another
        living job writes there. The right ends with the engine.
        """
        self._require_open()
        place = given_folder(folder).absolute()
        self._session.asking(lambda: self._state.saver.claim(place), alone=lambda: None)

    def remember(self, **objects: Stateful) -> None:
        """Save these objects' `state_dict()` in every checkpoint, each rank its own; `resume` restores them.

        `engine.remember(scheduler=scheduler, loader=loader)`. All ranks call, before `resume`. Raises `ConfigError` for
        an object without `state_dict()` and `load_state_dict()`.
        """
        for name, thing in objects.items():
            if not all(callable(getattr(thing, method, None)) for method in ("state_dict", "load_state_dict")):
                raise ConfigError(
                    f"remember({name}=...): a {type(thing).__name__} has no state_dict() and load_state_dict(), so it "
                    f"cannot be saved. Give an object with both, or save its values: engine.save(folder, state=...)."
                )
        self._state.remembered.update(objects)
        for name, thing in objects.items():
            if name in self._state.coming:
                thing.load_state_dict(decode(self._state.coming.pop(name), name))

    @takes_flags
    def save(
        self,
        folder: str | Path,
        step: int | None = None,
        state: Mapping[str, Any] | None = None,
        *,
        wait: bool = True,
        keep: Keep | None = None,
        metrics: Mapping[str, float] | None = None,
        without_gradients: bool = False,
    ) -> Path:
        """Write a checkpoint into `folder/step-XXXXXXXX` and make it the latest. All ranks call, between steps.

        `state` is the caller's own, and rank 0's is kept: numbers, text, lists, dicts, tensors. `step` defaults to the
        number of optimizer steps taken. With `wait=False` it returns once the model's visible values are copied to host
        memory, and goes on in the background; what only the optimizer holds is copied there, and the next step waits
        for that. A failure is then raised by the next call that saves, resumes or closes. `keep` says which checkpoints
        of the folder are kept, and `metrics` determine which is the best.

        Returns the checkpoint's path. Raises `CheckpointError` on all ranks if it could not be written; earlier
        checkpoints are then still there. Raises `StateError` while gradients wait for a step, unless
        `without_gradients`: a checkpoint has none, and a run that resumes from it begins this step without them.
        """
        self._require_open()
        place = given_folder(folder)
        return Path(
            self._session.asking(
                lambda: str(
                    self._state.save(
                        self._sharded,
                        place,
                        step,
                        {} if state is None else state,
                        wait=wait,
                        keep=Keep() if keep is None else keep,
                        metrics={} if metrics is None else metrics,
                        without_gradients=without_gradients,
                    )
                ),
                alone=lambda: str(place.absolute() / step_name(self.num_steps if step is None else step)),
            )
        )

    def wait_for_save(self) -> None:
        """Return once the last `save(wait=False)` is on disk; raise `CheckpointError` if it failed. All ranks call.

        In an elastic job, what a lost rank has not finished is written again, if no step was taken since.
        """
        self._session.asking(lambda: self._state.wait_for_save(self._sharded), alone=lambda: None)

    def resume(self, folder: str | Path) -> Loaded | None:
        """Continue from the latest checkpoint in `folder`; `None`, and no change, if there is none.

        `folder` may also be one checkpoint. It may have been written with any world size, plan and precision. All ranks
        call; if it is damaged or another model's, all raise the same `CheckpointError` and nothing is changed.

        A rank that has joined ranks in training has their values already and reads nothing: it gets the number of steps
        they have taken, and their `state` as saved or resumed last (empty if it never was), or `None` if they have
        taken no step yet.
        """
        self._require_open()
        place = given_folder(folder)

        def read() -> Loaded | None:
            self._state.wait_for_copy()
            self._sharded.parts.unfreezing.replan_now()
            return self._state.resume(self._sharded, place)

        return self._session.resume(place, read)

    @takes_flags
    def save_pretrained(
        self,
        folder: str | Path,
        *,
        dtype: Literal["fp32", "bf16", "fp16"] | None = None,
        max_file_bytes: int | str = _FILE_BYTES,
        overwrite: bool = False,
        merge_adapters: bool = False,
    ) -> None:
        """Write the model as a Hugging Face folder, for `from_pretrained`. All ranks call.

        Works unit by unit: no rank ever has the whole model; rank 0 writes. Parameters have the precision in which the
        optimizer keeps them, unless `dtype` asks for another. A model of the transformers library gets its
        configuration too; for any other module the folder has its state dict, as `model.safetensors`, split at
        `max_file_bytes` (a number, or text such as `"5GiB"`). Adapters of peft are merged into the weights with
        `merge_adapters`, and refused without it, because peft has files of its own for them. Raises `CheckpointError`
        on all ranks if `folder` is not empty and `overwrite` is not given.
        """
        formats.save_pretrained(
            formats.base_model(self.module),
            self._weights_of_files(dtype, merge_adapters=merge_adapters),
            self.world,
            given_folder(folder),
            max_file_bytes=formats.file_bytes(max_file_bytes),
            overwrite=overwrite,
        )

    def _weights_of_files(self, dtype: Literal["fp32", "bf16", "fp16"] | None, *, merge_adapters: bool) -> WeightStream:
        self._require_open()
        if hasattr(self.module, "peft_config") and not merge_adapters:
            raise ModelError(
                f"{type(self.module).__name__} has PEFT adapters, which have a file format of their own: "
                f"model.save_pretrained(folder, state_dict=engine.state_dict(rank_0_only=True)) writes it. With "
                f"merge_adapters=True they are merged into the weights that are written."
            )
        return self.weights(dtype=dtype, merge_adapters=merge_adapters)

    @takes_flags
    def weights(
        self,
        *,
        names: Names = "hf",
        dtype: Literal["fp32", "bf16", "fp16"] | None = None,
        merge_adapters: bool = True,
    ) -> WeightStream:
        """The model's weights as a stream of whole tensors, unit by unit, which can be iterated again. All ranks call.

        `names`: "hf" as in files of Hugging Face (a tied weight once), "module" as in the model. `dtype`: of all
        floating-point values; by default that in which the optimizer keeps them. With `merge_adapters`, adapters of
        peft are merged into what they adapt, and names are those of the model without them; quantized weights, and
        prompts, are refused then with a `ModelError`. The stream's `metadata()` comes from shapes. Every rank gets
        every tensor, of any pipeline stage. No rank has more than a unit whole at a time.
        """
        from shardwise.sharded.weights import weight_stream  # with formats of files, which few jobs need

        self._require_open()
        return weight_stream(self._sharded, names, formats.dtype_of(dtype), merge_adapters=merge_adapters)

    @takes_flags
    def publish(
        self,
        folder: str | Path,
        *,
        version: int | None = None,
        keep: int = 2,
        dtype: Literal["fp32", "bf16", "fp16"] | None = None,
        merge_adapters: bool = True,
        tell: Sequence[Callable[[Published], None]] = (),
        wait: bool = True,
    ) -> int:
        """Write the weights into `folder`, for samplers that read them while training goes on. All ranks call.

        Each `version` (by default the number of steps) is a Hugging Face folder of its own, in which adapters are
        merged; it is announced when it is whole, and found by `sw.published(folder)` in any process. Older ones are
        deleted, but for the newest `keep` and those that readers read or use. A folder in /dev/shm is memory that
        readers on the host of rank 0 share. One job publishes in a folder. Each of `tell` is called with what is
        announced, on rank 0 and in threads: servers that have to be asked to load it (`integrations.samplers`).

        Each rank writes its own rows, where all see the folder and files have the model's own tensors; nothing is
        gathered. Otherwise weights are gathered to rank 0, which writes them. With `wait=False` it returns once what
        the model shows its user is copied, and goes on in the background: the next update waits until the rest is
        copied, and no step waits for a disk. Where weights are gathered it returns once rank 0 has all of them in its
        memory, in the `dtype` of the files. A failure is then raised by the next call that publishes, waits or closes.

        Returns the version. Raises `CheckpointError` on all ranks if rank 0 cannot write, and for a version that is not
        newer; readers stay with the one before. Also if a call of `tell` raises; the version is published then.
        """
        from shardwise.checkpoint.own_rows import Row, rows_of  # few jobs need them
        from shardwise.checkpoint.published import Version
        from shardwise.checkpoint.publishing import Weights

        self._require_open()
        number = self.num_steps if version is None else version
        place = given_folder(folder).absolute()  # a thread writes, and the loop may change its folder
        this = Version(place, number, keep)

        def publish() -> int:
            weights = self._weights_of_files(dtype, merge_adapters=merge_adapters)
            files = formats.WeightFolder(formats.base_model(self.module), weights, max_file_bytes=_FILE_BYTES)
            origins = weights.origins

            def own_rows() -> list[Row]:
                assert not isinstance(origins, str)
                return rows_of(content(self._sharded, with_states=False), origins, files.places())

            made_of = Weights(files, weights, origins if isinstance(origins, str) else own_rows)
            self._publisher().publish(self.world, this, made_of, tell=tell, wait=wait)
            return number

        return self._session.asking(publish, alone=lambda: number)

    def wait_for_publish(self) -> None:
        """Return once the last `publish(wait=False)` is announced; raise `CheckpointError` if it failed. All ranks
        call."""
        self._require_open()
        self._session.asking(lambda: self._publisher().wait(self.world), alone=lambda: None)

    def _publisher(self) -> Publisher:
        if self._state.publisher is None:
            from shardwise.checkpoint.publishing import Publisher

            self._state.publisher = Publisher()
        return self._state.publisher

    # -- whole tensors ------------------------------------------------------------------------------------

    @takes_flags
    def gathered(self, *names: str, write: bool = False, writer: int = 0) -> AbstractContextManager[None]:
        """Inside `with`, the named parameters of the model (all, without names) are whole on every rank.

        With `write`, all ranks take over the edits of rank `writer` on leaving, except where `set` has no effect
        either. All ranks enter and leave. Raises `ModelError` for an unknown name, and for parameters that `tp` or `ep`
        split; `StateError` if there is no rank `writer`.
        """
        self._require_open()
        if writer not in range(self.world.size):
            raise StateError(f"gathered(writer={writer}): there are ranks 0 to {self.world.size - 1}.")
        self._sharded.refuse_stages("gathered()", "engine.get(name) and engine.set(name, value) reach every stage.")
        if write and self._session.leaves_out("engine.gathered(write=True)"):
            return self._sharded.parts.access.gathered(names, write=False, writer=writer, puts_back=True)
        if write:
            self._before_change()
        return self._sharded.parts.access.gathered(names, write=write, writer=writer)

    def get(self, name: str, what: str = "param") -> torch.Tensor | None:
        """A whole tensor by the parameter's name, on every rank. All ranks call.

        `what` is `param`, `grad` (between backward and step, averaged over ranks), or a state of the optimizer such as
        `exp_avg`; with islands these are of this rank's island, and `outer.anchor` and `outer.momentum` of all. The
        result is in the dtype in which it is kept; `None` if there is none. In an iteration in which a rank was lost,
        which is repeated, gradients are zero. A tied parameter has each of its names. Raises `ModelError` for others.
        """
        self._require_open()

        def read() -> torch.Tensor | None:
            sharded = self._sharded
            if what == "grad":
                sharded.parts.gradients.prepare()
            if sharded.parts.pipeline is not None:
                return sharded.parts.pipeline.across.read(name, what, sharded.parts.access)
            return sharded.parts.access.read(name, what)

        def void() -> torch.Tensor | None:
            pipeline = self._sharded.parts.pipeline
            if pipeline is not None and not pipeline.across.holds(name):
                return pipeline.across.zeros(name)
            return self._sharded.parts.access.zeros(name, what)

        def alone() -> torch.Tensor:
            return self._sharded.parts.access.read_here(name, what)

        if what == "grad":
            return self._session.in_iteration(read, void=void, alone=alone, is_small=False)
        return self._session.asking(read, alone=alone, is_small=False)

    def set(self, name: str, value: torch.Tensor, what: str = "param") -> None:
        """Replace what `get` returns. All ranks call, with the same value, of the whole tensor's shape.

        In an elastic job neither this nor `load_state_dict` has an effect after a step that was void, which is repeated
        (docs/elastic.md).
        """
        self._require_open()
        if self._session.leaves_out(f"engine.set({name!r})"):
            return

        def write() -> None:
            self._sharded.settle_islands()
            pipeline, access = self._sharded.parts.pipeline, self._sharded.parts.access
            if pipeline is None:
                access.write(name, value, what)
            elif pipeline.across.takes(name, value, what):
                access.write(pipeline.across.first_name(name), value, what)

        def write_gradient() -> None:
            self._sharded.parts.gradients.prepare()
            write()
            self._sharded.parts.gradients.changed()  # on all ranks and stages: the norm is one of all

        if what == "grad":  # of this iteration alone: nothing that ranks go on from changes
            self._session.in_iteration(write_gradient, void=lambda: None, alone=self._before_change)
        else:
            self._before_change()
            with self._session.changing():
                write()

    @takes_flags
    def state_dict(self, *, rank_0_only: bool = False) -> dict[str, torch.Tensor]:
        """The plain model's `state_dict`, whole, on the CPU, for `model.load_state_dict` anywhere. All ranks call.
        With islands, of the model that they have in common (docs/islands.md).

        Works unit by unit, so that no device holds more than one. With `rank_0_only` all other ranks get `{}`.
        """
        self._require_open()
        on_rank = not rank_0_only or self.world.rank == 0

        def read() -> dict[str, torch.Tensor]:
            sharded = self._sharded
            if sharded.parts.pipeline is None:
                return sharded.parts.access.state_dict(on_rank=on_rank)
            whole = sharded.parts.pipeline.across.merged(sharded.parts.access.state_dict())
            return whole if on_rank else {}

        def alone() -> dict[str, torch.Tensor]:
            return self._sharded.parts.access.state_dict(on_rank=on_rank, is_alone=True)

        return self._session.asking(read, alone=alone, is_small=False)

    @takes_flags
    def load_state_dict(self, state: Mapping[str, torch.Tensor], *, strict: bool = True) -> None:
        """Load a plain model's `state_dict`, the same on every rank. All ranks call.

        With `strict=False`, as in torch, what the state lacks keeps its value, and what only the state has is ignored.
        Raises `ModelError` if shapes or, with `strict`, names differ.
        """
        self._require_open()
        if self._session.leaves_out("engine.load_state_dict()"):
            return
        self._before_change()
        with self._session.changing():
            self._sharded.settle_islands()
            if self._sharded.parts.pipeline is not None:
                state = self._sharded.parts.pipeline.across.own_part(state, strict=strict)
            self._sharded.parts.access.load_state_dict(state, strict=strict)

    @takes_flags
    def optimizer_state_dict(self, *, rank_0_only: bool = False) -> dict[str, Any]:
        """The plain optimizer's `state_dict()`, whole, on the CPU. All ranks call; see `state_dict`."""
        self._require_open()
        self._sharded.refuse_stages("optimizer_state_dict()", "Checkpoints have the states: engine.save(folder).")
        return self._session.asking(
            lambda: self._sharded.parts.access.optimizer_state_dict(on_rank=not rank_0_only or self.world.rank == 0),
            alone=lambda: refuse_to_arriving("optimizer_state_dict()"),
            is_small=False,
        )

    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a plain optimizer's `state_dict()`, the same on every rank. All ranks call.

        `optimizer.load_state_dict` does the same.
        """
        self._require_open()
        self._sharded.refuse_stages("load_optimizer_state_dict()", "Checkpoints have them: engine.resume(folder).")
        self._sharded.parts.unfreezing.replan_now()
        self._sharded.require_optimizer().load_state_dict(state)

    # -- sequences over several ranks ---------------------------------------------------------------------

    def split_sequence(self, batch: Any, *, documents: torch.Tensor | None = None) -> Any:
        """The tokens of `batch` that this rank computes. All ranks along the mesh's `sp` call, with the same batch.

        `batch` is a dict with `input_ids` or `inputs_embeds`, a tensor, or a list or tuple of tensors; every tensor
        whose dimension 1 has as many entries as there are tokens is split there. `documents`, int `[batch, tokens]`:
        tokens attend only to tokens of the same number.

        In a dict `attention_mask`, `[batch, tokens]`, marks what is not padding, and is removed. For models of
        transformers `position_ids` are added (without a mask, a document begins wherever given ones start over), and
        `labels` are shifted as a causal language model does: `shift_labels`, with `num_items_in_batch` so that the mean
        of the ranks' losses is the loss of the whole sample. If the number of tokens does not divide, a dict is padded
        at the end.

        A model of transformers that is called with a whole batch splits it in this way by itself.

        Without an axis `sp` in the mesh the batch is returned unchanged. Raises `ConfigError` for a batch that is not
        the same on all ranks that share it, or that cannot be split.
        """
        self._require_open()
        return self._session.splitting(lambda: self._split(batch, documents))

    def _split(self, batch: Any, documents: torch.Tensor | None) -> Any:
        sequence = self._sharded.parts.sequence
        if sequence is not None:
            return sequence.split(batch, documents)
        if documents is not None:
            raise ConfigError("documents= is for plans that split sequences; on one rank the model masks them.")
        return batch

    def join_sequence(self, part: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """The whole sequences of which this rank has `part`: the inverse of `split_sequence`, for results.

        Dimension `dim` of `part` has this rank's tokens of the batch that was split last, by `split_sequence` or by the
        model; in the result it has as many as that batch had, without the padding at the end. All ranks along the
        mesh's `sp` call, and all get the same tensor. Each of them may run backward on a loss computed from it: the
        gradients count once. Without an axis `sp`, and inside `inference()`, `part` is returned unchanged.

        Raises `ConfigError` for a tensor with another number of tokens, and `StateError` before any batch was split.
        """
        self._require_open()
        if self._session.sequence is None:
            return part
        return self._session.computing(lambda: self._join(part, dim))

    def _join(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        sequence = self._session.sequence  # that of the present world, if a rank was lost meanwhile
        return part if sequence is None else sequence.join(part, dim)

    @takes_flags
    def give_whole_outputs(self, *, tokens: bool = True, training: bool = False) -> None:
        """From now on, a model of transformers that is given a whole batch and splits it along `sp` returns whole
        outputs.

        A loss is that of the whole batch, on every rank along `sp`, and outputs with one entry per token in dimension 1
        are joined. Exception: in training, next to a loss of the model's own, logits and hidden states stay in parts
        because they would take too much memory (see `join_sequence`); with `tokens=False` they stay in parts
        everywhere. All ranks call.

        In pipeline stages, calls of the model return whole outputs anyway, except for what is larger than 64 KiB next
        to a loss: that is left on the last stage in training, unless `training` is given, and with `tokens=False`
        everywhere. Without `sp` and `pp` nothing changes.
        """
        self._require_open()
        self._sharded.progress.whole_outputs.ask(tokens=tokens, training=training)

    def mean_over_tokens(self, values: torch.Tensor, counted: torch.Tensor | None = None) -> torch.Tensor:
        """From one value per token of this rank, a scalar whose mean over ranks, as `backward` and `mean` take it, is
        the mean over all tokens that count of this micro-batch, however many are on each rank. If micro-batches of one
        step have different numbers of samples (`weigh`), each counts as its samples do.

        `values` may be losses with `reduction="none"`; `counted` is a bool tensor of the same shape (default: all
        count). All ranks call that train the same part of the model: all ranks, or under a pipeline those of its last
        stage. If no token counts on any rank, the result is nan, as a plain mean of nothing is.
        """
        self._require_open()
        values, counted = self._plain((values, counted))
        here = torch.tensor(values.numel(), device=values.device)
        if counted is not None:
            values, here = values.masked_fill(~counted, 0.0), counted.sum()
        weight = self._sharded.progress.weighing.current
        if not weight:  # the rows stand in for none, and so do their tokens
            here = torch.zeros_like(here)
        mine = torch.stack([here.double(), here.new_tensor(weight, dtype=torch.float64)])
        group = self._sharded.data_group
        of_one = torch.stack([mine[0], mine[1] * group.size])
        all_of_them = self._session.in_iteration(lambda: group.sum(mine), void=lambda: of_one)
        share = all_of_them[1] / all_of_them[0]  # by weights: of a step's micro-batches each counts as its samples do
        if weight not in (0.0, 1.0):  # gradients and `mean` are weighed by samples, which tokens replace here
            share = share / weight
        if not weight:  # on all ranks, maybe, and then there are no tokens either
            share = share.nan_to_num(0.0, 0.0)
        return self._session.computing(lambda: values.sum() * share.to(values.dtype))

    # -- memory and time ----------------------------------------------------------------------------------

    def memory(self) -> MemoryReport:
        """Promised and measured bytes of this rank; see `MemoryReport`. The promise is for steps that follow their
        program: the first two or so are recorded, and hold less."""
        in_images, kept, on_disk = self._session.bytes_for_survival
        report = memory_of(self._sharded)
        return replace(report, image_bytes=in_images, kept_bytes=kept, image_bytes_on_disk=on_disk)

    @property
    def copies(self) -> dict[str, float]:
        """What copies of this rank's state on another host have cost so far, in an elastic job with `survive: buddy`.

        `num_copies`; `sent_bytes` and `received_bytes`, of other ranks; `seconds` that they took, behind forwards and
        backwards, and `waited_seconds` that updates waited for them. Empty where there are none. Asks nobody.
        """
        return self._session.cost_of_copies

    def rehearse(
        self,
        batch: object,
        loss: Loss | None = None,
        *,
        expert_load: float = EXPERT_LOAD,
        as_call: bool = False,
    ) -> Footprint:
        """What a step on `batch` will hold on this rank at its peak, activations included: see `Footprint`.

        Runs a copy of the model on fake tensors, without memory or arithmetic. Nothing is changed and nothing is sent;
        but under a pipeline all its ranks call, with a micro-batch, and those in flight are counted. If sequences are
        split, pass this rank's part of a batch, from `split_sequence`. `batch` is a tensor, a tuple of arguments, or a
        dict of keyword arguments, of which only shapes and dtypes matter. `loss` maps the model's output to the loss,
        and must be given if a loop computes the loss itself; by default it is the output, or its `loss`.

        With `as_call`, `batch` is what a loop of one's own calls the model with: in pipeline stages, where such a call
        holds all of it, that is another sum than a schedule's, and an upper bound. Without stages it changes nothing.

        How many tokens the experts of this rank will get is not known in advance. If experts have a capacity, the count
        is as many as all ranks along `ep` may send; otherwise `expert_load` times an even share, at least 1.

        Raises `ModelError` for a model that asks for the values of tensors; `ConfigError` for an `expert_load` below 1;
        and `TierError` if activations go to a disk with too little room for those of this host's ranks.
        """
        self._require_open()
        if not expert_load >= 1:
            raise ConfigError(f"expert_load is {expert_load}; give how many times an even share, at least 1.")
        return rehearsed(self._sharded, batch, loss, expert_load, as_call=as_call)

    def fit_activations(
        self,
        batch: object,
        device: int | str | None = None,
        host: int | str | None = None,
        *,
        loss: Loss | None = None,
        expert_load: float = EXPERT_LOAD,
    ) -> str:
        """Choose a treatment of activations with which a step on `batch` fits, and continue with that plan. All ranks
        call.

        `device` (bytes, or such as "10GiB") is how much each rank may hold there, everything of a step included, and
        `host` how much the ranks of a host may hold in its memory besides. They default to the plan's `budget`.

        If activations fit, they are kept. Otherwise each choice is rehearsed: recomputed selectively or completely, on
        the host, and on a disk if the plan names a folder. Of those that fit the fastest is taken, as the clock times a
        step (docs/planner.md) on this machine as `shardwise calibrate` has measured it, else by its device's profile.
        Returns a sentence that says what was chosen and why. `batch`, `loss` and `expert_load` are those of `rehearse`.

        Under a pipeline `batch` is a micro-batch, those in flight are counted, and all stages take the same choice; it
        is for an engine that has not computed yet, and for plans whose rules say nothing of activations.

        Raises `ConfigError`, with figures, if nothing fits; nothing has been changed then.
        """
        self._require_open()
        if self._session.is_arriving:
            policy = self.plan.activations.policy
            return f"This rank has joined others, and treats activations as they do: {policy}."
        pipeline = self._sharded.parts.pipeline
        is_staged = pipeline is not None
        if pipeline is not None and pipeline.has_computed:
            raise StateError(
                "fit_activations() in a pipeline is for an engine that has not computed yet; call it before the first "
                "step."
            )
        allowed = self._sharded.parts.sharding.budget
        limit = allowed.device if device is None else bytes_of("device of fit_activations()", device)
        limit_of_host = allowed.host if host is None else bytes_of("host of fit_activations()", host)
        if limit is None:
            raise ConfigError("Say how much each device may hold: fit_activations(batch, '10GiB'), or budget.device.")
        from shardwise.fit.search import Limits  # only these jobs load the planner
        from shardwise.sharded.fitting import fit_activations

        limits = Limits(limit, limit_of_host)
        fitted = fit_activations(self._sharded, batch, loss, limits, expert_load)
        if fitted.plan.activations != self._sharded.plan.activations:
            if is_staged:
                self._session.treat(fitted.plan, fitted.treatments)
            else:
                self.reshard(fitted.plan)
        return fitted.summary

    def timeline(self, path: str | Path) -> AbstractContextManager[None]:
        """Inside `with`, record what every rank does, unit by unit and action by action, and write it to `path`. All
        ranks enter and leave.

        The file is a Chrome trace, for ui.perfetto.dev. Times are those of the host. For GPU kernels run
        `torch.profiler` as well; actions have the same names there.
        """
        self._require_open()
        return write_timeline(self._sharded, Path(path))

    # -- another plan -------------------------------------------------------------------------------------

    def reshard(self, plan: PlanLike) -> None:
        """Continue with another plan: another table, mesh, units or precision over the same ranks. All ranks call.

        Parameters, optimizer states and counters are kept, and moved between the ranks unit by unit; model, optimizer
        and schedulers stay the same objects. Call it between steps: raises `StateError` while gradients wait for a
        step, `ConfigError` for a plan that is impossible here, and `TierError` for a disk without room; nothing has
        been changed then. If the disk of any rank fails while values move, all raise a `TierError` that names it: the
        new plan is in effect then, and `resume` on all ranks fills it from the last checkpoint.

        In an elastic job `plan` is that of the whole job: ranks that are left of it lay out what `plan` is on fewer,
        and those that join have it too, on which this call returns at once until their first forward.
        """
        # Saving and resuming would do the same through a disk, with every tensor written and read once, and a model
        # built again. Parameters that are unfrozen later get their memory here (`_replan`), DeepSpeed's offload_states
        # and reload_states are this call, and recovery moves values in the same way (`state.move`).
        self._require_open()
        self._sharded.refuse_stages("reshard()", "Save, make another engine, and resume from the checkpoint.")
        self._state.wait_for_copy()  # shared memory that is let go reads as zeros
        before = self._sharded
        lost = self._session.reshard(load_plan(plan))
        if self._sharded is before:  # this rank has joined others, and has their plan
            return
        if self._run_log is not None:
            self._run_log.follow(self._sharded)
        if lost is not None:
            raise lost
        self._sharded.begin_factors_when_due()
        _ask_for_room_first(self._sharded)

    def _replan(self) -> None:
        """See [Note: unfrozen later] in `sharded/unfreezing.py`. All ranks call."""
        sharded = self._sharded
        if self._is_open and sharded.parts.unfreezing.can_plan:
            sharded.refuse_stages(
                "memory for what was frozen, or in no group of the optimizer, in shard()",
                "Have trained there, and in a group, whatever will be, and freeze it afterwards: requires_grad_(False) "
                "and set_adapter() then do what they do in a plain loop.",
            )
            sharded.parts.unfreezing.check(sharded.peers)
            dropped, others = sharded.parts.unfreezing.used_gradients()
            kept = gradients_aside(sharded, others)
            sharded.zero_grad()
            plan = sharded.parts.sharding.plan_to_fit
            if sharded.parts.unfreezing.begins_factors:
                plan = plan.with_factors_begun()
            with trained_as_before(sharded.parts.flats):
                self.reshard(plan)
            self._sharded.parts.unfreezing.note_dropped(dropped)
            put_gradients(self._sharded, kept)

    # -- before a call ------------------------------------------------------------------------------------

    def _require_open(self) -> None:
        if not self._is_open:
            raise StateError("This engine was closed; call shard() again to train the model.")
        self.world.journal.require_usable()
        if self._sharded.is_taken_down:
            raise StateError(
                "A change of plan failed half-way, and this engine's values are gone with it. Close it, make another "
                "with shard(), and resume from the last checkpoint."
            )

    def _before_change(self) -> None:
        self._session.before_change()
        self._sharded.forget_checksums()
        self._state.wait_for_copy()

    # -- the end ------------------------------------------------------------------------------------------

    def unshard(self) -> None:
        """Close the engine, and leave a plain model: parameters whole on every rank, modules as before `shard`.

        Parameters are in the precision in which the optimizer keeps them, fp32 by default; gradients and optimizer
        states are dropped. All ranks call, between steps, and each needs memory for the whole model. Raises
        `StateError` in a pipeline.
        """
        self._require_open()
        self._sharded.refuse_stages("unshard()", "Save, then run: shardwise convert CHECKPOINT MODEL --to hf.")
        self._state.wait_for_copy()
        unshard(self._sharded)
        self.close()

    def close(self, error: BaseException | None = None) -> None:
        """Unhook from model and optimizer. May be called twice. The model's parameters are no longer whole.

        Waits for a checkpoint that is still being written, and raises its error if it failed. With an `error`, as after
        an exception inside `with`, the other ranks raise too, and name it. All ranks call.
        """
        # Dropping the engine ends nothing: hooks of the user's model hold its memory. Without a close a checkpoint in
        # the background may stay a draft that nobody reports, gathers behind the last step are never awaited, so that
        # parameters are read half updated, files of the disk tier and images of this rank stay, and other ranks wait
        # for this one until their watchdogs end them. What can raise comes first, what must happen in any case after.
        if not self._is_open:
            return
        self._is_open = False
        with ExitStack() as ends:  # the last one first, and each whatever others raise, such as a log on a full disk
            ends.callback(self._close_world, error)
            ends.callback(self._close_disk)
            ends.callback(self._leave_model)
            ends.callback(self._close_session, error)
            ends.callback(self._close_log, error)
            self._state.close(self.world.rank)
            if error is None and not self._sharded.is_taken_down:
                self._session.finish_updates()

    def _close_log(self, error: BaseException | None) -> None:
        if self._run_log is not None:
            self._run_log.close(error)

    def _close_session(self, error: BaseException | None) -> None:
        try:
            self._session.close(error)
        finally:
            if self.world.membership is not None:
                self.world.membership.num_engines -= 1

    def _leave_model(self) -> None:
        self._sharded.unhook()
        self._sharded.converted.undo()

    def _close_disk(self) -> None:
        if self._sharded.disk is not None:
            self._sharded.disk.close()

    def _close_world(self, error: BaseException | None) -> None:
        if self._owns_world:
            self.world.close(error)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close(error)

    def __deepcopy__(self, memo: dict[int, Any]) -> Engine:
        if id(LEDGER_OF_COPIES) in memo:
            return self  # a model that is rehearsed refers to it, as Lightning's modules do through their trainer
        raise StateError(
            "An engine cannot be copied: it owns its model's memory and its place among the ranks. "
            "Copy the values with engine.state_dict(), or the model before it is sharded."
        )

    def __reduce__(self) -> NoReturn:
        raise StateError("An engine cannot be pickled. Write a checkpoint with engine.save(folder).")


class EngineHost:
    """An engine as those see it that train with it, beside the loop: loaders that follow it (`data_ranks.Follows`), and
    the recovery that gives it another world (`elastic.recovery.Host`)."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._readers: list[weakref.ref[Reader]] = []

    # -- for loaders, before each batch -------------------------------------------------------------------

    @property
    def data_ranks(self) -> tuple[int, int]:
        return self._engine.data_ranks

    @property
    def num_steps(self) -> int:
        return self._engine.num_steps

    @property
    def num_void(self) -> int:
        return self._engine.num_void

    def weigh(self, samples: int, of: float) -> None:
        self._engine.weigh(samples, of)

    def follow(self, reader: Reader) -> None:
        """Register a loader, which from now on asks this engine which share of each batch it hands out."""
        self._readers.append(weakref.ref(reader))

    def begin_to_read(self) -> None:
        """A loader is about to hand out a batch. On a rank that has joined, each of its loaders first moves, once, to
        the position of the others' loader with its number, or if they have dropped that, of the first with the same
        batches."""
        theirs = self._engine._session.loaders_of_others
        for number, known in enumerate(self._readers if theirs else ()):
            reader = known()
            if reader is None or theirs.get(number, ...) is None:
                continue
            alike = (other for other, state in theirs.items() if state is not None and reader.is_like(state))
            found = number if number in theirs else next(alike, None)
            if found is not None:
                state = theirs[found]
                theirs[number] = theirs[found] = None
                reader.go_where(state)

    def reading(self) -> AbstractContextManager[None]:
        """Inside, this rank waits for its loader: counted by its clock."""
        return self._engine.world.journal.clock.reading()

    # -- for recovery -------------------------------------------------------------------------------------

    def can_leave_out(self) -> bool:
        """Whether every loader that follows the engine can skip a batch; if only some could, they would get out of
        step."""
        readers = [reader for known in self._readers if (reader := known()) is not None]
        return bool(readers) and all(reader.can_leave_out for reader in readers)

    def leave_out(self, num_steps: int) -> None:
        """Make loaders skip the batch of the step after `num_steps`."""
        for known in self._readers:
            if (reader := known()) is not None:
                reader.leave_out(num_steps)

    def state_for_newcomers(self, num_steps: int) -> dict[str, Any]:
        """What a rank needs that joins when `num_steps` steps count: the state of objects given to `remember`, the
        positions of loaders, and the caller's own state as it was saved or resumed last."""
        state = self._engine._state
        objects = {name: encode(thing.state_dict(), name) for name, thing in state.remembered.items()}
        readers = [known() for known in self._readers]
        loaders = [None if one is None else encode(one.state_after(num_steps), "loader") for one in readers]
        return {
            "objects": objects,
            "loaders": loaders,
            "state": None if state.user_state is None else encode(dict(state.user_state), "state"),
            "begun": None if state.begun is None else state.begun.facts(),
        }

    def wait_for_copy(self) -> None:
        """Return once none of this rank's memory is being copied for a checkpoint. One rank may call alone."""
        self._engine._state.wait_for_copy()

    def take_over(self, world: World, sharded: ShardedModel) -> None:
        """Continue with `sharded`, the same model on the remaining ranks, in `world`."""
        engine = self._engine
        engine.world, engine._owns_world = world, True
        engine._state.renew(world)
        _ask_for_room_first(sharded)
        if engine._run_log is not None:
            engine._run_log.go_on(world, sharded)

    def receive(self, arrival: Arrival) -> None:
        """Take the others' state of objects, those that are remembered here already included, and of a save."""
        state, loop = self._engine._state, arrival.loop
        state.coming = dict(loop["objects"])
        state.begun = None if loop["begun"] is None else Begun.of(loop["begun"])
        state.user_state = None if loop["state"] is None else decode(loop["state"], "state")
        with ExitStack() as stack:
            for known in self._readers:
                if (reader := known()) is not None:
                    stack.enter_context(reader.staying())
            self._engine.remember(**state.remembered)

    def turned_away(self) -> None:
        """The others go on without this rank."""
        if self._engine._run_log is not None:
            self._engine._run_log.leave()

    def rest(self) -> None:
        """They do so until this rank comes back."""
        if self._engine._run_log is not None:
            self._engine._run_log.rest()


def _budget(keep_bytes: int | str | None) -> int | None:
    return None if keep_bytes is None else bytes_of("keep_bytes of inference()", keep_bytes)


def _open_log(plan: Plan, world: World, *, always: bool = False) -> RunLog | None:
    """The run log that `plan` asks for, or `None`; its modules are imported only if it does.

    Raises `ConfigError` for a log that cannot be opened.
    """
    asks = plan.run is not None or plan.trackers is not None or plan.profile != Profile()
    if not (asks or always or os.environ.get(PROFILE_VARIABLE)):
        return None
    from shardwise.observe.run_log import RunLog

    return RunLog(plan, world)


def _session_for(host: EngineHost, sharded: ShardedModel, arrival: Arrival | None = None) -> Session:
    """A session that survives lost ranks, in a job that can; its modules are imported only then."""
    plan, membership = sharded.plan, sharded.world.membership
    if membership is None and plan.survive not in ("host", "buddy") and plan.bad_batch == "stop":
        return Session(sharded)
    from shardwise.elastic.survivable import survives

    goes_on = survives(sharded, membership)
    if membership is not None:
        membership.num_engines += 1
    if not goes_on or membership is None:
        return Session(sharded)
    from shardwise.elastic.session import ElasticSession

    return ElasticSession(host, sharded, membership, arrival)


def _ask_for_room_first(sharded: ShardedModel) -> None:
    """Let the first forward that trains ask for disk space, if activations need any."""
    if sharded.plan.has_activations_on_disk:
        from shardwise.sharded.activation_disk import ask_before_first_forward  # only these jobs load it

        ask_before_first_forward(sharded)
