"""Training with recomputed or offloaded activations is bit-identical to training that keeps them."""

from __future__ import annotations

import copy
import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import small_transformers
import torch
import torch.nn.functional as F
from allocations import profiled_peak
from torch import nn
from torch.utils.checkpoint import checkpoint
from twins import batches, sharded_run

import shardwise as sw
from shardwise.errors import ConfigError, ModelError
from shardwise.memory import Copied, Copy, choose_units, make_units, tables_for, unit_specs
from shardwise.plan import load_plan
from shardwise.plan.placement import mesh_for, table_for
from shardwise.program import Activations
from shardwise.runtime.activations import Offloading, TreatedSites, treatments_for
from shardwise.runtime.rehearsal import rehearse
from shardwise.testing import run_ranks
from tests.models import Transformer
from tests.thorough import sampled, thorough_only

pytestmark = sampled

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
    ("offload", None, "every-2nd"),
]


def gradients(engine: sw.Engine) -> dict[str, Tensor]:
    names = [name for name, param in engine.module.named_parameters() if param.requires_grad]
    return {name: engine.get(name, "grad").clone() for name in names}


def raced(model: nn.Module, preset: str, num_ranks: int, mesh: Any, **plan: Any) -> tuple[Any, list[dict[str, Tensor]]]:
    """Train, and return the run and all gradients of each step. A step has two micro-batches of different lengths."""
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


@pytest.mark.parametrize(("preset", "mesh", "choice"), RACES)
def test_equal_to_the_bit(preset: str, mesh: dict[str, int] | None, choice: str, tmp_path: Path) -> None:
    """All losses, norms, gradients and parameters are equal, over several clipped steps of unequal micro-batches."""
    shares_memory = RACES.index((preset, mesh, choice)) % 2 == 0
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
    """Keeps bytes where torch's profiler does not see them."""

    def __init__(self, store: Elsewhere, source: torch.UntypedStorage) -> None:
        self.store = store
        self.kept = torch.empty(0, dtype=torch.uint8).set_(source).numpy().copy()

    def finish_copy(self) -> None:
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

    def put(self, source: torch.UntypedStorage, unit: str) -> Away:
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
    choices, rows, cpu = choose_units(model, plan), tables_for(model, plan, mesh), torch.device("cpu")
    units = make_units(choices, unit_specs(choices, rows, mesh), rows, mesh.coordinate(0), cpu)
    compute = table_for(plan, mesh).compute
    return rehearse(model, units, batch, device=cpu, compute=compute, treatments=treatments_for(model, choices, plan))


@pytest.mark.parametrize("choice", ["keep", *(choice for choice in CHOICES if choice != "disk")])
def test_a_rehearsal_counts_what_a_real_run_holds(choice: str) -> None:
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
    generators = num_recomputed * torch.get_rng_state().nbytes  # kept in tensors that no operation creates
    promised = max(mark.peak_bytes for mark in activations.marks)
    assert promised == measured + sum(one.nbytes for one in batch) - generators
    assert activations.host_bytes == store.peak
    assert store.now == 0
    assert "forward" not in twin.blocks[0].__dict__
    kept = max(mark.peak_bytes for mark in rehearsed(model, batch, load_plan("zero3")).marks)
    assert promised < {"keep": 2.0, "every-2nd": 0.85, "selective": 0.85}.get(choice, 0.7) * kept


class Changing(nn.Module):
    """The result of a matrix product is changed in place: inside the block, or by the caller after it was returned."""

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


class Noisy(nn.Module):
    """Dropout, running statistics, keyword arguments, and a nested output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 16)
        self.norm, self.dropout = nn.BatchNorm1d(64), nn.Dropout(0.3)

    def forward(self, x: Tensor, *, scale: Tensor) -> dict[str, Any]:
        hidden = self.dropout(self.norm(self.first(x)).relu_())
        hidden = F.scaled_dot_product_attention(*(hidden[None, None] for _ in range(3)), dropout_p=0.2)[0, 0]
        return {"hidden": [self.dropout(self.second(hidden)) * scale], "rest": None}


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Noisy() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.linspace(0.5, 2.0, 16).expand(len(x), -1).contiguous()  # every block saves it
        for block in self.blocks:
            x = x + block(x, scale=scale)["hidden"][0]
        return x.square().mean()


def twice(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Gradients of two backwards through one graph, then second derivatives; also buffers."""
    torch.manual_seed(1)
    model.zero_grad()
    loss = model(x)
    loss.backward(retain_graph=True)
    (loss * 2).backward()
    torch.manual_seed(1)
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(x), x, create_graph=True)
    grad.square().sum().backward()
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    return [*grads, *(buffer.clone() for buffer in model.buffers()), torch.rand(3)]


@pytest.mark.parametrize("policy", ["recompute", "selective", "offload"])
def test_dropout_statistics_and_several_backwards(policy: str) -> None:
    model, x, store = Deep(), torch.randn(32, 16), Elsewhere()
    twin = copy.deepcopy(model)
    with treated(twin, load_plan({"activations": policy}), store):
        results = twice(twin, x)
    expected = twice(model, x)
    assert len(results) == len(expected)
    assert all(map(torch.equal, results, expected))
    gc.collect()  # the graph of a second derivative is a reference cycle
    assert store.now == 0
    assert (store.num_fetched > 0) == (policy == "offload")


