"""The ranks of this host, from one rank's point of view: what it offers them, and what it waits for."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from shardwise.comm.life import Life, host_identity
from shardwise.comm.on_hosts import Hosts
from shardwise.comm.shm.arena import Arena, Block
from shardwise.comm.shm.file import Mapping, SharedFile, bytes_of, forget, is_possible
from shardwise.comm.shm.offers import TO_ALL, OfferTable, offer_table_bytes
from shardwise.comm.work import LinkError

Tensor = torch.Tensor
Exchange = Callable[[bytes], list[bytes]]
Found = TypeVar("Found")
_LOOK_SECONDS = 0.05
"""How often a wait looks whether the other still lives."""
_PATIENCE_SECONDS = 0.005
"""How long a rank waits for readers before it makes a block: some times what that takes."""
_NUM_MAPPED = 64
_KEPT_BYTES = 2**16
"""A neighbour's blocks up to this size stay mapped from step to step: to take them out costs as much."""
_log = logging.getLogger("shardwise")


@dataclass(eq=False, slots=True)
class _Lent:
    """An offer that has not been read by all, as far as is known. Slots are used again, numbers are not."""

    number: int
    slot: int
    places: list[int]
    block: Block
    is_read: bool = False


class Neighbours:
    """What this rank shares with the others of its host.

    Used by the thread that computes, and by those that bring its collectives over several hosts to their end. Nobody
    waits for anybody under the lock.
    """

    def __init__(self, rank: int, ranks: Sequence[int], files: dict[int, SharedFile], pids: dict[int, int]) -> None:
        self.rank = rank
        self.ranks = tuple(ranks)
        self._places = {other: place for place, other in enumerate(self.ranks)}
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
        self._mapped: OrderedDict[tuple[int, int, int], tuple[Mapping, Tensor]] = OrderedDict()
        self._lives = {other: Life(pid) for other, pid in pids.items() if pid != os.getpid()}
        self._is_cut = threading.Event()
        self._lock = threading.RLock()

    @classmethod
    def meet(cls, rank: int, exchange: Exchange, host: str = "") -> tuple[Neighbours | None, Hosts]:
        """Find the ranks of this host. All ranks of the world call; `exchange` gives everybody's message, by rank.

        `None` on all ranks of a host where memory cannot be shared, or where there is only one of them. Beside it where
        each rank is, the same on all. `host` is what to call this rank's, where it is not what the system says.
        """
        own = _create()
        said = _introduction(rank, own, host)
        told = [json.loads(message) for message in exchange(json.dumps(said).encode())]
        ranks = [other for other, one in enumerate(told) if one["host"] == said["host"]]
        pids = {other: int(told[other]["pid"]) for other in ranks}
        files: dict[int, SharedFile] = {} if own is None else {rank: own}
        found, refusal = None, ""
        try:
            if len(ranks) > 1:
                for other in ranks:
                    files[other] = files.get(other) or SharedFile.attach(pids[other], int(told[other]["file"]))
                found = cls(rank, ranks, files, pids)
        except OSError as error:
            refusal = str(error)
        answers = exchange(refusal.encode())
        refusals = [answers[other].decode() for other in ranks if answers[other]]
        numbers = _numbered([str(one["host"]) for one in told], [bool(answer) for answer in answers])
        hosts = Hosts(tuple(numbers), tuple(str(one["name"]) for one in told))
        if found is not None and not refusals:
            return found, hosts
        if refusals and rank == ranks[0]:
            _log.warning("The ranks of this host share no memory (%s); messages go over sockets.", refusals[0])
        for file in files.values():
            file.close()
        return None, hosts

    def has(self, ranks: Sequence[int]) -> bool:
        """Whether all of `ranks` are of this host."""
        return all(rank in self._places for rank in ranks)

    # -- to give ----------------------------------------------------------------------------------------

    def buffer(self, num_bytes: int, *, waits: bool = True) -> Tensor:
        """Memory whose content can be offered as it lies there: uint8, undefined.

        `waits`: a little, for readers of what there is, before more is made.
        """
        self._tidy()
        with self._lock:
            block = self._arena.soon(num_bytes) if waits else None
        if block is not None:
            self._wait_briefly(block)
        with self._lock:
            return self._arena.take(num_bytes)

    def rest(self, *, keeps_some: bool) -> None:
        """Give back what waits for the next `buffer`, perhaps but for the largest blocks."""
        self._tidy()
        with self._lock:
            self._arena.rest(keeps_some=keeps_some)
            for mapped, view in self._mapped.values():
                if len(view) > _KEPT_BYTES:
                    forget(mapped)  # it is a neighbour's memory, and shall not count as ours

    def lies_open(self, tensor: Tensor) -> bool:
        """Whether `tensor` is such memory."""
        with self._lock:
            return self._arena.find(tensor) is not None

    def offer(self, tensor: Tensor, tag: int, readers: Sequence[int], *, to_one: bool = False) -> int:
        """Let `readers`, ranks that await `tag`, read `tensor`, which is of a `buffer`. Returns the offer's number.

        Nobody may write to it until all have. The block is kept until then, the tensor itself need not be.
        """
        places = [self._places[reader] for reader in readers]
        to = places[0] if to_one else TO_ALL
        while True:
            with self._lock:
                if self._own.is_full:
                    self._tidy()
                if not self._own.is_full:
                    found = self._arena.find(tensor)
                    assert found is not None, "only memory of buffer() can be offered"
                    block, start = found
                    slot = self._own.put(tag, to, block.offset, block.num_bytes, start, tensor.nbytes)
                    block.pins += 1
                    self._num_offers += 1
                    self._lent.append(_Lent(self._num_offers, slot, places, block))
                    return self._num_offers
                oldest = self._lent[0]
            self._await(oldest)

    def reclaim(self, tensor: Tensor) -> None:
        """Return once all offers of the block in which `tensor` lies have been read."""
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
        for place in lent.places:
            self.wait_for(self.ranks[place], partial(self._has_read, lent, place))

    # -- to take ----------------------------------------------------------------------------------------

    def take(self, rank: int, tag: int, use: Callable[[Tensor], None]) -> None:
        """Wait for what `rank` offers under `tag`, and let `use` read it where it lies (uint8, flat)."""
        offer_table, me = self._offer_tables[rank], self._places[self.rank]
        offer = self.wait_for(rank, lambda: offer_table.find(tag, me))
        view = self._view(rank, offer.offset, offer.block_bytes)
        use(view[offer.start : offer.start + offer.num_bytes])
        offer_table.mark(offer.slot, me)
        self._own.notify()

    def wait_for(self, rank: int, look: Callable[[], Found | None]) -> Found:
        """What `look` finds, once `rank` has brought it about. Raises `LinkError` if that will not happen."""
        changes = self._offer_tables[rank].changes
        while True:
            seen = changes.value
            found = look()
            if found is not None:
                return found
            if self._is_cut.is_set():
                raise LinkError(rank, f"Nothing came from rank {rank}.")
            changes.wait_while(seen, _LOOK_SECONDS)
            if changes.value == seen and self._has_ended(rank) and look() is None:
                raise LinkError(rank, f"The process of rank {rank} has ended.")

    def notify(self) -> None:
        """Wake those who wait for this rank."""
        self._own.notify()

    def cut(self) -> None:
        """End every wait, now and from now on. From any thread."""
        self._is_cut.set()
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
        """Take back what has been read by all."""
        with self._lock:
            still = []
            for lent in self._lent:
                if self._own.is_read(lent.slot, lent.places):
                    lent.is_read = True
                    self._own.clear(lent.slot)
                    lent.block.pins -= 1
                else:
                    still.append(lent)
            self._lent = still

    def _wait_briefly(self, block: Block) -> None:
        """For the readers of `block`, who mostly take less time than fresh pages do. They may need us first."""
        until = time.monotonic() + _PATIENCE_SECONDS
        for lent in [lent for lent in self._lent if lent.block is block]:
            for place in lent.places:
                changes = self._offer_tables[self.ranks[place]].changes
                seen = changes.value
                while not self._has_read(lent, place) and (left := until - time.monotonic()) > 0:
                    changes.wait_while(seen, left)
                    seen = changes.value
        self._tidy()

    def _has_read(self, lent: _Lent, place: int) -> bool | None:
        with self._lock:  # the slot is another offer's as soon as this one is tidied up
            return lent.is_read or self._own.is_read(lent.slot, [place]) or None

    def _view(self, rank: int, offset: int, num_bytes: int) -> Tensor:
        """A neighbour's block, mapped once."""
        key = (rank, offset, num_bytes)
        with self._lock:
            view = self._mapped.get(key)
            if view is None:
                mapped = self._files[rank].map(offset, num_bytes)
                view = self._mapped[key] = mapped, bytes_of(mapped)
                if len(self._mapped) > _NUM_MAPPED:
                    self._mapped.popitem(last=False)
            else:
                self._mapped.move_to_end(key)  # the one that is used least goes first
            return view[1]

    def _has_ended(self, rank: int) -> bool:
        life = self._lives.get(rank)
        return life is not None and life.has_ended()


def _numbered(hosts: Sequence[str], has_refused: Sequence[bool]) -> list[int]:
    """The first rank of each rank's host; of a host where one has refused, each rank is on one of its own."""
    refused = {host for host, is_so in zip(hosts, has_refused, strict=True) if is_so}
    return [rank if host in refused else hosts.index(host) for rank, host in enumerate(hosts)]


def _introduction(rank: int, own: SharedFile | None, host: str) -> dict[str, str | int]:
    """What a rank tells the others: without a file of its own it is on a host of its own."""
    said: dict[str, str | int] = {"pid": os.getpid(), "file": -1, "host": f"that of rank {rank} alone"}
    said["name"] = host or socket.gethostname()
    return said if own is None else said | {"file": own.descriptor, "host": host or host_identity()}


def _create() -> SharedFile | None:
    try:
        return SharedFile.create() if is_possible() else None
    except OSError:
        return None
