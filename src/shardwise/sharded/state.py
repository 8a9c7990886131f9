"""The state of an engine that outlives its process or plan: checkpoints, and the change to another plan."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise import checkpoint
from shardwise.checkpoint import (
    Begun,
    Content,
    Entry,
    Keep,
    Request,
    Saver,
    content_of,
    encode,
    formats,
    numbers_of,
    of_island,
    rng,
    step_name,
    unwrapped,
)
from shardwise.comm import World
from shardwise.errors import ConfigError, StateError, TierError
from shardwise.fit.budget import Fitted, within_budget
from shardwise.init import check_same_settings
from shardwise.memory import DiskMemory, Flat, KeptFactors
from shardwise.optim.precision.auto_precision import settle
from shardwise.optim.sign_mean import Residual
from shardwise.parallel.conversions import check_plan
from shardwise.parallel.experts import ExpertSplit, share_totals
from shardwise.parallel.model_axes import carry_out_experts, carry_out_split, synchronize_generators
from shardwise.parallel.outline import SmallerMeshes
from shardwise.plan import Budget, Plan
from shardwise.plan.mesh import STAGE_AXIS, Mesh
from shardwise.plan.placement import Span, mesh_for
from shardwise.program import Update
from shardwise.sharded.access import GRAD, with_extra_state
from shardwise.sharded.sharded_model import Progress, ShardedModel, scaler_for
from shardwise.sharded.sharding import (
    Design,
    Sharding,
    check_design,
    design,
    log_fitted,
    ranks_of,
    settings_of,
    watch_views,
    with_fewer_groups,
)

if TYPE_CHECKING:
    from shardwise.checkpoint import Loaded, Stateful, TrainingState
    from shardwise.checkpoint.publishing import Publisher
    from shardwise.parallel.pipeline import StagedModel


class State:
    """The checkpoints of one engine, and the objects that are remembered in them."""

    def __init__(self, saver: Saver) -> None:
        self.saver = saver
        self.remembered: dict[str, Stateful] = {}
        self.coming: dict[str, Any] = {}
        """On a rank that has joined others: the states of objects that it has not remembered yet."""
        self.user_state: Mapping[str, Any] | None = None
        """The caller's own state, as saved or resumed last."""
        self.publisher: Publisher | None = None
        """Publishes versions of the weights, once there was one."""
        self.begun: Begun | None = None
        """The last checkpoint begun with `wait=False`, until it is known to be complete."""

    def wait_for_copy(self) -> None:
        """Return once nothing of this rank's memory is read in the background. One rank may call alone."""
        self.saver.wait_for_copy()
        if self.publisher is not None:
            self.publisher.wait_for_copy()

    def renew(self, world: World) -> None:
        """Continue in another world, after ranks were lost or have joined."""
        self.wait_for_copy()
        self.saver = self.saver.renewed(world)
        if self.begun is not None:
            self.begun.is_at_risk = True

    def save(
        self,
        sharded: ShardedModel,
        folder: Path,
        step: int | None,
        user_state: Mapping[str, Any],
        *,
        wait: bool,
        keep: Keep,
        metrics: Mapping[str, float],
        without_gradients: bool,
    ) -> Path:
        """See `Engine.save`."""
        progress = sharded.progress
        number = progress.num_steps if step is None else step
        sharded.settle_islands()
        check_same_settings({"step": number, "folder": str(folder)}, "save() argument", sharded.world)
        folder = folder.absolute()  # a thread writes, and the loop may change its folder

        def make() -> tuple[Request, Content]:
            if type(number) is not int or not 0 <= number < 10**18:
                raise ConfigError(f"step is {number!r}, which is not a number of steps; give a whole one, at least 0.")
            _check_kind("keep", keep, Keep, "keep=sw.Keep(last=3)")
            _check_kind("state", user_state, Mapping, 'state={"epoch": 3}')
            _check_kind("metrics", metrics, Mapping, 'metrics={"loss": 0.5}')
            if sharded.disk is not None:
                sharded.disk.require_whole()
            if not without_gradients and sharded.parts.gradients.wait():
                raise StateError("Gradients are waiting for a step; take it, or call zero_grad(), before save().")
            kept: dict[str, Any] = {"num_steps": progress.num_steps, "user": dict(user_state)}
            self.user_state = kept["user"]
            if progress.scaler is not None:
                kept["loss_scale"] = progress.scaler.state_dict()
            outer = sharded.parts.outer_steps
            if outer is not None:
                kept["islands"] = {"pending": outer.pending, "settings": _dealing(sharded)}
            extra = {name: module.get_extra_state() for name, module in with_extra_state(sharded.model)}
            if extra:
                for name, value in extra.items():
                    encode(value, name)  # raises an error that names the module, if the value cannot be encoded
                kept["extra_state"] = extra
            request = Request(
                folder,
                number,
                layout=f"{sharded.table.optim} on {sharded.mesh}",
                state=kept,
                metrics=numbers_of(metrics),
                keep=keep,
                memories={
                    "generators": rng.capture(sharded.world.rank_device),
                    "objects": {name: thing.state_dict() for name, thing in self.remembered.items()},
                },
            )
            return request, content(sharded)

        target = folder / (step_name(number) if isinstance(number, int) else str(number))
        before, self.begun = self.begun, None
        path = self.saver.save(target, make, wait=wait)
        if before is not None and before.target != target and sharded.world.rank == 0 and before.is_incomplete():
            logging.getLogger("shardwise").warning("%s", before.error(f"{target} takes its place."))
        if not wait:
            self.begun = Begun(target, number, progress.num_steps, keep, numbers_of(metrics))
        return path

    def wait_for_save(self, sharded: ShardedModel) -> None:
        """Wait for a checkpoint in the background. If a rank was lost while it was being written, write it again. All
        ranks call."""
        self.saver.wait()
        begun, rank = self.begun, sharded.world.rank
        if begun is not None and begun.is_at_risk and sharded.world.any_rank(rank == 0 and begun.is_incomplete()):
            if sharded.progress.num_steps != begun.num_steps:
                raise begun.error("Save again.")
            folder, user = begun.target.parent, self.user_state or {}
            self.save(
                sharded,
                folder,
                begun.number,
                user,
                wait=True,
                keep=begun.keep,
                metrics=begun.metrics,
                without_gradients=True,  # parameters and states are those of the step that it is of
            )
        self.begun = None

    def close(self, rank: int) -> None:
        """Wait for what is written in the background, and raise what this rank knows of it. If ranks were lost, `rank`
        0 knows whether a checkpoint is complete."""
        self.saver.close()
        if self.publisher is not None:
            self.publisher.close()
        if rank == 0 and self.begun is not None and self.begun.is_incomplete():
            raise self.begun.error("Call engine.wait_for_save() before close(): it writes it again.")

    def resume(self, sharded: ShardedModel, folder: Path) -> Loaded | None:
        """See `Engine.resume`."""
        self.saver.wait()
        path = checkpoint.find(folder, sharded.world, _refuse_others)
        if path is None:
            return None
        sharded.settle_islands()
        if sharded.disk is not None:
            sharded.disk.abandon()
            sharded.find_states()

        def before_change() -> None:
            sharded.parts.runner.step.open_params()
            if sharded.disk is not None:
                sharded.disk.begin_replacing()

        loaded = checkpoint.load_checkpoint(
            path, content(sharded), sharded.parts.optimizer, sharded.world, self.remembered, before_change=before_change
        )
        if sharded.disk is not None:
            sharded.disk.finish_writes()
        progress = sharded.progress
        progress.num_steps = int(loaded.state["num_steps"])
        if progress.scaler is not None and "loss_scale" in loaded.state:
            progress.scaler.load_state_dict(loaded.state["loss_scale"])
        if sharded.parts.outer_steps is not None:
            saved = loaded.state.get("islands", {})
            is_same = saved.get("settings") == _dealing(sharded)
            sharded.parts.outer_steps.pending = saved.get("pending") if is_same else None
        sharded.zero_grad()
        sharded.parts.runner.step.restore_params()
        if sharded.parts.optimizer is not None:
            sharded.parts.optimizer.find_changed_updates()
        sharded.begin_factors_when_due()
        synchronize_generators(sharded.model, sharded.mesh, sharded.world)
        extra = {unwrapped(name): value for name, value in loaded.state.get("extra_state", {}).items()}
        for name, module in with_extra_state(sharded.model):
            if unwrapped(name) in extra:
                module.set_extra_state(extra[unwrapped(name)])
        self.user_state = loaded.state["user"]
        self.saver.resumed(path)
        return replace(loaded, state=loaded.state["user"])


