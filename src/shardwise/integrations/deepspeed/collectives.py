"""`deepspeed.comm`: what torch.distributed does not have under the same name. Ranks are torch's."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.integrations.deepspeed.accelerator import get_accelerator

Tensor = torch.Tensor


def get_local_rank() -> int:
    """This rank among those of its host."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_world_group() -> Any:
    return dist.group.WORLD


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    """The rank in the world of one in `group`."""
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """The ranks in the world of `group`'s, in its order."""
    return list(dist.get_process_group_ranks(dist.group.WORLD if group is None else group))


def initialize_mesh_device(mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> DeviceMesh:
    """torch's device mesh of this shape over all ranks, which all call."""
    return init_device_mesh(get_accelerator().device_name(), tuple(mesh_shape), mesh_dim_names=tuple(mesh_dim_names))


def inference_all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> Any:
    return dist.all_reduce(tensor, op, group)


def all_gather_coalesced(
    output_tensors: Sequence[Tensor], input_tensors: Sequence[Tensor], group: Any = None, async_op: bool = False
) -> Any:
    """`all_gather_into_tensor` of each pair. With `async_op` returns a handle of all."""
    pairs = zip(output_tensors, input_tensors, strict=True)
    handles = [dist.all_gather_into_tensor(output, mine, group, async_op) for output, mine in pairs]
    return Together(handles) if async_op else None


def all_reduce_coalesced(
    tensors: Sequence[Tensor], op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    """`all_reduce` of each. With `async_op` returns a handle of all."""
    handles = [dist.all_reduce(tensor, op, group, async_op) for tensor in tensors]
    return Together(handles) if async_op else None


class Together:
    """The handle of several operations. Gloo has several threads, of which one may end a later operation first, so the
    last handle, which DeepSpeed returns, says nothing of the others."""

    def __init__(self, handles: Sequence[dist.Work]) -> None:
        self._handles = handles

    def wait(self, *timeout: timedelta) -> bool:
        """Wait for all, as `torch.distributed.Work.wait`."""
        for one in self._handles:
            one.wait(*timeout)
        return True

    def is_completed(self) -> bool:
        return all(one.is_completed() for one in self._handles)


def has_all_gather_into_tensor() -> bool:
    return True


def has_reduce_scatter_tensor() -> bool:
    return True


def has_all_reduce_coalesced() -> bool:
    return True


def configure(*args: object, **options: object) -> None:
    """Nothing is recorded: `shardwise explain` prints what is sent, and `engine.shardwise.timeline` when."""


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Nothing was recorded; see `configure`."""
    return {} if return_dict else None


def reset_log() -> None:
    """Nothing was recorded; see `configure`."""
