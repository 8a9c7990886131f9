"""Outer steps of islands: when they come, what they do and send, and which plans have them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from shardwise.errors import ConfigError, PlacementError, ProgramError
from shardwise.plan import Islands, Plan, WireFormat, load_plan
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import Place, Table, mesh_for, table_for
from shardwise.plan.placement.fragment import fragments_of
from shardwise.plan.placement.islands import check_islands
from shardwise.program import Action, FlatSpec, UnitSpec, plan_step, render, straight_trace
from shardwise.program.check import check_outer
from shardwise.program.outer_step import OuterStep, build_outer, in_words
from shardwise.program.verification import num_copies

MESH = {"island": 2, "dp": 2}


def plan_of(**islands: Any) -> Plan:
    return Plan(preset="zero1", mesh=MESH, precision="fp32", islands=Islands(**islands))


def units(names: str, plan: Plan, *, frozen: str = "") -> tuple[UnitSpec, ...]:
    mesh = mesh_for(plan, 4)
    table = table_for(plan, mesh).on(mesh)
    return tuple(UnitSpec(name, (FlatSpec(name, 128, 1, table, mesh, name not in frozen),)) for name in names)


def events(settings: Islands, num_steps: int) -> list[str]:
    """What happens after each step: `b1` where fragment 1 begins, `e1` where it ends."""
    fragments = fragments_of(settings)
    return [
        "".join(
            [f"e{one.number}" for one in fragments if one.ends_after(step)]
            + [f"b{one.number}" for one in fragments if one.begins_after(step)]
        )
        for step in range(1, num_steps + 1)
    ]


def test_a_fragment_begins_where_it_did_one_period_before() -> None:
    assert events(Islands(every=3), 6) == ["", "", "e0b0", "", "", "e0b0"]
    assert events(Islands(every=6, fragments=2, overlap=2), 8) == ["", "e1", "b0", "", "e0", "b1", "", "e1"]
    assert events(Islands(every=3, fragments=3), 3) == ["e0b0", "e1b1", "e2b2"]


def test_units_are_dealt_out_in_turn() -> None:
    fragments = fragments_of(Islands(every=6, fragments=3))
    assert [one.some_of("abcdefg") for one in fragments] == [["a", "d", "g"], ["b", "e"], ["c", "f"]]
    assert fragments[1].in_words() == "after steps 4, 10, ..."
    (overlapping,) = fragments_of(Islands(every=6, overlap=2))
    assert overlapping.in_words() == "after steps 6, 12, ..., takes effect 2 later"


def test_only_islands_vary_and_what_they_have_in_common_does_not() -> None:
    plan = plan_of()
    table = table_for(plan, Mesh.of(MESH, 4))
    assert str(table.optim) == "shard(dp) varying(island) fp32"
    assert table.outer is not None
    assert str(table.outer.place) == "shard(dp) fp32 host"
    assert (table.axes, table.fresh.partial) == (("dp",), ("dp",))
    alone = Mesh.of({"island": 1, "dp": 4}, 4)
    plain = table_for(Plan(preset="zero1", precision="fp32"), Mesh.of({"dp": 4}, 4))
    assert replace(table_for(plan, alone).on(alone), outer=None) == plain, "but for its outer steps"
    with pytest.raises(PlacementError, match="varies with everything"):
        Table(("dp",), Place(varying=("island",)), Place(), Place(), Place())


def steps_of(plan: Plan, names: str = "abc", frozen: str = "") -> Sequence[OuterStep]:
    return build_outer(units(names, plan, frozen=frozen))


def test_the_program_of_an_outer_step() -> None:
    """Nothing is computed meanwhile, so two outer gradients are there at a time; nothing frozen is sent."""
    (step,) = steps_of(plan_of(every=4), frozen="b")
    assert [render((block,)) for block in (step.begin, step.settle)] == [
        "after step\n"
        "    subtract    a  outer\n"
        "    all_reduce  a  outer   island  fp32  256 B  @reduce\n"
        "    subtract    c  outer\n"
        "    all_reduce  c  outer   island  fp32  256 B  @reduce\n"
        "    wait        a  outer\n"
        "    update      a  anchor\n"
        "    wait        c  outer\n"
        "    update      c  anchor\n",
        "after step\n",
    ]
    assert [str(action) for action in step.end.actions] == [
        "mix a master",
        "mix c master",
        "gather a updated dp fp32 256 B @gather",
        "gather c updated dp fp32 256 B @gather",
        "wait a param",
        "wait c param",
    ]
    assert in_words([step]) == [
        "after steps 4, 8, ...",
        "a rank sends 512 B to other islands in 4 steps, 128 B per step",
    ]


def test_a_single_island_sends_nothing() -> None:
    plan = Plan(preset="zero1", mesh={"island": 1, "dp": 4}, islands=Islands(every=4))
    (step,) = steps_of(plan, "a")
    assert [str(action) for action in (*step.begin.actions, *step.settle.actions)] == [
        "subtract a outer",
        "update a anchor",
    ]
    assert in_words([step])[-1] == "a rank sends 0 B to other islands in 4 steps, 0 B per step"


def test_with_an_overlap_a_whole_fragment_is_on_its_way() -> None:
    first, second = steps_of(plan_of(every=4, fragments=2, overlap=1, wire=WireFormat(dtype="bf16")))
    assert [str(action) for action in first.begin.actions if action.communicates] == [
        f"all_reduce {name} outer island bf16 128 B @reduce" for name in "ac"
    ]
    assert [str(action) for action in first.settle.actions] == [
        "wait a outer",
        "update a anchor",
        "wait c outer",
        "update c anchor",
    ]
    assert (first.sent_bytes, second.sent_bytes) == (256, 128)
    assert in_words([first, second])[0] == "fragment 0 (a, c): after steps 2, 6, ..., takes effect 1 later"


@pytest.mark.parametrize(
    ("left_out", "says"),
    [
        ("subtract a", "its next step is 'subtract a outer'"),
        ("all_reduce a", "nothing of it is on its way"),
        ("wait a outer", "still on its way"),
        ("update a", "outer gradient is left"),
        ("gather a", "nothing of it is on its way"),
    ],
)
def test_an_outer_step_without_one_of_its_actions_is_refused(left_out: str, says: str) -> None:
    plan = plan_of()
    (step,) = steps_of(plan)
    actions = [action for block in step.program for action in block.actions]
    check_outer(actions, units("abc", plan))
    left = [action for action in actions if not str(action).startswith(left_out)]
    assert len(left) == len(actions) - 1
    with pytest.raises(ProgramError, match=says):
        check_outer(left, units("abc", plan))


def test_outer_gradients_as_codes() -> None:
    """With two islands each rank gets the other's codes; they are never made codes again."""
    wire = load_plan({"preset": "zero1", "islands": {"wire": {"dtype": "int8", "block": 16}}}).islands.wire
    (step,) = steps_of(plan_of(every=4, wire=wire))
    sent = 64 + 64 // 16 * 2
    assert f"all_reduce a outer island fp32 as int8/16 {sent} B @reduce" in [str(one) for one in step.begin.actions]
    assert step.sent_bytes == 3 * sent
    short, spelt_out = (load_plan({"preset": "zero1", "islands": {"wire": one}}) for one in ("int4", {"dtype": "int4"}))
    assert short == spelt_out


