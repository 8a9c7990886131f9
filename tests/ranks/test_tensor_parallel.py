"""Models split along the mesh axis `tp`, compared with the unsplit twin: losses, norms, gradients, parameters."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_devices import Devices
from safetensors.torch import save_file
from split_models import TENSOR, Transformer, tokens
from torch import nn
from torch.autograd.forward_ad import dual_level, make_dual
from torch.nn import functional
from twins import Run, assert_alike, chunked, plain_run, ranks_run, work_on_ranks

import shardwise as sw
from shardwise.errors import ConfigError, DataError, ModelError, StateError
from shardwise.parallel.tensor import draws
from shardwise.plan.placement import PRESETS
from shardwise.testing import run_ranks
from tests import inside
from tests.ranks.split_models import Recomputing
from tests.thorough import THOROUGH, sampled, thorough_only, varies

pytestmark = sampled

Tensor = torch.Tensor
Build = Callable[[], nn.Module]
ONE_AXIS = sorted(name for name, one in PRESETS.items() if len(one.axes) == 1 and one.optim.tier != "disk")
NUM_STEPS, ACCUMULATE, MAX_NORM = 3, 2, 0.5


def seeded(build: Build) -> nn.Module:
    torch.manual_seed(3)
    return build()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """With an epsilon so large that gradients which are only rounding errors (of keys' biases) have no effect."""
    trained = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2, eps=1e-3)


DATA = [(torch.cat([tokens(10 * step + micro) for micro in range(ACCUMULATE)]),) for step in range(NUM_STEPS)]


def plain(model: nn.Module, num_data_ranks: int = 1) -> Run:
    """One rank's micro-batches after the other's, as a model counts its calls that computes every second one apart."""
    shares = ACCUMULATE * num_data_ranks
    dealt = [chunked(batch, shares) for batch in DATA]
    data = [(torch.cat([x for place in range(num_data_ranks) for (x,) in of[place::num_data_ranks]]),) for of in dealt]
    return plain_run(model, data, optimizer_of, clip=MAX_NORM, shares=shares, whole_state=True)


def sharded(
    build: Build,
    preset: str,
    tensor: dict[str, Any],
    *,
    dp: int = 2,
    tp: int = 2,
    shares_memory: bool = True,
    hosts: str | None = None,
    devices: Devices | None = None,
    **plan: Any,
) -> list[Run]:
    """Train on `dp` times `tp` ranks. `hosts` has a letter for the host of each rank."""
    asked = {
        "preset": preset,
        "mesh": {"dp": dp, "tp": tp},
        "tensor": tensor,
        "accumulate": ACCUMULATE,
        "clip_grad_norm": MAX_NORM,
        **plan,
    }
    on_cpu: dict[str, Any] = {"shares_memory": shares_memory, "hosts": hosts}
    how = on_cpu if devices is None else {"run": devices.run}
    return ranks_run(seeded(build), DATA, asked, optimizer_of, **how)


def assert_equal(runs: list[Run], twin: Run) -> None:
    for run in runs:
        assert run.params.keys() == twin.params.keys()
        assert_alike(run, twin, norm=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("preset", "tied"), [*((name, True) for name in ONE_AXIS), ("ddp", False), ("zero3", False)])
def test_every_preset_trains_as_the_unsplit_model(preset: str, tied: bool) -> None:
    def build() -> nn.Module:
        return Transformer(tied=tied)

    assert_equal(sharded(build, preset, TENSOR), plain(seeded(build), 2))


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize("hosts", [None, "aaaabbbb"], ids=["one-host", "two-hosts"])
@pytest.mark.parametrize("preset", ["hsdp", "hpz"])
def test_presets_of_two_axes(preset: str, hosts: str | None) -> None:
    mesh = {"node": 2, "local": 2, "tp": 2}
    assert_equal(sharded(Transformer, preset, TENSOR, dp=4, hosts=hosts, mesh=mesh), plain(seeded(Transformer), 4))


@pytest.mark.parametrize("preset", ["ddp", "zero3"])
def test_without_shared_memory_and_without_data_axes(preset: str) -> None:
    assert_equal(sharded(Transformer, preset, TENSOR, dp=1, shares_memory=False), plain(seeded(Transformer)))


@pytest.mark.parametrize("preset", ["ddp", "zero2", "zero3"])
def test_sequences_are_split_between_blocks(preset: str) -> None:
    asked = {**TENSOR, "sequence": True}
    assert_equal(sharded(Transformer, preset, asked), plain(seeded(Transformer), 2))


