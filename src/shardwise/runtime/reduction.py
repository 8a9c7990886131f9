"""A gradient on its way, and what its collectives hold besides."""

from __future__ import annotations

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
        self._meter.hold("working", flat.grads.bytes_beside_grad_buffer(source))
        self._next: Tensor | None = None
        self._work: Work | None = None
        self._staging_bytes = 0
        self._is_replaced = False
        """Whether what is on its way takes the place of `current`, byte for byte."""
        self.landing: Copy | None = None
        """What has brought `current` to the host, where its memory is counted."""
        self.num_started = 0

    def start(self, out: Tensor, work: Work, staging_bytes: int) -> None:
        beside = self._flat.grads.bytes_beside_grad_buffer
        is_alike = (out.numel(), beside(out)) == (self.current.numel(), beside(self.current))
        self._is_replaced = out is self.current or is_alike
        if not self._is_replaced:
            self._meter.hold("working", beside(out))
        self._meter.hold("working", staging_bytes)
        self._next, self._work, self._staging_bytes = out, work, staging_bytes
        self.num_started += 1

    def leave(self, out: Tensor, landing: Copy) -> None:
        """`out`, on the host, is what comes of it."""
        self._next = out
        self._work = self.landing = landing
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
        self._meter.drop("working", self._staging_bytes)
        if not self._is_replaced:
            self._meter.drop("working", self._flat.grads.bytes_beside_grad_buffer(self.current))
            if self._fresh is not None:
                self._flat.grads.take_back(self._fresh)
        self._fresh = None
        self.current, self._next, self._work = self._next, None, None

    def finish(self, cast: Tensor) -> None:
        beside = self._flat.grads.bytes_beside_grad_buffer
        self._meter.hold("working", beside(cast) - beside(self.current))
        self.current, self._fresh = cast, None
        self.num_started += 1

    def release(self) -> None:
        """From here on whoever takes `current` counts its bytes."""
        if self.landing is None:
            self._meter.drop("working", self._flat.grads.bytes_beside_grad_buffer(self.current))
