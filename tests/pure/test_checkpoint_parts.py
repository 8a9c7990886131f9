"""Parts of checkpoints that need no ranks: what is kept, values as JSON, whose folder it is, the image of a file."""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from shardwise.checkpoint import Content, Entry, Keep, checkpoints_in, newest
from shardwise.checkpoint.folder import tidy
from shardwise.checkpoint.image import WINDOW, Sums, image_of
from shardwise.checkpoint.index import LEAST_BLOCK_BYTES, Chunk, Index
from shardwise.checkpoint.json_codec import decode, encode
from shardwise.checkpoint.lock import LOCK, FolderLock
from shardwise.checkpoint.read import Reader
from shardwise.checkpoint.snapshot import Snapshot, staged
from shardwise.checkpoint.write import Copying, flush, live, write_text
from shardwise.errors import CheckpointError, ConfigError
from shardwise.plan.placement import Box, Span
from shardwise.system.devices import RankDevice
from shardwise.system.disk import PAGE, Holder

# --- what stays ------------------------------------------------------------------------------------------

LOSSES = {100: 3.0, 200: 1.0, 300: 2.0, 400: float("nan"), 500: 1.0}
SAID: dict[int, dict[str, float]] = {step: {"loss": loss} for step, loss in LOSSES.items()} | {600: {}}


@pytest.mark.parametrize(
    ("keep", "steps"),
    [
        (Keep(), set(SAID)),
        (Keep(last=2), {500, 600}),
        (Keep(last=99), set(SAID)),
        (Keep(every=300), {300, 600}),
        (Keep(best="loss"), {200}),
        (Keep(best="loss", num_best=3), {200, 500, 300}),
        (Keep(best="loss", largest=True), {100}),
        (Keep(best="elsewhere"), set()),
        (Keep(last=1, every=400, best="loss"), {600, 400, 200}),
    ],
)
def test_the_checkpoints_that_keep_leaves(keep: Keep, steps: set[int]) -> None:
    assert keep.chosen(SAID) == steps


@pytest.mark.parametrize("wrong", [{"last": 0}, {"every": -1}, {"num_best": 0}, {"last": 1.5}])
def test_keep_refuses(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        Keep(**wrong)


# --- values as JSON --------------------------------------------------------------------------------------

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
KEYS = st.text() | st.integers() | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner) | st.lists(inner).map(tuple),
    max_leaves=10,
)


@given(VALUES)
def test_values_come_back_as_they_were(value: Any) -> None:
    there = decode(json.loads(json.dumps(encode(value))))
    assert (there, type(there)) == (value, type(value))


def test_tensors_arrays_and_counters_come_back() -> None:
    value = {
        "bf16": torch.randn(2, 3).bfloat16(),
        "scalar": torch.tensor(7),
        "none": torch.empty(0, 4),
        "array": np.arange(6, dtype=np.uint32).reshape(2, 3),
        "number": np.float32(0.1),
        "milestones": Counter({30: 2, 60: 1}),
        "$tensor": "a key like one of ours",
    }
    there = decode(json.loads(json.dumps(encode(value))))
    for key in ("bf16", "scalar", "none"):
        assert torch.equal(there[key], value[key])
        assert there[key].dtype == value[key].dtype
    assert np.array_equal(there["array"], value["array"])
    assert there["array"].dtype == np.uint32
    assert (there["number"], type(there["number"])) == (value["number"], np.float32)
    assert (there["milestones"], type(there["milestones"])) == (value["milestones"], Counter)
    assert there["$tensor"] == "a key like one of ours"


@pytest.mark.parametrize("value", [{1, 2}, lambda: 1, object(), np.array([object()])])
def test_what_is_code_is_refused_by_its_place(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"state\['a'\]\[1\] is a"):
        encode({"a": [0, value]})


# --- whose folder ----------------------------------------------------------------------------------------


def holder(tmp_path: Path, **changes: Any) -> None:
    me = {"host": socket.gethostname(), "pid": os.getppid(), "began": 0.0, **changes}
    (tmp_path / LOCK).write_text(json.dumps(me))


def test_a_living_process_keeps_its_folder(tmp_path: Path) -> None:
    holder(tmp_path, began=psutil.Process(os.getppid()).create_time())
    with pytest.raises(CheckpointError, match=f"is being written to by process {os.getppid()} on"):
        FolderLock(tmp_path).acquire()


