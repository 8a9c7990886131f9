"""Ranks as points of a grid with named axes.

Along a *data axis*, ranks train the same model on different batches. Along a *model axis*, they share one batch and may
hold different parts of the model; the axis name says how they share. Along `sp`, they share the tokens of a batch and
train the same parameters. So the *replica axes*, over which a plan shards or copies parameters and sums gradients, are
the data axes and `sp`. `ep` is a data axis for everything except experts, of which each rank along it has its own.

`island` is a data axis and no replica axis: ranks along it train models of their own, which are brought together once
in many steps ([Note: islands] in `program/outer_step.py`).

Rank numbers are row-major: the last axis varies fastest, so it should be the one with the fastest links.
`Mesh.of({"node": 2, "local": 4}, 8)` puts ranks 0-3 on node 0.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardwise.errors import ConfigError, nearest

MODEL_AXES = {
    "tp": "tensor parallelism",
    "pp": "pipeline parallelism",
    "sp": "sequence parallelism",
    "ep": "expert parallelism",
}
"""Axis names with a conventional meaning. All others, and `ep`, are data axes: ranks along them read different
batches."""

TENSOR_AXIS = "tp"
SEQUENCE_AXIS = "sp"
EXPERT_AXIS = "ep"
STAGE_AXIS = "pp"
ISLAND_AXIS = "island"
"""The data axis along which parameters vary: between two outer steps each island trains its own copy."""
SYNONYMS = {"cp": SEQUENCE_AXIS}
"""Other names for model axes, which are refused, and the name to use instead."""
SAME_PARAMS_AXES = (TENSOR_AXIS,)
"""Model axes along which ranks have the same list of parameters: each holds its part of one that is split, and a copy
of any other. Along the others (pipeline stages), each rank has its own list."""

MOST_RANKS = 2_000_000
"""Of what is planned or simulated. What asks for each rank's host, or for every way to divide the ranks, would take
hours and all memory for a mistyped number."""


def check_num_ranks(what: str, num_ranks: int) -> None:
    """Raise `ConfigError` if that many ranks, given as `what`, cannot be planned."""
    if num_ranks < 1:
        raise ConfigError(f"{what} is {num_ranks}; give at least 1.")
    if num_ranks > MOST_RANKS:
        raise ConfigError(
            f"{what} is {num_ranks}; give at most {MOST_RANKS}: what is computed for each rank would not end."
        )


@dataclass(frozen=True)
class Mesh:
    """Named axes and their sizes, outermost first. Raises `ConfigError` for repeated axes, or sizes below 1."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.axes or len(self.axes) != len(self.sizes) or len(set(self.axes)) != len(self.axes):
            raise ConfigError(f"A mesh needs distinct axes with one size each, not {self.axes} and {self.sizes}.")
        for axis, size in zip(self.axes, self.sizes, strict=True):
            if size < 1:
                raise ConfigError(f"Mesh axis {axis!r} has size {size}; a size is at least 1.")
            if axis in SYNONYMS:
                raise ConfigError(
                    f"Mesh axis {axis!r} is called {SYNONYMS[axis]!r} here ({MODEL_AXES[SYNONYMS[axis]]}); "
                    f"write {SYNONYMS[axis]}."
                )

    @classmethod
    def of(cls, axes: Mapping[str, int], world_size: int) -> Mesh:
        """A mesh over `world_size` ranks. One size may be -1, and becomes what the others leave.

        Raises `ConfigError` if the sizes do not multiply to `world_size`.
        """
        unknown = [axis for axis, size in axes.items() if size == -1]
        known = math.prod(size for size in axes.values() if size != -1)
        sizes = dict(axes)
        if len(unknown) > 1:
            raise ConfigError(f"Only one mesh axis may be -1, but {' and '.join(unknown)} are.")
        if unknown and known > 0 and world_size % known == 0:
            sizes[unknown[0]] = world_size // known
        mesh = cls(tuple(sizes), tuple(size if size != -1 else 1 for size in sizes.values()))
        if mesh.world_size != world_size:
            cure = f"Make the sizes multiply to {world_size}, or write -1 for the axis that takes the rest."
            if unknown:
                cure = f"Start a multiple of {known} ranks, or change sizes: {unknown[0]} takes what is left."
            raise ConfigError(
                f"The mesh {_describe(axes)} makes {mesh.world_size} ranks, but the world has {world_size}. {cure}"
            )
        return mesh

    @property
    def world_size(self) -> int:
        return math.prod(self.sizes)

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The axes along which ranks read different batches."""
        return tuple(axis for axis in self.axes if axis not in MODEL_AXES or axis == EXPERT_AXIS)

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """The axes over which a plan shards or copies parameters and sums gradients: the data axes, without islands,
        and `sp`."""
        shared = (axis for axis in self.axes if axis not in MODEL_AXES or axis in (SEQUENCE_AXIS, EXPERT_AXIS))
        return tuple(axis for axis in shared if axis != ISLAND_AXIS)

    @property
    def island_axes(self) -> tuple[str, ...]:
        """The axis of islands, if there is one. A single island has outer steps too."""
        return (ISLAND_AXIS,) if ISLAND_AXIS in self.axes else ()

    @property
    def num_islands(self) -> int:
        return self.size(ISLAND_AXIS) if ISLAND_AXIS in self.axes else 1

    @property
    def axes_of_island(self) -> tuple[str, ...]:
        """The axes along which the ranks of one island differ: all others."""
        return tuple(axis for axis in self.axes if axis not in self.island_axes)

    def island_of(self, rank: int) -> int:
        """The number of the island of `rank`."""
        return self.coordinate(rank).get(ISLAND_AXIS, 0)

    @property
    def model_axes(self) -> tuple[str, ...]:
        """The other axes, of more than one rank: ranks along them hold parts of one model, or copies of what is not
        split."""
        others = (*self.replica_axes, ISLAND_AXIS)
        return tuple(axis for axis in self.axes if axis not in others and self.size(axis) > 1)

    @property
    def parted_axes(self) -> tuple[str, ...]:
        """The axes, of more than one rank, along which ranks may hold different parts of the model: model axes and
        `ep`."""
        parted = {*self.model_axes, *((EXPERT_AXIS,) if self.has_experts else ())}
        return tuple(axis for axis in self.axes if axis in parted)

    @property
    def same_params_axes(self) -> tuple[str, ...]:
        """The model axes, of more than one rank, along which ranks have the same list of parameters."""
        return tuple(axis for axis in self.model_axes if axis in SAME_PARAMS_AXES)

    @property
    def params_axes(self) -> tuple[str, ...]:
        """All axes of an island along which ranks have the same list of parameters."""
        return tuple(axis for axis in self.axes if axis in self.replica_axes or axis in self.same_params_axes)

    @property
    def has_experts(self) -> bool:
        """Whether ranks along an axis have different experts."""
        return EXPERT_AXIS in self.axes and self.size(EXPERT_AXIS) > 1

    @property
    def has_stages(self) -> bool:
        """Whether models are split into pipeline stages."""
        return STAGE_AXIS in self.axes and self.size(STAGE_AXIS) > 1

    @property
    def num_replicas(self) -> int:
        """How many ranks of an island share the parameters of one part of the model."""
        return math.prod(self.size(axis) for axis in self.replica_axes)

    def data_place(self, rank: int) -> tuple[int, int]:
        """Which share of a batch `rank` reads, and out of how many; the same for all ranks that share one batch."""
        place, num_shares = 0, 1
        coordinate = self.coordinate(rank)
        for axis in self.data_axes:
            place = place * self.size(axis) + coordinate[axis]
            num_shares *= self.size(axis)
        return place, num_shares

    @property
    def named_sizes(self) -> dict[str, int]:
        """The axes with their sizes, outermost first, as plans write them."""
        return dict(zip(self.axes, self.sizes, strict=True))

    def size(self, axis: str) -> int:
        return self.sizes[self._index(axis)]

    def degree(self, axis: str) -> int:
        """Into how many parts `axis` splits: 1 if the mesh has no such axis."""
        return self.size(axis) if axis in self.axes else 1

    def coordinate(self, rank: int) -> dict[str, int]:
        """The position of `rank` on every axis."""
        coordinate = {}
        for axis, size in zip(reversed(self.axes), reversed(self.sizes), strict=True):
            rank, coordinate[axis] = divmod(rank, size)
        return {axis: coordinate[axis] for axis in self.axes}

    def rank(self, coordinate: Mapping[str, int]) -> int:
        """The rank at `coordinate`; the inverse of `coordinate()`."""
        rank = 0
        for axis, size in zip(self.axes, self.sizes, strict=True):
            rank = rank * size + coordinate[axis]
        return rank

    def group(self, rank: int, axis: str) -> tuple[int, ...]:
        """The ranks on the line along `axis` through `rank`, in the order of that axis."""
        size, stride = self.size(axis), self.stride(axis)
        first = rank - rank // stride % size * stride
        return tuple(range(first, first + size * stride, stride))

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """Every line along `axis`, ordered by first rank; all ranks must create these groups together."""
        size, stride = self.size(axis), self.stride(axis)
        return [
            tuple(range(first, first + size * stride, stride))
            for block in range(0, self.world_size, size * stride)
            for first in range(block, block + stride)
        ]

    def stride(self, axis: str) -> int:
        """The distance in rank number between neighbours on `axis`. Size and stride determine which ranks share a
        line."""
        return math.prod(self.sizes[self._index(axis) + 1 :])

    def among(self, rank: int, axes: Iterable[str]) -> tuple[int, ...]:
        """The ranks that differ from `rank` only along `axes`, including itself, in rank order."""
        here, free = self.coordinate(rank), set(axes)
        self.require(free, "This group")
        places = ((range(self.size(axis)) if axis in free else (here[axis],)) for axis in self.axes)
        return tuple(self.rank(dict(zip(self.axes, place, strict=True))) for place in itertools.product(*places))

    def is_within_hosts(self, axes: Iterable[str], local_size: int) -> bool:
        """Whether ranks that differ only along `axes` share a host, each of which has `local_size` consecutive ones."""
        along = tuple(axes)
        if local_size >= self.world_size:
            return True
        firsts = (rank for rank in range(self.world_size) if self._is_first(rank, along))
        return all(len({one // local_size for one in self.among(rank, along)}) == 1 for rank in firsts)

    def _is_first(self, rank: int, axes: Iterable[str]) -> bool:
        """Whether no other rank that differs from `rank` only along `axes` comes before it."""
        here = self.coordinate(rank)
        return not any(here[axis] for axis in axes)

    def require(self, axes: Iterable[str], what: str) -> None:
        """Raise `ConfigError` if `axes` names one that this mesh does not have; `what` begins the message."""
        for axis in axes:
            self._index(axis, what)

    def _index(self, axis: str, what: str = "This") -> int:
        if axis not in self.axes:
            raise ConfigError(f"{what} names mesh axis {axis!r}, but the mesh is {self}. {nearest(axis, self.axes)}")
        return self.axes.index(axis)

    def __str__(self) -> str:
        return _describe(dict(zip(self.axes, self.sizes, strict=True)))


def place_along(mesh: Mesh, axes: Iterable[str], rank: int) -> tuple[int, ...]:
    """The position of `rank` on each of `axes`."""
    coordinate = mesh.coordinate(rank)
    return tuple(coordinate[axis] for axis in axes)


def _describe(axes: Mapping[str, int]) -> str:
    return " x ".join(f"{axis}={size}" for axis, size in axes.items())