def test_a_storage_that_every_block_saves_leaves_once() -> None:
    store, x = Elsewhere(), torch.randn(32, 16)
    model = Deep()
    own: list[int] = []
    with treated(model, load_plan({"activations": "offload"}), store):
        scale = torch.ones(32, 16) * 2  # 2 KiB: too small to be offloaded
        model.blocks[0](x, scale=scale)
        own.append(store.peak)
    wide = torch.ones(2048, 16) * 2
    with treated(model, load_plan({"activations": "offload"}), store):
        out = x
        for block in model.blocks[:2]:
            out = block(out, scale=wide[:32])["hidden"][0]
        assert store.now == 2 * own[0] + wide.nbytes


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_decoders_that_fill_caches(name: str) -> None:
    model = getattr(small_transformers, name)()
    tokens = torch.randint(0, 97, (4, 12))

    def grads(policy: str) -> tuple[list[Tensor], int]:
        model.zero_grad()
        with treated(model, load_plan({"activations": policy}), Elsewhere()):
            output = model(input_ids=tokens, labels=tokens, use_cache=True)
            output.loss.backward()
        found = [param.grad for param in model.parameters() if param.grad is not None]
        return found, output.past_key_values.get_seq_length()

    expected, length = grads("keep")
    assert length == 12
    for policy in ("recompute", "selective", "offload"):
        found, length = grads(policy)
        assert length == 12
        assert all(map(torch.equal, found, expected))


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(self.linear(x)).mul_(2.0)


def test_what_is_written_to_after_it_was_saved_raises() -> None:
    model = nn.Sequential(Writes(), Writes())
    with treated(model, load_plan({"activations": "offload"}), Elsewhere()):
        loss = model(torch.randn(32, 64)).sum()
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation: .* that the forward of \d has"):
            loss.backward()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"activations": "offlod"}, "activations.policy is 'offlod'; expected keep, recompute, selective, offload, disk"),
    ({"activations": {"policy": "recompute", "every": 0}}, "activations.every is 0; expected a whole number of at lea"),
    ({"activations": {"policy": "recompute", "keep": ["matmul"]}}, "activations.keep names operators .* selective"),
    ({"activations": {"policy": "selective", "keep": ["aten.mn"]}}, "names 'aten.mn', .* Did you mean 'aten.mm'"),
    ({"activations": {"policy": "selective", "keep": ["aten.native_dropout"]}}, "which draws random numbers"),
    ({"activations": "disk"}, "activations is disk, and the plan names no folder"),
    ({"activations": "selective", "compile": "aot_eager"}, "activations is selective and compile is 'aot_eager'"),
    ({"units": ["tokens"], "activations": "offload"}, "none of the units of Transformer is a module with modules"),
    (
        {"rules": {"some": {"params": ["blocks.0.up.*"], "activations": "offload"}}},
        "rule 'some' has activations, but there is no unit all of whose parameters fit it.* blocks.0",
    ),
]


@pytest.mark.parametrize(("plan", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_meant_is_refused(plan: dict[str, Any], message: str) -> None:
    model = Transformer()

    def shard(world: sw.World) -> None:
        with pytest.raises(ConfigError, match=f"(?s).*{message}"):
            sw.shard(model, plan, world=world)

    run_ranks(1, shard)
    assert "forward" not in model.blocks[0].__dict__


def test_a_unit_that_recomputes_itself_is_refused() -> None:
    model = small_transformers.llama()
    model.activation_checkpointing_enable()

    def shard(world: sw.World) -> None:
        with pytest.raises(ConfigError, match=r"model.layers.0 recomputes its activations itself"):
            sw.shard(model, {"activations": "recompute"}, world=world)

    run_ranks(1, shard)
    twin = Deep()
    with treated(twin, load_plan({"activations": "recompute"}), Elsewhere()):
        loss = checkpoint(twin, torch.randn(32, 16), use_reentrant=False)
        with pytest.raises(ModelError, match=r"blocks.\d is recomputed by the model"):
            loss.backward()


def test_an_engine_says_and_counts_what_is_elsewhere() -> None:
    model, batch = Transformer(), batches(1, rows=64)[0]
    plan = {"preset": "zero2", "activations": "offload", "rules": {"last": {"params": ["blocks.2.*"]}}}
    plan["rules"]["last"]["activations"] = "recompute"

    def rank(world: sw.World) -> tuple[str, sw.MemoryReport, int]:
        engine = sw.shard(model, plan, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), world=world)
        with engine:
            promised = engine.rehearse(batch)
            for _ in range(2):
                engine.backward(engine(*batch))
                engine.step()
            assert promised.host is not None
            return str(engine), engine.memory(), promised.host.activations

    ((said, memory, promised),) = run_ranks(1, rank)
    assert re.search(r"blocks.1 +12.6 K, activations on the host\n", said)
    assert re.search(r"blocks.2 +12.6 K, activations recomputed\n", said)
    assert memory.measured_on_host["activations"] == memory.promised_on_host["activations"] == promised > 0
    assert "activations on the host" in str(memory)
    assert model.blocks[0](torch.randn(2, 3, 32)).shape == (2, 3, 32)
    assert "forward" not in model.blocks[0].__dict__
