"""Keeps the images of one rank's state: updated in place by the optimizer, and copied during the next step, to another
host too where needed."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint import encode
from shardwise.comm import LinkError
from shardwise.elastic.copies import Copies, Outgoing
from shardwise.elastic.image_space import NoSpaceError
from shardwise.elastic.stage_buffers import BEGUN, BEGUN_AT, COMMITTED, StageBuffers
from shardwise.elastic.state_image import (
    AT,
    BLOCK,
    PARAM,
    SUMS,
    TORN,
    Cell,
    Image,
    ImagePlace,
    Plot,
    RestingCodes,
    RowsOnDisk,
    write_mark,
)
from shardwise.errors import TierError
from shardwise.memory import DiskRows, Flat
from shardwise.optim import AdoptedOptimizer, Piece
from shardwise.optim.quantize import Coded

Tensor = torch.Tensor
NUMBERS = "#numbers"
"""The cell of states that are not tensors, as JSON: `{name: {key: value}}`."""
_NO_SPACE = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT)
_HEAD_OF_SUMS, _SIZE_OF_SUM = 32, 40
"""Bytes of JSON: a version, and for each sum its number, quotes and commas."""
_NUMBERS_GROWTH = 2
"""Their cell has this many times their present size."""


class Survival:
    """The images of what one rank holds in one layout. `close()` it.

    Without a folder in `place`, no other rank needs this rank's state, and its image serves only to undo a step. With
    `copies`, each step is also copied to another host. `is_lone`: another rank, with another part of the model,
    may be the one that reads it. `is_verified`: the image has checksums of the state, if they are known.

    [Note: a part that nobody else has] After a step, the shadow is copied behind the next one, at another pace on each
    rank. Until then, a lost rank's state after the step is its live region, with the parameters as others have them.
    Where no other rank has them, they must be in the live region too, or the ranks would have no step in common: the
    others may have given up the step before.

    [Note: buffers in images] `buffers` are those of pipeline stages, if the model has any: in the live region as of the
    step, and as of the beginning of the next iteration, since loops change some between the two (see [Note: when
    buffers change] in `stage_buffers.py`). So the copy begins there, and not with the end of the step.
    """

    def __init__(
        self,
        flats: Sequence[Flat],
        optimizer: AdoptedOptimizer | None,
        place: ImagePlace,
        copies: Copies | None = None,
        *,
        is_lone: bool = False,
        buffers: StageBuffers | None = None,
        is_verified: bool = False,
    ) -> None:
        self._is_verified = is_verified
        self._flats = [flat for flat in flats if is_lone or flat.spec.trainable or flat.spec.table.param.shard]
        self._has_all = len(self._flats) == len(flats)
        self._optimizer = optimizer
        self.rows = _rows_on_disk(self._flats)
        """What of it lies on a disk, in the order of `Directory.rows`."""
        self.place = place
        self.copies = copies
        self._num_images = 0
        self._is_sending = False
        """Whether copies to other hosts have been started and not waited for: the same on all ranks."""
        self._outside_live: list[tuple[Tensor, Cell]] = []
        """Changing tensors that are not in the live region, with their cells."""
        self._shadows: list[Tensor] = []
        """Those cells in the shadow: to make such views takes longer than to copy small tensors."""
        self._numbers: tuple[Cell, Image] | None = None
        self._num_states = 0
        self._former: Image | None = None
        self.buffers = buffers
        self._buffers_in: dict[str, Tensor] = {}
        """What the image was made for. See [Note: buffers in images]."""
        self._cells_of_buffers: list[Cell] = []
        """The mark is the last one."""
        self._to_follow: int | None = None
        """The version of which the copy begins with the next iteration."""
        self.image = self._make()
        # last: without space for the image, nobody would end its thread
        self._copier = _Background(place.name)

    @property
    def images(self) -> list[Image]:
        """The images that may contain a whole state."""
        return [self.image] if self._former is None else [self._former, self.image]

    def begin(self, version: int, *, has_begun: bool = False, is_edited: bool = False) -> None:
        """The state of `version` is complete: copy it now. With copies on other hosts all ranks call, and return when
        those are complete; raises `CommError`. `has_begun`: the iteration after it, whose buffers these are.
        `is_edited`: what no step changes may be another as well, and a checkpoint has brought states where there were
        none."""
        self._to_follow = None
        has_other_still = is_edited and any(cell.is_still for cell in self.image.directory.cells)
        if self._has_other_buffers() or has_other_still or self._has_new_states():
            self._renew_image()
            self._write_numbers()
        self._write_files(self.image)
        self._write_buffers(COMMITTED)
        if has_begun:
            self._write_begun(version)
        self.image.live_version = version
        self._copy(version)
        if self.copies is not None:
            self._start(partial(self.copies.bring, version, self._outgoing()))
            self.await_copies()
        self._let_former_go()

    def before_change(self) -> None:
        """An update begins. Blocks until the state before it has been copied, here and to other hosts."""
        self._follow_what_waits()
        self.await_copies()
        self.image.live_version = TORN

    def complete(self, version: int, sums: Mapping[tuple[str, str], int] | None = None) -> None:
        """The update is done on this rank; `sums` are the checksums of what is at rest, by name and kind of cell."""
        self.await_copies()
        if self._has_new_states() or self._has_other_buffers():
            self._renew_image()
        if sums:
            self.image.write_sums(version, sums)
        self._write_image(version)

    def _write_image(self, version: int) -> None:
        self._write_numbers()
        self._write_files(self.image)
        self._write_buffers(COMMITTED)
        self.image.live_version = version

    def at_rest(self, *, is_live: bool) -> dict[tuple[str, str], Tensor]:
        """What of the state is in memory, by a parameter's name and the kind of its cell: as it is, or its copy."""
        cells = [cell for cell in self.image.directory.cells if cell.rows is None and (cell.is_live or not is_live)]
        found = {(cell.name, cell.kind): (self.image.live if is_live else self.image.shadow)(cell) for cell in cells}
        outside = {(cell.name, cell.kind): tensor for tensor, cell in self._outside_live}
        return found | outside if is_live else found

    @property
    def image_bytes(self) -> int:
        """Memory of this rank's images: states updated in place, which would be elsewhere otherwise, and a copy."""
        return sum(one.directory.num_bytes for one in self.images)

    @property
    def kept_bytes(self) -> int:
        """Memory of the copies that this rank keeps for ranks of other hosts."""
        return self.copies.kept_bytes if self.copies is not None else 0

    @property
    def disk_bytes(self) -> int:
        """What both take on the disk: the second version of each file, and copies of others."""
        former = sum(rows.num_bytes for rows in self.rows if len(rows.files) > 1)
        return former + (self.copies.kept_bytes_on_disk if self.copies is not None else 0)

    def follow(self, version: int) -> None:
        """The update is done on all ranks: start copying it, to run during the next step. With buffers, see
        `iteration_begins`."""
        if self.buffers is None:
            self._start_following(version)
        else:
            self._to_follow = version

    def iteration_begins(self, version: int) -> None:
        """An iteration begins with the state of `version`: see [Note: buffers in images]."""
        if self.buffers is None:
            return
        if self._has_other_buffers():
            self._renew_image()
            self._write_image(version)
        self._write_begun(version)
        self._follow_what_waits()

    @property
    def waits_for_space(self) -> bool:
        """Whether the image is where no other rank can read it, though others would need it."""
        return self.place.folder is not None and self.image.path is None

    def move_image(self) -> None:
        """Move an image that waits for space to its folder. Not in a step. Raises `NoSpaceError`."""
        self._copier.wait()
        self.image = self._placed(self.image.moved_to, self.image.directory.num_bytes)
        self._outside_live, self._shadows = [], []
        self._move_in(self.image, self._states())

    def _follow_what_waits(self) -> None:
        version, self._to_follow = self._to_follow, None
        if version is not None:
            self._start_following(version)

    def _start_following(self, version: int) -> None:
        self._start(partial(self._follow, version, self._outgoing() if self.copies is not None else None))

    def await_copies(self) -> None:
        """Return once nothing is being copied. With copies on other hosts all ranks call; raises `CommError`."""
        is_sending, self._is_sending = self._is_sending, False
        try:
            if is_sending and self.copies is not None:
                self.copies.await_together(self._copier)
            else:
                self._copier.wait()
        except TierError:
            self.give_up()
            raise

    def end_copies(self) -> None:
        """Return once nothing is being copied, after a fault: what was being sent to other hosts may be lost."""
        self._is_sending, self._to_follow = False, None
        self._copier.end()

    def bring(self, version: int) -> None:
        """Make the shadow hold the state of `version`, which one of the regions has."""
        self.end_copies()
        if self._former is not None and version not in self.image.versions:
            self.image.remove()
            self.image, self._former = self._former, None
        if self.image.shadow_version != version:
            self._copy(version)

    def give_up(self) -> None:
        """The disk of this rank has failed. Who tried to read what is there would fail too, so where another host has
        a copy, that is read instead."""
        if self.rows and self.copies is not None and self.copies.is_kept_elsewhere:
            for image in self.images:
                image.tear()

    def close(self, *, removes: bool = True) -> None:
        self._copier.close()
        if not removes:
            return
        for image in self.images:
            image.remove()
        for rows in self.rows:
            rows.remove()
        if self.copies is not None:
            self.copies.remove()

    # -- the file -----------------------------------------------------------------------------------------

    def _renew_image(self) -> None:
        """One with other cells. The last one that was copied stays until this one is."""
        superseded, self._outside_live, self._shadows = self.image, [], []
        self.image = self._make()
        if self._former is None:
            self._former = superseded
        else:
            superseded.remove()

    def _make(self) -> Image:
        """A new image of the whole state; the optimizer updates its live cells from now on."""
        plot = Plot()
        if self.rows:
            plot.add(AT, AT, torch.zeros(len(self.rows), dtype=torch.uint8, device="cpu"), is_live=True, is_piece=False)
        for rows in self.rows:
            plot.add_rows(RowsOnDisk(rows.name, tuple(str(file.path) for file in rows.files), rows.num_bytes))
        for flat in self._flats:
            if flat.rows is not None:
                for name, kind, tensor in _cells_of(flat):
                    plot.add_in_rows(name, kind, tensor, self.rows.index(flat.rows), flat.rows.place(tensor))
            elif flat.spec.trainable:
                plot.add_block(*_block_of(flat), is_live=self._is_movable(flat))
                for cell in _common_cells_of(flat):
                    plot.add(*cell, is_live=False)
            else:
                for cell in _cells_of(flat):
                    plot.add_still(*cell, _codes_of(flat))
        states = list(self._states())
        for piece, key, value in states:
            if (own := piece.flat.on_disk(value)) is not None:
                plot.add_in_rows(piece.name, key, value, self.rows.index(own), own.place(value))
                continue
            is_piece = value.shape == piece.tensor.shape and piece.span.numel > 0
            codes = self._coded(piece).get(key)
            plot.add(piece.name, key, value, is_live=True, is_piece=is_piece, codes=codes)
        numbers = self._numbers_now()
        if numbers:
            plot.add(
                NUMBERS,
                NUMBERS,
                torch.zeros(len(numbers) * _NUMBERS_GROWTH, dtype=torch.uint8, device="cpu"),
                is_live=True,
            )
        if self._is_verified:
            known = [*chain.from_iterable(map(_cells_of, self._flats)), *((one.name, key, _) for one, key, _ in states)]
            num_bytes = _HEAD_OF_SUMS + sum(_SIZE_OF_SUM + 2 * len(name) + len(kind) for name, kind, _ in known)
            plot.add(SUMS, SUMS, torch.zeros(num_bytes, dtype=torch.uint8, device="cpu"), is_live=True, is_piece=False)
        if self.buffers is not None:
            self._buffers_in = self.buffers.now()
            for kind in (COMMITTED, BEGUN):
                for name, buffer in self._buffers_in.items():
                    plot.add(name, kind, buffer, is_live=True, is_piece=False)
            mark = torch.zeros(2, dtype=torch.int64, device="cpu")
            plot.add(BEGUN_AT, BEGUN_AT, mark, is_live=True, is_piece=False)
        directory = replace(plot.directory(), is_all=self._has_all)
        self._num_images += 1
        try:
            image = self._placed(partial(Image.create, directory=directory), directory.num_bytes)
        except NoSpaceError:
            if directory.num_bytes > self.place.waiting_bytes:
                raise
            image = Image.create(None, directory)
        self._move_in(image, states)
        return image

    def _placed(self, make: Callable[[Path | None], Image], num_bytes: int) -> Image:
        """What `make` makes of the newest image's path. Raises `NoSpaceError`."""
        path = self.place.path(self._num_images - 1)
        try:
            return make(path)
        except OSError as error:
            if path is None or error.errno not in _NO_SPACE:
                raise
            path.unlink(missing_ok=True)
            raise NoSpaceError(path.parent, num_bytes) from error

    def _move_in(self, image: Image, states: Sequence[tuple[Piece, str, Tensor]]) -> None:
        cells = {(cell.name, cell.kind): cell for cell in image.directory.cells}
        for flat in self._flats:
            if flat.rows is not None:
                continue
            outside = _common_cells_of(flat)
            if self._is_movable(flat):
                self._move_flat(flat, image, cells)
            else:
                outside = [*_cells_of(flat), *outside]
            for name, kind, tensor in outside:
                cell = cells[name, kind]
                shadow = image.shadow(cell)
                shadow.copy_(tensor)
                if not cell.is_still:
                    self._outside_live.append((tensor, cell))
                    self._shadows.append(shadow)
        for piece, key, value in states:
            if piece.flat.on_disk(value) is not None:
                continue
            view = image.live(cells[piece.name, key])
            view.copy_(value)
            self._raw(piece)[key] = view
        self._num_states = len(states)
        self._cells_of_buffers = [one for one in cells.values() if one.kind in (COMMITTED, BEGUN, BEGUN_AT)]
        numbers = cells.get((NUMBERS, NUMBERS))
        self._numbers = (numbers, image) if numbers is not None else None
        self._write_files(image)

    def _move_flat(self, flat: Flat, image: Image, cells: dict[tuple[str, str], Cell]) -> None:
        """Move the master weights of `flat`, and the pieces that the optimizer updates, into the live region."""
        assert flat.master is not None
        block = image.live(cells[flat.name, BLOCK])
        if flat.spec.master_is_param and flat.spec.resident:
            flat.rest_in(block)
        elif flat.spec.master_is_param:
            mine = flat.optim_span.within(flat.param_span)
            block.copy_(flat.param)
            flat.param = block
            flat.master = block[mine.as_slice]
        else:
            block.copy_(flat.master)
            flat.master = block
        for piece in self._optimizer.pieces if self._optimizer is not None else ():
            if piece.flat is flat:
                piece.tensor.data = flat.master_piece(piece.index)[0].view(piece.tensor.shape)

    def _is_movable(self, flat: Flat) -> bool:
        """Whether what the optimizer updates is in memory of this process alone, from which nothing is sent."""
        if not flat.spec.trainable or not flat.spec.master_is_param:
            return flat.spec.trainable
        is_sent = flat.spec.resident and not flat.spec.is_lone
        return not is_sent and flat.shared is None

    # -- states -------------------------------------------------------------------------------------------

    def _raw(self, piece: Piece) -> dict[str, Any]:
        assert self._optimizer is not None
        return self._optimizer.raw_state_of(piece)

    def _coded(self, piece: Piece) -> Mapping[str, Coded]:
        assert self._optimizer is not None
        return self._optimizer.coded_keys_of(piece)

    def _states(self) -> list[tuple[Piece, str, Tensor]]:
        pieces = self._optimizer.pieces if self._optimizer is not None else []
        return [
            (piece, key, value)
            for piece in pieces
            for key, value in self._raw(piece).items()
            if isinstance(value, Tensor)
        ]

    def _has_new_states(self) -> bool:
        """Whether the optimizer has made states that are not in the image; it makes them when first needed."""
        (first, last), optimizer = self.image.extent, self._optimizer
        num_states = 0
        for piece in optimizer.pieces if optimizer is not None else ():
            for value in optimizer.raw_state_of(piece).values() if optimizer is not None else ():
                if isinstance(value, Tensor):
                    num_states += 1
                    if not first <= value.data_ptr() < last and piece.flat.on_disk(value) is None:
                        return True
        return num_states != self._num_states

    def _numbers_now(self) -> bytes:
        pieces = self._optimizer.pieces if self._optimizer is not None else []
        numbers: dict[str, dict[str, Any]] = {}
        for piece in pieces:
            for key, value in self._raw(piece).items():
                if not isinstance(value, Tensor):
                    numbers.setdefault(piece.name, {})[key] = encode(value, key)
        return json.dumps(numbers).encode() if numbers else b""

    def _write_numbers(self) -> None:
        if self._numbers is None:
            return
        cell, image = self._numbers
        text = self._numbers_now()
        view = image.live(cell)
        view.zero_()
        view[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def _write_files(self, image: Image) -> None:
        """Note in which files the rows on a disk have the present state, which the next update leaves there."""
        for rows in self.rows:
            rows.seal()
        if self.rows:
            image.files(is_live=True).copy_(
                torch.tensor([rows.at for rows in self.rows], dtype=torch.uint8, device="cpu")
            )

    # -- buffers of stages --------------------------------------------------------------------------------

    def _has_other_buffers(self) -> bool:
        """Whether there are others than the image was made for, or some have another shape or dtype."""
        if self.buffers is None:
            return False
        return _forms(self.buffers.now()) != _forms(self._buffers_in)

    def _write_buffers(self, kind: str, *, is_live: bool = True) -> None:
        if self.buffers is None:
            return
        values, view = self.buffers.now(), self.image.live if is_live else self.image.shadow
        for cell in self._cells_of_buffers:
            if cell.kind == kind:
                view(cell).copy_(values[cell.name])

    def _write_begun(self, version: int) -> None:
        """If this rank is killed meanwhile, the mark is of no step, and the buffers as of the step count. Where no copy
        follows, because there is one already, they are written there too."""
        if self.buffers is None:
            return
        is_copied = self._to_follow is None and self.image.shadow_version == version
        for is_live in (True, False) if is_copied else (True,):
            mark = (self.image.live if is_live else self.image.shadow)(self._cells_of_buffers[-1])
            write_mark(mark, 0, TORN)
            self._write_buffers(BEGUN, is_live=is_live)
            write_mark(mark, 0, version)

    # -- copying ------------------------------------------------------------------------------------------

    def _follow(self, version: int, outgoing: Outgoing | None) -> None:
        """See [Note: whose copy first] in `copies.py`."""
        if self.copies is not None and outgoing is not None:
            self.copies.bring(version, outgoing)
        self._copy(version)
        self._let_former_go()

    def _start(self, job: Callable[[], None]) -> None:
        self._copier.start(job)
        self._is_sending = self.copies is not None

    def _outgoing(self) -> Outgoing:
        """The present state, which does not change until the next update."""
        image, directory = self.image, self.image.directory
        segments = [(cell.offset, tensor.detach().reshape(-1).view(torch.uint8)) for tensor, cell in self._outside_live]
        segments.append((0, image.region(is_live=True)))
        segments.append((directory.changing_bytes, image.region(is_live=False)[directory.changing_bytes :]))
        segments = sorted((one for one in segments if len(one[1])), key=lambda one: one[0])
        return Outgoing(self._num_images, directory, segments, [rows.file for rows in self.rows])

    def _copy(self, version: int) -> None:
        image = self.image
        image.shadow_version = TORN
        image.copy_live()
        if self._outside_live:  # all in one call, which leaves the interpreter to the computation
            torch._foreach_copy_(self._shadows, [tensor for tensor, _ in self._outside_live])
        image.shadow_version = version

    def _let_former_go(self) -> None:
        former, self._former = self._former, None
        if former is not None:
            former.remove()


class _Background:
    """A thread that runs one job at a time, in the background of the computation."""

    def __init__(self, name: str) -> None:
        self._job: Callable[[], None] | None = None
        self._asked, self._done = threading.Event(), threading.Event()
        self._done.set()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"shardwise image {name}", daemon=True)
        self._is_over = False
        self._thread.start()

    def start(self, job: Callable[[], None]) -> None:
        self.wait()
        self._job = job
        self._done.clear()
        self._asked.set()

    def wait(self) -> None:
        """Return once the job is done; raises what it raised."""
        self._done.wait()
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        """Return once no job is running, after a fault that may have interrupted it."""
        self._done.wait()
        if self._error is not None and not isinstance(self._error, LinkError):
            raise self._error

    def close(self) -> None:
        self._done.wait()
        self._is_over = True
        self._asked.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._asked.wait()
            self._asked.clear()
            if self._is_over:
                return
            assert self._job is not None
            try:
                self._job()
            except BaseException as error:  # raised by `wait`, in the thread that calls it
                self._error = error
            finally:
                self._job = None
                self._done.set()


