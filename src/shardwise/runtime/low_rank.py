"""Sums of gradients of which matrices are sent as thin factors: see [Note: factors] in `program/low_rank.py`."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from shardwise.comm import Collectives, Group, Work
from shardwise.memory import Factors, Flat
from shardwise.program import Factored, FactoredMatrix

Tensor = torch.Tensor


class FactorMessages:
    """The messages of factors of all flat buffers on this rank; each is sent by `send`, or when it is waited for."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._open: FactorMessage | None = None

    def join(self, name: str, part: Tensor, group: Group, arrive: Arrive) -> FactorMessage:
        """The message that is being made, with `part` of the flat buffer called `name` added; `arrive` gets its sum."""
        if self._open is None or self._open.is_sent:
            self._open = FactorMessage(self._collectives, group)
        self._open.add(name, part, arrive)
        return self._open

    def send(self) -> None:
        """The message is complete. All ranks call."""
        if self._open is not None:
            self._open.send()
        self._open = None

    def forget(self) -> None:
        """What has not been sent never will be."""
        if self._open is not None:
            self._open.drop()
        self._open = None


class FactorMessage:
    """A sum of factors of several flat buffers, and what is made of it once it has come. A `Work`."""

    def __init__(self, collectives: Collectives, group: Group) -> None:
        self._collectives, self._group = collectives, group
        self._names: list[str] = []
        self._parts: list[Tensor] = []
        self._arrivals: list[tuple[int, Arrive]] = []
        """Of each flat buffer: how many elements it gets of the sum, and what takes them."""
        self._work: Work | None = None
        self._sum: Tensor | None = None

    @property
    def is_sent(self) -> bool:
        return self._sum is not None

    def add(self, name: str, part: Tensor, arrive: Arrive) -> None:
        self._names.append(name)
        self._parts.append(part)
        self._arrivals.append((len(part), arrive))

    def send(self) -> None:
        if self.is_sent or not self._parts:
            return
        self._sum = total = self._parts[0] if len(self._parts) == 1 else torch.cat(self._parts)
        self._parts = []
        subject = self._names[0] if len(self._names) == 1 else f"{self._names[0]} to {self._names[-1]}"
        self._work = self._collectives.all_reduce(total, total, self._group, total.dtype, subject)

    def drop(self) -> None:
        self._parts, self._arrivals = [], []

    def wait(self) -> None:
        """See `Work`: may be called again, also after it has raised."""
        self.send()
        if self._work is None:
            return
        self._work.wait()
        assert self._sum is not None
        arrived = torch.split(self._sum, [numel for numel, _ in self._arrivals])
        made = [one for (_, arrive), part in zip(self._arrivals, arrived, strict=True) for one in arrive(part)]
        _orthonormalize(made)
        self._work = None
        self.drop()


