"""A model laid out by one plan, with what trains it: hooks, programs, the adopted optimizer, and the steps they take.

The optimizer's own hooks lead here, so a step is the same whoever asks for it: `engine.step()`, `optimizer.step()`, or
a loop that knows nothing of engines. Another plan makes another `ShardedModel` (`state.reshard`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from shardwise.access import Access
from shardwise.activations import (
    ActivationMemory,
    DiskStore,
    HostStore,
    Offloading,
    PagedMemory,
    Store,
    TreatedSites,
)
from shardwise.comm import DataGroup, World
from shardwise.config import Plan
from shardwise.errors import StateError
from shardwise.gradients import Gradients
from shardwise.mesh import SEQUENCE_AXIS
from shardwise.optim import AdoptedOptimizer, Piece, RankPeers, hyper_digest
from shardwise.pipeline import Pipeline, SharedGradients, has_pipeline
from shardwise.precision import LossScaler, NoNews, Norm, Verdict, cast_floating
from shardwise.program import Action, Activations
from shardwise.runtime import NO_COPY, BufferSync, Executor, Runner, Settings
from shardwise.sequence import SequenceParallel
from shardwise.sharding import Sharding
from shardwise.storage import Flat, on_host, torch_dtype
from shardwise.telemetry import Ledger, Timeline
from shardwise.tensors import Owner, Structure


@dataclass
class Progress:
    """How far training has come. It outlives the `ShardedModel` of one plan."""

    num_steps: int = 0
    gradient_norm: Norm | None = None
    scaler: LossScaler | None = None


def scaler_for(plan: Plan) -> LossScaler | None:
    return LossScaler(plan.loss_scale) if plan.precision == "fp16" else None


@dataclass(frozen=True)
class Parts:
    """Everything that holds memory of one plan. None of it holds whoever holds it, so that the memory goes as soon as
    `ShardedModel` lets go of this, and waits for no garbage collection."""

    sharding: Sharding
    flats: list[Flat]
    optimizer: AdoptedOptimizer | None
    runner: Runner
    verdict: Verdict
    buffers: BufferSync
    gradients: Gradients
    access: Access
    owner: Owner
    ledger: Ledger
    timeline: Timeline


class ShardedModel:
    """Ties one sharded model to its hooks, programs and optimizer, and takes its steps.

    `before_change` is called before a step changes what an optimizer holds.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        sharding: Sharding,
        world: World,
        progress: Progress,
        before_change: Callable[[], None],
    ) -> None:
        self.model = model
        self.world = world
        self.plan, self.mesh, self.table = sharding.plan, sharding.mesh, sharding.table
        self.data_group = DataGroup(world, self.mesh)
        self.peers = DataGroup(world, self.mesh, self.mesh.params_axes)
        """The ranks that list the same parameters, those that a model axis cuts included."""
        self.progress = progress
        self.before_change = before_change
        self.pipeline: Pipeline | None = None
        self.shares_params = False
        """Whether this rank has parameters that other stages of its pipeline have too."""
        self.rehearsed: tuple[Activations, ...] = ()
        """What the latest rehearsal has counted, stage by stage."""
        self._num_micro_batches = 0
        self._hooks = ExitStack()
        self.disk = sharding.disk
        """What keeps the rows on a disk, if there are such."""
        self._parts: Parts | None = self._tied(sharding, optimizers)
        self.sequence = self._split_sequences(sharding.device)
        around = self.sequence.recomputing if self.sequence is not None else nullcontext
        treated = TreatedSites(sharding.treatments.by_site, self._stores(sharding), around)
        treated.install()
        self._hooks.callback(treated.remove)

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise StateError(NO_COPY)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise StateError(NO_COPY)

    def _tied(self, sharding: Sharding, optimizers: Sequence[torch.optim.Optimizer]) -> Parts:
        """Hooks to programs, programs to collectives, optimizers to their pieces."""
        plan, world = self.plan, self.world
        flats = [flat for unit in sharding.units for flat in unit.flats]
        collectives = world.collectives(sharding.device)
        collectives.prepare(self.mesh)
        groups = {axis: world.group(self.mesh, axis) for axis in self.mesh.axes}
        peers = RankPeers(flats, collectives, self.mesh, world.rank, self._during_step)
        exchange = self.data_group.exchange
        buffers = BufferSync(self.model, self.data_group, on_host)
        stages = [axis for axis in self.mesh.model_axes if axis not in self.mesh.same_params_axes]
        world.journal.whole_model_axes = frozenset([world.everybody.axis, *stages] if stages else [])
        verdict = Verdict(
            flats,
            collectives,
            groups,
            buffers if plan.sync_buffers and self.data_group.size > 1 else NoNews(),
            exchange=None if on_host(sharding.device) else partial(world.exchange, subject="verdict"),
            peers=self.peers.group.ranks,
            stages=stages,
            must_know_norm=plan.precision == "fp16",
            complete=self._shared_gradients(sharding, flats),
        )
        executor = Executor(flats, collectives, groups)
        executor.provide("verdict", lambda action: verdict.sum_over(action.over))
        executor.provide("buffers", lambda _: buffers.share())
        executor.provide("norms", peers.add_norms)
        by_name = {flat.name: flat for flat in flats}
        executor.provide("master", lambda action: self.require_optimizer().update_flat(by_name[action.flat]))
        executor.provide("states", partial(self._move_states, by_name))
        if sharding.disk is not None:
            sharding.disk.timeline = executor.timeline
        executor.provide("matrix", peers.exchange_matrices)
        executor.provide("update", peers.exchange_matrices)
        optimizer = self._adopt(optimizers, flats, peers) if optimizers else None
        prefetch_bytes = None if plan.prefetch_bytes == "auto" else plan.prefetch_bytes
        settings = Settings(prefetch_bytes, plan.compile)
        closings = partial(exchange, subject="closings")
        runner = Runner(self.model, sharding.units, executor, closings, sharding.shared_buffers, settings)
        agreement = executor.agreement
        groups_asked = (world.exchange, self.peers.exchange, exchange)
        among_all, among_peers, among_data = (partial(asked, subject="norms") for asked in groups_asked)
        exchanges = (among_all, among_peers, among_data)
        gradients = Gradients(flats, agreement, runner, verdict, exchanges, lambda: self.progress.scaler)
        access = Access(self.model, runner, flats, agreement, optimizer)
        owner = Owner(sharding.units, runner, agreement, access, gradients, self.before_change)
        self._hooks.callback(owner.close)
        self._hooks.callback(Structure(self.model).release)
        cast = self.model.register_forward_pre_hook(self._cast_inputs, prepend=True, with_kwargs=True)
        self._hooks.callback(cast.remove)
        self._hooks.callback(runner.remove)
        if sharding.staged is not None:
            self.pipeline = Pipeline(sharding.staged, world, self.mesh, sharding.device)
            self.pipeline.attach()
            units = sharding.staged.by_stage([(unit.spec, unit.params) for unit in sharding.units])
            runner.foresee_schedule(self.pipeline.row, units, self.pipeline.halved_params)
            gradients.is_of_stage = True
            world.journal.part = f"stage {', '.join(map(str, sharding.staged.stages))}"
            self._hooks.callback(self.pipeline.release)
        ledger, timeline = collectives.ledger, executor.timeline
        return Parts(sharding, flats, optimizer, runner, verdict, buffers, gradients, access, owner, ledger, timeline)

    def _stores(self, sharding: Sharding) -> dict[str, Offloading]:
        """Where activations go that leave the device, by policy."""
        if not sharding.treatments.have("offload", "disk"):
            return {}
        flats = [flat.full for unit in sharding.units for flat in unit.flats]
        resting = [*flats, *(param for param in self.model.parameters() if not param.is_floating_point())]
        own = self.world.rank_device
        device = own if sharding.device.type == own.device.type else None
        waits = device is not None and device.accelerator is not None
        stores: dict[str, Store] = {"offload": HostStore(ActivationMemory(sharding.meter, device))}
        if sharding.treatments.have("disk"):
            assert sharding.disk is not None
            stores["disk"] = DiskStore(sharding.disk, PagedMemory(sharding.meter, device), sharding.meter)
        return {policy: Offloading(store, sharding.device, resting, waits=waits) for policy, store in stores.items()}

    def _shared_gradients(self, sharding: Sharding, flats: Sequence[Flat]) -> Callable[[], None] | None:
        """What adds up gradients of parameters that lie on several stages of a pipeline, if this rank has any."""
        if sharding.staged is None:
            return None
        shared = SharedGradients(sharding.staged, flats, self.world, self.mesh)
        self.shares_params = bool(shared)
        return shared.add_up if shared else None

    def _split_sequences(self, device: torch.device) -> SequenceParallel | None:
        """What leads the model's attention over the ranks that share in a sequence, if the mesh has such."""
        if SEQUENCE_AXIS not in self.mesh.axes or self.mesh.size(SEQUENCE_AXIS) == 1:
            return None
        in_stages = has_pipeline(self.mesh)
        sequence = SequenceParallel(self.model, self.plan, self.mesh, self.world, device, in_stages=in_stages)
        self._hooks.callback(sequence.close)
        return sequence

    def _adopt(
        self, optimizers: Sequence[torch.optim.Optimizer], flats: Sequence[Flat], peers: RankPeers
    ) -> AdoptedOptimizer:
        adopted = AdoptedOptimizer(
            optimizers,
            flats,
            before=self._before_step,
            after=self._after_step,
            forget=self._forget,
            whole=self._whole_state,
            peers=peers,
        )
        self._hooks.callback(adopted.release)
        return adopted

    # -- what it is made of -----------------------------------------------------------------------------

    @property
    def is_taken_down(self) -> bool:
        return self._parts is None

    @property
    def parts(self) -> Parts:
        if self._parts is None:
            raise StateError("This engine's memory went to another plan, so there is nothing left here to ask.")
        return self._parts

    @property
    def sharding(self) -> Sharding:
        return self.parts.sharding

    @property
    def flats(self) -> list[Flat]:
        return self.parts.flats

    @property
    def optimizer(self) -> AdoptedOptimizer | None:
        return self.parts.optimizer

    def find_states(self) -> None:
        """After a failed step: let tensors be where the disk's rows are."""
        for flat in self.flats:
            if flat.rows is not None:
                flat.find_rows()
        if self.optimizer is not None:
            self.optimizer.find_states()

    @property
    def runner(self) -> Runner:
        return self.parts.runner

    @property
    def gradients(self) -> Gradients:
        return self.parts.gradients

    @property
    def access(self) -> Access:
        return self.parts.access

    @property
    def ledger(self) -> Ledger:
        return self.parts.ledger

    @property
    def timeline(self) -> Timeline:
        return self.parts.timeline

    def require_optimizer(self) -> AdoptedOptimizer:
        if self.optimizer is None:
            raise StateError(
                "This engine has no optimizer; give one to shard(model, plan, optimizer=...) to take steps."
            )
        return self.optimizer

    def unhook(self) -> None:
        """Leave the model and the optimizer alone from now on. May be called twice, and after `take_down`."""
        self._hooks.close()

    def take_down(self) -> None:
        """Unhook, give the optimizer its parameters back, and let go of the flat buffers.

        What is left is what an engine whose `reshard` fails half-way is described and closed by.
        """
        self.unhook()
        parts, self._parts = self.parts, None
        parts.owner.release()
        if parts.optimizer is not None:
            parts.optimizer.give_back()

    # -- what a loop asks for ---------------------------------------------------------------------------

    def refuse_stages(self, what: str, cure: str) -> None:
        """Raise `StateError` if the model is cut into pipeline stages, for which there is no `what`."""
        if self.pipeline is not None:
            raise StateError(f"A model that is cut into pipeline stages has no {what} in this version. {cure}")

    def backward(self, loss: torch.Tensor) -> None:
        self.scale(loss / self.plan.accumulate).backward()  # type: ignore[no-untyped-call]  # torch's own
        self._num_micro_batches += 1

    def note_step_complete(self) -> None:
        """A pipeline has run all micro-batches of a step, whichever of its losses were this rank's."""
        self._num_micro_batches = self.plan.accumulate

    @property
    def is_between_micro_batches(self) -> bool:
        """Whether `backward` has been called for some micro-batches of a step, and not for all."""
        return self._num_micro_batches % self.plan.accumulate > 0

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        scaler = self.progress.scaler
        if scaler is None:
            return loss
        scaled = loss * scaler.scale
        scaled.register_hook(lambda _: self.runner.note_scaled())  # type: ignore[no-untyped-call]  # torch's own
        return scaled

    def step(self) -> Norm | None:
        """The gradient norm; `None` if more micro-batches are to come."""
        if self._num_micro_batches % self.plan.accumulate:
            return None
        for member in self.require_optimizer().members:
            member.step()
        self.zero_grad()
        return self.progress.gradient_norm

    def zero_grad(self, *, keep: bool = False) -> None:
        """Forget all gradients, or with `keep` make them zeros. All ranks call."""
        self._num_micro_batches = 0
        self.gradients.zero(keep=keep)
        if self.optimizer is not None:
            self.optimizer.withdraw_gradients()

    def _forget(self, pieces: Sequence[Piece] | None, set_to_none: bool) -> None:
        """`zero_grad` of one optimizer: of the only one it forgets all gradients, of one of several its own."""
        if pieces is None:
            self.zero_grad(keep=not set_to_none)
        else:
            self.gradients.zero(pieces, keep=not set_to_none)

    def _whole_state(self, member: torch.optim.Optimizer) -> dict[str, Any]:
        """`state_dict()` of one optimizer, as the plain one would return it."""
        self.refuse_stages("optimizer.state_dict()", "Checkpoints have the states: engine.save(folder).")
        return self.access.optimizer_state_dict(member)

    @contextmanager
    def inference(self, keep_bytes: int | None) -> Iterator[None]:
        """See `Engine.inference`. Sequences are whole inside."""
        with ExitStack() as stack:
            if self.sequence is not None:
                stack.enter_context(self.sequence.suspended())
            stack.enter_context(self.runner.inference(self.world, keep_bytes))
            yield

    # -- the optimizer's step, whoever asks for it ------------------------------------------------------

    def _before_step(self, member: torch.optim.Optimizer) -> None:
        if self.disk is not None:
            self.disk.require_whole()
        self.world.journal.mark(hyper_digest(member))  # the next collective will compare
        self.progress.gradient_norm = self.gradients.norm_before_clipping()
        optimizer = self.require_optimizer()
        if not self.gradients.judge():
            optimizer.offer_nothing(member)
            return  # without gradients an optimizer changes nothing
        self.runner.step.open_params()
        if self.plan.clip_grad_norm is not None:
            self.gradients.clip_by_plan(self.plan.clip_grad_norm)
        self.before_change()
        self.world.journal.check()  # see [Note: garbage after a fault]
        optimizer.begin(member)
        self.runner.step.update_units()
        optimizer.offer_gradients(member)

    def _move_states(self, flats: Mapping[str, Flat], action: Action) -> None:
        """`fetch` or `evict` of what one flat buffer has on a disk."""
        optimizer = self.require_optimizer()
        move = optimizer.fetch_states if action.verb == "fetch" else optimizer.evict_states
        move(flats[action.flat])

    def _during_step(self) -> None:
        """An optimizer asks for whole parameters. Where no gradient was offered, nobody has anything to say."""
        if self.gradients.is_taken:
            self.runner.step.during()

    def _after_step(self, member: torch.optim.Optimizer) -> None:
        self.require_optimizer().withdraw_gradients()
        if not self.gradients.is_taken:
            self.zero_grad()
            return
        parts = self.parts
        if parts.verdict.is_news:
            parts.runner.programs.foresee_buffers(parts.buffers.learn())
        parts.runner.step.after()
        if self.disk is not None:
            self.disk.settle()
        parts.gradients.note_step()
        self._num_micro_batches = 0
        if member is self.require_optimizer().members[0]:
            self.progress.num_steps += 1

    def _cast_inputs(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self.parts.owner.require_trainable()
        if self.table.compute not in ("bf16", "fp16"):
            return None
        dtype = torch_dtype(self.table.compute)
        return cast_floating(args, dtype), cast_floating(kwargs, dtype)
