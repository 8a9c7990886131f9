"""What of sequence parallelism outlives a plan, and every engine has: which outputs a loop has asked for, and of which
batches the tensors are that were split."""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shardwise.errors import StateError
from shardwise.runtime.nested import tensors_in

if TYPE_CHECKING:
    from shardwise.parallel.sequence.attention import Sample

Tensor = torch.Tensor
_NUM_REMEMBERED = 1024
"""For how many of the latest tensors the batch is remembered."""


@dataclass
class WholeOutputs:
    """Whether a model that splits batches itself should return the outputs for the whole batch."""

    are_asked_for: bool = False
    with_tokens: bool = True
    in_training: bool = False
    """Whether pipeline stages send logits beside a loss in training too."""

    def ask(self, *, tokens: bool, training: bool) -> None:
        self.are_asked_for, self.with_tokens, self.in_training = True, tokens, training


class SplitBatches:
    """The tensors that were returned by splits, with their samples. It outlives the plan and the world that split them:
    where a rank is lost between a split and its forward, the forward is repeated with what was split."""

    def __init__(self) -> None:
        self.last: Sample | None = None
        """The sample of the batch that was split, or computed, last."""
        self._recent: deque[tuple[weakref.ref[Tensor], Sample]] = deque(maxlen=_NUM_REMEMBERED)
        self._division: tuple[int, bool] | None = None

    def divided(self, num_ranks: int, *, is_zigzag: bool) -> SplitBatches:
        """For tokens that are divided so from now on: without those that were divided otherwise."""
        division = num_ranks, is_zigzag
        if self._division not in (None, division):
            return SplitBatches().divided(num_ranks, is_zigzag=is_zigzag)
        self._division = division
        return self

    def note(self, part: Any, batch: Any, sample: Sample) -> None:
        """Remember the tensors of `part` that are not in `batch`; other parts may contain those too."""
        whole = {id(tensor) for tensor in tensors_in(batch)}
        cut = [tensor for tensor in tensors_in(part) if id(tensor) not in whole]
        self._recent.extend((weakref.ref(tensor), sample) for tensor in cut)

    def note_copy(self, copy: object, of: object) -> None:
        """Remember the tensors of `copy`, which are those of `of` in the same order, with samples of their own."""
        samples: dict[int, Sample] = {}
        for mine, theirs in zip(tensors_in(copy), tensors_in(of), strict=True):
            sample = self.sample_of(theirs)
            if sample is not None:
                self.note(mine, (), samples.setdefault(id(sample), sample.cloned()))

    def sample_of(self, inputs: object) -> Sample | None:
        """The sample of the first tensor in `inputs` that was returned by a split."""
        for tensor in tensors_in(inputs):
            for given, sample in reversed(self._recent):
                if given() is tensor:
                    return sample
        return None

    def require_one(self) -> None:
        """Raise `StateError` if inputs derived from a split batch could belong to different samples."""
        alive = [sample for given, sample in self._recent if given() is not None]
        if any(not sample.is_attended_like(alive[-1]) for sample in alive):
            raise StateError(
                "The model is called with tensors that engine.split_sequence has not returned, and the batches that "
                "it has split differ in length, documents or padding. Call the model with what it returned, or split "
                "each batch right before its forward."
            )
