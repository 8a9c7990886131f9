"""Edited checkpoints with matching checksums are refused and change nothing, or load the values that were saved."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import shutil
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from twins import adamw, work_on_ranks

import shardwise as sw
from shardwise.checkpoint.index_schema import read_index
from shardwise.errors import CheckpointError
from shardwise.system.safe_files import parse_json
from tests import inside

FILES = ("rank-00000.safetensors", "rank-00001.safetensors")


def build() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    model[1].weight.requires_grad_(False)
    model.register_buffer("seen", torch.arange(3))
    return model


def step(engine: sw.Engine) -> None:
    engine.backward(engine(torch.ones(2, 5)).sum())
    engine.step()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")

    def work(engine: sw.Engine) -> Path:
        step(engine)
        return engine.save(folder, state={"epoch": (1, 2)}, metrics={"loss": 2.5})

    path: Path = work_on_ranks(2, work, "zero3", build, adamw)[0]
    return path


@pytest.fixture(scope="module")
def reader() -> Iterator[sw.Engine]:
    """An engine of one rank, whose values differ from the checkpoint's."""
    model = build()
    with sw.shard(model, "zero3", optimizer=adamw(model)) as engine:
        step(engine)
        step(engine)
        yield engine


def values(engine: sw.Engine) -> dict[str, torch.Tensor]:
    return {entry.key: entry.tensor.detach().clone() for entry in inside.entries(engine)}


