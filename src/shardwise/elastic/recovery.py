"""Recovery after a fault: the state after the last step that all ranks completed, sharded over the survivors.

All survivors arrive here at about the same time, from any point of a step. If another one dies meanwhile, recovery
starts again. `session.py` describes when it happens.
"""

from __future__ import annotations

import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from shardwise.checkpoint import Held
from shardwise.checkpoint.codec import encode
from shardwise.comm import World
from shardwise.comm.generation import LEFT_OUT, Membership
from shardwise.elastic.arrival import Arrival
from shardwise.elastic.copies import CopyMeter
from shardwise.elastic.image_space import make_images, share_wishes
from shardwise.elastic.layouts import Layout, choose
from shardwise.elastic.loop_state import LoopState
from shardwise.elastic.outside import Outside
from shardwise.elastic.quiet_mode import QuietMode
from shardwise.elastic.rebuild import rebuilt, take_down
from shardwise.elastic.reports import Report, check_agreement
from shardwise.elastic.survival import Survival
from shardwise.elastic.trained_params import TrainedParams
from shardwise.errors import CommError, FaultError, StateError, TurnedAwayError
from shardwise.sharded_model import Progress, ShardedModel
from shardwise.state import Former

_CODE_FAULTS = ("contradiction", "deadlock")
"""Kinds of faults that would occur with any set of ranks."""
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

    def take_over(self, world: World, sharded: ShardedModel) -> None:
        """Use `sharded`, in `world`, from now on."""
        ...


@dataclass(frozen=True)
class Replanned:
    """A model whose memory is being planned again, as it was in the layout `label`."""

    label: int
    model: Former