@pytest.mark.parametrize("changes", [{}, {"pid": 2**22 + 1}, {"host": "elsewhere"}, {"began": "no number"}])
def test_who_is_gone_is_followed(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Another process has its number; nobody has; it was on another host; the file says nothing."""
    holder(tmp_path, **changes)
    lock = FolderLock(tmp_path)
    assert lock.acquire()
    lock.check()
    assert not FolderLock(tmp_path).acquire()  # ours already
    holder(tmp_path, host="elsewhere", pid=7)
    with pytest.raises(CheckpointError, match="taken over by process 7 on elsewhere"):
        lock.check()
    lock.release()  # leaves the other's
    assert Holder(**json.loads((tmp_path / LOCK).read_text())).pid == 7


def test_a_rank_of_the_same_job_takes_over_from_one_that_lives_and_is_not_the_first_any_more(tmp_path: Path) -> None:
    """Its replica group has lost a rank, and it waits as a spare."""
    began = psutil.Process(os.getppid()).create_time()
    spare = {"pid": os.getppid(), "began": began, "job": "/dev/shm/job"}
    holder(tmp_path, **spare)
    for job in ("", "/dev/shm/other"):
        with pytest.raises(CheckpointError, match="is being written to by process"):
            FolderLock(tmp_path, job).acquire()
    lock = FolderLock(tmp_path, "/dev/shm/job")
    assert lock.acquire()
    lock.check()
    holder(tmp_path, **spare)  # and then the first of others again
    assert lock.is_passed_on()
    with pytest.raises(CheckpointError, match=r"is written to by process .* the first of the ranks of this job"):
        lock.check()
    lock.release()
    assert FolderLock(tmp_path, "/dev/shm/job").acquire()


@pytest.mark.parametrize("can_link", [True, False])
def test_of_two_hosts_that_share_a_folder_and_a_process_number_one_gets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, can_link: bool
) -> None:
    """The other one comes, and is refused or not, while the first has written its draft and not yet linked it."""
    link, others = os.link, []

    def link_later(source: Path, target: Path) -> None:
        if not others:
            others.append(FolderLock(tmp_path))
            others[0].acquire()
            others[0].release()
        if not can_link:
            raise OSError(errno.EPERM, "no links here")
        link(source, target)

    monkeypatch.setattr("os.link", link_later)
    lock = FolderLock(tmp_path)
    assert lock.acquire()
    lock.check()
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]


def test_a_lock_that_was_cut_off_holds_nobody_up(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text('{"host": "x", ')
    lock = FolderLock(tmp_path)
    assert lock.acquire()
    lock.release()
    assert not (tmp_path / LOCK).exists()


def test_a_replacement_that_was_cut_short_is_undone(tmp_path: Path) -> None:
    for name in (".replaced-step-00000003", "step-00000002", ".writing-step-00000004-1", ".removed-step-00000001"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.json").write_text("{}")
    (tmp_path / "latest").write_text("step-00000003")
    assert list(checkpoints_in(tmp_path)) == [2, 3]
    assert newest(tmp_path) == tmp_path / ".replaced-step-00000003"
    tidy(tmp_path)
    assert newest(tmp_path) == newest(tmp_path / "latest") == tmp_path / "step-00000003"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000002", "step-00000003"]


# --- the image of a file ---------------------------------------------------------------------------------


def content() -> Content:
    """Tensors of several widths, one with a hole, one larger than a window, an empty share, a scalar."""
    numbers = torch.Generator().manual_seed(0)
    large = torch.randn(WINDOW // 4 + 1001, generator=numbers)
    tensors = {"bf16": torch.randn(777).bfloat16(), "large": large, "bytes": torch.arange(5, dtype=torch.uint8)}
    tensors["strided"] = torch.randn(6, 4).t()
    entries = [
        Entry("param", name, Span(0, tensor.numel()), tensor, Span(0, tensor.numel()))
        for name, tensor in tensors.items()
    ]
    entries.append(Entry("param", "shared", Span(10, 30), torch.arange(10.0, 30.0), Span(15, 20)))
    entries.append(Entry("param", "copy", Span(0, 9), torch.zeros(9), Span(0, 0)))
    entries.append(
        Entry("state.step", "large", Span(0, 1), torch.tensor(3.0), Span(0, 1), is_whole=True, is_hidden=True)
    )
    return Content(entries=entries)


def test_an_image_is_what_safetensors_reads(tmp_path: Path) -> None:
    made = content()
    image = image_of("rank-00000.safetensors", made, {"rank/0": b'{"a": 1}'})
    stage = torch.zeros(image.padded_bytes, dtype=torch.uint8)
    snapshot = Snapshot(image, stage, RankDevice.cpu())
    snapshot.take()
    snapshot.go_on()
    snapshot.copy_rest()
    windows = [
        bytes(window) for window in live(image, torch.empty(2 * WINDOW, dtype=torch.uint8), Copying(RankDevice.cpu()))
    ]
    assert b"".join(windows) == stage.numpy().tobytes()
    assert len(stage) % PAGE == 0
    path = tmp_path / image.name
    path.write_bytes(stage.numpy().tobytes()[: image.num_bytes])
    with safe_open(path, framework="pt") as file:
        for name in ("bf16", "large", "bytes", "strided"):
            expected = next(entry.tensor for entry in made.entries if entry.name == name)
            assert torch.equal(file.get_tensor(f"param/{name}"), expected.reshape(-1))
        assert file.get_tensor("param/shared").tolist() == [15, 16, 17, 18, 19]
        assert "param/copy" not in file.keys()  # noqa: SIM118  # not a dict
        assert file.get_tensor("rank/0").numpy().tobytes() == b'{"a": 1}'


def test_sums_are_those_of_each_block() -> None:
    image = image_of("f", content(), {"rank/0": b"x"})
    stage = torch.zeros(image.padded_bytes, dtype=torch.uint8)
    image.read(0, stage)
    sums = Sums(image)
    for window in staged(stage):
        sums.add(window)
    for chunk in image.chunks(sums.of_parts):
        blocks = stage[chunk.offset : chunk.offset + chunk.num_bytes].split(chunk.block_bytes)
        assert len(blocks) <= 64
        assert chunk.crc32 == [zlib.crc32(block.numpy().tobytes()) for block in blocks]
    assert sums.of_head == zlib.crc32(image.head)


def test_a_dtype_without_a_word_is_refused() -> None:
    entry = Entry("buffer", "phase", Span(0, 2), torch.zeros(2, dtype=torch.complex64), Span(0, 2))
    with pytest.raises(CheckpointError, match="buffer/phase is complex64"):
        image_of("f", Content(entries=[entry]), {})


@pytest.mark.parametrize("kind", ["param", "state.exp_avg"])
@pytest.mark.parametrize("box", [None, Box.whole([2, 5])], ids=["flat", "box"])
def test_elements_that_are_not_there_are_missed(kind: str, box: Box | None, tmp_path: Path) -> None:
    """Though an index has been checked, a reader may ask for what it never listed."""
    sums = {"block_bytes": LEAST_BLOCK_BYTES, "crc32": [0]}
    chunk = Chunk("param", "w", 0, 6, "rank-00000.safetensors", "param/w", "float32", offset=0, num_bytes=24, **sums)
    index = Index(1, 1, "", {}, {"w": [2, 5]}, [], {}, chunks=[chunk])
    there = 6 if kind == "param" else 0
    with Reader(tmp_path, index) as reader:
        assert [read.span.numel for read in reader.reads(kind, "w", Span(0, there), box)] == [6][: there // 6]
        with pytest.raises(CheckpointError, match=f"has {there} of 8 elements of {kind} w that this rank"):
            reader.reads(kind, "w", Span(0, 8), box)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fails_when_it_is_flushed_is_told(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index of which the disk has lost the bytes would only be missed by whoever resumes."""
    path = tmp_path / "index.json"
    write_text(path, "before")
    monkeypatch.setattr(os, "fsync", failing(number))
    with pytest.raises(OSError, match=re.escape(os.strerror(number))):
        write_text(path, "after")
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["index.json"]
    monkeypatch.setattr(os, "fsync", failing(errno.EINVAL))  # of a file system that cannot flush a folder
    flush(tmp_path)


def failing(number: int) -> Callable[[int], None]:
    def fsync(_: int) -> None:
        raise OSError(number, os.strerror(number))

    return fsync
