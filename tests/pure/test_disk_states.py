"""Masters and states on a disk, updated slice by slice, are what the plain optimizer makes of the whole tensor."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.errors import ModelError, StateError, TierError
from shardwise.optim import AdamW, Lamb, Lion
from shardwise.optim.disk_states import DiskStates
from shardwise.optim.host_adam import HostAdam
from shardwise.system.disk import PAGE, BufferPool, IoQueue, SlicedFile, SystemCalls, TierFolder
from shardwise.system.telemetry import Timeline, hidden_share, write_trace
from tests.patience import PATIENCE

Tensor = torch.Tensor
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
NUMEL, SLICE = 5000, 1024

OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "adam, amsgrad": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True, weight_decay=0.1),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, initial_accumulator_value=0.5),
    "rprop": lambda params: torch.optim.Rprop(params, lr=0.1),
    "asgd": lambda params: torch.optim.ASGD(params, lr=0.1),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, centered=True),
    "lion": lambda params: Lion(params, lr=0.01),
    "our adamw": lambda params: AdamW(params, lr=0.01),
}


@pytest.fixture
def queue() -> Iterator[IoQueue]:
    made = IoQueue(depth=2, block_bytes=2 * PAGE)
    yield made
    made.close()


def start() -> tuple[nn.Parameter, Tensor]:
    numbers = torch.Generator().manual_seed(3)
    return nn.Parameter(torch.randn(NUMEL, generator=numbers)), torch.randn(NUMEL, generator=numbers).bfloat16()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_elementwise_optimizer(tmp_path: Path, queue: IoQueue, name: str) -> None:
    param, grad = start()
    plain = OPTIMIZERS[name]([param])
    (group,) = plain.param_groups
    other = OPTIMIZERS[name]([nn.Parameter(param.detach().clone())])
    before = str(other.state_dict())
    folder = TierFolder(tmp_path)
    states = DiskStates(folder, "h.0", param.detach(), other, other.param_groups[0], queue, slice_numel=SLICE)
    pool = BufferPool(3, states.buffer_bytes)
    out = torch.zeros(NUMEL, dtype=torch.bfloat16)
    for factor in (1.0, -0.5, 2.0):
        group["lr"] *= 0.7  # as a scheduler does
        param.grad = grad.float() * factor
        plain.step()
        states.step(grad, {**group, "params": []}, pool, out=out, scale=factor)
        assert torch.allclose(states.get("param"), param, rtol=1e-6, atol=1e-7)
        assert torch.equal(out, states.get("param").bfloat16())
    shaped = {key: value for key, value in plain.state[param].items() if isinstance(value, Tensor) and value.dim()}
    assert set(states.keys) == {"param", *shaped}
    for key, value in shaped.items():
        assert torch.allclose(states.get(key), value, rtol=1e-6, atol=1e-7)
        assert torch.equal(states.get(key, 1000, 3001), states.get(key)[1000:3001])
    for key, value in states.scalars.items():
        assert value == plain.state[param][key]
    assert pool.num_free == 3
    assert str(other.state_dict()) == before, "the optimizer is only read"
    folder.close()


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}])
def test_adam_in_threads_has_the_bits_of_torchs_fused_one(
    tmp_path: Path, queue: IoQueue, options: dict[str, bool]
) -> None:
    param, grad = start()
    plain = torch.optim.AdamW([param], lr=0.01, fused=True, **options)
    (group,) = plain.param_groups
    folder, adam = TierFolder(tmp_path), HostAdam(num_threads=2, slice_numel=128)
    states = DiskStates(folder, "h.0", param.detach(), plain, group, queue, slice_numel=SLICE)
    pool = BufferPool(3, states.buffer_bytes)
    for _ in range(3):
        param.grad = grad.float() * 0.3
        plain.step()
        states.step(grad, group, pool, scale=0.3, adam=adam)
    assert torch.equal(states.get("param"), param)
    assert all(torch.equal(states.get(key), plain.state[param][key]) for key in states.keys if key != "param")
    adam.close()
    folder.close()


def test_states_are_taken_over_and_given_back(tmp_path: Path, queue: IoQueue) -> None:
    """What a checkpoint needs: read after some steps, put into another file, and gone on with."""
    param, grad = start()
    plain = torch.optim.AdamW([param], lr=0.01)
    (group,) = plain.param_groups
    folder = TierFolder(tmp_path)
    first = DiskStates(folder, "first", param.detach(), plain, group, queue, slice_numel=SLICE)
    pool = BufferPool(3, first.buffer_bytes)
    first.step(grad, group, pool)
    second = DiskStates(folder, "second", torch.zeros(NUMEL), plain, group, queue, slice_numel=SLICE)
    for key in first.keys:
        second.put(key, first.get(key)[:777])
        second.put(key, first.get(key)[777:], start=777)
    second.scalars = dict(first.scalars)
    for states in (first, second):
        states.step(grad, group, pool)
    assert all(torch.equal(first.get(key), second.get(key)) for key in first.keys)
    with (tmp_path / "checkpoint").open("w+b") as checkpoint:
        first.file.copy_to("exp_avg", checkpoint.fileno(), 100)
        checkpoint.seek(100)
        assert checkpoint.read() == first.get("exp_avg").numpy().tobytes()
    with pytest.raises(StateError, match=r"Elements 1 to 5001 of exp_avg"):
        first.get("exp_avg", 1, 5001)
    folder.close()


def test_what_cannot_lie_on_a_disk_is_refused(tmp_path: Path, queue: IoQueue) -> None:
    param = nn.Parameter(torch.zeros(8))
    folder = TierFolder(tmp_path)
    for optimizer, said in (
        (AdamW([param], state_dtype="bf16"), "exp_avg as bfloat16"),
        (AdamW([param], state_dtype="int8"), "exp_avg as uint8"),
        (Lamb([param]), "looks at whole parameters"),
    ):
        with pytest.raises(ModelError, match=said):
            DiskStates(folder, "h.0", param.detach(), optimizer, optimizer.param_groups[0], queue)
    folder.close()
    assert not list(tmp_path.iterdir())


def test_a_timeline_shows_transfers_beside_updates(tmp_path: Path) -> None:
    """On a disk that ends the read of slice 2 and the write of slice 0 only while slice 1 is updated."""
    in_update, done = threading.Event(), threading.Semaphore(0)

    class Held(SystemCalls):
        slice_of: Callable[[int], int]

        def hold(self, verb: str, offset: int) -> None:
            if (verb, self.slice_of(offset)) in (("read", 2), ("write", 0)):
                assert in_update.wait(PATIENCE)
                done.release()

        def read(self, handle: int, into: memoryview, offset: int) -> int:
            self.hold("read", offset)
            return super().read(handle, into, offset)

        def write(self, handle: int, data: memoryview, offset: int) -> int:
            self.hold("write", offset)
            return super().write(handle, data, offset)

    disk, queue = Held(), IoQueue(depth=4, block_bytes=2**20)
    folder = TierFolder(tmp_path / "tier", calls=disk)
    file = SlicedFile(folder, "h.0", {"param": torch.float32}, NUMEL, queue, slice_numel=SLICE)
    disk.slice_of = lambda offset: offset // file.stride_bytes
    timeline = Timeline()
    timeline.start()

    def work(index: int, views: dict[str, Tensor]) -> None:
        if index == 1:
            in_update.set()
            assert all(done.acquire(timeout=PATIENCE) for _ in range(2))

    file.update(BufferPool(3, file.stride_bytes), work, timeline)
    events = timeline.stop()
    (updating,) = [event for event in events if event["name"] == "update h.0 slice 1"]
    for name in ("read h.0 slice 2", "write h.0 slice 0"):
        begun, ended = [event["ts"] for event in events if event["name"] == name]
        assert begun < updating["ts"] < ended, "it was under way when the update began"
    assert {event["name"] for event in events} == {
        f"{verb} h.0 slice {index}" for verb in ("read", "update", "write") for index in range(file.num_slices)
    }
    write_trace(tmp_path / "trace.json", [events])
    assert 0 < hidden_share(events) <= 1
    folder.close()
    queue.close()


def test_the_hidden_share_counts_what_overlaps_once() -> None:
    def events(*spans: tuple[str, str, float, float]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for cat, name, start, stop in spans:
            if cat == "host":
                found.append({"cat": cat, "ph": "X", "name": name, "ts": start, "dur": stop - start})
            else:
                found += [{"cat": cat, "ph": ph, "name": name, "ts": ts} for ph, ts in (("b", start), ("e", stop))]
        return found

    travel = ("on the way", "a", 0.0, 4.0), ("on the way", "b", 2.0, 6.0)
    assert hidden_share(events(*travel)) == 0
    assert hidden_share(events(*travel, ("host", "u", 3.0, 9.0))) == 0.5
    assert hidden_share(events(*travel, ("host", "u", 0.0, 3.0), ("host", "v", 2.0, 10.0))) == 1
    assert hidden_share(events(("host", "u", 0.0, 3.0))) == 1


def test_a_disk_that_fails_in_a_step_gives_all_buffers_back(tmp_path: Path, queue: IoQueue) -> None:
    class Failing(SystemCalls):
        def __init__(self) -> None:
            self.left = 10**6

        def write(self, handle: int, data: memoryview, offset: int) -> int:
            self.left -= 1
            if self.left < 0:
                raise OSError(5, "Input/output error")
            return super().write(handle, data, offset)

    disk = Failing()
    folder = TierFolder(tmp_path, calls=disk)
    file = SlicedFile(folder, "h.0", {"param": torch.float32}, NUMEL, queue, slice_numel=SLICE)
    pool = BufferPool(3, file.stride_bytes)
    disk.left = 2
    worked: list[int] = []
    with pytest.raises(TierError, match=r"Writing 4.0 KiB at byte 8192 of .*h\.0 failed: .*EIO"):
        file.update(pool, lambda index, views: worked.append(index))
    assert pool.num_free == 3
    assert len(worked) < file.num_slices + 1
    folder.close()


class Counting(torch.optim.SGD):
    """Counts its steps in its group."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.param_groups[0]["taken"] = self.param_groups[0].get("taken", 0) + 1
        super().step(closure)


def test_an_optimizer_that_counts_in_its_group_is_refused(tmp_path: Path, queue: IoQueue) -> None:
    """Each slice would count."""
    optimizer = Counting([nn.Parameter(torch.empty(0))], lr=0.1)
    folder = TierFolder(tmp_path)
    with pytest.raises(ModelError, match="changes taken of its group"):
        DiskStates(folder, "states", torch.zeros(8), optimizer, optimizer.param_groups[0], queue)
