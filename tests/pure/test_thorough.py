"""Which cases `make test` runs."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import thorough
from tests.conftest import _begin_elsewhere
from tests.covering import Chooser, combinations, covering


def case(test: str, mark: Any = thorough.sampled, only: bool = False, races: bool = False, **params: object) -> Any:
    marks = [] if mark is None else [mark.mark]
    marks += [thorough.thorough_only("slow").mark] if only else []
    marks += [thorough.soak("a timeout").mark] if races else []
    nodeid = f"a.py::{test}[{'-'.join(map(str, params.values()))}]" if params else f"a.py::{test}"
    return Case(nodeid, marks, params, dict.fromkeys(params, 0))


@dataclass(frozen=True)
class Case:
    """What pytest calls a callspec, and then an item."""

    nodeid: str
    marks: list[pytest.Mark]
    params: dict[str, Any]
    indices: dict[str, int]

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next((mark for mark in self.marks if mark.name == name), None)


def run_as(share: str, items: list[Case], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.setattr(thorough, "_SHARE", share)
    choosers: dict[Path, Chooser] = {}
    kept = []
    for _, cases in itertools.groupby(items, key=lambda item: item.nodeid.partition("[")[0]):
        of_test = [replace(case, marks=[*case.marks]) for case in cases]
        definition = SimpleNamespace(path=Path("a.py"), get_closest_marker=lambda _: None)
        metafunc: Any = SimpleNamespace(definition=definition, _calls=of_test if of_test[0].params else [])
        thorough.keep_wanted(metafunc, choosers)
        kept += metafunc._calls or of_test
        assert metafunc._calls or not of_test[0].params, "pytest would run it without parameters"
    return thorough.divided(kept)[0]


def names(items: list[Any]) -> list[str]:
    return [item.nodeid for item in items]


def test_every_case_runs_somewhere_once_and_one_of_each_test_always(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = (1, 2, 5, 6, 60, 330)
    items = [case(f"test_{size}", place=place) for size in sizes for place in range(size)]
    items.append(case("test_alone"))
    shares = {share: run_as(share, items, monkeypatch) for share in ("test", "thorough", "exhaustive")}
    assert sorted(name for now in shares.values() for name in names(now)) == sorted(names(items))
    counts = [sum(name.startswith(f"a.py::test_{size}[") for name in names(shares["test"])) for size in sizes]
    assert counts == [1, 1, 1, 1, 1, 3]
    assert "a.py::test_alone" in names(shares["test"])


def test_the_tests_of_a_file_have_different_values_and_then_different_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    presets, sizes = ("ddp", "zero1", "zero3"), (1, 2, 4)
    tests = [f"test_{number}" for number in range(9)]
    items = [case(test, preset=preset, size=size) for test in tests for preset in presets for size in sizes]
    chosen = [item.params for item in run_as("test", items, monkeypatch)]
    assert {one["preset"] for one in chosen[:3]} == set(presets)
    assert {one["size"] for one in chosen[:3]} == set(sizes)
    assert len({tuple(one.values()) for one in chosen}) == 9


def test_make_thorough_adds_every_value_of_every_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    items = [case("test", outer=outer, inner=inner) for outer in range(9) for inner in range(3)]
    chosen = [*run_as("test", items, monkeypatch), *run_as("thorough", items, monkeypatch)]
    assert len(chosen) == 9
    for name, values in (("outer", range(9)), ("inner", range(3))):
        assert {item.params[name] for item in chosen} == set(values)


def test_what_all_rests_on_has_every_value_in_make_test(monkeypatch: pytest.MonkeyPatch) -> None:
    mark = thorough.each_value
    items = [case("test", mark, preset=preset, size=size) for preset in range(8) for size in range(3)]
    chosen = [item.params for item in run_as("test", items, monkeypatch)]
    assert len(chosen) == 8
    assert {one["size"] for one in chosen} == set(range(3))
    assert not run_as("thorough", items, monkeypatch)


def test_values_that_are_named_by_their_address_are_told_apart_by_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    items = [case("test", make=make) for make in (object(), object())]
    for place, item in enumerate(items):
        item.indices["make"] = place
    assert len(run_as("thorough", items, monkeypatch)) == 1


def test_what_make_test_leaves_out_is_run_by_make_thorough(monkeypatch: pytest.MonkeyPatch) -> None:
    items = [case("test", place=place, other=0, only=True) for place in range(12)] + [case("test_alone", only=True)]
    shares = {share: run_as(share, items, monkeypatch) for share in ("test", "thorough", "exhaustive")}
    assert not shares["test"]
    assert len(shares["thorough"]) == 12 + 1
    assert sorted(names([*shares["thorough"], *shares["exhaustive"]])) == sorted(names(items))


def test_what_races_time_is_run_by_make_soak_alone_and_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    racing = [case("test", place=place, only=True, races=True) for place in range(12)]
    items = [*racing, case("test_alone", mark=None)]
    shares = {share: names(run_as(share, items, monkeypatch)) for share in ("test", "thorough", "exhaustive", "soak")}
    assert shares == {"test": ["a.py::test_alone"], "thorough": [], "exhaustive": [], "soak": names(racing)}


def test_faults_are_looked_for_in_make_test_and_then_in_make_thorough(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = [case("test_slow", place=place, only=True) for place in range(3)]
    items = [*slow, *(case("test", place=place) for place in range(3)), case("test_alone", mark=None)]
    first, then = (names(run_as(share, items, monkeypatch)) for share in ("test", "thorough"))
    assert names(run_as("mutations", items, monkeypatch)) == [*first, *sorted(then, key=names(items).index)]


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_few_cases_have_every_combination(strength: int) -> None:
    values = {"preset": ("ddp", "zero3", "hpz"), "ranks": (1, 2, 4, 8), "disk": (False, True), "wire": ("fp32", "bf16")}
    cases = covering(values, strength)
    every = [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())]
    wanted = {one for case in every for one in combinations(case, strength)}
    assert set().union(*(combinations(case, strength) for case in cases)) == wanted
    assert len(cases) <= (0, 4, 16, 32)[strength]
    assert cases == covering(values, strength)


def test_a_worker_begins_elsewhere_and_leaves_out_what_is_ignored(tmp_path: Path) -> None:
    """Files that are named are not ignored by pytest."""
    paths = [tmp_path / f"test_{letter}.py" for letter in "abcd"]
    for path in paths:
        path.touch()
    worker = {"workerid": "gw1", "workercount": 2}
    options = {"ignore": [str(paths[1])]}
    config: Any = SimpleNamespace(workerinput=worker, args=[str(tmp_path)], stash=pytest.Stash(), getoption=options.get)
    _begin_elsewhere(config)
    assert config.args == [str(path) for path in (paths[2], paths[3], paths[0])]
