"""On a mesh with a model axis, ranks with the same part of the model agree and communicate only among themselves.

The tests add a model axis, `parts`. Two unrelated models train side by side, one at each place of this axis, each as if
it were alone.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.checkpoint.content import kept_span, written_span
from shardwise.comm import DataGroup
from shardwise.errors import ModelError
from shardwise.memory import choose_units, tables_for
from shardwise.memory.unit import unit_specs
from shardwise.plan.mesh import MODEL_AXES, Mesh
from shardwise.plan.placement import PRESETS, Slot
from shardwise.sharded import sharding
from shardwise.testing import run_ranks
from tests import inside
from tests.thorough import sampled, thorough_only

MESH = Mesh(("dp", "parts"), (2, 2))
ONE_AXIS = sorted(name for name, one in PRESETS.items() if len(one.axes) == 1 and one.optim.tier != "disk")
NUM_STEPS = 3


@pytest.fixture(autouse=True)
def _parts_is_a_model_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODEL_AXES, "parts", "ranks with other parts of a model")


def model_at(place: int) -> nn.Module:
    """Models that differ in depth, width and kind, with different initial values on every rank."""
    if place:
        return nn.Sequential(nn.Linear(8, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 24), nn.Linear(24, 8))
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def models() -> dict[tuple[int, int], nn.Module]:
    """One model per rank, by its places on both axes. Those of a group differ, and must get the first one's values."""
    made = {}
    for data_place, model_place in itertools.product(range(2), repeat=2):
        torch.manual_seed(10 * data_place + model_place)
        made[data_place, model_place] = model_at(model_place)
    return made


def trained(world: sw.World, preset: str, model: nn.Module, data_place: int) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.randn(NUM_STEPS, 2, 6, 8, generator=torch.Generator().manual_seed(7))
    with sw.shard(model, {"preset": preset, "units": ["?"]}, optimizer=optimizer, world=world) as engine:
        losses = []
        for batch in data[:, data_place]:
            loss = engine(batch).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        entries = [entry for entry in inside.entries(engine) if entry.kind == "buffer"]
        params = {name: value.clone() for name, value in engine.state_dict().items()}
        writes = sorted(entry.name for entry in entries if entry.written.numel)
        return {"losses": losses, "params": params, "buffers": buffers, "writes": writes}


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize("shares_memory", [False, True])
@pytest.mark.parametrize("preset", ONE_AXIS)
@sampled
def test_two_models_train_side_by_side_as_if_alone(
    preset: str, shares_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = []
    for model_place in range(2):
        own = models()
        alone.append(
            run_ranks(
                2,
                lambda world: trained(world, preset, own[world.rank, model_place], world.rank),  # noqa: B023
                shares_memory=shares_memory,
            )
        )
    monkeypatch.setattr(sharding, "mesh_for", lambda *_: MESH)
    every = models()
    together = run_ranks(
        4,
        lambda world: trained(world, preset, every[divmod(world.rank, 2)], world.rank // 2),
        shares_memory=shares_memory,
    )
    for rank, run in enumerate(together):
        twin = alone[rank % 2][rank // 2]
        assert run["losses"] == twin["losses"]
        assert run["writes"] == twin["writes"]
        for kind in ("params", "buffers"):
            assert run[kind].keys() == twin[kind].keys()
            for name, value in twin[kind].items():
                assert torch.equal(run[kind][name], value), name


def test_models_are_compared_within_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models may differ between places of the model axis. A difference within a place is an error."""
    monkeypatch.setattr(sharding, "mesh_for", lambda *_: MESH)
    widths = [4, 6, 4, 7]
    with pytest.raises(ModelError, match=r"rank 1 has weight \[6, 4\] torch.float32 where rank 3 has weight \[7, 4\]"):
        run_ranks(4, lambda world: sw.shard(nn.Linear(4, widths[world.rank]), "zero3", world=world))


def test_a_group_exchanges_and_broadcasts_among_its_own() -> None:
    def rank(world: sw.World) -> tuple[list[bytes], float, bool, int]:
        group = DataGroup(world, MESH)
        told = torch.full((3,), float(world.rank))
        group.broadcast(told, "told")
        return group.exchange(str(world.rank).encode()), told[0].item(), group.is_first, group.rank_at(1)

    assert run_ranks(4, rank) == [
        ([b"0", b"2"], 0.0, True, 2),
        ([b"1", b"3"], 1.0, True, 3),
        ([b"0", b"2"], 0.0, False, 2),
        ([b"1", b"3"], 1.0, False, 3),
    ]


def test_buffers_are_padded_for_the_ranks_that_share_them_and_each_element_is_written_once_for_each_part() -> None:
    model = nn.Linear(5, 5)
    plan = sw.Plan(preset="zero1")
    [choice] = choose_units(model, plan)
    (spec,) = unit_specs([choice], tables_for(model, plan, MESH), MESH)
    [flat] = spec.flats
    assert flat.numel == 64  # 25 and 5 elements, each aligned to 16: 48 would do for one rank, 32 divides for two
    assert flat.table.axes == ("dp",)
    slot = Slot("weight", (5, 5), 0)
    for place in range(2):
        spans = [written_span(flat, slot, {"dp": dp, "parts": place}) for dp in range(2)]
        kept = [kept_span(flat, slot, {"dp": dp, "parts": place}) for dp in range(2)]
        assert sorted(index for span in spans for index in range(span.start, span.stop)) == list(range(25))
        assert spans == kept
