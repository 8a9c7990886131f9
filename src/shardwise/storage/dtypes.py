"""The table's names of dtypes, and torch's."""

from __future__ import annotations

import torch

from shardwise.placement import Dtype

TORCH_DTYPES: dict[Dtype, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "uint8": torch.uint8,
    "int8": torch.int8,
}
CODES: dict[torch.dtype, Dtype] = {torch.uint8: "uint8", torch.int8: "int8"}
"""The integers that parameters in flat buffers may be."""


def torch_dtype(name: Dtype) -> torch.dtype:
    return TORCH_DTYPES[name]
