"""Units made whole, and let go: by the program where it is followed, else by the table, waited for at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from shardwise.program import Moment, drop_due, gather_due, serial
from shardwise.runtime.executor import BoundBlock, Executor
from shardwise.runtime.passes import Pass
from shardwise.runtime.reach import Reach
from shardwise.storage import ABSENT, GATHERING, Flat, Unit


class Gathering:
    """What is done to the units of one model. All ranks call every method."""

    def __init__(self, units: Sequence[Unit], executor: Executor) -> None:
        self.units = list(units)
        self._executor = executor
        self.watcher: Reach | None = None
        """Who looks at every operation just now, and shall not look at ours."""

    def open(self, unit: Unit) -> None:
        """`unit` is whole, and its parameters are plain ones, while it computes."""
        self.make_sure(unit)
        unit.wake()

    def make_sure(self, unit: Unit) -> None:
        """`unit` is whole when it computes, whatever the program thought."""
        for flat in unit.flats:
            if flat.is_whole:
                continue
            if flat.state is GATHERING:
                self._executor.movers[flat.name].params.wait_full()
            if flat.state is ABSENT:
                moment = unit.moments.before_forward
                with self._unwatched():
                    self._executor.run(moment, serial(gather_due(unit.spec, moment)))

    def begin(self, unit: Unit) -> None:
        """What makes `unit` whole is on its way: `open` waits for it."""
        moment = unit.moments.before_forward
        absent = {flat.name for flat in unit.flats if flat.state is ABSENT}
        due = serial(tuple(action for action in gather_due(unit.spec, moment) if action.flat in absent))
        with self._unwatched():
            self._executor.run(moment, [action for action in due if (action.verb, action.subject) != ("wait", "full")])

    def let_go(self, unit: Unit) -> None:
        """Nobody needs `unit` whole, or on its way."""
        unit.rest()
        for flat in unit.flats:
            self._executor.movers[flat.name].params.wait_full()
            flat.free_full()

    def run(
        self, block: BoundBlock | None, moment: Moment, unit: Unit, current: Pass, *, training: bool = True
    ) -> None:
        """What the program has for `moment` of `current`; without one what is due by the table."""
        if block is not None and self.watcher is None:
            block.run()
            return
        with self._unwatched():
            if block is not None:
                block.run()
            else:
                self._act(moment, unit, current, training=training)

    def _act(self, moment: Moment, unit: Unit, current: Pass, *, training: bool) -> None:
        if moment.edge == "before":
            due = gather_due(unit.spec, moment, training=training)
        else:
            due = drop_due(unit.spec, moment, training=training, reduces=current.reduces)
        if unit.name in current.lasting:
            due = tuple(action for action in due if action.verb != "free")
        self._executor.run(moment, serial(due))

    @contextmanager
    def _unwatched(self) -> Iterator[None]:
        if self.watcher is None:
            yield
        else:
            with self.watcher.paused():
                yield

    def make_whole(self, flats: Sequence[Flat]) -> None:
        """Gather `flats` outside of any forward; `free_all` lets them go."""
        wanted = set(flats)
        for unit in self.units:
            if wanted & set(unit.flats):
                self.open(unit)

    @contextmanager
    def borrowed(self, units: Sequence[Unit]) -> Iterator[None]:
        """Inside, `units` are whole, for whoever reads them between two computations. All ranks enter."""
        absent = [flat for unit in units for flat in unit.flats if not flat.is_whole]
        for unit in units:
            self.make_sure(unit)
        try:
            yield
        finally:
            for flat in absent:
                flat.free_full()

    def free_all(self) -> None:
        """Let go of everything that is whole and need not be."""
        for unit in self.units:
            for flat in unit.flats:
                flat.guard.rest()
                flat.lasts = False
                self._executor.movers[flat.name].params.wait_full()
                flat.free_full()
                flat.free_held()

    def owe_frees(self, unit: Unit, block: BoundBlock) -> None:
        """What `block` would have freed of `unit` has to stay until the backward is through."""
        for flat in unit.flats:
            flat.owes_free |= flat.name in block.frees

    def free_owed(self) -> None:
        """A backward in the middle of a schedule is through: what had to stay until then goes, if the program counts on
        that; what it keeps, or has on its way, stays."""
        for unit in self.units:
            for flat in unit.flats:
                flat.guard.rest()
                flat.lasts = False
                if flat.owes_free:
                    flat.free_full()

    def expect_gradients(self) -> None:
        """Those that come from here on are of another backward."""
        for unit in self.units:
            for flat in unit.flats:
                flat.grads.have_come = False

    def forget_graphs(self) -> bool:
        """What was to stay whole because a graph may read it may go. Whether there was any; it has not gone yet."""
        staying = [flat for unit in self.units for flat in unit.flats if flat.stays]
        for flat in staying:
            flat.stays = False
        return bool(staying)

    def finish_reductions(self) -> None:
        """Bring reductions that the program left under way to their end."""
        for mover in self._executor.movers.values():
            mover.grads.finish_reduction()

    def come_to_rest(self) -> None:
        """Reductions done, gathered buffers freed."""
        self.finish_reductions()
        self.free_all()

    def drop_gradients(self) -> None:
        """Forget all gradients, those of backwards before included."""
        for unit in self.units:
            for flat in unit.flats:
                flat.grads.drop()

    def abandon(self) -> None:
        """A forward or backward raised: wait for what is on its way, and let go of what is whole."""
        for mover in self._executor.movers.values():
            mover.abandon()
        self.free_all()
