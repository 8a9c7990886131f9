"""Which gradient buffers are kept from step to step; see [Note: gradient buffers] in `memory/grad_buffer.py`."""

from __future__ import annotations

import pytest
from torch import nn

from shardwise.memory import choose_units, tables_for, unit_specs
from shardwise.plan import load_plan
from shardwise.plan.placement import WIDTH, mesh_for
from shardwise.program import FlatSpec

NUM_LAYERS = 7


def flats(preset: str, precision: str, *, on_cpu: bool = True) -> list[FlatSpec]:
    """The flat buffers of layers of unequal sizes, for two ranks."""
    model = nn.Sequential(*(nn.Linear(8 + 3 * index, 11 + 3 * index) for index in range(NUM_LAYERS)))
    plan = load_plan(preset, [f"precision={precision}"])
    mesh = mesh_for(plan, 2)
    specs = unit_specs(choose_units(model, plan), tables_for(model, plan, mesh), mesh, on_cpu=on_cpu)
    return [flat for spec in specs for flat in spec.flats]


def kept(every: list[FlatSpec]) -> int:
    return sum(flat.grad_bytes for flat in every if flat.keeps_grad_buffer)


@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero2"])
def test_all_buffers_are_kept_where_gradients_have_one_dtype(preset: str) -> None:
    assert all(flat.keeps_grad_buffer for flat in flats(preset, "fp32"))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero2"])
def test_what_is_kept_of_wider_gradients_is_no_more_than_is_sent_of_them(preset: str, precision: str) -> None:
    every = flats(preset, precision)
    sent = sum(flat.table.grad_wire.num_bytes(flat.grad_bytes // WIDTH[flat.table.grad.dtype]) for flat in every)
    largest = max(flat.grad_bytes for flat in every)
    assert sent - largest < kept(every) <= sent < sum(flat.grad_bytes for flat in every)


def test_nothing_is_kept_where_parameters_come_and_go_nor_on_devices() -> None:
    assert kept(flats("zero3", "fp32")) == kept(flats("zero3", "bf16")) == 0
    assert kept(flats("ddp", "fp32", on_cpu=False)) == 0
