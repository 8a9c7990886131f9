"""What each action of a program costs, alone, in seconds. Pure.

`PRICES` has an entry for each entry of `program/effects.py`: an action without one is an error, not free. What an
action moves is in its `sent_bytes`; what it reads and writes in memory follows from the table of its flat buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwise.errors import ProgramError
from shardwise.fit.hardware import Hardware, fresh_seconds
from shardwise.fit.operations import Operation
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import WIDTH, Dtype, SumOfCodes
from shardwise.program import (
    ALL_FLATS,
    Action,
    FlatSpec,
    Program,
    States,
    StepProgram,
    Update,
    backward_makes,
    disk_bytes,
    resting_disk_bytes,
    stay_as_made,
)
from shardwise.program.effects import Buffer, Subject, Verb

HOST, DISK = "host", "disk"
LINKS = {"evict": "to the host", "fetch": "from the host"}
"""A device's link to its host, which goes both ways at once."""
COPIES_TO_ENCODE, COPIES_TO_DECODE = 4.0, 3.0
"""What it takes to make codes of an element and to read them, in copies of it in fp32 from memory to memory. On one
core it was 3.7 and 2.2 for int8, and 4.3 and 3.5 for int4 (docs/between-hosts.md)."""
COPIES_TO_FEED_BACK = 5.0
"""What error feedback takes beside it, of an element that is encoded: 4.3 for int8, and 4.9 for int4."""
ADAM = Update(States(copies=2))
NEWTON_SCHULZ_STEPS = 5
"""Of Muon, whose steps multiply `Matrix.cost` pairs each."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of one action on its own stream, on `links` that it shares with others, for the sake of `axis`.

    `computing` are seconds of the computing stream when it is issued: for casts and codes.
    """

    seconds: float = 0.0
    links: tuple[str, ...] = ()
    axis: str = ""
    computing: float = 0.0


FREE = Cost()


