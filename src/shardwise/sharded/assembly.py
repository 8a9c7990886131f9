"""What trains a model under one plan, and how it is put together: hooks to programs, programs to collectives,
optimizers to their pieces."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from shardwise.comm import Collectives, Communicator, DataGroup, Line, World
from shardwise.errors import ConfigError
from shardwise.memory import Flat, on_host
from shardwise.optim import AdoptedOptimizer, Piece, RankPeers
from shardwise.optim.precision import Agreeing, LossScaler, NoNews, Verdict
from shardwise.parallel.experts import EXPERT_LOAD, loaded
from shardwise.plan import Plan
from shardwise.plan.mesh import SEQUENCE_AXIS, TENSOR_AXIS
from shardwise.plan.mesh import STAGE_AXIS as STAGES
from shardwise.program import Action, stay_as_made
from shardwise.runtime import BufferSync, Executor, Runner, Settings
from shardwise.runtime.activations import (
    ActivationMemory,
    DiskStore,
    HostStore,
    Offloading,
    PagedMemory,
    Store,
    TreatedSites,
    Treatments,
)
from shardwise.sharded.access import Access
from shardwise.sharded.at_rest import (
    Owner,
    OwnShare,
    StageNames,
    Structure,
    give_values_to_torch,
    use_unsplit_states,
)
from shardwise.sharded.gradients import Gradients
from shardwise.sharded.sharding import Sharding
from shardwise.sharded.unfreezing import Unfreezing
from shardwise.system.heap import BackwardHeap, FreeHeap, heap_for_backwards, heap_to_keep_small
from shardwise.system.own_hooks import hook
from shardwise.system.telemetry import Ledger, Timeline

if TYPE_CHECKING:
    from shardwise.parallel.pipeline import Pipeline
    from shardwise.parallel.sequence import SequenceParallel, SplitBatches, WholeOutputs
    from shardwise.runtime.outer_steps import OuterSteps
    from shardwise.runtime.verification import Verification


@dataclass(frozen=True)
class Parts:
    """Everything that holds memory of one plan, in one place, so that a change of plan drops all of it or nothing.

    None of it refers back to its holder, so that the memory is freed as soon as `ShardedModel` drops this. With one
    reference cycle, old buffers stay until the next garbage collection, and a change of plan peaks at two layouts, of
    which rarely both fit where a change is needed (`tests/ranks/test_reshard.py` holds it to one and a unit).
    """

    sharding: Sharding
    flats: list[Flat]
    optimizer: AdoptedOptimizer | None
    runner: Runner
    verdict: Verdict
    buffers: BufferSync
    gradients: Gradients
    access: Access
    owner: Owner
    unfreezing: Unfreezing
    verification: Verification | None
    """If the plan verifies steps."""
    ledger: Ledger
    timeline: Timeline
    pipeline: Pipeline | None
    """If the model is split into stages."""
    outer_steps: OuterSteps | None
    """If there are islands."""
    sequence: SequenceParallel | None
    """Of the model's attention, if the mesh has that axis."""
    treatment: ExitStack
    """Undoes the treatment of activations, and is undone with `hooks`."""
    hooks: ExitStack
    """Leaves the model and the optimizers alone again, when closed."""


class Training(Protocol):
    """What outlives one plan, as far as parts need it."""

    num_steps: int
    unread: set[str]
    whole_outputs: WholeOutputs
    split_batches: SplitBatches

    @property
    def replan(self) -> Callable[[], object]: ...


class Steps(Protocol):
    """Takes the steps; called by optimizers and by the model's forward."""

    @property
    def progress(self) -> Training: ...

    def before_step(self, member: torch.optim.Optimizer) -> None: ...

    def during_step(self) -> None: ...

    def after_step(self, member: torch.optim.Optimizer) -> None: ...

    def before_change(self) -> None: ...

    def forget(self, pieces: Sequence[Piece], set_to_none: bool) -> None: ...

    def whole_state(self, member: torch.optim.Optimizer) -> dict[str, Any]: ...

    def rewritten(self) -> AbstractContextManager[None]: ...

    def scaler(self) -> LossScaler | None: ...

    def cast_inputs(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], /
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None: ...