def copied(saved: Path, run: Path) -> Path:
    shutil.copytree(saved, run / saved.name)
    (run / "latest").write_text(saved.name)
    return run / saved.name


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Edit the index, and update its checksum."""
    raw = json.loads((path / "index.json").read_text())
    change(raw["index"])
    text = json.dumps(raw["index"], sort_keys=True, separators=(",", ":"))
    raw["crc32"] = zlib.crc32(text.encode())
    (path / "index.json").write_text(json.dumps(raw))


# -- edits seen before ----------------------------------------------------------------------------------


def chunk(index: dict[str, Any], key: str = "param/0.weight") -> dict[str, Any]:
    return next(one for one in index["chunks"] if one["key"] == key)


def put(chunk_key: str, /, **said: Any) -> Callable[[dict[str, Any]], object]:
    return lambda index: chunk(index, chunk_key).update(said)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


EDITS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a start below 0": (put("param/0.weight", start=-1), r"chunks\[\d+\].start is '-1': input should be greater"),
    "a start that is text": (put("param/0.weight", start="0"), r"chunks\[\d+\].start is '0': input should be a valid"),
    "no bytes": (put("param/0.weight", num_bytes=0, crc32=[]), "num_bytes is 0, which does not fit its elements"),
    "all of it as wide": (
        lambda index: [one.update(dtype="int32") for one in index["chunks"] if one["key"] == "param/0.weight"],
        "does not have param 0.weight as",
    ),
    "a narrower dtype": (put("param/0.weight", dtype="float16"), "does not fit its elements of float16"),
    "a dtype as wide": (put("param/0.weight", dtype="int32"), "is partly int32 and partly"),
    "no dtype": (put("param/0.weight", dtype="Tensor"), "'Tensor' is not a dtype"),
    "in the head": (put("param/0.weight", offset=8), "has bytes 8 to"),
    "behind the end": (put("param/0.weight", offset=2**40), "whose tensors lie from"),
    "another's bytes": (lambda index: put("param/0.weight", offset=chunk(index)["offset"] + 4)(index), "but what is"),
    "too few sums": (put("param/0.weight", crc32=[]), "has 0 sums"),
    "a sum too large": (put("param/0.weight", crc32=[2**40]), "crc32"),
    "other blocks": (put("param/0.weight", block_bytes=2**50), "block_bytes is"),
    "an unknown kind": (put("param/0.weight", kind="weights"), "has the unknown kind 'weights'"),
    "a name that is no text": (put("param/0.weight", key="\ud800"), "is not text"),
    "another key": (put("param/0.weight", name="0.bias"), "has a key that does not fit param 0.bias"),
    "an absolute name": (lambda index: index["files"][0].update(name="/etc/passwd"), "not the plain name"),
    "a name above": (lambda index: index["files"][0].update(name="../x.safetensors"), "not the plain name"),
    "a file that is not listed": (put("param/0.weight", file="other.safetensors"), "which files does not list"),
    "a huge head": (lambda index: index["files"][0].update(head_bytes=10**18), "has a header of 1000000000000000000"),
    "a head that is no whole number": (lambda index: index["files"][0].update(head_bytes=1e18), "valid integer"),
    "a huge file": (lambda index: index["files"][0].update(num_bytes=2**60), "but its tensors end at"),
    "a chunk twice": (lambda index: index["chunks"].append(dict(chunk(index))), "but what is before ends at"),
    "a chunk less": (lambda index: index["chunks"].remove(chunk(index)), "what is before ends at|tensors end at"),
    "a field more": (put("param/0.weight", code="x"), r"chunks\[\d+\].code"),
    "a field less": (lambda index: chunk(index).pop("dtype"), r"chunks\[\d+\].dtype: field required"),
    "a shape for a parameter": (
        put("param/0.weight", shape=[3], start=0, stop=0),
        "is for states of an optimizer only",
    ),
    "no world": (lambda index: index.update(world_size=0), "world_size is '0'"),
    "a huge shape": (
        lambda index: index["shapes"].update({"0.weight": [2**50, 2**50]}),
        "which is not a tensor's shape",
    ),
    "a negative shape": (lambda index: index["shapes"].update({"0.weight": [-5, -7]}), "shapes"),
    "no steps": (lambda index: index["state"].pop("num_steps"), "which is not a number of steps"),
    "steps below 0": (lambda index: index["state"].update(num_steps=-1), "which is not a number of steps"),
    "no state of the user": (lambda index: index["state"].update(user=3), "must be an object"),
    "a word that is none": (
        lambda index: index["state"].update(user={"$x": 1}),
        "the key is unknown, or its value is malformed",
    ),
    "a tensor too short": (
        lambda index: index["state"].update(user={"t": {"$tensor": ["float32", [2], "AAAA"]}}),
        r"state\['user'\]\['t'\] is not what shardwise writes there",
    ),
    "an array of objects": (
        lambda index: index["state"].update(user={"t": {"$array": ["|O", [1], "AAAAAAAAAAA="]}}),
        "not a dtype of numbers",
    ),
    "a negative size": (
        lambda index: index["state"].update(user={"t": {"$tensor": ["float32", [-1], "AAAAAA=="]}}),
        "is not a shape",
    ),
    "a key that is a list": (lambda index: index["state"].update(user={"$dict": [[[1], 2]]}), "unhashable"),
    "nested": (lambda index: index["state"].update(user={"deep": nested(100)}), "nests more than 100"),
    "nested deeper": (lambda index: index["state"].update(user={"deep": nested(900)}), "nests more than 100"),
    "a group without names": (lambda index: index["groups"][0].update(params="0.weight"), "is not a list of names"),
    "a name twice": (lambda index: index["groups"][0]["params"].append("0.weight"), "which is unknown or listed twice"),
    "a rate that is text": (lambda index: index["groups"][0].update(lr="fast"), "has lr = 'fast'"),
    "betas that are one": (lambda index: index["groups"][0].update(betas=0.9), "has betas = '0.9'"),
    "no groups": (lambda index: index.update(groups=[]), "groups has no '0.*', whose states are there"),
    "a parameter less in a group": (
        lambda index: index["groups"][0]["params"].remove("0.bias"),
        "groups has no '0.bias', whose states are there",
    ),
    "a rate that is no number": (lambda index: index["groups"][0].update(lr=float("nan")), "has lr = 'nan'"),
    "an infinite rate": (lambda index: index["groups"][0].update(lr=float("inf")), "has lr = 'inf'"),
    "an infinite rate in a tensor": (
        lambda index: index["groups"][0].update(lr={"$tensor": ["float32", [], "AACAfw=="]}),
        "has lr = ",
    ),
    "a beta that is no number": (
        lambda index: index["groups"][0].update(betas={"$tuple": [0.9, float("nan")]}),
        "has betas = ",
    ),
    "no rate": (lambda index: index["groups"][0].pop("lr"), "has no lr, which every AdamW has"),
    "no betas": (lambda index: index["groups"][0].pop("betas"), "has no betas, which every AdamW has"),
    "more ranks": (lambda index: index.update(world_size=3), "world_size is 3, but 2 ranks wrote"),
    "steps below 0 as a number": (
        lambda index: index["numbers"].update({"0.bias": {"step": -1}}),
        "has step = -1, which is not a number of steps",
    ),
    "a state that is no number": (
        lambda index: index["numbers"].update({"0.bias": {"best": float("nan")}}),
        "has best = nan",
    ),
    "a state as narrow that is not": (
        put("state.exp_avg/0.weight", is_narrow=True),
        "is narrow, but its float32 has not fewer bits|is partly float32 and partly something else",
    ),
    "a parameter as narrow": (
        lambda index: [one.update(is_narrow=True) for one in index["chunks"] if one["key"] == "param/0.weight"],
        "is narrow, but its float32 has not fewer bits",
    ),
    "a tie to nothing": (lambda index: index["ties"].update(other="nothing"), "one has to be a new name"),
    "numbers of nobody": (lambda index: index["numbers"].update(other={}), "numbers has 'other'"),
    "a metric that is text": (lambda index: index["metrics"].update(loss="low"), r"metrics.loss is 'low'"),
    "a loss scale of nothing": (lambda index: index["state"].update(loss_scale={"scale": 0}), "loss_scale"),
    "a number that is a list": (
        put("state.step/0.weight", shape=[1]),
        r"kept exp_avg, exp_avg_sq, step \(not a number\)",
    ),
    "a state less": (lambda index: rename_state(index), "kept exp_avg_sq, other, step for 0.weight"),
}


OF_THE_OPTIMIZER = {
    *("a rate that is text", "betas that are one", "a number that is a list", "a rate that is no number"),
    *("an infinite rate", "an infinite rate in a tensor", "a beta that is no number", "no rate", "no betas"),
}
"""Refused by an engine with an optimizer: only that knows which settings and states are valid."""


def rename_state(index: dict[str, Any]) -> None:
    for one in index["chunks"]:
        if one["kind"] == "state.exp_avg":
            one.update(kind="state.other", key=f"state.other/{one['name']}")


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_is_refused_by_its_field_everywhere(edit: str, saved: Path, reader: sw.Engine, tmp_path: Path) -> None:
    change, words = EDITS[edit]
    path = copied(saved, tmp_path)
    rewrite(path, change)
    before = values(reader), reader.num_steps
    with pytest.raises(CheckpointError, match=words) as caught:
        reader.resume(tmp_path)
    assert str(path) in str(caught.value)
    assert_same(before[0], values(reader))
    assert reader.num_steps == before[1]
    if edit in OF_THE_OPTIMIZER:
        return
    refusals = []
    try:
        refusals += sw.inspect(tmp_path, verify=True).problems
    except CheckpointError as error:
        refusals.append(str(error))
    assert refusals
    with pytest.raises(CheckpointError):
        sw.convert(path, tmp_path / "out", "shardwise")


def assert_same(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> None:
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda data: data + b"\0", r"has \d+ bytes instead of"),
        (lambda data: data[:-1], r"has \d+ bytes instead of"),
        (lambda data: data.replace(b'"pt"', b'"tp"'), "is damaged: the checksum of its header"),
    ],
    ids=["grown", "cut", "head"],
)
def test_a_file_that_somebody_has_written_to_is_refused(
    edit: Callable[[bytes], bytes], words: str, saved: Path, reader: sw.Engine, tmp_path: Path
) -> None:
    """Though all that the index lists may be there, as it was."""
    path = copied(saved, tmp_path)
    before = values(reader)
    data = (path / FILES[1]).read_bytes()
    (path / FILES[1]).write_bytes(edit(data))
    assert (path / FILES[1]).read_bytes() != data
    with pytest.raises(CheckpointError, match=f"{FILES[1]}.* {words}"):
        reader.resume(path)
    assert_same(before, values(reader))


def test_what_is_no_regular_file_is_refused_at_once(saved: Path, reader: sw.Engine, tmp_path: Path) -> None:
    """Reading a pipe would block, and a link may lead anywhere."""
    path = copied(saved, tmp_path)
    for file, words in (("index.json", "index.json"), (FILES[1], FILES[1])):
        kept = tmp_path / "elsewhere"
        (path / file).rename(kept)
        os.mkfifo(path / file)
        with pytest.raises(CheckpointError, match=f"{words} is not a regular file"):
            reader.resume(path)
        with pytest.raises(CheckpointError):
            sw.convert(path, tmp_path / "out", "shardwise")
        (path / file).unlink()
        (path / file).symlink_to(kept)
        with pytest.raises(CheckpointError, match=f"{words} is a symbolic link"):
            reader.resume(path)
        (path / file).unlink()
        kept.rename(path / file)
    assert reader.resume(path) is not None


@pytest.mark.parametrize(
    "said", ["../outside", "/", "step-1", "global_step3", "", "step-00000009", "x" * 10000, b"\xff"]
)
def test_latest_leads_nowhere_else(said: str | bytes, saved: Path, reader: sw.Engine, tmp_path: Path) -> None:
    """If `latest` is invalid or names a missing checkpoint, no older one is loaded instead: the user must choose it."""
    path = copied(saved, tmp_path / "run")
    copied(saved, tmp_path / "outside")
    (tmp_path / "run/latest").write_bytes(said.encode() if isinstance(said, str) else said)
    before = values(reader)
    with pytest.raises(CheckpointError, match="latest") as caught:
        reader.resume(tmp_path / "run")
    if len(said) < 100 and isinstance(said, str):
        assert str(path) in str(caught.value)  # the checkpoint that exists instead
    with pytest.raises(CheckpointError, match="latest"):
        sw.inspect(tmp_path / "run")
    assert_same(before, values(reader))
    assert reader.resume(path) is not None


def test_a_link_in_a_run_is_not_followed(saved: Path, reader: sw.Engine, tmp_path: Path) -> None:
    copied(saved, tmp_path / "outside")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / saved.name).symlink_to(tmp_path / "outside" / saved.name)
    with pytest.raises(CheckpointError, match="is a symbolic link"):
        reader.resume(tmp_path / "run")
    assert reader.resume(tmp_path / "run" / saved.name) is not None  # naming the link itself is intended


def test_what_goes_along_is_no_link(saved: Path, tmp_path: Path) -> None:
    path = copied(saved, tmp_path / "run")
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "run/huggingface").mkdir()
    (tmp_path / "run/huggingface/config.json").symlink_to(tmp_path / "secret")
    (tmp_path / "run/huggingface/notes.txt").write_text("notes")
    sw.convert(path, tmp_path / "out", "shardwise")
    assert [one.name for one in (tmp_path / "out/huggingface").iterdir()] == ["notes.txt"]


def test_text_that_nests_is_refused_on_any_stack() -> None:
    def work() -> None:
        for text in ("[" * 10**5, '{"a":' * 10**5, '["[[[[' + '\\"' + '", ' + "[" * 101 + "]" * 102):
            with pytest.raises(CheckpointError, match="nests more than 100"):
                parse_json(text, "it")

    assert parse_json('["[[' + "[" * 500 + '"]', "it") == ["[[" + "[" * 500]
    threading.stack_size(2**18)
    try:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    finally:
        threading.stack_size(0)


def test_an_unreadable_place_is_refused_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()

    def work(engine: sw.Engine) -> str:
        with pytest.raises(CheckpointError) as caught:
            engine.resume(tmp_path)
        return str(caught.value)

    messages = work_on_ranks(2, work, "zero3", build, adamw)
    assert messages[0] == messages[1]
    assert "latest is not a regular file" in messages[0]


# -- random edits ---------------------------------------------------------------------------------------

JUNK: list[Any] = [
    None,
    True,
    False,
    -1,
    0,
    1,
    2,
    3.5,
    1e300,
    2**31,
    2**53,
    2**63,
    10**30,
    "",
    "x",
    "..",
    "/etc/passwd",
]
JUNK += [[], {}, [1], [[1]], {"a": 1}, {"$tuple": 1}, {"$tensor": ["float32", [1], "AAAAAA=="]}, nested(30), "\ud800"]
JUNK += ["float64", "float32", "uint8", "int32", "param", "buffer", "state.step", "state.exp_avg", "rank", "buffer.1"]
JUNK += ["0.weight", "0.bias", "param/0.weight", "seen", *FILES]


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to every value within `value`."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*at, key)
        yield from places(inner, (*at, key))


@st.composite
def edited(draw: Any, original: dict[str, Any]) -> dict[str, Any]:
    """Make one to three edits: replace a value, shift it, drop it, repeat it, or swap two."""
    made = copy.deepcopy(original)
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
        every = list(places(made))
        at = draw(st.sampled_from(every))
        home = made
        for key in at[:-1]:
            home = home[key]
        what = draw(st.sampled_from(["junk", "junk", "junk", "shift", "drop", "twice", "swap"]))
        value = home[at[-1]]
        if what == "shift" and type(value) is int:
            home[at[-1]] = value + draw(st.sampled_from([-64, -8, -1, 1, 4, 2**16]))
        elif what == "drop":
            del home[at[-1]]
        elif what == "twice" and isinstance(home, list):
            home.append(copy.deepcopy(value))
        elif what == "swap":
            other = draw(st.sampled_from(list(home) if isinstance(home, dict) else range(len(home))))
            home[at[-1]], home[other] = home[other], value
        else:
            home[at[-1]] = copy.deepcopy(draw(st.sampled_from(JUNK)))
        if not made:
            break
    return made


FUZZ = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def tensors(source: Any) -> dict[str, torch.Tensor]:
    return {spec.key: source.read(spec) for spec in source.specs}


def converted(run: Path, out: Path) -> dict[str, torch.Tensor]:
    """Inspect and convert a checkpoint; returns its tensors, or nothing if it is refused with a `CheckpointError`."""
    with contextlib.suppress(CheckpointError):
        sw.inspect(run, verify=True)
    try:
        sw.convert(run, out, "shardwise")
    except CheckpointError:
        assert not out.exists()
        return {}
    return tensors(sw.inspect(out).source)


@FUZZ
@given(data=st.data())
def test_any_edit_of_an_index(data: st.DataObject, saved: Path, reader: sw.Engine) -> None:
    original = json.loads((saved / "index.json").read_text())["index"]
    index = data.draw(edited(original))
    with tempfile.TemporaryDirectory() as folder:
        path = copied(saved, Path(folder) / "run")
        rewrite(path, lambda body: (body.clear(), body.update(index)))
        race(path, saved, reader, Path(folder) / "out")


@FUZZ
@given(data=st.data())
def test_any_edit_of_what_a_rank_remembers(data: st.DataObject, saved: Path, reader: sw.Engine) -> None:
    document = data.draw(edited(remembered(saved)))
    with tempfile.TemporaryDirectory() as folder:
        path = copied(saved, Path(folder) / "run")
        remember(path, document)
        race(path, saved, reader, Path(folder) / "out")


def remembered(path: Path) -> dict[str, Any]:
    """The state that rank 0 remembers."""
    there = next(one for one in read_index(path).chunks if one.key == "rank/0")
    content = (path / there.file).read_bytes()
    document: dict[str, Any] = json.loads(content[there.offset : there.offset + there.num_bytes])
    return document


def remember(path: Path, document: dict[str, Any]) -> None:
    """Replace the state that rank 0 remembers, cut or padded to the same length, and update the checksums."""
    there = next(one for one in read_index(path).chunks if one.key == "rank/0")
    content = (path / there.file).read_bytes()
    text = json.dumps(document).encode()[: there.num_bytes].ljust(there.num_bytes)
    (path / there.file).write_bytes(content[: there.offset] + text + content[there.offset + there.num_bytes :])
    size = there.block_bytes
    rewrite(path, put("rank/0", crc32=[zlib.crc32(text[start : start + size]) for start in range(0, len(text), size)]))


@pytest.mark.parametrize("name", ["", "MT", "\ud800"])
def test_generators_that_cannot_be_change_nothing(name: str, saved: Path, reader: sw.Engine, tmp_path: Path) -> None:
    path = copied(saved, tmp_path)
    document = remembered(path)
    document["generators"]["numpy"][0] = name
    remember(path, document)
    before, state = values(reader), torch.get_rng_state()
    with pytest.raises(CheckpointError, match=r"rank 0 remembers, .* has invalid states of random generators"):
        reader.resume(tmp_path)
    assert_same(before, values(reader))
    assert torch.equal(state, torch.get_rng_state())
    assert any("random generators" in problem for problem in sw.inspect(path, verify=True).problems)


def race(path: Path, saved: Path, reader: sw.Engine, out: Path) -> None:
    """Resume from an edited checkpoint: this changes nothing, or loads the values that were saved."""
    before, num_steps = values(reader), reader.num_steps
    generators = torch.get_rng_state()
    try:
        loaded = reader.resume(path.parent)
    except CheckpointError:
        assert_same(before, values(reader))
        assert reader.num_steps == num_steps
        assert torch.equal(generators, torch.get_rng_state())
    else:
        assert loaded is not None
        there = values(reader)
        assert reader.resume(saved) is not None
        assert_same(values(reader), there)
    expected = tensors(sw.inspect(saved).source)
    for key, value in converted(path.parent, out).items():
        assert torch.equal(value.reshape(-1), expected[key].reshape(-1)), key
