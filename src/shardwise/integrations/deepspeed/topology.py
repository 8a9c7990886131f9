"""`deepspeed.runtime.pipe.topology`: ranks as points of a grid with named axes, the last of which varies fastest."""

from __future__ import annotations

import itertools
import math
from collections import namedtuple
from collections.abc import Sequence
from typing import Any

from shardwise.errors import ConfigError


class ProcessTopology:
    """A grid of `dims` ranks along `axes`. Ranks are counted from 0; the last axis varies fastest."""

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        if len(axes) != len(dims) or len(set(axes)) != len(axes) or any(dim < 1 for dim in dims):
            raise ConfigError(
                f"A topology has one size of 1 or more for each of its axes, which have different names; got "
                f"{list(axes)} and {list(dims)}."
            )
        self.axes = list(axes)
        self.dims = list(dims)
        self.ProcessCoord: Any = namedtuple("ProcessCoord", self.axes)  # type: ignore[misc]  # of these axes

    def world_size(self) -> int:
        return math.prod(self.dims)

    def get_axis_names(self) -> list[str]:
        return self.axes

    def get_dim(self, axis: str) -> int:
        """The size of `axis`; 0 if there is none of this name."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_rank(self, **coord: int) -> int:
        """The rank at these indices, one for each axis. Raises `ValueError` for others."""
        outside = [axis for axis in self.axes if not 0 <= coord.get(axis, -1) < self.get_dim(axis)]
        if outside or len(coord) != len(self.axes):
            raise ValueError(f"get_rank() takes an index of each of {self.axes}, below {self.dims}; got {coord}.")
        rank = 0
        for axis, dim in zip(self.axes, self.dims, strict=True):
            rank = rank * dim + coord[axis]
        return rank

    def get_coord(self, rank: int) -> Any:
        """The indices of `rank`, a named tuple. Raises `ValueError` for a rank that there is not."""
        if not 0 <= rank < self.world_size():
            raise ValueError(f"There is no rank {rank} among {self.world_size()}.")
        coord = []
        for dim in reversed(self.dims):
            rank, index = divmod(rank, dim)
            coord.append(index)
        return self.ProcessCoord(*reversed(coord))

    def get_rank_repr(
        self, rank: int, omit_axes: Sequence[str] = ("data", "pipe"), inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """The indices of `rank` as text for names of files: `model_00`."""
        coord = self.get_coord(rank)
        kept = (axis for axis in self.axes if axis not in omit_axes)
        return outer_sep.join(f"{axis}{inner_sep}{getattr(coord, axis):02d}" for axis in kept)

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """The lines of ranks along `axis`; empty if there is no axis of this name."""
        if axis not in self.axes:
            return []
        others = [one for one in self.axes if one != axis]
        lines = itertools.product(*(range(self.get_dim(one)) for one in others))
        return [self.filter_match(**dict(zip(others, line, strict=True))) for line in lines]

    def filter_match(self, **coord: int) -> list[int]:
        """The ranks at these indices, in order. Raises `ValueError` for an axis that there is not."""
        if unknown := coord.keys() - set(self.axes):
            raise ValueError(f"There is no axis {', '.join(sorted(unknown))} among {', '.join(self.axes)}.")
        sizes = zip(self.axes, self.dims, strict=True)
        allowed = [[index for index in range(dim) if coord.get(axis, index) == index] for axis, dim in sizes]
        return [self.get_rank(**dict(zip(self.axes, place, strict=True))) for place in itertools.product(*allowed)]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """The ranks whose index on `axis` is `idx`."""
        return self.filter_match(**{axis: idx})


class PipeDataParallelTopology(ProcessTopology):
    """`num_pp` stages of `num_dp` ranks each."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """`num_pp` stages of `num_dp` copies, each split over `num_mp` ranks."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])


_ORDER = ["pipe", "data", "model"]


def stages_in(topology: ProcessTopology) -> int:
    """The pipeline stages of `topology`. Raises `ConfigError` if it is none that shardwise's meshes have."""
    several = [axis for axis in topology.axes if topology.get_dim(axis) > 1]
    if several != [axis for axis in _ORDER if axis in several]:
        raise ConfigError(
            f"The topology has the axes {', '.join(several)}. Supported are pipe, data and model, in this order, whose "
            f"last varies fastest."
        )
    return max(1, topology.get_dim("pipe"))


def require_topology(topology: ProcessTopology, replicas: int, tensor: int) -> None:
    """Raise `ConfigError` unless the config has as many ranks for `data` and `model`."""
    wanted = {axis: max(1, topology.get_dim(axis)) for axis in ("data", "model")}
    if wanted["model"] != tensor:
        raise ConfigError(
            f"The topology has {wanted['model']} ranks along model, the config {tensor}. Set "
            f"tensor_parallel: {{autotp_size: {wanted['model']}}} in the config, by which shardwise splits layers."
        )
    if wanted["data"] != replicas:
        raise ConfigError(
            f"The topology has {wanted['data']} ranks along data, but {replicas} take part: ranks divided by stages "
            f"and model parallelism."
        )
