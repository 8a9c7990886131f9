"""Plans from files, mappings, names and overrides: what is read, where it came from, what is refused."""

from __future__ import annotations

import copy
import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardwise.errors import ConfigError, nearest, some
from shardwise.plan import Offload, PlaceEdit, Plan, Rows, Wire, WireFormat, load_plan, plan_table, schema_table
from shardwise.plan.schema import Sequence, Strict, plan_heard, plan_told

DTYPES = st.none() | st.sampled_from(["fp64", "fp32", "bf16"])
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
NAMES = st.lists(TEXT, max_size=3).map(tuple)
EDITS = st.builds(
    PlaceEdit,
    shard=st.none() | NAMES,
    partial=st.none() | NAMES,
    tier=st.none() | st.sampled_from(["device", "host", "disk"]),
    dtype=DTYPES,
)
PLANS = st.builds(
    Plan,
    preset=TEXT,
    mesh=st.none() | st.dictionaries(TEXT, st.integers(-1, 4096), max_size=3),
    precision=st.sampled_from(["fp64", "fp32", "bf16"]),
    rows=st.builds(Rows, param=EDITS, held=EDITS, grad=EDITS, optim=EDITS),
    wire=st.builds(Wire, grad=DTYPES | st.builds(WireFormat, dtype=st.just("int4"), axes=st.none() | NAMES)),
    units=st.just("auto")
    | NAMES
    | st.fixed_dictionaries({"class": TEXT})
    | st.fixed_dictionaries({"min_numel": st.integers(1, 2**40)}),
    prefetch_bytes=st.just("auto") | st.integers(0, 2**50),
    accumulate=st.integers(1, 2**20),
    clip_grad_norm=st.none() | st.floats(0, exclude_min=True, allow_infinity=False),
    sync_buffers=st.booleans(),
)


