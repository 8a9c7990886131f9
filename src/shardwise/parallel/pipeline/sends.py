"""Activations and their gradients between neighbouring stages.

[Note: layouts] The receiving rank has to know the size of a message in advance. The first activations for micro-batches
of one kind (the shapes and dtypes of the model's inputs, which all ranks of a pipeline see) are preceded by a message
with their layout; later ones of the same kind are not. A gradient has the layout of its activation. So in a step like
the previous one no rank waits for a size, and the next messages can be received while something else is computed. Where
values of a batch decide on shapes (see [Note: sizes of values] in `dependence.py`) the first layout says so, and each
message is preceded by its own.

Between ranks of one host a message is copied once, and its sender never waits for a block of shared memory, as gathers
and sums do: a stage is meant to be ahead of the next, and 5 ms of patience for each message would be its bubble.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch

from shardwise.comm import Collectives, Group, Work
from shardwise.errors import ModelError
from shardwise.parallel.pipeline.stage_messages import BY_SHAPES, Layout, StageMessage, StageMessageLayout

Tensor = torch.Tensor


def most_under_way(num_ranks: int) -> int:
    """How many messages of a channel may be in flight at a time, in a pipeline of `num_ranks` ranks."""
    return 2 * num_ranks


class _Incoming(NamedTuple):
    tensors: list[Tensor]
    works: list[Work]


class _Outgoing(NamedTuple):
    tensor: Tensor
    work: Work
    micro_batch: int


class Channel:
    """The link from one stage to a neighbour on another rank, at either end. `kind` names the content of its messages.

    Sends are asynchronous, for at most `most_under_way` micro-batches at a time; each keeps its tensor until it is
    sent.
    """

    def __init__(
        self,
        link: Group,
        kind: str,
        collectives: Collectives,
        host: Collectives,
        device: torch.device,
        most_under_way: int,
    ) -> None:
        """`collectives` send tensors of `device`, and `host` sends their layouts."""
        self._link = link
        self._kind = kind
        self._collectives = collectives
        self._host = host
        self._device = device
        self._max_in_flight = most_under_way
        self._layouts: dict[Hashable, StageMessageLayout] = {}
        self._in_flight: deque[_Outgoing] = deque()
        self._incoming: dict[int, _Incoming] = {}

    def send_with_layout(
        self, tensors: Sequence[Tensor], layout: StageMessageLayout, kind: Hashable, micro_batch: int
    ) -> None:
        """Send `tensors`, preceded by their layout if they are the first of their `kind`, or it varies; see [Note:
        layouts]."""
        known = self._layouts.get(kind)
        if known is None or known.varies:
            self._layouts[kind] = layout
            self._send_layout(layout, micro_batch)
        elif known != layout:
            if _shown(known) == _shown(layout) and _needs(known) != _needs(layout):
                raise ModelError(
                    "The outputs of a pipeline stage need gradients now and did not before, or the other way round: "
                    "parameters were frozen or unfrozen in the middle of training. Do it before shard(), and resume "
                    "from a checkpoint."
                )
            raise ModelError(
                f"A pipeline stage had outputs of {_shown(known)} for micro-batches like this one, and now of "
                f"{_shown(layout)}. {BY_SHAPES}"
            )
        self.send(tensors, micro_batch)

    def layout(self, kind: Hashable) -> StageMessageLayout:
        """The layout of the next message, for a micro-batch of this `kind`; waits for it if it is not known."""
        known = self.known(kind)
        if known is None:
            known = self._layouts[kind] = self._receive_layout()
        return known

    def known(self, kind: Hashable) -> StageMessageLayout | None:
        """The layout of all messages of this `kind`, if one has been sent or has arrived, and it does not vary."""
        found = self._layouts.get(kind)
        return None if found is None or found.varies else found

    def send_once(self, tensors: Sequence[Tensor], layout: StageMessageLayout) -> None:
        """Send `tensors`, preceded by their layout, which is not remembered: for shapes that change with each call."""
        self._send_layout(layout, 0)
        self.send(tensors, 0)

    def receive_once(self) -> StageMessage:
        """What `send_once` sent."""
        layout = self._receive_layout()
        return StageMessage(self.receive(layout.tensors, 0), layout)

    def send(self, tensors: Sequence[Tensor], micro_batch: int) -> None:
        for tensor in tensors:
            sent = sendable(tensor.detach().contiguous().view(-1))
            if sent.numel():
                work = self._collectives.send(sent, self._link, f"{self._kind} {micro_batch}")
                self._keep(_Outgoing(sent, work, micro_batch))

    def expect(self, layouts: Sequence[Layout], micro_batch: int) -> None:
        """Begin to receive in the background; `receive` returns the result."""
        if micro_batch not in self._incoming:
            tensors = [torch.empty(one.shape, dtype=one.dtype, device=self._device) for one in layouts]
            works = [
                self._collectives.receive(sendable(tensor.view(-1)), self._link, f"{self._kind} {micro_batch}")
                for tensor in tensors
                if tensor.numel()
            ]
            self._incoming[micro_batch] = _Incoming(tensors, works)

    def receive(self, layouts: Sequence[Layout], micro_batch: int) -> list[Tensor]:
        self.expect(layouts, micro_batch)
        tensors, works = self._incoming.pop(micro_batch)
        for work in works:
            work.wait()
        return tensors

    def was_answered(self, micro_batch: int) -> None:
        """The receiver has answered the message of `micro_batch`, so it and those before it need not be kept alive."""
        under_way = [outgoing.micro_batch for outgoing in self._in_flight]
        while micro_batch in under_way:
            del under_way[0]
            self._in_flight.popleft().work.wait()

    def wait_for_sends(self) -> None:
        """Return when all messages have been sent."""
        while self._in_flight:
            self._in_flight.popleft().work.wait()

    def abandon(self) -> None:
        """Drop the messages in flight, after an error."""
        self._in_flight.clear()
        self._incoming.clear()

    def _send_layout(self, layout: StageMessageLayout, micro_batch: int) -> None:
        message = torch.frombuffer(bytearray(layout.encoded()), dtype=torch.uint8)
        size = torch.tensor([message.numel()], dtype=torch.int64, device="cpu")
        for tensor in (size, message):
            self._keep(_Outgoing(tensor, self._host.send(tensor, self._link, "layout"), micro_batch))

    def _receive_layout(self) -> StageMessageLayout:
        size = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._host.receive(size, self._link, "layout").wait()
        message = torch.zeros(int(size), dtype=torch.uint8, device="cpu")
        self._host.receive(message, self._link, "layout").wait()
        return StageMessageLayout.of_encoded(message.numpy().tobytes())

    def _keep(self, outgoing: _Outgoing) -> None:
        """Waiting for old messages does not delay this rank, because the receiver is at most a few micro-batches
        behind."""
        self._in_flight.append(outgoing)
        while len({one.micro_batch for one in self._in_flight}) > self._max_in_flight:
            self._in_flight.popleft().work.wait()


def sendable(flat: Tensor) -> Tensor:
    """The bytes of integers and booleans, which not every transport can send as such."""
    return flat if flat.is_floating_point() else flat.view(torch.uint8)


def _needs(layout: StageMessageLayout) -> list[bool]:
    return [one.has_grad for one in layout.tensors]


def _shown(layout: StageMessageLayout) -> str:
    """Such as `shape [2, 6, 32]`."""
    shapes = " and ".join(str(list(one.shape)) for one in layout.tensors)
    return f"shape {shapes}"