class FactoredSum:
    """The sums of one flat buffer on this rank, each in two steps: `project`, then `restore`. All ranks call both."""

    def __init__(self, flat: Flat, factors: Factors, messages: FactorMessages) -> None:
        assert flat.spec.table.low_rank is not None
        self._flat, self._factors, self._messages = flat, factors, messages
        self._by = Factored(flat.spec)
        self._matrices = flat.spec.factored
        self._seed = flat.spec.table.low_rank.seed
        self._projected: dict[int, Tensor] = {}
        """The first factors, of the sum under way."""
        self._has_begun = False

    def project(self, source: Tensor, group: Group) -> Work:
        """Add the first factors to a message, and what is sent as it is. Once waited for, the latter is in `source`."""
        self._begin()
        self._factors.unsent.add_(source)
        message = self._message("project")
        parts, plain = self._projections(message, source)
        for one in self._matrices:
            torch.mm(self._unsent(one), self._factors.cols[one.index], out=parts[one.index])
        for part, of_source in plain:
            part.copy_(of_source)

        def arrive(total: Tensor) -> list[Columns]:
            self._projected, plain = self._projections(total, source)
            for part, of_source in plain:
                of_source.copy_(part)
            return [Columns(part) for part in self._projected.values()]

        return self._messages.join(self._flat.name, message, group, arrive)

    def restore(self, source: Tensor, out: Tensor, group: Group) -> Work:
        """Add the second factors to a message. Once waited for, all sums are in `out`, which may be `source`."""
        message = self._message("restore")
        for one, part in zip(self._matrices, self._cut(message), strict=True):
            torch.mm(self._unsent(one).t(), self._projected[one.index], out=part)

        def arrive(total: Tensor) -> list[Columns]:
            if out is not source:
                out.copy_(source)
            made = [self._keep(one, part, out) for one, part in zip(self._matrices, self._cut(total), strict=True)]
            for span in self._by.plain:
                self._factors.unsent[span.as_slice].zero_()
            self._projected = {}
            return made

        return self._messages.join(self._flat.name, message, group, arrive)

    def _keep(self, one: FactoredMatrix, cols: Tensor, out: Tensor) -> Columns:
        """Multiply the factors into `out`, and keep what was not sent. Returns the second factor for the next step.

        Gradients come divided by the number of ranks, so each rank has sent that share of the sum.

        Where the sum is not finite, what was not sent is forgotten, and the factor stays; where a column of it is zero,
        as of a gradient that is, it stays too, because nothing would ever come out of zero again. No element of the sum
        is larger than all of the second factor's together, as the first's columns are of norm 1: so factors say whether
        it is finite, in a small part of its elements.
        """
        projected = self._projected[one.index]
        total = out[one.span.as_slice].view(one.rows, one.cols)
        torch.mm(projected, cols.t(), out=total)
        unsent, before = self._unsent(one), self._factors.cols[one.index]
        is_finite = torch.isfinite(projected.sum() + 2 * cols.abs().sum())
        unsent.sub_(total, alpha=1 / self._by.num_ranks)
        if not (is_finite.is_cpu and is_finite):  # to ask a device would be to wait for it
            unsent.copy_(torch.where(is_finite, unsent, 0.0))
        return Columns(before, torch.where(is_finite, cols, 0.0), before)

    def _begin(self) -> None:
        """Draw the first second factors, unless a checkpoint had them. The same on all ranks, in any unit."""
        if self._has_begun:
            return
        self._has_begun = True
        for one in self._matrices:
            cols = self._factors.cols[one.index]
            if not cols.any():
                numbers = torch.Generator().manual_seed(_seed_of(self._seed, self._flat.slots[one.index].name))
                cols.copy_(orthonormal(torch.randn(cols.shape, generator=numbers, dtype=cols.dtype, device="cpu")))

    def _unsent(self, one: FactoredMatrix) -> Tensor:
        return self._factors.unsent[one.span.as_slice].view(one.rows, one.cols)

    def _projections(self, message: Tensor, source: Tensor) -> tuple[dict[int, Tensor], list[tuple[Tensor, Tensor]]]:
        """The part of a message for each matrix, and parts of it with the elements of `source` that are sent as they
        are."""
        sizes = [*(one.rows * one.rank for one in self._matrices), *(span.numel for span in self._by.plain)]
        cut = torch.split(message[: sum(sizes)], sizes)
        num = len(self._matrices)
        parts = {one.index: part.view(one.rows, one.rank) for one, part in zip(self._matrices, cut, strict=False)}
        spans = [source[span.as_slice] for span in self._by.plain]
        return parts, list(zip(cut[num:], spans, strict=True))

    def _cut(self, message: Tensor) -> list[Tensor]:
        """The second factor of each matrix in a message."""
        sizes = [one.cols * one.rank for one in self._matrices]
        cut = torch.split(message[: sum(sizes)], sizes)
        return [part.view(one.cols, one.rank) for one, part in zip(self._matrices, cut, strict=True)]

    def _message(self, verb: str) -> Tensor:
        return self._factors.unsent.new_zeros(self._by.numel_of(verb))


class Columns(NamedTuple):
    """A matrix whose columns are to be made orthonormal, from `given` or from itself; zeros are those of
    `otherwise`."""

    out: Tensor
    given: Tensor | None = None
    otherwise: Tensor | None = None


Arrive = Callable[[Tensor], list[Columns]]


def _orthonormalize(every: Sequence[Columns]) -> None:
    """All of one shape at once: they are small, so that the number of calls is what takes time."""
    alike: dict[tuple[torch.Size, bool], list[Columns]] = {}
    for one in every:
        alike.setdefault((one.out.shape, one.otherwise is None), []).append(one)
    for some in alike.values():
        given = torch.stack([one.out if one.given is None else one.given for one in some])
        otherwise = [one.otherwise for one in some if one.otherwise is not None]
        made = orthonormal(given, torch.stack(otherwise) if otherwise else None)
        for one, columns in zip(some, made, strict=True):
            one.out.copy_(columns)


def orthonormal(matrices: Tensor, otherwise: Tensor | None = None) -> Tensor:
    """Columns of norm 1, each orthogonal to those before it, by modified Gram-Schmidt as in torch's hook. A column of
    zeros stays so, or is that of `otherwise`. Of one matrix, or of several in the first dimension."""
    made = matrices.clone()
    for index in range(made.shape[-1]):
        column = made[..., index]
        norm = torch.linalg.vector_norm(column, dim=-1, keepdim=True)
        if otherwise is not None:
            column.copy_(torch.where(norm > 0, column / norm, otherwise[..., index]))
        else:
            column.div_(torch.where(norm > 0, norm, 1.0))
        rest = made[..., index + 1 :]
        rest.sub_(column[..., None] * (column[..., None, :] @ rest))
    return made


def _seed_of(seed: int, name: str) -> int:
    return (seed * 1_000_003 + zlib.crc32(name.encode())) % 2**63