def content(sharded: ShardedModel, *, with_states: bool = True) -> Content:
    """What a checkpoint holds of this rank, as live tensors; or the model alone, without the optimizer's states."""
    own_buffers = not sharded.plan.sync_buffers
    island = sharded.mesh.island_of(sharded.world.rank) if sharded.mesh.island_axes else None
    place = sharded.peers.index + (island or 0) * sharded.peers.size
    optimizer = sharded.parts.optimizer if with_states else None
    mine = content_of(sharded.model, sharded.parts.flats, optimizer, place, own_buffers=own_buffers)
    if island is not None:
        mine = of_island(mine, sharded.parts.flats, island, is_first=sharded.peers.is_first)
    staged = sharded.parts.sharding.staged
    return mine if staged is None else _of_stages(mine, staged)


def _refuse_others(folder: Path) -> None:
    formats.refuse_others(folder)  # imported only when it is called: few jobs look for other formats


def _of_stages(content: Content, staged: StagedModel) -> Content:
    """The content of a rank with some stages, named as in the whole model. What several stages have (shared parameters,
    buffers outside of all) is written by the first of them."""

    def is_written_here(entry: Entry) -> bool:
        return staged.is_first_with(entry.name)

    entries = [entry if is_written_here(entry) else replace(entry, written=Span(0, 0)) for entry in content.entries]
    names = staged.group_names
    groups = [{**group, "params": names[number]} for number, group in enumerate(content.groups)]
    numbers = {name: kept for name, kept in content.numbers.items() if staged.is_first_with(name)}
    whole = staged.whole
    return replace(
        content, entries=entries, groups=groups, numbers=numbers, shapes=dict(whole.shapes), ties=dict(whole.ties)
    )


