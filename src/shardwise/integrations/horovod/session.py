"""One rank's session: its connection to the coordinator and the collectives that it issues."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

import shardwise as sw
from shardwise.integrations.horovod.collectives import HorovodCollectives
from shardwise.integrations.horovod.coordinator import LEAVE, Coordinator
from shardwise.integrations.horovod.errors import InvalidCallError, ProcessSetError
from shardwise.integrations.horovod.executor import Executor
from shardwise.integrations.horovod.links import LOOPBACK, Link, Listener, SendQueue, connect
from shardwise.integrations.horovod.messages import WORLD_SET, MessageEncoder, Request
from shardwise.integrations.horovod.pending import Entry, Handle, PendingCollectives
from shardwise.integrations.horovod.settings import Settings
from shardwise.integrations.horovod.timeline import Timeline
from shardwise.system.listening import address_towards

Tensor = torch.Tensor
_CONNECT_SECONDS = 60
_CLOSE_SECONDS = 10
"""For collectives that this rank has issued and the others may still be executing."""
_ABANDON_SECONDS = 2


@dataclass(frozen=True)
class Topology:
    """This rank among the ranks of its host, and among the ranks of other hosts with the same local rank."""

    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    is_homogeneous: bool


class Session:
    """One rank between `init` and `shutdown`: its process sets, its link to the coordinator, its pending collectives.

    All ranks create one; `close()` it.
    """

    def __init__(
        self,
        world: sw.World,
        process_sets: Mapping[int, Sequence[int]] | None = None,
        settings: Settings | None = None,
    ) -> None:
        """`process_sets` are the initial process sets by number, the same on all ranks. Number 0 is taken."""
        self.settings = settings or Settings.of()
        self.world = world
        self.rank = world.rank
        self.size = world.size
        self.sets: dict[int, tuple[int, ...]] = {WORLD_SET: tuple(range(world.size))}
        self.timeline = Timeline(world.rank)
        self.pending = PendingCollectives()
        self._num_unnamed: Counter[str] = Counter()
        hosts = self._exchange_hosts(process_sets or {})
        self.topology = _topology(hosts, self.rank)
        self._collectives = HorovodCollectives(world)
        for number, ranks in self.sets.items():
            self._collectives.add_set(number, ranks)
        self._link = self._connect(LOOPBACK if len(set(hosts)) == 1 else _own_address())
        self._send_queue = SendQueue(self._link)
        self._encoder = MessageEncoder(self.settings.cache_capacity)
        self._executor = Executor(world, self._collectives, self._link, self.pending, self.timeline)
        if self.settings.timeline:
            self.timeline.start(self.settings.timeline)

    def _exchange_hosts(self, process_sets: Mapping[int, Sequence[int]]) -> list[str]:
        """Every rank's host name. Also checks that all ranks have the same process sets, and adds them.

        Raises `ProcessSetError` on all ranks.
        """
        sets = [(number, sorted(set(ranks))) for number, ranks in sorted(process_sets.items())]
        own = json.dumps({"host": socket.gethostname(), "sets": sets})
        received = [json.loads(message) for message in self.world.exchange(own.encode(), "horovod")]
        sets_of_ranks = [one["sets"] for one in received]
        for rank, other in enumerate(sets_of_ranks):
            if other != sets_of_ranks[0]:
                first, odd = ([ranks for _, ranks in one] for one in (sets_of_ranks[0], other))
                raise ProcessSetError(
                    f"init() was given process sets {first} on rank 0 and {odd} on rank {rank}. Pass the same sets on "
                    f"all ranks."
                )
        for number, ranks in sets:
            self._require_ranks(ranks)
            self.sets[number] = tuple(ranks)
        return [one["host"] for one in received]

    def _connect(self, own_address: str) -> Link:
        """A link to the coordinator, which rank 0 starts."""
        listener = Listener(own_address) if self.rank == 0 else None
        try:
            own = f"{own_address} {listener.address}" if listener is not None else ""
            addresses = self.world.exchange(own.encode(), "horovod")
            host, _, address = addresses[0].decode().partition(" ")
            link = connect(host, address, self.rank, _CONNECT_SECONDS)
            try:
                if listener is not None:
                    links = listener.admit(self.size, _CONNECT_SECONDS, lambda: self.world.fault is not None)
                    Coordinator(links, self.sets, self.settings, self.timeline)  # its thread ends with the ranks
            except BaseException:
                link.close()
                raise
        finally:
            if listener is not None:
                listener.close()
        return link

    def _require_ranks(self, ranks: Sequence[int]) -> None:
        if not ranks or not set(ranks) <= set(range(self.size)):
            raise ProcessSetError(f"A process set of ranks {list(ranks)} is not one of 0 ... {self.size - 1}.")

    # -- issuing collectives ----------------------------------------------------------------------------

    def issue(self, request: Request, entry: Entry) -> Handle:
        """Queue a request to the coordinator. Raises `ValueError` if its name is in flight already."""
        if request.verb not in ("join", "add_set", "remove_set"):
            self._require_member(request)
        self.pending.add(request.key, entry)
        entry.handle.before_wait = self._send_queue.flush
        self._send_queue.put(lambda: self._encoder.encode(request))
        return entry.handle

    def _require_member(self, request: Request) -> None:
        if self.rank not in self.sets.get(request.process_set, ()):
            name = request.name.partition(".")[2] or request.name
            raise ValueError(
                f"Rank {self.rank} issued {request.verb} '{name}' on process set {request.process_set}, which "
                f"it is not in. Check process_set.included() first."
            )

    def name_for(self, verb: str, name: str | None) -> str:
        """`name`, or a numbered one. Ranks must issue unnamed collectives in the same order, as in Horovod."""
        if name is not None:
            return name
        self._num_unnamed[verb] += 1
        return f"noname.{self._num_unnamed[verb]}"

    def issue_tensors(
        self,
        verb: Any,
        name: str | None,
        sources: Sequence[Tensor],
        outs: Sequence[Tensor] | None = None,
        *,
        is_single: bool = True,
        finish: Callable[[Any], Any] | None = None,
        **fields: Any,
    ) -> Handle:
        """Issue `verb` on `sources`. Results are written to `outs`, or else to new tensors.

        The handle returns a list, or one tensor if `is_single`, passed through `finish`. `fields` are the other fields
        of the `Request`.
        """
        self._check_tensors(verb, sources, fields)
        # Only necessary torch calls: each releases the GIL, and getting it back from other threads takes time.
        sources = [source.detach() if source.requires_grad else source for source in sources]
        if verb != "broadcast":
            sources = [source if source.is_contiguous() else source.contiguous() for source in sources]
        request = Request(
            verb,
            f"{verb}.{self.name_for(verb, name)}",
            dtypes=tuple(map(_dtype_name, [source.dtype for source in sources])),
            shapes=tuple(tuple(source.shape) for source in sources),
            device=sources[0].device.type,
            **fields,
        )
        return self.issue(request, Entry.of(sources, outs, is_single=is_single, finish=finish))

    def _check_tensors(self, verb: str, sources: Sequence[Tensor], fields: Mapping[str, Any]) -> None:
        if not sources:
            raise ValueError(f"{verb} was given an empty list of tensors.")
        if len(sources) > 1 and len({source.device for source in sources}) > 1:
            raise ValueError(f"{verb} was given tensors of several devices. Use one call for each device.")
        if verb == "reducescatter" and fields["op"] == "Adasum":
            raise InvalidCallError("reducescatter does not support Adasum. Use Average, Sum, Min, Max or Product.")

    def join(self) -> int:
        """See `hvd.join`."""
        last: int = self.issue(Request("join", "join"), Entry(Handle(), [])).wait()
        return last

    def barrier(self, process_set: int) -> None:
        self.issue(Request("barrier", "barrier", process_set), Entry(Handle(), [])).wait()

    def add_set(self, ranks: Sequence[int]) -> int:
        """Add a process set and return its number. Blocks until all ranks have called with the same `ranks`."""
        listed = tuple(sorted(set(ranks)))
        self._require_ranks(listed)
        number: int = self.issue(Request("add_set", "add_process_set", ranks=listed), Entry(Handle(), [])).wait()
        self.sets[number] = listed
        return number

    def remove_set(self, number: int) -> None:
        """Remove a process set. Blocks until all ranks have called."""
        if number == WORLD_SET or number not in self.sets:
            raise ValueError(f"There is no process set {number} to remove.")
        self.issue(Request("remove_set", "remove_process_set", root=number), Entry(Handle(), [])).wait()
        del self.sets[number]

    def close(self) -> None:
        """Leave the job. Collectives for which other ranks wait for this one raise there. May be called twice."""
        self._send_queue.put(lambda: LEAVE)
        self._send_queue.close()
        self._executor.wait(_CLOSE_SECONDS)
        self._link.close()
        self.timeline.stop()

    def abandon(self) -> None:
        """Close the link at once, since the ranks will open another session. Pending collectives raise on all ranks."""
        self._link.close()
        self._send_queue.close()
        self._executor.wait(_ABANDON_SECONDS)
        self.timeline.stop()


def _own_address() -> str:
    """The address by which other hosts reach this one.

    It is the one of the interface towards MASTER_ADDR, which in an elastic job need not be the host of rank 0.
    """
    master = os.environ.get("MASTER_ADDR", LOOPBACK)
    address = address_towards(master)
    return master if not address or ipaddress.ip_address(address.partition("%")[0]).is_loopback else address


@cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _topology(hosts: list[str], rank: int) -> Topology:
    local = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    local_rank = local.index(rank)
    local_ranks = [hosts[:other].count(host) for other, host in enumerate(hosts)]
    cross = [other for other in range(len(hosts)) if local_ranks[other] == local_rank]
    return Topology(local_rank, len(local), cross.index(rank), len(cross), len(set(Counter(hosts).values())) == 1)
