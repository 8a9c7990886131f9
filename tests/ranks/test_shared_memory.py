"""Memory shared by ranks of one host: which ranks read and write it, and what happens where there is none."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import errno
import gc
import json
import mmap
import os
import struct
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from twins import adamw, assert_same, batches, engine_step, full_params, plain_run, sharded_run, work_on_ranks

import shardwise as sw
from shardwise.comm.transport.shm import futex, neighbours
from shardwise.comm.transport.shm.arena import Arena
from shardwise.comm.transport.shm.buffers import MappedBuffers
from shardwise.comm.transport.shm.file import PAGE, Mapping, SharedFile, bytes_of, is_possible
from shardwise.comm.transport.shm.offers import NUM_OFFERS, TO_ALL, OfferTable, offer_table_bytes
from shardwise.errors import CommError, StateError
from shardwise.memory import flat_gradients
from shardwise.system.pages import bring
from shardwise.testing import run_ranks
from tests import inside
from tests.models import Transformer
from tests.patience import PATIENCE
from tests.thorough import sampled

Tensor = torch.Tensor
pytestmark = [sampled, pytest.mark.skipif(not is_possible(), reason="this system has no memfd")]
CPU = torch.device("cpu")
MESH = {"node": 2, "local": 2}
MADV_POPULATE_READ = 22


def _can_bring() -> bool:
    """Whether the system maps pages in one call: Linux from 5.14 on."""
    page = mmap.mmap(-1, PAGE)
    return ctypes.CDLL(None).madvise(ctypes.byref(ctypes.c_char.from_buffer(page)), PAGE, MADV_POPULATE_READ) == 0


in_one_call = pytest.mark.skipif(not _can_bring(), reason="the system maps no pages in one call")


@pytest.fixture(scope="module")
def model() -> Transformer:
    torch.manual_seed(0)
    return Transformer()


def engines(num_ranks: int, model: nn.Module, work: Any, plan: Any = "zero3") -> list[Any]:
    return work_on_ranks(num_ranks, work, plan, lambda: copy.deepcopy(model))


# -- parameters ---------------------------------------------------------------------------------------------


def test_one_copy_is_read_by_all(model: Transformer) -> None:
    """What one rank writes to parameters at rest is read by all others, without messages."""

    def work(engine: sw.Engine) -> list[float]:
        flat = inside.flats(engine)[0]
        inside.ledger(engine).clear()
        inside.runner(engine).step.open_params()
        flat.param.fill_(engine.world.rank + 1)
        inside.runner(engine).step.close_params()
        engine.world.barrier()
        return sorted(set(flat.full.tolist()))

    assert engines(3, model, work) == [[1.0, 2.0, 3.0]] * 3


def test_parameters_are_written_when_no_other_rank_reads_them_any_more(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 reads when rank 0 waits to write, or has written."""
    has_come, plain_wait = threading.Event(), MappedBuffers.wait_until

    def wait_until(self: MappedBuffers, *counts: Any) -> None:
        if threading.current_thread().name == "rank 0":
            has_come.set()
        plain_wait(self, *counts)

    monkeypatch.setattr(MappedBuffers, "wait_until", wait_until)

    def work(engine: sw.Engine) -> bool:
        flat, step = inside.flats(engine)[0], inside.runner(engine).step
        engine.world.barrier()
        before = flat.full.clone()
        has_come.clear()
        engine.world.barrier()
        if engine.world.rank == 1:
            assert has_come.wait(PATIENCE)
            assert torch.equal(flat.full, before)
        step.open_params()
        flat.param.fill_(7)
        has_come.set()
        step.close_params()
        engine.world.barrier()
        return bool((flat.full == 7).all())

    assert engines(2, model, work) == [True] * 2


def test_parameters_can_be_read_between_steps(model: Transformer) -> None:
    twin = plain_run(model, batches(2, rows=12))

    def work(engine: sw.Engine) -> dict[str, Tensor]:
        for x, y in batches(2, rows=12):
            rows = slice(6 * engine.world.rank, 6 * (engine.world.rank + 1))
            engine_step(engine, None, (x[rows], y[rows]))  # type: ignore[arg-type]
        engine.world.barrier()
        return {name: param.detach().clone() for name, param in engine.module.named_parameters()}

    for params in engines(2, model, work):
        for name, param in twin.params.items():
            assert torch.allclose(params[name], param, atol=1e-5), name


