"""Writing a checkpoint: everybody writes beside the target, then it appears under its name at once.

[Note: agreement without messages] While a checkpoint is written behind the training's back, no rank may send a message
for it: the background thread's would mix with the training's. So ranks agree through the draft itself. Each leaves a
note beside its file once that is on the disk, or a note that says why it never will be; rank 0's thread looks for the
notes, and publishes when all are good. Everything that needs everybody's word (whose folder it is, whether there is
room, what went wrong last time) is asked in the call itself, before the thread starts, with messages.
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
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from shardwise.checkpoint import folder as folders
from shardwise.checkpoint.codec import encode
from shardwise.checkpoint.content import Content
from shardwise.checkpoint.image import WINDOW, Image, image_of
from shardwise.checkpoint.index import Chunk, File, Index
from shardwise.checkpoint.keep import Keep
from shardwise.checkpoint.lock import FolderLock
from shardwise.checkpoint.write import Feed, Snapshot, Stage, live, staged, write_rank
from shardwise.comm import World
from shardwise.errors import CheckpointError, ConfigError, ShardwiseError
from shardwise.units import format_seconds
from shardwise.version import __version__

LOOK_SECONDS = 0.005, 0.1
"""Rank 0 looks for the others' notes this often at first, and this often after a while."""

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


