"""Every difference between PyTorch versions (2.11 and later) that communication meets."""

from __future__ import annotations

import torch
import torch.distributed as dist

# 2.13 renamed the single-tensor collectives and warns on the old names; 2.11 has only the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather_single(out: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    work: dist.Work = _all_gather(out, own, group=group, async_op=True)
    return work


def reduce_scatter_single(out: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    work: dist.Work = _reduce_scatter(out, source, group=group, async_op=True)
    return work
