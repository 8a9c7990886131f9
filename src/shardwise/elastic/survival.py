"""Keeps the images of one rank's state: updated in place by the optimizer, and copied behind the next step."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint import encode
from shardwise.elastic.images import BLOCK, PARAM, TORN, Cell, Image, Plot
from shardwise.optim import AdoptedOptimizer, Piece
from shardwise.storage import Flat

Tensor = torch.Tensor
NUMBERS = "#numbers"
"""A cell with states that are no tensors, as JSON: `{name: {key: value}}`."""
_ROOM = 2
"""So many times what numbers take now is kept for them."""


class Survival:
    """The images of what one rank holds by one layout. `close()` it.

    `folder` is where the file is to lie; without one nobody else needs what this rank holds, and its image serves only
    to go back by. `name` is the file's, which others look for.
    """

    def __init__(
        self, flats: Sequence[Flat], optimizer: AdoptedOptimizer | None, folder: Path | None, name: str
    ) -> None:
        self._flats = [flat for flat in flats if flat.spec.trainable or flat.spec.table.param.shard]
        self._optimizer = optimizer
        self._folder, self._name = folder, name
        self._num_images = 0
        self._behind = _Behind(name)
        self._beside: list[tuple[Tensor, Tensor]] = []
        """What is not live, and where the shadow has it."""
        self._numbers: tuple[Cell, Image] | None = None
        self._num_states = 0
        self._former: Image | None = None
        self.image = self._make()

    @property
    def images(self) -> list[Image]:
        """Those in which a whole state may be."""
        return [self.image] if self._former is None else [self._former, self.image]

    def begin(self, step: int) -> None:
        """All of the state of `step` is here: take it down at once."""
        self.image.live_step = step
        self._copy(step)
        self._let_former_go()

    def before_change(self) -> None:
        """An update begins. Blocks until the shadow has the state before it."""
        self._behind.wait()
        self.image.live_step = TORN

    def complete(self, step: int) -> None:
        """The update is done on this rank."""
        if self._has_new_states():
            self._former, self._beside = self.image, []
            self.image = self._make()
        self._write_numbers()
        self.image.live_step = step

    def follow(self, step: int) -> None:
        """It is done on all ranks: the shadow may follow, beside what comes next."""
        self._behind.start(lambda: self._follow(step))

    def settle(self) -> None:
        """Return once nothing is being copied."""
        self._behind.wait()

    def bring(self, step: int) -> None:
        """Let the shadow have the state of `step`, which either region has."""
        self.settle()
        if self._former is not None and step not in self.image.steps:
            self.image, self._former = self._former, None
        if self.image.shadow_step != step:
            self._copy(step)

    def close(self, *, removes: bool = True) -> None:
        self._behind.close()
        for image in self.images if removes else ():
            image.remove()

    # -- the file -----------------------------------------------------------------------------------------

    def _make(self) -> Image:
        """An image with a cell for all there is, whose live ones are from now on what the optimizer updates."""
        plot = Plot()
        for flat in self._flats:
            plot.add_block(*_block_of(flat), is_live=_is_movable(flat))
        states = list(self._states())
        for piece, key, value in states:
            is_piece = value.shape == piece.tensor.shape and piece.span.numel > 0
            plot.add(piece.name, key, value, is_live=True, is_piece=is_piece)
        numbers = self._numbers_now()
        if numbers:
            plot.add(NUMBERS, NUMBERS, torch.zeros(len(numbers) * _ROOM, dtype=torch.uint8), is_live=True)
        directory = plot.directory()
        path = None
        if self._folder is not None:
            path = self._folder / f"{self._name}-{self._num_images}.image"
            self._num_images += 1
        image = Image.create(path, directory)
        self._move_in(image, states)
        return image

    def _move_in(self, image: Image, states: Sequence[tuple[Piece, str, Tensor]]) -> None:
        cells = {(cell.name, cell.kind): cell for cell in image.directory.cells}
        for flat in self._flats:
            if _is_movable(flat):
                self._move_flat(flat, image, cells)
            else:
                for name, kind, tensor in _cells_of(flat):
                    shadow = image.shadow(cells[name, kind])
                    shadow.copy_(tensor)
                    if flat.spec.trainable:  # frozen ones never change
                        self._beside.append((tensor, shadow))
        for piece, key, value in states:
            place = image.live(cells[piece.name, key])
            place.copy_(value)
            self._raw(piece)[key] = place
        self._num_states = len(states)
        numbers = cells.get((NUMBERS, NUMBERS))
        self._numbers = (numbers, image) if numbers is not None else None

    def _move_flat(self, flat: Flat, image: Image, cells: dict[tuple[str, str], Cell]) -> None:
        """Let the master weights of `flat` lie in the live region, with the pieces that the optimizer updates."""
        assert flat.master is not None
        block = image.live(cells[flat.name, BLOCK])
        if flat.spec.master_is_param:
            mine = flat.optim_span.within(flat.param_span)
            block.copy_(flat.param)
            flat.param = block
            flat.master = block[mine.start : mine.stop]
        else:
            block.copy_(flat.master)
            flat.master = block
        for piece in self._optimizer.pieces if self._optimizer is not None else ():
            if piece.flat is flat:
                piece.tensor.data = flat.master_piece(piece.index)[0]

    # -- states -------------------------------------------------------------------------------------------

    def _raw(self, piece: Piece) -> dict[str, Any]:
        assert self._optimizer is not None
        return self._optimizer.raw_state_of(piece)

    def _states(self) -> list[tuple[Piece, str, Tensor]]:
        pieces = self._optimizer.pieces if self._optimizer is not None else []
        return [
            (piece, key, value)
            for piece in pieces
            for key, value in self._raw(piece).items()
            if isinstance(value, Tensor)
        ]

    def _has_new_states(self) -> bool:
        """Whether there are others than those in the image: an optimizer makes its states when it first needs them."""
        states = self._states()
        first, last = self.image.extent
        return len(states) != self._num_states or any(not first <= one.data_ptr() < last for _, _, one in states)

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
        place = image.live(cell)
        place.zero_()
        place[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    # -- copying ------------------------------------------------------------------------------------------

    def _follow(self, step: int) -> None:
        self._copy(step)
        self._let_former_go()

    def _copy(self, step: int) -> None:
        image = self.image
        image.shadow_step = TORN
        image.copy_live()
        for tensor, shadow in self._beside:
            shadow.copy_(tensor)
        image.shadow_step = step

    def _let_former_go(self) -> None:
        former, self._former = self._former, None
        if former is not None:
            former.remove()


class _Behind:
    """A thread that does one thing at a time, behind the computation."""

    def __init__(self, name: str) -> None:
        self._job: Any = None
        self._asked, self._done = threading.Event(), threading.Event()
        self._done.set()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"shardwise image {name}", daemon=True)
        self._is_over = False
        self._thread.start()

    def start(self, job: Any) -> None:
        self.wait()
        self._job = job
        self._done.clear()
        self._asked.set()

    def wait(self) -> None:
        self._done.wait()
        if self._error is not None:
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
            try:
                self._job()
            except BaseException as error:  # raised by `wait`, in the thread that asks
                self._error = error
            finally:
                self._job = None
                self._done.set()


def _is_movable(flat: Flat) -> bool:
    """Whether what the optimizer updates lies in memory of this process alone, which nothing is sent from."""
    if not flat.spec.trainable:
        return False
    return not flat.spec.master_is_param or not (flat.spec.resident or flat.shared is not None)


def _block_of(flat: Flat) -> tuple[str, Tensor, list[tuple[str, str, Tensor]]]:
    """What is copied at once, and the cells in it."""
    whole = flat.param if not flat.spec.trainable or flat.spec.master_is_param else flat.require_master()
    return flat.name, whole, _cells_of(flat)


def _cells_of(flat: Flat) -> list[tuple[str, str, Tensor]]:
    pieces = ((slot.name, flat.param_piece(index)) for index, slot in enumerate(flat.slots))
    return [(name, PARAM, piece) for name, piece in pieces if piece.numel()]
