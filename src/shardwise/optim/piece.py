"""What an optimizer holds instead of a parameter."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwise.errors import StateError
from shardwise.memory import Flat
from shardwise.plan.placement import Box, Slot, Span


@dataclass(frozen=True)
class Piece:
    """This rank's elements `span` of one parameter, as the optimizer sees them: flat, in fp32.

    An optimizer that needs whole parameters (`Update.whole`) sees those in their shapes.
    """

    name: str
    shape: tuple[int, ...]
    span: Span
    tensor: nn.Parameter
    flat: Flat
    index: int

    @property
    def slot(self) -> Slot:
        """Where the parameter lies in `flat`."""
        return self.flat.slots[self.index]

    @property
    def box(self) -> Box | None:
        """The part of the unsplit parameter that `shape` and `span` refer to, if a model axis splits or copies it."""
        return self.slot.box

    @property
    def in_masters(self) -> Span:
        """Its range in the master weights that this rank has of its flat buffer."""
        return span_in_masters(self.flat, self.slot.span)

    def flat_state(self, value: torch.Tensor) -> torch.Tensor:
        """A state of the shape of `tensor`, or this itself, as the flat row that it is a part of."""
        return value if value.dim() == 1 else value.detach().reshape(-1)

    @property
    def param(self) -> nn.Parameter:
        """The model's own parameter."""
        return self.flat.params[self.index]


class PiecesOfFlat(NamedTuple):
    """Some pieces of one flat buffer, and of each what every step asks for: of hundreds of pieces one by one that takes
    longer than to update them."""

    pieces: Sequence[Piece]
    indices: Sequence[int]
    tensors: Sequence[nn.Parameter]
    params: Sequence[nn.Parameter]

    @classmethod
    def of(cls, pieces: Sequence[Piece]) -> PiecesOfFlat:
        indices, tensors = [piece.index for piece in pieces], [piece.tensor for piece in pieces]
        return cls(pieces, indices, tensors, [piece.param for piece in pieces])


class GroupsOfPieces:
    """The parameter groups of one adopted optimizer: during its steps they list this rank's `pieces`, otherwise
    parameters.

    So a loop over `optimizer.param_groups` finds the model's own parameters, as in plain PyTorch.
    """

    def __init__(self, member: torch.optim.Optimizer, pieces: Sequence[Piece]) -> None:
        self.member = member
        self.pieces = tuple(pieces)
        self.updated = tuple(piece for piece in pieces if piece.span.numel)
        """Pieces with any elements on this rank; only these are ever given a gradient."""
        self.updated_by_flat = _by_flat(self.updated)
        self.trained_by_flat = _by_flat([piece for piece in pieces if piece.flat.spec.trainable])
        """The pieces that are trained, with elements here or not."""
        by_param = {piece.param: piece for piece in pieces}
        self.entries = [[by_param.get(param) for param in group["params"]] for group in member.param_groups]
        """Group by group; `None` for parameters that are in no flat buffer."""
        self._group_numbers = {
            piece.tensor: number for number, group in enumerate(self.entries) for piece in group if piece is not None
        }
        self._params: list[list[nn.Parameter]] = [group["params"] for group in member.param_groups]
        self._tensors = [
            [param if piece is None else piece.tensor for param, piece in zip(params, entries, strict=True)]
            for params, entries in zip(self._params, self.entries, strict=True)
        ]
        self._kept = [tuple(params) for params in self._params]
        """What the lists held, because code may change them in place."""
        self.lists_pieces = False

    def settings_of(self, piece: Piece) -> dict[str, Any]:
        """The optimizer's group that lists `piece`."""
        return self.member.param_groups[self._group_numbers[piece.tensor]]

    def list_pieces(self) -> None:
        """Raises `StateError`, and changes nothing, if code has put other parameters into a group."""
        self._require_kept()
        self._list(self._tensors)
        self.lists_pieces = True

    def list_params(self) -> None:
        self._list(self._params)
        self.lists_pieces = False

    @contextmanager
    def listed(self) -> Iterator[None]:
        """Inside, they list pieces, as in a step."""
        if self.lists_pieces:
            yield
            return
        self.list_pieces()
        try:
            yield
        finally:
            self.list_params()

    def _require_kept(self) -> None:
        groups = self.member.param_groups
        if len(groups) != len(self._params):
            raise StateError(
                f"optimizer.param_groups was replaced after shard(): it has {len(groups)} groups, and the engine knows "
                f"{len(self._params)}. Add groups by optimizer.add_param_group()."
            )
        for number, (group, kept) in enumerate(zip(groups, self._kept, strict=True)):
            listed = group["params"]
            if len(listed) != len(kept) or not all(map(operator.is_, listed, kept)):
                raise StateError(
                    f"optimizer.param_groups[{number}]['params'] was changed after shard(): it lists {len(listed)} "
                    f"parameters, and the engine has {len(kept)}, or others, there. To leave parameters alone freeze "
                    f"them, requires_grad_(False), or set their grad to None before the step; add others by "
                    f"optimizer.add_param_group()."
                )

    def _list(self, lists: list[list[nn.Parameter]]) -> None:
        for group, params in zip(self.member.param_groups, lists, strict=True):
            group["params"] = params


def span_in_masters(flat: Flat, span: Span) -> Span:
    """The range of `span`, of the whole buffer, in the master weights that this rank has of it."""
    return span.overlap(flat.optim_span).within(flat.optim_span)


def _by_flat(pieces: Iterable[Piece]) -> dict[Flat, PiecesOfFlat]:
    by_flat: dict[Flat, list[Piece]] = {}
    for piece in pieces:
        by_flat.setdefault(piece.flat, []).append(piece)
    return {flat: PiecesOfFlat.of(own) for flat, own in by_flat.items()}


def homes_of(flats: Sequence[Flat]) -> dict[nn.Parameter, tuple[Flat, int]]:
    """The flat buffer in which each parameter lies, and its index there."""
    return {param: (flat, index) for flat in flats for index, param in enumerate(flat.params)}


def pieces_of(optimizer: torch.optim.Optimizer, flats: Sequence[Flat]) -> list[Piece]:
    """A piece for each parameter of the optimizer, in the order of its groups."""
    homes = homes_of(flats)
    pieces = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param not in homes:  # of an integer dtype: it is in no flat buffer and has no gradient
                continue
            flat, index = homes[param]
            slot = flat.slots[index]
            if flat.spec.trainable:
                tensor, span = flat.master_piece(index)
                tensor = tensor.view(slot.shape) if flat.spec.updates_whole(slot.span) else tensor
            else:  # torch accepts a frozen parameter in a group, and never updates it
                tensor, span = torch.empty(0, device=flat.device), Span(0, 0)
            pieces.append(Piece(slot.name, slot.shape, span, nn.Parameter(tensor), flat, index))
    return pieces