def test_an_action_of_a_buffer_without_an_anchor_is_refused() -> None:
    plan = Plan(preset="zero1", mesh={"dp": 4}, precision="fp32")
    assert not build_outer(units("a", plan))
    with pytest.raises(ProgramError, match="a has no anchor"):
        check_outer([Action("subtract", "a", "outer")], units("a", plan))


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("tier", ["host", "device"])
def test_memory_and_bytes_of_islands(tier: str, overlap: int) -> None:
    """128 elements in each buffer, of which a rank updates 64: 256 bytes. With an overlap all three outer gradients,
    and as much for messages, are there while the next step computes."""
    plain_plan = Plan(preset="zero1", precision="fp32", mesh={"dp": 2})
    mesh = mesh_for(plain_plan, 2)
    table = table_for(plain_plan, mesh)
    plain_units = tuple(UnitSpec(name, (FlatSpec(name, 128, 1, table, mesh),)) for name in "abc")
    own_units = units("abc", plan_of(every=4, tier=tier, overlap=overlap))
    own, plain = (plan_step(one, straight_trace(one)) for one in (own_units, plain_units))
    held, alone, in_common = own.footprint(), plain.footprint(), 3 * 2 * 256
    assert (held.param, held.grad) == (alone.param, alone.grad)
    assert held.optim - alone.optim == (in_common if tier == "device" else 0)
    assert (held.host.optim if held.host is not None else 0) == (in_common if tier == "host" else 0)
    assert held.working - alone.working == (3 * 2 * 256 if overlap else 0)
    assert own.sent_by_axis() == plain.sent_by_axis()


