"""The plans that a search chooses from, and what each of them takes at least. Pure.

A candidate is light: 100,000 of them are bounded in seconds, and only those that may be among the best become plans.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from shardwise.errors import ShardwiseError
from shardwise.fit.hardware import Hardware
from shardwise.plan import Activations, Offload, Pipeline, Plan, PolicyName, PrecisionName, WireFormat
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import PRESETS, WIDTH, Table, Tier, table_for
from shardwise.program.schedule import SCHEDULES, chunks_of


def _using(*tiers: Tier) -> tuple[str, ...]:
    """The presets that use just these tiers."""
    rows = {name: (one.param, one.held, one.grad, one.optim) for name, one in PRESETS.items()}
    return tuple(name for name, places in rows.items() if {place.tier for place in places} == set(tiers))


ON_DEVICE, ON_HOST = _using("device"), _using("device", "host")
SPLITTING = ("pp", "ep", "sp", "tp")
"""Axes along which ranks compute different things, from outside inwards."""
MOST_STAGES = 64
MOST_ROWS = 2**30
"""Samples of a step; larger numbers are mistakes."""
SCHEDULE = Pipeline().schedule
"""That of a plan which says nothing."""
IN_STAGES = tuple((name, chunks) for name, kind in SCHEDULES.items() for chunks in kind.chunks)
"""Schedules of pipelines, with the stages on each rank."""


@dataclass(frozen=True)
class Space:
    """What may differ from the given plan. Axes that are not named keep size 1; `()` keeps the plan's own value.

    `rows`: sizes of a micro-batch of one data rank to be tried, () for all that divide. `wires`: dtypes of gradients on
    the wire, which change the numbers, so that they are tried only if somebody asks for it.
    """

    presets: tuple[str, ...] = (*ON_DEVICE, *ON_HOST)
    axes: tuple[str, ...] = ("tp", "pp")
    activations: tuple[PolicyName, ...] = ("keep", "selective", "recompute", "offload")
    schedules: tuple[tuple[str, int], ...] = IN_STAGES
    rows: tuple[int, ...] = ()
    precisions: tuple[PrecisionName, ...] = ()
    wires: tuple[str, ...] = ()
    shares: bool = True
    """Whether what does not fit may have a share of its updates on the host, and of its states on a disk."""
    parts: int = 0
    """That of all candidates with pipeline stages."""


@dataclass(frozen=True)
class Size:
    """What is known of a model before it is split, with one treatment of activations: for bounds.

    Elements are those of the whole model. `flops_seconds` are those that a micro-batch of one row takes at least,
    forward, backward and what is computed again; `row_bytes` the most that its activations hold at once.
    """

    numel: int
    trained_numel: int
    largest_unit_numel: int
    num_blocks: int
    num_states: int
    flops_seconds: float
    row_bytes: float


@dataclass(frozen=True)
class Candidate:
    """One way to train `num_rows` samples in a step, on ranks that are arranged as `sizes`, outermost first; `rows` are
    those of a micro-batch of one data rank. `schedule` is that of a pipeline, with `chunks` stages on each rank."""

    preset: str
    sizes: tuple[tuple[str, int], ...]
    rows: int
    accumulate: int
    policy: PolicyName = "keep"
    schedule: str = SCHEDULE
    chunks: int = 1
    precision: PrecisionName | None = None
    wire: str | None = None
    offload: Offload | None = None
    """The shares of a preset on the device that are off it; `disk` is the folder of those on a disk."""
    disk: str | None = None
    parts: int = 0
    """In how many parts a micro-batch passes through pipeline stages where a loop calls the model with it; 0 where
    `engine.train_step` runs the schedule."""

    def size(self, axis: str) -> int:
        return self._size_of.get(axis, 1)

    @cached_property
    def _size_of(self) -> Mapping[str, int]:
        return dict(self.sizes)

    @cached_property
    def mesh(self) -> Mesh:
        return Mesh(tuple(axis for axis, _ in self.sizes), tuple(size for _, size in self.sizes))

    @cached_property
    def world_size(self) -> int:
        return math.prod(size for _, size in self.sizes)

    @property
    def least_waiting(self) -> float:
        """How long a rank waits in a step at least, as a share of the forward and backward of a micro-batch through its
        stages."""
        others = self.size("pp") - 1
        if self.parts:  # each call fills the pipeline and drains it
            return self.accumulate * others / (self.parts * self.chunks)
        return SCHEDULES[self.schedule].waits * others / self.chunks

    @property
    def most_in_flight(self) -> int:
        """Micro-batches whose activations the first rank of a pipeline holds at once, at least."""
        return 1 if self.parts else min(self.size("pp"), self.accumulate)

    @cached_property
    def split(self) -> tuple[int, ...]:
        """How many ranks there are, and how they split the model: by `SPLITTING`."""
        return (self.world_size, *map(self.size, SPLITTING))

    def plan(self, base: Plan) -> Plan:
        """`base` with what the candidate says."""
        changed: dict[str, Any] = {
            "preset": self.preset,
            "mesh": None if [axis for axis, _ in self.sizes] == ["dp"] and base.mesh is None else dict(self.sizes),
            "accumulate": self.accumulate,
            "activations": base.activations
            if base.activations.policy == self.policy
            else Activations(policy=self.policy),
        }
        if self.size("pp") > 1:
            asked = Pipeline(schedule=self.schedule, stages=base.pipeline.stages)
            is_default = self.chunks == chunks_of(asked)
            changed["pipeline"] = asked if is_default else asked.model_copy(update={"virtual_stages": self.chunks})
        if self.precision is not None:
            changed["precision"] = self.precision
        if self.wire is not None:
            changed["wire"] = base.wire.model_copy(update={"grad": WireFormat.model_validate(self.wire)})
        if self.offload is not None:
            changed["offload"] = self.offload
        if self.disk is not None:
            changed["disk"] = self.disk
        if changed["mesh"] is None:  # a preset takes all ranks by itself
            del changed["mesh"]
        return Plan(**{**{name: getattr(base, name) for name in base.model_fields_set}, **changed})

    def __str__(self) -> str:
        split = [f"{axis} {size}" for axis, size in self.sizes if size > 1]
        words = [self.preset, *split, f"{self.accumulate} x {self.rows} rows"]
        if self.size("pp") > 1:
            schedule = f"calls in {self.parts} parts" if self.parts else self.schedule
            words.append(schedule + (f" of {self.chunks}" if self.chunks > 1 else ""))
        if self.policy != "keep":
            words.append(f"activations {self.policy}")
        words += [self.precision] if self.precision is not None else []
        for key, what in _SHARES.items():
            share = 0.0 if self.offload is None else getattr(self.offload, key)
            words += [f"{share:.0%} {what}"] if share else []
        words += [f"gradients sent in {self.wire}"] if self.wire is not None else []
        return ", ".join(words)


_SHARES = {
    "optim": "updated on the host",
    "optim_disk": "of the states on a disk",
    "param": "of the parameters at rest on the host",
    "param_disk": "of the parameters at rest on a disk",
}


def divisors(number: int) -> list[int]:
    low = [one for one in range(1, math.isqrt(number) + 1) if number % one == 0]
    return sorted({*low, *(number // one for one in low)})


def candidates(
    world_size: int, ranks_per_node: int, num_rows: int, num_blocks: int, base: Plan, space: Space
) -> Iterator[Candidate]:
    """All candidates of the space, on `world_size` ranks that train `num_rows` samples in a step. A plan that has a
    mesh keeps it."""
    policies = space.activations or (base.activations.policy or "keep",)
    precisions: tuple[PrecisionName | None, ...] = space.precisions or (None,)
    wires: tuple[str | None, ...] = (None, *space.wires)
    treatments = list(itertools.product(policies, precisions, wires))
    for preset in space.presets or (base.preset,):
        for sizes in _meshes(preset, world_size, ranks_per_node, num_blocks, base, space):
            mesh = Mesh(tuple(axis for axis, _ in sizes), tuple(size for _, size in sizes))
            num_data, num_stages = math.prod(mesh.size(axis) for axis in mesh.data_axes), dict(sizes).get("pp", 1)
            if num_rows % num_data:
                continue
            for rows in divisors(num_rows // num_data):
                if space.rows and rows not in space.rows:
                    continue
                accumulate = num_rows // num_data // rows
                parts = space.parts if num_stages > 1 else 0
                for schedule, chunks in _schedules(num_stages, accumulate, num_blocks, base, space):
                    for policy, precision, wire in treatments:
                        how = (policy, schedule, chunks, precision, wire)
                        yield Candidate(preset, sizes, rows, accumulate, *how, parts=parts)


def _schedules(
    num_stages: int, accumulate: int, num_blocks: int, base: Plan, space: Space
) -> Iterator[tuple[str, int]]:
    if num_stages == 1:
        yield SCHEDULE, 1
    elif not space.schedules:
        yield base.pipeline.schedule, chunks_of(base.pipeline)
    for schedule, chunks in space.schedules if num_stages > 1 else ():
        is_taken = space.parts > 0 or SCHEDULES[schedule].takes(num_stages, accumulate)
        if num_stages * chunks <= num_blocks and is_taken:
            yield schedule, chunks


def _meshes(
    preset: str, world_size: int, ranks_per_node: int, num_blocks: int, base: Plan, space: Space
) -> Iterator[tuple[tuple[str, int], ...]]:
    """Axes in the order of how often their ranks communicate, the most often innermost."""
    if base.mesh is not None:
        mesh = Mesh.of(base.mesh, world_size)
        axes = PRESETS[preset].axes
        if len(axes) == 1 or all(axis in mesh.axes for axis in axes):
            yield tuple(zip(mesh.axes, mesh.sizes, strict=True))
        return
    for pp in _sizes("pp", world_size, min(num_blocks, MOST_STAGES), space):
        for tp in _sizes("tp", world_size // pp, ranks_per_node, space):
            for sp in _sizes("sp", world_size // (pp * tp), ranks_per_node // tp or 1, space):
                for ep in _sizes("ep", world_size // (pp * tp * sp), MOST_STAGES, space):
                    rest = world_size // (pp * tp * sp * ep)
                    outer = (("pp", pp),) if pp > 1 else ()
                    inner = tuple((axis, size) for axis, size in (("ep", ep), ("sp", sp), ("tp", tp)) if size > 1)
                    if len(PRESETS[preset].axes) == 1:
                        yield (*outer, ("dp", rest), *inner)
                        continue
                    local = math.gcd(rest, max(1, ranks_per_node // (tp * sp * ep)))
                    if local > 1 and rest > local:
                        yield (*outer, ("node", rest // local), ("local", local), *inner)


def _sizes(axis: str, world_size: int, most: int, space: Space) -> list[int]:
    return [size for size in divisors(world_size) if size <= most] if axis in space.axes else [1]


@dataclass(frozen=True)
class Bound:
    """What a candidate takes at least, on the fullest rank: bytes of a device, of a node's host, and seconds."""

    device_bytes: float
    host_bytes: float
    seconds: float