def _require_same_split(sharded: ShardedModel, plan: Plan) -> None:
    """A change of plan moves values along data axes, including `ep`, but not along axes that split layers."""
    before, after = sharded.mesh, mesh_for(plan, sharded.world.size, sharded.world.local_size)

    def places(mesh: Mesh) -> list[dict[str, int]]:
        every = map(mesh.coordinate, range(mesh.world_size))
        return [{axis: place[axis] for axis in mesh.model_axes} for place in every]

    if places(before) != places(after) or (before.model_axes and plan.tensor != sharded.plan.tensor):
        raise ConfigError(
            f"reshard() keeps how a model is split along {', '.join(before.model_axes) or 'model axes'}: the mesh is "
            f"{before}, and the new plan's is {after}. Save a checkpoint, and resume it with the new plan."
        )
    islands = [[mesh.island_of(rank) for rank in range(mesh.world_size)] for mesh in (before, after)]
    if islands[0] != islands[1] or (before.island_axes and plan.islands != sharded.plan.islands):
        raise ConfigError(
            f"reshard() changes the plan inside of islands, and keeps these and how they come together: the mesh is "
            f"{before}, and the new plan's is {after}. Save a checkpoint, and resume it with the new plan."
        )
    if plan.loss != sharded.plan.loss:
        raise ConfigError(
            f"reshard() keeps how the loss is computed: loss is {sharded.plan.loss.logits}, and the new plan's is "
            f"{plan.loss.logits}. Save a checkpoint, and resume it with the new plan."
        )
    if plan.fp8 != sharded.plan.fp8:
        raise ConfigError(
            f"reshard() keeps which layers multiply in 8 bits: fp8 is {sharded.plan.fp8.recipe}, and the new plan's is "
            f"{plan.fp8.recipe}, or its skip differs. Save a checkpoint, and resume it with the new plan."
        )
    if after.model_axes and plan.compile is not None:
        raise ConfigError(
            f"compile needs units whose modules do not communicate. Leave it out of a plan with {after.model_axes[0]}."
        )
    if plan.budget.device is not None and sharded.parts.sharding.experts is not None:
        raise ConfigError(
            "budget is for models that lie whole on each rank; with experts dealt out say offload or rows."
        )