def test_the_last_unit_stays_whole_until_its_backward_without_its_pages(model: Transformer) -> None:
    """A forward does not write to it, so its pages are not held until the loss is computed."""
    x, y = batches(1)[0]

    def work(engine: sw.Engine) -> tuple[bool, int]:
        [flat] = [flat for flat in inside.flats(engine) if any(slot.name == "head.weight" for slot in flat.slots)]
        for _ in range(2):  # then the program is followed
            engine_step(engine, None, (x, y))  # type: ignore[arg-type]
        loss = engine(x, y)
        pages = _num_present(flat.full)
        is_whole = flat.is_whole
        engine.backward(loss)
        return is_whole, pages

    for is_whole, pages in engines(2, model, work):
        assert is_whole
        assert pages == 0


class Looking(nn.Module):
    """Notes how many pages of its weight are there when it begins to compute, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(512, 512)
        self.present: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.look()
        y: Tensor = self.layer(x)
        if y.requires_grad:
            y.register_hook(lambda _: self.look())
        return y.relu()  # whose backward is the unit's first

    def look(self) -> None:
        self.present.append(_num_present(self.layer.weight))


@in_one_call
def test_pages_of_a_unit_are_there_before_they_are_read() -> None:
    """Those of the last unit, too, which go while the loss is computed."""
    x, models = torch.ones(2, 512), [nn.Sequential(Looking(), Looking()) for _ in range(2)]

    def rank(world: sw.World) -> list[list[int]]:
        model = models[world.rank]
        with sw.shard(model, "zero3", optimizer=adamw(model), world=world) as engine:
            for _ in range(3):  # then the program is followed
                engine.backward(engine(x).sum())
                engine.step()
        return [layer.present for layer in model]  # type: ignore[misc]  # they are `Looking`

    num_pages = 512 * 512 * 4 // PAGE
    for layers in run_ranks(2, rank):
        for present in layers:
            assert len(present) == 6
            assert all(found >= num_pages for found in present)


@in_one_call
def test_pages_of_neighbours_are_there_before_they_are_read() -> None:
    """Only those that are."""

    def rank(world: sw.World) -> list[int]:
        near, seen = world._host._neighbours, list[int]()  # type: ignore[attr-defined]

        def use(given: Tensor) -> None:
            seen.extend((given.numel() // PAGE, _num_present(given)))
            assert bool((given == 1 - world.rank).all())

        for tag, part in enumerate((lambda whole: whole[: 2**19], None)):
            near.offer(near.buffer(2**20).fill_(world.rank), tag, [1 - world.rank])
            near.take(1 - world.rank, tag, use, part)
            world.barrier()
            near.rest(keeps_some=True)
        left = sum(_num_present(view.whole) for view in near._mapped.values() if len(view.whole) == 2**20)
        return [*seen, left]

    assert run_ranks(2, rank) == [[128, 128, 256, 256, 0]] * 2


@in_one_call
def test_pages_are_made_in_one_call_to_be_written() -> None:
    memory = bytes_of(SharedFile.create().map(0, 2**20))
    small, large = memory[: 2**16], memory[2**19 :]
    memory[-1] = 7
    bring(small, to_write=True)
    assert _num_present(small) == 0, "a few faults take less"
    bring(large, to_write=True)
    assert (_num_present(large), _num_present(memory)) == (128, 128)
    assert memory[-1] == 7


def test_pages_of_new_memory_for_gradients_are_made_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under zero2 memory stays from step to step, as parameters do."""
    made: Counter[str] = Counter()
    models = [nn.Sequential(nn.Linear(512, 1024, bias=False), nn.Linear(1024, 512, bias=False)) for _ in range(2)]

    def note(view: Tensor, *, to_write: bool) -> None:
        assert to_write
        made[threading.current_thread().name] += view.numel()

    monkeypatch.setattr(flat_gradients, "bring", note)

    def rank(world: sw.World, preset: str) -> None:
        model = copy.deepcopy(models[world.rank])
        with sw.shard(model, preset, optimizer=adamw(model), world=world) as engine:
            for _ in range(3):
                engine.backward(engine(torch.ones(2, 512)).sum())
                engine.step()

    run_ranks(2, partial(rank, preset="zero2"))
    assert not made
    run_ranks(2, partial(rank, preset="zero3"))
    assert made == {f"rank {number}": 3 * 2 * 512 * 1024 for number in range(2)}


