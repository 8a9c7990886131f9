"""All differences between PyTorch versions (2.11 and later) that concern communication, and all private parts that do.

The stores are public as `torch.distributed.Store`, ..., but torch's types do not export them from there.
"""

from __future__ import annotations

import datetime
import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d

__all__ = [
    "PrefixStore",
    "Store",
    "TCPStore",
    "all_gather_coalesced",
    "all_gather_single",
    "another_connection",
    "can_split",
    "forget_groups",
    "is_of_store",
    "port_of",
    "reduce_scatter_single",
    "split_group",
    "twin",
]

# 2.13 renamed the single-tensor collectives and warns on the old names; 2.11 has only the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather_single(out: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    work: dist.Work = _all_gather(out, own, group=group, async_op=True)
    return work


def all_gather_coalesced(outs: list[torch.Tensor], owns: list[torch.Tensor], group: dist.ProcessGroup) -> dist.Work:
    """Several all-gathers, launched together by a backend that can."""
    options = AllgatherOptions()
    options.asyncOp = True
    # renamed in 2.13 too; before, a group has only the old name
    gather: Any = getattr(group, "all_gather_single_coalesced", None) or group.allgather_into_tensor_coalesced
    work: dist.Work = gather(outs, owns, options)
    return work


def reduce_scatter_single(out: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    work: dist.Work = _reduce_scatter(out, source, group=group, async_op=True)
    return work


def another_connection() -> Store | None:
    """The store at which the process group met, over a connection of our own; `None` if the store has only one.

    A client must not be shared between threads: one thread's question would wait for the answer to another's.
    """
    store: Any = distributed_c10d._get_default_store()  # torch has no public name
    try:
        return twin(store)
    except (RuntimeError, AttributeError):  # not every kind of store can
        return None


def twin(store: Any) -> Store:
    """The same store, over a connection of its own."""
    found: Store = store.clone()
    return found


def forget_groups() -> None:
    """Name the next groups as a process would that has created none yet.

    Torch puts a group's number into the names of its keys, and counts groups that failed to open. After such a failure
    the ranks that tried would look for the others under a different name than newcomers. Also destroys the process
    group of a world that was abandoned.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    distributed_c10d._world.group_count = 0


def is_of_store(store: Store) -> bool:
    """Whether the current process group met at `store`."""
    if not dist.is_initialized():
        return False
    inner: Any = distributed_c10d._get_default_store()
    while inner is not store and hasattr(inner, "underlying_store"):
        inner = inner.underlying_store
    return inner is store


def port_of(store: Store) -> int:
    """The port at which the process that keeps the store listens; 0 if no process does."""
    inner: Any = store
    while hasattr(inner, "underlying_store"):
        inner = inner.underlying_store
    return int(getattr(inner, "port", 0) or 0)


def can_split(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether groups can be split off `group`, with one call for all lines of an axis; the same on all ranks.

    Torch before 2.13 cannot keep only one of a group's backends, and no version splits a group that is bound to no
    device.
    """
    if "backend" not in inspect.signature(dist.split_group).parameters:
        return False
    default: Any = dist.group.WORLD
    if default is None or default.bound_device_id is None:
        return False
    backend: Any = group._get_backend(torch.device(device.type))
    return bool(backend.supports_splitting)


def split_group(
    group: dist.ProcessGroup, lines: list[list[int]], *, timeout: datetime.timedelta, backend: str, options: Any
) -> dist.ProcessGroup:
    made: dist.ProcessGroup | None = dist.split_group(
        group, lines, timeout=timeout, pg_options=options, backend=backend
    )
    assert made is not None, "each rank is on one line"
    return made
