"""What the ranks along the tensor-parallel axis tell each other: sums and concatenations of activations."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.comm import Collectives, Group
from shardwise.telemetry import Ledger

Tensor = torch.Tensor
SUBJECT = "activations"


class Line:
    """The ranks that share one sample along the axis `tp`. All of them call, in one order; everything blocks.

    Tensors may have any shape, strides and length; results are contiguous, and the same to the bit on all ranks where
    they are the same tensor.
    """

    __slots__ = ("_collectives", "_ledger", "group")

    def __init__(self, collectives: Collectives | None, group: Group, ledger: Ledger | None = None) -> None:
        """Without `collectives` nothing is sent, and only shapes mean something: for rehearsals. A `ledger` then counts
        what would be."""
        self._collectives = collectives
        self._ledger = ledger
        self.group = group

    def __deepcopy__(self, memo: object) -> Line:
        """A copy of a model is a rehearsal's: a sharded model itself cannot be copied."""
        return Line(None, self.group, self._ledger)

    @property
    def size(self) -> int:
        return len(self.group.ranks)

    @property
    def place(self) -> int:
        """This rank's, counted from 0."""
        return self.group.index

    def told(self, message: bytes) -> list[bytes]:
        """Every rank's `message`, by place."""
        if self._collectives is None:
            return [message] * self.size
        return self._collectives.exchange(message, self.group, SUBJECT)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of the ranks' `tensor`, in its dtype."""
        numel = tensor.numel()
        padded = -(-numel // self.size) * self.size
        if padded == numel:
            source = tensor.detach().contiguous().view(-1)
        else:
            source = tensor.new_zeros(padded)
            source[:numel].copy_(tensor.detach().reshape(-1))
        out = torch.empty_like(source)
        if self._collectives is not None:
            self._collectives.all_reduce(out, source, self.group, source.dtype, SUBJECT).wait()
        self._note("all_reduce", 2 * source.nbytes // self.size)
        return out[:numel].view(tensor.shape)

    def concatenate(self, tensor: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        """The ranks' `tensor` side by side along `dim`, where each has its own of `sizes`."""
        longest = max(sizes)
        first = tensor.detach().movedim(dim, 0)
        full = tensor.new_empty(self.size, longest, *first.shape[1:])
        own = full[self.place]
        own[: first.shape[0]].copy_(first)
        own[first.shape[0] :].zero_()
        if self._collectives is not None:
            self._collectives.all_gather(full.view(-1), self.group, SUBJECT).wait()
        self._note("gather", full.nbytes // self.size)
        parts = [full[place, :size] for place, size in enumerate(sizes)]
        whole = full.flatten(0, 1) if min(sizes) == longest else torch.cat(parts)
        return whole.movedim(0, dim).contiguous()

    def sum_part(self, tensor: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        """Of the sum of the ranks' `tensor` this rank's part along `dim`, where each gets its own of `sizes`."""
        longest = max(sizes)
        parts = tensor.detach().movedim(dim, 0).split_with_sizes(list(sizes))
        source = tensor.new_zeros(self.size, longest, *parts[0].shape[1:])
        for place, part in enumerate(parts):
            source[place, : part.shape[0]].copy_(part)
        out = torch.empty_like(source[0]).view(-1)
        if self._collectives is not None:
            self._collectives.reduce_scatter(out, source.view(-1), self.group, out.dtype, SUBJECT).wait()
        self._note("reduce_scatter", out.nbytes)
        own = out.view(longest, *parts[0].shape[1:])[: sizes[self.place]]
        return own.movedim(0, dim).contiguous()

    def largest(self, tensor: Tensor) -> Tensor:
        """Of each element the largest that any rank has."""
        every = self.concatenate(tensor.reshape(1, -1), 0, [1] * self.size)
        return every.amax(0).view(tensor.shape)

    def _note(self, verb: str, chunk_bytes: int) -> None:
        """Count a message of so many bytes to each other rank, where nobody else does."""
        if self._collectives is None and self._ledger is not None:
            self._ledger.sent(verb, self.group.axis, (self.size - 1) * chunk_bytes)
