"""What can only be read in order: the same batches for any number of ranks, and what going on within an epoch takes."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from shardwise.data import Loader, Mixture, Samples, Stream, Workers, from_iterable
from shardwise.errors import ConfigError, DataError, StateError


class Lines(IterableDataset[int]):
    """`num` numbers, other ones in every epoch; `read` counts what was read, over all copies."""

    def __init__(self, num: int) -> None:
        self.num, self.epoch, self.read = num, 0, [0]

    def __iter__(self) -> Iterator[int]:
        for number in range(self.num):
            self.read[0] += 1
            yield self.epoch * 1000 + number

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class StatefulLines(Lines):
    """Knows where it is, as datasets.IterableDataset and torchdata's nodes do."""

    def __init__(self, num: int) -> None:
        super().__init__(num)
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        begin, self.at = self.at, 0
        for number in range(begin, self.num):
            self.read[0] += 1
            self.at = number + 1
            yield self.epoch * 1000 + number

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def seekable(num: int, read: list[int]) -> Stream:
    def begin(epoch: int, position: int) -> Iterator[int]:
        for number in range(position, num):
            read[0] += 1
            yield epoch * 1000 + number

    return from_iterable(begin, seekable=True)


def take(loader: Loader, num: int) -> list[list[int]]:
    with loader:
        iterator = iter(loader)
        return [next(iterator).tolist() for _ in range(num)]


@pytest.mark.parametrize("tail", ["carry", "drop"])
@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_get_parts_of_the_same_batches(tail: Any, workers: int) -> None:
    options: dict[str, Any] = {"batch_rows": 6, "samples": Samples(tail=tail), "steps": 5, "workers": workers}
    whole = take(Loader(Lines(15), **options), 5)
    for size in (2, 3):
        shares = [take(Loader(Lines(15), world=(rank, size), **options), 5) for rank in range(size)]
        assert [list(itertools.chain(*parts)) for parts in zip(*shares, strict=True)] == whole
    expected = {"carry": [12, 13, 14, 1000, 1001, 1002], "drop": [1000, 1001, 1002, 1003, 1004, 1005]}
    assert whole[2] == expected[tail]


@pytest.mark.parametrize("tail", ["carry", "drop"])
def test_an_iteration_ends_with_the_epoch_and_the_next_goes_on_without_reading_again(tail: Any) -> None:
    lines = Lines(10)
    with Loader(lines, batch_rows=4, samples=Samples(tail=tail), workers=0) as loader:
        epochs = [[batch.tolist() for batch in loader] for _ in range(3)]
    assert [len(batches) for batches in epochs] == {"carry": [3, 2, 3], "drop": [2, 2, 2]}[tail]
    assert lines.read[0] == {"carry": (3 + 2 + 3 + 1) * 4, "drop": 3 * 10 + 4}[tail], "one batch tells of the end"


@given(
    kind=st.sampled_from(["state", "seekable", "skip"]),
    num=st.integers(4, 20),
    stop=st.integers(0, 9),
    tail=st.sampled_from(["carry", "drop"]),
    size=st.sampled_from([1, 2, 4]),
)
def test_a_state_goes_on_at_any_world_size(kind: str, num: int, stop: int, tail: Any, size: int) -> None:
    def source() -> Any:
        if kind == "state":
            return StatefulLines(num)
        return seekable(num, [0]) if kind == "seekable" else from_iterable(lambda epoch: _epoch(num, epoch), skip=True)

    options: dict[str, Any] = {"batch_rows": 4, "samples": Samples(tail=tail), "steps": 10, "workers": 0}
    whole = take(Loader(source(), **options), 10)
    before = Loader(source(), **options)
    take(before, stop)
    state = json.loads(json.dumps(before.state_dict()))
    shares = []
    for rank in range(size):
        after = Loader(source(), world=(rank, size), **options)
        after.load_state_dict(copy.deepcopy(state))
        shares.append([batch.tolist() for batch in after])
    assert [list(itertools.chain(*parts)) for parts in zip(*shares, strict=True)] == whole[stop:]


def _epoch(num: int, epoch: int) -> Iterator[int]:
    return (epoch * 1000 + number for number in range(num))