def refused(source: Any, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_plan(source, overrides)
    return str(caught.value)


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write a file into a fresh working directory and return its name."""
    monkeypatch.chdir(tmp_path)

    def write(name: str, text: str | bytes) -> str:
        Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return name

    return write


# --- what goes out comes back ---------------------------------------------------------------------


class Yaml12(yaml.SafeDumper):
    """Puts in quotes also what is a number in YAML 1.2 only: an axis may be called 0E0."""


Yaml12.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


@settings(deadline=None)  # a busy disk is no failure
@example(Plan(preset="0E0"))
@given(PLANS)
def test_every_plan_survives_every_format(tmp_path_factory: pytest.TempPathFactory, plan: Plan) -> None:
    folder = tmp_path_factory.mktemp("plans")
    values = plan.model_dump(mode="json")
    texts = {
        "plan.yaml": yaml.dump(values, Dumper=Yaml12, sort_keys=False),
        "plan.json": json.dumps(values, indent="\t"),
        "plan.toml": to_toml(plan.model_dump(mode="json", exclude_none=True)),
    }
    for name, text in texts.items():
        (folder / name).write_bytes(text.encode())
        assert load_plan(folder / name) == plan, name


def to_toml(values: dict[str, Any]) -> str:
    """A mapping as TOML: JSON's texts, numbers and lists are TOML's too, but for the escape of DEL."""
    lines = [f"{quoted(key)} = {quoted(value)}" for key, value in values.items() if key != "rows"]
    lines += ["[rows]"] + [f"{row} = {quoted(edit)}" for row, edit in values.get("rows", {}).items()]
    return "\n".join(lines) + "\n"


def quoted(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{quoted(key)} = {quoted(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(quoted, value)) + "]"
    if isinstance(value, str):
        return '"' + "".join(one if one.isalnum() else f"\\U{ord(one):08x}" for one in value) + '"'
    return json.dumps(value)


@settings(deadline=None)
@given(PLANS)
def test_a_plan_is_its_own_source(plan: Plan) -> None:
    again = load_plan(plan)
    assert again == plan
    assert hash(again) == hash(plan)
    assert plan_table(again) == plan_table(plan)
    assert load_plan(plan.model_dump()) == plan


def test_the_order_of_axes_is_part_of_a_plan() -> None:
    assert Plan(mesh={"node": 2, "local": 4}) != Plan(mesh={"local": 4, "node": 2})
    assert Plan() != "zero3"


def test_origins_survive_a_copy_and_a_pickle() -> None:
    plan = load_plan("ddp", ["accumulate=2"])
    for twin in (copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))):
        assert twin == plan
        assert twin.origin("accumulate") == "override 'accumulate=2'"


# --- where a value came from ----------------------------------------------------------------------


def test_origins_of_a_yaml_file(write: Any) -> None:
    name = write(
        "plan.yaml",
        "# first\npreset: ddp\n\nwire:\n  grad: bf16\nmesh: {dp: 4,\n  tp: 2}\nclip_grad_norm: 1e-1\n",
    )
    plan = load_plan(name, ["mesh.tp=-1", "prefetch_bytes=64M"])
    assert plan.clip_grad_norm == 0.1
    assert plan.mesh == {"dp": 4, "tp": -1}
    assert plan.prefetch_bytes == 64 * 2**20
    assert plan.origin("preset") == "plan.yaml:2"
    assert plan.origin("wire") == "plan.yaml:4"
    assert plan.origin("wire.grad") == "plan.yaml:5"
    assert plan.origin("mesh.dp") == "plan.yaml:6"
    assert plan.origin("mesh.tp") == "override 'mesh.tp=-1'"
    assert plan.origin("accumulate") == "default"
    table = {path: (value, origin) for path, value, origin in plan_table(plan)}
    assert table["mesh.dp"] == (4, "plan.yaml:6")
    assert table["wire.grad.dtype"] == ("bf16", "plan.yaml:5")
    assert table["rows.grad.tier"] == (None, "default")


def test_origins_of_a_toml_file(write: Any) -> None:
    name = write(
        "plan.toml",
        'preset = "ddp"\nunits = [\n  "h.*",  # accumulate = 3\n]\nwire.grad = "bf16"\r\n\n'
        "[rows.grad]\n  tier = 'host'\n[rows]\nparam = {dtype = 'bf16'}\n[mesh]\ndp = 2\n",
    )
    plan = load_plan(name)
    assert plan.units == ("h.*",)
    places = ["preset", "units", "wire.grad", "rows.grad.tier", "rows.param.dtype", "mesh.dp"]
    assert [plan.origin(path) for path in places] == [f"plan.toml:{line}" for line in (1, 2, 5, 8, 10, 12)]
    assert plan.origin("accumulate") == "default"


def test_origins_of_a_json_file_indented_with_tabs(write: Any) -> None:
    name = write(
        "plan.json",
        '{\n\t"preset": "d\\"dp{",\n\t"units": ["a}", "b"],\n\t"wire": {},\n\t"mesh": {"dp":\n2\n, "tp": 1}}',
    )
    plan = load_plan(name)
    assert plan.preset == 'd"dp{'
    places = ["preset", "units", "wire", "mesh.dp", "mesh.tp"]
    assert [plan.origin(path) for path in places] == [f"plan.json:{line}" for line in (2, 3, 4, 5, 7)]


def test_origins_of_arguments_names_and_overrides() -> None:
    assert Plan(wire=Wire(grad="bf16")).origin("wire.grad") == "argument"
    assert load_plan({"wire": {"grad": "bf16"}}).origin("wire.grad") == "argument"
    assert load_plan("ddp").origin("preset") == "argument"
    plan = load_plan(Plan(accumulate=2, mesh={"dp": 2}), ["mesh={node: 2, local: -1}", "wire.grad=null"])
    assert plan.origin("accumulate") == "argument"
    assert plan.origin("mesh.dp") == "default"
    assert plan.origin("mesh.local") == "override 'mesh={node: 2, local: -1}'"
    assert plan.origin("wire") == plan.origin("wire.grad") == "override 'wire.grad=null'"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("wire.gard", "unknown key 'gard' in wire. Did you mean 'grad'?"),
        ("acumulate", "unknown key 'acumulate' in the plan. Did you mean 'accumulate'?"),
        ("rows.grad.sharded", "unknown key 'sharded' in rows.grad. Did you mean 'shard'?"),
        ("rules.experts.rowz", "unknown key 'rowz' in rules.experts. Did you mean 'rows'?"),
        ("accumulate.steps", "accumulate has no keys of its own."),
        ("", "unknown key '' in the plan. Known: accumulate, "),
    ],
)
def test_a_place_that_no_plan_has_has_no_origin(path: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Plan().origin(path)
    assert str(caught.value).startswith(f"origin({path!r}): {words}")


@pytest.mark.parametrize("path", ["mesh.dp", "rules.experts", "rules.experts.rows.grad.shard", "units.class", "wire"])
def test_a_place_that_a_plan_may_have_is_a_default(path: str) -> None:
    assert Plan().origin(path) == "default"
    twin = load_plan(load_plan({"units": {"class": "Block"}, "rules": {"a.b": {"max_numel": 9}}}))
    assert twin.origin("units.class") == twin.origin("rules.a.b.max_numel") == "argument"


@pytest.mark.parametrize(
    "text",
    [
        '{"preset": "zero1", "wire": {"grad": "fp32"}}',
        "{preset: zero1, wire: {grad: fp32}}",
        ' {"preset":"zero1","wire":{"grad":"fp32"}}',
    ],
)
def test_a_plan_may_be_written_out_in_the_place_of_its_name(text: str) -> None:
    plan = load_plan(text, ["wire.param=bf16"])
    assert plan == Plan(preset="zero1", wire=Wire(grad=WireFormat(dtype="fp32"), param=WireFormat(dtype="bf16")))
    assert plan.origin("preset") == "argument"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"preset": "zero1"', 'The plan \'{"preset": "zero1"\': this is not YAML'),
        ("{preset:zero1}", "The plan '{preset:zero1}': 'preset:zero1' is one word. Put a space after the colon"),
        ("{presett: zero1}", "argument: unknown key 'presett' in the plan. Did you mean 'preset'?"),
        (
            "{preset: zero1, preset: zero2}",
            "The plan '{preset: zero1, preset: zero2}': the key 'preset' is given twice",
        ),
    ],
)
def test_a_plan_that_is_written_out_wrongly(text: str, message: str) -> None:
    assert refused(text).startswith(message)


def test_overrides_leave_the_source_alone(write: Any) -> None:
    values = {"mesh": {"dp": 2}}
    load_plan(values, ["mesh.dp=4"])
    assert values == {"mesh": {"dp": 2}}
    name = write("plan.yaml", "rows: {param: &same {dtype: bf16}, grad: *same}")
    rows = load_plan(name, ["rows.grad.dtype=fp64"]).rows
    assert (rows.param.dtype, rows.grad.dtype) == ("bf16", "fp64")


def test_the_last_override_wins() -> None:
    assert load_plan("ddp", ["accumulate=2", "accumulate=3", "units=[h.*, head]"]).accumulate == 3
    assert load_plan("ddp", ["mesh.dp=2", "mesh=null", "mesh.tp=4"]).mesh == {"tp": 4}
    assert load_plan("ddp", ["rows.grad.shard=[]"]).rows.grad.shard == ()


def test_yaml_merges_are_understood(write: Any) -> None:
    name = write(
        "plan.yml",
        "rows:\n  param: &p {dtype: bf16,\n    tier: host}\n  held:\n    <<: *p\n    tier: device\n",
    )
    plan = load_plan(name)
    assert (plan.rows.held.dtype, plan.rows.held.tier) == ("bf16", "device")
    assert plan.origin("rows.held.dtype") == "plan.yml:2"
    assert plan.origin("rows.held.tier") == "plan.yml:6"


def test_an_int_will_do_for_a_float_and_an_empty_object_is_a_plan(write: Any) -> None:
    assert load_plan({"clip_grad_norm": 1}).clip_grad_norm == 1.0
    assert load_plan(write("plan.json", "\ufeff{}")) == Plan()
    assert load_plan(Path(write("PLAN.YAML", "preset: ddp"))).preset == "ddp"


# --- what is refused ------------------------------------------------------------------------------


def test_an_unknown_key_gets_the_nearest_name_at_its_level(write: Any) -> None:
    name = write("plan.yaml", "preset: zero3\n\nprefech_bytes: 0\nrows:\n  grd: {}\n  grad: {shart: []}\n")
    assert refused(name).splitlines() == [
        "plan.yaml:3: unknown key 'prefech_bytes' in the plan. Did you mean 'prefetch_bytes'?",
        "plan.yaml:5: unknown key 'grd' in rows. Did you mean 'grad'?",
        "plan.yaml:6: unknown key 'shart' in rows.grad. Did you mean 'shard'?",
    ]


@pytest.mark.parametrize(
    ("key", "cure"),
    [
        ("stage", "preset: zero3"),
        ("zero_optimization", "shardwise convert"),
        ("train_micro_batch_size_per_gpu", "accumulate: 4"),
        ("gradient_accumulation_steps", "Write accumulate: 4."),
        ("fp16", "Write precision: bf16, or fp16."),
        ("mixed_precision", "Write precision: bf16, or fp16."),
        ("fsdp_config", "preset: zero3"),
        ("max_grad_norm", "Write clip_grad_norm: 1.0."),
        ("gradient_checkpointing", "Write activations: recompute."),
        ("tp", "mesh: {dp: -1, tp: 2}"),
        ("Preset", "Did you mean 'preset'?"),
        ("MESH", "Did you mean 'mesh'?"),
    ],
)
def test_the_keys_of_other_libraries_get_what_a_plan_says_instead(key: str, cure: str) -> None:
    message = refused({key: {}})
    assert message.startswith(f"argument: unknown key {key!r} in the plan. ")
    assert cure in message


def test_other_libraries_keys_are_known_at_the_top_of_a_plan_alone() -> None:
    assert refused({"rows": {"tp": {}}}) == (
        "argument: unknown key 'tp' in rows. " + nearest("tp", ["param", "held", "grad", "optim"])
    )


def test_of_many_names_the_first_are_said() -> None:
    assert [some("abcd"[:number], 3) for number in range(5)] == ["", "a", "a, b", "a, b, c", "a, b, c and 1 more"]


def test_what_names_trackers_is_text_or_a_mapping() -> None:
    for wrong in ([["wandb"]], [3], [{"wandb"}], [None]):
        assert refused({"trackers": wrong}).startswith(f"argument: trackers is {wrong}; expected a list of jsonl, ")


@pytest.mark.parametrize("overrides", ["accumulate=4", {"accumulate": 4}])
def test_overrides_are_a_list(overrides: Any) -> None:
    with pytest.raises(ConfigError, match=r"overrides are a list of texts, such as \['wire.grad=bf16'\], not "):
        load_plan("zero3", overrides)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: Plan(levell=3), "unknown key 'levell' in Plan. Known: accumulate, "),
        (lambda: Plan(acumulate=3), "unknown key 'acumulate' in Plan. Did you mean 'accumulate'?"),
        (lambda: Plan(wire={"grd": "bf16"}), "unknown key 'grd' in wire. Did you mean 'grad'?"),
        (lambda: Plan(rules={"a": {"params": ["*"], "rowz": {}}}), "unknown key 'rowz' in rules.a. Did you mean"),
        (lambda: Rows(parm=3), "unknown key 'parm' in Rows. Did you mean 'param'?"),
        (lambda: Plan(accumulate="x"), "accumulate is 'x'; expected a whole number of at least 1."),
        (lambda: Plan(mesh={"dp": "x"}), "mesh.dp is 'x'; expected a whole number."),
        (lambda: Plan(rows=Rows(param=PlaceEdit(tier="dsk"))), "tier is 'dsk'; expected device, host, disk or null."),
        (
            lambda: Plan(rows=Sequence()),
            "rows is Sequence(attention='auto'); expected a mapping with param, held, grad or optim.",
        ),
    ],
)
def test_python_says_what_files_say(made: Any, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        made()
    assert str(raised.value).startswith(f"argument: {message}")
    assert raised.value.__suppress_context__


def test_every_section_made_in_python_raises_our_error() -> None:
    def sections(kind: Any) -> list[Any]:
        return [kind, *(below for one in kind.__subclasses__() for below in sections(one))]

    for section in sections(Strict)[1:]:
        with pytest.raises(ConfigError, match=f"unknown key 'zzz' in {section.__name__}. Known: "):
            section(zzz=1)


def test_all_that_is_wrong_is_told_at_once_in_the_order_of_writing(write: Any) -> None:
    name = write(
        "plan.yaml",
        "wire: {grad: fp17}\nmesh: {dp: two}\naccumulate: 0\nclip_grad_norm: -1\nsync_buffers: 1\n"
        "units: {clas: Block}\nprefetch_bytes: 64 miles\nrows:\n  grad:\n    shard: dp\n",
    )
    assert refused(name, "precision=int8").splitlines() == [
        "plan.yaml:1: wire.grad.dtype is 'fp17'; expected fp64, fp32, bf16, fp16, int8, int4, fp8 or null.",
        "plan.yaml:2: mesh.dp is 'two'; expected a whole number.",
        "plan.yaml:3: accumulate is 0; expected a whole number of at least 1.",
        "plan.yaml:4: clip_grad_norm is -1; expected a number above 0 or null.",
        "plan.yaml:5: sync_buffers is 1; expected true or false.",
        "plan.yaml:6: units is {'clas': 'Block'}; expected auto, a list of names or a rule such as {class: Block}.",
        "plan.yaml:7: prefetch_bytes is '64 miles'; expected auto or bytes such as 64M or 4096.",
        "plan.yaml:10: rows.grad.shard is 'dp'; expected a list of names or null.",
        "override 'precision=int8': precision is 'int8'; expected fp64, fp32, bf16, fp16 or auto.",
    ]


@pytest.mark.parametrize(
    "values",
    [
        {"accumulate": True},
        {"accumulate": 1.5},
        {"clip_grad_norm": float("inf")},
        {"units": {"class": 3}},
        {"units": {"min_numel": 0}},
        {"units": {"class": "Block", "min_numel": 3}},
        {"units": {}},
        {"prefetch_bytes": -1},
        {"rows": None},
        {"rows": {"grad": {"shard": [1]}}},
        {"mesh": {"dp": 1.0}},
        {"preset": 3},
    ],
)
def test_a_wrong_value_names_its_path(values: dict[str, Any]) -> None:
    message = refused(values)
    assert message.startswith("argument: ")
    assert next(iter(values)) in message
    assert "; expected " in message


ALIASES = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{name}: &{name} [{', '.join(f'*{before}' for _ in range(10))}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
"""Nine lines that stand for a billion values."""


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "preset: [\n", "a.yaml:2: this is not YAML: expected the node content"),
        ("a.yaml", "a: 1\nb: \x07\n", "a.yaml:2: this is not YAML: special characters"),
        ("a.yaml", "a: 1\n---\nb: 2\n", "a.yaml:2: this is not YAML: but found another document"),
        ("a.yaml", "a: !!python/object:os.system x\n", "a.yaml:1: this is not YAML: could not determine"),
        ("a.yaml", "a: 2026-13-45\n", "a.yaml: a value cannot be read: month"),
        (
            "a.yaml",
            "wire:\n  grad: fp32\n  grad: bf16\n",
            "a.yaml:3: the key 'grad' is given twice, first on line 2.",
        ),
        ("a.yaml", "mesh:\n  1: 2\n", "a.yaml:2: the key '1' is not text. Put it in quotes."),
        ("a.yaml", "mesh: {dp:2, tp: 2}", "a.yaml:1: 'dp:2' is one word. Put a space after the colon: 'dp: 2'."),
        ("a.yaml", "? [a]\n: 2\n", "a.yaml:1: the key here is not text."),
        (
            "a.yaml",
            "preset: zero1\naccumulate: 010\n",
            "a.yaml:2: 010 is 8 in YAML 1.1 and something else in YAML 1.2.",
        ),
        ("a.yaml", "timeouts: {step: 1:30}\n", "a.yaml:1: 1:30 is 90 in YAML 1.1"),
        ("a.yaml", "mesh:\n  dp: [1:30.5]\n", "a.yaml:2: 1:30.5 is 90.5 in YAML 1.1"),
        ("a.yaml", "rows: &r\n  param: *r\n", "a.yaml:1: an alias refers to the mapping that contains it."),
        ("a.yaml", "- preset\n", "a.yaml:1: a plan is a mapping of keys to values"),
        ("a.yaml", "", "a.yaml: the file is empty."),
        ("a.yml", "# only a remark\n", "a.yml: the file is empty."),
        ("a.json", " \n", "a.json: the file is empty."),
        (
            "a.json",
            '{"a": 1,\n}',
            "a.json:2: this is not JSON: Expecting property name enclosed in double quotes. JSON has "
            "no comma after the last value.",
        ),
        (
            "a.json",
            '{\n// mine\n"a": 1}',
            "a.json:2: this is not JSON: Expecting property name enclosed in double quotes. JSON has no comments",
        ),
        (
            "a.json",
            "{'a': 1}",
            "a.json:1: this is not JSON: Expecting property name enclosed in double quotes. JSON has no "
            "comments, and text is in double quotes",
        ),
        ("a.json", '{"a": True}', "a.json:1: this is not JSON: Expecting value. In JSON these are written true, false"),
        ("a.json", "[1]", "a.json:1: a plan is a mapping of keys to values"),
        ("a.json", '{"a": {"b": 1,\n"b": 2}}', "a.json:2: the key 'b' is given twice, first on line 1."),
        ("a.json", '{"a": ' + "9" * 5000 + "}", "a.json: this cannot be read: Exceeds the limit"),
        ("a.json", '{"a":' * 50_000, "a.json: the values are nested too deeply"),
        (
            "a.json",
            '{"a": 1}' + 300_000 * " x",
            "a.json has more than 262144 characters, which is too long for a plan.",
        ),
        ("a.yaml", ALIASES, "a.yaml:5: it stands for more than 20000 values."),
        ("a.yaml", "a: " + "[" * 50_000, "a.yaml: the values are nested too deeply"),
        ("a.toml", "a = [\n" + "1,\n" * 2_000 + "]", "a.toml:1: a value has"),
        ("a.toml", "preset = \n", "a.toml:1: this is not TOML: Invalid value."),
        (
            "a.toml",
            "accumulate = 1\naccumulate = 2\n",
            "a.toml:2: this is not TOML: Cannot overwrite a value.",
        ),
        ("a.toml", '[mesh]\ndp = 2\n["mesh"]\n', "a.toml:3: this is not TOML: Cannot declare"),
        ("a.toml", "# only a remark\n", "a.toml: the file is empty."),
        ("a.ini", "preset = zero3", "a.ini ends in '.ini', which is not a plan file's suffix. Use one of .yaml"),
        ("a.yaml", b"preset: \xff", "a.yaml: byte 8 is not UTF-8 text."),
    ],
)
def test_a_file_that_cannot_be_meant(write: Any, name: str, text: str, message: str) -> None:
    assert refused(write(name, text)).startswith(message)


def test_a_toml_value_of_the_wrong_type_below_a_list_of_tables(write: Any) -> None:
    name = write("a.toml", "[[wire]]\ngrad = 'bf16'\n")
    assert (
        refused(name)
        == "a.toml:1: wire is [{'grad': 'bf16'}]; expected a mapping with param, frozen, grad or feedback."
    )


def test_a_missing_file_names_what_is_there(write: Any, tmp_path: Path) -> None:
    write("pyproject.toml", "[project]")  # lies in many a folder, and is no plan
    assert "There is no .yaml or .yml" in refused("plan.yaml")
    assert "There is no .yaml or .yml" in refused("project.toml")
    write("plan.yaml", "preset: ddp")
    assert refused("nofile.toml").endswith("To use a preset, give its name without a suffix, such as zero3.")
    assert refused("plam.yaml") == (
        f"There is no plan file 'plam.yaml'; looked in {tmp_path}. Did you mean 'plan.yaml'?"
    )
    assert refused("runs/plan.yaml").startswith("There is no folder 'runs' for the plan 'plan.yaml'")
    assert refused(Path("zero3")).startswith("zero3 has no suffix")
    Path("folder.yaml").mkdir()
    assert refused("folder.yaml").startswith("folder.yaml cannot be read: ")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("accumulate", "write path=value"),
        ("=3", "write path=value"),
        ("wire..grad=3", "write path=value"),
        ("accumulate= ", "there is no value; write null for none."),
        ("preset.a=2", "preset.a cannot be set, because preset is 'ddp' (argument), not a mapping."),
        ("accumulate.a=2", "accumulate is {'a': 2}; expected a whole number of at least 1."),
        ("offload.optim=1.5", "offload.optim is 1.5; expected a number from 0 to 1."),
        ("wire.gard=bf16", "unknown key 'gard' in wire. Did you mean 'grad'?"),
        ("rows.grd.shard=[]", "unknown key 'grd' in rows. Did you mean 'grad'?"),
        ("units=[*]", "this is not YAML: expected alphabetic"),
        ("mesh={dp: 1, dp: 2}", "the key 'dp' is given twice"),
        ("wire=bf16", "wire is 'bf16'; expected a mapping with param, frozen, grad or feedback."),
        ("verify=0", "verify is 0; expected a whole number of at least 1, or a mapping with every or gradients."),
        ("verify=true", "verify is True; expected a whole number of at least 1, or a mapping with every or gradients."),
        (
            "activations=3",
            "activations is 3; expected keep, recompute, selective, offload or disk, or a mapping with policy, every "
            "or keep.",
        ),
        ("fp8=hybrid", "fp8 is 'hybrid'; expected tensorwise, rowwise, rowwise_with_gw_hp, blockwise or mxfp8, or a"),
        ("float8.recipe_name=rowwise", "unknown key 'float8' in the plan. Here it is called 'fp8'."),
        ("fp8.filter_fqns=[output]", "unknown key 'filter_fqns' in fp8. Here it is called 'skip'."),
        ("powersgd.start_powerSGD_iter=9", "unknown key 'start_powerSGD_iter' in powersgd. Here it is called 'start_"),
        ("islands.sync_every=9", "unknown key 'sync_every' in islands. Here it is called 'every'."),
        (
            "precision=fp8",
            "precision is 'fp8'; expected fp64, fp32, bf16, fp16 or auto: layers that multiply in 8 bits are set by "
            "fp8, such as fp8: rowwise, beside precision: bf16.",
        ),
        (
            "wire.grad=sign",
            "wire.grad.dtype is 'sign'; expected fp64, fp32, bf16, fp16, int8, int4, fp8 or null: signs are what an "
            "optimizer sends: sw.optim.OneBitAdam, ",
        ),
    ],
)
def test_a_bad_override_is_named(override: str, message: str) -> None:
    assert refused("ddp", override).startswith(f"override {override!r}: {message}")


@pytest.mark.parametrize("source", ["", 3, None, ["ddp"]])
def test_what_is_no_source(source: Any) -> None:
    assert refused(source).startswith("A plan is a preset's name, a file, a mapping or a Plan, not ")


def test_a_mapping_needs_keys_of_text() -> None:
    assert refused({"mesh": {1: 2}}) == "argument: the key 1 in mesh is not text."


def test_every_field_has_words_and_its_default_is_the_plans() -> None:
    defaults = {path: default for path, _, default in schema_table()}
    named = {path for path in defaults if "<name>" in path}
    assert {path: value for path, value, _ in plan_table(Plan()) if path != "rules"} == {
        path: default for path, default in defaults.items() if path not in named
    }
    assert all(path.startswith("rules.<name>.") for path in named)
    assert ("rules.norms.max_numel", 5, "argument") in plan_table(
        Plan.model_validate({"rules": {"norms": {"max_numel": 5}}})
    )


def test_a_plan_told_to_another_process_is_the_same_there() -> None:
    plan = load_plan({"preset": "hsdp", "mesh": {"node": 2, "local": 2}, "budget": {"device": "1GiB"}})
    settled = plan.with_own_precision("bf16").with_offload(Offload(optim=0.5))
    heard = plan_heard(json.loads(json.dumps(plan_told(settled))))
    assert heard == settled
    assert heard.has_own_precision
    assert heard.origin("offload.optim") == "budget"
    assert load_plan("zero1").after(heard).precision == "bf16"
