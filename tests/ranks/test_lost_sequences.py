"""A rank that shares its samples along `sp` is lost: its replica group leaves, and comes back when it is complete.
Losses and parameters are those of the unsharded model."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sequences import TOKENS, Batch, batches
from small_transformers import llama
from torch import nn
from torch.nn import functional

import shardwise as sw
from shardwise.comm import World
from shardwise.parallel.sequence import Layout, SplitBatches
from shardwise.parallel.sequence.attention import Sample
from tests.models import Gpt
from tests.ranks.lost_groups import NUM_STEPS, ROWS, DiesBefore, race_of
from tests.ranks.test_buddies import HostDiesAt
from tests.ranks.test_lost_ranks import DiesAt, adamw, update
from tests.ranks.threads_as_members import run_members
from tests.thorough import drawn, sampled, thorough_only, varies

Tensor = torch.Tensor
PRESETS = ("ddp", "zero1", "zero2", "zero3")
LOOPS = ("engine", "plain", "train_step", "joined")
ATTENTION = ("ulysses", "ring")


def losses_of(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none")


def mean_of(logits: Tensor, batch: Batch) -> Tensor:
    return losses_of(logits, batch["labels"]).sum() / (batch["labels"] != -100).sum()


class Sequences:
    """The task: next tokens, of which the last of each sample do not count, so that the ranks along `sp` have different
    numbers of those that do."""

    def __init__(self, make: Callable[[], nn.Module] = Gpt) -> None:
        self.make = make
        self.batches = batches(NUM_STEPS, rows=ROWS)
        for batch in self.batches:
            batch["labels"] = batch["labels"].clone()
            batch["labels"][:, -5:] = -100

    def loss(self, model: nn.Module, step: int) -> Tensor:
        batch = self.batches[step]
        return mean_of(model(batch["input_ids"], batch["position_ids"]), batch)

    def take_step(
        self, loop: str, engine: sw.Engine, optimizer: torch.optim.Optimizer, step: int, place: int, num: int
    ) -> Tensor:
        batch = {name: value.tensor_split(num)[place] for name, value in self.batches[step].items()}
        engine.weigh(len(batch["labels"]), ROWS)
        mine: Batch = engine.split_sequence(batch)
        inputs = mine["input_ids"], mine["position_ids"]

        def mean(logits: Tensor, labels: Tensor) -> Tensor:
            return engine.mean_over_tokens(losses_of(logits, labels), labels.flatten() != -100)

        if loop == "train_step":
            return engine.train_step(inputs, mine["labels"], loss_fn=mean)
        logits = engine.module(*inputs)
        if loop == "joined":
            loss = mean_of(engine.join_sequence(logits), batch)
            update("engine", engine, optimizer, loss)
        else:
            loss = mean(logits, mine["labels"])
            update(loop, engine, optimizer, loss)
        return loss


def plan_of(preset: str, attention: str = "ulysses", **mesh: int) -> dict[str, Any]:
    return {"preset": preset, "mesh": mesh or {"dp": 2, "sp": 2}, "sequence": {"attention": attention}}


@sampled
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("attention", ATTENTION)
def test_a_group_leaves_and_comes_back(attention: str, loop: str, preset: str, tmp_path: Path) -> None:
    plan = plan_of(preset, attention)
    sizes = race_of(Sequences(), plan, DiesAt({2: 60}), tmp_path, loop=loop, num_newcomers=1, least=4)
    assert sizes.keys() == {0, 1, 3, 4}
    assert {one[-1] for one in sizes.values()} == {4}


POINTS = {
    "split": ("exchange of activations", 1),
    "forward": ("all_to_all of activations", 2),
    "backward": ("all_to_all of activations", 6),
    "join": ("gather of activations", 1),
    "tokens": ("all_reduce of activations", 2),
    "reduction": ("*reduce* blocks.1 *", 1),
    "waiting": ("wait blocks.1 *", 1),
    "verdict": ("all_reduce of verdict", 1),
    "commit": ("exchange of commit", 1),
    "mean": ("gather of weighed mean", 1),
}


@sampled
@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("point", POINTS)
def test_a_rank_dies_before(point: str, attention: str, preset: str, rank: int, tmp_path: Path) -> None:
    fault = DiesBefore(rank, 2, *POINTS[point])
    loop = "joined" if point == "join" else "engine"
    is_replaced = rank == 3
    sizes = race_of(
        Sequences(),
        plan_of(preset, attention),
        fault,
        tmp_path,
        loop=loop,
        num_newcomers=int(is_replaced),
        least=4 if is_replaced else 2,
    )
    assert fault.is_dead
    assert all(one[-1] == (4 if is_replaced else 2) for one in sizes.values())


@varies
def test_a_rank_dies_anywhere(tmp_path: Path) -> None:
    """At any collective, also of a recovery."""
    for seed in range(drawn(1, 60)):
        draw = random.Random(seed)
        mesh = draw.choice([{"dp": 2, "sp": 2}, {"sp": 2, "dp": 2}])
        is_replaced = draw.random() < 0.5
        folder = tmp_path / str(seed)
        folder.mkdir()
        race_of(
            Sequences(),
            plan_of(draw.choice(PRESETS), draw.choice(ATTENTION), **mesh),
            DiesAt({draw.randrange(4): draw.randrange(3, 150)}),
            folder,
            loop=draw.choice(LOOPS),
            shares_memory=draw.random() < 0.5,
            num_newcomers=int(is_replaced),
            least=4 if is_replaced else 2,
        )


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("hosts", ["aabb", "abab", "abcd"])
def test_groups_on_several_hosts(hosts: str, preset: str, tmp_path: Path) -> None:
    fault = HostDiesAt({1: 67}, as_host=hosts != "abab")
    sizes = race_of(Sequences(), plan_of(preset), fault, tmp_path, hosts=hosts, loop="train_step")
    assert sizes.keys() == {2, 3}
    assert sizes[2][-1] == 2


@thorough_only("slow; smaller tests beside it cover the same code")
def test_the_plan_may_leave_the_size_of_a_group_open(tmp_path: Path) -> None:
    """What the other axes leave when the job begins is its size from then on."""
    sizes = race_of(Sequences(), plan_of("zero1", dp=2, sp=-1), DiesAt({1: 60}), tmp_path, num_newcomers=1, least=4)
    assert sizes.keys() == {0, 2, 3, 4}
    assert {one[-1] for one in sizes.values()} == {4}


@thorough_only("slow; smaller tests beside it cover the same code")
def test_with_split_layers(tmp_path: Path) -> None:
    plan = plan_of("zero1", dp=2, sp=2, tp=2)
    plan["tensor"] = {"plan": {"blocks.*.up": "column", "blocks.*.down": "row"}}
    sizes = race_of(Sequences(), plan, DiesAt({1: 80}), tmp_path, num_ranks=8, num_newcomers=1, least=8)
    assert sizes[0][-1] == 8


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize("whole", [False, True], ids=["parts", "whole outputs"])
def test_a_model_of_transformers_splits_its_batch_itself(whole: bool, tmp_path: Path) -> None:
    class Whole(Sequences):
        def loss(self, model: nn.Module, step: int) -> Tensor:
            loss: Tensor = model(**self.batch(step, 0, 1)).loss
            return loss

        def batch(self, step: int, place: int, num: int) -> Batch:
            ids = self.batches[step]["input_ids"].tensor_split(num)[place]
            return {"input_ids": ids, "labels": ids}

        def take_step(
            self, loop: str, engine: sw.Engine, optimizer: torch.optim.Optimizer, step: int, place: int, num: int
        ) -> Tensor:
            batch = self.batch(step, place, num)
            engine.weigh(len(batch["labels"]), ROWS)
            if whole:
                engine.give_whole_outputs()
            output = engine.module(**batch)
            assert output.logits.shape[1] == TOKENS // 2
            update(loop, engine, optimizer, output.loss)
            loss: Tensor = output.loss
            return loss

    fault = DiesBefore(1, 2, *POINTS["forward"])
    sizes = race_of(Whole(llama), plan_of("zero2"), fault, tmp_path, num_newcomers=1, least=4)
    assert sizes[0][-1] == 4


@thorough_only("slow; smaller tests beside it cover the same code")
def test_what_is_evaluated_between_steps_is_right_or_nan(tmp_path: Path) -> None:
    """Ranks that have met a fault there compute nothing more with others until the next step, so they have no
    result."""
    torch.manual_seed(3)
    model, task = Gpt(), Sequences()
    models = [copy.deepcopy(model) for _ in range(4)]
    fault = DiesBefore(1, 2, "all_to_all of activations")
    batch = task.batches[0]

    def work(world: World, member: int) -> list[tuple[int, float]]:
        own, found = models[member], []
        optimizer = adamw(own)
        engine = sw.shard(own, plan_of("zero3"), optimizer=optimizer, world=world)
        fault(engine, member)
        while engine.num_steps < NUM_STEPS:
            with torch.no_grad():
                mine = engine.split_sequence(batch)
                logits = engine.join_sequence(engine.module(mine["input_ids"], mine["position_ids"]))
            found.append((engine.num_steps, mean_of(logits, batch).item()))
            task.take_step("engine", engine, optimizer, engine.num_steps, *engine.data_ranks)
        engine.close()
        return found

    results = run_members(4, work, tmp_path, shares_memory=False)
    assert fault.is_dead
    assert results.keys() == {2, 3}
    plain, expected = copy.deepcopy(model), []
    optimizer = adamw(plain)
    for step in range(NUM_STEPS):
        expected.append(task.loss(plain, 0).item())
        optimizer.zero_grad()
        task.loss(plain, step).backward()
        optimizer.step()
    for found in results.values():
        assert [step for step, loss in found if math.isnan(loss)] == [2]
        assert [loss for _, loss in found if not math.isnan(loss)] == pytest.approx(expected, rel=5e-6)


def test_copies_of_a_batch_are_known_with_the_values_that_it_had() -> None:
    """A step that is undone after its end is repeated with copies of its batch, which a loop may refill."""
    batches, documents = SplitBatches(), torch.arange(8)[None]
    part, other = torch.zeros(1, 4), torch.ones(1, 4)
    batches.note([part, other], (), Sample(Layout(8, 2), documents))
    copies = [part.clone(), other.clone(), torch.zeros(1)]
    batches.note_copy(copies, [part, other, torch.zeros(1)])
    documents.zero_()
    mine, theirs = batches.sample_of(copies[:1]), batches.sample_of(copies[1:])
    assert mine is theirs is not None
    assert mine.layout == Layout(8, 2)
    assert torch.equal(mine.documents, torch.arange(8)[None])
    assert batches.sample_of(copies[2:]) is None
    batches.divide(2, is_zigzag=False)
    batches.divide(4, is_zigzag=False)
    assert batches.sample_of([part]) is None, "of another number of ranks"
