"""Which thread uses which device, tested with fake devices: as in torch, each thread has its own current device."""

from __future__ import annotations

import copy
import datetime
import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_devices import Devices, FakeAccelerator, FakeGroups, FakeStream, FakeWork, Noted
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch._subclasses.fake_tensor import FakeTensorMode
from twins import Batch, adamw, batches, share_of

import shardwise as sw
from shardwise.checkpoint import rng
from shardwise.comm import bootstrap
from shardwise.comm.transport import nccl
from shardwise.comm.transport.nccl import NcclGroups
from shardwise.comm.transport.pairwise import Nobody
from shardwise.comm.transport.process_groups import TorchGroups
from shardwise.comm.watch.fault import Fault
from shardwise.data import Loader, Samples, Workers
from shardwise.errors import CommError, ConfigError, FaultError, ModelError, StateError
from shardwise.init import check_model
from shardwise.memory.host_memory import HostMemory
from shardwise.sharded.sharding import check_device
from shardwise.system.devices import RankDevice, TorchAccelerator
from shardwise.system.disk import PAGE, BufferPool, Stage
from shardwise.system.process_rank import ProcessRank
from shardwise.system.telemetry import ByteMeter
from shardwise.testing import run_ranks
from tests import inside
from tests.models import Transformer
from tests.thorough import sampled

Tensor = torch.Tensor
CPU = torch.device("cpu")


def model_on_ranks(num_ranks: int) -> list[Transformer]:
    torch.manual_seed(0)
    model = Transformer(num_blocks=1)
    return [copy.deepcopy(model) for _ in range(num_ranks)]


def take_step(engine: sw.Engine, batch: Batch) -> None:
    engine.backward(engine(*batch))
    engine.step()


def by_thread(accelerator: FakeAccelerator, what: str) -> Iterator[Noted]:
    return (noted for noted in accelerator.noted if noted.what == what)


# -- the current device ------------------------------------------------------------------------------


def test_a_world_makes_its_ranks_device_the_current_one_until_it_is_closed() -> None:
    accelerator = FakeAccelerator()
    accelerator.use(2)
    with sw.World(0, 1, joining_nobody(), device=RankDevice.of(accelerator, 5)) as world:
        assert accelerator.current_index() == 5
        assert world.device == torch.device("cuda", 5)
    assert accelerator.current_index() == 2
    world.close()
    assert accelerator.current_index() == 2


def joining_nobody() -> Any:
    return Nobody()


def test_threads_of_the_library_ask_under_the_ranks_device() -> None:
    """The thread that watches for faults queries events with its rank's device as current; else it would open a context
    on the first device."""
    devices, models = Devices(), model_on_ranks(2)

    def rank(world: sw.World) -> None:
        model = models[world.rank]
        with sw.shard(model, "zero3", optimizer=adamw(model), world=world) as engine:
            take_step(engine, share_of(engine, batches(1)[0]))
            event = world.collectives(CPU)._marker._event
            event.has_come = False
            watched = threading.Thread(target=world.journal.awaited, name=f"asks {world.rank}")
            watched.start()
            watched.join()

    devices.run(2, rank)
    asked = [noted for noted in by_thread(devices.accelerator, "query") if noted.thread.startswith("asks")]
    assert sorted(noted.index for noted in asked) == [0, 1]
    assert all(noted.index == noted.about[0].index for noted in by_thread(devices.accelerator, "query"))


@pytest.mark.parametrize("wait", [True, False])
def test_a_save_copies_behind_what_was_queued_before(tmp_path: Path, wait: bool) -> None:
    """The threads that save have their own stream, and the first device as current by default. Their copies must use
    the rank's device, and wait for the training stream."""
    devices, models = Devices(), model_on_ranks(2)

    def rank(world: sw.World) -> None:
        model = models[world.rank]
        with sw.shard(model, "zero3", optimizer=adamw(model), world=world) as engine:
            take_step(engine, share_of(engine, batches(1)[0]))
            engine.save(tmp_path, wait=wait)

    devices.run(2, rank)
    copies = [noted for noted in by_thread(devices.accelerator, "on") if noted.thread.startswith("shardwise")]
    assert {noted.index for noted in copies} == {0, 1}
    assert all(noted.about[0].index == noted.index for noted in copies)
    waits = {noted.about[0]: noted.about[1] for noted in by_thread(devices.accelerator, "wait_event")}
    for noted in copies:
        event = waits[noted.about[0]]
        assert event.stream is devices.accelerator._defaults[noted.index]


