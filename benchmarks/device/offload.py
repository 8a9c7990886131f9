"""States and gradients on the host: what a step takes, what of it is hidden, and each copy beside a bare one.

First the machine's own limits: copies of pinned memory in each direction and both together, torch's fused AdamW on the
host's cores, and a norm of gradients there. Then a Llama whose states lie on the host. `larger` has the larger ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import psutil
import torch

import shardwise as sw
from benchmarks.device.gaps import traced
from benchmarks.device.models import ONE_BILLION, TINY, llama, tokens_of
from benchmarks.device.rows import Rows
from benchmarks.device.speed import num_params_of
from benchmarks.engines import adamw
from benchmarks.llama import LlamaSize
from shardwise.optim.host_adam import AdamTensors, HostAdam
from shardwise.optim.precision.verdict import sum_of_squares

COPIED_BYTES = 1 << 30
NUM_STEPS, LEAST_STEPS = 7, 3
"""Less if there is no time for them. The first two touch memory for the first time."""
SECONDS_TO_SPARE = 4
"""Steps for which there has to be time before another is begun: it, the profiled one, and what it takes to close."""


def copies(rows: Rows) -> dict[str, Any]:
    """GB/s of bare copies between pinned memory and the device."""
    num_bytes = COPIED_BYTES if rows.is_real else 1 << 20
    host = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=rows.is_real) for _ in range(2)]
    there = [torch.empty(num_bytes, dtype=torch.uint8, device=rows.device) for _ in range(2)]
    streams: list[Any] = [torch.Stream(rows.device) for _ in range(2)] if rows.is_real else []

    def fetch() -> None:
        there[0].copy_(host[0], non_blocking=True)

    def evict() -> None:
        host[1].copy_(there[1], non_blocking=True)

    def both() -> None:
        if not streams:
            return fetch()
        for stream, work in zip(streams, (fetch, evict), strict=True):
            with torch.cuda.stream(stream):
                work()
        return None

    def rate(work: Callable[[], None], times: int) -> float:
        seconds = []
        for _ in range(4):
            rows.synchronize()
            start = time.perf_counter()
            work()
            rows.synchronize()
            seconds.append(time.perf_counter() - start)
        return times * num_bytes / median(seconds[1:]) / 1e9

    return {"fetch_gb": rate(fetch, 1), "evict_gb": rate(evict, 1), "both_gb": rate(both, 2)}


def host_adam(rows: Rows) -> dict[str, Any]:
    """Parameters per second of torch's fused AdamW on this host's cores: fp32 parameters, gradients and states."""
    numel = 256 << 20 if rows.is_real else 1 << 16
    param = torch.nn.Parameter(torch.zeros(numel))
    param.grad = torch.full_like(param, 1e-3)
    optimizer = torch.optim.AdamW([param], fused=True)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    return {"params_per_second": numel / min(seconds), "threads": torch.get_num_threads()}


def our_adam(rows: Rows, slice_numel: int | None) -> dict[str, Any]:
    """The same for ours, with gradients and parameters in bf16 as in training, by the elements of a slice: `None` for
    those that training takes."""
    numel = 64 << 20 if rows.is_real else 1 << 16
    param, exp_avg, exp_avg_sq = (torch.zeros(numel) for _ in range(3))
    grad = torch.full((numel,), 1e-3, dtype=torch.bfloat16)
    tensors = AdamTensors(param, grad, exp_avg, exp_avg_sq, out=torch.zeros(numel, dtype=torch.bfloat16))
    group = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], fused=True).param_groups[0]
    adam = HostAdam(slice_numel=slice_numel)
    seconds = []
    for step in range(1, 6):
        start = time.perf_counter()
        adam.update([tensors], group, step=step)
        seconds.append(time.perf_counter() - start)
    adam.close()
    return {"params_per_second": numel / median(seconds[1:]), "threads": torch.get_num_threads()}


def norm_of_gradients(rows: Rows) -> dict[str, Any]:
    """Seconds for the sum of squares of bf16 gradients on the host, ours and torch's, and how far off they are."""
    numel = 64 << 20 if rows.is_real else 1 << 16
    grad = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    exact = sum(float(part.double().square().sum()) for part in torch.split(grad, 1 << 20))

    def whole() -> torch.Tensor:
        norm: torch.Tensor = torch.linalg.vector_norm(grad, dtype=torch.float32)
        return norm.square()

    row: dict[str, Any] = {"numel": numel}
    works: dict[str, Callable[[], torch.Tensor]] = {
        "ours": lambda: sum_of_squares(grad, torch.float32),
        "torch": whole,
    }
    for name, work in works.items():
        work()
        start = time.perf_counter()
        squares = float(work())
        row |= {f"{name}_norm_seconds": time.perf_counter() - start, f"{name}_off": abs(squares - exact) / exact}
    return row


