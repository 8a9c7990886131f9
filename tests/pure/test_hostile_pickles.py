"""Pickles that are made to do harm: nothing of the process changes, and what is refused is refused in our words."""

from __future__ import annotations

import copyreg
import pathlib
import pickle
import shutil
import struct
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import filesystem, metadata

import shardwise as sw
from shardwise.checkpoint.formats.opcodes import Made, Name, Outside, read_pickle
from shardwise.errors import CheckpointError

FIXTURES = Path(__file__).parents[1] / "fixtures" / "deepspeed"
RAN: list[str] = []


def ran(what: str) -> None:
    RAN.append(what)


def name(full: str) -> bytes:
    module, _, attribute = full.rpartition(".")
    return f"c{module}\n{attribute}\n".encode()


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


ME = f"{__name__}.ran"
CALL = name(ME) + b"(" + text("it") + b"tR."
ATTACKS = {
    "REDUCE": CALL,
    "REDUCE of os.system": name("os.system") + text("touch ran") + b"\x85R.",
    "INST": b"(" + text("it") + f"i{__name__}\nran\n.".encode(),
    "OBJ": b"(" + name(ME) + text("it") + b"o.",
    "NEWOBJ": name(ME) + text("it") + b"\x85\x81.",
    "EXT1": b"\x82\xf0.",
    "text of protocol 0": b"cos\nsystem\n(S'touch ran'\ntR.",
    "persistent text": b"Pit\n.",
    "BUILD on a class": name("torch.distributed.checkpoint.metadata.Metadata") + b"N}" + text("version") + b"Ns\x86b.",
    "BUILD on a class, slots": name("pathlib.PosixPath") + b"N}" + text("parent") + text("evil") + b"s\x86b.",
    "BUILD on a function": name("torch.serialization._get_layout") + b"N}" + text("x") + b"Ns\x86b.",
    "BUILD on an enum": name("torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING") + b"}b.",
    "call of what was made": name("builtins.type") + b")R)R.",
    "getattr": name("builtins.getattr") + name("pathlib.PosixPath") + text("rmdir") + b"\x86R.",
    "a list as a key": b"}]Ns.",
    "a number of many bytes": b"\x8b" + struct.pack("<I", 2**31 - 1) + b"1.",
    "text without end": b"\x8d" + struct.pack("<Q", 2**62) + b"x.",
    "bytes without end": b"\x8e" + struct.pack("<Q", 2**63) + b"x.",
    "a memo far away": b"Nr\xff\xff\xff\xffj\xff\xff\xff\xff.",
    "no end": b"]" * 10,
    "an empty stack": b"R.",
    "no mark": b"Nt.",
}


@pytest.fixture(autouse=True)
def _nothing_ran() -> Iterator[None]:
    before = _attributes()
    RAN.clear()
    yield
    assert RAN == []
    assert _attributes() == before
    assert not Path("ran").exists()


def _attributes() -> list[dict[str, Any]]:
    """What a hostile file could have set on classes that it may name."""
    kinds = [getattr(metadata, one) for one in metadata.__all__] + [filesystem._StorageInfo]
    kinds += [metadata._MEM_FORMAT_ENCODING, pathlib.PosixPath, pathlib.PurePath, torch.Size]
    named = [
        {key: one for key, one in vars(kind).items() if key != "__slotnames__"} for kind in kinds
    ]  # of pickle itself
    return [*named, dict(vars(torch.serialization._get_layout))]


@pytest.fixture
def extension() -> Iterator[None]:
    """A code in the registry of copyreg, which an unpickler would follow without asking by name."""
    copyreg.add_extension(__name__, "ran", 0xF0)
    pickle.loads(b"\x80\x02\x82\xf0.")
    yield
    copyreg.remove_extension(__name__, "ran", 0xF0)
    copyreg.clear_extension_cache()


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.usefixtures("extension")
def test_metadata_of_dcp_does_nothing(attack: str, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"\x80\x02" + ATTACKS[attack])
    with pytest.raises(CheckpointError) as caught:
        sw.inspect(tmp_path, verify=True)
    assert "weights_only" not in str(caught.value)


