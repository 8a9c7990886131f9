"""Finding parameters that are read from elsewhere, while a pass is recorded: see `reach.py`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from shardwise.runtime.gathering import Gathering
from shardwise.runtime.hooks import Hooks
from shardwise.runtime.passes import Passes
from shardwise.runtime.reach import Callers, Reach
from shardwise.storage import Unit


class Watching:
    """Looks at every operation of a forward until all that it reads is known."""

    def __init__(self, model: nn.Module, gathering: Gathering, hooks: Hooks, passes: Passes) -> None:
        self._model = model
        self._units: Sequence[Unit] = gathering.units
        self._gathering = gathering
        self._hooks = hooks
        self._passes = passes
        self._callers: Callers | None = None
        self._has_seen = {True: False, False: False}
        """Whether everything that passes read is known: of training ones, and of others."""

    def has_seen(self, *, training: bool) -> bool:
        """Whether nothing has to be looked for in a pass of this kind."""
        return self._has_seen[training]

    def note_seen(self, *, training: bool) -> None:
        """A pass of this kind was watched from end to end, and taught nothing new."""
        self._has_seen[training] = True

    def look(self) -> None:
        """Look at every operation until the root is left."""
        if self._callers is None:
            self._callers = Callers(self._model)
        if self._gathering.watcher is None:
            watcher = Reach(self._units, self.gather_reached)
            watcher.__enter__()  # type: ignore[no-untyped-call]  # torch's own
            self._gathering.watcher = watcher

    def look_away(self) -> None:
        if self._gathering.watcher is not None:
            self._gathering.watcher.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's own
            self._gathering.watcher = None

    def stop(self) -> None:
        """Nothing has to be found any more. Only while no module runs."""
        self.look_away()
        if self._callers is not None:
            self._callers.remove()
            self._callers = None

    def gather_reached(self, unit: Unit) -> None:
        """A module reads `unit` without calling it: gather it now, and from the next pass on before that module.

        Where nobody has watched which module that is, the next pass is watched.
        """
        self._passes.current.keep(unit)
        if self._callers is None:
            self._has_seen = {True: False, False: False}
        else:
            self._add_site(unit, self._callers)
        self._gathering.open(unit)

    def _add_site(self, unit: Unit, callers: Callers) -> None:
        caller = callers.innermost()
        site = caller if caller is not None else self._model
        if all(site is not known for known in unit.sites):
            unit.sites.append(site)
            self._hooks.add_site(unit, site, num_running=callers.num_running(site))
