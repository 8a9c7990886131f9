"""What a machine can do, in seconds: a profile by name, or one of the user's own. Pure.

A profile has the published figures of a device and its links, and a few parameters that say what share of them a
program gets. Share and size are related by smooth functions, so that they can be fitted, and so that a plan that is a
little larger is a little slower.

[Note: messages at once] Devices communicate by NCCL, in rings and trees. Ranks on processors do not: each sends what it
has to all others at once (`comm/transport/pairwise.py`), and those of a host read it in shared memory, one of them for
each host that it comes from (`between_hosts.py`). That is as many bytes as in a ring, but a wait for one message within
a host and one between hosts, however many ranks and hosts there are; and a tensor that is broadcast leaves the host of
its sender once for each other host.
"""

from __future__ import annotations

import bisect
import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from shardwise.errors import ConfigError, nearest
from shardwise.fit.operations import Operation
from shardwise.plan.files.sources import read_source
from shardwise.plan.validation_messages import as_config_error
from shardwise.system.heap import HEAP_BLOCK_BYTES, LARGE_BLOCK_BYTES
from shardwise.system.units import parse_bytes

PROFILES = "profiles"
ROUTED_LAUNCHES = 0.35
"""What a call of a function takes, in launches, that goes through Python besides: 0.28 in models of transformers, and
0.40 in one's own, where it is looked at, too."""
SUFFIX = ".yaml"


def _bytes(value: object) -> object:
    return parse_bytes(value) if isinstance(value, str) else value


Bytes = Annotated[int, BeforeValidator(_bytes), Field(ge=0, description="bytes such as 80GiB")]
Rate = Annotated[float, Field(gt=0)]
Seconds = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]
Size = Annotated[float, Field(ge=0)]
FreshBlocks = tuple[tuple[Bytes, Seconds], ...]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Products(_Section):
    """The share of the peak rate that matrix products reach: `share` if they are large.

    `half_area`: the elements of the result at which half of that is lost, because it has too few tiles to fill the
    device. `half_depth`: the length of the sums at which half is lost to filling a pipeline.
    """

    share: Share = 0.75
    half_area: Size = 0
    half_depth: Size = 0


class AttentionShare(_Section):
    """The share of the peak rate that fused attention reaches, of the pairs of positions that it computes: `share` if
    sequences are long. `half_length`: the number of keys at which half of that is lost.
    `half_scores`: the number of pairs of queries and keys at which half is lost to what each head costs by itself."""

    share: Rate = 0.5
    half_length: Size = 0
    half_scores: Size = 0


class Link(_Section):
    """How ranks reach one another: one way, from or to one rank.

    `share` of `bytes_per_second` is what collectives reach with large messages. `node_bytes_per_second` is what all
    ranks of a node get together, where they share something (a network card, memory); None if nothing is shared.
    """

    latency_seconds: Seconds
    bytes_per_second: Rate
    node_bytes_per_second: Rate | None = None
    share: Share = 0.8


class Host(_Section):
    """The host's side of a rank. `memory_bytes`, `memory_bytes_per_second` (bytes copied: each is read and written) and
    `adam_elements_per_second` are of a node, which its ranks share, with all of its `cores`; `link_bytes_per_second` is
    between one device and the host, each way. Without a link the device is the host's processor."""

    memory_bytes: Bytes
    memory_bytes_per_second: Rate
    adam_elements_per_second: Rate
    link_bytes_per_second: Rate | None = None
    cores: Annotated[int, Field(ge=1)] | None = None

    def with_cores(self, cores: int) -> Host:
        """A part of this host, which gets the same part of its rates: neither one core nor 16 of 112 can move all that
        the memory's channels can. All of it where it is not known to have more."""
        if self.cores is None or cores >= self.cores:
            return self
        share = cores / self.cores
        rates = ("memory_bytes_per_second", "adam_elements_per_second")
        return self.model_copy(update={"cores": cores, **{name: share * getattr(self, name) for name in rates}})


