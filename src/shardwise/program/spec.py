"""The inputs of a program: units, their flat buffers, and the order in which they are used."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import WIDTH, Axes, Dtype, Layout, Place, Span, Table, Tier, wider
from shardwise.plan.replica_groups import is_lone, shrinking_axes
from shardwise.program.action import Action, Moment
from shardwise.program.effects import Buffer
from shardwise.program.update import PlacedUpdate

Trace = tuple[Moment, ...]


@dataclass(frozen=True)
class FactoredMatrix:
    """A parameter whose gradient is sent as two factors of `rank` columns: the `index`-th of its flat buffer, at
    `span`."""

    index: int
    span: Span
    rows: int
    cols: int
    rank: int


@dataclass(frozen=True)
class FlatSpec:
    """One flat buffer: parameters of one dtype that share a row of the table.

    `numel` counts padding; `num_params` counts parameters, not elements. `table` has no axis of size 1. `updates` gives
    the update of each parameter; it is empty where no optimizer is known. With `keeps_grad_buffer` the memory in which
    gradients wait for the step is kept from one step to the next. With `overlaps_compute` collectives along the axes
    that shard the update overlap with computation. `factored` are the matrices whose gradients are sent as factors.
    """

    name: str
    numel: int
    num_params: int
    table: Table
    mesh: Mesh
    trainable: bool = True
    updates: tuple[PlacedUpdate, ...] = ()
    keeps_grad_buffer: bool = False
    overlaps_compute: bool = False
    factored: tuple[FactoredMatrix, ...] = ()
    even_numel: int | None = None
    """An even share, the same on all ranks, where those along an axis have parts of different sizes: seven experts on
    two ranks. What is planned by sizes, such as how far ahead gathers run, is planned by it, because ranks along that
    axis gather their other parameters together, in one order."""

    @cached_property
    def layout(self) -> Layout:
        return Layout.of(self.numel, self.table.order, self.mesh)

    @cached_property
    def paths(self) -> dict[object, tuple[Action, ...]]:
        """The actions that `build.py` has found, such as those between two places: a schedule has them for every
        micro-batch."""
        return {}

    @cached_property
    def split_axes(self) -> Axes:
        """The replica axes that the table leaves out. Along them ranks have different parts of these parameters
        (experts), and the tokens were brought to those ranks, so that there are no gradients to sum."""
        replica_axes = self.mesh.replica_axes
        return tuple(axis for axis in replica_axes if axis not in self.table.axes and self.mesh.size(axis) > 1)

    def part_of(self, coordinate: Mapping[str, int]) -> tuple[int, ...]:
        """Which part of these parameters the rank at `coordinate` has: its place along the axes that split them."""
        return tuple(coordinate[axis] for axis in (*self.mesh.model_axes, *self.split_axes))

    @property
    def reduces_each_time(self) -> bool:
        """Whether the gradients of each micro-batch of a pipeline are reduced separately, which is the case where they
        wait in shards. Others wait whole, and are reduced once for all micro-batches."""
        return bool(self.table.grad.shard)

    def reduces_in(self, *, is_last: bool) -> bool:
        """Whether a backward is followed by their reduction; in a pipeline that of the last micro-batch, if it
        `is_last`."""
        return is_last or self.reduces_each_time

    @cached_property
    def fresh(self) -> Place:
        """What is there to be reduced: what one backward leaves, in the dtype that is sent, or the sum of what all
        micro-batches of a pipeline leave, in that in which gradients wait. So a sum is rounded once, on the wire."""
        place, waits = self.table.fresh, self.table.grad.dtype
        are_added = self.mesh.has_stages and not self.reduces_each_time
        return replace(place, dtype=wider(place.dtype, waits)) if are_added else place

    @cached_property
    def is_lone(self) -> bool:
        """Whether no other rank has any of what a rank has of these parameters, and the others go on without it."""
        parted = {*self.mesh.model_axes, *self.split_axes}
        return is_lone(self.mesh) and parted.issuperset(shrinking_axes(self.mesh))

    @cached_property
    def resident(self) -> bool:
        """Whether parameters lie here whole between steps: there is nothing to gather or free."""
        return self.table.stays_whole

    @cached_property
    def gathers_behind_step(self) -> bool:
        """Whether the gather of updated parameters may still be in flight when the step returns; the unit's next use
        waits for it.

        This hides all but the first unit's, half of what a step of `zero1` or `zero2` sends. On one host of CPUs ranks
        copy from each other's memory when they wait, so nothing would be hidden, and the step waits.
        """
        is_gathered = self.trainable and self.resident and bool(self.table.optim.shard)
        return self.overlaps_compute and is_gathered and self.table.step == "device"

    @property
    def master_is_param(self) -> bool:
        """Whether the optimizer updates the parameter's own bytes, without a second copy in another dtype."""
        param, optim = self.table.param, self.table.optim
        return (param.dtype, param.tier) == (optim.dtype, optim.tier) and not self.is_rounded_at_rest

    @property
    def kept(self) -> Place:
        """Where what is kept of these parameters between steps is: master weights, or, if frozen, the parameters."""
        return self.table.optim if self.trainable else self.table.param

    @cached_property
    def is_shareable(self) -> bool:
        """Whether ranks that share memory could keep these parameters once, and read them in place: they rest in
        pieces there, and a gather would not round them."""
        shard = self.table.param.shard
        return bool(shard) and self.table.param.tier == "device" and not self.table.rounds_params_over(shard)

    @property
    def is_rounded_at_rest(self) -> bool:
        """Whether parameters rest as they were sent, because each rank has parts that another one updates. All ranks
        keep the rounded values then, also the one that has updated them: copies must be equal."""
        table = self.table
        gathered = tuple(axis for axis in table.optim.shard if axis not in table.param.shard)
        return self.trainable and table.rounds_params_over(gathered)

    @property
    def updates_below(self) -> bool:
        """Whether the update is done off the device."""
        return self.trainable and self.table.step != "device"

    @cached_property
    def updates_by_unit(self) -> bool:
        """Whether its unit is updated separately, before the optimizer's own step: off the device, unless the update
        needs whole parameters, for which the optimizer's own step asks once for all units."""
        every = [placed.update for placed in self.updates]
        needs_whole = any(update.matrix or update.needs_norm or update.whole for update in every)
        return self.updates_below and not needs_whole

    def updates_whole(self, span: Span) -> bool:
        """Whether the optimizer is given the parameter that lies at `span` whole, in its shape."""
        return any(placed.update.whole and placed.span == span for placed in self.updates)

    @cached_property
    def num_summands(self) -> int:
        """Of how many ranks' gradients, divided by their number, the gradient is the sum, where the update reads them
        before they are summed; 1 where it reads the sum."""
        return math.prod(map(self.mesh.size, self.table.due.partial))

    @cached_property
    def copies_of_due(self) -> float:
        """How many of the ranks along replica axes have each element of the gradient that the update reads.

        [Note: norms of summands] Every square counts once among its copies, so the sum over all ranks of squares
        divided by this is the square of the norm. N ranks' summands have different elements. The sum of N times their
        squares is the mean square of the norms of the ranks' own gradients, which is never less than the square of the
        norm of their mean; gradients are clipped by it, and it is what is reported as their norm. So one N-th of a copy
        is counted. This holds for the 2-norm only.
        """
        table = self.table
        if table.due.partial:
            return 1 / self.num_summands
        return math.prod(self.mesh.size(axis) for axis in table.axes if axis not in table.optim.shard)

    @property
    def updates_from_disk(self) -> bool:
        """Whether master weights and states are read from a disk to be updated."""
        return self.trainable and self.table.optim.tier == "disk"

    @property
    def lies_on_disk(self) -> bool:
        """Whether any of it is on a disk."""
        return self.updates_from_disk or self.rests_on_disk

    @property
    def rests_on_disk(self) -> bool:
        """Whether parameters rest on a disk; trainable ones in one file with their master weights and states."""
        return self.table.param.tier == "disk"

    def tier_of(self, buffer: Buffer) -> Tier:
        """The tier of `buffer`; for a sum, the tier until it is evicted."""
        return self._tiers.get(buffer, "device")

    @cached_property
    def _tiers(self) -> Mapping[str, Tier]:
        table = self.table
        where: dict[str, Tier] = {
            "param": table.param.tier,
            "held": table.held.tier,
            "grad": table.grad.tier,
            "due": table.due.tier,
            "master": table.optim.tier,
            "outgoing": table.step,
        }
        if table.outer is not None and self.trainable:
            where["anchor"] = table.outer.place.tier
        return where

    @cached_property
    def outer_bytes(self) -> int:
        """Bytes on this rank of what islands have in common, and of the states of its optimizer."""
        outer = self.table.outer
        if outer is None or not self.trainable:
            return 0
        return (1 + outer.num_states) * self.num_bytes(outer.place.shard, outer.place.dtype)

    def num_bytes(self, shard: Axes, dtype: Dtype) -> int:
        """Bytes of this buffer on one rank when sharded over `shard`. The same on every rank."""
        return self.num_elements(shard) * WIDTH[dtype]

    def num_elements(self, shard: Axes) -> int:
        """Elements of it on one rank when sharded over `shard`."""
        found = self._known_elements.get(shard)
        if found is None:
            span = self.layout.span(shard, dict.fromkeys(self.layout.order, 0))
            found = self._known_elements[shard] = span.numel
        return found

    @cached_property
    def _known_elements(self) -> dict[Axes, int]:
        return {}

    @cached_property
    def resting_bytes(self) -> int:
        """Bytes of parameters on this rank between computations."""
        codes, place = self.table.rests_as, self.table.param
        if codes is not None:
            return codes.num_bytes(self.num_elements(place.shard))
        return self.num_bytes(place.shard, place.dtype)

    def state_bytes(self, coordinate: Mapping[str, int] | None) -> int:
        """Bytes of states, by the updates of the parameters, for the range at `coordinate`; without one, for the range
        with the most."""
        return self._most_state_bytes if coordinate is None else self._bytes_of_states(coordinate)

    @cached_property
    def _most_state_bytes(self) -> int:
        return self._bytes_of_states(None)

    def _bytes_of_states(self, coordinate: Mapping[str, int] | None) -> int:
        shard, dtype = self.table.optim.shard, self.table.optim.dtype
        mine = self.layout.span(shard, coordinate or dict.fromkeys(self.layout.order, 0))
        kept: dict[int, int] = {}
        for placed in self.updates if self.numel else ():
            for number in placed.ranges(mine.numel) if coordinate is None else (mine.start // mine.numel,):
                span = placed.span.overlap(Span.nth(number, mine.numel)).within(placed.span)
                kept[number] = kept.get(number, 0) + placed.update.states.num_bytes(span, dtype)
        return max(kept.values(), default=0)

    @cached_property
    def grad_bytes(self) -> int:
        """Bytes of gradients on this rank while they wait for the step."""
        return self.num_bytes(self.table.grad.shard, self.table.grad.dtype)

    @cached_property
    def full_bytes(self) -> int:
        return self.num_bytes((), self.table.compute)

    def evenly(self, num_bytes: int) -> int:
        """What the `num_bytes` that this rank has would be with an even share."""
        return num_bytes if self.even_numel is None else num_bytes * self.even_numel // self.numel


@dataclass(frozen=True)
class UnitSpec:
    """What is gathered together, before one module (or several) runs."""

    name: str
    flats: tuple[FlatSpec, ...]
    spans_model: bool = False
    """Whether the model itself is one of those modules. Its inputs are data and get no gradient, so nothing tells when
    a backward has read what is frozen of this unit for the last time: that stays whole until the backward ends, see
    [Note: blind calls] in `runtime/hooks.py`."""

    @property
    def trainable(self) -> bool:
        return any(flat.trainable for flat in self.flats)

    @cached_property
    def flat_names(self) -> frozenset[str]:
        return frozenset(flat.name for flat in self.flats)

    def under(self, table: Table) -> UnitSpec:
        """The unit, with all of its flat buffers under `table`."""
        return replace(self, flats=tuple(replace(flat, table=table) for flat in self.flats))


def straight_trace(units: tuple[UnitSpec, ...]) -> Trace:
    """The order of a model that uses each unit once, one after the other: what `explain` assumes."""
    forward = [Moment(edge, "forward", unit.name) for unit in units for edge in ("before", "after")]
    backward = [Moment(edge, "backward", unit.name) for unit in reversed(units) for edge in ("before", "after")]
    return (*forward, *backward)
