"""What an optimizer holds in place of a parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from shardwise.placement import Span
from shardwise.storage import Flat


@dataclass(frozen=True)
class Piece:
    """This rank's elements `span` of one parameter, as the optimizer sees them: flat, in fp32."""

    name: str
    shape: tuple[int, ...]
    span: Span
    tensor: nn.Parameter
    flat: Flat
    index: int


def pieces_of(optimizer: torch.optim.Optimizer, flats: Sequence[Flat]) -> list[Piece]:
    """A piece for each parameter of the optimizer, in the order of its groups."""
    homes = {param: (flat, index) for flat in flats for index, param in enumerate(flat.params)}
    pieces = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param not in homes:  # of an integer dtype: it lies in no flat buffer and has no gradient
                continue
            flat, index = homes[param]
            slot = flat.slots[index]
            if flat.spec.trainable:
                tensor, span = flat.master_piece(index)
            else:  # torch lets a frozen parameter stand in a group, and never updates it
                tensor, span = torch.empty(0, device=flat.device), Span(0, 0)
            pieces.append(Piece(slot.name, slot.shape, span, nn.Parameter(tensor), flat, index))
    return pieces
