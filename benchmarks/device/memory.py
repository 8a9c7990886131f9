"""Peak memory of a step over the promise, for models of several families and all presets.

The promise is what `engine.rehearse(batch)` says before the first step. Measured is, in the steps after the first two,
what torch's allocator was asked for at most, what it handed out, and what it had reserved of the device. It hands out
more than it is asked for where it does not split a large block: one of its segments unless they are expandable.

Before that: what each of torch's attention kernels takes in its backward beside its results, which a rehearsal knows of
one of them alone (`shardwise.runtime.rehearsal.kernel_memory`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import shardwise as sw
from benchmarks.device.allocations import live_at_peak
from benchmarks.device.models import FAMILIES, Family
from benchmarks.device.rows import Rows
from shardwise.runtime.rehearsal.kernel_memory import flash_backward_bytes

PRESETS = ("ddp", "zero1", "zero2", "zero3", "zero3-kept", "offload", "zero3-offload")
NUM_STEPS = 4
ALLOWED_OVER = 0.002
"""By how much the peak may be above the promise before the row says what was alive at the peak."""


def settle(rows: Rows) -> None:
    """Let libraries take what they keep for the process, cuBLAS its workspaces above all, before anything is
    counted."""
    if rows.is_real:
        for dtype in (torch.float32, torch.bfloat16):
            ones = torch.ones(256, 256, device=rows.device, dtype=dtype, requires_grad=True)
            torch.autograd.backward((ones @ ones).sum())
        rows.synchronize()


def cases() -> Iterator[tuple[str, str, str]]:
    """Most telling first: every family and preset once, then other precisions."""
    for family in FAMILIES:
        yield family, "zero3", "bf16"
    for preset in PRESETS:
        if preset != "zero3":
            yield "llama", preset, "bf16"
    for preset in PRESETS:
        yield "llama", preset, "fp32"
    for family in FAMILIES:
        for preset in PRESETS:
            if family != "llama" and preset != "zero3":
                yield family, preset, "bf16"


def measured(rows: Rows, family: Family, preset: str, precision: str, **more: Any) -> dict[str, Any]:
    """What a step takes beside its promise; `more` is further keys of the plan."""
    before = torch.cuda.memory_stats() if rows.is_real else {}
    model, batch = family(rows.device, not rows.is_real)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    plan = {"preset": preset, "precision": precision, **more}
    with sw.shard(model, plan, optimizer=optimizer, world=rows.world) as engine:
        promise = engine.rehearse(batch)

        def train() -> None:
            engine.backward(engine(**batch).loss)
            engine.step()

        for step in range(NUM_STEPS):
            if rows.is_real and step == 2:
                torch.cuda.empty_cache()  # what building the model and learning its order has left behind
                torch.cuda.reset_peak_memory_stats()
            train()
        rows.synchronize()
        peaks: dict[str, int] = {}
        if rows.is_real:
            stats = torch.cuda.memory_stats()
            peaks = {
                "requested": stats["requested_bytes.all.peak"] - before["requested_bytes.all.current"],
                "allocated": stats["allocated_bytes.all.peak"] - before["allocated_bytes.all.current"],
                "reserved": stats["reserved_bytes.all.peak"] - before["allocated_bytes.all.current"],
            }
        report = engine.memory()
        tensors = promise.total - promise.process
        result: dict[str, Any] = {
            "promised_bytes": tensors,
            "promised": promise.by_kind,
            "peak_at": str(promise.peak_at),
            "at_rest_promised": report.promised,
            "at_rest_measured": report.measured,
        }
        for kind, peak in peaks.items():
            result |= {f"{kind}_bytes": peak, f"{kind}_over_promised": round(peak / tensors, 4)}
        if peaks.get("requested", 0) > (1 + ALLOWED_OVER) * tensors:
            result["at_peak"] = live_at_peak(train)
        return result


KERNELS = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION")
ATTENDED = ((16, 64, 197, 16), (4, 16, 1024, 64), (4, 16, 4096, 128), (1, 32, 8192, 128), (8, 12, 500, 80))
"""Rows, heads, tokens and widths: of the ViT and the Llamas here, of a long sequence, and of odd sizes."""


def of_attention(rows: Rows, kernel: str) -> dict[str, Any]:
    """Bytes by which the allocator's peak is above the gradients that a backward returns, and FlashAttention's by its
    shapes."""
    backend, chosen = SDPBackend.__members__[kernel], {}
    beyond: dict[str, dict[str, Any]] = {}
    for shape in ATTENDED if rows.is_real else ((2, 4, 16, 8),):
        q, k, v = (torch.randn(shape, device=rows.device).bfloat16().requires_grad_() for _ in range(3))
        try:
            with sdpa_kernel(backend) if rows.is_real else nullcontext():
                out = scaled_dot_product_attention(q, k, v, is_causal=True)
        except RuntimeError as error:  # some take no such shape
            beyond[str(shape)] = {"refused": str(error).splitlines()[0]}
            continue
        chosen[str(shape)] = SDPBackend(torch._fused_sdp_choice(q, k, v, is_causal=True)).name
        grad = torch.ones_like(out)
        rows.synchronize()
        before = torch.cuda.memory_allocated() if rows.is_real else 0
        if rows.is_real:
            torch.cuda.reset_peak_memory_stats()
        grads = torch.autograd.grad(out, (q, k, v), grad)
        peak = torch.cuda.max_memory_allocated() if rows.is_real else 0
        beyond[str(shape)] = {
            "beyond_results_bytes": peak - before - sum(one.nbytes for one in grads),
            "flash_bytes_by_shape": flash_backward_bytes(shape, shape, q.element_size()),
        }
    return {"chosen_by_torch": chosen, "beyond": beyond}


def run(rows: Rows) -> None:
    settle(rows)
    for kernel in KERNELS:
        rows.measure(f"attention's backward by {kernel}", lambda kernel=kernel: of_attention(rows, kernel))  # type: ignore[misc]
    for family, preset, precision in cases() if rows.is_real else [*cases()][:7]:
        rows.measure(
            f"{family} {preset} {precision}",
            lambda family=family, preset=preset, precision=precision: measured(  # type: ignore[misc]
                rows, FAMILIES[family], preset, precision
            ),
            needs_seconds=2,
        )
