"""Functions on several real ranks, each a fork of a process that has imported what they need.

Trainer and Accelerate keep their state per process and read the environment, so threads cannot be ranks here.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from functools import cache
from multiprocessing import forkserver
from typing import Any

from tests.free_port import free_port

_SERVER = multiprocessing.get_context("forkserver")
SECONDS = 240


@cache
def _preload() -> None:
    _SERVER.set_forkserver_preload(["rank_imports"])
    needed = {
        "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *filter(None, sys.path)]),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    before = {name: os.environ.get(name) for name in needed}
    os.environ |= needed
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def on_ranks(size: int, call: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    """What `call(*args, **kwargs)` returns on each of `size` ranks; raises what the first of them raised, as text."""
    return begin(size, call, *args, **kwargs)()


def begin(size: int, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[[], list[Any]]:
    """The same, begun: the result waits for it."""
    _preload()
    port = free_port()
    ranks = []
    for rank in range(size):
        here, there = _SERVER.Pipe(duplex=False)
        child = _SERVER.Process(target=_work, args=(there, rank, size, port, call, args, kwargs), daemon=True)
        child.start()
        there.close()
        ranks.append((child, here))

    def finish() -> list[Any]:
        results, failures = [], []
        for rank, (_, here) in enumerate(ranks):
            try:
                is_good, result = here.recv() if here.poll(SECONDS) else (False, "nothing came")
            except EOFError:
                is_good, result = False, "the process died"
            (results if is_good else failures).append(result if is_good else f"rank {rank}: {result}")
        for child, here in ranks:
            child.join(0 if failures else 10)
            child.kill()
            child.join()
            here.close()
        if failures:
            raise RuntimeError("\n".join(failures))
        return results

    return finish


def _work(there: Any, rank: int, size: int, port: int, call: Callable[..., Any], args: Any, kwargs: Any) -> None:
    if not os.environ.get("RANKS_SPEAK"):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
    import torch

    torch.set_num_threads(1)
    if size > 1:
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
        os.environ |= {name: str(value) for name, value in places.items()} | {"MASTER_ADDR": "127.0.0.1"}
    try:
        there.send((True, call(*args, **kwargs)))
    except BaseException:  # told to whoever waits for it
        there.send((False, traceback.format_exc()))
    there.close()
    os._exit(0)  # a world that broke may still wait for something
