"""A unit with memory: its flat buffers, and the sites before which they are needed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter

import torch
from torch import nn

from shardwise.memory.dtypes import dtype_of_codes
from shardwise.memory.flat import Flat
from shardwise.memory.flat_gradients import FlatGradients
from shardwise.memory.select import UnitChoice
from shardwise.memory.tables import LabelledTable
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import WIDTH, Slot, Table, padded_numel
from shardwise.program import FactoredMatrix, FlatSpec, PlacedUpdate, UnitMoments, UnitSpec, Update, gather_due
from shardwise.system.telemetry import ByteMeter
from shardwise.system.torch_private import DisableTorchFunction

Named = tuple[str, nn.Parameter]
OverlapsCompute = Callable[[str], bool]
_version = attrgetter("_version")


@dataclass
class Unit:
    """What is gathered together. `sites` may grow while the first step is watched."""

    spec: UnitSpec
    flats: tuple[Flat, ...]
    sites: list[nn.Module]

    @cached_property
    def name(self) -> str:
        return self.spec.name

    @cached_property
    def moments(self) -> UnitMoments:
        return UnitMoments.of(self.name)

    @cached_property
    def params(self) -> tuple[nn.Parameter, ...]:
        return tuple(param for flat in self.flats for param in flat.params)

    @cached_property
    def has_frozen(self) -> bool:
        return any(not flat.spec.trainable for flat in self.flats)

    @cached_property
    def comes_alone(self) -> bool:
        """Whether a rank makes its parameters whole without the others: they are copies, wherever they rest."""
        return not any(action.communicates for action in gather_due(self.spec, self.moments.before_forward))

    @cached_property
    def stays_whole(self) -> bool:
        """Whether its parameters rest as they are computed with."""
        return all(flat.spec.resident and flat.shared is None for flat in self.flats)

    @cached_property
    def trained_grads(self) -> tuple[FlatGradients, ...]:
        """The gradients of the trainable flat buffers."""
        return tuple(flat.grads for flat in self.flats if flat.spec.trainable)

    def num_writes(self) -> int:
        """How often parameters have been written to in place. Writes through `.data` are not counted."""
        with DisableTorchFunction():  # as `unwatched`, for each forward
            return sum(map(_version, self.params))

    def wake(self) -> None:
        """A computation uses the parameters from here on; see [Note: parameters at rest] in `at_rest.py`."""
        for flat in self.flats:
            flat.guard.wake()

    def rest(self) -> None:
        for flat in self.flats:
            flat.guard.rest()

    def has_fresh(self) -> bool:
        """Whether there are gradients here that should have been reduced by now."""
        return any(flat.grads.has_fresh() for flat in self.flats)


@dataclass(frozen=True)
class _FlatKind:
    """Parameters that can share a flat buffer: all trainable or all frozen, under one table."""

    row: LabelledTable
    trainable: bool

    def name(self, unit: str) -> str:
        """`h.0`, `h.0:norms`, `h.0:frozen`, `h.0:norms-frozen`."""
        labels = [label for label in (self.row.label, "" if self.trainable else "frozen") if label]
        return f"{unit}:{'-'.join(labels)}" if labels else unit


def unit_specs(
    choices: Iterable[UnitChoice],
    rows: Mapping[nn.Parameter, LabelledTable],
    mesh: Mesh,
    updates: Mapping[nn.Parameter, Update] | None = None,
    *,
    on_cpu: bool = True,
    overlaps_compute: OverlapsCompute | None = None,
) -> list[UnitSpec]:
    """What the program needs to know of the units of one rank. Needs no memory: parameters may be on the meta device.

    `updates` says how an optimizer updates each parameter, if one is known. `on_cpu`: whether ranks compute on the CPU
    (`Collectives.is_host`). `overlaps_compute(axis)`: whether collectives along `axis` overlap with computation
    (`Collectives.overlaps_compute`); default: on devices they do.
    """
    overlaps = overlaps_compute or (lambda _: not on_cpu)
    known: dict[object, UnitSpec] = {}
    specs = []
    for choice in choices:
        contents = _contents(choice, rows, updates)
        if contents not in known:
            known[contents] = _unit_spec(choice, rows, mesh, updates, on_cpu, overlaps)
        specs.append(_renamed(known[contents], choice.name))
    return _keep_some(specs)


def _contents(
    choice: UnitChoice, rows: Mapping[nn.Parameter, LabelledTable], updates: Mapping[nn.Parameter, Update] | None
) -> object:
    """What the spec of a unit depends on beside its name: most units of a large model are equal blocks."""
    of_params = tuple(
        (
            param.shape,
            param.requires_grad,
            id(rows[param]) if lies_in_units(param) else None,
            updates.get(param) if updates is not None else None,
            choice.boxes.get(param),
        )
        for param in choice.params.values()
    )
    return of_params, choice.spans_model


def _renamed(spec: UnitSpec, name: str) -> UnitSpec:
    """That of a unit with the same contents."""
    if spec.name == name:
        return spec
    flats = tuple(replace(flat, name=name + flat.name.removeprefix(spec.name)) for flat in spec.flats)
    return replace(spec, name=name, flats=flats)


def _unit_spec(
    choice: UnitChoice,
    rows: Mapping[nn.Parameter, LabelledTable],
    mesh: Mesh,
    updates: Mapping[nn.Parameter, Update] | None,
    on_cpu: bool,
    overlaps_compute: OverlapsCompute,
) -> UnitSpec:
    """One of them; it keeps each gradient buffer that may be kept."""
    flats = []
    for kind, named in _by_kind(choice, rows, updates).items():
        align = kind.row.table.align
        slots = choice.slots(named, align)
        numel = padded_numel(slots, mesh.num_replicas * mesh.num_islands, align)  # sums over islands divide evenly too
        name, table = kind.name(choice.name), kind.row.table.on(mesh)
        placed = _placed(slots, named, updates)
        stays_whole = table.stays_whole and bool(table.axes)
        waits_here = table.grad.tier == "device"
        is_widest = WIDTH[table.grad_wire.dtype] <= WIDTH[table.grad.dtype] == WIDTH[table.optim.dtype]
        may_keep = on_cpu and kind.trainable and stays_whole and waits_here and is_widest
        overlaps = all(map(overlaps_compute, table.optim.shard))
        factored = _factored(slots, table) if kind.trainable else ()
        spec = FlatSpec(name, numel, len(slots), table, mesh, kind.trainable, placed, may_keep, overlaps, factored)
        num_parts = math.prod(mesh.size(axis) for axis in spec.split_axes)
        if num_parts > 1:
            spec = replace(spec, even_numel=sum(math.prod(slot.whole_shape) for slot in slots) // num_parts)
        flats.append(spec)
    return UnitSpec(choice.name, tuple(flats), choice.spans_model)


def _factored(slots: Sequence[Slot], table: Table) -> tuple[FactoredMatrix, ...]:
    """The matrices whose gradients are sent as factors, on a mesh where they are sent at all."""
    if table.low_rank is None or not table.axes:
        return ()
    found = [(index, slot, table.low_rank.matrix_of(slot.shape)) for index, slot in enumerate(slots)]
    return tuple(FactoredMatrix(index, slot.span, *matrix) for index, slot, matrix in found if matrix is not None)


def _keep_some(specs: Sequence[UnitSpec]) -> list[UnitSpec]:
    """`specs`, of which those keep gradient buffers that together need no more bytes than gradients as they are sent;
    see [Note: gradient buffers] in `grad_buffer.py`."""
    spare_bytes = 0
    chosen = []
    for spec in specs:
        flats = []
        for flat in spec.flats:
            if flat.keeps_grad_buffer:
                spare_bytes += flat.table.grad_wire.num_bytes(flat.grad_bytes // WIDTH[flat.table.grad.dtype])
                keeps = flat.grad_bytes <= spare_bytes
                spare_bytes -= flat.grad_bytes if keeps else 0
                flats.append(flat if keeps else replace(flat, keeps_grad_buffer=False))
            else:
                flats.append(flat)
        chosen.append(replace(spec, flats=tuple(flats)))
    return chosen


def _placed(
    slots: Sequence[Slot], named: Sequence[Named], updates: Mapping[nn.Parameter, Update] | None
) -> tuple[PlacedUpdate, ...]:
    """How each parameter of a flat buffer is updated; one that the optimizer does not have keeps no state."""
    if updates is None:
        return ()
    pairs = zip(slots, named, strict=True)
    return tuple(PlacedUpdate(slot.span, updates.get(param, Update())) for slot, (_, param) in pairs)


def make_units(
    choices: Iterable[UnitChoice],
    specs: Iterable[UnitSpec],
    rows: Mapping[nn.Parameter, LabelledTable],
    coordinate: Mapping[str, int],
    device: torch.device,
    updates: Mapping[nn.Parameter, Update] | None = None,
    meter: ByteMeter | None = None,
) -> list[Unit]:
    """The units of the rank at `coordinate`, whose `specs` are of the same `choices`, `rows` and `updates`
    (`unit_specs`), with flat buffers that are still empty: `init` fills them, and `meter` counts what they get then.
    Units without parameters are left out."""
    meter = meter or ByteMeter()
    every = (
        _make_unit(choice, spec, rows, coordinate, meter, device, updates)
        for choice, spec in zip(choices, specs, strict=True)
    )
    return [unit for unit in every if unit.flats]


def _make_unit(
    choice: UnitChoice,
    spec: UnitSpec,
    rows: Mapping[nn.Parameter, LabelledTable],
    coordinate: Mapping[str, int],
    meter: ByteMeter,
    device: torch.device,
    updates: Mapping[nn.Parameter, Update] | None,
) -> Unit:
    flats = []
    for flat_spec, (kind, named) in zip(spec.flats, _by_kind(choice, rows, updates).items(), strict=True):
        slots = choice.slots(named, kind.row.table.align)
        flats.append(Flat(flat_spec, slots, [param for _, param in named], coordinate, meter, device))
    return Unit(spec, tuple(flats), list(choice.sites))


def _by_kind(
    choice: UnitChoice,
    rows: Mapping[nn.Parameter, LabelledTable],
    updates: Mapping[nn.Parameter, Update] | None,
) -> dict[_FlatKind, Sequence[Named]]:
    """Parameters by kind: the plan's own table first, and under each table trainable parameters first."""
    kinds: dict[_FlatKind, list[Named]] = {}
    for name, param in choice.params.items():
        if lies_in_units(param):
            takes_summands = param.requires_grad and updates is not None and updates.get(param, Update()).summands
            row = rows[param].with_summands() if takes_summands else rows[param]
            kinds.setdefault(_FlatKind(row, param.requires_grad), []).append((name, param))
    order = sorted(kinds, key=lambda kind: (kind.row.label, not kind.trainable))
    return {kind: kinds[kind] for kind in order}


def lies_in_units(param: torch.Tensor) -> bool:
    """Whether a parameter has its place in a flat buffer: floating-point values, and codes. Others are whole on every
    rank."""
    return param.dtype.is_floating_point or dtype_of_codes(param) is not None  # the method gives way to other threads
