"""Cross-entropy of logits that are split by vocabulary, or whole."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from shardwise.errors import ModelError
from shardwise.parallel.tensor.forwards import Column
from shardwise.parallel.tensor.loss_of_parts import IGNORED, Reduction
from shardwise.parallel.tensor.split_logits import CutLogits, cross_entropy_of_cut


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    head: nn.Module | None = None,
    *,
    weight: Tensor | None = None,
    ignore_index: int = IGNORED,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """`torch.nn.functional.cross_entropy` for logits that are split by vocabulary.

    `logits` [N, vocabulary] are the output of a head of the style `vocabulary_cut`. `targets` [N] are indices into the
    whole vocabulary, `weight` [vocabulary] a weight of each, the same on all ranks of the line. Returns a scalar, or
    [N] with `reduction="none"`, the same on all ranks, computed at least in fp32. Each rank sends 3 numbers per row,
    with `label_smoothing` 4, and no logits. For whole logits this is torch's function, so a model can use it in either
    case.

    Raises `ModelError` if the `head` that is given gathers its logits.
    """
    options: dict[str, Any] = {"ignore_index": ignore_index, "reduction": reduction}
    options["label_smoothing"] = label_smoothing
    if isinstance(logits, CutLogits):
        return cross_entropy_of_cut(logits, targets, weight, **options)
    forward = None if head is None else head.__dict__.get("forward")
    if isinstance(forward, Column) and not forward.is_cut:
        raise ModelError(
            "The head given to cross_entropy() gathers its logits, so they are whole. Give it the style vocabulary_cut "
            "in tensor.plan, or use torch's cross_entropy."
        )
    return functional.cross_entropy(logits, targets, weight, **options)
