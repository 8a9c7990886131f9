"""The ranks of this host as seen from one of them: what it offers them, and what it waits for."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from shardwise.comm.group import Exchange
from shardwise.comm.host_layout import Hosts
from shardwise.comm.transport.shm.arena import Arena, Block
from shardwise.comm.transport.shm.file import Mapping, SharedFile, bytes_of, forget, is_possible
from shardwise.comm.transport.shm.offers import TO_ALL, OfferTable, offer_table_bytes
from shardwise.comm.watch.liveness import Life, host_identity
from shardwise.comm.work import LinkError
from shardwise.system.pages import LEAST_BYTES, bring

Tensor = torch.Tensor
Found = TypeVar("Found")
_LOOK_SECONDS = 0.05
"""How often a wait checks whether the other process is alive."""
_PATIENCE_SECONDS = 0.005
"""How long a rank waits for readers before it creates a block: a few times what creating one takes."""
_NUM_MAPPED = 64
_KEPT_BYTES = 2**16
"""A neighbour's blocks up to this size stay mapped from step to step, because unmapping costs as much."""
_log = logging.getLogger("shardwise")


@dataclass(eq=False, slots=True)
class _Lent:
    """An offer that not all readers are known to have read. Slots are reused, numbers are not."""

    number: int
    slot: int
    indices: list[int]
    block: Block | None
    """`None` for a short message, which is in the slot."""
    is_read: bool = False


class _View:
    """A neighbour's block, mapped."""

    def __init__(self, mapped: Mapping) -> None:
        self._mapped = mapped
        self.whole = bytes_of(mapped)
        self._read = range(0)
        """Addresses from the first to the last that have been read. What lies between two parts may come by faults."""

    def bring(self, part: Tensor) -> None:
        """Map the pages of `part`, which is about to be read, in one call, unless it has been read before."""
        start, stop = part.data_ptr(), part.data_ptr() + part.nbytes
        read = self._read
        if read and read.start <= start and stop <= read.stop:
            return
        bring(part)
        self._read = range(min(start, read.start), max(stop, read.stop)) if read else range(start, stop)

    def forget(self) -> None:
        """It is a neighbour's memory, and must not count as ours while nothing of it is read."""
        self._read = range(0)
        forget(self._mapped)


