"""Where computation on split tensors begins and ends: see [Note: regions] in `generators.py`."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.comm import Line
from shardwise.errors import ModelError
from shardwise.parallel.tensor.collective_overlap import (
    DeferredParams,
    OverlappedSum,
    start_in_backward,
    wait_in_backward,
)
from shardwise.parallel.tensor.column_products import (
    PendingCollective,
    RegatheredInput,
    SequencePart,
    autocast_dtype,
    has_own_backward,
    product,
)
from shardwise.parallel.tensor.functions import (
    copy_to,
    gather_from,
    gather_to,
    reduce_from,
    reduce_scatter_from,
    scatter_to,
)
from shardwise.parallel.tensor.generators import Generators
from shardwise.runtime import NotCopied

Tensor = torch.Tensor
SEQUENCE_DIM = -2


@dataclass(frozen=True)
class _Region:
    """An open region, and the module and tensor with which it was entered."""

    module: nn.Module
    tensor: weakref.ref[Tensor]
    version: int
    has_grad: bool
    inputs: Tensor
    """The input of its columns."""
    dtype: torch.dtype | None
    """That of autocast."""
    deferred: dict[nn.Module, DeferredParams]
    part: SequencePart | None
    """This rank's part of `inputs`, which is saved for the backward instead of them."""

    def was_entered_with(self, tensor: Tensor) -> bool:
        """Whether it was entered with `tensor` in its present state, which a tensor of `torch.inference_mode` does not
        tell."""
        if tensor.is_inference():
            return False
        return self.tensor() is tensor and (self.version, self.has_grad) == (tensor._version, torch.is_grad_enabled())


