"""The coordinator's decisions about requests of Horovod's collectives, and what a rank that has joined contributes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwise.integrations.horovod.collectives import HorovodCollectives
from shardwise.integrations.horovod.executor import neutral_tensors
from shardwise.integrations.horovod.messages import Request, Response
from shardwise.integrations.horovod.mismatches import why_invalid
from shardwise.integrations.horovod.negotiation import Negotiation
from shardwise.integrations.horovod.timeline import Timeline

SETS = {0: (0, 1, 2, 3), 1: (0, 1)}


def request(verb: Any, name: str, process_set: int = 0, *, op: str = "", dtype: str = "float32") -> Request:
    return Request(verb, f"{verb}.{name}", process_set, (dtype,), ((2,),), op)


def issue(negotiation: Negotiation, one: Request, *ranks: int) -> None:
    for rank in ranks:
        negotiation.issue(rank, one, now=0.0)


def take_all(negotiation: Negotiation) -> list[Response]:
    return [negotiation.take(0) for _ in range(len(negotiation.ready))]


def test_a_process_set_is_independent_of_ranks_outside_of_it_that_have_joined() -> None:
    negotiation = Negotiation(4, SETS)
    negotiation.issue(3, Request("join", "join"), 0.0)
    issue(negotiation, request("allgather", "w", 1), 0, 1)
    (response,) = take_all(negotiation)
    assert not response.error
    assert response.rows == ((2, 2),)


def test_a_collective_that_was_issued_before_join_has_its_data() -> None:
    negotiation = Negotiation(4, SETS)
    issue(negotiation, request("allgather", "w"), 3)
    negotiation.issue(3, Request("join", "join"), 0.0)
    issue(negotiation, request("allgather", "w"), 0, 1, 2)
    (response,) = take_all(negotiation)
    assert not response.error
    issue(negotiation, request("allgather", "v"), 0)
    (response,) = take_all(negotiation)
    assert "issued while rank 3 had joined" in response.error


def test_a_complete_collective_fails_if_a_rank_leaves_before_it_is_sent() -> None:
    negotiation = Negotiation(4, SETS)
    issue(negotiation, request("allreduce", "w", op="Sum"), 0, 1, 2, 3)
    issue(negotiation, request("allreduce", "v", 1, op="Sum"), 0, 1)
    issue(negotiation, Request("barrier", "barrier"), 0, 1, 2, 3)
    negotiation.leave(3, "has called shutdown()")
    failed, unaffected, barrier = take_all(negotiation)
    assert failed.error == "allreduce 'w' was issued by all ranks, but then rank 3 has called shutdown()."
    assert negotiation.members(failed) == (0, 1, 2)
    assert not unaffected.error  # rank 3 is not in its process set
    assert not barrier.error  # it exchanges nothing


def test_collectives_of_a_removed_process_set_fail() -> None:
    negotiation = Negotiation(4, SETS)
    issue(negotiation, request("allreduce", "w", 1, op="Sum"), 0)
    issue(negotiation, Request("remove_set", "remove_process_set", root=1), 0, 1, 2, 3)
    failed, removed = take_all(negotiation)
    assert failed.error == "allreduce 'w' uses process set 1, which does not exist (any more)."
    assert failed.to == (0,)
    assert removed.number == 1


@pytest.mark.parametrize(
    ("one", "num_ranks", "error"),
    [
        (request("allreduce", "w", op="Adasum"), 3, "uses Adasum on 3 ranks. Adasum needs a power of two"),
        (request("allreduce", "w", op="Adasum"), 4, ""),
        (request("allreduce", "w", op="Adasum", dtype="int64"), 2, "cannot reduce int64 tensors by Adasum. Use one of"),
        (request("allreduce", "w", op="Average", dtype="bool"), 2, "cannot reduce bool tensors by Average. Use one of"),
        (request("allreduce", "w", op="Sum", dtype="bool"), 2, ""),
        (request("reducescatter", "w", op="Max", dtype="complex64"), 2, "cannot reduce complex64 tensors by Max."),
        (request("allreduce", "w", op="Sum", dtype="float8_e5m2"), 2, "by Sum. Cast it to a supported dtype."),
        (request("allgather", "w", dtype="float8_e5m2"), 2, ""),
    ],
)
def test_reductions_that_a_dtype_does_not_have(one: Request, num_ranks: int, error: str) -> None:
    ranks = tuple(range(num_ranks))
    found = why_invalid(dict.fromkeys(ranks, one), ranks)
    assert error in found
    assert bool(found) == bool(error)


class FakeBackend:
    def prepare(self, mesh: Any) -> None:
        pass


def test_a_rank_that_has_joined_contributes_on_the_device_of_the_others() -> None:
    device = torch.device("meta")
    world: Any = SimpleNamespace(
        rank=0,
        size=2,
        device=device,
        everybody=SimpleNamespace(axis="everybody", ranks=(0, 1)),
        collectives=lambda device: FakeBackend(),
        line=lambda name, ranks: SimpleNamespace(axis=name, ranks=ranks),
    )
    collectives = HorovodCollectives(world)
    assert collectives.device_for("meta", 0) == device
    assert collectives.device_for("cpu", 0).type == "cpu"
    collectives.add_set(1, (0, 1))
    assert collectives.device_for("meta", 1).type == "cpu"  # other process sets exchange on the host
    (tensor,) = neutral_tensors(("float32",), ((3,),), "Min", collectives.device_for("meta", 0))
    assert (tensor.device, tensor.shape) == (device, (3,))
    collectives.add_set(0, (0, 1))  # the same ranks again, by add_process_set()
    assert collectives._groups[0] is world.everybody


@pytest.mark.parametrize("ends", [lambda timeline: timeline.stop(), lambda timeline: None])
def test_a_full_disk_ends_the_timeline_alone(
    ends: Callable[[Timeline], None], caplog: pytest.LogCaptureFixture
) -> None:
    timeline = Timeline(0)
    timeline.start("/dev/full")
    with caplog.at_level(logging.WARNING, "shardwise"):
        for number in range(1000):
            timeline.negotiated(f"allreduce.{number}", "NEGOTIATE_ALLREDUCE", 0)
            timeline.executed((f"allreduce.{number}",), "ALLREDUCE", 0.0, 1.0)
        ends(timeline)
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "The timeline ends here, since it cannot be written"
    ]