class Prices:
    """The prices of one rank's actions on some hardware."""

    def __init__(
        self,
        step: StepProgram,
        hardware: Hardware,
        mesh: Mesh,
        *,
        rank: int = 0,
        num_states: int = 2,
        num_micro_batches: int = 1,
    ) -> None:
        """`num_micro_batches` are those whose gradients are added in a step."""
        self.hardware = hardware
        self.num_states = num_states
        self.num_micro_batches = num_micro_batches
        self.flats: Mapping[str, FlatSpec] = {flat.name: flat for unit in step.units for flat in unit.flats}
        self._keeps_blocks = all(flat.resident for flat in self.flats.values())
        """Whether blocks from which gradients are sent stay, with their pages, from one step to the next."""
        self.exchanges = step.matrix_exchanges
        self._mesh = mesh
        self._coordinate = mesh.coordinate(rank)
        self._rank = rank
        self._found: dict[Action, Cost] = {}
        self._lines: dict[str, Sequence[int]] = {}

    def of(self, action: Action) -> Cost:
        """Raises `ProgramError`, naming the action, if it has no price."""
        found = self._found.get(action)
        if found is None:
            price = PRICES.get((action.verb, action.subject))
            if price is None:
                raise ProgramError(f"'{action}' has no price: add one to PRICES in fit/prices.py.")
            found = self._found[action] = price(self, action)
        return found

    def flat(self, action: Action) -> FlatSpec:
        found = self.flats.get(action.flat)
        if found is None:
            raise ProgramError(f"'{action}' has no price: the flat buffer {action.flat!r} is in no unit of the step.")
        return found

    def ranks_along(self, over: str) -> Sequence[int]:
        """The ranks with which this one communicates along `over`: an axis, several joined by `+`, or `world`."""
        found = self._lines.get(over)
        if found is None:
            found = self._lines[over] = self._ranks_along(over)
        return found

    def _ranks_along(self, over: str) -> Sequence[int]:
        mesh = self._mesh
        if over == "world":
            return range(mesh.world_size)
        axes = over.split("+")
        if len(axes) > 1:
            return mesh.among(self._rank, axes)
        size, stride = mesh.size(over), mesh.stride(over)
        first = self._rank - self._coordinate[over] * stride
        return range(first, first + size * stride, stride)

    # -- what is not an action --------------------------------------------------------------------------

    @property
    def accumulates(self) -> bool:
        """Whether gradients are added to those of earlier micro-batches."""
        return self.num_micro_batches > 1

    def gradients_left(self, flats: Iterable[FlatSpec]) -> float:
        """After a backward: each gradient is written to its place in the flat buffer, by an operator of its own, unless
        it stays where it was made. The pages of what is sent are new, unless it is kept or sent from a block that is;
        those of what waits are new once a step."""
        hardware = self.hardware
        num_bytes, num_params, allocating = 0, 0, 0.0
        for flat in flats:
            if not flat.trainable:
                continue
            waits = backward_makes(flat) == "grad"
            left = flat.table.grad.dtype if waits else flat.fresh.dtype
            adds, stays = waits and self.accumulates, hardware.is_processor and stay_as_made(flat)
            num_params += flat.num_params
            if not stays or adds:
                num_bytes += flat.numel * (WIDTH[flat.table.compute] + WIDTH[left] * (2 if adds else 1))
            if stays or flat.keeps_grad_buffer:
                continue
            if waits:
                fresh = fresh_seconds(hardware.fresh_blocks, flat.numel * WIDTH[left])
                allocating += fresh / self.num_micro_batches
            elif not self._keeps_blocks:
                allocating += hardware.small_pages_seconds(flat.numel * WIDTH[left])
        starting = 0.0 if hardware.runs_ahead else num_params * hardware.launch_seconds
        return hardware.flat_seconds(num_bytes) + allocating + starting

    def activations(self, operations: Iterable[Operation], verb: str) -> tuple[Cost, ...]:
        """What copies of activations to a tier (`evict`) or back (`fetch`) cost, one for each tier."""
        by_tier: dict[str, float] = {}
        for one in operations:
            if one.kind == verb:
                by_tier[one.axis] = by_tier.get(one.axis, 0.0) + one.num_bytes
        return tuple(self._activations(tier, num_bytes, verb) for tier, num_bytes in by_tier.items())

    def _activations(self, tier: str, num_bytes: float, verb: str) -> Cost:
        copying = self.hardware.host_copy_seconds(num_bytes)
        if tier == HOST:
            return Cost(copying, (LINKS[verb],), HOST)
        if tier == DISK:
            read, written = (num_bytes, 0.0) if verb == "fetch" else (0.0, num_bytes)
            return Cost(max(copying, self.hardware.disk_seconds(read, written)), (LINKS[verb], DISK), DISK)
        raise ProgramError(f"Activations on the tier {tier!r} have no price.")

    def norm(self) -> float:
        """Before a step: the norm of all gradients that are due here is computed."""
        return self.hardware.flat_seconds(
            self.due_bytes(flat for flat in self.flats.values() if not flat.updates_below)
        )

    @staticmethod
    def due_bytes(flats: Iterable[FlatSpec]) -> int:
        """One rank's part of the gradients with which `flats` are updated."""
        return sum(flat.num_bytes(flat.table.due.shard, flat.table.due.dtype) for flat in flats if flat.trainable)

    def verification(self, program: Program, num_micro_batches: int = 1) -> float:
        """What is added to a verified step: `build_verification`, of which the pass is run `num_micro_batches`
        times."""
        costs = [
            (self.of(action), num_micro_batches if block.moment.unit else 1)
            for block in program
            for action in block.actions
        ]
        return sum(times * (cost.seconds + cost.computing) for cost, times in costs)

    def update(self) -> float:
        """The optimizer's own step, of what is updated on the device: gradients read, states and master weights read
        and written."""
        num_bytes = 0.0
        for flat in self.flats.values():
            if flat.trainable and not flat.updates_below:
                numel, width = flat.num_elements(flat.table.optim.shard), WIDTH[flat.table.optim.dtype]
                num_bytes += numel * (WIDTH[flat.table.due.dtype] + 2 * width) + 2 * _state_bytes(flat, self.num_states)
        return self.hardware.flat_seconds(num_bytes)


Price = Callable[[Prices, Action], Cost]


