"""What a program holds on one rank: bytes at rest by kind, and the peak of everything temporary.

These are promises: the runtime counts the same bytes (`engine.memory()`), and a test compares the two. Here a backward
takes all memory for its gradients when it begins; the runtime takes it when the first gradient comes. Activations are
the model's own, and are counted only if a rehearsal has measured them.

The runtime may hold less (in passes that are recorded, which gather nothing ahead and wait for each message; in a
backward that is open long before its first gradient), and more in two cases, until the backward ends: where the last
use of a frozen parameter is not seen ([Note: blind calls] in `runtime/hooks.py`), unless the unit is around the whole
model, as the one of small parameters often is; and where a forward returns tensors that nobody finds, or its own
parameters.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardwise.errors import ProgramError
from shardwise.plan.placement import WIDTH, Tier
from shardwise.program.action import Moment, Program, actions_of
from shardwise.program.activations import Activations, Mark
from shardwise.program.build import fills_grad, reduce_due, stay_as_made
from shardwise.program.effects import Buffer
from shardwise.program.feedback import losses_bytes
from shardwise.program.low_rank import factored_bytes
from shardwise.program.sign_exchange import residual_bytes
from shardwise.program.spec import FlatSpec, UnitSpec
from shardwise.program.walk import Walk, own_chunk_bytes
from shardwise.system.even_parts import round_up
from shardwise.system.heap import heap_bytes
from shardwise.system.units import PAGE

if TYPE_CHECKING:
    from shardwise.program.outer_step import OuterStep

NUM_KEPT_BLOCKS = 2
"""Blocks of shared memory that stay allocated, with their pages, so that the next gradients can be sent from where they
lie. Two are used in turn: one is filled while the other is read."""
NUM_DISK_BUFFERS = 3
"""Host buffers, each for what one flat buffer has on a disk: one is read, one updated, one written."""
NUM_READ_BUFFERS = 3
"""Host buffers, each for the parameters of one flat buffer on a disk: one is copied to the device, the others are
read."""
GAP_BYTES = 10 * 2**20
"""Of the heap of a process on a CPU, up to so much is free between its blocks, where the next one does not fit, by the
order in which blocks come and go, with the settings of [Note: glibc and small blocks] in `launch/environment.py`: as
much as activations and gradients that lie there, if that is less. At the peaks of steps 12 to 20 MiB were free beside
10 to 38 of these in fp32, 7 to 20 beside 5 to 30 in bf16, and none beside one; some of it is in the allowance of [Note:
process memory]. Chosen on 54 plans of three models (docs/planner-accuracy.md)."""


@dataclass(frozen=True)
class HostFootprint:
    """Bytes of one rank on the host, if rows of the table are there.

    `param` and `optim` rest; `buffers` is reusable memory for gradients and for copies under way.
    """

    param: int
    optim: int
    buffers: int
    activations: int = 0
    """What forwards save for backwards, if a rehearsal has counted it and the plan puts it there."""
    staging: int = 0
    """Memory through which activations go to a disk and come back, if a rehearsal has counted it."""

    @property
    def by_kind(self) -> dict[str, int]:
        kinds = {"param": self.param, "optim": self.optim, "buffers": self.buffers}
        counted = {"activations": self.activations, "staging": self.staging}
        return kinds | {kind: num_bytes for kind, num_bytes in counted.items() if num_bytes}

    @property
    def total(self) -> int:
        return sum(self.by_kind.values())


@dataclass(frozen=True)
class DiskFootprint:
    """Bytes of one rank on a disk: a file per flat buffer for states, master weights and parameters, and activations if
    a rehearsal has counted them.

    `param` counts parameters that rest there and are not master weights; it is 0 if parameters rest elsewhere.
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
    """Bytes on one rank: on its device, and in `host` and `disk` if the table has rows there.

    `param`, `optim` (states and master weights) and `grad` rest between steps or wait for one; `working` is what the
    peak holds beyond them: gathered parameters, gradients being reduced, copies for messages.

    If `activations` are counted, `grad` and `working` are what is held at the one moment at which the total peaks,
    which is at `peak_at` or on the way to it from the previous moment; `working` then includes blocks kept for reuse,
    and `process` is an allowance for memory that no tensor accounts for, and what the heap then holds beyond that peak.
    Otherwise both are absent.
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

    @property
    def host_total(self) -> int:
        return 0 if self.host is None else self.host.total

    @property
    def disk_total(self) -> int:
        return 0 if self.disk is None else self.disk.total


def footprint(  # noqa: PLR0913  # a step, and what is known of who runs it
    units: Sequence[UnitSpec],
    micro_batch: Program,
    step: Program,
    *,
    states_per_param: int = 2,
    num_micro_batches: int = 1,
    coordinate: Mapping[str, int] | None = None,
    activations: Activations | None = None,
    outer_steps: Sequence[OuterStep] = (),
    local_size: int = 1,
) -> Footprint:
    """What one step holds on each rank: `micro_batch` as often as gradients are accumulated, then `step`.

    `states_per_param`: tensors of the parameter's size that the optimizer keeps (Adam: 2), for flat buffers that do not
    say how they are updated. Ranks differ where they do: the figures are then those of the rank at `coordinate` of the
    mesh, or without one the most of any rank. `activations` are those of a rehearsal in the order of `micro_batch`. Of
    `outer_steps`, one after another, the peak is counted of the one that holds most.

    `local_size` ranks share the memory of a host, if they compute on CPUs: pages of libraries count in part, and
    parameters that all of them keep together are read there, and gathering them takes nothing; nor does what others
    send of gradients that are summed. An engine promises and counts as if no rank shared any.
    """
    flats = [flat for unit in units for flat in unit.flats]
    param = _resting_bytes(flats, "device")
    optim = _optim_bytes(flats, "device", states_per_param, coordinate)
    grad = sum(flat.grad_bytes for flat in flats if flat.trainable and flat.tier_of("grad") == "device")
    summed_in_place = _summed_in_place(flats, local_size)
    walk = Walk(
        units,
        coordinate,
        _read_in_place(flats, local_size),
        summed_in_place,
        kept_bytes=_kept_bytes(flats, summed_in_place) if activations is not None and activations.on_cpu else 0,
        heap_bytes=activations.peak_heap_bytes if activations is not None else 0,
    )
    under_way, step = _with_outer_steps(step, outer_steps)
    for block in under_way:
        walk.walk(block)
    for _ in range(min(2, num_micro_batches)):  # later micro-batches hold what the second holds
        for block, mark in zip(micro_batch, _marks(micro_batch, activations), strict=True):
            walk.walk(block, mark)
    for block in step:
        walk.walk(block)
    disk = _on_disk(flats, states_per_param, coordinate)
    buffers = walk.pooled + _disk_buffers(flats, states_per_param, coordinate)
    if activations is not None and activations.disk_bytes:
        disk = replace(disk or DiskFootprint(0, 0), activations=activations.disk_bytes)
    host = _on_host(flats, buffers, states_per_param, coordinate)
    if activations is not None and (activations.host_bytes or activations.staging_bytes):
        below, staging = activations.host_bytes, activations.staging_bytes
        host = replace(host or HostFootprint(0, 0, 0), activations=below, staging=staging)
    grad_buffers = sum(flat.grad_bytes for flat in flats if flat.trainable and flat.keeps_grad_buffer)
    if activations is None:
        return Footprint(param, grad, optim, max(0, grad_buffers + walk.peak - grad), host=host, disk=disk)
    working = walk.peak - walk.peak_grad - walk.peak_activations
    come_and_go = activations.peak_heap_bytes + activations.host_heap_bytes
    come_and_go += _grad_heap_bytes(flats) if activations.on_cpu else 0
    gaps = max(activations.gap_bytes, min(GAP_BYTES, come_and_go))
    code = activations.code_bytes // local_size
    process = activations.process_bytes + code + gaps + walk.peak_with_gaps - walk.peak
    grad = grad_buffers + walk.peak_grad
    return Footprint(param, grad, optim, working, walk.peak_activations, process, walk.peak_at, host, disk)


def _read_in_place(flats: Sequence[FlatSpec], local_size: int) -> frozenset[str]:
    """The names of the flat buffers that no rank gathers, because all who have a piece share memory."""
    if local_size == 1:
        return frozenset()
    shareable = [flat for flat in flats if flat.is_shareable]
    together = {
        shard: mesh.is_within_hosts(shard, local_size)
        for shard, mesh in {flat.table.param.shard: flat.mesh for flat in shareable}.items()
    }
    return frozenset(flat.name for flat in shareable if together[flat.table.param.shard])


def _summed_in_place(flats: Sequence[FlatSpec], local_size: int) -> frozenset[str]:
    """The names of the flat buffers whose first reduction is among ranks that share memory."""
    if local_size == 1:
        return frozenset()
    over = {flat.name: (flat.mesh, due[0].over) for flat in flats if flat.trainable and (due := reduce_due(flat))}
    return frozenset(
        name for name, (mesh, axis) in over.items() if axis in mesh.axes and mesh.is_within_hosts((axis,), local_size)
    )


def _with_outer_steps(step: Program, outer_steps: Sequence[OuterStep]) -> tuple[Program, Program]:
    """What is on its way before the step begins, and `step` with the outer steps that follow it: all of them, because
    each leaves nothing behind. With an overlap, the one that holds most is begun before, and ends here."""
    if not outer_steps:
        return (), step
    *blocks, last = step
    begun: Program = ()
    if all(one.fragment.begins == one.fragment.ends for one in outer_steps):
        ended = [block for one in outer_steps for block in one.program]
    else:
        largest = max(outer_steps, key=lambda one: one.sent_bytes)
        begun, ended = (largest.begin,), [largest.settle, largest.end]
    return begun, (*blocks, last._replace(actions=(*last.actions, *actions_of(ended))))


def _on_host(
    flats: Sequence[FlatSpec], buffers: int, states_per_param: int, coordinate: Mapping[str, int] | None
) -> HostFootprint | None:
    rows: tuple[Buffer, ...] = ("param", "master", "grad", "anchor")
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
    """Host buffers for what is read from a disk and written to it."""
    updated = [disk_bytes(flat, coordinate, states_per_param) for flat in flats if flat.updates_from_disk]
    read = [resting_disk_bytes(flat) for flat in flats if flat.rests_on_disk]
    to_update = min(NUM_DISK_BUFFERS, len(updated)) * max(updated, default=0)
    return to_update + min(NUM_READ_BUFFERS, len(read)) * max(read, default=0)


def _resting_bytes(flats: Sequence[FlatSpec], tier: Tier) -> int:
    return sum(flat.resting_bytes for flat in flats if flat.tier_of("param") == tier)


def _kept_bytes(flats: Sequence[FlatSpec], summed_in_place: Container[str]) -> int:
    """What ranks of one host keep on the CPU for sending gradients. Promises do not depend on where ranks run, so it is
    always counted.

    Where parameters come and go nothing is kept through a forward. What is only copied to another tier is not read
    meanwhile, so that one block, the largest, serves all of it ([Note: requests of several sizes] in
    `comm/transport/shm/arena.py`). What is left in another dtype than it is sent in, as by stages, lies in a rank's own
    memory, which is freed.
    """
    if not all(flat.resident for flat in flats):
        return 0
    sent, copied = [], 0
    for flat in flats:
        is_as_sent = flat.fresh.dtype == flat.table.grad_wire.dtype
        if flat.trainable and is_as_sent and not fills_grad(flat) and (actions := reduce_due(flat)):
            num_bytes = flat.table.grad_wire.num_bytes(flat.numel)
            num_bytes -= own_chunk_bytes(flat) if flat.name in summed_in_place else 0
            if any(action.communicates for action in actions):
                sent.append(num_bytes)
            else:
                copied = max(copied, num_bytes)
    return sum(sorted([*sent, copied])[-NUM_KEPT_BLOCKS:])


def _marks(micro_batch: Program, activations: Activations | None) -> tuple[Mark | None, ...]:
    """The mark of each block's moment."""
    if activations is None:
        return (None,) * len(micro_batch)
    moments = [block.moment for block in micro_batch]
    marked = [mark.moment for mark in activations.marks]
    if moments != marked:
        said, instead = (list(map(str, some)) for some in (marked, moments))
        raise ProgramError(f"The activations were rehearsed in another order: {said} instead of {instead}.")
    return activations.marks


