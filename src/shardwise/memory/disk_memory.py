"""Parameters, master weights and states on a disk: one file per flat buffer, a few of which are in memory during a
step.

[Note: rows on a disk] Between steps, a tensor on the tier `disk` is an address that stands for its place in the file.
Code that reads or writes one (access, checkpoints, a change of plan) passes it to `DiskRows.read` and `write`, which
bypass the page cache and work in pieces: a process holds no more of a file than it asks for, and a disk error is raised
like any other. In a step a file is read whole into one of a few buffers, where the optimizer finds its tensors; it is
written back from there while the next one, read in the meantime, is updated. The first file is read while the model
computes, from the first forward on that a step can follow; if it is changed before the step, it is read again.

The addresses are those of the file mapped into memory, so code that reads them directly still gets the right values:
kernels keep mapped pages coherent with direct I/O. They are not used while the file is in a buffer.

Parameters that rest on a disk are at the beginning of the file, on pages of their own. A pass reads only those, also
bypassing the page cache (`disk_reads.py`); an update has them beside their states, and writes everything back.

With leases instead, at every place that reads a state, a forgotten one would be silently wrong. A unit is read whole,
so that any optimizer, group and hook works on its own tensors.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from shardwise.comm import World
from shardwise.errors import FaultError, StateError, TierError
from shardwise.memory.disk_reads import DiskRead, DiskReads
from shardwise.memory.disk_rows import DiskRows
from shardwise.memory.host_memory import Copy
from shardwise.program import NUM_DISK_BUFFERS, NUM_READ_BUFFERS
from shardwise.system.devices import RankDevice
from shardwise.system.disk import BufferPool, DiskFile, IoQueue, Patience, Pending, TierFolder
from shardwise.system.named_folder import folder_of
from shardwise.system.telemetry import ON_THE_WAY, ByteMeter, StepClock, Timeline

Tensor = torch.Tensor
WAIT = "wait for the disk"
"""The name of such a wait in a timeline."""
_TORN = {
    "step": "some units are updated and others are not",
    "change of plan": "parts of the model are lost",
}
"""What is left if a disk fails in the middle."""


class Temporary(Protocol):
    """Keeps on a disk what the rest of a step needs."""

    def drop(self) -> None:
        """Drop it: the step is void."""
        ...


@dataclass(frozen=True)
class _Ahead:
    """Rows that are being read into a buffer before a step wants them."""

    rows: DiskRows
    buffer: Tensor
    pending: Pending
    version: tuple[int, int]

    @property
    def is_usable(self) -> bool:
        """Whether it still has what is in the file. A read that has failed may succeed if it is repeated."""
        return self.rows.version == self.version and not self.pending.has_failed


class DiskMemory:
    """The files of one rank in the plan's folder, and the buffers that a step reads them into.

    Files are counted as `param` and `optim` on the disk, buffers as `buffers` on the host.
    """

    def __init__(
        self,
        folder: Path | str,
        rank: int,
        device: RankDevice | None = None,
        queue: IoQueue | None = None,
        *,
        job: str | None,
        named: str | None = None,
        clock: StepClock | None = None,
        keeps_versions: bool = False,
    ) -> None:
        """`device` is the rank's, if tensors lie there; `job` as in `TierFolder`; `named` is the folder as the plan
        names it; `clock` counts how long the rank waits. With `keeps_versions`, an update writes to other files than
        it reads, and other ranks can read both when this one is lost. Raises `TierError` for a folder that cannot be
        opened."""
        self._queue = IoQueue() if queue is None else queue
        self.folder = TierFolder(folder, rank=rank, job=job, patience=self._queue.patience)
        self._named = str(folder) if named is None else named
        self._device = device
        self._clock = StepClock() if clock is None else clock
        self._queue.note_done = self._clock.note_disk_call
        self.patience = self._queue.patience
        """How long this rank waits for the disk, if that answers nothing."""
        self._queues_of_others: dict[Path, IoQueue] = {}
        """By folder, for files of ranks that are gone. Another folder may be on another disk: if that answers nothing,
        this rank's own still does, and its requests are not behind others that never end."""
        self._meter = ByteMeter()
        self.timeline = Timeline()
        """Records the reads and writes of a step."""
        self._rows: list[DiskRows] = []
        """The rows that an update changes."""
        self._every: list[DiskRows] = []
        self._left: list[DiskRows] = []
        self._reads = DiskReads(self._pool_for_reads, self.wait_for)
        self._pool: BufferPool | None = None
        self._ahead: _Ahead | None = None
        self._writing: deque[tuple[Tensor, Pending, Callable[[], None]]] = deque()
        self._buffer_bytes = 0
        self._torn_by = ""
        """The step, the resume or the change of plan that has begun to change the files and not finished."""
        self._fault = ""
        """The first error of this rank's disk in the current step."""
        self._num_made = 0
        self._prepared: dict[tuple[int, int], list[DiskFile]] = {}
        """Files for rows, by their bytes and the bytes of resting parameters."""
        self.keeps_versions = keeps_versions
        """See [Note: two versions] in `disk_rows.py`. Files have names then."""
        self.outlives_rank = False
        """Whether the others go on if this rank is lost, from its files; the last of its host removes those."""
        self._temporary: weakref.WeakSet[Temporary] = weakref.WeakSet()
        self.on_failure: Callable[[], None] = lambda: None
        """Called before this rank is lost because its disk has failed."""
        self.has_checksums = False
        """Whether files created from here on have checksums, which are compared when they are read."""

    def count_with(self, meter: ByteMeter) -> None:
        """Rows created from here on belong to a new plan and are counted by `meter`. Those of the previous plan stay
        until `close_previous`."""
        self.finish_writes()
        self._reads.forget_all()
        self._left += self._every
        self._meter, self._rows, self._every, self._pool, self._buffer_bytes = meter, [], [], None, 0
        self._reads = DiskReads(self._pool_for_reads, self.wait_for)

    def close_previous(self) -> None:
        """Close the files of previous plans. Nothing of ranks that are gone is read any more."""
        for rows in self._left:
            rows.close()
        self._left = []
        self._close_queues_of_others()

    def is_in(self, named: str) -> bool:
        """Whether this is the folder that a plan names so, or one that it named so from another working directory."""
        return named == self._named or self.folder.folder == folder_of(named)

    def rows(self, name: str, num_bytes: int, resting_bytes: int = 0, *, is_updated: bool = True) -> DiskRows:
        """A file of zeros for the flat buffer `name`, the first `resting_bytes` for parameters that rest there."""
        rows = DiskRows(name, self._prepared_file(num_bytes, resting_bytes), resting_bytes)
        self._every.append(rows)
        if is_updated:
            self._rows.append(rows)
        if resting_bytes:
            self._reads.register(rows, lambda buffer: rows.file.read(0, buffer[:resting_bytes]))
        self._meter.on("disk").hold("param", resting_bytes)
        self._meter.on("disk").hold("optim", rows.file.num_bytes - resting_bytes)
        return rows

    def prepare(self, sizes: Iterable[tuple[int, int]]) -> None:
        """Make files for `rows`, given the bytes of each and of its resting parameters, while nothing has been changed
        yet. Raises `TierError` if there is no room for them, and keeps none."""
        try:
            for num_bytes, resting_bytes in sizes:
                file = self._rows_file(num_bytes, resting_bytes)
                self._prepared.setdefault((num_bytes, resting_bytes), []).append(file)
        except TierError:
            self.drop_prepared()
            raise

    def drop_prepared(self) -> None:
        """Close the files that no rows have been made of."""
        for files in self._prepared.values():
            for file in files:
                file.remove()
                file.close()
        self._prepared.clear()

    def keep_former(self, rows: DiskRows) -> None:
        """Keep what `rows` were before each update, in a second file."""
        if len(rows.files) == 1:
            rows.add_version(self._prepared_file(rows.num_bytes, rows.resting_bytes))

    def keep_no_versions(self) -> None:
        """Nobody goes on from what a lost rank had."""
        self.keeps_versions = False
        self.drop_prepared()
        for rows in self._every:
            rows.remove()

    def rows_of_other(self, name: str, paths: Sequence[Path], num_bytes: int) -> DiskRows:
        """The rows of a rank that is gone, whose files others can read. Raises `TierError` if they cannot be opened, or
        that does not return: their disk may be the reason why the rank is gone."""
        files: list[DiskFile] = []
        queue = self._queue_of_other(paths[0].parent)

        def open_all() -> None:
            files.extend(self.folder.open(path, num_bytes, queue) for path in paths)

        self.wait_for(queue.start([open_all]))
        first, *others = files
        rows = DiskRows(name, first)
        for file in others:
            rows.add_version(file)
        return rows

    def _queue_of_other(self, folder: Path) -> IoQueue:
        own = self._queue
        if folder not in self._queues_of_others:
            patience = Patience(f"{folder}, the disk of a lost rank,", own.patience.seconds)
            queue = self._queues_of_others[folder] = IoQueue(own.depth, own.block_bytes, patience)
            queue.note_done = own.note_done
        return self._queues_of_others[folder]

    def is_silent(self, path: Path) -> bool:
        """Whether a file of a rank that is gone is on a disk that was given up."""
        queue = self._queues_of_others.get(path.parent)
        return queue is not None and queue.patience.is_over

    def _close_queues_of_others(self) -> None:
        for queue in self._queues_of_others.values():
            queue.close()
        self._queues_of_others.clear()

    def file(self, name: str, num_bytes: int, *, cut: int = 0, is_named: bool = False) -> DiskFile:
        """A separate file in the folder; the caller counts and closes it. For `cut` and `is_named` see `DiskFile`."""
        self._num_made += 1
        path = f"{name}-{self._num_made - 1}"
        return self.folder.create(
            path, num_bytes, self._queue, checksums=self.has_checksums, cut=cut, is_named=is_named
        )

    def _prepared_file(self, num_bytes: int, resting_bytes: int) -> DiskFile:
        prepared = self._prepared.get((num_bytes, resting_bytes))
        return prepared.pop() if prepared else self._rows_file(num_bytes, resting_bytes)

    def _rows_file(self, num_bytes: int, resting_bytes: int) -> DiskFile:
        return self.file("rows", num_bytes, cut=resting_bytes, is_named=self.keeps_versions)

    def wait_for(self, pending: Pending) -> None:
        """Wait for reads or writes of this disk, as this rank's clock counts. Raises `TierError` if one failed."""
        span = self.timeline.span(WAIT) if self.timeline.is_on else nullcontext()
        with self._clock.waiting_for_disk(), span:
            pending.wait()

    # -- a pass -----------------------------------------------------------------------------------------

    def read(self, rows: DiskRows, copy: Callable[[Tensor], Copy]) -> DiskRead:
        """Start to bring the parameters of `rows` to the device, by `copy` from a buffer with their bytes, and to read
        those expected next."""
        what = f"What rests of the parameters of {rows.name} on a disk"
        return self._reads.fetch(rows, what, lambda buffer: copy(buffer[: rows.resting_bytes]))

    def abandon_reads(self) -> None:
        """A pass has failed: drop the reads under way."""
        self._reads.forget_all()

    def forget_read(self, rows: DiskRows) -> None:
        """The parameters of `rows` are about to be written: drop what was read ahead of them."""
        if rows.resting_bytes:
            self._reads.forget(rows)

    # -- a step -----------------------------------------------------------------------------------------

    def expect_step(self) -> None:
        """A step will follow: start to read the rows that it updates first, while the model computes."""
        if self._ahead is None and self._rows and not self._torn_by:
            self._ahead = self._start(self._rows[0], self._take())

    def fetch(self, rows: DiskRows) -> None:
        """Bring all of `rows` into a buffer, and start to read the next rows.

        [Note: a disk that fails in a step] The other ranks know nothing of it, and wait for this one in the collectives
        of the step. So it goes on to the end, reads and writes nothing more, and updates zeros; `end_step` then raises
        on all ranks, and nobody uses the result.
        """
        self.begin_change()
        self.forget_read(rows)
        if self._ahead is not None and not (self._ahead.rows is rows and self._ahead.is_usable):
            self._drop_ahead()
        ahead, self._ahead = self._ahead or self._start(rows, self._take()), None
        if not self._succeeds(ahead.pending):
            ahead.buffer.zero_()
        rows.buffer = ahead.buffer
        place = self._rows.index(rows) + 1
        if place < len(self._rows) and self._has_free():
            self._ahead = self._start(self._rows[place], self._take())

    def evict(self, rows: DiskRows, release: Callable[[], None]) -> None:
        """Start to write `rows` back. Its buffer may be read until `release` has been called."""
        assert rows.buffer is not None
        buffer, rows.buffer = rows.buffer, None
        if rows.is_kept:
            with self.timeline.span(f"wait until {rows.name} is saved") if self.timeline.is_on else nullcontext():
                rows.await_readers()
        rows.turn()
        writing = Pending(()) if self._fault else rows.file.write(0, buffer[: rows.file.num_bytes])
        self._follow(f"write {rows.name} states", writing)
        self._writing.append((buffer, writing, release))

    def begin_change(self, by: str = "step") -> None:
        """The files belong to no single step from here until `finish_writes`."""
        self._torn_by = by

    def begin_replacing(self) -> None:
        """Everything here is about to be replaced, until `finish_writes`; old checksums no longer count."""
        self.begin_change()
        self._drop_ahead()
        for rows in self._every:
            rows.await_readers()
            for file in rows.files:
                file.forget_checksums()

    def finish_writes(self) -> None:
        """Wait until a step, or a replacement of everything, is completely on the disk."""
        self._drop_ahead()
        while self._writing:
            self._finish_write()
        self._torn_by = "step" if self._fault else ""

    def end_step(self, world: World) -> None:
        """Wait until a step is completely on the disks of all ranks. All ranks call; if one failed, all raise as
        `agree` does."""
        self.finish_writes()
        self.agree(world, self._fault, "step", loses_rank=True)

    def agree(self, world: World, fault: str, during: str, *, loses_rank: bool = False) -> None:
        """Raise on all ranks if the disk of any has had a `fault` during a step or a change of plan; what is here
        belongs to none then. All ranks call.

        Raises `TierError`. If it `loses_rank`, and the others go on without that one, they raise `FaultError`.
        """
        faults = [told.decode() for told in world.exchange(fault.encode(errors="backslashreplace"), "disk")]
        failed = {rank: told for rank, told in enumerate(faults) if told}
        if not failed:
            return
        self.begin_change(during)
        if loses_rank:
            self.leave_if_lost(world.rank, failed, range(world.size), f"in a {during}")
        rank, told = next(iter(failed.items()))
        raise TierError(
            f"The disk of rank {rank} failed in a {during}. {told} {_TORN[during].capitalize()}: go on from the last "
            f"checkpoint with engine.resume(), on all ranks."
        )

    def leave_if_lost(self, me: int, failed: Mapping[int, str], ranks: Sequence[int], when: str) -> None:
        """Where a lost rank is survived, one whose disk has `failed` is lost: it raises `TierError`, and the others of
        `ranks` the `FaultError` from which they recover. Does nothing if it is not, or if no other is left."""
        if not self.outlives_rank or set(ranks) <= set(failed):
            return
        told = failed.get(me, "")
        if told:
            raise self.failure(f"The disk of rank {me} failed {when}. {told}")
        rank, told = next(iter(failed.items()))
        raise FaultError(f"The disk of rank {rank} failed {when}. {told}", kind="disk", ranks=tuple(failed))

    def failure(self, told: str) -> TierError:
        """The error with which this rank ends, since its disk has failed; `told` says how."""
        if not self.outlives_rank:
            return TierError(told)
        self.on_failure()
        return TierError(f"{told} This rank ends; the others go on without it.")

    def require_whole(self) -> None:
        """Raise `StateError` if a step has failed between its first update and its last, or a change of plan between
        its first unit and its last."""
        if self._torn_by:
            raise StateError(
                f"A {self._torn_by} failed while it changed what is in {self.folder.folder}: {_TORN[self._torn_by]}. "
                f"Go on from the last checkpoint with engine.resume(), on all ranks."
            )

    def abandon(self) -> None:
        """After a failed step: tensors refer to their files again, whatever is in them. Call `finish_writes` once all
        are replaced."""
        under_way = [pending for _, pending, _ in self._writing]
        for pending in (*under_way, *([self._ahead.pending] if self._ahead is not None else [])):
            with contextlib.suppress(TierError):  # the step that failed has raised it, or would have
                pending.wait()
        self._reads.forget_all()
        for rows in self._rows:
            rows.buffer = None
        self._ahead, self._pool, self._fault = None, None, ""
        self._writing.clear()

    def follow(self, temporary: Temporary) -> None:
        """Let `drop_temporary` drop what it keeps here."""
        self._temporary.add(temporary)

    def drop_temporary(self) -> None:
        """The step is void: drop what the rest of it would need."""
        for one in list(self._temporary):
            one.drop()

    def close(self) -> None:
        """Release the folder. Mappings live as long as someone refers to them. May be called twice."""
        if self.patience.is_over:  # whatever is asked of it may not return
            return
        self._reads.forget_all()
        for rows in (*self._every, *self._left):
            rows.await_readers()
            if not self.outlives_rank:
                rows.remove()
        self.drop_prepared()
        self._close_queues_of_others()
        self._queue.close()
        self.folder.close()

    # -- buffers ----------------------------------------------------------------------------------------

    def _start(self, rows: DiskRows, buffer: Tensor) -> _Ahead:
        if self._fault:
            buffer.zero_()
        reading = Pending(()) if self._fault else rows.file.read(0, buffer[: rows.file.num_bytes])
        self._follow(f"read {rows.name} states", reading)
        return _Ahead(rows, buffer, reading, rows.version)

    def _drop_ahead(self) -> None:
        """Take the buffer of what was read ahead back. Nobody uses that, so it does not matter whether it succeeded."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.pending.join()
            self._require_pool().give_back(ahead.buffer)

    def _follow(self, what: str, pending: Pending) -> None:
        if self.timeline.is_on:
            self.timeline.begin(ON_THE_WAY, what)
            pending.when_done(lambda: self.timeline.end(ON_THE_WAY, what))

    def _require_pool(self) -> BufferPool:
        if self._pool is None:
            most = max(rows.file.num_bytes for rows in self._rows)
            self._pool = BufferPool(min(NUM_DISK_BUFFERS, len(self._rows)), most, self._device)
            self._meter.on("host").hold("buffers", self._pool.num_bytes - self._buffer_bytes)
            self._buffer_bytes = self._pool.num_bytes
        return self._pool

    def _pool_for_reads(self) -> BufferPool:
        sizes = [rows.resting_bytes for rows in self._every if rows.resting_bytes]
        pool = BufferPool(min(NUM_READ_BUFFERS, len(sizes)), max(sizes), self._device)
        self._meter.on("host").hold("buffers", pool.num_bytes)
        return pool

    def _has_free(self) -> bool:
        """Whether a buffer is free, or will be once a write other than the last has finished."""
        return self._require_pool().num_free > 0 or len(self._writing) > 1

    def _take(self) -> Tensor:
        while not self._require_pool().num_free:
            self._finish_write()
        return self._require_pool().take()

    def _finish_write(self) -> None:
        """Wait for the oldest write, and take its buffer back."""
        if not self._writing:
            raise TierError(f"No buffer for {self.folder.folder} is free, and none is being written.")
        buffer, pending, release = self._writing.popleft()
        self._succeeds(pending)
        release()
        self._require_pool().give_back(buffer)

    def _succeeds(self, pending: Pending) -> bool:
        """Wait, and note an error for the end of the step."""
        try:
            self.wait_for(pending)
        except TierError as error:
            self._fault = self._fault or str(error)
            return False
        return True
