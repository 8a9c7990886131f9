"""Operations of a steady step that would make the host wait for a device, counted on a CPU by file of the library.

All tensors count as device tensors, except those that are always on the host: step counters of optimizers, and messages
between hosts.
"""

from __future__ import annotations

import copy
import json
import math
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from twins import adamw, batches, full_params, muon_groups, plan_of, share_of

import shardwise as sw
from shardwise.comm.watch.fault import Fault
from shardwise.errors import FaultError
from shardwise.optim.precision import LateFloat
from shardwise.testing import run_ranks
from tests import inside
from tests.models import Transformer
from tests.thorough import sampled

LIBRARY = str(Path(sw.__file__).parent)
READS = ("item", "tolist", "__float__", "__int__", "__bool__", "__index__", "cpu", "numpy", "nonzero")
Plan = dict[str, Any]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


class Waits:
    """Counts waits of a thread inside `counting`, by operation and innermost file of the library."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: Counter[str] = Counter()
        self.on_host: dict[int, object] = {}
        """By identity; they are kept, so that no other tensor gets one of theirs."""
        self._here = threading.local()
        for name in READS:
            monkeypatch.setattr(torch.Tensor, name, self._noted(name, getattr(torch.Tensor, name)))
        monkeypatch.setattr(torch, "equal", self._noted("equal", torch.equal))
        monkeypatch.setattr(torch, "tensor", self._made("tensor", torch.tensor))
        monkeypatch.setattr(torch.Tensor, "new_tensor", self._noted("new_tensor", torch.Tensor.new_tensor))
        monkeypatch.setattr(torch.Tensor, "to", self._moved("to", torch.Tensor.to))

    @contextmanager
    def counting(self) -> Iterator[None]:
        self._here.on = True
        try:
            yield
        finally:
            self._here.on = False

    def _note(self, what: str) -> None:
        site = _site() if getattr(self._here, "on", False) else None
        if site is not None:
            self.found[f"{site} {what}"] += 1

    def _noted(self, name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if id(args[0]) not in self.on_host:
                self._note(name)
            return original(*args, **kwargs)

        return call

    def _made(self, name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("device") is not None:
                self._note(name)
            return original(*args, **kwargs)

        return call

    def _moved(self, name: str, original: Any) -> Any:
        def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if any(isinstance(one, torch.device | str) for one in (*args, kwargs.get("device"))):
                self._note(name)
            return original(tensor, *args, **kwargs)

        return call


def _site() -> str | None:
    """The innermost file of the library on the stack; `None` outside of the library and in a message between hosts."""
    frame, found = sys._getframe(2), None
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(LIBRARY):
            found = found or path.removeprefix(f"{LIBRARY}/")
            if frame.f_code.co_name == "exchange":
                return None
        frame = frame.f_back
    return found


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that tensors are on a device."""
    monkeypatch.setattr("shardwise.sharded.assembly.on_host", lambda _: False)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch, away: None) -> Waits:
    return Waits(monkeypatch)


def lamb(model: nn.Module) -> torch.optim.Optimizer:
    return sw.optim.Lamb(model.parameters())


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return sw.optim.Adafactor(model.parameters(), beta1=0.9)


def lion(model: nn.Module) -> torch.optim.Optimizer:
    return sw.optim.Lion(model.parameters())


def muon(model: nn.Module) -> torch.optim.Optimizer:
    return sw.optim.Muon(muon_groups(model))


def narrow(state_dtype: Any) -> MakeOptimizer:
    return lambda model: sw.optim.AdamW(model.parameters(), state_dtype=state_dtype)


class WithTable(nn.Module):
    """A model with a buffer that never changes, although only the device knows this."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Transformer()
        self.register_buffer("table", torch.ones(8))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.inner(x, y) * self.table.mean()


def steps_of(engine: sw.Engine) -> dict[int, object]:
    """The tensors that count an optimizer's steps, by identity."""
    optimizer = inside.adopted(engine)
    steps = [optimizer.state_of(piece).get("step") for piece in optimizer.pieces]
    return {id(step): step for step in steps}


def steady_step(
    waits: Waits, plan: Plan, make_optimizer: MakeOptimizer, build: Callable[[], nn.Module], *, counted: int = 3
) -> float:
    """Count the waits of rank 0 in its fourth step, or the one `counted` from zero; returns the last step's norm."""
    torch.manual_seed(0)
    replicas = [build()]
    replicas += [copy.deepcopy(replicas[0]) for _ in range(math.prod(plan.get("mesh", {"world": 2}).values()) - 1)]
    data = batches(8)

    def rank(world: sw.World) -> float:
        model = replicas[world.rank]
        optimizer = make_optimizer(model)
        with sw.shard(model, plan, optimizer=optimizer, world=world) as engine:
            for number in range(4):
                waits.on_host |= steps_of(engine)
                world.barrier()
                with waits.counting() if number == counted and world.rank == 0 else _nothing():
                    for batch in data[2 * number : 2 * number + plan.get("accumulate", 1)]:
                        engine.backward(engine(*share_of(engine, batch)))
                    norm = engine.step()
            assert norm is not None
            return float(norm)

    return run_ranks(len(replicas), rank, shares_memory=False)[0]


