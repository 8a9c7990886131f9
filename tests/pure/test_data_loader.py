"""Map-style sources through the loader: batches, resuming, reading ahead, augmenting, and what goes wrong."""

from __future__ import annotations

import gc
import itertools
import json
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, NoReturn

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from shardwise.data import Loader, Mixture, Samples, Workers
from shardwise.data.read_ahead import THREAD_NAME, abandon, run_ahead
from shardwise.data.settings import OF_TORCH
from shardwise.data.to_device import on_tensors
from shardwise.errors import ConfigError, DataError
from tests.patience import PATIENCE

IN_ORDER = Samples(shuffle=False)


def take(loader: Loader, num: int) -> list[Any]:
    iterator = iter(loader)
    return [next(iterator).tolist() for _ in range(num)]


def flat(parts: Sequence[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(parts))


def reading_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith(THREAD_NAME)}


# -- batches ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_ranks_and_micro_batches_are_parts_of_one_batch(workers: int, accumulate: int) -> None:
    whole = take(Loader(range(50), batch_rows=12, world=(0, 1), steps=9), 9)
    for size in (1, 2, 3, 6):
        shares = []
        for rank in range(size):
            with Loader(
                range(50), batch_rows=12, world=(rank, size), accumulate=accumulate, workers=workers, steps=9
            ) as loader:
                parts = [batch.tolist() for batch in loader]
            assert len(parts) == len(loader) == 9 * accumulate
            shares.append([flat(parts[n : n + accumulate]) for n in range(0, len(parts), accumulate)])
        assert [flat(parts) for parts in zip(*shares, strict=True)] == whole


def test_torch_datasets_tensors_arrays_and_subsets_are_sources() -> None:
    values = torch.arange(20.0)
    for source in (values, values.numpy(), values.tolist(), Subset(values, range(20))):  # type: ignore[arg-type]
        with Loader(source, batch_rows=20) as loader:
            (batch,) = loader
        assert sorted(batch.tolist()) == values.tolist()
    with Loader(TensorDataset(values, values * 2), batch_rows=5) as loader:
        for x, y in loader:
            assert torch.equal(x * 2, y)


def test_an_iteration_ends_with_the_epoch_and_the_next_goes_on() -> None:
    with Loader(range(10), batch_rows=4) as loader:
        first, second = ([batch.tolist() for batch in loader] for _ in range(2))
        assert (len(first), len(second)) == (3, 2)  # the third batch begins in the first epoch
        assert loader.epoch == 2
    rows = flat(first + second)
    assert sorted(rows[:10]) == sorted(rows[10:]) == list(range(10))


def test_a_source_with_getitems_is_asked_once_for_a_batch() -> None:
    asked = []

    class Together(list[int]):
        def __getitems__(self, indices: list[int]) -> list[int]:
            asked.append(indices)
            return [self[index] for index in indices]

    with Loader(Together(range(8)), batch_rows=4, steps=2, samples=IN_ORDER) as loader:
        assert [batch.tolist() for batch in loader] == asked == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_mixture_gives_named_sources_in_their_shares() -> None:
    sources = {"text": torch.zeros(1000), "code": torch.ones(10)}
    with Loader(Mixture(sources, {"text": 3, "code": 1}), batch_rows=64, steps=40) as loader:
        rows = torch.cat(list(loader))
        assert rows.mean().item() == 0.25
        draw = loader.draw(39)
    assert draw.epoch[draw.source == 0].min() > 50  # sources are numbered by name: code is 0
    with Loader(Mixture(dict(reversed(sources.items())), {"text": 3, "code": 1}), batch_rows=64, steps=40) as loader:
        assert torch.equal(torch.cat(list(loader)), rows), "the order in which sources are named makes no difference"


# -- resuming -----------------------------------------------------------------------------------------------


