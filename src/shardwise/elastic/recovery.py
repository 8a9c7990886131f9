"""Recovery after a fault: the state after the last step that all ranks completed, sharded over the survivors.

All survivors arrive here at about the same time, from any point of a step. If another one dies meanwhile, recovery
starts again. `session.py` describes when it happens, and `iterations.py` counts what becomes void by it.

[Note: spares] If a rank is lost whose replica group has others (`plan/replica_groups.py`), these can compute nothing
without it: the group leaves, and they become spares. A spare lets go of its model and waits in the call in which it
has heard of the fault. It comes back as a rank that joins: with the others' state, at the beginning of an iteration of
theirs. Its loop is somewhere else, maybe in the middle of an iteration. That one ends as a void one which is this
rank's alone: nothing is sent in it, nor after it, until the next forward (`is_arriving`).
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from shardwise.checkpoint import Held
from shardwise.checkpoint.json_codec import encode
from shardwise.comm import World
from shardwise.comm.regrouping import Membership
from shardwise.elastic.arrival import Arrival, Built, arrive, versions_here
from shardwise.elastic.between_steps import BetweenSteps
from shardwise.elastic.copies import CopyMeter
from shardwise.elastic.image_space import (
    NoSpaceError,
    make_images,
    memory_to_wait_in,
    share_wishes,
    warn_if_scarce,
    why_no_space,
)
from shardwise.elastic.iterations import Iterations
from shardwise.elastic.layouts import Layout, choose, kept_by_rank
from shardwise.elastic.loop_state import LoopState
from shardwise.elastic.pace_meter import PaceMeter
from shardwise.elastic.quiet_mode import QuietMode
from shardwise.elastic.rebuild import make_plain, on_mesh_of, rebuilt, steps_seen_by, take_down, with_group_sizes
from shardwise.elastic.regroup_reports import IMAGES, Report, check_agreement
from shardwise.elastic.stage_buffers import RanksBuffers
from shardwise.elastic.survival import Survival
from shardwise.elastic.trained_params import TrainedParams
from shardwise.errors import (
    CommError,
    CorruptionError,
    FaultError,
    LostStateError,
    SpareError,
    StateError,
    TierError,
    TurnedAwayError,
)
from shardwise.parallel.outline import SmallerMeshes
from shardwise.plan import Plan
from shardwise.plan.replica_groups import Smaller, group_size, num_groups, split_alike
from shardwise.plan.schema import plan_told
from shardwise.program.image_bytes import what_begins_anew
from shardwise.sharded.sharded_model import ShardedModel
from shardwise.sharded.state import Former
from shardwise.system.disk import Removals
from shardwise.system.job_folder import LEFT_OUT

REMOVAL_SECONDS = 5.0
"""How long ranks that let others in, or end, wait until what lost ranks had on disks is deleted."""
_log = logging.getLogger("shardwise")


class Host(Protocol):
    """The engine, as far as recovery uses it."""

    def wait_for_copy(self) -> None:
        """Block until no memory of this rank is being copied for a checkpoint."""
        ...

    def state_for_newcomers(self, num_steps: int) -> dict[str, Any]:
        """Encoded states of the loop's own objects: `objects`, `loaders` and `state`."""
        ...

    def can_leave_out(self) -> bool:
        """Whether all loaders of this loop can skip a batch."""
        ...

    def leave_out(self, num_steps: int) -> None:
        """Skip the batch of the step after `num_steps`."""
        ...

    def turned_away(self) -> None:
        """The others continue without this rank."""
        ...

    def rest(self) -> None:
        """So they do until this rank comes back."""
        ...

    def take_over(self, world: World, sharded: ShardedModel) -> None:
        """Use `sharded`, in `world`, from now on."""
        ...

    def receive(self, arrival: Arrival) -> None:
        """Take the others' state of the loop's own objects, on a rank that joins them."""
        ...


class Loop(Protocol):
    """A loop whose calls of the model are intercepted."""

    def wrap(self, sharded: ShardedModel) -> None:
        """Go on with `sharded`, and intercept its calls."""
        ...

    def unwrap(self) -> None:
        """Stop intercepting them."""
        ...

    def come_back(self, arrival: Arrival) -> None:
        """This rank was a spare, and has joined the others again."""
        ...

    def seed_anew(self) -> None:
        """This rank is in a replica group with others, which have drawn other random numbers."""
        ...


