"""Checkpoints that are damaged, lie, or lead elsewhere: each is refused with a sentence, or read as it is."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save, save_file
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo

import shardwise as sw
from shardwise.checkpoint.formats.cover import why_not_covered
from shardwise.cli.main import main
from shardwise.errors import CheckpointError
from shardwise.init.files import WeightFiles
from shardwise.plan.placement import Span

FIXTURES = Path(__file__).parents[1] / "fixtures" / "deepspeed"
TENSORS = {
    "a.w": torch.arange(12.0).view(3, 4),
    "b": torch.arange(5),
    "c": torch.ones(2, 2).bfloat16(),
    "empty": torch.ones(0, 3),
    "one": torch.tensor(2.5),
}


def head_of(content: bytes) -> tuple[bytes, bytes]:
    length = int.from_bytes(content[:8], "little")
    return content[8 : 8 + length], content[8 + length :]


def with_head(head: bytes, data: bytes) -> bytes:
    return len(head).to_bytes(8, "little") + head + data


def lying(*entries: tuple[str, Any], size: int = 8) -> bytes:
    inner = ",".join(f"{json.dumps(name)}:{json.dumps(entry)}" for name, entry in entries)
    return with_head(f"{{{inner}}}".encode(), bytes(size))


def entry(start: Any, stop: Any, shape: Any = None, dtype: str = "U8", **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [stop - start] if shape is None else shape, "data_offsets": [start, stop], **more}


LIES = {
    "negative": lying(("a", entry(-8, 0, [8])), ("b", entry(0, 8))),
    "overlap": lying(("a", entry(0, 8)), ("b", entry(4, 8))),
    "hole": lying(("a", entry(0, 3)), ("b", entry(4, 8))),
    "hole at the start": lying(("a", entry(4, 8))),
    "too short": lying(("a", entry(0, 4))),
    "too long": lying(("a", entry(0, 16))),
    "wrong size": lying(("a", entry(0, 8, [4]))),
    "negative shape": lying(("a", entry(0, 8, [-2, -4]))),
    "huge shape": lying(("a", entry(0, 8, [2**62, 4]))),
    "number as text": lying(("a", entry(0, 8, ["8"]))),
    "float": lying(("a", {**entry(0, 8), "data_offsets": [0.0, 8.0]})),
    "boolean": lying(("a", entry(0, 8, [True, 8]))),
    "twice": lying(("a", entry(0, 4)), ("a", entry(4, 8))),
    "no dtype": lying(("a", {"shape": [8], "data_offsets": [0, 8]})),
    "unknown dtype": lying(("a", entry(0, 8, dtype="Q7"))),
    "dtype no text": lying(("a", {**entry(0, 8), "dtype": ["U8"]})),
    "more keys": lying(("a", entry(0, 8, extra=1))),
    "three offsets": lying(("a", {**entry(0, 8), "data_offsets": [0, 4, 8]})),
    "a list": lying(("a", [1])),
    "notes that are no text": lying(("__metadata__", {"x": 1}), ("a", entry(0, 8))),
    "a list for a head": with_head(b"[1, 2]", b""),
    "blank before": with_head(b'  {"a":' + json.dumps(entry(0, 8)).encode() + b"}", bytes(8)),
    "huge head": (2**63).to_bytes(8, "little") + b"{}",
    "head of 200 MB": (2 * 10**8).to_bytes(8, "little") + b"{}",
    "nested": with_head(b'{"a":' + b"[" * 10**5, b""),
    "nothing": b"",
    "seven bytes": b"\2\0\0\0\0\0\0",
}


@pytest.mark.parametrize("lie", LIES)
def test_heads_that_lie_are_refused(lie: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(LIES[lie])
    with pytest.raises(CheckpointError):
        WeightFiles(tmp_path)
    with pytest.raises(CheckpointError):
        sw.inspect(tmp_path)


ODD = st.sampled_from(
    ["-1", "0", "3", "12", "1e3", "99999999999999999999", "true", "null", "[]", "{}", '"a.w"', '"F32"']
)


def _changed_text(data: st.DataObject, text: str) -> str:
    """JSON with one of its words replaced or one character lost."""
    spans = [found.span() for found in re.finditer(r'-?\d+|"[^"]*"|[\[\]{},:]', text)]
    start, stop = data.draw(st.sampled_from(spans))
    return text[:start] + data.draw(ODD | st.just("")) + text[stop:]


def test_a_head_is_read_as_the_library_reads_it_or_refused(tmp_path: Path) -> None:
    """Whatever we take the library of safetensors takes too, and gives the same."""

    @given(st.data())
    def damaged(data: st.DataObject) -> None:
        content = _damaged_safetensors(data)
        (tmp_path / "model.safetensors").write_bytes(content)
        try:
            files = WeightFiles(tmp_path)
        except CheckpointError:
            return
        theirs = load(content)  # a SafetensorError here: the library refuses what we took
        assert files.tensors.keys() == theirs.keys()
        for name, stored in files.tensors.items():
            ours = files.read(name, Span(0, stored.numel)).view(stored.shape)
            assert ours.dtype == theirs[name].dtype
            assert ours.view(-1).view(torch.uint8).equal(theirs[name].reshape(-1).view(torch.uint8))

    damaged()


def _damaged_safetensors(data: st.DataObject) -> bytes:
    if data.draw(st.booleans()):
        head, body = head_of(save(TENSORS))
        return with_head(_changed_text(data, head.decode()).encode(), body)
    content = bytearray(save(TENSORS))
    for at in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=3)):
        content[at] = data.draw(st.integers(0, 255))
    return bytes(content[: data.draw(st.integers(0, len(content)) | st.just(len(content)))])


def sharded(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({"a.w": TENSORS["a.w"]}, folder / "m1.safetensors")
    save_file({"b": TENSORS["b"]}, folder / "m2.safetensors")
    index = {"metadata": {"total_size": 88}, "weight_map": {"a.w": "m1.safetensors", "b": "m2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def point(folder: Path, file: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a.w": file}}))


def both_refuse(folder: Path, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        WeightFiles(folder)
    with pytest.raises(CheckpointError, match=words):
        sw.inspect(folder)


@pytest.mark.parametrize("file", ["../m1.safetensors", "/etc/passwd", "..", "", "sub/m1.safetensors"])
def test_an_index_names_plain_files(file: str, tmp_path: Path) -> None:
    save_file({"a.w": TENSORS["a.w"]}, tmp_path / "m1.safetensors")
    folder = sharded(tmp_path / "folder")
    point(folder, file)
    both_refuse(folder, "not a plain file name")


def test_an_index_leads_to_regular_files_of_its_folder(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "folder")
    save_file({"a.w": TENSORS["a.w"]}, tmp_path / "outside.safetensors")
    (folder / "link.safetensors").symlink_to(tmp_path / "outside.safetensors")
    point(folder, "link.safetensors")
    both_refuse(folder, "outside of the checkpoint")
    os.mkfifo(folder / "pipe.safetensors")
    point(folder, "pipe.safetensors")
    both_refuse(folder, "not a regular file")
    point(folder, 3)
    both_refuse(folder, "is not text")
    point(folder, "m2.safetensors")
    both_refuse(folder, r"has no '?a\.w'?, though the index says so")
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model.safetensors").symlink_to(tmp_path / "outside.safetensors")
    both_refuse(folder, "outside of the checkpoint")


@pytest.mark.parametrize("name", [".metadata", "latest", "model.safetensors", "pytorch_model.bin", "x_model_states.pt"])
def test_a_pipe_makes_nobody_wait(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError):
        sw.inspect(tmp_path)


def test_names_do_not_command_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b]0;title\x07[/none]\u202eb"
    save_file({evil: TENSORS["b"]}, tmp_path / "model.safetensors")
    assert main(["inspect", str(tmp_path), "--full"]) == 0
    assert main(["convert", str(tmp_path), str(tmp_path / "out"), "--to", "hf"]) == 0
    assert main(["inspect", str(tmp_path / evil)]) == 2
    told = capsys.readouterr()
    assert not set("\x1b\x07\u202e") & set(told.out + told.err)
    assert "title" in told.out
    assert "[/none]" in told.err


def test_a_link_beside_the_weights_is_not_copied(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "folder")
    (tmp_path / "secret").write_text("secret")
    (folder / "tokenizer.json").symlink_to(tmp_path / "secret")
    (folder / "special.json").write_text("{}")
    done = sw.convert(folder, tmp_path / "out", "hf")
    assert "tokenizer.json, which is a link to elsewhere" in done.notes[0]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"model.safetensors", "special.json"}


def test_deepspeeds_latest_stays_in_its_folder(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "zero2", tmp_path / "run")
    (tmp_path / "elsewhere").mkdir()
    shutil.move(tmp_path / "run" / "global_step3", tmp_path / "elsewhere" / "global_step3")
    (tmp_path / "run" / "latest").write_text("../elsewhere/global_step3")
    with pytest.raises(CheckpointError, match="not a plain file name"):
        sw.inspect(tmp_path / "run")


def test_deepspeeds_names_stay_in_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    shutil.copytree(FIXTURES / "universal" / "global_step3", folder)
    file = folder / "mp_rank_00_model_states.pt"
    state = torch.load(file, weights_only=True)
    state["param_shapes"][0]["../../../x"] = torch.Size([3])
    torch.save(state, file)
    with pytest.raises(CheckpointError, match="not a plain file name"):
        sw.inspect(folder)


# -- DCP ------------------------------------------------------------------------------------------------


def dcp(folder: Path, change: Callable[[metadata.Metadata], None] = lambda _: None) -> Path:
    """A tensor of [4, 3] in two chunks of rows, and a number, as torch lays them out; then `change` lies about it."""
    folder.mkdir()
    whole = torch.arange(12.0).view(4, 3)
    places, chunks = {}, []
    with (folder / "__0_0.distcp").open("wb") as file:
        for start in (0, 2):
            offset = torch.Size([start, 0])
            chunks.append(metadata.ChunkStorageMetadata(offset, torch.Size([2, 3])))
            begin = file.tell()
            _save(whole[start : start + 2].clone(), file)
            places[metadata.MetadataIndex("model.w", offset)] = _StorageInfo("__0_0.distcp", begin, file.tell() - begin)
        begin = file.tell()
        _save(7, file)
        places[metadata.MetadataIndex("step")] = _StorageInfo("__0_0.distcp", begin, file.tell() - begin)
    properties = metadata.TensorProperties(dtype=torch.float32)
    keys = {
        "model.w": metadata.TensorStorageMetadata(properties, torch.Size([4, 3]), chunks),
        "step": metadata.BytesStorageMetadata(),
    }
    meta = metadata.Metadata(keys, {"model.w": ("model", "w"), "step": ("step",)}, places, metadata.StorageMeta(folder))
    change(meta)
    torch_pickle(meta, folder / ".metadata")
    return folder


def _save(value: Any, file: Any) -> None:
    blob = io.BytesIO()
    torch.save(value, blob)
    file.write(blob.getvalue())


def torch_pickle(meta: metadata.Metadata, path: Path) -> None:
    path.write_bytes(pickle.dumps(meta))


def chunks_of(meta: metadata.Metadata) -> list[Any]:
    return meta.state_dict_metadata["model.w"].chunks


def moved(meta: metadata.Metadata, **changes: Any) -> None:
    for key, info in meta.storage_data.items():
        meta.storage_data[key] = _StorageInfo(**{**vars(info), **changes})


def twice(meta: metadata.Metadata) -> None:
    chunks_of(meta)[1] = chunks_of(meta)[0]


def out_of_shape(meta: metadata.Metadata) -> None:
    chunks_of(meta)[1].sizes = torch.Size([9, 3])


def larger(meta: metadata.Metadata) -> None:
    meta.state_dict_metadata["model.w"].size = torch.Size([6, 3])


def huge(meta: metadata.Metadata) -> None:
    """As large as no memory is; every chunk says that it lies in the same few bytes."""
    meta.state_dict_metadata["model.w"].size = torch.Size([2**40, 3])
    chunks_of(meta)[1].sizes = torch.Size([2**40 - 2, 3])


def other_dtype(meta: metadata.Metadata) -> None:
    meta.state_dict_metadata["model.w"].properties.dtype = torch.int16


def same_bytes(meta: metadata.Metadata) -> None:
    first, second, _ = meta.storage_data
    meta.storage_data[second] = meta.storage_data[first]


DCP_LIES: dict[str, tuple[Callable[[metadata.Metadata], None], str]] = {
    "a chunk twice": (twice, "overlap"),
    "out of shape": (out_of_shape, "lies outside its shape"),
    "a hole": (larger, "lacks 6 of 18 elements"),
    "a chunk lost": (lambda meta: chunks_of(meta).pop(), "lacks 6 of 12 elements"),
    "huge": (huge, "fewer bytes than its elements take"),
    "the same bytes": (same_bytes, "use the same bytes"),
    "other dims": (lambda meta: setattr(chunks_of(meta)[0], "sizes", torch.Size([6])), "1 dims instead of 2"),
    "another file": (lambda meta: moved(meta, relative_path="../x"), "not a plain file name"),
    "absolute": (lambda meta: moved(meta, relative_path="/etc/passwd"), "not a plain file name"),
    "negative place": (lambda meta: moved(meta, offset=-5), "has an impossible range of bytes"),
    "no number": (lambda meta: moved(meta, length="x"), "has an impossible range of bytes"),
    "no place": (lambda meta: meta.storage_data.clear(), "does not say where model.w is"),
    "no list of locations": (lambda meta: setattr(meta, "storage_data", [1]), "list of locations is a list"),
    "no path": (lambda meta: meta.planner_data.update({"step": (1.5,)}), "is not a path"),
}


@pytest.mark.parametrize("lie", DCP_LIES)
def test_metadata_of_dcp_that_lies_is_refused(lie: str, tmp_path: Path) -> None:
    change, words = DCP_LIES[lie]
    with pytest.raises(CheckpointError, match=words):
        sw.inspect(dcp(tmp_path / "dcp", change))


def test_what_the_files_of_dcp_hold_is_compared(tmp_path: Path) -> None:
    source = sw.inspect(dcp(tmp_path / "good"), verify=True).source
    assert torch.equal(source.read(source.specs[0]), torch.arange(12.0).view(4, 3))
    assert source.step == 7
    [problem] = sw.inspect(dcp(tmp_path / "dtype", other_dtype), verify=True).problems
    assert "a piece of model.w that does not match its metadata" in problem
    cut = dcp(tmp_path / "cut") / "__0_0.distcp"
    cut.write_bytes(cut.read_bytes()[:1500])
    assert any("has 1500 bytes instead of" in problem for problem in sw.inspect(cut.parent).problems)
    assert any("it was truncated" in problem for problem in sw.inspect(cut.parent, verify=True).problems)
    pipe = dcp(tmp_path / "pipe") / "__0_0.distcp"
    pipe.unlink()
    os.mkfifo(pipe)
    assert any("not a regular file" in problem for problem in sw.inspect(pipe.parent, verify=True).problems)


@given(st.data())
def test_boxes_cover_what_they_cover(data: st.DataObject) -> None:
    """Any boxes in a small shape against a count of every element."""
    shape = tuple(data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=3)))
    offsets = st.tuples(*(st.integers(-1, size) for size in shape))
    sizes = st.tuples(*(st.integers(0, size) for size in shape))
    boxes = data.draw(st.lists(st.tuples(offsets, sizes), max_size=5))
    if data.draw(st.booleans()):
        boxes = _grid(data, shape)
        if boxes and data.draw(st.booleans()):
            boxes[data.draw(st.integers(0, len(boxes) - 1))] = data.draw(st.sampled_from(boxes))
    seen = torch.zeros(shape, dtype=torch.int64)
    is_inside = True
    for offset, size in boxes:
        ends = zip(offset, size, shape, strict=True)
        is_inside = is_inside and all(o >= 0 and o + s <= whole for o, s, whole in ends)
        if is_inside:
            seen[tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))] += 1
    assert (why_not_covered(shape, boxes) == "") == (is_inside and bool((seen == 1).all()))


def _grid(data: st.DataObject, shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Boxes that cover `shape`, by cutting again and again."""
    boxes = [(tuple(0 for _ in shape), shape)]
    for _ in range(data.draw(st.integers(0, 4))):
        offset, size = boxes.pop(0)
        dim = data.draw(st.integers(0, len(shape) - 1))
        cut = data.draw(st.integers(0, size[dim]))
        for start, length in ((0, cut), (cut, size[dim] - cut)):
            boxes.append(
                (
                    (*offset[:dim], offset[dim] + start, *offset[dim + 1 :]),
                    (*size[:dim], length, *size[dim + 1 :]),
                )
            )
    return boxes