class Neighbours:
    """What this rank shares with the others of its host.

    Used by the computing thread, and by the background threads of its collectives over several hosts. No wait happens
    under the lock.
    """

    def __init__(self, rank: int, ranks: Sequence[int], files: dict[int, SharedFile], pids: dict[int, int]) -> None:
        self.rank = rank
        self.ranks = tuple(ranks)
        self._index_of = {other: index for index, other in enumerate(self.ranks)}
        self._here = frozenset(self.ranks)
        num_bytes = offer_table_bytes(len(self.ranks))
        self._offer_tables = {
            other: OfferTable(files[other].map(0, num_bytes), len(self.ranks), is_own=other == rank)
            for other in self.ranks
        }
        self._files = files
        self._own = self._offer_tables[rank]
        self._arena = Arena(files[rank], num_bytes)
        self._lent: list[_Lent] = []
        self._num_offers = 0
        self._mapped: OrderedDict[tuple[int, int, int], _View] = OrderedDict()
        self._lives = {other: Life(pid) for other, pid in pids.items() if pid != os.getpid()}
        self._is_aborted = threading.Event()
        self._lock = threading.RLock()

    @classmethod
    def meet(cls, rank: int, exchange: Exchange, host: str = "") -> tuple[Neighbours | None, Hosts]:
        """Find the ranks of this host. All ranks of the world call; `exchange` returns every rank's message, by rank.

        Returns the neighbours, and the host of every rank, the same on all. There are no neighbours (`None`), on all
        ranks of the host, if memory cannot be shared or there is only one rank. `host` names this rank's host, if not
        the system's name.
        """
        with ExitStack() as opened:
            own = _create()
            files: dict[int, SharedFile] = {} if own is None else {rank: opened.enter_context(closing(own))}
            mine = _introduction(rank, own, host)
            introductions = [json.loads(message) for message in exchange(json.dumps(mine).encode())]
            ranks = [other for other, one in enumerate(introductions) if one["host"] == mine["host"]]
            pids = {other: int(introductions[other]["pid"]) for other in ranks}
            found, refusal = None, ""
            try:
                if len(ranks) > 1:
                    for other in ranks:
                        if other != rank:
                            attached = SharedFile.attach(pids[other], int(introductions[other]["file"]))
                            files[other] = opened.enter_context(closing(attached))
                    found = cls(rank, ranks, files, pids)
                    opened.callback(found.close)
            except OSError as error:
                refusal = str(error)
            answers = exchange(refusal.encode())
            refusals = [answers[other].decode() for other in ranks if answers[other]]
            if refusals and rank == ranks[0]:
                _log.warning("The ranks of this host share no memory (%s); messages go over sockets.", refusals[0])
            numbers = _numbered([str(one["host"]) for one in introductions], [bool(answer) for answer in answers])
            hosts = Hosts(tuple(numbers), tuple(str(one["name"]) for one in introductions))
            if found is None or refusals:
                return None, hosts
            opened.pop_all()
            return found, hosts

    def has(self, ranks: Sequence[int]) -> bool:
        """Whether all of `ranks` are on this host."""
        return self._here.issuperset(ranks)

    # -- to give ----------------------------------------------------------------------------------------

    def buffer(self, num_bytes: int, *, waits: bool = True) -> Tensor:
        """A uint8 tensor of undefined content that can be offered in place.

        `waits`: wait briefly for readers of existing blocks before creating another one.
        """
        self._tidy()
        with self._lock:
            block = self._arena.soon(num_bytes) if waits else None
        if block is not None:
            self._wait_briefly(block)
        with self._lock:
            return self._arena.take(num_bytes)

    def rest(self, *, keeps_some: bool) -> None:
        """Give back what is kept for the next `buffer`, optionally except the largest blocks."""
        self._tidy()
        with self._lock:
            self._arena.rest(keeps_some=keeps_some)
            for view in self._mapped.values():
                if len(view.whole) > _KEPT_BYTES:
                    view.forget()

    def is_shared(self, tensor: Tensor) -> bool:
        """Whether `tensor` lies in memory from `buffer`."""
        with self._lock:
            return self._arena.find(tensor) is not None

    def offer(self, tensor: Tensor, tag: int, readers: Sequence[int], *, to_one: bool = False) -> int:
        """Let `readers`, ranks that await `tag`, read `tensor`, which is from `buffer`. Returns the offer's number.

        The memory must not be written until all have read it. The block is kept until then; the tensor itself need not
        be.
        """
        indices = [self._index_of[reader] for reader in readers]
        to = indices[0] if to_one else TO_ALL

        def put() -> tuple[int, Block]:
            found = self._arena.find(tensor)
            assert found is not None, "only memory of buffer() can be offered"
            block, start = found
            block.pins += 1
            return self._own.put(tag, to, block.offset, block.num_bytes, start, tensor.nbytes), block

        return self._lend(indices, put)

    def tell(self, message: bytes, tag: int, readers: Sequence[int]) -> None:
        """Let `readers`, ranks that await `tag`, hear a short message."""
        indices = [self._index_of[reader] for reader in readers]
        self._lend(indices, lambda: (self._own.put(tag, TO_ALL, message=message), None))

    def _lend(self, indices: list[int], put: Callable[[], tuple[int, Block | None]]) -> int:
        """Call `put`, under the lock, when a slot is free. It returns the slot, and the block that is lent with it.
        Returns the offer's number."""
        while True:
            with self._lock:
                if self._own.is_full:
                    self._tidy()
                if not self._own.is_full:
                    slot, block = put()
                    self._num_offers += 1
                    self._lent.append(_Lent(self._num_offers, slot, indices, block))
                    return self._num_offers
                oldest = self._lent[0]
            self._await(oldest)

    def reclaim(self, tensor: Tensor) -> None:
        """Return once all offers of the block that contains `tensor` have been read."""
        with self._lock:
            found = self._arena.find(tensor)
            lent_of = [lent for lent in self._lent if found is not None and lent.block is found[0]]
        for lent in lent_of:
            self._await(lent)

    def await_readers(self, number: int) -> None:
        """Return once all readers of an offer have read it."""
        for lent in self._lent:
            if lent.number == number:
                self._await(lent)
                return

    def _await(self, lent: _Lent) -> None:
        for index in lent.indices:
            self.wait_for(self.ranks[index], partial(self._has_read, lent, index))

    # -- to take ----------------------------------------------------------------------------------------

    def take(
        self, rank: int, tag: int, use: Callable[[Tensor], None], part: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        """Wait for what `rank` offers under `tag`, and let `use` read it in place (uint8, flat), or only `part` of
        it."""
        offer_table, me = self._offer_tables[rank], self._index_of[self.rank]
        offer = self.wait_for(rank, lambda: offer_table.find(tag, me))
        view = self._view(rank, offer.offset, offer.block_bytes)
        given = view.whole[offer.start : offer.start + offer.num_bytes]
        if part is not None:
            given = part(given)
        if given.nbytes >= LEAST_BYTES:
            view.bring(given)
        use(given)
        offer_table.mark(offer.slot, me)
        self._own.notify()

    def hear(self, rank: int, tag: int) -> bytes:
        """Wait for the short message that `rank` tells under `tag`."""
        offer_table, me = self._offer_tables[rank], self._index_of[self.rank]
        slot = self.wait_for(rank, lambda: offer_table.find(tag, me)).slot
        message = offer_table.message(slot)
        offer_table.mark(slot, me)
        self._own.notify()
        return message

    def wait_for(self, rank: int, look: Callable[[], Found | None]) -> Found:
        """The first result of `look` that is not `None`; called again whenever `rank` notifies. Raises `LinkError` if
        that rank has ended or the wait is aborted."""
        changes = self._offer_tables[rank].changes
        while True:
            seen = changes.value
            found = look()
            if found is not None:
                return found
            if self._is_aborted.is_set():
                raise LinkError(rank, f"Nothing came from rank {rank}.")
            changes.wait_while(seen, _LOOK_SECONDS)
            if changes.value == seen and self._has_ended(rank) and look() is None:
                raise LinkError(rank, f"The process of rank {rank} has ended.")

    def notify(self) -> None:
        """Wake the ranks that wait for this one."""
        self._own.notify()

    def abort(self) -> None:
        """End every wait, now and from now on. From any thread."""
        self._is_aborted.set()
        for table in tuple(self._offer_tables.values()):
            table.changes.wake()

    def close(self) -> None:
        for life in self._lives.values():
            life.close()
        self._lives.clear()
        self._mapped.clear()
        self._arena.close()
        for file in self._files.values():
            file.close()

    # -- inside -----------------------------------------------------------------------------------------

    def _tidy(self) -> None:
        """Reclaim the offers that all readers have read."""
        with self._lock:
            still = []
            for lent in self._lent:
                if self._own.is_read(lent.slot, lent.indices):
                    lent.is_read = True
                    self._own.clear(lent.slot)
                    if lent.block is not None:
                        lent.block.pins -= 1
                else:
                    still.append(lent)
            self._lent = still

    def _wait_briefly(self, block: Block) -> None:
        """Wait for the readers of `block`, who usually take less time than fresh pages. Limited, for they may need this
        rank first."""
        until = time.monotonic() + _PATIENCE_SECONDS
        for lent in [lent for lent in self._lent if lent.block is block]:
            for index in lent.indices:
                changes = self._offer_tables[self.ranks[index]].changes
                seen = changes.value
                while not self._has_read(lent, index) and (left := until - time.monotonic()) > 0:
                    changes.wait_while(seen, left)
                    seen = changes.value
        self._tidy()

    def _has_read(self, lent: _Lent, index: int) -> bool | None:
        with self._lock:  # once this offer is tidied up its slot may hold another
            return lent.is_read or self._own.is_read(lent.slot, [index]) or None

    def _view(self, rank: int, offset: int, num_bytes: int) -> _View:
        """A neighbour's block, mapped once."""
        key = (rank, offset, num_bytes)
        with self._lock:
            view = self._mapped.get(key)
            if view is None:
                view = self._mapped[key] = _View(self._files[rank].map(offset, num_bytes))
                if len(self._mapped) > _NUM_MAPPED:
                    self._mapped.popitem(last=False)
            else:
                self._mapped.move_to_end(key)  # so that the least recently used one is dropped first
            return view

    def _has_ended(self, rank: int) -> bool:
        life = self._lives.get(rank)
        return life is not None and life.has_ended()


def _numbered(hosts: Sequence[str], has_refused: Sequence[bool]) -> list[int]:
    """By rank, the first rank of its host; ranks of a host where one has refused each count as a host of their own."""
    refused = {host for host, is_so in zip(hosts, has_refused, strict=True) if is_so}
    return [rank if host in refused else hosts.index(host) for rank, host in enumerate(hosts)]


def _introduction(rank: int, own: SharedFile | None, host: str) -> dict[str, str | int]:
    """A rank's introduction to the others; without a file it counts as alone on its host."""
    mine: dict[str, str | int] = {"pid": os.getpid(), "file": -1, "host": f"that of rank {rank} alone"}
    mine["name"] = host or socket.gethostname()
    return mine if own is None else mine | {"file": own.descriptor, "host": host or host_identity()}


def _create() -> SharedFile | None:
    try:
        return SharedFile.create() if is_possible() else None
    except OSError:
        return None


def copy_into(tensor: Tensor, wire: torch.dtype | None = None) -> Callable[[Tensor], None]:
    """For `Neighbours.take`: copies what is offered, in the dtype `wire` or else that of `tensor`, into `tensor`."""

    def copy(given: Tensor) -> None:
        tensor.copy_(given.view(tensor.dtype if wire is None else wire))

    return copy
