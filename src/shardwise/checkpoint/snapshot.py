"""What a checkpoint that is written in the background is written from, while training goes on.

[Note: late copies] What the model shows to its user may change at any time, so `Snapshot.take` copies it at once.
Shards, master weights and optimizer states are changed by the optimizer's step, and by the engine when it is told to;
so they are copied by the thread that goes on to write them, beside the next forward and backward, and `wait` is for
whoever is about to change them. (So does DataStates-LLM, arXiv:2406.10707, with everything.) Somebody who changes them
by hand meanwhile, through the optimizer's groups, is noticed by torch's own counter of changes in place, and the
checkpoint fails with an error instead of holding half of the change.

[Note: copies of what is on a disk] Rows on a disk are there because memory has no room for them, so no copy of them is
made: they are read as they are written into the checkpoint, window by window, one file after the other in the order in
which a step updates them. Whoever is about to write to a file waits until that one has been read
(`DiskRows.await_readers`); a step reads and updates meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from shardwise.checkpoint.codec import bytes_tensor
from shardwise.checkpoint.image import WINDOW, Image
from shardwise.checkpoint.write import Copying
from shardwise.devices import RankDevice
from shardwise.errors import CheckpointError
from shardwise.placement import Span
from shardwise.storage import DiskRows
from shardwise.tiers import PAGE


def stage_bytes(image: Image) -> int:
    """Host memory that a `Snapshot` needs: all of the image; of one with rows on a disk what is in memory, and two
    windows."""
    if not image.has_rows:
        return image.padded_bytes
    return _windows_at(image) + min(2 * WINDOW, image.padded_bytes)


def _windows_at(image: Image) -> int:
    return -(-sum(place.numel for place in _places(image) if place is not None) // PAGE) * PAGE


def _places(image: Image) -> list[Span | None]:
    """Where each part is kept in the stage; `None` of what is on a disk."""
    if not image.has_rows:
        return [part.place for part in image.parts]
    places: list[Span | None] = []
    start = 0
    for part, rows in zip(image.parts, image.rows, strict=True):
        places.append(Span(start, start + part.num_bytes) if rows is None else None)
        start += part.num_bytes if rows is None else 0
    return places


class Snapshot:
    """An image's bytes as they were when it was taken; see [Note: late copies]."""

    def __init__(self, image: Image, stage: torch.Tensor, device: RankDevice) -> None:
        """`stage` has `stage_bytes`."""
        self._image: Image | None = image
        self._device = device
        self._stage = stage
        self._places = _places(image)
        self._late = [
            number for number, part in enumerate(image.parts) if part.is_hidden and image.rows[number] is None
        ]
        self._counts = [_changes_of(image.sources[number]) for number in self._late]
        self._may_go_on = threading.Event()
        self._is_whole = threading.Event()
        self._rest: Copying | None = None
        self._on_disk = _OnDisk(image) if image.has_rows else None

    def take(self) -> None:
        """Copy what may change at any time, and note the moment."""
        image = self._image
        assert image is not None
        if not image.has_rows:
            self._stage[: len(image.head)].copy_(bytes_tensor(image.head))
        late = set(self._late)
        self._copy(image, (number for number in range(len(image.parts)) if number not in late))
        self._rest = Copying(self._device)
        self._rest.wait()

    def go_on(self) -> None:
        """Let `copy_rest` begin: a thread that copies takes the interpreter from the one that starts it."""
        self._may_go_on.set()

    def copy_rest(self) -> None:
        """Copy the rest of what is in memory, and let go of the model's. For the thread that goes on to write."""
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
        """The image, window by window. The first is to be asked for once `copy_rest` has returned."""
        image = self._image
        assert image is not None
        if self._on_disk is None:
            return staged(self._stage)
        sources = tuple(
            source if place is None else self._stage[place.start : place.stop]
            for source, place in zip(image.sources, self._places, strict=True)
        )
        return self._on_disk.windows(replace(image, sources=sources), self._stage[_windows_at(image) :])

    def end(self) -> None:
        """No more of it will be asked for: everything may change."""
        if self._on_disk is not None:
            self._on_disk.let_all_go()

    def _copy_rest(self) -> None:
        image = self._image
        assert image is not None
        assert self._rest is not None
        with self._rest.under_way():
            self._copy(image, self._late)
        for number, count in zip(self._late, self._counts, strict=True):
            if _changes_of(image.sources[number]) != count:
                raise _changed_by_hand(image.parts[number].key)

    def _copy(self, image: Image, numbers: Iterable[int]) -> None:
        """From a GPU the bytes may still be on their way."""
        for number in numbers:
            place = self._places[number]
            if place is not None:
                source = image.sources[number].reshape(-1).view(torch.uint8)
                self._stage[place.start : place.stop].copy_(source, non_blocking=True)


class _OnDisk:
    """The rows on a disk that an image is to be written from; nobody writes to them until they have been read."""

    def __init__(self, image: Image) -> None:
        self._last: dict[DiskRows, int] = {}
        """Where in the image the last byte of each is."""
        for part, rows in zip(image.parts, image.rows, strict=True):
            if rows is not None:
                self._last[rows] = part.place.stop
        self._counts = {rows: rows.num_changes for rows in self._last}
        self._are_read = {rows: threading.Event() for rows in self._last}
        for rows, event in self._are_read.items():
            rows.keep_for(event)

    def windows(self, image: Image, stage: torch.Tensor) -> Iterator[memoryview]:
        """`image`, through two windows of `stage` in turn."""
        for number, start in enumerate(range(0, image.padded_bytes, WINDOW)):
            at = number % 2 * WINDOW
            window = stage[at : at + min(WINDOW, image.padded_bytes - start)]
            image.read(start, window)
            self._let_go(start + WINDOW)
            yield memoryview(window.numpy().data)

    def let_all_go(self) -> None:
        for event in self._are_read.values():
            event.set()
        self._last.clear()

    def _let_go(self, position: int) -> None:
        """Of what ends before `position`, which has been read."""
        for rows in [rows for rows, last in self._last.items() if last <= position]:
            del self._last[rows]
            if rows.num_changes != self._counts[rows]:
                raise _changed_by_hand(rows.name)
            self._are_read[rows].set()


def _changed_by_hand(what: str) -> CheckpointError:
    return CheckpointError(
        f"{what} was changed by hand while it was being copied. What only the optimizer holds is to be left alone "
        f"between save(wait=False) and the next step; change it before the save, after wait_for_save(), or through "
        f"engine.set()."
    )


def _changes_of(tensor: torch.Tensor) -> int:
    """How often the memory of a tensor has been changed in place, as far as torch counts."""
    return 0 if tensor.is_inference() else tensor._version


def staged(stage: torch.Tensor) -> Iterator[memoryview]:
    """An image that lies in host memory, window by window."""
    view = memoryview(stage.numpy().data)
    for start in range(0, len(view), WINDOW):
        yield view[start : start + WINDOW]
