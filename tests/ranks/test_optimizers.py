"""Every optimizer trains sharded as on the plain model, and sends and holds what the program predicts."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from twins import (
    PRESETS_2,
    PRESETS_2X2,
    MakeOptimizer,
    Run,
    assert_rounds_like_the_plain_model,
    assert_same,
    batches,
    ledger_of_a_step,
    muon_groups,
    plain_run,
    plan_of,
    sharded_run,
    work_on_ranks,
)

import shardwise as sw
from shardwise.checkpoint.index_schema import read_index
from shardwise.errors import ConfigError, ModelError
from shardwise.optim import Adafactor, AdamW, Lamb, Lion, Muon, hidden_matrices
from shardwise.optim.probe import updates_of
from shardwise.program import DURING_STEP
from shardwise.program.walk import Walk
from shardwise.testing import run_ranks
from tests import inside
from tests.models import Transformer
from tests.ranks.twins import warmed
from tests.thorough import sampled, thorough_only

pytestmark = sampled

CASES = [*PRESETS_2, *PRESETS_2X2, ("zero3", 3, None), ("zero2", 4, None), ("zero3", 1, None)]
IDS = [f"{name}-{n}{'x2' if mesh else ''}" for name, n, mesh in CASES]


def muon(model: nn.Module, **settings: Any) -> Muon:
    groups = muon_groups(model, lr=3e-3, weight_decay=0.0, adamw_eps=1e-5)
    return Muon(groups, **{"lr": 0.01, "iterate_in": "fp32", **settings})


OURS: dict[str, MakeOptimizer] = {
    "lamb": lambda model: Lamb(model.parameters(), lr=0.01, eps=1e-5),
    "adafactor": lambda model: Adafactor(model.parameters(), lr=0.02, weight_decay=0.1),
    "adafactor-transformers": lambda model: Adafactor(
        model.parameters(), lr=None, beta1=0.9, weight_decay=0.1, variant="transformers"
    ),
    "muon": muon,
    "muon-bf16": lambda model: muon(model, iterate_in="bf16", adjust_lr_fn="match_rms_adamw"),
    "lion": lambda model: Lion(model.parameters(), lr=1e-4, weight_decay=0.1),
    "adamw": lambda model: AdamW(model.parameters(), lr=3e-3, eps=1e-5),
    "adamw-bf16": lambda model: AdamW(model.parameters(), lr=3e-3, eps=1e-5, state_dtype="bf16"),
    "adamw-int8": lambda model: AdamW(model.parameters(), lr=3e-3, eps=1e-5, state_dtype="int8"),
}
PARAM_TOLERANCE = {"muon-bf16": 3e-3, "adamw-bf16": 3e-4, "adamw-int8": 3e-3}
"""Where a number is rounded to 8 bits, the last bit of a gradient may round it the other way. And a block of 8-bit
states that a shard boundary cuts has two scales instead of one."""


@pytest.fixture(scope="module")
def model() -> Transformer:
    torch.manual_seed(0)
    return Transformer()


@pytest.fixture(scope="module")
def twins(model: Transformer) -> dict[str, Run]:
    return {name: plain_run(model, batches(6, rows=12), make) for name, make in OURS.items()}


def measure_step(engine: sw.Engine) -> dict[str, Any]:
    """Run one more step: every rank sends and holds what its program predicts, to the byte."""
    report = engine.memory()
    for kind in ("param", "grad", "working"):
        assert report.measured[kind] == report.promised[kind], kind
    assert 0 <= report.measured["optim"] - report.promised["optim"] < 4 * 60, "but for step counters"
    planned, coordinate = inside.program(engine), engine.mesh.coordinate(engine.world.rank)
    held = watch_update(engine)
    ledger = ledger_of_a_step(engine)
    sent, promised = sum(ledger.sent_bytes.values()), planned.sent_bytes(1, coordinate)
    assert sent == promised <= planned.sent_bytes()
    actions = [action for block in (*planned.micro_batch, *planned.step) for action in block.actions]
    assert sum(ledger.calls.values()) == sum(action.communicates for action in actions)
    clock = Walk(inside.programs(engine).specs, coordinate)
    for block in planned.step:
        if block.moment == DURING_STEP:
            clock.walk(block)
    assert sum(held) == clock.peak
    return {"program": engine.program()}


def watch_update(engine: sw.Engine) -> list[int]:
    """From now on, record for each update the peak memory of whole parameters that it looks at."""
    meter, run, peaks = inside.meter(engine), inside.runner(engine).step.during, []

    def during_step() -> None:
        before = sum(meter.now.values())
        meter.reset_peak()
        run()
        assert sum(meter.now.values()) == before
        peaks.append(meter.peak_total - before)

    inside.runner(engine).step.during = during_step
    return peaks


FEW = [("ddp", 2, None), ("zero1", 3, None), ("zero3", 2, None), ("hsdp", 4, {"node": 2, "local": 2})]
RACES = [(name, *case) for name in ("lamb", "adafactor", "muon") for case in CASES]
RACES += [(name, *case) for name in OURS if name not in ("lamb", "adafactor", "muon") for case in FEW]


@pytest.mark.parametrize(
    ("name", "preset", "num_ranks", "mesh"), RACES, ids=[f"{name}-{preset}-{n}" for name, preset, n, _ in RACES]
)
def test_ours_train_like_the_plain_model(
    name: str, preset: str, num_ranks: int, mesh: Any, model: Transformer, twins: dict[str, Run]
) -> None:
    run = sharded_run(model, batches(6, rows=12), preset, num_ranks, mesh, OURS[name], after=measure_step)
    tolerance = PARAM_TOLERANCE.get(name, 1e-5)
    assert_same(run, twins[name], loss=max(1e-6, tolerance / 10), param=tolerance, norm=max(1e-5, tolerance))
    sums = name == "lamb" or name.startswith("adafactor")
    looks = name.startswith("muon") or (sums and preset != "ddp" and num_ranks > 1)
    assert ("during step" in run.extra["program"]) == looks


def fed(engine: sw.Engine, steps: range) -> None:
    data = batches(max(steps, default=-1) + 1, rows=12)
    for step in steps:
        x, y = (part.chunk(engine.world.size)[engine.world.rank] for part in data[step])
        engine.backward(engine(x, y))
        engine.step()


def plain_after(model: nn.Module, make: MakeOptimizer, steps: range) -> tuple[nn.Module, torch.optim.Optimizer]:
    twin = copy.deepcopy(model)
    optimizer = make(twin)
    for x, y in batches(max(steps, default=-1) + 1, rows=12)[steps.start :]:
        optimizer.zero_grad()
        twin(x, y).backward()
        optimizer.step()
    return twin, optimizer


def on_ranks(
    model: nn.Module, case: tuple[str, int, Any], make: MakeOptimizer, work: Callable[[sw.Engine], Any]
) -> list[Any]:
    preset, num_ranks, mesh = case
    return work_on_ranks(num_ranks, work, plan_of(preset, mesh), lambda: copy.deepcopy(model), make)


KEPT = ("lamb", "adafactor", "adafactor-transformers", "muon", "adamw-bf16", "adamw-int8")
STATEFUL = {
    **{name: OURS[name] for name in KEPT},
    "torch-adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-5),
    "torch-asgd": lambda model: torch.optim.ASGD(model.parameters(), lr=0.01),
}


def near(one: torch.Tensor, other: torch.Tensor, name: str) -> bool:
    """Equal up to rounding; for narrow states, up to one or two of their rounding steps."""
    rough = {"adamw-bf16": 2**-7, "adamw-int8": 2e-2}.get(name, 1e-4)
    return bool(((one - other).abs() <= rough * other.abs().max() + 1e-7).all())


@pytest.mark.parametrize("case", FEW[1::2], ids=[case[0] for case in FEW[1::2]])
@pytest.mark.parametrize("name", STATEFUL)
def test_the_whole_state_is_the_plain_optimizers_and_goes_back(
    name: str, case: tuple[str, int, Any], model: Transformer
) -> None:
    """A state read from ranks continues in a plain loop, and a plain loop's state continues on ranks."""
    make = STATEFUL[name]
    _, plain = plain_after(model, make, range(3))

    def read(engine: sw.Engine) -> Any:
        fed(engine, range(3))
        return engine.optimizer_state_dict(rank_0_only=True), engine.state_dict()

    (state, params), (nothing, _) = on_ranks(model, case, make, read)[:2]
    assert nothing == {}
    wanted = plain.state_dict()
    assert state["param_groups"] == wanted["param_groups"]
    assert state["state"].keys() == wanted["state"].keys()
    for number, entry in wanted["state"].items():
        assert list(state["state"][number]) == list(entry)
        for key, value in entry.items():
            mine = state["state"][number][key]
            assert (mine.shape, mine.dtype) == (value.shape, value.dtype)
            assert near(mine, value, name), (number, key)

    plain_again = copy.deepcopy(model)
    plain_again.load_state_dict(params)
    optimizer = make(plain_again)
    optimizer.load_state_dict(copy.deepcopy(state))
    x, y = batches(4, rows=12)[3]
    plain_again(x, y).backward()
    optimizer.step()

    def take_over(engine: sw.Engine) -> Any:
        engine.load_state_dict(params)
        engine.load_optimizer_state_dict(state)
        fed(engine, range(3, 4))
        return engine.state_dict()

    sharded = on_ranks(model, case, make, take_over)[0]
    for key, value in plain_again.state_dict().items():
        assert (sharded[key] - value).abs().max() <= PARAM_TOLERANCE.get(name, 1e-5), key


