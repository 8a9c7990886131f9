"""What ranks have not sent yet is their island's own: against one process for each island that rounds as the ranks do,
and outer steps between these."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from twins import work_on_ranks

import shardwise as sw
from shardwise.checkpoint.index import LOST, UNSENT
from shardwise.comm import World
from shardwise.testing import run_ranks
from tests import inside
from tests.ranks.lost_groups import DiesBefore
from tests.ranks.test_lost_residuals import KINDS, ROUNDING, Twin, steps_taken
from tests.ranks.threads_as_members import run_members
from tests.thorough import sampled

Tensor = torch.Tensor
Values = dict[str, Tensor]
MESH = {"island": 2, "dp": 2}
EVERY, OVERLAP, MIX = 4, 1, 0.25
CASES = [
    (kind, preset) for kind in KINDS for preset in (("ddp", "zero1", "zero2", "zero3") if kind == "codes" else ("ddp",))
]


def plan_of(kind: str, preset: str, **more: Any) -> dict[str, Any]:
    return {
        "preset": preset,
        "mesh": MESH,
        "islands": {"every": EVERY, "overlap": OVERLAP, "mix": MIX},
        **KINDS[kind][1],
        **more,
    }


class Common:
    """The common model, and its outer optimizer, which begins as `first` does."""

    def __init__(self, first: Twin) -> None:
        self.values = {name: param.detach().clone() for name, param in first.model.named_parameters()}
        self._outer = torch.optim.SGD(self.values.values(), lr=0.7, momentum=0.9, nesterov=True)

    def subtract(self, islands: Collection[Twin]) -> None:
        for name, anchor in self.values.items():
            own = [island.model.get_parameter(name).detach() for island in islands]
            anchor.grad = sum(anchor - one for one in own) / len(own)

    def step(self, islands: Collection[Twin]) -> None:
        self._outer.step()
        for island in islands:
            for name, anchor in self.values.items():
                island.model.get_parameter(name).data.lerp_(anchor, 1 - MIX)


def trained_apart(kind: str) -> tuple[Values, list[Twin]]:
    """The common model, and the islands."""
    make_twin, _, of_kind, _, num_steps = KINDS[kind]
    islands = [make_twin(), make_twin()]
    common = Common(islands[0])
    for island in islands:
        island.forget(MESH["dp"])
    for step, x in enumerate(of_kind.data(num_steps), 1):
        for island, share in zip(islands, x.chunk(len(islands)), strict=True):
            island.step(share.chunk(MESH["dp"]))
        if step % EVERY == 0:
            common.subtract(islands)
        elif step % EVERY == OVERLAP and step > EVERY:
            common.step(islands)
    return common.values, islands


def trained(
    kind: str, plan: dict[str, Any], steps: range, folder: Path | None = None, *, resumes: bool = False
) -> list[tuple[Values, Values]]:
    """What islands have in common, and what each rank's island has. With a `folder` they resume from it, or save."""
    make_twin, _, of_kind, make_optimizer, _ = KINDS[kind]

    def work(engine: sw.Engine) -> tuple[Values, Values]:
        model = engine.module
        if resumes:
            engine.resume(folder)
            assert engine.num_steps == steps.start
        place, num = engine.data_ranks
        for x in of_kind.data(steps.stop)[steps.start :]:
            engine.backward(of_kind.loss_of(engine, x.chunk(num)[place]))
            engine.step()
        if folder is not None and not resumes:
            engine.save(folder)
        own = {name: engine.get(name).clone() for name, _ in model.named_parameters()}
        return engine.state_dict(), own

    return work_on_ranks(4, work, plan, make_twin().model, make_optimizer)


