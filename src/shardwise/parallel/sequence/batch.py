"""Splits a batch of whole samples into the part of each rank of a sequence line.

Every rank of a line reads whole samples, so each knows all documents, padding and labels, and masks and counts of
tokens need no messages.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from shardwise.comm import Line, require_same_batch
from shardwise.errors import ConfigError
from shardwise.parallel.library_model import pretrained_in
from shardwise.parallel.sequence import hugging_face
from shardwise.parallel.sequence.attention import Sample
from shardwise.parallel.sequence.hugging_face import takes_shifted_labels
from shardwise.parallel.sequence.parts import mark_cut
from shardwise.parallel.sequence.token_layout import Layout

Tensor = torch.Tensor
IGNORED = -100
_PADDING: dict[str, float] = {"input_ids": 0, "inputs_embeds": 0.0, "labels": IGNORED, "position_ids": 0}
"""The values with which tensors are padded to a multiple of the ranks."""


class Splitter:
    """Splits the batches of one model."""

    def __init__(self, model: nn.Module, line: Line, *, is_zigzag: bool) -> None:
        self._line = line
        self._is_zigzag = is_zigzag
        parameters = inspect.signature(model.forward).parameters
        takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
        self._is_pretrained = bool(pretrained_in(model))
        self._shifts = takes_shifted_labels(model) and (takes_any or "shift_labels" in parameters)
        """Whether the model accepts labels that are already shifted."""
        self._loses_labels = self._is_pretrained and not self._shifts
        """Whether the model computes its loss in a way that is wrong for the tokens of one rank."""
        self.adds_positions = hugging_face.takes_positions(model) and (takes_any or "position_ids" in parameters)
        """Whether the model takes `position_ids`, as transformers has them, which a batch may leave out."""
        self._is_eager = hugging_face.is_eager(model)
        self._model = model
        self._name = type(model).__name__
        self._signature = inspect.signature(model.forward)

    def split(self, batch: Any, documents: Tensor | None) -> tuple[Any, Sample]:
        """This rank's part of `batch`, as `Engine.split_sequence` describes it, and what attention needs to know of the
        whole.

        All ranks of the line must call, with the same batch.
        """
        if isinstance(batch, torch.Tensor):
            (part,), sample = self._split_tensors((batch,), documents)
            return part, sample
        if isinstance(batch, Mapping):
            return self._split_mapping(dict(batch), documents)
        if isinstance(batch, list | tuple) and batch and all(isinstance(one, torch.Tensor) for one in batch):
            parts, sample = self._split_tensors(batch, documents)
            return type(batch)(parts), sample
        raise ConfigError(
            f"engine.split_sequence takes a tensor [batch, tokens, ...], a list or tuple of such, or a dict with "
            f"input_ids, not a {type(batch).__name__}."
        )

    def whole_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """The arguments of a call of the model by name, if they are a batch as transformers has them."""
        called = {**self._signature.bind_partial(*args, **kwargs).arguments}
        for name, parameter in self._signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                called |= called.pop(name, {})
            elif parameter.kind is inspect.Parameter.VAR_POSITIONAL and called.pop(name, ()):
                return None
        called = {name: value for name, value in called.items() if value is not None}
        return called if "input_ids" in called or "inputs_embeds" in called else None

    # -- tensors without names --------------------------------------------------------------------------

    def _split_tensors(self, tensors: Sequence[Tensor], documents: Tensor | None) -> tuple[list[Tensor], Sample]:
        named = {f"tensor {number}": tensor for number, tensor in enumerate(tensors)}
        num_tokens = _num_tokens(named)
        odd = [name for name, tensor in named.items() if tensor.dim() < 2 or tensor.shape[1] != num_tokens]
        if odd:
            raise ConfigError(
                f"engine.split_sequence cuts dimension 1 of every tensor, which has {num_tokens} tokens in the first "
                f"and not in {', '.join(odd)}. Leave out tensors without a token dimension."
            )
        require_same_batch({**named, **_maybe(documents=documents)}, self._line)
        self._require_no_padding(num_tokens, ", ".join(named))
        layout = Layout(num_tokens, self._line.num_ranks, self._is_zigzag)
        sample = Sample(layout, _checked_documents(documents, tensors[0]))
        return [mark_cut(layout.take(tensor, self._line.index), tensor, layout) for tensor in tensors], sample

    # -- tensors by name --------------------------------------------------------------------------------

    def _split_mapping(self, batch: dict[str, Any], documents: Tensor | None) -> tuple[dict[str, Any], Sample]:
        tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
        require_same_batch({**tensors, **_maybe(documents=documents)}, self._line)
        hugging_face.check_batch(self._model, tensors)
        kept_logits = batch.get("logits_to_keep")
        if self._is_pretrained and (isinstance(kept_logits, torch.Tensor) or kept_logits):
            raise ConfigError(
                f"logits_to_keep chooses among all tokens, of which {self._name} has a part on each rank along sp. "
                f"Leave it out, and give tokens that do not count the label {IGNORED}; or generate inside "
                f"engine.inference(), where sequences are whole."
            )
        num_tokens = _num_tokens(tensors)
        first = tensors.get("input_ids", tensors.get("inputs_embeds", next(iter(tensors.values()))))
        mask = batch.pop("attention_mask", None)
        kept = self._kept(mask, first, num_tokens)
        documents = _checked_documents(documents, first)
        were_given = self._add_positions(batch, first, mask)
        if documents is None and mask is None and were_given:  # as transformers does
            documents = _documents_of(batch["position_ids"], len(first))
        self._shift_labels(batch)
        self._check_eager(batch, kept)
        missing = -num_tokens % Layout.multiple(self._line.num_ranks, is_zigzag=self._is_zigzag)
        if missing:
            batch = self._padded(batch, num_tokens, missing)
            kept = torch.ones(first.shape[:2], dtype=torch.bool, device=first.device) if kept is None else kept
            kept = functional.pad(kept, (0, missing), value=False)
            documents = None if documents is None else functional.pad(documents, (0, missing), value=-1)
        layout = Layout(num_tokens + missing, self._line.num_ranks, self._is_zigzag)
        cut = {name: self._own_part(value, layout) for name, value in batch.items()}
        return cut, Sample(layout, documents, kept, missing)

    def _own_part(self, value: Any, layout: Layout) -> Any:
        is_by_token = isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[1] == layout.num_tokens
        return mark_cut(layout.take(value, self._line.index), value, layout) if is_by_token else value

    def _kept(self, mask: Any, first: Tensor, num_tokens: int) -> Tensor | None:
        """Which tokens are not padding according to the batch; `None` if all are."""
        if mask is None:
            return None
        if not isinstance(mask, torch.Tensor) or mask.shape != (len(first), num_tokens):
            shape = list(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
            raise ConfigError(
                f"attention_mask is {shape}, but over a split sequence it marks the tokens that are not padding: "
                f"[{len(first)}, {num_tokens}]. Give packed documents as documents=."
            )
        kept = mask.bool()
        return None if kept.device.type == "cpu" and bool(kept.all()) else kept

    def _add_positions(self, batch: dict[str, Any], first: Tensor, mask: Tensor | None) -> bool:
        """Give the model the positions of the whole batch. Returns whether the batch had them."""
        positions, num_tokens = batch.get("position_ids"), first.shape[1]
        if positions is None and self.adds_positions:
            batch["position_ids"] = hugging_face.positions(self._model, first, mask)
        elif positions is not None and (positions.dim() != 2 or positions.shape[1] != num_tokens):
            raise ConfigError(
                f"position_ids is {list(positions.shape)}; over a split sequence it is [batch, {num_tokens}]."
            )
        return positions is not None and self.adds_positions

    def _check_eager(self, batch: Mapping[str, Any], kept: Tensor | None) -> None:
        """Refuse labels that count where the model's eager attention differs; see [Note: eager attention]."""
        labels = batch.get("shift_labels")
        if not self._is_eager or kept is None or labels is None:
            return
        if bool((hugging_face.sees_nothing(self._model, kept) & (labels != IGNORED)).any()):
            raise ConfigError(
                f"A label counts for padding that sees no token, such as the padding before a row's first token, which "
                f"predicts it. {self._name} has attn_implementation='eager', where such padding gets the mean of all "
                f"tokens; over a split sequence it gets zeros. Set such labels to {IGNORED}, including that of a row's "
                f"first token, or build the model with attn_implementation='sdpa'."
            )

    def _shift_labels(self, batch: dict[str, Any]) -> None:
        """Shift transformers' labels here, because the next token of a position may be on another rank."""
        if batch.get("labels") is None:
            return
        if self._loses_labels:
            raise ConfigError(
                f"{self._name} is not a causal language model that takes shift_labels, so its own loss would be that "
                f"of this rank's tokens only. Leave labels out of the batch, split them as a separate tensor, and "
                f"compute the loss from the logits with engine.mean_over_tokens."
            )
        if self._shifts and "shift_labels" not in batch:
            shifted = functional.pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:]
            batch["shift_labels"] = shifted
            num_counted = batch.get("num_items_in_batch")
            if num_counted is None:
                num_counted = int((shifted != IGNORED).sum())
            batch["num_items_in_batch"] = float(num_counted) / self._line.num_ranks

    def _padded(self, batch: dict[str, Any], num_tokens: int, missing: int) -> dict[str, Any]:
        padded = {}
        for name, value in batch.items():
            is_by_token = isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[1] == num_tokens
            if is_by_token and name not in (*_PADDING, "shift_labels"):
                self._require_no_padding(num_tokens, name)
            padded[name] = _pad(value, missing, _PADDING.get(name, IGNORED)) if is_by_token else value
        return padded

    # -- checks -----------------------------------------------------------------------------------------

    def _require_no_padding(self, num_tokens: int, names: str) -> None:
        multiple = Layout.multiple(self._line.num_ranks, is_zigzag=self._is_zigzag)
        if num_tokens % multiple:
            raise ConfigError(
                f"{num_tokens} tokens do not divide into {multiple} parts for the {self._line.num_ranks} ranks of axis "
                f"{self._line.axis!r}, and the padding for {names} is not known. Pad to a multiple of "
                f"{multiple}, or give a dict of {', '.join(_PADDING)} and attention_mask."
            )


