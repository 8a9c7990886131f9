"""Batch norms with the statistics of all ranks' rows: what `torch.nn.SyncBatchNorm` means under an engine.

torch's own forward asks `torch.distributed`. Where that is not initialized, as under an engine on CPUs, it computes
statistics of each rank's own rows without a word; where it is, it refuses CPUs, and elsewhere it sends what the engine
knows nothing of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardwise.comm import Line
from shardwise.errors import ModelError
from shardwise.parallel.tensor.functions import copy_to, reduce_from

Tensor = torch.Tensor


class SyncBatchNorm(nn.SyncBatchNorm):
    """`nn.SyncBatchNorm` over the ranks of `lines`, which may have different numbers of rows. Sums are at least
    fp32."""

    lines: tuple[Line, ...] = ()

    def forward(self, input: Tensor) -> Tensor:
        """Like torch's, for an input of shape [N, C, ...]. In training, all ranks call."""
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        if self.training and self.lines:
            return self._over_ranks(input)
        is_tracked = not self.training or self.track_running_stats
        return nn.functional.batch_norm(
            input,
            self.running_mean if is_tracked else None,
            self.running_var if is_tracked else None,
            self.weight,
            self.bias,
            self.training or self.running_mean is None,
            self._newest_share(),
            self.eps,
        )

    def _over_ranks(self, input: Tensor) -> Tensor:
        """In two sums, the second of squares of what is centred already, which cancels nothing."""
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        dims = [dim for dim in range(input.dim()) if dim != 1]
        shape: list[Any] = [1, -1] + [1] * (input.dim() - 2)
        num_own = wide.new_full((1,), input.numel() / input.shape[1])
        sums = self._total(torch.cat([wide.sum(dims), num_own]))
        num_rows = sums[-1].detach()
        mean = sums[:-1] / num_rows
        centred = wide - mean.view(shape)
        variance = self._total(centred.square().sum(dims)) / num_rows
        if self.track_running_stats and self.running_mean is not None and self.running_var is not None:
            unbiased = variance * (num_rows / (num_rows - 1).clamp(min=1))
            with torch.no_grad():
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), self._newest_share())
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), self._newest_share())
        normal = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.weight is not None:
            normal = normal * self.weight.view(shape)
        if self.bias is not None:
            normal = normal + self.bias.view(shape)
        return normal.to(input.dtype)

    def _newest_share(self) -> float:
        """The share of this batch in running statistics; without a momentum they are means over all batches."""
        if self.momentum is not None or not self.training or self.num_batches_tracked is None:
            return self.momentum or 0.0
        return 1.0 / float(self.num_batches_tracked)

    def _total(self, values: Tensor) -> Tensor:
        """The sum over all ranks. The loss of each depends on it, so gradients are summed over them, too."""
        for line in self.lines:
            values = copy_to(reduce_from(values, line), line)
        return values


class SyncedBatchNorms:
    """The conversion of `nn.SyncBatchNorm`, such as `nn.SyncBatchNorm.convert_sync_batchnorm` makes."""

    what = "batch norms over the rows of all ranks"
    communicates = True

    def takes(self, path: str, module: nn.Module) -> bool:
        if type(module) is not nn.SyncBatchNorm:
            return False
        if module.process_group is not None:
            raise ModelError(
                f"{path} is a SyncBatchNorm over a process group of torch.distributed. Make it without one: it then "
                f"takes the rows of all ranks of the engine that have different ones."
            )
        return True

    def convert(self, module: nn.Module) -> Callable[[], object]:
        module.__class__ = SyncBatchNorm

        def undo() -> None:
            module.__class__ = nn.SyncBatchNorm
            module.__dict__.pop("lines", None)

        return undo

    def check_device(self, device: torch.device) -> None:
        """Any will do."""

    def connect(self, module: nn.Module, lines: tuple[Line, ...]) -> None:
        module.__dict__["lines"] = lines

    def note_update(self, module: nn.Module) -> None:
        """Nothing of it is kept."""

    def notes(self) -> tuple[str, ...]:
        return ()
