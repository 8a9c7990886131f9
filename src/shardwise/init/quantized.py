"""Weights of linear layers in 8 or 4 bits, for models that only compute.

A weight is rounded to codes with a scale per group of inputs, and is made whole again, in the dtype of the
computation, whenever a layer uses it, one layer at a time. So it is memory that is saved, and not time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.system.torch_private import tree_map_only

Tensor = torch.Tensor


@dataclass(frozen=True)
class Symmetric:
    """Codes around zero, with a scale for all inputs of an output."""

    dtype: torch.dtype
    largest: float
    """The greatest code."""


FORMATS = {
    "int8": Symmetric(torch.int8, 127),
    "fp8": Symmetric(torch.float8_e4m3fn, torch.finfo(torch.float8_e4m3fn).max),
    "int4": None,
}
"""By the word for `load_for_inference(weights=...)`; codes of 4 bits reach from the least value of a group of inputs to
its greatest."""
_GROUP = 64
"""The most inputs that share a scale in 4 bits."""
_SMALLEST_GROUP = 16
"""With fewer, scales would take more memory than the codes save."""


class QuantizedWeight(Tensor):
    """A weight as codes. What is computed with it is computed with its values."""

    codes: Tensor
    scales: Tensor
    lows: Tensor | None
    is_transposed: bool

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor, lows: Tensor | None, *, is_transposed: bool) -> QuantizedWeight:
        """`codes` are `[outputs, inputs]` in int8 or fp8 (e4m3), or `[outputs, inputs / 2]` in uint8 with the even
        inputs in the lower four bits. `scales` and, in 4 bits, the `lows` to which codes are added are `[outputs,
        groups, 1]`. The weight is `[outputs, inputs]`, or `[inputs, outputs]` if `is_transposed`."""
        shape = [codes.shape[0], codes.shape[1] * (1 if lows is None else 2)]
        made = Tensor._make_wrapper_subclass(
            cls, shape[::-1] if is_transposed else shape, dtype=scales.dtype, device=codes.device
        )
        made.codes, made.scales, made.lows, made.is_transposed = codes, scales, lows, is_transposed
        return made

    def values(self) -> Tensor:
        """The weight in the dtype of the scales, a plain tensor."""
        codes = self.codes
        if self.lows is not None:
            codes = torch.stack([codes & 15, codes >> 4], -1).flatten(1)
        outputs, groups, _ = self.scales.shape
        grouped = codes.view(outputs, groups, -1).to(self.scales.dtype).mul_(self.scales)
        rows: Tensor = (grouped if self.lows is None else grouped.add_(self.lows)).flatten(1)
        return rows.T if self.is_transposed else rows

    def on(self, device: torch.device, dtype: torch.dtype) -> QuantizedWeight:
        """The same codes, with scales in `dtype`, on `device`."""
        scales = self.scales.to(device, dtype)
        lows = None if self.lows is None else self.lows.to(device, dtype)
        return QuantizedWeight(self.codes.to(device), scales, lows, is_transposed=self.is_transposed)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # untyped in torch
        kind = self.codes.dtype if self.lows is None else "4 bits"
        return f"QuantizedWeight {list(self.shape)} in {kind}"

    def __tensor_flatten__(self) -> tuple[list[str], bool]:
        return ["codes", "scales", *(() if self.lows is None else ("lows",))], self.is_transposed

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, Tensor], is_transposed: bool, size: object, stride: object
    ) -> QuantizedWeight:
        return QuantizedWeight(inner["codes"], inner["scales"], inner.get("lows"), is_transposed=is_transposed)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub is no class method
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func is torch.ops.aten.detach.default:
            return args[0].on(args[0].device, args[0].dtype)
        if func is torch.ops.aten._to_copy.default:
            return args[0].on(given.get("device") or args[0].device, given.get("dtype") or args[0].dtype)
        whole = tree_map_only(QuantizedWeight, QuantizedWeight.values, (args, given))
        return func(*whole[0], **whole[1])


def quantized(weight: Tensor, form: str, *, is_transposed: bool) -> QuantizedWeight | None:
    """`weight`, `[outputs, inputs]`, or `[inputs, outputs]` if `is_transposed`, in one of `FORMATS`; `None` if its
    inputs do not divide into groups.

    With integers each value is within half a scale of what it was, beside the rounding of its dtype. In fp8 it is
    within a sixteenth of itself, which three bits of mantissa leave, or, if it is small beside the greatest of its
    output, within 2^-10 of a scale.
    """
    rows = (weight.T if is_transposed else weight).float()
    inputs, symmetric = rows.shape[1], FORMATS[form]
    group = math.gcd(inputs, _GROUP) if symmetric is None else inputs
    if group < _SMALLEST_GROUP or group % 2:
        return None
    grouped = rows.reshape(len(rows), -1, group)
    if symmetric is not None:
        scales = _scales(grouped.abs().amax(-1, keepdim=True) / symmetric.largest, weight.dtype)
        codes = (grouped / scales.float()).clamp_(-symmetric.largest, symmetric.largest)
        codes = codes if symmetric.dtype.is_floating_point else codes.round_()
        return QuantizedWeight(codes.to(symmetric.dtype).flatten(1), scales, None, is_transposed=is_transposed)
    lows = grouped.amin(-1, keepdim=True).to(weight.dtype)
    scales = _scales((grouped.amax(-1, keepdim=True) - lows.float()) / 15, weight.dtype)
    codes = ((grouped - lows.float()) / scales.float()).round_().clamp_(0, 15).to(torch.uint8).flatten(1)
    return QuantizedWeight(codes[:, ::2] | codes[:, 1::2] << 4, scales, lows, is_transposed=is_transposed)


def _scales(wanted: Tensor, dtype: torch.dtype) -> Tensor:
    """In `dtype`, and none so small that it would lose digits there: with 0 for codes, a scale does not matter."""
    return wanted.clamp_min(torch.finfo(dtype).tiny).to(dtype)


def linear_weights(model: nn.Module) -> dict[nn.Parameter, bool]:
    """The weights that are quantized, each with whether it is transposed: those of `nn.Linear` and transformers'
    `Conv1D` that no other module shares, without the head of a language model, in which rounding shows most."""
    get_head = getattr(model, "get_output_embeddings", None)
    head = get_head() if callable(get_head) else None
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for param in module._parameters.values():
            if param is not None:
                owners.setdefault(param, []).append(module)
    found = {}
    for param, (owner, *others) in owners.items():
        is_transposed = type(owner).__name__ == "Conv1D"
        is_linear = is_transposed or isinstance(owner, nn.Linear)
        if is_linear and owner._parameters.get("weight") is param and not others and owner is not head:
            found[param] = is_transposed
    return found
