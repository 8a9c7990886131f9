"""The steps of adopted optimizers: pieces are given gradients, unit by unit or all at once, and lose them again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from shardwise.memory import Flat
from shardwise.optim import host_step
from shardwise.optim.by_units import StepsByUnits
from shardwise.optim.host_adam import HostAdam
from shardwise.optim.in_rows import PiecesInRows
from shardwise.optim.piece import GroupsOfPieces, Piece
from shardwise.optim.rank_peers import RankPeers


class Updates:
    """Runs the steps of several optimizers, one of which steps at a time. `close()` it."""

    def __init__(
        self, groups: Mapping[torch.optim.Optimizer, GroupsOfPieces], rows: PiecesInRows, peers: RankPeers
    ) -> None:
        self._groups = groups
        self._rows = rows
        self._peers = peers
        self._host_adam = HostAdam()
        self._by_units = {member: StepsByUnits(member) for member in groups}
        self._stepping = next(iter(groups))

    def begin(self, member: torch.optim.Optimizer) -> None:
        """`member` has been asked for a step, and may take it."""
        self._stepping = member

    def update_flat(self, flat: Flat) -> None:
        """Let it update the pieces of one flat buffer, before its own step: see [Note: steps by units]."""
        member = self._stepping
        pieces = [piece for piece in self._groups[member].updated if piece.flat is flat]
        with self._groups[member].listed(), self._peers.for_unit():
            try:
                if _offer(pieces):
                    flat.land()
                    self._update(member, flat, pieces)
            finally:
                for piece in pieces:
                    piece.tensor.grad = None

    def _update(self, member: torch.optim.Optimizer, flat: Flat, pieces: Sequence[Piece]) -> None:
        if host_step.takes(member, pieces):
            host_step.step(member, pieces, self._host_adam, host_step.outgoing_of(flat, pieces))
        elif flat.spec.updates_from_disk and any(not dict.get(member.state, one.tensor) for one in pieces):
            self._rows.step_one_by_one(pieces, self._by_units[member].step)
        else:
            self._by_units[member].step()

    def offer_gradients(self, member: torch.optim.Optimizer) -> None:
        """Give each piece its gradient, or `None` if no rank has one or it was updated already, so that the optimizer
        skips it."""
        groups = self._groups[member]
        together = [piece for piece in groups.updated if not piece.flat.spec.updates_by_unit]
        _offer(together)
        for flat in {piece.flat for piece in together}:
            if flat.spec.updates_below:
                flat.land()
        groups.list_pieces()
        self._by_units[member].hand_over()

    def offer_nothing(self, member: torch.optim.Optimizer) -> None:
        """Let a step of `member` find no gradient at all."""
        self._groups[member].list_pieces()

    def withdraw_gradients(self) -> None:
        """The step is over, or has raised: pieces have no gradients any more, and groups list parameters."""
        for member, groups in self._groups.items():
            self._by_units[member].end()
            if groups.lists_pieces:
                for piece in groups.updated:
                    piece.tensor.grad = None
                groups.list_params()

    def count_writes(self, member: torch.optim.Optimizer) -> None:
        """Let torch refuse a backward through a forward of before this step, as where an optimizer writes to parameters
        in place."""
        written = [
            piece.flat.params[piece.index]
            for piece in self._groups[member].pieces
            if piece.flat.spec.trainable and piece.flat.grads.touched_anywhere[piece.index]
        ]
        torch.autograd.graph.increment_version(written)

    def close(self) -> None:
        self._host_adam.close()


def _offer(pieces: Sequence[Piece]) -> bool:
    """Give pieces the gradients that are due. Returns whether any has one."""
    touched: dict[Flat, list[Piece]] = {}
    for piece in pieces:
        if piece.flat.grads.touched_anywhere[piece.index]:
            touched.setdefault(piece.flat, []).append(piece)
        else:
            piece.tensor.grad = None
    for flat, own in touched.items():
        for piece, due in zip(own, flat.grads.due_pieces([piece.index for piece in own]), strict=True):
            tensor = piece.tensor
            tensor.grad = due if due is None or tensor.dim() == 1 else due.view(tensor.shape)
    return bool(touched)
