"""A rank that shares its samples along `sp` is lost: what test_lost_groups.py does not have of all axes."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.comm import World
from shardwise.parallel.sequence import Layout, SplitBatches
from shardwise.parallel.sequence.attention import Sample
from tests.ranks.lost_groups import AXES, NUM_STEPS, DiesBefore, Sequences, mean_of, race
from tests.ranks.test_lost_ranks import DiesAt, adamw
from tests.ranks.threads_as_members import run_members
from tests.thorough import thorough_only


@thorough_only("slow; smaller tests beside it cover the same code")
def test_the_plan_may_leave_the_size_of_a_group_open(tmp_path: Path) -> None:
    """What the other axes leave when the job begins is its size from then on."""
    sizes = race(
        "sp", "zero1", DiesAt({1: 60}), tmp_path, mesh={"dp": 2, "sp": -1}, num_ranks=4, num_newcomers=1, least=4
    )
    assert sizes.keys() == {0, 2, 3, 4}
    assert {one[-1] for one in sizes.values()} == {4}


@thorough_only("slow; smaller tests beside it cover the same code")
def test_what_is_evaluated_between_steps_is_right_or_nan(tmp_path: Path) -> None:
    """Ranks that have met a fault there compute nothing more with others until the next step, so they have no
    result."""
    torch.manual_seed(3)
    task = Sequences()
    model = task.make()
    models = [copy.deepcopy(model) for _ in range(4)]
    fault = DiesBefore(1, 2, "all_to_all of activations")
    batch = task.batches[0]

    def work(world: World, member: int) -> list[tuple[int, float]]:
        own, found = models[member], []
        optimizer = adamw(own)
        engine = sw.shard(own, AXES["sp"].plan("zero3"), optimizer=optimizer, world=world)
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
    assert batches.divided(2, is_zigzag=False) is batches
    assert batches.divided(4, is_zigzag=False).sample_of([part]) is None, "of another number of ranks"
    assert batches.sample_of([part]) is not None, "what is void is computed as it was divided"
