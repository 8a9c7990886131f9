"""The ranks of one job, and how this process came to be one of them."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping
from functools import partial

import torch
import torch.distributed as dist

from shardwise.comm import compat
from shardwise.comm.board import Board, StoreBoard
from shardwise.comm.collectives import Communicator
from shardwise.comm.device_collectives import DeviceCollectives
from shardwise.comm.gloo import GlooTransport
from shardwise.comm.group import Group
from shardwise.comm.joining import (
    LATER_SECONDS,
    Opened,
    backend_of,
    device_of,
    number_in,
    open_beside,
    open_process_group,
    place_of,
    refusal_of,
    world_group,
)
from shardwise.comm.journal import Journal
from shardwise.comm.nccl import NcclGroups, leave_errors_to_the_watch
from shardwise.comm.pairwise import Pairwise, Transport
from shardwise.comm.process_groups import ProcessGroups, TorchGroups
from shardwise.comm.shm import Neighbours, Shared
from shardwise.comm.watchdog import Watchdog
from shardwise.comm.work import Done, Work
from shardwise.devices import RankDevice
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
        device: RankDevice | None = None,
        board: Board | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        patience_seconds: float = PATIENCE_SECONDS,
        shares_memory: bool = False,
        local_size: int | None = None,
    ) -> None:
        """`board` is where ranks tell each other how they fare; without one a fault is told by the transport alone.

        `device` is this rank's, the CPU if it is not given; it becomes the current one of this thread until `close`.
        With `shares_memory`, the same on all ranks, those of one host meet in memory that they share, if they can.
        `local_size` is how many ranks this one's host has: all of them, if it is not given.
        """
        self.rank = rank
        self.size = size
        self.local_size = size if local_size is None else local_size
        """Ranks of this host; 0 if the environment does not say. The inner axis of `hsdp` and `hpz` without a mesh."""
        self.rank_device = RankDevice.cpu() if device is None else device
        """This rank's device, and what torch can be asked about it. Tensors on others cannot be sharded."""
        self.everybody = Group(EVERYBODY, tuple(range(size)), rank)
        self.journal = Journal(rank)
        self._why_cpu = ""
        self._pairs = Pairwise(transport, self.journal)
        self._host: Communicator = self._pairs
        self._on_device: DeviceCollectives | None = None
        self._process_groups: list[dist.ProcessGroup | None] = []
        self._watch: Watchdog | None = None
        self.rank_device.enter()
        if board is not None and size > 1:
            self._watch = Watchdog(
                self.journal,
                size,
                board,
                self._cut,
                patience_seconds=patience_seconds,
                timeout_seconds=timeout_seconds,
                lost_ranks=transport.lost_ranks,
            )
        if shares_memory and size > 1:
            neighbours = Neighbours.meet(rank, partial(self.exchange, subject="neighbours"))
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

        Where every rank has an accelerator of its own, it is the current device from here on, until `close`: what is
        made on "cuda" lies there. A process group that is there already is used and left open by `close`.
        `timeout_seconds` bounds this meeting, and later how long one rank may keep the others waiting; after
        `patience_seconds` of waiting they say for whom.

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
                return cls(0, 1, _Nobody(), device=device_of(env))
            opened = open_process_group(rank, size, env, timeout_seconds, patience_seconds)
        else:
            opened = Opened(device_of(env))
            open_beside(opened)
        assert opened.gloo is not None
        world = cls(
            dist.get_rank(),
            dist.get_world_size(),
            GlooTransport(opened.gloo, opened.sockets),
            device=opened.device,
            board=_board(dist.get_world_size()),
            timeout_seconds=timeout_seconds,
            patience_seconds=patience_seconds,
            shares_memory=env.get("SHARDWISE_SHARED_MEMORY", "1") != "0" if shares_memory is None else shares_memory,
            local_size=number_in(env, "LOCAL_WORLD_SIZE", 0),
        )
        world._process_groups = [None] if owns else []
        if opened.beside is not None:
            world._process_groups.append(opened.beside)
        opened.sockets.keep_mirrored(world.rank, partial(world.exchange, subject="connections"))
        world._why_cpu = opened.why_cpu
        if not owns:
            world._agree_on_devices()
        world._host.ledger.clear()
        if world.rank_device.accelerator is not None:
            world.attach(_torch_groups(world.rank_device, timeout_seconds, is_own=owns))
        return world

    def _agree_on_devices(self) -> None:
        """Where not each rank has an accelerator, none of them uses one. All ranks call."""
        said = self.exchange(self.rank_device.identity.encode(), "devices")
        why = refusal_of([identity.decode() for identity in said])
        if why:
            self._why_cpu = why if any(said) else ""
            self.rank_device.leave()
            self.rank_device = RankDevice.cpu()

    def attach(self, groups: ProcessGroups) -> None:
        """Let `groups` move what lies on this rank's device. All ranks call."""
        self._on_device = DeviceCollectives(groups, self.rank_device, self._host, self.rank, self.size)

    @property
    def device(self) -> torch.device:
        """Where models that have no memory yet are put: this rank's accelerator, or the CPU."""
        return self.rank_device.device

    def be_patient(self, seconds: float) -> None:
        """How long this rank waits for others before it says so."""
        if self._watch is not None:
            self._watch.patience_seconds = seconds

    def collectives(self, device: torch.device) -> Communicator:
        """What moves tensors that lie on `device`."""
        if self._on_device is not None and device.type == self.device.type:
            return self._on_device
        if device.type == "cpu" or self.size == 1:
            return self._host
        why = f": {self._why_cpu}" if self._why_cpu else ""
        raise CommError(
            f"The model is on {device}, but this world of {self.size} ranks has nothing that moves tensors "
            f"there{why}. Give each rank an accelerator of its own, or put the model on the CPU."
        )

    def group(self, mesh: Mesh, axis: str) -> Group:
        """The ranks on this rank's line along `axis`."""
        return Group(axis, mesh.group(self.rank, axis), mesh.coordinate(self.rank)[axis])

    def exchange(self, message: bytes, subject: str = "message") -> list[bytes]:
        """Every rank's message, by rank. All ranks call, with the same `subject`: what it is about, in a word."""
        return self._host.exchange(message, self.everybody, subject)

    def any_rank(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank. All ranks call and get the same answer."""
        return b"1" in self.exchange(b"1" if flag else b"0", "any_rank")

    def mean(self, value: float) -> float:
        """The mean of every rank's `value`, the same on all of them. All ranks call."""
        told = torch.zeros(self.size, dtype=torch.float64)
        told[self.rank] = value
        self._host.all_gather(told, self.everybody, "mean").wait()
        return float(told.mean())

    def barrier(self) -> None:
        """Return once every rank has called."""
        self.exchange(b"", "barrier")

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
        if self._on_device is not None:
            self._on_device.close()
        while self._process_groups:
            dist.destroy_process_group(self._process_groups.pop())
        self.rank_device.leave()

    def _cut(self) -> None:
        """From the watch's thread. What is on a device first: its own sockets have to be there when it is aborted."""
        try:
            if self._on_device is not None:
                self._on_device.cut()
        finally:
            self._host.cut()

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

    def lost_ranks(self) -> tuple[int, ...]:
        return ()

    def cut(self) -> None:
        return

    def close(self) -> None:
        return


def _torch_groups(device: RankDevice, timeout_seconds: float, *, is_own: bool) -> ProcessGroups:
    """Torch's process groups on the ranks' devices; where the world group is another's, with one beside it."""
    kind, backend = device.device.type, backend_of(device.device.type)
    seconds = timeout_seconds + LATER_SECONDS
    if is_own:
        world = world_group()
    else:
        if kind == "cuda":
            leave_errors_to_the_watch()
        world = dist.new_group(backend=backend, timeout=datetime.timedelta(seconds=seconds))
    make = NcclGroups if kind == "cuda" else TorchGroups
    return make(backend, device.device, seconds, world)


def _board(size: int) -> StoreBoard | None:
    store = compat.another_connection()
    return StoreBoard(store, size) if store is not None else None
