"""The ranks of one job, and how this process came to be one of them."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from shardwise.comm.between_hosts import BetweenHosts
from shardwise.comm.board import Board, board_of
from shardwise.comm.collectives import Communicator
from shardwise.comm.device_collectives import DeviceCollectives
from shardwise.comm.fault import Fault
from shardwise.comm.group import Group
from shardwise.comm.joining import (
    LATER_SECONDS,
    MEMBER,
    Opened,
    backend_of,
    device_of,
    open_beside,
    open_mpi,
    open_process_group,
    refusal_of,
    world_group,
)
from shardwise.comm.journal import Journal
from shardwise.comm.nccl import NcclGroups, leave_errors_to_the_watch
from shardwise.comm.pairwise import Nobody, Pairwise, Transport
from shardwise.comm.process_groups import ProcessGroups, TorchGroups
from shardwise.comm.shm import Neighbours, Shared
from shardwise.comm.watchdog import Watchdog
from shardwise.devices import RankDevice
from shardwise.errors import CommError, ConfigError
from shardwise.job_token import Seal
from shardwise.mesh import Mesh
from shardwise.places import Place, place_of
from shardwise.weighing import mean_of

if TYPE_CHECKING:
    from shardwise.comm.generation import Membership
    from shardwise.comm.members.membership import Opening

EVERYBODY = "world"
TIMEOUT_SECONDS = 600
PATIENCE_SECONDS = 10
MPI_BACKEND = "mpi4py"
"""What torch calls our backend."""


@dataclass(frozen=True)
class Watched:
    """By whom a rank is watched: `board` is where ranks tell each other how they fare."""

    board: Board
    timeout_seconds: float = TIMEOUT_SECONDS
    """How long one rank may keep the others waiting."""
    patience_seconds: float = PATIENCE_SECONDS
    """After which the others say for whom they wait."""

    @classmethod
    def by(cls, board: Board | None, timeout_seconds: float, patience_seconds: float) -> Watched | None:
        return None if board is None else cls(board, timeout_seconds, patience_seconds)


@dataclass(frozen=True)
class Host:
    """The host of a rank."""

    num_ranks: int | None = None
    """How many it has: `None` for all of them, 0 where nobody knows."""
    name: str = ""
    """What it is called, if not as the system says: ranks of others share no memory with those of this one."""
    shares_memory: bool = False
    """Whether its ranks meet in memory that they share, if they can. The same on all ranks."""


class World:
    """This process among its peers. It owns what it opened: `close()` it, or use it in a `with`.

    `World.join()` reads the environment that `shardwise launch`, `torchrun`, `mpirun`, `srun` and their like set
    (docs/launching.md has the table); without one it is a world of one.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        transport: Transport,
        *,
        device: RankDevice | None = None,
        watched: Watched | None = None,
        host: Host | None = None,
    ) -> None:
        """Without `watched` a fault is told by the transport alone, and waits have no end but its own.

        `device` is this rank's, the CPU if it is not given; it becomes the current one of this thread until `close`.
        `host` is the one that it is on: by default all ranks are, and share no memory.
        """
        host = Host() if host is None else host
        self.rank = rank
        self.size = size
        self.local_size = size if host.num_ranks is None else host.num_ranks
        """Ranks of this host; 0 if the environment does not say. The inner axis of `hsdp` and `hpz` without a mesh."""
        self.generation = 0
        """Which of the worlds it is that these processes have been, one after the other."""
        self.members: tuple[int, ...] = ()
        """By rank: the member's number, which is never used again. Empty without an elastic launcher."""
        self.is_newcomer = False
        """Whether this process has come to others that train already."""
        self.is_arriving = False
        """Whether it has, and has not begun to train: what a script asks before by `barrier`, `any_rank` and `mean`,
        the others have asked each other before it came, and are not asked again."""
        self.membership: Membership | None = None
        """How to come to the next generation. `None` without an elastic launcher."""
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
        if watched is not None and size > 1:
            self._watch = Watchdog(
                self.journal,
                size,
                watched.board,
                self._cut,
                patience_seconds=watched.patience_seconds,
                timeout_seconds=watched.timeout_seconds,
                lost_ranks=transport.lost_ranks,
            )
        if host.shares_memory:
            self._share_memory(transport, host.name)

    def _share_memory(self, transport: Transport, host: str = "") -> None:
        """Meet the ranks of this host in memory that they share, if they can. All ranks call."""
        if self.size > 1:
            neighbours, hosts = Neighbours.meet(self.rank, partial(self.exchange, subject="neighbours"), host)
            if len(set(hosts.numbers)) > 1:
                self._pairs = BetweenHosts(transport, self.journal, hosts.numbers, neighbours)
                if self._watch is not None:
                    self._watch.know_hosts(hosts, transport.closed_ranks)
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
        transport: str | None = None,
    ) -> World:
        """Meet the other ranks. All ranks call; returns when all have come.

        Where every rank has an accelerator of its own, it is the current device from here on, until `close`: what is
        made on "cuda" lies there. A process group that is there already is used and left open by `close`.
        `timeout_seconds` bounds this meeting, and later how long one rank may keep the others waiting; after
        `patience_seconds` of waiting they say for whom.

        Ranks of one host share memory, unless `shares_memory` is false, or it is not given and the environment
        variable SHARDWISE_SHARED_MEMORY is 0; it has to be the same on all ranks.

        Other messages go by `transport`, `"gloo"` or `"mpi"`; if it is not given, as the environment variable
        SHARDWISE_TRANSPORT says, else by MPI where the process group that is there does, or where an MPI has started
        the ranks and there is none.

        Raises `CommError` if the ranks do not meet and `ConfigError` if the
        environment makes no sense.
        """
        env = os.environ if environment is None else environment
        owns = not dist.is_initialized()
        place = place_of(env)
        shares = env.get("SHARDWISE_SHARED_MEMORY", "1") != "0" if shares_memory is None else shares_memory
        by_mpi = _goes_by_mpi(env, place, transport, owns=owns)
        if MEMBER in env:
            _check_elastic(by_mpi=by_mpi, owns=owns)
            return _join_as_member(env, shares, timeout_seconds, patience_seconds)
        if owns:
            if place.size == 1 and "MASTER_ADDR" not in env:
                return cls(0, 1, Nobody(), device=device_of(place))
            opened = open_process_group(place, env, timeout_seconds, patience_seconds, by_mpi=by_mpi)
        else:
            opened = Opened(device_of(place))
            (open_mpi if by_mpi else open_beside)(opened)
        assert opened.transport is not None
        board = board_of(dist.get_world_size(), Seal.of(env), timeout_seconds)
        world = cls(
            dist.get_rank(),
            dist.get_world_size(),
            opened.transport,
            device=opened.device,
            watched=Watched.by(board, timeout_seconds, patience_seconds),
            host=Host(place.local_size, shares_memory=shares),
        )
        opened.transport.settle(world.rank, partial(world.exchange, subject="connections"))
        if by_mpi:
            from shardwise.comm.mpi.ending import take_time_to_say_why

            take_time_to_say_why(world.journal)
        world._take_over(opened, timeout_seconds, owns=owns)
        return world

    def belong(self, generation: int, members: tuple[int, ...], membership: Membership) -> None:
        """This is one of the worlds that a member enters, one after the other."""
        self.generation, self.members, self.membership = generation, members, membership
        if self._watch is not None:
            self._watch.goes_on = True

    def settle(self, opened: Opened, timeout_seconds: float, *, shares_memory: bool) -> None:
        """What ranks do first once they can be broken off. All ranks call; raises what sending does."""
        assert opened.transport is not None
        if shares_memory:
            self._share_memory(opened.transport)
        opened.transport.settle(self.rank, partial(self.exchange, subject="connections"))
        self._take_over(opened, timeout_seconds, owns=True)

    def _take_over(self, opened: Opened, timeout_seconds: float, *, owns: bool) -> None:
        """What was opened, or was there, is this world's until `close`. All ranks call."""
        self._process_groups = [None] if owns else []
        if opened.beside is not None:
            self._process_groups.append(opened.beside)
        self._why_cpu = opened.why_cpu
        if not owns:
            self._agree_on_devices()
        self._host.ledger.clear()
        if self.rank_device.accelerator is not None:
            self.attach(_torch_groups(self.rank_device, timeout_seconds, is_own=owns))

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

    def line(self, name: str, ranks: Sequence[int]) -> Group:
        """Any ranks, of which this one is one, for collectives of what lies on the host."""
        return Group(name, tuple(ranks), ranks.index(self.rank))

    def exchange(self, message: bytes, subject: str = "message") -> list[bytes]:
        """Every rank's message, by rank. All ranks call, with the same `subject`: what it is about, in a word."""
        return self._host.exchange(message, self.everybody, subject)

    def any_rank(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank. All ranks call and get the same answer."""
        if self.is_arriving:
            return False
        return b"1" in self.exchange(b"1" if flag else b"0", "any_rank")

    def mean(self, value: float, weight: float | None = None) -> float:
        """The mean of every rank's `value`, the same on all of them; each counts by its `weight` if all give one. All
        ranks call."""
        if self.is_arriving:
            return value
        if weight is not None:
            told = torch.zeros(self.size, 2, dtype=torch.float64)
            told[self.rank, 0], told[self.rank, 1] = value, weight
            self._host.all_gather(told.view(-1), self.everybody, "weighed mean").wait()
            return mean_of(told[:, 0].tolist(), told[:, 1].tolist())
        told = torch.zeros(self.size, dtype=torch.float64)
        told[self.rank] = value
        self._host.all_gather(told, self.everybody, "mean").wait()
        return float(told.mean())

    def barrier(self) -> None:
        """Return once every rank has called."""
        if self.is_arriving:
            return
        self.exchange(b"", "barrier")

    def close(self, error: BaseException | None = None) -> None:
        """Leave. Nothing may be on its way, unless `error` is why: then the other ranks raise too, and name it.

        What would be sent afterwards is refused with `StateError`. May be called twice.
        """
        if self.membership is not None:
            self.membership.end(error)
        self._close(error, parts=True)

    def part(self) -> None:
        """Close this world and say nothing to its ranks, most of which will meet again in the next one."""
        self._close(None, parts=False)

    def _close(self, error: BaseException | None, *, parts: bool) -> None:
        watch, self._watch = self._watch, None  # they know each other: no collector should be needed to part them
        if watch is not None:
            watch.close(error, parts=parts)
        if self.size > 1:
            self.journal.close()
        self._host.close()
        if self._on_device is not None:
            self._on_device.close()
        while self._process_groups:
            dist.destroy_process_group(self._process_groups.pop())
        self.rank_device.leave()

    @property
    def fault(self) -> Fault | None:
        """What went wrong between these ranks, if anything did."""
        return self.journal.fault

    def break_off(self, fault: Fault) -> None:
        """Wake this rank, if it waits for others: it raises `fault`, now or when it would send something next.

        From any thread. The first fault counts.
        """
        if self._watch is not None:
            self._watch.deliver(fault)

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


def _join_as_member(
    env: Mapping[str, str], shares_memory: bool, timeout_seconds: float, patience_seconds: float
) -> World:
    """The generation of an elastic job that lets this process in; its modules are imported only then."""
    from shardwise.comm.members.joining import join_members

    def make(opening: Opening, opened: Opened) -> World:
        assert opened.transport is not None
        size = len(opening.members)
        board = board_of(size, Seal.of(env), timeout_seconds)
        watched = Watched.by(board, timeout_seconds, patience_seconds)
        return World(opening.rank, size, opened.transport, device=opened.device, watched=watched)

    return join_members(env, make, timeout_seconds, shares_memory=shares_memory)


def _goes_by_mpi(env: Mapping[str, str], place: Place, wish: str | None, *, owns: bool) -> bool:
    """Whether messages go by MPI. Raises `ConfigError` for a transport that there is not."""
    name = wish or env.get("SHARDWISE_TRANSPORT", "")
    if name not in ("", "gloo", "mpi"):
        raise ConfigError(f"There is no transport {name!r} between ranks. Known: gloo, mpi.")
    if name:
        return name == "mpi"
    if not owns:
        return str(dist.get_backend()) == MPI_BACKEND
    return place.is_mpi


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


def _check_elastic(*, by_mpi: bool, owns: bool) -> None:
    """Refuse what the ranks of an elastic job cannot have."""
    if not owns:
        raise ConfigError(
            "In an elastic job each generation opens a process group of its own, but there is one already. Leave out "
            "init_process_group() and join one World, or start the job without --elastic."
        )
    if by_mpi:
        raise ConfigError("MPI ends with its first dead rank. Leave out SHARDWISE_TRANSPORT=mpi, or --elastic.")