@pytest.mark.parametrize("name", ["lamb", "adafactor-transformers", "muon", "adamw-bf16", "adamw-int8"])
def test_resume_is_bit_exact_and_another_mesh_can_read_it(name: str, model: Transformer, tmp_path: Path) -> None:
    def first(engine: sw.Engine) -> Any:
        fed(engine, range(3))
        engine.save(tmp_path)
        states = engine.optimizer_state_dict()
        fed(engine, range(3, 5))
        return engine.state_dict(), states

    def second(engine: sw.Engine) -> Any:
        assert engine.resume(tmp_path) is not None
        states = engine.optimizer_state_dict()
        fed(engine, range(3, 5))
        return engine.state_dict(), states

    params, states = on_ranks(model, ("zero3", 2, None), OURS[name], first)[0]
    resumed, _ = on_ranks(model, ("zero3", 2, None), OURS[name], second)[0]
    assert all(torch.equal(params[key], resumed[key]) for key in params)
    for case in [("ddp", 1, None), ("zero1", 3, None), ("hpz", 4, {"node": 2, "local": 2})]:
        read, read_states = on_ranks(model, case, OURS[name], second)[0]
        for number, entry in states["state"].items():
            for key, value in entry.items():
                assert near(read_states["state"][number][key], value, name), (number, key)
        for key, value in params.items():
            assert (read[key] - value).abs().max() <= PARAM_TOLERANCE.get(name, 1e-5), key


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize("wait", [True, False])
def test_narrow_states_are_saved_narrow_and_read_by_any(model: Transformer, tmp_path: Path, wait: bool) -> None:
    """bf16 states take two bytes each on disk. torch's AdamW reads the same values in fp32, and ours also in 8 bits."""

    def work(optimizer_of: Callable[[nn.Module], torch.optim.Optimizer], folder: Path, steps: int) -> dict[str, Any]:

        def rank(engine: sw.Engine) -> dict[str, Any]:
            resumed = engine.resume(tmp_path / "narrow")
            assert (resumed is None) == (steps > 0)
            for x, y in batches(steps):
                engine.backward(engine(x, y))
                engine.step()
            engine.save(folder, wait=wait)
            engine.wait_for_save()
            state: dict[str, Any] = engine.optimizer_state_dict()["state"]
            return state

        return work_on_ranks(2, rank, "zero3", model, optimizer_of)[0]

    narrow = work(OURS["adamw-bf16"], tmp_path / "narrow", 3)
    chunks = read_index(tmp_path / "narrow" / "step-00000003").chunks
    dtypes = {chunk.dtype for chunk in chunks if chunk.kind in ("state.exp_avg", "state.exp_avg_sq")}
    assert dtypes == {"bfloat16"}
    wide = work(lambda model: torch.optim.AdamW(model.parameters()), tmp_path / "wide", 0)
    int8 = work(OURS["adamw-int8"], tmp_path / "int8", 0)
    for number, states in narrow.items():
        for key in ("exp_avg", "exp_avg_sq"):
            assert wide[number][key].dtype == torch.float32
            assert torch.equal(states[key].float(), wide[number][key])
            largest = float(states[key].abs().max())
            torch.testing.assert_close(int8[number][key], wide[number][key], rtol=0.1, atol=largest / 50)