def test_a_path_in_the_metadata_stays_text(tmp_path: Path) -> None:
    """Torch itself writes the folder's `PosixPath` there; a BUILD behind it must not reach the class."""
    evil = name("pathlib.PosixPath") + text("x") + b"\x85R" + b"N}" + text("parent") + text("evil") + b"s\x86b."
    value, _ = read_pickle(evil, "here")
    assert isinstance(value, Made)
    assert (value.name, value.args) == ("pathlib.PosixPath", ("x",))
    assert pathlib.PosixPath("/a/b").parent == pathlib.PosixPath("/a")


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.usefixtures("extension")
def test_files_of_torch_do_nothing(attack: str, tmp_path: Path) -> None:
    """`pytorch_model.bin` and DeepSpeed's, as an archive and as torch wrote before 1.6."""
    content = b"\x80\x02" + ATTACKS[attack]
    folders = [tmp_path / "new", tmp_path / "old", tmp_path / "deepspeed"]
    for folder in folders[:2]:
        folder.mkdir()
    torch.save({"a": torch.ones(2)}, tmp_path / "good.bin")
    _with_pickle(tmp_path / "good.bin", folders[0] / "pytorch_model.bin", content)
    (folders[1] / "pytorch_model.bin").write_bytes(content)
    shutil.copytree(FIXTURES / "zero2" / "global_step3", folders[2])
    file = folders[2] / "mp_rank_00_model_states.pt"
    _with_pickle(file, file, content)
    for folder in folders:
        with pytest.raises(CheckpointError) as caught:
            sw.inspect(folder, verify=True)
        assert "weights_only" not in str(caught.value)


def _with_pickle(source: Path, target: Path, content: bytes) -> None:
    """`source`, an archive of torch, with another pickle in it."""
    with zipfile.ZipFile(source) as archive:
        entries = [(entry, archive.read(entry)) for entry in archive.infolist()]
    with zipfile.ZipFile(target, "w") as archive:
        for entry, old in entries:
            archive.writestr(entry.filename, content if entry.filename.endswith("data.pkl") else old)


class Evil:
    def __reduce__(self) -> Any:
        return ran, ("it",)


def test_tensors_beside_an_object_are_read_and_it_is_not_run(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(3), "evil": Evil()}, tmp_path / "pytorch_model.bin")
    source = sw.inspect(tmp_path, verify=True).source
    assert [spec.name for spec in source.specs] == ["a"]
    assert torch.equal(source.read(source.specs[0]), torch.arange(3))


def test_what_doubles_or_nests_takes_no_time(tmp_path: Path) -> None:
    """Forty levels of a list that has the one below twice; a hundred thousand lists in each other; a list in itself."""
    doubling = b"]" + b"".join(b"q%c](h%ch%ce" % (n, n, n) for n in range(40)) + b"."
    nested = b"]" * 10**5 + b"a" * (10**5 - 1) + b"."
    circle = b"]q\x00h\x00a."
    started = time.process_time()
    for number, content in enumerate((doubling, nested, circle)):
        folder = tmp_path / str(number)
        folder.mkdir()
        torch.save({}, tmp_path / "good.bin")
        pickled = b"\x80\x02}" + text("x") + content[:-1] + b"s."
        _with_pickle(tmp_path / "good.bin", folder / "mp_rank_00_model_states.pt", pickled)
        with pytest.raises(CheckpointError):
            sw.inspect(folder)
        (folder / ".metadata").write_bytes(b"\x80\x02" + content)
        with pytest.raises(CheckpointError):
            sw.inspect(folder)
    assert time.process_time() - started < 20


LEAVES = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text() | st.binary()
PLAIN = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=4)
    ),
    max_leaves=25,
)


@given(PLAIN, st.integers(2, 5))
def test_plain_data_is_read_as_pickle_reads_it(value: Any, protocol: int) -> None:
    pickled = pickle.dumps(value, protocol)
    if protocol > 2 or not _has_bytes(value):  # which protocol 2 writes as a call
        assert read_pickle(pickled, "here") == (value, len(pickled))


def _has_bytes(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_bytes, value.values()))
    return isinstance(value, bytes) or (isinstance(value, list | tuple) and any(map(_has_bytes, value)))


@given(st.data())
def test_any_bytes_are_data_or_refused(data: st.DataObject) -> None:
    """Opcodes in any order, and a real pickle with some bytes changed."""
    meta = metadata.Metadata({"a": metadata.BytesStorageMetadata()}, {"a": ("a",)}, {metadata.MetadataIndex("a"): 1})
    codes = st.sampled_from(b"().]}aesutR\x81\x85\x86\x87\x93\x94bNK\x88cqhXQ0or\x8c\x8a")
    content = bytearray(data.draw(st.binary(max_size=40) | st.lists(codes, max_size=40).map(bytes)))
    if data.draw(st.booleans()):
        content = bytearray(pickle.dumps(meta))
        for at in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=4)):
            content[at] = data.draw(st.integers(0, 255))
    try:
        value, _ = read_pickle(bytes(content), "here")
    except CheckpointError:
        return
    plain = (type(None), bool, int, float, str, bytes, list, tuple, dict, Made, Name, Outside)
    assert type(value) in plain
