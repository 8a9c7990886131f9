"""Training on threads in replica groups, of which ranks die, beside the same training in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise import testing
from shardwise.comm import World
from shardwise.testing import fail_at
from tests.ranks.test_lost_ranks import adamw, assert_same_values
from tests.ranks.threads_as_members import Killed, ThreadMembership, run_members

Tensor = torch.Tensor
ROWS, NUM_STEPS = 4, 6
Plant = Callable[[sw.Engine, int], None]


class Task(Protocol):
    """A model, and what it is trained on."""

    def make(self) -> nn.Module: ...

    def loss(self, model: nn.Module, step: int) -> Tensor:
        """The loss of the whole batch of `step`, of the plain model."""
        ...

    def take_step(
        self, loop: str, engine: sw.Engine, optimizer: torch.optim.Optimizer, step: int, place: int, num: int
    ) -> Tensor:
        """Take a step on share `place` of `num` of that batch, and return its loss."""
        ...


def trained_alone(
    task: Task, model: nn.Module, after_step: Callable[[nn.Module], None] | None = None
) -> tuple[list[float], nn.Module]:
    plain = copy.deepcopy(model)
    optimizer = adamw(plain)
    losses = []
    for step in range(NUM_STEPS):
        loss = task.loss(plain, step)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        optimizer.step()
        if after_step is not None:
            after_step(plain)
        losses.append(loss.item())
    return losses, plain


def race_of(
    task: Task,
    plan: dict[str, Any],
    plant: Plant,
    folder: Path,
    *,
    loop: str = "engine",
    num_ranks: int = 4,
    num_newcomers: int = 0,
    shares_memory: bool = True,
    least: int = 1,
    hosts: str = "",
    bound: float = 5e-6,
    most_wrong: int = 1,
    after_step: Callable[[nn.Module], None] | None = None,
) -> dict[int, list[int]]:
    """Train on threads, of which some die. Returns, by member that trains at the end, the sizes of the worlds in which
    it took its steps. `after_step` is what the task's own loop calls after a step."""
    torch.manual_seed(3)
    model = task.make()
    losses, plain = trained_alone(task, model, after_step)
    models = [copy.deepcopy(model) for _ in range(num_ranks + num_newcomers)]

    def work(world: World, member: int) -> tuple[dict[int, float], dict[int, int], dict[str, Tensor]]:
        own = models[member]
        optimizer = adamw(own)
        engine = sw.shard(own, plan, optimizer=optimizer, world=world)
        plant(engine, member)
        found: dict[int, float] = {}
        sizes: dict[int, int] = {}
        while engine.num_steps < NUM_STEPS:
            step, void = engine.num_steps, engine.num_void
            loss = task.take_step(loop, engine, optimizer, step, *engine.data_ranks)
            if engine.num_steps > step and engine.num_void == void:
                found[step] = engine.mean(loss.item())
                sizes[step] = engine.world.size
        state = engine.state_dict()
        engine.close()
        return found, sizes, state

    results = run_members(
        num_ranks,
        work,
        folder,
        shares_memory=shares_memory,
        num_newcomers=num_newcomers,
        least=least,
        hosts=hosts,
    )
    assert results
    for found, _, state in results.values():
        wrong = [step for step, loss in found.items() if loss != pytest.approx(losses[step], rel=bound)]
        assert len(wrong) <= most_wrong, "only the losses that a group took with it may be missing from a mean"
        assert_same_values(state, plain, bound)
    at_end = {hosts[member] for member in results} if hosts else {""}
    left = [path for host in at_end for path in (folder / host).rglob("*") if path.is_file()]
    assert not left, "images of a job that has ended"
    return {member: list(sizes.values()) for member, (_, sizes, _) in results.items()}


class DiesBefore:
    """A rank dies before an action or a collective, in the words in which `explain` prints it: before the n-th of a
    step that matches `point`, counted from 1."""

    def __init__(self, rank: int, step: int, point: str, nth: int = 1) -> None:
        self.is_dead = False
        self._left = nth
        self._fault = fail_at(rank, step, point, by=self._die)

    def _die(self) -> None:
        self._left -= 1
        if not self._left:
            self.is_dead = True
            raise Killed

    def __call__(self, engine: sw.Engine, member: int) -> None:
        membership = engine.world.membership
        assert isinstance(membership, ThreadMembership)
        membership.plant(partial(testing.plant, self._fault))