@given(
    size_before=st.sampled_from([1, 2, 3, 4]),
    size_after=st.sampled_from([1, 2, 3, 4]),
    stop=st.integers(0, 12),
    tail=st.sampled_from(["carry", "drop"]),
)
def test_a_state_goes_on_at_any_world_size(size_before: int, size_after: int, stop: int, tail: Any) -> None:
    options: dict[str, Any] = {"batch_rows": 12, "seed": 4, "samples": Samples(tail=tail), "steps": 13, "workers": 0}
    whole = take(Loader(range(31), **options, world=(0, 1)), 13)
    before = Loader(range(31), **options, world=(size_before - 1, size_before))
    take(before, stop)
    state = json.loads(json.dumps(before.state_dict()))
    shares = []
    for rank in range(size_after):
        after = Loader(range(31), **options, world=(rank, size_after))
        after.load_state_dict(state)
        assert after.step == stop
        shares.append([batch.tolist() for batch in after])
    assert [flat(parts) for parts in zip(*shares, strict=True)] == whole[stop:]


def test_resuming_reads_nothing_old_and_the_state_stays_small() -> None:
    read: list[int] = []

    class Watched(Dataset[int]):
        def __len__(self) -> int:
            return 10**12

        def __getitem__(self, index: int) -> int:
            read.append(index)
            return index

    with Loader(Watched(), batch_rows=4, workers=0) as loader:
        state = loader.state_dict() | {"step": 10**10}
        loader.load_state_dict(state)
        batch = next(iter(loader)).tolist()
        assert read == batch == loader.draw(10**10).index.tolist()
        assert len(json.dumps(loader.state_dict())) < 300


def test_batches_read_ahead_count_as_not_read() -> None:
    with Loader(range(100), batch_rows=5, workers=Workers(2, prefetch=6)) as loader:
        first = take(loader, 3)
        assert loader.state_dict()["step"] == 3
        again = take(loader, 2)
        loader.seek(0)
        assert take(loader, 5) == first + again


def test_a_step_handed_out_in_part_comes_again_as_a_whole() -> None:
    with Loader(range(100), batch_rows=6, accumulate=3, steps=4) as loader:
        parts = [batch.tolist() for batch in loader]
        loader.seek(0)
        take(loader, 4)
        assert loader.step == 1
        assert [batch.tolist() for batch in loader] == parts[3:]


def test_a_seek_within_a_step_is_heeded() -> None:
    with Loader(range(100), batch_rows=6, accumulate=2, steps=4) as loader:
        parts = [batch.tolist() for batch in loader]
        loader.seek(0)
        iterator = iter(loader)
        next(iterator)
        loader.seek(3)
        assert [batch.tolist() for batch in iterator] == parts[6:]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "seed=0, this one has 1"),
        ({"batch_rows": 6}, "batch_rows=3"),
        ({"samples": IN_ORDER}, "shuffle=True"),
        ({"samples": Samples(tail="drop")}, "tail='carry'"),
        ({"source": range(11)}, "samples="),
    ],
)
def test_a_state_of_other_batches_is_refused(change: dict[str, Any], message: str) -> None:
    options: dict[str, Any] = {"source": range(10), "batch_rows": 3}
    state = Loader(**options).state_dict()
    other = Loader(**{**options, **change})
    with pytest.raises(ConfigError, match=message):
        other.load_state_dict(state)
    assert other.step == 0


def test_something_else_than_a_state_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"not the state of a data loader.*'epoch_nr'"):
        Loader(range(4), batch_rows=2).load_state_dict({"epoch_nr": 1})


# -- augmenting ---------------------------------------------------------------------------------------------


def noisy(sample: int, generator: np.random.Generator) -> tuple[int, float]:
    return sample, float(generator.random())