def _forms(buffers: Mapping[str, Tensor]) -> list[tuple[str, torch.Size, torch.dtype]]:
    return [(name, buffer.shape, buffer.dtype) for name, buffer in buffers.items()]


def _block_of(flat: Flat) -> tuple[str, Tensor, list[tuple[str, str, Tensor]]]:
    """Name and tensor that are copied at once, and the cells inside it."""
    whole = flat.param if not flat.spec.trainable or flat.spec.master_is_param else flat.require_master()
    return flat.name, whole, _cells_of(flat)


def _rows_on_disk(flats: Sequence[Flat]) -> list[DiskRows]:
    """Those of `flats`. From here on an update leaves what they were before it."""
    found = []
    for flat in flats:
        if flat.rows is not None and flat.disk is not None:
            if flat.spec.updates_from_disk:
                flat.disk.keep_former(flat.rows)
            found.append(flat.rows)
    return found


def _cells_of(flat: Flat) -> list[tuple[str, str, Tensor]]:
    pieces = ((slot.name, flat.param_piece(index)) for index, slot in enumerate(flat.slots))
    if (coded := flat.coded) is not None:
        return [(name, PARAM, coded.codes_of(piece)) for name, piece in pieces if piece.numel()]
    return [(name, PARAM, piece) for name, piece in pieces if piece.numel()]


def _codes_of(flat: Flat) -> RestingCodes | None:
    codes = flat.spec.table.rests_as
    return None if codes is None else RestingCodes(codes.dtype, codes.block, flat.spec.table.param.dtype)


def _common_cells_of(flat: Flat) -> list[tuple[str, str, Tensor]]:
    """What islands have in common, which the optimizer does not update, but their outer steps do."""
    return [
        (slot.name, key, row)
        for index, slot in enumerate(flat.slots)
        for key, row in flat.outer_pieces(index).items()
        if row.numel()
    ]
