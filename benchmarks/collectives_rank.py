"""One rank of `collectives`: both sides in turn on the same buffers, compared first and then timed."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.figures import write_figures
from shardwise.comm import Collectives, Group, World
from shardwise.comm.compat import all_gather_single, reduce_scatter_single

SMALLEST_BYTES = 2**12
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Timing:
    """Medians, of the slower rank each time. `gloo_over_ours` is the median ratio of neighbours in time."""

    verb: str
    dtype: str
    bytes: int
    ours_seconds: float
    gloo_seconds: float
    gloo_over_ours: float


class Bench:
    """Buffers of one length: `full` is what is gathered, `source` what is summed."""

    def __init__(self, world: World, numel: int, dtype: torch.dtype) -> None:
        self._collectives: Collectives = world.collectives(torch.device("cpu"))
        self._group: Group = world.everybody
        torch.manual_seed(numel)
        whole = torch.randint(-8, 9, (world.size, numel)).to(dtype)  # sums of small whole numbers are exact
        self._expected_full = whole[0]
        self._expected_sum = whole.sum(0).chunk(world.size)[world.rank]
        self._own = self._expected_full.chunk(world.size)[world.rank].clone()
        self._source = whole[world.rank].clone()
        self._full = torch.zeros(numel, dtype=dtype)
        self._full.chunk(world.size)[world.rank].copy_(self._own)
        self._out = torch.empty_like(self._own)
        self._process_group = dist.group.WORLD

    def calls(self) -> dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor], Tensor]]:
        """For each verb our call, gloo's, and what both must give."""
        return {
            "all-gather": (self.our_gather, self.gloo_gather, self._expected_full),
            "reduce-scatter": (self.our_scatter, self.gloo_scatter, self._expected_sum),
        }

    def our_gather(self) -> Tensor:
        self._collectives.all_gather(self._full, self._group, "full").wait()
        return self._full

    def gloo_gather(self) -> Tensor:
        assert self._process_group is not None
        all_gather_single(self._full, self._own, self._process_group).wait()
        return self._full

    def our_scatter(self) -> Tensor:
        self._collectives.reduce_scatter(self._out, self._source, self._group, self._source.dtype, "source").wait()
        return self._out

    def gloo_scatter(self) -> Tensor:
        assert self._process_group is not None
        reduce_scatter_single(self._out, self._source, self._process_group).wait()
        return self._out


def measure(world: World, largest_bytes: int, repeats: int) -> Iterator[Timing]:
    """Raises ValueError if a result is wrong. All ranks call."""
    for name, dtype in DTYPES.items():
        num_bytes = SMALLEST_BYTES
        while num_bytes <= largest_bytes:
            numel = num_bytes // dtype.itemsize // world.size * world.size
            for verb, (ours, gloo, expected) in Bench(world, numel, dtype).calls().items():
                _compare(f"our {verb}", ours(), expected)
                _compare(f"gloo's {verb}", gloo(), expected)
                yield _timing(world, verb, name, numel * dtype.itemsize, ours, gloo, repeats)
            num_bytes *= 4


def _timing(
    world: World,
    verb: str,
    dtype: str,
    num_bytes: int,
    ours: Callable[[], Tensor],
    gloo: Callable[[], Tensor],
    repeats: int,
) -> Timing:
    pairs = [(_seconds(world, ours), _seconds(world, gloo)) for _ in range(repeats)]
    return Timing(
        verb,
        dtype,
        num_bytes,
        ours_seconds=median(our for our, _ in pairs),
        gloo_seconds=median(their for _, their in pairs),
        gloo_over_ours=median(their / our for our, their in pairs),
    )


def _seconds(world: World, call: Callable[[], Tensor]) -> float:
    """Of the rank that took longest, from a moment at which all were ready."""
    world.barrier()
    start = time.perf_counter()
    call()
    own = time.perf_counter() - start
    return max(float(told) for told in world.exchange(repr(own).encode()))


def _compare(what: str, found: Tensor, expected: Tensor) -> None:
    if not torch.equal(found, expected):
        raise ValueError(f"{what} of {expected.numel()} elements of {expected.dtype} is wrong.")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--largest", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    with write_figures(args.out) as figures, World.join() as world:
        figures["timed"] = [asdict(timing) for timing in measure(world, args.largest, args.repeats)]
        world.barrier()


if __name__ == "__main__":
    main()
