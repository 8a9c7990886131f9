"""Horovod's collectives on tensors of any shape, built from those of `sw.World`. Called by one thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

import shardwise as sw
from shardwise.integrations.horovod.messages import WORLD_SET
from shardwise.integrations.horovod.settings import FUSION_BYTES
from shardwise.system.even_parts import even_sizes, round_up

Tensor = torch.Tensor
_HALF_DTYPES = (torch.float16, torch.bfloat16)
_REDUCE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Min": lambda out, other: torch.minimum(out, other, out=out),
    "Max": lambda out, other: torch.maximum(out, other, out=out),
    "Product": lambda out, other: out.mul_(other),
}
"""Reductions that backends do not have: `other` is reduced into `out`."""
_BUFFER_BYTES = FUSION_BYTES + 2**16


class HorovodCollectives:
    """Collectives of process sets, over the world's backends.

    Device tensors are sent directly in collectives over all ranks, and through the host in other process sets.
    """

    def __init__(self, world: sw.World) -> None:
        self._world = world
        self._buffers: dict[str, Tensor] = {}
        self._groups: dict[int, Any] = {WORLD_SET: world.everybody}
        device = world.device
        self._has_device = device.type != "cpu" and world.size > 1
        if self._has_device:
            world.collectives(device).prepare(sw.Mesh((world.everybody.axis,), (world.size,)))

    def add_set(self, number: int, ranks: tuple[int, ...]) -> None:
        if self._world.rank in ranks and number not in self._groups:
            self._groups[number] = self._world.line(f"set {number}", ranks)

    def remove_set(self, number: int) -> None:
        self._groups.pop(number, None)

    def ranks(self, number: int) -> tuple[int, ...]:
        ranks: tuple[int, ...] = self._groups[number].ranks
        return ranks

    def device_for(self, kind: str, number: int) -> torch.device:
        """The device on which process set `number` exchanges tensors that are on `kind`, such as `cuda`."""
        is_direct = self._has_device and number == WORLD_SET and kind == self._world.device.type
        return self._world.device if is_direct else torch.device("cpu")

    # -- collectives ------------------------------------------------------------------------------------

    def all_reduce(
        self,
        outs: Sequence[Tensor],
        sources: Sequence[Tensor],
        number: int,
        op: str,
        scales: tuple[float, float] = (1.0, 1.0),
        name: str = "allreduce",
    ) -> None:
        """Reduce `sources`, of one dtype, into `outs`, of the same shapes. An out may be its source.

        `scales` are the prescale and postscale factors. `Average` divides the sum by the number of ranks in the set,
        including those that have joined. Half-precision values are summed in fp32; integers are scaled in fp64 and
        rounded towards zero.
        """
        if op == "Adasum":
            for out, source in zip(outs, sources, strict=True):
                self._adasum(out, source, number, scales, name)
            return
        group, backend = self._group_and_backend(number, sources[0])
        num_ranks = len(group.ranks)
        (prescale, postscale), divisor = scales, 1
        if op == "Average":
            op, divisor = "Sum", num_ranks
        numel = sum(source.numel() for source in sources)
        if not numel:
            return
        if num_ranks == 1:
            for out, source in zip(outs, sources, strict=True):
                _scale_into(out, source, prescale)
                _scale_into(out, out, postscale)
            return
        dtype = sources[0].dtype
        padded = round_up(numel, num_ranks)
        reduced = _as_buffer(outs, padded)
        if reduced is None:
            reduced = self._buffer("reduced", padded, dtype, backend)
        own = reduced.chunk(num_ranks)[group.index]
        if op == "Sum":
            sent = self._buffer("sent", padded, dtype, backend)
            _pack(sent, sources, prescale, padding=0)
            total = torch.empty_like(own, dtype=torch.float32) if dtype in _HALF_DTYPES else own
            backend.reduce_scatter(total, sent, group, dtype, name).wait()
            _scale_into(own, total, postscale, divisor)
        else:
            sent = torch.empty(padded, dtype=dtype, device=sources[0].device)
            _pack(sent, sources, prescale, padding=1)
            _reduce_scatter_other(own, sent, group, backend, op, name)
            _scale_into(own, own, postscale)
        backend.all_gather(reduced, group, name).wait()
        _unpack(reduced, outs)

    def all_gather(
        self, outs: Sequence[Tensor], sources: Sequence[Tensor], number: int, rows: Sequence[Sequence[int]], name: str
    ) -> None:
        """Concatenate the ranks' rows of each tensor. `rows[i]` has the number of rows of tensor i on each rank."""
        group, backend = self._group_and_backend(number, sources[0])
        for out, source, counts in zip(outs, sources, rows, strict=True):
            if not out.numel():
                continue
            parts = [part.reshape(-1) for part in out.split_with_sizes(list(counts))]
            parts[group.index].copy_(source.reshape(-1))
            if len(set(counts)) == 1:
                backend.all_gather(out.view(-1), group, name).wait()
            else:
                backend.all_to_all(parts, [parts[group.index]] * len(parts), group, name).wait()

    def broadcast(self, outs: Sequence[Tensor], sources: Sequence[Tensor], number: int, root: int, name: str) -> None:
        group, backend = self._group_and_backend(number, sources[0])
        for out, source in zip(outs, sources, strict=True):
            if self._world.rank == root:
                if out is not source:
                    out.copy_(source)
                flat = source.contiguous().view(-1)
                backend.broadcast(flat, root, group, name).wait()
            elif out.is_contiguous():
                backend.broadcast(out.view(-1), root, group, name).wait()
            else:
                flat = torch.empty_like(out, memory_format=torch.contiguous_format).view(-1)
                backend.broadcast(flat, root, group, name).wait()
                out.copy_(flat.view(out.shape))

    def all_to_all(self, out: Tensor, source: Tensor, number: int, rows: Sequence[Sequence[int]], name: str) -> None:
        """`rows[i][j]` is the number of rows that the i-th rank of the set sends to the j-th."""
        group, backend = self._group_and_backend(number, source)
        sent = [part.reshape(-1) for part in source.contiguous().split_with_sizes(list(rows[group.index]))]
        received = [part.view(-1) for part in out.split_with_sizes([counts[group.index] for counts in rows])]
        received[group.index].copy_(sent[group.index])
        backend.all_to_all(received, sent, group, name).wait()

    def reduce_scatter(
        self,
        outs: Sequence[Tensor],
        sources: Sequence[Tensor],
        number: int,
        op: str,
        scales: tuple[float, float],
        name: str,
    ) -> None:
        """Reduce `sources` and leave each rank its rows (`even_sizes`)."""
        group, backend = self._group_and_backend(number, sources[0])
        num_ranks = len(group.ranks)
        (prescale, postscale), divisor = scales, 1
        if op == "Average":
            op, divisor = "Sum", num_ranks
        for out, source in zip(outs, sources, strict=True):
            if not source.numel():
                continue
            if num_ranks == 1:
                _scale_into(out, source, prescale)
                _scale_into(out, out, postscale)
                continue
            counts = even_sizes(source.shape[0], num_ranks)
            width = source.numel() // source.shape[0] * counts[0]
            is_sum = op == "Sum"
            sent = (
                backend.buffer(num_ranks * width, source.dtype)
                if is_sum
                else torch.empty(num_ranks * width, dtype=source.dtype, device=source.device)
            )
            for chunk, part in zip(sent.chunk(num_ranks), source.split_with_sizes(counts), strict=True):
                _pack(chunk, [part], prescale, padding=0)
            is_summed_wide = is_sum and source.dtype in _HALF_DTYPES
            total = torch.empty(width, dtype=torch.float32 if is_summed_wide else source.dtype, device=source.device)
            if is_sum:
                backend.reduce_scatter(total, sent, group, source.dtype, name).wait()
            else:
                _reduce_scatter_other(total, sent, group, backend, op, name)
            _scale_into(out, total[: out.numel()].view(out.shape), postscale, divisor)

    # -- parts of collectives ---------------------------------------------------------------------------

    def _group_and_backend(self, number: int, tensor: Tensor) -> tuple[Any, Any]:
        return self._groups[number], self._world.collectives(tensor.device)

    def _buffer(self, use: str, numel: int, dtype: torch.dtype, backend: Any) -> Tensor:
        """Memory to send from. On the host one buffer per use is kept, since new pages cost more than copies."""
        num_bytes = numel * dtype.itemsize
        if not backend.is_host or num_bytes > _BUFFER_BYTES:
            new: Tensor = backend.buffer(numel, dtype)
            return new
        kept = self._buffers.get(use)
        if kept is None:
            kept = self._buffers[use] = backend.buffer(_BUFFER_BYTES, torch.uint8)
        backend.reclaim(kept)
        return kept[:num_bytes].view(dtype)

    def _adasum(self, out: Tensor, source: Tensor, number: int, scales: tuple[float, float], name: str) -> None:
        """Gather every rank's tensor and combine neighbours, on each rank: k rounds for 2**k ranks."""
        group, backend = self._group_and_backend(number, source)
        num_ranks = len(group.ranks)
        gathered = torch.empty(num_ranks * source.numel(), dtype=source.dtype, device=source.device)
        own = gathered.chunk(num_ranks)[group.index]
        own.copy_(source.reshape(-1))
        if scales[0] != 1:
            own.mul_(scales[0])
        backend.all_gather(gathered, group, name).wait()
        parts = [part.to(torch.float64) for part in gathered.chunk(num_ranks)]
        while len(parts) > 1:
            parts = [adasum(parts[index], parts[index + 1]) for index in range(0, len(parts), 2)]
        out.copy_(parts[0].mul_(scales[1]).view(out.shape))


