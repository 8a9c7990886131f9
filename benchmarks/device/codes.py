"""Codes of integers by the kernels of `codec_kernels.py` beside torch's operators: the same bytes, and how fast.

Where there are no kernels, as in a rehearsal, the operators are compared with themselves.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.device.rows import Rows
from shardwise.plan.placement import Codes
from shardwise.plan.placement.wire import Feedback
from shardwise.runtime.codec import Blocks, Codec, FedBack, codec_for

Tensor = torch.Tensor
WIRES = (Codes("int8", 256), Codes("int4", 128), Codes("int8", 4096), Codes("int4", 16))
NUM_REPEATS = 20


def _elements(rows: Rows, wire: Codes, dtype: torch.dtype, numel: int) -> Tensor:
    """Normal values of very different sizes, with blocks of zeros, and values that are halves of a scale."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(numel // wire.block, wire.block, generator=generator)
    values *= 10.0 ** torch.randint(-6, 6, (len(values), 1), generator=generator)
    values[::7] = 0
    values[1::7] = torch.arange(wire.block) % 254 / 2 - 63.5
    return values.to(dtype).view(-1).to(rows.device)


def _encoded(codec: Codec, elements: Tensor) -> Tensor:
    codes = torch.empty(codec.num_codes(elements.numel()), dtype=torch.uint8, device=elements.device)
    codec.encode(elements, codes)
    return codes


def same(rows: Rows, wire: Codes, dtype: torch.dtype) -> dict[str, Any]:
    """Codes of kernels, operators and the CPU, bit for bit; what is decoded, and added; what is kept of losses."""
    elements = _elements(rows, wire, dtype, 64 * 4096)
    kernels, operators = codec_for(wire, rows.device), Blocks(wire)
    codes = _encoded(kernels, elements)
    for where, other in (
        ("operators", _encoded(operators, elements)),
        ("the CPU", _encoded(operators, elements.cpu()).to(rows.device)),
    ):
        odd = int((codes != other).sum())
        if odd:
            raise AssertionError(f"{odd} of {codes.numel()} bytes differ from those of {where}")
    for name in ("decode", "add"):
        made, expected = torch.ones_like(elements), torch.ones_like(elements)
        getattr(kernels, name)(codes, made)
        getattr(operators, name)(codes, expected)
        if not torch.equal(made, expected):
            raise AssertionError(f"{name}: off by {float((made - expected).abs().max())}")
    losses = [torch.zeros(elements.numel(), dtype=torch.bfloat16, device=rows.device) for _ in range(2)]
    fed = Codes(wire.dtype, wire.block, feedback=Feedback(0.8, 1024))
    for _ in range(3):
        _encoded(codec_for(fed, rows.device, losses[0]), elements)
        _encoded(FedBack(operators, losses[1], 0.8), elements)
    apart = (losses[0].float() - losses[1].float()).norm() / losses[1].float().norm()
    if not apart <= 2.0**-6:  # rounded to bf16 three times
        raise AssertionError(f"what is kept of losses is off by {float(apart)} of its norm")
    return {"losses_off": float(apart)}


def raced(rows: Rows, wire: Codes) -> dict[str, Any]:
    """Gigabytes of fp32 per second, of kernels and of operators."""
    elements = _elements(rows, wire, torch.float32, (1 << 28) if rows.is_real else (1 << 16))
    losses = torch.zeros_like(elements, dtype=torch.bfloat16)
    fed = Codes(wire.dtype, wire.block, feedback=Feedback(0.8, 1024))
    both: dict[str, tuple[Codec, Codec]] = {
        "kernels": (codec_for(wire, rows.device), codec_for(fed, rows.device, losses)),
        "operators": (Blocks(wire), FedBack(Blocks(wire), losses, 0.8)),
    }
    found: dict[str, Any] = {}
    for name, (plain, fed_back) in both.items():
        codes, out = _encoded(plain, elements), torch.empty_like(elements)
        speeds = (
            _gigabytes(rows, elements, lambda codec=plain, codes=codes: codec.encode(elements, codes)),  # type: ignore[misc]
            _gigabytes(rows, elements, lambda codec=plain, codes=codes, out=out: codec.decode(codes, out)),  # type: ignore[misc]
            _gigabytes(rows, elements, lambda codec=fed_back, codes=codes: codec.encode(elements, codes)),  # type: ignore[misc]
        )
        for what, speed in zip(("encode", "decode", "feed_back"), speeds, strict=True):
            found[f"{name}_{what}"] = speed
    return {"gigabytes_per_second": found}


def _gigabytes(rows: Rows, elements: Tensor, work: Callable[[], None]) -> float:
    work()
    rows.synchronize()
    start = time.perf_counter()
    for _ in range(NUM_REPEATS if rows.is_real else 1):
        work()
    rows.synchronize()
    took = (time.perf_counter() - start) / (NUM_REPEATS if rows.is_real else 1)
    return round(elements.nbytes / took / 1e9, 1)


def run(rows: Rows) -> None:
    for wire in WIRES:
        for dtype in (torch.float32, torch.bfloat16):
            rows.measure(f"same codes {wire} of {dtype}", lambda wire=wire, dtype=dtype: same(rows, wire, dtype))  # type: ignore[misc]
    for wire in WIRES[:2]:
        rows.measure(f"speed {wire}", lambda wire=wire: raced(rows, wire))  # type: ignore[misc]
