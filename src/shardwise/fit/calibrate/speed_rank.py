"""One of the ranks that are started to measure: times what models compute while other ranks do, and messages.

[Note: cold operands] In a model an operator's operands were last touched a whole pass ago. The same product took up to
a fifth longer on them than on operands that it had just read: 256 x 256 x 512 at 121 instead of 155 GFLOP/s on one
core, 512 x 3072 x 768 at 147 instead of 151. So calls go round sets of operands which together do not stay in caches.

[Note: sizes for devices] A device is measured with calls that are long beside what the host needs to queue them, and
with several between two waits. With the sizes for processors, each waited for, an H200 seemed to reach 52 % of its peak
in bf16, half of it lost at 9.8 M elements, and 13 % in attention: that was the host's time.

[Note: ranks out of step] In a model ranks come to a collective from some computation, one a little later than another,
and what they send is in no cache. So collectives are timed between computations, which are subtracted: back to back
they take less, because whoever is late for one is late for all. On two cores that other jobs used too, a message of
8 KB took 0.1 ms back to back and 2.4 to 4.3 ms between products; each of the 48 exchanges of a step along `sp` took 4
to 5 ms.

[Note: measured twice] A shared machine is slow for seconds at a time: of two calibrations a quarter of an hour apart
one found products at 94 GFLOP/s, the other at 142, and a median is no help where all repeats of a setting lie in such a
time. So everything is measured again when all has been measured once, and the faster of the two counts. Steps of 30
plans had been predicted 18 % too long by the first, and were right within 9 % by the second (medians).
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from pathlib import Path

import torch
from torch import nn

from shardwise.comm import Line, World
from shardwise.fit.calibrate.speeds import Speeds
from shardwise.fit.counted_work import NAMES, CountedOperations
from shardwise.system.devices import RankDevice, TorchAccelerator

SHAPES = ((128, 256, 256), (256, 1024, 256), (512, 512, 512), (256, 256, 2048), (1024, 1024, 256), (1024, 2048, 1024))
LARGE_SHAPES = (
    (2048, 2048, 2048), (2048, 2048, 8192), (4096, 4096, 1024), (8192, 2048, 2048), (8192, 4096, 4096),
    (16384, 8192, 512), (8192, 8192, 8192),
)  # fmt: skip
"""Products (m, n, k); the large ones are for accelerators, see [Note: sizes for devices]."""
ATTENTION = ((16, 128, 64), (16, 256, 64), (8, 512, 64), (8, 1024, 64))
LARGE_ATTENTION = ((256, 512, 128), (64, 1024, 128), (64, 2048, 128), (32, 4096, 128), (16, 8192, 128))
"""Fused attention: (batch x heads, length, head size)."""
ELEMENTS, LARGE_ELEMENTS = (2**18, 2**20), (2**24, 2**26)
CACHED_COPY, FLAT_COPY, LARGE_COPY = 2**22, 2**24, 2**26
"""Elements of a copy: what fits into the caches of a processor, as between two operators, and what does not, as flat
buffers, which were last touched a whole pass ago. Two cores of an EPYC with 32 MiB of cache read and wrote 26 GB/s each
of the first, and 24 GB/s together of the second."""
MESSAGES = (2**12, 2**16, 2**24)
SECONDS = 0.15
"""For each setting, at least; a few repeats in any case."""
REPEATS, MESSAGE_REPEATS = 5, 31
MOST_SECONDS = 2.0
"""For each setting, about: without bf16 instructions, five repeats of its products would take a minute."""
AGAIN_WITHIN = 40.0
"""Seconds of the first round up to which there is a second one; see [Note: measured twice]."""
BETWEEN = 512
"""The size of the square matrices that ranks multiply between collectives."""
QUEUED_SECONDS = 0.01
"""Of calls that are queued on an accelerator before they are waited for, about."""
COLD_BYTES = 2**26
"""Of all sets of operands together; see [Note: cold operands]."""

AttentionRow = tuple[int, float, float]
"""Length, FLOPs, seconds."""


class Measuring:
    """Measures on one rank's device while other ranks measure the same."""

    def __init__(self, world: World, device: RankDevice) -> None:
        self._world, self._device = world, device
        self.is_large = device.accelerator is not None

    def seconds(self, call: Callable[[], object], repeats: int = 0) -> float:
        """How long a call takes: the median, and the mean of all ranks, which begin together.

        Without `repeats` each rank repeats it for `SECONDS`; calls that communicate are repeated equally often.
        """
        call()
        self._wait()
        queued = 1
        if self.is_large and not repeats:
            queued = max(1, int(QUEUED_SECONDS / self._time(call, 1)))
        self._world.barrier()
        times: list[float] = []
        started = time.perf_counter()
        while len(times) < repeats if repeats else _goes_on(len(times), time.perf_counter() - started):
            times.append(self._time(call, queued))
        return float(self._world.mean(sorted(times)[len(times) // 2]))

    def _time(self, call: Callable[[], object], queued: int) -> float:
        """Seconds of a call, of so many that are queued one behind the other."""
        begun = time.perf_counter()
        for _ in range(queued):
            call()
        self._wait()
        return (time.perf_counter() - begun) / queued

    def all_speeds(self, named: Mapping[str, torch.dtype]) -> Speeds:
        """One round of everything, in the dtypes with these names."""
        attention = {name: self.attention(dtype) for name, dtype in named.items()}
        communicates = self._world.size > 1
        return Speeds(
            num_ranks=self._world.size,
            products={name: self.products(dtype) for name, dtype in named.items()},
            attention={name: forward for name, (forward, _) in attention.items()},
            attention_backward={name: backward for name, (_, backward) in attention.items()},
            memory={name: self.memory(dtype) for name, dtype in named.items()},
            copy_bytes_per_second=self.copied(LARGE_COPY if self.is_large else CACHED_COPY),
            flat_bytes_per_second=self.copied(LARGE_COPY if self.is_large else FLAT_COPY),
            launch_seconds=self.launch(),
            messages=self.messages() if communicates else [],
            exchanges=self.exchanges() if communicates else [],
            device_memory_bytes=self._device.memory_bytes,
        )

    def products(self, dtype: torch.dtype) -> list[tuple[int, int, int, float]]:
        """(m, n, k, seconds): each in the layouts of a linear layer's forward, with bias, and of its gradients."""
        found = []
        for m, n, k in LARGE_SHAPES if self.is_large else SHAPES:
            bias = self._random(n, dtype=dtype)
            sets = cycle(self._cold([(m, k), (n, k), (k, n), (k, m)], dtype))

            def call(bias=bias, sets=sets) -> None:  # type: ignore[no-untyped-def]
                left, right, back, turned = next(sets)
                torch.addmm(bias, left, right.t())
                left @ back
                turned.t() @ back

            found.append((m, n, k, self.seconds(call) / 3))
        return found

    def attention(self, dtype: torch.dtype) -> tuple[list[AttentionRow], list[AttentionRow]]:
        """Of a forward, and of its backward."""
        forward: list[AttentionRow] = []
        backward: list[AttentionRow] = []
        for heads, length, size in LARGE_ATTENTION if self.is_large else ATTENTION:
            shape = (1, heads, length, size)
            sets = [[one.requires_grad_() for one in some] for some in self._cold([shape] * 3, dtype)]
            graphs = cycle([(_attend(some), some) for some in sets])
            operands, grad = cycle(sets), self._random(*shape, dtype=dtype)

            def attend(operands=operands) -> None:  # type: ignore[no-untyped-def]
                _attend(next(operands))

            def go_back(graphs=graphs, grad=grad) -> None:  # type: ignore[no-untyped-def]
                mixed, some = next(graphs)
                torch.autograd.grad(mixed, some, grad, retain_graph=True)

            for rows, call in ((forward, attend), (backward, go_back)):
                with CountedOperations() as counting:
                    call()
                flops = sum(one.flops for one in counting.operations if one.kind == "attention")
                rows.append((length, flops, self.seconds(call)))
        return forward, backward

    def memory(self, dtype: torch.dtype) -> list[tuple[float, float]]:
        """(bytes read and written, seconds) of the kinds of operators that models have between products."""
        found = []
        for numel in LARGE_ELEMENTS if self.is_large else ELEMENTS:
            sets = cycle(self._cold([(numel // 256, 256)], dtype))
            scale = torch.ones(256, device=self._device.device, dtype=dtype, requires_grad=True)

            def call(sets=sets, scale=scale) -> None:  # type: ignore[no-untyped-def]
                (rows,) = next(sets)
                rows.requires_grad_()
                normal = nn.functional.layer_norm(rows, (256,), scale, scale)
                torch.autograd.grad((rows + nn.functional.gelu(normal)).sum(), (rows, scale))

            with CountedOperations() as counting:
                call()
            found.append((sum(one.num_bytes for one in counting.operations), self.seconds(call)))
        return found

    def copied(self, numel: int) -> float:
        """Bytes read and written per second by a copy of so many elements."""
        source = self._random(numel)
        target = torch.empty_like(source)
        return 2 * source.nbytes / self.seconds(lambda: target.copy_(source))

    def launch(self) -> float:
        """Seconds per operator of a model so small that it computes next to nothing."""
        model = nn.Sequential(
            *(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()) for _ in range(12)), nn.Linear(8, 8)
        ).to(self._device.device)
        batch = self._random(4, 8)

        def call() -> None:
            model.zero_grad()
            model(batch).sum().backward()

        call()
        with CountedOperations() as counting:
            call()
        num_kernels: int = sum(one.kernels for one in counting.operations)
        return self.seconds(call) / num_kernels

    def between_computations(self, call: Callable[[], object]) -> float:
        """Seconds of a collective; see [Note: ranks out of step]."""
        sets = cycle(self._cold([(BETWEEN, BETWEEN), (BETWEEN, BETWEEN)], torch.float32))

        def compute() -> None:
            left, right = next(sets)
            left @ right

        def both() -> None:
            compute()
            call()

        in_turn = self.seconds(both, MESSAGE_REPEATS) - self.seconds(compute, MESSAGE_REPEATS)
        return max(in_turn, self.seconds(call, MESSAGE_REPEATS))

    def messages(self) -> list[tuple[int, float]]:
        """(bytes of the whole buffer, seconds) of all-gathers among all ranks."""
        collectives = self._world.collectives(self._device.device)
        group = self._world.everybody
        found = []
        for num_bytes in MESSAGES:
            full = torch.zeros(num_bytes * self._world.size // 4, device=self._device.device)

            def call(full=full) -> None:  # type: ignore[no-untyped-def]
                collectives.all_gather(full, group, "full").wait()

            found.append((full.nbytes, self.between_computations(call)))
        return found

    def exchanges(self) -> list[tuple[int, float]]:
        """(bytes of the whole buffer, seconds) of all-to-alls among all ranks, as activations are dealt along `sp` and
        `ep`: each time into new memory."""
        group = self._world.everybody
        line = Line(self._world.collectives(self._device.device), group)
        found = []
        for num_bytes in MESSAGES:
            parts = list(torch.zeros(self._world.size, num_bytes // 4, device=self._device.device))
            shapes = [part.shape for part in parts]

            def call(parts=parts, shapes=shapes) -> None:  # type: ignore[no-untyped-def]
                line.deal(parts, shapes)

            found.append((sum(part.nbytes for part in parts), self.between_computations(call)))
        return found

    def _cold(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[list[torch.Tensor]]:
        """Sets of operands of these shapes, to be used in turn; see [Note: cold operands]."""
        count = COLD_BYTES // (sum(map(math.prod, shapes)) * dtype.itemsize)
        return [[self._random(*shape, dtype=dtype) for shape in shapes] for _ in range(1 + count)]

    def _random(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, device=self._device.device, dtype=dtype)

    def _wait(self) -> None:
        if self._device.accelerator is not None:
            self._device.accelerator.current_stream().synchronize()


def _goes_on(num_repeats: int, seconds: float) -> bool:
    """Whether a setting is repeated once more. Ranks need not agree: what is repeated so does not communicate."""
    return seconds < (MOST_SECONDS if num_repeats < REPEATS else SECONDS)


def _attend(operands: Sequence[torch.Tensor]) -> torch.Tensor:
    query, key, value = operands
    return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def main(out: str, dtypes: Sequence[str]) -> None:
    """Rank 0 writes a list of `Speeds` as JSON, one of each round."""
    with World.join(timeout_seconds=60) as world:
        accelerator = TorchAccelerator.found()
        device = RankDevice.cpu() if accelerator is None else RankDevice.of(accelerator, world.rank)
        measuring = Measuring(world, device)
        named = {name: dtype for dtype, name in NAMES.items() if name in dtypes}
        started = time.perf_counter()
        rounds = [measuring.all_speeds(named)]
        if not measuring.is_large and world.mean(time.perf_counter() - started) < AGAIN_WITHIN:
            rounds.append(measuring.all_speeds(named))
        if world.rank == 0:
            Path(out).write_text(json.dumps([speeds.as_json() for speeds in rounds]))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