def test_augmentation_depends_on_seed_epoch_and_index_alone() -> None:
    def drawn(*, shuffle: bool = True, **options: Any) -> dict[tuple[int, int], float]:
        samples = Samples(shuffle=shuffle, transform=noisy)
        with Loader(range(12), samples=samples, steps=24 // options["batch_rows"], **options) as loader:
            rows = [row for index, noise in loader for row in zip(index.tolist(), noise.tolist(), strict=True)]
        first, second = rows[:12], rows[12:]
        return {(epoch, index): noise for epoch, part in enumerate((first, second)) for index, noise in part}

    one = drawn(batch_rows=4, workers=0)
    assert len(set(one.values())) == 24, "another draw for every sample and epoch"
    assert drawn(batch_rows=6, workers=3) == one
    assert drawn(batch_rows=12, shuffle=False) == one
    assert not set(drawn(batch_rows=4, seed=1).values()) & set(one.values())


def test_a_transform_may_write_to_its_sample(tmp_path: Any) -> None:
    kept = np.zeros((6, 2))
    np.save(tmp_path / "kept.npy", kept)
    shown = np.load(tmp_path / "kept.npy", mmap_mode="r")

    def add(sample: Any, _: np.random.Generator) -> Any:
        sample += 1
        return sample

    for source in (kept, shown, torch.zeros(6, 2)):
        with Loader(source, batch_rows=6, samples=Samples(transform=add)) as loader:
            assert all(batch.sum() == 12 for batch in loader)
        assert source.sum() == 0


def test_a_transform_of_one_argument_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"transform\(sample, generator\)"):
        Loader(range(4), batch_rows=2, samples=Samples(transform=lambda sample: sample))  # type: ignore[misc, arg-type]


# -- reading ahead ------------------------------------------------------------------------------------------


def test_samples_are_read_before_they_are_asked_for_but_not_too_far() -> None:
    read: queue.SimpleQueue[int] = queue.SimpleQueue()

    class Noting(list[int]):
        def __getitem__(self, index: Any) -> Any:
            read.put(index)
            return index

    with Loader(Noting(range(100)), batch_rows=1, samples=IN_ORDER, workers=Workers(2, prefetch=4)) as loader:
        iterator = iter(loader)
        for num_taken in range(1, 10):
            next(iterator)
            first = sorted(read.get(timeout=PATIENCE) for _ in range(5 if num_taken == 1 else 1))
            assert first == ([0, 1, 2, 3, 4] if num_taken == 1 else [num_taken + 3])
            assert read.empty()


@pytest.mark.parametrize("leave", ["close", "forget", "fail"])
def test_no_thread_outlives_its_loader(leave: str) -> None:
    before = reading_threads()  # some of a loader before this one may be about to end
    loader = Loader(range(100), batch_rows=1, workers=2, samples=Samples(transform=noisy))
    next(iter(loader))
    assert len(reading_threads() - before) == 2
    if leave == "close":
        loader.close()
    elif leave == "fail":
        with pytest.raises(ZeroDivisionError):
            _fail_while_iterating(loader)
    del loader
    gc.collect()
    for thread in reading_threads() - before:
        assert leave != "close"  # nobody may wait for threads while garbage is collected
        thread.join(PATIENCE)
    assert not reading_threads() - before


def test_a_loader_that_is_collected_waits_for_no_thread() -> None:
    """Whoever runs its finalizer may hold the lock without which no thread ends."""
    begun, may_end = threading.Event(), threading.Event()

    def blocked(sample: int) -> int:
        begun.set()
        assert may_end.wait(PATIENCE)
        return sample

    before = reading_threads()
    tasks = iter([lambda _: 0, lambda _: blocked(1)])
    results = run_ahead(tasks, 1, 2)
    assert next(results) == 0
    assert begun.wait(PATIENCE)
    abandon(results)
    left = reading_threads() - before
    assert len(left) == 1
    may_end.set()
    for thread in left:
        thread.join(PATIENCE)
    assert not reading_threads() - before


class Worker:
    """Stands for a worker process that gives no batch."""

    calls: ClassVar[list[str]] = []
    is_alive = True

    def __init__(self, *_: object) -> None:
        self.ask = self.forget = lambda *_: None

    def answer(self, *_: object) -> NoReturn:
        raise DataError("no batch")

    def close_pipe(self) -> None:
        self.calls.append("close_pipe")

    def end(self) -> None:
        self.calls.append("end")