def offloaded(rows: Rows, size: LlamaSize, plan: dict[str, Any]) -> dict[str, Any]:
    batch = tokens_of(size, rows.device, rows.world.rank)
    start = time.perf_counter()
    model = llama(size, rows.device)
    engine = sw.shard(model, {"precision": "bf16", **plan}, optimizer=adamw(model), world=rows.world)
    with engine:
        made_seconds = time.perf_counter() - start
        if rows.is_real:
            torch.cuda.reset_peak_memory_stats()

        def passes() -> torch.Tensor:
            loss: torch.Tensor = engine(**batch).loss
            engine.backward(loss)
            return loss.detach()

        losses: list[torch.Tensor] = []
        forward_backward: list[float] = []
        whole: list[float] = []
        for _ in range(NUM_STEPS):
            if len(whole) >= LEAST_STEPS and rows.seconds_left < SECONDS_TO_SPARE * whole[-1]:
                break
            rows.synchronize()
            start = time.perf_counter()
            losses.append(passes())
            rows.synchronize()
            middle = time.perf_counter()
            engine.step()
            rows.synchronize()
            forward_backward.append(middle - start)
            whole.append(time.perf_counter() - start)
        row: dict[str, Any] = {
            "num_params": num_params_of(size),
            "tokens": size.tokens,
            "made_seconds": made_seconds,
            "seconds": median(whole[LEAST_STEPS - 1 :]),
            "all_seconds": [round(one, 4) for one in whole],
            "forward_backward_seconds": median(forward_backward[LEAST_STEPS - 1 :]),
            "losses": [round(loss.item(), 4) for loss in losses],
            "host_process_bytes": psutil.Process().memory_info().rss,
            "promised": engine.memory().promised,
        }
        if rows.is_real:
            row["peak_allocated_bytes"] = torch.cuda.max_memory_allocated()

            def step() -> None:
                passes()
                engine.step()

            row |= traced(step, None)
        return row


def run(rows: Rows) -> None:
    rows.measure("our AdamW on the host, as it trains", lambda: our_adam(rows, None))
    rows.measure("norm of bf16 gradients on the host", lambda: norm_of_gradients(rows))
    rows.measure("bare copies", lambda: copies(rows))
    rows.measure("torch's fused AdamW on the host", lambda: host_adam(rows))
    size = ONE_BILLION if rows.is_real else TINY
    for name, plan, needed in (
        ("1 B offload", {"preset": "offload"}, 15),
        ("1 B zero3-offload, parameters on the host too",
         {"preset": "zero3-offload", "rows": {"param": {"tier": "host"}}}, 15),
        ("1 B zero3, activations on the host", {"preset": "zero3", "activations": "offload"}, 10),
    ):  # fmt: skip
        rows.measure(
            name,
            lambda plan=plan: offloaded(rows, size, plan),  # type: ignore[misc]
            needs_seconds=needed if rows.is_real else 0,
        )
    for power in (18, 19, 20, 21):
        rows.measure(
            f"our AdamW on the host, slices of 2^{power}",
            lambda power=power: our_adam(rows, 1 << power),  # type: ignore[misc]
        )
