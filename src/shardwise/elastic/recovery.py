"""From a fault to the state after the last step that all ranks have taken, laid out for those who are left.

All survivors come here at about the same time, wherever they are. One that dies meanwhile is one more fault, with which
it begins again. `session.py` says when.
"""

from __future__ import annotations

import json
import logging
import time
from abc import ABC, abstractmethod
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch import nn

from shardwise.checkpoint import Held
from shardwise.checkpoint.codec import decode, encode
from shardwise.comm import World
from shardwise.comm.generation import LEFT_OUT, Membership
from shardwise.elastic.arrival import Came
from shardwise.elastic.layouts import Layout
from shardwise.elastic.moment import Moment
from shardwise.elastic.rebuild import rebuilt, take_down
from shardwise.elastic.survival import Survival
from shardwise.elastic.told import Told
from shardwise.errors import CommError, FaultError, StateError, TurnedAwayError
from shardwise.sharded_model import ShardedModel
from shardwise.state import Former

_CODE = ("contradiction", "deadlock")
"""Kinds of faults that no other set of ranks would mend."""
_log = logging.getLogger("shardwise")


class Host(Protocol):
    """The engine, as far as it has to be told."""

    module: nn.Module

    def wait_for_copy(self) -> None:
        """Blocks until nothing that a checkpoint is written from is still read."""
        ...

    def told_to_those_who_come(self, num_steps: int) -> dict[str, Any]:
        """What the loop's own objects say, encoded: `objects`, `loaders` and `state`."""
        ...

    def can_leave_out(self) -> bool:
        """Whether the loop's batches come from loaders that can go on behind one."""
        ...

    def leave_out(self, num_steps: int) -> None:
        """The batch of the step after `num_steps` is not to come again."""
        ...

    def turned_away(self) -> None:
        """The others go on without this rank."""
        ...

    def take_over(self, world: World, sharded: ShardedModel) -> None:
        """From now on `sharded` takes the steps, in `world`."""
        ...


