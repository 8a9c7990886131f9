"""Activations and their gradients between neighbouring stages.

[Note: layouts] A message is as many bytes as its tensor, and the rank that receives it has to know how many. The first
activation for micro-batches of one kind (the shapes and dtypes of what the model is called with, which all ranks of a
pipeline see) is preceded by a message that tells its shape and dtype; those of the same kind that follow are not. A
gradient is like the activation that it is of. So no rank waits for a size in a step like the last, and what comes next
can be received while something else is computed.
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
        """As a message of fixed length."""
        told = [_DTYPES.index(self.dtype), len(self.shape), *self.shape]
        return torch.tensor(told + [0] * (2 + _MOST_DIMS - len(told)), dtype=torch.int64)

    @classmethod
    def of_numbers(cls, numbers: Tensor) -> Layout:
        dtype, num_dims, *shape = numbers.tolist()
        return cls(tuple(shape[:num_dims]), _DTYPES[dtype])


def most_under_way(num_ranks: int) -> int:
    """How many messages of a channel may be on their way at a time, in a pipeline of so many ranks."""
    return 2 * num_ranks


class _Coming(NamedTuple):
    tensor: Tensor
    work: Work


class Channel:
    """The way from one stage to a neighbour on another rank, at either end. `kind` is what travels, in a word.

    What is sent is on its way while the caller goes on; `most_under_way` messages at a time, each of which keeps its
    tensor until then.
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
        """`collectives` move tensors of `device`, `host` what tells their layouts."""
        self._link = link
        self._kind = kind
        self._collectives = collectives
        self._host = host
        self._device = device
        self._most = most_under_way
        self._layouts: dict[Hashable, Layout] = {}
        self._under_way: deque[tuple[Work, Tensor]] = deque()
        self._coming: dict[int, _Coming] = {}

    def tell_and_send(self, tensor: Tensor, kind: Hashable, micro_batch: int) -> None:
        """Send what another micro-batch of this `kind` may have been the first to tell of; see [Note: layouts]."""
        layout = Layout(tuple(tensor.shape), tensor.dtype)
        known = self._layouts.get(kind)
        if known is None:
            if layout.dtype not in _DTYPES or len(layout.shape) > _MOST_DIMS:
                raise ModelError(
                    f"A pipeline stage hands over {layout.dtype} {list(layout.shape)}, which none can take."
                )
            self._layouts[kind] = layout
            self._keep(self._host.send(layout.numbers(), self._link, "layout"), tensor)
        elif known != layout:
            raise ModelError(
                f"A pipeline stage handed over {list(known.shape)} for micro-batches like this one, and now "
                f"{list(layout.shape)}. Its shape has to follow from the shapes of the batch."
            )
        self.send(tensor, micro_batch)

    def layout(self, kind: Hashable) -> Layout:
        """What comes for micro-batches of this `kind`; waits to be told of the first."""
        if kind not in self._layouts:
            numbers = torch.zeros(2 + _MOST_DIMS, dtype=torch.int64)
            self._host.receive(numbers, self._link, "layout").wait()
            self._layouts[kind] = Layout.of_numbers(numbers)
        return self._layouts[kind]

    def knows(self, kind: Hashable) -> bool:
        return kind in self._layouts

    def send(self, tensor: Tensor, micro_batch: int) -> None:
        sent = tensor.detach().contiguous().view(-1)
        self._keep(self._collectives.send(sent, self._link, f"{self._kind} {micro_batch}"), sent)

    def expect(self, layout: Layout, micro_batch: int) -> None:
        """Begin to receive, beside whatever is computed until `receive` asks."""
        if micro_batch not in self._coming:
            shape, dtype = layout
            tensor = torch.empty(shape, dtype=dtype, device=self._device)
            work = self._collectives.receive(tensor.view(-1), self._link, f"{self._kind} {micro_batch}")
            self._coming[micro_batch] = _Coming(tensor, work)

    def receive(self, layout: Layout, micro_batch: int) -> Tensor:
        self.expect(layout, micro_batch)
        tensor, work = self._coming.pop(micro_batch)
        work.wait()
        return tensor

    def settle(self) -> None:
        """Return when everything that was sent has left."""
        while self._under_way:
            self._under_way.popleft()[0].wait()

    def abandon(self) -> None:
        """Something raised: what is on its way is nobody's any more."""
        self._under_way.clear()
        self._coming.clear()

    def _keep(self, work: Work, tensor: Tensor) -> None:
        """The receiver is never more than a few messages behind, so to wait for old ones does not hold anybody up."""
        self._under_way.append((work, tensor))
        while len(self._under_way) > self._most:
            self._under_way.popleft()[0].wait()