class Disk(_Section):
    """A node's disk for tiers, which its ranks share."""

    read_bytes_per_second: Rate
    write_bytes_per_second: Rate


class Hardware(_Section):
    """One kind of machine. Rates of the device are peaks, of which `products`, `attention` and `memory_share` say how
    much is reached."""

    name: str
    ranks_per_node: Annotated[int, Field(ge=1)]
    memory_bytes: Bytes
    memory_bytes_per_second: Rate
    peak_flops: Annotated[dict[str, Rate], Field(min_length=1)]
    products: Products = Products()
    attention: AttentionShare = AttentionShare()
    products_in: dict[str, Products] = {}
    """By dtype, where it differs from `products`: units for narrow dtypes need larger products."""
    attention_in: dict[str, AttentionShare] = {}
    attention_backward_in: dict[str, AttentionShare] = {}
    """By dtype, where the backward gets another share than the forward."""
    causal_share: Share = 0.5
    """Of the time of attention over all pairs, what it takes where a causal mask leaves out half of them."""
    memory_share: Share = 0.85
    memory_share_in: dict[str, Share] = {}
    """By dtype, where it differs from `memory_share`: processors convert bf16 to compute."""
    flat_share: Share | None = None
    """As `memory_share`, of copies, sums and updates of flat buffers, which are long, and in no cache of a processor;
    None: no more than others get."""
    fresh_blocks: FreshBlocks = ()
    """(bytes, seconds): what a block of that size costs to allocate and to return where its pages are new each time, as
    in [Note: glibc and large blocks]; in between by interpolation. Empty where allocations are kept for the next."""
    launch_seconds: Seconds = 0.0
    """Between two kernels of one rank; where `runs_ahead`, what the host needs to start one while the device computes
    others."""
    runs_ahead: bool = True
    launch_norm: Annotated[float, Field(ge=1)] = 8.0
    """Where the host runs ahead: how completely its time and the device's overlap, as the exponent of a norm of both.
    1: not at all; large: the longer of the two counts. In between, parts in which one waits for the other alternate."""
    contention: Annotated[float, Field(ge=1)] = 1.0
    """How many times as long computation and communication take while both go on. 2: nothing is won."""
    ranks_share_device: bool = False
    """Whether the rates of the device are those that `ranks_per_node` ranks get of a machine, whose cores they share:
    more ranks get less each."""
    cores: Annotated[int, Field(ge=1)] | None = None
    """Those of a node whose ranks share them, if known."""
    threads: Annotated[int, Field(ge=1)] | None = None
    """Of each of these ranks; None: as many as the launcher gives it, its part of the cores."""
    local: Link
    network: Link
    local_exchanges: Link | None = None
    """As `local`, of all-to-alls, where a transport copies more for them than for other collectives."""
    host: Host | None = None
    disk: Disk | None = None

    # -- the ranks on it --------------------------------------------------------------------------------

    def with_ranks(self, num_local: int, threads: int | None = None) -> Hardware:
        """This hardware with `num_local` ranks on each node. If they share its device they get less each, and no more
        of its cores than the `threads` that each runs (None: as many as the launcher gives it)."""
        changed: dict[str, object] = {"ranks_per_node": num_local, "threads": threads}
        if self.ranks_share_device:
            changed["memory_bytes"] = int(self.memory_bytes * self.ranks_per_node / num_local)
            before, now = (
                self._cores_of_rank(self.ranks_per_node, self.threads),
                self._cores_of_rank(num_local, threads),
            )
            changed["peak_flops"] = {dtype: rate * now / before for dtype, rate in self.peak_flops.items()}
            changed["memory_bytes_per_second"] = self.memory_bytes_per_second * now / before
        return self.model_copy(update=changed)

    def with_ranks_left(self, num_local: int) -> Hardware:
        """This hardware when only `num_local` ranks of each node are left. They run as many threads as before, so they
        compute faster only where there were more ranks than cores; what else a node has is theirs alone."""
        if not self.ranks_share_device or self.cores is None:
            return self.model_copy(update={"ranks_per_node": num_local})
        left = self.with_ranks(num_local, self.threads or _threads_of(self.cores, self.ranks_per_node))
        return left.model_copy(update={"memory_bytes": self.memory_bytes})

    def _cores_of_rank(self, num_local: int, threads: int | None) -> float:
        """Those that one of `num_local` ranks of a node computes on, or its part of the node where they are unknown."""
        if self.cores is None:
            return 1 / num_local
        return min(threads or _threads_of(self.cores, num_local), self.cores / num_local)

    @property
    def is_processor(self) -> bool:
        """Whether ranks compute on the host's processor, whose cores also copy."""
        return self.host is not None and self.host.link_bytes_per_second is None

    # -- computing --------------------------------------------------------------------------------------

    def peak(self, dtype: str) -> float:
        """FLOP per second in `dtype`. Raises `ConfigError` where the profile has none."""
        found = self.peak_flops.get(dtype)
        if found is None:
            raise ConfigError(
                f"The hardware {self.name!r} has no rate for {dtype}: peak_flops has {', '.join(self.peak_flops)}. "
                f"Add it, or compute in another precision."
            )
        return found

    def product_seconds(self, m: float, n: float, k: float, dtype: str, batch: float = 1) -> float:
        """An m x k by k x n product, or `batch` of them at once, as fast as the device computes it."""
        products = self.products_in.get(dtype, self.products)
        area = max(1.0, m * n * batch)
        lost = 1 + products.half_area / area + products.half_depth / max(1.0, k)
        return 2.0 * batch * m * n * k * lost / (self.peak(dtype) * products.share)

    def attention_seconds(
        self,
        flops: float,
        queries: float,
        keys: float,
        dtype: str,
        *,
        is_backward: bool = False,
        is_causal: bool = False,
    ) -> float:
        """`flops` of fused attention of all `queries` to all `keys` positions, or of its backward; with `is_causal` a
        mask leaves out half of them."""
        attention = self.attention_in.get(dtype, self.attention)
        if is_backward:
            attention = self.attention_backward_in.get(dtype, attention)
        lost = 1 + attention.half_length / max(1.0, keys) + attention.half_scores / max(1.0, queries * keys)
        left = self.causal_share if is_causal else 1.0
        return left * flops * lost / (self.peak(dtype) * attention.share)

    def memory_seconds(self, num_bytes: float, dtype: str = "-") -> float:
        """`num_bytes` read or written by operators whose results are in `dtype`."""
        return num_bytes / (self.memory_bytes_per_second * self.memory_share_in.get(dtype, self.memory_share))

    def flat_seconds(self, num_bytes: float) -> float:
        """`num_bytes` of flat buffers read or written."""
        return num_bytes / (self.memory_bytes_per_second * (self.flat_share or self.memory_share))

    def small_pages_seconds(self, num_bytes: float) -> float:
        """`num_bytes` in new pages of the smallest size, as memory has that ranks may share: the largest price that
        a byte has in `fresh_blocks`."""
        return num_bytes * max((seconds / size for size, seconds in self.fresh_blocks), default=0.0)

    def block_seconds(self, num_bytes: float, *, from_heap: bool = False) -> float:
        """What a block of memory costs to allocate and to return. `from_heap`: in a backward that takes all but the
        largest from the heap, where they have pages that others had before them ([Note: blocks of a backward] in
        `system/heap.py`)."""
        new = fresh_seconds(self.fresh_blocks, num_bytes)
        if not from_heap or num_bytes >= LARGE_BLOCK_BYTES:
            return new
        kept = [seconds for size, seconds in self.fresh_blocks if size < HEAP_BLOCK_BYTES]
        return min(new, max(kept, default=0.0))

    def operation_seconds(self, operation: Operation, *, from_heap: bool = False) -> float:
        """An operation that computes: the longer of its arithmetic and its memory, and what its results cost to
        allocate, without its launch. `from_heap`: see `block_seconds`."""
        allocating = sum(self.block_seconds(num_bytes, from_heap=from_heap) for num_bytes in operation.allocated_bytes)
        moving = self.memory_seconds(operation.num_bytes, operation.dtype if operation.kind == "memory" else "-")
        match operation.kind:
            case "product":
                m, n, k, *batch = operation.shape
                computing = self.product_seconds(m, n, k, operation.dtype, batch[0] if batch else 1)
            case "attention":
                _, queries, keys, _ = operation.shape
                computing = self.attention_seconds(
                    operation.flops,
                    queries,
                    keys,
                    operation.dtype,
                    is_backward=operation.is_backward,
                    is_causal=operation.is_causal,
                )
            case "memory":
                computing = 0.0
            case _:
                raise ConfigError(f"'{operation}' has no price as computation.")
        return max(moving, computing) + allocating

    def computing_seconds(
        self,
        operations: Sequence[Operation],
        waiting_seconds: float = 0.0,
        num_launched: int = 0,
        *,
        from_heap: bool = False,
    ) -> float:
        """Operations one after the other, with their launches: beside them where the host runs ahead, else between
        them.

        `waiting_seconds`: how long the device communicates between them, in `num_launched` kernels, which the host
        uses to run ahead too. `from_heap`: see `block_seconds`.
        """
        seconds = sum(self.operation_seconds(one, from_heap=from_heap) for one in operations)
        started = num_launched + sum(one.kernels + ROUTED_LAUNCHES * one.routed_calls for one in operations)
        launches = self.launch_seconds * started
        if not self.runs_ahead:
            return seconds + launches
        device = seconds + waiting_seconds
        longer = max(device, launches)
        if not longer:
            return 0.0
        ratio, norm = min(device, launches) / longer, self.launch_norm
        return longer * math.pow(1 + math.pow(ratio, norm), 1 / norm) - waiting_seconds

    # -- communicating ----------------------------------------------------------------------------------

    def collective_seconds(self, kind: str, num_bytes: float, ranks: Sequence[int]) -> float:
        """A collective among `ranks`, by their numbers in the world; `num_bytes` as in `Operation`.

        Between nodes every node's ranks send at once, and those of other groups too, so that a group gets its part of
        the node's link. Within and between nodes bytes flow at the same time (rings over both: NCCL; Thakur et al.,
        doi:10.1177/1094342005051521), so the slower of the two counts, and latencies add up.
        """
        num_ranks, num_near, num_nodes = _spread(ranks, self.ranks_per_node)
        if num_ranks < 2:
            return 0.0
        near = self._rate_near() if num_near > 1 else float("inf")
        far = self._rate_far(num_near) if num_nodes > 1 else float("inf")
        at_once = self.is_processor  # see [Note: messages at once]
        steps_near, steps_far = (min(1, num - 1) if at_once else num - 1 for num in (num_near, num_nodes))
        match kind:
            case "all_gather" | "reduce_scatter":
                rounds = 1.0
            case "all_reduce":
                rounds = 2.0
            case "all_to_all":
                # each pair of ranks on its own: what goes to other nodes is not combined on the way
                far = far / num_near if num_nodes > 1 else far
                away = num_bytes * (num_ranks - num_near) / num_ranks
                link = self.local_exchanges or self.local
                near = self._rate_near(link) if num_near > 1 else near
                moving = max(num_bytes * (num_near - 1) / num_ranks / near, away / far)
                return moving + steps_near * link.latency_seconds + self._latency(0, steps_far)
            case "broadcast" if at_once:
                leaving = num_bytes * (num_nodes - 1) / self._rate_far(1)
                return max(num_bytes / near, leaving) + self._latency(steps_near, steps_far)
            case "broadcast":
                return num_bytes / min(near, far) + self._latency(_log2(num_near), _log2(num_nodes))
            case "send":
                rate = self._rate_far(1) if num_nodes > 1 else near
                return num_bytes / rate + self._latency(int(num_nodes == 1), int(num_nodes > 1))
            case _:
                raise ConfigError(f"A collective {kind!r} among {num_ranks} ranks has no price.")
        within = num_bytes * (num_ranks - 1) / num_ranks / near
        between = num_bytes * (num_nodes - 1) / num_nodes / far
        moving = rounds * max(within, between)
        if at_once:
            is_of_two = kind == "all_reduce" and num_ranks == num_nodes == 2  # [Note: sums of two] in pairwise.py
            return moving + (1 if is_of_two else rounds) * self._latency(steps_near, steps_far)
        # a flat ring has one step for each rank but one, of which as many as nodes but one go between them (NCCL's
        # src/graph/tuning.cc)
        ring = moving + rounds * self._latency(num_ranks - num_nodes, steps_far)
        if kind != "all_reduce":
            return ring
        # a double binary tree moves as many bytes as a ring, in steps that grow with the logarithm of the nodes, within
        # which it is a chain of ranks (NCCL 2.4; the same tuning.cc)
        tree = rounds * (num_bytes / min(near, far) + self._latency(steps_near, _log2(num_nodes)))
        return min(ring, tree)

    def spread_of(self, ranks: Sequence[int]) -> tuple[int, int, int]:
        """How many `ranks` there are, the most of them on one node, and on how many nodes: what a collective among them
        takes depends on nothing else."""
        return _spread(ranks, self.ranks_per_node)

    def links_of(self, ranks: Sequence[int]) -> tuple[str, ...]:
        """The links that a collective among `ranks` uses: `local`, `network` or both."""
        num_ranks, num_near, num_nodes = self.spread_of(ranks)
        return (("local",) if num_near > 1 else ()) + (("network",) if num_nodes > 1 else ()) if num_ranks > 1 else ()

    def _rate_near(self, link: Link | None = None) -> float:
        """Bytes per second of one rank within its node, where all of them communicate."""
        link = link or self.local
        shared = link.node_bytes_per_second or float("inf")
        return link.share * min(link.bytes_per_second, shared / self.ranks_per_node)

    def _rate_far(self, num_near: int) -> float:
        """Bytes per second of the `num_near` ranks of a group on one node, where all ranks of the node communicate."""
        link = self.network
        shared = link.node_bytes_per_second or float("inf")
        return link.share * num_near * min(link.bytes_per_second, shared / self.ranks_per_node)

    def _latency(self, steps_near: int, steps_far: int) -> float:
        return steps_near * self.local.latency_seconds + steps_far * self.network.latency_seconds

    # -- other tiers ------------------------------------------------------------------------------------

    def host_copy_seconds(self, num_bytes: float) -> float:
        """`num_bytes` between a rank's device and the host's memory, one way; copied in memory if there is no link."""
        host = self._host("copies to and from the host")
        memory = host.memory_bytes_per_second / self.ranks_per_node
        return num_bytes / (memory if host.link_bytes_per_second is None else min(host.link_bytes_per_second, memory))

    def host_memory_seconds(self, num_bytes: float) -> float:
        """`num_bytes` read and written in the host's memory by every rank of a node at once."""
        return num_bytes * self.ranks_per_node / self._host("copies in the host's memory").memory_bytes_per_second

    def host_update_seconds(self, numel: float) -> float:
        """An update of `numel` elements on the host by every rank of a node at once."""
        return numel * self.ranks_per_node / self._host("updates on the host").adam_elements_per_second

    def disk_seconds(self, read_bytes: float = 0, written_bytes: float = 0) -> float:
        """Bytes of every rank of a node, from and to its one disk."""
        if self.disk is None:
            raise ConfigError(
                f"The hardware {self.name!r} has no disk, and the plan reads or writes one. Copy the profile, and add "
                f"disk: {{read_bytes_per_second: ..., write_bytes_per_second: ...}}."
            )
        read, write = self.disk.read_bytes_per_second, self.disk.write_bytes_per_second
        return self.ranks_per_node * (read_bytes / read + written_bytes / write)

    def _host(self, what: str) -> Host:
        if self.host is None:
            raise ConfigError(
                f"The hardware {self.name!r} has no host, and the plan needs {what}. Copy the profile, and add host: "
                f"{{memory_bytes: ..., memory_bytes_per_second: ..., adam_elements_per_second: ...}}."
            )
        return self.host


