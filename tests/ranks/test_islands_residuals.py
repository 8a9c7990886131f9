"""What ranks have not sent yet is their island's own: against one process for each island that rounds as the ranks do,
and outer steps between these."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.checkpoint.index import LOST, UNSENT
from shardwise.comm import World
from shardwise.testing import run_ranks
from tests import inside
from tests.ranks.test_lost_residuals import KINDS, ROUNDING, Twin
from tests.thorough import sampled

Tensor = torch.Tensor
Values = dict[str, Tensor]
MESH = {"island": 2, "dp": 2}
EVERY, OVERLAP, MIX = 4, 1, 0.25
CASES = [
    (kind, preset) for kind in KINDS for preset in (("ddp", "zero1", "zero2", "zero3") if kind == "codes" else ("ddp",))
]


def plan_of(kind: str, preset: str, **more: Any) -> dict[str, Any]:
    return {"preset": preset, "mesh": MESH, "islands": {"every": EVERY, "overlap": OVERLAP, "mix": MIX}, **KINDS[kind][1], **more}


def trained_apart(kind: str) -> tuple[Values, list[Twin]]:
    """The common model, and the islands."""
    make_twin, _, of_kind, _, num_steps = KINDS[kind]
    islands = [make_twin(), make_twin()]
    common = {name: param.detach().clone() for name, param in islands[0].model.named_parameters()}
    outer = torch.optim.SGD(common.values(), lr=0.7, momentum=0.9, nesterov=True)
    for island in islands:
        island.forget(MESH["dp"])
    for step, x in enumerate(of_kind.data(num_steps), 1):
        for island, share in zip(islands, x.chunk(len(islands)), strict=True):
            island.step(share.chunk(MESH["dp"]))
        if step % EVERY == 0:
            for name, anchor in common.items():
                own = [island.model.get_parameter(name).detach() for island in islands]
                anchor.grad = sum(anchor - one for one in own) / len(own)
        elif step % EVERY == OVERLAP and step > EVERY:
            outer.step()
            for island in islands:
                for name, anchor in common.items():
                    island.model.get_parameter(name).data.lerp_(anchor, 1 - MIX)
    return common, islands


def trained(
    kind: str, plan: dict[str, Any], steps: range, folder: Path | None = None, *, resumes: bool = False
) -> list[tuple[Values, Values]]:
    """What islands have in common, and what each rank's island has. With a `folder` they resume from it, or save."""
    make_twin, _, of_kind, make_optimizer, _ = KINDS[kind]
    models = [copy.deepcopy(make_twin().model) for _ in range(4)]

    def rank(world: World) -> tuple[Values, Values]:
        model = models[world.rank]
        with sw.shard(model, plan, optimizer=make_optimizer(model), world=world) as engine:
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

    return run_ranks(4, rank)


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