def test_copies_are_compared_within_an_island() -> None:
    (unit,) = units("a", Plan(preset="ddp", mesh=MESH, precision="fp32"))
    assert num_copies(unit.flats[0], "param") == 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"mesh": {"dp": 4}}, "Add an axis to it: mesh: {island: 2, ...}, or leave out islands"),
        ({"islands": {"every": 5, "fragments": 2}}, "every is 5 steps and islands.fragments 2, which does not divide"),
        ({"islands": {"every": 4, "fragments": 2, "overlap": 2}}, "Make overlap 1 or less"),
        ({"preset": "infinity"}, "Rows on a disk are not supported with islands"),
        ({"offload": {"optim": 1.0, "optim_disk": 0.5}}, "Rows on a disk are not supported with islands"),
        ({"preset": "zero3", "offload": {"param": 1.0, "param_disk": 0.5}}, "Rows on a disk are not supported"),
        ({"budget": {"device": "1GB", "host": "1GB", "disk": "/tmp/rows"}}, "Rows on a disk are not supported"),
        ({"survive": "buddy"}, "Leave out survive: other islands go on"),
        ({"preset": "ddp", "powersgd": 2, "mesh": {"island": 1, "a": 2, "b": 2}}, "as factors along a single axis"),
        ({"preset": "zero1", "powersgd": 2}, "powersgd.rank is 2, and grad is partial"),
        ({"islands": {"wire": "fp64"}}, "islands.wire is fp64, and master weights are fp32"),
        ({"islands": {"wire": "int8"}, "precision": "fp64"}, "islands.wire is int8/256, and master weights are fp64"),
        ({"islands": {"wire": {"dtype": "int8", "axes": ["dp"]}}}, "outer gradients are sent along one"),
        ({"islands": {"wire": {"dtype": "bf16", "block": 64}}}, "which is for int8 and int4"),
    ],
)
def test_what_islands_exclude(change: dict[str, Any], says: str) -> None:
    plan = load_plan({"preset": "zero1", "mesh": MESH, "precision": "fp32", "islands": {"every": 4}} | change)
    with pytest.raises((ConfigError, PlacementError)) as raised:
        check_islands(plan, mesh_for(plan, 4))
    assert says in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"mix": 1.0}, "islands.mix is 1.0; expected a number of at least 0 and below 1"),
        ({"optimizer": {"lr": 0}}, "islands.optimizer.lr"),
        ({"tier": "disk"}, "islands.tier"),
        ({"sync_every": 5}, "sync_every"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_plan({"preset": "zero1", "islands": settings})
    assert says in str(raised.value)


def test_a_plan_with_islands_reads_back() -> None:
    plan = load_plan({"preset": "zero1", "mesh": MESH, "islands": {"every": 12, "optimizer": {"lr": 0.5}}})
    assert plan.islands.optimizer.lr == 0.5
    assert Plan.model_validate_json(plan.model_dump_json()) == plan