def _threads_of(cores: int, num_local: int) -> int:
    """As `launch.environment.default_threads` has them, which this package is below."""
    return max(1, cores // num_local)


def fresh_seconds(blocks: FreshBlocks, num_bytes: float) -> float:
    """What a block of `num_bytes` costs to allocate and return, by interpolation of `blocks`, which are in the order of
    their sizes; in proportion to its size where it is larger than all of them."""
    place = bisect.bisect_left(blocks, (num_bytes, 0.0))
    if not blocks or place == 0:
        return blocks[0][1] * num_bytes / blocks[0][0] if blocks else 0.0
    below, less = blocks[place - 1]
    if place == len(blocks):
        return less * num_bytes / below
    above, more = blocks[place]
    return less + (more - less) * (num_bytes - below) / (above - below)


def profiles() -> tuple[str, ...]:
    """The names of the profiles that come with the library."""
    return tuple(sorted(one.name.removesuffix(SUFFIX) for one in _folder().iterdir() if one.name.endswith(SUFFIX)))


def hardware(name_or_path: str | os.PathLike[str]) -> Hardware:
    """The profile of that name, or in that file.

    Raises `ConfigError` for an unknown name, with the nearest, and for a file whose values are wrong, with its lines.
    """
    text = os.fspath(name_or_path)
    is_file = bool(Path(text).suffix) or os.sep in text
    if is_file:
        return _read(Path(text))
    if text not in profiles():
        raise ConfigError(
            f"There is no hardware {text!r}. {_nearest(text)} A file of your own is named by its path, such as "
            f"./{text}.yaml."
        )
    return _profile(text)


def _nearest(text: str) -> str:
    """The profiles of the chip that `text` names, as people write it: `A100`, `RTX 4090`, `NVIDIA H100 80GB HBM3`."""
    written = re.sub("[^a-z0-9]", "", text.lower())
    chips = {name: name.partition("-")[0] for name in profiles()}
    found = [name for name in chips if written and name.replace("-", "").startswith(written)]
    if not found:
        named = max((chip for chip in chips.values() if chip in written), key=len, default="")
        found = [name for name, chip in chips.items() if chip == named]
    return f"Did you mean {' or '.join(map(repr, found))}?" if found else nearest(text, profiles())


def _folder() -> Path:
    return Path(str(files("shardwise.fit"))) / PROFILES


@lru_cache
def _profile(name: str) -> Hardware:
    return _read(_folder() / f"{name}{SUFFIX}")


def _read(path: Path) -> Hardware:
    source = read_source(path, "hardware profile")
    origins = {(): str(path), **{key: f"{path}:{line}" for key, line in source.lines.items()}}
    try:
        return Hardware.model_validate(source.values)
    except ValidationError as error:
        raise as_config_error(error, source.values, origins, root=Hardware, name="the hardware") from None


@lru_cache(maxsize=4096)
def _spread_of_range(start: int, stop: int, step: int, ranks_per_node: int) -> tuple[int, int, int]:
    """As `_spread`; ranks in equal distances."""
    ranks = range(start, stop, step)
    return (len(ranks), 1, len(ranks)) if step >= ranks_per_node else _spread_of_list(ranks, ranks_per_node)


def _spread_of_list(ranks: Sequence[int], ranks_per_node: int) -> tuple[int, int, int]:
    by_node = Counter(rank // ranks_per_node for rank in ranks)
    return len(ranks), max(by_node.values(), default=0), len(by_node)


def _spread(ranks: Sequence[int], ranks_per_node: int) -> tuple[int, int, int]:
    """How many ranks there are, the most of them on one node, and on how many nodes."""
    if isinstance(ranks, range):
        return _spread_of_range(ranks.start, ranks.stop, ranks.step, ranks_per_node)
    return _spread_of_list(ranks, ranks_per_node)


def _log2(count: int) -> int:
    return max(0, count - 1).bit_length()
