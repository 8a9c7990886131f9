"""Buffers that a forward changes (running statistics): after each step all ranks take rank 0's."""

from __future__ import annotations

import json

import torch
from torch import nn

from shardwise.comm import World
from shardwise.storage import copy_into


class BufferSync:
    """Learns in the first step which buffers change, on any rank, and from then on keeps them the same."""

    def __init__(self, model: nn.Module, world: World) -> None:
        self._world = world
        self._buffers = dict(model.named_buffers())
        # Kept until the first step. Version counters would do, but batch norm changes its statistics without them.
        self._before = {name: buffer.detach().clone() for name, buffer in self._buffers.items()}
        self._changed: list[torch.Tensor] | None = None

    @property
    def is_learnt(self) -> bool:
        return self._changed is not None

    def learn(self) -> int:
        """Settle which buffers are kept the same; returns the bytes that a step sends for it. All ranks call."""
        mine = [name for name, buffer in self._buffers.items() if not torch.equal(buffer, self._before[name])]
        self._before.clear()
        said = self._world.exchange(json.dumps(mine).encode()) if self._buffers else []
        names = sorted({name for message in said for name in json.loads(message)})
        self._changed = [self._buffers[name] for name in names]
        return sum(buffer.nbytes for buffer in self._changed)

    def share(self) -> None:
        """Give everybody rank 0's values, all buffers of a dtype in one message. All ranks call."""
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for buffer in self._changed or ():
            by_dtype.setdefault(buffer.dtype, []).append(buffer)
        for buffers in by_dtype.values():
            together = torch.cat([buffer.detach().reshape(-1) for buffer in buffers])
            self._world.collectives(together.device).broadcast(together, 0, self._world.everybody).wait()
            if self._world.rank == 0:
                continue
            start = 0
            for buffer in buffers:
                copy_into(buffer.detach(), together[start : start + buffer.numel()])
                start += buffer.numel()