@dataclass(frozen=True)
class _Apart:
    """What of a bound does not depend on micro-batches: bytes that rest on a device, of gradients, of what is gathered,
    and on a host; seconds of an update there, and of messages of each micro-batch: so many gathers, and a sum."""

    resting: float
    grad: float
    gathered: float
    host: float
    updating: float
    num_gathers: int
    gathering: float
    reducing: float


@dataclass
class Bounds:
    """Computes bounds of candidates. None is above what an exact evaluation finds, as far as parts of a model are never
    more efficient than the whole."""

    base: Plan
    hardware: Hardware
    size_of: dict[tuple[PolicyName, PrecisionName | None], Size]
    _apart: dict[object, _Apart | ShardwiseError] = field(default_factory=dict)
    """By what differs between candidates beside their micro-batches."""
    _prices: dict[tuple[str, int, int], tuple[float, float]] = field(default_factory=dict)

    def of(self, candidate: Candidate) -> Bound:
        """Raises `ShardwiseError` for a plan that is impossible."""
        size = self.size_of[candidate.policy, candidate.precision]
        key = candidate.preset, candidate.sizes, candidate.policy, candidate.precision
        apart = self._apart.get(key)
        if apart is None:
            try:
                apart = self._found_apart(candidate, size)
            except ShardwiseError as error:
                apart = error
            self._apart[key] = apart
        if isinstance(apart, ShardwiseError):
            raise apart
        spread = candidate.size("tp") * candidate.size("sp") * candidate.size("pp")
        activations = size.row_bytes * candidate.rows * candidate.most_in_flight / spread
        communicating = apart.num_gathers * candidate.accumulate * apart.gathering
        communicating += candidate.accumulate * apart.reducing
        return Bound(
            apart.resting + max(apart.grad, activations, apart.gathered),
            apart.host,
            max(self._computing(candidate, size), communicating, apart.updating),
        )

    def _found_apart(self, candidate: Candidate, size: Size) -> _Apart:
        """Raises `ShardwiseError` where `shard` would."""
        mesh = candidate.mesh
        plan = replace(candidate, accumulate=1, policy="keep", wire=None).plan(self.base)
        table = table_for(plan, mesh).on(mesh)
        parts = candidate.size("tp") * candidate.size("pp") * candidate.size("ep")
        numel, trained = size.numel / parts, size.trained_numel / parts
        width = WIDTH[table.compute]

        def on(tier: str, place_tier: str, num_bytes: float, axes: Sequence[str]) -> float:
            return num_bytes / math.prod(mesh.size(axis) for axis in axes) if tier == place_tier else 0.0

        own_master = 0 if (table.param.dtype, table.param.tier) == (table.optim.dtype, table.optim.tier) else 1
        state_bytes = trained * (size.num_states + own_master) * WIDTH[table.optim.dtype]

        def resting(tier: str) -> float:
            param = on(tier, table.param.tier, numel * width, table.param.shard)
            return param + on(tier, table.optim.tier, state_bytes, table.optim.shard)

        gathered = size.largest_unit_numel * width / (candidate.size("tp") * candidate.size("ep"))
        num_local = min(candidate.world_size, self.hardware.ranks_per_node)
        gathering = reducing = 0.0
        if table.param.shard:
            gathering = self._collective("all_gather", numel * width, mesh, table.param.shard)
        if table.grad.shard and table.grad.shard == table.optim.shard:
            reducing = self._collective("reduce_scatter", numel * width, mesh, table.grad.shard)
        return _Apart(
            resting=resting("device"),
            grad=on("device", table.grad.tier, trained * WIDTH[table.grad.dtype], table.grad.shard),
            gathered=gathered if table.param.shard else 0.0,
            host=(resting("host") + on("host", table.grad.tier, trained * 4, table.grad.shard)) * num_local,
            updating=self._on_host(candidate, table, trained),
            num_gathers=1 if table.held.shard == () else 2,
            gathering=gathering,
            reducing=reducing,
        )

    def _computing(self, candidate: Candidate, size: Size) -> float:
        split = candidate.size("tp") * candidate.size("sp") * candidate.size("pp")
        rows = candidate.rows * candidate.accumulate
        return size.flops_seconds * rows / split * (1 + candidate.least_waiting / candidate.accumulate)

    def _on_host(self, candidate: Candidate, table: Table, trained: float) -> float:
        """Gradients that go there, the update, and parameters that come back."""
        host = self.hardware.host
        if table.optim.tier == "device" or host is None:
            return 0.0
        numel = trained / math.prod(candidate.mesh.size(axis) for axis in table.optim.shard)
        num_local = min(candidate.world_size, self.hardware.ranks_per_node)
        copying = self.hardware.host_copy_seconds(numel * WIDTH[table.compute])
        return max(copying, num_local * numel / host.adam_elements_per_second)

    def _collective(self, kind: str, num_bytes: float, mesh: Mesh, axes: Sequence[str]) -> float:
        """Along `axes`, which lie next to each other in the mesh."""
        key = kind, math.prod(mesh.size(axis) for axis in axes), mesh.stride(axes[-1])
        if key not in self._prices:
            ranks = range(0, key[1] * key[2], key[2])
            price = self.hardware.collective_seconds
            self._prices[key] = price(kind, 0, ranks), price(kind, 2**30, ranks)
        none, one = self._prices[key]  # seconds are affine in bytes
        return none + num_bytes * (one - none) / 2**30
