"""A rank of a pipeline is lost: what test_lost_groups.py does not have of all axes."""

from __future__ import annotations

import copy
import math
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from split_models import Transformer, tokens
from torch import nn

import shardwise as sw
from shardwise.comm import World
from shardwise.comm.regrouping import Regrouped
from shardwise.elastic.layouts import Layout
from shardwise.errors import StateError
from shardwise.parallel.pipeline.staged_model import Carried, Surveys
from shardwise.parallel.pipeline.survey import Surveyor
from shardwise.system.torch_private import FakeTensorMode, dispatch_modes
from shardwise.testing import run_ranks
from tests.patience import PATIENCE
from tests.ranks.lost_groups import AXES, NUM_STEPS, PRESETS, ROWS, DiesBefore, Layers, race, trained_alone
from tests.ranks.test_buddies import HostDiesAt
from tests.ranks.test_lost_ranks import adamw, assert_same_values
from tests.ranks.threads_as_members import ThreadMembership, run_members
from tests.thorough import sampled, thorough_only

Tensor = torch.Tensor
plan_of = AXES["pp"].plan


def train(engine: sw.Engine, num_steps: int) -> None:
    while engine.num_steps < num_steps:
        batch = tokens(engine.num_steps, ROWS).tensor_split(engine.data_ranks[1])[engine.data_ranks[0]]
        engine.weigh(len(batch), ROWS)
        engine.train_step(batch)


def test_a_spare_lets_go_of_memory_that_others_still_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters rest in memory that all ranks of a host share, and are read there if images do not have them yet."""
    is_resting = threading.Event()
    come_back, complete = ThreadMembership.come_back, Layout.complete

    def rest(membership: ThreadMembership) -> Regrouped:
        is_resting.set()
        return come_back(membership)

    def complete_late(*given: Any) -> None:
        assert is_resting.wait(PATIENCE)
        complete(*given)

    monkeypatch.setattr(ThreadMembership, "come_back", rest)
    monkeypatch.setattr(Layout, "complete", complete_late)
    race("pp", "zero3", DiesBefore(1, 1, "exchange of commit"), tmp_path)


def test_stages_that_stay_are_not_surveyed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But with a rank that joins, which knows nothing. None copies the parameters that wait for other stages to be put
    back."""
    surveys: Counter[str] = Counter()
    survey, copied, copies = Surveyor.survey, nn.Parameter.__deepcopy__, list[str]()

    def counted(self: Surveyor, *given: Any, **more: Any) -> Any:
        surveys[threading.current_thread().name] += 1
        return survey(self, *given, **more)

    def noted(self: nn.Parameter, memo: dict[int, Any]) -> Any:
        if any(isinstance(mode, FakeTensorMode) for mode in dispatch_modes()):
            copies.append(threading.current_thread().name)
        return copied(self, memo)

    monkeypatch.setattr(Surveyor, "survey", counted)
    monkeypatch.setattr(nn.Parameter, "__deepcopy__", noted)
    race("pp", "zero1", DiesBefore(2, 2, "message of gradient 0"), tmp_path)
    assert surveys == dict.fromkeys((f"member {member}" for member in range(4)), 1)
    surveys.clear()
    race("pp", "zero1", DiesBefore(2, 2, "message of gradient 0"), tmp_path, num_newcomers=1, least=4)
    assert surveys == {"member 0": 1, "member 1": 1, "member 2": 1, "member 3": 2, "member 4": 1}
    assert max(Counter(copies).values(), default=0) <= 2, "one of each dtype for each survey"


def test_of_a_survey_that_was_interrupted_none_knows_more_than_the_others() -> None:
    surveys = Surveys({"one": Carried(), "other": Carried()}, {"one": "", "other": ""})
    surveys.agree(lambda own: [own, b"[1, 2]"])
    assert (list(surveys.carried), list(surveys.mixing)) == (["one"], ["one", "other"])
    surveys.agree(lambda own: [b"[0, 0]", own])
    assert not surveys.carried
    assert not surveys.mixing


