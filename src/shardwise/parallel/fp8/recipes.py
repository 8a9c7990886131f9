"""How the factors of a linear layer's three products are rounded to 8 bits, by the names of torchao's recipes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from shardwise.plan.schema import Fp8RecipeName

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ScaleRule = Literal["exact", "power_of_two", "e8m0"]


@dataclass(frozen=True)
class Rounding:
    """How one factor of a product is rounded. As a matrix of rows times contracted elements it falls into blocks, each
    with a scale of its own; `None` is all of them."""

    rows: int | None
    contracted: int | None
    dtype: torch.dtype = E4M3


Factors = tuple[Rounding, Rounding]


@dataclass(frozen=True)
class Recipe:
    """The roundings of one linear layer. Weights are `[out, in]`, inputs `[tokens, in]`, and gradients of outputs
    `[tokens, out]`; each product contracts the last dimension of both of its factors."""

    name: Fp8RecipeName
    output: Factors
    """Of inputs `[tokens, in]` and weight `[out, in]`."""
    input_grad: Factors
    """Of gradients `[tokens, out]` and weight `[in, out]`."""
    weight_grad: Factors | None
    """Of gradients `[out, tokens]` and inputs `[in, tokens]`; `None`: they are not rounded."""
    scale: ScaleRule
    """`exact`: the largest element becomes the largest number of the dtype; `power_of_two`: or half of it, so that
    scaling rounds nothing; `e8m0`: powers of two that are exponents of 8 bits (MX)."""
    multiple: int = 16
    """Sizes of weights are multiples of it: of what kernels load at once, or of a block."""

    def is_small(self, num_out: int, num_in: int) -> bool:
        """Whether rounding the factors of a weight `[num_out, num_in]` takes as long as 8 bits save, on an H100.

        These are the sizes that torchao found for its filters (`float8_linear_utils.py` of 0.18); for recipes with
        blocks it publishes none, and those of `rowwise` are taken.
        """
        if self.name == "tensorwise":
            return num_in <= 4096 and num_out <= 1024
        return num_out <= 2048 or num_in <= 1024 or (num_out <= 4096 and num_in <= 2048)


_WHOLE = Rounding(None, None)
_ROWS = Rounding(1, None)
_TILES = Rounding(1, 128)
_MX = Rounding(1, 32)
_WIDE_RANGE = Rounding(None, None, E5M2)

RECIPES: Mapping[Fp8RecipeName, Recipe] = {
    one.name: one
    for one in (
        Recipe("tensorwise", (_WHOLE, _WHOLE), (_WIDE_RANGE, _WHOLE), (_WIDE_RANGE, _WHOLE), "exact"),
        Recipe("rowwise", (_ROWS, _ROWS), (_ROWS, _ROWS), (_ROWS, _ROWS), "power_of_two"),
        Recipe("rowwise_with_gw_hp", (_ROWS, _ROWS), (_ROWS, _WHOLE), None, "power_of_two"),
        Recipe(  # DeepSeek-V3, arXiv:2412.19437, section 3.3.2
            "blockwise", (_TILES, Rounding(128, 128)), (_TILES, Rounding(128, 128)), (_TILES, _TILES), "exact", 128
        ),
        Recipe("mxfp8", (_MX, _MX), (_MX, _MX), (_MX, _MX), "e8m0", 32),  # OCP Microscaling Formats 1.0
    )
}