class Recovery(ABC):
    """One rank's record of its iterations, and its way from one world to the next."""

    def __init__(self, host: Host, sharded: ShardedModel, membership: Membership, arrival: Arrival | None) -> None:
        """See `ElasticSession`."""
        self._host = host
        self._membership = membership
        self.sharded = sharded
        self._world = sharded.world
        self.plan = sharded.plan
        self.recovered_seconds: list[float] = []
        """Duration of each recovery, from this rank's first notice of the fault."""
        self._version = self._begun = 0
        self._iterations = {0: 0}
        """The iteration that produced each of the last two versions of the state."""
        self._num_steps = {0: sharded.progress.num_steps}
        """The steps taken until each of these versions."""
        self._is_open = False
        """Whether an iteration has begun and not ended."""
        self._void_after = self._void_until = 0
        """Iterations after the first and up to the second are void."""
        self._ended_anywhere = 0
        """The last iteration that any rank had ended when ranks regrouped."""
        self._quiet = QuietMode()
        self._outside = Outside()
        self._num_layouts = 0
        self._changes_wanted = False
        self._num_left_out = len(_left_out(self._membership.folder))
        """Batches skipped so far, those before this rank joined included."""
        self._is_edited = False
        """Whether the loop has changed parameters or states by hand since the last version."""
        self._is_left = False
        """Whether the others continue without this rank, or none can continue."""
        if arrival is not None:
            self._num_layouts, self._version = arrival.label, arrival.version
            self._begun = arrival.void_until - 1  # the others are about to begin the last void iteration
            self._void_after, self._void_until = arrival.void_after, arrival.void_until
            self._iterations = {arrival.version: arrival.void_after}
            self._num_steps = {arrival.version: sharded.progress.num_steps}
            self.plan = arrival.plan
        self.loop_state = LoopState(sharded)
        self._former: Layout | None = None
        """The layout to return to until the present one is complete on all ranks."""
        self._former_model: Former | None = None
        """The model, while it is taken down."""
        self._replanned: Replanned | None = None
        """While memory is planned again."""
        self.copy_meter = CopyMeter()
        self._layout: Layout
        self._make_layout(sharded)
        self._complete_label = self._num_layouts
        self._survival.begin(self._version)

    @abstractmethod
    def _wrap(self) -> None:
        """Intercept the loop's calls of the present model."""

    @abstractmethod
    def _unwrap(self) -> None:
        """Stop intercepting them."""

    @property
    def _survival(self) -> Survival:
        assert self._layout.survival is not None
        return self._layout.survival

    def is_void(self) -> bool:
        """Whether the open iteration is void: see [Note: iterations]."""
        return self._is_open and self.was_void()

    def was_void(self) -> bool:
        """Whether the iteration begun last is void, also after its end."""
        return self._void_after < self._begun <= self._void_until

    def is_undone(self, iteration: int) -> bool:
        """Whether a completed iteration has become void: see [Note: the commit]."""
        return self._void_after < iteration <= self._void_until

    @property
    def begun(self) -> int:
        """The number of iterations begun."""
        return self._begun

    @property
    def may_be_undone(self) -> bool:
        """Whether a step can be undone after it has ended."""
        return self._survival.copies is not None

    @property
    def progress(self) -> Progress:
        return self.sharded.progress

    @property
    def bytes_for_survival(self) -> tuple[int, int]:
        """Of this rank's images, and of the copies that it keeps: see `Survival`."""
        return self._survival.image_bytes, self._survival.kept_bytes

    def _recover(self, error: CommError | None) -> None:
        """Continue with another set of ranks: after a fault, or without one where ranks join or leave, at the beginning
        of an iteration.

        Returns with the model sharded for the new world, as it was after the last step that all completed, and at rest.
        Raises if recovery is impossible.
        """
        started = time.perf_counter()
        lets_in = error is None
        while True:
            if isinstance(error, TurnedAwayError) or (isinstance(error, FaultError) and error.kind in _CODE_FAULTS):
                self._is_left = True
                if isinstance(error, TurnedAwayError):
                    self._host.turned_away()
                raise error
            if self._is_edited:
                raise StateError(
                    "A rank was lost after parameters or states were changed by hand, or a checkpoint was resumed, "
                    "and before the next forward, so there is no copy of their present values. Start again from the "
                    "last checkpoint."
                ) from error
            try:
                self._regroup_and_restore(error, lets_in=lets_in)
                break
            except CommError as another:
                error = another
        seconds = time.perf_counter() - started
        self.recovered_seconds.append(seconds)
        if self._world.rank == 0:
            _log.warning(
                "Going on with %d ranks after step %d, %.0f ms after this was found: %s",
                self._world.size,
                self.sharded.progress.num_steps,
                seconds * 1e3,
                str(error).partition("\n")[0] if error is not None else "ranks have joined or left",
            )

    def _regroup_and_restore(self, error: CommError | None, *, lets_in: bool) -> None:
        self._changes_wanted = False
        self._quiet.leave(error)
        for layout in (self._former, self._layout):
            if layout is not None and layout.survival is not None:
                layout.survival.await_copies() if error is None else layout.survival.end_copies()
        reports = self._regroup(lets_in=lets_in)
        layouts = [one for one in (self._layout, self._former) if one is not None]
        layout, version, readers = choose(layouts, reports, self._world)
        self._set_void_iterations([one for one in reports if one is not None], version)
        self._leave_out_what_failed(self._num_steps[version])
        assert layout.survival is not None
        layout.survival.bring(version)
        mine = [rank for rank, reader in readers.items() if reader == self._world.rank]
        images = {rank: layout.images_of(rank) for rank in mine}
        for rank in mine if layout.flats else ():
            layout.complete(rank, images[rank], version)
        self._check_agreement(layout, version, readers)
        self._version = version
        self.sharded.progress.num_steps = self._num_steps[version]
        self._lay_out(layout, layout.held(self._world.rank, readers, images, version), version)
        self._undo_ended_iteration()
        if self.is_void():
            self.loop_state.note_settings()

    def _set_void_iterations(self, reports: Sequence[Report], version: int) -> None:
        """Note which iterations are void when all return to `version`, and the results that other ranks report."""
        self._void_after = next(one.iterations[version] for one in reports)
        begun = max(one.begun for one in reports)
        self._void_until = begun if begun > self._void_after else 0
        self._ended_anywhere = max(one.ended for one in reports)
        self._outside.hear(reports)

    def _undo_ended_iteration(self) -> None:
        """If an iteration that has ended here is void now, restore what it began with. This happens when a host dies
        before the copies on other hosts have the last step. Void ones before it changed nothing."""
        first = self._void_after + 1
        undone = min((one for one in self._iterations.values() if one >= first), default=first)
        is_of_before = first < self._begun or not self._is_open
        if not (first <= self._void_until and is_of_before):
            return
        is_inside = self._is_open and self.loop_state.iteration == self._begun
        if self.loop_state.go_back(undone) and not is_inside:  # else `_end_void` does that
            self.loop_state.restore()
            self.sharded.progress.num_void += 1

    def _leave_out_what_failed(self, num_steps: int) -> None:
        """Skip a batch if the launcher has asked for it with this generation: see `Plan.bad_batch`."""
        steps = _left_out(self._membership.folder)
        if num_steps in steps[self._num_left_out :]:
            self._host.leave_out(num_steps)
            if self._world.rank == 0:
                _log.warning("The batch after step %d is skipped: it failed on more than one rank.", num_steps)
        self._num_left_out = len(steps)

    def _regroup(self, *, lets_in: bool) -> list[Report | None]:
        """Enter the next world. Returns the report of each of its ranks, `None` for those that have joined."""
        layouts = [one for one in (self._former, self._layout) if one is not None]
        steps = {
            one.label: sorted({step for image in one.survival.images for step in image.steps})
            for one in layouts
            if one.survival is not None
        }
        began, ended = self._begun, self._begun - self._is_open
        report = Report(
            began, ended, self._iterations, self._complete_label, steps, self._outside.results, self._num_layouts
        )
        regrouped = self._membership.regroup(self._world, report.message(), lets_in=lets_in)
        self._world = regrouped.world
        self._layout = self._layout.regrouped(regrouped.origins)
        if self._former is not None:
            self._former = self._former.regrouped(regrouped.origins)
        is_new = [origin is None for origin in regrouped.origins]
        reports = [None if new else Report.of(message) for new, message in zip(is_new, regrouped.reports, strict=True)]
        self._num_layouts = 1 + max(one.num_layouts for one in reports if one is not None)
        return reports

    def _check_agreement(self, layout: Layout, version: int, readers: dict[int, int]) -> None:
        """Check that all continue from the same state; the first rank that was there sends it to those that join."""
        sent: dict[str, Any] = {
            "label": self._num_layouts,
            "of": layout.label,
            "version": version,
            "void_after": self._void_after,
            "void_until": self._void_until,
        }
        there = [rank for rank, origin in enumerate(layout.ranks) if origin is not None]
        if self._world.rank == there[0] and len(there) < self._world.size:
            sent["came"] = self._for_newcomers(layout, readers, self._num_steps[version])
        check_agreement(self._world, sent, there)

    def _for_newcomers(self, layout: Layout, readers: dict[int, int], num_steps: int) -> dict[str, Any]:
        sharded = self.sharded
        mesh = layout.specs[0][0].mesh
        scaler = sharded.progress.scaler
        trained = TrainedParams.of(sharded, self._former_model, layout)
        groups = [self.loop_state.settings_of(group) for group in trained.of_known_groups(self.loop_state.groups())]
        return {
            "mesh": dict(zip(mesh.axes, mesh.sizes, strict=True)),
            "stands_for": layout.stands_for(readers),
            "num_steps": num_steps,
            "precision": self.plan.precision,
            "scale": None if scaler is None else encode(scaler.state_dict()),
            "groups": groups,
            "trained": trained.facts(),
            "buffers": encode(dict(sharded.model.named_buffers())),
            "schedules": self.loop_state.schedules(),
            "loop": self._host.state_for_newcomers(num_steps),
        }

    def _lay_out(self, layout: Layout, held: Held, version: int) -> None:
        """Shard the model for the new world, with images. Until all have done so, `layout` is kept to return to."""
        if self._layout is not layout:
            self._layout.remove()  # of an attempt that not all ranks completed
        self._former, layout.flats = layout, []
        former = self._former_model = self._model_of(layout)
        take_down(self.sharded)
        self._unwrap()
        self.sharded = sharded = rebuilt(former, self.plan, held, self._world)
        self._wrap()
        self._former_model = self._replanned = None
        self._make_layout(sharded)
        self._survival.begin(version)
        self._complete_label = self._layout.label
        self._host.take_over(self._world, sharded)
        self.loop_state.follow(sharded)
        self._share_change_wishes("recovered")
        self._former.remove()
        self._former = None
        self._quiet.enter(self.sharded)

    def renew(self, sharded: ShardedModel) -> None:
        """The same ranks have changed the model's plan. All ranks call."""
        self._former = self._layout  # to return to, until the new one is complete on all ranks
        self._former.flats = []
        self._num_layouts += 1
        self.sharded, self.plan = sharded, sharded.plan
        self._make_layout(sharded)
        self._survival.begin(self._version)
        self.loop_state.follow(sharded)
        self._wrap()
        self._complete_label = self._num_layouts
        self._world.exchange(b"", "images")
        self._former.remove()
        self._former = None

    def _model_of(self, layout: Layout) -> Former:
        """The model without its present layout, with the parameters trained that were trained in `layout`."""
        if self._former_model is not None:
            return self._former_model
        if self._replanned is not None and self._replanned.label == layout.label:
            return self._replanned.model
        return Former.of(self.sharded)

    def _make_layout(self, sharded: ShardedModel) -> None:
        """Make the layout of `sharded` the present one, with images. All ranks call."""

        def make() -> None:
            self._layout = Layout.of(sharded, self._num_layouts, self._membership.folder, self.copy_meter)

        make_images(self._world, make)

    def _share_change_wishes(self, subject: str, refusal: str = "") -> None:
        """Exchange whether ranks want to join or leave. Returning also means that all ranks have reached this point,
        and that none has a `refusal`, which all raise."""
        self._changes_wanted = share_wishes(self._world, subject, refusal, wants=self._membership.changes_wanted())


def _left_out(folder: Path | None) -> list[int]:
    """See `LEFT_OUT`."""
    path = folder / LEFT_OUT if folder is not None else None
    return json.loads(path.read_text()) if path is not None and path.exists() else []
