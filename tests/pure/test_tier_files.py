"""Files of the disk tier: where bytes lie, what a broken disk says, whose a folder is, and what overlaps what."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import logging
import os
import shutil
import threading
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwise.errors import ConfigError, StateError, TierError
from shardwise.system.disk import (
    PAGE,
    BufferPool,
    Holder,
    IoQueue,
    Patience,
    Pending,
    Removals,
    Step,
    SystemCalls,
    TierFolder,
    check_local,
    copying,
    layout,
    remove_files_beside,
)
from shardwise.system.disk.align import down, requests
from shardwise.system.disk.slices import steps, walk
from shardwise.system.even_parts import round_up
from shardwise.system.named_folder import folder_of
from tests.patience import PATIENCE
from tests.thorough import drawn, varies

Tensor = torch.Tensor


def bytes_of(seed: int, num_bytes: int) -> Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


# --- where bytes lie -------------------------------------------------------------------------------------


@given(st.integers(0, 2**40), st.sampled_from([1, 512, PAGE, 2**20]))
def test_rounding(num_bytes: int, step: int) -> None:
    assert down(num_bytes, step) % step == round_up(num_bytes, step) % step == 0
    assert down(num_bytes, step) <= num_bytes <= round_up(num_bytes, step)
    assert round_up(num_bytes, step) - down(num_bytes, step) in (0, step)


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(1, 64).map(lambda pages: pages * PAGE))
def test_requests_cover_a_range_and_none_crosses_a_block(start: int, length: int, block: int) -> None:
    cut = list(requests(start, start + length, block))
    assert [first for first, _ in cut] == [start, *(last for _, last in cut[:-1])][: len(cut)]
    assert sum(last - first for first, last in cut) == length
    assert all(down(first, block) == down(last - 1, block) and first < last for first, last in cut)


@given(st.lists(st.integers(0, 20_000), max_size=8))
def test_a_layout_gives_each_name_pages_of_its_own(sizes: list[int]) -> None:
    regions = list(layout({str(number): size for number, size in enumerate(sizes)}).values())
    assert [region.num_bytes for region in regions] == sizes
    assert all(region.offset % PAGE == 0 and region.padded_bytes >= region.num_bytes for region in regions)
    assert all(one.stop == other.offset for one, other in itertools.pairwise(regions))


# --- reading and writing ---------------------------------------------------------------------------------


@varies
@settings(max_examples=drawn(10, 100), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 40_000), st.integers(0, 12_000)), min_size=1, max_size=12), st.booleans())
def test_any_bytes_at_any_place(tmp_path: Path, moves: list[tuple[int, int]], checksums: bool) -> None:
    """A file is what an array of bytes is, whatever is written where."""
    queue, folder = IoQueue(depth=3, block_bytes=2 * PAGE), TierFolder(tmp_path)
    file = folder.create("states", 52_000, queue, checksums=checksums)
    plain = torch.zeros(file.num_bytes, dtype=torch.uint8)
    for seed, (start, length) in enumerate(moves):
        data = bytes_of(seed, length)
        file.put(start, data)
        plain[start : start + length] = data
        first, last = max(0, start - 5), min(file.num_bytes, start + length + 5000)
        assert torch.equal(file.get(first, last), plain[first:last])
    assert torch.equal(file.get(0, file.num_bytes), plain)
    folder.close()
    queue.close()
    assert not list(tmp_path.iterdir())


class Disk(SystemCalls):
    """A disk that does as a test tells it: takes parts, is interrupted, refuses, or fails."""

    def __init__(self) -> None:
        self.script: dict[str, list[Any]] = {"read": [], "write": []}
        self.is_direct_refused = False
        self.free: int | None = None

    def open(self, path: Path, flags: int) -> int:
        if self.is_direct_refused and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return super().open(path, flags)

    def read(self, handle: int, into: memoryview, offset: int) -> int:
        part = self._next("read", len(into))
        return super().read(handle, into[:part], offset) if part else 0

    def write(self, handle: int, data: memoryview, offset: int) -> int:
        part = self._next("write", len(data))
        return super().write(handle, data[:part], offset) if part else 0

    def free_bytes(self, folder: Path) -> int:
        return super().free_bytes(folder) if self.free is None else self.free

    def _next(self, verb: str, length: int) -> int:
        todo = self.script[verb].pop(0) if self.script[verb] else length
        if isinstance(todo, BaseException):
            raise todo
        return min(length, int(todo))


@pytest.fixture
def queue() -> Any:
    made = IoQueue(depth=1, block_bytes=4 * PAGE)
    yield made
    made.close()


def test_parts_interruptions_and_refusals_of_direct_io_are_borne(
    tmp_path: Path, queue: IoQueue, caplog: pytest.LogCaptureFixture
) -> None:
    disk = Disk()
    folder = TierFolder(tmp_path, calls=disk)
    file = folder.create("states", 4 * PAGE, queue)
    pool = BufferPool(2, 4 * PAGE)
    one, other = pool.take(), pool.take()
    one.copy_(bytes_of(0, 4 * PAGE))
    disk.script["write"] = [PAGE, InterruptedError(), 2 * PAGE]
    disk.script["read"] = [InterruptedError(), 3 * PAGE, 10]
    file.write(0, one).wait()
    file.read(0, other).wait()
    assert torch.equal(one, other)
    disk.script["write"] = [OSError(errno.EINVAL, "Invalid argument"), OSError(errno.EINTR, "interrupted")]
    file.write(0, other).wait()  # opened past the cache, and then not written so
    file.write(0, other).wait()
    assert not file.is_direct
    folder.close()
    disk.is_direct_refused = True
    folder = TierFolder(tmp_path, calls=disk)
    file = folder.create("states", 4 * PAGE, queue)
    file.write(0, one).wait()
    file.read(0, other.zero_()).wait()
    assert torch.equal(one, other)
    assert not file.is_direct
    folder.create("more", PAGE, queue)
    said = [record.message for record in caplog.records if "page cache" in record.message]
    assert len(said) == 2, "once for each folder"
    folder.close()


@pytest.mark.parametrize(
    ("verb", "trouble", "said"),
    [
        ("write", OSError(errno.ENOSPC, ""), r"Writing 16.0 KiB at byte 16384 of .*states failed: .*ENOSPC.*Make room"),
        ("write", 0, "ENOSPC"),
        ("write", OSError(errno.EDQUOT, ""), "quota"),
        ("write", OSError(errno.EIO, ""), r"EIO\). The device reports a fault: see the kernel's log"),
        ("read", OSError(errno.EIO, ""), r"Reading 16.0 KiB at byte 16384 of .*states failed: .*EIO"),
        ("read", 0, "it ends at byte 16384. It was truncated"),
    ],
)
def test_what_a_broken_disk_says(tmp_path: Path, queue: IoQueue, verb: str, trouble: Any, said: str) -> None:
    disk = Disk()
    folder = TierFolder(tmp_path, calls=disk)
    file = folder.create("states", 8 * PAGE, queue)
    buffer = BufferPool(1, 8 * PAGE).take()
    disk.script[verb] = [4 * PAGE, trouble]  # the first block, then the second
    pending = file.write(0, buffer) if verb == "write" else file.read(0, buffer)
    with pytest.raises(TierError, match=said):
        pending.wait()
    file.write(0, buffer).wait()  # and goes on once it works again
    folder.close()


def test_a_block_that_changed_on_the_disk_is_noticed(tmp_path: Path, queue: IoQueue) -> None:
    folder = TierFolder(tmp_path)
    file = folder.create("states", 8 * PAGE, queue, checksums=True)
    buffer = BufferPool(1, 8 * PAGE).take()
    file.write(0, buffer.copy_(bytes_of(1, 8 * PAGE))).wait()
    os.pwrite(os.open(f"/proc/self/fd/{file.descriptor()}", os.O_WRONLY), b"?!", 5 * PAGE)
    file.read(0, buffer[: 4 * PAGE]).wait()
    with pytest.raises(TierError, match=r"byte 16384 of .*states are not what was written"):
        file.read(0, buffer).wait()
    with pytest.raises(TierError, match=r"byte 16384 of .*states are not what was written"):
        file.put(5 * PAGE + 1, bytes_of(2, 3))  # what shares the block with it is to stay
    file.put(4 * PAGE, bytes_of(2, 4 * PAGE))
    file.put(5 * PAGE + 1, bytes_of(2, 3))
    file.read(0, buffer).wait()
    assert torch.equal(file.get(5 * PAGE + 1, 5 * PAGE + 4), bytes_of(2, 3))
    folder.close()


@pytest.mark.parametrize("in_kernel", [True, False])
def test_any_bytes_are_copied_to_another_file(
    tmp_path: Path, queue: IoQueue, monkeypatch: pytest.MonkeyPatch, in_kernel: bool
) -> None:
    """Those that were just written past the page cache, between any places."""
    if not in_kernel:
        monkeypatch.setattr(os, "copy_file_range", lambda *_: (_ for _ in ()).throw(OSError(errno.EXDEV, "")))
        monkeypatch.setattr(copying, "PIECE_BYTES", 5000)
    folder = TierFolder(tmp_path / "tier")
    file = folder.create("states", 8 * PAGE, queue)
    plain = bytes_of(5, 8 * PAGE)
    file.put(0, plain)
    target = os.open(tmp_path / "checkpoint", os.O_RDWR | os.O_CREAT)
    for start, stop, at in ((0, 8 * PAGE, 0), (3, 3, 9), (PAGE - 1, 5 * PAGE + 7, 13), (0, PAGE, 8 * PAGE)):
        stayed = file.copy_to(target, at, start, stop)
        assert in_kernel or not stayed or start == stop
        assert os.pread(target, stop - start, at) == plain[start:stop].numpy().tobytes()
    os.ftruncate(file.descriptor(), 6 * PAGE)
    with pytest.raises(TierError, match=r"Copying 32.0 KiB at byte 0 of .*states failed: it ends at byte 24576"):
        file.copy_to(target, 0, 0, 8 * PAGE)
    os.close(target)
    folder.close()


def test_what_makes_no_sense_is_refused(tmp_path: Path, queue: IoQueue) -> None:
    folder = TierFolder(tmp_path)
    file = folder.create("states", 2 * PAGE, queue)
    pool = BufferPool(1, PAGE)
    buffer = pool.take()
    with pytest.raises(StateError, match="multiples of 4096"):
        file.read(0, buffer[1:])
    with pytest.raises(StateError, match="it has 8192"):
        file.write(2 * PAGE, buffer)
    with pytest.raises(StateError, match="All 1 buffers"):
        pool.take()
    pool.give_back(buffer)
    with pytest.raises(StateError, match="not lent"):
        pool.give_back(buffer)
    for depth, block in ((0, PAGE), (1, 1000), (1, 0)):
        with pytest.raises(ConfigError, match="at least 1, and blocks"):
            IoQueue(depth, block)
    folder.close()
    with pytest.raises(StateError, match="closed"):
        file.get(0, 1)
    with pytest.raises(StateError, match="given up"):
        folder.create("other", PAGE, queue)


# --- a disk that answers nothing -------------------------------------------------------------------------


class SilentDisk(SystemCalls):
    """Reads do not return until the test lets them."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()

    def read(self, handle: int, into: memoryview, offset: int) -> int:
        assert self.goes_on.wait(PATIENCE)
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_disk_that_answers_nothing_is_given_up_and_not_waited_for_again(tmp_path: Path) -> None:
    disk, patience = SilentDisk(), Patience("/scratch/run", 0.0)
    queue = IoQueue(depth=1, block_bytes=PAGE, patience=patience)
    file = TierFolder(tmp_path, calls=disk).create("states", PAGE, queue)
    try:
        with pytest.raises(TierError, match="/scratch/run has answered nothing for 0 s: none of its reads and writes"):
            file.read(0, BufferPool(1, PAGE).take()).wait()
        patience.seconds = PATIENCE  # none of these waits again
        with pytest.raises(TierError, match="has answered nothing"):
            file.read(0, BufferPool(1, PAGE).take()).wait()
        with pytest.raises(TierError, match="has answered nothing"):
            file.get(8, 16)  # one block is not read by the thread that waits for it either
        pending = file.read(0, BufferPool(1, PAGE).take())
        pending.join()
        assert not pending.is_done
        queue.close()
    finally:
        disk.goes_on.set()


