"""Blocks of a Llama of 8 billion parameters in fp8 beside bf16, compiled, and what fp8 layers take beside the promise.

Four blocks of its sizes, under `zero3`, in turns. The target is 1.15 times the tokens per second of bf16 with the best
recipe that the card has. Products that CPUs only decode are compared with the card's kernels first.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.device import memory
from benchmarks.device.models import FAMILIES, TINY
from benchmarks.device.rows import Rows
from benchmarks.device.speed import Variant, ours, timed
from benchmarks.llama import LlamaSize
from shardwise.errors import ConfigError
from shardwise.parallel.fp8.kernels import CAPABILITIES, KERNELS, require_kernels
from shardwise.parallel.fp8.linear import fp8_linear
from shardwise.parallel.fp8.recipes import RECIPES
from shardwise.plan.schema import Fp8RecipeName

EIGHT_BILLION_BLOCKS = LlamaSize(4, 4096, 14_336, 32, 8, 32_000, 4096, 2)
"""Of Llama-3-8B, four of 32, with a smaller vocabulary."""
ALLOWED_OFF = {torch.bfloat16: 2.0**-6, torch.float32: 2.0**-6}
"""Of the norm: kernels sum in another order, and for rows they make bf16."""
NUM_ROUNDS = 2


def recipes_of(device: torch.device) -> list[Fp8RecipeName]:
    """Those that the device has kernels for; all of them in a rehearsal."""
    found: list[Fp8RecipeName] = []
    for name in CAPABILITIES:
        try:
            require_kernels(name, device)
        except ConfigError as error:
            print(f"left out: {error}")
        else:
            found.append(name)
    return found


def products(rows: Rows, name: Fp8RecipeName) -> dict[str, Any]:
    """Output and gradients by the device's kernels, against the same layer on the CPU, as shares of their norms."""
    generator = torch.Generator().manual_seed(0)
    off: dict[str, list[float]] = {}
    for dtype in (torch.bfloat16,) if name in KERNELS else ALLOWED_OFF:
        tokens, weight, grad = (
            torch.randn(shape, generator=generator).to(dtype) for shape in ((384, 512), (256, 512), (384, 256))
        )

        def results(on: torch.device, given: tuple[torch.Tensor, ...] = (tokens, weight, grad)) -> list[torch.Tensor]:
            left, right, back = (one.detach().to(on) for one in given)
            made = fp8_linear(left.requires_grad_(), right.requires_grad_(), RECIPES[name])
            return [one.float().cpu() for one in (made.detach(), *torch.autograd.grad(made, (left, right), back))]

        pairs = zip(results(rows.device), results(torch.device("cpu")), strict=True)
        found = off[str(dtype)] = [((one - other).norm() / other.norm()).item() for one, other in pairs]
        if max(found) > ALLOWED_OFF[dtype]:
            raise AssertionError(f"{name}: output, input gradient and weight gradient in {dtype} are off by {found}")
    return {"off": off}


def run(rows: Rows) -> None:
    names = recipes_of(rows.device)
    for name in names:
        rows.measure(f"products {name}", lambda name=name: products(rows, name))  # type: ignore[misc]
    size = EIGHT_BILLION_BLOCKS if rows.is_real else TINY
    compiled = {"compile": "inductor"} if rows.is_real else {}
    skip = ["auto"] if rows.is_real else ["lm_head"]
    plans: dict[str, dict[str, Any]] = {"bf16": {}} | {
        name: {"fp8": {"recipe": name, "skip": skip}}
        for name in names
        if rows.is_real or RECIPES[name].multiple < RECIPES["blockwise"].multiple  # TINY has no such sizes
    }
    memory.settle(rows)
    for name in [name for name in names if rows.is_real or name in plans]:
        fp8 = {"recipe": name, "skip": ["lm_head"]}
        rows.measure(
            f"memory {name}",
            lambda fp8=fp8: memory.measured(rows, FAMILIES["llama"], "zero3", "bf16", fp8=fp8),  # type: ignore[misc]
        )
    for number in range(NUM_ROUNDS if rows.is_real else 1):
        for label, plan in plans.items():
            variant = _variant(label, {"preset": "zero3", **compiled, **plan})
            rows.measure(
                f"{label}, round {number + 1}",
                lambda variant=variant: timed(rows, size, variant, looks_inside=False),  # type: ignore[misc]
                needs_seconds=25,
            )


def _variant(name: str, plan: dict[str, Any]) -> Variant:
    return Variant(name, lambda rows, size: ours(rows, size, **plan))
