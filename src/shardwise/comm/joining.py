"""From the environment of a process to its place among the ranks, and to the process group of all of them."""

from __future__ import annotations

import contextlib
import datetime
import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from shardwise.comm.gloo import GlooTransport
from shardwise.comm.meeting import Meeting
from shardwise.comm.nccl import leave_errors_to_the_watch
from shardwise.comm.pairwise import Transport
from shardwise.comm.sockets import opened_inside
from shardwise.devices import RankDevice, TorchAccelerator
from shardwise.errors import CommError, ConfigError
from shardwise.job_token import Seal
from shardwise.listening import listen_at
from shardwise.places import Place, address_of, number_in

LATER_SECONDS = 10
"""gloo's own timeout closes connections and names nobody: the watch is to be there before it."""
MEMBER = "SHARDWISE_MEMBER"
"""Where an elastic launcher writes which member a process is."""
_NONE = "rank {rank} has no accelerator of its own"
_TWICE = "ranks {first} and {rank} are shown the same device ({identity})"
_log = logging.getLogger("shardwise")


class JoinedTransport(Transport, Protocol):
    """One between ranks that have just met."""

    def settle(self, rank: int, exchange: Callable[[bytes], list[bytes]]) -> None:
        """Find out how to know of the end of others. All ranks call; `exchange` gives everybody's message, by rank."""
        ...


@dataclass
class Opened:
    """What a rank has once it has met the others."""

    device: RankDevice = field(default_factory=RankDevice.cpu)
    why_cpu: str = ""
    """Why that is the CPU, although there are accelerators."""
    transport: JoinedTransport | None = None
    beside: dist.ProcessGroup | None = None
    """Gloo's group, if it is not torch's own."""


def device_of(place: Place) -> RankDevice:
    """The accelerator that this rank would compute on, by its place among the ranks of its host; else the CPU.

    Where each process is shown one device alone, that is it, whatever its place.
    """
    accelerator = TorchAccelerator.found()
    if accelerator is None or not _has_backend(accelerator.kind):
        return RankDevice.cpu()
    index = place.local_rank if accelerator.num_devices > 1 else 0
    return RankDevice.of(accelerator, index) if index < accelerator.num_devices else RankDevice.cpu()


def backend_of(kind: str) -> str:
    """Torch's name for what moves tensors between devices of a kind: `nccl`, `xccl`, `hccl`."""
    name: str = dist.get_default_backend_for_device(kind)
    return name


def _has_backend(kind: str) -> bool:
    """Whether this torch can move tensors between devices of a kind without a way over the host."""
    try:
        return backend_of(kind) != "gloo" and bool(dist.is_backend_available(backend_of(kind)))
    except ValueError:  # torch knows none
        return False


def refusal_of(identities: Sequence[str]) -> str:
    """Why ranks with devices of these identities have not one each; `""` if they have. `""` is who has none."""
    first: dict[str, int] = {}
    for rank, identity in enumerate(identities):
        if not identity:
            return _NONE.format(rank=rank)
        if first.setdefault(identity, rank) != rank:
            return _TWICE.format(first=first[identity], rank=rank, identity=identity)
    return ""


