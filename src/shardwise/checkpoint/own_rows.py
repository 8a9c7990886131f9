"""The rows that one rank writes of a version of the weights, each to its place in files that all ranks write.

[Note: rows beside the steps] Names, shapes and dtypes of a version are known before any value is, so its files are laid
out first, and each rank writes what it keeps of every parameter, in the dtype of the files, without a message. As in
[Note: late copies] in `snapshot.py`, what the model exposes to its user is copied at once. What only the optimizer's
step changes is copied by the thread that writes it, beside the next forward and backward, and whoever is about to
change it waits for that. Where the folder is memory, writing is this copy. A disk may be slower than a step, so there
all rows are copied first, and each is let go when it is written.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from shardwise.checkpoint.content import Content, Entry
from shardwise.checkpoint.formats.live import Place
from shardwise.checkpoint.snapshot import changed_by_hand, changes_of
from shardwise.checkpoint.write import Copying, leave_refusal, note_path, write_text
from shardwise.errors import CheckpointError
from shardwise.memory import Rows
from shardwise.plan.placement import Box, Run, Span, common_runs
from shardwise.system.devices import RankDevice
from shardwise.system.disk import is_memory, write_at

Tensor = torch.Tensor
BYTES = "bytes"
"""In a rank's note: how many of the version it has written."""


class LostRankError(CheckpointError):
    """What another rank was to write will not come."""


@dataclass(frozen=True)
class Row:
    """Elements of one tensor of a version that this rank writes."""

    name: str
    tensor: Tensor
    """Live and flat."""
    place: Place
    runs: tuple[Run, ...]
    """Start in `tensor`, start in the whole tensor, and number of elements."""
    is_hidden: bool
    """Whether only an optimizer's step, or a call to the engine, changes it: see `Entry`."""
    elsewhere: Rows | None
    """What `tensor` is only an address of, if it is one: rows on a disk, or codes."""

    def values(self) -> Tensor:
        """A copy, flat, on the CPU, in the dtype of the files."""
        tensor = self.tensor if self.elsewhere is None else self.elsewhere.read(self.tensor)
        return tensor.to(device="cpu", dtype=self.place.dtype, copy=True)

    def num_changes(self) -> int:
        """How often it was changed in place, by torch's counter."""
        return changes_of(self.tensor) if self.elsewhere is None else self.elsewhere.num_changes


def rows_of(content: Content, origins: Mapping[str, str], places: Mapping[str, Place]) -> list[Row]:
    """What this rank writes of `content`. `origins` has, by tensor of the version, the model's own that it is."""
    names = {origin: name for name, origin in origins.items()}
    return [
        _row(entry, places[names[entry.name]], is_hidden=entry.is_hidden and content.island is None)
        for entry in content.entries
        if entry.kind in ("param", "buffer") and entry.name in names and entry.written.numel
    ]


def _row(entry: Entry, place: Place, *, is_hidden: bool) -> Row:
    """With islands nothing is hidden: what they have in common changes when their gradients come, between two steps."""
    mine, written = entry.written.within(entry.span), entry.written
    runs = [(written.start, written.start, written.numel)]
    if entry.box is not None:
        whole = Box.whole(entry.box.shape)
        runs = common_runs(entry.box, written, whole, Span(0, whole.numel))
    return Row(
        entry.name,
        entry.tensor.detach().reshape(-1)[mine.as_slice],
        place,
        tuple((start - written.start, there, numel) for start, there, numel in runs),
        is_hidden,
        entry.rows,
    )


class OwnRows:
    """Writes rows into the files of a draft, and leaves a note there; see [Note: rows beside the steps]."""

    def __init__(self, rows: list[Row], file: Path, device: RankDevice) -> None:
        """Copies what may change at any time. `file`, in the draft, is what the note is about: see `note_path`."""
        self._file = file
        self._is_memory = is_memory(file.parent)
        self._copying = Copying(device)
        self._taken = [(row.place, row.runs, row.values()) for row in rows if not row.is_hidden]
        self._late = [(row, row.num_changes()) for row in rows if row.is_hidden]
        self._may_change = threading.Event()
        self._is_abandoned = False
        for rows_elsewhere in {row.elsewhere for row, _ in self._late if row.elsewhere is not None}:
            rows_elsewhere.keep_for(self._may_change)

    def wait_for_copy(self) -> None:
        """Return once the model's memory may change."""
        self._may_change.wait()

    def abandon(self) -> None:
        """Nobody waits for the rest, and the model's memory may change."""
        self._is_abandoned = True
        self._may_change.set()

    def make(self) -> None:
        """Write all rows, then the note, which has the number of bytes, or why they are not there. For a thread of its
        own."""
        try:
            self._write()
        except BaseException as error:
            leave_refusal(self._file, error)
            if isinstance(error, FileNotFoundError):
                raise LostRankError("another rank has failed, and the draft is gone.") from error
            raise
        finally:
            self._late.clear()
            self._taken.clear()
            self._may_change.set()

    def _write(self) -> None:
        num_bytes, handles = 0, dict[str, int]()
        with ExitStack() as stack:
            for place, runs, values in self._copies():
                if place.file not in handles:
                    handles[place.file] = os.open(self._file.with_name(place.file), os.O_WRONLY)
                    stack.callback(partial(os.close, handles[place.file]))
                _put(handles[place.file], place, runs, values)
                num_bytes += values.nbytes
                del values
                if self._is_abandoned:
                    raise CheckpointError("a rank has failed meanwhile.")
            for handle in handles.values():
                os.fsync(handle)
        write_text(note_path(self._file), json.dumps({BYTES: num_bytes}))

    def _copies(self) -> Iterator[tuple[Place, tuple[Run, ...], Tensor]]:
        """Of all rows, each to be let go before the next."""
        with self._copying.under_way():
            for row, _ in self._late:
                copy = row.place, row.runs, row.values()
                if self._is_memory:
                    yield copy
                else:
                    self._taken.append(copy)
                del copy
        for row, count in self._late:
            if row.num_changes() != count:
                raise changed_by_hand(row.name, "publish")
        self._late.clear()
        self._may_change.set()
        while self._taken:
            yield self._taken.pop()


def _put(handle: int, place: Place, runs: tuple[Run, ...], values: Tensor) -> None:
    data, size = memoryview(values.view(torch.uint8).numpy().data), values.element_size()
    for start, there, numel in runs:
        write_at(handle, data[start * size : (start + numel) * size], place.start + there * size)