def test_what_knows_its_position_is_not_read_from_the_beginning() -> None:
    read = [0]
    for source in (seekable(1000, read), StatefulLines(1000)):
        count = read if isinstance(source, Stream) else source.read
        with Loader(source, batch_rows=10, workers=0) as loader:
            iterator = iter(loader)
            for _ in range(90):
                next(iterator)
            state = loader.state_dict()
        count[0] = 0
        with Loader(source, batch_rows=10, workers=0) as loader:
            loader.load_state_dict(state)
            assert next(iter(loader)).tolist() == list(range(900, 910))
        assert count[0] == 10


def test_reading_again_is_refused_unless_it_was_asked_for() -> None:
    with Loader(Lines(100), batch_rows=10) as loader:
        next(iter(loader))
        state = loader.state_dict()
    other = Loader(Lines(100), batch_rows=10)
    with pytest.raises(StateError, match=r"Lines was left after sample 10 of epoch 0.*skip=True"):
        other.load_state_dict(state)
    assert other.step == 0
    with pytest.raises(StateError, match="skip=True"):
        next(iter(loader))


def test_leaving_an_iteration_and_coming_back_reads_nothing_again() -> None:
    lines = Lines(100)
    with Loader(lines, batch_rows=10, workers=0) as loader:
        for _ in loader:
            break
        assert next(iter(loader)).tolist() == list(range(10, 20))
    assert lines.read[0] == 20


def test_a_position_does_not_outlive_its_epoch() -> None:
    with Loader(StatefulLines(8), batch_rows=4, steps=4) as loader:
        loader.load_state_dict(loader.state_dict() | {"step": 1, "position": 4, "source_state": {"at": 4}})
        assert [batch[0].item() for batch in loader] == [4, 1000, 1004]


def test_augmentation_depends_on_epoch_and_position_alone() -> None:
    def noisy(sample: int, generator: np.random.Generator) -> float:
        return float(generator.random())

    options: dict[str, Any] = {"samples": Samples(transform=noisy), "batch_rows": 4, "steps": 6}
    whole = take(Loader(Lines(10), **options), 6)
    halves = [take(Loader(Lines(10), world=(rank, 2), **options), 6) for rank in range(2)]
    assert [one + two for one, two in zip(*halves, strict=True)] == whole
    assert len({noise for batch in whole for noise in batch}) == 24


def test_a_failing_stream_is_named_with_the_index() -> None:
    def begin(epoch: int) -> Iterator[int]:
        yield from range(5)
        raise OSError("disk is gone")

    with (
        Loader(from_iterable(begin, name="web"), batch_rows=4, workers=1) as loader,
        pytest.raises(DataError, match="web failed at index 5, in epoch 0: OSError: disk is gone"),
    ):
        list(loader)


def test_an_empty_stream_and_one_without_a_whole_batch_are_errors() -> None:
    with Loader(Lines(0), batch_rows=4) as loader, pytest.raises(DataError, match="Lines gave no samples in epoch 0"):
        next(iter(loader))
    with (
        Loader(Lines(3), batch_rows=4, samples=Samples(tail="drop")) as loader,
        pytest.raises(DataError, match="Lines has 3 samples, too few for one batch of 4 rows"),
    ):
        next(iter(loader))


def test_a_stream_that_has_become_shorter_is_an_error() -> None:
    with Loader(from_iterable(lambda _: range(3), skip=True), batch_rows=1) as loader:
        loader.load_state_dict(loader.state_dict() | {"step": 5, "position": 5})
        with pytest.raises(DataError, match=r"ended after 3 samples of epoch 0, but had given 5"):
            next(iter(loader))


def test_what_cannot_be_streamed_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"generator, which can be read only once.*from_iterable"):
        Loader((number for number in range(4)), batch_rows=2)
    with pytest.raises(ConfigError, match="b is a stream"):
        Mixture({"a": [1], "b": Lines(3)})
    with pytest.raises(ConfigError, match="processes=True is for sources with an index"):
        Loader(Lines(4), batch_rows=2, workers=Workers(processes=True))
    with pytest.raises(ConfigError, match="'repeat'"):
        Loader(Lines(4), batch_rows=2, samples=Samples(tail="repeat"))  # type: ignore[arg-type]
    loader = Loader(Lines(4), batch_rows=2)
    with pytest.raises(StateError, match="load_state_dict"):
        loader.seek(1)
    with pytest.raises(StateError, match="known only when it is read"):
        loader.draw(0)
    with (
        Loader(from_iterable(lambda _: 5), batch_rows=2) as loader,  # type: ignore[arg-type, return-value]
        pytest.raises(DataError, match="gave a int, which cannot"),
    ):
        next(iter(loader))