class Recovery(ABC):
    """What one rank knows of its iterations, and how it comes to the next world."""

    def __init__(self, host: Host, sharded: ShardedModel, membership: Membership, came: Came | None) -> None:
        """See `Session`."""
        self._host = host
        self._membership = membership
        self._sharded = sharded
        self._world = sharded.world
        self._plan = sharded.plan
        self.recovered_seconds: list[float] = []
        """How long each recovery took, from the fault as this rank met it."""
        self._version = self._begun = 0
        self._taken_in = {0: 0}
        """By version, of the last two, the iteration that it came of; and how many steps had been taken then."""
        self._num_steps = {0: sharded.progress.num_steps}
        self._is_open = False
        """Whether an iteration has begun and not ended."""
        self._void_after = self._void_until = 0
        """Iterations after the one and up to the other are void."""
        self._quiet = ExitStack()
        self._is_in_quiet = False
        self._results: list[tuple[int, int, Any]] = []
        """What calls outside of steps came to: iteration, number, value."""
        self._known: dict[tuple[int, int], Any] = {}
        """What others have told of that."""
        self._num_layouts = 0
        self._changes_wanted = False
        self._num_left_out = len(self._left_out())
        """Batches that were left out so far, or came before this rank."""
        self._is_left = False
        """Whether the others go on without this rank, or nobody can."""
        if came is not None:
            self._num_layouts, self._version = came.label, came.version
            self._begun = came.void_until - 1  # the others are about to begin the last that is void
            self._void_after, self._void_until = came.void_after, came.void_until
            self._taken_in = {came.version: came.void_after}
            self._num_steps = {came.version: sharded.progress.num_steps}
            self._plan = came.plan
        self._moment = Moment(sharded)
        self._former: Layout | None = None
        """What can be gone back to until the present layout is complete on all ranks."""
        self._former_model: Former | None = None
        """The model, while it is taken down."""
        self._layout = Layout.of(sharded, self._num_layouts, membership.folder)
        self._complete_label = self._num_layouts
        self._survival.begin(self._version)

    @abstractmethod
    def _wrap(self) -> None:
        """Let the loop's calls of the present model come here."""

    @abstractmethod
    def _unwrap(self) -> None:
        """Let them go."""

    @property
    def _survival(self) -> Survival:
        assert self._layout.survival is not None
        return self._layout.survival

    def is_void(self) -> bool:
        """Whether what the loop does now comes to nothing: see [Note: iterations]."""
        return self._is_open and self.was_void()

    def was_void(self) -> bool:
        """The same of the iteration that was begun last, also after its end."""
        return self._void_after < self._begun <= self._void_until

    def _recover(self, error: CommError | None) -> None:
        """Go on with the ranks that there are after a fault, or where somebody comes or leaves, at the beginning of an
        iteration, without one.

        Returns with the model laid out anew, as it was after the last step that all have taken, and at rest; raises
        what cannot be mended.
        """
        started = time.perf_counter()
        lets_in = error is None
        while True:
            if isinstance(error, TurnedAwayError) or (isinstance(error, FaultError) and error.kind in _CODE):
                self._is_left = True
                if isinstance(error, TurnedAwayError):
                    self._host.turned_away()
                raise error
            try:
                self._go_on(error, lets_in=lets_in)
                break
            except CommError as another:
                error = another
        seconds = time.perf_counter() - started
        self.recovered_seconds.append(seconds)
        if self._world.rank == 0:
            _log.warning(
                "Going on with %d ranks after step %d, %.0f ms after this was found: %s",
                self._world.size,
                self._sharded.progress.num_steps,
                seconds * 1e3,
                str(error).partition("\n")[0] if error is not None else "others have come, or left",
            )

    def _go_on(self, error: CommError | None, *, lets_in: bool) -> None:
        self._changes_wanted = False
        self._drop_quiet(error)
        for layout in (self._former, self._layout):
            if layout is not None and layout.survival is not None:
                layout.survival.settle()
        told = self._regroup(lets_in=lets_in)
        layout, version, givers, images = self._choose(told)
        there = [one for one in told if one is not None]
        self._void_after = next(one.taken_in[version] for one in there)
        begun = max(one.begun for one in there)
        self._void_until = begun if begun > self._void_after else 0
        self._known = {(one[0], one[1]): decode(one[2]["is"]) for said in there for one in said.results if one[2]}
        self._leave_out_what_failed(self._num_steps[version])
        assert layout.survival is not None
        layout.survival.bring(version)
        for rank in layout.gone if layout.flats else ():
            if rank in givers and layout.reader(rank) == self._world.rank:
                layout.heal(rank, images[rank], version)
        self._agree(layout, version, givers)
        self._version = version
        self._sharded.progress.num_steps = self._num_steps[version]
        self._lay_out(layout, layout.held(self._world.rank, givers, images, version), version)
        if self.is_void():
            self._moment.take_schedules()

    def _left_out(self) -> list[int]:
        """See `LEFT_OUT`."""
        path = self._membership.folder / LEFT_OUT if self._membership.folder is not None else None
        return json.loads(path.read_text()) if path is not None and path.exists() else []

    def _leave_out_what_failed(self, num_steps: int) -> None:
        """If the launcher has said so with this generation: see `Plan.bad_batch`."""
        steps = self._left_out()
        if num_steps in steps[self._num_left_out :]:
            self._host.leave_out(num_steps)
            if self._world.rank == 0:
                _log.warning("The batch after step %d is left out: it failed wherever it went.", num_steps)
        self._num_left_out = len(steps)

    def _regroup(self, *, lets_in: bool) -> list[Told | None]:
        """What each rank of the new world has told, `None` from those who have come."""
        layouts = [one for one in (self._former, self._layout) if one is not None]
        steps = {
            one.label: sorted({step for image in one.survival.images for step in image.steps})
            for one in layouts
            if one.survival is not None
        }
        told = Told(self._begun, self._taken_in, self._complete_label, steps, self._results)
        regrouped = self._membership.regroup(self._world, told.message(), lets_in=lets_in)
        self._world = regrouped.world
        self._num_layouts += 1
        self._layout = self._layout.regrouped(regrouped.origins)
        if self._former is not None:
            self._former = self._former.regrouped(regrouped.origins)
        came = [origin is None for origin in regrouped.origins]
        return [None if new else Told.of(message) for new, message in zip(came, regrouped.said, strict=True)]

    def _choose(self, told: list[Told | None]) -> tuple[Layout, int, frozenset[int], dict[int, Any]]:
        """The newest layout that is complete on all, and of it the newest state."""
        layouts = [one for one in (self._layout, self._former) if one is not None]
        label = min(one.label for one in told if one is not None)
        for layout in layouts:
            if layout.label > label:
                continue
            images = {rank: layout.images_of(rank) for rank in layout.gone}
            try:
                steps = [set() if one is None else set(one.steps.get(layout.label, [])) for one in told]
                version, givers = layout.newest(steps, images)
            except StateError:
                if layout is layouts[-1]:
                    raise
                continue
            return layout, version, givers, images
        raise StateError("The ranks that are left have no layout in common. Start again from the last checkpoint.")

    def _agree(self, layout: Layout, version: int, givers: frozenset[int]) -> None:
        """All go on from the same state; the first of those who were there tells it to those who have come."""
        said: dict[str, Any] = {
            "label": self._num_layouts,
            "of": layout.label,
            "version": version,
            "void_after": self._void_after,
            "void_until": self._void_until,
        }
        there = [rank for rank, origin in enumerate(layout.ranks) if origin is not None]
        if self._world.rank == there[0] and len(there) < self._world.size:
            said["came"] = self._for_newcomers(layout, givers, self._num_steps[version])
        told = self._world.exchange(json.dumps(said).encode(), "recovery")
        others = [json.loads(told[rank]) for rank in there]
        if any({**other, "came": None} != {**others[0], "came": None} for other in others):
            raise StateError(f"Ranks would go on from different states: {others}.")

    def _for_newcomers(self, layout: Layout, givers: frozenset[int], num_steps: int) -> dict[str, Any]:
        sharded = self._sharded
        mesh = layout.specs[0][0].mesh
        scaler = sharded.progress.scaler
        groups = [self._moment.settings_of(group) for group in self._moment.groups()]
        return {
            "mesh": dict(zip(mesh.axes, mesh.sizes, strict=True)),
            "stands_for": layout.stands_for(givers),
            "num_steps": num_steps,
            "scale": None if scaler is None else encode(scaler.state_dict()),
            "groups": groups,
            "buffers": encode(dict(sharded.model.named_buffers())),
            "schedules": self._moment.schedules(),
            "told": self._host.told_to_those_who_come(num_steps),
        }

    def _lay_out(self, layout: Layout, held: Held, version: int) -> None:
        """The model anew, with images of it. Until all have that, `layout` stays what can be gone back to."""
        if self._layout is not layout:
            self._layout.remove()  # that of an attempt which not all have completed
        self._former, layout.flats = layout, []
        former = self._former_model
        if former is None:
            sharded = self._sharded
            optimizers = sharded.optimizer.members if sharded.optimizer is not None else ()
            before_change = sharded.before_change
            former = Former(sharded.model, optimizers, sharded.sharding, sharded.progress, before_change)
            self._former_model = former
            take_down(sharded)
        self._unwrap()
        self._sharded = sharded = rebuilt(former, self._plan, held, self._world)
        self._wrap()
        self._former_model = None
        self._layout = Layout.of(sharded, self._num_layouts, self._membership.folder)
        self._survival.begin(version)
        self._complete_label = self._layout.label
        self._host.take_over(self._world, sharded)
        self._moment.follow(sharded)
        self._hear_of_changes("recovered")
        self._former.remove()
        self._former = None
        self._enter_quiet()

    def _hear_of_changes(self, subject: str) -> None:
        """All say whether somebody wants to come or to leave, and so that they have come as far as this."""
        wish = b"1" if self._membership.changes_wanted() else b""
        self._changes_wanted = b"1" in self._world.exchange(wish, subject)

    def _drop_quiet(self, error: CommError | None) -> None:
        """After a fault nothing can be left in order."""
        if error is None:
            self._leave_quiet()
        elif self._is_in_quiet:
            self._is_in_quiet = False
            grads = torch.is_grad_enabled()
            self._quiet.__exit__(type(error), error, None)
            torch.set_grad_enabled(grads)

    def _enter_quiet(self) -> None:
        grads = torch.is_grad_enabled()
        self._quiet = ExitStack()
        try:
            self._quiet.enter_context(self._sharded.inference(None))
        finally:
            torch.set_grad_enabled(grads)
        self._is_in_quiet = True

    def _leave_quiet(self) -> None:
        if self._is_in_quiet:
            self._is_in_quiet = False
            grads = torch.is_grad_enabled()
            self._quiet.close()
            torch.set_grad_enabled(grads)