def _grad_heap_bytes(flats: Sequence[FlatSpec]) -> int:
    """Gradients that stay where they are made and lie in the heap, which they leave with each step as activations do.
    Without an optimizer it is not known how large they are."""
    staying = [flat for flat in flats if flat.trainable and stay_as_made(flat)]
    return sum(heap_bytes(one.span.numel * WIDTH[flat.table.grad.dtype]) for flat in staying for one in flat.updates)


def _optim_bytes(
    flats: Sequence[FlatSpec], tier: Tier, states_per_param: int, coordinate: Mapping[str, int] | None
) -> int:
    """States and master weights on `tier`, what islands have in common of them, and what codes of gradients have
    lost."""
    num_bytes = 0
    for flat in flats:
        if not flat.trainable:
            continue
        if flat.tier_of("anchor") == tier:
            num_bytes += flat.outer_bytes
        if flat.tier_of("master") == tier:
            num_bytes += optim_bytes_of(flat, states_per_param, coordinate)
        if tier == "device":
            num_bytes += losses_bytes(flat)
    return num_bytes


def disk_bytes(flat: FlatSpec, coordinate: Mapping[str, int] | None, states_per_param: int = 0) -> int:
    """The size of a flat buffer's file on a disk: whole pages for the parameters, if they rest there, followed by whole
    pages for states and master weights."""
    states = optim_bytes_of(flat, states_per_param, coordinate) if flat.updates_from_disk else 0
    return resting_disk_bytes(flat) + round_up(states, PAGE)


def resting_disk_bytes(flat: FlatSpec) -> int:
    """The part of that file that a forward or backward reads; 0 if parameters rest elsewhere."""
    return round_up(flat.resting_bytes, PAGE) if flat.rests_on_disk else 0


def optim_bytes_of(flat: FlatSpec, states_per_param: int, coordinate: Mapping[str, int] | None) -> int:
    """States, master weights where these are not the parameters themselves, and what was not sent yet."""
    return updated_bytes_of(flat, states_per_param, coordinate) + residual_bytes(flat) + factored_bytes(flat)


def updated_bytes_of(flat: FlatSpec, states_per_param: int, coordinate: Mapping[str, int] | None) -> int:
    """What an update changes beside the parameters themselves: states, and master weights."""
    copies = (0 if flat.updates else states_per_param) + (0 if flat.master_is_param else 1)
    num_bytes = copies * flat.num_bytes(flat.table.optim.shard, flat.table.optim.dtype)
    return num_bytes + flat.state_bytes(coordinate)
