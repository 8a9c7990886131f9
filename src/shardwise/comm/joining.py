"""From the environment of a process to its place among the ranks, and to the process group of all of them."""

from __future__ import annotations

import contextlib
import datetime
import errno
import logging
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from shardwise.comm.meeting import Meeting
from shardwise.comm.nccl import leave_errors_to_the_watch
from shardwise.comm.sockets import Sockets, opened_inside
from shardwise.devices import RankDevice, TorchAccelerator
from shardwise.errors import CommError, ConfigError, FaultError

LATER_SECONDS = 10
"""gloo's own timeout closes connections and names nobody: the watch is to be there before it."""
_BACKLOG = 4096  # all ranks connect at the same moment
_STARTERS = {
    "SLURM_STEP_NUM_TASKS": "srun",
    "SLURM_NTASKS": "srun",
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpiexec",
}
"""How many processes were started together, by the variable that says so and whoever sets it."""
_NONE = "rank {rank} has no accelerator of its own"
_TWICE = "ranks {first} and {rank} are shown the same device ({identity})"
_log = logging.getLogger("shardwise")


@dataclass
class Opened:
    """What a rank has once it has met the others."""

    device: RankDevice = field(default_factory=RankDevice.cpu)
    why_cpu: str = ""
    """Why that is the CPU, although there are accelerators."""
    gloo: dist.ProcessGroup | None = None
    sockets: Sockets = field(default_factory=Sockets)
    """Of `gloo`."""
    beside: dist.ProcessGroup | None = None
    """`gloo`, if it is not torch's own group."""


def place_of(env: Mapping[str, str]) -> tuple[int, int]:
    """This process's rank and the number of ranks. Raises `ConfigError` for an environment that makes no sense."""
    if "RANK" not in env and "WORLD_SIZE" not in env:
        _check_alone(env)
    rank, size = number_in(env, "RANK", 0), number_in(env, "WORLD_SIZE", 1)
    if not 0 <= rank < size:
        raise ConfigError(f"RANK={rank} is not within WORLD_SIZE={size}; ranks count from 0.")
    return rank, size


def _check_alone(env: Mapping[str, str]) -> None:
    """Without RANK a process is a world of its own, unless it plainly is one of several."""
    for name, starter in _STARTERS.items():
        if env.get(name, "").isdigit() and int(env[name]) > 1:
            prefix = name.partition("_")[0]
            ranks = {"SLURM": "SLURM_PROCID", "OMPI": "OMPI_COMM_WORLD_RANK", "PMI": "PMI_RANK"}[prefix]
            raise ConfigError(
                f"This process is one of {env[name]} that {starter} started ({name}={env[name]}), but RANK and "
                f"WORLD_SIZE are not set, so each of them would train alone. Set RANK from {ranks}, WORLD_SIZE from "
                f"{name}, and MASTER_ADDR and MASTER_PORT to a free port of rank 0's host; or WORLD_SIZE=1 if each is "
                f"to be alone."
            )


def number_in(env: Mapping[str, str], name: str, default: int) -> int:
    try:
        return int(env.get(name, default))
    except ValueError as error:
        raise ConfigError(
            f"{name}={env[name]!r} is not a number. Start the ranks with `shardwise launch`, which sets it."
        ) from error


def device_of(env: Mapping[str, str]) -> RankDevice:
    """The accelerator that this rank would compute on, by its place among the ranks of its host; else the CPU.

    Where each process is shown one device alone, that is it, whatever its place.
    """
    accelerator = TorchAccelerator.found()
    if accelerator is None or not _has_backend(accelerator.kind):
        return RankDevice.cpu()
    index = number_in(env, "LOCAL_RANK", 0) if accelerator.num_devices > 1 else 0
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
    rank: int, size: int, env: Mapping[str, str], timeout_seconds: float, patience_seconds: float
) -> Opened:
    """Meet the others, then open torch's group: gloo for what lies on the host, and another backend for devices.

    Keys carry the attempt: after a restart nobody reads what a dead generation wrote.
    """
    host, port = env.get("MASTER_ADDR", "127.0.0.1"), number_in(env, "MASTER_PORT", 29500)
    is_host = rank == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    place = f"{host}:{port}"
    timeout = datetime.timedelta(seconds=timeout_seconds + LATER_SECONDS)
    try:
        deadline = time.monotonic() + timeout_seconds
        if is_host:
            descriptor = _listen(port).detach()
            store = TCPStore(
                host, port, size, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=descriptor
            )
        else:
            _await_host(rank, host, port, deadline, patience_seconds)
            store = TCPStore(host, port, size, is_master=False, timeout=timeout, wait_for_workers=False)
        Meeting(store, attempt).attend(
            rank,
            size,
            place,
            timeout_seconds=max(0.0, deadline - time.monotonic()),
            patience_seconds=patience_seconds,
            is_host=is_host,
        )
        own_store = PrefixStore(f"shardwise/attempt-{attempt}", store)
        device, why = _agreed_device(own_store, rank, size, env)
        return _open_groups(own_store, rank, size, timeout, Opened(device, why))
    except FaultError:
        raise  # it says all there is to say
    except (RuntimeError, OSError) as error:
        raise CommError(
            f"Rank {rank} of {size} could not meet the others at {place}: {error}. Is the address right, "
            f"is the port free on rank 0's machine, and have all {size} ranks been started?"
        ) from error


def _open_groups(store: Store, rank: int, size: int, timeout: datetime.timedelta, opened: Opened) -> Opened:
    """Torch's own group, and gloo's connections.

    The backend of a device connects at once, and those sockets are its own: gloo then has a group beside it, so that
    what is found to be opened is gloo's.
    """
    device = opened.device.device
    settings: dict[str, Any] = {"store": store, "rank": rank, "world_size": size, "timeout": timeout}
    if device.type == "cpu":
        with opened_inside() as opened.sockets:
            dist.init_process_group("gloo", **settings)
        opened.gloo = world_group()
        return opened
    if device.type == "cuda":
        leave_errors_to_the_watch()
    dist.init_process_group(f"cpu:gloo,{device.type}:{backend_of(device.type)}", device_id=device, **settings)
    open_beside(opened)
    return opened


def open_beside(opened: Opened) -> None:
    """A gloo group beside the process group that is there: one of our own, which a fault may break."""
    with opened_inside() as opened.sockets:
        opened.gloo = opened.beside = dist.new_group(backend="gloo")


def world_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    if group is None:
        raise CommError("The process group was destroyed while a World was made from it.")
    return group


def _agreed_device(store: Store, rank: int, size: int, env: Mapping[str, str]) -> tuple[RankDevice, str]:
    """This rank's device, if all ranks have one each, else the CPU, and why if that is no matter of course."""
    device = device_of(env)
    why = agree_on_devices(store, rank, size, device.identity)
    return (RankDevice.cpu(), why if TorchAccelerator.found() is not None else "") if why else (device, "")


def _listen(port: int) -> socket.socket:
    """As torch would, but that a port which is taken is told by us alone."""
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise  # else the system knows the sixth version, and is forbidden to use it
    return socket.create_server(("", port), backlog=_BACKLOG)


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
