"""From the environment of a process to its rank, and to the process group of all ranks."""

from __future__ import annotations

import contextlib
import datetime
import gc
import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from shardwise.comm.compat import PrefixStore, Store, TCPStore
from shardwise.comm.transport import mpi
from shardwise.comm.transport.gloo import GlooTransport
from shardwise.comm.transport.nccl import leave_errors_to_the_watch
from shardwise.comm.transport.pairwise import Transport
from shardwise.comm.watch.sockets import opened_inside
from shardwise.comm.watch.startup_barrier import StartupBarrier
from shardwise.errors import CommError, ConfigError
from shardwise.system.devices import RankDevice, TorchAccelerator
from shardwise.system.job_token import Seal
from shardwise.system.listening import listen_at, own_address
from shardwise.system.process_rank import (
    ProcessRank,
    address_of,
    attempt_of,
    launcher_keeps_store,
    left_over,
    port_in,
)

LATER_SECONDS = 10
"""gloo's own timeout closes connections and names no rank, so the watchdog's has to come first."""
MEMBER = "SHARDWISE_MEMBER"
"""An elastic launcher sets it to the member number of the process."""
_NONE = "rank {rank} has no accelerator of its own"
_TWICE = "ranks {first} and {rank} are shown the same device ({identity})"
_log = logging.getLogger("shardwise")


class JoinedTransport(Transport, Protocol):
    """A transport between ranks that have just met."""

    def watch_peers(self, rank: int, exchange: Callable[[bytes], list[bytes]]) -> None:
        """Prepare to detect the end of other ranks. All ranks call; `exchange` returns every rank's message, by
        rank."""
        ...


@dataclass(frozen=True)
class Opened:
    """What a rank has once it has met the others."""

    transport: JoinedTransport
    device: RankDevice = field(default_factory=RankDevice.cpu)
    why_cpu: str = ""
    """Why that is the CPU, although there are accelerators."""
    beside: dist.ProcessGroup | None = None
    """Gloo's group, if it is not torch's own."""
    number: int | None = None
    """How often the ranks of this attempt have met; `None` in a process group that was there."""
    seal: Seal = field(default_factory=Seal)
    """Authenticates what the ranks write into the store."""


def device_of(process: ProcessRank) -> RankDevice:
    """The accelerator for this rank, by its rank on its host; else the CPU.

    If each process is shown a single device, it is that one, whatever its rank.
    """
    accelerator = TorchAccelerator.found()
    if accelerator is None or not _has_backend(accelerator.kind):
        return RankDevice.cpu()
    index = process.local_rank if accelerator.num_devices > 1 else 0
    return RankDevice.of(accelerator, index) if index < accelerator.num_devices else RankDevice.cpu()


def backend_of(kind: str) -> str:
    """Torch's name of the backend for a kind of device: `nccl`, `xccl`, `hccl`."""
    name: str = dist.get_default_backend_for_device(kind)
    return name


def _has_backend(kind: str) -> bool:
    """Whether this torch can send between devices of a kind without going through the host."""
    try:
        return backend_of(kind) != "gloo" and bool(dist.is_backend_available(backend_of(kind)))
    except ValueError:  # torch knows none
        return False


def refusal_of(identities: Sequence[str]) -> str:
    """Why ranks whose devices have these identities (`""`: no device) do not have one device each; `""` if they do."""
    first: dict[str, int] = {}
    for rank, identity in enumerate(identities):
        if not identity:
            return _NONE.format(rank=rank)
        if first.setdefault(identity, rank) != rank:
            return _TWICE.format(first=first[identity], rank=rank, identity=identity)
    return ""


def agree_on_devices(store: Store, rank: int, size: int, identity: str) -> str:
    """Why not every rank has a device of its own, the same on all of them; `""` if every rank has. All ranks call.

    `identity` distinguishes this rank's device from all others, and is `""` if it has none. Two ranks on one device
    cannot be served, and only one of them would notice. Store errors are raised as they come, `RuntimeError`.
    """
    number = store.add(f"devices/{rank}", 1)  # a rank may meet the others several times
    prefix = f"devices-{number}"
    refusal = "" if identity else _NONE.format(rank=rank)
    if identity:
        first = store.compare_set(f"{prefix}/{identity}", "", str(rank)).decode()
        if first != str(rank):
            refusal = _TWICE.format(first=first, rank=rank, identity=identity)
    if refusal:
        store.compare_set(f"{prefix}/refusal", "", refusal)
    if store.add(f"{prefix}/told", 1) == size:
        store.set(f"{prefix}/all", "told")
    store.get(f"{prefix}/all")
    return store.get(f"{prefix}/refusal").decode() if store.check([f"{prefix}/refusal"]) else ""


