"""The time of a step with other numbers of ranks, from the program of one, beside the program that these would have."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwise.fit.clock import RankProgram, time_ranks
from shardwise.fit.foreseen import count_step, rank_units
from shardwise.fit.hardware import hardware
from shardwise.fit.other_sizes import seconds_by_size, sizes_up_to
from shardwise.plan import Plan
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import table_for

ROWS, WIDTH = 65536, 1024
"""ROWS are those of the global batch."""


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.mean()


def program(plan: Plan, mesh: Mesh) -> RankProgram:
    with torch.device("meta"):
        model, x = Layers(), torch.zeros(ROWS // mesh.world_size, WIDTH)
    (units,) = rank_units(model, plan, mesh, optimizer="adamw", on_cpu=False)
    (counted,) = count_step(model, x, plan, mesh, counts_work=True, on_cpu=False)
    return units.program(plan, counted)


@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("now", [1, 2, 4])
def test_another_size_is_as_its_own_program_would_be(preset: str, now: int) -> None:
    """From any size to any, the first ones with no axis to communicate along: within what small kernels cost."""
    plan, described, sizes = Plan(preset=preset), hardware("h100-sxm").with_ranks(1), (1, 2, 4, 8)
    mesh = Mesh(("dp",), (now,))
    found = seconds_by_size(program(plan, mesh), described, mesh, table_for(plan, mesh), sizes, num_micro_batches=1)
    assert list(found) == list(sizes)
    for size in sizes:
        there = Mesh(("dp",), (size,))
        expected = time_ranks([program(plan, there)], described, there, num_micro_batches=1).step_seconds
        assert found[size] == pytest.approx(expected, rel=1e-9 if size == now else 0.05), size
    assert found[8] > found[4] or found[8] < found[4] < found[2]


def test_ranks_that_are_left_on_a_processor_keep_their_cores_and_get_no_others() -> None:
    """Each computes as fast as before, with twice the rows. What they share with others is theirs alone."""
    shared = hardware("h100-sxm").with_ranks(4).model_copy(update={"ranks_share_device": True})
    plan, mesh, half = Plan(preset="ddp"), Mesh(("dp",), (4,)), Mesh(("dp",), (2,))
    found = seconds_by_size(program(plan, mesh), shared, mesh, table_for(plan, mesh), (2, 4), num_micro_batches=1)
    alone = shared.model_copy(update={"ranks_per_node": 2})
    expected = time_ranks([program(plan, half)], alone, half, num_micro_batches=1).step_seconds
    assert found[2] == pytest.approx(expected, rel=0.05)
    assert found[2] > 1.5 * found[4]


def test_ranks_that_are_left_compute_faster_where_there_were_more_than_cores() -> None:
    """Four ranks on two cores have half of one each, and two have one each; more threads they do not start."""
    four = hardware("h100-sxm").with_ranks(4).model_copy(update={"ranks_share_device": True})
    for cores, gains in ((2, {4: 1, 2: 2, 1: 2}), (4, {2: 1, 1: 1}), (6, {3: 1, 1: 1}), (None, {2: 1})):
        on = four.model_copy(update={"cores": cores})
        for num_left, gain in gains.items():
            left = on.with_ranks_left(num_left)
            assert left.ranks_per_node == num_left
            assert left.peak("bf16") == pytest.approx(gain * four.peak("bf16"))
            assert left.memory_bytes_per_second == pytest.approx(gain * four.memory_bytes_per_second)


def test_whole_replica_groups_only_and_nothing_where_parameters_have_other_tables() -> None:
    plan, described, mesh = Plan(preset="zero2"), hardware("h100-sxm").with_ranks(4), Mesh(("dp",), (4,))
    whole = program(plan, mesh)
    other = table_for(Plan(preset="zero3"), mesh)
    assert seconds_by_size(whole, described, mesh, other, (2, 4), num_micro_batches=1) == {}
    assert sizes_up_to(10, {"dp": 4}) == [1, 2, 3, 4, 5, 6, 8, 10]
    assert sizes_up_to(11, {"dp": 2, "tp": 2}) == [2, 4, 6, 8, 10]
    assert len(sizes_up_to(100_000, {"dp": 2})) < 45