@contextmanager
def _nothing() -> Iterator[None]:
    yield


TWO_BY_TWO = {"node": 2, "local": 2}
NEVER: dict[str, tuple[Plan, MakeOptimizer]] = {
    "ddp": (plan_of("ddp", None), adamw),
    "zero1": (plan_of("zero1", None), adamw),
    "zero2": (plan_of("zero2", None, precision="bf16"), adamw),
    "zero3": (plan_of("zero3", None), adamw),
    "zero3-kept": (plan_of("zero3-kept", None, precision="bf16"), adamw),
    "hsdp": (plan_of("hsdp", TWO_BY_TWO, precision="bf16"), adamw),
    "hpz": (plan_of("hpz", TWO_BY_TWO), adamw),
    "clip": (plan_of("zero3", None, clip_grad_norm=0.1), adamw),
    "accumulate": (plan_of("zero2", None, accumulate=2), adamw),
    "AdamW": (plan_of("zero3", None), narrow("fp32")),
    "AdamW bf16": (plan_of("zero3", None), narrow("bf16")),
    "AdamW int8": (plan_of("zero3", None), narrow("int8")),
    "Lamb": (plan_of("zero3", None), lamb),
    "Adafactor": (plan_of("zero3", None), adafactor),
    "Lion": (plan_of("zero3", None), lion),
    "Muon": (plan_of("zero3", None), muon),
}


@pytest.mark.parametrize("name", NEVER)
@sampled
def test_the_host_never_waits(name: str, waits: Waits) -> None:
    steady_step(waits, *NEVER[name], Transformer)
    assert waits.found == {}


@pytest.mark.parametrize("case", ["fp16", "buffer"])
def test_it_waits_once_for_what_only_the_device_knows(case: str, waits: Waits) -> None:
    plan = plan_of("zero3", None, precision="fp16" if case == "fp16" else "fp32", clip_grad_norm=0.1)
    steady_step(waits, plan, adamw, Transformer if case == "fp16" else WithTable)
    assert waits.found == {"optim/precision/verdict.py tolist": 1}


def test_the_counter_sees_what_a_host_would_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, the host reads the sum. In the first step the counter finds a tensor made from host values as well, the
    marks of what has a gradient; later ones are those of the step before."""
    waits = Waits(monkeypatch)
    for counted, num_made in ((0, 1), (3, 0)):
        waits.found.clear()
        steady_step(waits, plan_of("zero3", None), adamw, Transformer, counted=counted)
        assert waits.found["optim/precision/verdict.py tensor"] == num_made
        assert waits.found["optim/precision/verdict.py tolist"] == 1
    assert waits.found.total() == 1


def test_hosts_agree_by_a_byte_where_nothing_is_new(away: None, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: dict[int, list[int]] = {0: [], 1: []}
    exchange = sw.World.exchange

    def noted(world: sw.World, message: bytes, subject: str = "message") -> list[bytes]:
        lengths[world.rank].append(len(message))
        return exchange(world, message, subject)

    monkeypatch.setattr(sw.World, "exchange", noted)

    def rank(world: sw.World) -> list[list[int]]:
        model = replicas[world.rank]
        by_step = []
        with sw.shard(model, "zero3", optimizer=adamw(model), world=world) as engine:
            for batch in batches(4):
                lengths[world.rank].clear()
                engine.backward(engine(*share_of(engine, batch)))
                engine.step()
                by_step.append(list(lengths[world.rank]))
        return by_step

    replicas = [Transformer() for _ in range(2)]
    num_params = len(list(replicas[0].parameters()))
    by_step = run_ranks(2, rank)[0]
    assert by_step[0][-1] == 1 + num_params
    assert by_step[2:] == [[1], [1]]


def test_a_norm_is_read_when_somebody_looks(waits: Waits) -> None:
    def rank(world: sw.World) -> None:
        model = nn.Linear(4, 4)
        optimizer = adamw(model)
        with sw.shard(model, "zero3", optimizer=optimizer, world=world) as engine:
            for _ in range(2):
                engine.backward(engine(torch.ones(2, 4)).sum())
                engine.step()
            waits.on_host |= steps_of(engine)
            engine.backward(engine(torch.ones(2, 4)).sum())
            with waits.counting():
                norm = engine.step()
                assert isinstance(norm, LateFloat)
                assert not waits.found
                assert engine.gradient_norm == norm
            assert waits.found == {"optim/precision/late_float.py item": 1}

    run_ranks(1, rank)


def test_steps_of_our_optimizers_are_on_the_host_on_any_device() -> None:
    for make_optimizer in (narrow("fp32"), narrow("bf16"), narrow("int8"), lamb, muon):
        model = nn.Sequential(nn.Linear(80, 80), nn.Linear(80, 3)).to("meta")
        optimizer = make_optimizer(model)
        for param in model.parameters():
            param.grad = torch.empty_like(param)
            state = {"step": torch.ones(()), "exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}
            if isinstance(optimizer, sw.optim.AdamW):
                optimizer.accept_state(param, state)
                assert optimizer.state[param]["step"].device.type == "cpu"


# -- the same results as when the host reads values ----------------------------------------------------------


class Experts(nn.Module):
    """A batch goes to one expert, so that ranks use different parameters of one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ParameterList(torch.randn(4, 4) / 2 for _ in range(3))
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        return self.head(self.norm(x @ self.experts[expert])).square().mean()


