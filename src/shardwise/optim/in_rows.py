"""Pieces of an optimizer, and their states, in rows on a disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardwise.memory import Flat
from shardwise.optim.piece import Piece

Tensor = torch.Tensor


class PiecesInRows:
    """Points the pieces of one or several optimizers to the rows of their flat buffers: on the disk, or during an
    update in host memory."""

    def __init__(self, pieces: Sequence[Piece], member_of: Mapping[torch.nn.Parameter, torch.optim.Optimizer]) -> None:
        self._pieces = pieces
        self._member_of = member_of

    def fetch(self, flat: Flat) -> None:
        """Read what one flat buffer has on a disk into host memory, and point its pieces and states there, until
        everything is on the disk again."""
        assert flat.disk is not None
        assert flat.rows is not None
        flat.disk.fetch(flat.rows)
        flat.find_rows()
        for piece in self._of(flat):
            self.find(piece)

    def evict(self, flat: Flat) -> None:
        """Start to write it back, with the states that an optimizer has created or replaced."""
        pieces = self._of(flat)
        for piece in pieces:
            self.find(piece, moves=True)
        assert flat.disk is not None
        assert flat.rows is not None

        def leave_buffer() -> None:
            flat.land()
            flat.find_rows()

        flat.disk.evict(flat.rows, leave_buffer)
        for piece in pieces:
            self.find(piece)

    def step_one_by_one(self, pieces: Sequence[Piece], step: Callable[[], None]) -> None:
        """Step one piece at a time. A first step creates states in memory of their own, which are then moved to the
        rows: those of one piece at a time instead of a whole unit."""
        grads = [piece.tensor.grad for piece in pieces]
        for piece in pieces:
            piece.tensor.grad = None
        for piece, grad in zip(pieces, grads, strict=True):
            if grad is not None:
                piece.tensor.grad = grad
                step()
                piece.tensor.grad = None
                self.find(piece, moves=True)

    def find_all(self) -> None:
        """Point all pieces and their states to the current place of the rows."""
        for piece in self._pieces:
            self.find(piece)

    def find(self, piece: Piece, *, moves: bool = False) -> None:
        """Point one piece and its states there; with `moves` copy what is not there yet."""
        flat, rows = piece.flat, piece.flat.rows
        if rows is None or not piece.span.numel or not flat.spec.updates_from_disk:
            return
        piece.tensor.data = flat.master_in_rows()[piece.in_masters.as_slice]
        kept: dict[Tensor, dict[str, Any]] = self._member_of[piece.tensor].state
        state = dict.get(kept, piece.tensor) or {}
        for key, value in list(state.items()):
            if isinstance(value, Tensor) and value.dim() and value.shape == piece.tensor.shape:
                there = rows.view(piece.index, key, value.numel(), value.dtype)
                if moves and there.data_ptr() != value.data_ptr():
                    flat.put(there, value)
                state[key] = there

    def _of(self, flat: Flat) -> list[Piece]:
        return [piece for piece in self._pieces if piece.flat is flat and piece.span.numel]
