"""What all ranks must agree on before an update: the gradient norm, and which parameters have a gradient.

[Note: the verdict] One small vector is summed over all ranks once per step. It has the squared norm of the elements
that a rank is responsible for, whether the rank still has gradients that no program has reduced, and for every
parameter whether any backward reached it on this rank. A parameter that no rank reached is not updated at all, as in a
plain PyTorch loop, where its `.grad` would be None. One that only some ranks reached is updated by its owner
everywhere.

[Note: one number for two] Ranks with gradients left to reduce and ranks with news are counted in the same element, the
latter in units of `_NEWS`. The fp32 count is exact while there are fewer than that of either.

[Note: the whole model] Along model axes ranks hold different parts of one model but must make the same decisions. So
the norm, the news and the gradients left are summed over those axes too. Every element of the unsplit model counts
once; one that lies on several ranks counts fractionally on each. Which parameters were touched is summed only among
ranks with the same list of parameters; pipeline stages have different lists.

[Note: agreed by messages] On a CPU the host reads the sum, which costs nothing. On a device that would wait, in every
step, for all the work that the host has queued. What the host must know to go on (which parameters have a gradient,
whether some are left to reduce, whether buffers changed) is known to the hosts, so they exchange it in a message, of
one byte if nothing has changed since the last one. The norm stays on the device until its value is needed
(`LateFloat`), and gradients are clipped there. Only what the device alone knows is read at once, in one read: whether
fp16 has overflowed, and whether a buffer on the device has changed.

One read of the sum in each step would be simpler, but the device idles then from the last kernel of the backward until
the host has queued the update. `tests/ranks/test_host_waits.py` counts waits by call site.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Protocol

import torch

from shardwise.comm import Collectives, Exchange, Group, sum_small
from shardwise.memory import Flat, torch_dtype
from shardwise.optim.precision.late_float import LateFloat, Norm, root
from shardwise.program import verdict_dtype, verdict_numel

Tensor = torch.Tensor
_NEWS = 4096.0
_LEFT, _HAS_NEWS, _READS, _SAME_MARKS = 1, 2, 4, 8
_SLICE_NUMEL = 2**18


class News(Protocol):
    """A part of the engine that may have a change to announce to all ranks, once per step."""

    def has_news(self) -> bool:
        """As far as the host knows."""
        ...

    def news_on_device(self) -> Tensor | None:
        """News that only the device knows of: a bool without dimensions; `None` if there cannot be any."""
        ...


class NoNews:
    """Never has any news."""

    def has_news(self) -> bool:
        return False

    def news_on_device(self) -> None:
        return


@dataclass(frozen=True)
class Agreeing:
    """The ranks that agree on one verdict, those of one island. Among them, `peers` are the places of those with the
    same list of parameters; along the axes `stages`, lists differ. With `exchange` they agree by messages; see the
    note."""

    peers: frozenset[int] = frozenset()
    stages: frozenset[str] = frozenset()
    exchange: Exchange | None = None


class Verdict:
    """The verdict of one step at a time, over the trainable flat buffers of one model.

    With `must_know_norm` the norm decides whether the step is taken. `complete` is called before the norm
    is computed, when all gradients are due.
    """

    def __init__(
        self,
        flats: Sequence[Flat],
        collectives: Collectives,
        groups: Mapping[str, Group],
        news: News,
        agreeing: Agreeing,
        *,
        must_know_norm: bool = False,
        complete: Callable[[], None] | None = None,
    ) -> None:
        self._flats = [flat for flat in flats if flat.spec.trainable]
        self._collectives = collectives
        self._groups = groups
        self._news = news
        self._exchange = agreeing.exchange
        self._peers = agreeing.peers
        self._stages = agreeing.stages
        self._must_know_norm = must_know_norm
        self._complete = complete
        self._device = flats[0].device if flats else torch.device("cpu")
        self._dtype = torch_dtype(verdict_dtype([flat.spec for flat in self._flats]))
        self._vector: Tensor | None = None
        self._marked: list[bool] | None = None
        """Which parameters this rank had touched when `_vector_of_marks` was made, if the host sends such a one."""
        self._vector_of_marks = torch.empty(0, device="cpu")
        self._squares: list[tuple[str, Tensor]] = []
        self._reads = False
        """Whether this rank has queued a question on its device, in this step, whose answer the host needs."""
        self._marks_sent: bytes | None = None
        self._marks: dict[int, int] = {}
        """By place: which parameters that rank has touched, one byte each, from its last message that had them."""
        self.is_incomplete = False
        """Whether some rank still has gradients to reduce, so that this verdict was too early."""
        self.is_news = False
        """Whether any rank had news; see [Note: one number for two]."""

    def sum_over(self, axis: str) -> None:
        """Sum the vectors of the ranks along `axis`. All of them call it, once per axis and step."""
        if self._vector is None:
            self._vector = self._own()
        vector, group = self._vector, self._groups[axis]
        if axis in self._stages:  # lists and dtypes differ between stages
            vector[:2] = sum_small(vector[:2].double(), self._collectives, group, "verdict")
        else:
            self._vector = sum_small(vector, self._collectives, group, "verdict")

    def decide(self) -> Norm:
        """Record which parameters were touched on any rank, and return the global 2-norm of the gradients."""
        vector = self._own() if self._vector is None else self._vector
        self._vector = None
        if self._exchange is None:
            squared, counts, *touched = vector.tolist()
            self._collectives.journal.check()  # see [Note: garbage after a fault]
            self._record(counts, list(map(bool, touched)))
            return root(squared)
        flags = self._agree(self._exchange)
        if not flags & _READS:
            return LateFloat(vector[0])
        squared, counts = vector[:2].tolist()
        self._collectives.journal.check()
        self.is_news |= counts >= _NEWS
        return root(squared)

    def _record(self, counts: float, touched: Sequence[bool]) -> None:
        self.is_news, self.is_incomplete = counts >= _NEWS, counts % _NEWS > 0
        start = 0
        for flat in self._flats:
            flat.grads.touched_anywhere = list(touched[start : start + len(flat.slots)])
            start += len(flat.slots)

    def _own(self) -> Tensor:
        """This rank's summand. Ranks with the same elements share them in the norm; see [Note: the whole model], and
        [Note: each takes its share] in `memory/flat_gradients.py`."""
        if self._complete is not None:
            self._complete()
        touched = self._touched_here()
        device = self._device
        if self._exchange is None:
            if touched != self._marked:  # it is the same in most steps
                self._marked = touched
                self._vector_of_marks = torch.tensor([0.0, 0.0, *map(float, touched)], dtype=self._dtype, device=device)
            vector = self._vector_of_marks.clone()
            counts = float(self._has_left()) + _NEWS * self._news.has_news()
            if counts:
                vector[1] = counts
        else:
            vector = torch.zeros(2 + len(touched), dtype=self._dtype, device=device)
            news = self._news.news_on_device()
            self._reads = news is not None or self._must_know_norm
            if news is not None:
                vector[1] = news * _NEWS
        assert vector.numel() == verdict_numel(len(touched))
        squared, self._squares = vector[0], []
        for flat in self._flats:
            noted = flat.grads.noted_squares()
            for index, (parts, copies) in enumerate(flat.grads.squared_ranges()):
                own = sum_of_all_squares(parts, self._dtype) if noted is None else noted[index].to(self._dtype)
                own = own if copies == 1 else own / copies
                self._squares.append((flat.name, own))
                squared += own
        return vector

    def squares(self) -> list[tuple[str, float]]:
        """This rank's summands of the square of the last step's norm, with the names of their flat buffers, in the
        order of the forward. On a device the host waits."""
        return [(name, float(square)) for name, square in self._squares]

    def _touched_here(self) -> list[bool]:
        touched: list[bool] = []
        for flat in self._flats:
            touched += flat.grads.touched_here
        return touched

    def _has_left(self) -> bool:
        return any(flat.grads.has_fresh() for flat in self._flats)

    def _agree(self, exchange: Exchange) -> int:
        """Exchange what each host knows and record the result; returns the flags of all ranks combined."""
        mine = bytes(self._touched_here())
        is_same = mine == self._marks_sent
        flags = self._has_left() * _LEFT | self._news.has_news() * _HAS_NEWS | self._reads * _READS
        messages = exchange(bytes([flags | is_same * _SAME_MARKS]) + (b"" if is_same else mine))
        self._marks_sent = mine
        together = 0
        for place, message in enumerate(messages):
            together |= message[0]
            if not message[0] & _SAME_MARKS and (place in self._peers or not self._peers):
                self._marks[place] = int.from_bytes(message[1:], "little")
        touched = reduce(or_, set(self._marks.values())).to_bytes(len(mine), "little")
        counts = float(bool(together & _LEFT)) + _NEWS * bool(together & _HAS_NEWS)
        self._record(counts, list(map(bool, touched)))
        return together


def sum_of_all_squares(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    """In `dtype`, of tensors of one dtype on one device; they are not none."""
    if len(parts) == 1:
        return sum_of_squares(parts[0], dtype)
    if parts[0].device.type == "cpu" and parts[0].dtype != dtype:
        return torch.stack([sum_of_squares(one, dtype) for one in parts]).sum()
    return torch.stack(torch._foreach_norm(parts, dtype=dtype)).square().sum()


def sum_of_squares(due: Tensor, dtype: torch.dtype) -> Tensor:
    """In `dtype`. Torch's norm of a narrower tensor on the host adds one element after the other: of 16 M in bf16 it is
    off by 3e-4, and takes five times as long as widening slices that stay in the cache."""
    if due.device.type != "cpu" or due.dtype == dtype or not due.numel():
        norm: Tensor = torch.linalg.vector_norm(due, dtype=dtype)
        return norm.square()
    numel = _SLICE_NUMEL * max(1, torch.get_num_threads() // 2)  # 16 threads took 42 ms for 67 M in slices of 2^18
    squares = [torch.linalg.vector_norm(part.to(dtype)).square() for part in torch.split(due, numel)]
    return torch.stack(squares).sum()


def clip(flats: Sequence[Flat], norm: Norm, max_norm: float) -> bool:
    """Scale the gradients so that their global norm is at most `max_norm`, as `torch.nn.utils.clip_grad_norm_` does.

    Returns whether that may have changed them. A norm that is still on its device stays there.
    """
    if isinstance(norm, LateFloat) and not norm.is_known:
        scale_gradients(flats, (max_norm / (norm.on_device() + 1e-6)).clamp(max=1.0))
        return True
    factor = max_norm / (float(norm) + 1e-6)
    if factor < 1 or math.isnan(factor):
        scale_gradients(flats, factor)
        return True
    return False


def scale_gradients(flats: Sequence[Flat], factor: float | Tensor) -> None:
    """Multiply every gradient, once it is where the update needs it, by a number or a tensor without dimensions.

    Gradients that are updated on the host make this wait if the factor is still on its device.
    """
    dues = [(part, flat.spec.updates_below) for flat in flats for part, _ in due_parts([flat])]
    here = [due for due, is_below in dues if not is_below]
    there = [due for due, is_below in dues if is_below]
    if here:
        torch._foreach_mul_(here, factor)
    if there:
        torch._foreach_mul_(there, float(factor))


def due_parts(flats: Sequence[Flat]) -> list[tuple[Tensor, float]]:
    """The parts of the gradients that are due on this rank, each with the number of ranks that have the same
    elements: see [Note: norms of summands] in `program/spec.py`."""
    return [(part, copies) for flat in flats for parts, copies in flat.grads.due_ranges() for part in parts]


def copies_of(flat: Flat, index: int) -> float:
    """How many ranks have each element of a parameter's gradient, where the update needs it."""
    box = flat.slots[index].box
    return flat.spec.copies_of_due * (1 if box is None else box.copies)
