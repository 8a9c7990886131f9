"""Activations that are recomputed or lie elsewhere come to the same as those that are kept, to the bit."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from allocations import profiled_peak
from torch import nn
from twins import Transformer, batches, sharded_run

import shardwise as sw
from shardwise.activations import Offloading, TreatedSites, treatments_for
from shardwise.config import load_plan
from shardwise.errors import ModelError
from shardwise.placement import mesh_for, table_for
from shardwise.program import Activations
from shardwise.rehearsal import rehearse
from shardwise.storage import Copied, Copy, choose_units, make_unit, tables_for
from shardwise.telemetry import ByteMeter
from tests.thorough import one_in

pytestmark = one_in(3)

Tensor = torch.Tensor
STEPS = 2
CHOICES: dict[str, dict[str, Any]] = {
    "recompute": {"activations": "recompute"},
    "every-2nd": {"activations": {"policy": "recompute", "every": 2}},
    "selective": {"activations": "selective"},
    "offload": {"activations": "offload"},
    "disk": {"activations": "disk"},
    "mixed": {
        "activations": "offload",
        "rules": {
            "first": {"params": ["blocks.0.*"], "activations": "recompute"},
            "last": {"params": ["blocks.2.*"], "activations": {"policy": "selective", "keep": ["aten.addmm"]}},
        },
    },
}


RACES = [
    ("ddp", None, "disk"),
    ("zero1", None, "selective"),
    ("zero2", None, "mixed"),
    ("zero2", None, "recompute"),
    ("zero3", None, "offload"),
    ("zero3", None, "every-2nd"),
    ("zero3-kept", None, "mixed"),
    ("zero3-kept", None, "selective"),
    ("hsdp", {"node": 2, "local": 2}, "offload"),
    ("hpz", {"node": 2, "local": 2}, "mixed"),
    ("zero3-offload", None, "offload"),
    ("infinity", None, "disk"),
]


def gradients(engine: sw.Engine) -> dict[str, Tensor]:
    names = [name for name, param in engine.module.named_parameters() if param.requires_grad]
    return {name: engine.get(name, "grad").clone() for name in names}


def raced(model: nn.Module, preset: str, num_ranks: int, mesh: Any, **plan: Any) -> tuple[Any, list[dict[str, Tensor]]]:
    """A run, and all gradients of each of its steps; every step has two micro-batches, of two lengths."""
    steps: list[dict[str, Tensor]] = []

    def step(engine: sw.Engine, _: torch.optim.Optimizer, batch: Any) -> Tensor:
        for part in (tuple(one[:, :4] for one in batch), batch):
            loss = engine(*part)
            engine.backward(loss)
        grads = gradients(engine)
        if engine.world.rank == 0:
            steps.append(grads)
        engine.step()
        return loss

    run = sharded_run(model, batches(STEPS), preset, num_ranks, mesh, step=step, accumulate=2, **plan)
    return run, steps


@pytest.mark.parametrize("shares_memory", [True, False], ids=["shared", "sent"])
@pytest.mark.parametrize(("preset", "mesh", "choice"), RACES)
def test_equal_to_the_bit(
    preset: str, mesh: dict[str, int] | None, choice: str, tmp_path: Path, *, shares_memory: bool
) -> None:
    """All gradients of several steps, clipped, of two micro-batches that differ in length."""
    torch.manual_seed(0)
    model, num_ranks = Transformer(tied=True), 4 if mesh else 2
    plan: dict[str, Any] = {"clip_grad_norm": 1.0, "shares_memory": shares_memory, "disk": str(tmp_path)}
    kept, kept_grads = raced(model, preset, num_ranks, mesh, **plan)
    run, grads = raced(model, preset, num_ranks, mesh, **plan, **CHOICES[choice])
    assert run.losses == kept.losses
    assert run.norms == kept.norms
    for one, other in zip(grads, kept_grads, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert all(torch.equal(run.params[name], kept.params[name]) for name in kept.params)


class Away:
    """Bytes where no profiler of torch sees them."""

    def __init__(self, store: Elsewhere, source: torch.UntypedStorage) -> None:
        self.store = store
        self.kept = torch.empty(0, dtype=torch.uint8).set_(source).numpy().copy()

    def settle(self) -> None:
        return

    def look_ahead(self) -> None:
        return

    def fetch(self, out: Tensor) -> Copy:
        out.view(torch.uint8).numpy()[:] = self.kept
        self.store.num_fetched += 1
        return Copied()

    def release(self) -> None:
        self.store.now -= self.kept.nbytes


class Elsewhere:
    def __init__(self) -> None:
        self.now = self.peak = self.num_fetched = 0

    def put(self, source: torch.UntypedStorage) -> Away:
        self.now += source.nbytes()
        self.peak = max(self.peak, self.now)
        return Away(self, source)


@contextmanager
def treated(model: nn.Module, plan: sw.Plan, store: Elsewhere) -> Iterator[None]:
    offloading = Offloading(store, torch.device("cpu"), list(model.parameters()), waits=False)
    sites = TreatedSites(treatments_for(model, choose_units(model, plan), plan).by_site, {"offload": offloading})
    sites.install()
    try:
        yield
    finally:
        sites.remove()


def rehearsed(model: nn.Module, batch: object, plan: sw.Plan) -> Activations:
    mesh = mesh_for(plan, 2)
    rows, coordinate = tables_for(model, plan, mesh), dict.fromkeys(mesh.axes, 0)
    choices, cpu = choose_units(model, plan), torch.device("cpu")
    units = [make_unit(each, rows, mesh, coordinate, ByteMeter(), cpu) for each in choices]
    compute = table_for(plan, mesh).compute
    return rehearse(model, units, batch, device=cpu, compute=compute, treatments=treatments_for(model, choices, plan))


@pytest.mark.parametrize("choice", ["keep", *(choice for choice in CHOICES if choice != "disk")])
def test_a_rehearsal_counts_what_a_real_run_holds(choice: str) -> None:
    torch.manual_seed(0)
    model = Transformer(num_blocks=4)
    batch = tuple(tensor.contiguous() for tensor in batches(1, rows=64)[0])
    plan = load_plan({"preset": "zero3", **CHOICES.get(choice, {})})
    activations = rehearsed(model, batch, plan)
    twin, store = copy.deepcopy(model), Elsewhere()
    for param in twin.parameters():
        param.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
    with treated(twin, plan, store):
        num_recomputed = sum(type(block.forward).__name__ == "Recomputing" for block in twin.blocks)
        measured = profiled_peak(lambda: twin(*batch).backward())
    generators = num_recomputed * torch.get_rng_state().nbytes  # kept in tensors that no operation makes
    promised = max(mark.peak_bytes for mark in activations.marks)
    assert promised == measured + sum(one.nbytes for one in batch) - generators
    assert activations.host_bytes == store.peak
    assert store.now == 0
    assert "forward" not in twin.blocks[0].__dict__
    kept = max(mark.peak_bytes for mark in rehearsed(model, batch, load_plan("zero3")).marks)
    assert promised < {"keep": 2.0, "every-2nd": 0.85, "selective": 0.85}.get(choice, 0.7) * kept


class Changing(nn.Module):
    """The result of a product is added to in place: inside, or outside what it has returned."""

    def __init__(self, *, inside: bool) -> None:
        super().__init__()
        self.inside = inside
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x).add_(1.0) if self.inside else self.first(x)
        return x, self.second(torch.exp(x))


class Adding(nn.Module):
    def __init__(self, *, inside: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Changing(inside=inside) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            first, second = block(x)
            x = first + second if block.inside else first.add_(second)
        return torch.sin(x).sum()


@pytest.mark.parametrize("inside", [True, False])
def test_a_kept_result_that_is_written_to_is_refused(*, inside: bool) -> None:
    torch.manual_seed(0)
    model, x = Adding(inside=inside), torch.randn(4, 3, 8)

    def grads(*keep: str) -> list[Tensor]:
        plan = {"activations": {"policy": "selective", "keep": list(keep)} if keep else "keep"}
        with treated(model, load_plan(plan), Elsewhere()):
            model.zero_grad()
            model(x).backward()
        return [param.grad for param in model.parameters() if param.grad is not None]

    assert all(map(torch.equal, grads("aten.exp"), grads()))
    with pytest.raises(ModelError, match=r"The result of aten.mm.default in blocks.\d is changed in place"):
        grads("matmul")
