"""What a rank that comes is told of the loop of the others: which scheduler is which, and what was never saved."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LRScheduler, SequentialLR, StepLR

from shardwise.checkpoint.json_codec import decode, encode
from shardwise.elastic.arrival import Built, NeverSaved, first_difference
from shardwise.elastic.loop_state import matched
from shardwise.errors import StateError


def made(sizes: tuple[int, ...]) -> list[LRScheduler]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    steps: list[LRScheduler] = [StepLR(optimizer, size) for size in sizes]
    rest = CosineAnnealingWarmRestarts(optimizer, 4)
    return [*steps, rest, SequentialLR(optimizer, [StepLR(optimizer, 2), StepLR(optimizer, 3)], [5])]


def told(schedulers: list[LRScheduler]) -> list[tuple[str, dict[str, object]]]:
    return [(type(one).__name__, decode(encode(one.state_dict()))) for one in schedulers]


def test_schedulers_of_one_class_are_told_apart_by_their_settings() -> None:
    theirs, mine = made((2, 7, 9)), made((2, 7, 9))
    for number, one in enumerate(theirs):
        for _ in range(number + 3):
            one.optimizer.step()
            one.step()
    for scheduler, state in matched(mine, told(theirs)[::-1]):
        scheduler.load_state_dict(state)
    assert [one.last_epoch for one in mine] == [one.last_epoch for one in theirs] == [3, 4, 5, 6, 7]
    assert [one.state_dict() for one in mine] == [one.state_dict() for one in theirs]


def test_twins_that_count_differently_are_left_alone_with_the_cure(caplog: pytest.LogCaptureFixture) -> None:
    theirs, mine = made((2, 2)), made((2, 2))
    assert len(matched(mine, told(theirs))) == 4, "they say the same"
    theirs[0].optimizer.step()
    theirs[0].step()
    with caplog.at_level(logging.WARNING, logger="shardwise"):
        found = matched(mine, told(theirs))
    assert {type(scheduler).__name__ for scheduler, _ in found} == {"CosineAnnealingWarmRestarts", "SequentialLR"}
    assert "2 schedulers of class StepLR" in caplog.text
    assert "engine.remember(name=scheduler)" in caplog.text


def test_a_state_that_was_never_saved_says_so_where_it_is_asked() -> None:
    state = NeverSaved()
    assert not state
    assert state.get("best", 3) == 3
    with pytest.raises(StateError, match=r"state\['best'\]. Read it with state.get\(\), or register its object with"):
        state["best"]


def test_what_differs_is_named_of_one_that_comes_and_of_ranks_that_have_a_stage_each() -> None:
    mine = Built.of(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)), [])
    first, last = (Built({}, {}, []) for _ in range(2))
    for stage, number in ((first, "0"), (last, "1")):
        stage.params.update({name: shape for name, shape in mine.params.items() if name.startswith(number)})
        stage.buffers.update({name: shape for name, shape in mine.buffers.items() if name.startswith(number)})
    assert first_difference(mine, [first, last]) == ""
    assert first_difference(mine, [first]) == "parameter 1.bias is only here"
    last.buffers["1.made_in_the_first_forward"] = [3]
    assert first_difference(mine, [first, last]) == ""
    last.buffers["1.running_mean"] = [4]
    assert first_difference(mine, [first, last]) == "buffer 1.running_mean has the shape [3] here and [4] there"
