"""Every difference between PyTorch versions (2.11 and later) that communication meets."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d

# 2.13 renamed the single-tensor collectives and warns on the old names; 2.11 has only the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather_single(out: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    work: dist.Work = _all_gather(out, own, group=group, async_op=True)
    return work


def reduce_scatter_single(out: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    work: dist.Work = _reduce_scatter(out, source, group=group, async_op=True)
    return work


def another_connection() -> Store | None:
    """The store at which the process group met, over a connection that nobody else uses; `None` if it has but one.

    A client is not safe to share: one thread's question would wait for the answer to another's.
    """
    store: Any = distributed_c10d._get_default_store()  # torch has no public name
    try:
        twin: Store = store.clone()
    except (RuntimeError, AttributeError):  # not every kind of store can
        return None
    return twin