def _state_bytes(flat: FlatSpec, num_states: int) -> float:
    numel, width = flat.num_elements(flat.table.optim.shard), WIDTH[flat.table.optim.dtype]
    if not flat.updates:
        return num_states * numel * width
    whole = sum(placed.update.states.num_bytes(placed.span, flat.table.optim.dtype) for placed in flat.updates)
    return whole * numel / max(1, flat.numel)


def _free(_: Prices, __: Action) -> Cost:
    return FREE


def _collective(kind: str, rounds: int) -> Price:
    """A collective in which each rank sends `rounds` times n - 1 of the n parts of a buffer."""

    def price(prices: Prices, action: Action) -> Cost:
        ranks = prices.ranks_along(action.over)
        if len(ranks) < 2:
            return FREE
        if action.codes and kind != "all_gather":
            return _sum_of_codes(prices, action, ranks)
        part = action.sent_bytes / (rounds * (len(ranks) - 1))
        seconds = prices.hardware.collective_seconds(kind, part * len(ranks), ranks)
        computing = _encoding(prices, action)
        if kind != "all_gather" and prices.hardware.is_processor:
            computing += _adding(prices, action, part, len(ranks)) + _sum_memory(prices, action, part, len(ranks))
        return Cost(seconds, prices.hardware.links_of(ranks), action.over, computing)

    return price


def _adding(prices: Prices, action: Action, part: float, num_ranks: int) -> float:
    """What processors take to add up parts of so many bytes on the wire, of which one is the sum: devices do it while
    they receive. In a wider dtype than that of the wire, a rank's own part is first copied into the sum. Verdicts and
    sums of squares are too small to count."""
    if action.flat == ALL_FLATS:
        return 0.0
    table = prices.flat(action).table
    summed = table.grad.dtype if action.dtype == "-" else action.dtype
    wire, added = WIDTH[table.grad_wire.dtype], WIDTH[summed]
    copied = 0 if summed == table.grad_wire.dtype else wire + added
    return prices.hardware.flat_seconds(part / wire * (copied + (num_ranks - 1) * (wire + 2 * added)))


def _sum_memory(prices: Prices, action: Action, part: float, num_ranks: int) -> float:
    """What it costs processors to allocate a sum of which a part has so many bytes on the wire: it is new memory,
    unless it is made in a gradient buffer that is kept."""
    if action.flat == ALL_FLATS or prices.flat(action).keeps_grad_buffer:
        return 0.0
    table = prices.flat(action).table
    summed = table.grad.dtype if action.dtype == "-" else action.dtype
    numel = part / WIDTH[table.grad_wire.dtype] * (num_ranks if action.verb == "all_reduce" else 1)
    return fresh_seconds(prices.hardware.fresh_blocks, numel * WIDTH[summed])


def _sum_of_codes(prices: Prices, action: Action, ranks: Sequence[int]) -> Cost:
    """Codes to the ranks that sum them, and sums to all others if these do not sum themselves."""
    hardware, way = prices.hardware, SumOfCodes.parse(action.verb, action.codes)
    to_each = action.sent_bytes / (len(ranks) - 1)
    codes, sums = way.bytes_to_each(way.codes.block * len(ranks), len(ranks))
    share = sums / (codes + sums)
    kind = "all_gather" if way.gathers_codes else "all_to_all"
    seconds = hardware.collective_seconds(kind, to_each * (1 - share) * len(ranks), ranks)
    if sums:
        seconds += hardware.collective_seconds("all_gather", to_each * share * len(ranks), ranks)
    return Cost(seconds, hardware.links_of(ranks), action.over, _encoding(prices, action))


def _encoding(prices: Prices, action: Action) -> float:
    """What has to be computed before bytes are sent: parameters into codes, or gradients into the dtype of the wire."""
    if action.flat == ALL_FLATS:
        return 0.0
    flat = prices.flat(action)
    table = flat.table
    if action.codes:
        return _coding(prices, action)
    if action.verb == "gather" and table.param_wire is not None:
        numel = flat.num_elements(table.param.shard)
        return prices.hardware.flat_seconds(numel * WIDTH[table.param.dtype] + table.param_wire.num_bytes(numel))
    return 0.0