# -- any damage at all ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One checkpoint of every foreign format."""
    home = tmp_path_factory.mktemp("healthy")
    for name in ("hf", "bin", "old"):
        (home / name).mkdir()
    save_file(TENSORS, home / "hf" / "model.safetensors")
    (home / "hf" / "config.json").write_text('{"architectures": ["Nobody"], "dtype": "float32"}')
    sharded(home / "sharded")
    torch.save(TENSORS, home / "bin" / "pytorch_model.bin")
    torch.save(TENSORS, home / "old" / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    dcp(home / "dcp")
    for case in ("zero2", "zero3", "universal"):
        shutil.copytree(FIXTURES / case, home / case)
    return home


def _damage(data: st.DataObject, folder: Path) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    heads = [path for path in files if path.suffix == ".json" or path.name in (".metadata", "latest")]
    file = data.draw(st.sampled_from(heads * 4 + files))
    content = bytearray(file.read_bytes())
    where = st.integers(0, min(len(content) - 1, data.draw(st.sampled_from([100, 3000, 10**9]))))
    match data.draw(st.sampled_from(["change", "change", "cut", "insert", "remove", "text", "gone", "pipe"])):
        case "change":
            for at in data.draw(st.lists(where, min_size=1, max_size=4)):
                content[at] = data.draw(st.integers(0, 255))
        case "cut":
            del content[data.draw(where) :]
        case "insert":
            at = data.draw(where)
            content[at:at] = data.draw(st.binary(min_size=1, max_size=9))
        case "remove":
            at = data.draw(where)
            del content[at : at + data.draw(st.integers(1, 9))]
        case "text" if file.suffix == ".json":
            content = bytearray(_changed_text(data, content.decode()).encode())
        case "gone":
            file.unlink()
            return
        case "pipe":
            file.unlink()
            os.mkfifo(file)
            return
    file.write_bytes(content)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", ["hf", "sharded", "bin", "old", "dcp", "zero2", "zero3", "universal"])
def test_any_damage_has_a_sentence(form: str, healthy: Path, tmp_path: Path) -> None:
    @settings(max_examples=20)
    @given(st.data())
    def damaged(data: st.DataObject) -> None:
        shutil.rmtree(tmp_path / "it", ignore_errors=True)
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        shutil.copytree(healthy / form, tmp_path / "it")
        _damage(data, tmp_path / "it")
        try:
            json.dumps(sw.inspect(tmp_path / "it", verify=True).as_json())
            sw.convert(tmp_path / "it", tmp_path / "out", data.draw(st.sampled_from(["hf", "shardwise"])))
        except CheckpointError:
            return
        assert (tmp_path / "out").is_dir()

    damaged()