class Regions(NotCopied):
    """The regions of one model on one rank.

    Column modules that read the same tensor (queries, keys and values) share a region, so that it is gathered once and
    its gradients are summed once.
    """

    def __init__(self, line: Line, generators: Generators | None = None) -> None:
        """`generators` are needed if the forward of the model draws random numbers."""
        self.line = line
        self._generators = generators
        self._open: list[_Region] = []
        """The open regions. Adapters open a second one while that of their base module is open."""
        self._alone: _Region | None = None
        self._columns: dict[nn.Module, list[nn.Module]] = {}
        """By the module that enters a region: the columns that share it."""
        self._pending: set[PendingCollective] = set()
        self.keeps_whole = False
        """Whether no sequence is split, whatever `on_sequence` says; see `whole_sequences`."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Regions:
        """The copy is for a rehearsal: it neither communicates nor changes generators."""
        copied = Regions(copy.deepcopy(self.line, memo))
        copied.keeps_whole = self.keeps_whole
        return copied

    def enter(self, module: nn.Module, tensor: Tensor, *, on_sequence: bool, is_alone: bool) -> Tensor:
        """The input of a column module. `is_alone`: no row module follows. `on_sequence`: `tensor` is this rank's part
        of the sequence."""
        on_sequence = on_sequence and not self.keeps_whole
        known = next((one for one in self._open if one.was_entered_with(tensor)), None)
        if known is not None:
            return known.inputs
        sizes = [tensor.shape[SEQUENCE_DIM]] * self.line.num_ranks if on_sequence else []
        deferred: dict[nn.Module, DeferredParams] = {}
        if columns := self._columns_to_defer(module):  # the order matters: see [Note: overlapped sums]
            overlapped = OverlappedSum(self.line, SEQUENCE_DIM if on_sequence else None, sizes, self._pending)
            before = wait_in_backward(tensor, overlapped)
            deferred = {column: DeferredParams(*params) for column, params in columns.items()}
            inputs = start_in_backward(before, overlapped)
        elif on_sequence:
            inputs = gather_to(tensor, self.line, SEQUENCE_DIM, sizes)
        else:
            inputs = copy_to(tensor, self.line)
        whole = RegatheredInput(self.line, SEQUENCE_DIM, sizes, self._pending) if on_sequence else None
        region = _Region(
            module,
            weakref.ref(tensor),
            0 if tensor.is_inference() else tensor._version,
            torch.is_grad_enabled(),
            inputs,
            autocast_dtype(tensor),
            deferred,
            None if whole is None else SequencePart(tensor, whole),
        )
        if is_alone:
            self._alone = region
        else:
            self._open = [one for one in self._open if one.tensor() is not None]
            self._open.append(region)
            # With `on_sequence` the ranks already use their own generators.
            if self._generators is not None and module.training and not on_sequence:
                self._generators.use_own()
        return inputs

    def _columns_to_defer(self, module: nn.Module) -> dict[nn.Module, tuple[Tensor, Tensor | None]]:
        """The columns that share the region of `module`, and whose parameter gradients can be computed after the sum
        has started: the weight of each, and its bias if that is trained."""
        if not self.line.overlaps_compute:
            return {}
        found: dict[nn.Module, tuple[Tensor, Tensor | None]] = {}
        for column in self._columns.get(module, ()):
            weight, bias = column._parameters.get("weight"), column._parameters.get("bias")
            trained = bias if bias is not None and bias.requires_grad else None
            if weight is not None and has_own_backward(weight) and (trained is None or has_own_backward(trained)):
                found[column] = weight, trained
        return found

    def product(self, column: nn.Module, tensor: Tensor, own: dict[str, Tensor], *, is_conv1d: bool) -> Tensor | None:
        """The output of `column` for `tensor`, or `None` if torch's own backward is to be used.

        `own` replaces parameters of the column by name; their gradients cannot be deferred.
        """
        alone, self._alone = self._alone, None
        region = next((one for one in (alone, *self._open) if one is not None and one.inputs is tensor), None)
        if region is None:
            return None
        params = {**column._parameters, **own}
        weight, bias = params["weight"], params.get("bias")
        if weight is None or autocast_dtype(weight) != region.dtype:
            return None
        if not own:
            columns = self._columns.setdefault(region.module, [])
            if column not in columns:
                columns.append(column)
            deferred = region.deferred.pop(column, None)
            if deferred is not None:
                return deferred.product(tensor, bias, region.part, is_conv1d=is_conv1d, dtype=region.dtype)
        # A column that is not known yet already saves the same tensors as later: a recomputation may find it known.
        if not (self.line.overlaps_compute or region.part) or not has_own_backward(weight):
            return None
        return product(tensor, weight, bias, is_conv1d=is_conv1d, dtype=region.dtype, part=region.part)

    def leave(self, partial: Tensor, bias: Tensor | None, *, on_sequence: bool) -> Tensor:
        """The output of a row module, given its partial sum."""
        self._open.clear()
        if on_sequence and not self.keeps_whole:
            sizes = self._sizes(partial.shape[SEQUENCE_DIM])
            made = reduce_scatter_from(partial, self.line, SEQUENCE_DIM, sizes)
            return made if bias is None else made + copy_to(bias, self.line)
        if self._generators is not None:
            self._generators.use_common()
        made = reduce_from(partial, self.line)
        return made if bias is None else made + bias

    def split_sequence(self, tensor: Tensor, *, is_training: bool) -> Tensor:
        """This rank's part of the sequence, before the first block."""
        if self.keeps_whole:
            return tensor
        self.enter_sequence_part(is_training=is_training)
        return scatter_to(tensor, self.line, SEQUENCE_DIM, self._sizes(tensor.shape[SEQUENCE_DIM]))

    def enter_sequence_part(self, *, is_training: bool) -> None:
        """From here on this rank works on its part of the sequence."""
        if self._generators is not None and is_training and not self.keeps_whole:
            self._generators.use_own()

    def gather_sequence(self, tensor: Tensor) -> Tensor:
        """The whole sequence, after the last block."""
        if self.keeps_whole:
            return tensor
        if self._generators is not None:
            self._generators.use_common()
        return gather_from(tensor, self.line, SEQUENCE_DIM, [tensor.shape[SEQUENCE_DIM]] * self.line.num_ranks)

    @contextmanager
    def random_numbers(self, *, are_common: bool) -> Iterator[None]:
        """Inside, random numbers are the same on all ranks, or those of this rank."""
        generators = self._generators
        if generators is None or generators.are_own != are_common:
            yield
            return
        common, own = generators.use_common, generators.use_own
        change, change_back = (common, own) if are_common else (own, common)
        change()
        try:
            yield
        finally:
            change_back()

    def end(self) -> None:
        """A forward, or that of a pipeline stage, has ended: use the common generators again."""
        if self._generators is not None:
            self._generators.use_common()

    def reset(self) -> None:
        """A forward begins: close regions and collectives that an exception has left open."""
        self._open.clear()
        self._alone = None
        for collective in tuple(self._pending):
            collective.discard()
        if self._generators is not None:
            self._generators.use_common()

    def end_recomputation(self) -> None:
        """The recomputation of a block has ended. The checkpointing code restores the generators."""
        self._open.clear()
        if self._generators is not None:
            self._generators.drop_common()

    def _sizes(self, length: int) -> list[int]:
        num_ranks = self.line.num_ranks
        if length % num_ranks:
            raise ModelError(
                f"tensor.sequence splits a sequence over {num_ranks} ranks, but its length is {length}. Pad batches to "
                f"a multiple of {num_ranks}, or leave tensor.sequence out of the plan."
            )
        return [length // num_ranks] * num_ranks