@pytest.mark.parametrize("is_narrow", [False, True], ids=["fp32", "autocast"])
def test_only_a_part_of_gathered_sequences_is_saved(is_narrow: bool) -> None:
    """Column modules read the whole sequence. They gather it again in the backward, in their compute dtype."""
    plan = {"preset": "ddp", "mesh": {"dp": 1, "tp": 2}, "tensor": {**TENSOR, "sequence": True}}
    whole = (tokens(0).numel(), 24)

    def work(engine: sw.Engine) -> tuple[list[tuple[int, ...]], int]:
        saved: list[tuple[int, ...]] = []

        def pack(tensor: Tensor) -> Tensor:
            saved.append(tuple(tensor.flatten(0, -2).shape) if tensor.dim() > 1 else ())
            return tensor

        narrow = torch.autocast("cpu", torch.bfloat16, enabled=is_narrow)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), narrow:
            loss = engine(tokens(0))
        ledger = inside.ledger(engine)
        ledger.clear()
        engine.backward(loss)
        return saved, ledger.sent_bytes["gather", "tp"]

    for saved, gathered_bytes in work_on_ranks(2, work, plan, lambda: seeded(Transformer), None):
        assert (whole[0] // 2, whole[1]) in saved
        assert saved.count(whole) == 2, "what the last norm and the head read, behind the blocks"
        # per block, the inputs of two regions and the gradients of two row modules' outputs; that of the first edge
        num_bytes = 2 if is_narrow else 4
        assert gathered_bytes == (2 * (2 + 2) * num_bytes + 4) * math.prod(whole) // 2


def test_with_sequences_an_attention_that_no_pattern_splits_is_refused() -> None:
    """It would attend to a rank's own tokens, without an error from torch. Without `sequence` it is right."""
    unsplit = {name: style for name, style in TENSOR["plan"].items() if "attn" not in name}
    assert_equal(sharded(Transformer, "ddp", {"plan": unsplit}, dp=1), plain(seeded(Transformer)))
    with pytest.raises(ModelError, match=r"blocks.0.attn computes .*attention over 12 tokens, of which .* 6"):
        sharded(Transformer, "ddp", {"plan": unsplit, "sequence": True}, dp=1)


def test_sequences_that_do_not_divide_are_refused() -> None:
    plan = {"preset": "ddp", "mesh": {"dp": 1, "tp": 2}, "tensor": {**TENSOR, "sequence": True}}

    def work(engine: sw.Engine) -> None:
        engine(tokens(0)[:, :11])

    with pytest.raises(ModelError, match="over 2 ranks, but its length is 11"):
        work_on_ranks(2, work, plan, lambda: seeded(Transformer), None)
    other = {**plan, "tensor": {"plan": {"q": "column", "k": "column", "o": "row"}, "sequence": True}}
    uneven = [seeded(Uneven) for _ in range(2)]
    with pytest.raises(ModelError, match=r"tensor.sequence needs one list of blocks"):
        run_ranks(2, lambda world: sw.shard(uneven[world.rank], other, world=world))


@thorough_only("slow; smaller tests beside it cover the same code")
def test_frozen_parts() -> None:
    def build() -> nn.Module:
        model = Transformer(tied=False)
        for part in (model.embed, model.blocks[0].attn, model.blocks[1].up, model.norm):
            part.requires_grad_(False)
        return model

    for preset in ("zero1", "zero3"):
        assert_equal(sharded(build, preset, TENSOR), plain(seeded(build), 2))


@varies
def test_uneven_parts() -> None:
    """Five heads, 76 features and a vocabulary of 40 on three ranks, or on two."""

    def build() -> nn.Module:
        return Uneven()

    for tp in (3, 2) if THOROUGH else (3,):
        assert_equal(sharded(build, "zero2", UNEVEN, dp=1, tp=tp), plain(seeded(build)))


class Uneven(nn.Module):
    """Attention that derives the number of heads from its input, as in models of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 20, padding_idx=3)
        self.q, self.k, self.v, self.o = (nn.Linear(20, 20) for _ in range(4))
        self.head_norm = nn.LayerNorm(4)
        self.up, self.down = nn.Linear(20, 76, bias=False), nn.Linear(76, 20)
        self.features = nn.Embedding(12, 20)
        self.head = nn.Linear(20, 40)

    def forward(self, batch: Tensor) -> Tensor:
        x = self.embed(batch) + self.features(torch.arange(batch.shape[1]))
        q, k, v = (one(x).unflatten(-1, (-1, 4)).transpose(1, 2) for one in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(self.head_norm(q), k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        x = x + self.down(functional.silu(self.up(x)))
        return functional.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


UNEVEN: dict[str, Any] = {
    "plan": {
        **{name: {"style": "column", "heads": 5} for name in "qkv"},
        "o": {"style": "row", "heads": 5},
        "head_norm": "summed",
        "up": "column_gathered",
        "down": "row_scattered",
        "embed": "vocabulary",
        "features": "embedding_column",
        "head": "vocabulary",
    }
}


class CutLogits(Transformer):
    """The loss is computed from split logits; some targets are ignored."""

    def forward(self, batch: Tensor) -> Tensor:
        x = self.embed(batch) + self.positions.weight[: batch.shape[1]]
        for block in self.blocks:
            x = block(x)
        targets = batch[:, 1:].masked_fill(batch[:, 1:] % 7 == 0, -100)
        return sw.tensor.cross_entropy(self.head(self.norm(x))[:, :-1].flatten(0, 1), targets.flatten(), self.head)


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize("tp", [2, 4])
def test_split_logits(tp: int) -> None:
    """In the twin the head is whole, and the same function calls torch's."""
    asked = {**TENSOR, "plan": {**TENSOR["plan"], "head": "vocabulary_cut"}}
    assert_equal(sharded(CutLogits, "zero1", asked, dp=1, tp=tp), plain(seeded(CutLogits)))


def test_cross_entropy_of_a_head_that_gathers_is_refused() -> None:
    plan = {"preset": "ddp", "mesh": {"dp": 1, "tp": 2}, "tensor": TENSOR}

    def work(engine: sw.Engine) -> None:
        engine(tokens(0))

    with pytest.raises(ModelError, match="The head given to cross_entropy\\(\\) gathers its logits"):
        work_on_ranks(2, work, plan, lambda: seeded(CutLogits), None)
    asked = {**plan, "tensor": {**TENSOR, "cut_logits": True}}
    others = [seeded(CutLogits) for _ in range(2)]
    with pytest.raises(ModelError, match=r"is for language models of transformers, .* CutLogits has none"):
        run_ranks(2, lambda world: sw.shard(others[world.rank], asked, world=world))


def verified(build: Build, tensor: dict[str, Any], **plan: Any) -> list[float]:
    asked = {"preset": "zero3", "mesh": {"dp": 2, "tp": 2}, "tensor": {**tensor, "verify": True}, **plan}

    def work(engine: sw.Engine) -> float:
        for step in range(2):
            loss = engine(tokens(step).chunk(2)[engine.world.rank // 2])
            engine.backward(loss)
            engine.step()
        return loss.item()

    return work_on_ranks(4, work, asked, lambda: seeded(build), optimizer_of)


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize("plan", [{}, {"precision": "bf16"}])
def test_verify_accepts_a_correct_split_and_changes_nothing(plan: dict[str, Any]) -> None:
    assert len(set(verified(Transformer, TENSOR, **plan))) == 2
    verified(Transformer, {**TENSOR, "sequence": True}, **plan)


class ByPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.linspace(1, 2, x.shape[-1], device=x.device)


class MixingBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.by_place, self.down = nn.Linear(8, 16), ByPlace(), nn.Linear(16, 8)
        self.norm, self.embed = nn.LayerNorm(8), nn.Embedding(40, 8)

    def forward(self, batch: Tensor) -> Tensor:
        return self.norm(self.down(self.by_place(self.up(self.embed(batch))))).square().mean() * 3


def test_verify_names_the_first_module_that_differs() -> None:
    with pytest.raises(ModelError, match=r"The first module that differs is down \(Linear\), by"):
        verified(MixingBlock, {"plan": {"up": "column", "down": "row"}})


def test_verify_says_behind_what_it_sees_nothing(caplog: pytest.LogCaptureFixture) -> None:
    asked = {**UNEVEN, "plan": {name: rule for name, rule in UNEVEN["plan"].items() if name != "features"}}
    verified(partial(Gated, 0.0), asked)
    assert "o.weight begins with zeros: what is computed before it is not compared" in caplog.text


def test_verify_compares_the_first_forward_that_does_not_raise() -> None:
    tensor = {"plan": {"up": "column", "down": "row"}, "verify": True}
    plan = {"preset": "ddp", "mesh": {"tp": 2}, "tensor": tensor}

    def work(engine: sw.Engine) -> None:
        handle = engine.module.norm.register_forward_pre_hook(_raise)
        with pytest.raises(ArithmeticError):
            engine(tokens(0))
        handle.remove()
        engine(tokens(0))

    with pytest.raises(ModelError, match=r"The first module that differs is down \(Linear\), by"):
        work_on_ranks(2, work, plan, lambda: seeded(MixingBlock), None)


class FrozenNorm(nn.Module):
    """As of a pretrained part: it keeps its statistics while the rest trains."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(40, 8), nn.BatchNorm1d(8).eval()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, batch: Tensor) -> Tensor:
        return self.down(self.up(self.norm(self.embed(batch).mean(1)))).square().mean()


def test_verify_keeps_modules_in_evaluation() -> None:
    plan = {
        "preset": "ddp",
        "mesh": {"tp": 2},
        "tensor": {"plan": {"up": "column", "down": "row"}, "verify": True},
    }
    work_on_ranks(2, lambda engine: engine(tokens(0)).item(), plan, lambda: seeded(FrozenNorm), None)


def _raise(*_: object) -> None:
    raise ArithmeticError


def test_verify_in_stages_is_refused_before_anything_changes() -> None:
    models = [seeded(Transformer) for _ in range(4)]
    before = {name: value.clone() for name, value in models[0].state_dict().items()}
    plan = {"preset": "zero1", "mesh": {"pp": 2, "tp": 2}, "accumulate": 2, "tensor": {**TENSOR, "verify": True}}
    with pytest.raises(ConfigError, match=r"tensor.verify compares the whole model, .* pp left out of the mesh"):
        run_ranks(4, lambda world: sw.shard(models[world.rank], plan, world=world))
    for model in models:
        assert model.blocks[0].attn.num_heads == 4
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_verify_refuses_dropout_before_a_disk_folder_is_locked(tmp_path: Path) -> None:
    models = [nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 8)) for _ in range(2)]
    plan = {"preset": "zero1", "mesh": {"dp": 1, "tp": 2}, "rows": {"optim": {"tier": "disk"}}, "disk": str(tmp_path)}
    tensor = {"plan": {"0": "column", "2": "row"}, "verify": True}

    def rank(world: sw.World) -> None:
        model = models[world.rank]
        sw.shard(model, {**plan, "tensor": tensor}, optimizer=torch.optim.AdamW(model.parameters()), world=world)

    with pytest.raises(ConfigError, match="verify cannot compare outputs with dropout"):
        run_ranks(2, rank)
    assert not list(tmp_path.iterdir())


@thorough_only("slow; smaller tests beside it cover the same code")
def test_bf16_stays_near_the_unsplit_model() -> None:
    """fp16: `test_fp16_splits.py`."""
    runs = sharded(Transformer, "zero3", TENSOR, precision="bf16")
    twin = plain(seeded(Transformer), 2)
    for run in runs:
        assert run.norms == runs[0].norms
        assert run.losses == pytest.approx(twin.losses, rel=2e-2)
        assert run.norms == pytest.approx(twin.norms, rel=5e-2)


@thorough_only("slow; smaller tests beside it cover the same code")
def test_a_scale_that_overflows_in_fp16_changes_nothing() -> None:
    scale = {"initial": 2.0**40, "hysteresis": 1}
    runs = sharded(Transformer, "zero1", TENSOR, precision="fp16", loss_scale=scale)
    for run in runs:
        assert run.norms == runs[0].norms
        assert not any(map(math.isfinite, run.norms))
        assert all(torch.equal(run.params[name], value) for name, value in seeded(Transformer).state_dict().items())


@thorough_only("slow; smaller tests beside it cover the same code")
def test_a_rehearsal_and_an_evaluation() -> None:
    expected = seeded(Transformer)(tokens(0)).item()
    plan = {"preset": "zero3", "mesh": {"dp": 2, "tp": 2}, "tensor": TENSOR}

    def work(engine: sw.Engine) -> tuple[int, float, float]:
        model = engine.module
        held = engine.rehearse(tokens(0)).by_kind["activations"]
        with engine.inference():
            in_inference = float(model(tokens(0)))
        with torch.no_grad():
            return held, in_inference, float(model(tokens(0)))

    for held, in_inference, outside in work_on_ranks(4, work, plan, lambda: seeded(Transformer), optimizer_of):
        assert held > 0
        assert (in_inference, outside) == pytest.approx((expected, expected), rel=1e-5)


@thorough_only("slow; smaller tests beside it cover the same code")
def test_recomputed_blocks() -> None:
    assert_equal(sharded(Recomputing, "zero3", TENSOR), plain(seeded(Recomputing), 2))


@thorough_only("slow; smaller tests beside it cover the same code")
def test_lamb_and_the_norms_of_whole_parameters() -> None:
    def lamb(model: nn.Module) -> torch.optim.Optimizer:
        return sw.optim.Lamb(model.parameters(), lr=1e-2, eps=1e-3)

    twin = seeded(Transformer)
    optimizer = lamb(twin)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        twin(tokens(step)).backward()
        optimizer.step()
    models = [seeded(Transformer) for _ in range(4)]

    def rank(world: sw.World) -> dict[str, Tensor]:
        model = models[world.rank]
        plan = {"preset": "zero1", "mesh": {"dp": 2, "tp": 2}, "tensor": TENSOR}
        with sw.shard(model, plan, optimizer=lamb(model), world=world) as engine:
            for step in range(NUM_STEPS):
                engine.backward(engine(tokens(step).chunk(2)[world.rank // 2]))
                engine.step()
            return engine.state_dict()

    for state in run_ranks(4, rank):
        for name, value in twin.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)


def test_initial_values_are_those_of_the_unsplit_model_however_it_is_built(tmp_path: Path) -> None:
    expected = seeded(Transformer).state_dict()
    plan = {"preset": "zero3", "mesh": {"dp": 2, "tp": 2}, "tensor": TENSOR}
    models = [seeded(Transformer) for _ in range(4)]
    for model in models[1:]:
        nn.init.normal_(model.blocks[0].up.weight)  # rank 0's values count
    deferred = []
    for _ in range(4):
        torch.manual_seed(3)
        with sw.deferred_init():
            deferred.append(Transformer())
    with torch.device("meta"):
        metas = [Transformer() for _ in range(4)]
    file = tmp_path / "model.safetensors"
    save_file({name: value.clone() for name, value in expected.items() if name != "head.weight"}, file)
    for born, weights in ((models, None), (deferred, None), (metas, file)):

        def rank(world: sw.World, born: list[Any] = born, weights: Path | None = weights) -> dict[str, Tensor]:
            with sw.shard(born[world.rank], plan, world=world, weights=weights) as engine:
                assert born[world.rank].blocks[0].up.weight.shape == (36, 24)
                return engine.state_dict()

        for state in run_ranks(4, rank):
            for name, value in expected.items():
                assert torch.equal(state[name], value), name


OF_A_PART: dict[str, Callable[[nn.Parameter], Any]] = {
    "norm in a loss": lambda param: param.norm(),
    "norm": lambda param: param.detach().norm(),
    "mean of the gradient": lambda param: param.grad.mean(),
    "a row": lambda param: param.detach()[0],
    "product": lambda param: param.T @ param,
    "norms of all": lambda param: torch._foreach_norm([param.grad]),
    "rows": lambda param: param.detach().norm(dim=0),
    "a sum of squares": lambda param: param.detach().pow(2).sum(),
    "a sum of squares of .data": lambda param: (param.data**2).sum().sqrt(),
    "a mean of the gradient's squares": lambda param: param.grad.square().mean(),
    "a copy's norm": lambda param: param.detach().clone().norm(),
    "a wider norm": lambda param: param.grad.double().norm(),
    "the largest element": lambda param: param.grad.abs().max(),
    "whether one is no number": lambda param: torch.isnan(param.grad).any(),
    "a row of what is derived": lambda param: param.detach().abs()[3],
    "a ratio": lambda param: (param.grad / (param.detach().abs() + 1)).std(),
    "a dot product": lambda param: torch.dot(param.detach().flatten(), param.grad.flatten()),
    "a mean in a loss": lambda param: param.pow(2).mean(),
    "a factor that trains": lambda param: param * torch.ones((), requires_grad=True),
}
OF_EACH_PART: dict[str, Callable[[nn.Parameter], Any]] = {
    "elementwise": lambda param: param.detach().clamp_(-0.5, 0.5),
    "columns": lambda param: param.detach().norm(dim=1),
    "a column": lambda param: param.detach()[:, 0],
    "a copy": lambda param: torch.zeros(param.shape).lerp_(param.detach(), 0.1),
    "transposed": lambda param: param.detach().t(),
    "a sum in a loss": lambda param: 0 * param.sum(),
    "a sum of squares in a loss": lambda param: 0 * param.pow(2).sum(),
    "an average of many steps": lambda param: param.detach().clone().mul_(0.9).add_(param.detach(), alpha=0.1),
    "sums along whole dimensions": lambda param: param.detach().square().sum(1),
}


def test_what_is_computed_of_a_part_alone_is_refused() -> None:
    """Of a matrix that is split by rows: what the unsplit one would not give in parts. A gradient's norm is whole."""
    plan = {"preset": "zero1", "mesh": {"tp": 2}, "tensor": TENSOR}
    twin = seeded(Transformer)
    twin(tokens(0)).backward()

    def work(engine: sw.Engine) -> None:
        model = engine.module
        engine.backward(engine(tokens(0)))
        weight = model.blocks[0].up.weight
        for compute in OF_A_PART.values():
            with pytest.raises(StateError, match=r"blocks.0.up.weight is split .* has \[.*\] of \[.*\]"):
                compute(weight)
        for compute in OF_EACH_PART.values():
            compute(weight)
        with pytest.raises(StateError, match=r"blocks.0.up.weight .* add_ is given the part .* model.state_dict\(\)"):
            torch.zeros(72, 24).mul_(0.9).add_(weight.detach(), alpha=0.1)
        assert weight.grad is not None
        torch.testing.assert_close(weight.grad.norm(), twin.blocks[0].up.weight.grad.norm())
        assert model.norm.weight.detach().norm().item() > 0  # whole on each rank

    work_on_ranks(2, work, plan, lambda: seeded(Transformer), optimizer_of)


SUMS: dict[str, Callable[[Any], Tensor]] = {
    "of squares": lambda params: sum(p.pow(2).sum() for p in params),
    "a norm": lambda params: sum(p.pow(2).sum() for p in params).sqrt(),
    "norms of each": lambda params: sum((1 + p).pow(2).sum().sqrt() for p in params),
    "columns": lambda params: sum(p.pow(2).sum(0).sqrt().sum() for p in params if p.dim() == 2),
    "rows": lambda params: sum(p.pow(2).sum(1).sqrt().sum() for p in params if p.dim() == 2),
    "a product of two": lambda params: (params[0].abs().sum() * params[1].exp().sum()).log(),
    "a distance": lambda params: sum(torch.sum((0.5 - p) ** 2) for p in params).log1p(),
}


@pytest.mark.parametrize("term", SUMS)
@pytest.mark.parametrize("preset", ["zero1", "zero3"])
def test_sums_over_split_parameters_are_the_whole_ones_in_a_loss(term: str, preset: str) -> None:
    plan = {"preset": preset, "mesh": {"dp": 2, "tp": 2}, "tensor": TENSOR}
    twin, models = seeded(Transformer), [seeded(Transformer) for _ in range(4)]
    loss = twin(tokens(0)) + SUMS[term](list(twin.parameters()))
    loss.backward()

    def rank(world: sw.World) -> None:
        model = models[world.rank]
        with sw.shard(model, plan, optimizer=optimizer_of(model), world=world) as engine:
            ours = engine(tokens(0)) + SUMS[term](list(model.parameters()))
            torch.testing.assert_close(ours.detach(), loss.detach())
            engine.backward(ours)
            for name, param in twin.named_parameters():
                torch.testing.assert_close(engine.get(name, "grad"), param.grad)

    run_ranks(4, rank)


@pytest.mark.parametrize("use", ["without a block", "a shallow copy"])
def test_a_plan_is_checked_in_the_model_that_is_called(use: str) -> None:
    """The first forward, which is checked, calls other modules than `shard` has seen."""

    def called(model: Any) -> Any:
        if use == "a shallow copy":
            return copy.copy(model)
        del model.blocks[-1]
        return model

    twin = seeded(Transformer)
    loss = called(twin)(tokens(0))
    loss.backward()

    def work(engine: sw.Engine) -> None:
        ours = called(engine.module)(tokens(0))
        torch.testing.assert_close(ours.detach(), loss.detach())
        ours.backward()
        for name, param in twin.named_parameters():
            torch.testing.assert_close(engine.get(name, "grad"), param.grad)

    work_on_ranks(
        2, work, {"preset": "zero1", "mesh": {"tp": 2}, "tensor": TENSOR}, lambda: seeded(Transformer), optimizer_of
    )


def test_whole_tensors_are_read_and_written() -> None:
    plan = {"preset": "zero2", "mesh": {"dp": 2, "tp": 2}, "tensor": TENSOR}
    value = torch.arange(72.0 * 24).view(72, 24)

    def work(engine: sw.Engine) -> None:
        model = engine.module
        engine.set("blocks.0.attn.qkv.weight", value)
        assert torch.equal(engine.get("blocks.0.attn.qkv.weight"), value)
        place = engine.world.rank % 2
        own = [value[start + 12 * place : start + 12 * (place + 1)] for start in (0, 24, 48)]
        assert torch.equal(model.blocks[0].attn.qkv.weight.detach().clone(), torch.cat(own))
        engine.backward(engine(tokens(0)))
        engine.step()
        moment = torch.randn(24, 72, generator=torch.Generator().manual_seed(5))
        engine.set("blocks.1.down.weight", moment, "exp_avg")
        state, whole = engine.optimizer_state_dict(), engine.state_dict()
        numbers = [name for name, _ in model.named_parameters()]
        assert torch.equal(state["state"][numbers.index("blocks.1.down.weight")]["exp_avg"], moment)
        engine.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in whole.items()})
        assert all(not tensor.any() for tensor in engine.state_dict().values())
        engine.load_state_dict(whole)
        engine.load_optimizer_state_dict(state)
        for name, tensor in engine.state_dict().items():
            assert torch.equal(tensor, whole[name])
        again = engine.optimizer_state_dict()["state"]
        for number, entry in state["state"].items():
            for key, tensor in entry.items():
                assert torch.equal(again[number][key], tensor), (number, key)
        gathered = engine.gathered("blocks.0.up.weight")
        with pytest.raises(ModelError, match=r"of blocks.0.up.weight this rank has the part"), gathered:
            pass

    work_on_ranks(4, work, plan, lambda: seeded(Transformer), optimizer_of)


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no plan": ({}, ModelError, "Transformer has no tensor-parallel plan of its own"),
    "no such module": (
        {"plan": {"blocks.*.mlp": "column"}},
        ConfigError,
        r"has the pattern 'blocks.\*.mlp', which matches no module",
    ),
    "heads": (
        {"plan": {"blocks.*.attn.qkv": {"style": "column", "parts": 3, "heads": 5}}},
        ModelError,
        r"blocks.0.attn.qkv has 24 features, which are not divisible into 5 heads",
    ),
    "parts": (
        {"plan": {"blocks.*.attn.qkv": {"style": "column", "parts": 5}}},
        ModelError,
        "blocks.0.attn.qkv has 72 features, which are not divisible into 5 matrices",
    ),
    "an attribute": (
        {**TENSOR, "divide": {"blocks.*.attn": ["num_head"]}},
        ConfigError,
        "tensor.divide names num_head of blocks.0.attn, which is None",
    ),
    "a module that is not linear": (
        {"plan": {"blocks.*.attn": "row"}},
        ModelError,
        "blocks.0.attn is a Attention, but the style row is for nn.Linear",
    ),
    "two ways to split one weight": (
        {"plan": {"embed": "embedding_column", "head": "vocabulary"}},
        ModelError,
        r"embed.weight is used by embed and by head, which split it differently: \[:, \d+:\d+\] and \[\d+:\d+, :\]",
    ),
    "nothing": ({"plan": {"norm": "summed"}}, ModelError, "splits no module"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_before_anything_changes(case: str) -> None:
    tensor, kind, said = REFUSED[case]
    models = [seeded(Transformer) for _ in range(2)]
    before = {name: value.clone() for name, value in models[0].state_dict().items()}
    plan = {"preset": "zero1", "mesh": {"dp": 1, "tp": 2}, "tensor": tensor}
    with pytest.raises(kind, match=said):
        run_ranks(2, lambda world: sw.shard(models[world.rank], plan, world=world))
    for name, value in models[0].state_dict().items():
        assert torch.equal(value, before[name])
    assert models[0].blocks[0].attn.num_heads == 4


def test_an_odd_number_of_ranks_for_a_count_is_refused() -> None:
    plan = {"preset": "zero1", "mesh": {"dp": 1, "tp": 3}, "tensor": {**TENSOR, "plan": {"blocks.*.up": "column"}}}
    models = [seeded(Transformer) for _ in range(3)]
    with pytest.raises(ModelError, match=r"blocks.0.attn.num_heads is 4, .* not divisible by the 3 ranks along tp"):
        run_ranks(3, lambda world: sw.shard(models[world.rank], plan, world=world))


def test_optimizers_of_whole_matrices_are_refused_for_split_ones() -> None:
    plan = {"preset": "zero1", "mesh": {"dp": 1, "tp": 2}, "tensor": TENSOR}
    models = [seeded(Transformer) for _ in range(2)]

    def rank(world: sw.World) -> None:
        hidden = [block.up.weight for block in models[world.rank].blocks]
        sw.shard(models[world.rank], plan, optimizer=sw.optim.Muon(hidden), world=world)

    with pytest.raises(ModelError, match=r"blocks.0.up.weight is split along tp: this rank has \[\d+:\d+, :\] of it"):
        run_ranks(2, rank)


def test_ranks_that_share_a_sample_but_get_different_batches_are_refused() -> None:
    plan = {"preset": "ddp", "mesh": {"dp": 2, "tp": 2}, "tensor": TENSOR}

    def work(engine: sw.Engine) -> None:
        assert engine.data_ranks == (engine.world.rank // 2, 2)
        engine(tokens(engine.world.rank))

    with pytest.raises(DataError, match=r"Ranks \d and \d share each sample along the mesh axis 'tp', .* argument 0"):
        work_on_ranks(4, work, plan, lambda: seeded(Transformer), None)


def test_later_batches_of_ranks_that_share_a_sample_are_compared_too() -> None:
    models = [seeded(Transformer) for _ in range(2)]
    plan = {"preset": "ddp", "mesh": {"tp": 2}, "tensor": TENSOR}
    num_steps = []

    def rank(world: sw.World) -> None:
        optimizer = torch.optim.AdamW(models[world.rank].parameters())
        with sw.shard(models[world.rank], plan, optimizer=optimizer, world=world) as engine:
            for step in range(3):
                batch = tokens(step + world.rank * (step == 2))
                engine.backward(engine(batch).square().mean())
                engine.step()
                num_steps.append(step)

    with pytest.raises(DataError, match=r"Ranks 0 and 1 share each sample along the mesh axis 'tp', .* argument 0"):
        run_ranks(2, rank)
    assert sorted(num_steps) == [0, 0, 1, 1]


class Gated(Uneven):
    """Its attention begins with no, or next to no, weight in what follows, and so do the gradients in it."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.o.weight.data *= gain


@pytest.mark.parametrize("gain", [1.0, 1e-6, 0.0])
def test_a_missing_summed_style_is_detected(gain: float) -> None:
    asked = {**UNEVEN, "plan": {name: rule for name, rule in UNEVEN["plan"].items() if name != "head_norm"}}
    with pytest.raises(ModelError, match=r"The gradient of head_norm.(weight|bias) has norms from .* the style summed"):
        sharded(partial(Gated, gain), "zero1", asked, dp=1)


@thorough_only("slow; smaller tests beside it cover the same code")
def test_the_preset_changes_during_training() -> None:
    twin = plain(seeded(Transformer), 2)
    common = {"mesh": {"dp": 2, "tp": 2}, "tensor": TENSOR, "accumulate": ACCUMULATE, "clip_grad_norm": MAX_NORM}

    def work(engine: sw.Engine) -> dict[str, Tensor]:
        for step, preset in enumerate(("ddp", "zero2", "zero3")):
            for (batch,) in (chunked(micro, 2)[engine.world.rank // 2] for micro in chunked(DATA[step], ACCUMULATE)):
                engine.backward(engine(batch))
            engine.step(is_last=True)
            engine.reshard({"preset": preset, **common})
        with pytest.raises(ConfigError, match="reshard\\(\\) keeps how a model is split along tp"):
            engine.reshard({"preset": "zero1", "mesh": {"dp": 4}})
        return engine.state_dict()

    for state in work_on_ranks(4, work, {"preset": "zero3", **common}, lambda: seeded(Transformer), optimizer_of):
        for name, value in twin.params.items():
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)


class Jittered(nn.Linear):
    """Draws random numbers in training without dropout, like Mixtral's router."""

    def __init__(self, noise: float) -> None:
        super().__init__(4, 4)
        self.jitter_noise = noise


def test_models_that_draw_numbers_are_recognized() -> None:
    """Ranks along `tp` then draw the same numbers for what they share."""
    assert draws(nn.Sequential(Jittered(0.1)))
    assert draws(nn.Sequential(nn.Dropout(0.1)))
    assert not draws(nn.Sequential(Jittered(0.0), nn.Dropout(0.0)))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_scripts_and_pickles_are_refused_by_name() -> None:
    models = [seeded(Transformer) for _ in range(2)]

    def rank(world: sw.World) -> None:
        model = models[world.rank]
        with sw.shard(model, {"mesh": {"tp": 2}, "tensor": TENSOR}, world=world):
            with pytest.raises(StateError, match=r"given to torch\.jit\.script"):
                torch.jit.script(model)
            with pytest.raises(StateError, match="cannot be copied or pickled"):
                pickle.dumps(model)

    run_ranks(2, rank)


SEEN: dict[tuple[str, int], Tensor] = {}


def test_hooks_collect_what_forwards_return_and_not_what_the_check_of_a_plan_does() -> None:
    """The first forward is compared with the unsplit one on fake tensors, which hooks must not keep."""
    models = [seeded(Transformer) for _ in range(2)]

    def rank(world: sw.World) -> None:
        model, kept = models[world.rank], list[Tensor]()
        model.blocks[0].down.register_forward_hook(lambda _, __, output: kept.append(output))

        def note(_: nn.Module, __: object, output: Tensor) -> None:
            SEEN["norm", world.rank] = output

        model.norm.register_forward_hook(note)
        plan = {"preset": "zero1", "mesh": {"tp": 2}, "tensor": TENSOR}
        with sw.shard(model, plan, optimizer=optimizer_of(model), world=world) as engine:
            loss = engine(tokens(0))
            assert [type(one) for one in (*kept, SEEN["norm", world.rank])] == [Tensor, Tensor]
            engine.backward(loss + kept[0].square().mean())
            engine.step()

    run_ranks(2, rank)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # make_dual calls it
def test_derivatives_are_computed_output_by_output_and_others_refused() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))

    def rows(model: Any) -> Tensor:
        out = model(x).sum(0)
        return torch.stack([torch.autograd.grad(one, x, retain_graph=True)[0] for one in out])

    def work(engine: sw.Engine) -> Tensor:
        with pytest.raises(RuntimeError, match="Batching rule") as raised:
            torch.autograd.grad(engine(x).sum(0), x, torch.eye(2), is_grads_batched=True)
        assert "Call torch.autograd.grad for each output" in "".join(raised.value.__notes__)
        with pytest.raises(NotImplementedError, match="jvp") as raised:
            engine(make_dual(x.detach(), torch.ones(x.shape)))
        assert "functional.jvp(..., create_graph=True) computes the same" in "".join(raised.value.__notes__)
        _, tangent = torch.autograd.functional.jvp(engine, x.detach(), torch.ones(x.shape))
        torch.testing.assert_close(tangent.sum(0), rows(model).sum(-1).sum(-1))
        return rows(engine)

    x = torch.linspace(-1, 1, 12).view(4, 3).requires_grad_()
    model = seeded(build)
    plan = {"preset": "zero1", "mesh": {"tp": 2}, "tensor": {"plan": {"0": "column", "2": "row"}}}
    with dual_level():  # of all threads
        results = work_on_ranks(2, work, plan, lambda: seeded(build))
    for found in results:
        torch.testing.assert_close(found, rows(model))
