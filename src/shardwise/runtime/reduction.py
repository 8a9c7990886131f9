"""One gradient reduction in flight, and the memory that its collectives take."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.comm import Work
from shardwise.memory import Copy, Flat, FreshGradients
from shardwise.plan.placement import SumOfCodes
from shardwise.program import Action

Tensor = torch.Tensor


def staging_bytes(action: Action, source: Tensor, num_ranks: int, wire: torch.dtype) -> int:
    """Bytes that the collective of `action` over `num_ranks` ranks takes beside input and output: the other ranks'
    chunks, and ours if they are cast to be sent.

    An all-reduce counts one more chunk, so that the figure also covers a sum that is not made in place.
    """
    if action.codes:
        return SumOfCodes.parse(action.verb, action.codes).memory_bytes(source.numel(), num_ranks)
    copies = 1 if source.dtype == wire else 2
    num_chunks = num_ranks - (action.verb != "all_reduce")
    return copies * num_chunks * (source.numel() // num_ranks) * wire.itemsize


class Reduction:
    """A gradient being reduced: the sum so far, and the collective under way."""

    def __init__(self, source: Tensor, flat: Flat, fresh: FreshGradients | None) -> None:
        self.current = source
        self._flat = flat
        self._fresh = fresh
        """The fresh gradients whose memory `current` is, if it is."""
        self._meter = flat.meter
        self._bytes = flat.grads.bytes_beside_grad_buffer(source)
        """The bytes that `current` is counted with."""
        self._next_bytes = 0
        self._meter.hold("working", self._bytes)
        self._next: Tensor | None = None
        self._work: Work | None = None
        self._staging_bytes = 0
        self._is_replaced = False
        """Whether the output takes the place of `current`, byte for byte."""
        self.landing: Copy | None = None
        """The copy of `current` to the host, where its memory is counted."""
        self.num_started = 0

    def chunks(self, num_ranks: int) -> Sequence[Tensor] | None:
        """`current` cut into one chunk per rank, if these views exist already."""
        return self._fresh.chunks(num_ranks) if self._fresh is not None else None

    @property
    def own(self) -> Tensor | None:
        """Where the sum of this rank's chunk is made, if its summand lies there already."""
        return self._fresh.own.memory if self._fresh is not None and self._fresh.own is not None else None

    def start(self, out: Tensor, work: Work, staging_bytes: int) -> None:
        is_in_place = out is self.current
        num_bytes = self._bytes if is_in_place else self._flat.grads.bytes_beside_grad_buffer(out)
        self._is_replaced = is_in_place or (num_bytes == self._bytes and out.numel() == self.current.numel())
        self._meter.hold("working", staging_bytes if self._is_replaced else num_bytes + staging_bytes)
        self._next, self._work, self._staging_bytes = out, work, staging_bytes
        self._next_bytes = num_bytes
        self.num_started += 1

    def leave(self, out: Tensor, landing: Copy) -> None:
        """`landing` is copying `current` to `out`, on the host."""
        self._next = out
        self._work = self.landing = landing
        self._next_bytes = self._flat.grads.bytes_beside_grad_buffer(out)
        self._staging_bytes, self._is_replaced = 0, False
        self.num_started += 1

    def land(self) -> None:
        """Block until the copy to the host is done, if there is one."""
        if self.landing is not None:
            self.landing.land()

    def wait(self) -> None:
        if self._work is None or self._next is None:
            return
        self._work.wait()
        if self._is_replaced:
            self._meter.drop("working", self._staging_bytes)
        else:
            self._meter.drop("working", self._staging_bytes + self._bytes)
            if self._fresh is not None:
                self._flat.grads.take_back(self._fresh)
        self._fresh, self._bytes = None, self._next_bytes
        self.current, self._next, self._work = self._next, None, None

    def finish(self, cast: Tensor) -> None:
        num_bytes = self._flat.grads.bytes_beside_grad_buffer(cast)
        self._meter.hold("working", num_bytes - self._bytes)
        self.current, self._fresh, self._bytes = cast, None, num_bytes
        self.num_started += 1

    def release(self) -> None:
        """Stop counting the bytes of `current`: its taker counts them from here on."""
        if self.landing is None:
            self._meter.drop("working", self._bytes)
