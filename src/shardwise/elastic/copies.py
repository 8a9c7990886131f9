"""Copies, in the memory of other hosts, of the state that only one rank holds.

[Note: whose copy first] When a host dies, the images of its ranks are lost, and the copies of the last step may not be
complete yet. So all ranks must be able to return to the step before, until all copies of a step are complete:

    after step N          live = N    shadow = N - 1    copies = N - 1, N being sent
    all copies complete   live = N    shadow = N being copied from live
    before an update      live = N    shadow = N        copies = N

A barrier tells the ranks that all copies are complete; then each updates its own shadow. Both run during the next
forward and backward, and are waited for before the next update.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import torch

from shardwise.comm import Work, World
from shardwise.comm.transport.side_channel import SideChannel
from shardwise.comm.work import Pending
from shardwise.elastic.image_space import HOW_TO_ENLARGE
from shardwise.elastic.state_image import TORN, Directory, Image, ImagePlace
from shardwise.errors import StateError
from shardwise.memory import DiskMemory
from shardwise.program.buddies import Keepers
from shardwise.system.disk import DiskFile
from shardwise.system.units import format_bytes

Tensor = torch.Tensor
_PORTION_BYTES = 2**20
_MAX_BYTES = 2**48
"""More than any copy has."""
_NUM_UNDER_WAY = 4
"""Portions of one copy sent at a time, which bounds how long the training's own messages wait."""


@dataclass
class CopyMeter:
    """What copies to other hosts have cost this rank since its engine was created."""

    num_copies: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    seconds: float = 0.0
    """From the first byte until all copies are complete, during forwards and backwards."""
    waited_seconds: float = 0.0
    """How long updates waited for copies."""


@dataclass(frozen=True)
class Outgoing:
    """An image to be sent. `segments` are its bytes, each with its start in the shadow, in that order."""

    number: int
    """This rank's images are numbered; one with other cells has another number."""
    directory: Directory
    segments: Sequence[tuple[int, Tensor]]
    files: Sequence[DiskFile] = ()
    """What it has on a disk, in the order of `Directory.rows`."""

    def portions(self, num_bytes: int) -> Iterator[Tensor]:
        """The first `num_bytes` of the shadow to be, in portions. Gaps between cells may hold anything."""
        starts = [start for start, _ in self.segments]
        for first in range(0, num_bytes, _PORTION_BYTES):
            last = min(first + _PORTION_BYTES, num_bytes)
            at = max(0, bisect_right(starts, first) - 1)
            start, segment = self.segments[at]
            if start <= first and last <= start + len(segment):
                yield segment[first - start : last - start]
                continue
            portion = torch.zeros(last - first, dtype=torch.uint8, device="cpu")
            while at < len(self.segments) and self.segments[at][0] < last:
                start, segment = self.segments[at]
                low, high = max(first, start), min(last, start + len(segment))
                if low < high:
                    portion[low - first : high - first] = segment[low - start : high - start]
                at += 1
            yield portion

    def portions_on_disk(self, *, is_new: bool) -> Iterator[Tensor]:
        """What changes of its files; if it `is_new`, all. Raises `TierError`."""
        for rows, file in zip(self.directory.rows, self.files, strict=True):
            if is_new or not rows.is_still:
                for first, last in _portions_of(rows.num_bytes):
                    yield file.get(first, last)


def _portions_of(num_bytes: int) -> Iterator[tuple[int, int]]:
    for first in range(0, num_bytes, _PORTION_BYTES):
        yield first, min(first + _PORTION_BYTES, num_bytes)


