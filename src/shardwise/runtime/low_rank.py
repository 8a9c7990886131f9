"""Sums of gradients of which matrices are sent as thin factors: see [Note: factors] in `program/low_rank.py`."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch

from shardwise.comm import Collectives, Group, Work
from shardwise.memory import Factors, Flat
from shardwise.program import Factored, FactoredMatrix

Tensor = torch.Tensor


class FactoredSum:
    """The sums of one flat buffer on this rank, each in two steps: `project`, then `restore`. All ranks call both."""

    def __init__(self, flat: Flat, factors: Factors, collectives: Collectives) -> None:
        assert flat.spec.table.low_rank is not None
        self._flat, self._factors, self._collectives = flat, factors, collectives
        self._by = Factored(flat.spec)
        self._matrices = flat.spec.factored
        self._seed = flat.spec.table.low_rank.seed
        self._projected: dict[int, Tensor] = {}
        """The first factors, of the sum under way."""
        self._has_begun = False

    def project(self, source: Tensor, group: Group) -> Work:
        """Start to sum the first factors, and what is sent as it is. Once waited for, the latter is in `source`."""
        self._begin()
        self._factors.unsent.add_(source)
        message, parts, plain = self._projections(source)
        for one in self._matrices:
            torch.mm(self._unsent(one), self._factors.cols[one.index], out=parts[one.index])
        for part, of_source in plain:
            part.copy_(of_source)

        def arrive() -> None:
            for part, of_source in plain:
                of_source.copy_(part)
            self._projected = {index: orthonormal(part) for index, part in parts.items()}

        return _Summed(self._sum(message, group), arrive)

    def restore(self, source: Tensor, out: Tensor, group: Group) -> Work:
        """Start to sum the second factors. Once waited for, all sums are in `out`, which may be `source`."""
        message = self._message("restore")
        sizes = [one.cols * one.rank for one in self._matrices]
        cut = torch.split(message[: sum(sizes)], sizes)
        parts = {one.index: part.view(one.cols, one.rank) for one, part in zip(self._matrices, cut, strict=True)}
        for one in self._matrices:
            torch.mm(self._unsent(one).t(), self._projected[one.index], out=parts[one.index])

        def arrive() -> None:
            if out is not source:
                out.copy_(source)
            unsent = self._factors.unsent
            for one in self._matrices:
                total = out[one.span.start : one.span.stop].view(one.rows, one.cols)
                torch.mm(self._projected[one.index], parts[one.index].t(), out=total)
                self._keep(one, parts[one.index], total)
            for span in self._by.plain:
                unsent[span.start : span.stop].zero_()
            self._projected = {}

        return _Summed(self._sum(message, group), arrive)

    def _keep(self, one: FactoredMatrix, cols: Tensor, total: Tensor) -> None:
        """Keep what was not sent, and the second factor for the next step.

        Gradients come divided by the number of ranks, so each rank has sent that share of the sum.

        Where the sum is not finite, what was not sent is forgotten, and the factor stays; where a column of it is zero,
        as of a gradient that is, it stays too, because nothing would ever come out of zero again.
        """
        unsent, before = self._unsent(one), self._factors.cols[one.index]
        is_finite = torch.isfinite(total).all()
        unsent.copy_(torch.where(is_finite, unsent.sub_(total, alpha=1 / self._by.num_ranks), 0.0))
        before.copy_(torch.where(is_finite, orthonormal(cols, before), before))

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
        return self._factors.unsent[one.span.start : one.span.stop].view(one.rows, one.cols)

    def _projections(self, source: Tensor) -> tuple[Tensor, dict[int, Tensor], list[tuple[Tensor, Tensor]]]:
        """The message, the part of it for each matrix, and parts of it with the elements of `source` that are sent as
        they are."""
        message = self._message("project")
        sizes = [*(one.rows * one.rank for one in self._matrices), *(span.numel for span in self._by.plain)]
        cut = torch.split(message[: sum(sizes)], sizes)
        num = len(self._matrices)
        parts = {one.index: part.view(one.rows, one.rank) for one, part in zip(self._matrices, cut, strict=False)}
        spans = [source[span.start : span.stop] for span in self._by.plain]
        return message, parts, list(zip(cut[num:], spans, strict=True))

    def _message(self, verb: str) -> Tensor:
        return self._factors.unsent.new_zeros(self._by.numel_of(verb))

    def _sum(self, message: Tensor, group: Group) -> Work:
        return self._collectives.all_reduce(message, message, group, message.dtype, self._flat.name)


class _Summed:
    """A sum, and what is made of it once it has come."""

    def __init__(self, work: Work, arrive: Callable[[], None]) -> None:
        self._work: Work | None = work
        self._arrive = arrive

    def wait(self) -> None:
        """See `Work`: may be called again after it has raised."""
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        self._arrive()


def orthonormal(matrix: Tensor, otherwise: Tensor | None = None) -> Tensor:
    """Columns of norm 1, each orthogonal to those before it, by modified Gram-Schmidt as in torch's hook. A column of
    zeros stays so, or is that of `otherwise`."""
    made = matrix.clone()
    for index in range(made.shape[1]):
        column = made[:, index]
        norm = torch.linalg.vector_norm(column)
        if otherwise is not None:
            column.copy_(torch.where(norm > 0, column / norm, otherwise[:, index]))
        else:
            column.div_(torch.where(norm > 0, norm, 1.0))
        rest = made[:, index + 1 :]
        rest.sub_(column[:, None] * (column @ rest)[None, :])
    return made


def _seed_of(seed: int, name: str) -> int:
    return (seed * 1_000_003 + zlib.crc32(name.encode())) % 2**63
