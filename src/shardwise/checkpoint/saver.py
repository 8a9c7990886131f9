"""Writing a checkpoint: every rank writes into a draft, which is then renamed to the target.

[Note: agreement without messages] While a checkpoint is written in the background, no rank may send a message for it,
because the background thread's messages would mix with those of training. So ranks agree through the draft itself. Each
leaves a note beside its file once that is on the disk, or a note that says why it will not be; rank 0's thread waits
for the notes, and publishes when all are good. Everything that needs the agreement of all ranks (the lock, free space,
whether all can be written, what went wrong last time) is agreed on with messages in the call itself, before the thread
starts. Whatever a rank does alone there is inside an agreement, because a rank that fails alone would leave the others
waiting.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import secrets
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from shardwise.checkpoint import folder as folders
from shardwise.checkpoint.content import Content
from shardwise.checkpoint.draft_notes import Notes, Writer, file_name
from shardwise.checkpoint.folder import AfterwardsError
from shardwise.checkpoint.formats.drafts import remove_draft
from shardwise.checkpoint.image import WINDOW, Image, image_of
from shardwise.checkpoint.index import Chunk, File, Index
from shardwise.checkpoint.json_codec import as_bytes, check_depth, encode
from shardwise.checkpoint.keep import Keep
from shardwise.checkpoint.lock import FolderLock
from shardwise.checkpoint.snapshot import Snapshot, stage_bytes
from shardwise.checkpoint.write import Copying, Feed, leave_refusal, live, write_rank
from shardwise.comm import World
from shardwise.comm.agreed import Failure, agreed
from shardwise.errors import CheckpointError, ConfigError, StateError, said_by
from shardwise.system.disk import Stage
from shardwise.version import __version__

Result = TypeVar("Result")


@dataclass(frozen=True)
class Request:
    """The properties of a checkpoint, besides its content. The same on all ranks, except `memories`."""

    folder: Path
    step: int
    layout: str
    state: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    keep: Keep = field(default_factory=Keep)
    memories: Mapping[str, Any] = field(default_factory=dict)
    """This rank's own document: its generators, and the states of the user's objects."""

    @property
    def target(self) -> Path:
        return self.folder / folders.step_name(self.step)


@dataclass(frozen=True)
class _Prepared:
    """What this rank is to write, and where."""

    request: Request
    content: Content
    image: Image
    stage: torch.Tensor
    draft: Path
    writers: list[Writer]

    @property
    def shell(self) -> Content:
        """The content without the model's memory."""
        return replace(self.content, entries=[])


