"""Writes an image to disk at the disk's own speed, and computes its checksums on the way.

safetensors' own writer holds all bytes twice, and has neither slices nor direct I/O nor checksums on the way. Directly
a disk was as fast as `dd`, through the cache between a fifth of that and all of it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import queue
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.image import Image, Sums
from shardwise.errors import NO_SPACE, said_by
from shardwise.system.devices import Event, RankDevice, Stream
from shardwise.system.disk import open_direct, write_at
from shardwise.system.safe_files import replaced


class Copying:
    """Copies off a device by another thread, ordered after everything queued on the creating thread's stream.

    A thread's own current stream is the default one, which is not ordered after work queued on others.
    """

    def __init__(self, device: RankDevice) -> None:
        self._device = device
        self._stream: Stream | None = None
        self._made: Event | None = None
        if device.accelerator is not None:
            with device.here():
                self._made = device.accelerator.event()
                self._made.record(device.accelerator.current_stream())

    def wait(self) -> None:
        """Wait for what was queued when this was created."""
        if self._made is not None:
            self._made.synchronize()

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Inside, copies are queued; on leaving they are done."""
        accelerator = self._device.accelerator
        if accelerator is None or self._made is None:
            yield
            return
        with self._device.here():
            if self._stream is None:
                self._stream = accelerator.new_stream()
                self._stream.wait_event(self._made)
            with accelerator.on(self._stream):
                yield
            self._stream.synchronize()


def live(image: Image, stage: torch.Tensor, copying: Copying) -> Iterator[memoryview]:
    """An image read from live tensors, window by window, through `stage` in host memory."""

    def read(start: int, window: torch.Tensor) -> None:
        with copying.under_way():
            image.read(start, window)

    return image.windows(stage, read)


class Feed(threading.Thread):
    """Prepares windows beside the writing: computes the checksums of one and reads the next while one is written.

    Created and started by the thread that calls `save`: an exiting interpreter lets running threads finish, but starts
    no new ones. `first` and `last` are called in any case.
    """

    def __init__(
        self,
        image: Image,
        windows: Iterator[memoryview],
        *,
        first: Callable[[], None] = lambda: None,
        last: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(name="shardwise checksums")
        self.image = image
        self.sums = Sums(image)
        self._windows = windows
        self._first, self._last = first, last
        self._free = threading.Semaphore(2)
        self._ready: queue.SimpleQueue[memoryview | BaseException | None] = queue.SimpleQueue()
        self._is_stopped = False

    def run(self) -> None:
        try:
            self._first()
            while self._free.acquire() and not self._is_stopped:
                window = next(self._windows, None)
                self._ready.put(window)
                if window is None:
                    return
                self.sums.add(window)
        except BaseException as error:  # raised where the windows are used
            self._ready.put(error)
        finally:
            self._last()

    def windows(self) -> Iterator[memoryview]:
        """Every window in turn. The previous one may be refilled when the next is requested."""
        while (window := self._ready.get()) is not None:
            if isinstance(window, BaseException):
                raise window
            yield window
            self._free.release()

    def stop(self) -> None:
        self._is_stopped = True
        self._free.release()
        self.join()


def write_rank(draft: Path, feed: Feed, numbers: dict[str, Any]) -> None:
    """Write this rank's file to disk, then a note beside it that lists its content.

    The note appears atomically: if it is there, the file is complete. If anything fails the file is removed, to free
    its space, and the note has the error.
    """
    image = feed.image
    path = draft / image.name
    try:
        try:
            _write(path, image.num_bytes, feed.windows())
        finally:
            feed.stop()
        note = {
            "file": vars(image.file(feed.sums.of_head)),
            "chunks": [vars(chunk) for chunk in image.chunks(feed.sums.of_parts)],
            "numbers": numbers,
        }
        write_text(note_path(path), json.dumps(note))
    except BaseException as error:
        leave_refusal(path, error)
        raise


def leave_refusal(path: Path, error: BaseException) -> None:
    """Remove the file at `path`, to free its space, and leave a note with the error: an empty one where even that does
    not fit, so that nobody waits for it."""
    with contextlib.suppress(OSError):  # the first failure is the one that counts
        path.unlink(missing_ok=True)
        try:
            write_text(note_path(path), json.dumps({"error": said_by(error)}))
        except OSError:
            note_path(path).touch()


def note_path(path: Path) -> Path:
    return path.with_suffix(".json")


def write_text(path: Path, text: str) -> None:
    """Write a small file atomically, and flush it."""
    with replaced(path) as draft:
        draft.write_text(text)
        flush(draft)


def flush(path: Path) -> None:
    """Flush to the disk, so that a power cut cannot leave a name without its bytes.

    Raises `OSError` if the disk fails or is full, which many file systems only say here. Some cannot flush a folder,
    and need not.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno in (errno.EIO, *NO_SPACE):
            raise
    finally:
        os.close(handle)


def put_in_place(draft: Path, target: Path, old: Path) -> None:
    """Rename the folder `draft` to `target`, and what was there to `old`; if that fails, or is interrupted, what was
    there is back."""
    shutil.rmtree(old, ignore_errors=True)
    try:
        if target.exists():
            target.rename(old)
        draft.rename(target)
    except BaseException:
        if old.exists() and not target.exists():
            old.rename(target)
        raise


def remove_replaced(old: Path, target: Path) -> None:
    """Remove what `put_in_place` renamed to `old`, also after it was interrupted, if `target` is there."""
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)


def _write(path: Path, num_bytes: int, windows: Iterator[memoryview]) -> None:
    handle, _ = open_direct(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        offset = 0
        for window in windows:
            write_at(handle, window, offset)
            offset += len(window)
        os.ftruncate(handle, num_bytes)
        os.fsync(handle)
    finally:
        os.close(handle)
