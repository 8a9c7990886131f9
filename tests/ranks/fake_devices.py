"""Fake devices and process groups: threads as ranks and tensors on the CPU, beneath the library's real code.

A collective on a device runs some time between the call and `wait`. Here it runs at one of these two ends, or at a
random one of them, and until then its outputs have wrong values (see `wrong_values`). Code that reads them too early,
frees or changes tensors that are in flight, or never waits, is therefore detected.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

import shardwise as sw
from shardwise.system.devices import RankDevice
from shardwise.testing import run_ranks
from tests.patience import PATIENCE

Tensor = torch.Tensor
Ranks = tuple[int, ...]
When = Literal["late", "early", "random"]
WHENS: tuple[When, ...] = ("late", "early", "random")


class Race(RuntimeError):
    """A tensor was read, written or freed while it was in flight."""


@dataclass
class Group:
    ranks: Ranks
    number: int


class Devices:
    """The state that the ranks of one run share."""

    def __init__(self, when: When = "late", *, can_split: bool = True, seed: int = 0) -> None:
        self.when = when
        self.can_split = can_split
        self.made: dict[int, list[tuple[str, Any]]] = {}
        """For each rank, the groups that it was asked to create, in order."""
        self.num_works: Counter[str] = Counter()
        self.num_waited: Counter[str] = Counter()
        self._seed = seed
        self.accelerator = FakeAccelerator(devices=self)
        self._given: dict[object, dict[int, list[Tensor]]] = {}
        self._changed = threading.Condition()

    def acts_at_issue(self, rank: int, number: int) -> bool:
        if self.when == "random":
            return random.Random(f"{self._seed} {rank} {number}").random() < 0.5
        return self.when == "early"

    def count(self, counter: Counter[str], verb: str) -> None:
        with self._changed:  # ranks are threads
            counter[verb] += 1

    def give(self, key: object, place: int, tensors: list[Tensor]) -> None:
        with self._changed:
            self._given.setdefault(key, {})[place] = tensors
            self._changed.notify_all()

    def has_come(self, key: object) -> bool:
        """Whether the first rank has given its tensors."""
        with self._changed:
            return 0 in self._given.get(key, {})

    def take(self, key: object, num_ranks: int, groups: FakeGroups) -> list[list[Tensor]] | None:
        """The tensors of all ranks, by place; blocks until all have given theirs, or `groups` is aborted: `None`."""
        with self._changed:
            box = self._given.setdefault(key, {})
            if not self._changed.wait_for(lambda: groups.is_aborted or len(box) == num_ranks, timeout=PATIENCE):
                raise RuntimeError(f"{sorted(box)} of {num_ranks} ranks came to {key}")
            return [box[place] for place in range(num_ranks)] if len(box) == num_ranks else None

    def wake(self, groups: FakeGroups) -> None:
        """End the waits of `groups`, now and later."""
        with self._changed:
            groups.is_aborted = True
            self._changed.notify_all()

    def run(self, num_ranks: int, work: Callable[[sw.World], Any], **more: Any) -> list[Any]:
        """`run_ranks` with a device for every rank."""

        def rank(world: sw.World) -> Any:
            self.join(world)
            return work(world)

        results = run_ranks(num_ranks, rank, shares_memory=False, **more)
        self.accelerator.check_sources()
        return results

    def join(self, world: sw.World, groups: Callable[[Devices, int, int], FakeGroups] | None = None) -> None:
        world.rank_device = RankDevice(torch.device("cpu"), self.accelerator, world.rank)
        world.rank_device.enter()
        world.attach((groups or FakeGroups)(self, world.rank, world.size))


class FakeGroups:
    """The `ProcessGroups` of one rank."""

    backend = "fake"

    def __init__(self, devices: Devices, rank: int, size: int) -> None:
        self.devices = devices
        self.rank = rank
        self.is_aborted = False
        """Whether operations end without the other ranks, and leave garbage."""
        self._world = Group(tuple(range(size)), 0)
        self._num_works: Counter[int] = Counter()
        devices.made[rank] = []

    @property
    def can_split(self) -> bool:
        return self.devices.can_split

    def world(self) -> Group:
        return self._world

    def new_group(self, ranks: Ranks, *, is_urgent: bool) -> Group:
        return self._made("new_group", ranks, ranks, is_urgent)

    def split(self, lines: Sequence[Ranks], *, is_urgent: bool) -> Group:
        (mine,) = [line for line in lines if self.rank in line]
        return self._made("split", tuple(lines), mine, is_urgent)

    def _made(self, how: str, asked: Any, ranks: Ranks, is_urgent: bool) -> Group:
        assert is_urgent
        made = self.devices.made[self.rank]
        made.append((how, asked))
        return Group(ranks, len(made))

    def all_gather(self, full: Tensor, own: Tensor, group: Group) -> FakeWork:
        return self._work("gather", group, [own], [full], lambda given, _: full.copy_(torch.cat([g[0] for g in given])))

    def all_gather_coalesced(self, fulls: Sequence[Tensor], owns: Sequence[Tensor], group: Group) -> FakeWork:
        def act(given: list[list[Tensor]], _: int) -> None:
            for number, full in enumerate(fulls):
                full.copy_(torch.cat([g[number] for g in given]))

        return self._work("gather together", group, owns, fulls, act)

    def reduce_scatter(self, out: Tensor, source: Tensor, group: Group) -> FakeWork:
        def act(given: list[list[Tensor]], place: int) -> None:
            out.copy_(_sum([g[0].chunk(len(given))[place] for g in given]))

        return self._work("reduce_scatter", group, [source], [out], act)

    def all_reduce(self, tensor: Tensor, group: Group) -> FakeWork:
        return self._work(
            "all_reduce", group, [tensor], [tensor], lambda given, _: tensor.copy_(_sum([g[0] for g in given]))
        )

    def all_to_all(self, arrived: Sequence[Tensor], sent: Sequence[Tensor], group: Group) -> FakeWork:
        assert len(arrived) == len(sent) == len(group.ranks)

        def act(given: list[list[Tensor]], place: int) -> None:
            for other, out in enumerate(arrived):
                assert given[other][place].shape == out.shape
                out.copy_(given[other][place])

        return self._work("all_to_all", group, sent, arrived, act)

    def swap_chunks(self, arrived: Tensor, sent: Tensor, group: Group) -> FakeWork:
        def act(given: list[list[Tensor]], place: int) -> None:
            arrived.copy_(torch.cat([g[0].chunk(len(given))[place] for g in given]))

        return self._work("swap_chunks", group, [sent], [arrived], act)

    def broadcast(self, tensor: Tensor, root: int, group: Group) -> FakeWork:
        place = group.ranks.index(root)
        sources = [tensor] if self.rank == root else []
        outs = [] if self.rank == root else [tensor]

        def act(given: list[list[Tensor]], _: int) -> None:
            for out in outs:
                out.copy_(given[place][0])

        return self._work("broadcast", group, sources, outs, act)

    def send(self, tensor: Tensor, rank: int, group: Group) -> FakeWork:
        """A message is a collective of two ranks. Messages from one rank to another arrive in the order of sending."""
        return self._work("message", self._way(self.rank, rank, group), [tensor], [], None)

    def receive(self, tensor: Tensor, rank: int, group: Group) -> FakeWork:
        def act(given: list[list[Tensor]], _: int) -> None:
            tensor.copy_(given[0][0])

        return self._work("message", self._way(rank, self.rank, group), [], [tensor], act)

    def _way(self, source: int, target: int, group: Group) -> Group:
        """A group for messages from `source` to `target`, numbered separately from other collectives of the line."""
        assert {source, target} <= set(group.ranks)
        return Group((source, target), (group.number + 1) * 1000 + source)

    def abort(self, groups: Iterable[Group]) -> None:
        """`groups` are all that this rank has. What it waits for, and what it issues later, ends with wrong values."""
        self.devices.wake(self)

    def destroy(self, group: Group) -> None:
        """Nothing to do: a fake group has no resources."""

    def _work(
        self,
        verb: str,
        group: Group,
        sources: Sequence[Tensor],
        outs: Sequence[Tensor],
        act: Callable[[list[list[Tensor]], int], object] | None,
    ) -> FakeWork:
        self._num_works[group.number] += 1
        # Lines of one axis share a number; their ranks distinguish them.
        key = group.ranks, group.number, self._num_works[group.number], verb
        self.devices.count(self.devices.num_works, verb)
        work = FakeWork(self, key, group.ranks.index(self.rank), list(sources), list(outs), act)
        at_once = self.devices.acts_at_issue(self.rank, self._num_works.total())
        if verb == "message" and outs:  # the host continues before the message has been sent
            at_once = at_once and self.devices.has_come(key)
        work.begin(at_once=at_once)
        return work


@dataclass
class FakeWork:
    """One rank's part of a collective in flight. Its inputs may not change, and its outputs may not be touched."""

    groups: FakeGroups
    key: tuple[Ranks, int, int, str]
    place: int
    sources: list[Tensor]
    outs: list[Tensor]
    act: Callable[[list[list[Tensor]], int], object] | None
    """`None` for an operation that only sends, and does not wait for the others."""
    is_done: bool = False
    _kept: list[Tensor] = field(default_factory=list)
    _poisoned: list[Tensor] = field(default_factory=list)

    def begin(self, *, at_once: bool) -> None:
        self._kept = [source.detach().clone() for source in self.sources]
        self.groups.devices.give(self.key, self.place, self._kept)
        with torch.no_grad():
            for out in self.outs:
                self._poisoned += [part.detach() for part in outside_of(out, self.sources)]
            for part in self._poisoned:
                part.copy_(wrong_values(part))
        if at_once:
            self.finish()

    def wait(self) -> None:
        self.groups.devices.count(self.groups.devices.num_waited, self.key[-1])
        if not self.is_done:
            self.finish()

    def finish(self) -> None:
        for source, kept in zip(self.sources, self._kept, strict=True):
            if source.numel() and not source.untyped_storage().nbytes():
                raise Race(f"{self.key}: what is sent was freed on its way")
            if not torch.equal(_bits(source), _bits(kept)):
                raise Race(f"{self.key}: what is sent was changed on its way")
        for part in self._poisoned:
            if not part.untyped_storage().nbytes():
                raise Race(f"{self.key}: what is to be filled was freed on its way")
            if not torch.equal(_bits(part), _bits(wrong_values(part))):
                raise Race(f"{self.key}: what is to be filled was written to on its way")
        given = self.groups.devices.take(self.key, len(self.key[0]), self.groups) if self.act is not None else None
        if self.act is not None and given is not None:
            with torch.no_grad():
                self.act(given, self.place)
        self.is_done = True


