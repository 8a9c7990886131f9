"""Tokens per second of a Llama of a billion parameters, beside the plain loop and FSDP2 on the same card, in turns.

Everywhere: compute in bf16, masters and states in fp32, fused AdamW, torch's scaled_dot_product_attention. The plain
loop has masters written by hand, FSDP2 its mixed precision, each block wrapped. Compiled is each block, as torchtitan
does it. Of one step torch says how often the host waited for the device, and a profile how many kernels it launched.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import shardwise as sw
from benchmarks.device.models import ONE_BILLION, TINY, Batch, llama, tokens_of
from benchmarks.device.rows import Rows
from benchmarks.engines import adamw, optimizer_of
from benchmarks.llama import LlamaSize

Step = Callable[[Batch], Tensor]
NUM_WARM, NUM_TIMED = 3, 5
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "B200": 2250e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12}
"""Dense bf16, by the makers' data sheets."""


class Variant:
    """One way to train: `start` returns a step, `close` ends it."""

    def __init__(self, name: str, start: Callable[[Rows, LlamaSize], tuple[Step, Callable[[], None]]]) -> None:
        self.name = name
        self.start = start


def plain(rows: Rows, size: LlamaSize, *, compiled: bool = False) -> tuple[Step, Callable[[], None]]:
    model = llama(size, rows.device)
    optimizer = optimizer_of(model, "bf16")
    if compiled:
        compile_blocks(model)

    def step(batch: Batch) -> Tensor:
        loss: Tensor = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, lambda: None


def fsdp2(rows: Rows, size: LlamaSize, *, compiled: bool = False) -> tuple[Step, Callable[[], None]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if not dist.is_initialized():  # ours needs none for a single rank
        raise RuntimeError("no process group")
    mesh = init_device_mesh(rows.device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model: Any = llama(size, rows.device)
    if compiled:
        compile_blocks(model)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    optimizer = adamw(model)

    def step(batch: Batch) -> Tensor:
        loss: Tensor = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, lambda: None


def ours(rows: Rows, size: LlamaSize, **plan: Any) -> tuple[Step, Callable[[], None]]:
    model = llama(size, rows.device)
    engine = sw.shard(model, {"precision": "bf16", **plan}, optimizer=adamw(model), world=rows.world)

    def step(batch: Batch) -> Tensor:
        loss: Tensor = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step, engine.close


def compile_blocks(model: Any) -> None:
    for block in model.model.layers:
        block.compile()


VARIANTS = (
    Variant("plain", plain),
    Variant("ours zero3", lambda rows, size: ours(rows, size, preset="zero3")),
    Variant("ours ddp", lambda rows, size: ours(rows, size, preset="ddp")),
    Variant("fsdp2", fsdp2),
)
MORE = (
    Variant("ours zero1", lambda rows, size: ours(rows, size, preset="zero1")),
    Variant("ours zero3 selective", lambda rows, size: ours(rows, size, preset="zero3", activations="selective")),
    Variant("ours zero3 recompute", lambda rows, size: ours(rows, size, preset="zero3", activations="recompute")),
    Variant("ours zero3 compiled", lambda rows, size: ours(rows, size, preset="zero3", compile="inductor")),
    Variant("plain compiled", lambda rows, size: plain(rows, size, compiled=True)),
)


def timed(rows: Rows, size: LlamaSize, variant: Variant, *, looks_inside: bool) -> dict[str, Any]:
    batch = tokens_of(size, rows.device, rows.world.rank)
    step, close = variant.start(rows, size)
    try:
        losses = [step(batch) for _ in range(NUM_WARM)]
        rows.synchronize()
        if rows.is_real:
            torch.cuda.reset_peak_memory_stats()
        seconds, queued = [], []
        for _ in range(NUM_TIMED):
            start = time.perf_counter()
            losses.append(step(batch))
            queued.append(time.perf_counter() - start)
            rows.synchronize()
            seconds.append(time.perf_counter() - start)
        num_params = num_params_of(size)
        row: dict[str, Any] = {
            "seconds": median(seconds),
            "all_seconds": [round(one, 5) for one in seconds],
            "host_seconds": median(queued),
            "tokens_per_second": size.tokens / median(seconds),
            "losses": [round(loss.item(), 5) for loss in losses],
        }
        if rows.is_real:
            name = torch.cuda.get_device_name()
            peak = next((flops for key, flops in PEAK_FLOPS.items() if key in name), None)
            achieved = size.flops_per_step(num_params) / median(seconds)
            row |= {
                "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
                "tflops": achieved / 1e12,
                "mfu": achieved / peak if peak else None,
            }
            if looks_inside:
                row |= looked_inside(step, batch)
        return row
    finally:
        close()


def num_params_of(size: LlamaSize) -> int:
    with torch.device("meta"):
        return sum(param.numel() for param in llama(size, torch.device("meta")).parameters())


def looked_inside(step: Step, batch: Batch) -> dict[str, Any]:
    """Where the host waits for the device in one step, and how many kernels are launched."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            step(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = Counter(
        f"{one.filename.rpartition('/site-packages/')[2] or one.filename}:{one.lineno}"
        for one in seen
        if "synchronizing" in str(one.message)
    )
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step(batch)
        torch.cuda.synchronize()
    counts = Counter(event.name for event in profile.events())
    return {
        "host_waits": sum(waits.values()),
        "host_waits_at": dict(waits.most_common(8)),
        "launches": sum(number for name, number in counts.items() if name.startswith(("cudaLaunch", "cuLaunch"))),
        "copies": counts["cudaMemcpyAsync"],
        "synchronizations": {name: n for name, n in counts.items() if "Synchronize" in name},
    }


def run(rows: Rows) -> None:
    size = ONE_BILLION if rows.is_real else TINY
    rounds = 2 if rows.is_real else 1
    for number in range(rounds):
        for variant in VARIANTS:
            rows.measure(
                f"{variant.name}, round {number + 1}",
                lambda variant=variant, number=number: timed(  # type: ignore[misc]
                    rows, size, variant, looks_inside=number == 0
                ),
                needs_seconds=6,
            )
    for variant in MORE if rows.is_real else MORE[:3]:  # compilers are for the real thing
        rows.measure(
            variant.name,
            lambda variant=variant: timed(rows, size, variant, looks_inside=False),  # type: ignore[misc]
            needs_seconds=20 if "compiled" in variant.name else 6,
        )
