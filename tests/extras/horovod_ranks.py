"""`python horovod_ranks.py FOLDER`: the jobs of horovod_jobs.py on two ranks each, forks of this process.

What takes long to import is imported once, and nothing is computed before the forks. Prints what ranks found, as JSON.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import horovod_jobs as jobs
import jax  # noqa: F401
import tensorflow  # noqa: F401  # what forks are not to import again
import torch

RANKS, SECONDS = 2, 200
PAGE = Path(__file__).parents[2] / "docs" / "horovod-frameworks.md"


def on_ranks(job: Callable[..., Any], *args: str) -> list[Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    ranks = []
    for rank in range(RANKS):
        here, there = context.Pipe(duplex=False)
        child = context.Process(target=work, args=(there, rank, port, job, args), daemon=True)
        child.start()
        there.close()
        ranks.append((child, here))
    told = []
    for child, here in ranks:
        try:
            told.append(here.recv() if here.poll(SECONDS) else "nothing came")
        except EOFError:
            told.append("the process died")
        child.kill()
        child.join()
    return told


def work(there: Connection, rank: int, port: int, job: Callable[..., Any], args: tuple[str, ...]) -> None:
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in places.items()} | {"MASTER_ADDR": "127.0.0.1"}
    torch.set_num_threads(1)
    try:
        there.send(job(*args))
    except BaseException:  # told to whoever waits for it
        there.send(traceback.format_exc())
    os._exit(0)


def main() -> None:
    folder = sys.argv[1]
    found = {"numpy": on_ranks(jobs.numpy_job), "jax": on_ranks(jobs.jax_job)}
    found["tensorflow"] = on_ranks(jobs.tensorflow_job)
    for backend in ("tensorflow", "jax", "torch"):
        found[f"keras on {backend}"] = on_ranks(jobs.keras_job, backend, folder)
    found["the page"] = on_ranks(jobs.page_job, str(PAGE))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
