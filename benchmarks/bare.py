"""The floor of `overhead`: ZeRO-3 for one model, with everything known beforehand and nothing looked at.

No program, no look-ahead, no other table, precision or model; no padding, no journal, no counting of bytes or messages,
no fault found. What is left is what PyTorch asks of any engine that works through its hooks, one call for each thing.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.echo import EchoTransport

TAG = 0


class Bare:
    """A block whose parameters are whole while it computes, on rank 0 of `num_ranks`. Its output is one tensor."""

    def __init__(self, block: nn.Module, num_ranks: int, transport: EchoTransport) -> None:
        params = list(block.parameters())
        self._transport = transport
        self._others = range(1, num_ranks)
        self._full = torch.cat([param.detach().view(-1) for param in params])
        self._fresh = torch.empty_like(self._full)
        self._chunks, self._summands = self._full.chunk(num_ranks), self._fresh.chunk(num_ranks)
        self._storages = self._full.untyped_storage(), self._fresh.untyped_storage()
        self._num_bytes = self._full.nbytes
        self._scale = torch.tensor(1 / num_ranks, dtype=self._full.dtype)
        self._num_params, self._num_arrived = len(params), 0
        self.shard = nn.Parameter(self._chunks[0].clone())
        """What this rank keeps, and updates."""
        sizes = [param.numel() for param in params]
        wholes = torch.split_with_sizes(self._full, sizes)
        places = torch.split_with_sizes(self._fresh, sizes)
        for param, whole, place in zip(params, wholes, places, strict=True):
            param.data = whole.view(param.shape)
            self._watch(param, place.view(param.shape))
        for storage in self._storages:
            storage.resize_(0)
        block.register_forward_pre_hook(self._before_forward)
        block.register_forward_hook(self._after_forward)

    def _before_forward(self, _: nn.Module, args: object) -> None:  # noqa: ARG002
        self._gather()

    def _after_forward(self, _: nn.Module, args: object, output: Tensor) -> None:  # noqa: ARG002
        self._storages[0].resize_(0)
        assert output.grad_fn is not None
        output.grad_fn.register_prehook(self._before_backward)

    def _before_backward(self, _: object) -> None:
        self._gather()
        self._storages[1].resize_(self._num_bytes)

    def _watch(self, param: nn.Parameter, place: Tensor) -> None:
        def arrived(param: Tensor) -> None:
            assert param.grad is not None
            torch.mul(param.grad, self._scale, out=place)
            param.grad = None
            self._num_arrived += 1
            if self._num_arrived == self._num_params:
                self._reduce()

        param.register_post_accumulate_grad_hook(arrived)

    def _gather(self) -> None:
        self._storages[0].resize_(self._num_bytes)
        self._chunks[0].copy_(self.shard.detach())
        self._swap([self._chunks[0]] * len(self._chunks), self._chunks)

    def _reduce(self) -> None:
        self._num_arrived = 0
        self._storages[0].resize_(0)
        arrived = [torch.empty_like(chunk) for chunk in self._summands]
        self._swap(self._summands, arrived)
        total = self._summands[0] + arrived[1]
        for summand in arrived[2:]:
            total.add_(summand)
        self.shard.grad = total
        self._storages[1].resize_(0)

    def _swap(self, sent: list[Tensor] | tuple[Tensor, ...], arrived: list[Tensor] | tuple[Tensor, ...]) -> None:
        works = [self._transport.receive(arrived[rank], rank, TAG) for rank in self._others]
        works += [self._transport.send(sent[rank], rank, TAG) for rank in self._others]
        for work in works:
            work.wait()
