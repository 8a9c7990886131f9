"""Where computation on cut tensors begins and ends: between a column module and the row module that follows it.

[Note: regions] Outside of regions all ranks of a line compute the same on the same, or, with `sequence_parallel`, each
on its part of the sequence. Inside each works on its own features. A region begins in a column module and ends in a row
module; between the two a rank draws random numbers of its own, so that dropout takes other elements on other ranks, and
outside all draw the same. The generator for the inside is seeded from the common one, which moves on by one draw, so
that recomputing a region (activation checkpointing) draws the same again.
"""

from __future__ import annotations

import torch
from torch import nn

from shardwise.tensor.functions import copy_to, reduce_from
from shardwise.tensor.line import Line

Tensor = torch.Tensor
SEQUENCE_DIM = -2


class Regions:
    """The regions of one model on one rank."""

    def __init__(self, line: Line, *, sequence_parallel: bool = False, draws: bool = False) -> None:
        """`draws`: the model draws random numbers in its forward (dropout), so that generators matter."""
        self.line = line
        self.sequence_parallel = sequence_parallel
        self.draws = draws
        self._common: Tensor | None = None
        """The state of the common generator, while a region is open."""

    def enter(self, module: nn.Module, tensor: Tensor, *, gathers: bool) -> Tensor:
        """What a column module reads; it ends in itself if it `gathers` its output."""
        if not gathers:
            self._open(module)
        return copy_to(tensor, self.line)

    def leave(self, module: nn.Module, partial: Tensor, bias: Tensor | None) -> Tensor:
        """What a row module makes of its summand."""
        self._close(module)
        made = reduce_from(partial, self.line)
        return made if bias is None else made + bias

    def embedded(self, partial: Tensor) -> Tensor:
        """What a vocabulary-parallel embedding makes of its summand."""
        return reduce_from(partial, self.line)

    def forget(self) -> None:
        """A forward begins: a region that an exception left open is closed."""
        if self._common is not None:
            self._close(None)

    def _open(self, module: nn.Module) -> None:
        if not self.draws or self._common is not None or not module.training:
            return
        seed = int(torch.randint(2**31, ()))
        self._common = torch.get_rng_state()
        torch.default_generator.manual_seed(seed + 7_919 * (self.line.place + 1))

    def _close(self, module: nn.Module | None) -> None:  # noqa: ARG002
        if self._common is not None:
            torch.set_rng_state(self._common)
            self._common = None
