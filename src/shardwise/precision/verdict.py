"""What all ranks must agree on before an update: the gradient norm, and which parameters have a gradient.

[Note: the verdict] One small vector is summed over all ranks once per step: the squared norm of the elements
a rank is responsible for, whether gradients lie here that no program has reduced, then for every parameter whether
any backward reached it here. A parameter that no rank reached is not updated at all, as in a plain PyTorch loop,
where its `.grad` would be None. One that only some ranks reached is updated by its owner everywhere.

[Note: one number for two] Ranks with something to reduce and ranks with news are counted in one element, the latter in
units of `_NEWS`. fp32 counts exactly as long as either are fewer than that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from shardwise.comm import Collectives, Group, sum_small
from shardwise.program import verdict_dtype, verdict_numel
from shardwise.storage import Flat, torch_dtype

_NEWS = 4096.0


class Verdict:
    """The verdict of one step at a time, over the trainable flat buffers of one model."""

    def __init__(
        self,
        flats: Sequence[Flat],
        collectives: Collectives,
        groups: Mapping[str, Group],
        has_news: Callable[[], bool] | None = None,
    ) -> None:
        self._flats = [flat for flat in flats if flat.spec.trainable]
        self._collectives = collectives
        self._groups = groups
        self._vector: torch.Tensor | None = None
        self._has_news = has_news
        self.is_incomplete = False
        """Whether some rank still has gradients to reduce, so that this verdict was early."""
        self.is_news = False
        """Whether `has_news` was true on some rank; see [Note: one number for two]."""

    def sum_over(self, axis: str) -> None:
        """Add up what the ranks along `axis` say. All of them call, once per axis and step."""
        if self._vector is None:
            self._vector = self._own()
        self._vector = sum_small(self._vector, self._collectives, self._groups[axis], "verdict")

    def pronounce(self) -> float:
        """Settle which parameters were touched anywhere and return the global 2-norm of the gradients."""
        vector = self._own() if self._vector is None else self._vector
        self._vector = None
        squared, told, *touched = vector.tolist()
        self._collectives.journal.check()  # see [Note: garbage after a fault]
        self.is_news, self.is_incomplete = told >= _NEWS, told % _NEWS > 0
        start = 0
        for flat in self._flats:
            flat.touched = [count > 0 for count in touched[start : start + len(flat.slots)]]
            start += len(flat.slots)
        return math.sqrt(squared) if squared >= 0 else math.nan

    def _own(self) -> torch.Tensor:
        """This rank's summand. Ranks that hold the same elements share in their norm."""
        touched = [float(mark) for flat in self._flats for mark in flat.touched]
        device = self._flats[0].device if self._flats else torch.device("cpu")
        told = float(any(flat.has_partial_inbox() for flat in self._flats))
        if self._has_news is not None and self._has_news():
            told += _NEWS
        dtype = torch_dtype(verdict_dtype([flat.spec for flat in self._flats]))
        vector = torch.tensor([0.0, told, *touched], dtype=dtype, device=device)
        assert vector.numel() == verdict_numel(len(touched))
        for flat in self._flats:
            if flat.due is not None:
                vector[0] += torch.linalg.vector_norm(flat.due, dtype=dtype) ** 2 / num_copies(flat)
        return vector


def clip(flats: Sequence[Flat], norm: float, max_norm: float) -> bool:
    """Scale the gradients so that their global norm is at most `max_norm`, as `torch.nn.utils.clip_grad_norm_` does.

    Returns whether that changed them.
    """
    factor = max_norm / (norm + 1e-6)
    if factor < 1 or math.isnan(factor):
        scale_gradients(flats, factor)
        return True
    return False


def scale_gradients(flats: Sequence[Flat], factor: float) -> None:
    """Multiply every gradient, once it is where the update needs it."""
    for flat in flats:
        if flat.due is not None:
            flat.due.mul_(factor)


def num_copies(flat: Flat) -> int:
    """On how many ranks each element of the gradient lies, once it is where the update needs it."""
    table = flat.spec.table
    return math.prod(flat.spec.mesh.size(axis) for axis in table.axes if axis not in table.optim.shard)
