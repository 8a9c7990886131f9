"""The optimizer step: gradients to where the update needs them, new parameters to where they rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from shardwise.comm import SharedBuffers
from shardwise.program import AFTER_STEP, BEFORE_STEP, DURING_STEP
from shardwise.runtime.executor import Executor
from shardwise.runtime.gathering import Gathering
from shardwise.runtime.passes import Passes
from shardwise.runtime.post_backward import PostBackward
from shardwise.runtime.programs import Programs


class Step:
    """Runs the program's blocks around an update. All ranks call every method."""

    def __init__(
        self,
        executor: Executor,
        programs: Programs,
        passes: Passes,
        gathering: Gathering,
        post_backward: PostBackward,
        shared_buffers: Sequence[SharedBuffers],
    ) -> None:
        self._executor = executor
        self._programs = programs
        self._passes = passes
        self._gathering = gathering
        self._post_backward = post_backward
        self._shared_buffers = shared_buffers
        self._keeps_memory = all(flat.spec.resident for unit in gathering.units for flat in unit.flats)
        """Whether memory may be kept between steps. Where parameters come and go memory is short, and the forward needs
        it."""

    def before(self) -> None:
        """Bring gradients to where the optimizer states are, and compute the ranks' verdict on them.

        Gradients that `no_sync` left unreduced, with no reducing backward since, are reduced first.
        """
        if self._passes.owes_reductions:
            self._reduce_left()
        self._gathering.await_updates()
        for mover in self._executor.movers.values():
            if mover.grads.waits_where_due:
                mover.grads.keep_due()
        self._programs.step[BEFORE_STEP].run()

    def reduce_unforeseen(self) -> None:
        """Reduce the gradients that the program left on some rank, and record the next pass."""
        self._reduce_left()
        self._passes.forget_programs()

    def _reduce_left(self) -> None:
        self._passes.finish_reductions()
        self._gathering.finish_reductions()
        for unit in self._post_backward.left_anywhere():
            self._gathering.run(None, unit.moments.after_backward, unit, self._passes.current)
        self._gathering.free_all()

    def verify(self) -> None:
        """Compare checksums, before the update of a verified step. Raises `CorruptionError` on all ranks."""
        if BEFORE_STEP in (blocks := self._programs.verification):
            blocks[BEFORE_STEP].run()

    def take_checksums(self) -> None:
        """At the end of the step before a verified one."""
        if AFTER_STEP in (blocks := self._programs.verification):
            blocks[AFTER_STEP].run()

    def update_units(self) -> None:
        """Run the updates that precede the optimizer's own step, unit by unit, with the parameters' way back."""
        self._programs.update_units()

    def during(self) -> None:
        """Gather the whole parameters that the update needs, if it needs any."""
        if DURING_STEP in self._programs.step:
            self._programs.step[DURING_STEP].run()

    def after(self) -> None:
        """Bring new parameters to where they rest, or start to: see `gathers_behind_step` in `program/spec.py`."""
        self._executor.journal.num_backwards = 0
        self._executor.journal.note(None)
        self._programs.step[AFTER_STEP].run()
        self.close_params()
        self._executor.rest(keeps_some=self._keeps_memory)

    def take_first_values(self) -> None:
        """They have been written. What rests as it was sent is sent once, so that the first forward of all ranks
        computes with the same rounded values as later ones."""
        if any(flat.is_rounded_at_rest for unit in self._programs.specs for flat in unit.flats):
            self.restore_params()
        else:
            self.close_params()

    def open_params(self) -> None:
        """Call before parameters are written where they rest: waits until no rank reads them any more, and none of the
        update before is still on its way."""
        self._gathering.await_updates()
        for shared_buffers in self._shared_buffers:
            shared_buffers.open()

    def restore_params(self) -> None:
        """Bring the master weights, which have been written, back to the parameters.

        What is gathered, by a forward that no backward has followed, has the values before, and is freed.
        """
        self._gathering.free_all()
        self._programs.restore.run()
        self._gathering.await_updates()
        self.close_params()

    @contextmanager
    def outer_step(self) -> Iterator[None]:
        """Inside, master weights and parameters may be written after an update, as in an outer step."""
        self._gathering.free_all()
        self.open_params()
        yield
        self._gathering.await_updates()
        self.close_params()

    def close_params(self) -> None:
        """This rank has written its parameters."""
        for shared_buffers in self._shared_buffers:
            shared_buffers.close()
