"""`python horovod_ranks.py FOLDER`: runs each job of horovod_jobs.py on two ranks, and prints the results as JSON.

Ranks are forks of this process, so that large libraries are imported only once. Nothing is computed before the forks.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import horovod_jobs as jobs
import jax  # noqa: F401
import tensorflow  # noqa: F401  # imported before the forks
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.free_port import free_port

RANKS, SECONDS = 2, 200
PAGE = Path(__file__).parents[2] / "docs" / "horovod-frameworks.md"


def on_ranks(job: Callable[..., Any], *args: str) -> list[Any]:
    port = free_port()
    context = multiprocessing.get_context("fork")
    ranks = []
    for rank in range(RANKS):
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=run_rank, args=(sender, rank, port, job, args), daemon=True)
        child.start()
        sender.close()
        ranks.append((child, receiver))
    results = []
    for child, receiver in ranks:
        try:
            results.append(receiver.recv() if receiver.poll(SECONDS) else f"no result after {SECONDS} s")
        except EOFError:
            results.append("the process died")
        child.kill()
        child.join()
    return results


def run_rank(sender: Connection, rank: int, port: int, job: Callable[..., Any], args: tuple[str, ...]) -> None:
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in variables.items()} | {"MASTER_ADDR": "127.0.0.1"}
    torch.set_num_threads(1)
    try:
        sender.send(job(*args))
    except BaseException:  # the test shows it
        sender.send(traceback.format_exc())
    os._exit(0)


def main() -> None:
    folder = sys.argv[1]
    results = {"numpy": on_ranks(jobs.numpy_job), "jax": on_ranks(jobs.jax_job)}
    results["tensorflow"] = on_ranks(jobs.tensorflow_job)
    for backend in ("tensorflow", "jax", "torch"):
        results[f"keras on {backend}"] = on_ranks(jobs.keras_job, backend, folder)
    results["the page"] = on_ranks(jobs.page_job, str(PAGE))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
