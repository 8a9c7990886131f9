"""Batch normalization with the statistics of all ranks' batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwise.integrations.horovod.basics import is_initialized, size
from shardwise.integrations.horovod.ops import Sum
from shardwise.integrations.horovod.torch.reductions import allreduce

Tensor = torch.Tensor


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """`torch.nn.BatchNorm1d`, `2d` or `3d` over the batches of all ranks, whose sizes may differ.

    Unlike Horovod's, it accepts tensors on any device. In evaluation, and on one rank, it is the plain batch norm.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm needs an input of at least 2 dimensions, not {input.dim()}.")

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        uses_batch_stats = self.training or self.running_mean is None
        if not uses_batch_stats or not is_initialized() or size() == 1:
            return super().forward(input)
        dims = [dim for dim in range(input.dim()) if dim != 1]
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        count = wide.new_full((1,), input.numel() / input.shape[1])
        total = allreduce(torch.cat([wide.sum(dims), count]), op=Sum)
        num_rows = total[-1].detach()
        mean = total[:-1] / num_rows
        shape: list[Any] = [1, -1] + [1] * (input.dim() - 2)
        centred = wide - mean.view(shape)
        variance = allreduce(centred.square().sum(dims), op=Sum) / num_rows
        if self.training and self.track_running_stats:
            self._update_running_stats(mean.detach(), variance.detach(), float(num_rows))
        normalized = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            normalized = normalized * self.weight.view(shape) + self.bias.view(shape)
        return normalized.to(input.dtype)

    def _update_running_stats(self, mean: Tensor, variance: Tensor, num_rows: float) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            weight = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), weight)
            unbiased = variance * num_rows / max(1.0, num_rows - 1)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), weight)
