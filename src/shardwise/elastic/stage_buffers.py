"""Buffers of pipeline stages, where ranks get other stages: they go with their stage.

[Note: when buffers change] Forwards change them (running statistics), and so do loops between two steps (the biases of
routers), on each rank at its own time. So a rank's image has them twice: as they were when the step was committed, and
as they were when the next iteration began. What a lost rank had is the latter; if it was lost before, the former. Then
one thing is made up for: `update_biases`, if those that go on have called it since that step. They can tell by what
their own routers have counted.

What lives has its own values, put back to those with which the void iteration began.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from shardwise.checkpoint import encode
from shardwise.checkpoint.json_codec import decode
from shardwise.comm import World
from shardwise.elastic.state_image import TORN, Image, read_mark
from shardwise.parallel.experts.router import Router, move_bias, routers_of
from shardwise.parallel.outline import kept_buffers
from shardwise.parallel.pipeline import AXIS
from shardwise.sharded.sharded_model import ShardedModel

Tensor = torch.Tensor
COMMITTED, BEGUN, BEGUN_AT = "#committed", "#begun", "#begun at"
"""Kinds of cells: buffers as of a step, and as of the beginning of the next iteration; and of which version that is."""
_COUNTS = "#counts"
"""Follows the name of a router: what steps have added up since the last `update_biases`."""


class StageBuffers:
    """Those that a rank has of its stages, and what the routers there have counted."""

    def __init__(self, model: nn.Module, pieces: Sequence[str] | None) -> None:
        """`pieces` are the modules of all stages; without, the rank has the whole model."""
        kept = set(kept_buffers(model))
        self._owners: dict[str, tuple[nn.Module, str]] = {}
        """By name: the module and the key there. It stays the same also where another rank has the stage."""
        for prefix, module in model.named_modules():
            for key in module._buffers:
                name = f"{prefix}.{key}" if prefix else key
                if name in kept and (pieces is None or any(name.startswith(f"{piece}.") for piece in pieces)):
                    self._owners[name] = module, key
        self._routers = {name: one for name, one in routers_of(model).items() if f"{name}.bias" in self._owners}

    @classmethod
    def of(cls, sharded: ShardedModel) -> StageBuffers | None:
        """`None` on all ranks if the model has no buffers that checkpoints have, or never has stages."""
        sharding = sharded.parts.sharding
        staged = sharding.staged
        if staged is not None:
            has_some = any(name not in staged.holders for name in staged.whole.shapes)
            return cls(sharded.model, staged.layout.pieces) if has_some else None
        has_stages = any(axes.get(AXIS, 1) > 1 for axes in sharding.smaller.meshes)
        return cls(sharded.model, None) if has_stages and kept_buffers(sharded.model) else None

    def now(self) -> dict[str, Tensor]:
        """By name. Counts are that of a router with `#counts`."""
        buffers = ((name, owner._buffers[key]) for name, (owner, key) in self._owners.items())
        found = {name: buffer.detach() for name, buffer in buffers if buffer is not None}
        for name, router in self._routers.items():
            none = torch.zeros(router.num_experts, device=router.weight.device)
            found[name + _COUNTS] = none if router.counts is None else router.counts
        return found


@dataclass(frozen=True)
class RanksBuffers:
    """What one rank of a former layout had."""

    rank: int
    is_committed_only: bool
    """Whether the rank was lost before the iteration after the step began."""
    values: dict[str, Tensor]

    @classmethod
    def living(cls, rank: int, own: StageBuffers) -> RanksBuffers:
        return cls(rank, False, own.now())

    @classmethod
    def read(cls, rank: int, image: Image, version: int) -> RanksBuffers:
        """From the shadow of an image, which is of `version`."""
        begun = TORN
        for cell in image.directory.cells:
            if cell.kind == BEGUN_AT:
                begun = read_mark(image.shadow(cell), 0)
        kind = BEGUN if begun == version else COMMITTED
        cells = (cell for cell in image.directory.cells if cell.kind == kind)
        return cls(rank, begun != version, {cell.name: image.shadow(cell).clone() for cell in cells})

    def told(self) -> dict[str, object]:
        return {"rank": self.rank, "is_committed_only": self.is_committed_only, "values": encode(self.values)}


def share_buffers(model: nn.Module, known: Sequence[RanksBuffers], world: World) -> None:
    """Give the whole `model`, which is plain, the buffers of all stages. `known` is what this rank knows of those of
    the former layout. All ranks call."""
    if not kept_buffers(model):
        return
    received = world.exchange(json.dumps([one.told() for one in known]).encode(), "buffers of stages")
    told = sorted(_told_by(received), key=lambda one: (one.is_committed_only, one.rank))
    found = {name: (value, whose) for whose in reversed(told) for name, value in whose.values.items()}
    counts = {name: one for name, one in found.items() if name.endswith(_COUNTS)}
    for name, (value, _) in found.items():
        if name not in counts:
            _put(model, name, value)
    have_moved = any(not value.any() for value, whose in counts.values() if not whose.is_committed_only)
    routers = routers_of(model)
    for name, (value, whose) in counts.items():
        _go_on(routers[name.removesuffix(_COUNTS)], value, moves=have_moved and whose.is_committed_only)


def _told_by(received: Sequence[bytes]) -> Iterator[RanksBuffers]:
    for one in (one for message in received for one in json.loads(message)):
        yield RanksBuffers(one["rank"], one["is_committed_only"], decode(one["values"]))


@torch.no_grad()
def _put(model: nn.Module, name: str, value: Tensor) -> None:
    prefix, _, key = name.rpartition(".")
    buffers = model.get_submodule(prefix)._buffers
    present = buffers[key]
    if present is None or (present.shape, present.dtype) != (value.shape, value.dtype):
        device = next(iter(model.parameters())).device if present is None else present.device
        buffers[key] = value.to(device)
    else:
        present.copy_(value)


def _go_on(router: Router, counts: Tensor, *, moves: bool) -> None:
    router.load, router.counts = None, counts.to(router.weight.device)
    if moves:
        move_bias(router)
