"""Bytes of a checkpoint's files on their way to tensors: any part of any chunk, into any dtype, by several threads.

And what is looked at before: the index's own sums, and how deep JSON nests.
"""

from __future__ import annotations

import json
import os
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardwise.checkpoint import transfer
from shardwise.checkpoint.index import INDEX, Chunk, Index, read_body
from shardwise.checkpoint.transfer import PORTION_BYTES, Carrier, OpenFile, Portion, Read, portions
from shardwise.errors import CheckpointError
from shardwise.plan.placement import Span
from shardwise.system.checksum import crc32
from shardwise.system.disk import tensors_in_pages
from shardwise.system.safe_files import nests_deeper

BLOCK = 2**16
SIZES = st.sampled_from([0, 1, 3, 100, BLOCK // 4 - 1, BLOCK // 4, BLOCK, PORTION_BYTES // 4 + 5])


class Stored:
    """Tensors of fp32 one after the other in a file, and the chunks that an index would list."""

    def __init__(self, path: Path, sizes: list[int]) -> None:
        self.values = [torch.randn(size, generator=torch.Generator().manual_seed(size)) for size in sizes]
        self.chunks: list[Chunk] = []
        content = b"a head"
        for number, value in enumerate(self.values):
            own = value.numpy().tobytes()
            sums = [zlib.crc32(own[at : at + BLOCK]) for at in range(0, len(own), BLOCK)]
            place = (f"{number}", 0, len(value), path.name, f"param/{number}", "float32", len(content), len(own))
            self.chunks.append(Chunk("param", *place, BLOCK, sums))
            content += own
        path.write_bytes(content)
        self.file = OpenFile.of(path, os.open(path, os.O_RDONLY))

    def carry(
        self, wanted: list[tuple[int, Span, torch.Tensor | None]], num_threads: int, *, are_checked: bool = False
    ) -> int:
        due: list[Portion] = []
        for number, span, out in wanted:
            due += portions(Read(self.chunks[number], span, 2), self.file, out)
        return Carrier(num_threads).carry(due, are_checked=are_checked)


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(SIZES, min_size=1, max_size=6),
    threads=st.sampled_from([1, 3]),
    dtypes=st.lists(st.sampled_from([torch.float32, torch.float32, torch.float64, None]), min_size=6, max_size=6),
    data=st.data(),
)
def test_any_part_goes_where_it_belongs(
    sizes: list[int], threads: int, dtypes: list[torch.dtype | None], data: st.DataObject
) -> None:
    """Whole blocks are read, the elements that are wanted land, and not one beside them; a flipped bit is found."""
    with tempfile.TemporaryDirectory() as folder:
        stored = Stored(Path(folder) / "rank.safetensors", sizes)
        wanted: list[tuple[int, Span, torch.Tensor | None]] = []
        least = 0
        for number, (size, dtype) in enumerate(zip(sizes, dtypes, strict=False)):
            start = data.draw(st.integers(0, size))
            span = Span(start, data.draw(st.integers(start, size)))
            out = None if dtype is None else torch.full((span.numel + 4,), -7.0, dtype=dtype)
            wanted.append((number, span, out))
            least += 4 * span.numel
        read = stored.carry(data.draw(st.permutations(wanted)), threads)
        assert least <= read <= least + 2 * BLOCK * len(sizes)
        for number, span, out in wanted:
            if out is not None:
                assert torch.equal(out[2:-2].float(), stored.values[number][span.start : span.stop])
                assert out[:2].tolist() == out[-2:].tolist() == [-7.0, -7.0]
        some = [one for one in wanted if one[1].numel]
        if some:
            number, span, _ = data.draw(st.sampled_from(some))
            place = stored.chunks[number].offset + 4 * data.draw(st.integers(span.start, span.stop - 1))
            with stored.file.path.open("r+b") as file:
                file.seek(place)
                byte = file.read(1)[0]
                file.seek(place)
                file.write(bytes([byte ^ 16]))
            with pytest.raises(CheckpointError, match=f"is damaged in param {number}: bytes"):
                stored.carry(wanted, threads)
        os.truncate(stored.file.path, 5)
        if some:
            with pytest.raises(CheckpointError, match="it was truncated"):
                stored.carry(some, threads)
        os.close(stored.file.handle)


@pytest.mark.parametrize("is_settled", [True, False])
def test_known_bytes_are_not_summed_again_unless_somebody_has_written(
    is_settled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As sums that are wrong from the second reading on show."""
    monkeypatch.setattr(transfer, "SETTLED_SECONDS", -1 if is_settled else 3600)
    stored = Stored(tmp_path / "rank.safetensors", [BLOCK, 100])
    outs = [torch.zeros(BLOCK + 2), torch.zeros(102, dtype=torch.float64)]
    wanted: list[tuple[int, Span, torch.Tensor | None]] = [
        (number, Span(0, len(value)), out) for number, (value, out) in enumerate(zip(stored.values, outs, strict=True))
    ]
    stored.carry(wanted, 1)
    with monkeypatch.context() as patched:
        patched.setattr(transfer, "crc32", lambda view, found: -1)
        with pytest.raises(CheckpointError, match="is damaged"):
            stored.carry(wanted, 1)
        for out in outs:
            out.zero_()
        if is_settled and _page_cache_tells(stored.file):
            stored.carry(wanted, 1, are_checked=True)
            for value, out in zip(stored.values, outs, strict=True):
                assert torch.equal(out[2:].float(), value)
            patched.setattr(os, "preadv", _only_at_once(os.preadv))  # as if the page cache had lost it
        with pytest.raises(CheckpointError, match="is damaged"):
            stored.carry(wanted, 1, are_checked=True)
    with stored.file.path.open("r+b") as file:
        file.seek(stored.chunks[0].offset)
        file.write(b"otherwise")
    os.utime(stored.file.path, (1, 1))  # kernels count a file's times in steps, and no time has passed here
    with pytest.raises(CheckpointError, match="is damaged in param 0"):
        stored.carry(wanted, 1, are_checked=True)
    os.close(stored.file.handle)


def _page_cache_tells(file: OpenFile) -> bool:
    try:
        return os.preadv(file.handle, [bytearray(1)], 0, os.RWF_NOWAIT) == 1
    except (OSError, AttributeError):
        return False


def _only_at_once(preadv: Callable[..., int]) -> Callable[..., int]:
    def lost(handle: int, views: list[memoryview], place: int, flags: int = 0) -> int:
        if flags:
            raise BlockingIOError
        return preadv(handle, views, place)

    return lost


def test_tensors_in_pages_are_apart_and_aligned() -> None:
    """Each has a storage of its own, so that whoever pickles one does not pickle all."""
    wanted = [(3, torch.float32), (0, torch.int64), (2**20, torch.bfloat16), (7, torch.uint8), (2**18, torch.float64)]
    tensors = tensors_in_pages(wanted)
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    for number, (tensor, (numel, dtype)) in enumerate(zip(tensors, wanted, strict=True)):
        assert (tensor.numel(), tensor.dtype, tensor.untyped_storage().nbytes()) == (numel, dtype, tensor.nbytes)
        assert tensor.data_ptr() % 64 == 0
        assert bool((tensor == number).all())


def test_the_sum_is_zlibs() -> None:
    content = np.random.default_rng(0).bytes(100_000)
    assert crc32(memoryview(content)[5:], crc32(content[:5])) == zlib.crc32(content)


def test_an_index_laid_out_anew_is_the_same_and_a_changed_one_is_damaged(tmp_path: Path) -> None:
    index = Index(3, 1, "somewhere", {"ä\\": "[[[", "b": [1.5, None]}, {"w": [2]}, [], {"torch": "2"})
    path, text = tmp_path / INDEX, index.to_json()
    raw = json.loads(text)
    for same in (text, json.dumps(raw, indent=1), json.dumps(raw, ensure_ascii=False), text.replace("text_crc32", "t")):
        path.write_text(same)
        assert read_body(tmp_path) == raw["index"]
    for other in (text.replace("somewhere", "elsewhere"), json.dumps(raw).replace("1.5", "1.25")):
        path.write_text(other)
        with pytest.raises(CheckpointError, match="checksum"):
            read_body(tmp_path)


JSON = st.recursive(
    st.text('[]{}"\\é', max_size=4) | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('[{"\\', max_size=2), inner, max_size=3),
)


@given(value=JSON, limit=st.integers(0, 4))
@example(value={"\\": [], "": ""}, limit=1)  # two keys become one
def test_how_deep_json_nests_whatever_its_texts_have(value: object, limit: int) -> None:
    def depth(value: object) -> int:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
        return 0 if inner is None else 1 + max(map(depth, inner), default=0)

    for text in (json.dumps(value), json.dumps(value).replace("\\", "")):
        try:
            parsed = json.loads(text, object_pairs_hook=lambda pairs: dict(enumerate(value for _, value in pairs)))
        except ValueError:
            continue
        assert nests_deeper(text.encode(), limit) == (depth(parsed) > limit)
