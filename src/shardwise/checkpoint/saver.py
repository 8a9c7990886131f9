"""Writing a checkpoint: everybody writes beside the target, then it appears under its name at once.

[Note: agreement without messages] While a checkpoint is written behind the training's back, no rank may send a message
for it: the background thread's would mix with the training's. So ranks agree through the draft itself. Each leaves a
note beside its file once that is on the disk, or a note that says why it never will be; rank 0's thread looks for the
notes, and publishes when all are good. Everything that needs everybody's word (whose folder it is, whether there is
room, whether all can be written, what went wrong last time) is asked in the call itself, before the thread starts,
with messages. Whatever a rank does by itself there, it does inside of an agreement: one that fails alone would leave
the others waiting.
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
from shardwise.checkpoint.codec import as_bytes, check_depth, encode
from shardwise.checkpoint.content import Content
from shardwise.checkpoint.folder import AfterwardsError
from shardwise.checkpoint.image import WINDOW, Image, image_of
from shardwise.checkpoint.index import Chunk, File, Index
from shardwise.checkpoint.keep import Keep
from shardwise.checkpoint.lock import FolderLock
from shardwise.checkpoint.notes import Notes, Writer, file_name
from shardwise.checkpoint.snapshot import Snapshot, stage_bytes
from shardwise.checkpoint.write import Copying, Feed, leave_refusal, live, write_rank
from shardwise.comm import World
from shardwise.errors import CheckpointError, ConfigError, ShardwiseError, StateError
from shardwise.tiers import Stage
from shardwise.version import __version__

Result = TypeVar("Result")


@dataclass(frozen=True)
class Request:
    """What a checkpoint is to be, besides what it holds. The same on all ranks, but for `memories`."""

    folder: Path
    step: int
    layout: str
    state: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    keep: Keep = field(default_factory=Keep)
    memories: Mapping[str, Any] = field(default_factory=dict)
    """What this rank alone remembers: its generators, and the states of the user's objects."""

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
        self._left: _UnderWay | None = None
        """What a saver before this one has left to be written."""

    def renewed(self, world: World) -> Saver:
        """One for the ranks that are left, after a fault: the right to write passes on to it.

        What is being written is left to itself: it ends with a checkpoint if all ranks had finished their files, and
        else with a line in the log. Blocks until nothing of this rank's memory is read any more.
        """
        self.wait_for_copy()
        other = Saver(world, pinned=self._pinned, timeout_seconds=self._timeout_seconds)
        other._locks, self._locks = self._locks, {}
        other._metrics = self._metrics
        other._left, self._under_way = self._under_way or self._left, None
        return other

    def claim(self, folder: Path) -> None:
        """Take the right to write into `folder`, until `close`. All ranks call; if one fails, all raise."""
        what = f"{folder} cannot be claimed"
        self._agree(lambda: self._hold(folder) if self._world.rank == 0 else None, what, None)

    def save(self, target: Path, make: Callable[[], tuple[Request, Content]], *, wait: bool = True) -> Path:
        """Write the checkpoint `target`, then point `latest` at it. All ranks call.

        `make` says what it is to hold; it is called once what was written before is settled, and what it raises on one
        rank all raise. A reader, or a `kill -9`, never sees half a checkpoint. If one rank fails, all raise
        `CheckpointError`, and what was there before is still there. Without `wait` it returns once what the model shows
        is copied to host memory ([Note: late copies]), and what goes wrong after that is raised by the next call of
        `save` or `settle`, or by `close`.
        """
        self.settle()
        prepared = self._prepare(target, make, wait=wait)
        what = f"The checkpoint {target} could not be written"
        if wait:
            self._write_now(prepared, what)
        else:
            self._under_way = self._begin_behind(prepared, what)
        return target

    def wait_for_copy(self) -> None:
        """Return once all of this rank's memory may change; see [Note: late copies]. For one rank alone."""
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is not None:
            snapshot.wait()

    def settle(self) -> None:
        """Wait for what is written in the background; raise on all ranks what went wrong with it. All ranks call.

        A rank that died is noticed here, as anywhere where ranks wait for each other: nobody waits for rank 0, which
        waits for the notes of all, before all have said that theirs is there.
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
        self._agree(under_way.result, under_way.what, None)

    def close(self) -> None:
        """Wait for what is written in the background, and give the folders free. Raises what this rank knows of."""
        under_way, self._under_way = self._under_way, None
        try:
            if under_way is not None:
                under_way.wait()
                try:
                    under_way.result()
                except AfterwardsError:
                    raise
                except (CheckpointError, OSError) as error:
                    raise CheckpointError(f"{under_way.what}: {_said(error)}") from error
        finally:
            for lock in self._locks.values():
                lock.release()
            self._locks.clear()

    # -- before anything is written ---------------------------------------------------------------------

    def _prepare(self, target: Path, make: Callable[[], tuple[Request, Content]], *, wait: bool) -> _Prepared:
        """What this rank will write, with memory for it, and an empty draft with room for what all of them will.

        Its state is encoded as it is now: the caller may change it while it is being written.
        """
        what = f"The checkpoint {target} could not be started"
        mine: list[tuple[Request, Content, Image, torch.Tensor]] = []
        folder = target.parent

        def begin(draft: Path) -> dict[str, Any]:
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
            said = {"bytes": image.num_bytes, "free": free, "draft": draft.name, "step": request.step}
            return {**said, "writer": asdict(Writer.me())}

        name = f"{folders.WRITING}{target.name}-{os.getpid()}-{secrets.token_hex(4)}"
        told = self._agree(lambda: begin(folder / name), what, folder / name)
        draft = folder / told[0]["draft"]
        try:  # on every rank: all were told the same
            _check_steps([said["step"] for said in told])
            folders.check_room(folder, sum(said["bytes"] for said in told), told[0]["free"])
        except CheckpointError as error:
            if self._world.rank == 0:
                shutil.rmtree(draft, ignore_errors=True)
            raise CheckpointError(f"{what}: {error}") from error
        return _Prepared(*mine[0], draft, [Writer(**said["writer"]) for said in told])

    def _open(self, folder: Path, draft: Path) -> int:
        """Make the draft, in a folder that is ours; returns how many bytes are free there."""
        self._hold(folder)
        free = shutil.disk_usage(folder).free
        draft.mkdir()
        return free

    def _hold(self, folder: Path) -> None:
        """Make sure that `folder` is there, and ours."""
        folder.mkdir(parents=True, exist_ok=True)
        lock = self._locks.get(folder)
        if lock is None:
            lock = FolderLock(folder)
            if lock.acquire():
                folders.tidy(folder)
            self._locks[folder] = lock
        lock.check()

    def _agree(self, work: Callable[[], Result], what: str, draft: Path | None) -> list[Result]:
        """Do `work` on every rank and learn how all of them fared; if one failed, all raise, and `draft` goes."""
        try:
            outcome: dict[str, Any] = {"result": work()}
        except Exception as error:  # whatever it is, the others must hear of it
            outcome = {"error": _said(error), "kind": _kind_of(error).__name__}
        outcomes = [json.loads(message) for message in self._world.exchange(json.dumps(outcome).encode(), "checkpoint")]
        failed = [(rank, said) for rank, said in enumerate(outcomes) if "error" in said]
        if failed:
            if draft is not None and self._world.rank == 0:
                shutil.rmtree(draft, ignore_errors=True)
            rank, said = failed[0]
            kind = _KINDS[said["kind"]]
            if kind in _WHOLE:
                raise kind(said["error"])
            raise kind(f"{what}: rank {rank} reports: {said['error']} What was there before is unchanged.")
        return [said["result"] for said in outcomes]

    # -- writing ----------------------------------------------------------------------------------------

    def _write_now(self, prepared: _Prepared, what: str) -> None:
        """All ranks write, and agree that they have; then rank 0 makes the checkpoint appear."""

        def write() -> None:
            feed = Feed(prepared.image, live(prepared.image, prepared.stage, Copying(self._world.rank_device)))
            feed.start()
            write_rank(prepared.draft, feed, prepared.content.numbers)

        def publish() -> None:
            if self._world.rank == 0:
                self._publish(prepared)

        self._agree(write, what, prepared.draft)
        self._agree(publish, what, prepared.draft)

    def _begin_behind(self, prepared: _Prepared, what: str) -> _UnderWay:
        """Copy what may change at any time, and leave the rest to threads.

        From here on no rank hears of another before the next call, so what fails here is told there as well.
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
        except Exception as error:  # of the device, or no thread to be had
            if snapshot is not None:
                snapshot.go_on()
                snapshot.end()
            if feed is not None and feed.is_alive():
                feed.stop()
            return self._failed(prepared, what, error)
        self._snapshot = snapshot
        snapshot.go_on()
        return under_way

    def _failed(self, prepared: _Prepared, what: str, error: Exception) -> _UnderWay:
        leave_refusal(prepared.draft / prepared.image.name, error)
        if self._world.rank == 0:
            shutil.rmtree(prepared.draft, ignore_errors=True)  # the others, who still write there, then fail too
        return _UnderWay.failed(what, error)

    def _write_behind(self, prepared: _Prepared, feed: Feed, written: Callable[[], None]) -> None:
        """This rank's file; on rank 0 then the others' notes, and the checkpoint appears. In the background."""
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
                    self._notes(prepared).wait()  # a folder in which others still write cannot be removed
                raise
            written()
            self._notes(prepared).wait()
            self._publish(prepared)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise

    def _notes(self, prepared: _Prepared) -> Notes:
        return Notes(prepared.draft, prepared.writers, self._world.journal, self._timeout_seconds)

    # -- rank 0 -----------------------------------------------------------------------------------------

    def _publish(self, prepared: _Prepared) -> None:
        """All files are there: make the index, make the checkpoint appear, and let go of older ones."""
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