class Counting(Transformer):
    """Its batches are counted by the model itself, whose forward runs in every stage, and by a module of one stage."""

    def __init__(self) -> None:
        super().__init__(tied=False)
        self.register_buffer("count", torch.zeros(()))
        self.blocks[0].register_buffer("count", torch.zeros(()))
        self.blocks[0].register_forward_pre_hook(_count)

    def forward(self, tokens: Tensor) -> Tensor:
        _count(self)
        return super().forward(tokens)


def _count(module: nn.Module, *_: object) -> None:
    if torch.is_grad_enabled():
        assert isinstance(module.count, Tensor)
        module.count += 1


@sampled
@pytest.mark.parametrize("schedule", AXES["pp"].ways)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_repeated_step_counts_once(rank: int, schedule: str, tmp_path: Path) -> None:
    """Micro-batches are counted, so twice as many as the unsharded model counts."""
    torch.manual_seed(3)
    model = Counting()
    models = [copy.deepcopy(model) for _ in range(5)]
    fault = DiesBefore(rank, 2, "message of gradient 1")

    def work(world: World, member: int) -> dict[str, Tensor]:
        own = models[member]
        engine = sw.shard(own, plan_of("zero1", schedule), optimizer=adamw(own), world=world)
        fault(engine, member)
        train(engine, NUM_STEPS)
        state = engine.state_dict()
        engine.close()
        return state

    results = run_members(4, work, tmp_path, num_newcomers=1, least=4)
    assert results.keys() == {0, 1, 2, 3, 4} - {rank}
    for state in results.values():
        assert state["count"] == state["blocks.0.count"] == 2 * NUM_STEPS


@sampled
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("point", ["message of activation 0", "broadcast of loss", "exchange of read"])
def test_a_rank_dies_in_an_evaluation(point: str, preset: str, tmp_path: Path) -> None:
    """The others evaluate again, and get the loss of the unsharded model."""
    torch.manual_seed(3)
    model = Transformer()
    losses, plain = trained_alone(Layers(), model)
    models = [copy.deepcopy(model) for _ in range(5)]
    fault = DiesBefore(2, 2, point)
    batches = [tokens(step, ROWS) for step in range(NUM_STEPS)]

    def work(world: World, member: int) -> tuple[list[float], dict[str, Tensor]]:
        own = models[member]
        engine = sw.shard(own, plan_of(preset), optimizer=adamw(own), world=world)
        found = []
        while engine.num_steps < NUM_STEPS:
            batch = batches[engine.num_steps].tensor_split(engine.data_ranks[1])[engine.data_ranks[0]]
            engine.weigh(len(batch), ROWS)
            engine.train_step(batch)
            if engine.num_steps == 2:
                fault(engine, member)
            if engine.num_steps < NUM_STEPS:
                found.append(engine.eval_step(batches[engine.num_steps]).item() - losses[engine.num_steps])
        state = engine.state_dict()
        engine.close()
        return found, state

    results = run_members(4, work, tmp_path, num_newcomers=1, least=4)
    assert fault.is_dead
    assert results.keys() == {0, 1, 3, 4}
    for member, (found, state) in results.items():
        assert_same_values(state, plain, 5e-6)
        assert all(abs(one) < 5e-5 or (math.isnan(one) and member >= 3) for one in found)


WHOLE = {
    "zero1": {"grad": {"partial": []}, "optim": {"shard": []}},
    "zero3": {kind: {"shard": []} for kind in ("param", "held", "grad", "optim")},
}
"""Rows with which every rank has a copy of everything."""


class Untied(Transformer):
    def __init__(self) -> None:
        super().__init__(tied=False)


def different(preset: str) -> dict[str, Any]:
    """The states of the first stage have copies on all ranks, and those of the other have not."""
    rule = {"params": ["embed*", "positions*"], "rows": WHOLE[preset]}
    stages = [["embed", "positions"], ["blocks.*", "norm", "head"]]
    return {"pipeline": {"stages": stages}, "rules": {"first": rule}}


