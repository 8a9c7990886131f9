"""What programs, prices and messages say of codes: integers in blocks with a scale each."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shardwise.errors import ConfigError, PlacementError
from shardwise.memory.tables import sent_whole
from shardwise.parallel.experts import MoE
from shardwise.plan import load_plan
from shardwise.plan.placement import Codes, SumOfCodes, Wire, mesh_for, table_for
from shardwise.plan.placement.wire import Feedback
from shardwise.program import Action, sent_by_hosts
from shardwise.runtime.codec import codec_for
from tests.models import Transformer

INT8, INT4 = Codes("int8", 256), Codes("int4", 128)
SUMS = st.builds(
    SumOfCodes.cheapest,
    st.sampled_from(["reduce_scatter", "all_reduce"]),
    st.sampled_from([INT8, INT4, Codes("int4", 16)]),
    st.sampled_from([Wire("bf16"), Wire("fp32")]),
    st.integers(1, 4).map(lambda parts: parts * 4096 * 12),
    st.integers(2, 12),
)


def test_bytes_with_scales() -> None:
    assert [INT8.num_bytes(512), INT4.num_bytes(512)] == [512 + 4, 256 + 8]
    assert [str(INT8), str(INT4)] == ["int8/256", "int4/128"]


@pytest.mark.parametrize(("plain", "codes", "ranks"), [("bf16", INT4, 4), ("fp32", INT4, 8), ("bf16", INT8, 2)])
def test_sums_are_made_by_all_ranks_where_that_sends_less(plain: Any, codes: Codes, ranks: int) -> None:
    """`ranks` is the most for which an all-reduce gathers codes."""
    numel = 4096 * 8 * 9 * 5
    ways = [SumOfCodes.cheapest("all_reduce", codes, Wire(plain), numel, count) for count in range(2, 13)]
    assert [way.gathers_codes for way in ways] == [count <= ranks for count in range(2, 13)]
    assert str(ways[-1]) == f"{codes}+{plain}"


@given(SUMS)
def test_the_text_of_an_action_parses_back(way: SumOfCodes) -> None:
    action = Action(way.verb, "h.0", "grad", "node", "fp32", 1234, "reduce", str(way))  # type: ignore[arg-type]
    assert Action.parse(str(action)) == action
    assert SumOfCodes.parse(way.verb, str(way)) == way
    gather = Action("gather", "h as", "param", "as", "bf16", 66048, "gather", "int8/256")
    assert Action.parse(str(gather)) == gather


@given(SUMS, st.integers(1, 3), st.integers(2, 4))
def test_bytes_that_leave_a_host(way: SumOfCodes, num_local: int, num_hosts: int) -> None:
    """As counted rank by rank: what a rank adds goes to each rank that sums, what all get once to each host."""
    num_ranks, numel = num_local * num_hosts, 4096 * 12 * num_local * num_hosts
    mesh = mesh_for(load_plan("zero3"), num_ranks)
    codes, sums = way.bytes_to_each(numel, num_ranks)
    to_ranks, to_hosts = (0, codes) if way.gathers_codes else (codes, sums)
    left = num_local * (num_ranks - num_local) * to_ranks + num_local * (num_hosts - 1) * to_hosts
    sent_bytes = way.sent_bytes(numel, num_ranks)
    action = Action(way.verb, "h", "grad", "dp", "fp32", sent_bytes, "reduce", str(way))  # type: ignore[arg-type]
    assert sent_by_hosts([action], mesh, num_local) == [left] * num_hosts


def test_codes_follow_the_axis_between_hosts() -> None:
    def axes(plan: Any, num_ranks: int = 4) -> tuple[tuple[str, ...] | None, ...]:
        plan = load_plan(plan)
        table = table_for(plan, mesh_for(plan, num_ranks))
        return tuple(codes and codes.axes for codes in (table.param_codes, table.grad_codes))

    two = {"preset": "zero3", "mesh": {"node": 2, "local": 2}}
    wire = {"param": "int8", "grad": "int4"}
    assert axes({"preset": "zero3", "wire": wire}) == (("dp",), ("dp",))
    assert axes({**two, "wire": wire}) == (("node",), ("node",))
    everywhere = {"param": {"dtype": "int8", "axes": "everywhere"}, "grad": {"dtype": "int4", "axes": ["local"]}}
    assert axes({**two, "wire": everywhere}) == (("node", "local"), ("local",))
    plan = load_plan({**two, "mesh": {"node": 1, "local": 4}, "wire": wire})
    mesh = mesh_for(plan, 4)
    assert not table_for(plan, mesh).on(mesh).sends_codes  # nothing is sent along node


@pytest.mark.parametrize("inner", ["ep", "sp"])
def test_sums_of_gradients_are_not_made_codes(inner: str) -> None:
    """Along the inner axis they are summed as they are; parameters are codes of the same values along both."""

    def along(mesh: dict[str, int], **grad: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
        plan = load_plan(
            {"preset": "zero3", "mesh": mesh, "wire": {"param": "int8", "grad": {"dtype": "int4", **grad}}}
        )
        table = table_for(plan, of := mesh_for(plan, 4)).on(of)
        assert table.param_codes is not None
        assert table.grad_codes is not None
        return table.param_codes.axes, table.grad_codes.axes

    assert along({"dp": 2, inner: 2}) == (("dp", inner), ("dp",))
    assert along({"dp": 1, inner: 4}) == ((inner,), (inner,))
    assert along({"dp": 2, inner: 2}, axes="everywhere") == (("dp", inner), ("dp", inner))
    plan = load_plan({"preset": "zero3", "mesh": {"ep": 2, "dp": 2}, "wire": {"grad": "int4"}})
    experts = (
        table_for(plan, of := mesh_for(plan, 4)).without("ep").on(of)
    )  # of which ranks along ep have different ones
    assert experts.grad_codes is not None
    assert experts.grad_codes.axes == ("dp",)


@pytest.mark.parametrize(
    ("wire", "why"),
    [
        ({"grad": "int3"}, "wire.grad.dtype is 'int3'; expected .*int8, int4, fp8 or null"),
        ({"grad": {"dtype": "int4", "block": 100}}, "wire.grad.block is 100; expected 16, 32, .* 4096 or null"),
        ({"grad": {"dtype": "int4", "blok": 128}}, r"unknown key 'blok' in wire.grad. .*block"),
        ({"grad": {"dtype": "int4", "axes": ["nod"]}}, "wire.grad.axes names mesh axis 'nod'"),
        ({"grad": {"dtype": "int4", "axes": ["tp"]}}, "wire.grad.axes names tp, along which ranks hold different"),
        ({"grad": {"dtype": "bf16", "block": 64}}, "wire.grad.block is given, but wire.grad.dtype is bf16"),
        ({"param": {"axes": "everywhere"}}, "wire.param.axes is given, but wire.param.dtype is not"),
        ({"param": {"rest": "bf16"}}, "wire.param.rest is given, but wire.param.dtype is not"),
        ({"grad": {"dtype": "int4", "rest": "fp32"}}, "wire.grad.rest is fp32, which is not narrower than fp32"),
    ],
)
def test_a_format_of_messages_is_refused(wire: Any, why: str) -> None:
    def table() -> None:
        plan = load_plan({"preset": "zero3", "mesh": {"dp": 2, "tp": 2}, "wire": wire})
        table_for(plan, mesh_for(plan, 4))

    with pytest.raises((ConfigError, PlacementError), match=why):
        table()


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        ({"preset": "ddp"}, "with ddp every rank has and updates all parameters"),
        ({"preset": "hsdp", "mesh": {"node": 2, "local": 2}}, "parameters are sent along local only"),
        ({"preset": "zero3", "precision": "fp64"}, "the precision is fp64"),
    ],
)
def test_parameters_that_are_not_sent_as_codes(plan: Any, why: str) -> None:
    plan = load_plan({**plan, "wire": {"param": "int8"}})
    with pytest.raises(PlacementError, match=why):
        table_for(plan, mesh_for(plan, 4))


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        ({"preset": "zero1", "wire": {"frozen": "int8"}}, "every rank has all frozen parameters, so none are sent"),
        (
            {"preset": "zero3", "wire": {"frozen": "bf16"}},
            "wire.frozen is bf16, and frozen parameters are sent as they",
        ),
        (
            {"preset": "hsdp", "mesh": {"node": 2, "local": 2}, "wire": {"frozen": "int8"}},
            "parameters are sent along local only. .* in wire.frozen.axes",
        ),
    ],
)
def test_frozen_parameters_that_are_not_sent_as_codes(plan: Any, why: str) -> None:
    plan = load_plan(plan)
    with pytest.raises(PlacementError, match=why):
        table_for(plan, mesh_for(plan, 4))


def test_what_is_sent_whole() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.gate_proj = nn.Linear(8, 32), nn.Linear(8, 32)

    model = nn.ModuleDict({"base": Transformer(tied=True, num_blocks=1), "moe": MoE(32, 24, num_experts=4, top_k=2)})
    model["mlp"] = Gated()
    whole = sent_whole(model)
    coded = {name for name, param in model.named_parameters() if param not in whole}
    matrices = {f"base.blocks.0.{name}.weight" for name in ("qkv", "out", "up", "down")}
    experts = {name for name, _ in model.named_parameters() if name.startswith("moe.experts")}
    assert coded == matrices | experts | {"mlp.gate.weight", "mlp.gate_proj.weight"}


@pytest.mark.parametrize("wire", [INT8, INT4, Codes("int4", 16)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_error_is_half_a_step(wire: Codes, dtype: torch.dtype) -> None:
    """Of each block's own scale, which is rounded to bf16; values far below and above 1 included. All zeros stay so."""
    generator = torch.Generator().manual_seed(0)
    blocks, largest = 64, {"int8": 127, "int4": 7}[wire.dtype]
    reach = 4 if dtype == torch.float16 else 30
    sizes = 10.0 ** torch.linspace(-reach, reach, blocks)
    values = (torch.randn(blocks, wire.block, generator=generator) * sizes[:, None]).to(dtype)
    values[3] = 0
    values[4] = torch.finfo(torch.float32).tiny / 256
    codec = codec_for(wire)
    codes, decoded = torch.empty(codec.num_codes(values.numel()), dtype=torch.uint8), torch.empty_like(values)
    codec.encode(values.view(-1), codes)
    codec.decode(codes, decoded.view(-1))
    wide = values.float()
    most = wide.abs().amax(1, keepdim=True)
    # half a step; the scale's rounding, which moves the largest by up to 2**-9; the rounding of the result
    allowed = most / largest * 0.5 * (1 + 2**-8) + most * (2**-8 + torch.finfo(dtype).eps)
    allowed[4] = 1e-38  # of numbers that are nearly zero little is left
    assert bool(((decoded.float() - wide).abs() <= allowed).all())
    assert not decoded[3].any()
    twice = torch.zeros_like(wide)
    codec.add(codes, twice.view(-1))
    codec.add(codes, twice.view(-1))
    exact = torch.empty_like(wide)
    codec.decode(codes, exact.view(-1))
    assert torch.equal(twice, 2 * exact)