def _check_steps(steps: list[int]) -> None:
    for rank, step in enumerate(steps):
        if step != steps[0]:
            raise CheckpointError(
                f"rank 0 saves step {steps[0]}, rank {rank} step {step}. Pass the same step on all ranks, or none."
            )


class _UnderWay(threading.Thread):
    """A checkpoint that is being written. The interpreter does not end before it is done."""

    def __init__(self, what: str, work: Callable[[Callable[[], None]], None]) -> None:
        """`work` is given what it is to call when this rank's own file is done with, or has failed."""
        super().__init__(name="shardwise checkpoint")
        self.what = what
        self.written = threading.Event()
        self._work = work
        self._error: Exception | None = None

    @classmethod
    def failed(cls, what: str, error: Exception) -> _UnderWay:
        """One that came to its end before it began."""

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
            logging.getLogger("shardwise").error("%s: %s", self.what, _said(error))
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


_KINDS: dict[str, type[ShardwiseError]] = {
    kind.__name__: kind for kind in (AfterwardsError, CheckpointError, ConfigError, StateError)
}
_WHOLE = (AfterwardsError, StateError)
"""Errors that say all by themselves."""


def _kind_of(error: Exception) -> type[ShardwiseError]:
    return next((kind for kind in _KINDS.values() if isinstance(error, kind)), CheckpointError)


def _said(error: Exception) -> str:
    """An error of ours as it is; anything else with its type."""
    return str(error) if isinstance(error, ShardwiseError) else f"{type(error).__name__}: {error}."