def test_a_disk_that_goes_on_is_waited_for_however_slow_it_is() -> None:
    patience = Patience(seconds=600)
    waits: list[float | None] = []

    class Slow(Future[None]):
        """Done at the fourth wait; in each of those before another call of that disk returns."""

        def exception(self, timeout: float | None = None) -> BaseException | None:
            waits.append(timeout)
            if len(waits) < 4:
                patience.num_done += 1
                raise TimeoutError
            self.set_result(None)
            return None

    Pending([Slow()], patience).wait()
    assert waits == [600] * 4
    assert not patience.is_over


def test_files_on_a_disk_that_answers_nothing_are_deleted_when_it_does_or_named() -> None:
    removals, goes_on = Removals(), threading.Event()
    deleted: list[str] = []

    def fail() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def delete_later() -> None:
        assert goes_on.wait(PATIENCE)
        deleted.append("first")

    removals.start(Path("silent/first"), delete_later)
    removals.start(Path("silent/second"), lambda: deleted.append("second"))
    broken, done = threading.Event(), threading.Event()
    removals.start(Path("broken/file"), fail)
    removals.start(Path("broken/other"), broken.set)
    removals.start(Path("good/file"), done.set)
    assert broken.wait(PATIENCE)
    assert done.wait(PATIENCE), "another disk is not kept waiting"
    left = {Path("broken/file"), Path("silent/first"), Path("silent/second")}
    assert left <= set(removals.settle(0.0))
    removals.start(Path("silent/third"), lambda: deleted.append("third"))
    assert {*left, Path("silent/third")} <= set(removals.settle(PATIENCE)), "nobody waits for it again"
    goes_on.set()
    for thread in threading.enumerate():
        if thread.name == "shardwise removal":
            thread.join(PATIENCE)
    assert deleted == ["first"], "what was given up is not begun any more"


