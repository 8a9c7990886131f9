"""The optimizer step: gradients to where the update needs them, and new parameters to where they rest."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.comm import SharedBuffers
from shardwise.program import AFTER_STEP, BEFORE_STEP, DURING_STEP
from shardwise.runtime.closings import Closings
from shardwise.runtime.executor import Executor
from shardwise.runtime.gathering import Gathering
from shardwise.runtime.passes import Passes
from shardwise.runtime.programs import Programs


class Step:
    """Runs what the program has around an update. All ranks call every method."""

    def __init__(
        self,
        executor: Executor,
        programs: Programs,
        passes: Passes,
        gathering: Gathering,
        closings: Closings,
        shared_buffers: Sequence[SharedBuffers],
    ) -> None:
        self._executor = executor
        self._programs = programs
        self._passes = passes
        self._gathering = gathering
        self._closings = closings
        self._shared_buffers = shared_buffers
        self._keeps_memory = all(flat.spec.resident for unit in gathering.units for flat in unit.flats)
        """Where parameters come and go it is memory that is short, and the forward shall have it."""

    def before(self) -> None:
        """Gradients to where the optimizer's states are, and the ranks' verdict on them.

        What `no_sync` left behind, with no backward since that reduced it, is reduced first.
        """
        if self._passes.owes_reductions:
            self._reduce_left()
        for mover in self._executor.movers.values():
            if mover.grads.waits_where_due:
                mover.grads.keep_due()
        self._programs.step[BEFORE_STEP].run()

    def reduce_unforeseen(self) -> None:
        """Reduce the gradients that the program has left on some rank, and record the next pass."""
        self._reduce_left()
        self._passes.forget_programs()

    def _reduce_left(self) -> None:
        self._passes.finish_reductions()
        self._gathering.finish_reductions()
        left = [unit.name for unit in self._gathering.units if unit.has_fresh()]
        for name in self._closings.agree((), left):
            unit = self._closings.unit(name)
            self._gathering.run(None, unit.moments.after_backward, unit, self._passes.current)
        self._gathering.free_all()

    def update_units(self) -> None:
        """The updates that are done before the optimizer's own step: unit by unit, with the parameters' way back."""
        self._programs.update_units()

    def during(self) -> None:
        """What the update needs of whole parameters, if it needs any."""
        if DURING_STEP in self._programs.step:
            self._programs.step[DURING_STEP].run()

    def after(self) -> None:
        """New parameters to where they rest."""
        self._executor.journal.num_backwards = 0
        self._executor.journal.note(None)
        self._programs.step[AFTER_STEP].run()
        self.close_params()
        self._executor.rest(keeps_some=self._keeps_memory)

    def open_params(self) -> None:
        """Before parameters are written where they rest: no rank reads them any more."""
        for shared_buffers in self._shared_buffers:
            shared_buffers.open()

    def restore_params(self) -> None:
        """Parameters anew from the master weights, which have been written."""
        self._programs.restore.run()
        self.close_params()

    def close_params(self) -> None:
        """This rank has written its parameters."""
        for shared_buffers in self._shared_buffers:
            shared_buffers.close()