def test_states_by_name_can_be_read_and_written(model: Transformer) -> None:
    key = "blocks.1.up.weight"

    def work(engine: sw.Engine) -> Any:
        fed(engine, range(2))
        engine.set(key, torch.full((128, 32), 0.25), "exp_avg_sq")
        return engine.get(key, "exp_avg"), engine.get(key, "exp_avg_sq")

    for name in ("adamw-int8", "adamw-bf16"):
        twin, optimizer = plain_after(model, OURS[name], range(2))
        number = [one for one, _ in twin.named_parameters()].index(key)
        for exp_avg, exp_avg_sq in on_ranks(model, ("zero3", 2, None), OURS[name], work):
            assert near(exp_avg, optimizer.state_dict()["state"][number]["exp_avg"], name)
            assert torch.equal(exp_avg_sq, torch.full((128, 32), 0.25))


@thorough_only("slow; smaller tests beside it cover the same code")
def test_steps_taken_before_sharding_count(model: Transformer) -> None:
    for name in ("muon", "adamw-int8", "lamb", "adafactor"):
        data = batches(4, rows=12)[2:]
        make = warmed(OURS[name], batches(2, rows=12))
        run = sharded_run(model, data, "zero3", 2, None, make)
        tolerance = PARAM_TOLERANCE.get(name, 1e-5)
        assert_same(run, plain_run(model, data, make), loss=max(1e-6, tolerance), param=tolerance, norm=1e-2)