def adasum(a: Tensor, b: Tensor) -> Tensor:
    """The mean of the parallel parts and the sum of the orthogonal parts of `a` and `b`.

    Maleki et al., "Scaling Distributed Training with Adaptive Summation", 2020.
    """
    dot = float(a @ b)
    squares = float(a @ a), float(b @ b)
    weights = [1 - dot / (2 * square) if square > 0 else 1.0 for square in squares]
    return weights[0] * a + weights[1] * b


def _reduce_scatter_other(own: Tensor, sent: Tensor, group: Any, backend: Any, op: str, name: str) -> None:
    """Reduce this rank's chunk of all ranks' `sent` into `own`, by an op other than a sum, in the order of ranks."""
    chunks = list(sent.chunk(len(group.ranks)))
    received = [torch.empty_like(own) for _ in chunks]
    received[group.index] = chunks[group.index]
    backend.all_to_all(received, chunks, group, name).wait()
    own.copy_(received[0])
    for chunk in received[1:]:
        _REDUCE[op](own, chunk)


def _as_buffer(outs: Sequence[Tensor], padded: int) -> Tensor | None:
    """The only tensor of `outs`, flat, if it needs no padding: it can receive the result directly."""
    out = outs[0]
    return out.view(-1) if len(outs) == 1 and out.numel() == padded and out.is_contiguous() else None


