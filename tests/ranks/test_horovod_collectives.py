"""Horovod's collectives, issued by each rank in its own order, compared with the same computed on one process."""

from __future__ import annotations

import json
import logging
import random
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
import shardwise.integrations.horovod.torch as hvd
from shardwise.errors import ConfigError
from shardwise.integrations.horovod.errors import InvalidCallError
from shardwise.testing import run_ranks
from tests.patience import PATIENCE
from tests.ranks.horovod_ranks import on_ranks
from tests.thorough import drawn, varies

Tensor = torch.Tensor
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8)
OPS = ("Sum", "Average", "Min", "Max", "Product")
REDUCE: dict[str, Callable[[Tensor], Tensor]] = {
    "Sum": lambda rows: rows.sum(0),
    "Average": lambda rows: rows.sum(0) / len(rows),
    "Min": lambda rows: rows.amin(0),
    "Max": lambda rows: rows.amax(0),
    "Product": lambda rows: rows.prod(0),
}


def values(*shape: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Small integers, so that results are exact in every dtype."""
    return torch.randint(0, 4, shape, generator=generator).to(dtype)


def cases(seed: int, size: int) -> list[tuple[str, Callable[[int], hvd.Handle], list[Any]]]:
    """For each collective: its name, a function that issues it on a rank, and the expected result of each rank."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    made: list[Any] = []
    for number in range(40):
        dtype, op = draw.choice(DTYPES), draw.choice(OPS)
        shape = tuple(draw.randint(1, 5) for _ in range(draw.randint(1, 3)))
        rows = values(size, *shape, dtype=dtype, generator=generator)
        kind = draw.choice(["reduce", "reduce", "in place", "group", "gather", "root", "all", "scatter"])
        made.append((f"{kind} {number}", *one_case(kind, f"t{number}", rows, op, size, draw)))
    return made


def one_case(kind: str, name: str, rows: Tensor, op: str, size: int, draw: random.Random) -> tuple[Any, list[Any]]:
    chosen = getattr(hvd, op)
    reduced = REDUCE[op](rows.double()).to(rows.dtype)
    if kind == "reduce":
        scale = 2.0 if op in ("Sum", "Average") else 1.0
        expected = (REDUCE[op](rows.double()) * scale).to(rows.dtype)
        return lambda rank: hvd.allreduce_async(rows[rank], name=name, op=chosen, postscale_factor=scale), [
            expected
        ] * size
    if kind == "in place":
        return lambda rank: hvd.allreduce_async_(rows[rank].clone(), name=name, op=chosen), [reduced] * size
    if kind == "group":
        flat = rows.flatten(1)
        both = [REDUCE[op](flat.double()).to(rows.dtype), REDUCE[op](flat.double()).float()]
        return lambda rank: hvd.grouped_allreduce_async([flat[rank], flat[rank].float()], name=name, op=chosen), [
            both
        ] * size
    if kind == "gather":
        parts = [rows[rank].repeat(draw.randint(0, 2), *[1] * (rows.dim() - 2)) for rank in range(size)]
        return lambda rank: hvd.allgather_async(parts[rank], name=name), [torch.cat(parts)] * size
    if kind == "root":
        root = draw.randrange(size)
        return lambda rank: hvd.broadcast_async(rows[rank], root, name=name), [rows[root]] * size
    if kind == "all":
        splits = [[draw.randint(0, 2) for _ in range(size)] for _ in range(size)]
        sent = [
            [rows[rank][:1].repeat(count, *[1] * (rows.dim() - 2)) for count in splits[rank]] for rank in range(size)
        ]
        expected = [
            (torch.cat([sent[other][rank] for other in range(size)]), torch.tensor([one[rank] for one in splits]).int())
            for rank in range(size)
        ]
        return lambda rank: hvd.alltoall_async(torch.cat(sent[rank]), splits[rank], name=name), expected
    expected = list(reduced.tensor_split(size))
    return lambda rank: hvd.reducescatter_async(rows[rank], name=name, op=chosen), expected


def equal(result: Any, expected: Any) -> bool:
    if isinstance(expected, Tensor):
        return bool(result.dtype == expected.dtype and torch.equal(result, expected))
    return all(map(equal, result, expected))


@varies
@pytest.mark.parametrize("seed", range(drawn(3, 20)))
def test_any_order_gives_the_results_of_one_process(seed: int) -> None:
    size = random.Random(seed).choice([2, 3, 4])
    listed = cases(seed, size)

    def work() -> list[str]:
        rank = hvd.rank()
        order = random.Random(f"{seed} {rank}").sample(listed, len(listed))
        handles = {name: (issue(rank), expected[rank]) for name, issue, expected in order}
        return [name for name, (handle, expected) in handles.items() if not equal(hvd.synchronize(handle), expected)]

    assert on_ranks(size, work, shares_memory=seed % 2 == 0) == [[]] * size


def test_collectives_have_gradients() -> None:
    """As in Horovod, including the gradients that it averages."""

    def work() -> list[Tensor]:
        rank = hvd.rank()
        weights = torch.arange(4.0).reshape(4, 1) + rank
        found = []
        for call in (
            lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5),
            lambda x: hvd.allgather(x[: rank + 1])[:4],
            lambda x: hvd.broadcast(x, 1),
            lambda x: hvd.alltoall(x),
            lambda x: hvd.alltoall(x, splits=[1, 3] if rank == 0 else [3, 1])[0],
            lambda x: hvd.reducescatter(x, op=hvd.Sum).repeat(2, 1),
            lambda x: sum(hvd.grouped_allreduce([x, 2 * x])),
        ):
            x = torch.ones(4, 2, requires_grad=True)
            y = call(x)
            (y * weights[: len(y)]).sum().backward()
            assert x.grad is not None
            found.append(x.grad[:, 0])
        return found

    first, second = on_ranks(2, work)
    assert [one.tolist() for one in first[:4]] == [[0.5, 1.5, 2.5, 3.5], [0.5, 0, 0, 0], [0] * 4, [0, 1, 1, 2]]
    assert second[2].tolist() == [0.5, 1.5, 2.5, 3.5]
    assert first[4].tolist() == [0, 1, 2, 3]
    assert first[5].tolist() == [4, 8, 8, 12]
    assert first[6].tolist() == [1.5, 4.5, 7.5, 10.5]


