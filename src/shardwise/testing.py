"""Threads as ranks: try a model at any world size in one process, in milliseconds.

```python
def train(world):
    engine = sw.shard(build(), "zero3", world=world)
    ...

losses = run_ranks(4, train)
```

And injected faults, to see how a job handles them: at a point of the loop, or at an action of the program.

```python
fault = skip_at(rank=1, step=3, point="backward")
...
    if not fault(world.rank, step, "backward"):
        engine.backward(loss)

losses = run_ranks(4, train, fault=fail_at(rank=1, step=3, point="reduce_scatter blocks.2 *"))
```
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import TypeVar

import torch

from shardwise.comm import Host, PostOffice, ThreadTransport, Watched, World

Result = TypeVar("Result")
Fault = Callable[[int, int, str], bool]
"""Called with the rank, the step and the point; returns true if it is to be skipped."""


class InjectedError(Exception):
    """Raised by `fail_at`."""


def fail_at(rank: int, step: int, point: str = "step", *, by: Callable[[], object] | None = None) -> Fault:
    """A fault that raises `InjectedError` at that point, or calls `by`, which may end the process.

    `point` is any word that the loop passes, or an action of the program (see `plant`), in which `*` stands for any
    text, as in `fnmatch`.
    """

    def fail() -> None:
        raise InjectedError(f"rank {rank} was to fail at step {step}, {point}")

    return _when_there(rank, step, point, by or fail)


def stall_at(
    rank: int, step: int, point: str = "step", *, seconds: float = 0, until: Callable[[], object] | None = None
) -> Fault:
    """A fault that sleeps for `seconds` at that point, or until `until` returns, then continues."""
    return _when_there(rank, step, point, until or functools.partial(time.sleep, seconds))


def skip_at(rank: int, step: int, point: str = "step") -> Fault:
    """A fault that skips that point."""
    return lambda *at: _is_at(at, rank, step, point)


def _when_there(rank: int, step: int, point: str, happens: Callable[[], object]) -> Fault:
    def fault(*at: int | str) -> bool:
        if _is_at(at, rank, step, point):
            happens()
        return False

    return fault


def _is_at(at: tuple[int | str, ...], rank: int, step: int, point: str) -> bool:
    return at[:2] == (rank, step) and (at[2] == point or fnmatchcase(str(at[2]), point))


def plant(fault: Fault, world: World) -> None:
    """Let `fault` befall this rank also at the actions of programs: it is called before each, in the words in which
    `explain` prints it ("reduce_scatter blocks.2 grad dp fp32 1536 B"), and before each collective ("exchange of
    barrier"), with the number of optimizer steps that were taken in `world`.

    An action that it skips is not carried out; a collective cannot be skipped.
    """
    journal = world.journal
    journal.before = lambda what: fault(world.rank, journal.num_steps, what)


@functools.cache
def prepare_operators() -> None:
    """Look up all of torch's operators in Python, once. Call it before threads compute under a `TorchDispatchMode`;
    `run_ranks` does.

    [Note: operators looked up by threads] A mode is given an operator's Python object, which torch makes at its first
    use and keeps a borrowed pointer to. If two threads make it at once, the second object replaces the first in
    `torch.ops`, and the pointer to the first dangles: rarely, the process crashed in the middle of an operation.
    Operators that are looked up already are found without running any Python code, so that no
    other thread can come between. Seen with torch 2.13 (`maybe_get_registered_torch_dispatch_rule`).
    """
    _set_device_guard()
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, operator = name.partition("::")
        packet, _, overload = operator.partition(".")
        if namespace == "aten":
            getattr(getattr(torch.ops.aten, packet), overload or "default")


def _set_device_guard() -> None:
    """[Note: a device guard replaced by threads] Whenever a `FakeTensorMode` is entered without a GPU, torch replaces
    its device guard for CUDA, and with several threads the process crashes there (torch 2.11 built for CUDA, on a
    machine without a GPU: tests of `compile` and of split logits). Once is enough.
    """
    ensure = getattr(torch._C, "_ensureCUDADeviceGuardSet", None)
    if ensure is not None and not torch.cuda.is_available():
        ensure()
        torch._C._ensureCUDADeviceGuardSet = lambda: None


def run_ranks(
    num_ranks: int,
    work: Callable[[World], Result],
    *,
    timeout_seconds: float = 300,
    patience_seconds: float = 1,
    shares_memory: bool = True,
    local_size: int | None = None,
    hosts: Sequence[str] | None = None,
    fault: Fault | None = None,
) -> list[Result]:
    """Call `work(world)` on `num_ranks` threads that form one world; returns their results, by rank.

    If ranks raise, the error of the first one is raised here, and the others are released from their waiting.
    `timeout_seconds`, `patience_seconds` and `shares_memory` are those of `World.join`; `local_size` is the number of
    ranks per host (default: all ranks are on one). `hosts` names each rank's host instead: ranks of different hosts
    share no memory, and `local_size` follows from it. `fault` is planted in each rank's world. Threads share random
    number generators: build models before, or seed under a lock.
    """
    prepare_operators()
    office = PostOffice()
    results: dict[int, Result] = {}
    failures: list[tuple[int, BaseException]] = []

    def rank(index: int) -> None:
        try:
            with World(
                index,
                num_ranks,
                ThreadTransport(office, index),
                watched=Watched(office, timeout_seconds, patience_seconds),
                host=Host(
                    hosts.count(hosts[index]) if hosts is not None and local_size is None else local_size,
                    hosts[index] if hosts is not None else "",
                    shares_memory,
                ),
            ) as world:
                if fault is not None:
                    plant(fault, world)
                try:
                    results[index] = work(world)
                except BaseException as error:
                    failures.append((index, error))  # before the others notice and raise themselves
                    raise
        except BaseException as error:  # handed to the caller below
            if all(error is not known for _, known in failures):
                failures.append((index, error))

    threads = [threading.Thread(target=rank, args=(index,), name=f"rank {index}") for index in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        index, error = failures[0]
        error.add_note(f"(raised on rank {index} of {num_ranks})")
        raise error
    return [results[index] for index in range(num_ranks)]
