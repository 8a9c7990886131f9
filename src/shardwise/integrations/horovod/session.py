"""One rank's part in a job of Horovod: its world, its links, and what it issues."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

import shardwise as sw
from shardwise.errors import ConfigError
from shardwise.integrations.horovod.collectives import HorovodCollectives
from shardwise.integrations.horovod.coordinator import LEAVE, Coordinator
from shardwise.integrations.horovod.executor import Executor
from shardwise.integrations.horovod.links import LOOPBACK, Listener, SendQueue, connect
from shardwise.integrations.horovod.messages import WORLD_SET, MessageEncoder, Request
from shardwise.integrations.horovod.pending import Entry, Handle, PendingCollectives
from shardwise.integrations.horovod.settings import Settings
from shardwise.integrations.horovod.timeline import Timeline
from shardwise.listening import address_towards

Tensor = torch.Tensor
_SECONDS = 60
_FAREWELL_SECONDS = 10
_ABANDON_SECONDS = 2
"""For what another rank has left before it was carried out; the end of the world ends that too."""


@dataclass(frozen=True)
class Topology:
    """Where this rank is: among those of its host, and among those with its place on other hosts."""

    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    is_homogeneous: bool


class Session:
    """From `init` to `shutdown`. All ranks make one; `close()` it."""

    def __init__(
        self, world: sw.World, process_sets: Sequence[Sequence[int]] = (), settings: Settings | None = None
    ) -> None:
        """`process_sets` are those that are there from the start, the same on all ranks, numbered from 1."""
        self.settings = settings or Settings.of()
        self.world = world
        self.rank = world.rank
        self.size = world.size
        self.sets: dict[int, tuple[int, ...]] = {WORLD_SET: tuple(range(world.size))}
        self.timeline = Timeline(world.rank)
        self.pending = PendingCollectives()
        self._names: Counter[str] = Counter()
        hosts = set(self._meet(process_sets))
        here = LOOPBACK if len(hosts) == 1 else _own_address()
        door = Listener(here) if world.rank == 0 else None
        told = world.exchange(f"{here} {door.address}".encode() if door is not None else b"", "horovod")
        host, _, address = told[0].decode().partition(" ")
        self._collectives = HorovodCollectives(world)
        for number, ranks in self.sets.items():
            if number != WORLD_SET:
                self._collectives.add_set(number, ranks)
        self._link = connect(host, address, world.rank, _SECONDS)
        self._send_queue = SendQueue(self._link)
        self._coordinator: Coordinator | None = None
        if door is not None:
            links = door.admit(world.size, _SECONDS, lambda: world.fault is not None)
            self._coordinator = Coordinator(links, self.sets, self.settings, self.timeline)
        self._encoder = MessageEncoder(self.settings.cache_capacity)
        self._executor = Executor(world, self._collectives, self._link, self.pending, self.timeline)
        if self.settings.timeline:
            self.timeline.start(self.settings.timeline)

    def _meet(self, process_sets: Sequence[Sequence[int]]) -> list[str]:
        """Everybody's host; where this rank is, and whether all have the same process sets, is found out too."""
        listed = [sorted(set(ranks)) for ranks in process_sets]
        said = {"host": socket.gethostname(), "sets": listed}
        told = [json.loads(message) for message in self.world.exchange(json.dumps(said).encode(), "horovod")]
        odd = [rank for rank, one in enumerate(told) if one["sets"] != told[0]["sets"]]
        if odd:
            raise ConfigError(
                f"init() was given process sets {told[0]['sets']} on rank 0 and {told[odd[0]]['sets']} on rank "
                f"{odd[0]}. Give all ranks the same."
            )
        for ranks in listed:
            self._require_ranks(ranks)
            self.sets[len(self.sets)] = tuple(ranks)
        self.topology = _topology([one["host"] for one in told], self.rank)
        return [one["host"] for one in told]

    def _require_ranks(self, ranks: Sequence[int]) -> None:
        if not ranks or not set(ranks) <= set(range(self.size)):
            raise ValueError(f"A process set of ranks {list(ranks)} is not one of 0 ... {self.size - 1}.")

    # -- what is issued ---------------------------------------------------------------------------------

    def issue(self, request: Request, entry: Entry) -> Handle:
        """Tell the coordinator; returns at once. Raises `ValueError` for a name that is under way."""
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
                f"it is not in. Ask process_set.included() before."
            )

    def name_for(self, verb: str, name: str | None) -> str:
        """`name`, or one that is counted: then all ranks have to issue in one order, as Horovod's do."""
        if name is not None:
            return f"{verb}.{name}"
        self._names[verb] += 1
        return f"{verb}.noname.{self._names[verb]}"

    def on_tensors(
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
        """Issue `verb` on `sources`, whose results go to `outs` or, without these, to memory that is made."""
        # torch's functions let go of the interpreter, which other threads want: only those that are needed are called
        sources = [source.detach() if source.requires_grad else source for source in sources]
        if verb != "broadcast":
            sources = [source if source.is_contiguous() else source.contiguous() for source in sources]
        request = Request(
            verb,
            self.name_for(verb, name),
            dtypes=tuple(map(_dtype_name, [source.dtype for source in sources])),
            shapes=tuple(tuple(source.shape) for source in sources),
            device=sources[0].device.type,
            **fields,
        )
        entry = Entry.of(sources, outs, is_single=is_single)
        entry.handle = Handle(finish)
        return self.issue(request, entry)

    def join(self) -> int:
        """Give others zeros until they have joined too; blocks. The rank that was the last."""
        last: int = self.issue(Request("join", "join"), Entry(Handle(), [])).wait()
        return last

    def barrier(self, process_set: int) -> None:
        self.issue(Request("barrier", "barrier", process_set), Entry(Handle(), [])).wait()

    def add_set(self, ranks: Sequence[int]) -> int:
        """All ranks call with the same `ranks`; blocks."""
        listed = tuple(sorted(set(ranks)))
        self._require_ranks(listed)
        number: int = self.issue(Request("add_set", "add_process_set", ranks=listed), Entry(Handle(), [])).wait()
        self.sets[number] = listed
        return number

    def remove_set(self, number: int) -> None:
        """All ranks call; blocks."""
        if number == WORLD_SET or number not in self.sets:
            raise ValueError(f"There is no process set {number} that could be removed.")
        self.issue(Request("remove_set", "remove_process_set", root=number), Entry(Handle(), [])).wait()
        del self.sets[number]

    def close(self) -> None:
        """Leave. What others still wait for from this rank raises on them. May be called twice."""
        self._send_queue.put(lambda: LEAVE)
        self._send_queue.close()
        self._executor.wait(_FAREWELL_SECONDS)
        self._link.close()
        self.timeline.stop()
        self._coordinator = None

    def abandon(self) -> None:
        """Leave ranks that will meet again in another session. What is pending raises; others notice by the link."""
        self._link.close()
        self._send_queue.close()
        self._executor.wait(_ABANDON_SECONDS)
        self.timeline.stop()
        self._coordinator = None


def _own_address() -> str:
    """By which other hosts reach this one: on the way to where ranks have met, which in an elastic job is not always
    where rank 0 is."""
    meeting = os.environ.get("MASTER_ADDR", LOOPBACK)
    found = address_towards(meeting)
    return meeting if not found or ipaddress.ip_address(found.partition("%")[0]).is_loopback else found


@cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _topology(hosts: list[str], rank: int) -> Topology:
    local = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    local_rank = local.index(rank)
    place_of = {other: hosts[:other].count(host) for other, host in enumerate(hosts)}
    across = [other for other in range(len(hosts)) if place_of[other] == local_rank]
    return Topology(local_rank, len(local), across.index(rank), len(across), len(set(Counter(hosts).values())) == 1)
