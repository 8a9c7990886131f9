"""The door: `shard` a model by a plan, and train it as before."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from torch import nn

from shardwise.access import Access
from shardwise.birth import FirstValues, Init, Wishes, check_same_everywhere
from shardwise.checkpoint import (
    Belongings,
    Content,
    Keep,
    Loaded,
    Request,
    Saver,
    Stateful,
    content_of,
    find,
    load,
    rng,
)
from shardwise.comm import Commons, World
from shardwise.config import Plan, load_plan
from shardwise.errors import ConfigError, StateError
from shardwise.formats import DTYPES, MAX_FILE_BYTES, save_pretrained
from shardwise.mesh import Mesh
from shardwise.optim import AdoptedOptimizer, Company, vet
from shardwise.placement import KINDS, Table, mesh_for, table_for
from shardwise.precision import LossScaler, Verdict, cast_floating, clip, norm_of, scale_gradients
from shardwise.program import Activations, Footprint, UnitSpec, Update, plan_step, render, straight_trace
from shardwise.rehearsal import Loss, rehearse
from shardwise.runtime import BufferSync, Executor, Runner
from shardwise.storage import (
    Unit,
    choose_units,
    make_unit,
    rows_for,
    share,
    torch_dtype,
)
from shardwise.telemetry import ByteMeter, write_trace
from shardwise.units import format_bytes, format_count, parse_bytes

PlanLike = Plan | str | Path | Mapping[str, Any]


@dataclass(frozen=True)
class MemoryReport:
    """Bytes on this rank by kind: as the plan promised, as counted at the peak, and as replicas would need.

    Kinds are `param`, `grad`, `optim` (states and master weights) and `working` (gathered parameters and
    messages at their peak). Activations are the model's own and in none of them.
    """

    promised: dict[str, int]
    measured: dict[str, int]
    replicated: dict[str, int]

    @property
    def promised_total(self) -> int:
        return sum(self.promised.values())

    @property
    def measured_total(self) -> int:
        return sum(self.measured.values())

    @property
    def replicated_total(self) -> int:
        return sum(self.replicated.values())


def shard(
    model: nn.Module,
    plan: PlanLike = "zero3",
    *,
    optimizer: torch.optim.Optimizer | None = None,
    world: World | None = None,
    device: torch.device | str | None = None,
    weights: str | Path | None = None,
    strict: bool = True,
    init: Init | None = None,
) -> Engine:
    """Put every tensor of `model` and `optimizer` where `plan` says. All ranks call.

    `model` stays the same object, its parameters keep their names and shapes, and `optimizer` (any
    elementwise one, or one of `shardwise.optim`, over `model.parameters()`) stays the user's own object. All ranks
    start from rank 0's values. `plan` is a preset's name, a file, a mapping or a `Plan`; `world` is joined
    from the environment if it is not given, and is then closed with the engine.

    First values: those of the model; of one built inside `deferred_init()`, or on the meta device, each rank makes
    only its own part (docs/birth.md). `weights` is a safetensors file, or a folder as `save_pretrained` writes it,
    of which each rank reads its own part; names must fit unless `strict` is false. `init` is called as
    `init(module)` to fill a model on the meta device. `device` defaults to the model's own, and to this
    rank's for a model without values.

    Raises `ConfigError` for a plan that cannot be meant on this world and `ModelError` for a model or
    optimizer that cannot be sharded, or weights of another one; nothing has been changed then. Raises
    `CheckpointError` for files that cannot be read.
    """
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
        return Engine(model, loaded, optimizer, world, wishes, owns_world=own_world)
    except BaseException as error:
        if own_world:
            world.close(error)
        raise


class Engine:
    """A sharded model. Make one with `shard`."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        optimizer: torch.optim.Optimizer | None,
        world: World,
        wishes: Wishes,
        *,
        owns_world: bool = False,
    ) -> None:
        self.module = model
        self.plan = plan
        self.world = world
        self.mesh: Mesh = mesh_for(plan, world.size)
        self.table: Table = table_for(plan, self.mesh)
        self.num_steps = 0
        self.gradient_norm: float | None = None
        """The global 2-norm before clipping, of the last step; infinite where it overflowed and was not taken."""
        self.scaler = _scaler_for(plan)
        self._owns_world = owns_world
        if plan.patience_seconds is not None:
            world.be_patient(plan.patience_seconds)
        self._is_open = True
        self._meter = ByteMeter()
        self._updates = vet(optimizer, model) if optimizer is not None else {}
        self._units, self._commons = _build_units(model, plan, self.mesh, world, self._meter, wishes, self._updates)
        self._flats = [flat for unit in self._units for flat in unit.flats]
        self._saver = Saver(world, pinned=self._flats[0].device.type == "cuda")
        self._remembered: dict[str, Stateful] = {}
        self._wire_up(model, optimizer)
        self._runner.close_params()

    def _wire_up(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Tie hooks, programs and the optimizer together."""
        device = self._flats[0].device
        collectives = self.world.collectives(device)
        collectives.prepare(self.mesh)
        groups = {axis: self.world.group(self.mesh, axis) for axis in self.mesh.axes}
        self._verdict = Verdict(self._flats, collectives, groups)
        self._buffers = BufferSync(model, self.world)
        executor = Executor(self._flats, collectives, groups)
        executor.provide("verdict", lambda action: self._verdict.sum_over(action.over))
        executor.provide("buffers", lambda _: self._buffers.share())
        prefetch_bytes = None if self.plan.prefetch_bytes == "auto" else self.plan.prefetch_bytes
        company = Company(self._flats, collectives, self.mesh, self.world.rank, self._during_step)
        executor.provide("norms", company.add_norms)
        executor.provide("update", company.hand_over)
        self._optimizer: AdoptedOptimizer | None = None
        if optimizer is not None:
            self._optimizer = AdoptedOptimizer(
                optimizer,
                self._flats,
                before=self._before_step,
                after=self._after_step,
                forget=self.zero_grad,
                company=company,
            )
        self._runner = Runner(
            model,
            self._units,
            executor,
            self.world.exchange,
            self._commons,
            prefetch_bytes=prefetch_bytes,
            compile_backend=self.plan.compile,
        )
        self._access = Access(model, self._runner, executor.movers, self._optimizer)
        self._ledger = collectives.ledger
        self._timeline = executor.timeline
        self._cast_handle = model.register_forward_pre_hook(self._cast_inputs, prepend=True, with_kwargs=True)
        self._num_micro_batches = 0
        self._is_prepared = self._is_scaled = False
        self._is_taken = True

    # -- training ---------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward; `model(...)` does the same."""
        self._require_open()
        return self.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor) -> None:
        """Gradients of `loss`, a scalar on every rank, averaged over ranks and over the plan's `accumulate`."""
        self.scale(loss / self.plan.accumulate).backward()  # type: ignore[no-untyped-call]  # torch's own
        self._num_micro_batches += 1

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """`loss` times the present loss scale: for a plain loop in fp16, `engine.scale(loss).backward()`.

        In other precisions it is `loss` itself. The step takes the scale out of the gradients again.
        """
        self._require_open()
        self._is_scaled = True
        return loss if self.scaler is None else loss * self.scaler.scale

    def step(self) -> float | None:
        """Clip if the plan says so, update, and drop the gradients. All ranks call.

        Returns the global gradient norm before clipping; `None` where the plan accumulates and this was
        not the last micro-batch, so that nothing was updated. In fp16 it is infinite if a gradient
        overflowed on some rank: no rank has updated anything then, and the loss scale may have been halved.
        """
        self._require_open()
        if self._num_micro_batches % self.plan.accumulate:
            return None
        self._require_optimizer().optimizer.step()
        return self.gradient_norm

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Scale gradients to a global norm of at most `max_norm`; returns the norm before. All ranks call.

        For a plain loop, between `loss.backward()` and `optimizer.step()`. A plan with
        `clip_grad_norm` does it by itself, for the 2-norm. `norm_type` may be any positive number, or `inf`.
        """
        self._require_open()
        norm = self._prepare()
        if norm_type != 2:
            norm = norm_of(self._flats, norm_type, self.world.exchange)
        clip(self._flats, norm, max_norm)
        return norm

    def zero_grad(self) -> None:
        """Forget all gradients. A step forgets them too; this is for those that are not to be used."""
        self._is_prepared = self._is_scaled = False
        self._num_micro_batches = 0
        for flat in self._flats:
            flat.drop_gradients()
        if self._optimizer is not None:
            self._optimizer.withdraw_gradients()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backwards leave gradients on the rank that made them; the next one outside, or the step, sums all.

        Saves communication where gradients are accumulated, and takes a whole gradient's memory, as DDP's
        does. For the same at every step: `rows: {grad: {partial: [...]}}` in the plan.
        """
        self._require_open()
        before, self._runner.reduces = self._runner.reduces, False
        try:
            yield
        finally:
            self._runner.reduces = before

    # -- agreement between ranks ------------------------------------------------------------------------

    def any_rank(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank: how ranks decide to stop together. All ranks call."""
        return self.world.any_rank(flag)

    def mean(self, value: float) -> float:
        """The mean of every rank's `value`, such as a loss to print. All ranks call."""
        return self.world.mean(value)

    # -- state ------------------------------------------------------------------------------------------

    def save(
        self,
        folder: str | Path,
        step: int | None = None,
        state: Mapping[str, Any] | None = None,
        *,
        wait: bool = True,
        keep: Keep | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> Path:
        """Write a checkpoint into `folder/step-XXXXXXXX` and make it the latest. All ranks call, between steps.

        `state` is the caller's own, rank 0's is kept: numbers, text, lists, dicts, tensors. `step` defaults to the
        number of optimizer steps taken. With `wait=False` it returns when what the model shows is copied to host
        memory, and goes on in the background; what only the optimizer holds is copied first there, and the next step
        waits for that. A failure is raised by the next call that saves, resumes or closes. `keep`
        says which checkpoints of the folder stay, and `metrics` by what the best is known.

        Raises `CheckpointError` on all ranks if it could not be written; what was there before is still there.
        """
        self._require_open()
        number = self.num_steps if step is None else step
        kept: dict[str, Any] = {"num_steps": self.num_steps, "user": dict(state or {})}
        if self.scaler is not None:
            kept["loss_scale"] = self.scaler.state_dict()
        request = Request(
            Path(folder),
            number,
            layout=f"{self.table.optim} on {self.mesh}",
            state=kept,
            metrics=dict(metrics or {}),
            keep=keep or Keep(),
            memories={
                "generators": rng.capture(),
                "objects": {name: thing.state_dict() for name, thing in self._remembered.items()},
            },
        )
        return self._saver.save(request, self._content(), wait=wait)

    def remember(self, **objects: Stateful) -> None:
        """Keep what these objects say in `state_dict()` in every checkpoint, each rank its own; `resume` gives it back.

        `engine.remember(scheduler=scheduler, loader=loader)`. All ranks call, before `resume`.
        """
        self._remembered.update(objects)

    def wait_for_save(self) -> None:
        """Return once the last `save(wait=False)` is on disk; raise `CheckpointError` if it failed. All ranks call."""
        self._saver.settle()

    def resume(self, folder: str | Path) -> Loaded | None:
        """Continue from the latest checkpoint in `folder`; `None`, and nothing changed, if there is none.

        `folder` may be one checkpoint too. Any world size, plan and precision can have written it. All ranks call;
        all raise the same `CheckpointError`, and nothing is changed, if it is damaged or another model's.
        """
        self._require_open()
        self._saver.settle()
        path = find(Path(folder), self.world)
        if path is None:
            return None
        self._runner.open_params()
        loaded = load(path, self._content(), self._optimizer, self.world, self._remembered)
        self.num_steps = int(loaded.state["num_steps"])
        if self.scaler is not None and "loss_scale" in loaded.state:
            self.scaler.load_state_dict(loaded.state["loss_scale"])
        self.zero_grad()
        self._runner.restore_params()
        return replace(loaded, state=loaded.state["user"])

    def reshard(self, plan: PlanLike) -> None:
        """Go on by another plan: another table, mesh, units or precision over the same ranks. All ranks call.

        Parameters, optimizer states and counters are kept, and moved between the ranks unit by unit; model, optimizer
        and schedulers stay the same objects. Between steps: raises `StateError` while gradients wait for one, and
        `ConfigError` for a plan that cannot be meant here; nothing has been changed then.
        """
        self._require_open()
        loaded = load_plan(plan)
        mesh = mesh_for(loaded, self.world.size)
        table = table_for(loaded, mesh)
        choices, rows = choose_units(self.module, loaded), rows_for(self.module, loaded, mesh)
        if len(set(self.world.exchange(loaded.model_dump_json().encode()))) > 1:
            raise ConfigError("The ranks gave reshard() different plans; give all of them the same.")
        if self.world.any_rank(any(any(flat.touched) for flat in self._flats)):
            raise StateError("Gradients are waiting for a step; take it, or call zero_grad(), before reshard().")
        optimizer = self._optimizer.optimizer if self._optimizer is not None else None
        belongings = Belongings(self._flats, self._optimizer, self.world)
        device = self._flats[0].device
        self._take_down()
        if loaded.precision != self.plan.precision:
            self.scaler = _scaler_for(loaded)
        self.plan, self.mesh, self.table, self._meter = loaded, mesh, table, ByteMeter()
        coordinate = mesh.coordinate(self.world.rank)
        self._units = [
            make_unit(choice, rows, mesh, coordinate, self._meter, device, self._updates) for choice in choices
        ]
        self._units = [unit for unit in self._units if unit.flats]
        self._flats = [flat for unit in self._units for flat in unit.flats]
        collectives = self.world.collectives(self._flats[0].device)
        self._commons = share(self._flats, collectives, mesh, self.world.rank)
        states: dict[str, dict[str, Any]] = {}
        for flat in self._flats:
            states |= belongings.move_into(flat, collectives)
        self._wire_up(self.module, optimizer)
        for piece in self._optimizer.pieces if self._optimizer is not None else ():
            self._require_optimizer().put_state(piece, states.get(piece.name, {}))
        self._runner.restore_params()

    def _take_down(self) -> None:
        """Undo `_wire_up`, and let go of the flat buffers."""
        self._unhook()
        if self._optimizer is not None:
            self._optimizer.give_back()
        self._runner.dissolve()
        del self._units, self._flats, self._commons, self._runner, self._access, self._verdict, self._optimizer

    def save_pretrained(
        self,
        folder: str | Path,
        *,
        dtype: Literal["fp32", "bf16", "fp16"] | None = None,
        max_file_bytes: int = MAX_FILE_BYTES,
        overwrite: bool = False,
    ) -> None:
        """Write the model as a folder of Hugging Face, which `from_pretrained` loads. All ranks call.

        Unit by unit: no rank ever has the whole model; rank 0 writes. Parameters have the precision in which the
        optimizer keeps them, unless `dtype` asks for another. A model of the transformers library gets its
        configuration too; any other module its state dict, as `model.safetensors`, split at `max_file_bytes`.
        Raises `CheckpointError` on all ranks if `folder` is not empty and `overwrite` is not given.
        """
        self._require_open()
        save_pretrained(
            self.module,
            self._access.kept_params(),
            self._access.whole_params(),
            self.world,
            Path(folder),
            dtype=None if dtype is None else DTYPES[dtype],
            max_file_bytes=max_file_bytes,
            overwrite=overwrite,
        )

    def _content(self) -> Content:
        own = not self.plan.sync_buffers
        return content_of(self.module, self._flats, self._optimizer, self.world.rank, own_buffers=own)

    # -- whole tensors ----------------------------------------------------------------------------------

    def gathered(self, *names: str, write: bool = False) -> AbstractContextManager[None]:
        """Inside `with`, the named parameters of the model (all, without names) are whole on every rank.

        With `write` rank 0's edits are taken over by all ranks on leaving. All ranks enter and leave.
        """
        self._require_open()
        if write:
            self._saver.wait_for_copy()
        return self._access.gathered(names, write=write)

    def inference(self, keep_bytes: int | str | None = None) -> AbstractContextManager[None]:
        """Inside `with`, each rank runs the model at its own pace, without gradients: `module.generate()`, any method.

        All ranks enter and leave; in between prompts, lengths and the number of calls may differ from rank to rank.
        Parameters are whole inside, in the dtype of the forward, and nothing is sent. With `keep_bytes`
        (`"2GiB"`, 0) only as many units are as fit; the others are gathered when any rank calls for one, which takes
        as many messages as there are such units in a forward, and the memory of two of them.
        """
        self._require_open()
        num_bytes = parse_bytes(keep_bytes) if isinstance(keep_bytes, str) else keep_bytes
        return self._runner.inference(self.world, num_bytes)

    def get(self, name: str, what: str = "param") -> torch.Tensor | None:
        """A whole tensor by the parameter's name, on every rank. All ranks call.

        `what` is `param`, `grad` (between backward and step, averaged over ranks), or a state of the
        optimizer such as `exp_avg`; in the dtype in which it is kept. `None` if there is none.
        """
        self._require_open()
        if what == "grad" and self._optimizer is not None:
            self._prepare()
        return self._access.read(name, what)

    def set(self, name: str, value: torch.Tensor, what: str = "param") -> None:
        """Replace what `get` returns. All ranks call, with the same value."""
        self._require_open()
        if what == "grad" and self._optimizer is not None:
            self._prepare()
        self._saver.wait_for_copy()
        self._access.write(name, value, what)

    def state_dict(self, *, rank_0_only: bool = False) -> dict[str, torch.Tensor]:
        """The plain model's `state_dict`, whole, on the CPU, for `model.load_state_dict` anywhere. All ranks call.

        Unit by unit, so that no device holds more than one. Ranks other than 0 get `{}` if `rank_0_only`.
        """
        self._require_open()
        return self._access.state_dict(on_rank=not rank_0_only or self.world.rank == 0)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over a plain model's `state_dict`, the same on every rank. All ranks call."""
        self._require_open()
        self._saver.wait_for_copy()
        self._access.load_state_dict(state)

    def optimizer_state_dict(self, *, rank_0_only: bool = False) -> dict[str, Any]:
        """The plain optimizer's `state_dict()`, whole, on the CPU. All ranks call; see `state_dict`."""
        self._require_open()
        return self._access.optimizer_state_dict(on_rank=not rank_0_only or self.world.rank == 0)

    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a plain optimizer's `state_dict()`, the same on every rank. All ranks call.

        `optimizer.load_state_dict` does the same."""
        self._require_open()
        self._require_optimizer().optimizer.load_state_dict(dict(state))

    # -- what people read -------------------------------------------------------------------------------

    def memory(self) -> MemoryReport:
        """Promise and measurement for this rank; see `MemoryReport`."""
        specs = tuple(unit.spec for unit in self._units)
        promised = self._footprint(specs)
        ddp = table_for(Plan(preset="ddp", precision=self.plan.precision), self.mesh)
        replicas = tuple(_with_table(unit.spec, ddp.on(self.mesh)) for unit in self._units)
        return MemoryReport(promised.by_kind, self._measured(), self._footprint(replicas).by_kind)

    def rehearse(self, batch: object, loss: Loss | None = None) -> Footprint:
        """What a step on `batch` will hold on this rank when it holds most, activations included: see `Footprint`.

        Runs a twin of the model without memory and without arithmetic; nothing is changed, and no other rank is asked.
        `batch` is a tensor, a tuple of arguments, or a dict of keyword arguments, of which only shapes and dtypes
        count. `loss` makes of the model's output what is sent back, and must be given where a loop computes it itself;
        else it is the output, or its `loss`. Raises `ModelError` for a model that asks for the values of tensors.
        """
        self._require_open()
        device, compute = self._flats[0].device, self.table.compute
        activations = rehearse(self.module, self._units, batch, device=device, compute=compute, loss=loss)
        return self._footprint(tuple(unit.spec for unit in self._units), activations)

    def _footprint(self, specs: tuple[UnitSpec, ...], activations: Activations | None = None) -> Footprint:
        trace = self._runner.trace if specs == self._runner.specs else straight_trace(specs)
        trace = activations.trace if activations is not None else trace
        budget = None if self.plan.prefetch_bytes == "auto" else self.plan.prefetch_bytes
        planned = plan_step(
            specs,
            trace,
            prefetch_bytes=budget,
            states_per_param=0,  # without an optimizer; else each parameter says what is kept for it
            coordinate=self.mesh.coordinate(self.world.rank),
            num_micro_batches=self.plan.accumulate,
            activations=activations,
        )
        return planned.footprint

    def _measured(self) -> dict[str, int]:
        meter = self._meter
        states = self._optimizer.state_bytes() if self._optimizer is not None else 0
        resting = meter.now["param"] + meter.now["optim"]
        return {
            "param": meter.now["param"],
            "grad": meter.peak["grad"],
            "optim": meter.now["optim"] + states,
            "working": max(0, meter.peak_total - resting - meter.peak["grad"]),
        }

    @contextmanager
    def timeline(self, path: str | Path) -> Iterator[None]:
        """Write what every rank does inside, unit by unit and action by action, to `path`. All ranks call.

        A Chrome trace, for ui.perfetto.dev. Times are the host's: for kernels of a GPU run `torch.profiler` beside
        it, to which the actions are known by the same names.
        """
        self._require_open()
        self._timeline.start()
        try:
            yield
        finally:
            events = self._timeline.stop()
        told = self.world.exchange(json.dumps(events).encode())
        if self.world.rank == 0:
            write_trace(Path(path), [json.loads(message) for message in told])

    def program(self) -> str:
        """The program of one step as text: as foreseen before the first step, as recorded after it."""
        return render(self._runner.program.micro_batch) + render(self._runner.program.step)

    def __str__(self) -> str:
        """The table, the units, and the bytes of this rank."""
        memory = self.memory()
        rows = [f"  {kind:6} {self.table.place(kind)}" for kind in KINDS]
        units = [f"  {unit.name:24} {_said_unit(unit.spec)}" for unit in self._units]
        sums = [f"  {kind:8} {format_bytes(num_bytes)}" for kind, num_bytes in memory.promised.items()]
        return "\n".join(
            (
                f"{self.plan.preset} on {self.mesh}, rank {self.world.rank} of {self.world.size}",
                *self._said_transports(),
                f"table, computing in {self.table.compute}, gradients travelling in {self.table.wire}",
                *rows,
                f"{len(units)} units",
                *units,
                "bytes of this rank, as promised",
                *sums,
            )
        )

    def _said_transports(self) -> list[str]:
        """`bytes travel along local by shared memory, along node by gloo`"""
        if self.world.size == 1:
            return []
        collectives = self.world.collectives(self._flats[0].device)
        lines = {axis: self.world.group(self.mesh, axis) for axis in self.mesh.axes if self.mesh.size(axis) > 1}
        said = [f"along {axis} by {collectives.transport(line)}" for axis, line in lines.items()]
        return [f"bytes travel {', '.join(said)}"]

    def __repr__(self) -> str:
        state = "open" if self._is_open else "closed"
        return f"<Engine: {type(self.module).__name__}, {self.plan.preset} on {self.mesh}, {state}>"

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise StateError(
            "An engine cannot be copied: its model's memory and its place among the ranks are not two. "
            "Copy the values with engine.state_dict(), or the model before it is sharded."
        )

    def __reduce__(self) -> NoReturn:
        raise StateError("An engine cannot be pickled. Write a checkpoint with engine.save(folder).")

    # -- the end ----------------------------------------------------------------------------------------

    def close(self, error: BaseException | None = None) -> None:
        """Unhook from model and optimizer. May be called twice. The model's parameters are no longer whole.

        Waits for a checkpoint that is still being written, and raises what went wrong with it. With an `error`,
        as after an exception inside `with`, the other ranks raise too, and name it.
        """
        if not self._is_open:
            return
        self._is_open = False
        try:
            self._saver.close()
        finally:
            self._unhook()
            if self._owns_world:
                self.world.close(error)

    def _unhook(self) -> None:
        self._runner.remove()
        self._cast_handle.remove()
        if self._optimizer is not None:
            self._optimizer.release()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close(error)

    # -- the optimizer step, whoever asks for it --------------------------------------------------------

    def _before_step(self) -> None:
        norm = self._prepare()
        if not self._is_taken:
            return  # without gradients an optimizer changes nothing
        self._runner.open_params()
        if self.plan.clip_grad_norm is not None:
            clip(self._flats, norm, self.plan.clip_grad_norm)
        self._saver.wait_for_copy()
        self._require_optimizer().offer_gradients()

    def _during_step(self) -> None:
        """An optimizer asks for whole parameters. Where no gradient was offered, nobody has anything to say."""
        if self._is_taken:
            self._runner.during_step()

    def _prepare(self) -> float:
        """Bring gradients to where the update needs them, once per step, and agree on their norm."""
        if not self._is_prepared or self.gradient_norm is None:
            self._runner.before_step()
            self.gradient_norm = self._verdict.pronounce()
            if self._verdict.is_incomplete:
                self._runner.reduce_unforeseen()
                self._runner.before_step()
                self.gradient_norm = self._verdict.pronounce()
            if self.scaler is not None:
                self._unscale(self.scaler)
            self._is_prepared = True
        return self.gradient_norm

    def _unscale(self, scaler: LossScaler) -> None:
        """Take the loss scale out of the gradients, and learn whether the step may be taken."""
        if not self._is_scaled:
            raise StateError(
                "precision fp16 needs a scaled loss, but the gradients are not. Call engine.backward(loss), or "
                "engine.scale(loss).backward(), in the place of loss.backward()."
            )
        scale, norm = scaler.scale, self.gradient_norm
        assert norm is not None
        self._is_taken = scaler.judge(norm)
        if self._is_taken:
            scale_gradients(self._flats, 1 / scale)
            self.gradient_norm = norm / scale

    def _after_step(self) -> None:
        self._require_optimizer().withdraw_gradients()
        if not self._is_taken:
            self._is_taken = True
            self.zero_grad()
            return
        if self.plan.sync_buffers and not self._buffers.is_learnt and self.world.size > 1:
            self._runner.foresee_buffers(self._buffers.learn())
        self._runner.after_step()
        self._is_prepared = self._is_scaled = False
        self._num_micro_batches = 0
        self.num_steps += 1

    def _cast_inputs(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self.table.compute not in ("bf16", "fp16"):
            return None
        dtype = torch_dtype(self.table.compute)
        return cast_floating(args, dtype), cast_floating(kwargs, dtype)

    def _require_open(self) -> None:
        if not self._is_open:
            raise StateError("This engine was closed; call shard() again to train the model.")

    def _require_optimizer(self) -> AdoptedOptimizer:
        if self._optimizer is None:
            raise StateError(
                "This engine has no optimizer; give one to shard(model, plan, optimizer=...) to take steps."
            )
        return self._optimizer


def _scaler_for(plan: Plan) -> LossScaler | None:
    return LossScaler(plan.loss_scale) if plan.precision == "fp16" else None


def _build_units(
    model: nn.Module,
    plan: Plan,
    mesh: Mesh,
    world: World,
    meter: ByteMeter,
    wishes: Wishes,
    updates: Mapping[nn.Parameter, Update],
) -> tuple[list[Unit], list[Commons]]:
    """Check, choose, and only then change anything."""
    check_same_everywhere(model, world)
    choices, rows = choose_units(model, plan), rows_for(model, plan, mesh)
    values = FirstValues(model, wishes, world)
    coordinate = mesh.coordinate(world.rank)
    units = [make_unit(choice, rows, mesh, coordinate, meter, values.device, updates) for choice in choices]
    units = [unit for unit in units if unit.flats]
    flats = [flat for unit in units for flat in unit.flats]
    commons = share(flats, world.collectives(values.device), mesh, world.rank)
    values.settle(units)
    return units, commons


def _with_table(unit: UnitSpec, table: Table) -> UnitSpec:
    return replace(unit, flats=tuple(replace(flat, table=table) for flat in unit.flats))


def _said_unit(unit: UnitSpec) -> str:
    frozen = sum(flat.numel for flat in unit.flats if not flat.trainable)
    numel = sum(flat.numel for flat in unit.flats)
    return format_count(numel) + (f", {format_count(frozen)} of them frozen" if frozen else "")