def _coding(prices: Prices, action: Action) -> float:
    """What it takes to encode what this rank sends, and to decode what arrives: both are counted when the action is
    issued."""
    num_ranks = len(prices.ranks_along(action.over))
    way = SumOfCodes.parse(action.verb, action.codes)
    of_codes = prices.hardware.flat_seconds(2 * WIDTH["fp32"])  # a copy of one element
    grad_codes = prices.flat(action).table.grad_codes
    is_fed_back = action.verb != "gather" and grad_codes is not None and grad_codes.feedback is not None
    to_encode = COPIES_TO_ENCODE + (COPIES_TO_FEED_BACK if is_fed_back else 0.0)
    if action.verb == "gather" or way.gathers_codes:
        own = action.sent_bytes / (num_ranks - 1) / way.codes.bytes_per_element
        return of_codes * own * (to_encode + num_ranks * COPIES_TO_DECODE)
    codes, sums = way.bytes_to_each(way.codes.block * num_ranks, num_ranks)
    own = action.sent_bytes / (num_ranks - 1) * way.codes.block / (codes + sums)
    return of_codes * own * num_ranks * (to_encode + COPIES_TO_DECODE)


def _decode(prices: Prices, action: Action) -> Cost:
    """Codes that rest here, made whole."""
    numel = prices.flat(action).numel
    return Cost(computing=prices.hardware.flat_seconds(2 * WIDTH["fp32"] * numel) * COPIES_TO_DECODE)


def _arrival(prices: Prices, action: Action) -> Cost:
    """A wait: it takes no time of its own, unless what has arrived must be decoded. What codes take is counted where
    they are sent."""
    flat = prices.flat(action)
    wire = flat.table.param_wire
    if action.subject not in ("full", "param", "updated") or wire is None:
        return FREE
    return Cost(computing=prices.hardware.flat_seconds(flat.full_bytes + wire.num_bytes(flat.numel)))


def _grad_arrival(prices: Prices, action: Action) -> Cost:
    """A reduced gradient waits for the step, or is added to those that wait: by the host, while a device computes, if
    they wait there."""
    flat = prices.flat(action)
    if not prices.accumulates or (flat.tier_of("grad") != "device" and not prices.hardware.is_processor):
        return FREE
    return Cost(computing=prices.hardware.flat_seconds(3 * flat.grad_bytes))


def _cast(source: str, target: str) -> Price:
    """Elements of one kind of row read in its dtype, and written in the dtype of the action."""

    def price(prices: Prices, action: Action) -> Cost:
        flat = prices.flat(action)
        rows = {"fresh": flat.fresh, "grad": flat.table.grad, "due": flat.table.due, "optim": flat.table.optim}
        dtype: Dtype = rows[source].dtype if action.dtype == "-" else action.dtype
        numel = flat.num_elements(rows[target].shard)
        return Cost(computing=prices.hardware.flat_seconds(numel * (WIDTH[rows[source].dtype] + WIDTH[dtype])))

    return price


def _cast_on_host(prices: Prices, action: Action) -> Cost:
    """Adam's update writes it in its own pass, at the rate that a host's updates are measured with ([Note: one pass] in
    `optim/host_adam.py`)."""
    flat = prices.flat(action)
    if all(placed.update == ADAM for placed in flat.updates):
        return FREE
    numel = flat.num_elements(flat.table.optim.shard)
    width = WIDTH[flat.table.optim.dtype] + WIDTH[flat.table.param.dtype]
    return Cost(computing=prices.hardware.host_memory_seconds(numel * width / 2))  # a rate of bytes read and written


def _slice_held(prices: Prices, action: Action) -> Cost:
    flat = prices.flat(action)
    return Cost(
        computing=prices.hardware.flat_seconds(2 * flat.num_bytes(flat.table.held.shard, flat.table.held.dtype))
    )


def _slice_due(prices: Prices, action: Action) -> Cost:
    flat = prices.flat(action)
    return Cost(computing=prices.hardware.flat_seconds(2 * flat.num_bytes(flat.table.due.shard, flat.table.due.dtype)))


def _copy(prices: Prices, action: Action) -> Cost:
    """Between the host and the device."""
    return Cost(prices.hardware.host_copy_seconds(action.sent_bytes), (LINKS[action.verb],), HOST)