class Saver:
    """Writes the checkpoints of one engine, one at a time. `close()` it."""

    def __init__(self, world: World, *, pinned: bool = False, timeout_seconds: float = 300) -> None:
        self._world = world
        self._stage = Stage(pinned=pinned)
        self._timeout_seconds = timeout_seconds
        self._under_way: _UnderWay | None = None
        self._snapshot: Snapshot | None = None
        self._locks: dict[Path, FolderLock] = {}
        self._metrics: dict[Path, dict[str, float]] = {}

    def claim(self, folder: Path) -> None:
        """Take the right to write into `folder`, until `close`. All ranks call; if one fails, all raise."""
        what = f"{folder} is not for this job"
        self._agree(lambda: self._hold(folder) if self._world.rank == 0 else None, what, None)

    def save(self, request: Request, content: Content, *, wait: bool = True) -> Path:
        """Write `request.target`, then point `latest` at it. All ranks call.

        A reader, or a `kill -9`, never sees half a checkpoint. If one rank fails, all raise `CheckpointError`, and
        what was there before is still there. Without `wait` it returns once what the model shows is copied to host
        memory ([Note: late copies]), and what goes wrong after that is raised by the next call of `save` or
        `settle`, or by `close`.
        """
        self.settle()
        request, image, draft = self._prepare(request, content)
        what = f"The checkpoint {request.target} could not be written"
        if wait:
            stage = self._stage.sized(min(image.padded_bytes, 2 * WINDOW))
            self._write_now(request, content, draft, Feed(image, live(image, stage)), what)
            return request.target
        stage = self._stage.sized(image.padded_bytes)
        snapshot = Snapshot(image, stage)
        snapshot.take()
        feed = Feed(image.without_sources, staged(stage), first=snapshot.copy_rest)
        shell = Content(shapes=content.shapes, groups=content.groups, numbers=content.numbers)
        self._under_way = _UnderWay(what, lambda: self._write_behind(request, shell, draft, feed))
        feed.start()
        self._under_way.start()
        self._snapshot = snapshot
        snapshot.go_on()
        return request.target

    def wait_for_copy(self) -> None:
        """Return once all of this rank's memory may change; see [Note: late copies]. For one rank alone."""
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is not None:
            snapshot.wait()

    def settle(self) -> None:
        """Wait for what is written in the background; raise on all ranks what went wrong with it. All ranks call."""
        under_way, self._under_way, self._snapshot = self._under_way, None, None
        if under_way is not None:
            under_way.join()
            self._agree(under_way.result, under_way.what, None)

    def close(self) -> None:
        """Wait for what is written in the background, and give the folders free. Raises what this rank knows of."""
        under_way, self._under_way = self._under_way, None
        try:
            if under_way is not None:
                under_way.join()
                try:
                    under_way.result()
                except (CheckpointError, OSError) as error:
                    raise CheckpointError(f"{under_way.what}: {_said(error)}") from error
        finally:
            for lock in self._locks.values():
                lock.release()
            self._locks.clear()

    # -- before anything is written ---------------------------------------------------------------------

    def _prepare(self, request: Request, content: Content) -> tuple[Request, Image, Path]:
        """What this rank will write, and an empty draft with room for what all of them will.

        The request comes back with its state as it is now: the caller may change it while it is being written.
        """
        what = f"The checkpoint {request.target} could not be begun"
        images: list[Image] = []
        states: list[dict[str, Any]] = []

        def begin(draft: Path) -> dict[str, Any]:
            memories = {f"rank/{self._world.rank}": json.dumps(encode(dict(request.memories), "memories")).encode()}
            images.append(image_of(_file_name(self._world.rank), content, memories))
            states.append(encode(dict(request.state)))
            free = self._open(request.folder, draft) if self._world.rank == 0 else 0
            return {"bytes": images[0].num_bytes, "free": free, "draft": draft.name}

        name = f"{folders.WRITING}{request.target.name}-{os.getpid()}-{secrets.token_hex(4)}"
        told = self._agree(lambda: begin(request.folder / name), what, request.folder / name)
        draft = request.folder / told[0]["draft"]
        try:
            folders.check_room(request.folder, sum(said["bytes"] for said in told), told[0]["free"])
        except CheckpointError as error:  # on every rank: all were told the same
            if self._world.rank == 0:
                shutil.rmtree(draft, ignore_errors=True)
            raise CheckpointError(f"{what}: {error}") from error
        return replace(request, state=states[0]), images[0], draft

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
            outcome = {"error": _said(error), "is_config": isinstance(error, ConfigError)}
        outcomes = [json.loads(message) for message in self._world.exchange(json.dumps(outcome).encode())]
        failed = [(rank, said) for rank, said in enumerate(outcomes) if "error" in said]
        if failed:
            if draft is not None and self._world.rank == 0:
                shutil.rmtree(draft, ignore_errors=True)
            rank, said = failed[0]
            kind = ConfigError if said["is_config"] else CheckpointError
            raise kind(f"{what}: rank {rank} met {said['error']} What was there before is untouched.")
        return [said["result"] for said in outcomes]

    # -- writing ----------------------------------------------------------------------------------------

    def _write_now(self, request: Request, content: Content, draft: Path, feed: Feed, what: str) -> None:
        """All ranks write, and agree that they have; then rank 0 makes the checkpoint appear."""
        feed.start()
        self._agree(lambda: write_rank(draft, feed, content.numbers), what, draft)
        self._agree(lambda: self._publish(request, content, draft) if self._world.rank == 0 else None, what, draft)

    def _write_behind(self, request: Request, shell: Content, draft: Path, feed: Feed) -> None:
        """This rank's file; on rank 0 then the others' notes, and the checkpoint appears. In the background."""
        if self._world.rank:
            write_rank(draft, feed, shell.numbers)
            return
        try:
            try:
                write_rank(draft, feed, shell.numbers)
            except Exception:
                with contextlib.suppress(CheckpointError):
                    self._await_notes(draft)  # a folder in which others still write cannot be removed
                raise
            self._await_notes(draft)
            self._publish(request, shell, draft)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise

    def _await_notes(self, draft: Path) -> None:
        """Look until every other rank has left its note. Waits as long as files grow; then for `timeout_seconds`."""
        started, seen, pause = time.monotonic(), -1, LOOK_SECONDS[0]
        missing = set(range(1, self._world.size))
        while missing:
            missing -= {rank for rank in missing if folders.read_note(draft, _file_name(rank)) is not None}
            size = _bytes_in(draft)
            if size != seen:
                started, seen = time.monotonic(), size
            if missing and time.monotonic() - started > self._timeout_seconds:
                raise CheckpointError(
                    f"rank {min(missing)} has not finished its file, which has not grown for "
                    f"{format_seconds(self._timeout_seconds)}; has the rank ended?"
                )
            time.sleep(pause)
            pause = min(1.5 * pause, LOOK_SECONDS[1])

    # -- rank 0 -----------------------------------------------------------------------------------------

    def _publish(self, request: Request, content: Content, draft: Path) -> None:
        """All files are there: make the index, make the checkpoint appear, and let go of older ones."""
        notes = [folders.read_note(draft, _file_name(rank)) or {} for rank in range(self._world.size)]
        for rank, note in enumerate(notes):
            if "file" not in note:
                raise CheckpointError(f"rank {rank} says: {note.get('error', 'nothing')}")
        self._locks[request.folder].check()
        folders.publish(draft, request.target, _index(request, content, notes).to_json())
        self._metrics[request.target] = dict(request.metrics)
        folders.thin_out(request.folder, request.keep, request.step, self._metrics)


class _UnderWay(threading.Thread):
    """A checkpoint that is being written. The interpreter does not end before it is done."""

    def __init__(self, what: str, work: Callable[[], None]) -> None:
        super().__init__(name="shardwise checkpoint")
        self.what = what
        self._work = work
        self._error: Exception | None = None

    def run(self) -> None:
        try:
            self._work()
        except Exception as error:  # raised by `result`, in the thread that asks
            self._error = error
            logging.getLogger("shardwise").error("%s: %s", self.what, _said(error))

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
    )


def _file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _bytes_in(draft: Path) -> int:
    with contextlib.suppress(OSError):
        return sum(path.stat().st_size for path in draft.iterdir())
    return 0


def _said(error: Exception) -> str:
    """A letter of ours as it is; anything else with its type."""
    return str(error) if isinstance(error, ShardwiseError) else f"{type(error).__name__}: {error}."