def test_generators_of_the_ranks_device_are_kept() -> None:
    accelerator = FakeAccelerator()
    device = RankDevice.of(accelerator, 3)  # not the current one
    state = rng.capture(device)
    assert state["cuda"].tolist() == [3]
    accelerator.generators[3] = torch.tensor([7], dtype=torch.uint8)
    rng.restore(state, device)
    assert {index: kept.item() for index, kept in accelerator.generators.items()} == {n: n for n in range(8)}
    assert "cuda" not in rng.capture(RankDevice.cpu())
    rng.restore(state, RankDevice.cpu())


def test_batches_are_pinned_under_the_ranks_device_and_copied_beside_the_computation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accelerator = FakeAccelerator()
    pinned: list[int] = []

    def pin(tensor: Tensor) -> Tensor:
        pinned.append(accelerator.current_index())
        return tensor

    monkeypatch.setattr(Tensor, "pin_memory", pin)
    accelerator.use(3)
    reader = accelerator.current_stream()
    device = RankDevice(CPU, accelerator, 3)
    samples, workers = Samples(shuffle=False), Workers(2, device=device)
    with Loader(torch.arange(8.0), batch_rows=4, samples=samples, workers=workers) as loader:
        assert torch.cat(list(loader)).tolist() == list(range(8))
    assert len(pinned) >= 2  # some steps ahead
    assert set(pinned) == {3}
    order = [noted for noted in accelerator.noted if noted.what in ("on", "off", "wait_stream", "keep_for")]
    assert [noted.what for noted in order] == 2 * ["on", "off", "wait_stream", "keep_for"]
    copying = order[0].about[0]
    assert copying is not reader
    assert order[2].about == (reader, copying)
    assert order[3].about[1] is reader


# -- which device ------------------------------------------------------------------------------------


def test_a_device_without_a_number_is_the_ranks_own() -> None:
    mine = RankDevice.of(FakeAccelerator(), 3)
    assert mine.resolve("cuda") == torch.device("cuda", 3)
    assert mine.resolve("cuda:3") == torch.device("cuda", 3)
    assert mine.resolve("cpu") == CPU
    with pytest.raises(ConfigError, match=r"device is cuda:0, but this rank's device is cuda:3"):
        mine.resolve("cuda:0")
    assert RankDevice.cpu().resolve("cuda:1") == torch.device("cuda", 1)


def test_a_model_on_the_device_of_another_rank_is_refused_by_name() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = nn.ParameterDict({"weight": nn.Parameter(torch.empty(2, device="cuda:0"))})
    world = sw.World(1, 2, joining_nobody(), device=RankDevice.of(FakeAccelerator(), 1))
    assert check_model(model) == torch.device("cuda:0")
    with pytest.raises(ModelError, match=r"Parameter weight is on cuda:0, but this rank's device is cuda:1"):
        check_device(model, world)
    check_device(nn.Linear(2, 2), world)
    world.close()


@pytest.mark.parametrize(
    ("identities", "refusal"),
    [
        (["a", "b", "c"], ""),
        (["a", "b", "a"], "ranks 0 and 2 are shown the same device (a)"),
        (["a", "", "c"], "rank 1 has no accelerator of its own"),
    ],
)
def test_ranks_agree_whether_each_has_a_device_of_its_own(identities: list[str], refusal: str) -> None:
    store, told = HashStore(), {}

    def rank(number: int) -> None:
        told[number] = [bootstrap.agree_on_devices(store, number, 3, identities[number]) for _ in range(2)]

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert bootstrap.refusal_of(identities) == refusal
    said = {words for both in told.values() for words in both}
    if "same" in refusal:  # which of the two came first is random
        assert {" ".join(sorted(words.split())) for words in said} == {" ".join(sorted(refusal.split()))}
    else:
        assert said == {refusal}