class KeptCopies:
    """The copies that this rank keeps of one other rank's state. What that has on a disk is copied to `disk`."""

    def __init__(self, place: ImagePlace, disk: DiskMemory | None) -> None:
        self._place = place
        self._disk = disk
        self._files: list[list[DiskFile]] = []
        self._former_files: list[list[DiskFile]] = []
        self._num_images = 0
        self._former: Image | None = None
        self.image: Image | None = None
        self._to_live = False
        """Whether the live region is being filled, rather than the shadow."""

    @property
    def images(self) -> list[Image]:
        """The images that may contain a whole state."""
        return [image for image in (self._former, self.image) if image is not None]

    def require_image(self) -> Image:
        assert self.image is not None
        return self.image

    def renew(self, directory: Directory) -> None:
        """Prepare for an image with other cells. The copy before stays until `complete`."""
        self._num_images += 1
        files = [[self._file(rows.num_bytes) for _ in rows.paths] for rows in directory.rows]
        paths = [[str(file.path) for file in own] for own in files]
        self._former, self.image = self.image, self._placed(directory.of_copy(paths))
        self._former_files, self._files = self._files, files

    @property
    def _path(self) -> Path | None:
        """Of the newest image."""
        return self._place.path(self._num_images - 1)

    def _placed(self, directory: Directory) -> Image:
        try:
            return Image.create(self._path, directory)
        except OSError:
            if self._path is not None:
                self._path.unlink(missing_ok=True)
            if directory.num_bytes > self._place.waiting_bytes:
                raise
            return Image.create(None, directory)

    @property
    def waiting(self) -> list[Image]:
        """Those that wait for space: only this rank can read them."""
        return [image for image in self.images if image.path is None and self._place.folder is not None]

    def begin(self, num_bytes: int) -> Tensor:
        """Where to write `num_bytes`: over the older of the two copies."""
        image = self.require_image()
        is_first = image.live_version == image.shadow_version == TORN
        self._to_live = not is_first and image.live_version < image.shadow_version
        self._mark(TORN)
        return image.region(is_live=self._to_live)[:num_bytes]

    def places_on_disk(self, *, is_new: bool) -> Iterator[tuple[DiskFile, int, int]]:
        """Where to write what changes on a disk, in portions: a file, the first byte and the last; if it `is_new`, all
        of it."""
        for rows, files in zip(self.require_image().directory.rows, self._files, strict=True):
            if is_new or not rows.is_still:
                for first, last in _portions_of(rows.num_bytes):
                    yield files[self._number(files)], first, last

    def arrived(self, version: int) -> None:
        if self._files:
            numbers = [self._number(files) for files in self._files]
            self.require_image().files(is_live=self._to_live).copy_(
                torch.tensor(numbers, dtype=torch.uint8, device="cpu")
            )
        self._mark(version)

    def _number(self, files: Sequence[DiskFile]) -> int:
        """Which file belongs to the region that is being filled: see [Note: rows of an image]."""
        return 0 if self._to_live else len(files) - 1

    def _file(self, num_bytes: int) -> DiskFile:
        assert self._disk is not None
        return self._disk.file("copy", num_bytes, is_named=True)

    def complete(self) -> None:
        """All ranks have their copies, so none will return to the copy before."""
        former, self._former = self._former, None
        if former is not None:
            former.remove()
            _close(self._former_files)
            self._former_files = []
        if self.waiting and self._path is not None:
            try:
                self.image = self.require_image().moved_to(self._path)
            except OSError:  # it goes on waiting
                self._path.unlink(missing_ok=True)

    def remove(self) -> None:
        for image in self.images:
            image.remove()
        _close(self._former_files + self._files)

    def _mark(self, version: int) -> None:
        image = self.require_image()
        if self._to_live:
            image.live_version = version
        else:
            image.shadow_version = version


def _close(files: Sequence[Sequence[DiskFile]]) -> None:
    for file in (file for own in files for file in own):
        file.remove()
        file.close()


