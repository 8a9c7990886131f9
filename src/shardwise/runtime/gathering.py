"""Gathers and frees units: by the program where it is followed, else by the table, waiting for each gather."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from shardwise.errors import CommError
from shardwise.memory import ABSENT, GATHERING, Flat, Unit
from shardwise.program import Block, Moment, drop_due, gather_due, serial
from shardwise.runtime.executor import BoundBlock, Executor
from shardwise.runtime.foreign_reads import Reach
from shardwise.runtime.param_mover import ParamMover
from shardwise.runtime.passes import Pass


class Gathering:
    """Gathers and frees the units of one model. All ranks call every method."""

    def __init__(self, units: Sequence[Unit], executor: Executor) -> None:
        self.units = list(units)
        self._executor = executor
        self.was_read = False
        """Whether code between two computations has read parameters."""
        self.watcher: Reach | None = None
        """The mode that watches every operation just now; it is paused during our own actions."""
        self._num_borrowed = 0
        self._written: list[Unit] = []
        """Units that code has changed which has borrowed some."""

    def open(self, unit: Unit) -> None:
        """Gather `unit` and make its parameters plain tensors, for as long as it computes."""
        for flat in unit.flats:
            if not flat.is_whole or flat.is_outdated:
                self.ensure_whole(unit)
            if flat.is_relaxed:
                flat.resume()
            flat.guard.wake()

    def ensure_whole(self, unit: Unit) -> None:
        """Gather what is absent of `unit`, or has been updated since, even if the program did not foresee that: its own
        gather may have come before the update, ahead of the use."""
        for flat in unit.flats:
            if flat.is_whole and not flat.is_outdated:
                continue
            if flat.state is GATHERING or flat.is_updating:
                self._executor.movers[flat.name].params.wait_full()
            if flat.state is ABSENT or (flat.is_whole and flat.is_outdated):
                moment = unit.moments.before_forward
                with self.unwatched():
                    self._executor.run(moment, serial(gather_due(unit.spec, moment)))

    def await_updates(self) -> None:
        """All parameters are what the step before has made them."""
        for params in self._updating():
            params.wait_param()

    def abandon_updates(self) -> None:
        """Nothing is under way any more, whether it has come or never will."""
        for params in self._updating():
            params.abandon()

    def _updating(self) -> list[ParamMover]:
        return [mover.params for mover in self._executor.movers.values() if mover.params.flat.is_updating]

    def beginning(self, unit: Unit) -> BoundBlock:
        """What starts to gather `unit`, of which nothing is gathered; `open` waits for it."""
        moment = unit.moments.before_forward
        absent = {flat.name for flat in unit.flats if flat.state is ABSENT}
        due = serial(tuple(action for action in gather_due(unit.spec, moment) if action.flat in absent))
        started = tuple(action for action in due if (action.verb, action.subject) != ("wait", "full"))
        (block,) = self._executor.bind((Block(moment, started),))
        return block

    def gather_with_others(self, unit: Unit, *, keeps: bool) -> None:
        """Gather `unit` on all ranks, because some rank needs it. Unless this rank `keeps` it, or has had it whole, it
        is freed again."""
        absent = []
        for flat in unit.flats:
            if flat.state is GATHERING or flat.is_updating:
                self._executor.movers[flat.name].params.wait_full()
            if flat.state is ABSENT:
                absent.append(flat)
            elif not flat.spec.resident:
                flat.owes_free = True  # another rank needs this one's part
        moment = unit.moments.before_forward
        self._executor.run(moment, serial(gather_due(unit.spec, moment)))
        for flat in () if keeps else absent:
            flat.free_full()

    def free(self, unit: Unit) -> None:
        """Free `unit`, after waiting for a gather that is under way."""
        unit.rest()
        for flat in unit.flats:
            self._executor.movers[flat.name].params.wait_full()
            flat.free_full()

    def run(
        self, block: BoundBlock | None, moment: Moment, unit: Unit, current: Pass, *, training: bool = True
    ) -> None:
        """Run the program's block for `moment`; without a block, what the table requires."""
        if block is not None and self.watcher is None:
            block.act()
            return
        with self.unwatched():
            if block is not None:
                block.act()
            else:
                self._act(moment, unit, current, training=training)

    def _act(self, moment: Moment, unit: Unit, current: Pass, *, training: bool) -> None:
        if moment.edge == "before":
            due = gather_due(unit.spec, moment, training=training)
        else:
            due = drop_due(unit.spec, moment, training=training, reduces=current.reduces, is_last=current.is_last)
        if unit.name in current.lasting:
            due = tuple(action for action in due if action.verb != "free")
        self._executor.run(moment, serial(due))

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Inside, operations are not watched, because they are our own."""
        if self.watcher is None:
            yield
        else:
            with self.watcher.paused():
                yield

    def make_whole(self, flats: Sequence[Flat]) -> None:
        """Gather `flats` outside of any forward; `free_all` frees them."""
        wanted = set(flats)
        for unit in self.units:
            if wanted & set(unit.flats):
                self.open(unit)

    @contextmanager
    def borrowed(self, units: Sequence[Unit]) -> Iterator[None]:
        """Inside, `units` are gathered, for code that reads them between two computations. All ranks enter."""
        self.was_read = True
        absent = [flat for unit in units for flat in unit.flats if not flat.is_whole]
        for unit in units:
            self.ensure_whole(unit)
        self._num_borrowed += 1
        try:
            self._synchronize(absent, [flat for unit in units for flat in unit.flats if flat.spec.gathers_behind_step])
            yield
        finally:
            self._num_borrowed -= 1
            for flat in absent:
                flat.free_full()
            if not self._num_borrowed:
                written, self._written = self._written, []
                for unit in written:
                    self.free(unit)

    def note_written(self, unit: Unit) -> None:
        """The resting parameters of `unit` have changed between two computations. All ranks call.

        It may be whole, from a forward that no backward has followed: that is freed, once no code that writes several
        at a time has borrowed it.
        """
        if self._num_borrowed:
            self._written.append(unit)
        else:
            self.free(unit)

    def finish_updates(self) -> None:
        """All parameters are what the step before has made them, and the host has waited for it."""
        updating = [params.flat for params in self._updating()]
        self.await_updates()
        self._synchronize((), updating)

    def _synchronize(self, gathered: Sequence[Flat], updated: Sequence[Flat]) -> None:
        """Before code outside of the library reads them: see [Note: garbage after a fault] in
        `comm/watch/journal.py`."""
        if not gathered and not updated:
            return
        try:
            self._executor.synchronize()
        except CommError as error:
            for flat in updated:
                flat.fail_update(error)
            raise

    def free_all(self) -> None:
        """Free every gathered buffer that is not always kept whole."""
        for unit in self.units:
            for flat in unit.flats:
                if not flat.guard.is_resting:
                    flat.guard.rest()
                flat.lasts = False
                if flat.failed_update is None:  # its readers get the error, and nothing else of it is on its way
                    self._executor.movers[flat.name].params.wait_full()
                flat.free_full()
                flat.free_held()

    def free_before_update(self, kept: Collection[str]) -> None:
        """Parameters are about to change: free what forwards that no backward has followed have left gathered of them.

        Units `kept` for a backward whose beginning will not be seen, or for a graph, stay whole, and are gathered again
        when they are next used.
        """
        for unit in self.units:
            for flat in unit.flats:
                if flat.state is ABSENT or flat.spec.resident or not flat.spec.trainable:
                    continue
                self._executor.movers[flat.name].params.wait_full()
                if flat.stays or unit.name in kept:
                    flat.owes_free = flat.is_outdated = True
                else:
                    unit.rest()
                    flat.free_full()
                flat.free_held()

    def owe_frees(self, unit: Unit, block: BoundBlock) -> None:
        """Remember what `block` would have freed of `unit`; it is freed when the backward has ended."""
        for flat in unit.flats:
            flat.owes_free |= flat.name in block.frees

    def free_owed(self, awake: Collection[str]) -> None:
        """At the end of a backward within a schedule, free what was owed. What the program keeps or is gathering
        stays, and the parameters of units that are `awake`, which are whole anyway, do not rest."""
        for unit in self.units:
            for flat in () if unit.name in awake else unit.flats:
                if not flat.guard.is_resting:
                    flat.guard.rest()
                flat.lasts = False
                if flat.owes_free:
                    flat.free_full()

    def expect_gradients(self) -> None:
        """Gradients from here on belong to another backward."""
        for unit in self.units:
            for flat in unit.flats:
                flat.grads.have_come = False

    def forget_graphs(self) -> bool:
        """Allow buffers that were kept for a graph to be freed. Returns whether there were any; frees nothing
        itself."""
        staying = [flat for unit in self.units for flat in unit.flats if flat.stays]
        for flat in staying:
            flat.stays = False
        return bool(staying)

    def finish_reductions(self) -> None:
        """Finish the reductions that the program left under way."""
        for mover in self._executor.movers.values():
            mover.grads.finish_reduction()

    def come_to_rest(self) -> None:
        """Finish reductions and free gathered buffers."""
        self.finish_reductions()
        self.free_all()

    def drop_gradients(self) -> None:
        """Drop all gradients, including those of earlier backwards."""
        for unit in self.units:
            for flat in unit.flats:
                flat.grads.drop()

    def abandon(self) -> None:
        """After a forward or backward raised: wait for transfers under way, and free what is gathered."""
        for mover in self._executor.movers.values():
            mover.abandon()
        self.free_all()