def _num_present(tensor: Tensor) -> int:
    """How many of its pages are present in this process."""
    first, last = tensor.data_ptr() // mmap.PAGESIZE, (tensor.data_ptr() + tensor.nbytes - 1) // mmap.PAGESIZE
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(8 * first)
        entries = struct.unpack(f"{last - first + 1}Q", pagemap.read(8 * (last - first + 1)))
    return sum(entry >> 63 for entry in entries)


def test_pages_stay_while_ranks_generate(model: Transformer) -> None:
    """Units come and go; their pages, which take no memory beside the parameters at rest, go at the end, and with them
    what this rank has written."""
    x, y = batches(1)[0]

    def work(engine: sw.Engine) -> tuple[int, int]:
        [flat] = [flat for flat in inside.flats(engine) if flat.name == "blocks.0"]
        engine.world.barrier()  # the other rank has written its part
        before = flat.full.clone()
        with engine.inference(keep_bytes=0):
            engine.module(x, y)
            assert not flat.is_whole
            pages = _num_present(flat.full)
            flat.full[0] = 7
        after = _num_present(flat.full)
        assert torch.equal(flat.full, before)
        return pages, after

    assert all(pages > 0 and after == 0 for pages, after in engines(2, model, work))


@pytest.mark.parametrize("writer", [0, 2])
def test_one_rank_edits_for_all(model: Transformer, writer: int) -> None:
    def work(engine: sw.Engine) -> float:
        with pytest.raises(StateError, match="there are ranks 0 to 2"):
            engine.gathered(write=True, writer=3)
        with engine.gathered("head.weight", write=True, writer=writer):
            engine.module.get_parameter("head.weight").data.fill_(0.5 + engine.world.rank)
        value = engine.get("head.weight")
        assert value is not None
        return float(value.mean())

    assert engines(3, model, work) == [0.5 + writer] * 3


@pytest.mark.parametrize("plan", ["zero3", {"preset": "zero3", "precision": "bf16"}, {"preset": "hsdp", "mesh": MESH}])
def test_reshard_set_and_load(model: Transformer, plan: Any) -> None:
    """Everything that writes parameters, one after the other, with a forward in between."""
    x, y = batches(1, rows=4)[0]

    def work(engine: sw.Engine) -> list[float]:
        losses = []
        state = engine.state_dict()
        value = engine.get("head.weight")
        assert value is not None
        for change in (
            lambda: engine.set("head.weight", value * 2),
            lambda: engine.load_state_dict(state),
            lambda: engine.reshard("zero2"),
            lambda: engine.reshard(plan),
            lambda: engine.set("head.weight", value * 2),
        ):
            change()
            with torch.no_grad():
                losses.append(round(float(engine(x, y)), 4))
        return losses

    told = engines(4, model, work, plan)
    assert all(losses == told[0] for losses in told)
    doubled, plain, _, again, at_last = told[0]
    assert (doubled, plain) == (at_last, again) != (plain, doubled)


def test_nothing_stays_mapped(model: Transformer) -> None:
    """Closed engines leave no mapping and no file descriptor behind."""

    def shared() -> int:
        gc.collect()
        return Path("/proc/self/maps").read_text().count("memfd:shardwise")

    def work(engine: sw.Engine) -> None:
        engine.world.barrier()
        assert shared() > 0
        engine.world.barrier()

    before, open_before = shared(), num_descriptors()
    for _ in range(3):
        engines(2, model, work)
    assert shared() <= before
    assert num_descriptors() <= open_before


def num_descriptors() -> int:
    """Descriptors of our shared memory, and of processes that have it too. Others in this process are other tests'
    threads' affair, and come and go."""
    found = 0
    for one in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of this loop, or closed meanwhile
            found += any(kind in os.readlink(one) for kind in ("memfd:shardwise", "[pidfd]"))
    return found


