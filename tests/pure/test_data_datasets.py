"""Hugging Face `datasets` as sources, if they are installed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from shardwise.data import Loader, Mixture

datasets = pytest.importorskip("datasets")


def take(loader: Loader, num: int) -> list[list[int]]:
    iterator = iter(loader)
    return [next(iterator)["number"].tolist() for _ in range(num)]


@pytest.fixture
def numbers(tmp_path: Path) -> Any:
    """40 rows with their number and a text."""

    def rows() -> Iterator[dict[str, Any]]:
        yield from ({"number": n, "text": f"row {n}"} for n in range(40))

    return datasets.Dataset.from_generator(rows, cache_dir=str(tmp_path))


def test_a_dataset_is_a_map_style_source(numbers: Any) -> None:
    with Loader(numbers, batch_rows=8) as loader:
        batches = list(loader)
    assert sorted(n for batch in batches for n in batch["number"].tolist()) == list(range(40))
    assert all(batch["text"] == [f"row {n}" for n in batch["number"].tolist()] for batch in batches)
    with Loader(Mixture({"a": numbers.select(range(8)), "b": numbers}), batch_rows=6, steps=2) as loader:
        assert [len(batch["number"]) for batch in loader] == [6, 6]


@pytest.mark.parametrize("stop", [1, 5, 7])
def test_an_iterable_dataset_goes_on_by_its_own_state(numbers: Any, stop: int) -> None:
    """With shuffled shards, so that `set_epoch` matters; at another world size."""

    def source() -> Any:
        return numbers.to_iterable_dataset(num_shards=4).shuffle(seed=3, buffer_size=1)

    options: dict[str, Any] = {"batch_rows": 8, "steps": 15, "workers": 0}
    with Loader(source(), **options) as loader:
        whole = take(loader, 15)
    assert sorted(chain(*whole[:5])) == sorted(chain(*whole[5:10])) == list(range(40))
    assert whole[:5] != whole[10:], "shards come in another order"
    with Loader(source(), **options) as loader:
        take(loader, stop)
        state = json.loads(json.dumps(loader.state_dict()))
    assert state["source_state"] is not None
    halves = []
    for rank in range(2):
        with Loader(source(), world=(rank, 2), **options) as loader:
            loader.load_state_dict(state)
            halves.append(take(loader, 15 - stop))
    assert [one + two for one, two in zip(*halves, strict=True)] == whole[stop:]


def test_a_generator_dataset_resumes() -> None:
    def lines() -> Iterator[dict[str, int]]:
        yield from ({"number": n} for n in range(20))

    source = datasets.IterableDataset.from_generator(lines)
    with Loader(source, batch_rows=5, steps=4) as loader:
        whole = take(loader, 4)
        loader.load_state_dict(loader.state_dict() | {"step": 0, "position": 0, "source_state": None})
        take(loader, 3)
        state = json.loads(json.dumps(loader.state_dict()))
    with Loader(source, batch_rows=5, steps=4) as loader:
        loader.load_state_dict(state)
        assert take(loader, 1) == whole[3:]
