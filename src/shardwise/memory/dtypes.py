"""The table's names of dtypes, and torch's."""

from __future__ import annotations

from typing import get_args

import torch

from shardwise.plan import DtypeName
from shardwise.plan.placement import Dtype

TORCH_DTYPES: dict[Dtype, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "uint8": torch.uint8,
    "int8": torch.int8,
}
_CODES: dict[torch.dtype, Dtype] = {torch.uint8: "uint8", torch.int8: "int8"}
_QUANT_STORAGE = "quant_storage"
"""bitsandbytes' parameters have it: the dtype in which their codes are packed, which may be one of floating point."""


def dtype_of_codes(param: torch.Tensor) -> Dtype | None:
    """The dtype of a parameter that lies in a flat buffer and is no number per element, but codes of a quantizer, which
    are never converted; `None` for all others."""
    if param.dtype in _CODES:
        return _CODES[param.dtype]
    is_packed = not param.requires_grad and getattr(param, _QUANT_STORAGE, None) is param.dtype
    return next((name for name, dtype in TORCH_DTYPES.items() if dtype is param.dtype), None) if is_packed else None


def own_precision(param: torch.Tensor) -> DtypeName | None:
    """The precision that a parameter has by itself; `None` for codes, integers and dtypes in which none computes."""
    if dtype_of_codes(param) is not None:
        return None
    return next((name for name in get_args(DtypeName) if TORCH_DTYPES[name] is param.dtype), None)


def torch_dtype(name: Dtype) -> torch.dtype:
    return TORCH_DTYPES[name]