def open_process_group(
    process: ProcessRank, env: Mapping[str, str], timeout_seconds: float, patience_seconds: float, *, by_mpi: bool
) -> Opened:
    """Meet the other ranks, then open torch's group: gloo or MPI for host memory, and another backend for devices.

    Keys carry the attempt and how often its ranks have met, so that no rank reads what a dead generation wrote, or an
    earlier world of the same processes: gloo would connect to the addresses of that one.
    """
    attempt = attempt_of(env)
    timeout = datetime.timedelta(seconds=timeout_seconds + LATER_SECONDS)
    host, port = address_of(env, process)
    who, where = f"Rank {process.rank}" + (f" of {process.size}" if process.size else ""), f"{host}:{port}"
    try:
        deadline = time.monotonic() + timeout_seconds
        token = ""
        if by_mpi:
            process, store, where, token = _store_by_mpi(process, env, timeout, deadline, patience_seconds)
        rank, size = process.rank, process.size
        assert size is not None
        seal = Seal.of(env, token)

        def meet(store: Store, *, is_host: bool) -> int:
            return StartupBarrier(store, attempt, seal=seal).wait(
                rank,
                size,
                where,
                timeout_seconds=max(0.0, deadline - time.monotonic()),
                patience_seconds=patience_seconds,
                is_host=is_host,
                hint=left_over(env, process),
            )

        if by_mpi:
            number = meet(store, is_host=rank == 0)
        else:
            is_host = rank == 0 and not launcher_keeps_store(env)
            opened = partial(_store_at, host, port, process, timeout, patience_seconds=patience_seconds)
            store, number = meet_at(opened, meet, deadline, is_host=is_host)
        own_store = PrefixStore(f"shardwise/attempt-{attempt}/startup-{number}", store)
        device, why = agreed_device(own_store, rank, size, process)
        transport, beside = open_groups(own_store, rank, size, timeout, device.device, by_mpi=by_mpi)
        return Opened(transport, device, why, beside, number, seal)
    except (CommError, ConfigError):
        raise  # its message is complete
    except (RuntimeError, OSError) as error:
        raise CommError(
            f"{who} could not meet the others at {where}: {error}. Is the address right, "
            f"is the port free on rank 0's machine, and have all {process.size} ranks been started?"
        ) from error


def meet_at(
    opened: Callable[..., Store], meet: Callable[..., int], deadline: float, *, is_host: bool
) -> tuple[Store, int]:
    """The store that is `opened`, and the number of the meeting there.

    A rank may come while rank 0 still has the store of an earlier world of these processes, which then ends: so one
    that is lost is looked for once more, for some seconds.
    """
    while True:
        store = opened(deadline=deadline, is_host=is_host)
        try:
            return store, meet(store, is_host=is_host)
        except (CommError, ConfigError):
            raise
        except RuntimeError:
            until = time.monotonic() + LATER_SECONDS
            if is_host or deadline <= until:
                raise
            deadline = until


def _store_at(
    host: str,
    port: int,
    process: ProcessRank,
    timeout: datetime.timedelta,
    *,
    deadline: float,
    patience_seconds: float,
    is_host: bool,
) -> Store:
    """The store at an address that all ranks know."""
    if not is_host:
        _await_host(process.rank, host, port, deadline, patience_seconds)
        return TCPStore(host, port, process.size, is_master=False, timeout=timeout, wait_for_workers=False)
    try:
        listener = listen_at(host, port)
    except OSError:
        gc.collect()  # an earlier world of this process that is part of a cycle keeps its store until then
        listener = listen_at(host, port)
    return _kept_store(listener, process.size, timeout)


