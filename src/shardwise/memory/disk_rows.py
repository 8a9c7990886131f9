"""The tensors of one flat buffer on a disk, and their addresses: see [Note: rows on a disk] in `disk_memory.py`.

[Note: two versions] Where the others go on when a rank is lost, a step may have to be undone that some ranks have
taken and others have not. So there are two files then. An update reads the one with the last step and writes the
other, in the place of the step before; what has been written is the state from there on. Nothing is copied, and the
last step is whole on the disk until the next update begins. `elastic/state_image.py` knows which file has which step.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator, Sequence

import torch

from shardwise.errors import StateError
from shardwise.system.disk import DiskFile
from shardwise.system.even_parts import round_up

Tensor = torch.Tensor
PIECE_BYTES = 2**23
"""The most that is read or written at once between steps."""


class MappedFile:
    """A file whose bytes have addresses, by which `DiskRows` finds them."""

    def __init__(self, file: DiskFile) -> None:
        self.file = file
        self.bytes = torch.frombuffer(mmap.mmap(file.descriptor(), file.num_bytes), dtype=torch.uint8)

    def has(self, tensor: Tensor) -> bool:
        return 0 <= self.place(tensor) < self.file.num_bytes

    def place(self, tensor: Tensor) -> int:
        """Where in the file `tensor` begins."""
        return tensor.data_ptr() - self.bytes.data_ptr()

    def part(self, start: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The address of a tensor that begins at byte `start`."""
        numel = torch.Size(shape).numel()
        return self.bytes[start : start + numel * dtype.itemsize].view(dtype).view(torch.Size(shape))


