"""Activations and their gradients between neighbouring stages.

[Note: layouts] The receiving rank has to know the size of a message in advance. The first activation for micro-batches
of one kind (the shapes and dtypes of the model's inputs, which all ranks of a pipeline see) is preceded by a message
with its shape and dtype; later ones of the same kind are not. A gradient has the layout of its activation. So in a step
like the previous one no rank waits for a size, and the next message can be received while something else is computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import NamedTuple

import torch

from shardwise.comm import Collectives, Group, Work
from shardwise.errors import ModelError

Tensor = torch.Tensor
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MOST_DIMS = 14


class Layout(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype

    def numbers(self) -> Tensor:
        """Encoded as a message of fixed length."""
        header = [_DTYPES.index(self.dtype), len(self.shape), *self.shape]
        return torch.tensor(header + [0] * (2 + _MOST_DIMS - len(header)), dtype=torch.int64)

    @classmethod
    def of_numbers(cls, numbers: Tensor) -> Layout:
        dtype, num_dims, *shape = numbers.tolist()
        return cls(tuple(shape[:num_dims]), _DTYPES[dtype])


def most_under_way(num_ranks: int) -> int:
    """How many messages of a channel may be in flight at a time, in a pipeline of `num_ranks` ranks."""
    return 2 * num_ranks


class _Incoming(NamedTuple):
    tensor: Tensor
    work: Work


class _Outgoing(NamedTuple):
    tensor: Tensor
    work: Work
    micro_batch: int


class Channel:
    """The link from one stage to a neighbour on another rank, at either end. `kind` names the content of its messages.

    Sends are asynchronous, with at most `most_under_way` messages in flight; each keeps its tensor alive until it is
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
        self._layouts: dict[Hashable, Layout] = {}
        self._in_flight: deque[_Outgoing] = deque()
        self._incoming: dict[int, _Incoming] = {}

    def send_with_layout(self, tensor: Tensor, kind: Hashable, micro_batch: int) -> None:
        """Send `tensor`, preceded by its layout if it is the first of its `kind`; see [Note: layouts]."""
        layout = Layout(tuple(tensor.shape), tensor.dtype)
        known = self._layouts.get(kind)
        if known is None:
            if layout.dtype not in _DTYPES or len(layout.shape) > _MOST_DIMS:
                raise ModelError(
                    f"A pipeline stage outputs {layout.dtype} {list(layout.shape)}, which cannot be sent to another."
                )
            self._layouts[kind] = layout
            self._keep(_Outgoing(tensor, self._host.send(layout.numbers(), self._link, "layout"), micro_batch))
        elif known != layout:
            raise ModelError(
                f"A pipeline stage had outputs of shape {list(known.shape)} for micro-batches like this one, and now "
                f"{list(layout.shape)}. The shape must depend on the shapes of the batch only."
            )
        self.send(tensor, micro_batch)

    def layout(self, kind: Hashable) -> Layout:
        """The layout of messages for micro-batches of this `kind`; waits for it if none has arrived yet."""
        if kind not in self._layouts:
            numbers = torch.zeros(2 + _MOST_DIMS, dtype=torch.int64)
            self._host.receive(numbers, self._link, "layout").wait()
            self._layouts[kind] = Layout.of_numbers(numbers)
        return self._layouts[kind]

    def knows(self, kind: Hashable) -> bool:
        return kind in self._layouts

    def send(self, tensor: Tensor, micro_batch: int) -> None:
        sent = tensor.detach().contiguous().view(-1)
        work = self._collectives.send(sent, self._link, f"{self._kind} {micro_batch}")
        self._keep(_Outgoing(sent, work, micro_batch))

    def expect(self, layout: Layout, micro_batch: int) -> None:
        """Begin to receive in the background; `receive` returns the result."""
        if micro_batch not in self._incoming:
            shape, dtype = layout
            tensor = torch.empty(shape, dtype=dtype, device=self._device)
            work = self._collectives.receive(tensor.view(-1), self._link, f"{self._kind} {micro_batch}")
            self._incoming[micro_batch] = _Incoming(tensor, work)

    def receive(self, layout: Layout, micro_batch: int) -> Tensor:
        self.expect(layout, micro_batch)
        tensor, work = self._incoming.pop(micro_batch)
        work.wait()
        return tensor

    def was_answered(self, micro_batch: int) -> None:
        """The receiver has answered the message of `micro_batch`, so it and those before it need not be kept alive."""
        while any(outgoing.micro_batch == micro_batch for outgoing in self._in_flight):
            self._in_flight.popleft().work.wait()

    def settle(self) -> None:
        """Return when all messages have been sent."""
        while self._in_flight:
            self._in_flight.popleft().work.wait()

    def abandon(self) -> None:
        """Drop the messages in flight, after an error."""
        self._in_flight.clear()
        self._incoming.clear()

    def _keep(self, outgoing: _Outgoing) -> None:
        """Waiting for old messages does not delay this rank, because the receiver is at most a few messages behind."""
        self._in_flight.append(outgoing)
        while len(self._in_flight) > self._max_in_flight:
            self._in_flight.popleft().work.wait()
