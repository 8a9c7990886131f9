"""Which precision a rank's device computes fast: what `precision: auto` means, and a warning where bf16 is slow."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable

import torch

from shardwise.comm import World
from shardwise.plan import Plan
from shardwise.system.devices import bf16_ratio
from shardwise.system.machine import SLOW_BF16

_log = logging.getLogger("shardwise")


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