class DiskRows:
    """The tensors of one flat buffer on the disk, one after the other, in a file of the promised size, or in two: see
    [Note: two versions]."""

    def __init__(self, name: str, file: DiskFile, resting_bytes: int = 0) -> None:
        """The first `resting_bytes`, whole pages, are parameters that rest there."""
        self.name = name
        self.resting_bytes = resting_bytes
        self._versions = [MappedFile(file)]
        self.at = 0
        """Which of its files has the present values."""
        self._sealed = 0
        """Which has those that an update must leave."""
        self._used = resting_bytes
        self._places: dict[tuple[int, str], tuple[int, int, torch.dtype]] = {}
        self.buffer: Tensor | None = None
        """A copy of the whole file, from `DiskMemory.fetch` to `evict`."""
        self._kept_for: list[threading.Event] = []
        self._num_writes = 0

    @property
    def file(self) -> DiskFile:
        """The file with the present values."""
        return self._versions[self.at].file

    @property
    def files(self) -> list[DiskFile]:
        return [one.file for one in self._versions]

    @property
    def num_bytes(self) -> int:
        """Of each file."""
        return self.file.num_bytes

    def add_version(self, file: DiskFile) -> None:
        """Write what is updated to `file` in every other step, beginning with the next one."""
        self._versions.append(MappedFile(file))

    def turn(self) -> None:
        """All of it is about to be written anew, maybe not for the first time in a step: to the other file than the
        sealed one, if there are two."""
        self.at = (self._sealed + 1) % len(self._versions)
        self._num_writes += 1

    def seal(self) -> None:
        """A step is complete: the next one must leave what is there now."""
        self._sealed = self.at

    def remove(self) -> None:
        """Take the names of its files."""
        for file in self.files:
            file.remove()

    def close(self) -> None:
        """Close the files, which deletes them."""
        self.await_readers()
        self.remove()
        for file in self.files:
            file.close()

    def has(self, tensor: Tensor) -> bool:
        """Whether `tensor` is an address in its files."""
        return tensor.numel() > 0 and any(one.has(tensor) for one in self._versions)

    def place(self, tensor: Tensor) -> int:
        """Where in its file `tensor` begins, an address there."""
        return self._of(tensor).place(tensor)

    def part(self, version: int, start: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The address of a tensor that begins at byte `start` of one of its files."""
        return self._versions[version].part(start, shape, dtype)

    def keep_for(self, reader: threading.Event) -> None:
        """Do not write to the file until the event is set: another thread reads it, for a checkpoint."""
        self._kept_for.append(reader)

    def await_readers(self) -> None:
        """Return once the file may be written to."""
        while self._kept_for:
            self._kept_for.pop().wait()

    @property
    def is_kept(self) -> bool:
        return any(not reader.is_set() for reader in self._kept_for)

    @property
    def num_changes(self) -> int:
        """How often the addresses have been written through, by torch's counter."""
        return sum(one.bytes._version for one in self._versions)

    @property
    def version(self) -> tuple[int, int]:
        """Another one after each write to the file between steps, by whichever way."""
        return self._num_writes, self.num_changes

    def read(self, tensor: Tensor, out: Tensor | None = None) -> Tensor:
        """The values that the flat `tensor` stands for, in memory: in `out`, if given, which has its dtype and
        length."""
        found = torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu") if out is None else out
        raw, file = found.view(torch.uint8), self._of(tensor).file
        for start, stop, place in self._pieces(tensor):
            raw[start:stop].copy_(file.get(place, place + stop - start))
        return found

    def write(self, tensor: Tensor, values: Tensor) -> None:
        """Write `values`, flat and of any dtype and device, to the place that `tensor` stands for."""
        self.await_readers()
        self._num_writes += 1
        file = self._of(tensor).file
        for start, stop, place in self._pieces(tensor):
            size = tensor.element_size()
            part = values[start // size : stop // size].to("cpu", tensor.dtype).contiguous()
            file.put(place, part.view(torch.uint8))

    def _of(self, tensor: Tensor) -> MappedFile:
        return next((one for one in self._versions if one.has(tensor)), self._versions[self.at])

    def _pieces(self, tensor: Tensor) -> Iterator[tuple[int, int, int]]:
        """Its bytes in pieces: first, last, and their place in the file. All boundaries but the outer two are at
        pages."""
        place, start = self.place(tensor), 0
        while start < tensor.nbytes:
            stop = min(tensor.nbytes, (place + start) // PIECE_BYTES * PIECE_BYTES + PIECE_BYTES - place)
            yield start, stop, place + start
            start = stop

    @property
    def has_states(self) -> bool:
        """Whether it has anything besides parameters that an update changes."""
        return self.num_bytes > self.resting_bytes

    def param(self, numel: int, dtype: torch.dtype) -> Tensor:
        """The parameters that rest here: in the buffer if there is one, else mapped."""
        return self._here[: numel * dtype.itemsize].view(dtype)

    @property
    def _here(self) -> Tensor:
        return self._versions[self.at].bytes if self.buffer is None else self.buffer

    def master(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Master weights; the first call gives them a place."""
        return self.view(-1, "master", numel, dtype)

    def view(self, index: int, key: str, numel: int, dtype: torch.dtype) -> Tensor:
        """State `key` of parameter `index` (or of all): in the buffer if there is one, else mapped.

        The first call gives it a place. Raises `StateError` if that exceeds the promised size, or if size or dtype
        change.
        """
        found = self._places.get((index, key))
        if found is None:
            start = round_up(self._used, dtype.itemsize)
            if start + numel * dtype.itemsize > self.num_bytes:
                raise StateError(
                    f"{self.name}: {key} is a state that the optimizer did not keep when shard() probed it, "
                    f"and there is no room for it on the disk. Put the states of its parameters on the host: "
                    f"rows.optim.tier: host."
                )
            self._used = start + numel * dtype.itemsize
            found = self._places[index, key] = (start, numel, dtype)
        elif found[1:] != (numel, dtype):
            raise StateError(f"{self.name}: {key} has changed its size or dtype, and on a disk it has {found[1:]}.")
        start, stop = found[0], found[0] + numel * dtype.itemsize
        return self._here[start:stop].view(dtype)
