"""The ranks of one job, and how this process came to be one of them."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
import torch.distributed as dist

from shardwise.comm import compat
from shardwise.comm.board import Board, StoreBoard
from shardwise.comm.collectives import Collectives
from shardwise.comm.gloo import GlooTransport
from shardwise.comm.group import Group
from shardwise.comm.joining import gpu_of, number_in, open_process_group, place_of
from shardwise.comm.journal import Journal
from shardwise.comm.nccl import Nccl
from shardwise.comm.pairwise import Pairwise, Transport
from shardwise.comm.shm import Neighbours, Shared
from shardwise.comm.sockets import opened_inside
from shardwise.comm.watch import Watch
from shardwise.comm.work import Done, Work
from shardwise.errors import CommError
from shardwise.mesh import Mesh

EVERYBODY = "world"
TIMEOUT_SECONDS = 600
PATIENCE_SECONDS = 10


class World:
    """This process among its peers. It owns what it opened: `close()` it, or use it in a `with`.

    `World.join()` reads the environment that `shardwise launch`, `torchrun` and their like set;
    without one it is a world of one.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        transport: Transport,
        *,
        device: torch.device | None = None,
        board: Board | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        patience_seconds: float = PATIENCE_SECONDS,
        shares_memory: bool = False,
        local_size: int | None = None,
    ) -> None:
        """`board` is where ranks tell each other how they fare; without one a fault is told by the transport alone.

        With `shares_memory`, the same on all ranks, those of one host meet in memory that they share, if they can.
        `local_size` is how many ranks this one's host has: all of them, if it is not given.
        """
        self.rank = rank
        self.size = size
        self.local_size = size if local_size is None else local_size
        """Ranks of this host; 0 if the environment does not say. The inner axis of `hsdp` and `hpz` without a mesh."""
        self.device = torch.device("cpu") if device is None else device
        """Where models that have no memory yet are put: this rank's GPU, where NCCL can be used, else the CPU."""
        self.journal = Journal(rank)
        self._pairs = Pairwise(transport, self.journal)
        self._host: Collectives = self._pairs
        self._nccl: Nccl | None = None
        self._process_groups: list[dist.ProcessGroup | None] = []
        self._watch: Watch | None = None
        if board is not None and size > 1:
            self._watch = Watch(
                self.journal,
                size,
                board,
                self._cut,
                patience_seconds=patience_seconds,
                timeout_seconds=timeout_seconds,
            )
        if shares_memory and size > 1:
            neighbours = Neighbours.meet(rank, self.exchange)
            self._host = Shared(neighbours, self._pairs) if neighbours is not None else self._pairs
            self._pairs.ledger.clear()

    @classmethod
    def join(
        cls,
        timeout_seconds: float = TIMEOUT_SECONDS,
        environment: Mapping[str, str] | None = None,
        *,
        patience_seconds: float = PATIENCE_SECONDS,
        shares_memory: bool | None = None,
    ) -> World:
        """Meet the other ranks. All ranks call; returns when all have come.

        A process group that is there already is used and left open by `close`. `timeout_seconds` bounds
        this meeting, and later how long one rank may keep the others waiting; after `patience_seconds` of
        waiting they say for whom.

        Ranks of one host share memory, unless `shares_memory` is false, or it is not given and the environment
        variable SHARDWISE_SHARED_MEMORY is 0; it has to be the same on all ranks.

        Raises `CommError` if the ranks do not meet and `ConfigError` if the
        environment makes no sense.
        """
        env = os.environ if environment is None else environment
        owns = not dist.is_initialized()
        if owns:
            rank, size = place_of(env)
            if size == 1 and "MASTER_ADDR" not in env:
                return cls(0, 1, _Nobody(), device=gpu_of(env))
        with opened_inside() as sockets:
            if owns:
                open_process_group(rank, size, env, timeout_seconds, patience_seconds)
            gloo = _world_group() if owns else _beside()
        world = cls(
            dist.get_rank(),
            dist.get_world_size(),
            GlooTransport(gloo, sockets),
            device=gpu_of(env),
            board=_board(dist.get_world_size()),
            timeout_seconds=timeout_seconds,
            patience_seconds=patience_seconds,
            shares_memory=env.get("SHARDWISE_SHARED_MEMORY", "1") != "0" if shares_memory is None else shares_memory,
            local_size=number_in(env, "LOCAL_WORLD_SIZE", 0),
        )
        world._process_groups = [None if owns else gloo]
        if (gpu := gpu_of(env)) is not None:
            world._nccl = Nccl(_world_group(), gpu, world.journal)
        return world

    def be_patient(self, seconds: float) -> None:
        """How long this rank waits for others before it says so."""
        if self._watch is not None:
            self._watch.patience_seconds = seconds

    def collectives(self, device: torch.device) -> Collectives:
        """What moves tensors that lie on `device`."""
        if device.type == "cpu":
            return self._host
        if device.type == "cuda" and self._nccl is not None:
            return self._nccl
        if self.size == 1:
            return self._host
        raise CommError(
            f"The model is on {device}, but this world of {self.size} ranks has nothing that moves tensors "
            f"there. Start it where NCCL can be used, or put the model on the CPU."
        )

    def group(self, mesh: Mesh, axis: str) -> Group:
        """The ranks on this rank's line along `axis`."""
        return Group(axis, mesh.group(self.rank, axis), mesh.coordinate(self.rank)[axis])

    @property
    def everybody(self) -> Group:
        return Group(EVERYBODY, tuple(range(self.size)), self.rank)

    def exchange(self, message: bytes) -> list[bytes]:
        """Every rank's message, by rank. All ranks call."""
        return self._host.exchange(message, self.everybody)

    def any_rank(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank. All ranks call and get the same answer."""
        return b"1" in self.exchange(b"1" if flag else b"0")

    def mean(self, value: float) -> float:
        """The mean of every rank's `value`, the same on all of them. All ranks call."""
        told = torch.zeros(self.size, dtype=torch.float64)
        told[self.rank] = value
        self._host.all_gather(told, self.everybody).wait()
        return float(told.mean())

    def barrier(self) -> None:
        """Return once every rank has called."""
        self.exchange(b"")

    def close(self, error: BaseException | None = None) -> None:
        """Leave. Nothing may be on its way, unless `error` is why: then the other ranks raise too, and name it.

        What would be sent afterwards is refused with `StateError`. May be called twice.
        """
        watch, self._watch = self._watch, None  # they know each other: no collector should be needed to part them
        if watch is not None:
            watch.close(error)
        if self.size > 1:
            self.journal.close()
        self._host.close()
        if self._nccl is not None:
            self._nccl.close()
        while self._process_groups:
            dist.destroy_process_group(self._process_groups.pop())

    def _cut(self) -> None:
        self._host.cut()
        if self._nccl is not None:
            self._nccl.cut()

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close(error)


class _Nobody:
    """The transport of a world of one: there is nobody to write to."""

    name = "nothing"

    def send(self, tensor: torch.Tensor, rank: int, tag: int) -> Work:  # noqa: ARG002
        return Done()

    def receive(self, tensor: torch.Tensor, rank: int, tag: int) -> Work:  # noqa: ARG002
        return Done()

    def cut(self) -> None:
        return

    def close(self) -> None:
        return


def _world_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    if group is None:
        raise CommError("The process group was destroyed while a World was made from it.")
    return group


def _beside() -> dist.ProcessGroup:
    """A gloo group beside the process group that is there: one of our own, which a fault may break."""
    _world_group()
    group: dist.ProcessGroup = dist.new_group(backend="gloo")
    return group


def _board(size: int) -> StoreBoard | None:
    store = compat.another_connection()
    return StoreBoard(store, size) if store is not None else None
