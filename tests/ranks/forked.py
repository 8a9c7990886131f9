"""Calls in forked children. A child that is killed by a signal, or hangs, is a result like any other."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from tests.patience import PATIENCE

_SERVER = multiprocessing.get_context("forkserver")
_BEGUN = "begun"


class Died(Exception):
    """The child was killed by a signal, crashed, or was killed because it took too long."""


@cache
def preload(*modules: str) -> None:
    """Import once what all children need, and start the process that they are forked from. Only tests that need it
    should call it: the imports take seconds.

    That process gets this process's module path, which Python 3.11's own `set_forkserver_preload` does not pass on. It
    computes in one thread: OpenMP's threads do not survive a fork, and results may depend on the number of threads.
    """
    _SERVER.set_forkserver_preload(list(modules))
    needed = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
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


def call_each(call: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """Call `call(item)` for each item, all in one child as long as it lives, each within `PATIENCE`.

    If a child dies, the item's result is a `Died`, and a new child takes the remaining items.
    """
    results: list[Any] = []
    while len(results) < len(items):
        results += _in_one_child(call, items[len(results) :])
    return results


def _in_one_child(call: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    with tempfile.NamedTemporaryFile(prefix="crash-") as trace:
        return _results(call, items, Path(trace.name))


def _results(call: Callable[[Any], Any], items: Sequence[Any], trace: Path) -> list[Any]:
    here, there = _SERVER.Pipe(duplex=False)
    child = _SERVER.Process(target=_work, args=(there, call, list(items), str(trace)), daemon=True)
    child.start()
    there.close()
    results: list[Any] = []
    try:
        has_begun = here.poll(PATIENCE) and here.recv() == _BEGUN
        while len(results) < len(items):
            if not has_begun or not here.poll(PATIENCE):
                results.append(Died(f"hang: nothing for {PATIENCE:.0f} s"))
                break
            results.append(here.recv())
    except EOFError:
        child.join(PATIENCE)
        results.append(Died(f"crash: {_ended_by(child.exitcode)}\n{trace.read_text()}".rstrip()))
    finally:
        if child.is_alive():
            child.join(5 if len(results) == len(items) else 0)
        child.kill()
        child.join()
        here.close()
    return results


def _ended_by(status: int | None) -> str:
    if status is not None and status < 0:
        return signal.Signals(-status).name
    return f"exit status {status}"


def _work(there: Any, call: Callable[[Any], Any], items: list[Any], trace: str) -> None:
    """`trace` is a file to which all threads' stacks are written if a signal kills this process."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    written = open(trace, "w")  # noqa: SIM115  # for as long as this process lives
    faulthandler.enable(written)
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(
            1
        )  # before there are threads: torch makes its pool anew after a fork, and not under a lock
    there.send(_BEGUN)
    for item in items:
        try:
            result = call(item)
        except BaseException:  # reported to the parent process
            result = Died(f"crash: {traceback.format_exc()}")
        there.send(result)
    there.close()
    os._exit(0)  # threads of a broken world may still be waiting
