"""Getting an image to disk at the disk's own speed, with its checksums taken on the way."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import mmap
import os
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.image import PAGE, WINDOW, Image, Sums


class Stage:
    """Host memory for one image, kept from save to save. It begins on a page; pinned where it is filled from a GPU."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._memory = torch.empty(0, dtype=torch.uint8)

    def sized(self, num_bytes: int) -> torch.Tensor:
        if self._memory.numel() < num_bytes:
            self._memory = torch.empty(0, dtype=torch.uint8)  # lets the old one go before the new one comes
            self._memory = (
                torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True) if self._pinned else pages(num_bytes)
            )
        return self._memory[:num_bytes]


def pages(num_bytes: int) -> torch.Tensor:
    """Host memory that begins on a page, as writes that bypass the page cache demand."""
    memory = mmap.mmap(-1, max(num_bytes, PAGE))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages does without
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def staged(stage: torch.Tensor) -> Iterator[memoryview]:
    """An image that lies in host memory, window by window."""
    view = memoryview(stage.numpy().data)
    for start in range(0, len(view), WINDOW):
        yield view[start : start + WINDOW]


def live(image: Image) -> Iterator[memoryview]:
    """An image read from where its tensors live, window by window, through two windows of host memory in turn."""
    bounces = [pages(min(WINDOW, image.padded_bytes)) for _ in range(2)]
    for number, start in enumerate(range(0, image.padded_bytes, WINDOW)):
        window = bounces[number % 2][: min(WINDOW, image.padded_bytes - start)]
        image.read(start, window)
        yield memoryview(window.numpy().data)


class Feed(threading.Thread):
    """Makes windows ready beside the writing: reads the next one and takes its checksums while one is written.

    Made and started by whoever calls for a save: an interpreter that is about to end lets running threads finish,
    but starts no new ones.
    """

    def __init__(self, image: Image, windows: Iterator[memoryview]) -> None:
        super().__init__(name="shardwise checksums")
        self.image = image
        self.sums = Sums(image)
        self._windows = windows
        self._free = threading.Semaphore(2)
        self._ready: queue.SimpleQueue[memoryview | BaseException | None] = queue.SimpleQueue()
        self._is_stopped = False

    def run(self) -> None:
        try:
            while self._free.acquire() and not self._is_stopped:
                window = next(self._windows, None)
                if window is not None:
                    self.sums.add(window)
                self._ready.put(window)
                if window is None:
                    return
        except BaseException as error:  # raised where the windows are used
            self._ready.put(error)

    def windows(self) -> Iterator[memoryview]:
        """Every window in turn. The last one is free to be filled again when the next is asked for."""
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
    """This rank's file, on the disk itself; then a note beside it that says so and what is in it.

    The note appears at once or not at all: whoever sees it may rely on the file. If anything fails the file goes, to
    make room, and the note says what happened.
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
        with contextlib.suppress(OSError):  # the failure that counts is the first one
            path.unlink(missing_ok=True)
            write_text(note_path(path), json.dumps({"error": f"{type(error).__name__}: {error}"}))
        raise


def note_path(path: Path) -> Path:
    return path.with_suffix(".json")


def write_text(path: Path, text: str) -> None:
    """All of a small file or nothing, flushed."""
    fresh = path.with_name(f".{path.name}.fresh")
    fresh.write_text(text)
    flush(fresh)
    fresh.replace(path)


def flush(path: Path) -> None:
    """To the disk itself, so that a power cut cannot leave a name without its bytes."""
    handle = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some file systems cannot flush a folder, and need not
            os.fsync(handle)
    finally:
        os.close(handle)


def _write(path: Path, num_bytes: int, windows: Iterator[memoryview]) -> None:
    handle = _opened(path)
    try:
        for window in windows:
            _write_all(handle, window)
        os.ftruncate(handle, num_bytes)
        os.fsync(handle)
    finally:
        os.close(handle)


def _opened(path: Path) -> int:
    """Past the page cache where that can be done: as fast as the disk, and nothing that others have there is lost."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_CLOEXEC", 0)
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o666)


def _write_all(handle: int, window: memoryview) -> None:
    while window:
        try:
            window = window[os.write(handle, window) :]
        except OSError as error:
            if error.errno != errno.EINVAL or not _through_the_cache(handle):
                raise


def _through_the_cache(handle: int) -> bool:
    """Give up on writing past the page cache, for file systems that open a file so and then do not write it."""
    flags, direct = fcntl.fcntl(handle, fcntl.F_GETFL), getattr(os, "O_DIRECT", 0)
    fcntl.fcntl(handle, fcntl.F_SETFL, flags & ~direct)
    return bool(flags & direct)
