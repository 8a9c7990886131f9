"""What the image of a rank takes in the host's memory: what others go back to where a rank is lost (`elastic/`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.program.footprint import optim_bytes_of
from shardwise.program.spec import FlatSpec


@dataclass(frozen=True)
class ImageBytes:
    """Of one rank. `live` would lie elsewhere without an image; the `copy` is what it costs."""

    live: int
    """What the optimizer updates there, in place: states, and master weights in another dtype than the parameters'."""
    copy: int
    """That, and what the rank alone has of parameters, as they were after the last step."""

    @property
    def total(self) -> int:
        return self.live + self.copy


def image_bytes(
    flats: Sequence[FlatSpec], states_per_param: int, coordinate: Mapping[str, int] | None = None
) -> ImageBytes:
    """For ranks that share memory, in which sharded parameters rest. Numbers beside tensors, and what fills up to a
    multiple of 64 bytes, are not counted. `coordinate` is the rank's; without one, of the range with the most."""
    live = copy = 0
    for flat in flats:
        param, optim = flat.table.param, flat.table.optim
        if not flat.trainable:
            copy += flat.num_bytes(param.shard, param.dtype) if param.shard else 0
            continue
        updated = optim_bytes_of(flat, states_per_param, coordinate)
        live += updated
        copy += updated + (flat.num_bytes(optim.shard, optim.dtype) if flat.master_is_param else 0)
    return ImageBytes(live, copy)