@dataclass(frozen=True)
class Replanned:
    """A model whose memory is being planned again, as it was in the layout `label`."""

    label: int
    model: Former


class Recovery:
    """One rank's images of its state, and its way from one world to the next.

    `loop` is intercepted, `arrival` what a rank that joins has received from the others.
    """

    def __init__(
        self, host: Host, loop: Loop, sharded: ShardedModel, membership: Membership[World], arrival: Arrival | None
    ) -> None:
        self._host = host
        self._loop = loop
        self._membership = membership
        self._sharded = sharded
        self.world = sharded.world
        self._plan = with_group_sizes(sharded.plan if arrival is None else arrival.plan, {}, self.world.size)
        self._smaller = sharded.parts.sharding.smaller
        self._told_least = 0 if arrival is None else self._smaller.least
        self._choice: Smaller | None = None
        """Which of these are taken, in order, as far as this rank has heard: see [Note: agreed before it is used] in
        `mesh_choice.py`."""
        self.seconds: list[float] = []
        """Duration of each recovery, from this rank's first notice of the fault."""
        self.iterations = Iterations.of(sharded.progress.num_steps, arrival)
        self.loop_state = LoopState(sharded, () if arrival is None else arrival.attributes)
        self.quiet = QuietMode()
        self.between_steps = BetweenSteps()
        self.changes_wanted = False
        """Whether ranks want to join or leave, as all of them know."""
        self.is_left = False
        """Whether the others continue without this rank, or none can continue."""
        self.is_edited = False
        """Whether the loop has changed parameters or states by hand since the last version."""
        self._num_left_out = len(_left_out(membership.folder))
        """Batches skipped so far, those before this rank joined, or came back, included."""
        self.copy_meter = CopyMeter()
        self._removals = Removals()
        self._pace_meter = PaceMeter()
        self._num_layouts = 0 if arrival is None else arrival.label
        self._layout: Layout
        self._num_waits = 0
        """How often in this layout there was no space for an image that waits for it."""
        self._told_changed = ""
        """What of this rank's state has changed, as it has told the others of the present world."""
        self._lost_copy = ""
        """What has changed in a copy of a state that this rank has no more since."""
        self._lets_in = False
        """Whether others join in the present world, while these ranks lay out the model for it."""
        self._former: Layout | None = None
        """The layout to return to until the present one is complete on all ranks."""
        self._former_model: Former | None = None
        """The model, while it is taken down."""
        self._replanned: Replanned | None = None
        """While memory is planned again."""
        self._make_layout(sharded)
        self._complete_label = self._num_layouts
        self.survival.begin(self.iterations.version)
        if arrival is None:
            self._tell_of_groups()
            self.loop_state.loads.begin()

    @property
    def survival(self) -> Survival:
        """Keeps the images of the present layout."""
        assert self._layout.survival is not None
        return self._layout.survival

    def join(self) -> None:
        """On a rank that has joined: the last exchange of the recovery in which it has."""
        self._share_change_wishes("recovered")
        self._go_quiet()

    def _go_quiet(self) -> None:
        self.quiet.enter(self._sharded)
        if self.iterations.is_open:  # maybe behind its backward
            self.quiet.give_gradients()

    def close(self, error: BaseException | None) -> None:
        """With an `error`, or if the others continue without this rank, its images stay: the others need them. So they
        do until all ranks have closed."""
        is_end = error is None and not self.is_left
        if is_end:
            self.quiet.leave()
        for layout in (self._former, self._layout):
            if layout is None or layout.survival is None:
                continue
            if is_end:
                layout.leave(self.world)
            else:
                layout.survival.close(removes=False)
        if is_end and (left := self._removals.settle(REMOVAL_SECONDS)):
            _log.warning(
                "These files of ranks that are gone could not be deleted, as their disk has failed or answers nothing: "
                "%s. The next job in the folder deletes them; without one, delete them yourself.",
                ", ".join(map(str, left)),
            )

    # -- versions of the state ------------------------------------------------------------------------------

    def commit(self, *, awaits_updates: bool) -> None:
        """Make the step that was just taken a version that all ranks can return to, once all have reported it. See
        [Note: the commit] and [Note: reads between steps] in `session.py`."""
        iterations, num_steps, survival = self.iterations, self._sharded.progress.num_steps, self.survival
        if awaits_updates or survival.copies is None:
            self._sharded.parts.runner.gathering.await_updates()
        survival.await_copies()
        if self._smaller.is_open:
            self._hear_choice()
        self.loop_state.loads.add_up()  # before a rank has the new version, to which all may return
        iterations.next_version(iterations.begun, num_steps)
        images = survival.image
        verification = self._sharded.parts.verification
        sums = None if verification is None else verification.noted_after(num_steps)
        refusal = why_no_space(lambda: survival.complete(iterations.version, sums))
        self._share_change_wishes("commit", refusal)
        self._settle(self._choice)
        if survival.image is not images:
            warn_if_scarce(self._layout.folder, self.world)
        survival.follow(iterations.version)
        self._membership.step = num_steps
        if self.world.rank == 0 and (pace := self._pace_meter.step(self.world.generation)) is not None:
            self._membership.tell_pace(self.world.size, pace.step_seconds, pace.error)

    def iteration_begins(self) -> None:
        """See [Note: when buffers change] in `stage_buffers.py`, and [Note: twice the images] in `image_space.py`."""
        survival = self.survival
        if survival.waits_for_space and not self.quiet.is_on:
            self._move_image()
        survival.iteration_begins(self.iterations.version)

    def _move_image(self) -> None:
        try:
            self.survival.move_image()
        except NoSpaceError as error:
            self._num_waits += 1
            if self._num_waits == 2:  # the first time, others may not have deleted theirs yet
                _log.warning("If rank %d is lost now, its state is lost with it: %s", self.world.rank, error)

    def propose(self, meshes: Smaller) -> None:
        """On the first rank, before the first step: on which `meshes`, one for each number of ranks, the job is to go
        on where no replica group is whole. None if that is not known."""
        if self._smaller.is_open:
            self._choice = meshes

    def _hear_choice(self) -> None:
        """See [Note: agreed before it is used] in `mesh_choice.py`. All ranks call."""
        received = self.world.exchange(json.dumps(list(map(dict, self._choice or ()))).encode(), "smaller meshes")
        self._choice = next((found for one in received if (found := json.loads(one))), ())

    def _settle(self, choice: Smaller | None) -> None:
        """All ranks know of this choice; `None` if of none."""
        if choice is None or not self._smaller.is_open:
            return
        self._choice, self._smaller = choice, self._smaller.settled(choice)
        if choice and self._plan.mesh is not None:
            self._membership.prefers(self._plan.mesh, choice)

    def take_edits(self) -> None:
        """Give values changed by hand a version of their own, so that neither copies from before nor the image of a
        rank that is lost before it has come here are taken for them."""
        if not self.is_edited:
            return
        iterations = self.iterations
        try:
            self.survival.await_copies()
            iterations.next_version(iterations.made[iterations.version], self._sharded.progress.num_steps)
            self.survival.begin(iterations.version, has_begun=True, is_edited=True)
        except CommError as error:
            self.recover(error)
        self.is_edited = False

    def plan_again(self) -> None:
        """Plan memory for what was unfrozen. If a rank is lost meanwhile, the others recover, and plan later."""
        sharded = self._sharded
        try:
            self.survival.await_copies()  # then the images have all of the layout that is given up
            self._replanned = Replanned(self._layout.label, Former.of(sharded))
            sharded.progress.replan()
        except CommError as error:
            if sharded.is_taken_down and self._sharded is sharded:
                assert self._replanned is not None
                self._former_model, self._layout.flats = self._replanned.model, []
            self.recover(error)
        self._replanned = None

    def fault_for_others(self, error: CorruptionError) -> FaultError:
        """See `fault_for_others` in `corrupt_rank.py`."""
        from shardwise.elastic.corrupt_rank import fault_for_others  # only then

        return fault_for_others(error, self._sharded.parts.verification, self.survival, self.world)

    # -- from one world to the next -------------------------------------------------------------------------

    def recover(self, error: CommError | None) -> None:
        """Continue with another set of ranks: after a fault, or without one where ranks join or leave, at the beginning
        of an iteration.

        Returns with the model sharded for the new world, as it was after the last step that all completed, and at rest.
        Raises if recovery is impossible.
        """
        try:
            self._recover(error)
        except LostStateError:
            self._membership.gives_up()
            raise

    def _recover(self, error: CommError | None) -> None:
        started = time.perf_counter()
        lets_in = error is None
        self._host.wait_for_copy()  # memory that a layout lets go reads as zeros
        while True:
            is_code = isinstance(error, FaultError) and error.is_of_code and not self._is_of_newcomers(error)
            if error is not None and (isinstance(error, TurnedAwayError) or is_code or self._membership.has_several):
                self.is_left = True
                if isinstance(error, TurnedAwayError):
                    self._host.turned_away()
                raise error
            if self.is_edited:
                raise LostStateError(
                    "A rank was lost after parameters or states were changed by hand, or a checkpoint was resumed, "
                    "and before the next forward, so there is no copy of their present values. Start again from the "
                    "last checkpoint."
                ) from error
            try:
                self._regroup_and_restore(error, lets_in=lets_in)
                break
            except SpareError as spare:
                self._wait_as_spare(spare)
                return
            except CommError as another:
                error = another
        seconds = time.perf_counter() - started
        self.seconds.append(seconds)
        if self.world.rank == 0:
            _log.warning(
                "Going on with %d ranks after step %d, %.0f ms after this was found: %s",
                self.world.size,
                self._sharded.progress.num_steps,
                seconds * 1e3,
                str(error).partition("\n")[0] if error is not None else "ranks have joined or left",
            )
            if anew := what_begins_anew([flat.spec for flat in self._sharded.parts.flats]):
                _log.warning("%s", anew)

    def _is_of_newcomers(self, error: FaultError) -> bool:
        """Whether those at fault join here, whose scripts call something else than the others': they end."""
        return bool(error.ranks) and self._lets_in and all(self._layout.ranks[rank] is None for rank in error.ranks)

    def _wait_as_spare(self, why: SpareError) -> None:
        """See [Note: spares]. If a rank is lost while this one joins, it ends, as a new one does."""
        _log.warning("Rank %d waits as a spare: %s", self.world.rank, why)
        layouts = [one for one in (self._former, self._layout) if one is not None]
        for layout in layouts:
            if layout.survival is not None:
                layout.survival.close(removes=False)  # the others read its images
        former = self._former_model or Former.of(self._sharded)
        self._host.rest()
        self._loop.unwrap()
        take_down(self._sharded)
        make_plain(former)
        try:
            self.world = self._membership.come_back().world
            for layout in layouts:
                layout.clear()
            self._removals.settle(REMOVAL_SECONDS)
            if former.sharding.disk is not None:  # this rank opens its folder anew
                former.sharding.disk.close()
            sharded, arrival = arrive(
                former.model, self._plan, former.optimizers, self.world, former.before_change, former.progress
            )
            self._join_again(sharded, arrival)
        except CommError:
            self.is_left = True
            self._host.turned_away()
            raise
        _log.warning("Rank %d trains again, after step %d.", self.world.rank, sharded.progress.num_steps)

    def _join_again(self, sharded: ShardedModel, arrival: Arrival) -> None:
        self._sharded, self._former, self._former_model, self._replanned = sharded, None, None, None
        self.iterations.come_back(sharded.progress.num_steps, arrival)
        self.between_steps = BetweenSteps()
        self.is_edited = False
        self._num_layouts = arrival.label
        self._plan, self._smaller, self._choice = arrival.plan, sharded.parts.sharding.smaller, None
        self._told_least = self._smaller.least
        self._num_left_out = len(_left_out(self._membership.folder))
        self._loop.wrap(sharded)
        self._make_layout(sharded)
        self.survival.begin(self.iterations.version)
        self._complete_label = self._num_layouts
        self._host.take_over(self.world, sharded)
        self._host.receive(arrival)
        self.loop_state.follow(sharded)
        self.join()
        self.loop_state.come_back(self.iterations.begun)
        self.loop_state.attributes.hear(arrival.attributes)
        self._loop.come_back(arrival)

    def _regroup_and_restore(self, error: CommError | None, *, lets_in: bool) -> None:
        self.changes_wanted = False
        self.quiet.leave(error)
        for layout in (self._former, self._layout):
            if layout is None or layout.survival is None:
                continue
            if error is None:
                layout.survival.await_copies()
            else:
                layout.survival.end_copies()
        if lets_in:  # a spare that comes back makes files of the same names
            self._removals.settle(REMOVAL_SECONDS)
        reports = self._regroup(lets_in=lets_in)
        told = [one for one in reports if one is not None]
        self._require_own_bits(told)
        layouts = [one for one in (self._layout, self._former) if one is not None]
        layout, version, readers = choose(layouts, reports, self.world, compares=not _is_of_code(told))
        self.iterations.return_to(version, told)
        if self.iterations.is_void():
            self.loop_state.undo_update()
        self._settle(next((one.choice for one in told if one.choice is not None), None))
        self.between_steps.hear(told)
        self._leave_out_what_failed(self.iterations.num_steps[version])
        assert layout.survival is not None
        layout.survival.bring(version)
        mine = [rank for rank, reader in readers.items() if reader == self.world.rank]
        images = {rank: layout.images_of(rank) for rank in mine}
        for rank in mine:  # also if memory of the layout is gone: copies of other hosts' ranks do without
            layout.complete(rank, images[rank], version)
        self._check_agreement(layout, version, readers)
        self.iterations.version = version
        self._sharded.progress.num_steps = self.iterations.num_steps[version]
        if layout.survival.buffers is not None:
            self.loop_state.return_to(self.iterations.void_after)
        try:
            held = layout.held(self.world.rank, readers, images, version)
            self._lay_out(layout, held, layout.buffers(self.world.rank, readers, images, version), version)
        except TierError:
            layout.give_up_silent(images)
            raise
        self._undo_ended_iteration()
        if self.iterations.is_void():
            self.loop_state.note_settings()

    def _undo_ended_iteration(self) -> None:
        """If an iteration that has ended here is void now, restore what it began with. This happens when a host dies
        before the copies on other hosts have the last step."""
        iterations = self.iterations
        undone = iterations.ended_and_undone()
        if undone is None:
            return
        is_inside = iterations.is_open and self.loop_state.iteration == iterations.begun
        if self.loop_state.go_back(undone) and not is_inside:  # else the end of the void iteration does that
            self.loop_state.restore()
            self._sharded.progress.num_void += 1

    def _leave_out_what_failed(self, num_steps: int) -> None:
        """Skip a batch if the launcher has asked for it with this generation: see `Plan.bad_batch`."""
        steps = _left_out(self._membership.folder)
        if num_steps in steps[self._num_left_out :]:
            self._host.leave_out(num_steps)
            if self.world.rank == 0:
                _log.warning("The batch after step %d is skipped: it failed on more than one rank.", num_steps)
        self._num_left_out = len(steps)

    def _regroup(self, *, lets_in: bool) -> list[Report | None]:
        """Enter the next world. Returns the report of each of its ranks, `None` for those that have joined."""
        self._told_changed, self._lost_copy = self._changed_at_rest()
        layouts = [one for one in (self._former, self._layout) if one is not None]
        versions = {
            one.label: sorted(set().union(*(image.versions for image in one.survival.images)))
            for one in layouts
            if one.survival is not None
        }
        own = self.iterations
        begun, results = own.begun + own.is_prepared, self.between_steps.results
        choice = None if self._choice is None else list(map(dict, self._choice))
        facts = (self._complete_label, versions, results, self._num_layouts, self._told_changed, choice)
        report = Report(begun, own.ended, own.made, *facts)
        regrouped = self._membership.regroup(self.world, report.message(), lets_in=lets_in)
        self.world = regrouped.world
        self._layout = self._layout.regrouped(regrouped.origins)
        if self._former is not None:
            self._former = self._former.regrouped(regrouped.origins)
        is_new = [origin is None for origin in regrouped.origins]
        self._lets_in = any(is_new)
        reports = [None if new else Report.of(message) for new, message in zip(is_new, regrouped.reports, strict=True)]
        self._num_layouts = 1 + max(one.num_layouts for one in reports if one is not None)
        return reports

    def _changed_at_rest(self) -> tuple[str, str]:
        """See [Note: a copy that is read] in `corrupt_rank.py`."""
        sharded = self._sharded
        if sharded.is_taken_down or sharded.parts.verification is None or self._former is not None:
            return "", ""  # or it is of a layout that the ranks may return to, and has been compared
        from shardwise.elastic.corrupt_rank import changed_at_rest  # only plans that verify need it

        return changed_at_rest(sharded.parts.verification, self.survival, self.iterations.num_steps)

    def _require_own_bits(self, told: Sequence[Report]) -> None:
        """Leave, if this rank's state has changed, and that of most others has not; or a copy, without which it has no
        state in common with them."""
        label = min(one.label for one in told)
        in_common = set.intersection(*(set(one.versions.get(label, ())) for one in told))
        mine = self._told_changed or ("" if in_common else self._lost_copy)
        if mine and not _is_of_code(told):
            from shardwise.elastic.corrupt_rank import leave

            raise leave(mine, self.survival, self.world.rank, self._sharded.progress.num_steps)

    def _check_agreement(self, layout: Layout, version: int, readers: dict[int, int]) -> None:
        """Check that all continue from the same state; the first rank that was there sends it to those that join, and
        so does the first with each pipeline stage."""
        sent: dict[str, Any] = {
            "label": self._num_layouts,
            "of": layout.label,
            "version": version,
            "void_after": self.iterations.void_after,
            "void_until": self.iterations.void_until,
        }
        there = [rank for rank, origin in enumerate(layout.ranks) if origin is not None]
        if len(there) < self.world.size and layout.is_first_of_list(self.world.rank):
            sent["came"] = self._for_newcomers(layout, readers, self.iterations.num_steps[version])
        check_agreement(self.world, sent, there)

    def _for_newcomers(self, layout: Layout, readers: dict[int, int], num_steps: int) -> dict[str, Any]:
        sharded, sharding = self._sharded, self._model_of(layout).sharding
        mesh = layout.specs[0][0].mesh
        scaler = sharded.progress.scaler
        trained = TrainedParams.of(sharded, self._former_model, layout)
        shapes = {slot.name: slot.whole_shape for _, slots in layout.specs for slot in slots}
        groups = [self.loop_state.settings_of(group) for group in trained.of_known_groups(self.loop_state.groups())]
        return {
            "versions": versions_here(),
            "built": asdict(Built.of(sharded.model, self._model_of(layout).optimizers, shapes)),
            "mesh": mesh.named_sizes,
            "plan": plan_told(self._plan),
            "budget": sharding.budget.model_dump(mode="json"),
            "fitted": sharding.fitted,
            "smaller": self._smaller.told(),
            "stands_for": layout.stands_for(readers),
            "num_steps": num_steps,
            "scale": None if scaler is None else encode(scaler.state_dict()),
            "groups": groups,
            "attributes": self.loop_state.attributes.told(),
            "optimizer_steps": [steps_seen_by(optimizer) for optimizer in self._model_of(layout).optimizers],
            "trained": trained.facts(),
            "buffers": encode(dict(sharded.model.named_buffers())),
            "loads": encode(self.loop_state.loads.known()),
            "schedules": self.loop_state.schedules(),
            "loop": self._host.state_for_newcomers(num_steps),
        }

    def _lay_out(self, layout: Layout, held: Held, buffers: Sequence[RanksBuffers], version: int) -> None:
        """Shard the model for the new world, with images. Until all have done so, `layout` is kept to return to."""
        if self._layout is not layout:
            self._layout.remove(is_last=False)  # of an attempt that not all ranks completed
        self._former, layout.flats = layout, []
        former = self._model_of(layout)
        former = self._former_model = replace(former, sharding=replace(former.sharding, smaller=self._smaller))
        take_down(self._sharded)
        self._loop.unwrap()
        self._sharded = sharded = rebuilt(former, self._plan, held, self.world, buffers)
        is_mixed = None in layout.ranks or num_groups(layout.specs[0][0].mesh) > 1
        if is_mixed and held.changes_parts(sharded.mesh):
            self._loop.seed_anew()
        self._loop.wrap(sharded)
        self._former_model = self._replanned = None
        try:
            self._make_layout(sharded, lets_in=self._lets_in)
            self.survival.begin(version, has_begun=self.iterations.is_open)
        except StateError as error:  # when they start again, there is only one image of each
            raise LostStateError(f"{error} All ranks start again from the last checkpoint.") from error
        self._complete_label = self._layout.label
        self._host.take_over(self.world, sharded)
        self.loop_state.follow(sharded)
        if self.survival.buffers is not None:
            self.loop_state.note_again(self.iterations.void_after)
        self._share_change_wishes("recovered")
        self._let_former_go()
        self._go_quiet()

    def of_whole_job(self, plan: Plan) -> tuple[Plan, SmallerMeshes]:
        """`plan`, to which these ranks change, as it is for all ranks of the job, and the smaller meshes that it has
        then. One that keeps the mesh of these ranks keeps that of all."""
        if plan.mesh == self._sharded.plan.mesh:
            plan = plan.model_copy(update={"mesh": self._plan.mesh})
        plan = with_group_sizes(plan, self._plan.mesh or {}, self.world.size)
        return plan, self._smaller.after(plan.mesh or {})

    def plan_here(self, plan: Plan, smaller: SmallerMeshes) -> Plan:
        """`plan`, that of all ranks of the job, on the mesh of those that are there. Before any have left or come, it
        has to fit as it is."""
        world = self.world
        return on_mesh_of(plan, world.size, world.local_size, smaller) if world.generation else plan

    def renew(self, sharded: ShardedModel, whole: Plan) -> None:
        """The same ranks have changed the model's plan, which is the one of the `whole` job on their mesh. All ranks
        call."""
        self._former = self._layout  # to return to, until the new one is complete on all ranks
        self._former.flats = []
        self._num_layouts += 1
        had_groups = self._has_groups
        self._sharded, self._plan = sharded, sharded.plan.model_copy(update={"mesh": whole.mesh})
        smaller, is_open = sharded.parts.sharding.smaller, self._smaller.is_open
        if self._choice is not None:
            self._choice = split_alike(smaller.every, self._choice)
        self._smaller = smaller if is_open else smaller.settled(())
        self._pace_meter = PaceMeter()
        self._make_layout(sharded)
        self.survival.begin(self.iterations.version, has_begun=self.iterations.is_open)
        self.loop_state.follow(sharded)
        self._loop.wrap(sharded)
        self._complete_label = self._num_layouts
        self._tell_of_groups(had_groups=had_groups)
        self.world.exchange(b"", IMAGES)
        self._let_former_go()

    def note_treatments(self, plan: Plan) -> None:
        """The same ranks treat activations as `plan` says from now on, which is all in which it differs."""
        self._plan = self._plan.model_copy(update={"activations": plan.activations})

    def _let_former_go(self) -> None:
        """All ranks have the present layout."""
        assert self._former is not None
        self._former.remove()
        if (disk := self._former.disk) is not None:
            if disk is self._layout.disk:
                disk.close_previous()
            else:  # a smaller mesh needed it, and this one does not
                disk.close()
        self._former = None

    def _model_of(self, layout: Layout) -> Former:
        """The model without its present layout, with the parameters trained that were trained in `layout`."""
        if self._former_model is not None:
            return self._former_model
        if self._replanned is not None and self._replanned.label == layout.label:
            return self._replanned.model
        return Former.of(self._sharded)

    @property
    def _has_groups(self) -> bool:
        """Whether ranks leave together."""
        return group_size(self._plan.mesh or {}) > 1

    def _tell_of_groups(self, *, had_groups: bool = False) -> None:
        """Let the launcher know which ranks leave together, on which smaller meshes the others may go on, and how many
        the plan's budget needs."""
        if self._smaller.least != self._told_least:
            self._told_least = self._smaller.least
            self._membership.needs_ranks(self._told_least)
        if self._has_groups or had_groups:
            self._membership.needs_groups(self._plan.mesh or {}, self._smaller.every)

    def _make_layout(self, sharded: ShardedModel, *, lets_in: bool = False) -> None:
        """Make the layout of `sharded` the present one, with images. All ranks call; `lets_in`: others join."""
        kept = kept_by_rank(sharded)
        self._num_waits = 0
        is_first = self._former is None and not self.world.is_newcomer
        waiting_bytes = 0 if is_first else memory_to_wait_in(self.world)

        def make() -> None:
            given = (self._num_layouts, self._membership.folder, self.copy_meter, self._removals, kept)
            self._layout = Layout.of(sharded, *given, waiting_bytes=waiting_bytes)

        make_images(self.world, make, lets_in=lets_in)

    def _share_change_wishes(self, subject: str, refusal: str = "") -> None:
        """Exchange whether ranks want to join or leave. Returning also means that all ranks have reached this point,
        and that none has a `refusal`, which all raise."""
        wants = self._membership.changes_wanted() and not self._membership.has_several
        self.changes_wanted = share_wishes(self.world, subject, refusal, wants=wants)


def _is_of_code(told: Sequence[Report]) -> bool:
    """Whether the state of most ranks has changed since the last step: code has done that, and on all of them."""
    return 2 * sum(bool(one.changed) for one in told) > len(told)


def _left_out(folder: Path | None) -> list[int]:
    """See `LEFT_OUT`."""
    path = folder / LEFT_OUT if folder is not None else None
    return json.loads(path.read_text()) if path is not None and path.exists() else []