def test_errors_about_mismatches_name_tensor_and_ranks() -> None:
    def work() -> list[str]:
        rank = hvd.rank()
        odd = rank == 2
        errors, kinds = [], []
        for call in (
            lambda: hvd.allreduce(torch.ones(3 if odd else 2), name="w"),
            lambda: hvd.allreduce(torch.ones(2, dtype=torch.int32 if odd else torch.float32), name="w"),
            lambda: hvd.allreduce(torch.ones(2), name="w", op=hvd.Max if odd else hvd.Sum),
            lambda: hvd.broadcast(torch.ones(2), 2 if odd else 1, name="w"),
            lambda: hvd.allgather(torch.ones(1, 3 if odd else 2), name="w"),
            lambda: hvd.alltoall(torch.ones(4), splits=[1, 1, 1] if odd else [1, 2, 1], name="w"),
            lambda: hvd.alltoall(torch.ones(4), name="w"),
            lambda: hvd.allgather(torch.ones(()), name="w"),
            lambda: hvd.broadcast(torch.ones(2), 7, name="w"),
            lambda: hvd.grouped_allreduce([torch.ones(2)] * (2 if odd else 1), name="w"),
            lambda: hvd.add_process_set([0, 1] if odd else [1]),
        ):
            with pytest.raises((hvd.HorovodInternalError, InvalidCallError)) as caught:
                call()
            errors.append(str(caught.value))
            kinds.append(isinstance(caught.value, ValueError))
        assert kinds == [False] * 5 + [True] * 4 + [False] * 2  # an elastic loop does not retry an invalid call
        assert hvd.allreduce(torch.ones(2), name="w").tolist() == [1, 1]  # the job continues
        return errors

    of_ranks = on_ranks(3, work)
    assert of_ranks[0] == of_ranks[1] == of_ranks[2]
    errors = of_ranks[0]
    assert errors[0] == (
        "allreduce 'w' has different shapes: [2] on ranks 0, 1, [3] on rank 2. They must be the same on all ranks."
    )
    assert "float32 on ranks 0, 1, int32 on rank 2" in errors[1]
    assert "Sum on ranks 0, 1, Max on rank 2" in errors[2]
    assert "root ranks: 1 on ranks 0, 1, 2 on rank 2" in errors[3]
    assert "[any, 2] on ranks 0, 1, [any, 3] on rank 2" in errors[4]
    assert "on rank 2 has splits [1, 1, 1]" in errors[5]
    assert "4 rows, which cannot be split equally among 3 ranks" in errors[6]
    assert "without dimensions" in errors[7]
    assert "root rank 7, which is not one of [0, 1, 2]" in errors[8]
    assert "numbers of tensors: 1 on ranks 0, 1, 2 on rank 2" in errors[9]
    assert errors[10].startswith("add_process_set has different ranks: [1] on ranks 0, 1, [0, 1] on rank 2")


