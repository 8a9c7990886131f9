"""What an update asks for, as plain data: who works out which matrix, what travels, what is kept."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.optim.adam import round_stochastically
from shardwise.optim.quantize import SIGNED, UNSIGNED, decode, encode
from shardwise.plan import Plan
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import Span, mesh_for, pack, padded_numel, table_for
from shardwise.program import (
    BLOCK,
    FlatSpec,
    PlacedUpdate,
    States,
    UnitSpec,
    Update,
    matrix_exchanges,
    parse,
    plan_step,
    render,
    state_of,
    straight_trace,
)

Shapes = list[tuple[int, int]]


def units_of(shapes: list[Shapes], preset: str, world_size: int) -> tuple[tuple[UnitSpec, ...], Mesh]:
    plan = Plan(preset=preset)
    mesh = mesh_for(plan, world_size)
    units = []
    for number, own in enumerate(shapes):
        slots = pack((str(index), shape) for index, shape in enumerate(own))
        placed = tuple(PlacedUpdate(slot.span, Update(States(1), matrix=slot.shape)) for slot in slots)  # type: ignore[arg-type]  # pairs
        table = table_for(plan, mesh).on(mesh)
        flat = FlatSpec(f"u{number}", padded_numel(slots, world_size), len(slots), table, mesh, True, placed)
        units.append(UnitSpec(f"u{number}", (flat,)))
    return tuple(units), mesh


shapes_of_a_model = st.lists(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=5), min_size=1, max_size=4
)


@settings(max_examples=60, deadline=None)
@given(shapes_of_a_model, st.sampled_from(["ddp", "zero1", "zero3", "hsdp"]), st.integers(1, 6))
def test_every_piece_that_is_given_is_taken(shapes: list[Shapes], preset: str, world_size: int) -> None:
    units, mesh = units_of(shapes, preset, world_size)
    planned = plan_step(units, straight_trace(units))
    assert parse(render(planned.step)) == planned.step
    for over in planned.matrix_exchanges.values():
        given_bytes, taken_bytes = over.given_bytes.total(), over.taken_bytes.total()
        outside = sum(one.span.numel - over.held(one, one.owner).numel for one in over.matrices)
        assert given_bytes == taken_bytes == 2 * outside
        assert given_bytes == 0 or over.moves
    every = [planned.sent_bytes(1, mesh.coordinate(rank)) for rank in range(world_size)]
    assert max(every) <= planned.sent_bytes()


def test_work_is_shared_and_stays_where_it_lies() -> None:
    """Eight equal matrices on four ranks: two each, and where a rank holds a whole one, nothing is sent."""
    units, _ = units_of([[(64, 64)] * 4, [(64, 64)] * 4], "zero3", 4)
    owned = [
        one.owner for over in matrix_exchanges([unit.flats[0] for unit in units]).values() for one in over.matrices
    ]
    assert owned == [0, 1, 2, 3, 0, 1, 2, 3]
    step = plan_step(units, straight_trace(units)).step
    verbs = [action.verb for block in step for action in block.actions]
    assert "collect" not in verbs
    assert verbs.count("orthogonalize") == 2


def test_a_rank_with_enough_to_do_gives_some_away() -> None:
    units, _ = units_of([[(64, 64)] * 4, [(8, 8)]], "hsdp", 2)
    skewed = FlatSpec("u0", 4 * 64 * 64, 4, units[0].flats[0].table, units[0].flats[0].mesh, True)
    first_half = tuple(
        PlacedUpdate(Span(index * 2048, (index + 1) * 2048), Update(matrix=(64, 32))) for index in range(4)
    )
    (over,) = matrix_exchanges([FlatSpec(**{**vars_of(skewed), "updates": first_half})]).values()
    assert sorted(one.owner for one in over.matrices) == [0, 0, 1, 1]
    assert over.moves


def vars_of(flat: FlatSpec) -> dict[str, object]:
    return {key: getattr(flat, key) for key in ("name", "numel", "num_params", "table", "mesh", "trainable")}


def test_bytes_of_states() -> None:
    span = Span(0, 4096)
    assert States(2).num_bytes(span, "fp32") == 8 * 4096
    assert state_of("bf16", 2, 4096).num_bytes(span, "fp32") == 4 * 4096
    assert state_of("int8", 2, 4096).num_bytes(span, "fp32") == 2 * 4096 + 8 * 16
    assert state_of("int8", 2, 4095).num_bytes(Span(0, 4095), "fp32") == 8 * 4095, "small ones stay wide"
    cut = state_of("int8", 2, 4096).num_bytes(Span(100, 300), "fp32")
    assert cut == 2 * 200 + 8 * 2, "a piece that touches two blocks has two scales"


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 3 * BLOCK), st.integers(0, 3 * BLOCK), st.floats(-8, 8))
def test_8_bit_numbers(seed: int, numel: int, start: int, exponent: float) -> None:
    """Within the step between levels; what was decoded encodes to the same; blocks count from the parameter's first."""
    values = torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 10**exponent
    for levels, given_values in ((SIGNED, values), (UNSIGNED, values.abs())):
        codes, scales = encode(given_values, start, levels)
        back = decode(codes, scales, start, levels)
        assert scales.numel() == -(-(start + numel) // BLOCK) - start // BLOCK
        largest = given_values.abs().max()
        assert (back - given_values).abs().max() <= largest * 0.04
        again, scales_again = encode(back, start, levels)
        assert torch.equal(again, codes)
        assert torch.equal(scales_again, scales)
        lead = min(numel, -start % BLOCK)
        rest = encode(given_values[lead:], start + lead, levels)[0] if lead < numel else codes[:0]
        assert torch.equal(codes[lead:], rest)
    assert len(SIGNED.values) == len(UNSIGNED.values) == 256
    assert torch.equal(decode(*encode(torch.zeros(5), start, SIGNED), start, SIGNED), torch.zeros(5))


def test_stochastic_rounding_is_right_on_average_and_repeats() -> None:
    values = torch.full((200_000,), 1 + 2**-10)  # an eighth of the way from 1 to the next bf16
    rounded = round_stochastically(values, 0, seed=3).float()
    assert set(rounded.unique().tolist()) == {1.0, 1.0078125}
    assert abs(rounded.mean().item() - values[0].item()) < 5e-5
    part = round_stochastically(values[1000:3000], 1000, seed=3).float()
    assert torch.equal(part, rounded[1000:3000]), "a piece rounds as the whole does"
    assert not torch.equal(round_stochastically(values, 0, seed=4).float(), rounded)
    exact = torch.tensor([0.0, 1.5, -2.0, float("inf"), 3e38]).bfloat16().float()
    assert torch.equal(round_stochastically(exact, 7, seed=1).float(), exact)


def test_a_second_moment_in_bf16_decays_although_its_steps_are_tiny() -> None:
    """[Note: narrow states]: rounded to the nearest it would stand still."""
    start = torch.full((4096,), 1.5)
    nearest, stochastic = start.clone(), start.clone()
    for step in range(500):
        nearest = (nearest * 0.999).bfloat16().float()
        stochastic = round_stochastically(stochastic * 0.999, 0, seed=step).float()
    assert nearest.mean().item() == 1.5
    assert abs(stochastic.mean().item() - 1.5 * 0.999**500) < 0.02
