"""An engine in its job: open or closed, with a run log and loaders, and among ranks that may be lost or join."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from shardwise.access import arriving_error
from shardwise.checkpoint import encode
from shardwise.checkpoint.codec import decode
from shardwise.comm import World
from shardwise.data_ranks import Reader
from shardwise.errors import StateError
from shardwise.sharded_model import ShardedModel
from shardwise.state import State

if TYPE_CHECKING:
    from shardwise.elastic.session import Session
    from shardwise.run_log import RunLog

Result = TypeVar("Result")


class EngineInJob:
    """Part of `Engine`, whose constructor sets these attributes."""

    world: World
    _is_open: bool
    _state: State
    _sharded: ShardedModel
    _run_log: RunLog | None
    _owns_world: bool
    _session: Session | None = None
    """Survives lost ranks, in a job that can."""
    _readers: list[weakref.ref[Reader]]

    # -- ranks that are lost or join --------------------------------------------------------------------

    def state_for_newcomers(self, num_steps: int) -> dict[str, Any]:
        """What a rank needs that joins when `num_steps` steps count: the state of objects given to `remember`, the
        positions of loaders, and the caller's own state as it was saved or resumed last."""
        objects = {name: encode(thing.state_dict(), name) for name, thing in self._state.remembered.items()}
        readers = [known() for known in self._readers]
        loaders = [None if one is None else encode(one.state_after(num_steps), "loader") for one in readers]
        user = self._state.user_state
        return {
            "objects": objects,
            "loaders": loaders,
            "state": None if user is None else encode(dict(user), "state"),
            "begun": None if self._state.begun is None else self._state.begun.facts(),
        }

    def take_over(self, world: World, sharded: ShardedModel) -> None:
        """Continue with `sharded`, the same model on the remaining ranks, in `world`."""
        self.world, self._sharded, self._owns_world = world, sharded, True
        self._state.renew(world)
        if self._run_log is not None:
            self._run_log.go_on(world, sharded)

    def turned_away(self) -> None:
        """The others go on without this rank."""
        if self._run_log is not None:
            self._run_log.leave()

    @property
    def _is_arriving(self) -> bool:
        """Whether this rank has joined others and not begun a step: it has their values, and nobody answers it."""
        return self._session is not None and self._session.is_arriving

    # -- loaders that follow (`shardwise.data_ranks.Follows`) -------------------------------------------

    def follow(self, reader: Reader) -> None:
        """Register a loader, which from now on asks this engine which share of each batch it hands out. Loaders call
        this themselves."""
        self._readers.append(weakref.ref(reader))

    def begin_to_read(self) -> None:
        """A loader is about to hand out a batch. On a rank that has joined, its loaders first move to the others'
        positions."""
        theirs = self._session.loaders_of_others() if self._session is not None else []
        for known, state in zip(self._readers, theirs, strict=False):
            reader = known()
            if reader is not None and state is not None:
                reader.go_where(decode(state, "loader"))

    # -- before a call ----------------------------------------------------------------------------------

    def wait_for_copy(self) -> None:
        """Return once none of this rank's memory is being copied for a checkpoint. One rank may call alone."""
        self._state.saver.wait_for_copy()

    def _require_open(self) -> None:
        if not self._is_open:
            raise StateError("This engine was closed; call shard() again to train the model.")
        if self._sharded.is_taken_down:
            raise StateError(
                "A change of plan failed half-way, and this engine's values are gone with it. Close it, make another "
                "with shard(), and resume from the last checkpoint."
            )

    def _before_change(self) -> None:
        if self._is_arriving:
            raise arriving_error("a change of values")
        self.wait_for_copy()
        if self._session is not None:
            self._session.note_edit()

    def _asking(self, work: Callable[[], Result], *, is_small: bool = True) -> Result:
        """Run `work`, an exchange between ranks outside of a step. A small result can be sent again to a rank that was
        cut off from it."""
        return work() if self._session is None else self._session.outside(work, is_small=is_small)
