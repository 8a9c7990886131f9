"""A pure function that returns a rank's environment variables."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.system.heap import HEAP_BLOCK_BYTES, KEPT_END_BYTES
from shardwise.system.job_token import VARIABLE as TOKEN
from shardwise.system.machine import num_cores

# [Note: glibc and large blocks]
# glibc serves large blocks by mmap, which returns them to the system when freed, but raises the
# threshold by itself (up to 32 MiB) as blocks are freed, and from then on keeps them. With the
# threshold fixed at 1 MB the same sharded run peaked at 811 MiB instead of 1,214 MiB. The price
# is that large blocks come as fresh pages each time, a tenth of a step where pages are dear (docs/launching.md
# has figures by threshold); asking for large pages makes that cheaper for blocks of many MiB only, because those
# of glibc are not aligned. What plans promise is modelled on 1 MB.

# [Note: glibc and small blocks]
# torch asks for 64-byte alignment, for which glibc cuts small pieces off its blocks. Freed ones lie in its caches of
# small chunks, per thread and as fastbins, unjoined with free neighbours: a hole is then too small for the next block
# of its size, and the heap grows. Without these caches holes join. But then the end of the heap is free more often,
# and with a trim threshold of 1 MB it was given back and taken again: 204,000 page faults a step where there were
# 108,000. So the heap keeps its end, as it mostly did anyway (see [Note: the heap does not shrink] in
# `system/heap.py`): 63,000. docs/planner-accuracy.md has memory and processor time of 30 plans.
MALLOC_SETTINGS = {
    "MALLOC_MMAP_THRESHOLD_": str(HEAP_BLOCK_BYTES),
    "MALLOC_TRIM_THRESHOLD_": str(KEPT_END_BYTES),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0",
}

# [Note: expandable segments]
# By default torch's allocator takes fixed segments of a device, does not split the last MiB of a large block, and
# cannot use what is free in one segment together with what is free in the next. Segments that grow in place have
# neither cost (docs/gpus.md has what was measured). Nothing of ours shares device memory between processes, which is
# what they cannot do. A setting of the user's own, under any of torch's three names, is kept.
SEGMENTS = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
_SAME_AS_SEGMENTS = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"


@dataclass(frozen=True)
class Attempt:
    """One start of all ranks: the address of their store, and the attempt's number of how many restarts."""

    address: str
    port: int | str
    number: int = 0
    max_restarts: int = 0
    run_id: str = "shardwise"
    token: str = ""
    """Authenticates ranks to each other; `""` sets none."""


@dataclass(frozen=True)
class RankPosition:
    """A process's rank and the number of ranks, on its host and in total."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: int = 0
    num_hosts: int = 1


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
    """Variables that `rank` of `nproc`, all on one host, gets in addition to the `inherited` environment."""
    position = RankPosition(rank, nproc, rank, nproc)
    settings = environment_at(position, attempt, inherited, threads=threads, on_cpu=on_cpu, error_file=error_file)
    if sys.platform == "linux" and "GLOO_SOCKET_IFNAME" not in inherited:
        settings["GLOO_SOCKET_IFNAME"] = "lo"  # else gloo listens at this host's name, where others may reach it
    return settings


def environment_at(
    position: RankPosition,
    attempt: Attempt,
    inherited: Mapping[str, str],
    *,
    threads: int | None,
    on_cpu: bool,
    error_file: str,
) -> dict[str, str]:
    """Variables that the rank at `position` gets in addition to the `inherited` environment.

    Names and meanings are those of torchrun. What the user has set is kept: the thread count (unless `threads` is
    given), glibc's thresholds, the allocator of devices, the buffering of output.
    """
    settings = {
        "RANK": str(position.rank),
        "LOCAL_RANK": str(position.local_rank),
        "WORLD_SIZE": str(position.size),
        "LOCAL_WORLD_SIZE": str(position.local_size),
        "GROUP_RANK": str(position.host),
        "GROUP_WORLD_SIZE": str(position.num_hosts),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(position.rank),
        "ROLE_WORLD_SIZE": str(position.size),
        "MASTER_ADDR": attempt.address,
        "MASTER_PORT": str(attempt.port),
        "TORCHELASTIC_RESTART_COUNT": str(attempt.number),
        "TORCHELASTIC_MAX_RESTARTS": str(attempt.max_restarts),
        "TORCHELASTIC_RUN_ID": attempt.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": error_file,
    }
    if attempt.token:
        settings[TOKEN] = attempt.token
    if threads is not None:
        settings["OMP_NUM_THREADS"] = str(threads)
    defaults = {
        "OMP_NUM_THREADS": str(default_threads(position.local_size)),
        "PYTHONUNBUFFERED": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # see [Note: aborts] in comm/transport/nccl.py
        **(MALLOC_SETTINGS if on_cpu else {}),
        **({} if on_cpu or any(name in inherited for name in _SAME_AS_SEGMENTS) else SEGMENTS),
    }
    unset = {name: value for name, value in defaults.items() if name not in inherited}
    return unset | settings


def default_threads(nproc: int) -> int:
    """Threads for each of `nproc` ranks, so that together they use all available cores."""
    return max(1, num_cores() // nproc)
