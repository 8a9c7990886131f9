"""From the environment of a process to its place among the ranks, and to the process group of all of them."""

from __future__ import annotations

import contextlib
import datetime
import logging
import socket
import time
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from shardwise.comm.meeting import Meeting
from shardwise.errors import CommError, ConfigError, FaultError

_LATER_SECONDS = 10
"""gloo's own timeout closes connections and names nobody: the watch is to be there before it."""
_BACKLOG = 4096  # all ranks connect at the same moment
_STARTERS = {
    "SLURM_STEP_NUM_TASKS": "srun",
    "SLURM_NTASKS": "srun",
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpiexec",
}
"""How many processes were started together, by the variable that says so and whoever sets it."""
_log = logging.getLogger("shardwise")


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


def gpu_of(env: Mapping[str, str]) -> torch.device | None:
    """The GPU of this rank; each needs one of its own, for NCCL refuses two ranks on one."""
    num_local = number_in(env, "LOCAL_WORLD_SIZE", 1)
    if torch.cuda.is_available() and dist.is_nccl_available() and torch.cuda.device_count() >= num_local:
        return torch.device("cuda", number_in(env, "LOCAL_RANK", 0))
    return None


def open_process_group(
    rank: int, size: int, env: Mapping[str, str], timeout_seconds: float, patience_seconds: float
) -> None:
    """Meet the others, then open torch's group: gloo for what lies on the host, and NCCL beside it on GPUs.

    Keys carry the attempt: after a restart nobody reads what a dead generation wrote.
    """
    host, port = env.get("MASTER_ADDR", "127.0.0.1"), number_in(env, "MASTER_PORT", 29500)
    is_host = rank == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    place, gpu = f"{host}:{port}", gpu_of(env)
    timeout = datetime.timedelta(seconds=timeout_seconds + _LATER_SECONDS)
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
        dist.init_process_group(
            "gloo" if gpu is None else "cpu:gloo,cuda:nccl",
            store=PrefixStore(f"shardwise/attempt-{attempt}", store),
            rank=rank,
            world_size=size,
            timeout=timeout,
            device_id=gpu,
        )
    except FaultError:
        raise  # it says all there is to say
    except (RuntimeError, OSError) as error:
        raise CommError(
            f"Rank {rank} of {size} could not meet the others at {place}: {error}. Is the address right, "
            f"is the port free on rank 0's machine, and have all {size} ranks been started?"
        ) from error


def _listen(port: int) -> socket.socket:
    """As torch would, but that a port which is taken is told by us alone."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
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