# -- two hosts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["hsdp", "hpz", "zero3", "zero1"])
def test_lines_beyond_a_host_go_by_messages(preset: str, model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hosts of two ranks: the inner axis shares memory, the outer one does not."""

    def host() -> str:
        return "ab"[int(threading.current_thread().name.removeprefix("rank ")) // 2]

    monkeypatch.setattr(neighbours, "host_identity", host)
    transports: list[list[str]] = []

    def after(engine: sw.Engine) -> dict[str, Any]:
        collectives = engine.world.collectives(CPU)
        transports.append([collectives.transport(engine.world.group(engine.mesh, axis)) for axis in engine.mesh.axes])
        return {}

    data = batches(5, rows=12)
    assert_same(sharded_run(model, data, preset, 4, MESH, after=after), plain_run(model, data))
    assert transports == [["threads", "shared memory"]] * 4


def test_where_memory_cannot_be_shared_messages_are_sent(
    model: Transformer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> SharedFile:
        raise PermissionError("not allowed to look")

    monkeypatch.setattr(SharedFile, "attach", refuse)
    data = batches(3, rows=12)
    run = sharded_run(model, data, "zero3", 2, None, after=lambda engine: {"how": str(engine)})
    assert_same(run, plain_run(model, data))
    assert "along dp by threads" in run.extra["how"]
    assert "share no memory (not allowed to look)" in caplog.text


def test_where_nothing_can_rest_in_common_collectives_still_share(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank lacks address space for it. Parameters rest separately on all ranks, and are gathered through blocks."""
    plain_map = SharedFile.map_privately

    def refuse(self: SharedFile, offset: int, num_bytes: int) -> Mapping:
        if threading.current_thread().name == "rank 1":
            raise OSError("Cannot allocate memory")
        return plain_map(self, offset, num_bytes)

    monkeypatch.setattr(SharedFile, "map_privately", refuse)

    def after(engine: sw.Engine) -> dict[str, Any]:
        return {"how": str(engine), "rests_apart": all(flat.shared is None for flat in inside.flats(engine))}

    data = batches(5, rows=12)
    run = sharded_run(model, data, "zero3", 3, None, after=after)
    assert_same(run, plain_run(model, data))
    assert "by shared memory" in run.extra["how"]
    assert run.extra["rests_apart"]


def test_a_unit_takes_no_descriptor() -> None:
    """With one each, hundreds of units would exceed the usual limit of 1024."""

    def num_open(units: int) -> int:
        layers = nn.Sequential(*(nn.Linear(2, 2) for _ in range(units)))

        def rank(world: sw.World) -> int:
            model = copy.deepcopy(layers)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            engine = sw.shard(
                model, {"preset": "zero3", "units": {"class": "Linear"}}, optimizer=optimizer, world=world
            )
            engine.backward(engine(torch.ones(1, 2)).sum())
            engine.step()
            world.barrier()
            num = num_descriptors()
            world.barrier()
            return num

        return max(run_ranks(2, rank))

    assert num_open(60) == num_open(5) > 0


def test_a_mapping_lives_as_long_as_what_was_made_from_it() -> None:
    file = SharedFile.create()
    whole = file.map(0, 2 * PAGE)
    file.close()
    view = bytes_of(whole)[PAGE:]
    address = view.data_ptr()
    del whole
    gc.collect()
    view.fill_(7)
    assert view.sum() == 7 * PAGE
    assert f"{address - PAGE:x}-" in Path("/proc/self/maps").read_text()
    del view
    assert f"{address - PAGE:x}-" not in Path("/proc/self/maps").read_text()


def test_what_the_system_refuses_is_told_in_its_words() -> None:
    file = SharedFile.create()
    with pytest.raises(OSError, match="Cannot allocate memory"):
        file.map(0, 2**60)
    file.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        file.map(0, PAGE)


@pytest.mark.parametrize("num_heard", [0, 1])
def test_a_meeting_that_fails_leaves_nothing_open(num_heard: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a rank dies while those of the next generation meet: the others do so again in the same process."""
    heard: list[bytes] = []

    def exchange(message: bytes) -> list[bytes]:
        if len(heard) == num_heard:
            raise CommError("A rank is gone.")
        heard.append(message)
        return [message, json.dumps({**json.loads(message), "pid": os.getppid()}).encode()]

    monkeypatch.setattr(SharedFile, "attach", lambda _, number: SharedFile(os.dup(number)))
    before = num_descriptors()
    with pytest.raises(CommError, match="gone"):
        neighbours.Neighbours.meet(0, exchange)
    gc.collect()
    assert num_descriptors() == before


def test_a_file_that_cannot_be_long_enough_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ulimit -f` bounds it as any other."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    before = num_descriptors()
    monkeypatch.setattr(os, "ftruncate", refuse)
    with pytest.raises(OSError, match="File too large"):
        SharedFile.create()
    assert num_descriptors() == before


def test_of_a_neighbours_blocks_the_least_recently_used_is_unmapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "_NUM_MAPPED", 2)

    def rank(world: sw.World) -> list[int]:
        near = world._host._neighbours  # type: ignore[attr-defined]
        for offset in (1, 2, 1, 3):
            near._view(1 - world.rank, offset * PAGE, PAGE)
        return [offset // PAGE for _, offset, _ in near._mapped]

    assert run_ranks(2, rank) == [[1, 3]] * 2


# -- the parts ----------------------------------------------------------------------------------------------


def test_what_is_offered_in_place_is_overwritten_when_all_have_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 reads when rank 0 waits for its readers, or has overwritten what it offers."""
    has_come, plain_await = threading.Event(), neighbours.Neighbours.await_readers

    def await_readers(self: neighbours.Neighbours, number: int) -> None:
        if self.rank == 0:
            has_come.set()
        plain_await(self, number)

    monkeypatch.setattr(neighbours.Neighbours, "await_readers", await_readers)

    def rank(world: sw.World) -> list[float]:
        collectives = world.collectives(CPU)
        full = collectives.buffer(6, torch.float32)
        own, others = full.chunk(2) if world.rank == 0 else full.chunk(2)[::-1]
        own.fill_(world.rank)
        gathering = collectives.all_gather(full, world.everybody, "values")
        if world.rank == 1:
            assert has_come.wait(PATIENCE)
        gathering.wait()
        own.fill_(7)
        has_come.set()
        return others.tolist()

    assert run_ranks(2, rank) == [[1.0] * 3, [0.0] * 3]


class _Overtaken(OfferTable):
    """As a reader sees it, while its owner does something between two of its looks."""

    def __init__(self, *args: Any, before_look: int, owner_acts: Callable[[], object]) -> None:
        super().__init__(*args, is_own=False)
        self._left, self._owner_acts = before_look, owner_acts

    def _order(self) -> None:
        super()._order()
        self._left -= 1
        if self._left == 0:
            self._owner_acts()


@pytest.mark.parametrize("before_look", [1, 2])
@pytest.mark.parametrize("next_tag", [7, 8])
def test_a_slot_is_used_again_while_it_is_looked_at(next_tag: int, before_look: int) -> None:
    """Of an all-to-all all messages have one tag. One for another reader makes room for the next collective's, or for
    another message of the same."""
    file = SharedFile.create()
    mapped = file.map(0, offer_table_bytes(3))
    owner = OfferTable(mapped, 3, is_own=True)
    slot = owner.put(7, 1, 0, 4096, 0, 1024)

    def take_its_place() -> None:
        owner.clear(slot)
        assert owner.put(next_tag, TO_ALL if next_tag == 8 else 2, 4096, 4096, 64, 16) == slot

    reader = _Overtaken(mapped, 3, before_look=before_look, owner_acts=take_its_place)
    assert reader.find(7, 2) is None
    assert reader.find(next_tag, 2) == (slot, 4096, 4096, 64, 16)
    file.close()


def test_more_offers_than_there_are_places_for() -> None:
    def rank(world: sw.World) -> float:
        collectives = world.collectives(CPU)
        sharded, tensors = [], []
        for number in range(NUM_OFFERS + 20):
            if world.rank == 0:
                tensors.append(torch.full((3,), float(number)))
            else:
                tensors.append(torch.zeros(3))
            sharded.append(collectives.broadcast(tensors[-1], 0, world.everybody, "values"))
            if world.rank == 1:
                sharded[-1].wait()
        if world.rank == 0:
            for work in sharded:
                work.wait()
        world.barrier()
        return float(torch.stack(tensors).sum())

    assert run_ranks(2, rank) == [3.0 * sum(range(NUM_OFFERS + 20))] * 2


def test_short_messages_have_places_in_turn_and_long_ones_follow_them() -> None:
    """A short one takes no memory of its own, and its place is free again when all have read it."""
    lengths = [0, 1, 56, 57, 4096] * (2 * NUM_OFFERS // 5)

    def message(rank: int, number: int) -> bytes:
        length = lengths[(number + rank) % len(lengths)]
        return bytes((rank + number + place) % 256 for place in range(length))

    def rank(world: sw.World) -> bool:
        received = [world.exchange(message(world.rank, number), "a message") for number in range(len(lengths))]
        return received == [[message(other, number) for other in range(3)] for number in range(len(lengths))]

    assert run_ranks(3, rank) == [True] * 3


@pytest.mark.parametrize("by_futex", [True, False], ids=["futex", "naps"])
def test_a_word_wakes_who_waits(by_futex: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not by_futex:
        monkeypatch.setattr(futex, "_FUTEX", None)
    file = SharedFile.create()
    writer, reader = (futex.Futex(file.map(0, mmap.PAGESIZE)) for _ in range(2))
    seen = reader.value
    reader.wait_while(seen, 0.01)
    assert reader.value == seen  # it timed out
    woken = threading.Event()

    def wait() -> None:
        while reader.value == seen:
            reader.wait_while(seen, 2 * PATIENCE)
        woken.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    writer.advance()
    assert woken.wait(PATIENCE)  # long before its time is over
    waiting.join()
    assert reader.value == writer.value == seen + 1
    reader.wait_while(seen, 20)  # it has changed by now


def test_blocks_are_used_again_once_nobody_needs_them() -> None:
    arena = Arena(SharedFile.create(), mmap.PAGESIZE)
    large = arena.take(10 * 2**20)
    address = large.data_ptr()
    view = large[5:]
    del large
    second = arena.take(10 * 2**20)
    assert second.data_ptr() != address  # a view still exists
    del view
    third = arena.take(9 * 2**20)
    assert third.data_ptr() == address
    small = arena.take(10)
    assert small.numel() == 10
    found = arena.find(third[100:])
    assert found is not None
    assert found[1] == 100
    assert arena.find(torch.zeros(4)) is None


def test_requests_of_several_sizes_take_blocks_that_stay_in_any_case() -> None:
    """Messages alternate with gradients in a backward, and each new block is new pages."""
    arena = Arena(SharedFile.create(), mmap.PAGESIZE)

    def place_of(num_bytes: int) -> int:
        return arena.take(num_bytes).data_ptr()  # idle again at once

    message, gradient = place_of(900_000), place_of(8 * 2**20)
    assert place_of(300_000) == message, "a small block stays beside a large one"
    assert place_of(2 * 2**20) != gradient, "a large one is given back, where none is kept between steps"
    gradient = place_of(8 * 2**20)
    arena.rest(keeps_some=True)
    assert place_of(2 * 2**20) == gradient == place_of(8 * 2**20)
    held = arena.take(900_000)
    assert place_of(64) != gradient, "a few bytes take no large block from what comes next"
    del held
    assert place_of(300_000) == message
    arena.rest(keeps_some=False)
    assert place_of(900_000) == message


def test_pages_of_idle_blocks_are_given_back() -> None:
    file = SharedFile.create()
    arena = Arena(file, mmap.PAGESIZE)
    blocks = [arena.take(4 * 2**20) for _ in range(4)]
    for block in blocks:
        block.fill_(1)
    assert _pages_bytes(file) >= 16 * 2**20
    del blocks, block
    arena.rest(keeps_some=True)
    assert 8 * 2**20 <= _pages_bytes(file) <= 9 * 2**20
    arena.rest(keeps_some=False)
    assert _pages_bytes(file) < 2**20


def test_first_values_for_stages_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stages send each other in a step is much smaller, and would never need these blocks."""
    arenas: list[Arena] = []

    class Known(Arena):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            arenas.append(self)

    monkeypatch.setattr(neighbours, "Arena", Known)
    plan = {"preset": "ddp", "mesh": {"dp": 1, "pp": 2}}

    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(600, 600, bias=False) for _ in range(4)))

    def work(engine: sw.Engine) -> None:
        engine.world.barrier()  # both have been in `shard` for as long as it takes
        assert not [block for arena in arenas for block in arena._blocks if block.num_bytes >= 600 * 600 * 4]

    work_on_ranks(2, work, plan, build)
    assert len(arenas) == 2


def test_a_buffer_that_has_moved_gives_its_pages_back() -> None:
    """Each rank's own pages, except those in which a neighbour's part begins or ends."""

    def rank(world: sw.World) -> tuple[int, int]:
        model = nn.Linear(1024, 1023)
        with sw.shard(model, "zero3", optimizer=torch.optim.SGD(model.parameters()), world=world) as engine:
            (flat,) = inside.flats(engine)
            assert flat.shared is not None
            own = flat.shared.own
            assert own.count_nonzero() > 0.9 * own.numel()
            engine.reshard("ddp")
            world.exchange(b"", "moved")
            return int(own.count_nonzero()), own.numel()

    for left, num_bytes in run_ranks(2, rank):
        assert left <= 2 * PAGE < num_bytes // 100


def _pages_bytes(file: SharedFile) -> int:
    return Path(f"/proc/self/fd/{file.descriptor}").stat().st_blocks * 512


def test_full_params_are_the_masters(model: Transformer) -> None:
    def work(engine: sw.Engine) -> float:
        whole = full_params(engine)
        mine = {name: param.detach() for name, param in engine.module.named_parameters()}
        return max(float((whole[name] - mine[name]).abs().max()) for name in whole)

    assert engines(4, model, work) == [0.0] * 4
