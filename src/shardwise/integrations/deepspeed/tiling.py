"""`deepspeed.zero.TiledLinear`: a linear layer in tiles, each a layer of its own that is gathered by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from shardwise.system.even_parts import even_bounds

Tensor = torch.Tensor


class TiledLinear(nn.Module):
    """A linear layer whose weight `[out, in]` is cut into `out_splits` times `in_splits` tiles.

    `linears[row][column]` is a tile, made by `linear_cls(in, out, bias=...)`; the last column has the biases. To have
    tiles gathered one by one under stage 3, list their class in the plan's `units`. Inputs are `[..., in]`, or with
    `input_is_already_split` a sequence of their parts. Returns `[..., out]`, or a list of its parts without
    `combine_out_splits`. Raises `RuntimeError` for more splits than features.
    """

    def __init__(  # noqa: PLR0913  # DeepSpeed's arguments
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Callable[..., nn.Module] = nn.Linear,
        init_linear: nn.Linear | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        for splits, features, name in ((in_splits, in_features, "in"), (out_splits, out_features, "out")):
            if not 1 <= splits <= features:
                raise RuntimeError(f"{name}_splits is {splits}; it must be between 1 and {name}_features, {features}.")
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split, self.combine_out_splits = input_is_already_split, combine_out_splits
        self.in_parts, self.out_parts = even_bounds(in_features, in_splits), even_bounds(out_features, out_splits)
        self.linears = nn.ModuleList(
            nn.ModuleList(
                linear_cls(end - start, bottom - top, bias=bias and end == in_features, **kwargs)
                for start, end in pairwise(self.in_parts)
            )
            for top, bottom in pairwise(self.out_parts)
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Tensor | Sequence[Tensor]) -> Any:
        parts = self._inputs(input_)
        outputs = [self._row([tile(part) for tile, part in zip(row, parts, strict=True)]) for row in self._rows()]
        return self._combined(outputs) if self.combine_out_splits else outputs

    def _inputs(self, input_: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
        if isinstance(input_, Tensor) and not self.input_is_already_split:
            return torch.split(input_, [end - start for start, end in pairwise(self.in_parts)], dim=-1)
        if len(input_) != self.in_splits:
            raise RuntimeError(f"There are {len(input_)} parts of the input, but in_splits is {self.in_splits}.")
        return list(input_)

    def _rows(self) -> list[list[Any]]:
        return [list(row) for row in self.linears]  # type: ignore[call-overload]

    def _row(self, outputs: list[Any]) -> Any:
        total = outputs[0]
        for output in outputs[1:]:
            total = total + output
        return total

    def _combined(self, outputs: list[Any]) -> Any:
        return torch.cat(outputs, dim=-1) if len(outputs) > 1 else outputs[0]

    @torch.no_grad()
    def copy_params_from(self, other: nn.Linear) -> None:
        """Take over the weight and bias of a linear layer of the same shape, which must be whole."""
        for row, (top, bottom) in zip(self._rows(), pairwise(self.out_parts), strict=True):
            for tile, (start, end) in zip(row, pairwise(self.in_parts), strict=True):
                tile.weight.copy_(other.weight[top:bottom, start:end])
            if other.bias is not None:
                row[-1].bias.copy_(other.bias[top:bottom])


class TiledLinearReturnBias(TiledLinear):
    """As `TiledLinear`, of layers that return their output and their bias apart; so does this one."""

    def _row(self, outputs: list[Any]) -> Any:
        total = super()._row([output for output, _ in outputs])
        return total, next((bias for _, bias in reversed(outputs) if bias is not None), None)

    def _combined(self, outputs: list[Any]) -> Any:
        values, biases = zip(*outputs, strict=True)
        bias = None if biases[0] is None else super()._combined(list(biases))
        return super()._combined(list(values)), bias
