"""Products in blocks on GPUs, by torchao. This is the one module that knows its names.

torch has kernels for scales of whole matrices and of rows. Those for blocks need codes and scales laid out as each
generation of GPUs wants them, and torchao has functions that make them, with backwards: `blockwise` for Hopper
(compute capability 9.0), `mxfp8` for Blackwell (10.0).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping

import torch
from torch.nn import functional

from shardwise.errors import ConfigError
from shardwise.plan.schema import Fp8RecipeName

Tensor = torch.Tensor
Kernel = Callable[[Tensor, Tensor], Tensor]
CAPABILITIES: Mapping[Fp8RecipeName, tuple[int, int]] = {
    "tensorwise": (8, 9),
    "rowwise": (8, 9),
    "rowwise_with_gw_hp": (8, 9),
    "blockwise": (9, 0),
    "mxfp8": (10, 0),
}
"""The first compute capability whose kernels multiply with such scales."""


def _blockwise(tokens: Tensor, weight: Tensor) -> Tensor:
    from torchao.prototype.blockwise_fp8_training.linear import fp8_blockwise_mm

    made: Tensor = fp8_blockwise_mm.apply(tokens, weight, 128, torch.bfloat16, False)
    return made


def _mxfp8(tokens: Tensor, weight: Tensor) -> Tensor:
    from torchao.prototype.moe_training.mxfp8_linear import mx_mm
    from torchao.prototype.mx_formats import config
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    made: Tensor = mx_mm.apply(
        tokens,
        weight,
        torch.float8_e4m3fn,
        torch.float8_e4m3fn,
        torch.float8_e4m3fn,
        32,
        KernelPreference.AUTO,
        config.MXFP8Dim0CastKernelChoice.TRITON,
        config.MXFP8Dim1CastKernelChoice.CUDA,
        config.ScaleCalculationMode.RCEIL,
        False,
    )
    return made


def _in_whole_blocks(kernel: Kernel, size: int) -> Kernel:
    """`kernel` for any number of tokens and any dtype: it is given bf16, and a multiple of `size` tokens, of which
    those added are zeros, and change no scale."""

    def multiply(tokens: Tensor, weight: Tensor) -> Tensor:
        num_tokens = tokens.shape[0]
        padded = functional.pad(tokens.to(torch.bfloat16), (0, 0, 0, -num_tokens % size)).contiguous()
        return kernel(padded, weight.to(torch.bfloat16))[:num_tokens].to(tokens.dtype)

    return multiply


KERNELS: Mapping[Fp8RecipeName, Kernel] = {
    "blockwise": _in_whole_blocks(_blockwise, 128),
    "mxfp8": _in_whole_blocks(_mxfp8, 32),
}
"""By recipe, `tokens @ weight.T` in 8 bits, with a backward."""


def require_kernels(name: Fp8RecipeName, device: torch.device) -> None:
    """Raise `ConfigError` if `device` has no kernels for a recipe. CPUs have none for any; there codes are multiplied
    in fp32."""
    if device.type in ("cpu", "meta"):
        return
    if device.type != "cuda" or torch.version.hip is not None:
        raise ConfigError(
            f"fp8 is for NVIDIA GPUs, and for trying plans on CPUs, but the model is on {device}. Leave fp8 out of the "
            f"plan."
        )
    needed, own = CAPABILITIES[name], torch.cuda.get_device_capability(device)
    if own < needed:
        raise ConfigError(
            f"fp8: {name} needs GPUs of compute capability {needed[0]}.{needed[1]} or newer, and this one has "
            f"{own[0]}.{own[1]}. Leave fp8 out of the plan, or take a recipe that it has: "
            f"{_recipes_of(own) or 'there is none'}."
        )
    if name in KERNELS and importlib.util.find_spec("torchao") is None:
        raise ConfigError(f"fp8: {name} needs torchao on GPUs: pip install 'shardwise[fp8]'.")


def _recipes_of(capability: tuple[int, int]) -> str:
    return ", ".join(name for name, needed in CAPABILITIES.items() if needed <= capability)
