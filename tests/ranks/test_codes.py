"""Parameters and gradients sent as codes: integers in blocks with a scale each. The twin rounds tensor by tensor."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import split_models
import torch
from torch import nn
from twins import adamw, assert_same, batches, rounded_by, sharded_run, train_steps, work_on_ranks
from wires import assert_same_but_for_flips, assert_trains_like, is_coded, learnt, race, resuming, saving_to, twin_run

import shardwise as sw
from shardwise.errors import PlacementError
from shardwise.memory import choose_units, tables_for, unit_specs
from shardwise.plan.placement import Codes, mesh_for, table_for
from shardwise.runtime.codec import codec_for
from shardwise.testing import run_ranks
from tests import inside
from tests.models import Transformer
from tests.thorough import sampled, thorough_only

Tensor = torch.Tensor
ROWS = 12
INT8, INT4 = {"dtype": "int8", "block": 32}, {"dtype": "int4", "block": 16}
FP8 = {"dtype": "fp8", "block": 32}
EVERYWHERE = {"axes": "everywhere"}
REST = {"rest": "bf16"}
TWO = {"node": 2, "local": 2}

CASES = [
    ("ddp", 2, None, {"grad": INT4}),
    ("ddp", 5, None, {"grad": INT8}),
    ("zero1", 2, None, {"param": INT8, "grad": INT4}),
    ("zero2", 3, None, {"param": INT8, "grad": INT4}),
    ("zero3", 4, None, {"param": INT8, "grad": INT4}),
    ("zero3-kept", 2, None, {"param": INT8, "grad": INT8}),
    ("hsdp", 4, TWO, {"grad": INT4}),
    ("hpz", 4, TWO, {"param": INT8, "grad": INT4}),
    ("zero3", 4, TWO, {"param": INT8, "grad": INT4}),
    ("zero1", 4, TWO, {"param": INT8, "grad": INT4}),
    ("hpz", 4, TWO, {"param": INT8 | EVERYWHERE, "grad": INT4}),
    ("offload", 2, None, {"param": INT8, "grad": INT4}),
    ("zero3", 3, None, {"param": FP8}),
    ("hpz", 4, TWO, {"param": FP8 | EVERYWHERE, "grad": INT8}),
    ("zero1", 2, None, {"param": FP8, "grad": FP8}),
    ("zero3", 2, None, {"param": INT8 | REST, "grad": INT4 | REST}),
    ("zero1", 4, TWO, {"param": INT8 | REST, "grad": INT4}),
]
IDS = [
    f"{preset}-{num_ranks}{'x2' if mesh else ''}-{place}" for place, (preset, num_ranks, mesh, _) in enumerate(CASES)
]


@pytest.fixture(scope="module")
def model() -> Transformer:
    torch.manual_seed(0)
    return Transformer()


@sampled
@pytest.mark.parametrize("shares_memory", [True, False], ids=["shared", "sent"])
@pytest.mark.parametrize(("preset", "num_ranks", "mesh", "wire"), CASES, ids=IDS)
def test_trains_like_a_twin_that_rounds_every_tensor(
    preset: str, num_ranks: int, mesh: Any, wire: dict[str, Any], model: Transformer, *, shares_memory: bool
) -> None:
    """And sends and holds what its program says."""
    data = batches(3, rows=20 if num_ranks == 5 else ROWS)
    race(model, data, preset, num_ranks, mesh, wire, shares_memory=shares_memory)


def accumulating(engine: sw.Engine, _: torch.optim.Optimizer | None, batch: Any) -> Tensor:
    """A step of as many micro-batches as the plan says."""
    number = engine.plan.accumulate
    losses = []
    for micro_batch in zip(*(part.chunk(number) for part in batch), strict=True):
        loss = engine(*micro_batch)
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return torch.stack(losses).mean()


def test_a_parameter_in_fp64_is_refused_with_the_cure(model: Transformer) -> None:
    """Of a plan that names no precision each parameter keeps its own."""
    mixed = copy.deepcopy(model)
    mixed.unused = nn.Parameter(torch.ones(4, 4, dtype=torch.float64))
    data, wire = batches(1, rows=4), {"grad": "int8"}
    with pytest.raises(PlacementError, match=r"that of some parameters\. Set precision: fp32"):
        sharded_run(mixed, data, "zero3", 2, None, wire=wire)
    found = sharded_run(mixed, data, "zero3", 2, None, wire=wire, precision="fp32")
    assert found.losses == sharded_run(model, data, "zero3", 2, None, wire=wire).losses


@sampled
@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero2", "zero3"])
def test_accumulates(preset: str, model: Transformer) -> None:
    """Where gradients wait whole they are made codes once in a step, elsewhere once in a micro-batch."""
    wire, data = {"grad": INT4}, batches(3, rows=ROWS)
    run = sharded_run(model, data, preset, 2, None, step=accumulating, wire=wire, accumulate=2)
    assert_same(run, twin_run(model, data, 2, wire, accumulate=2, waits_whole=preset == "zero1"))


@sampled
@pytest.mark.parametrize(
    ("preset", "mesh", "wire"),
    [
        ("zero1", None, {"param": INT8, "grad": INT4}),
        ("zero3", None, {"param": INT8, "grad": INT4}),
        ("zero3", None, {"frozen": INT4}),
        ("hpz", TWO, {"frozen": INT4 | EVERYWHERE, "param": INT8 | EVERYWHERE}),
        ("zero3-offload", None, {"frozen": FP8, "grad": INT4}),
    ],
)
def test_tied_and_frozen(preset: str, mesh: Any, wire: dict[str, Any]) -> None:
    """A head that is tied to the embedding is sent as it is; frozen matrices are codes where they are gathered, also if
    they alone are."""
    model = Transformer(tied=True)
    for name, param in model.named_parameters():
        param.requires_grad_("blocks.1" not in name)
    data, num_ranks = batches(3, rows=ROWS), 4 if mesh else 2
    twin = twin_run(model, data, num_ranks, wire, num_near=2 if mesh else 1, sends_frozen=preset != "zero1")
    assert_trains_like(twin, model, data, preset, num_ranks, mesh, kinds=("param", "grad"), wire=wire)


def test_frozen_codes_follow_what_is_frozen(model: Transformer) -> None:
    """Parameters that are unfrozen are sent as they are from the next step on, and the others still as codes."""

    def codes(engine: sw.Engine) -> dict[str, Any]:
        planned = inside.program(engine)
        return {action.flat: action.codes for block in planned.micro_batch for action in block.actions if action.codes}

    def work(engine: sw.Engine) -> tuple[set[str], set[str]]:
        train_steps(engine, range(2))
        before = set(codes(engine))
        engine.module.blocks[0].requires_grad_(True)
        train_steps(engine, range(2))
        return before, set(codes(engine))

    def frozen() -> Transformer:
        made = copy.deepcopy(model)
        for block in made.blocks:
            block.requires_grad_(False)
        return made

    for before, after in work_on_ranks(2, work, {"preset": "zero3", "wire": {"frozen": "int8"}}, frozen):
        assert before == {f"blocks.{place}:frozen" for place in range(3)}
        assert after == before - {"blocks.0:frozen"}


@pytest.mark.parametrize("dtype", ["int8", "int4", "fp8"])
def test_codes_do_not_depend_on_the_mesh(dtype: str, model: Transformer) -> None:
    """Of 1 to 4 ranks the same bytes, parameter by parameter."""
    wire = {"param": {"dtype": dtype, "block": 64}, "grad": {"dtype": dtype, "block": 32}}
    found = []
    for num_ranks in (1, 2, 3, 4):
        plan = sw.Plan(preset="zero3", mesh={"dp": num_ranks}, wire=wire)
        mesh = mesh_for(plan, num_ranks)
        specs = unit_specs(choose_units(model, plan), tables_for(model, plan, mesh), mesh)
        whole = table_for(plan, mesh)
        codec = codec_for(Codes(dtype, 64, ("dp",)))
        coded = {}
        for choice in choose_units(model, plan):
            flat = next((flat for spec in specs for flat in spec.flats if flat.name == choice.name), None)
            if flat is None:  # all of it is sent whole
                continue
            named = [(name, param) for name, param in choice.params.items() if is_coded(name, param)]
            slots = choice.slots(named, whole.align)
            memory = torch.zeros(flat.numel)
            for slot, (_, param) in zip(slots, named, strict=True):
                memory[slot.start : slot.span.stop] = param.detach().flatten()
            pieces = []
            for part in memory.chunk(num_ranks):
                codes = torch.empty(codec.num_codes(part.numel()), dtype=torch.uint8)
                codec.encode(part, codes)
                elements = torch.empty_like(part)
                codec.decode(codes, elements)
                pieces.append(elements)
            for slot, (name, _) in zip(slots, named, strict=True):
                coded[name] = torch.cat(pieces)[slot.start : slot.span.stop]
        found.append(coded)
    rounds = rounded_by({"dtype": dtype, "block": 64})
    expected = {name: rounds(param).flatten() for name, param in model.named_parameters() if is_coded(name, param)}
    for coded in found:
        assert coded.keys() == expected.keys()
        assert all(torch.equal(coded[name], expected[name]) for name in expected)


@sampled
@pytest.mark.parametrize(
    ("preset", "plan"),
    [
        ("zero3", {"activations": "recompute"}),
        ("zero3", {"resident_below": 2000}),
        ("zero3-offload", {}),
        ("zero2", {"offload": {"optim": 0.5}}),
        (
            "zero3",
            {"rules": {"heads": {"params": ["head.*"], "rows": {"param": {"shard": []}, "held": {"shard": []}}}}},
        ),
        ("zero3", {"prefetch_bytes": 0}),
    ],
    ids=["recomputed", "small-ones-whole", "states-on-host", "some-on-host", "ruled", "not-ahead"],
)
def test_with_other_settings(preset: str, plan: dict[str, Any], model: Transformer) -> None:
    wire, data = {"param": INT8, "grad": INT4}, batches(3, rows=ROWS)
    same = assert_same_but_for_flips if preset == "zero3-offload" or "offload" in plan else assert_same
    same(sharded_run(model, data, preset, 2, None, wire=wire, **plan), twin_run(model, data, 2, wire))


def test_presets_train_alike(model: Transformer) -> None:
    """What ranks add is rounded on each alike, and summed in their order, whoever sums it: to the bit."""
    data, wire = batches(2, rows=ROWS), {"grad": INT4}
    first, *others = (sharded_run(model, data, preset, 3, None, wire=wire) for preset in ("zero3", "zero1", "ddp"))
    for run in others:
        assert run.losses == first.losses
        assert all(torch.equal(run.params[name], param) for name, param in first.params.items())


@thorough_only("several engines each")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("preset", ["zero1", "hpz", "zero3"])
def test_in_narrow_precision(preset: str, precision: str, model: Transformer) -> None:
    """Close to the run without codes; what a gather brings is the same in forward and backward, and on all ranks."""
    mesh = None if preset == "zero1" else TWO
    data = batches(3, rows=ROWS)
    seen: list[Tensor] = []

    def step(engine: sw.Engine, _: torch.optim.Optimizer, batch: Any) -> Tensor:
        block = engine.module.blocks[1]
        found: dict[str, Tensor] = {}

        def forward_hook(module: nn.Module, *_: Any) -> None:
            found["forward"] = module.up.weight.detach().clone()

        def backward_hook(grad: Tensor) -> Tensor:
            found["backward"] = block.up.weight.detach().clone()
            return grad

        handles = [block.register_forward_pre_hook(forward_hook)]
        handles.append(block.register_forward_hook(lambda _, __, out: out.register_hook(backward_hook) and None))
        loss = engine(*batch)
        engine.backward(loss)
        engine.step()
        for handle in handles:
            handle.remove()
        assert torch.equal(found["forward"], found["backward"])
        seen.append(found["forward"])
        return loss

    wire = {"param": INT8 | EVERYWHERE, "grad": INT8 | EVERYWHERE}
    num_ranks = 4 if mesh else 2
    run = sharded_run(model, data, preset, num_ranks, mesh, step=step, precision=precision, wire=wire, verify=1)
    exact = sharded_run(model, data, preset, num_ranks, mesh, precision=precision)
    assert run.losses == pytest.approx(exact.losses, rel=0.01)
    if mesh is None:  # codes were made of fp32 masters, once
        assert torch.equal(seen[0], rounded_by(INT8)(model.blocks[1].up.weight).to(seen[0].dtype))
    assert {one.dtype for one in seen} == {{"bf16": torch.bfloat16, "fp16": torch.float16}[precision]}


@thorough_only("several engines each")
@pytest.mark.parametrize("preset", ["zero1", "zero3"])
def test_resumes_exactly(preset: str, model: Transformer, tmp_path: Any) -> None:
    """On another number of ranks too: the twin of all steps is that of two runs."""
    wire, data = {"param": INT8, "grad": INT8}, batches(4, rows=ROWS)

    whole = sharded_run(model, data, preset, 2, None, wire=wire)
    sharded_run(model, data[:2], preset, 2, None, after=saving_to(tmp_path), wire=wire)
    run = sharded_run(Transformer(), data[2:], preset, 2, None, step=resuming(tmp_path), wire=wire)
    assert run.losses == whole.losses[2:]
    assert all(torch.equal(run.params[name], param) for name, param in whole.params.items())
    on_three = sharded_run(Transformer(), data[2:], preset, 3, None, step=resuming(tmp_path), wire=wire)
    assert on_three.losses[0] == pytest.approx(whole.losses[2], rel=1e-6)  # the same codes of parameters


@sampled
@pytest.mark.parametrize("to_codes", [True, False])
def test_changes_of_plan(to_codes: bool, model: Transformer) -> None:
    """Blocks move the places of parameters in flat buffers; values and states stay."""
    data = batches(3, rows=ROWS)
    plain: dict[str, Any] = {"preset": "zero1"}
    coded = {"preset": "zero3", "wire": {"param": INT8}}
    first, then = (plain, coded) if to_codes else (coded, plain)

    def step(engine: sw.Engine, _: torch.optim.Optimizer, batch: Any) -> Tensor:
        if engine.num_steps == 2:
            engine.reshard(then)
        loss = engine(*batch)
        engine.backward(loss)
        engine.step()
        return loss

    run = sharded_run(model, data, first.pop("preset"), 2, None, step=step, **first)
    twins = [twin_run(model, data, 2, wire) for wire in ({}, {"param": INT8})]
    assert run.losses[0] == pytest.approx(twins[not to_codes].losses[0], rel=1e-6)
    away = abs(run.losses[2] - twins[0].losses[2]) / twins[0].losses[2]
    assert away < 2e-3


@sampled
@pytest.mark.parametrize("dtype", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero3"])
def test_an_overflow_on_one_rank_is_seen_by_all(preset: str, dtype: str, model: Transformer) -> None:
    """Of one matrix alone: vectors and embeddings, which are sent as they are, have no part in it."""
    data = batches(3, rows=ROWS)

    def step(engine: sw.Engine, _: torch.optim.Optimizer, batch: Any) -> Tensor:
        loss = engine(*batch)
        is_bad = engine.num_steps == 1 and engine.world.rank == 1 and not overflown
        matrix = engine.module.get_parameter("blocks.1.qkv.weight")
        overflow = matrix.register_hook(lambda grad: grad * float("inf") if is_bad else grad)
        engine.backward(loss)
        overflow.remove()
        if engine.num_steps == 1:
            engine.world.barrier()
            overflown.add(1)
        engine.step()
        return loss

    overflown: set[int] = set()
    wire = {"grad": {"dtype": dtype, "block": 32}}
    run = sharded_run(model, [data[0], data[1], data[1]], preset, 2, None, step=step, skip_nonfinite=True, wire=wire)
    assert [math.isfinite(norm) for norm in run.norms] == [True, False, True]
    assert run.losses[1] == run.losses[2]  # the step was left out
    assert all(bool(param.isfinite().all()) for param in run.params.values())


@thorough_only("several engines each")
@pytest.mark.parametrize("preset", ["zero1", "zero3"])
def test_beside_a_split_along_tp(preset: str) -> None:
    """Codes are of the part that a rank has. Sends and holds what the program says, and trains nearly alike."""
    start = split_models.Transformer(width=32)

    def losses(**plan: Any) -> list[float]:
        replicas = [copy.deepcopy(start) for _ in range(4)]
        settings = {"preset": preset, "mesh": {"dp": 2, "tp": 2}, "tensor": split_models.TENSOR, **plan}

        def rank(world: sw.World) -> list[float]:
            found, model = [], replicas[world.rank]
            with sw.shard(model, settings, optimizer=adamw(model), world=world) as engine:
                for step in range(3):
                    tokens = split_models.tokens(step).chunk(2)[engine.world.rank // 2]
                    loss = engine(tokens)
                    engine.backward(loss)
                    engine.step()
                    found.append(loss.item())
                report = engine.memory()
                for kind in ("param", "grad"):
                    assert report.measured[kind] == report.promised[kind], kind
                assert report.measured["working"] <= report.promised["working"]
            return found

        return [sum(each) / 4 for each in zip(*run_ranks(4, rank), strict=True)]

    coded, exact = losses(wire={"param": INT8, "grad": INT4}), losses()
    assert coded == pytest.approx(exact, rel=0.01)
    assert coded != exact


@thorough_only("hundreds of steps")
@pytest.mark.parametrize(
    ("preset", "plan"),
    [
        ("zero3", {"wire": {"param": "int8", "grad": "int4"}}),
        ("ddp", {"wire": {"grad": "int4"}}),
        ("zero1", {"wire": {"param": "int8", "grad": "int8"}}),
        ("zero3", {"wire": {"param": "fp8"}}),
    ],
    ids=["zero3-int8-int4", "ddp-int4", "zero1-int8-int8", "zero3-fp8"],
)
def test_a_language_model_learns_as_well(preset: str, plan: dict[str, Any]) -> None:
    """The loss of the last steps is within 1 % of that of fp32 wires. `shardwise bench learning` takes 1,000 steps."""
    exact, coded = learnt(preset), learnt(preset, **plan)
    assert exact < 3.0  # it has learned: uniform bytes are 5.5
    assert abs(coded - exact) <= 0.01 * exact, (coded, exact)
