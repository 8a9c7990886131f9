"""Where computation on cut tensors begins and ends: see [Note: regions] in `generators.py`."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from shardwise.comm import Line
from shardwise.errors import ModelError
from shardwise.tensor.functions import copy_to, gather_from, gather_to, reduce_from, reduce_scatter_from, scatter_to
from shardwise.tensor.generators import Generators

Tensor = torch.Tensor
SEQUENCE_DIM = -2


class Regions:
    """The regions of one model on one rank.

    Column modules that read the same tensor (queries, keys and values) enter together, so that it is gathered once, and
    its gradients are summed once.
    """

    def __init__(self, line: Line, generators: Generators | None = None) -> None:
        """`generators` for a model that draws random numbers in its forward."""
        self.line = line
        self._generators = generators
        self._entered: tuple[weakref.ref[Tensor], int, bool, Tensor] | None = None

    def __deepcopy__(self, memo: object) -> Regions:
        """A rehearsal's: nothing is sent, and nobody's generators are touched."""
        return Regions(self.line.__deepcopy__(memo))

    def enter(self, module: nn.Module, tensor: Tensor, *, on_sequence: bool, is_alone: bool) -> Tensor:
        """What a column module reads; `is_alone`: no row module follows. `on_sequence`: of the input
        this rank has its part of the sequence."""
        known = self._entered
        if known is not None and known[0]() is tensor and known[1:3] == (tensor._version, torch.is_grad_enabled()):
            return known[3]
        if not on_sequence:
            entered = copy_to(tensor, self.line)
        else:
            sizes = [tensor.shape[SEQUENCE_DIM]] * self.line.num_ranks
            entered = gather_to(tensor, self.line, SEQUENCE_DIM, sizes)
        if not is_alone:
            self._entered = weakref.ref(tensor), tensor._version, torch.is_grad_enabled(), entered
            if self._generators is not None and module.training and not on_sequence:  # else they have parted before
                self._generators.part()
        return entered

    def leave(self, partial: Tensor, bias: Tensor | None, *, on_sequence: bool) -> Tensor:
        """What a row module makes of its summand."""
        self._entered = None
        if on_sequence:
            sizes = self._sizes(partial.shape[SEQUENCE_DIM])
            made = reduce_scatter_from(partial, self.line, SEQUENCE_DIM, sizes)
            return made if bias is None else made + copy_to(bias, self.line)
        if self._generators is not None:
            self._generators.join()
        made = reduce_from(partial, self.line)
        return made if bias is None else made + bias

    def cut_sequence(self, tensor: Tensor, *, is_training: bool) -> Tensor:
        """This rank's part of a sequence, before the first block."""
        if self._generators is not None and is_training:
            self._generators.part()
        return scatter_to(tensor, self.line, SEQUENCE_DIM, self._sizes(tensor.shape[SEQUENCE_DIM]))

    def join_sequence(self, tensor: Tensor) -> Tensor:
        """All of it, behind the last."""
        if self._generators is not None:
            self._generators.join()
        return gather_from(tensor, self.line, SEQUENCE_DIM, [tensor.shape[SEQUENCE_DIM]] * self.line.num_ranks)

    @contextmanager
    def drawing(self, *, in_common: bool) -> Iterator[None]:
        """Inside, random numbers are those that all ranks draw, or those of this rank alone."""
        generators = self._generators
        if generators is None or generators.are_own != in_common:
            yield
            return
        first, then = (generators.join, generators.part) if in_common else (generators.part, generators.join)
        first()
        try:
            yield
        finally:
            then()

    def forget(self) -> None:
        """A forward begins: what an exception left open is closed."""
        self._entered = None
        if self._generators is not None:
            self._generators.join()

    def abandon(self) -> None:
        """A block that was computed again is through, and whoever does that puts the generators back."""
        self._entered = None
        if self._generators is not None:
            self._generators.abandon()

    def _sizes(self, length: int) -> list[int]:
        num_ranks = self.line.num_ranks
        if length % num_ranks:
            raise ModelError(
                f"tensor.sequence deals a sequence to {num_ranks} ranks, which do not divide its length {length}. Pad "
                f"batches to a multiple of {num_ranks}, or leave tensor.sequence out of the plan."
            )
        return [length // num_ranks] * num_ranks
