"""The rows of docs/elastic.md on what restarts and what is refused that no longer test comes to: each in the cheapest
job that says it."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.elastic.layouts import choose
from shardwise.elastic.regroup_reports import Report, check_agreement
from shardwise.elastic.survivable import _why_not
from shardwise.errors import ConfigError, FaultError, LostStateError
from shardwise.parallel.outline import SmallerMeshes
from shardwise.plan.mesh import Mesh
from shardwise.program.image_bytes import ON_ACCELERATOR
from shardwise.testing import run_ranks
from tests.ranks.lost_groups import DiesBefore
from tests.ranks.test_lost_ranks import adamw, batches, loss_of, net
from tests.ranks.threads_as_members import ThreadMembership, run_members
from tests.thorough import sampled


@sampled
@pytest.mark.parametrize(
    ("has_memory", "has_optimizer", "said"),
    [(False, True, "There is no memory that outlives a rank (/dev/shm)"), (True, False, "There is no optimizer")],
    ids=["no memory", "no optimizer"],
)
def test_a_lost_rank_ends_the_attempt_and_rank_0_has_said_why_when_the_job_began(
    has_memory: bool,
    has_optimizer: bool,
    said: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, fault = net(), DiesBefore(1, 0, "gather *")
    told_launcher: list[int] = []
    monkeypatch.setattr(ThreadMembership, "needs_all", lambda self: told_launcher.append(self.member))
    models = [copy.deepcopy(first) for _ in range(2)]

    def work(world: sw.World, member: int) -> str:
        model = models[member]
        engine = sw.shard(model, "zero3", optimizer=adamw(model) if has_optimizer else None, world=world)
        fault(engine, member)
        x, y = batches()[0]
        with pytest.raises(FaultError) as caught:
            engine.backward(loss_of(engine(x), y))
        return str(caught.value)

    (error,) = run_members(2, work, tmp_path if has_memory else None).values()
    assert "ank 1" in error
    assert sorted(told_launcher) == [0, 1], "all are to start again"
    (told,) = [one for one in caplog.messages if one.startswith(said)]
    assert "If a rank is lost, this job restarts from its last checkpoint instead." in told


@sampled
@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"survive": "host"}, "survive: host needs an elastic job. Start it with `shardwise launch --elastic`"),
        ({"survive": "buddy"}, "survive: buddy needs an elastic job. Start it with `shardwise launch --elastic`"),
        ({"bad_batch": "skip"}, "bad_batch: skip needs a job whose ranks survive a lost one"),
        ({"bad_batch": "skip", "survive": "checkpoint"}, "bad_batch: skip needs a job whose ranks survive a lost one"),
    ],
)
@pytest.mark.parametrize("is_elastic", [False, True])
def test_what_needs_an_elastic_job_is_refused_with_the_cure(
    plan: dict[str, Any], said: str, is_elastic: bool, tmp_path: Path
) -> None:
    if is_elastic and plan != {"bad_batch": "skip", "survive": "checkpoint"}:
        pytest.skip("possible there")

    models = [net() for _ in range(2)]

    def work(world: sw.World, _: int = 0) -> str:
        model = models[world.rank]
        with pytest.raises(ConfigError) as refused:
            sw.shard(model, {"preset": "zero1", **plan}, optimizer=adamw(model), world=world)
        return str(refused.value)

    told = list(run_members(2, work, tmp_path).values()) if is_elastic else run_ranks(2, work)
    assert all(one.startswith(said) for one in told)


def test_parameters_on_an_accelerator_are_said_to_go_with_their_process() -> None:
    parts = SimpleNamespace(
        sharding=SimpleNamespace(smaller=SmallerMeshes(), device=torch.device("cuda")), flats=[], optimizer=object()
    )
    sharded: Any = SimpleNamespace(mesh=Mesh.of({"dp": 2}, 2), parts=parts)
    assert _why_not(sharded, SimpleNamespace(has_several=False)) == ON_ACCELERATOR  # type: ignore[arg-type]


def report(label: int) -> Report:
    return Report(1, 1, {1: 1}, label, {label: [1]}, [], 1, "", None)


def test_ranks_that_have_no_layout_in_common_start_again() -> None:
    """One had not completed the layout to which the others had moved, and whose predecessor they have let go."""
    layouts: list[Any] = [SimpleNamespace(label=2, sources=lambda _: [])]

    def work(world: sw.World) -> str:
        with pytest.raises(LostStateError) as caught:
            choose(layouts, [report(2), report(1)], world, compares=False)
        return str(caught.value)

    assert set(run_ranks(2, work)) == {
        "The surviving ranks have no layout in common. Start again from the last checkpoint."
    }


def test_ranks_that_would_go_on_from_different_states_start_again() -> None:
    def work(world: sw.World) -> str:
        check_agreement(world, {"version": 3, "came": world.rank}, [0, 1])  # what is for those that join may differ
        with pytest.raises(LostStateError) as caught:
            check_agreement(world, {"version": 3 + world.rank, "came": None}, [0, 1])
        return str(caught.value)

    assert all(one.startswith("The ranks would continue from different states: ") for one in run_ranks(2, work))
