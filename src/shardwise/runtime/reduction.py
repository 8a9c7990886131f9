"""A gradient on its way, and what its collectives hold besides."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.comm import Work
from shardwise.program import Action
from shardwise.storage import Copy, Flat, FreshGradients

Tensor = torch.Tensor


def staging_bytes(action: Action, source: Tensor, num_ranks: int, wire: torch.dtype) -> int:
    """What the collective of `action` over so many ranks holds besides: the others' chunks, and ours if they are cast
    to be sent.

    For an all-reduce one more chunk, so that the same figure covers a sum that is not made in place.
    """
    copies = 1 if source.dtype == wire else 2
    num_chunks = num_ranks - (action.verb != "all_reduce")
    return copies * num_chunks * (source.numel() // num_ranks) * wire.itemsize


class Reduction:
    """A gradient on its way: what has been summed so far, and the collective that is under way."""

    def __init__(self, source: Tensor, flat: Flat, fresh: FreshGradients | None) -> None:
        self.current = source
        self._flat = flat
        self._fresh = fresh
        """What `current` is the memory of, as long as it is that of fresh gradients."""
        self._meter = flat.meter
        self._bytes = flat.grads.bytes_beside_grad_buffer(source)
        """What `current` is counted as."""
        self._next_bytes = 0
        self._meter.hold("working", self._bytes)
        self._next: Tensor | None = None
        self._work: Work | None = None
        self._staging_bytes = 0
        self._is_replaced = False
        """Whether what is on its way takes the place of `current`, byte for byte."""
        self.landing: Copy | None = None
        """What has brought `current` to the host, where its memory is counted."""
        self.num_started = 0

    def chunks(self, num_ranks: int) -> Sequence[Tensor] | None:
        """What `current` is for each rank, if that is known without cutting it."""
        return self._fresh.chunks(num_ranks) if self._fresh is not None else None

    def start(self, out: Tensor, work: Work, staging_bytes: int) -> None:
        num_bytes = self._flat.grads.bytes_beside_grad_buffer(out)
        self._is_replaced = out is self.current or (num_bytes == self._bytes and out.numel() == self.current.numel())
        self._meter.hold("working", staging_bytes if self._is_replaced else num_bytes + staging_bytes)
        self._next, self._work, self._staging_bytes = out, work, staging_bytes
        self._next_bytes = num_bytes
        self.num_started += 1

    def leave(self, out: Tensor, landing: Copy) -> None:
        """`out`, on the host, is what comes of it."""
        self._next = out
        self._work = self.landing = landing
        self._next_bytes = self._flat.grads.bytes_beside_grad_buffer(out)
        self._staging_bytes, self._is_replaced = 0, False
        self.num_started += 1

    def land(self) -> None:
        """Block until it is on the host, if that is where it goes."""
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
        """From here on whoever takes `current` counts its bytes."""
        if self.landing is None:
            self._meter.drop("working", self._bytes)
