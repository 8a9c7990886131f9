"""The Triton kernels for codes of integers, in Triton's interpreter: the codes of torch's operators, to the bit."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from shardwise.plan.placement import Codes
from shardwise.plan.placement.wire import Feedback
from shardwise.runtime.codec import Codec, KernelBlocks, codec_for

pytest.importorskip("triton", reason="torch brings Triton for GPUs only; requirements.txt has it")

Tensor = torch.Tensor
WIRES = [("int8", 256), ("int4", 128), ("int8", 16), ("int4", 16), ("int4", 4096)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def values_of(block: int, dtype: torch.dtype) -> Tensor:
    """Of very different sizes, with zeros, halves of a scale, and numbers that are nearly zero."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(9, block, generator=generator)
    values *= 10.0 ** torch.linspace(-4, 4, len(values))[:, None]
    values[1] = 0
    values[2] = torch.arange(block) % 254 / 2 - 63.5
    values[3] = torch.finfo(torch.float32).tiny / 256
    return values.to(dtype).view(-1)


def encoded(codec: Codec, values: Tensor) -> Tensor:
    codes = torch.empty(codec.num_codes(values.numel()), dtype=torch.uint8)
    codec.encode(values, codes)
    return codes


def compare(kernels: ModuleType) -> None:
    """All of it, in a process whose Triton interprets."""
    for (dtype, block), kept_in in itertools.product(WIRES, DTYPES):
        wire, values = Codes(dtype, block), values_of(block, kept_in)  # type: ignore[arg-type]
        ours, plain = KernelBlocks(wire, kernels, None), codec_for(wire)
        codes = encoded(ours, values)
        assert torch.equal(codes, encoded(plain, values)), (dtype, block, kept_in)
        for name in ("decode", "add"):
            made, expected = torch.ones_like(values), torch.ones_like(values)
            getattr(ours, name)(codes, made)
            getattr(plain, name)(codes, expected)
            assert torch.equal(made, expected), (name, dtype, block, kept_in)
        fed_back = Codes(dtype, block, feedback=Feedback(0.8, 1024))  # type: ignore[arg-type]
        losses = [torch.zeros(2 * values.numel(), dtype=torch.bfloat16) for _ in range(2)]
        codecs = [KernelBlocks(fed_back, kernels, losses[0]), codec_for(fed_back, losses=losses[1])]
        for _ in range(3):  # of the second half of what is kept
            found, expected = (torch.empty_like(codes) for _ in range(2))
            for codec, out in zip(codecs, (found, expected), strict=True):
                codec.encode(values, out, values.numel())
            assert torch.equal(found, expected), ("fed back", dtype, block, kept_in)
            assert torch.equal(*losses), ("losses", dtype, block, kept_in)
        assert losses[0].any()
        assert not losses[0][: values.numel()].any()
    for value in (float("inf"), float("-inf"), float("nan")):
        values = torch.ones(4, 256)
        values[1, 5] = value
        losses = torch.zeros(values.numel(), dtype=torch.bfloat16)
        ours = KernelBlocks(Codes("int8", 256, feedback=Feedback(0.0, 1024)), kernels, losses)
        decoded = torch.empty_like(values)
        ours.decode(encoded(ours, values.view(-1)), decoded.view(-1))
        assert not decoded[1].isfinite().any()
        assert decoded[[0, 2, 3]].isfinite().all()
        assert losses.isfinite().all()


def test_they_make_the_codes_of_torchs_operators() -> None:
    root = Path(__file__).parents[2]
    script = "import test_codec_kernels as own; from shardwise.runtime import codec_kernels; own.compare(codec_kernels)"
    paths = os.pathsep.join(map(str, (Path(__file__).parent, root, root / "src", *filter(None, sys.path))))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