def outside_of(out: Tensor, sources: Sequence[Tensor]) -> list[Tensor]:
    """The flat parts of `out` that do not overlap with a source."""
    if not out.numel():
        return []
    size, parts, start = out.element_size(), [], 0
    first = out.data_ptr()
    inside = [(s.data_ptr() - first) // size for s in sources if first <= s.data_ptr() < first + out.nbytes]
    numels = [s.numel() for s in sources if first <= s.data_ptr() < first + out.nbytes]
    for begin, numel in sorted(zip(inside, numels, strict=True)):
        parts.append(out[start:begin])
        start = begin + numel
    return [part for part in (*parts, out[start:]) if part.numel()]


def wrong_values(tensor: Tensor) -> Tensor:
    """What is in `tensor` until it is filled.

    NaN, which spreads. -1 as an integer: no size and no count, as an index another row than was meant. Bools, and bytes
    (which may be those of bools), alternate: all of one value could be the right mask.
    """
    if tensor.dtype in (torch.bool, torch.uint8):
        alternating = torch.arange(tensor.numel(), device=tensor.device).view(tensor.shape) % 2 == 0
        return alternating if tensor.dtype == torch.bool else alternating.to(torch.uint8) * 255
    is_integer = not (tensor.is_floating_point() or tensor.is_complex())
    return torch.full_like(tensor, -1 if is_integer else torch.nan, requires_grad=False)


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    """The sum in the dtype that is sent, as a backend computes it."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


# -- the device itself ------------------------------------------------------------------------------


class FakeStream:
    def __init__(self, accelerator: FakeAccelerator, index: int) -> None:
        self.accelerator = accelerator
        self.index = index
        self.copies: list[FakeCopy] = []

    def wait_stream(self, other: FakeStream) -> None:
        self.accelerator.note("wait_stream", self, other)

    def wait_event(self, event: FakeEvent) -> None:
        self.accelerator.note("wait_event", self, event)
        for one in event.copies:
            one.order()

    def synchronize(self) -> None:
        self.accelerator.note("synchronize", self)


class FakeEvent:
    """An event remembers its device: a query while another device is current would open a context there."""

    def __init__(self, accelerator: FakeAccelerator, index: int) -> None:
        self.accelerator = accelerator
        self.index = index
        self.stream: FakeStream | None = None
        self.copies: list[FakeCopy] = []
        self.has_come = True

    def record(self, stream: FakeStream | None = None) -> None:
        self.accelerator.note("record", self, stream)
        self.stream = stream
        if stream is not None:
            stream.copies = [one for one in stream.copies if not one.is_landed]
            self.copies = list(stream.copies)  # copies of one stream are done in order

    def query(self) -> bool:
        self.accelerator.note("query", self)
        return self.has_come

    def synchronize(self) -> None:
        self.accelerator.note("synchronize", self)
        for one in self.copies:
            one.land()


class FakeCopy:
    """A copy between pinned memory and the device. A copy to the device may be used once computation is ordered after
    it; a copy to the host only once the host has waited."""

    def __init__(self, accelerator: FakeAccelerator, out: Tensor, source: Tensor, *, at_once: bool) -> None:
        self.accelerator = accelerator
        self.is_evict = accelerator.is_pinned(out)
        if not self.is_evict:
            accelerator.fill_evicted(source)
        assert self.is_evict != accelerator.is_pinned(source), "one end of a copy is pinned, the other on the device"
        self.out, self.source, self.kept = out, source, source.detach().clone()
        self.is_ordered = self.is_landed = self.is_done = False
        with torch.no_grad():
            out.copy_(wrong_values(out))
        if at_once:
            self._fill()

    def order(self) -> None:
        """Later work on the device is ordered after this copy."""
        if not self.is_ordered:
            self.is_ordered = True
            self.accelerator.count_waited()
            self.check_source()
            if not self.is_evict:
                self._fill()

    def land(self) -> None:
        """The host has waited for this copy: what it queues on the device from now on finds what was fetched."""
        if not self.is_landed:
            if not self.is_evict or not self.is_ordered:
                self.check_source()
            if not self.is_evict and not self.is_ordered:
                self.is_ordered = True
                self.accelerator.count_waited()
            self.is_landed = True
            self._fill()

    def check_source(self) -> None:
        if not self.source.untyped_storage().nbytes() or not torch.equal(_bits(self.source), _bits(self.kept)):
            raise Race("what is copied was changed or freed on its way")

    def _fill(self) -> None:
        if not self.is_done:
            self.is_done = True
            self.out.data.copy_(self.kept)  # a device changes no versions: they count what the host queues


@dataclass
class Noted:
    thread: str
    index: int
    """The current device of that thread."""
    what: str
    about: tuple[Any, ...]


class FakeAccelerator:
    """A device type with any number of devices. Each thread has its own current device."""

    kind = "cuda"

    def __init__(self, num_devices: int = 8, devices: Devices | None = None) -> None:
        self.num_devices = num_devices
        self._devices = devices
        self._pinned: list[Tensor] = []
        self._locked: dict[int, int] = {}
        self._fetches: list[FakeCopy] = []
        self._evicts: list[FakeCopy] = []
        self.noted: list[Noted] = []
        self.generators = {index: torch.tensor([index], dtype=torch.uint8) for index in range(num_devices)}
        self.identities: dict[int, str] = {}
        self.locks_pages = True
        self.device_bytes: int | None = None
        self._here = threading.local()
        self._defaults = {index: FakeStream(self, index) for index in range(num_devices)}

    def fill_evicted(self, source: Tensor) -> None:
        """Complete copies to the host that are now fetched back. The fetch follows them, so the host need not wait."""
        self._evicts = [one for one in self._evicts if not one.is_done]
        for one in self._evicts:
            if one.is_ordered and one.out.untyped_storage().data_ptr() == source.untyped_storage().data_ptr():
                one._fill()

    def note(self, what: str, *about: Any) -> None:
        self.noted.append(Noted(threading.current_thread().name, self.current_index(), what, about))

    def current_index(self) -> int:
        return getattr(self._here, "index", 0)

    def use(self, index: int) -> None:
        assert 0 <= index < self.num_devices
        self._here.index = index

    def identity(self, index: int) -> str:
        return self.identities.get(index, "")

    def memory_bytes(self, index: int) -> int | None:
        return self.device_bytes

    def event(self) -> FakeEvent:
        return FakeEvent(self, self.current_index())

    def current_stream(self) -> FakeStream:
        stream = getattr(self._here, "stream", None)
        return stream if stream is not None else self._defaults[self.current_index()]

    def new_stream(self) -> FakeStream:
        return FakeStream(self, self.current_index())

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        before = getattr(self._here, "stream", None)
        self._here.stream = stream
        self.note("on", stream)
        try:
            yield
        finally:
            self.note("off", stream)
            self._here.stream = before

    def pinned(self, num_bytes: int) -> Tensor:
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        self._pinned.append(memory)
        return memory

    def is_pinned(self, tensor: Tensor) -> bool:
        address = tensor.untyped_storage().data_ptr()
        pinned = (memory.untyped_storage() for memory in self._pinned)
        ranges = [*self._locked.copy().items(), *((memory.data_ptr(), memory.nbytes()) for memory in pinned)]
        return any(start <= address < start + num_bytes for start, num_bytes in ranges)

    def copy(self, out: Tensor, source: Tensor) -> None:
        devices = self._devices
        at_once = devices is None or devices.acts_at_issue(self.current_index(), len(self._fetches))
        one = FakeCopy(self, out, source, at_once=at_once)
        self.current_stream().copies.append(one)
        (self._evicts if one.is_evict else self._fetches).append(one)
        if devices is not None:
            devices.count(devices.num_works, "copy")

    def count_waited(self) -> None:
        if self._devices is not None:
            self._devices.count(self._devices.num_waited, "copy")

    def check_sources(self) -> None:
        """A fetch that the host never waited for may still read its source at the end of the run."""
        for one in self._fetches:
            if not one.is_landed:
                one.check_source()

    def keep_for(self, tensor: Tensor, reader: FakeStream) -> Tensor:
        self.note("keep_for", tensor, reader)
        return tensor

    def rng_state(self) -> Tensor:
        return self.generators[self.current_index()].clone()

    def set_rng_state(self, state: Tensor) -> None:
        self.generators[self.current_index()] = state.clone()

    def lock_pages(self, address: int, num_bytes: int) -> Callable[[], None] | None:
        self.note("lock_pages", address, num_bytes)
        if not self.locks_pages:
            return None
        self._locked[address] = num_bytes

        def unlock() -> None:
            del self._locked[address]
            self.note("unlock_pages", address, is_mapped(address))

        return unlock


def is_mapped(address: int) -> bool:
    """Whether this process has memory mapped at `address`."""
    ranges = (line.split(maxsplit=1)[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(start, 16) <= address < int(end, 16) for start, end in ranges)