def assemble(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    sharding: Sharding,
    world: World,
    data_group: DataGroup,
    peers: DataGroup,
    steps: Steps,
) -> Parts:
    """Put together what trains `model`, which is laid out as `sharding`. All ranks call.

    The order matters, as each part is given those before it, and one stack collects what undoes them: were hooks
    removed by each part itself, one that raises would leave a model with some of them, that no engine owns.

    `data_group` are the ranks that hold the same part of the model, `peers` those that list the same parameters;
    `steps` takes the steps. If this raises, model and optimizers are left alone.
    """
    with ExitStack() as hooks:
        return _Assembly(model, sharding, world, data_group, peers, hooks, steps).parts(optimizers)


def treated(parts: Parts, model: nn.Module, world: World, plan: Plan, treatments: Treatments) -> Parts:
    """`parts` with other treatments of activations, which is all in which `plan` differs. Before the first pass; all
    ranks call."""
    sharding = parts.sharding.treated(plan, treatments, world)
    parts.treatment.close()
    parts.treatment.callback(_treat_activations(model, sharding, world, parts.sequence))
    return replace(parts, sharding=sharding)


class _Assembly:
    """Puts the parts of one sharded model together; see `assemble`. `hooks` collects what undoes it."""

    def __init__(
        self,
        model: nn.Module,
        sharding: Sharding,
        world: World,
        data_group: DataGroup,
        peers: DataGroup,
        hooks: ExitStack,
        steps: Steps,
    ) -> None:
        self._model = model
        self._sharding = sharding
        self._plan, self._mesh = sharding.plan, sharding.mesh
        self._world = world
        self._data_group = data_group
        self._peers = peers
        self._hooks = hooks
        self._steps = steps
        self._flats = sharding.flats
        self._island = DataGroup(world, self._mesh, self._mesh.axes_of_island)
        """The ranks that train one model together: all, unless there are islands."""
        self._groups = {axis: world.group(sharding.mesh, axis) for axis in sharding.mesh.axes}
        self._optimizer: AdoptedOptimizer | None = None

    def parts(self, optimizers: Sequence[torch.optim.Optimizer]) -> Parts:
        sharding, flats = self._sharding, self._flats
        collectives = self._world.collectives(sharding.device)
        collectives.prepare(self._mesh)
        buffers = BufferSync(self._model, self._data_group, on_host)
        verdict = self._verdict(collectives, buffers)
        executor = Executor(sharding.units, collectives, self._groups)
        executor.provide("verdict", lambda action: verdict.sum_over(action.over))
        executor.provide("buffers", lambda _: buffers.share())
        self._adopt(optimizers, collectives, executor)
        verification = self._verification(executor)
        runner = self._runner(executor)
        gradients = self._gradients(executor, runner, verdict)
        access = Access(self._model, runner, flats, executor.agreement, self._optimizer)
        owner = self._owner(runner, executor, access, gradients)
        self._hooks.callback(give_values_to_torch(self._model))
        self._hooks.callback(Structure(self._model).release)
        cast = self._model.register_forward_pre_hook(hook(self._steps.cast_inputs), prepend=True, with_kwargs=True)
        self._hooks.callback(cast.remove)
        self._hooks.callback(runner.remove)
        progress = self._steps.progress
        unfreezing = Unfreezing(
            self._model,
            owner,
            self._optimizer,
            gradients,
            self._flats,
            runner,
            progress.unread,
            lambda: progress.replan(),  # noqa: PLW0108  # the engine sets it later
        )
        self._hooks.callback(unfreezing.close)
        pipeline = self._pipeline(runner, gradients)
        sequence = self._sequence(progress)
        if pipeline is not None:
            self._survey_with(pipeline, sequence)
        elif sequence is not None:
            self._tell_tokens_apart(sequence)
        treatment = ExitStack()
        self._hooks.callback(treatment.close)
        treatment.callback(_treat_activations(self._model, sharding, self._world, sequence))
        return Parts(
            sharding=sharding,
            flats=flats,
            optimizer=self._optimizer,
            runner=runner,
            verdict=verdict,
            buffers=buffers,
            gradients=gradients,
            access=access,
            owner=owner,
            unfreezing=unfreezing,
            verification=verification,
            ledger=collectives.ledger,
            timeline=executor.timeline,
            pipeline=pipeline,
            outer_steps=self._outer_steps(executor, collectives, runner),
            sequence=sequence,
            treatment=treatment,
            hooks=self._hooks.pop_all(),
        )

    def _owner(self, runner: Runner, executor: Executor, access: Access, gradients: Gradients) -> Owner:
        sharding, share = self._sharding, _own_share(self._sharding)
        owner = Owner(
            sharding.units,
            runner,
            executor.agreement,
            access,
            gradients,
            self._steps.before_change,
            sharding.weights_outside,
            None if share is None else _stage_names(sharding, share),
        )
        owner.share = share
        owner.note_hooks()
        self._hooks.callback(owner.close)
        self._hooks.callback(use_unsplit_states(self._model, owner.split_home_of))
        return owner

    def _verdict(self, collectives: Collectives, buffers: BufferSync) -> Verdict:
        stages = [axis for axis in self._mesh.model_axes if axis not in self._mesh.same_params_axes]
        journal = self._world.journal
        island = self._island
        journal.whole_model_axes = frozenset([island.group.axis, self._world.everybody.axis, *stages] if stages else [])
        exchange = None if on_host(self._sharding.device) else partial(island.exchange, subject="verdict")
        peers = frozenset(place for place, rank in enumerate(island.group.ranks) if rank in self._peers.group.ranks)
        return Verdict(
            self._flats,
            collectives,
            self._groups,
            buffers if self._plan.sync_buffers and self._data_group.size > 1 else NoNews(),
            Agreeing(peers, frozenset(stages), exchange),
            must_know_norm=self._plan.takes_only_finite,
            complete=self._shared_gradients(),
        )

    def _shared_gradients(self) -> Callable[[], None] | None:
        """Sums gradients of parameters that are on several pipeline stages, if this rank has any."""
        if self._sharding.staged is None:
            return None
        from shardwise.parallel.pipeline import SharedGradients  # only ranks with a pipeline load it

        shared = SharedGradients(self._sharding.staged, self._flats, self._world, self._mesh)
        return shared.add_up if shared else None

    def _adopt(self, optimizers: Sequence[torch.optim.Optimizer], collectives: Collectives, executor: Executor) -> None:
        """Give optimizers pieces of the flat buffers instead of parameters, and bind their actions in the program."""
        peers = RankPeers(self._flats, collectives, self._mesh, self._world.rank, self._steps.during_step)
        executor.provide("sums", peers.add_up)
        executor.provide("norms", peers.add_up)
        executor.provide("matrix", peers.exchange_matrices)
        executor.provide("update", peers.exchange_matrices)
        executor.provide("signs", peers.exchange_signs)
        executor.provide("momentum", peers.exchange_signs)
        disk = self._sharding.disk
        if disk is not None:
            disk.timeline = executor.timeline
        if optimizers:
            steps = self._steps
            self._optimizer = AdoptedOptimizer(
                optimizers,
                self._flats,
                before=steps.before_step,
                after=steps.after_step,
                forget=steps.forget,
                whole=steps.whole_state,
                rewritten=steps.rewritten,
                peers=peers,
            )
            self._hooks.callback(self._optimizer.release)
        by_name = {flat.name: flat for flat in self._flats}
        executor.provide("master", partial(_update, self._optimizer, by_name))
        executor.provide("states", partial(_move_states, self._optimizer, by_name))

    def _verification(self, executor: Executor) -> Verification | None:
        if self._plan.verify.gradients is not None:
            self._require_recomputable()
        if self._plan.verify.every is None:
            return None
        from shardwise.runtime.verification import Verification  # only plans that verify load it

        units = {flat.name: unit.name for unit in self._sharding.units for flat in unit.flats}
        progress = self._steps.progress
        verification = Verification(
            self._flats,
            units,
            self._optimizer,
            self._mesh,
            self._world.rank,
            partial(self._world.exchange, subject="checksums"),
            lambda: progress.num_steps,
        )
        executor.provide_verb("checksum", verification.take)
        executor.provide_verb("compare", verification.compare)
        return verification

    def _require_recomputable(self) -> None:
        from shardwise.program.verification import why_not_recomputed  # only plans that verify load it

        is_deterministic = on_host(self._sharding.device) or torch.are_deterministic_algorithms_enabled()
        is_elastic = self._world.membership is not None
        why = why_not_recomputed(self._mesh, is_elastic=is_elastic, is_deterministic=is_deterministic)
        if self._sharding.converted.communicates:
            why = why or "its modules exchange values in the forward"
        if self._mesh.num_islands > 1:
            why = why or "another island has another model"
        if why:
            raise ConfigError(
                f"verify.gradients: a micro-batch cannot be computed again on another rank, because {why}. Leave "
                f"verify.gradients out; verify.every works."
            )

    def _runner(self, executor: Executor) -> Runner:
        plan, sharding = self._plan, self._sharding
        to_say = sharding.if_forward_communicates
        settings = Settings(plan.prefetch_bytes, plan.compile, plan.paths == "by_rank", to_say)
        exchange = self._data_group.exchange
        heap: FreeHeap | BackwardHeap | None = None
        if on_host(sharding.device) and sharding.budget.device is not None:
            heap = heap_to_keep_small()
        elif on_host(sharding.device) and any(one.spec.trainable and not stay_as_made(one.spec) for one in self._flats):
            heap = heap_for_backwards()  # gradients that stay where autograd made them would stay in the heap
        return Runner(self._model, sharding.units, executor, exchange, sharding.shared_buffers, settings, heap)

    def _gradients(self, executor: Executor, runner: Runner, verdict: Verdict) -> Gradients:
        among_all, among_peers, among_data = (
            partial(exchange, subject="norms")
            for exchange in (self._island.exchange, self._peers.exchange, self._data_group.exchange)
        )
        exchanges = (among_all, among_peers, among_data)
        return Gradients(
            self._flats,
            executor.agreement,
            runner,
            verdict,
            exchanges,
            self._steps.scaler,
            only_finite=self._plan.takes_only_finite,
        )

    def _pipeline(self, runner: Runner, gradients: Gradients) -> Pipeline | None:
        sharding = self._sharding
        if sharding.staged is None:
            return None
        from shardwise.parallel.pipeline import Pipeline  # only ranks with a pipeline load it

        pipeline = Pipeline(sharding.staged, self._world, self._mesh, sharding.device)
        if sharding.stage_design is not None and sharding.stage_design.draws:
            from shardwise.parallel.tensor import Generators

            generators = Generators(self._world.rank_device, pipeline.pp_rank)
            generators.synchronize(self._world, self._world.group(self._mesh, STAGES))
            pipeline.own_numbers = generators.own_inside
        if sharding.views is not None:
            line = Line(self._world.collectives(sharding.device), self._groups[TENSOR_AXIS])
            pipeline.views = sharding.views.in_stages(
                self._model, sharding.units, sharding.device, sharding.table.compute, line
            )
        if sharding.split is not None and sharding.split.weights is not None:
            sharding.split.weights.is_in_stages = True
            pipeline.watched_weights = sharding.split.weights.watched
        pipeline.attach()
        units = sharding.staged.by_stage([(unit.spec, unit.params) for unit in sharding.units])
        runner.foresee_schedule(pipeline.row, units, pipeline.halved_params)
        gradients.is_of_stage = True
        gradients.num_stages_with = {name: len(on) for name, on in sharding.staged.holders.items() if len(on) > 1}
        self._world.journal.part = f"stage {', '.join(map(str, sharding.staged.stages))}"
        self._hooks.callback(pipeline.release)
        return pipeline

    def _outer_steps(self, executor: Executor, collectives: Communicator, runner: Runner) -> OuterSteps | None:
        if not self._mesh.island_axes:
            return None
        from shardwise.runtime.outer_steps import OuterSteps  # only plans with islands load it

        specs = [unit.spec for unit in self._sharding.units]
        settings, writing = self._plan.islands, runner.step.outer_step
        return OuterSteps(settings, specs, self._flats, executor, collectives, self._groups, writing)

    def _survey_with(self, pipeline: Pipeline, sequence: SequenceParallel | None) -> None:
        """Let a pipeline find out which results stages read."""
        from shardwise.parallel.pipeline.survey import Surveyor  # only ranks with a pipeline load it

        sharding, compute = self._sharding, self._sharding.table.compute
        pipeline.surveyor = Surveyor(
            pipeline.staged, sharding.units, sharding.device, compute, _around(sequence), pipeline.exchange
        )

    def _tell_tokens_apart(self, sequence: SequenceParallel) -> None:
        """Let a split sequence's forwards find out whether what is as many as a rank's tokens is the tokens."""
        from shardwise.parallel.sequence.coincidences import Coincidences  # only ranks with sequences load it

        sharding, compute = self._sharding, self._sharding.table.compute
        sequence.coincidences = Coincidences(
            self._model, sharding.units, sharding.device, compute, _around(sequence), 2 if sequence.is_ring else 1
        )

    def _sequence(self, progress: Training) -> SequenceParallel | None:
        mesh = self._mesh
        if SEQUENCE_AXIS not in mesh.axes or mesh.size(SEQUENCE_AXIS) == 1:
            return None
        from shardwise.parallel.sequence import SequenceParallel  # only ranks with that axis load it

        staged, device = self._sharding.staged, self._sharding.device
        sequence = SequenceParallel(
            self._model,
            self._plan,
            mesh,
            self._world,
            device,
            progress.whole_outputs,
            progress.split_batches,
            ends_here=None if staged is None else lambda: staged.ends_here,
        )
        progress.split_batches = sequence.batches
        self._hooks.callback(sequence.close)
        return sequence


