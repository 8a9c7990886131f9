"""A unit with memory: its flat buffers, and the sites before which they are needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from shardwise.mesh import Mesh
from shardwise.placement import Table, pack, padded_numel
from shardwise.program import FlatSpec, UnitSpec
from shardwise.storage.flat import Flat
from shardwise.storage.select import UnitChoice
from shardwise.telemetry import ByteMeter

Named = tuple[str, nn.Parameter]


@dataclass
class Unit:
    """What is gathered together. `sites` may grow while the first step is watched."""

    spec: UnitSpec
    flats: tuple[Flat, ...]
    sites: list[nn.Module]

    @property
    def name(self) -> str:
        return self.spec.name

    @cached_property
    def has_frozen(self) -> bool:
        return any(not flat.spec.trainable for flat in self.flats)

    def has_partial_inbox(self) -> bool:
        """Whether gradients lie here that should have been reduced by now."""
        return any(flat.has_partial_inbox() for flat in self.flats)


def unit_spec(choice: UnitChoice, table: Table, mesh: Mesh) -> UnitSpec:
    """What the program needs to know of a unit. Needs no memory: the parameters may be on the meta device."""
    flats = []
    for label, named in _shelves(choice).items():
        slots = pack((name, tuple(param.shape)) for name, param in named)
        name = choice.name if not label else f"{choice.name}:{label}"
        numel = padded_numel(slots, mesh.world_size)
        flats.append(FlatSpec(name, numel, len(slots), table.on(mesh), mesh, trainable=not label))
    return UnitSpec(choice.name, tuple(flats))


def make_unit(choice: UnitChoice, spec: UnitSpec, coordinate: Mapping[str, int], meter: ByteMeter) -> Unit:
    """A unit whose flat buffers are still empty; see `birth.py` for what fills them."""
    flats = []
    for flat_spec, named in zip(spec.flats, _shelves(choice).values(), strict=True):
        slots = pack((name, tuple(param.shape)) for name, param in named)
        flats.append(Flat(flat_spec, slots, [param for _, param in named], coordinate, meter))
    return Unit(spec, tuple(flats), list(choice.sites))


def _shelves(choice: UnitChoice) -> dict[str, Sequence[Named]]:
    """Parameters that can lie in one buffer: trainable ones, and frozen ones, which have no gradient."""
    shelves: dict[str, list[Named]] = {"": [], "frozen": []}
    for name, param in choice.params.items():
        if is_floating(param):
            shelves["" if param.requires_grad else "frozen"].append((name, param))
    return {label: named for label, named in shelves.items() if named}


def is_floating(param: torch.Tensor) -> bool:
    return param.is_floating_point()