@contextmanager
def trained_as_before(flats: Sequence[Flat], *, exactly: bool = False) -> Iterator[None]:
    """Inside, parameters that have been frozen since the plan was made are trainable, so that they keep their states.
    With `exactly`, those that have been unfrozen since are frozen, because other ranks may not have come that far."""
    changed = [
        (param, flat.spec.trainable)
        for flat in flats
        if exactly or flat.spec.trainable
        for param in flat.params
        if param.requires_grad != flat.spec.trainable
    ]
    for param, was_trained in changed:
        param.requires_grad_(was_trained)
    try:
        yield
    finally:
        for param, was_trained in changed:
            param.requires_grad_(not was_trained)


def reshard(
    sharded: ShardedModel, plan: Plan, smaller: SmallerMeshes | None = None
) -> tuple[ShardedModel, TierError | None]:
    """A `ShardedModel` for another plan, with everything that `sharded` had; `sharded` is taken down. All ranks call,
    between steps. `smaller` are the job's smaller meshes with this plan, in an elastic job.

    With it comes what is to be raised, on all ranks, if the disk of any has failed meanwhile; then only a resume can
    fill the new plan. Raises `ConfigError`, `StateError` or `TierError` before anything is changed.
    """
    sharded.parts.unfreezing.check(sharded.peers)
    if mesh_for(plan, sharded.world.size, sharded.world.local_size).has_stages:
        raise ConfigError(
            "reshard() cannot split a live model into pipeline stages. Save, create an engine with this plan, and "
            "resume."
        )
    model, world, progress = sharded.model, sharded.world, sharded.progress
    plan = _in_one_precision(plan, sharded)
    _require_same_split(sharded, plan)
    sharded.settle_islands()
    check_plan(sharded.converted, plan)
    fitted, budget, sharding = _fitted(sharded, plan, smaller or sharded.parts.sharding.smaller)
    plan, updates, device = fitted.plan, sharding.updates, sharding.device
    designed = design(model, plan, world, known=sharding)
    check_design(model, designed, sharded.optimizers, updates, device)
    had = sharded.disk
    if had is not None:
        had.require_whole()
    if sharded.parts.gradients.exist():
        raise StateError(
            "Gradients are waiting for a step, or are of parameters that no optimizer has; take the step, and call "
            "engine.zero_grad(), before reshard()."
        )
    disk = designed.open_disk(world, model, device, updates, had)
    if plan.precision != sharded.plan.precision:
        progress = replace(progress, scaler=scaler_for(plan))
    dealt = dealt_out(model, sharding.experts, designed)
    log_fitted(fitted, world)
    try:
        renewed, fault = _moved(sharded, sharding, designed, (fitted.summary, budget), disk, progress, dealt)
    except BaseException:
        if disk is not None and disk is not had:
            disk.close()
        raise
    lost = _lost(renewed, had, fault)
    if had is not None and had is not renewed.disk:
        had.close()
    elif had is not None and not had.outlives_rank:  # else others may go on from it until the new plan has images
        had.close_previous()
    if lost is not None:
        return renewed, lost
    try:
        renewed.parts.runner.step.restore_params()
    except BaseException:  # a rank was lost: the others go on from the model in its plain form
        renewed.take_down()
        raise
    return renewed, None


def _in_one_precision(plan: Plan, sharded: ShardedModel) -> Plan:
    """`plan` in the precision in which the ranks will compute. All ranks call; raises `ConfigError` on all of them if
    they have different plans."""
    plan = plan.after(sharded.plan)
    check_same_settings(settings_of(plan, sharded.world), "plan", sharded.world)
    return settle(plan, sharded.world, sharded.parts.sharding.device)


def _fitted(sharded: ShardedModel, plan: Plan, smaller: SmallerMeshes) -> tuple[Fitted, Budget, Sharding]:
    """What `plan` keeps off the devices to be within its budget; the budget from now on, its own or an earlier one; and
    the present sharding, with the updates of all parameters that optimizers have by now, and what fewer ranks keep off
    theirs. All ranks call."""
    sharding, optimizer, world = sharded.parts.sharding, sharded.parts.optimizer, sharded.world
    mesh = mesh_for(plan, world.size, world.local_size)
    updates = dict(sharding.updates)
    if optimizer is not None:
        updates |= {**optimizer.added, **optimizer.changed}
    ranks = ranks_of(world, plan, sharding.device)
    fitted = within_budget(sharded.model, plan, mesh, ranks, updates, is_live=True)
    smaller = smaller.of_smaller_meshes()
    if plan.budget != Budget():
        smaller = with_fewer_groups(smaller, sharded.model, plan, mesh, ranks, updates, world)
    budget = plan.budget if plan.budget.device is not None else sharding.budget
    return fitted, budget, replace(sharding, updates=updates, smaller=smaller)