def _around(sequence: SequenceParallel | None) -> Callable[[nn.Module], AbstractContextManager[None]]:
    """What is around a copy of the model while it is rehearsed."""

    @contextmanager
    def around(twin: nn.Module) -> Iterator[None]:
        with loaded(twin, EXPERT_LOAD), nullcontext() if sequence is None else sequence.rehearsed(twin):
            yield

    return around


def _own_share(sharding: Sharding) -> OwnShare | None:
    """What this rank's parameters are of the model's, where stages or model axes leave it a part."""
    slots = [slot for flat in sharding.flats for slot in flat.slots]
    shapes = [slot.whole_shape for slot in slots]
    if sharding.staged is not None:
        shapes = [sharding.staged.whole.shapes[name] for name in sharding.staged.holders]
    own, whole = sum(math.prod(slot.shape) for slot in slots), sum(map(math.prod, shapes))
    trained = frozenset(slot.name for flat in sharding.flats if flat.spec.trainable for slot in flat.slots)
    return OwnShare(trained, own, whole) if own != whole else None


def _stage_names(sharding: Sharding, share: OwnShare) -> StageNames | None:
    """The parameters of this rank's stages by name, if there is a pipeline."""
    if sharding.staged is None or sharding.stage_design is None or sharding.stage_design.copies is None:
        return None
    pieces = sharding.staged.layout.pieces
    names = [slot.name for flat in sharding.flats for slot in flat.slots]
    within = {name: max((one for one in pieces if name.startswith(f"{one}.")), key=len, default="") for name in names}
    return StageNames(within, sharding.stage_design.copies.other_than, share)


