"""The environment variables that a rank gets, as a pure function."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

# [Note: glibc and large blocks]
# glibc serves large blocks by mmap, which returns them to the system when freed, but raises the
# threshold by itself (up to 32 MiB) as blocks are freed, and from then on keeps them. With the
# threshold fixed at 1 MB the same sharded run peaked at 811 MiB instead of 1,214 MiB. Setting the
# trim threshold too keeps freed memory at the end of the heap from staying with the process. The price
# is that large blocks come as fresh pages each time; asking for large pages makes that cheap again.
MALLOC_SETTINGS = {
    "MALLOC_MMAP_THRESHOLD_": "1000000",
    "MALLOC_TRIM_THRESHOLD_": "1000000",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}


@dataclass(frozen=True)
class Attempt:
    """One start of all ranks: where they meet, and the how-manieth it is of how many restarts."""

    address: str
    port: int | str
    number: int = 0
    max_restarts: int = 0
    run_id: str = "shardwise"


def rank_environment(
    rank: int,
    nproc: int,
    attempt: Attempt,
    inherited: Mapping[str, str],
    *,
    threads: int | None = None,
    on_cpu: bool = True,
    error_file: str = "",
) -> dict[str, str]:
    """What rank `rank` of `nproc` gets on top of the `inherited` environment.

    The names and meanings are those of torchrun. What the user has set by himself stays: the thread
    count (unless `threads` says otherwise), glibc's thresholds, the buffering of output.
    """
    settings = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": attempt.address,
        "MASTER_PORT": str(attempt.port),
        "TORCHELASTIC_RESTART_COUNT": str(attempt.number),
        "TORCHELASTIC_MAX_RESTARTS": str(attempt.max_restarts),
        "TORCHELASTIC_RUN_ID": attempt.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": error_file,
    }
    if threads is not None:
        settings["OMP_NUM_THREADS"] = str(threads)
    defaults = {
        "OMP_NUM_THREADS": str(default_threads(nproc)),
        "PYTHONUNBUFFERED": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        **(MALLOC_SETTINGS if on_cpu else {}),
    }
    unset = {name: value for name, value in defaults.items() if name not in inherited}
    return unset | settings


def default_threads(nproc: int) -> int:
    """Threads for each of `nproc` ranks, so that together they fill the cores we may use."""
    return max(1, _usable_cores() // nproc)


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