class Saver:
    """Writes the checkpoints of one engine, one at a time. `close()` it."""

    def __init__(self, world: World, *, pinned: bool = False, timeout_seconds: float = 300) -> None:
        self._world = world
        self._pinned = pinned
        self._stage = Stage(world.rank_device if pinned else None)
        self._timeout_seconds = timeout_seconds
        self._under_way: _UnderWay | None = None
        self._snapshot: Snapshot | None = None
        self._locks: dict[Path, FolderLock] = {}
        self._metrics: dict[Path, dict[str, float]] = {}
        self._own: set[Path] = set()
        """Folders in which this run has saved, or from which it has resumed. All ranks know: any may be rank 0 next."""
        self._has_joined = world.is_newcomer
        """Whether this rank has joined others, and does not know whether they have resumed."""
        self._left: _UnderWay | None = None
        """A checkpoint that a previous saver was writing."""

    def renewed(self, world: World) -> Saver:
        """A saver for the remaining ranks after a fault; it takes over the locks.

        A checkpoint that is being written continues by itself: it is published if all ranks had finished their files,
        otherwise the log says that it failed. Blocks until none of this rank's memory is read any more.
        """
        self.wait_for_copy()
        other = Saver(world, pinned=self._pinned, timeout_seconds=self._timeout_seconds)
        other._locks, self._locks = self._locks, {}
        other._metrics, other._own, other._has_joined = self._metrics, self._own, self._has_joined
        other._left, self._under_way = self._under_way or self._left, None
        return other

    def claim(self, folder: Path) -> None:
        """Take the right to write into `folder`, until `close`. All ranks call; if one fails, all raise."""
        what = f"{folder} cannot be claimed"
        self._agree(lambda: self._hold(folder) if self._world.rank == 0 else None, what)

    def save(self, target: Path, make: Callable[[], tuple[Request, Content]], *, wait: bool = True) -> Path:
        """Write the checkpoint `target`, then point `latest` at it. All ranks call.

        `make` returns what it is to contain; it is called once the previous checkpoint is complete, and if it raises on
        one rank, all raise. A reader never sees half a checkpoint, even after a `kill -9`. If one rank fails, all raise
        `CheckpointError`, and earlier checkpoints are still there. Without `wait` it returns once the model's visible
        values are copied to host memory ([Note: late copies]); a later failure is raised by the next call of `save` or
        `wait`, or by `close`.
        """
        self.wait()
        draft = target.parent / f"{folders.WRITING}{target.name}-{os.getpid()}-{secrets.token_hex(4)}"
        what = f"The checkpoint {target} could not be written"
        try:
            prepared = self._prepare(target, make, draft, wait=wait)  # rank 0's draft, which is that of all
            draft = prepared.draft
            if wait:
                self._write_now(prepared, what)
            else:
                self._under_way = self._begin_behind(prepared, what)
        except BaseException:  # Ctrl-C and a lost rank, too; of ranks that remove it, the last one leaves nothing
            remove_draft(draft)
            raise
        return target

    def wait_for_copy(self) -> None:
        """Return once all of this rank's memory may change; see [Note: late copies]. One rank may call alone."""
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is not None:
            snapshot.wait()

    def wait(self) -> None:
        """Wait for a checkpoint that is written in the background; if it failed, raise on all ranks. All ranks call.

        A rank that died is noticed here, as in any collective: rank 0 waits for all notes, and no rank waits for rank 0
        before all have announced that their note is there.
        """
        under_way, self._under_way, self._snapshot = self._under_way, None, None
        if self._left is not None:
            self._left.wait()
            self._left = None
        if under_way is None:
            return
        under_way.written.wait()
        try:
            self._world.barrier()
        finally:
            under_way.wait()
        self._agree(under_way.result, under_way.what)

    def close(self) -> None:
        """Wait for a checkpoint that is written in the background, and release the folders. Raises what this rank knows
        of."""
        under_way, self._under_way = self._under_way, None
        if self._left is not None:
            self._left.wait()
        try:
            if under_way is not None:
                under_way.wait()
                try:
                    under_way.result()
                except AfterwardsError:
                    raise
                except (CheckpointError, OSError) as error:
                    raise CheckpointError(f"{under_way.what}: {said_by(error)}") from error
        finally:
            for lock in self._locks.values():
                lock.release()
            self._locks.clear()

    # -- before anything is written ---------------------------------------------------------------------

    def _prepare(
        self, target: Path, make: Callable[[], tuple[Request, Content]], draft: Path, *, wait: bool
    ) -> _Prepared:
        """What this rank will write, memory to stage it, and an empty draft on a disk with room for what all ranks
        write.

        The user's state is encoded now, because the caller may change it while it is being written.
        """
        what = f"The checkpoint {target} could not be started"
        mine: list[tuple[Request, Content, Image, torch.Tensor]] = []
        folder = target.parent

        def begin() -> dict[str, Any]:
            request, content = make()
            rank = self._world.rank
            document = as_bytes(request.memories)
            check_depth(document, "what engine.remember() was given")
            state = encode(dict(request.state))
            check_depth(json.dumps(state).encode(), "state")
            image = image_of(file_name(rank), content, {f"rank/{rank}": document})
            stage = self._stage.sized(min(image.padded_bytes, 2 * WINDOW) if wait else stage_bytes(image))
            mine.append((replace(request, state=state), content, image, stage))
            free = self._open(folder, draft) if rank == 0 else 0
            facts = {"bytes": image.num_bytes, "free": free, "draft": draft.name, "step": request.step}
            return {**facts, "writer": asdict(Writer.me())}

        every = self._agree(begin, what)
        try:  # on every rank, because all have the same data
            _check_steps([one["step"] for one in every])
            folders.check_room(folder, sum(one["bytes"] for one in every), every[0]["free"])
        except CheckpointError as error:
            raise CheckpointError(f"{what}: {error}") from error
        self._own.add(folder.resolve())
        return _Prepared(*mine[0], folder / every[0]["draft"], [Writer(**one["writer"]) for one in every])

    def _open(self, folder: Path, draft: Path) -> int:
        """Create the draft, in a folder that is locked; returns the free bytes there."""
        self._hold(folder)
        self._look_for_earlier_run(folder)
        free = shutil.disk_usage(folder).free
        draft.mkdir()
        return free

    def resumed(self, path: Path) -> None:
        """This run goes on from the checkpoint `path`, so those beside it are its own."""
        self._own.add(path.parent.resolve())

    def _look_for_earlier_run(self, folder: Path) -> None:
        """On rank 0, before the first checkpoint in `folder`."""
        if self._has_joined or folder.resolve() in self._own:
            return
        found = list(folders.checkpoints_in(folder))
        if found:
            steps = f"step {found[0]}" if len(found) == 1 else f"steps {found[0]} to {found[-1]}"
            logging.getLogger("shardwise").warning(
                "%s has checkpoints of an earlier run (%s), which this one has not resumed. Those of the same steps "
                "are replaced, and those of earlier steps count for keep=. Call engine.resume(%r) before training, or "
                "give each run a folder of its own.",
                folder,
                steps,
                str(folder),
            )

    def _hold(self, folder: Path) -> None:
        """Make sure that `folder` exists and that this process holds its lock."""
        folder.mkdir(parents=True, exist_ok=True)
        lock = self._locks.get(folder)
        if lock is None or lock.is_passed_on():
            lock = FolderLock(folder, _job_of(self._world))
            if lock.acquire():
                folders.tidy(folder)
            self._locks[folder] = lock
        lock.check()

    def _agree(self, work: Callable[[], Result], what: str) -> list[Result]:
        """Run `work` on every rank, and return the results; if one failed, raise on all."""

        def worded(failure: Failure) -> str:
            if failure.kind in (AfterwardsError, StateError):
                return failure.text  # it is complete
            return f"{what}: rank {failure.rank} reports: {failure.text} What was there before is unchanged."

        kinds = AfterwardsError, ConfigError, StateError, CheckpointError
        with agreed(self._world, "checkpoint", *kinds, worded=worded) as told:
            told.mine = work()
        return told.by_rank

    # -- writing ----------------------------------------------------------------------------------------

    def _write_now(self, prepared: _Prepared, what: str) -> None:
        """Let all ranks write and agree that they have; rank 0 then publishes the checkpoint."""

        def write() -> None:
            feed = Feed(prepared.image, live(prepared.image, prepared.stage, Copying(self._world.rank_device)))
            feed.start()
            try:
                write_rank(prepared.draft, feed, prepared.content.numbers)
            finally:
                if feed.is_alive():  # Ctrl-C just before: it would keep the interpreter from exiting
                    feed.stop()

        def publish() -> None:
            if self._world.rank == 0:
                self._publish(prepared)

        self._agree(write, what)
        self._agree(publish, what)

    def _begin_behind(self, prepared: _Prepared, what: str) -> _UnderWay:
        """Copy what may change at any time, and leave the rest to threads.

        From here on ranks exchange nothing before the next call, so failures are reported there as well.
        """
        snapshot: Snapshot | None = None
        feed: Feed | None = None
        try:
            snapshot = Snapshot(prepared.image, prepared.stage, self._world.rank_device)
            snapshot.take()
            image = prepared.image.without_sources
            feed = Feed(image, snapshot.windows(), first=snapshot.copy_rest, last=snapshot.end)
            kept = replace(prepared, content=prepared.shell, image=image)
            under_way = _UnderWay(what, lambda written: self._write_behind(kept, feed, written))
            feed.start()
            under_way.start()
            self._snapshot = snapshot
            snapshot.go_on()
        except BaseException as error:  # a device error, or no thread available, or Ctrl-C
            if snapshot is not None:
                snapshot.go_on()
                snapshot.end()
            if feed is not None and feed.is_alive():
                feed.stop()
            if not isinstance(error, Exception):
                raise
            return self._failed(prepared, what, error)
        return under_way

    def _failed(self, prepared: _Prepared, what: str, error: Exception) -> _UnderWay:
        leave_refusal(prepared.draft / prepared.image.name, error)
        if self._world.rank == 0:
            remove_draft(prepared.draft)  # the other ranks, which still write there, then fail too
        return _UnderWay.failed(what, error)

    def _write_behind(self, prepared: _Prepared, feed: Feed, written: Callable[[], None]) -> None:
        """Write this rank's file; on rank 0 then wait for the others' notes, and publish. Runs in the background."""
        draft = prepared.draft
        if self._world.rank:
            write_rank(draft, feed, prepared.content.numbers)
            return
        try:
            try:
                write_rank(draft, feed, prepared.content.numbers)
            except Exception:
                written()
                with contextlib.suppress(CheckpointError):
                    self._notes(prepared).wait()  # the others shall not fail because the folder is gone
                raise
            written()
            self._publish(prepared)
        except BaseException:
            remove_draft(draft)
            raise

    def _notes(self, prepared: _Prepared) -> Notes:
        return Notes(prepared.draft, prepared.writers, self._world.journal, self._timeout_seconds)

    # -- rank 0 -----------------------------------------------------------------------------------------

    def _publish(self, prepared: _Prepared) -> None:
        """Once all files are there: create the index, publish the checkpoint, and remove older ones."""
        request = prepared.request
        notes = self._notes(prepared).wait()
        for rank, note in enumerate(notes):
            if "file" not in note:
                raise CheckpointError(f"rank {rank} reports: {note.get('error', 'nothing')}")
        self._locks[request.folder].check()
        folders.publish(prepared.draft, request.target, _index(request, prepared.content, notes).to_json())
        self._metrics[request.target] = dict(request.metrics)
        try:
            folders.thin_out(request.folder, request.keep, request.step, self._metrics)
        except OSError as error:
            raise AfterwardsError(
                f"The checkpoint {request.target} is written, but older ones that keep= does not ask for could not "
                f"be removed: {error}."
            ) from error


