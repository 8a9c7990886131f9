"""Joins what the ranks of a sequence line have computed for one sample.

[Note: gradients of a whole] Gradients are averaged over ranks, including those along `sp`. If every rank computes a
loss from the same joined tensor, the loss counts once if the gradient of a rank's own tokens is multiplied by the
number of ranks: each rank propagates to its own tokens only, and the mean over ranks divides by their number again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function_unary

from shardwise.comm import Line
from shardwise.errors import ConfigError
from shardwise.parallel.sequence.attention import Sample

Tensor = torch.Tensor
LABELS = ("labels", "shift_labels")


def join(part: Tensor, line: Line, sample: Sample, dim: int) -> Tensor:
    """Concatenate every rank's `part`, whose dimension `dim` is its tokens, without padding. All ranks must call.

    See [Note: gradients of a whole] for its backward.
    """
    if has_torch_function_unary(part):  # logits that are not computed yet join the input of their head
        joined: Tensor = handle_torch_function(join, (part,), part, line, sample, dim)
        return joined
    if not -part.dim() <= dim < part.dim() or part.shape[dim] != sample.layout.num_local:
        raise ConfigError(
            f"engine.join_sequence was given a tensor {list(part.shape)} to join along dimension {dim}, but "
            f"this rank has {sample.layout.num_local} tokens of the batch that was split last. That dimension must be "
            f"this rank's tokens."
        )
    whole: Tensor = _Join.apply(part, line, sample, dim % part.dim())  # type: ignore[no-untyped-call]  # torch's own
    return whole


def whole_output(
    output: Any, line: Line, sample: Sample, called: Mapping[str, Any], *, trains: bool, with_tokens: bool
) -> Any:
    """Turn the model's output for this rank's tokens of the batch `called` into the output for all tokens.

    A loss, which is present if there were labels, becomes that of the whole sample. Tensors with this rank's tokens in
    dimension 1 are joined. But beside a loss, tensors with more than one number per token, such as logits, are left as
    they are if the loop `trains`, because whole logits of a long sequence would not fit, and without `with_tokens`.
    """
    has_loss = any(called.get(name) is not None for name in LABELS)
    most = 2 if has_loss and (trains or not with_tokens) else math.inf

    def change(tensor: Tensor) -> Tensor:
        if tensor.dim() == 0:
            is_loss = has_loss and tensor.is_floating_point()
            mean: Tensor = _Mean.apply(tensor, line) if is_loss else tensor  # type: ignore[no-untyped-call]  # torch's own
            return mean
        is_by_token = tensor.dim() > 1 and tensor.shape[1] == sample.layout.num_local
        return join(tensor, line, sample, 1) if is_by_token and tensor.dim() <= most else tensor

    return _changed(output, change)


def _changed(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`value` with its tensors changed, in mappings, tuples and lists too; anything else is kept."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, MutableMapping):
        for name, one in list(value.items()):
            if isinstance(one, torch.Tensor | MutableMapping | tuple | list):
                value[name] = _changed(one, change)
        return value
    if isinstance(value, tuple | list):
        made = [_changed(one, change) for one in value]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    return value


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, line: Line, sample: Sample, dim: int) -> Tensor:
        layout = sample.layout
        ctx.of = line, sample, dim
        side_by_side = line.concatenate(part, dim, [layout.num_local] * line.num_ranks)
        whole = layout.join(list(side_by_side.chunk(line.num_ranks, dim)), dim)
        return whole.narrow(dim, 0, layout.num_tokens - sample.num_padded).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        line, sample, dim = ctx.of
        if sample.num_padded:
            grad = functional.pad(grad, (*(0, 0) * (grad.dim() - 1 - dim), 0, sample.num_padded))
        return sample.layout.take(grad, line.index, dim) * line.num_ranks, None, None, None


class _Mean(torch.autograd.Function):
    """The mean of the ranks' losses; in the backward each rank propagates through its own loss only."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, line: Line) -> Tensor:  # noqa: ARG004  # torch's
        return line.sum(loss) / line.num_ranks

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ARG004
        return grads[0], None
