"""Which precision a rank's device computes fast: what `precision: auto` means, and a warning where bf16 is slow.

A processor without bf16 instructions converts each element before it multiplies. Compared with fp32, a product of
matrices in bf16 took 45 times as long with AVX2, 5 times with AVX-512 alone, 1.7 times with its bf16, and 0.2 times
with AMX (torch 2.13). The flags of a processor do not tell it: oneDNN may be told to use fewer (ONEDNN_MAX_CPU_ISA). So
it is measured.
"""

from __future__ import annotations

import functools
import json
import logging
import threading
import time
from collections.abc import Callable

import torch

from shardwise.comm import World
from shardwise.plan import Plan
from shardwise.system.machine import SLOW_BF16

_log = logging.getLogger("shardwise")

_SIZE = 256
_SECONDS = 0.02
_alone = threading.Lock()


@functools.cache
def bf16_ratio() -> float:
    """How many times as long as in fp32 a product of matrices takes in bf16 on this processor. Takes 0.1 s at most on
    those that are slow at it.

    Counts this thread's own time, without helpers, for which it would wait, and takes the shortest of several tries, so
    that a loaded machine gives the same.
    """
    with _alone:  # ranks may be threads, and the number of threads is the process's
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            fp32, bf16 = (_seconds(dtype) for dtype in (torch.float32, torch.bfloat16))
        finally:
            torch.set_num_threads(num_threads)
    return bf16 / fp32


def _seconds(dtype: torch.dtype) -> float:
    matrix = torch.ones(_SIZE, _SIZE, dtype=dtype, device="cpu")
    times: list[float] = []
    with torch.no_grad():
        matrix @ matrix  # prepares kernels
        while len(times) < 2 or sum(times) < _SECONDS:
            started = time.thread_time()
            matrix @ matrix
            times.append(max(time.thread_time() - started, 1e-6))
    return min(times)


def ratio_on(device: torch.device) -> float:
    """`bf16_ratio` for a processor. For an accelerator 0 if it has bf16, and infinity if it does not."""
    if device.type == "cpu":
        return bf16_ratio()
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return float("inf")
    return 0.0


def is_slow(ratio: float) -> bool:
    return ratio > SLOW_BF16


def settle(plan: Plan, world: World, device: torch.device, ratio: Callable[[torch.device], float] = ratio_on) -> Plan:
    """`plan` with `precision: auto` replaced: by bf16, or by fp32 if any rank's `device` is slow at bf16. For a plan
    that asks for bf16 on such a device, rank 0 logs a warning. All ranks must call, with the same plan."""
    asked = {plan.precision, *(rule.precision for rule in plan.rules.values())}
    if not asked & {"auto", "bf16"}:
        return plan
    ratios = [json.loads(one) for one in world.exchange(json.dumps(ratio(device)).encode(), "precision")]
    slowest = max(range(len(ratios)), key=ratios.__getitem__)
    if plan.precision == "auto":
        return plan.with_precision("fp32" if is_slow(ratios[slowest]) else "bf16", "auto")
    if is_slow(ratios[slowest]) and world.rank == 0:
        where = "this processor" if world.size == 1 else f"the processor of rank {slowest}"
        _warn_once(where, ratios[slowest])
    return plan


@functools.cache
def _warn_once(where: str, ratio: float) -> None:
    _log.warning(
        "The plan asks for bf16, in which %s takes %.0f times as long as in fp32 to multiply matrices, because it has "
        "no instructions for it. Set precision: auto, or fp32.",
        where,
        ratio,
    )


def settled_here(plan: Plan) -> Plan:
    """`plan` as `settle` makes it where all ranks have the devices of this machine. For reports about a plan."""
    if plan.precision != "auto":
        return plan
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    return plan.with_precision("fp32" if is_slow(ratio_on(device)) else "bf16", "auto")
