"""The plans that a search chooses from, and what each of them takes at least. Pure.

A candidate is light: 100,000 of them are bounded in seconds, and only those that may be among the best become plans.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, get_args

from shardwise.errors import ConfigError, ShardwiseError, nearest
from shardwise.fit.hardware import Hardware
from shardwise.plan import Activations, DtypeName, Offload, Pipeline, Plan, PolicyName, PrecisionName, WireFormat
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import BITS, PRESETS, WIDTH, Axes, Codes, Table, Tier, Wire, mesh_for, table_for
from shardwise.program.schedule import SCHEDULES, chunks_of
from shardwise.system.even_parts import divisors


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
Wires = tuple[tuple[str, str], ...]
"""Formats in which something is sent that the plan sends as it is, by what that is: a key of `SENT`, in their order."""
SENT = {"param": "parameters", "grad": "gradients"}


def wires_of(words: Sequence[str], what: str) -> tuple[Wires, ...]:
    """The formats that `words` name, such as `int4` of gradients and `param=int8` of parameters, each alone and one of
    each together. Raises `ConfigError`, which says `what` names them."""
    named: dict[str, list[str]] = {kind: [] for kind in SENT}
    formats = (*get_args(DtypeName), *BITS)
    for word in words:
        kind, _, dtype = word.rpartition("=")
        if kind and kind not in SENT:
            raise ConfigError(f"{what} is {word!r}, and formats are those of param or grad. {nearest(kind, SENT)}")
        if dtype not in formats:
            raise ConfigError(f"{what} is {word!r}. {nearest(dtype, formats)}")
        named[kind or "grad"].append(dtype)
    each = (("", *dict.fromkeys(dtypes)) for dtypes in named.values())
    every = (zip(SENT, chosen, strict=True) for chosen in itertools.product(*each))
    found = (tuple((kind, dtype) for kind, dtype in one if dtype) for one in every)
    return tuple(filter(None, found))


def precisions_of(words: Sequence[str], what: str) -> tuple[DtypeName, ...]:
    """Dtypes of forward and backward by their names. Raises `ConfigError`, which says `what` names them."""
    known: tuple[DtypeName, ...] = get_args(DtypeName)
    for word in words:
        if word not in known:
            raise ConfigError(f"{what} is {word!r}. {nearest(word, known)}")
    return tuple(name for name in known if name in words)


def sent_in(wires: Wires) -> str:
    return ", ".join(f"{SENT[kind]} sent in {dtype}" for kind, dtype in wires)


@dataclass(frozen=True)
class Space:
    """What may differ from the given plan. Axes that are not named keep size 1; `()` keeps the plan's own value.

    `rows`: sizes of a micro-batch of one data rank to be tried, () for all that divide. `precisions` and `wires` change
    the numbers, so that they are tried only if somebody asks for it; see [Note: codes between hosts].
    """

    presets: tuple[str, ...] = (*ON_DEVICE, *ON_HOST)
    axes: tuple[str, ...] = ("tp", "pp")
    activations: tuple[PolicyName, ...] = ("keep", "selective", "recompute", "offload")
    schedules: tuple[tuple[str, int], ...] = IN_STAGES
    rows: tuple[int, ...] = ()
    precisions: tuple[PrecisionName, ...] = ()
    wires: tuple[Wires, ...] = ()
    shares: bool = True
    """Whether what does not fit may have a share of its updates on the host, and of its states on a disk."""
    parts: int = 0
    """That of all candidates with pipeline stages."""


@dataclass(frozen=True)
class Size:
    """What is known of a model before it is split, with one treatment of activations: for bounds.

    Elements are those of the whole model. `flops_seconds` are those that a micro-batch of one row takes at least,
    forward, backward and what is computed again; `row_bytes` the most that its activations hold at once, and
    `between_row_bytes` between the two, of which `blocks_row_bytes` are those of the blocks; `host_row_bytes` what of
    them goes to the host, of all units and of the one of which most does.
    """

    numel: int
    trained_numel: int
    largest_unit_numel: int
    num_blocks: int
    num_states: int
    flops_seconds: float
    row_bytes: float
    host_row_bytes: float = 0.0
    host_unit_row_bytes: float = 0.0
    between_row_bytes: float = 0.0
    blocks_row_bytes: float = 0.0


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
    wires: Wires = ()
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
    def ranks_per_sample(self) -> int:
        """Among how many ranks a sample's activations, and what is computed for it, are divided."""
        return self.size("tp") * self.size("sp") * self.size("pp")

    @property
    def least_waiting(self) -> float:
        """How long a rank waits in a step at least, as a share of the forward and backward of a micro-batch through its
        stages."""
        others = self.size("pp") - 1
        if self.parts:  # each call fills the pipeline and drains it
            return self.accumulate * others / (self.parts * self.chunks)
        return SCHEDULES[self.schedule].waits * others / self.chunks

    @property
    def has_gradients_beside(self) -> bool:
        """Whether a rank has gradients of all it trains while it holds the activations of as many micro-batches as it
        ever does: once a pipeline is full, and each of several stages on a rank, which take turns, has been through a
        backward; and never if all forwards come first."""
        return self.accumulate >= self._num_rounds * self.size("pp") and not self.fills_first

    @property
    def _num_rounds(self) -> int:
        """Rounds of micro-batches through a pipeline after which it holds what it holds after more."""
        return 2 if self.chunks == 1 else 3  # several stages of a rank have all gradients only then

    @property
    def fills_first(self) -> bool:
        """Whether stages hold the activations of all micro-batches of a step."""
        return self.size("pp") > 1 and not self.parts and SCHEDULES[self.schedule].fills_first

    @property
    def fullest(self) -> Candidate:
        """It, or the same with as few rounds of micro-batches through its pipeline as hold as much as all of them."""
        stages = self.size("pp")
        if stages == 1 or self.accumulate <= 3 * stages or self.fills_first:
            return self
        return replace(self, accumulate=self._num_rounds * stages)

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
        if self.wires:
            formats = {kind: WireFormat.model_validate(dtype) for kind, dtype in self.wires}
            changed["wire"] = base.wire.model_copy(update=formats)
        if self.offload is not None:
            changed["offload"] = self.offload
        if self.disk is not None:
            changed["disk"] = self.disk
        if changed["mesh"] is None:  # a preset takes all ranks by itself
            del changed["mesh"]
        given = {name: getattr(base, name) for name in base.model_fields_set if name != "search"}
        return Plan(**{**given, **changed})

    def placed(self, base: Plan, ranks_per_node: int) -> tuple[Plan, Mesh]:
        """Its plan, on the mesh that `shard` would make."""
        plan = self.plan(base)
        return plan, mesh_for(plan, self.world_size, ranks_per_node)

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
        words += [f"{sent_in(self.wires)} (numerics asked for)"] if self.wires else []
        return ", ".join(words)


