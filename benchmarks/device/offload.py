"""States and gradients on the host: what a step takes, what of it is hidden, and each copy beside a bare one.

First the card's own limits: copies of pinned memory in each direction and both together, and torch's fused AdamW on the
host's cores. Then Llamas whose states lie on the host, up to the largest that the time left bears.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import psutil
import torch

import shardwise as sw
from benchmarks.device.gaps import traced
from benchmarks.device.models import FIFTH, ONE_BILLION, TINY, TWO_BILLION, Shape, llama, tokens_of
from benchmarks.device.rows import Rows
from benchmarks.device.speed import shape_params
from benchmarks.engines import adamw
from shardwise.optim.host_adam import AdamTensors, HostAdam

COPIED_BYTES = 1 << 30
NUM_STEPS = 7


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


def our_adam(rows: Rows, slice_numel: int) -> dict[str, Any]:
    """The same for ours, with gradients and parameters in bf16 as in training, by the elements of a slice."""
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


def offloaded(rows: Rows, shape: Shape, plan: dict[str, Any]) -> dict[str, Any]:
    batch = tokens_of(shape, rows.device, rows.world.rank)
    start = time.perf_counter()
    model = llama(shape, rows.device)
    engine = sw.shard(model, {"precision": "bf16", **plan}, optimizer=adamw(model), world=rows.world)
    with engine:
        made_seconds = time.perf_counter() - start
        if rows.is_real:
            torch.cuda.reset_peak_memory_stats()

        def passes() -> torch.Tensor:
            loss: torch.Tensor = engine(**batch).loss
            engine.backward(loss)
            return loss.detach()

        losses, forward_backward, whole = [], [], []
        for _ in range(NUM_STEPS):
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
            "num_params": shape_params(shape),
            "tokens": shape.tokens,
            "made_seconds": made_seconds,
            "seconds": median(whole[2:]),
            "all_seconds": [round(one, 4) for one in whole],
            "forward_backward_seconds": median(forward_backward[2:]),
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
    with tempfile.TemporaryDirectory(prefix="shardwise-device-") as folder:
        rows.measure("bare copies", lambda: copies(rows))
        rows.measure("torch's fused AdamW on the host", lambda: host_adam(rows))
        for power in (17, 18, 19, 20, 21):
            rows.measure(
                f"our AdamW on the host, slices of 2^{power}",
                lambda power=power: our_adam(rows, 1 << power),  # type: ignore[misc]
            )
        few, small, large = (FIFTH, ONE_BILLION, TWO_BILLION) if rows.is_real else (TINY, TINY, TINY)
        recompute = {"activations": "recompute"}
        cases: list[tuple[str, Shape, dict[str, Any], float]] = [
            ("1 B offload", small, {"preset": "offload"}, 15),
            ("1 B zero3-offload, parameters on the host too", small,
             {"preset": "zero3-offload", "rows": {"param": {"tier": "host"}}}, 15),
            ("1 B zero3, activations on the host", small, {"preset": "zero3", "activations": "offload"}, 10),
            ("2 B offload, recomputed", large, {"preset": "offload", **recompute}, 30),
            ("0.2 B infinity", few, {"preset": "infinity", "disk": folder}, 15),
        ]  # fmt: skip
        for name, shape, plan, needed in cases:
            rows.measure(
                name,
                lambda shape=shape, plan=plan: offloaded(rows, shape, plan),  # type: ignore[misc]
                needs_seconds=needed if rows.is_real else 0,
            )