def test_a_name_can_be_in_flight_once() -> None:
    has_tried_again = threading.Event()

    def work() -> None:
        if hvd.rank() == 1:
            assert has_tried_again.wait(PATIENCE)
        first = hvd.allreduce_async(torch.ones(2), name="w")
        if hvd.rank() == 0:
            with pytest.raises(ValueError, match="Two tensors named 'w'"):
                hvd.allreduce_async(torch.ones(2), name="w")
            has_tried_again.set()
        hvd.barrier()
        assert first.wait().tolist() == [1, 1]

    on_ranks(2, work)


def test_a_stalled_rank_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("HOROVOD_STALL_CHECK_TIME_SECONDS", "0.1")
    monkeypatch.setenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "3")

    together, others_failed = threading.Barrier(2), threading.Barrier(3)

    def work() -> str:
        (others_failed if hvd.rank() == 1 else together).wait(PATIENCE)
        with pytest.raises(hvd.HorovodInternalError) as caught:
            hvd.allreduce(torch.ones(2), name="w")
        if hvd.rank() != 1:
            others_failed.wait(PATIENCE)
        hvd.barrier()
        return str(caught.value)

    with caplog.at_level(logging.WARNING, "shardwise"):
        results = on_ranks(3, work)
    assert results[0] == results[1] == results[2]
    assert re.match(r"allreduce 'w' was issued by ranks 0, 2, but for \d s not by rank 1\.", results[0])
    assert any("'w' was issued by ranks 0, 2" in record.message for record in caplog.records)


def test_a_rank_that_leaves_is_named() -> None:
    both_have_errors = threading.Barrier(2)  # the first of them to leave would be named too

    def work() -> str:
        if hvd.rank() == 1:
            return ""
        with pytest.raises(hvd.HorovodInternalError) as caught:
            hvd.allreduce(torch.ones(2), name="w")
        with pytest.raises(hvd.HorovodInternalError, match=r"rank 1 has called shutdown\(\)"):
            hvd.allgather(torch.ones(2), name="v")
        with pytest.raises(hvd.HorovodInternalError, match=r"join\(\) cannot end"):
            hvd.join()
        both_have_errors.wait(timeout=PATIENCE)
        return str(caught.value)

    results = on_ranks(3, work)
    assert "but rank 1 has called shutdown(), or its script has ended." in results[2]


def test_ranks_that_have_joined_are_neutral() -> None:
    """Ranks with fewer batches contribute neutral values for every op, and all return the last rank to join."""

    def work() -> tuple[list[Any], int]:
        rank = hvd.rank()
        seen = []
        for step in range(rank + 1):
            x = torch.full((3,), float(rank + 1))
            handles = [
                hvd.allreduce_async(x, name=f"sum{step}", op=hvd.Sum),
                hvd.allreduce_async(x, name=f"mean{step}"),
                hvd.allreduce_async(-x, name=f"max{step}", op=hvd.Max),
                hvd.allreduce_async(x.int(), name=f"product{step}", op=hvd.Product),
                hvd.grouped_allreduce_async([x, x.half()], name=f"group{step}", op=hvd.Min),
            ]
            reduced = [handle.wait() for handle in handles]
            seen.append([one[0].item() for one in (*reduced[:4], *reduced[4])])
        if rank == 2:
            with pytest.raises(hvd.HorovodInternalError, match="while ranks 0, 1 had joined"):
                hvd.allgather(torch.ones(2))
        return seen, hvd.join()

    results = on_ranks(3, work)
    assert [last for _, last in results] == [2, 2, 2]
    expected = [[6, 2, -1, 6, 1, 1], [5, 5 / 3, -2, 6, 2, 2], [3, 1, -3, 3, 3, 3]]
    torch.testing.assert_close(torch.tensor(results[2][0]), torch.tensor(expected))