def _kept_store(listener: socket.socket, size: int | None, timeout: datetime.timedelta) -> TCPStore:
    """The store that this process keeps, which listens as `listener` does.

    As torch would open it, but with our own error for a port that is taken. Its own client connects where it listens:
    the address may be one at which others reach this host and it does not reach itself, or, left over, another host's.
    """
    return TCPStore(
        own_address(listener),
        listener.getsockname()[1],
        size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _store_by_mpi(
    process: ProcessRank, env: Mapping[str, str], timeout: datetime.timedelta, deadline: float, patience_seconds: float
) -> tuple[ProcessRank, Store, str, str]:
    """This process's rank by MPI, a store whose address rank 0 sends by MPI, that address, and a token that only the
    ranks know. All ranks call."""
    from shardwise.comm.transport.mpi.address import addresses_to_send, confirm, connect, invite, invited
    from shardwise.comm.transport.mpi.library import checked_session

    session = checked_session(process)
    process = replace(process, rank=session.rank, size=session.size)
    if process.rank != 0:
        invitation = invited(session, deadline, patience_seconds)
        return process, *connect(invitation, session.size, timeout, deadline), invitation.token
    is_local = process.local_size == process.size
    # local ranks connect by the loopback interface, others by any: listen on the former, or on all
    listener = listen_at("127.0.0.1" if is_local else "", port_in(env, 0))
    port = listener.getsockname()[1]
    addresses = addresses_to_send(env, is_local=is_local)
    store = _kept_store(listener, process.size, timeout)
    session.kept.append(store)  # other ranks may still use the board when this rank has closed its world
    invitation = invite(session, addresses, port)
    confirm(store, invitation)
    return process, store, f"{addresses[0]}:{port}", invitation.token


def open_groups(
    store: Store, rank: int, size: int, timeout: datetime.timedelta, device: torch.device, *, by_mpi: bool
) -> tuple[JoinedTransport, dist.ProcessGroup | None]:
    """Open torch's own group. Returns the transport for host memory, and gloo's group for that, if it is not torch's
    own.

    A device's backend connects at once, with sockets of its own. So gloo gets a separate group beside it, and the
    sockets that are found to be opened are gloo's.
    """
    # Its functions have the default group of that moment as a default argument. Imported later, as torch itself does,
    # it would keep this group, the store and its port while the process lives, and rank 0 could join no other world.
    import torch.distributed.nn.functional  # noqa: F401

    settings: dict[str, Any] = {"store": store, "rank": rank, "world_size": size, "timeout": timeout}
    if device.type == "cpu" and by_mpi:
        from shardwise.comm.transport.mpi.backend import register

        register()
        dist.init_process_group(mpi.BACKEND, **settings)
        return open_mpi(), None
    if device.type == "cpu":
        with opened_inside() as sockets:
            dist.init_process_group("gloo", **settings)
        return GlooTransport(world_group(), sockets), None
    if device.type == "cuda":
        leave_errors_to_the_watch()
    dist.init_process_group(f"cpu:gloo,{device.type}:{backend_of(device.type)}", device_id=device, **settings)
    return (open_mpi(), None) if by_mpi else open_beside(timeout.total_seconds())


def open_beside(timeout_seconds: float) -> tuple[JoinedTransport, dist.ProcessGroup]:
    """Open a gloo group of our own beside the existing process group; a fault may break it. Raises `CommError` if not
    all ranks of the existing one come within `timeout_seconds`."""
    timeout = datetime.timedelta(seconds=timeout_seconds + LATER_SECONDS)
    try:
        with opened_inside() as sockets:
            group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
    except RuntimeError as error:
        raise CommError(
            f"Not all {dist.get_world_size()} ranks of the existing process group have come to World.join(), or to "
            f"shard(). All must call it; for a model of some of them, let the process group be of these. ({error})"
        ) from error
    return GlooTransport(group, sockets), group


def open_mpi() -> JoinedTransport:
    """Messages by MPI among the ranks of the existing process group. All ranks call."""
    from shardwise.comm.transport.mpi.backend import ranks_communicator
    from shardwise.comm.transport.mpi.library import session
    from shardwise.comm.transport.mpi.transport import MpiTransport

    found = session()
    return MpiTransport(found, ranks_communicator(found, dist.get_rank(), dist.get_world_size()))


def world_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    if group is None:
        raise CommError("The process group was destroyed while a World was made from it.")
    return group


def agreed_device(store: Store, rank: int, size: int, process: ProcessRank) -> tuple[RankDevice, str]:
    """This rank's device, if every rank has one; else the CPU, and why, if there are accelerators."""
    device = device_of(process)
    why = agree_on_devices(store, rank, size, device.identity)
    return (RankDevice.cpu(), why if TorchAccelerator.found() is not None else "") if why else (device, "")


def _await_host(rank: int, host: str, port: int, deadline: float, patience_seconds: float) -> None:
    """Return once rank 0's address answers; warn while it does not. Raises `OSError` at the deadline."""
    started, warn_after = time.monotonic(), patience_seconds
    while True:
        try:
            with contextlib.closing(socket.create_connection((host, port), timeout=2)):
                return
        except OSError as error:
            now = time.monotonic()
            if now > deadline:
                raise
            if now - started > warn_after:
                warn_after *= 2
                _log.warning(
                    "Rank %d waits for rank 0, which does not answer at %s:%d, for %.0f s (%s).",
                    rank, host, port, now - started, error,
                )  # fmt: skip
        time.sleep(0.1)