def _job_of(world: World) -> str:
    """See `FolderLock`: the folder in memory that the ranks of an elastic job have on this host."""
    folder = None if world.membership is None else world.membership.folder
    return "" if folder is None else str(folder)


def _check_steps(steps: list[int]) -> None:
    for rank, step in enumerate(steps):
        if step != steps[0]:
            raise CheckpointError(
                f"rank 0 saves step {steps[0]}, rank {rank} step {step}. Pass the same step on all ranks, or none."
            )


class _UnderWay(threading.Thread):
    """A checkpoint that is being written. The interpreter does not exit before it is done."""

    def __init__(self, what: str, work: Callable[[Callable[[], None]], None]) -> None:
        """`work` gets a function to call when this rank's own file is done, or has failed."""
        super().__init__(name="shardwise checkpoint")
        self.what = what
        self.written = threading.Event()
        self._work = work
        self._error: Exception | None = None

    @classmethod
    def failed(cls, what: str, error: Exception) -> _UnderWay:
        """One that failed before it began."""

        def fail(_: Callable[[], None]) -> None:
            raise error

        under_way = cls(what, fail)
        under_way.run()
        return under_way

    def run(self) -> None:
        try:
            self._work(self.written.set)
        except Exception as error:  # raised by `result`, in the thread that asks
            self._error = error
            logging.getLogger("shardwise").error("%s: %s", self.what, said_by(error))
        finally:
            self.written.set()

    def wait(self) -> None:
        if self.ident is not None:
            self.join()

    def result(self) -> None:
        if self._error is not None:
            raise self._error


def _index(request: Request, content: Content, notes: list[dict[str, Any]]) -> Index:
    numbers: dict[str, dict[str, Any]] = {}
    for note in notes:
        for name, states in note["numbers"].items():
            numbers.setdefault(name, {}).update(states)
    return Index(
        step=request.step,
        world_size=len(notes),
        layout=request.layout,
        state=dict(request.state),
        shapes={name: list(shape) for name, shape in content.shapes.items()},
        groups=content.groups,
        ties=content.ties,
        versions={"shardwise": __version__, "torch": torch.__version__, "python": platform.python_version()},
        numbers=numbers,
        metrics=dict(request.metrics),
        files=[File(**note["file"]) for note in notes],
        chunks=[Chunk(**chunk) for note in notes for chunk in note["chunks"]],
        optimizer=content.optimizer,
    )
