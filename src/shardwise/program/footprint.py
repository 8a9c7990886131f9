"""What a program will hold on one rank: bytes at rest by kind, and the peak of what comes and goes.

These are promises: the runtime counts the same bytes (`engine.memory()`), and a test holds the two together. A backward
takes all the memory for its gradients at its beginning here; the runtime takes it when the first one comes.
Activations are the model's own: they are counted where a rehearsal says what they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shardwise.errors import ProgramError
from shardwise.placement import WIDTH, Span, Tier
from shardwise.program.action import Moment, Program
from shardwise.program.activations import Activations, Mark
from shardwise.program.build import fills_grad, reduce_due
from shardwise.program.effects import Buffer
from shardwise.program.spec import FlatSpec, UnitSpec
from shardwise.program.walk import Walk
from shardwise.units import PAGE

NUM_KEPT_BLOCKS = 2
"""Blocks of shared memory that wait, with their pages, for the next gradients to be sent from where they lie. As many
are used in turn: one is filled while another is read."""


@dataclass(frozen=True)
class HostFootprint:
    """Bytes of one rank on the host, where rows of the table are there.

    `param` and `optim` rest; `buffers` is memory for gradients, and for copies on their way, that is used again.
    """

    param: int
    optim: int
    buffers: int
    activations: int = 0
    """What forwards save for backwards, where a rehearsal has counted it and the plan has it there."""

    @property
    def by_kind(self) -> dict[str, int]:
        kinds = {"param": self.param, "optim": self.optim, "buffers": self.buffers}
        return {**kinds, "activations": self.activations} if self.activations else kinds

    @property
    def total(self) -> int:
        return sum(self.by_kind.values())


NUM_DISK_BUFFERS = 3
"""Of the host, each for what one flat buffer has on a disk: one is read, one updated, one written."""
NUM_READ_BUFFERS = 3
"""Of the host, each for the parameters of one flat buffer on a disk: one is copied to the device, others are read."""


@dataclass(frozen=True)
class DiskFootprint:
    """Bytes of one rank on a disk: files for states, master weights and parameters, one for each flat buffer, and for
    activations, where a rehearsal has counted them.


    `param` is what rests there and is no master weight, and 0 where parameters rest elsewhere.
    """

    param: int
    optim: int
    activations: int = 0

    @property
    def by_kind(self) -> dict[str, int]:
        kinds = {"param": self.param, "optim": self.optim, "activations": self.activations}
        return {kind: num_bytes for kind, num_bytes in kinds.items() if num_bytes or kind == "optim"}

    @property
    def total(self) -> int:
        return sum(self.by_kind.values())


@dataclass(frozen=True)
class Footprint:
    """Bytes on one rank: on its device, and beside them those on `host` and `disk`, if the table has rows there.

    `param`, `optim` (states and master weights) and `grad` rest between steps or wait for one; `working`
    is what the peak holds beyond them: gathered parameters, gradients on their way, copies for the wire.

    Where `activations` are counted, `grad` and `working` too are what is held at the one moment when everything
    together is most, which is at `peak_at` or on the way to it from the moment before, and `working` has blocks that
    only wait to be used again; `process` is an allowance for what no tensor shows. Else there is neither.
    """

    param: int
    grad: int
    optim: int
    working: int
    activations: int | None = None
    process: int = 0
    peak_at: Moment | None = None
    host: HostFootprint | None = None
    disk: DiskFootprint | None = None

    @property
    def by_kind(self) -> dict[str, int]:
        """Bytes that add up to `total`; without `activations` and `process` where they are not counted."""
        kinds = {"param": self.param, "grad": self.grad, "optim": self.optim, "working": self.working}
        if self.activations is None:
            return kinds
        return {**kinds, "activations": self.activations, "process": self.process}

    @property
    def total(self) -> int:
        return sum(self.by_kind.values())


def footprint(
    units: Sequence[UnitSpec],
    micro_batch: Program,
    step: Program,
    *,
    states_per_param: int = 2,
    num_micro_batches: int = 1,
    coordinate: Mapping[str, int] | None = None,
    activations: Activations | None = None,
) -> Footprint:
    """What one step, `micro_batch` as often as gradients are accumulated and then `step`, holds on each rank.

    `states_per_param`: tensors of the parameter's size that the optimizer keeps (Adam: 2), where a flat buffer does
    not say how it is updated. Ranks differ where it does: the figures are those of the rank at `coordinate` of the
    mesh, or else the most that any rank holds. `activations` are those of a rehearsal with the order of `micro_batch`.
    """
    flats = [flat for unit in units for flat in unit.flats]
    param = _resting_bytes(flats, "device")
    optim = _optim_bytes(flats, "device", states_per_param, coordinate)
    grad = sum(flat.grad_bytes for flat in flats if flat.trainable and flat.tier_of("grad") == "device")
    clock = Walk(units, coordinate)
    clock.kept = _kept_bytes(flats) if activations is not None and activations.on_cpu else 0
    _walk(clock, micro_batch, step, num_micro_batches, activations)
    disk = _on_disk(flats, states_per_param, coordinate)
    buffers = clock.pooled + _disk_buffers(flats, states_per_param, coordinate)
    if activations is not None and activations.disk_bytes:
        disk = replace(disk or DiskFootprint(0, 0), activations=activations.disk_bytes)
    host = _on_host(flats, buffers, states_per_param, coordinate)
    if activations is not None and activations.host_bytes:
        host = replace(host or HostFootprint(0, 0, 0), activations=activations.host_bytes)
    grad_buffers = sum(flat.grad_bytes for flat in flats if flat.trainable and flat.keeps_grad_buffer)
    if activations is None:
        return Footprint(param, grad, optim, max(0, grad_buffers + clock.peak - grad), host=host, disk=disk)
    working = clock.peak - clock.peak_grad - clock.peak_activations
    grad, process = grad_buffers + clock.peak_grad, activations.process_bytes
    return Footprint(param, grad, optim, working, clock.peak_activations, process, clock.peak_at, host, disk)


def _walk(
    clock: Walk, micro_batch: Program, step: Program, num_micro_batches: int, activations: Activations | None
) -> None:
    for _ in range(min(2, num_micro_batches)):  # all later ones hold what the second holds
        for block, mark in zip(micro_batch, _marks(micro_batch, activations), strict=True):
            clock.walk(block, mark)
    for block in step:
        clock.walk(block)


def _on_host(
    flats: Sequence[FlatSpec], buffers: int, states_per_param: int, coordinate: Mapping[str, int] | None
) -> HostFootprint | None:
    rows: tuple[Buffer, ...] = ("param", "master", "grad")
    if all(flat.tier_of(row) == "device" for flat in flats for row in rows):
        return None
    optim = _optim_bytes(flats, "host", states_per_param, coordinate)
    return HostFootprint(_resting_bytes(flats, "host"), optim, buffers)


def _on_disk(
    flats: Sequence[FlatSpec], states_per_param: int, coordinate: Mapping[str, int] | None
) -> DiskFootprint | None:
    there = [flat for flat in flats if flat.lies_on_disk]
    if not there:
        return None
    param = sum(resting_disk_bytes(flat) for flat in there)
    return DiskFootprint(param, sum(disk_bytes(flat, coordinate, states_per_param) for flat in there) - param)


def _disk_buffers(flats: Sequence[FlatSpec], states_per_param: int, coordinate: Mapping[str, int] | None) -> int:
    """Of the host, for what comes from a disk and goes there."""
    updated = [disk_bytes(flat, coordinate, states_per_param) for flat in flats if flat.updates_from_disk]
    read = [resting_disk_bytes(flat) for flat in flats if flat.rests_on_disk]
    return min(NUM_DISK_BUFFERS, len(updated)) * max(updated, default=0) + min(NUM_READ_BUFFERS, len(read)) * max(
        read, default=0
    )


def _resting_bytes(flats: Sequence[FlatSpec], tier: Tier) -> int:
    there = [flat for flat in flats if flat.tier_of("param") == tier]
    return sum(flat.num_bytes(flat.table.param.shard, flat.table.param.dtype) for flat in there)


def _kept_bytes(flats: Sequence[FlatSpec]) -> int:
    """What ranks of one host keep on the CPU for gradients that are sent; promises do not depend on where ranks run.

    Where parameters come and go nothing is kept through a forward.
    """
    if not all(flat.resident for flat in flats):
        return 0
    sent = [flat for flat in flats if flat.trainable and reduce_due(flat) and not fills_grad(flat)]
    return sum(sorted(flat.numel * WIDTH[flat.table.wire] for flat in sent)[-NUM_KEPT_BLOCKS:])


def _marks(micro_batch: Program, activations: Activations | None) -> tuple[Mark | None, ...]:
    """For each block the mark of its moment."""
    if activations is None:
        return (None,) * len(micro_batch)
    moments = [str(block.moment) for block in micro_batch]
    told = [str(mark.moment) for mark in activations.marks]
    if moments != told:
        raise ProgramError(f"The activations are those of another order: {told}, and not {moments}.")
    return activations.marks


def _optim_bytes(
    flats: Sequence[FlatSpec], tier: Tier, states_per_param: int, coordinate: Mapping[str, int] | None
) -> int:
    """States and master weights that lie on `tier`."""
    num_bytes = 0
    for flat in flats:
        if not flat.trainable or flat.tier_of("master") != tier:
            continue
        num_bytes += optim_bytes_of(flat, states_per_param, coordinate)
    return num_bytes


def disk_bytes(flat: FlatSpec, coordinate: Mapping[str, int] | None, states_per_param: int = 0) -> int:
    """Of the file with what one flat buffer has on a disk: whole pages for the parameters, if they rest there, and
    behind them whole pages for states and master weights."""
    states = optim_bytes_of(flat, states_per_param, coordinate) if flat.updates_from_disk else 0
    return resting_disk_bytes(flat) + up_to_page(states)


def resting_disk_bytes(flat: FlatSpec) -> int:
    """Of that, what is read for a forward or a backward; 0 where parameters rest elsewhere."""
    if not flat.rests_on_disk:
        return 0
    return up_to_page(flat.num_bytes(flat.table.param.shard, flat.table.param.dtype))


def up_to_page(num_bytes: int) -> int:
    return -(-num_bytes // PAGE) * PAGE


def optim_bytes_of(flat: FlatSpec, states_per_param: int, coordinate: Mapping[str, int] | None) -> int:
    """States, and master weights where these are not the parameters themselves."""
    copies = (0 if flat.updates else states_per_param) + (0 if flat.master_is_param else 1)
    num_bytes = copies * flat.num_bytes(flat.table.optim.shard, flat.table.optim.dtype)
    return num_bytes + _state_bytes(flat, coordinate)


def _state_bytes(flat: FlatSpec, coordinate: Mapping[str, int] | None) -> int:
    """What the parameters' own updates say is kept for the range at `coordinate`, or for the range with the most."""
    shard = flat.table.optim.shard
    mine = flat.layout.span(shard, coordinate or dict.fromkeys(flat.layout.order, 0))
    kept: dict[int, int] = {}
    for placed in flat.updates if flat.numel else ():
        first, last = placed.span.start // mine.numel, max(0, placed.span.stop - 1) // mine.numel
        for place in range(first, last + 1) if coordinate is None else (mine.start // mine.numel,):
            here = Span(place * mine.numel, (place + 1) * mine.numel)
            span = placed.span.overlap(here).within(placed.span)
            kept[place] = kept.get(place, 0) + placed.update.states.num_bytes(span, flat.table.optim.dtype)
    return max(kept.values(), default=0)