class Copies:
    """What one rank sends to its keeper, and keeps for other ranks, under one layout. `bring` is for one thread."""

    def __init__(
        self,
        world: World,
        keepers: Keepers,
        folder: Path | None,
        names: Sequence[str],
        meter: CopyMeter,
        disk: DiskMemory | None,
        *,
        waiting_bytes: int,
    ) -> None:
        """`names` are the file names, by rank; without a `folder`, copies are in this process's own memory. What ranks
        have on disks is copied to `disk`. `waiting_bytes`: see `ImagePlace`."""
        self._channel = SideChannel(world.transport, world.everybody, world.journal)
        self._keepers = keepers
        self._keeper = keepers[world.rank]
        self.kept = {
            rank: KeptCopies(ImagePlace(folder, names[rank], waiting_bytes), disk)
            for rank, one in enumerate(keepers)
            if one == world.rank
        }
        self._sent_number = -1
        """Number of the image whose cells the keeper knows."""
        self.meter = meter

    @property
    def is_kept_elsewhere(self) -> bool:
        """Whether another host keeps a copy of this rank's state."""
        return self._keeper is not None

    @property
    def kept_bytes(self) -> int:
        return sum(image.directory.num_bytes for kept in self.kept.values() for image in kept.images)

    @property
    def kept_bytes_on_disk(self) -> int:
        rows = (one for kept in self.kept.values() for image in kept.images for one in image.directory.rows)
        return sum(one.num_bytes * len(one.paths) for one in rows)

    def bring(self, version: int, outgoing: Outgoing) -> None:
        """Send this rank's state of `version`, and receive those of others. All ranks call; returns when all copies are
        complete. Raises `LinkError`, `StateError` on all ranks if one has no memory for a copy, and `TierError` if a
        disk fails."""
        started = time.perf_counter()
        is_new = outgoing.number != self._sent_number
        directory = outgoing.directory
        num_bytes = directory.shadow_bytes if is_new else directory.changing_bytes
        text = directory.text() if is_new else b""
        heads = self._swap_heads(torch.tensor([version, num_bytes, len(text)], device="cpu"))
        tables = self._swap_texts(text, {rank: head[2] for rank, head in heads.items()})
        directories = {rank: Directory.read(table) for rank, table in tables.items()}
        without_room = {rank: one for rank, one in directories.items() if not self._has_room(rank, one)}
        targets = {rank: self.kept[rank].begin(head[1]) for rank, head in heads.items() if rank not in without_room}
        under_way: list[Iterator[Work]] = [
            chain(self._receiving(rank, target), self._receiving_files(rank, is_new=heads[rank][2] > 0))
            for rank, target in targets.items()
        ]
        under_way += [self._dropping(heads[rank][1], rank, one) for rank, one in without_room.items()]
        if self._keeper is not None:
            portions = chain(outgoing.portions(num_bytes), outgoing.portions_on_disk(is_new=is_new))
            under_way.append(self._sending(self._keeper, portions))
        _carry_out(under_way)
        for rank in targets:
            self.kept[rank].arrived(heads[rank][0])
        self._require_room(without_room)
        self._sent_number = outgoing.number
        for kept in self.kept.values():
            kept.complete()
        meter = self.meter
        meter.num_copies += 1
        if self._keeper is not None:
            meter.sent_bytes += num_bytes + directory.disk_bytes(is_new=is_new)
        for rank, target in targets.items():
            arrived = self.kept[rank].require_image().directory
            meter.received_bytes += len(target) + arrived.disk_bytes(is_new=heads[rank][2] > 0)
        meter.seconds += time.perf_counter() - started

    def await_together(self, work: Work) -> None:
        """Wait for `work`, in which `bring` is called. All ranks call; raises `CommError`."""
        started = time.perf_counter()
        self._channel.await_together(work, "copies on other hosts")
        self.meter.waited_seconds += time.perf_counter() - started

    def remove(self) -> None:
        for kept in self.kept.values():
            kept.remove()

    def _has_room(self, rank: int, directory: Directory) -> bool:
        try:
            self.kept[rank].renew(directory)
        except OSError:
            return False
        return True

    def _dropping(self, num_bytes: int, rank: int, directory: Directory) -> Iterator[Work]:
        """Receive what there is no room for, so that its sender gets as far as `_require_room`."""
        for size in (num_bytes, *(rows.num_bytes for rows in directory.rows)):
            for first, last in _portions_of(size):
                yield self._channel.receive(torch.empty(last - first, dtype=torch.uint8, device="cpu"), rank)

    def _require_room(self, without_room: Mapping[int, Directory]) -> None:
        """Wait until all ranks have all copies. All raise the same error if one has no room: otherwise the others would
        go on without it, as if it had died."""
        mine = [(rank + 1) * _MAX_BYTES + directory.num_bytes for rank, directory in without_room.items()]
        number = self._channel.barrier(max(mine, default=0))
        if number:
            rank, num_bytes = number // _MAX_BYTES - 1, number % _MAX_BYTES
            raise StateError(
                f"The host of rank {self._keepers[rank]} has no memory for the copy of rank {rank}'s state, which "
                f"takes {format_bytes(num_bytes)}. Enlarge its /dev/shm {HOW_TO_ENLARGE}, or choose survive: host or "
                f"survive: checkpoint."
            )

    def _swap_heads(self, head: Tensor) -> dict[int, tuple[int, int, int]]:
        arriving = {rank: torch.zeros_like(head) for rank in self.kept}
        self._swap(head, arriving)
        return {rank: (int(one[0]), int(one[1]), int(one[2])) for rank, one in arriving.items()}

    def _swap_texts(self, text: bytes, lengths: dict[int, int]) -> dict[int, bytes]:
        arriving = {
            rank: torch.empty(length, dtype=torch.uint8, device="cpu") for rank, length in lengths.items() if length
        }
        self._swap(torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else None, arriving)
        return {rank: tensor.numpy().tobytes() for rank, tensor in arriving.items()}

    def _swap(self, sent: Tensor | None, arriving: Mapping[int, Tensor]) -> None:
        works = [self._channel.receive(tensor, rank) for rank, tensor in arriving.items()]
        if self._keeper is not None and sent is not None:
            works.append(self._channel.send(sent, self._keeper))
        for work in works:
            work.wait()

    def _sending(self, rank: int, portions: Iterator[Tensor]) -> Iterator[Work]:
        return (self._channel.send(portion, rank) for portion in portions)

    def _receiving(self, rank: int, target: Tensor) -> Iterator[Work]:
        starts = range(0, len(target), _PORTION_BYTES)
        return (self._channel.receive(target[start : start + _PORTION_BYTES], rank) for start in starts)

    def _receiving_files(self, rank: int, *, is_new: bool) -> Iterator[Work]:
        for file, first, last in self.kept[rank].places_on_disk(is_new=is_new):
            portion = torch.empty(last - first, dtype=torch.uint8, device="cpu")
            yield Pending([self._channel.receive(portion, rank)], partial(file.put, first, portion))


def _carry_out(streams: Sequence[Iterator[Work]]) -> None:
    """Start and wait for the works of all `streams`, advancing them in turn."""
    begun: list[deque[Work]] = [deque() for _ in streams]
    num_open = len(streams)
    while num_open:
        num_open = 0
        for stream, works in zip(streams, begun, strict=True):
            if (work := next(stream, None)) is not None:
                works.append(work)
                num_open += 1
        for works in begun:
            if len(works) >= _NUM_UNDER_WAY:
                works.popleft().wait()
    for works in begun:
        for work in works:
            work.wait()
