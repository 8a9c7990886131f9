"""One rank of the exchange with which `shardwise doctor` tries MPI: `mpirun -np 2 python -m shardwise.cli.mpi_rank`.

Every pair of ranks in turn exchanges small messages, then large ones. Rank 0 prints `RESULT {...}`. A rank that cannot
take part prints `TROUBLE ...` with the reason.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from itertools import combinations
from typing import Any

import numpy as np

from shardwise.cli.rank_words import RESULT, TROUBLE
from shardwise.comm.transport.mpi.library import CURE, check_library, check_size, library, short_version
from shardwise.errors import ShardwiseError
from shardwise.system.process_rank import process_rank_of

SMALL_TIMES, LARGE_TIMES, LARGE_BYTES = 100, 8, 8 * 2**20


def measure(comm: Any) -> list[dict[str, float]]:
    """For the pairs in which this rank is first: one-way latency of a small message in seconds, and bytes per second of
    large ones. All ranks call."""
    rows = []
    for first, second in combinations(range(comm.size), 2):
        comm.Barrier()
        if comm.rank == first:
            latency = statistics.median(_trips(comm, second, 1, SMALL_TIMES)) / 2
            rate = 2 * LARGE_BYTES / min(_trips(comm, second, LARGE_BYTES, LARGE_TIMES))
            rows.append({"from": first, "to": second, "latency": latency, "rate": rate})
        elif comm.rank == second:
            for num_bytes, times in ((1, SMALL_TIMES), (LARGE_BYTES, LARGE_TIMES)):
                _send_back(comm, first, num_bytes, times)
    return rows


def _trips(comm: Any, other: int, num_bytes: int, times: int) -> list[float]:
    """Seconds of `times` round trips."""
    buffer, seconds = np.zeros(num_bytes, np.uint8), []
    for _ in range(times):
        started = time.perf_counter()
        comm.Send(buffer, other)
        comm.Recv(buffer, other)
        seconds.append(time.perf_counter() - started)
    return seconds


def _send_back(comm: Any, other: int, num_bytes: int, times: int) -> None:
    buffer = np.zeros(num_bytes, np.uint8)
    for _ in range(times):
        comm.Recv(buffer, other)
        comm.Send(buffer, other)


def main() -> int:
    """The exit status: 0 if this rank took part."""
    try:
        process, mpi = process_rank_of(os.environ), library()
        version = mpi.Get_library_version()
        check_library(process, version)  # before MPI_Init, which may end the process
        mpi.Init()
        comm = mpi.COMM_WORLD
        check_size(process, comm.rank, comm.size, version)
    except ShardwiseError as error:
        print(f"{TROUBLE}{' '.join(str(error).split())}", flush=True)
        return 1
    if comm.size == 1:
        print(f"{TROUBLE}{short_version(version)} counts one rank, so mpirun is of another MPI. {CURE}", flush=True)
    else:
        rows = comm.gather(measure(comm))
        if comm.rank == 0:
            told = {
                "library": short_version(version),
                "rows": [row for own in rows for row in own],
            }
            print(f"{RESULT}{json.dumps(told)}", flush=True)
    mpi.Finalize()
    return 0


if __name__ == "__main__":
    sys.exit(main())