def _pack(flat: Tensor, sources: Sequence[Tensor], factor: float, padding: float) -> None:
    """Write `sources` times `factor` one after the other into `flat`, and `padding` behind them."""
    start = 0
    for source in sources:
        part = flat[start : start + source.numel()]
        _scale_into(part.view(source.shape), source, factor)
        start += source.numel()
    if start < flat.numel():
        flat[start:].fill_(padding)


def _unpack(flat: Tensor, outs: Sequence[Tensor]) -> None:
    if flat.data_ptr() == outs[0].data_ptr():
        return
    start = 0
    for out in outs:
        out.copy_(flat[start : start + out.numel()].view(out.shape))
        start += out.numel()


def _scale_into(out: Tensor, source: Tensor, factor: float, divisor: int = 1) -> None:
    """`out = source * factor / divisor`. A mean is divided, since 1/49 is not exact."""
    if factor == divisor == 1:
        if out.data_ptr() != source.data_ptr():
            out.copy_(source)
    elif not out.is_floating_point() and not out.is_complex():
        out.copy_(source.to(torch.float64).mul_(factor).div_(divisor).trunc_())
    elif out.dtype != source.dtype or out.dtype in _HALF_DTYPES:
        out.copy_(source.to(torch.float32).mul_(factor).div_(divisor))
    elif factor == 1:
        torch.div(source, divisor, out=out)
    else:
        torch.mul(source, factor, out=out)
        if divisor != 1:
            out.div_(divisor)


def scaled(source: Tensor, factor: float) -> Tensor:
    """A contiguous copy of `source` times `factor`, with the rounding of `all_reduce`."""
    out = torch.empty_like(source, memory_format=torch.contiguous_format)
    _scale_into(out, source, factor)
    return out


def wait_for_device(tensor: Tensor) -> None:
    """Wait for the kernels that this thread has launched on the tensor's device."""
    if tensor.device.type != "cpu":
        with suppress(RuntimeError):
            torch.accelerator.current_stream(tensor.device).synchronize()
