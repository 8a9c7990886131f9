"""The steps of adopted optimizers: pieces are given gradients, unit by unit or all at once, and lose them again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress

import torch

from shardwise.memory import Flat
from shardwise.optim import host_step
from shardwise.optim.by_units import StepsByUnits
from shardwise.optim.host_adam import HostAdam
from shardwise.optim.in_rows import PiecesInRows
from shardwise.optim.piece import GroupsOfPieces, Piece, PiecesOfFlat
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
        own = self._groups[member].updated_by_flat.get(flat)
        if own is None:
            return
        with self._groups[member].listed(), self._peers.for_unit():
            try:
                if _offer(flat, own):
                    flat.land()
                    self._update(member, flat, own.pieces)
            finally:
                for tensor in own.tensors:
                    tensor.grad = None

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
        for flat, own in groups.updated_by_flat.items():
            if not flat.spec.updates_by_unit:
                _offer(flat, own)
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
                for own in groups.updated_by_flat.values():
                    for tensor in own.tensors:
                        tensor.grad = None
                groups.list_params()

    def count_writes(self, member: torch.optim.Optimizer) -> None:
        """Let torch refuse a backward through a forward of before this step, as where an optimizer writes to parameters
        in place."""
        written: list[torch.Tensor] = []
        for flat, own in self._groups[member].trained_by_flat.items():
            written += compress(own.params, map(flat.grads.touched_anywhere.__getitem__, own.indices))
        torch.autograd.graph.increment_version(written)

    def close(self) -> None:
        self._host_adam.close()


def _offer(flat: Flat, own: PiecesOfFlat) -> bool:
    """Give pieces of one flat buffer the gradients that are due. Returns whether any has one."""
    touched = list(compress(own.indices, map(flat.grads.touched_anywhere.__getitem__, own.indices)))
    dues = dict(zip(touched, flat.grads.due_pieces(touched), strict=True)) if touched else {}
    for tensor, due in zip(own.tensors, map(dues.get, own.indices), strict=True):
        tensor.grad = due if due is None or tensor.dim() == 1 else due.view(tensor.shape)
    return bool(touched)