def _num_tokens(tensors: Mapping[str, Tensor]) -> int:
    order = sorted(tensors, key=lambda name: name not in ("input_ids", "inputs_embeds"))
    for name in order:
        if tensors[name].dim() > 1:
            return tensors[name].shape[1]
    raise ConfigError(
        "engine.split_sequence found no tensor [batch, tokens, ...] in the batch to split by tokens, such as input_ids."
    )


def _checked_documents(documents: Tensor | None, first: Tensor) -> Tensor | None:
    if documents is None:
        return None
    if documents.shape != first.shape[:2] or documents.is_floating_point():
        raise ConfigError(
            f"documents is {documents.dtype} {list(documents.shape)}; it is the number of each token's document, "
            f"whole numbers {list(first.shape[:2])}."
        )
    return documents.to(first.device)


def _documents_of(positions: Tensor, batch_size: int) -> Tensor | None:
    """Document numbers from positions: a new document begins where positions do not increase by one. `None` if there is
    only one document."""
    steps = positions.diff(dim=1) != 1
    if not bool(steps.any()):
        return None
    return functional.pad(steps.cumsum(1), (1, 0)).expand(batch_size, -1)


def _maybe(**tensors: Tensor | None) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _pad(tensor: Tensor, num_tokens: int, value: float) -> Tensor:
    """Append padding to the tokens of dimension 1."""
    return functional.pad(tensor, (*(0, 0) * (tensor.dim() - 2), 0, num_tokens), value=value)
