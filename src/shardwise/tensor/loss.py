"""Cross-entropy of logits that are split by vocabulary and not gathered (Megatron-LM, arXiv:1909.08053, section 3)."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

from shardwise.comm import Line
from shardwise.errors import ModelError
from shardwise.placement import Span
from shardwise.tensor.forwards import Column
from shardwise.tensor.functions import apply

Tensor = torch.Tensor
Reduction = Literal["mean", "sum", "none"]
IGNORED = -100


def cross_entropy(
    logits: Tensor, targets: Tensor, head: nn.Module, *, ignore_index: int = IGNORED, reduction: Reduction = "mean"
) -> Tensor:
    """`torch.nn.functional.cross_entropy` for logits that are split by vocabulary.

    `logits` [N, this rank's vocabulary] are the output of `head`, a module of the style `vocabulary_cut`. `targets` [N]
    are indices into the whole vocabulary, the same on all ranks of the line. Returns a scalar, or [N] with
    `reduction="none"`, the same on all ranks, computed at least in fp32. Each rank sends 3 numbers per row, and no
    logits. If `head` is not split, this is torch's function, so a model can use it in either case.
    """
    forward = head.__dict__.get("forward")
    if not isinstance(forward, Column):
        return functional.cross_entropy(logits, targets, ignore_index=ignore_index, reduction=reduction)
    if forward.gathers:
        raise ModelError(
            "The head given to cross_entropy() gathers its logits, so they are whole. Give it the style vocabulary_cut "
            "in tensor.plan, or use torch's cross_entropy."
        )
    start = sum(forward.sizes[: forward.line.index])
    own = Span(start, start + forward.sizes[forward.line.index])
    wide = logits if logits.dtype == torch.float64 else logits.float()
    is_counted = targets != ignore_index
    losses = apply(_CrossEntropy, wide, targets.masked_fill(~is_counted, 0), forward.line, own)
    losses = losses.masked_fill(~is_counted, 0.0)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / is_counted.sum()


class CausalLoss:
    """The loss of a causal language model of transformers, computed from split logits. Replaces `loss_function`."""

    def __init__(self, head: nn.Module) -> None:
        self.head = head

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int | None = None,  # noqa: ARG002  # the library's arguments
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = IGNORED,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """The labels are shifted by one token, unless `shift_labels` has them shifted already."""
        wanted = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:] if shift_labels is None else shift_labels
        flat, targets = logits.flatten(0, -2), wanted.reshape(-1).to(logits.device)
        if num_items_in_batch is None:
            return cross_entropy(flat, targets, self.head, ignore_index=ignore_index)
        return cross_entropy(flat, targets, self.head, ignore_index=ignore_index, reduction="sum") / num_items_in_batch


class _CrossEntropy(torch.autograd.Function):
    """The loss of each row."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, line: Line, own: Span) -> Tensor:
        largest = line.largest(logits.detach().amax(-1))
        shifted = logits.detach() - largest.unsqueeze(-1)
        is_here = (targets >= own.start) & (targets < own.stop)
        local = (targets - own.start).masked_fill(~is_here, 0)
        wanted = shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(~is_here, 0.0)
        exponentials = shifted.exp_()
        wanted, sums = line.sum(torch.stack([wanted, exponentials.sum(-1)]))
        probabilities = exponentials.div_(sums.unsqueeze(-1))
        ctx.save_for_backward(probabilities, local, is_here)
        losses: Tensor = sums.log() - wanted
        return losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        probabilities, local, is_here = ctx.saved_tensors
        found = probabilities * grad.unsqueeze(-1)
        found.scatter_add_(-1, local.unsqueeze(-1), (-grad * is_here).unsqueeze(-1))
        return found, None, None, None
