"""Ranks that are forks of one process, which has imported what they need: a run begins at once, in memory of its own.

For libraries whose import takes longer than the steps that are timed, and that keep their state per process.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from typing import Any

from benchmarks.figures import Figures
from benchmarks.fresh import RunError, environment
from shardwise.launch.environment import MALLOC_SETTINGS

_SERVER = multiprocessing.get_context("forkserver")
Call = Callable[..., Mapping[str, Any]]


def begin_with(modules: Sequence[str], **variables: str) -> None:
    """Start the process that ranks are forked from, with `modules` imported and `variables` set. Once."""
    before = dict(os.environ)
    os.environ.update({**environment(on_cpu=True), **MALLOC_SETTINGS, "OMP_NUM_THREADS": "1", **variables})
    try:
        _SERVER.set_forkserver_preload(list(modules))
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def run_forks(call: Call, *args: Any, num_ranks: int, timeout_seconds: float) -> list[Figures]:
    """What `call(*args)`, a function of a module, returns on each rank. Raises `RunError` if a rank fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(num_ranks):
        here, there = _SERVER.Pipe(duplex=False)
        child = _SERVER.Process(target=_work, args=(there, rank, num_ranks, port, call, args), daemon=True)
        child.start()
        there.close()
        ranks.append((child, here))
    told = [_told(rank, here, timeout_seconds) for rank, (_, here) in enumerate(ranks)]
    wrong = [one for one in told if isinstance(one, str)]
    for child, here in ranks:
        child.join(None if not wrong else 0)
        child.kill()
        here.close()
    if wrong:
        raise RunError(wrong[0])
    return [one for one in told if not isinstance(one, str)]


def _told(rank: int, here: Any, timeout_seconds: float) -> Figures | str:
    try:
        found: Figures | str = here.recv() if here.poll(timeout_seconds) else f"rank {rank}: not done"
    except EOFError:
        return f"rank {rank}: it died"
    return found


def _work(there: Any, rank: int, num_ranks: int, port: int, call: Call, args: Sequence[Any]) -> None:
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    os.environ.update({name: str(value) for name, value in places.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    if not os.environ.get("RANKS_SPEAK"):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
    try:
        there.send(dict(call(*args)))
    except BaseException as error:  # told to whoever waits for it
        there.send(f"rank {rank}: {type(error).__name__}: {error}")
        raise
    there.close()
    os._exit(0)  # what libraries leave behind would wait for ranks that are gone
