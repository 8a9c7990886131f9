"""DeepSpeed's public names, found by machine, and the table that says what becomes of each."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import shardwise as sw
import shardwise.integrations.deepspeed as deepspeed
from shardwise.errors import StateError
from shardwise.integrations.deepspeed import collectives, facade, names
from shardwise.integrations.deepspeed.accelerator import get_accelerator
from shardwise.integrations.deepspeed.names import NAMES
from shardwise.integrations.name_table import NameStatus, Row
from shardwise.testing import run_ranks

ROOT = Path(__file__).parent.parent.parent
SURFACE = (ROOT / "tests/fixtures/deepspeed/surface.txt").read_text().splitlines()
"""Written by surface.py beside it."""
Absent = object()


@pytest.fixture(scope="module")
def modules() -> dict[str, ModuleType]:
    """The modules that scripts import, without replacing any in this process."""
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "deepspeed"}
    finders = list(sys.meta_path)
    facade.install()
    found = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "deepspeed"}
    for name in found:
        del sys.modules[name]
    sys.modules.update(before)
    sys.meta_path[:] = finders
    return found


@pytest.fixture(scope="module")
def objects() -> dict[str, object]:
    """An engine, one of a pipeline, and others with rows of their own, by their labels in the table."""
    made: dict[str, object] = {}

    def rank_of(world: sw.World) -> None:
        config = {"optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}
        made["engine"], optimizer, *_ = deepspeed.initialize(model=nn.Linear(4, 4), config=config, world=world)
        layers = deepspeed.PipelineModule([nn.Linear(4, 4)], num_stages=1, loss_fn=nn.functional.mse_loss)
        made["pipeline engine"], *_ = deepspeed.initialize(model=layers, config=config, world=world)
        made["PipelineModule"] = layers
        made["OneCycle"] = deepspeed.lr_schedules.OneCycle(optimizer, cycle_min_lr=0.1, cycle_max_lr=0.2)
        made["WarmupLR"] = deepspeed.lr_schedules.WarmupLR(optimizer)

    run_ranks(1, rank_of)
    return {**made, "get_accelerator()": get_accelerator()}


def found_in(modules: dict[str, ModuleType], objects: dict[str, object], name: str) -> object:
    """What a name of the surface is here; `Absent` if it is not there."""
    owner, _, last = name.rpartition(".")
    if owner in objects:
        return getattr(objects[owner], last, Absent)
    if name in modules:
        return modules[name]
    return getattr(modules[owner], last, Absent) if owner in modules else Absent


def public_names() -> Iterator[str]:
    for line in SURFACE:
        yield line.removeprefix("module ")


def row_of(name: str) -> Row | None:
    owner, _, last = name.rpartition(".")
    row = names.row_of(name)
    return names.row_of(f"engine.{last}") if row is None and owner == "pipeline engine" else row


def test_every_name_works_or_has_a_row(modules: dict[str, ModuleType], objects: dict[str, object]) -> None:
    assert len(SURFACE) > 1000
    without = [name for name in public_names() if found_in(modules, objects, name) is Absent and row_of(name) is None]
    assert without == []


def test_a_function_is_not_hidden_by_the_module_of_its_name(modules: dict[str, ModuleType]) -> None:
    assert modules["deepspeed.utils"].z3_leaf_module is modules["deepspeed.utils.z3_leaf_module"].z3_leaf_module
    assert modules["deepspeed"].zero is modules["deepspeed.zero"]


def test_rows_are_of_names_that_deepspeed_has() -> None:
    known = set(public_names())
    same = {"deepspeed.zero": "deepspeed.runtime.zero", "deepspeed.comm": "deepspeed.comm.comm"}  # by `import *`
    same["deepspeed.checkpointing"] = "deepspeed.runtime.activation_checkpointing.checkpointing"
    unknown = []
    for name in NAMES:
        owner, _, last = name.removesuffix(".*").rpartition(".")
        places = {f"{owner}.{last}", f"{same.get(owner)}.{last}", same.get(f"{owner}.{last}")}
        unknown += [] if places & known else [name]
    assert unknown == []


def test_what_has_no_effect_is_there_and_what_is_refused_is_not(
    modules: dict[str, ModuleType], objects: dict[str, object]
) -> None:
    wrong = []
    for name, row in NAMES.items():
        if name.endswith(".*") or name == "engine.compile":
            continue
        found = found_in(modules, objects, name)
        if (found is Absent) != (row.status is NameStatus.REFUSED):
            wrong.append(name)
        elif found is Absent:
            owner, _, last = name.rpartition(".")
            held = objects.get(owner) or modules.get(owner)
            if held is not None:
                with pytest.raises(AttributeError, match="is not supported by shardwise: "):
                    getattr(held, last)
    assert wrong == []


def test_settings_are_those_of_the_config(objects: dict[str, object]) -> None:
    engine = objects["engine"]
    assert engine.zero_reduce_bucket_size() == 500_000_000
    assert engine.optimizer_params() == {"lr": 1e-3}
    assert engine.zero_offload_param()["device"] == "none"
    for name in names.SETTINGS:
        getattr(engine, name)()
    for name in names.OFF:
        assert getattr(engine, name)() is False
    assert engine.optimizer_name() == "adam"
    assert engine.loss_scale() == 1.0
    assert engine.config == {"optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}


def test_private_names_say_what_to_use(modules: dict[str, ModuleType], objects: dict[str, object]) -> None:
    for held, name in [
        (modules["deepspeed.utils"], "groups"),
        (modules["deepspeed.runtime.utils"], "_handle_overflow"),
        (modules["deepspeed.runtime.zero.partition_parameters"], "_no_gather_coalesced"),
        (objects["engine"], "data_parallel_group"),
    ]:
        with pytest.raises(AttributeError, match=r"is not supported by shardwise: .*\."):
            getattr(held, name)
    with pytest.raises(AttributeError, match="'Linear' object has no attribute 'new'"):
        _ = objects["engine"].new
    with pytest.raises(AttributeError, match="module 'deepspeed' has no attribute 'new'"):
        _ = modules["deepspeed"].new
    finder = names.RefusedImports()
    with pytest.raises(ImportError, match=r"deepspeed\.utils\.groups is not supported by shardwise: groups follow"):
        finder.find_spec("deepspeed.utils.groups")
    assert finder.find_spec("deepspeed.zero") is None
    assert finder.find_spec("json") is None


def test_no_error_of_a_module_is_bare(modules: dict[str, ModuleType]) -> None:
    assert modules["deepspeed"].dist is modules["deepspeed.comm"]
    finder = names.RefusedImports()
    for name in modules:
        if name != "deepspeed":
            with pytest.raises(AttributeError, match=rf"{name}\.ITS_CONSTANT is not supported by shardwise: "):
                _ = modules[name].ITS_CONSTANT
            with pytest.raises(ImportError, match="is not supported by shardwise: "):
                finder.find_spec(f"{name}.ITS_CONSTANT")
            assert not hasattr(modules[name], "__wrapped__")
    with pytest.raises(AttributeError, match=r"deepspeed\.comm\.TorchBackend is not supported"):
        _ = modules["deepspeed.comm"].TorchBackend


def test_the_page_is_that_of_the_table() -> None:
    assert (ROOT / "docs/deepspeed-names.md").read_text() == names.page()


def test_compile_says_where_it_is_chosen(objects: dict[str, object]) -> None:
    with pytest.raises(StateError, match="use compile: inductor in a shardwise plan"):
        objects["engine"].compile()


def test_the_accelerator_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = get_accelerator()
    assert get_accelerator() is accelerator
    if accelerator.device_name() != "cpu":
        pytest.skip("on a CPU")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert accelerator.device_count() == 3
    assert torch.bfloat16 in accelerator.supported_dtypes()
    assert accelerator.Stream is accelerator.Event is None
    with accelerator.stream(accelerator.current_stream()), accelerator.device(0):
        accelerator.range_push("x")
        accelerator.range_pop()
    assert 0 < accelerator.available_memory() < accelerator.total_memory()
    assert accelerator.LongTensor([1, 2]).dtype == torch.int64
    assert accelerator.memory_stats()["allocated_bytes.all.current"] > 0
    assert accelerator.lazy_call(lambda: 3) == 3
    environment: dict[str, str] = {}
    accelerator.set_visible_devices_envs(environment, [0, 2])
    assert environment == {"CUDA_VISIBLE_DEVICES": "0,2"}


def test_contents_of_modules_are_there() -> None:
    contents = [(name, key, value) for name, one in facade._modules().items() for key, value in one.items()]
    missing = [(name, key) for name, key, value in contents if name != "deepspeed" and value is None]
    assert {key for _, key in missing} <= {"git_hash", "git_branch"}, missing
    importlib.import_module("shardwise.integrations.deepspeed.facade")


def test_what_its_documentation_calls_is_there(modules: dict[str, ModuleType]) -> None:
    """`deepspeed.zero.unregister_external_parameter` is in its API's pages, and not in its package."""
    layer = nn.Linear(2, 2)
    modules["deepspeed.zero"].register_external_parameter(layer, layer.weight)
    modules["deepspeed.zero"].unregister_external_parameter(layer, layer.weight)


class Begun:
    """The handle of an operation that ends when it is waited for."""

    def __init__(self) -> None:
        self.has_ended = False

    def wait(self) -> bool:
        self.has_ended = True
        return True

    def is_completed(self) -> bool:
        return self.has_ended


@pytest.mark.parametrize("name", ["all_reduce_coalesced", "all_gather_coalesced"])
def test_all_that_was_begun_together_is_waited_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo may end a later operation first, so the last handle says nothing of the others."""
    begun: list[Begun] = []

    def begin(*given: object) -> Begun | None:
        is_async = given[-1]
        begun.append(Begun())
        return begun[-1] if is_async else None

    monkeypatch.setattr(torch.distributed, "all_reduce", begin)
    monkeypatch.setattr(torch.distributed, "all_gather_into_tensor", begin)
    tensors = [torch.ones(2), torch.ones(3)]
    given = [tensors] if name == "all_reduce_coalesced" else [tensors, tensors]
    together = getattr(collectives, name)
    assert together(*given) is None
    begun.clear()
    handle = together(*given, async_op=True)
    begun[-1].wait()
    assert not handle.is_completed()
    assert handle.wait()
    assert handle.is_completed()
    assert all(one.has_ended for one in begun)