def _lost(renewed: ShardedModel, had: DiskMemory | None, fault: str) -> TierError | None:
    """What is to be raised if the disk of any rank has failed while values moved; `fault` is that of this one's. Such a
    model refuses to compute until it is filled by a resume, also if nothing of the new plan is on a disk."""
    disk = renewed.disk or had
    if disk is None:
        return None
    try:
        disk.agree(renewed.world, fault, "change of plan")
    except TierError as error:
        if renewed.disk is None:
            disk.count_with(renewed.parts.sharding.meter)
            disk.begin_change("change of plan")
            renewed.disk = disk
            for flat in renewed.parts.flats:
                flat.disk = disk
        return error
    return None


def _moved(
    sharded: ShardedModel,
    sharding: Sharding,
    designed: Design,
    fitted: tuple[str, Budget],
    disk: DiskMemory | None,
    progress: Progress,
    dealt: Sequence[str] | None,
) -> tuple[ShardedModel, str]:
    """The same model and optimizers under the new design, with everything that `sharded` has; `sharded` is taken
    down. `sharding` is its own, with the updates of all parameters that optimizers have by now. Also returns the first
    error of this rank's disk, or ""."""
    held = checkpoint.Held.live(sharded.parts.flats, sharded.parts.optimizer, sharded.world)
    residuals = dict(sharded.parts.optimizer.residuals) if sharded.parts.optimizer is not None else {}
    factors = {name: kept for flat in sharded.parts.flats for name, kept in flat.kept_factors().items()}
    optimizers, before_change = sharded.optimizers, sharded.before_change
    former = Former(sharded.model, optimizers, sharding, progress, before_change, {}, residuals, factors)
    training_state = checkpoint.TrainingState(held, sharded.world, dealt)
    pending = sharded.parts.outer_steps.pending if sharded.parts.outer_steps is not None else None
    dealing = _dealing(sharded)
    sharded.take_down()
    for flat in former.sharding.flats:
        flat.grads.let_go()
    renewed = move(former, designed, training_state, sharded.world, fitted=fitted, disk=disk)
    if renewed.parts.outer_steps is not None:
        renewed.parts.outer_steps.pending = pending if _dealing(renewed) == dealing else None
    return renewed, training_state.fault


def _check_kind(name: str, value: object, kind: type, example: str) -> None:
    """Raise `ConfigError` for an argument of `save` of another kind: later it would be told as a fault of the disk."""
    if not isinstance(value, kind):
        raise ConfigError(f"{name} is {value!r:.60}; write it as in {example}.")


def _dealing(sharded: ShardedModel) -> str:
    """What says which units a fragment has: the settings of islands, and in a pipeline the cut into stages, each of
    which deals out its own units."""
    settings, mesh = sharded.plan.islands.model_dump_json(), sharded.mesh
    if not mesh.has_stages:
        return settings
    return f"{settings} {mesh.size(STAGE_AXIS)} {sharded.plan.pipeline.model_dump_json()}"


def gradients_aside(sharded: ShardedModel, names: Set[str]) -> dict[str, torch.Tensor]:
    """This rank's share, on the host, of the gradients of these parameters, for `put_gradients` after a change of plan
    that leaves their tables as they are. All ranks call."""
    shares = {}
    for flat in sharded.parts.flats:
        num, place = _place_among(sharded, flat)
        for slot in flat.slots:
            if slot.name in names:
                whole = sharded.parts.access.read_part(slot.name, GRAD)
                assert whole is not None
                shares[slot.name] = whole.reshape(-1).tensor_split(num)[place].to("cpu", copy=True)
    return shares


def put_gradients(sharded: ShardedModel, shares: Mapping[str, torch.Tensor]) -> None:
    """Let these parameters have gradients that no step is to use. All ranks call."""
    gradients = sharded.parts.gradients
    for flat in sharded.parts.flats:
        num, place = _place_among(sharded, flat)
        for index, slot in enumerate(flat.slots):
            if slot.name in shares:
                share = shares[slot.name].to(flat.device)
                whole = share.new_zeros(slot.numel)
                whole.tensor_split(num)[place].copy_(share).mul_(num)  # for the mean over ranks
                gradients.assign(flat, index, whole)
    if shares:
        gradients.note_step()


