"""Horovod's collectives on tensors of any shape, built from those of `sw.World`. Called by one thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

import shardwise as sw
from shardwise.integrations.horovod.messages import WORLD_SET
from shardwise.integrations.horovod.settings import FUSION_BYTES

Tensor = torch.Tensor
_HALVES = (torch.float16, torch.bfloat16)
_FOLDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Min": lambda out, other: torch.minimum(out, other, out=out),
    "Max": lambda out, other: torch.maximum(out, other, out=out),
    "Product": lambda out, other: out.mul_(other),
}
_STARTS = {"Product": 1}
_HELD_BYTES = FUSION_BYTES + 2**16


class HorovodCollectives:
    """Collectives of process sets, over the world's backends.

    Device tensors are sent directly in collectives over all ranks, and through the host in other process sets.
    """

    def __init__(self, world: sw.World) -> None:
        self._world = world
        self._held: dict[str, Tensor] = {}
        self._groups: dict[int, Any] = {WORLD_SET: world.everybody}
        device = world.device
        self._has_device = device.type != "cpu" and world.size > 1
        if self._has_device:
            world.collectives(device).prepare(sw.Mesh((world.everybody.axis,), (world.size,)))

    def add_set(self, number: int, ranks: tuple[int, ...]) -> None:
        if self._world.rank in ranks:
            self._groups[number] = self._world.line(f"set {number}", ranks)

    def remove_set(self, number: int) -> None:
        self._groups.pop(number, None)

    def ranks(self, number: int) -> tuple[int, ...]:
        ranks: tuple[int, ...] = self._groups[number].ranks
        return ranks

    # -- verbs ------------------------------------------------------------------------------------------

    def all_reduce(
        self,
        outs: Sequence[Tensor],
        sources: Sequence[Tensor],
        number: int,
        op: str,
        scales: tuple[float, float] = (1.0, 1.0),
        name: str = "allreduce",
    ) -> None:
        """Reduce `sources`, of one dtype, into `outs`, of the same shapes; each may be its source.

        `Average` divides the sum by the ranks of the set, those without data included. Halves are summed in fp32;
        whole numbers are scaled in fp64, and rounded towards zero.
        """
        if op == "Adasum":
            for out, source in zip(outs, sources, strict=True):
                self._adasum(out, source, number, scales, name)
            return
        group, by = self._way(number, sources[0])
        num_ranks = len(group.ranks)
        (before, after), divisor = scales, 1
        if op == "Average":
            op, divisor = "Sum", num_ranks
        numel = sum(source.numel() for source in sources)
        if not numel:
            return
        if num_ranks == 1:
            for out, source in zip(outs, sources, strict=True):
                _scale_into(out, source, before)
                _scale_into(out, out, after)
            return
        dtype = sources[0].dtype
        padded = -(-numel // num_ranks) * num_ranks
        whole = self._alone(outs, padded, by)
        if whole is None:
            whole = self._memory("whole", padded, dtype, by)
        if op == "Sum":
            given = self._memory("given", padded, dtype, by)
            _fill(given, sources, before, 0)
            own = whole.chunk(num_ranks)[group.index]
            total = torch.empty_like(own, dtype=torch.float32) if dtype in _HALVES else own
            by.reduce_scatter(total, given, group, dtype, name).wait()
            _scale_into(own, total, after, divisor)
        else:
            given = torch.empty(padded, dtype=dtype, device=sources[0].device)
            _fill(given, sources, before, _STARTS.get(op, 0))
            own = whole.chunk(num_ranks)[group.index]
            self._fold(own, given, group, by, op, name)
            _scale_into(own, own, after, divisor)
        by.all_gather(whole, group, name).wait()
        self._give_out(whole, outs)

    def all_gather(
        self, outs: Sequence[Tensor], sources: Sequence[Tensor], number: int, rows: Sequence[Sequence[int]], name: str
    ) -> None:
        """The ranks' rows of each tensor, one after the other. `rows[i]`: of tensor i how many each rank has."""
        group, by = self._way(number, sources[0])
        for out, source, counts in zip(outs, sources, rows, strict=True):
            if not out.numel():
                continue
            parts = [part.reshape(-1) for part in out.split_with_sizes(list(counts))]
            parts[group.index].copy_(source.reshape(-1))
            if len(set(counts)) == 1:
                by.all_gather(out.view(-1), group, name).wait()
            else:
                by.all_to_all(parts, [parts[group.index]] * len(parts), group, name).wait()

    def broadcast(self, outs: Sequence[Tensor], sources: Sequence[Tensor], number: int, root: int, name: str) -> None:
        group, by = self._way(number, sources[0])
        for out, source in zip(outs, sources, strict=True):
            if self._world.rank == root:
                if out is not source:
                    out.copy_(source)
                flat = source.contiguous().view(-1)
                by.broadcast(flat, root, group, name).wait()
            elif out.is_contiguous():
                by.broadcast(out.view(-1), root, group, name).wait()
            else:
                flat = torch.empty_like(out, memory_format=torch.contiguous_format).view(-1)
                by.broadcast(flat, root, group, name).wait()
                out.copy_(flat.view(out.shape))

    def all_to_all(self, out: Tensor, source: Tensor, number: int, rows: Sequence[Sequence[int]], name: str) -> None:
        """`rows[i][j]`: how many rows the i-th rank of the set sends to the j-th."""
        group, by = self._way(number, source)
        sent = [part.reshape(-1) for part in source.contiguous().split_with_sizes(list(rows[group.index]))]
        arrived = [part.view(-1) for part in out.split_with_sizes([counts[group.index] for counts in rows])]
        arrived[group.index].copy_(sent[group.index])
        by.all_to_all(arrived, sent, group, name).wait()

    def reduce_scatter(
        self,
        outs: Sequence[Tensor],
        sources: Sequence[Tensor],
        number: int,
        op: str,
        scales: tuple[float, float],
        name: str,
    ) -> None:
        """Reduce `sources` and leave each rank its rows: equally many, the first ranks one more where need be."""
        group, by = self._way(number, sources[0])
        num_ranks = len(group.ranks)
        (before, after), divisor = scales, 1
        if op == "Average":
            op, divisor = "Sum", num_ranks
        for out, source in zip(outs, sources, strict=True):
            if not source.numel():
                continue
            if num_ranks == 1:
                _scale_into(out, source, before)
                _scale_into(out, out, after)
                continue
            counts = rows_of_ranks(source.shape[0], num_ranks)
            width = source.numel() // source.shape[0] * counts[0]
            is_sum = op == "Sum"
            given = (
                by.buffer(num_ranks * width, source.dtype)
                if is_sum
                else torch.empty(num_ranks * width, dtype=source.dtype, device=source.device)
            )
            for chunk, part in zip(given.chunk(num_ranks), source.split_with_sizes(counts), strict=True):
                _fill(chunk, [part], before, 0)
            total = torch.empty(width, dtype=source.dtype, device=source.device)
            if is_sum:
                summed = torch.empty_like(total, dtype=torch.float32) if source.dtype in _HALVES else total
                by.reduce_scatter(summed, given, group, source.dtype, name).wait()
            else:
                summed = total
                self._fold(total, given, group, by, op, name)
            _scale_into(out, summed[: out.numel()].view(out.shape), after, divisor)

    def barrier(self, number: int) -> None:
        """That all have issued it is what a barrier is: the coordinator knows, and nothing is sent."""

    # -- what verbs are made of -------------------------------------------------------------------------

    def can_stay(self, tensor: Tensor, number: int) -> bool:
        """Whether the collectives of this set take `tensor` from where it lies."""
        return tensor.device.type == "cpu" or (
            self._has_device and number == WORLD_SET and tensor.device.type == self._world.device.type
        )

    def _way(self, number: int, tensor: Tensor) -> tuple[Any, Any]:
        return self._groups[number], self._world.collectives(tensor.device)

    def _memory(self, use: str, numel: int, dtype: torch.dtype, by: Any) -> Tensor:
        """Memory to send from. What is fused has another length every time, and fresh pages cost more than copies: so
        on the host there is one block for each use, of which a part is taken."""
        num_bytes = numel * dtype.itemsize
        if not by.is_host or num_bytes > _HELD_BYTES:
            taken: Tensor = by.buffer(numel, dtype)
            return taken
        held = self._held.get(use)
        if held is None:
            held = self._held[use] = by.buffer(_HELD_BYTES, torch.uint8)
        by.reclaim(held)
        return held[:num_bytes].view(dtype)

    def _alone(self, outs: Sequence[Tensor], padded: int, by: Any) -> Tensor | None:
        """The one tensor that is reduced, if what arrives can be put there at once."""
        out = outs[0]
        return out.view(-1) if len(outs) == 1 and out.numel() == padded and out.is_contiguous() else None

    def _give_out(self, whole: Tensor, outs: Sequence[Tensor]) -> None:
        if whole.data_ptr() == outs[0].data_ptr():
            return
        start = 0
        for out in outs:
            out.copy_(whole[start : start + out.numel()].view(out.shape))
            start += out.numel()

    def _fold(self, own: Tensor, given: Tensor, group: Any, by: Any, op: str, name: str) -> None:
        """This rank's chunk of `given`, reduced by other than a sum, into `own`: in the order of the group."""
        chunks = list(given.chunk(len(group.ranks)))
        arrived = [torch.empty_like(own) for _ in chunks]
        arrived[group.index] = chunks[group.index]
        by.all_to_all(arrived, chunks, group, name).wait()
        own.copy_(arrived[0])
        for chunk in arrived[1:]:
            _FOLDS[op](own, chunk)

    def _adasum(self, out: Tensor, source: Tensor, number: int, scales: tuple[float, float], name: str) -> None:
        """Every rank has every tensor, and works out the same: for 2**k ranks, in k rounds of neighbours."""
        group, by = self._way(number, source)
        num_ranks = len(group.ranks)
        whole = torch.empty(num_ranks * source.numel(), dtype=source.dtype, device=source.device)
        own = whole.chunk(num_ranks)[group.index]
        own.copy_(source.reshape(-1))
        if scales[0] != 1:
            own.mul_(scales[0])
        by.all_gather(whole, group, name).wait()
        parts = [part.to(torch.float64) for part in whole.chunk(num_ranks)]
        while len(parts) > 1:
            parts = [adasum(parts[place], parts[place + 1]) for place in range(0, len(parts), 2)]
        out.copy_(parts[0].mul_(scales[1]).view(out.shape))