def test_process_sets_are_independent() -> None:
    def rank_of(world: sw.World) -> list[Any]:
        even, odd = hvd.ProcessSet([0, 2]), hvd.ProcessSet(range(1, 4, 2))
        hvd.init(world, process_sets=[even, odd])
        mine, other = (even, odd) if even.included() else (odd, even)
        pair = hvd.add_process_set([2, 3])
        x = torch.tensor([float(hvd.rank())])
        found = [
            hvd.allreduce(x, op=hvd.Sum, process_set=mine).item(),
            hvd.allgather(x, process_set=mine).tolist(),
            hvd.allreduce(x, op=hvd.Sum, name="all").item(),
            mine.rank(),
            other.rank(),
            (mine.size(), pair.ranks, pair.process_set_id),
        ]
        if pair.included():
            found.append(hvd.broadcast(x, 3, process_set=pair).item())
        else:
            with pytest.raises(ValueError, match="which it is not in"):
                hvd.broadcast(x, 3, process_set=pair)
        hvd.barrier(mine)
        assert hvd.remove_process_set(pair)
        assert not hvd.remove_process_set(pair)
        with pytest.raises(ValueError, match="has not been added"):
            hvd.allreduce(x, process_set=pair)
        hvd.shutdown()
        return found

    results = run_ranks(4, rank_of)
    assert results[0] == [2, [0, 2], 6, 0, -1, (2, [2, 3], 3)]
    assert results[3] == [4, [1, 3], 6, 1, -1, (2, [2, 3], 3), 3]


def test_process_sets_must_be_the_same_on_all_ranks() -> None:
    def rank_of(world: sw.World) -> None:
        with pytest.raises(ConfigError, match=r"process sets \[\[0\]\] on rank 0 and \[\[1\]\] on rank 1"):
            hvd.init(world, process_sets=[hvd.ProcessSet([world.rank])])

    run_ranks(2, rank_of)


def test_adasum_averages_parallel_and_sums_orthogonal_vectors() -> None:
    def work() -> list[list[float]]:
        rank = hvd.rank()
        basis = torch.eye(4)[rank]
        return [
            hvd.allreduce(torch.ones(3), op=hvd.Adasum).tolist(),
            hvd.allreduce(basis, op=hvd.Adasum).tolist(),
        ]

    assert on_ranks(4, work)[0] == [[1, 1, 1], [1, 1, 1, 1]]


def test_the_timeline_is_valid_json(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"

    def work() -> None:
        hvd.start_timeline(str(file))
        hvd.barrier()
        hvd.allreduce(torch.ones(2), name="w")
        hvd.barrier()
        hvd.stop_timeline()

    on_ranks(2, work)
    events = json.loads(file.read_text())
    named = [event for event in events if event.get("name") == "thread_name"]
    row = next(event["tid"] for event in named if event["args"]["name"] == "allreduce.w")
    results = [(event["ph"], event.get("name")) for event in events if event["tid"] == row]
    assert {("B", "NEGOTIATE_ALLREDUCE"), ("i", "0"), ("i", "1"), ("X", "ALLREDUCE")} <= set(results)
    assert [ph for ph, _ in results].count("B") == [ph for ph, _ in results].count("E")


def test_wrong_arguments_of_init_and_calls_before_it() -> None:
    with pytest.raises(ValueError, match="Horovod has not been initialized"):
        hvd.rank()
    with pytest.raises(ConfigError, match="Make process sets"):
        hvd.init([0, 1])
    with pytest.raises(ValueError, match="not both"):
        hvd.allreduce_async(torch.ones(1), average=True, op=hvd.Sum)