def _fetch_param(prices: Prices, action: Action) -> Cost:
    flat = prices.flat(action)
    copying = prices.hardware.host_copy_seconds(action.sent_bytes)
    if not flat.rests_on_disk:
        return Cost(copying, (LINKS["fetch"],), HOST)
    reading = prices.hardware.disk_seconds(read_bytes=resting_disk_bytes(flat))
    return Cost(max(copying, reading), (LINKS["fetch"], DISK), DISK)


def _read_states(prices: Prices, action: Action) -> Cost:
    num_bytes = disk_bytes(prices.flat(action), None, prices.num_states)
    return Cost(prices.hardware.disk_seconds(read_bytes=num_bytes), (DISK,), DISK)


def _write_states(prices: Prices, action: Action) -> Cost:
    num_bytes = disk_bytes(prices.flat(action), None, prices.num_states)
    return Cost(prices.hardware.disk_seconds(written_bytes=num_bytes), (DISK,), DISK)


def _update_on_host(prices: Prices, action: Action) -> Cost:
    flat = prices.flat(action)
    return Cost(computing=prices.hardware.host_update_seconds(flat.num_elements(flat.table.optim.shard)), axis=HOST)


def _orthogonalize(prices: Prices, action: Action) -> Cost:
    """The busiest rank's Newton-Schulz iteration."""
    exchange = prices.exchanges.get(action.flat)
    if exchange is None:
        raise ProgramError(f"'{action}' has no price: the step has no matrices of {action.flat!r}.")
    by_owner: dict[int, float] = {}
    for matrix in exchange.matrices:
        short, long = sorted((matrix.rows, matrix.cols))
        products = (
            prices.hardware.product_seconds(short, short, long, exchange.dtype)
            + prices.hardware.product_seconds(short, short, short, exchange.dtype)
            + prices.hardware.product_seconds(short, long, short, exchange.dtype)
        )
        by_owner[matrix.owner] = by_owner.get(matrix.owner, 0.0) + NEWTON_SCHULZ_STEPS * products
    return Cost(computing=max(by_owner.values(), default=0.0))


def _exchange(prices: Prices, action: Action) -> Cost:
    """Pieces of matrices, each straight to its owner or back."""
    ranks = prices.ranks_along(action.over)
    if len(ranks) < 2:
        return FREE
    whole = action.sent_bytes * len(ranks) / (len(ranks) - 1)
    hardware = prices.hardware
    return Cost(hardware.collective_seconds("all_to_all", whole, ranks), hardware.links_of(ranks), action.over)


def _averaging(prices: Prices, action: Action) -> Cost:
    """Signs are made of momenta with their residuals, or momenta of signs: half of that at each of two waits."""
    flat = prices.flat(action)
    width = WIDTH[flat.table.optim.dtype]
    return Cost(computing=prices.hardware.flat_seconds(4 * flat.num_elements(flat.table.optim.shard) * width))


def _broadcast(prices: Prices, action: Action) -> Cost:
    ranks = prices.ranks_along(action.over)
    hardware = prices.hardware
    seconds = hardware.collective_seconds("broadcast", action.sent_bytes, ranks)
    return Cost(seconds, hardware.links_of(ranks), action.over)


def _checksum(prices: Prices, action: Action) -> Cost:
    """One pass over a row, on the tier where it lies."""
    flat = prices.flat(action)
    table = flat.table
    num_bytes = {
        "param": flat.num_bytes(table.param.shard, table.param.dtype),
        "master": flat.num_bytes(table.optim.shard, table.optim.dtype),
        "states": _state_bytes(flat, prices.num_states),
        "due": flat.num_bytes(table.due.shard, table.due.dtype),
        "full": flat.full_bytes,
    }[action.subject]
    buffers: dict[str, Buffer] = {"param": "param", "due": "due", "full": "full"}
    tier = flat.tier_of(buffers.get(action.subject, "master"))
    hardware = prices.hardware
    seconds = hardware.flat_seconds(num_bytes) if tier == "device" else hardware.host_memory_seconds(num_bytes)
    return Cost(computing=seconds)