@sampled
@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("point", ["exchange of commit", "message of gradient 0", "agree * verdict *"])
@pytest.mark.parametrize("preset", WHOLE)
def test_stages_that_are_sharded_along_different_axes(preset: str, point: str, rank: int, tmp_path: Path) -> None:
    """All agree on what is lost with a rank of either, and a new one forms a group with the spare."""
    fault = DiesBefore(rank, 2, point)
    more: Any = {"num_newcomers": rank % 2, "least": 2 + 2 * (rank % 2)}
    sizes = race("pp", preset, fault, tmp_path, settings=different(preset), task=Layers(Untied), **more)
    assert fault.is_dead
    assert {one[-1] for one in sizes.values()} == {2 + 2 * (rank % 2)}


@sampled
@pytest.mark.parametrize("death", range(40, 90, 8))
@pytest.mark.parametrize(("hosts", "doomed"), [("aabb", 3), ("aabb", 0), ("abab", 2)])
@pytest.mark.parametrize("preset", WHOLE)
def test_a_host_of_such_stages_is_lost(preset: str, hosts: str, doomed: int, death: int, tmp_path: Path) -> None:
    """Of `abab`, each host has a stage of both groups, so a rank is lost and no host."""
    fault = HostDiesAt({doomed: death}, as_host=hosts != "abab")
    more: Any = {"hosts": hosts, "most_wrong": 2}
    sizes = race("pp", preset, fault, tmp_path, settings=different(preset), task=Layers(Untied), **more)
    assert {one[-1] for one in sizes.values()} == {2}


def test_calls_of_the_model_are_refused_and_name_whole_steps(tmp_path: Path) -> None:
    def work(world: World, _: int) -> str:
        own = Transformer(tied=False)
        with sw.shard(own, plan_of("zero1"), optimizer=adamw(own), world=world) as engine:
            with pytest.raises(StateError) as caught:
                own(tokens(0, ROWS))
            train(engine, 1)
        return str(caught.value)

    for one in run_members(4, work, tmp_path).values():
        assert "In a job that goes on when ranks are lost, use engine.train_step(batch)" in one


@thorough_only("slow; smaller tests have each of its parts")
def test_a_checkpoint_after_a_rank_has_taken_other_stages(tmp_path: Path) -> None:
    """It has the states and groups of the whole model, and a plan without stages resumes it."""
    folder, images = tmp_path / "checkpoints", tmp_path / "images"
    images.mkdir()
    torch.manual_seed(3)
    model = Transformer()
    _, plain = trained_alone(Layers(), model)
    models = [copy.deepcopy(model) for _ in range(5)]
    fault = DiesBefore(1, 2, "message of gradient 0")

    def work(world: World, member: int) -> bool:
        own = models[member]
        whole = dict(own.named_parameters())
        engine = sw.shard(own, plan_of("zero2"), optimizer=adamw(own), world=world)
        before = [name for name, _ in own.named_parameters()]
        others = whole.keys() - before
        assert others
        assert all(whole[name].untyped_storage().nbytes() == 4 for name in others), "they have no memory"
        fault(engine, member)
        train(engine, 4)
        engine.save(folder)
        changed = before != [name for name, _ in own.named_parameters()]
        engine.close()
        return changed

    results = run_members(4, work, images, num_newcomers=1, least=4)
    assert results[0], "the spare has taken other stages"

    def resume(world: World) -> dict[str, Tensor]:
        own = copy.deepcopy(model)
        with sw.shard(own, {"preset": "zero1", "accumulate": 2}, optimizer=adamw(own), world=world) as engine:
            engine.resume(folder)
            assert engine.num_steps == 4
            train(engine, NUM_STEPS)
            return engine.state_dict()

    assert_same_values(run_ranks(2, resume)[0], plain, 5e-6)