@pytest.mark.parametrize(
    ("num_devices", "local_rank", "index"), [(1, 5, 0), (8, 5, 5), (4, 5, None), (8, 0, 0), (0, 0, None)]
)
def test_a_device_for_each_rank(
    num_devices: int, local_rank: int, index: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If each process sees only one device, that one has index 0 in every process."""
    found = FakeAccelerator(num_devices) if num_devices else None
    monkeypatch.setattr(TorchAccelerator, "found", staticmethod(lambda: found))
    monkeypatch.setattr(bootstrap.dist, "is_backend_available", lambda _: True)
    device = bootstrap.device_of(ProcessRank(local_rank=local_rank, local_size=8))
    assert device.device == (CPU if index is None else torch.device("cuda", index))
    assert bool(device.identity) == (index is not None)


def test_why_a_world_has_nothing_for_devices_is_told() -> None:
    world = sw.World(0, 2, joining_nobody())
    world._why_cpu = "ranks 0 and 1 are shown the same device (GPU-5)"
    with pytest.raises(CommError, match=r"ranks 0 and 1 are shown the same device \(GPU-5\)\. Give each rank"):
        world.collectives(torch.device("cuda", 0))
    world.close()


# -- streams and memory ------------------------------------------------------------------------------


def test_another_stream_than_the_first_is_refused() -> None:
    """Memory freed on one stream could be reused on the other while it is still being read."""
    devices, models = Devices(), model_on_ranks(2)

    def rank(world: sw.World) -> None:
        model = models[world.rank]
        batch = batches(1)[0]
        with sw.shard(model, "zero3", optimizer=adamw(model), world=world) as engine:
            take_step(engine, share_of(engine, batch))
            other = FakeStream(devices.accelerator, world.rank)
            with (
                devices.accelerator.on(other),
                pytest.raises(StateError, match="runs under another stream than the ones before it"),
            ):
                engine(*share_of(engine, batch))
            take_step(engine, share_of(engine, batch))

    devices.run(2, rank)


def test_pages_are_locked_as_they_are_and_unlocked_when_they_go() -> None:
    accelerator = FakeAccelerator()
    stage = Stage(RankDevice.of(accelerator, 2))
    memory = stage.sized(3 * 4096 + 1)
    (locked,) = by_thread(accelerator, "lock_pages")
    assert locked.index == 2
    assert locked.about == (memory.data_ptr(), memory.untyped_storage().nbytes())
    assert memory.untyped_storage().nbytes() < 4 * 4096, "not rounded to a power of two"
    memory = stage.sized(5 * 4096)
    gc.collect()
    (unlocked,) = by_thread(accelerator, "unlock_pages")
    assert unlocked.index == 2
    assert unlocked.about == (locked.about[0], True), "pages are unlocked while they are there"


@sampled
@pytest.mark.parametrize("locks_pages", [True, False])
def test_rows_on_the_host_take_the_pages_they_need(locks_pages: bool) -> None:
    accelerator = FakeAccelerator()
    accelerator.locks_pages = locks_pages
    host = HostMemory(ByteMeter(), RankDevice.of(accelerator, 1))
    row = host.zeros(1025, torch.float32, "optim")
    assert row.shape == (1025,)
    assert accelerator.is_pinned(row)
    (locked,) = by_thread(accelerator, "lock_pages")
    assert (locked.index, locked.about[1]) == (1, 4100)
    address = row.data_ptr()
    del row
    gc.collect()
    unlocked = [(address, True)] if locks_pages else []
    assert [noted.about for noted in by_thread(accelerator, "unlock_pages")] == unlocked


def test_a_pool_of_buffers_is_locked_once_and_each_begins_on_a_page() -> None:
    accelerator = FakeAccelerator()
    pool = BufferPool(3, PAGE + 1, RankDevice.of(accelerator, 1))
    buffers = [pool.take() for _ in range(3)]
    (locked,) = by_thread(accelerator, "lock_pages")
    assert locked.index == 1
    assert sorted(buffer.data_ptr() - locked.about[0] for buffer in buffers) == [0, 2 * PAGE, 4 * PAGE]
    assert all(buffer.data_ptr() % PAGE == 0 for buffer in buffers)
    del pool, buffers
    gc.collect()
    assert len(list(by_thread(accelerator, "unlock_pages"))) == 1


def test_graphs_that_record_addresses_are_refused_where_parameters_are_gathered() -> None:
    model = model_on_ranks(1)[0]

    def rank(world: sw.World) -> None:
        with pytest.raises(ConfigError, match="compile is 'cudagraphs', whose graphs read parameters where they lay"):
            sw.shard(copy.deepcopy(model), {"preset": "zero3", "compile": "cudagraphs"}, world=world)
        sw.shard(copy.deepcopy(model), {"preset": "ddp", "compile": "cudagraphs"}, world=world).close()

    run_ranks(2, rank)


# -- faults ------------------------------------------------------------------------------------------


def test_nothing_is_updated_with_what_a_device_brings_after_a_fault() -> None:
    """An abort wakes a rank that waits for others, with garbage in place of sums. No parameter may be updated by it."""

    class Aborted(FakeGroups):
        journal: Any = None

        def _work(self, verb: str, *more: Any) -> FakeWork:
            work = super()._work(verb, *more)
            if verb == "all_reduce" and self.journal is not None:  # the verdict
                honest = work.finish

                def finish() -> None:
                    honest()
                    self.journal.fault = Fault("lost", (1,), "Rank 1 is gone.")  # garbage may look like any verdict

                work.finish = finish  # type: ignore[method-assign]
            return work

    devices, models = Devices(), model_on_ranks(2)
    devices.join = lambda world: Devices.join(devices, world, Aborted)  # type: ignore[method-assign]

    def rank(world: sw.World) -> bool:
        model = models[world.rank]
        engine = sw.shard(model, "zero3", optimizer=adamw(model), world=world)
        batch = share_of(engine, batches(1)[0])
        take_step(engine, batch)
        engine.backward(engine(*batch))
        before = [flat.param.clone() for flat in inside.flats(engine)]
        world.collectives(CPU)._groups.journal = world.journal
        with pytest.raises(FaultError, match="Rank 1 is gone"):
            engine.step()
        inside.sharded(engine).unhook()
        return all(torch.equal(flat.param, kept) for flat, kept in zip(inside.flats(engine), before, strict=True))

    assert devices.run(2, rank) == [True, True]


def test_aborts_come_before_sockets_are_shut() -> None:
    """The fault must be recorded, and communicators aborted, before sockets are closed; else an operation could end
    with garbage that looks valid."""
    devices, order = Devices(), []

    def rank(world: sw.World) -> None:
        if world.rank:
            return
        groups: FakeGroups = world.collectives(CPU)._groups

        def abort(_: Any) -> None:
            order.append(("abort", world.journal.fault is not None, devices.accelerator.current_index()))

        groups.abort = abort  # type: ignore[method-assign]
        world._host.abort = lambda: order.append("host abort")  # type: ignore[method-assign, assignment, func-returns-value]
        assert world._watch is not None
        thread = threading.Thread(target=world._watch._deliver, args=[Fault("lost", (1,), "Rank 1 is gone.")])
        thread.start()
        thread.join()

    devices.run(2, rank)
    assert order == [("abort", True, 0), "host abort"]


def test_sockets_are_shut_even_if_an_abort_fails() -> None:
    devices, was_aborted = Devices(), []

    def rank(world: sw.World) -> None:
        def abort(_: Any) -> None:
            raise RuntimeError("no")

        world.collectives(CPU)._groups.abort = abort
        world._host.abort = lambda: was_aborted.append(world.rank)  # type: ignore[method-assign, assignment, func-returns-value]
        with pytest.raises(RuntimeError, match="no"):
            world._abort()

    devices.run(2, rank)
    assert sorted(was_aborted) == [0, 1]


def test_nccl_aborts_all_communicators_as_one() -> None:
    order: list[str] = []

    class Backend:
        def _group_start(self) -> None:
            order.append("start")

        def _group_end(self) -> None:
            order.append("end")

    class Communicator:
        def __init__(self, name: str) -> None:
            self.name = name

        def _get_backend(self, device: torch.device) -> Backend:
            assert device == torch.device("cuda")
            return Backend()

        def abort(self) -> None:
            order.append(self.name)

    world: Any = Communicator("world")
    groups = NcclGroups("nccl", torch.device("cuda", 1), 10, world)
    groups.abort([Communicator("gathers"), Communicator("reductions"), world])
    assert order == ["start", "gathers", "reductions", "world", "end"]


@pytest.mark.parametrize(("before", "after"), [(None, "0"), ("1", "0"), ("3", "3"), ("0", "0")])
def test_torchs_own_handling_of_errors_is_left_off(
    before: str | None, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would end the process before the error is read. `1` is torchrun's and is overridden; others are the user's."""
    monkeypatch.delenv(nccl.ERROR_HANDLING, raising=False)
    if before is not None:
        monkeypatch.setenv(nccl.ERROR_HANDLING, before)
    nccl.leave_errors_to_the_watch()
    assert nccl.os.environ[nccl.ERROR_HANDLING] == after
    monkeypatch.setenv(nccl.ERROR_HANDLING, "")  # so that monkeypatch restores it


def test_groups_have_the_timeout_of_the_world() -> None:
    """Torch gives later process groups its default timeout of ten minutes; ours get that of the world."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        groups = TorchGroups("gloo", CPU, 7, bootstrap.world_group())
        assert not groups.can_split
        made = groups.new_group((0,), is_urgent=True)
        assert made._get_backend(CPU).options._timeout == datetime.timedelta(seconds=7)
        full = torch.tensor([3.0])
        groups.all_gather(full, full, made).wait()
        groups.all_reduce(full, made).wait()
        groups.broadcast(full, 0, made).wait()
        assert full.tolist() == [3.0]
        groups.destroy(made)
    finally:
        dist.destroy_process_group()