def assert_equal(found: Sequence[tuple[Values, Values]], expected: Sequence[tuple[Values, Values]]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        for values, others in zip(ours, theirs, strict=True):
            assert all(torch.equal(value, others[name]) for name, value in values.items())


@sampled
@pytest.mark.parametrize(("kind", "preset"), CASES)
def test_islands_keep_what_they_have_not_sent_apart(kind: str, preset: str) -> None:
    common, islands = trained_apart(kind)
    for rank, (found, own) in enumerate(trained(kind, plan_of(kind, preset), range(KINDS[kind][-1]))):
        for name, param in islands[rank // 2].model.named_parameters():
            torch.testing.assert_close(found[name], common[name], **ROUNDING)
            torch.testing.assert_close(own[name], param.detach(), **ROUNDING)


@sampled
@pytest.mark.parametrize(("kind", "preset"), CASES)
def test_it_is_in_checkpoints(kind: str, preset: str, tmp_path: Path) -> None:
    """Each island's own: to the bit, saved where some of it is kept, and outer gradients are on their way."""
    num_steps, plan = KINDS[kind][-1], plan_of(kind, preset)
    whole = trained(kind, plan, range(num_steps))
    trained(kind, plan, range(EVERY), tmp_path)
    assert_equal(trained(kind, plan, range(EVERY, num_steps), tmp_path, resumes=True), whole)


@pytest.mark.parametrize(("kind", "preset"), [("codes", "zero1"), ("factors", "ddp"), ("adam", "ddp")])
def test_who_has_other_ranks_begins_at_zero(kind: str, preset: str, tmp_path: Path) -> None:
    """Without islands, on as many ranks in all: these are not an island's."""
    trained(kind, plan_of(kind, preset), range(EVERY), tmp_path)
    alone = plan_of(kind, preset, mesh={"dp": 4})
    del alone["islands"]
    make_twin, _, _, make_optimizer, _ = KINDS[kind]

    def rank(world: World) -> bool:
        model = models[world.rank]
        with sw.shard(model, alone, optimizer=make_optimizer(model), world=world) as engine:
            engine.resume(tmp_path)
            kept = [entry for entry in inside.entries(engine) if entry.kind.startswith((LOST, UNSENT))]
            return bool(kept) and not any(entry.tensor.any() for entry in kept)

    models = [make_twin().model for _ in range(4)]
    assert run_ranks(4, rank) == [True] * 4


Pair = tuple[int, int]
"""The members of an island."""


def pairs_of(members: Sequence[int]) -> list[Pair]:
    return [(members[first], members[first + 1]) for first in range(0, len(members), 2)]


@sampled
@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize(("step", "point"), [(2, "* verdict"), (4, "exchange of commit"), (5, "* verdict")])
@pytest.mark.parametrize(
    ("kind", "preset"), [("codes", "zero1"), ("codes", "zero3"), ("factors", "ddp"), ("adam", "ddp")]
)
def test_all_begin_at_zero_when_an_island_leaves_or_joins(
    kind: str, preset: str, step: int, point: str, joins: bool, tmp_path: Path
) -> None:
    make_twin, _, of_kind, make_optimizer, num_steps = KINDS[kind]
    fault, data = DiesBefore(1, step, point), of_kind.data(num_steps)
    plan = plan_of(kind, preset, islands={"every": EVERY, "mix": MIX})
    models = [make_twin().model for _ in range(4 + joins)]

    def work(world: World, member: int) -> tuple[dict[int, list[Pair]], Values]:
        model = models[member]
        engine = sw.shard(model, plan, optimizer=make_optimizer(model), world=world)
        fault(engine, member)
        found = {number: pairs_of(members) for number, members in steps_taken(engine, of_kind, data).items()}
        own = {name: engine.get(name) for name, _ in model.named_parameters()}
        engine.close()
        return found, own  # type: ignore[return-value]  # a rank with all has no `None`

    results = run_members(4, work, tmp_path, num_newcomers=int(joins))
    assert fault.is_dead
    took = {number: pairs for found, _ in results.values() for number, pairs in found.items()}
    assert [len(took[number]) for number in (0, num_steps - 1)] == [2, 1 + joins]
    islands = {pair: make_twin() for pair in took[0]}
    common = Common(next(iter(islands.values())))
    before: list[Pair] = []
    for number, x in enumerate(data):
        if took[number] != before:
            first = next((one for pair, one in islands.items() if pair in took[number]), None)
            islands = {pair: islands.get(pair) or copy.deepcopy(first) for pair in took[number]}  # type: ignore[misc]
            for island in islands.values():
                island.forget(MESH["dp"])
        before = took[number]
        for island, share in zip(islands.values(), x.chunk(len(islands)), strict=True):
            island.step(share.chunk(MESH["dp"]))
        if (number + 1) % EVERY == 0:
            common.subtract(islands.values())
            common.step(islands.values())
    for member, (_, own) in results.items():
        island = next(one for pair, one in islands.items() if member in pair)
        for name, param in island.model.named_parameters():
            torch.testing.assert_close(own[name], param.detach(), **ROUNDING)
