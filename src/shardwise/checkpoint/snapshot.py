"""The memory from which a checkpoint is written in the background, while training goes on.

[Note: late copies] What the model exposes to its user may change at any time, so `Snapshot.take` copies it at once.
Shards, master weights and optimizer states are changed only by the optimizer's step, and by calls to the engine. So
they are copied by the thread that then writes them, beside the next forward and backward, and code that is about to
change them calls `wait`. (DataStates-LLM, arXiv:2406.10707, does this with everything.) If the user changes them by
hand meanwhile, through the optimizer's groups, torch's own counter of in-place changes shows it, and the checkpoint
fails with an error instead of holding half of the change.

Copied before `save(wait=False)` returned, everything took 13 ms of a stall of 26, on two ranks that copy 20 GB/s
together, where a whole save takes 160: more than 5 % for the copy alone.

[Note: copies of what is on a disk] Rows on a disk are there because memory has no room for them, so they are not
copied: they are read while they are written into the checkpoint, window by window, one file after the other in the
order in which a step updates them. A write to a file waits until that file has been read (`DiskRows.await_readers`); a
step may read and update in memory meanwhile.

Alternatives: new files for what a step writes meanwhile need the room of all states once more; copies that share
extents (`FICLONE`) do not exist on ext4, and would be read all the same, for the checksums.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from shardwise.checkpoint.image import WINDOW, Image
from shardwise.checkpoint.json_codec import bytes_tensor
from shardwise.checkpoint.write import Copying
from shardwise.errors import CheckpointError
from shardwise.memory import Rows
from shardwise.plan.placement import Span
from shardwise.system.devices import RankDevice
from shardwise.system.disk import PAGE
from shardwise.system.even_parts import round_up


def stage_bytes(image: Image) -> int:
    """Host memory that a `Snapshot` needs: all of the image; or, with rows on a disk, what is in memory plus two
    windows."""
    if not image.has_rows:
        return image.padded_bytes
    return _windows_at(image) + min(2 * WINDOW, image.padded_bytes)


def _windows_at(image: Image) -> int:
    return round_up(sum(span.numel for span in _spans(image) if span is not None), PAGE)


def _spans(image: Image) -> list[Span | None]:
    """The span of each part in the stage; `None` for parts on a disk."""
    if not image.has_rows:
        return [part.in_file for part in image.parts]
    spans: list[Span | None] = []
    start = 0
    for part, rows in zip(image.parts, image.rows, strict=True):
        spans.append(Span(start, start + part.num_bytes) if rows is None else None)
        start += part.num_bytes if rows is None else 0
    return spans


class Snapshot:
    """An image's bytes as they were when it was taken; see [Note: late copies]."""

    def __init__(self, image: Image, stage: torch.Tensor, device: RankDevice) -> None:
        """`stage` has `stage_bytes` bytes."""
        self._image: Image | None = image
        self._device = device
        self._stage = stage
        self._spans = _spans(image)
        self._late = [
            number for number, part in enumerate(image.parts) if part.is_hidden and image.rows[number] is None
        ]
        self._counts = [changes_of(image.sources[number]) for number in self._late]
        self._may_go_on = threading.Event()
        self._is_whole = threading.Event()
        self._rest: Copying | None = None
        self._on_disk = _OnDisk(image) if image.has_rows else None

    @property
    def _live(self) -> Image:
        """The image, until `copy_rest` has dropped it."""
        assert self._image is not None
        return self._image

    def take(self) -> None:
        """Copy what may change at any time, and mark this point of the stream."""
        image = self._live
        if not image.has_rows:
            self._stage[: len(image.head)].copy_(bytes_tensor(image.head))
        late = set(self._late)
        self._copy(image, (number for number in range(len(image.parts)) if number not in late))
        self._rest = Copying(self._device)
        self._rest.wait()

    def go_on(self) -> None:
        """Let `copy_rest` begin. A copying thread would take the interpreter from the thread that starts it."""
        self._may_go_on.set()

    def copy_rest(self) -> None:
        """Copy the rest of what is in memory, and drop references to the model. For the writing thread."""
        try:
            self._may_go_on.wait()
            self._copy_rest()
        finally:
            self._image = None
            self._is_whole.set()

    def wait(self) -> None:
        """Return once everything in memory may change again."""
        self._is_whole.wait()

    def windows(self) -> Iterator[memoryview]:
        """The image, window by window. Take the first window only after `copy_rest` has returned."""
        image = self._live
        if self._on_disk is None:
            return staged(self._stage)
        sources = tuple(
            source if span is None else self._stage[span.as_slice]
            for source, span in zip(image.sources, self._spans, strict=True)
        )
        return self._on_disk.windows(replace(image, sources=sources), self._stage[_windows_at(image) :])

    def end(self) -> None:
        """No more of it will be read: everything may change."""
        if self._on_disk is not None:
            self._on_disk.release_all()

    def _copy_rest(self) -> None:
        image = self._live
        assert self._rest is not None
        with self._rest.under_way():
            self._copy(image, self._late)
        for number, count in zip(self._late, self._counts, strict=True):
            if changes_of(image.sources[number]) != count:
                raise changed_by_hand(image.parts[number].key)

    def _copy(self, image: Image, numbers: Iterable[int]) -> None:
        """Copies from a GPU may still be under way on return."""
        for number in numbers:
            span = self._spans[number]
            if span is not None:
                source = image.sources[number].reshape(-1).view(torch.uint8)
                self._stage[span.as_slice].copy_(source, non_blocking=True)


class _OnDisk:
    """The rows on a disk of an image; writes to them wait until they have been read."""

    def __init__(self, image: Image) -> None:
        self._last: dict[Rows, int] = {}
        """By rows, the end of their last part in the image."""
        for part, rows in zip(image.parts, image.rows, strict=True):
            if rows is not None:
                self._last[rows] = part.in_file.stop
        self._counts = {rows: rows.num_changes for rows in self._last}
        self._are_read = {rows: threading.Event() for rows in self._last}
        for rows, event in self._are_read.items():
            rows.keep_for(event)

    def windows(self, image: Image, stage: torch.Tensor) -> Iterator[memoryview]:
        """`image`, through `stage`."""

        def read(start: int, window: torch.Tensor) -> None:
            image.read(start, window)
            self._release(start + WINDOW)

        return image.windows(stage, read)

    def release_all(self) -> None:
        for event in self._are_read.values():
            event.set()
        self._last.clear()

    def _release(self, position: int) -> None:
        """Release rows that end before `position`, which have been read."""
        for rows in [rows for rows, last in self._last.items() if last <= position]:
            del self._last[rows]
            if rows.num_changes != self._counts[rows]:
                raise changed_by_hand(rows.name)
            self._are_read[rows].set()


def changed_by_hand(what: str, call: str = "save") -> CheckpointError:
    """The error for what has changed between `engine.CALL(wait=False)` and its copy."""
    return CheckpointError(
        f"{what} was changed by hand while it was being copied. What only the optimizer holds is to be left alone "
        f"between {call}(wait=False) and the next step; change it before the {call}, after wait_for_{call}(), or "
        f"through engine.set()."
    )


def changes_of(tensor: torch.Tensor) -> int:
    """How often the memory of a tensor has been changed in place, by torch's counter."""
    return 0 if tensor.is_inference() else tensor._version


def staged(stage: torch.Tensor) -> Iterator[memoryview]:
    """An image in host memory, window by window."""
    view = memoryview(stage.numpy().data)
    for start in range(0, len(view), WINDOW):
        yield view[start : start + WINDOW]