@pytest.mark.parametrize("leave", ["close", "collect"])
def test_who_closes_a_loader_waits_for_its_processes_and_who_collects_it_does_not(
    leave: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.data.processes._Worker", Worker)
    monkeypatch.setattr(Worker, "calls", [])
    loader = Loader(range(8), batch_rows=4, workers=Workers(processes=True))
    with pytest.raises(DataError, match="no batch"):
        next(iter(loader))
    if leave == "close":
        loader.close()
    del loader
    gc.collect()
    assert Worker.calls == (["close_pipe", "end"] if leave == "close" else ["close_pipe"])


def _fail_while_iterating(loader: Loader) -> None:
    for _ in loader:
        raise ZeroDivisionError


# -- batches of any structure -------------------------------------------------------------------------------


class Pair(NamedTuple):
    x: Tensor
    y: list[Tensor]


@dataclass(frozen=True)
class Record:
    x: Tensor
    name: str


class Named(dict[str, Tensor]):
    pass


def test_tensors_move_and_everything_around_them_stays() -> None:
    one, seen = torch.ones(2), []

    def double(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor * 2

    batch = {
        "pair": Pair(one, [one]),
        "record": Record(one, "n"),
        "named": Named(a=one),
        "text": "t",
        "plain": (one, 1),
    }
    moved = on_tensors(batch, double)
    assert len(seen) == 5
    assert moved["pair"].x.sum() == moved["record"].x.sum() == moved["named"]["a"].sum() == 4
    assert [type(moved[name]) for name in batch] == [Pair, Record, Named, str, tuple]
    assert batch["named"]["a"].sum() == 2  # type: ignore[index]


def test_batches_come_on_the_device_that_was_asked_for() -> None:
    with Loader(torch.ones(4), batch_rows=2, workers=Workers(device="meta")) as loader:
        assert [batch.device.type for batch in loader] == ["meta", "meta"]


# -- what goes wrong ----------------------------------------------------------------------------------------


class Broken(Dataset[int]):
    """Fails at index 7 until it is mended."""

    def __init__(self) -> None:
        self.is_mended = False

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        if index == 7 and not self.is_mended:
            raise OSError("disk is gone")
        return index


@pytest.mark.parametrize("workers", [0, 2])
def test_a_failing_sample_is_named_and_its_step_comes_again(workers: int) -> None:
    source = Broken()
    with Loader(source, batch_rows=4, world=(1, 2), samples=IN_ORDER, workers=workers) as loader:
        iterator = iter(loader)
        assert next(iterator).tolist() == [2, 3]
        with pytest.raises(
            DataError, match=r"source \(a Broken\) failed at index 7, in epoch 0, row 3 of the batch of step 1: OSError"
        ) as failure:
            next(iterator)
        assert isinstance(failure.value.__cause__, OSError)
        source.is_mended = True
        assert next(iter(loader)).tolist() == [6, 7]


def test_a_source_that_has_become_shorter_is_an_error_with_the_index() -> None:
    source = list(range(8))
    with Loader(source, batch_rows=8, samples=IN_ORDER) as loader:
        source.pop()
        with pytest.raises(DataError, match=r"failed at index 7.*IndexError"):
            next(iter(loader))


def test_samples_that_make_no_batch_are_an_error() -> None:
    with (
        Loader([torch.ones(1), torch.ones(2)], batch_rows=2) as loader,
        pytest.raises(DataError, match=r"2 samples of step 0 do not make a batch.*collate="),
    ):
        next(iter(loader))


def test_a_source_that_gives_too_few_at_once_is_an_error() -> None:
    class Short(list[int]):
        def __getitems__(self, indices: list[int]) -> list[int]:
            return indices[1:]

    with Loader(Short(range(4)), batch_rows=4) as loader, pytest.raises(DataError, match=r"asked for 4 .* gave 3"):
        next(iter(loader))


REFUSED: list[tuple[str, Callable[[], Any], str]] = [
    ("empty", lambda: Loader([], batch_rows=2), "no samples"),
    ("dict", lambda: Loader({"train": [1]}, batch_rows=1), r"keys \['train'\].*Mixture"),
    ("number", lambda: Loader(5, batch_rows=1), "class int"),
    ("path", lambda: Loader("train.txt", batch_rows=1), "text 'train.txt', whose samples would be its characters"),
    ("batches", lambda: Loader(DataLoader(range(4), batch_size=2), batch_rows=1), r"batches of their own.*its dataset"),
    (
        "shuffled",
        lambda: Loader(DataLoader(range(4), batch_size=None, shuffle=True), batch_rows=1),
        "shuffles, differently on each rank",
    ),
    *(
        (name, lambda name=name: Loader(range(4), batch_rows=2, **{name: 1}), f"Loader has no {name}")
        for name in OF_TORCH
    ),
    *(
        (
            f"kind of {name}",
            lambda name=name, value=value: Loader(range(9), **{"batch_rows": 3, name: value}),
            f"{name} is ",
        )
        for name, value in (
            ("batch_rows", 2.0),
            ("batch_rows", "2"),
            ("batch_rows", True),
            ("accumulate", "2"),
            ("accumulate", 1.5),
            ("seed", None),
            ("seed", "a"),
            ("steps", "3"),
            ("steps", 2.5),
            ("steps", -1),
            ("workers", "2"),
            ("workers", None),
            ("samples", {"shuffle": False}),
            ("world", "world"),
            ("world", 3),
            ("world", (0,)),
            ("world", (0, "2")),
        )
    ),
    ("shuffle", lambda: Samples(shuffle="no"), r"shuffle='no'\): give True or False"),  # type: ignore[arg-type]
    ("collate", lambda: Samples(collate=3), r"collate=3\) is not a function"),  # type: ignore[arg-type]
    ("transform", lambda: Samples(transform="x"), r"transform='x'\) is not a function"),  # type: ignore[arg-type]
    ("set", lambda: Loader({"b", "a"}, batch_rows=1), r"a set, whose order is another one in each process.*sorted"),
    ("list of sources", lambda: Mixture([[1], [2]]), "sources of a mixture are a list"),  # type: ignore[arg-type]
    ("no state", lambda: Loader(range(9), batch_rows=3).load_state_dict(None), "not the state of a data loader"),
    ("rows", lambda: Loader(range(9), batch_rows=4, world=(0, 3)), "4 rows does not divide among 3 ranks"),
    ("micro", lambda: Loader(range(9), batch_rows=4, accumulate=3), "3 micro-batches each.*give 3 or 6"),
    ("accumulate", lambda: Loader(range(9), batch_rows=4, accumulate=0), "accumulate=0"),
    ("rank", lambda: Loader(range(9), batch_rows=4, world=(2, 2)), "Rank 2 is not within 2 ranks"),
    ("workers", lambda: Loader(range(9), batch_rows=4, workers=-1), "-1 workers"),
    ("prefetch", lambda: Loader(range(9), batch_rows=4, workers=Workers(prefetch=0)), "prefetch of 0"),
    ("processes", lambda: Loader(range(9), batch_rows=4, workers=Workers(0, processes=True)), "number of processes"),
    ("mixture of none", lambda: Mixture({}), "no sources"),
    ("names", lambda: Mixture({"a": [1]}, {"b": 1.0}), r"sources \['a'\] but weights for \['b'\]"),
    (
        "tail",
        lambda: Loader(Mixture({"a": [1]}), batch_rows=1, samples=Samples(tail="drop")),
        "mixture cannot have tail='drop'",
    ),
    ("seek", lambda: Loader(range(9), batch_rows=1).seek(-1), "no step -1"),
]


@pytest.mark.parametrize(("make", "message"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_what_cannot_be_meant_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is one")
def test_pinning_without_a_gpu_is_refused() -> None:
    for options in ({"pin": True}, {"device": "cuda"}):
        with pytest.raises(ConfigError, match="torch finds none"):
            Loader(range(4), batch_rows=2, workers=Workers(**options))  # type: ignore[arg-type]


def test_arguments_that_are_in_a_group_now_are_told_of_by_name() -> None:
    for name, where in (("shuffle", "samples=sw.data.Samples"), ("prefetch", "workers=sw.data.Workers")):
        with pytest.raises(ConfigError, match=rf"takes {name} as part of a group now: {where}\({name}=\.\.\.\)"):
            Loader(range(4), batch_rows=2, **{name: 1})
    with pytest.raises(TypeError, match="unexpected keyword argument 'rows'"):
        Loader(range(4), batch_rows=2, rows=4)


def test_a_mixture_has_no_length() -> None:
    with pytest.raises(TypeError, match="steps="):
        len(Loader(Mixture({"a": [1]}), batch_rows=1))


def test_ranks_come_from_the_launcher_unless_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    loader = Loader(range(8), batch_rows=4)
    assert (loader.rank, loader.size) == (2, 4)
