"""The ranks of one job, and how this process became one of them."""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from shardwise.comm.bootstrap import (
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
from shardwise.comm.collectives import Communicator
from shardwise.comm.group import Group
from shardwise.comm.host_layout import even_local_size
from shardwise.comm.regrouping import Membership
from shardwise.comm.transport import mpi
from shardwise.comm.transport.between_hosts import BetweenHosts
from shardwise.comm.transport.device_collectives import DeviceCollectives
from shardwise.comm.transport.nccl import NcclGroups, leave_errors_to_the_watch
from shardwise.comm.transport.pairwise import Nobody, Pairwise, Transport
from shardwise.comm.transport.process_groups import ProcessGroups, TorchGroups
from shardwise.comm.transport.shm import Neighbours, Shared
from shardwise.comm.watch.fault import Fault
from shardwise.comm.watch.journal import Journal
from shardwise.comm.watch.status_board import Board, board_of
from shardwise.comm.watch.watchdog import Watchdog
from shardwise.comm.weighing import mean_of
from shardwise.errors import CommError, ConfigError
from shardwise.plan.mesh import Mesh
from shardwise.system.devices import RankDevice
from shardwise.system.flags import takes_flags
from shardwise.system.job_token import Seal
from shardwise.system.process_rank import ProcessRank, process_rank_of

if TYPE_CHECKING:
    from shardwise.comm.members.membership import Opening

EVERYBODY = "world"
TIMEOUT_SECONDS = 600
PATIENCE_SECONDS = 10


@dataclass(frozen=True)
class Watched:
    """How a rank is watched: `board` is where ranks report how they fare."""

    board: Board
    timeout_seconds: float = TIMEOUT_SECONDS
    """How long one rank may keep the others waiting."""
    patience_seconds: float = PATIENCE_SECONDS
    """After how long the waiting ranks log which rank they wait for."""

    @classmethod
    def by(cls, board: Board | None, timeout_seconds: float, patience_seconds: float) -> Watched | None:
        return None if board is None else cls(board, timeout_seconds, patience_seconds)


@dataclass(frozen=True)
class Host:
    """The host of a rank."""

    num_ranks: int | None = None
    """Its number of ranks: `None` for all, 0 if unknown."""
    name: str = ""
    """Its name, if not the system's: ranks on hosts with different names share no memory."""
    shares_memory: bool = False
    """Whether its ranks use shared memory, if they can. The same on all ranks."""


class World:
    """This process among the ranks of its job. It owns what it opened: `close()` it, or use it in a `with`.

    `World.join()` reads the environment that `shardwise launch`, `torchrun`, `mpirun`, `srun` and other launchers set
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
        """Usually made by `World.join()`. Without `watched`, faults show, and waits end, only through the transport.

        `device` is this rank's, by default the CPU; it is the current device of this thread until `close`. `host` is
        this rank's host: by default all ranks are on one and share no memory.
        """
        host = Host() if host is None else host
        self.rank = rank
        self.size = size
        self.local_size = size if host.num_ranks is None else host.num_ranks
        """Ranks of each host; 0 if the environment does not say, or if in an elastic job hosts have different numbers
        of ranks, or ranks not in a row. The inner axis of `hsdp` and `hpz` without a mesh."""
        self.hosts: tuple[str, ...] = ()
        """By rank: the name of its host, in an elastic job on several hosts; empty elsewhere."""
        self.generation = 0
        """The number of this world among those that these processes have formed, one after the other."""
        self.members: tuple[int, ...] = ()
        """By rank: the member's number, which is never used again. Empty without an elastic launcher."""
        self.is_newcomer = False
        """Whether this process has joined others that were training already."""
        self.is_arriving = False
        """Whether it is a newcomer that has not begun to train: its `barrier`, `any_rank` and `mean` are not sent."""
        self.membership: Membership[World] | None = None
        """The way to the next generation. `None` without an elastic launcher."""
        self.rank_device = RankDevice.cpu() if device is None else device
        """This rank's device, and what torch can be asked about it. Tensors on other devices cannot be sharded."""
        self.everybody = Group(EVERYBODY, tuple(range(size)), rank)
        self.journal = Journal(rank)
        self.timeout_seconds: float = TIMEOUT_SECONDS if watched is None else watched.timeout_seconds
        """How long one rank may keep the others waiting."""
        self._why_cpu = ""
        self.transport = transport
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
                self._abort,
                patience_seconds=watched.patience_seconds,
                timeout_seconds=watched.timeout_seconds,
                lost_ranks=transport.lost_ranks,
                end_lost_waits=transport.end_lost_waits,
            )
        if host.shares_memory:
            self._share_memory(transport, host.name)

    def _share_memory(self, transport: Transport, host: str = "") -> None:
        """Set up shared memory with the other ranks of this host, if possible. All ranks call."""
        if self.size > 1:
            neighbours, hosts = Neighbours.meet(self.rank, partial(self.exchange, subject="neighbours"), host)
            if len(set(hosts.numbers)) > 1:
                self._pairs = BetweenHosts(transport, self.journal, hosts.numbers, neighbours)
                if self._watch is not None:
                    self._watch.set_hosts(hosts, transport.closed_ranks)
            self._host = Shared(neighbours, self._pairs) if neighbours is not None else self._pairs
            self._pairs.ledger.clear()

    @classmethod
    @takes_flags
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

        If every rank has an accelerator of its own, it is the current device from here until `close`, so that tensors
        made on "cuda" are there. An existing process group is used, and left open by `close`. `timeout_seconds` bounds
        this wait, and later how long one rank may keep the others waiting; after `patience_seconds` of waiting they
        log which rank they wait for.

        Ranks of one host share memory, unless `shares_memory` is false, or it is not given and the environment variable
        SHARDWISE_SHARED_MEMORY is 0. It has to be the same on all ranks.

        Other messages go by `transport`, `"gloo"` or `"mpi"`. If it is not given, the environment variable
        SHARDWISE_TRANSPORT decides; without it, MPI is used if the existing process group uses it, or if there is none
        and an MPI launcher started the ranks.

        Raises `CommError` if the ranks do not meet, and `ConfigError` if the environment is inconsistent or names an
        unknown transport, or if this process is only importing the script of a rank.
        """
        _check_not_importing_main()
        env = os.environ if environment is None else environment
        owns = not dist.is_initialized()
        process = process_rank_of(env)
        shares = _shares_memory(env) if shares_memory is None else shares_memory
        by_mpi = _goes_by_mpi(env, process, transport, owns=owns)
        if MEMBER in env:
            _check_elastic(by_mpi=by_mpi, owns=owns)
            return _join_as_member(env, shares, timeout_seconds, patience_seconds)
        if owns:
            if process.size == 1 and (process.launcher is None or "MASTER_ADDR" not in env):
                return cls(0, 1, Nobody(), device=device_of(process))
            opened = open_process_group(process, env, timeout_seconds, patience_seconds, by_mpi=by_mpi)
        else:
            transport_there, beside = (open_mpi(), None) if by_mpi else open_beside(timeout_seconds)
            opened = Opened(transport_there, device_of(process), beside=beside, seal=Seal.of(env))
        board = board_of(dist.get_world_size(), opened.seal, timeout_seconds, opened.number)
        world = cls(
            dist.get_rank(),
            dist.get_world_size(),
            opened.transport,
            device=opened.device,
            watched=Watched.by(board, timeout_seconds, patience_seconds),
            host=Host(process.local_size),
        )
        world._own_groups(opened, owns=owns)
        try:
            if by_mpi:
                from shardwise.comm.transport.mpi.ending import take_time_to_say_why

                take_time_to_say_why(world.journal)
            world._meet(opened, shares_memory=shares)
            world._take_over(opened, timeout_seconds, owns=owns)
        except BaseException as error:  # another try, as in a notebook, must not find what is left of this one
            world.close(error)
            raise
        return world

    def belong(
        self,
        generation: int,
        members: tuple[int, ...],
        membership: Membership[World],
        hosts: tuple[str, ...] = (),
    ) -> None:
        """Record that this world is a generation of an elastic job; `hosts` has each rank's host if it has several."""
        self.generation, self.members, self.membership = generation, members, membership
        self.hosts = hosts
        self.local_size = even_local_size(hosts) if hosts else self.local_size
        self.journal.is_elastic = True

    def finish_joining(self, opened: Opened, timeout_seconds: float, *, shares_memory: bool) -> None:
        """Run the first exchanges, after which a fault can interrupt ranks. All ranks call; raises as sending does."""
        self._meet(opened, shares_memory=shares_memory)
        self._own_groups(opened, owns=True)
        self._take_over(opened, timeout_seconds, owns=True)

    def _meet(self, opened: Opened, *, shares_memory: bool) -> None:
        """Find the other ranks of this host, and prepare to detect the end of any. All ranks call."""
        if shares_memory:
            self._share_memory(opened.transport)
        opened.transport.watch_peers(self.rank, partial(self.exchange, subject="connections"))

    def _own_groups(self, opened: Opened, *, owns: bool) -> None:
        """Take ownership, until `close`, of the process groups that were opened."""
        self._process_groups = [None] if owns else []
        if opened.beside is not None:
            self._process_groups.append(opened.beside)

    def _take_over(self, opened: Opened, timeout_seconds: float, *, owns: bool) -> None:
        """Agree on devices, and send from them. All ranks call."""
        self._why_cpu = opened.why_cpu
        if not owns:
            self._agree_on_devices()
        self._host.ledger.clear()
        if self.rank_device.accelerator is not None:
            self.attach(_torch_groups(self.rank_device, timeout_seconds, is_own=owns))

    def _agree_on_devices(self) -> None:
        """Unless every rank has an accelerator, none uses one. All ranks call."""
        identities = self.exchange(self.rank_device.identity.encode(), "devices")
        why = refusal_of([identity.decode() for identity in identities])
        if why:
            self._why_cpu = why if any(identities) else ""
            self.rank_device.leave()
            self.rank_device = RankDevice.cpu()

    def attach(self, groups: ProcessGroups) -> None:
        """Use `groups` for tensors on this rank's device. All ranks call."""
        self._on_device = DeviceCollectives(groups, self.rank_device, self._host, self.rank, self.size)

    @property
    def ranks_of_host(self) -> tuple[int, ...]:
        """All ranks of this rank's host in an elastic job, itself included: all there are, if that is on one host."""
        own = self.hosts[self.rank] if self.hosts else None
        return tuple(rank for rank in range(self.size) if not self.hosts or self.hosts[rank] == own)

    @property
    def device(self) -> torch.device:
        """The device for models that have no memory yet: this rank's accelerator, or the CPU."""
        return self.rank_device.device

    def be_patient(self, seconds: float) -> None:
        """Set how long this rank waits for others before it logs that."""
        if self._watch is not None:
            self._watch.patience_seconds = seconds

    def collectives(self, device: torch.device) -> Communicator:
        """The communicator for tensors on `device`. Raises `CommError` if there is none."""
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
        """A group of any ranks, including this one, for collectives on host memory."""
        return Group(name, tuple(ranks), ranks.index(self.rank))

    def exchange(self, message: bytes, subject: str = "message") -> list[bytes]:
        """Every rank's message, by rank. Blocks. All ranks call, with the same `subject`, a word for messages."""
        return self._host.exchange(message, self.everybody, subject)

    def any_rank(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank. All ranks call and get the same answer."""
        if self.is_arriving:
            return False
        return b"1" in self.exchange(b"1" if flag else b"0", "any_rank")

    def mean(self, value: float, weight: float | None = None) -> float:
        """The mean of every rank's `value`, weighted if all give a `weight`. All ranks call and get the same."""
        if self.is_arriving:
            return value
        if weight is not None:
            values = torch.zeros(self.size, 2, dtype=torch.float64, device="cpu")
            values[self.rank, 0], values[self.rank, 1] = value, weight
            self._host.all_gather(values.view(-1), self.everybody, "weighed mean").wait()
            return mean_of(values[:, 0].tolist(), values[:, 1].tolist())
        values = torch.zeros(self.size, dtype=torch.float64, device="cpu")
        values[self.rank] = value
        self._host.all_gather(values, self.everybody, "mean").wait()
        return float(values.mean())

    def barrier(self) -> None:
        """Return once every rank has called."""
        if self.is_arriving:
            return
        self.exchange(b"", "barrier")

    def close(self, error: BaseException | None = None) -> None:
        """Leave. Nothing may be under way, unless `error` is the reason: then the other ranks raise too, and name it.

        Sending afterwards raises `StateError`. May be called twice.
        """
        if self.membership is not None:
            self.membership.end(error)
        self._close(error, parts=True)

    def part(self) -> None:
        """Close this world without reporting an end to its ranks, most of which will meet again in the next one."""
        self._close(None, parts=False)

    def _close(self, error: BaseException | None, *, parts: bool) -> None:
        watch, self._watch = self._watch, None  # break their reference cycle, so that no garbage collection is needed
        if watch is not None:
            watch.close(error, parts=parts)
        if self.size > 1:
            self.journal.close()
        self._host.close()
        if self._on_device is not None:
            self._on_device.close()
        while self._process_groups:
            with contextlib.suppress(ValueError):  # dist.destroy_process_group() of a script has ended it before
                dist.destroy_process_group(self._process_groups.pop())
        self.rank_device.leave()

    @property
    def fault(self) -> Fault | None:
        """What went wrong between these ranks, if anything did."""
        return self.journal.fault

    def break_off(self, fault: Fault) -> None:
        """Wake this rank if it waits for others: it raises `fault`, now or when it next sends something.

        From any thread. The first fault counts.
        """
        if self._watch is not None:
            self._watch.deliver(fault)

    def _abort(self) -> None:
        """Called from the watchdog's thread. The device is first: its own sockets are needed for the abort."""
        try:
            if self._on_device is not None:
                self._on_device.abort()
        finally:
            self._host.abort()

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close(error)


def num_ranks_per_host(world: World) -> int:
    """The ranks on each host of `world`; all of them where that is not known."""
    return min(world.size, world.local_size or world.size)


def _join_as_member(
    env: Mapping[str, str], shares_memory: bool, timeout_seconds: float, patience_seconds: float
) -> World:
    """The generation of an elastic job that admits this process; its modules are imported only then."""
    from shardwise.comm.members.channels import scope_of
    from shardwise.comm.members.join_members import join_members

    def begin(opening: Opening[World], opened: Opened, membership: Membership[World]) -> World:
        size = len(opening.members)
        seal = Seal.of(env).within(scope_of(opening.generation))
        board = board_of(size, seal, timeout_seconds, stores=opening.stores)
        watched = Watched.by(board, timeout_seconds, patience_seconds)
        world = World(opening.rank, size, opened.transport, device=opened.device, watched=watched)
        world.belong(opening.generation, opening.members, membership, opening.hosts)
        if env is os.environ:
            num_local = len(world.ranks_of_host)
            os.environ.update(RANK=str(opening.rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(num_local))
        opening.watch_over(world)
        try:
            world.finish_joining(opened, timeout_seconds, shares_memory=shares_memory)
        except (CommError, RuntimeError, OSError):
            world.part()
            raise
        return world

    return join_members(env, begin, timeout_seconds)


def _check_not_importing_main() -> None:
    """Raise `ConfigError` in a process that a rank has spawned, as a worker of a data loader, while it imports the
    rank's script: a script without a guard would join again as the same rank, and the ranks wait for each other."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # as CPython recognizes it itself
        raise ConfigError(
            "This process was started by a rank, with multiprocessing's spawn or forkserver (a data loader's worker, "
            "for example). It imports the rank's script to find what is defined there, and so came to World.join, as "
            'if it were that rank again. Put what the script does under `if __name__ == "__main__":`; leave imports, '
            "functions and classes outside."
        )


def _shares_memory(env: Mapping[str, str]) -> bool:
    value = env.get("SHARDWISE_SHARED_MEMORY", "1")
    if value not in ("0", "1"):
        raise ConfigError(
            f"SHARDWISE_SHARED_MEMORY={value!r} says neither 0 nor 1: whether ranks of one host share memory."
        )
    return value == "1"


def _goes_by_mpi(env: Mapping[str, str], process: ProcessRank, wish: str | None, *, owns: bool) -> bool:
    """Whether messages go by MPI. Raises `ConfigError` for an unknown transport."""
    name = wish or env.get("SHARDWISE_TRANSPORT", "")
    if name not in ("", "gloo", "mpi"):
        raise ConfigError(f"There is no transport {name!r} between ranks. Known: gloo, mpi.")
    if name:
        return name == "mpi"
    if not owns:
        return str(dist.get_backend()) == mpi.BACKEND
    return process.is_mpi


def _torch_groups(device: RankDevice, timeout_seconds: float, *, is_own: bool) -> ProcessGroups:
    """Torch's process groups on the ranks' devices; a separate group if the world group is not ours."""
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
    """Refuse what is impossible in an elastic job."""
    if not owns:
        raise ConfigError(
            "In an elastic job each generation opens a process group of its own, but there is one already. Leave out "
            "init_process_group() and join one World. If a library has made it, as Accelerate, transformers' Trainer "
            "and Lightning do, start the job with --max-restarts instead of --elastic: then all ranks restart from the "
            "last checkpoint when one is lost."
        )
    if by_mpi:
        raise ConfigError("MPI ends with its first dead rank. Leave out SHARDWISE_TRANSPORT=mpi, or --elastic.")
