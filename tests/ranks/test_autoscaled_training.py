"""A job that grows by itself trains through a recorded day of a cluster, on a clock that its steps turn: ranks are
granted, evicted and killed, and no step is lost."""

from __future__ import annotations

import copy
import threading
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.comm import World
from shardwise.comm.members import MemberMessage, Pace
from shardwise.errors import SpareError, TurnedAwayError
from shardwise.launch.autoscale import Fill, Gain, Patience, Policy, Sizes
from shardwise.launch.elastic.job_notes import FolderNotes
from shardwise.launch.elastic.scaling import Scaling
from tests.admissions import DAY_SECONDS, AtOnce, one_day, slots_at, training
from tests.ranks.test_lost_ranks import adamw
from tests.ranks.threads_as_members import Crowd, Killed, ThreadMembership, run_members
from tests.thorough import THOROUGH, sampled, thorough_only

Tensor = torch.Tensor
ROWS, GPUS_PER_RANK, MOST = 16, 4, 8
STEP_SECONDS = 120.0
"""Of the fastest step, by the clock of the test."""
BUSIEST = (38_000.0, 46_500.0)
"""The part of the day in which most is granted and taken away."""
NUM_NEWCOMERS = 120 if THOROUGH else 40


def speed(size: int) -> float:
    """Steps per second: beyond four ranks each does less than half of what one alone would."""
    return (1 / (0.3 + 0.7 / size)) * (0.3 + 0.7 / MOST) / STEP_SECONDS


