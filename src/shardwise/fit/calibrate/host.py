"""Measures how fast host memory is copied, and how fast AdamW updates it, by the number of threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from shardwise.optim.host_adam import MANY_THREADS, AdamTensors, HostAdam, slice_numel_of

NUMEL, QUICK_NUMEL = 2**24, 2**21
REPEATS = 5
ADAM_BYTES = 28
"""Per element: bf16 gradient in, fp32 master and moments in and out, bf16 parameter out."""
GROUP = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


@dataclass(frozen=True)
class HostRow:
    """The best of a few repeats with one number of threads, because other processes use memory as well."""

    num_threads: int
    copy_bytes_per_second: float
    """Bytes copied: each is read once and written once."""
    adam_elements_per_second: float

    @property
    def adam_bytes_per_second(self) -> float:
        """Bytes per second that an update has to read or write at least."""
        return ADAM_BYTES * self.adam_elements_per_second


def measure_host(threads: Sequence[int], numel: int, tell: Callable[[HostRow], None] = lambda _: None) -> list[HostRow]:
    """One row for each of `threads`; takes 30 bytes per element of memory meanwhile.

    Of `numel` elements, or of two slices for each thread: with fewer, some threads would have nothing to do (16 threads
    seemed to update 0.46 G parameters/s with 2^21, where training reached 2.6).
    """
    numel = max(numel, *(2 * count * slice_numel_of(count) for count in threads if count >= MANY_THREADS), 0)
    source = torch.randn(ADAM_BYTES // 2 * numel // 4, device="cpu")
    target = torch.empty_like(source)
    tensors = AdamTensors(
        torch.randn(numel, device="cpu"),
        torch.randn(numel, device="cpu").bfloat16(),
        torch.zeros(numel, device="cpu"),
        torch.zeros(numel, device="cpu"),
        out=torch.empty(numel, dtype=torch.bfloat16, device="cpu"),
    )
    rows = []
    for num_threads in threads:
        adam = HostAdam(num_threads)
        with ThreadPoolExecutor(num_threads) as pool:
            copy = _best(lambda pool=pool, count=num_threads: _copy(pool, count, target, source))  # type: ignore[misc]
        update = _best(lambda adam=adam: adam.update([tensors], GROUP, step=1))  # type: ignore[misc]
        adam.close()
        rows.append(HostRow(num_threads, source.nbytes / copy, numel / update))
        tell(rows[-1])
    return rows


def best_of(rows: Sequence[HostRow]) -> HostRow:
    """The fewest threads within 3 % of the fastest update."""
    fastest = max(row.adam_elements_per_second for row in rows)
    return min((row for row in rows if row.adam_elements_per_second >= 0.97 * fastest), key=lambda row: row.num_threads)


def _copy(pool: ThreadPoolExecutor, num_threads: int, target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy by NumPy, which copies in the calling thread."""
    pairs = zip(target.chunk(num_threads), source.chunk(num_threads), strict=True)
    views = [(to.numpy(), of.numpy()) for to, of in pairs]
    list(pool.map(lambda pair: pair[0].__setitem__(slice(None), pair[1]), views))


def _best(call: Callable[[], None]) -> float:
    times = []
    for _ in range(REPEATS + 1):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times[1:])