def _treat_activations(
    model: nn.Module, sharding: Sharding, world: World, sequence: SequenceParallel | None
) -> Callable[[], None]:
    """Let units recompute their activations, or keep them elsewhere, as the plan says. Returns what undoes it."""
    around = sequence.recomputing if sequence is not None else nullcontext
    treated = TreatedSites(sharding.treatments.by_site, _stores(model, sharding, world), around)
    treated.install()
    return treated.remove


def _stores(model: nn.Module, sharding: Sharding, world: World) -> dict[str, Offloading]:
    """The stores of activations that leave the device, by policy."""
    if not sharding.treatments.have("offload", "disk"):
        return {}
    flats = sharding.flats
    sharded = {param for flat in flats for param in flat.params}
    others = (param for param in model.parameters() if param not in sharded)
    resting = [*(flat.full for flat in flats), *others]
    own = world.rank_device
    device = own if sharding.device.type == own.device.type else None
    waits = device is not None and device.accelerator is not None
    stores: dict[str, Store] = {"offload": HostStore(ActivationMemory(sharding.meter, device))}
    if sharding.treatments.have("disk"):
        assert sharding.disk is not None
        stores["disk"] = DiskStore(sharding.disk, PagedMemory(sharding.meter, device), sharding.meter)
    return {policy: Offloading(store, sharding.device, resting, waits=waits) for policy, store in stores.items()}


def _update(optimizer: AdoptedOptimizer | None, flats: Mapping[str, Flat], action: Action) -> None:
    """Run `update` on one flat buffer. Without an optimizer no step is taken."""
    assert optimizer is not None
    optimizer.updates.update_flat(flats[action.flat])


def _move_states(optimizer: AdoptedOptimizer | None, flats: Mapping[str, Flat], action: Action) -> None:
    """Run `fetch` or `evict` on what one flat buffer has on a disk."""
    assert optimizer is not None
    move = optimizer.rows.fetch if action.verb == "fetch" else optimizer.rows.evict
    move(flats[action.flat])