# --- whose a folder is -----------------------------------------------------------------------------------


def test_one_job_has_a_folder_and_each_rank_its_part(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = TierFolder(tmp_path)
    other_rank = TierFolder(tmp_path, rank=10)
    with pytest.raises(TierError, match=f"is being used by process {os.getpid()} on .*, which is this one. Close the"):
        TierFolder(tmp_path)
    folder.tidy_after_others()
    other_rank.tidy_after_others()
    folder.close()
    folder.close()
    again = TierFolder(tmp_path)
    assert not caplog.records, "nothing was left behind"
    again.close()
    other_rank.close()
    assert not list(tmp_path.iterdir())


def test_ranks_of_another_job_are_found_whatever_their_numbers(tmp_path: Path) -> None:
    ours = [TierFolder(tmp_path, rank=rank, job="ours") for rank in (0, 1)]
    other = TierFolder(tmp_path, rank=8, job="another")
    for folder in (*ours, other):
        with pytest.raises(TierError, match=f"{tmp_path} is being used by process {os.getpid()} on"):
            folder.tidy_after_others()
    other.close()
    for folder in ours:
        folder.tidy_after_others()
        folder.close()
    assert not list(tmp_path.iterdir())


def test_a_lock_that_somebody_only_looks_at_is_taken_after_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank that tidies up locks what a killed one has left, for a moment."""
    (tmp_path / "shardwise-rank-0.lock").write_text(json.dumps({"job": "killed", **asdict(Holder.me())}))
    handle = os.open(tmp_path / "shardwise-rank-0.lock", os.O_RDWR)
    fcntl.flock(handle, fcntl.LOCK_EX)
    threading.Timer(0.05, os.close, (handle,)).start()
    folder = TierFolder(tmp_path)
    assert "which was killed; it is used again" in caplog.text
    folder.close()
    assert not list(tmp_path.iterdir())


def test_a_disk_without_room_for_a_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the file system says so or writes only a part: one sentence, and nothing is left."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def writes_nothing(*_: object) -> int:
        return 0

    for write in (full, writes_nothing):
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", write)
            with pytest.raises(TierError, match=r"cannot be written to: No space left on device \(ENOSPC\)\. Make"):
                TierFolder(tmp_path)
        assert not list(tmp_path.iterdir())
    TierFolder(tmp_path).close()


def test_a_folder_stays_where_it_was_when_the_working_directory_changes(
    tmp_path: Path, queue: IoQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = TierFolder("scratch")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    folder.create("states", PAGE, queue)
    folder.close()
    assert not list((tmp_path / "scratch").iterdir())
    assert not list((tmp_path / "elsewhere").iterdir())


def test_what_a_lost_rank_has_written_is_read_by_another_and_removed(tmp_path: Path, queue: IoQueue) -> None:
    lost, other = TierFolder(tmp_path, rank=0, job="1"), TierFolder(tmp_path, rank=1, job="1")
    file = lost.create("rows", 2 * PAGE, queue, is_named=True)
    lost.create("more", PAGE, queue, is_named=True)
    lost.create("without a name", PAGE, queue)
    file.put(0, bytes_of(1, 2 * PAGE))
    path = file.path
    lost.close()
    found = other.open(path, 2 * PAGE, queue)
    assert torch.equal(found.get(10, 2 * PAGE), bytes_of(1, 2 * PAGE)[10:])
    remove_files_beside(path)
    assert [left.name for left in tmp_path.iterdir()] == ["shardwise-rank-1.lock"]
    with pytest.raises(TierError, match=r"rank-0\.rows cannot be opened: No such file or directory"):
        other.open(path, 2 * PAGE, queue)
    other.close()


def test_the_next_job_removes_what_the_last_one_kept_for_ranks_that_were_lost(tmp_path: Path, queue: IoQueue) -> None:
    for rank in (1, 7):
        folder = TierFolder(tmp_path, rank=rank, job="1")
        folder.create("rows", PAGE, queue, is_named=True)
        folder.close()
    assert len(list(tmp_path.iterdir())) == 2
    folder = TierFolder(tmp_path, rank=1, job="2")
    folder.tidy_after_others()
    folder.close()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_deleted_under_a_job(tmp_path: Path, queue: IoQueue) -> None:
    folder = TierFolder(tmp_path / "scratch")
    shutil.rmtree(tmp_path / "scratch")
    with pytest.raises(TierError, match=r"scratch cannot be asked for its free space: No such file .*Make the folder"):
        folder.create("states", PAGE, queue)
    folder.close()


def test_a_plan_may_name_a_folder_by_home_and_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SCRATCH", "/local/disk")
    monkeypatch.chdir(tmp_path)
    assert folder_of("~/scratch") == tmp_path / "scratch"
    assert folder_of("$SCRATCH/run-${SCRATCH}") == Path("/local/disk/run-/local/disk")
    assert folder_of("run") == tmp_path / "run"
    for text, words in (
        ("", "empty"),
        ("  ", "empty"),
        ("$NOT_SET_HERE/run", "not all of its variables are set"),
        ("~nobody-of-that-name/run", "no such user"),
    ):
        with pytest.raises(ConfigError, match=f"The plan's run is .*{words}"):
            folder_of(text, "run")


def test_a_lock_file_alone_holds_nobody_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "shardwise-rank-0.lock").write_text(json.dumps(asdict(Holder.me())))  # nobody has locked it
    folder = TierFolder(tmp_path)
    assert "which was killed; it is used again" in caplog.text
    folder.close()


def test_room_is_asked_for_first(tmp_path: Path, queue: IoQueue) -> None:
    disk = Disk()
    disk.free = 2**20
    folder = TierFolder(tmp_path, calls=disk)
    with pytest.raises(TierError, match=r"1.0 MiB free, and 1.5 MiB are needed: 512.0 KiB too little"):
        folder.create("states", 3 * 2**19, queue)
    file = folder.create("states", 2**19, queue)
    assert os.fstat(file.descriptor()).st_blocks * 512 >= 2**19, "taken, not only promised"
    disk.reserve = lambda handle, num_bytes: (_ for _ in ()).throw(OSError(errno.ENOSPC, ""))  # type: ignore[method-assign]
    with pytest.raises(TierError, match="cannot be made: No space left"):
        folder.create("more", PAGE, queue)
    folder.close()
    assert not list(tmp_path.iterdir())


def test_file_systems_of_other_machines_are_refused_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def table(kind: str) -> str:
        here = f"store:/home\\040dirs {tmp_path} {kind} rw 0 0\n"
        return f"/dev/vda / ext4 rw 0 0\n{here}none {tmp_path}/else tmpfs rw 0 0\n"

    for kind in ("nfs4", "cifs", "fuse.sshfs"):
        with pytest.raises(TierError, match=rf"is on {kind} \(store:/home dirs, mounted at .*over a network"):
            TierFolder(tmp_path / "states", mounts=table(kind))
    assert "other machines" in str(check_local(tmp_path / "deep" / "er", table("lustre")))
    assert "a program serves" in str(check_local(tmp_path, table("fuse.mergerfs")))
    assert "memory" in str(check_local(tmp_path / "else" / "where", table("nfs4")))
    assert check_local(tmp_path, table("xfs")) is None
    assert check_local(tmp_path, "") is None
    with caplog.at_level(logging.WARNING, "shardwise"):
        TierFolder(tmp_path / "states", mounts=table("lustre")).close()
    assert "lustre" in caplog.text


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TierError, match=r"cannot be made: .*name a folder"):
        TierFolder(tmp_path / "file" / "below")
    with pytest.raises(TierError, match=r"file cannot be made: File exists \(EEXIST\)\. It is a file: name a folder"):
        TierFolder(tmp_path / "file")


# --- what overlaps what ----------------------------------------------------------------------------------


@given(st.integers(0, 12), st.integers(1, 6))
def test_every_slice_is_read_worked_on_and_written_and_no_buffer_is_used_twice_at_once(
    num_slices: int, num_buffers: int
) -> None:
    used: dict[int, int] = {}
    done: list[tuple[str, int]] = []
    for step in steps(num_slices, num_buffers):
        done.append((step.verb, step.index))
        if step.verb == "read":
            assert step.buffer not in used, "its last slice has been written"
            used[step.buffer] = step.index
        assert used[step.buffer] == step.index
        if step.verb == "have_written":
            del used[step.buffer]
    assert not used
    verbs = ("read", "have_read", "work", "write", "have_written")
    for index in range(num_slices):
        assert [verb for verb, number in done if number == index] == list(verbs)
    assert [number for verb, number in done if verb == "work"] == list(range(num_slices))


def test_a_walk_reads_the_next_slice_and_writes_the_last_one_while_it_works() -> None:
    """By a clock that moves as the steps say: a transfer takes as long as it takes, beside work or not."""

    def length(num_buffers: int, read: int, work: int, write: int, num_slices: int = 10) -> int:
        now, disk_free, ends = 0, 0, {}
        for step in steps(num_slices, num_buffers):
            if step.verb in ("read", "write"):
                disk_free = max(disk_free, now) + (read if step.verb == "read" else write)
                ends["have_read" if step.verb == "read" else "have_written", step.index] = disk_free
            elif step.verb == "work":
                now += work
            else:
                now = max(now, ends[step.verb, step.index])
        return now

    assert length(3, read=2, work=5, write=3) == 2 + 10 * 5 + 3, "all but the first read and the last write is hidden"
    assert length(3, read=4, work=3, write=4) == 10 * 8, "where the disk is slower it is never idle"
    assert length(1, read=2, work=5, write=3) == 10 * (2 + 5 + 3), "one buffer: nothing overlaps"
    assert length(2, read=2, work=5, write=3) < length(1, read=2, work=5, write=3)


class Slow:
    """A transfer that another thread ends."""

    def __init__(self, name: str, log: list[str], failure: Exception | None = None) -> None:
        self.name, self.log, self.failure = name, log, failure
        self.may_end = threading.Event()

    def wait(self) -> None:
        assert self.may_end.wait(PATIENCE)
        self.log.append(f"{self.name} done")
        if self.failure is not None:
            raise self.failure


def test_work_goes_on_while_transfers_take_long() -> None:
    """The write of slice 0 and the read of slice 2 end only once slice 1 has been worked on."""
    log: list[str] = []
    reads = [Slow(f"read {index}", log) for index in range(3)]
    writes = [Slow(f"write {index}", log) for index in range(3)]
    reads[0].may_end.set()
    reads[1].may_end.set()

    def work(index: int, buffer: int) -> None:
        log.append(f"work {index}")
        if index == 1:
            assert "write 0 done" not in log
            assert "read 2 done" not in log
            for one in (*reads, *writes):
                one.may_end.set()

    walk(3, read=lambda index, _: reads[index], work=work, write=lambda index, _: writes[index])
    assert [line for line in log if line.startswith("work")] == ["work 0", "work 1", "work 2"]


@pytest.mark.parametrize("at", ["read", "work", "write"])
def test_a_failure_waits_for_what_is_under_way(at: str) -> None:
    log: list[str] = []
    broken = TierError("no disk")

    def transfer(verb: str, index: int) -> Slow:
        slow = Slow(f"{verb} {index}", log, broken if verb == at and index == 1 else None)
        slow.may_end.set()
        log.append(f"{verb} {index} begun")
        return slow

    def work(index: int, buffer: int) -> None:
        if at == "work" and index == 1:
            raise broken

    with pytest.raises(TierError, match="no disk"):
        walk(5, read=lambda i, _: transfer("read", i), work=work, write=lambda i, _: transfer("write", i))
    begun = {line.removesuffix(" begun") for line in log if line.endswith("begun")}
    done = {line.removesuffix(" done") for line in log if line.endswith("done")}
    assert begun == done
    assert Step("work", 0, 0) in list(steps(1))
    with pytest.raises(ConfigError, match="at least 1"):
        list(steps(3, 0))


def test_a_closed_queue_takes_no_requests() -> None:
    queue = IoQueue(depth=1, block_bytes=PAGE)
    done: list[bool] = []
    queue.start([lambda: done.append(True)])
    queue.close()
    queue.close()
    assert done == [True]
    with pytest.raises(StateError, match="asked for after its disk had been closed"):
        queue.start([lambda: None])


def test_each_request_is_noted_whichever_thread_does_it(tmp_path: Path, queue: IoQueue) -> None:
    """By these notes a rank whose disk is slow is told from one that hangs."""
    folder, done = TierFolder(tmp_path), list[int]()
    queue.note_done = lambda: done.append(threading.get_ident())
    file = folder.create("rows", 3 * queue.block_bytes, queue)
    file.put(0, bytes_of(1, PAGE))
    assert torch.equal(file.get(0, PAGE), bytes_of(1, PAGE))
    assert done == [threading.get_ident()] * 2
    file.get(0, file.num_bytes)
    assert len(done) == 5
    assert threading.get_ident() not in done[2:]
    folder.close()


def test_a_folder_does_not_keep_files_that_are_closed_and_forgotten(tmp_path: Path, queue: IoQueue) -> None:
    folder = TierFolder(tmp_path)
    for _ in range(3):
        folder.create("activations", PAGE, queue).close()
    kept = folder.create("rows", PAGE, queue)
    assert list(folder._files) == [kept]
    folder.close()
    with pytest.raises(StateError, match="rows is closed"):
        kept.descriptor()