class Admitted(Crowd):
    """Members that are granted and taken away: what is asked for, as far as the day admits it."""

    room = None

    def __init__(self, num_ranks: int, *given: Any, **more: Any) -> None:
        super().__init__(num_ranks, *given, **more)
        self.wanted = num_ranks
        self.now, self.num_steps, self.num_drops = 0.0, 0, 0
        self.course: list[int] = []
        """The number of ranks in each step."""
        self.said: list[str] = []
        self._leaving: set[int] = set()
        self.killed: set[int] = set()
        self.scaling: Scaling

    def ask(self, num_slots: int, hosts: Collection[str]) -> None:
        self.wanted = num_slots

    def begin(self, policy: Policy, now: float) -> None:
        asking, utc = AtOnce(self, self.said.append), partial(datetime, 2026, 11, 30, tzinfo=UTC)
        sizes = partial(Sizes.of, 1, MOST, 1)
        patience = Patience(first_ban=300.0, first_hold=300.0, longest_hold=300.0)  # so that more changes
        self.scaling = Scaling(policy, sizes, asking, self.said.append, utc, wanted=self.wanted, patience=patience)
        self.now = now

    def took_step(self, num_steps: int, size: int) -> None:
        """The first rank has taken a step with `size` ranks: time passes, and others may come or have to go."""
        if num_steps <= self.num_steps:
            return
        self.num_steps, self.now = num_steps, self.now + 1 / speed(size)
        self.course.append(size)
        pace = Pace(size, 1 / speed(size), 0.001, {})
        self.scaling.hear(MemberMessage("pace", 0, text=pace.to_text()), self.now)
        self.scaling.look(self.now, training(size, num_steps), [], FolderNotes(None))
        self._resize(min(self.wanted, slots_at(DAY, self.now) // GPUS_PER_RANK))

    def _resize(self, size: int) -> None:
        with self._changed:
            staying = [one for one in self._members if one in self._living - self._leaving - self.killed]
            while len(staying) + len(self._waiting) > size and self._waiting:
                self._starting.append(self._waiting.pop())
            for member in staying[:-size] if self.num_drops % 2 else staying[size:]:
                self.num_drops += 1
                (self.killed if self.num_drops % 3 == 0 else self._leaving).add(member)
            while len(staying) + len(self._waiting) < size:
                self._waiting.append(self._starting.pop(0))
            self._changed.notify_all()

    def changes_wanted(self, num_steps: int) -> bool:
        return super().changes_wanted(num_steps) or bool(self._leaving & self._living)

    def _announce(self) -> bool:
        if all(lets_in for _, lets_in in self._arrived.values()):
            self._living -= self._leaving
        return super()._announce()

    def meet(self, member: int, report: bytes, *, lets_in: bool) -> Any:
        try:
            return super().meet(member, report, lets_in=lets_in)
        except SpareError as error:
            assert member in self._leaving
            raise TurnedAwayError("it has left", has_asked=True) from error

    def die(self, member: int, *, has_ended: bool) -> None:
        starting, self._starting = self._starting, []  # nobody comes in its place by itself
        super().die(member, has_ended=has_ended)
        self._starting = starting


DAY = one_day()


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    return draw(ROWS, 8), draw(ROWS, 4)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def trained_alone(model: nn.Module, num_steps: int) -> tuple[list[float], nn.Module]:
    plain = copy.deepcopy(model)
    optimizer, losses = adamw(plain), []
    for step in range(num_steps):
        x, y = batch_of(step)
        loss = loss_of(plain(x), y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        optimizer.step()
        losses.append(loss.item())
    return losses, plain


@thorough_only("a day of changes; test_autoscale.py has its decisions, and test_lost_groups.py has changes")
@sampled
@pytest.mark.parametrize("preset", ["zero3", "zero1", "ddp"])
@pytest.mark.parametrize("policy", [Gain(0.5), Fill()], ids=str)
def test_no_step_is_lost_through_a_recorded_day(policy: Policy, preset: str, tmp_path: Path) -> None:
    """Every third rank that is taken away is killed, the others leave. `gain` gives the fifth rank back each time that
    it has tried it; `fill` has what there is."""
    begin, end = (0.0, float(DAY_SECONDS)) if THOROUGH else BUSIEST
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 4)).double()
    models = [copy.deepcopy(model) for _ in range(1 + NUM_NEWCOMERS)]
    losses: dict[int, float] = {}
    started = threading.Lock()
    crowds: list[Admitted] = []

    def work(world: World, member: int) -> tuple[int, dict[str, Tensor]]:
        membership = world.membership
        assert isinstance(membership, ThreadMembership)
        crowd = membership.crowd
        assert isinstance(crowd, Admitted)
        with started:
            if not crowds:
                crowd.begin(policy, begin)
                crowds.append(crowd)
        own = models[member]
        engine = sw.shard(own, preset, optimizer=adamw(own), world=world)
        while not engine.any_rank(crowd.now >= end):
            step, void = engine.num_steps, engine.num_void
            x, y = (whole.tensor_split(engine.data_ranks[1])[engine.data_ranks[0]] for whole in batch_of(step))
            engine.weigh(len(x), ROWS)
            loss = loss_of(engine(x), y)
            engine.backward(loss)
            engine.step()
            if engine.num_steps == step or engine.num_void > void:
                continue
            mean = engine.mean(loss.item())
            if engine.world.rank == 0:
                losses[step] = mean
                crowd.took_step(engine.num_steps, engine.world.size)
            if member in crowd.killed:
                raise Killed
        result = engine.num_steps, engine.state_dict()
        engine.close()
        return result

    results = run_members(1, work, tmp_path, num_newcomers=NUM_NEWCOMERS, of=Admitted)
    (crowd,) = crowds
    num_steps = {steps for steps, _ in results.values()}.pop()
    expected, plain = trained_alone(model, num_steps)
    assert sorted(losses) == list(range(num_steps)), "each step once, in one order"
    assert crowd.num_drops >= 3, "ranks were taken away, and one of them was killed"
    assert list(losses.values()) == pytest.approx(expected, rel=1e-9)
    for steps, state in results.values():
        assert steps == num_steps
        for name, whole in plain.state_dict().items():
            torch.testing.assert_close(state[name], whole, rtol=1e-9, atol=1e-12)
    check_course(policy, crowd.course, crowd.said)


def check_course(policy: Policy, course: Sequence[int], said: Sequence[str]) -> None:
    changes = sum(one != other for one, other in pairwise(course))
    assert changes >= 8
    if isinstance(policy, Gain):
        assert max(course) == 5
        assert any("each of 5 ranks is only 45% as fast as one alone" in line for line in said), said
        assert sum(size > 4 for size in course) < 0.2 * len(course)
    else:
        assert max(course) > 5