def adasum(a: Tensor, b: Tensor) -> Tensor:
    """Maleki et al., "Scaling Distributed Training with Adaptive Summation", 2020: a mean of what is parallel, a sum
    of what is orthogonal."""
    dot = float(a @ b)
    squares = float(a @ a), float(b @ b)
    weights = [1 - dot / (2 * square) if square > 0 else 1.0 for square in squares]
    return weights[0] * a + weights[1] * b


def rows_of_ranks(num_rows: int, num_ranks: int) -> list[int]:
    """How many rows of a reduce-scatter each rank gets."""
    each, more = divmod(num_rows, num_ranks)
    return [each + (place < more) for place in range(num_ranks)]


def _fill(flat: Tensor, sources: Sequence[Tensor], factor: float, rest: float) -> None:
    """`sources` times `factor`, one after the other, and `rest` after them."""
    start = 0
    for source in sources:
        place = flat[start : start + source.numel()]
        _scale_into(place.view(source.shape), source, factor)
        start += source.numel()
    if start < flat.numel():
        flat[start:].fill_(rest)


def _scale_into(out: Tensor, source: Tensor, factor: float, divisor: int = 1) -> None:
    """`source * factor / divisor`; a mean is divided, as times 1/49 is not quite a 49th."""
    if factor == divisor == 1:
        if out.data_ptr() != source.data_ptr():
            out.copy_(source)
    elif not out.is_floating_point() and not out.is_complex():
        out.copy_(source.to(torch.float64).mul_(factor).div_(divisor).trunc_())
    elif out.dtype != source.dtype or out.dtype in _HALVES:
        out.copy_(source.to(torch.float32).mul_(factor).div_(divisor))
    elif factor == 1:
        torch.div(source, divisor, out=out)
    else:
        torch.mul(source, factor, out=out)
        if divisor != 1:
            out.div_(divisor)


def wait_for_device(tensor: Tensor) -> None:
    """Wait until the device has done what this thread has asked for."""
    if tensor.device.type != "cpu":
        with suppress(RuntimeError):
            torch.accelerator.current_stream(tensor.device).synchronize()
