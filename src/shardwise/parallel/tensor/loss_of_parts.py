"""Cross-entropy of logits that are split by vocabulary over ranks (Megatron-LM, arXiv:1909.08053, section 3)."""

from __future__ import annotations

from typing import Any, Literal

import torch

from shardwise.comm import Line
from shardwise.parallel.tensor.functions import own_words
from shardwise.plan.placement import Span

Tensor = torch.Tensor
Reduction = Literal["mean", "sum", "none"]
IGNORED = -100


def cross_entropy_of_parts(  # noqa: PLR0913  # torch's options
    local: Tensor,
    targets: Tensor,
    line: Line,
    own: Span,
    num_words: int,
    *,
    weight: Tensor | None = None,
    ignore_index: int = IGNORED,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """`torch.nn.functional.cross_entropy`, computed at least in fp32.

    `local` [N, this rank's vocabulary] are columns `own` of the logits [N, num_words]; `targets` [N] and `weight`
    [num_words] are the same on all ranks of the line. Each rank sends 3 numbers per row, and one more with
    `label_smoothing`.
    """
    wide = local if local.dtype == torch.float64 else local.float()
    is_counted = targets != ignore_index
    wanted = targets.masked_fill(~is_counted, 0)
    require_words(wanted, num_words)
    weights = wide.new_ones(num_words) if weight is None else weight.to(wide.dtype)
    of_own = weights[own.as_slice] if label_smoothing else None
    found: list[Tensor] = list(_Rows.apply(wide, wanted, line, own, of_own))  # type: ignore[no-untyped-call]  # torch's own
    log_sums, logits, *weighted = found
    of_target = weights[wanted]
    losses = (log_sums - logits) * of_target
    if label_smoothing:
        of_all_words = log_sums * weights.sum() - weighted[0]
        losses = losses * (1 - label_smoothing) + of_all_words * (label_smoothing / num_words)
    losses = losses.masked_fill(~is_counted, 0.0)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / of_target.masked_fill(~is_counted, 0.0).sum()


def require_words(index: Tensor, num_words: int) -> None:
    """Raise `RuntimeError`, on a device when it gets there, if an index is no word: no rank would have it."""
    is_word = ((index >= 0) & (index < num_words)).all()
    torch._assert_async(is_word, f"An index is outside of the vocabulary of {num_words} words.")


class _Rows(torch.autograd.Function):
    """Of each row: the logarithm of the sum of exponentials, the target's logit, and the sum of all logits times
    `weight`, this rank's part of it, if it is given. All logits are counted from the largest of the row."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, line: Line, own: Span, weight: Tensor | None) -> Any:
        largest = line.largest(logits.detach().amax(-1))
        shifted = logits.detach() - largest.unsqueeze(-1)
        local, is_here = own_words(targets, own)
        wanted = shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(~is_here, 0.0)
        weighted = [] if weight is None else [(shifted * weight).sum(-1)]
        exponentials = shifted.exp_()
        sums, *others = line.sum(torch.stack([exponentials.sum(-1), wanted, *weighted])).unbind(0)
        probabilities = exponentials.div_(sums.unsqueeze(-1))
        ctx.save_for_backward(probabilities, local, is_here, weight)
        return sums.log(), *(other.clone() for other in others)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        probabilities, local, is_here, weight = ctx.saved_tensors
        of_sums, of_targets, *of_weighted = (grad.unsqueeze(-1) for grad in grads)
        found = probabilities * of_sums
        found.scatter_add_(-1, local.unsqueeze(-1), of_targets * is_here.unsqueeze(-1))
        if of_weighted:
            found += of_weighted[0] * weight
        return found, None, None, None, None
