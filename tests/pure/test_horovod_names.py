"""Horovod's public names, found by machine, and the table that says what becomes of each."""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.errors import ConfigError
from shardwise.integrations.horovod import elastic, import_hook, names, process_sets
from shardwise.integrations.horovod import torch as hvd
from shardwise.integrations.horovod.command_line import add_horovodrun_arguments
from shardwise.integrations.horovod.torch import optimizer
from shardwise.integrations.name_table import NameStatus

ROOT = Path(__file__).parent.parent.parent
SOURCE = ROOT / "src/shardwise/integrations/horovod"
SURFACE = (ROOT / "tests/fixtures/horovod/surface.txt").read_text().splitlines()
"""Written by surface.py beside it."""
FRAMEWORKS = ("horovod.tensorflow", "horovod.keras")
"""Not installed where this test runs, so our modules for them are read and not imported; tests/extras runs them."""
CLASSES = {
    "DistributedOptimizer": optimizer._Distributed,
    "ElasticSampler": hvd.elastic.ElasticSampler,
    "ProcessSet": process_sets.ProcessSet,
    "State": elastic.State,
    "TorchState": hvd.elastic.TorchState,
}


def of_module(name: str) -> str:
    """The module of ours that a script gets as `name`; empty if it gets none."""
    return import_hook._MODULES.get(name, "")


def arguments(node: ast.FunctionDef) -> set[str]:
    return {one.arg for one in (*node.args.args, *node.args.kwonlyargs, *node.args.posonlyargs)}


@functools.cache  # our modules import each other's names one by one
def read(module: str) -> dict[str, set[str]]:
    """The public names of one of our modules, with the arguments of its functions and classes, without importing it."""
    tree = ast.parse((SOURCE / f"{module.replace('.', '/')}.py").read_text())
    found: dict[str, set[str]] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = arguments(node)
        elif isinstance(node, ast.ClassDef):
            inits = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
            found[node.name] = arguments(inits[0]) if inits else set()
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    last = node.value.args[0] if isinstance(node.value, ast.Call) and node.value.args else None
                    found[target.id] = imported(last.attr) if isinstance(last, ast.Attribute) else set()
        elif isinstance(node, ast.ImportFrom):
            for one in node.names:
                place = (node.module or "").removeprefix("shardwise.integrations.horovod").removeprefix(".")
                if one.name == "*":
                    found |= {name: imported(name) for name in hvd.basics.__all__}
                elif place in ("keras", "tensorflow_reductions"):
                    found[one.asname or one.name] = read(place)[one.name]
                else:
                    found[one.asname or one.name] = imported(one.name)
    return found


def imported(name: str) -> set[str]:
    """The arguments of what PyTorch's module has under this name, too."""
    found = getattr(hvd, name, None)
    return set(inspect.signature(found).parameters) if inspect.isfunction(found) else set()


def is_there(name: str) -> bool:
    if name.startswith("module "):
        return name.removeprefix("module ") in ("horovod", *import_hook._MODULES)
    name, _, argument = name.rstrip(")").partition("(")
    owner, _, last = name.rpartition(".")
    if owner in CLASSES:
        kind = CLASSES[owner]
        return hasattr(kind, last) or last in kind.__annotations__ or f"self.{last}" in inspect.getsource(kind)
    if owner == "horovod":
        return last == "run"
    owner = owner.replace("horovod.common.basics", "horovod.torch")
    if not of_module(owner):
        return False
    if owner.startswith(FRAMEWORKS):
        found = read(of_module(owner))
        return last in found and (not argument or argument in found[last])
    held = getattr(importlib.import_module(f"shardwise.integrations.horovod.{of_module(owner)}"), last, None)
    return held is not None and (not argument or argument in inspect.signature(held).parameters)


def public_names() -> Iterator[str]:
    yield from (line for line in SURFACE if not line.startswith("horovodrun "))


def test_every_name_works_or_has_a_row() -> None:
    assert len(SURFACE) > 900
    without = [
        name for name in public_names() if not is_there(name) and names.row_of(name.removeprefix("module ")) is None
    ]
    assert without == []


def test_rows_are_of_names_that_horovod_has_and_this_lacks() -> None:
    known = {name.removeprefix("module ") for name in public_names()}
    assert [name for name in names.NAMES if name not in known] == []
    there = [name for name in names.NAMES if is_there(name) or is_there(f"module {name}")]
    assert there == []
    used = {name.partition("(")[2].rstrip(")") for name in known if "(" in name and not is_there(name)}
    assert [name for name in names.ARGUMENTS if name not in used] == []


def test_every_option_of_horovodrun_is_known() -> None:
    parser = argparse.ArgumentParser()
    add_horovodrun_arguments(parser)
    known = set(parser._option_string_actions) | {action.dest for action in parser._actions}
    options = [line.removeprefix("horovodrun ") for line in SURFACE if line.startswith("horovodrun ")]
    assert len(options) > 60
    assert [option for option in options if option not in known] == []


def test_errors_say_what_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "horovod"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    import_hook.install()
    for line, words in [
        ("import horovod.spark", "start ranks by `shardwise launch`"),
        ("from horovod import ray", "use Ray Train"),
        ("from horovod.runner import run", "put the function into a script"),
        ("import horovod.data", "use torch.utils.data.DataLoader"),
        ("from horovod.torch.elastic import run_fn", "use hvd.elastic.run"),
        ("from horovod.torch.mpi_ops import HorovodAllreduce", "which has gradients"),
    ]:
        with pytest.raises(
            ImportError, match=rf"{line.split()[1].split('.')[0]}.* is not supported by shardwise: .*{words}"
        ):
            exec(line)
    with pytest.raises(ImportError, match=r"docs/horovod\.md lists what is"):
        exec("import horovod.nothing")
    with pytest.raises(AttributeError, match=r"check_extension is not supported by shardwise: nothing is compiled"):
        exec("import horovod.torch as hvd; hvd.check_extension()")
    with pytest.raises(AttributeError, match=r"module 'horovod.torch' has no attribute 'nothing'"):
        exec("import horovod.torch as hvd; hvd.nothing")
    for name in [name for name in sys.modules if name.split(".")[0] == "horovod"]:
        monkeypatch.delitem(sys.modules, name)


def test_arguments_that_are_missing_are_refused_by_name_or_have_no_effect() -> None:
    @names.takes_horovods_arguments
    def reduced(value: int, groups: int = 0) -> tuple[int, int]:
        return value, groups

    assert reduced(1, groups=2, device_dense="/gpu:0", session=None, scale_local_gradients=True) == (1, 2)
    with pytest.raises(ConfigError, match=r"reduced\(session=\) is not supported by shardwise: call it eagerly"):
        reduced(1, session=object())
    with pytest.raises(TypeError, match="nothing"):
        reduced(1, nothing=2)
    assert all(one.row.status is not NameStatus.WORKS for one in names.ARGUMENTS.values())


def test_the_page_is_that_of_the_table() -> None:
    assert (ROOT / "docs/horovod-names.md").read_text() == names.page()
