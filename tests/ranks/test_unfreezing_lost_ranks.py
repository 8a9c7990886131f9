"""Ranks are lost, or join, in a job whose parameters are unfrozen one after the other."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.elastic.loop_state import LoopState
from shardwise.elastic.recovery import Recovery
from shardwise.errors import FaultError
from shardwise.sharded import state as state_module
from shardwise.sharded.unfreezing import Unfreezing
from tests.ranks.test_unfreezing import adam_of_trained, frozen
from tests.ranks.threads_as_members import Killed, run_members
from tests.thorough import sampled

NUM_RANKS, NUM_STEPS, ROWS = 3, 7, 12
FIRST = frozen()


def batch(step: int) -> torch.Tensor:
    return torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(step))


def act(step: int, model: Any, optimizer: torch.optim.Optimizer, *, adds: bool, rests: bool) -> None:
    """A block is unfrozen at step 2. With `rests`, another one is frozen in steps 3 and 4."""
    if step == 2:
        model[1].requires_grad_(True)
        if adds and len(optimizer.param_groups) == 1:  # ranks that joined later have the others' groups
            optimizer.add_param_group({"params": model[1].parameters(), "lr": 0.01})
    if rests:
        model[2].requires_grad_(step not in (3, 4))


def adam(model: nn.Module, *, adds: bool) -> torch.optim.Optimizer:
    return adam_of_trained(model) if adds else torch.optim.AdamW(model.parameters(), lr=0.02)


def trained_plain(*, adds: bool, rests: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same training in one process."""
    plain = copy.deepcopy(FIRST)
    optimizer = adam(plain, adds=adds)
    for number in range(NUM_STEPS):
        act(number, plain, optimizer, adds=adds, rests=rests)
        plain(batch(number)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return plain, optimizer


@sampled
@pytest.mark.parametrize("num_newcomers", [0, 1])
@pytest.mark.parametrize(
    ("step", "point"), [(1, "forward"), (1, "step"), (2, "begin"), (2, "forward"), (2, "step"), (4, "forward")]
)
@pytest.mark.parametrize(("adds", "rests"), [(True, False), (False, False), (True, True)])
def test_the_others_train_what_was_unfrozen(
    step: int, point: str, adds: bool, rests: bool, num_newcomers: int, tmp_path: Path
) -> None:
    plain, optimizer = trained_plain(adds=adds, rests=rests)
    models = [copy.deepcopy(FIRST) for _ in range(NUM_RANKS + num_newcomers)]

    def work(world: sw.World, member: int) -> tuple[dict[str, torch.Tensor], list[bool], int]:
        model = models[member]
        optimizer = adam(model, adds=adds)
        try:
            engine = sw.shard(model, "zero3", optimizer=optimizer, world=world)
        except FaultError as error:  # a rank that joins while another dies may end; the others continue
            raise Killed if member >= NUM_RANKS else error from None

        def pass_by(now: str) -> None:
            if (member, number, now) == (1, step, point):
                raise Killed

        while engine.num_steps < NUM_STEPS:
            number = engine.num_steps
            act(number, model, optimizer, adds=adds, rests=rests)
            pass_by("begin")
            place, count = engine.data_ranks
            rows = batch(number).tensor_split(count)[place]
            engine.weigh(len(rows), ROWS)
            loss = model(rows).square().mean()
            pass_by("forward")
            engine.backward(loss)
            pass_by("step")
            engine.step()
        state = engine.state_dict()
        trained = [param.requires_grad for param in model.parameters()]
        engine.close()
        return state, trained, len(optimizer.param_groups)

    results = run_members(NUM_RANKS, work, tmp_path, num_newcomers=num_newcomers)
    assert len(results) >= NUM_RANKS - 1
    for state, trained, num_groups in results.values():
        assert trained == [param.requires_grad for param in plain.parameters()]
        assert num_groups == len(optimizer.param_groups)
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


class Dying:
    """Kills member 1 in step 2 at one point of planning memory again, wherever the others are then."""

    POINTS = ("check", "down", "moved", "images", "follow", "done")

    def __init__(self, point: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self._here = threading.local()
        self.has_died = False
        functions: dict[str, tuple[Any, str, bool]] = {
            "check": (Unfreezing, "check", False),
            "down": (state_module, "move", False),
            "moved": (state_module, "move", True),
            "images": (Recovery, "renew", False),
            "follow": (LoopState, "follow", False),
            "done": (Recovery, "renew", True),
        }
        owner, name, is_after = functions[point]
        original = getattr(owner, name)

        def die_in_it(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs) if is_after else None
            if getattr(self._here, "member", None) == 1 and not self.has_died:
                self.has_died = True
                raise Killed
            return result if is_after else original(*args, **kwargs)

        monkeypatch.setattr(owner, name, die_in_it)

    @contextlib.contextmanager
    def around(self, member: int, number: int) -> Iterator[None]:
        if number == 2:
            self._here.member = member
        yield
        self._here.member = None


@sampled
@pytest.mark.parametrize("whole_steps", [False, True])
@pytest.mark.parametrize("preset", ["zero3", "zero1"])
@pytest.mark.parametrize("point", Dying.POINTS)
def test_a_rank_is_lost_while_memory_is_planned_again(
    point: str, preset: str, whole_steps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _ = trained_plain(adds=True, rests=False)
    models = [copy.deepcopy(FIRST) for _ in range(NUM_RANKS)]
    dying = Dying(point, monkeypatch)

    def work(world: sw.World, member: int) -> dict[str, torch.Tensor]:
        model = models[member]
        optimizer = adam(model, adds=True)
        engine = sw.shard(model, preset, optimizer=optimizer, world=world)
        while engine.num_steps < NUM_STEPS:
            number = engine.num_steps
            act(number, model, optimizer, adds=True, rests=False)
            place, count = engine.data_ranks
            rows = batch(number).tensor_split(count)[place]
            engine.weigh(len(rows), ROWS)
            with dying.around(member, number):
                if whole_steps:
                    engine.train_step(rows, loss_fn=lambda output: output.square().mean())
                    continue
                loss = model(rows).square().mean()
            engine.backward(loss)
            engine.step()
        state = engine.state_dict()
        engine.close()
        return state

    results = run_members(NUM_RANKS, work, tmp_path)
    assert dying.has_died
    assert len(results) == NUM_RANKS - 1
    for state in results.values():
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)