_SHARES = {
    "optim": "updated on the host",
    "optim_disk": "of the states on a disk",
    "param": "of the parameters at rest on the host",
    "param_disk": "of the parameters at rest on a disk",
}


def candidates(
    world_size: int, ranks_per_node: int, num_rows: int, num_blocks: int, base: Plan, space: Space
) -> Iterator[Candidate]:
    """All candidates of the space, on `world_size` ranks that train `num_rows` samples in a step. A plan that has a
    mesh keeps it."""
    policies = space.activations or (base.activations.policy or "keep",)
    precisions: tuple[PrecisionName | None, ...] = space.precisions or (None,)
    treatments = list(itertools.product(policies, precisions))
    for preset, wires in itertools.product(space.presets or (base.preset,), ((), *space.wires)):
        for sizes in _meshes(preset, world_size, ranks_per_node, num_blocks, base, space, wires):
            mesh = Mesh(tuple(axis for axis, _ in sizes), tuple(size for _, size in sizes))
            num_data, num_stages = math.prod(mesh.size(axis) for axis in mesh.data_axes), dict(sizes).get("pp", 1)
            if num_rows % num_data or (wires and mesh.num_replicas == 1):
                continue
            for rows in divisors(num_rows // num_data):
                if space.rows and rows not in space.rows:
                    continue
                accumulate = num_rows // num_data // rows
                parts = space.parts if num_stages > 1 else 0
                for schedule, chunks in _schedules(num_stages, accumulate, num_blocks, base, space):
                    for policy, precision in treatments:
                        how = (policy, schedule, chunks, precision, wires)
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
    preset: str, world_size: int, ranks_per_node: int, num_blocks: int, base: Plan, space: Space, wires: Wires
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
                    sizes = arranged(
                        preset, wires, world_size, ranks_per_node, {"pp": pp, "ep": ep, "sp": sp, "tp": tp}
                    )
                    if sizes is not None:
                        yield sizes


def arranged(
    preset: str, wires: Wires, world_size: int, ranks_per_node: int, split: Mapping[str, int]
) -> tuple[tuple[str, int], ...] | None:
    """The axes of `world_size` ranks that split the model as `split` says, by `SPLITTING`, outermost first; `None`
    where they do not divide, or the preset or the wires make no sense on what is left."""
    num_data, left = divmod(world_size, math.prod(split.values()))
    if left or not num_data:
        return None
    stages, *within = ((axis, split[axis]) for axis in SPLITTING)
    data = axes_of_data(preset, wires, num_data, ranks_per_node // math.prod(size for _, size in within))
    if data is None:
        return None
    outer = (stages,) if stages[1] > 1 else ()
    return (*outer, *data, *(one for one in within if one[1] > 1))


# [Note: codes between hosts] Codes gain nothing within a host, and a sum is made codes once. So where ranks of a host
# read different samples, plans with codes have the axes `node` and `local`, whichever preset it is, and `node` is where
# codes are sent; without several hosts there are none. A plain dtype is sent along all axes of any mesh.


def axes_of_data(preset: str, wires: Wires, num_ranks: int, most_local: int) -> tuple[tuple[str, int], ...] | None:
    """The axes of `num_ranks` that read different samples, of which at most so many are on one host; `None` where the
    preset or the wires make no sense for so few."""
    local = math.gcd(num_ranks, max(1, most_local))
    has_one, has_codes = len(PRESETS[preset].axes) == 1, any(dtype in BITS for _, dtype in wires)
    if has_one and not has_codes:
        return (("dp", num_ranks),)
    if num_ranks == local:
        return None
    if local > 1:
        return ("node", num_ranks // local), ("local", local)
    return (("dp", num_ranks),) if has_one else None


def _sizes(axis: str, world_size: int, most: int, space: Space) -> list[int]:
    return [size for size in divisors(world_size) if size <= most] if axis in space.axes else [1]


@dataclass(frozen=True)
class Bound:
    """What a candidate takes at least, on the fullest rank: bytes of a device, of a node's host, and seconds.

    `resting` and `grad` are bytes of a device that rest on the average rank, and in which gradients wait, `held` those
    of parameters between a forward and its backward; in a pipeline they are there for most of a step, and count as
    `resting`. `communicating` are seconds of messages beside what is computed.
    """

    device_bytes: float
    host_bytes: float
    seconds: float
    resting: float = 0.0
    grad: float = 0.0
    held: float = 0.0
    communicating: float = 0.0
    is_own: bool = False
    """Whether it is from what was counted of that very split and treatment."""

    def bytes_with(self, loads: Iterable[Load], *, grad_waits: bool) -> float:
        """Bytes of a device on the fullest of ranks with these loads; `grad_waits`: gradients are there while most
        activations are."""
        beside = self.resting + (self.grad if grad_waits else 0.0)
        most = (one.share * beside + max(one.activations, self.held + one.between) for one in loads)
        return max((self.device_bytes, *most))


class Load(NamedTuple):
    """What one rank has at least, once its model is known: parameters, as a share of what the average rank has, and
    bytes of activations at once, and `between` a forward and its backward, if that is known."""

    share: float
    activations: float
    between: float = 0.0


@dataclass(frozen=True)
class _Apart:
    """What of a bound does not depend on micro-batches: bytes that rest on a device, of gradients, of what is held of
    parameters from forwards to backwards, of what is gathered, and on a host; seconds of an update there, and of
    messages of each micro-batch: gathers, and a sum."""

    resting: float
    grad: float
    held: float
    gathered: float
    host: float
    updating: float
    gathering: float
    reducing: float


@dataclass
class Bounds:
    """Computes bounds of candidates. None is above what an exact evaluation finds, as far as parts of a model are never
    more efficient than the whole."""

    base: Plan
    hardware: Hardware
    size_of: dict[tuple[PolicyName, PrecisionName | None], Size]
    blocks_by_rank: Callable[[Candidate], Sequence[int]]
    """How many blocks each rank of a pipeline has. Raises `ShardwiseError` if it cannot have so many stages."""
    _apart: dict[object, _Apart | ShardwiseError] = field(default_factory=dict)
    """By what differs between candidates beside their micro-batches."""
    _most_blocks: dict[tuple[int, int, int], int] = field(default_factory=dict)
    """By stages, those of a rank, and micro-batches: blocks of which some rank holds activations, times how many."""
    _prices: dict[tuple[str, int, int], tuple[float, float]] = field(default_factory=dict)

    def of(self, candidate: Candidate) -> Bound:
        """Raises `ShardwiseError` for a plan that is impossible."""
        size = self.size_of[candidate.policy, candidate.precision]
        key = candidate.preset, candidate.sizes, candidate.policy, candidate.precision, candidate.wires
        apart = self._apart.get(key)
        if apart is None:
            try:
                apart = self._found_apart(candidate, size)
            except ShardwiseError as error:
                apart = error
            self._apart[key] = apart
        if isinstance(apart, ShardwiseError):
            raise apart
        communicating = candidate.accumulate * (apart.gathering + apart.reducing)
        rows = candidate.rows / (candidate.size("tp") * candidate.size("sp"))
        resting, held = apart.resting, apart.held
        activations = max(size.row_bytes * rows, held + size.between_row_bytes * rows)
        if candidate.size("pp") > 1:  # before its first backward a rank has used all of its units
            resting, held = resting + held, 0.0
            activations = size.blocks_row_bytes * rows * self._in_flight(candidate, size)
        return Bound(
            resting + max(apart.grad, activations, apart.gathered),
            apart.host,
            max(self._computing(candidate, size), communicating, apart.updating, self._copying(candidate, size)),
            resting,
            apart.grad,
            held,
            communicating,
        )

    def _in_flight(self, candidate: Candidate, size: Size) -> float:
        """What blocks hold at once on some rank of a pipeline, at least, as a share of what all blocks hold of one
        micro-batch. A rank holds as many of these as there are ranks from it on; with several stages, one less of
        each."""
        stages, chunks = candidate.size("pp"), candidate.chunks
        most = 1 if candidate.parts else min(stages, candidate.accumulate)
        if (stages, chunks, most) not in self._most_blocks:
            blocks = self.blocks_by_rank(candidate)
            some = (min(stages - rank - (chunks > 1), most) * num for rank, num in enumerate(blocks))
            self._most_blocks[stages, chunks, most] = max(some)
        return self._most_blocks[stages, chunks, most] / size.num_blocks

    def _found_apart(self, candidate: Candidate, size: Size) -> _Apart:
        """Raises `ShardwiseError` where `shard` would."""
        mesh = candidate.mesh
        plan = replace(candidate, accumulate=1, policy="keep").plan(self.base)
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
        blocks = size.num_blocks / candidate.size("pp")  # of the average rank, each of which is a message of its own
        if table.param.shard:
            again = numel - gathered / width  # one unit stays from its forward to its backward
            passes = ((numel, blocks, table.param.shard), (again, blocks - 1, table.held.shard))
            if mesh.has_stages:  # one stays from each pass to the next, and what is held stays for the whole step
                passes = ((again, blocks - 1, table.held.shard), (again, blocks - 1, table.held.shard))
            for some, num, shard in passes:
                of_param = table.param_codes, table.param_wire
                gathering += self._sending("all_gather", some, num, width, mesh, shard, *of_param)
        if table.grad.shard and table.grad.shard == table.optim.shard:
            of_grad = table.grad_codes, table.grad_wire
            num = blocks if trained == numel else 1.0
            reducing = self._sending("reduce_scatter", numel, num, width, mesh, table.grad.shard, *of_grad)
        return _Apart(
            resting=resting("device"),
            grad=on("device", table.grad.tier, trained * WIDTH[table.grad.dtype], table.grad.shard),
            held=on("device", table.held.tier, max(0.0, numel * width - gathered), table.held.shard)
            if table.param.shard and table.held.shard != table.param.shard
            else 0.0,
            gathered=gathered if table.param.shard else 0.0,
            host=(resting("host") + on("host", table.grad.tier, trained * 4, table.grad.shard)) * num_local,
            updating=self._on_host(candidate, table, trained),
            gathering=gathering,
            reducing=reducing,
        )

    def _computing(self, candidate: Candidate, size: Size) -> float:
        seconds = size.flops_seconds * candidate.rows * candidate.accumulate / candidate.ranks_per_sample
        return seconds * (1 + candidate.least_waiting / candidate.accumulate)

    def _copying(self, candidate: Candidate, size: Size) -> float:
        """Activations to the host in each forward, and back in its backward: what they take on their link, while all
        else may go on. Those of one unit may go there, and come back, beside another pass."""
        if not size.host_row_bytes or self.hardware.host is None:
            return 0.0
        one_way = size.host_row_bytes / candidate.size("pp")
        row_bytes = max(one_way, 2 * (one_way - size.host_unit_row_bytes))
        num_rows = candidate.rows * candidate.accumulate / (candidate.size("tp") * candidate.size("sp"))
        return self.hardware.host_copy_seconds(row_bytes * num_rows)

    def _on_host(self, candidate: Candidate, table: Table, trained: float) -> float:
        """Gradients that go there, the update, and parameters that come back."""
        host = self.hardware.host
        if table.optim.tier == "device" or host is None:
            return 0.0
        numel = trained / math.prod(candidate.mesh.size(axis) for axis in table.optim.shard)
        num_local = min(candidate.world_size, self.hardware.ranks_per_node)
        copying = self.hardware.host_copy_seconds(numel * WIDTH[table.compute])
        return max(copying, num_local * numel / host.adam_elements_per_second)

    def _sending(
        self,
        kind: str,
        numel: float,
        num: float,
        width: int,
        mesh: Mesh,
        shard: Axes,
        codes: Codes | None,
        wire: Wire | None,
    ) -> float:
        """Of elements in `num` messages, that are `width` bytes wide, unless their wire is narrower; or of their codes
        alone, along the axes that have them, of what is left of a buffer there."""
        if numel <= 0 or not shard:
            return 0.0
        if codes is None:
            num_bytes = numel * min(width, WIDTH[wire.dtype] if wire is not None else width)
            return self._collective(kind, num_bytes, num, mesh, shard)
        axes = [axis for axis in shard if axis in codes.axes]
        if not axes:
            return 0.0
        left = numel / math.prod(mesh.size(axis) for axis in shard if axis not in axes)
        kind = kind if kind == "all_gather" else "all_to_all"  # ranks add up what others have made codes
        return self._collective(kind, left * codes.bytes_per_element, num, mesh, axes)

    def _collective(self, kind: str, num_bytes: float, num: float, mesh: Mesh, axes: Sequence[str]) -> float:
        """Of `num` messages along `axes`, which lie next to each other in the mesh."""
        key = kind, math.prod(mesh.size(axis) for axis in axes), mesh.stride(axes[-1])
        if key not in self._prices:
            ranks = range(0, key[1] * key[2], key[2])
            price = self.hardware.collective_seconds
            self._prices[key] = price(kind, 0, ranks), price(kind, 2**30, ranks)
        none, one = self._prices[key]  # seconds are affine in bytes
        return max(1.0, num) * none + num_bytes * (one - none) / 2**30
