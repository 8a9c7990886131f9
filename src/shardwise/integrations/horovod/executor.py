"""The executor: a thread of each rank that executes the coordinator's responses in their order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from shardwise.errors import ShardwiseError
from shardwise.integrations.horovod.collectives import HorovodCollectives, scaled, wait_for_device
from shardwise.integrations.horovod.coordinator import DONE
from shardwise.integrations.horovod.errors import HorovodInternalError, InvalidCallError
from shardwise.integrations.horovod.links import Link
from shardwise.integrations.horovod.messages import MessageDecoder, Response
from shardwise.integrations.horovod.pending import Entry, PendingCollectives
from shardwise.integrations.horovod.timeline import Timeline
from shardwise.system.even_parts import even_sizes

if TYPE_CHECKING:
    import shardwise as sw

Tensor = torch.Tensor


class Executor:
    """Runs until the link is closed. Collectives that are still pending then raise `HorovodInternalError`."""

    def __init__(
        self,
        world: sw.World,
        collectives: HorovodCollectives,
        link: Link,
        pending: PendingCollectives,
        timeline: Timeline,
    ) -> None:
        self._world = world
        self._collectives = collectives
        self._link = link
        self._pending = pending
        self._timeline = timeline
        self._verbs: dict[str, Callable[[Response, list[Entry]], None]] = {
            "allreduce": self._all_reduce,
            "allgather": self._all_gather,
            "broadcast": self._broadcast,
            "alltoall": self._all_to_all,
            "reducescatter": self._reduce_scatter,
        }
        self._thread = threading.Thread(target=self._run, name=f"horovod-{world.rank}", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> None:
        """Wait until it has ended, for at most `seconds`."""
        self._thread.join(seconds)

    def _run(self) -> None:
        decoder = MessageDecoder(Response.from_text)
        self._world.rank_device.enter()
        why = "The thread that executes Horovod's collectives failed, which is a defect of shardwise."
        try:
            while messages := self._link.receive():
                for message in messages:
                    self._execute(decoder.decode(message))
            why = "Rank 0, which coordinates Horovod's collectives, has exited or called shutdown()."
        except (ShardwiseError, RuntimeError, OSError) as error:
            why = str(error)
        finally:
            self._pending.end(HorovodInternalError(why))
            self._link.close()

    def _execute(self, response: Response) -> None:
        if response.error:
            error_class = InvalidCallError if response.is_invalid else HorovodInternalError
            for name in response.names:
                entry = self._pending.take((response.process_set, name))
                if entry is not None:
                    entry.handle.fail(error_class(response.error))
            return
        start = time.perf_counter()
        verb = self._verbs.get(response.verb)
        if verb is not None:
            entries = self._take_entries(response)
            try:
                self._execute_on_tensors(verb, response, entries)
            except BaseException as error:
                for entry in entries:  # they are not pending any more
                    entry.handle.fail(HorovodInternalError(str(error)))
                raise
        else:
            self._execute_without_tensors(response)
        if response.acknowledges == self._world.rank:
            self._link.send(DONE)
        self._timeline.executed(response.names, response.verb.upper(), start, time.perf_counter())

    def _execute_without_tensors(self, response: Response) -> None:
        if response.verb == "add_set":
            self._collectives.add_set(response.number, response.ranks)
        elif response.verb == "remove_set":
            self._collectives.remove_set(response.number)
        for name in response.names:
            entry = self._pending.take((response.process_set, name))
            if entry is not None:
                entry.handle.finish(response.number)

    def _execute_on_tensors(
        self, verb: Callable[[Response, list[Entry]], None], response: Response, entries: list[Entry]
    ) -> None:
        for entry in entries:
            if entry.ready is not None:
                entry.ready.wait()
        self._copy_to_host(entries, response.process_set)
        verb(response, entries)
        for entry in entries:
            self._copy_back(entry)
            entry.handle.finish(entry.result())

    def _take_entries(self, response: Response) -> list[Entry]:
        """This rank's entries for the response. If the rank has joined, it contributes neutral values."""
        entries = []
        start = 0
        for name, count in zip(response.names, response.counts, strict=True):
            entry = self._pending.take((response.process_set, name))
            if entry is None:
                dtypes, shapes = response.dtypes[start : start + count], response.shapes[start : start + count]
                device = self._collectives.device_for(response.device, response.process_set)
                entry = Entry.of(neutral_tensors(dtypes, shapes, response.op, device), is_single=False)
                entry.is_neutral = True
            start += count
            entries.append(entry)
        return entries

    def _copy_to_host(self, entries: list[Entry], number: int) -> None:
        """Replace tensors that this process set cannot exchange on their device by copies on the host."""
        for entry in entries:
            entry.device_outs = None
            if entry.sources[0].device.type != self._collectives.device_for(entry.sources[0].device.type, number).type:
                entry.device_outs = entry.outs
                entry.sources = [source.cpu() for source in entry.sources]
                entry.outs = None if entry.outs is None else [out.cpu() for out in entry.outs]

    def _copy_back(self, entry: Entry) -> None:
        assert entry.outs is not None
        if entry.device is not None and entry.device.type != "cpu":
            if entry.device_outs is not None:
                for device_out, out in zip(entry.device_outs, entry.outs, strict=True):
                    device_out.copy_(out)
                entry.outs = entry.device_outs
            else:
                entry.outs = [out.to(entry.device) for out in entry.outs]
            wait_for_device(entry.outs[0])

    # -- verbs ------------------------------------------------------------------------------------------

    def _all_reduce(self, response: Response, entries: list[Entry]) -> None:
        by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        prescale = response.prescale
        if prescale != 1 and any(entry.is_neutral for entry in entries):
            for entry in entries:
                if not entry.is_neutral:  # a neutral value times a factor would not be neutral
                    entry.sources = [scaled(source, prescale) for source in entry.sources]
            prescale = 1.0
        for entry in entries:
            if entry.outs is None:
                entry.outs = [torch.empty_like(one, memory_format=torch.contiguous_format) for one in entry.sources]
            for out, source in zip(entry.outs, entry.sources, strict=True):
                outs, sources = by_dtype.setdefault(source.dtype, ([], []))
                outs.append(out)
                sources.append(source)
        scales = prescale, response.postscale
        for outs, sources in by_dtype.values():
            self._collectives.all_reduce(outs, sources, response.process_set, response.op, scales, response.names[0])

    def _all_gather(self, response: Response, entries: list[Entry]) -> None:
        (entry,) = entries
        entry.outs = [
            source.new_empty(sum(counts), *source.shape[1:])
            for source, counts in zip(entry.sources, response.rows, strict=True)
        ]
        self._collectives.all_gather(entry.outs, entry.sources, response.process_set, response.rows, response.names[0])

    def _broadcast(self, response: Response, entries: list[Entry]) -> None:
        (entry,) = entries
        entry.outs = [torch.empty_like(source) for source in entry.sources] if entry.outs is None else entry.outs
        self._collectives.broadcast(entry.outs, entry.sources, response.process_set, response.root, response.names[0])

    def _all_to_all(self, response: Response, entries: list[Entry]) -> None:
        (entry,) = entries
        index = self._collectives.ranks(response.process_set).index(self._world.rank)
        received = [counts[index] for counts in response.rows]
        source = entry.sources[0]
        entry.outs = [source.new_empty(sum(received), *source.shape[1:])]
        entry.extra = torch.tensor(received, dtype=torch.int32, device="cpu")
        self._collectives.all_to_all(entry.outs[0], source, response.process_set, response.rows, response.names[0])

    def _reduce_scatter(self, response: Response, entries: list[Entry]) -> None:
        (entry,) = entries
        ranks = self._collectives.ranks(response.process_set)
        index = ranks.index(self._world.rank)
        entry.outs = [
            source.new_empty(even_sizes(source.shape[0], len(ranks))[index], *source.shape[1:])
            for source in entry.sources
        ]
        scales = response.prescale, response.postscale
        self._collectives.reduce_scatter(
            entry.outs, entry.sources, response.process_set, response.op, scales, response.names[0]
        )


def neutral_tensors(
    dtypes: tuple[str, ...], shapes: tuple[tuple[int, ...], ...], op: str, device: torch.device
) -> list[Tensor]:
    """Tensors that do not change a reduction by `op`: the contribution of a rank that has joined.

    On `device`, as the other ranks' tensors: with others on their device and this rank on the host, all would wait.
    """
    typed = [(getattr(torch, name), shape) for name, shape in zip(dtypes, shapes, strict=True)]
    return [torch.full(shape, _neutral(op, dtype), dtype=dtype, device=device) for dtype, shape in typed]


def _neutral(op: str, dtype: torch.dtype) -> float | int | bool:
    if op in ("Sum", "Average"):
        return 0
    if op == "Product":
        return 1
    if dtype == torch.bool:
        return op == "Min"
    if dtype.is_floating_point:
        return float("inf") if op == "Min" else float("-inf")
    limits = torch.iinfo(dtype)
    return limits.max if op == "Min" else limits.min
