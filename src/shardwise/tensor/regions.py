"""Where computation on cut tensors begins and ends: see [Note: regions] in `generators.py`."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from shardwise.comm import Line
from shardwise.errors import ModelError
from shardwise.tensor.beside import LaterParams, SumBeside, awaited, sent
from shardwise.tensor.functions import copy_to, gather_from, gather_to, reduce_from, reduce_scatter_from, scatter_to
from shardwise.tensor.generators import Generators
from shardwise.tensor.products import GatheredAgain, Part, UnderWay, autocast_dtype, has_own_backward, product

Tensor = torch.Tensor
SEQUENCE_DIM = -2


@dataclass(frozen=True)
class _Entered:
    """A region that is open, and what opened it."""

    module: nn.Module
    tensor: weakref.ref[Tensor]
    version: int
    has_grad: bool
    made: Tensor
    dtype: torch.dtype | None
    """Autocast's."""
    later: dict[nn.Module, LaterParams]
    part: Part | None
    """What is saved for the backward in the place of `made`, where this rank has a part of it."""

    def is_of(self, tensor: Tensor) -> bool:
        """Whether it was opened with `tensor` as it is now."""
        return self.tensor() is tensor and (self.version, self.has_grad) == (tensor._version, torch.is_grad_enabled())


class Regions:
    """The regions of one model on one rank.

    Column modules that read the same tensor (queries, keys and values) enter together, so that it is gathered once, and
    its gradients are summed once.
    """

    def __init__(self, line: Line, generators: Generators | None = None) -> None:
        """`generators` for a model that draws random numbers in its forward."""
        self.line = line
        self._generators = generators
        self._entered: list[_Entered] = []
        """Those that are open; adapters beside a module open one of their own while that of the module goes on."""
        self._alone: _Entered | None = None
        self._together: dict[nn.Module, list[nn.Module]] = {}
        """By the module that enters a region: the columns that read what it has entered with."""
        self._under_way: set[UnderWay] = set()

    def __deepcopy__(self, memo: object) -> Regions:
        """A rehearsal's: nothing is sent, and nobody's generators are touched."""
        return Regions(self.line.__deepcopy__(memo))

    def enter(self, module: nn.Module, tensor: Tensor, *, on_sequence: bool, is_alone: bool) -> Tensor:
        """What a column module reads; `is_alone`: no row module follows. `on_sequence`: of the input
        this rank has its part of the sequence."""
        known = next((one for one in self._entered if one.is_of(tensor)), None)
        if known is not None:
            return known.made
        sizes = [tensor.shape[SEQUENCE_DIM]] * self.line.num_ranks if on_sequence else []
        later: dict[nn.Module, LaterParams] = {}
        if columns := self._columns_for_later(module):  # in this order: see [Note: sums beside products]
            beside = SumBeside(self.line, SEQUENCE_DIM if on_sequence else None, sizes, self._under_way)
            before = awaited(tensor, beside)
            later = {column: LaterParams(*params) for column, params in columns.items()}
            made = sent(before, beside)
        elif on_sequence:
            made = gather_to(tensor, self.line, SEQUENCE_DIM, sizes)
        else:
            made = copy_to(tensor, self.line)
        again = GatheredAgain(self.line, SEQUENCE_DIM, sizes, self._under_way) if on_sequence else None
        entered = _Entered(
            module,
            weakref.ref(tensor),
            tensor._version,
            torch.is_grad_enabled(),
            made,
            autocast_dtype(tensor),
            later,
            None if again is None else Part(tensor, again),
        )
        if is_alone:
            self._alone = entered
        else:
            self._entered = [one for one in self._entered if one.tensor() is not None]
            self._entered.append(entered)
            if self._generators is not None and module.training and not on_sequence:  # else they have parted before
                self._generators.part()
        return made

    def _columns_for_later(self, module: nn.Module) -> dict[nn.Module, tuple[Tensor, Tensor | None]]:
        """The columns that read what `module` enters with, of which gradients can be made behind the sum: of these the
        weight, and the bias if it is trained."""
        if not self.line.runs_beside:
            return {}
        found: dict[nn.Module, tuple[Tensor, Tensor | None]] = {}
        for column in self._together.get(module, ()):
            weight, bias = column._parameters.get("weight"), column._parameters.get("bias")
            trained = bias if bias is not None and bias.requires_grad else None
            if weight is not None and has_own_backward(weight) and (trained is None or has_own_backward(trained)):
                found[column] = weight, trained
        return found

    def product(self, column: nn.Module, tensor: Tensor, own: dict[str, Tensor], *, is_conv1d: bool) -> Tensor | None:
        """What `column` computes of `tensor`, where its backward differs from torch's; `None` where it does not.

        `own` has what stands in the place of its parameters, the gradients of which cannot be left for later.
        """
        alone, self._alone = self._alone, None
        entered = next((one for one in (alone, *self._entered) if one is not None and one.made is tensor), None)
        if entered is None:
            return None
        params = {**column._parameters, **own}
        weight, bias = params["weight"], params.get("bias")
        if weight is None or autocast_dtype(weight) != entered.dtype:
            return None
        if not own:
            together = self._together.setdefault(entered.module, [])
            if column not in together:
                together.append(column)
            later = entered.later.pop(column, None)
            if later is not None:
                return later.product(tensor, bias, entered.part, is_conv1d=is_conv1d, dtype=entered.dtype)
        # A column that is not known yet saves what it will save: it may be computed again when it is known.
        if not (self.line.runs_beside or entered.part) or not has_own_backward(weight):
            return None
        return product(tensor, weight, bias, is_conv1d=is_conv1d, dtype=entered.dtype, part=entered.part)

    def leave(self, partial: Tensor, bias: Tensor | None, *, on_sequence: bool) -> Tensor:
        """What a row module makes of its summand."""
        self._entered.clear()
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
        self.begin_part(is_training=is_training)
        return scatter_to(tensor, self.line, SEQUENCE_DIM, self._sizes(tensor.shape[SEQUENCE_DIM]))

    def begin_part(self, *, is_training: bool) -> None:
        """From here on this rank works on its part of the sequence."""
        if self._generators is not None and is_training:
            self._generators.part()

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

    def end(self) -> None:
        """A forward is over, or a pipeline stage's share of one: draw what all ranks draw again."""
        if self._generators is not None:
            self._generators.join()

    def forget(self) -> None:
        """A forward begins: what an exception left open is closed."""
        self._entered.clear()
        self._alone = None
        for beside in tuple(self._under_way):
            beside.give_up()
        if self._generators is not None:
            self._generators.join()

    def abandon(self) -> None:
        """A block that was computed again is through, and whoever does that puts the generators back."""
        self._entered.clear()
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
