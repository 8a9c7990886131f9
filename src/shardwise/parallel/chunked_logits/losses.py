"""Losses and log-probabilities of a language model, of which the logits of all tokens never exist."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import nn
from torch.nn import functional

from shardwise.errors import ModelError
from shardwise.parallel.chunked_logits.by_chunks import enter, num_words, over_logits, rows_per_chunk

Tensor = torch.Tensor
Head = nn.Module | Tensor


def chunked_cross_entropy(  # noqa: PLR0913  # the options that losses of language models have
    hidden: Tensor,
    head: Head,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    scale: float = 1.0,
    num_items_in_batch: Tensor | float | None = None,
    chunk_rows: int | None = None,
) -> Tensor:
    """The cross-entropy of `head(hidden)` and `labels`, some rows of logits at a time.

    `hidden` [..., H] are the inputs of the head, `labels` [...] the word of each row: for a causal model
    `hidden[:, :-1]` and `tokens[:, 1:]`. `head` is a module, such as `nn.Linear`, one with adapters, or the embedding
    whose weight it shares; or a weight [V, H] that this rank has whole, with `bias` [V]. Call it where the head is
    called otherwise: in the model's forward. `ignore_index`, `reduction` and `label_smoothing` are those of
    `torch.nn.functional.cross_entropy`. Logits are multiplied by `scale` and capped, `softcap * tanh(logits / softcap)`
    (Gemma 2, arXiv:2408.00118). `z_loss` adds `z_loss * logsumexp(logits) ** 2` to each row that counts (PaLM,
    arXiv:2204.02311). With `num_items_in_batch` the result is the sum divided by it, as in transformers.

    Returns a scalar, or [...] with `reduction="none"`, in fp32 (fp64 for fp64). The memory it takes depends neither on
    the number of words nor, beside `hidden`, on that of tokens: `chunk_rows` rows of logits (default: 64 MiB of fp32,
    or as much as `hidden` takes), and while the backward runs a gradient of the weight. Logits are computed again in
    the backward. Every rank that calls the head calls; those along `tp` with the same rows.

    Raises `ModelError` if shapes do not fit, or the head does not say how many words it has.
    """
    rows, of_rows, chunk_rows = _rows(hidden, head, labels, chunk_rows)

    def losses(logits: Tensor, words: Tensor) -> tuple[Tensor]:
        wide = shaped(logits, scale, softcap)
        found = functional.cross_entropy(
            wide, words, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing
        )
        if z_loss:
            found = found + z_loss * wide.logsumexp(-1).square().masked_fill(words == ignore_index, 0.0)
        return (found,)

    (found,) = over_logits(head, rows, losses, (of_rows,), bias=bias, chunk_rows=chunk_rows)
    if num_items_in_batch is not None:
        return found.sum() / num_items_in_batch
    if reduction == "none":
        return found.view(labels.shape)
    return found.sum() if reduction == "sum" else found.sum() / (of_rows != ignore_index).sum()


@overload
def chunked_log_probs(
    hidden: Tensor,
    head: Head,
    tokens: Tensor,
    *,
    bias: Tensor | None = ...,
    temperature: float = ...,
    softcap: float | None = ...,
    scale: float = ...,
    with_entropy: Literal[False] = ...,
    chunk_rows: int | None = ...,
) -> Tensor: ...
@overload
def chunked_log_probs(
    hidden: Tensor,
    head: Head,
    tokens: Tensor,
    *,
    bias: Tensor | None = ...,
    temperature: float = ...,
    softcap: float | None = ...,
    scale: float = ...,
    with_entropy: Literal[True],
    chunk_rows: int | None = ...,
) -> tuple[Tensor, Tensor]: ...
def chunked_log_probs(  # noqa: PLR0913
    hidden: Tensor,
    head: Head,
    tokens: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    scale: float = 1.0,
    with_entropy: bool = False,
    chunk_rows: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The log-probability of each of `tokens` [...] by `head(hidden)`, some rows of logits at a time, as DPO and GRPO
    need it; with `with_entropy` also the entropy of each row, in nats.

    Logits are scaled, capped, and then divided by `temperature`. All else, ranks and errors too, is as in
    `chunked_cross_entropy`; both results are differentiable, [...] in fp32 (fp64 for fp64). Give tokens that do not
    count any word, and mask the result.
    """
    rows, of_rows, chunk_rows = _rows(hidden, head, tokens, chunk_rows)

    def picked(logits: Tensor, words: Tensor) -> tuple[Tensor, ...]:
        wide = shaped(logits, scale, softcap) / temperature
        if not with_entropy:
            return (-functional.cross_entropy(wide, words, reduction="none"),)
        log_probs = wide.log_softmax(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        return log_probs.gather(-1, words.unsqueeze(-1)).squeeze(-1), entropy

    found = over_logits(head, rows, picked, (of_rows,), bias=bias, chunk_rows=chunk_rows)
    log_probs, *entropy = (one.view(tokens.shape) for one in found)
    return (log_probs, entropy[0]) if with_entropy else log_probs


def shaped(logits: Tensor, scale: float = 1.0, softcap: float | None = None) -> Tensor:
    """Logits in fp32 at least, scaled and capped."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    if scale != 1.0:
        wide = wide * scale
    return wide if softcap is None else softcap * torch.tanh(wide / softcap)


def _rows(hidden: Tensor, head: Head, words: Tensor, chunk_rows: int | None) -> tuple[Tensor, Tensor, int]:
    """The input of the head [N, H], the word of each row [N], and how many rows are computed at a time."""
    entered = enter(head, hidden)
    if entered.shape[:-1] != words.shape:
        raise ModelError(
            f"Hidden states {list(entered.shape)} and words {list(words.shape)} do not belong to the same tokens. Give "
            f"[..., H] and [...], for a causal model hidden[:, :-1] and tokens[:, 1:]."
        )
    size = num_words(head)
    if chunk_rows is None:
        if size is None:
            raise ModelError(
                f"{type(head).__name__} does not say how many words it has (out_features). Pass chunk_rows, the number "
                f"of rows to compute at a time."
            )
        chunk_rows = rows_per_chunk(entered, size)
    return entered.flatten(0, -2), words.flatten(), chunk_rows