@pytest.mark.parametrize("wire", [INT8, INT4, Codes("int4", 16), Codes("fp8", 256)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_codes_that_rest_are_made_again_to_the_bit(wire: Codes, dtype: torch.dtype) -> None:
    """Of elements that were decoded, in each dtype, large, small and zero: a checkpoint has these."""
    generator = torch.Generator().manual_seed(0)
    sizes = 10.0 ** torch.linspace(-9, 3, 512)
    values = (torch.randn(512, wire.block, generator=generator) * sizes[:, None]).to(dtype)
    values[3] = 0
    codec = codec_for(replace(wire, rests=True))

    def through(elements: torch.Tensor) -> torch.Tensor:
        codes = torch.empty(codec.num_codes(elements.numel()), dtype=torch.uint8)
        codec.encode(elements.view(-1), codes)
        decoded = torch.empty_like(elements)
        codec.decode(codes, decoded.view(-1))
        return decoded

    once = through(values)
    assert torch.equal(through(once), once)
    most = values.float().abs().amax(1, keepdim=True)
    coarse = {"int8": 2 / 127, "int4": 17 / 16 / 7, "fp8": 1 / 8}[wire.dtype] * most / 2  # half a step
    assert bool(((once.float() - values.float()).abs() <= coarse + most * torch.finfo(dtype).eps + 2.0**-20).all())


FED_BACK = {"feedback": Feedback(0.5, 1024)}
WAYS: list[dict[str, Any]] = [{}, {"rests": True}, FED_BACK]


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("more", WAYS, ids=["sent", "rests", "fed back"])
@pytest.mark.parametrize("wire", [INT8, INT4, Codes("fp8", 256)], ids=str)
def test_what_is_not_finite_is_seen(wire: Codes, more: dict[str, Any], value: float) -> None:
    """In each dtype all of its block, and nothing else; a sum has it too, and nothing is kept of it."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        values = torch.ones(4 * wire.block, dtype=dtype)
        values[wire.block + 5] = value
        losses = torch.full((len(values),), 0.25, dtype=torch.bfloat16)
        codec = codec_for(replace(wire, **more), losses=losses)
        codes, decoded = torch.empty(codec.num_codes(values.numel()), dtype=torch.uint8), torch.empty_like(values)
        codec.encode(values, codes)
        codec.decode(codes, decoded)
        total = torch.ones(4 * wire.block)
        codec.add(codes, total)
        for made in (decoded, total):
            finite = made.view(4, -1).isfinite()
            assert not finite[1].any()
            assert finite[[0, 2, 3]].all()
        assert losses.isfinite().all()
        assert bool(losses.view(4, -1)[1].any()) == (more != FED_BACK)


@pytest.mark.parametrize("wire", [INT8, INT4, Codes("fp8", 256)], ids=str)
def test_the_largest_numbers_stay_finite_or_are_infinite(wire: Codes) -> None:
    """A scale is rounded, so the largest may be decoded to infinity; to nothing in between, and with its sign."""
    values = torch.ones(2 * wire.block)
    values[0], values[1] = torch.finfo(torch.float32).max, -torch.finfo(torch.float32).max
    codec = codec_for(wire)
    codes, decoded = torch.empty(codec.num_codes(values.numel()), dtype=torch.uint8), torch.empty_like(values)
    codec.encode(values, codes)
    codec.decode(codes, decoded)
    assert decoded[0] >= values[0] * (1 - 2**-4)
    assert decoded[1] == -decoded[0]
    assert decoded[2:].isfinite().all()


def test_fp8_is_decoded_as_torch_converts_it_and_int4_lies_in_halves() -> None:
    """All bytes. A nan, which only a block with a scale of nan has, may become a number."""
    every, scale = torch.arange(256, dtype=torch.uint8), torch.tensor([2.0], dtype=torch.bfloat16)
    message, decoded = torch.cat([every, scale.view(torch.uint8)]), torch.empty(256)
    codec_for(Codes("fp8", 256)).decode(message, decoded)
    expected = every.view(torch.float8_e4m3fn).float() * 2
    is_number = ~expected.isnan()
    assert torch.equal(decoded[is_number], expected[is_number])
    assert torch.equal(decoded[is_number].signbit(), expected[is_number].signbit())
    decoded = torch.empty(512)
    codec_for(Codes("int4", 512)).decode(message, decoded)
    assert decoded.view(2, 256).tolist() == [
        [2.0 * (byte % 16 - 8) for byte in range(256)],
        [2.0 * (byte // 16 - 8) for byte in range(256)],
    ]
    made = torch.empty_like(message)
    codec_for(Codes("int4", 512)).encode(decoded.clamp(-14, 14), made)
    assert made[:256].tolist() == [max(byte % 16, 1) + 16 * max(byte // 16, 1) for byte in range(256)]


def test_a_plan_with_codes_is_written_down_and_read_again() -> None:
    plan = load_plan({"preset": "zero2", "wire": {"param": "int8", "grad": {"dtype": "int4", "block": 64}}})
    assert load_plan(json.loads(plan.model_dump_json(exclude_unset=True))) == plan
    assert plan.origin("wire.grad.block") == "argument"
    assert load_plan({"preset": "zero2"}, ("wire.grad=int4",)).wire.grad.dtype == "int4"