def _outer(num_passes: int) -> Price:
    """Reads and writes of as many elements as a rank updates, where islands have them in common."""

    def price(prices: Prices, action: Action) -> Cost:
        flat, hardware = prices.flat(action), prices.hardware
        num_bytes = num_passes * flat.num_bytes(flat.table.optim.shard, flat.table.optim.dtype)
        is_here = flat.tier_of("anchor") == "device"
        return Cost(computing=hardware.flat_seconds(num_bytes) if is_here else hardware.host_memory_seconds(num_bytes))

    return price


def _compare(prices: Prices, action: Action) -> Cost:
    ranks = prices.ranks_along(action.over)
    if len(ranks) < 2:
        return FREE
    whole = action.sent_bytes * len(ranks) / (len(ranks) - 1)
    return Cost(prices.hardware.collective_seconds("all_gather", whole, ranks), (), action.over)


_gather = _collective("all_gather", 1)
_reduce_scatter = _collective("reduce_scatter", 1)
_all_reduce = _collective("all_reduce", 2)


def _as_factors(prices: Prices, action: Action) -> Cost:
    """A product with every matrix, and the sum of what it gives."""
    flat = prices.flat(action)
    sizes = [(one.rows, one.cols, one.rank) for one in flat.factored]
    dtype = flat.table.grad.dtype
    computing = sum(prices.hardware.product_seconds(rows, rank, cols, dtype) for rows, cols, rank in sizes)
    return replace(_all_reduce(prices, action), computing=computing)


PRICES: dict[tuple[Verb, Subject], Price] = {
    ("gather", "param"): _gather,
    ("decode", "param"): _decode,
    ("gather", "held"): _gather,
    ("gather", "updated"): _gather,
    ("fetch", "param"): _fetch_param,
    ("slice", "held"): _slice_held,
    ("free", "full"): _free,
    ("wait", "range"): _arrival,
    ("wait", "full"): _arrival,
    ("reduce_scatter", "grad"): _reduce_scatter,
    ("reduce_scatter", "due"): _reduce_scatter,
    ("all_reduce", "grad"): _all_reduce,
    ("all_reduce", "due"): _all_reduce,
    ("project", "grad"): _as_factors,
    ("restore", "grad"): _as_factors,
    ("cast", "grad"): _cast("fresh", "grad"),
    ("cast", "due"): _cast("grad", "due"),
    ("slice", "due"): _slice_due,
    ("evict", "grad"): _copy,
    ("evict", "due"): _copy,
    ("wait", "sum"): _free,
    ("wait", "grad"): _grad_arrival,
    ("wait", "due"): _free,
    ("agree", "verdict"): _all_reduce,
    ("agree", "sums"): _all_reduce,
    ("agree", "norms"): _all_reduce,
    ("collect", "update"): _exchange,
    ("wait", "matrix"): _free,
    ("orthogonalize", "update"): _orthogonalize,
    ("hand_back", "update"): _exchange,
    ("wait", "update"): _free,
    ("collect", "momentum"): _exchange,
    ("wait", "signs"): _averaging,
    ("hand_back", "momentum"): _exchange,
    ("wait", "momentum"): _averaging,
    ("fetch", "states"): _read_states,
    ("update", "master"): _update_on_host,
    ("evict", "states"): _write_states,
    ("cast", "outgoing"): _cast_on_host,
    ("fetch", "outgoing"): _copy,
    ("fetch", "updated"): _copy,
    ("cast", "param"): _cast("optim", "optim"),
    ("wait", "updated"): _arrival,
    ("wait", "param"): _arrival,
    ("broadcast", "buffers"): _broadcast,
    ("subtract", "outer"): _outer(3),
    ("all_reduce", "outer"): _all_reduce,
    ("wait", "outer"): _free,
    ("update", "anchor"): _outer(6),
    ("mix", "master"): _outer(3),
    ("checksum", "param"): _checksum,
    ("checksum", "master"): _checksum,
    ("checksum", "states"): _checksum,
    ("checksum", "due"): _checksum,
    ("checksum", "full"): _checksum,
    ("compare", "checksums"): _compare,
}
"""By verb and subject, as `EFFECTS`."""
