"""Files and JSON of strangers: what leads elsewhere, never ends, or is too much is refused with a sentence."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import CheckpointError
from shardwise.system.safe_files import (
    inside,
    is_plain_name,
    open_regular,
    parse_object,
    read_json,
    read_regular,
    read_text,
    replaced,
)

HERE = Path("x.json")


@pytest.mark.parametrize(
    "name", ["", ".", "..", "/etc/passwd", "../a", "a/b", "a\0b", "a\\b", "\ud800", "a" * 5000, 3, None]
)
def test_names_that_are_not_plain_are_refused(name: object, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a plain file name"):
        inside(tmp_path, name)


def test_links_may_lead_within_the_folder_only(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "real").write_text("here")
    (tmp_path / "secret").write_text("there")
    (folder / "near").symlink_to("real")
    (folder / "far").symlink_to(tmp_path / "secret")
    (folder / "round").symlink_to("round")
    assert read_text(inside(folder, "near")) == "here"
    with pytest.raises(CheckpointError, match="outside of the checkpoint"):
        inside(folder, "far")
    with pytest.raises(CheckpointError):
        read_text(inside(folder, "round"))
    (tmp_path / "alias").symlink_to(folder)  # the folder itself may be named by a link
    assert read_text(inside(tmp_path / "alias", "near")) == "here"


def test_links_of_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--a--b" / "blobs").mkdir()
    (tmp_path / "models--a--b" / "blobs" / "abc").write_text("weights")
    (snapshot / "model.safetensors").symlink_to("../../blobs/abc")
    (snapshot / "other").symlink_to("../../../elsewhere")
    assert read_text(inside(snapshot, "model.safetensors")) == "weights"
    with pytest.raises(CheckpointError, match="outside"):
        inside(snapshot, "other")


def test_only_regular_files_are_opened_and_nothing_waits(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(CheckpointError, match="not a regular file"):
            open_regular(path)
    with pytest.raises(CheckpointError, match="is missing"):
        open_regular(tmp_path / "none")


def test_sizes_have_a_limit(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(CheckpointError, match="more than the"):
        read_regular(tmp_path / "sparse")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "cannot be read as JSON"),
        ("[1]", "a JSON list instead of an object"),
        ('{"a": 1, "a": 2}', "says 'a' twice"),
        ('{"a": {"b": 1, "b": 2}}', "says 'b' twice"),
        ('{"a": NaN}', "NaN is not a number"),
        ('{"a": -Infinity}', "Infinity is not a number"),
        ('{"a": "\\ud800"}', "surrogates not allowed"),
        ('{"a": ' * 101 + "1" + "}" * 101, "nests more than 100"),
        ('{"a": ' + "[" * 10**6, "nests more than 100"),
        ('{"a": ' + "9" * 10**5 + "}", "cannot be read as JSON"),
    ],
)
def test_json_has_bounds(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(CheckpointError, match=words):
        read_json(tmp_path / "x.json")


def test_what_people_write_may_be_odd() -> None:
    assert parse_object(b'{"a": 1, "a": Infinity}', HERE, lenient=True) == {"a": float("inf")}
    with pytest.raises(CheckpointError):
        parse_object(b'{"a": ' * 100, HERE, lenient=True)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text(), PLAIN, max_size=5))
def test_json_of_any_object_is_read_as_it_is(value: dict[str, object]) -> None:
    assert parse_object(json.dumps(value).encode(), HERE) == value
    assert parse_object(json.dumps(value, ensure_ascii=False).encode(), HERE) == value


@given(st.binary(max_size=60))
def test_any_bytes_are_json_or_refused(content: bytes) -> None:
    try:
        parse_object(content, HERE)
    except CheckpointError:
        pass


@given(st.text(max_size=12))
def test_a_plain_name_stays_in_its_folder(name: str) -> None:
    if is_plain_name(name):
        assert (Path("/folder") / name).parent == Path("/folder")


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "latest"
    path.write_text("before")
    with pytest.raises(UnicodeEncodeError), replaced(path) as draft:
        draft.write_text("half of \ud800")
    assert path.read_text() == "before"
    with replaced(path) as draft:
        draft.write_text("after")
        assert path.read_text() == "before"
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("latest", "after")]


def test_two_who_replace_a_file_at_once_each_write_their_own_draft(tmp_path: Path) -> None:
    """Threads of one process, or processes that have one number on two hosts."""
    path = tmp_path / "latest"
    with replaced(path) as first:
        first.write_text("the first, which is longer")
        with replaced(path) as second:
            second.write_text("the second")
        assert path.read_text() == "the second"
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("latest", "the first, which is longer")]
