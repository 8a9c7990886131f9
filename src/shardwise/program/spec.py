"""What a program is built from: units, the flat buffers in them, and the order in which they are used."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from shardwise.mesh import Mesh
from shardwise.placement import WIDTH, Axes, Dtype, Layout, Table, Tier
from shardwise.program.action import Moment
from shardwise.program.effects import Buffer
from shardwise.program.update import PlacedUpdate

Trace = tuple[Moment, ...]


@dataclass(frozen=True)
class FlatSpec:
    """One flat buffer: parameters of one dtype that share a row of the table.

    `numel` counts padding; `num_params` counts parameters, not elements. `table` has no axis of size 1.
    `updates` says of each parameter how it is updated; it is empty where no optimizer is known. With
    `keeps_grad_buffer` the memory in which gradients wait for the step stays from one step to the next.
    """

    name: str
    numel: int
    num_params: int
    table: Table
    mesh: Mesh
    trainable: bool = True
    updates: tuple[PlacedUpdate, ...] = ()
    keeps_grad_buffer: bool = False

    @cached_property
    def layout(self) -> Layout:
        return Layout.of(self.numel, self.table.order, self.mesh)

    @cached_property
    def cut_axes(self) -> Axes:
        """The replica axes that the table leaves out: along them ranks have other parts of these parameters (experts),
        and what they compute with those has been brought to them, so that there are no gradients to add up."""
        replica_axes = self.mesh.replica_axes
        return tuple(axis for axis in replica_axes if axis not in self.table.axes and self.mesh.size(axis) > 1)

    @cached_property
    def resident(self) -> bool:
        """The parameters lie here whole between steps: there is nothing to gather or free."""
        return self.table.param == self.table.full

    @property
    def master_is_param(self) -> bool:
        """The optimizer updates the parameter's own bytes; there is no second copy in another dtype."""
        param, optim = self.table.param, self.table.optim
        return (param.dtype, param.tier) == (optim.dtype, optim.tier)

    @property
    def updates_below(self) -> bool:
        """Whether the update is not done on the device, and so by itself, apart from that of other units."""
        return self.trainable and self.table.step != "device"

    @property
    def updates_from_disk(self) -> bool:
        """Whether master weights and states come from a disk to be updated."""
        return self.trainable and self.table.optim.tier == "disk"

    @property
    def lies_on_disk(self) -> bool:
        """Whether there is anything of it on a disk."""
        return self.updates_from_disk or self.rests_on_disk

    @property
    def rests_on_disk(self) -> bool:
        """Whether parameters rest on a disk: of trainable ones in one file with their master weights and states."""
        return self.table.param.tier == "disk"

    def tier_of(self, buffer: Buffer) -> Tier:
        """Where `buffer` lies; of a sum, where it is until it is evicted."""
        table = self.table
        where: dict[str, Tier] = {
            "param": table.param.tier,
            "held": table.held.tier,
            "grad": table.grad.tier,
            "due": table.due.tier,
            "master": table.optim.tier,
            "outgoing": table.step,
        }
        return where.get(buffer, "device")

    def num_bytes(self, shard: Axes, dtype: Dtype) -> int:
        """Bytes of this buffer on one rank when sharded over `shard`. The same on every rank."""
        return self.layout.span(shard, dict.fromkeys(self.layout.order, 0)).numel * WIDTH[dtype]

    @cached_property
    def grad_bytes(self) -> int:
        """What gradients take on this rank while they wait for the step."""
        return self.num_bytes(self.table.grad.shard, self.table.grad.dtype)

    @cached_property
    def full_bytes(self) -> int:
        return self.num_bytes((), self.table.compute)


@dataclass(frozen=True)
class UnitSpec:
    """What is gathered together, before one module (or several) runs."""

    name: str
    flats: tuple[FlatSpec, ...]

    @property
    def trainable(self) -> bool:
        return any(flat.trainable for flat in self.flats)


def straight_trace(units: tuple[UnitSpec, ...]) -> Trace:
    """The order of a model that uses its units one after the other, once: what `explain` assumes."""
    forward = [Moment(edge, "forward", unit.name) for unit in units for edge in ("before", "after")]
    backward = [Moment(edge, "backward", unit.name) for unit in reversed(units) for edge in ("before", "after")]
    return (*forward, *backward)
