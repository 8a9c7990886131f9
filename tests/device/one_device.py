"""Several ranks on one device, beneath the library's real code.

NCCL refuses two ranks on one GPU. Here ranks are threads of one process, each with a stream of its own for computation,
and a collective is device-to-device copies on a further stream, as NCCL's kernels are: it starts after what was queued
on every rank's stream when the rank issued it, ends at some time after that, and `wait` orders a rank's stream behind
it. So it is the real allocator, real streams and real pinned memory that decide whether something is read before it has
come, or freed or overwritten while it is still read. To make that likely, outputs are filled with wrong values first,
and a collective begins late.

Without a GPU the same code runs on a pretended accelerator, whose streams do everything at once.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from fake_devices import Devices, FakeAccelerator, FakeGroups, Group, outside_of, wrong_values

import shardwise as sw
from shardwise.comm.transport.pairwise import Nobody
from shardwise.system.devices import Accelerator, RankDevice, TorchAccelerator
from shardwise.testing import run_ranks

Tensor = torch.Tensor
Act = Callable[[list[list[Tensor]], int], object]
LATE_CYCLES = 100_000
"""Clock cycles of the device, about 50 microseconds, by which a collective or a copy begins late."""
HANG_SECONDS = 60
"""How long ranks wait for one that has failed: nothing tells them of it."""


class OneDevice(Devices):
    """The ranks of one run, which share a device."""

    def __init__(self, kind: str) -> None:
        super().__init__("early")
        self.kind = kind
        self.device = torch.device(kind, 0) if kind != "cpu" else torch.device("cpu")
        self.real = LateAccelerator(kind) if kind != "cpu" else None
        if self.real is not None:
            settle_attention(self.device)
        self._meetings: dict[object, Meeting] = {}
        self._streams: dict[object, Any] = {}
        self._lock = threading.Lock()

    @property
    def is_real(self) -> bool:
        return self.real is not None

    def run(self, num_ranks: int, work: Callable[[sw.World], Any], **more: Any) -> list[Any]:
        """What `work` returns on each of the ranks. One rank is a world of its own, as in a script without launcher."""
        if num_ranks == 1:
            device = RankDevice.of(self.real, 0) if self.real is not None else RankDevice.cpu()
            with sw.World(0, 1, Nobody(), device=device) as world:
                return [work(world)]
        self.num_works.clear()
        self.num_waited.clear()
        self._meetings.clear()
        self.accelerator = FakeAccelerator()

        def rank(world: sw.World) -> Any:
            with self._as_rank(world):
                return work(world)

        return run_ranks(num_ranks, rank, shares_memory=False, timeout_seconds=HANG_SECONDS, **more)

    @contextmanager
    def _as_rank(self, world: sw.World) -> Iterator[None]:
        accelerator = self.real or self.accelerator
        world.rank_device = RankDevice(self.device, accelerator, 0)
        world.rank_device.enter()
        stream = accelerator.new_stream()
        with contextlib.ExitStack() as stack:
            stack.enter_context(accelerator.on(stream))
            # Backward passes of one device have one thread, in which a rank that waits would keep the others waiting.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            world.attach(StreamedGroups(self, world.rank, world.size))
            yield
            stream.synchronize()

    def meeting(self, key: tuple[Any, ...], group: Group, num_ranks: int) -> Meeting:
        with self._lock:
            if key not in self._meetings:
                accelerator = self.real or self.accelerator
                place = group.ranks, group.number
                if place not in self._streams:
                    self._streams[place] = accelerator.new_stream()
                self._meetings[key] = Meeting(key, num_ranks, accelerator, self._streams[place], self._forget)
            return self._meetings[key]

    def _forget(self, key: object) -> None:
        with self._lock:
            del self._meetings[key]


def settle_attention(device: torch.device) -> None:
    """Torch orders its attention kernels when the first one is chosen, and a thread that comes meanwhile gets the order
    from before: a rank's forward had FlashAttention, and its recomputation cuDNN's, which saves other tensors."""
    query = torch.ones(1, 1, 8, 16, device=device, dtype=torch.bfloat16)
    torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)


class LateAccelerator(TorchAccelerator):
    """Copies between host and device begin late, so that what does not wait for them reads wrong values."""

    def copy(self, out: Tensor, source: Tensor) -> None:
        torch.cuda._sleep(LATE_CYCLES)
        super().copy(out, source)


class StreamedGroups(FakeGroups):
    """The process groups of one rank, whose collectives run on streams of the device."""

    backend = "streams"
    devices: OneDevice

    def _work(
        self, verb: str, group: Group, sources: Sequence[Tensor], outs: Sequence[Tensor], act: Act | None
    ) -> StreamedWork:
        self._num_works[group.number] += 1
        key = group.ranks, group.number, self._num_works[group.number], verb
        self.devices.count(self.devices.num_works, verb)
        meeting = self.devices.meeting(key, group, len(group.ranks))
        meeting.come(group.ranks.index(self.rank), list(sources), list(outs), act)
        return StreamedWork(self.devices, verb, meeting)


@dataclass
class Part:
    sources: list[Tensor]
    outs: list[Tensor]
    act: Act | None
    issued: Any


class Meeting:
    """One collective: it is queued on the device by the rank that issues it last."""

    def __init__(
        self, key: object, num_ranks: int, accelerator: Accelerator, stream: Any, forget: Callable[[object], None]
    ) -> None:
        self._key = key
        self._num_ranks = num_ranks
        self._accelerator = accelerator
        self._stream = stream
        self._forget = forget
        self._parts: dict[int, Part] = {}
        self._lock = threading.Lock()
        self._is_queued = threading.Event()
        self._done = accelerator.event()

    def come(self, place: int, sources: list[Tensor], outs: list[Tensor], act: Act | None) -> None:
        issued = self._accelerator.event()
        issued.record(self._accelerator.current_stream())
        with self._lock:
            self._parts[place] = Part(sources, outs, act, issued)
            if len(self._parts) == self._num_ranks:
                self._queue([self._parts[place] for place in sorted(self._parts)])
                self._parts.clear()
                self._forget(self._key)
                self._is_queued.set()

    def _queue(self, parts: Sequence[Part]) -> None:
        with torch.no_grad(), self._accelerator.on(self._stream):
            for part in parts:
                self._stream.wait_event(part.issued)
                for out in part.outs:
                    for one in outside_of(out.detach(), part.sources):
                        one.copy_(wrong_values(one))
            if isinstance(self._accelerator, TorchAccelerator):
                torch.cuda._sleep(LATE_CYCLES)
            given = [[source.detach().clone() for source in part.sources] for part in parts]
            for place, part in enumerate(parts):
                if part.act is not None:
                    part.act(given, place)
            self._done.record(self._stream)

    def wait(self) -> None:
        """The host is held up until all ranks have issued it; on a GPU only the stream would be, to the same end: what
        the rank issues later would be queued behind."""
        if not self._is_queued.wait(HANG_SECONDS):
            raise RuntimeError(f"{sorted(self._parts)} of {self._num_ranks} ranks came to {self._key}")
        stream: Any = self._accelerator.current_stream()
        stream.wait_event(self._done)


@dataclass
class StreamedWork:
    devices: OneDevice
    verb: str
    meeting: Meeting

    def wait(self) -> None:
        self.devices.count(self.devices.num_waited, self.verb)
        self.meeting.wait()
