"""A loader that follows its engine: any number of rows on any number of ranks, and the batches of a void step again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.data import Loader, Workers, from_iterable
from shardwise.data.sampling import Share
from shardwise.errors import ConfigError, StateError
from shardwise.system.data_ranks import DataRanks
from tests.thorough import thorough_only


@dataclass
class Engine:
    """What a loader sees of one, and what it says."""

    data_ranks: tuple[int, int] = (0, 1)
    num_steps: int = 0
    num_void: int = 0
    weights: list[Fraction] = field(default_factory=list)
    readers: list[Any] = field(default_factory=list)

    def follow(self, reader: Any) -> None:
        self.readers.append(reader)

    def begin_to_read(self) -> None:
        """This rank was there from the start."""

    def reading(self) -> AbstractContextManager[None]:
        return nullcontext()

    def weigh(self, samples: int, of: float) -> None:
        self.weights.append(Fraction(samples) / Fraction(of).limit_denominator(1000))

    def take_step(self) -> None:
        self.num_steps += 1


def loader_of(engine: Engine, source: Any = range(50), **options: Any) -> Loader:
    ranks = DataRanks.of(engine.data_ranks, engine)
    return Loader(source, **{"batch_rows": 8, "steps": 6, "workers": 1, **options}, world=ranks)


def plain_batches(source: Any = range(50), **options: Any) -> list[list[int]]:
    with Loader(source, **{"batch_rows": 8, "steps": 6, **options}) as loader:
        return [batch.tolist() for batch in loader]


@given(size=st.integers(1, 9), batch_rows=st.integers(1, 20), accumulate=st.integers(1, 5), num_steps=st.integers(1, 3))
def test_parts_make_up_the_batch_and_weights_their_mean(
    size: int, batch_rows: int, accumulate: int, num_steps: int
) -> None:
    options: dict[str, Any] = {"batch_rows": batch_rows, "steps": num_steps, "workers": 0}
    whole = plain_batches(**options)
    engines = [Engine((rank, size)) for rank in range(size)]
    handed = [list(loader_of(engine, **options, accumulate=accumulate)) for engine in engines]
    assert {len(batches) for batches in handed} == {num_steps * accumulate}
    for step in range(num_steps):
        places = range(step * accumulate, (step + 1) * accumulate)
        counted = [
            row
            for batches, engine in zip(handed, engines, strict=True)
            for place in places
            if engine.weights[place]
            for row in batches[place].tolist()
        ]
        assert counted == whole[step]
        assert all(len(batches[place]) >= 1 for batches in handed for place in places)
        weights = [engine.weights[place] for engine in engines for place in places]
        assert float(sum(weights)) == pytest.approx(accumulate)
    counts = [Share(rank, size, batch_rows, accumulate).counts for rank in range(size)]
    assert max(map(sum, counts)) - min(map(sum, counts)) <= 1


def drawn_again(engine: Engine, loader: Loader, voids: dict[int, tuple[tuple[int, int], int]]) -> Iterator[list[int]]:
    """What a loop trains on: `voids` says after how many batches a step was made void, on which ranks it goes on, and
    how many steps are lost besides."""
    trained: list[list[int]] = []
    for number, batch in enumerate(loader):
        trained.append(batch.tolist())
        if number in voids:
            ranks, lost = voids[number]
            engine.data_ranks, engine.num_void = ranks, engine.num_void + 1
            engine.num_steps -= lost
            trained = trained[: engine.num_steps * loader.accumulate]
        elif len(trained) % loader.accumulate == 0:
            engine.take_step()
    yield from trained


SOURCES: dict[str, Any] = {
    "map": range(50),
    "stream": from_iterable(lambda _, position: iter(range(position, 50)), seekable=True),
}


@pytest.mark.parametrize(
    ("source", "workers"),
    [
        ("map", Workers(0)),
        ("map", Workers(2)),
        ("stream", Workers(1)),
        pytest.param("map", Workers(2, processes=True), marks=thorough_only("thorough only")),
    ],
)
def test_the_batches_of_a_void_step_come_again_for_the_ranks_that_are_left(source: str, workers: Workers) -> None:
    """In the first micro-batch of a step, in its last, in the first step, in the last, twice in a row, with a step
    that had been taken, and growing."""
    whole = plain_batches(SOURCES[source])
    voids = {
        0: ((0, 1), 0),
        1: ((0, 2), 0),  # the first step goes on with two
        4: ((1, 3), 0),
        5: ((0, 2), 0),
        9: ((1, 4), 1),
        15: ((0, 1), 0),
        20: ((0, 1), 0),
    }
    engine = Engine((0, 4))
    with loader_of(engine, SOURCES[source], accumulate=2, workers=workers) as loader:
        trained = list(drawn_again(engine, loader, voids))
        assert (loader.rank, loader.size, loader.step) == (0, 1, 6)
    assert engine.num_steps == 6
    assert len(trained) == 12
    rows = [trained[at] + trained[at + 1] for at in range(0, 12, 2)]
    assert rows[5] == whole[5]  # the last step was wholly this rank's
    for mine, batch in zip(rows, whole, strict=True):
        assert set(mine) <= set(batch)


def test_a_state_goes_on_unevenly_and_validation_is_not_repeated() -> None:
    engine = Engine((0, 1))
    whole = plain_batches()
    with loader_of(engine) as loader:
        batches = iter(loader)
        for _ in range(3):
            next(batches)
            engine.take_step()
        state = json.loads(json.dumps(loader.state_dict()))
    shares = []
    for rank in range(3):
        other = Engine((rank, 3))
        with loader_of(other) as loader:
            loader.load_state_dict(state)
            shares.append([batch.tolist() for batch in loader])
    assert [list(chain(*parts)) for parts in zip(*shares, strict=True)] == whole[3:]

    validation = loader_of(engine, steps=2)
    assert [batch.tolist() for batch in validation] == whole[:2]
    engine.num_void += 1
    engine.take_step()
    validation.seek(0)
    engine.num_void += 1
    engine.take_step()
    assert [batch.tolist() for batch in validation] == whole[:2]


def test_what_cannot_be_read_again_is_refused_and_plain_pairs_divide() -> None:
    engine = Engine((0, 2))
    with loader_of(engine, from_iterable(lambda _: iter(range(50)), name="tap")) as loader:
        batches = iter(loader)
        next(batches)
        engine.take_step()
        next(batches)
        engine.num_void += 1
        with pytest.raises(StateError, match=r"tap was left after sample 8.*can only be read from its beginning"):
            next(batches)
    with pytest.raises(ConfigError, match=r"8 rows does not divide among 3 ranks.*or Loader\(..., world=engine.data"):
        Loader(range(9), batch_rows=8, world=(0, 3))
    with pytest.raises(ConfigError, match="batch_rows=0"):
        loader_of(engine, batch_rows=0)


@pytest.mark.parametrize("is_sought", [False, True])
def test_a_loader_on_a_rank_that_has_come_goes_where_those_of_the_others_are(is_sought: bool) -> None:
    engine, plain = Engine(), plain_batches()
    there = loader_of(engine)
    batches = iter(there)
    for _ in range(3):
        next(batches)
        engine.take_step()
    next(batches)  # of a step that is given up
    state = there.state_after(engine.num_steps)
    came = loader_of(Engine(num_steps=3))
    if is_sought:
        came.seek(1)
    came.go_where(state)
    assert [batch.tolist() for batch in came] == plain[1 if is_sought else 3 :]


def test_a_stream_that_cannot_be_left_is_joined_at_the_beginning_of_an_epoch() -> None:
    tap = from_iterable(lambda _: iter(range(50)), name="tap")
    there, came = loader_of(Engine(), tap), loader_of(Engine(), tap)
    first = next(iter(there)).tolist()
    came.go_where(there.state_after(0))
    assert next(iter(came)).tolist() == first


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("has_begun", [False, True])
def test_a_bad_batch_is_left_out_once_whether_it_was_begun_or_not(
    has_begun: bool, accumulate: int, workers: int
) -> None:
    """Ranks that have had the bad batch, one that had not come to it, and one that comes later go on alike."""
    plain = plain_batches()
    engine = Engine()
    there = loader_of(engine, accumulate=accumulate, workers=workers)
    assert there.can_leave_out
    batches = iter(there)

    def taken() -> list[int]:
        rows = [row for _ in range(accumulate) for row in next(batches).tolist()]
        engine.take_step()
        return rows

    def given_up() -> None:
        for _ in range(accumulate):
            next(batches)
        engine.num_void += 1

    assert [taken(), taken()] == plain[:2]
    if has_begun:
        next(batches)
    there.leave_out(2)
    came = loader_of(Engine(num_steps=2))
    came.go_where(there.state_after(2))
    assert [batch.tolist() for batch in came] == plain[3:]
    for _ in range(accumulate - 1 if has_begun else accumulate):  # of the void iteration
        next(batches)
    engine.num_void += 1
    given_up()  # the one in its place may be given up too, and comes again
    assert [taken(), taken(), taken()] == plain[3:]
    assert there.step == 6
    assert not loader_of(engine, from_iterable(range(50))).can_leave_out


def test_a_loader_that_trains_nothing_does_not_pass_over_a_batch() -> None:
    engine = Engine()
    validation = loader_of(engine)
    batches = iter(validation)
    next(batches)
    for _ in range(3):
        engine.take_step()
    validation.leave_out(3)
    assert next(batches).tolist() == plain_batches()[1]


def test_a_spare_that_comes_back_goes_where_the_others_are_though_its_script_had_sought() -> None:
    """A script may seek before its first batch, as one that resumes does. That says nothing of where a rank goes that
    has waited while the others trained."""
    engine = Engine()
    there, spare = loader_of(engine), loader_of(Engine(num_steps=2))
    for one in (there, spare):
        one.seek(1)
    batches, own, expected = iter(there), iter(spare), []
    for _ in range(3):
        expected.append(next(batches).tolist())
        engine.take_step()
    assert next(own).tolist() == expected[0]
    spare.go_where(there.state_after(2))
    assert next(own).tolist() == expected[2]


@pytest.mark.parametrize("evaluates_again", [False, True])
def test_a_loader_for_validation_goes_on_after_what_the_others_have_evaluated(evaluates_again: bool) -> None:
    """A rank joins behind an evaluation, when a step begins, and that one is void. A loop that evaluates again then, as
    no step was taken, gets the same samples; another one gets those of the next epoch, of which it reads its share."""
    engine = Engine()
    there = loader_of(engine, batch_rows=25, steps=None)
    evaluated = [batch.tolist() for batch in there]
    here = Engine()
    came = loader_of(here, batch_rows=25, steps=None)
    came.go_where(json.loads(json.dumps(there.state_after(engine.num_steps))))
    for one in (engine, here):
        one.num_void += 1
        one.num_steps += not evaluates_again
    found = [[batch.tolist() for batch in loader] for loader in (there, came)]
    assert found[0] == found[1]
    assert (found[0][:2] == evaluated) == evaluates_again