def test_a_matrix_that_nobody_used_is_left_alone() -> None:
    """No message is sent for it, and its owner does not wait for one."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ways = nn.ModuleList(nn.Linear(24, 24, bias=False) for _ in range(4))

        def forward(self, x: torch.Tensor, ways: tuple[int, ...]) -> torch.Tensor:
            for way in ways:
                x = self.ways[way](x).tanh()
            return x.square().mean()

    torch.manual_seed(0)
    model = Branches()
    x = torch.randn(6, 24)
    twin = copy.deepcopy(model)
    optimizer = Muon(twin.parameters(), lr=0.01, iterate_in="fp32")
    for ways in [(0, 1, 2), (2, 0)]:
        optimizer.zero_grad()
        twin(x, ways).backward()
        optimizer.step()

    def work(engine: sw.Engine) -> Any:
        for ways in [(0, 1, 2), (2, 0)]:
            engine.backward(engine(x[2 * engine.world.rank : 2 * engine.world.rank + 2], ways))
            engine.step()
        return engine.state_dict()

    for state in work_on_ranks(
        3, work, {"units": ["ways"]}, model, lambda replica: Muon(replica.parameters(), lr=0.01, iterate_in="fp32")
    ):
        for key, value in twin.state_dict().items():
            assert torch.allclose(state[key], value, atol=1e-5), key


@thorough_only("slow; smaller tests beside it cover the same code")
def test_narrow_states_follow_torchs_adamw(model: Transformer) -> None:
    """With fp32 states equal to it; bf16 and int8 stay close, over as many steps as the loss needs to fall."""
    data = batches(1, rows=6) * 25
    theirs = plain_run(model, data, lambda plain: torch.optim.AdamW(plain.parameters(), lr=3e-3, eps=1e-5))
    for name, close in {"adamw": 1e-5, "adamw-bf16": 0.02, "adamw-int8": 0.02}.items():
        ours = plain_run(model, data, OURS[name])
        assert ours.losses == pytest.approx(theirs.losses, rel=close, abs=close), name
        assert ours.losses[-1] < 0.7 * ours.losses[0]


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize(
    "settings", [{}, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.3, "ns_steps": 4}]
)
def test_muon_is_torchs(settings: dict[str, Any], model: Transformer) -> None:
    data = batches(4, rows=12)
    ours = plain_run(model, data, lambda plain: Muon(hidden_matrices(plain), lr=0.01, **settings))
    theirs = plain_run(model, data, lambda plain: torch.optim.Muon(hidden_matrices(plain), lr=0.01, **settings))
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-4)
    for key, value in theirs.params.items():
        assert (ours.params[key] - value).abs().max() <= 2e-3, key


def test_hidden_matrices_are_neither_embeddings_nor_heads() -> None:
    for tied in (False, True):
        model = Transformer(tied=tied)
        names = {param: name for name, param in model.named_parameters()}
        hidden = [names[param] for param in hidden_matrices(model)]
        kinds = ("qkv", "out", "up", "down")
        assert hidden == [f"blocks.{index}.{kind}.weight" for index in range(3) for kind in kinds]


def test_matrices_of_a_model_as_wide_as_it_has_positions_are_hidden_ones() -> None:
    model = nn.ModuleDict(
        {"token": nn.Embedding(50, 16), "position": nn.Embedding(16, 16), "up": nn.Linear(16, 64)}
        | {"down": nn.Linear(64, 16), "out": nn.Linear(16, 16), "head": nn.Linear(16, 50)}
    )
    hidden = hidden_matrices(model)
    assert [name for name, param in model.named_parameters() if any(param is one for one in hidden)] == [
        f"{name}.weight" for name in ("up", "down", "out")
    ]


def test_what_cannot_be_meant_is_refused(model: Transformer) -> None:
    with pytest.raises(ModelError, match=r"shape \[32\]. Put it into a group with use_muon=False"):
        Muon(model.parameters())
    with pytest.raises(ConfigError, match="state_dtype is 'int4'"):
        AdamW(model.parameters(), state_dtype="int4")  # type: ignore[arg-type]  # on purpose
    with pytest.raises(ConfigError, match="iterate_in is 'fp16'"):
        Muon(hidden_matrices(model), iterate_in="fp16")  # type: ignore[arg-type]  # on purpose
    for alone, added in (
        (Muon(hidden_matrices(model)), {}),
        (Muon(hidden_matrices(model)), {"use_muon": False, "iterate_in": "fp32"}),
        (AdamW(hidden_matrices(model)), {"state_dtype": "int4"}),
    ):
        with pytest.raises((ConfigError, ModelError), match=r"use_muon=False|the same for all groups|state_dtype is"):
            alone.add_param_group({"params": [nn.Parameter(torch.ones(3))], **added})
        assert len(alone.param_groups) == 1

    def work(engine: sw.Engine) -> None:
        optimizer = inside.member(engine)
        with pytest.raises(ModelError, match=r"A parameter group with lr=0\.5 was added .* is not one of the model's"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "lr": 0.5})

    on_ranks(model, ("zero3", 2, None), OURS["adamw"], work)


def test_a_closed_engine_gives_the_optimizer_back(model: Transformer) -> None:
    plain = copy.deepcopy(model)
    optimizer = Lamb(plain.parameters())
    with sw.shard(plain, "zero3", optimizer=optimizer) as engine:
        fed(engine, range(1))
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    assert "peers" not in vars(optimizer) or type(optimizer.peers).__name__ == "Alone"


def test_an_optimizer_with_narrow_states_can_be_saved_by_torch(model: Transformer) -> None:
    _, optimizer = plain_after(model, OURS["adamw-int8"], range(2))
    stream = io.BytesIO()
    torch.save(optimizer.state_dict(), stream)
    stream.seek(0)
    other = copy.deepcopy(OURS["adamw-int8"](copy.deepcopy(model)))
    other.load_state_dict(torch.load(stream, weights_only=True))
    for one, two in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert all(torch.equal(one[key], two[key]) for key in one)
    theirs = torch.optim.AdamW(copy.deepcopy(model).parameters())
    theirs.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("name", ["AdamW", "the rest of Muon"])
def test_gradients_that_lie_in_memory_otherwise_than_their_parameters(name: str) -> None:
    start, grad = torch.randn(96, 64), torch.randn(96, 64)
    params = [nn.Parameter(start.clone()) for _ in range(2)]
    for param, its_grad in zip(params, (grad, grad.T.contiguous().T), strict=True):
        optimizer = AdamW([param]) if name == "AdamW" else Muon([{"params": [param], "use_muon": False}])
        param.grad = its_grad
        optimizer.step()
    assert not torch.equal(params[0], start)
    assert torch.equal(*params)


@pytest.mark.parametrize("name", ["adamw", "adamw-bf16", "adamw-int8", "lamb", "muon"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_plain_models_of_other_dtypes_and_strides(name: str, dtype: torch.dtype) -> None:
    """The same steps, roughly, for a transposed, non-contiguous weight."""
    start = torch.randn(96, 64).to(dtype)
    params = [nn.Parameter(start.clone()), nn.Parameter(start.T.contiguous().T)]
    grads = [torch.randn(96, 64).to(dtype) for _ in range(3)]
    make = {"muon": lambda model: Muon(model.parameters(), lr=0.01)}.get(name, OURS[name])
    for param in params:
        holder = nn.Module()
        holder.weight = param
        optimizer = make(holder)
        for grad in grads:
            param.grad = grad.clone()
            optimizer.step()
    moved = (params[0] - start).abs().max()
    assert moved > 0
    assert (params[0] - params[1]).abs().max() <= 0.5 * moved


COPIED = {kind: {"shard": []} for kind in ("param", "held", "grad", "optim")}
LOCAL = {kind: {"shard": ["local"]} for kind in ("param", "held", "grad", "optim")}


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize("name", ["lamb", "muon", "adamw-bf16"])
def test_with_rows_by_rule_clipping_and_accumulation(name: str, model: Transformer) -> None:
    """Parameters whose states are on more ranks than others' count only once in norms."""
    rules = {
        "copied": {"params": ["blocks.0.*", "*.bias"], "rows": COPIED},
        "local": {"params": ["blocks.1.*"], "rows": LOCAL},
    }
    mesh = {"node": 2, "local": 2}
    data = batches(4, rows=16)

    def halves(engine: sw.Engine, _: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
        losses = []
        for half in zip(*(part.chunk(2) for part in batch), strict=True):
            losses.append(engine(*half))
            engine.backward(losses[-1])
            engine.step()
        return torch.stack(losses).mean().detach()

    plan = {"rules": rules, "clip_grad_norm": 0.5, "accumulate": 2}
    run = sharded_run(model, data, "zero3", 4, mesh, OURS[name], step=halves, after=measure_step_of(2), **plan)
    tolerance = PARAM_TOLERANCE.get(name, 1e-5)
    assert_same(run, plain_run(model, data, OURS[name], clip=0.5), loss=1e-5, param=tolerance, norm=1e-4)


def measure_step_of(num_micro_batches: int) -> Callable[[sw.Engine], dict[str, Any]]:
    def measure(engine: sw.Engine) -> dict[str, Any]:
        ledger, planned = inside.ledger(engine), inside.program(engine)
        engine.world.barrier()
        ledger.clear()
        x, y = batches(1, rows=4)[0]
        for _ in range(num_micro_batches):
            engine.backward(engine(x, y))
            engine.step()
        coordinate = engine.mesh.coordinate(engine.world.rank)
        assert sum(ledger.sent_bytes.values()) == planned.sent_bytes(num_micro_batches, coordinate)
        return {}

    return measure


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize("name", ["lamb", "muon", "adamw-int8"])
def test_in_half_precision(name: str, model: Transformer) -> None:
    """bf16 is close to the plain model. In fp16, a step that overflows on one rank is skipped on all."""
    data = batches(6, rows=12)
    narrow = sharded_run(model, data, "zero3", 3, None, OURS[name], precision="bf16")
    assert_rounds_like_the_plain_model(narrow, model, data, OURS[name], num_ranks=3, dtype=torch.bfloat16)

    def work(engine: sw.Engine) -> None:
        x, y = (part.chunk(2)[engine.world.rank] for part in data[0])
        before = engine.state_dict()
        engine.backward(engine(x, y) * (float("inf") if engine.world.rank == 1 else 1.0))
        engine.step()
        assert all(torch.equal(before[key], value) for key, value in engine.state_dict().items())
        engine.backward(engine(x, y))
        engine.step()
        assert any(not torch.equal(before[key], value) for key, value in engine.state_dict().items())

    work_on_ranks(2, work, {"precision": "fp16"}, model, OURS[name])


@pytest.mark.parametrize("state_dtype", ["fp32", "bf16", "int8"])
def test_its_own_state_dict_is_whole_and_loads(state_dtype: Any) -> None:
    """Like that of torch's AdamW, it is whole on every rank, and in fp32."""
    start = nn.Linear(6, 5)

    def rank(world: sw.World) -> dict[str, Any]:
        model = copy.deepcopy(start)
        optimizer = AdamW(model.parameters(), state_dtype=state_dtype)
        engine = sw.shard(model, "zero3", optimizer=optimizer, world=world)
        engine.backward(engine(torch.ones(2, 6)).sum())
        engine.step()
        kept = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(kept)
        again = optimizer.state_dict()
        for number, state in kept["state"].items():
            assert all(torch.equal(value, again["state"][number][key]) for key, value in state.items())
        return kept

    for state in run_ranks(2, rank):
        assert {number: one["exp_avg"].shape for number, one in state["state"].items()} == {0: (5, 6), 1: (5,)}
        assert state["state"][0]["exp_avg_sq"].dtype == torch.float32


def test_a_trial_of_a_capturable_optimizer_needs_no_device() -> None:
    param = nn.Parameter(torch.ones(3, 4))
    plain, capturable = (torch.optim.Adam([param], capturable=capturable) for capturable in (False, True))
    assert updates_of(capturable, capturable.param_groups) == updates_of(plain, plain.param_groups)