def agree_on_devices(store: Store, rank: int, size: int, identity: str) -> str:
    """Why the ranks have no device each, the same on all of them; `""` if they have. All ranks call.

    `identity` tells this rank's device from all others, and is `""` if it has none. Two ranks on one device cannot be
    served, and one of them alone would know. Store errors are raised as they come, `RuntimeError`.
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
    place: Place, env: Mapping[str, str], timeout_seconds: float, patience_seconds: float, *, by_mpi: bool
) -> Opened:
    """Meet the others, then open torch's group: for what lies on the host by gloo or by MPI, and another backend for
    devices.

    Keys carry the attempt: after a restart nobody reads what a dead generation wrote.
    """
    attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    timeout = datetime.timedelta(seconds=timeout_seconds + LATER_SECONDS)
    host, port = address_of(env, place)
    who, where = f"Rank {place.rank}" + (f" of {place.size}" if place.size else ""), f"{host}:{port}"
    try:
        deadline = time.monotonic() + timeout_seconds
        if by_mpi:
            place, store, where = _store_by_mpi(place, env, timeout, deadline, patience_seconds)
            is_host = place.rank == 0
        else:
            is_host = place.rank == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
            store = _store_at(host, port, place, timeout, deadline, patience_seconds, is_host=is_host)
        rank, size = place.rank, place.size
        assert size is not None
        Meeting(store, attempt, seal=Seal.of(env)).attend(
            rank,
            size,
            where,
            timeout_seconds=max(0.0, deadline - time.monotonic()),
            patience_seconds=patience_seconds,
            is_host=is_host,
        )
        own_store = PrefixStore(f"shardwise/attempt-{attempt}", store)
        device, why = agreed_device(own_store, rank, size, place)
        return open_groups(own_store, rank, size, timeout, Opened(device, why), by_mpi=by_mpi)
    except (CommError, ConfigError):
        raise  # it says all there is to say
    except (RuntimeError, OSError) as error:
        raise CommError(
            f"{who} could not meet the others at {where}: {error}. Is the address right, "
            f"is the port free on rank 0's machine, and have all {place.size} ranks been started?"
        ) from error


def _store_at(
    host: str,
    port: int,
    place: Place,
    timeout: datetime.timedelta,
    deadline: float,
    patience_seconds: float,
    *,
    is_host: bool,
) -> Store:
    """The store at an address that all ranks know."""
    if not is_host:
        _await_host(place.rank, host, port, deadline, patience_seconds)
        return TCPStore(host, port, place.size, is_master=False, timeout=timeout, wait_for_workers=False)
    descriptor = listen_at(host, port).detach()  # as torch would, but that we alone tell of a port that is taken
    return TCPStore(
        host, port, place.size, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=descriptor
    )


def _store_by_mpi(
    place: Place, env: Mapping[str, str], timeout: datetime.timedelta, deadline: float, patience_seconds: float
) -> tuple[Place, Store, str]:
    """The place that MPI gives this process, and a store whose address rank 0 tells by MPI. All ranks call."""
    from shardwise.comm.mpi.address import addresses_of_this_host, confirm, connect, invite, invited
    from shardwise.comm.mpi.session import checked_session

    session = checked_session(place)
    place = replace(place, rank=session.rank, size=session.size)
    if place.rank != 0:
        invitation = invited(session, deadline, patience_seconds)
        return place, *connect(invitation, session.size, timeout, deadline)
    is_local = place.local_size == place.size
    # who is near comes by the loopback interface, who is far by any other: so it is that one, or all
    listener = listen_at("127.0.0.1" if is_local else "", number_in(env, "MASTER_PORT", 0))
    port = listener.getsockname()[1]
    address = env.get("MASTER_ADDR", "")
    addresses = [address] if address else ["127.0.0.1"] if is_local else addresses_of_this_host()
    store = TCPStore(
        "127.0.0.1",
        port,
        place.size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    session.kept.append(store)  # ranks may still leave the board when this one has closed its world
    confirm(store, invite(session, addresses, port))
    return place, store, f"{addresses[0]}:{port}"


def open_groups(
    store: Store, rank: int, size: int, timeout: datetime.timedelta, opened: Opened, *, by_mpi: bool
) -> Opened:
    """Torch's own group, and what carries messages of the host's memory.

    The backend of a device connects at once, and those sockets are its own: gloo then has a group beside it, so that
    what is found to be opened is gloo's.
    """
    device = opened.device.device
    settings: dict[str, Any] = {"store": store, "rank": rank, "world_size": size, "timeout": timeout}
    if device.type == "cpu" and by_mpi:
        from shardwise.comm.mpi.backend import BACKEND, register

        register()
        dist.init_process_group(BACKEND, **settings)
        open_mpi(opened)
        return opened
    if device.type == "cpu":
        with opened_inside() as sockets:
            dist.init_process_group("gloo", **settings)
        opened.transport = GlooTransport(world_group(), sockets)
        return opened
    if device.type == "cuda":
        leave_errors_to_the_watch()
    dist.init_process_group(f"cpu:gloo,{device.type}:{backend_of(device.type)}", device_id=device, **settings)
    if by_mpi:
        open_mpi(opened)
    else:
        open_beside(opened)
    return opened


def open_beside(opened: Opened) -> None:
    """A gloo group beside the process group that is there: one of our own, which a fault may break."""
    with opened_inside() as sockets:
        opened.beside = dist.new_group(backend="gloo")
    assert opened.beside is not None
    opened.transport = GlooTransport(opened.beside, sockets)


def open_mpi(opened: Opened) -> None:
    """Messages by MPI, between the ranks of the process group that is there. All ranks call."""
    from shardwise.comm.mpi.backend import ranks_communicator
    from shardwise.comm.mpi.session import session
    from shardwise.comm.mpi.transport import MpiTransport

    found = session()
    opened.transport = MpiTransport(found, ranks_communicator(found, dist.get_rank(), dist.get_world_size()))


def world_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    if group is None:
        raise CommError("The process group was destroyed while a World was made from it.")
    return group


def agreed_device(store: Store, rank: int, size: int, place: Place) -> tuple[RankDevice, str]:
    """This rank's device, if all ranks have one each, else the CPU, and why if that is no matter of course."""
    device = device_of(place)
    why = agree_on_devices(store, rank, size, device.identity)
    return (RankDevice.cpu(), why if TorchAccelerator.found() is not None else "") if why else (device, "")


def _await_host(rank: int, host: str, port: int, deadline: float, patience_seconds: float) -> None:
    """Return once somebody answers at rank 0's address; say so while nobody does. Raises `OSError` at the deadline."""
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