CHOICES = [(0, 0), (0, 1), (1, 1), (2, 0), (0, 0), (0, 1)]
"""For each step, the experts of both ranks."""


def trained(plan: Plan, *, shares_memory: bool) -> tuple[list[float], dict[str, torch.Tensor], torch.Tensor]:
    torch.manual_seed(0)
    replicas = [Experts()]
    replicas.append(copy.deepcopy(replicas[0]))
    data = [torch.randn(2, 6, 4) for _ in CHOICES]

    def rank(world: sw.World) -> tuple[list[float], dict[str, torch.Tensor], torch.Tensor]:
        model = replicas[world.rank]
        norms = []
        with sw.shard(model, plan, optimizer=adamw(model), world=world) as engine:
            for rows, experts in zip(data, CHOICES, strict=True):
                engine.backward(engine(rows[world.rank], experts[world.rank]))
                engine.step()
                norms.append(engine.gradient_norm or 0.0)
            assert model.norm.running_mean is not None
            return norms, full_params(engine), model.norm.running_mean.clone()

    first, second = run_ranks(2, rank, shares_memory=shares_memory)
    assert first[0] == second[0]
    assert torch.equal(first[2], second[2])  # of rank 0, on all
    return first


@sampled
@pytest.mark.parametrize("preset", ["ddp", "zero2", "zero3"])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_numbers_are_those_that_the_host_would_have_read(
    preset: str, clip: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(preset, None, clip_grad_norm=clip)
    norms, params, mean = trained(plan, shares_memory=True)
    monkeypatch.setattr("shardwise.sharded.assembly.on_host", lambda _: False)
    late_norms, late_params, late_mean = trained(plan, shares_memory=False)
    assert late_norms == pytest.approx(norms, rel=1e-6)
    assert torch.allclose(late_mean, mean, atol=1e-6)
    for name, param in params.items():
        assert torch.allclose(late_params[name], param, atol=1e-6), name


def test_no_update_begins_after_a_fault(away: None) -> None:
    """An aborted collective leaves garbage. If the host reads nothing, it must check for faults before the update."""

    def rank(world: sw.World) -> None:
        model = nn.Linear(4, 4)
        before = model.weight.detach().clone()
        with sw.shard(model, "ddp", optimizer=adamw(model), world=world) as engine:
            engine.backward(engine(torch.ones(2, 4)).sum())
            engine.clip_grad_norm_(1.0)  # the ranks have agreed
            world.journal.fault = Fault("lost", (0,), "a rank was lost")
            with pytest.raises(FaultError, match="a rank was lost"):
                engine.step()
            world.journal.fault = None
            assert torch.equal(engine.state_dict()["weight"], before)

    run_ranks(1, rank)


def test_a_late_number_behaves_like_a_float() -> None:
    def late() -> LateFloat:
        return LateFloat(torch.tensor(6.25))

    assert float(late()) == 2.5
    assert f"{late():.2f} {late()}" == "2.50 2.5"
    assert late() == 2.5 == late()
    assert late() < 3 < late() + 1
    assert 2 < late() <= 2.5 <= late()
    assert (2 * late(), late() / 2, 5 / late(), 1 - late(), late() ** 2) == (5.0, 1.25, 2.0, -1.5, 6.25)
    assert (max(late(), 1.0), round(late()), round(late(), 1), abs(-late()), int(late())) == (2.5, 2, 2.5, 2.5, 2)
    assert math.isfinite(late())
    assert math.isnan(LateFloat(torch.tensor(math.nan)))
    assert {late(): 1}[2.5] == 1
    assert json.dumps({"norm": float(late())}) == '{"norm": 2.5}'
    assert type(copy.deepcopy(late())) is float
    with pytest.raises(TypeError, match="not JSON serializable"):
        json.dumps(late())