def _place_among(sharded: ShardedModel, flat: Flat) -> tuple[int, int]:
    """How many ranks share `flat`, and which of them this one is."""
    rank = sharded.world.rank
    ranks = sharded.mesh.among(rank, flat.spec.table.axes)
    return len(ranks), ranks.index(rank)


def unshard(sharded: ShardedModel) -> None:
    """Take `sharded` down, and leave a plain model, whole on every rank, in the precision in which the optimizer keeps
    it. All ranks call."""
    sharded.zero_grad()
    values = {name: value.clone() for name, value in sharded.parts.access.whole_params()}
    sharding = sharded.parts.sharding
    sharded.take_down()
    for split in (sharding.split, sharding.experts):
        if split is not None:
            split.undo()
    share_totals(sharded.model, torch.Tensor.clone)
    for flat in sharding.flats:
        for slot, param in zip(flat.slots, flat.params, strict=True):
            param.data = values.pop(slot.name)


@dataclass(frozen=True)
class Former:
    """What remains of a sharded model when it gets another layout."""

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    sharding: Sharding
    progress: Progress
    before_change: Callable[[], None]
    added: Mapping[nn.Parameter, Update] = field(default_factory=dict)
    """Updates of parameters whose groups were added and for which memory is still to be planned."""
    residuals: Mapping[str, Residual] = field(default_factory=dict)
    """What this rank has not sent of what optimizers average."""
    factors: Mapping[str, KeptFactors] = field(default_factory=dict)
    """What it keeps of gradients that are sent as factors, by parameter."""

    @classmethod
    def of(cls, sharded: ShardedModel) -> Former:
        """What remains of `sharded`, which is still to be taken down."""
        parts = sharded.parts
        added = {} if parts.optimizer is None else dict(parts.optimizer.added)
        return cls(sharded.model, sharded.optimizers, parts.sharding, sharded.progress, sharded.before_change, added)


def move(
    former: Former,
    designed: Design,
    training_state: TrainingState,
    world: World,
    *,
    fitted: tuple[str, Budget],
    disk: DiskMemory | None = None,
) -> ShardedModel:
    """Lay out the model of `former`, which has been taken down, as `designed`, with `training_state`. All ranks
    call."""
    model, device, updates = former.model, former.sharding.device, former.sharding.updates
    if former.sharding.experts is not None:
        former.sharding.experts.undo()
    sharding = replace(
        designed.carry_out(world, device, updates, disk),
        split=designed.split or former.sharding.split,
        converted=former.sharding.converted,
        fitted=fitted[0],
        budget=fitted[1],
        smaller=former.sharding.smaller,
        views=None if former.progress.num_steps else former.sharding.views,
    )
    flats = sharding.flats
    training_state.learn_new(flats)
    states = training_state.move_into(flats, world.collectives(device))
    for flat in flats:
        flat.go_on_with(former.factors)
    carry_out_experts(model, sharding.experts, sharding.mesh, world, device)
    if sharding.split is not None and sharding.split.line is None:  # in another world than before
        carry_out_split(model, sharding.split, sharding.mesh, world, device)
        if sharding.views is not None and sharding.staged is None:
            watch_views(sharding.views, model, sharding)
    sharding.connect_converted(world)
    renewed = ShardedModel(model, former.optimizers, sharding, world, former.progress, former.before_change)
    if renewed.parts.optimizer is not None:
        for piece in renewed.parts.optimizer.pieces:
            renewed.parts.optimizer.put_state(piece, states.pop(piece.name, {}))
        renewed.parts.optimizer.go_on_with(former.residuals)
        if former.added:
            renewed.parts.optimizer.await_memory(former.added)
    return renewed


def dealt_out(model: nn.Module, had: ExpertSplit | None, designed: Design) -> list[str] | None:
    """The parameters of which ranks along `ep` have different parts, before or after; `None` if there are none in the
    whole model."""
    splits = [split for split in (had, designed.experts) if split is not None]
    if not splits:
        return None
    either = {param for split in splits for param in split.params}
    return [name for name, param in model.named_parameters() if param in either]
