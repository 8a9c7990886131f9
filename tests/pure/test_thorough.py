"""Which cases `make test` runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests import thorough


def case(test: str, *values: int, number: int = 0, only: bool = False, races: bool = False) -> Any:
    marks = {"one_in": pytest.mark.one_in(number).mark} if number else {}
    marks |= {"thorough_only": thorough.thorough_only("slow").mark} if only else {}
    marks |= {"soak": thorough.soak("a timeout").mark} if races else {}
    nodeid = f"{test}[{'-'.join(map(str, values))}]" if values else test
    return SimpleNamespace(nodeid=nodeid, get_closest_marker=marks.get)


def run_as(share: str, items: list[Any], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(thorough, "_SHARE", share)
    now, later = thorough.divided(items)
    assert len(now) + len(later) == len(items)
    return [item.nodeid for item in now]


def test_every_case_runs_somewhere_once_and_one_of_each_test_always(monkeypatch: pytest.MonkeyPatch) -> None:
    items = [case(f"test_{size}", place, number=6) for size in (1, 2, 5, 6, 30) for place in range(size)]
    items.append(case("test_alone", number=6))
    shares = {share: run_as(share, items, monkeypatch) for share in ("test", "thorough", "exhaustive")}
    assert sorted(name for names in shares.values() for name in names) == sorted(item.nodeid for item in items)
    counts = [sum(name.startswith(f"test_{size}[") for name in shares["test"]) for size in (1, 2, 5, 6, 30)]
    assert counts == [1, 1, 1, 1, 5]
    assert "test_alone" in shares["test"]


def test_cases_are_not_all_of_one_value_of_the_inner_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    items = [case("test", outer, inner, number=3) for outer in range(9) for inner in range(3)]
    names = run_as("test", items, monkeypatch)
    assert {name[-2] for name in names} == {"0", "1", "2"}
    assert {name[5] for name in names} == set("012345678")


def test_what_make_test_leaves_out_is_run_by_make_thorough(monkeypatch: pytest.MonkeyPatch) -> None:
    items = [case("test", place, number=6, only=True) for place in range(12)] + [case("test_alone", only=True)]
    shares = {share: run_as(share, items, monkeypatch) for share in ("test", "thorough", "exhaustive")}
    assert not shares["test"]
    assert len(shares["thorough"]) == 2 + 2 + 1
    assert {*shares["thorough"], *shares["exhaustive"]} == {item.nodeid for item in items}


def test_what_races_time_is_run_by_make_soak_alone_and_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    racing = [case("test", place, number=6, only=True, races=True) for place in range(12)]
    items = [*racing, case("test_alone")]
    shares = {share: run_as(share, items, monkeypatch) for share in ("test", "thorough", "exhaustive", "soak")}
    assert shares == {"test": ["test_alone"], "thorough": [], "exhaustive": [], "soak": [one.nodeid for one in racing]}
