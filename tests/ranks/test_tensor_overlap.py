"""Sums and gathers that overlap with the backward of column modules: their order, and unchanged results."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fake_devices import WHENS, Devices, When
from split_models import TENSOR, Transformer, tokens
from test_tensor_parallel import (
    UNEVEN,
    CutLogits,
    Uneven,
    assert_equal,
    optimizer_of,
    plain,
    seeded,
    sharded,
)
from torch import nn
from torch.nn import functional
from twins import work_on_ranks

import shardwise as sw
from shardwise.comm import Line, Started
from shardwise.errors import CommError
from shardwise.parallel.tensor import column_products
from shardwise.testing import InjectedError, run_ranks
from tests import inside
from tests.ranks.split_models import Recomputing
from tests.thorough import sampled, thorough_only

pytestmark = sampled

Tensor = torch.Tensor
Build = Callable[[], nn.Module]


class Attention(nn.Module):
    """Causal attention with separate projections that read the same tensor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one(x).unflatten(-1, (-1, 6)).transpose(1, 2) for one in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Apart(Transformer):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.attn = Attention(24)


APART: dict[str, Any] = {
    "plan": {
        **{name: rule for name, rule in TENSOR["plan"].items() if "qkv" not in name},
        "blocks.*.attn.[qkv]": {"style": "column", "heads": 4},
    },
}
SEQUENCE = {**APART, "sequence": True}


# -- order --------------------------------------------------------------------------------------------


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, list[str]]]:
    """Events by thread: starts and waits of collectives, and matrix products of column modules."""
    events: dict[int, list[str]] = {}

    def noting(of: Any, name: str, told: str) -> None:
        call = getattr(of, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            events.setdefault(threading.get_ident(), []).append(told)
            made = call(*args, **kwargs)
            if isinstance(made, Started):
                made.wait = lambda wait=made.wait: (events[threading.get_ident()].append(f"{told}ed"), wait())[1]  # type: ignore[method-assign]
            return made

        monkeypatch.setattr(of, name, noted)

    noting(Line, "start_sum", "sum")
    noting(Line, "start_sum_part", "sum")
    noting(Line, "start_concatenate", "gather")
    noting(column_products, "_input_grad", "input")
    noting(column_products, "_weight_grad", "weight")
    return events


def backwards_of(build: Build, tensor: dict[str, Any], events: dict[int, list[str]], **more: Any) -> list[str]:
    """The events in the backward of the second step, which must be the same on both ranks."""
    models = [seeded(build) for _ in range(2)]

    def rank(world: sw.World) -> str:
        plan = {"preset": "zero1", "mesh": {"dp": 1, "tp": 2}, "tensor": tensor}
        with sw.shard(models[world.rank], plan, world=world) as engine:
            engine.backward(engine(tokens(0)))
            loss = engine(tokens(0))
            events[threading.get_ident()].clear()
            engine.backward(loss)
            return " ".join(events[threading.get_ident()])

    devices = more.pop("devices", None)
    first, second = devices.run(2, rank) if devices is not None else run_ranks(2, rank, **more)
    assert first == second
    return first.split()


ATTENTION = "input input input sum weight weight weight sumed"
MLP = "input sum weight sumed"


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize("where", ["hosts", "devices"])
def test_parameters_are_differentiated_between_the_start_of_a_sum_and_its_end(
    order: dict[int, list[str]], where: str
) -> None:
    more: dict[str, Any] = {"devices": Devices("late")} if where == "devices" else {"hosts": "ab"}
    told = " ".join(backwards_of(Apart, APART, order, **more))
    for region, times in ((ATTENTION, 2), (MLP, 3)):  # the head is a region too
        assert told.count(region) == times, told


def test_gathering_a_sequence_again_overlaps_with_products(order: dict[int, list[str]]) -> None:
    told = " ".join(backwards_of(Apart, SEQUENCE, order, hosts="ab"))
    for num_columns in (3, 1):
        inputs, weights = ["input"] * num_columns, ["weight"] * (num_columns - 1)
        region = ["gather", *inputs, "sum", "gathered", "weight", *weights, "sumed"]
        assert told.count(" ".join(region)) == 2, told


def test_ranks_of_one_host_do_not_overlap(order: dict[int, list[str]]) -> None:
    """The ranks compute the sums themselves, so nothing could overlap, and torch's own backwards are faster."""
    told = backwards_of(Apart, APART, order)
    assert "input" not in told
    sums = [place for place, what in enumerate(told) if what == "sum"]
    assert sums
    assert all(told[place + 1] == "sumed" for place in sums)


# -- results --------------------------------------------------------------------------------------------


@thorough_only("several hosts and tp; test_between_hosts has the first")
@pytest.mark.parametrize("hosts", ["abab", "abcd", "aabb"])
@pytest.mark.parametrize("preset", ["zero3", "ddp", "zero2"])
@pytest.mark.parametrize("tensor", [APART, SEQUENCE], ids=["tensor", "sequence"])
def test_training_between_hosts_is_that_of_the_unsplit_model(preset: str, tensor: dict[str, Any], hosts: str) -> None:
    """With `aabb`, ranks along `tp` share a host and do not overlap."""
    assert_equal(sharded(Apart, preset, tensor, hosts=hosts), plain(seeded(Apart), 2))


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize("when", WHENS)
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(("build", "tensor"), [(Transformer, TENSOR), (Apart, APART)])
def test_training_on_devices_is_that_of_the_unsplit_model(
    build: Build, tensor: dict[str, Any], sequence: bool, when: When
) -> None:
    devices = Devices(when)
    split = sharded(build, "zero3", {**tensor, "sequence": sequence}, devices=devices)
    assert_equal(split, plain(seeded(build), 2))
    assert devices.num_works == devices.num_waited


class Conv1D(nn.Module):
    """Linear with a transposed weight, as in GPT-2 of transformers."""

    def __init__(self, num_out: int, num_in: int) -> None:
        super().__init__()
        self.nf, self.nx = num_out, num_in
        self.weight = nn.Parameter(torch.randn(num_in, num_out) / 8)
        self.bias = nn.Parameter(torch.randn(num_out) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


class Transposed(Transformer):
    """Each block has one `Conv1D`."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.up = Conv1D(block.up.out_features, block.up.in_features)


@thorough_only("slow; smaller tests beside it cover the same code")
def test_transposed_weights() -> None:
    assert_equal(sharded(Transposed, "zero2", TENSOR, hosts="abab"), plain(seeded(Transposed), 2))


class Lora(nn.Module):
    """A frozen linear module with adapters, named as in peft."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 4, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(4, base.out_features, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))
        return out


class Adapted(Apart):
    """Adapters on queries and values."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for block in self.blocks:
            block.attn.q, block.attn.v = Lora(block.attn.q), Lora(block.attn.v)


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_adapters_do_not_end_the_region_of_their_base(order: dict[int, list[str]], hosts: str) -> None:
    """The input gradient of queries, keys and values is summed once, although adapters open regions of their own."""
    told = backwards_of(Adapted, APART, order, hosts=hosts)
    adapters, read, heads = 2 * 2, 1, 1  # nothing before the first block's attention is trained
    assert told.count("sum") == adapters + read + 2 + heads


class Frozen(Apart):
    """One column of a region is frozen, one trains only its bias, and one has a frozen bias."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.attn.q.requires_grad_(False)
            block.attn.k.weight.requires_grad_(False)
            block.attn.v.bias.requires_grad_(False)


class Tied(Apart):
    """Two columns of one region share a weight, and so do the blocks."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.attn.v.weight = block.attn.k.weight
            block.up.weight = self.blocks[0].up.weight


class Twice(Apart):
    """A column module is called twice in its region, and another is skipped in every second forward."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def forward(self, batch: Tensor) -> Tensor:
        self.num_calls += 1
        for block in self.blocks:
            block.attn.skips = self.num_calls % 2 == 0
        return super().forward(batch)


class TwiceAttention(Attention):
    skips = False

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.q(x), self.q(x).tanh() if self.skips else self.k(x) + self.q(x).tanh()
        heads = [one.unflatten(-1, (-1, 6)).transpose(1, 2) for one in (q, k, self.v(x))]
        mixed = functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


def twice() -> nn.Module:
    model = Twice()
    for block in model.blocks:
        block.attn = TwiceAttention(24)
    return model


class Checkpointed(Apart, Recomputing):
    """With separate projections."""


class Reentrant(Checkpointed):
    reentrant = True


class Hooked(Apart):
    """Hooks on column modules, which read and scale inputs and outputs."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.attn.k.register_full_backward_hook(lambda _, grads, __: (grads[0] * 1.5,))
            block.attn.v.register_forward_hook(lambda _, __, made: made * 0.5)
            block.up.weight.register_hook(lambda grad: grad * 2)


BUILDS: dict[str, tuple[Build, dict[str, Any]]] = {
    "adapters": (Adapted, APART),
    "frozen": (Frozen, APART),
    "frozen on sequences": (Frozen, SEQUENCE),
    "tied": (Tied, APART),
    "tied on sequences": (Tied, SEQUENCE),
    "twice": (twice, APART),
    "checkpointed": (Checkpointed, APART),
    "checkpointed on sequences": (Checkpointed, SEQUENCE),
    "reentrant": (Reentrant, APART),
    "hooked": (Hooked, APART),
    "hooked on sequences": (Hooked, SEQUENCE),
    "fused": (Transformer, {**TENSOR, "sequence": True}),
    "cut logits": (CutLogits, {**TENSOR, "plan": {**TENSOR["plan"], "head": "vocabulary_cut"}}),
}


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize("where", ["hosts", "devices"])
@pytest.mark.parametrize("name", BUILDS)
def test_models_of_all_kinds(name: str, where: str) -> None:
    build, tensor = BUILDS[name]
    more: dict[str, Any] = {"devices": Devices("late")} if where == "devices" else {"hosts": "abab"}
    assert_equal(sharded(build, "zero2", tensor, **more), plain(seeded(build), 2))


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize("policy", ["recompute", "selective", "offload"])
@pytest.mark.parametrize("tensor", [APART, SEQUENCE], ids=["tensor", "sequence"])
def test_activations_that_are_recomputed_or_offloaded(tensor: dict[str, Any], policy: str) -> None:
    activations = {"policy": "selective", "keep": ["matmul"]} if policy == "selective" else policy
    runs = sharded(Apart, "zero3", tensor, hosts="abab", activations=activations)
    assert_equal(runs, plain(seeded(Apart), 2))


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize("tp", [2, 3])
def test_uneven_parts(tp: int) -> None:
    assert_equal(sharded(Uneven, "zero2", UNEVEN, dp=1, tp=tp, hosts="abc"[:tp]), plain(seeded(Uneven)))


class FewKeys(Apart):
    """Two key and value heads for four query heads."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.attn = FewKeyHeads()


class FewKeyHeads(Attention):
    def __init__(self) -> None:
        super().__init__(24)
        self.k, self.v = nn.Linear(24, 12), nn.Linear(24, 12)
        self.num_key_value_groups = 2

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one(x).unflatten(-1, (-1, 6)).transpose(1, 2) for one in (self.q, self.k, self.v))
        k, v = (one.repeat_interleave(self.num_key_value_groups, 1) for one in (k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize("sequence", [False, True])
def test_ranks_that_share_heads(sequence: bool) -> None:
    """The gradients of shared heads are summed over those ranks at once, without overlap."""
    heads = {f"blocks.*.attn.{name}": {"style": "column", "heads": 2} for name in "kv"}
    asked = {**APART, "plan": {**APART["plan"], **heads}, "sequence": sequence}
    assert_equal(sharded(FewKeys, "zero2", asked, dp=1, tp=4, hosts="aabb"), plain(seeded(FewKeys)))


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize("sequence", [False, True])
def test_autocast_equals_that_without_overlap(monkeypatch: pytest.MonkeyPatch, sequence: bool) -> None:
    """Close to the run without overlap, and to the unsplit model."""
    asked = {**APART, "sequence": sequence}

    class Narrow(Apart):
        def forward(self, batch: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(batch)

    beside = sharded(Narrow, "zero1", asked, dp=1, hosts="ab")
    waited = sharded(Narrow, "zero1", asked, dp=1)
    twin = plain(seeded(Narrow))
    for one, other in zip(beside, waited, strict=True):
        for name, grad in other.grads[-1].items():
            assert torch.allclose(one.grads[-1][name], grad, rtol=2e-2, atol=2e-3), name
            assert torch.allclose(one.grads[-1][name], twin.grads[-1][name], rtol=5e-2, atol=5e-3), name
        assert one.losses == pytest.approx(other.losses, rel=1e-3)


@thorough_only("takes many steps")
def test_ten_steps_equal_those_without_overlap() -> None:
    """With and without overlap: the same parameters, up to rounding, and the same bytes along each axis."""

    def trained(tensor: dict[str, Any], **where: Any) -> list[dict[str, Any]]:

        plan = {"preset": "zero1", "mesh": {"dp": 2, "tp": 2}, "tensor": tensor}

        def work(engine: sw.Engine) -> dict[str, Any]:
            for step in range(10):
                engine.backward(engine(tokens(step).chunk(2)[engine.world.rank // 2]))
                engine.step()
            sent = dict(inside.ledger(engine).sent_bytes)
            return {"params": engine.state_dict(), "sent": sent}

        return work_on_ranks(4, work, plan, lambda: seeded(Apart), optimizer_of, **where)

    for tensor in (APART, SEQUENCE):
        beside, waited = trained(tensor, hosts="abab"), trained(tensor)
        for one, other in zip(beside, waited, strict=True):
            assert one["sent"] == other["sent"]
            for name, param in other["params"].items():
                assert torch.allclose(one["params"][name], param, rtol=1e-5, atol=1e-6), name


@pytest.mark.parametrize("tensor", [APART, SEQUENCE], ids=["tensor", "sequence"])
def test_two_backwards_with_retain_graph(tensor: dict[str, Any]) -> None:
    models = [seeded(Apart) for _ in range(2)]
    twin = seeded(Apart)
    for _ in range(2):
        twin(tokens(0)).backward()

    def rank(world: sw.World) -> dict[str, Tensor | None]:
        plan = {"preset": "ddp", "mesh": {"dp": 1, "tp": 2}, "tensor": tensor}
        with sw.shard(models[world.rank], plan, world=world) as engine:
            engine.backward(engine(tokens(0)))
            engine.zero_grad()
            loss = engine(tokens(0))
            loss.backward(retain_graph=True)
            loss.backward()
            return {name: engine.get(name, "grad") for name, _ in models[world.rank].named_parameters()}

    for grads in run_ranks(2, rank, hosts="ab"):
        for name, param in twin.named_parameters():
            assert torch.allclose(grads[name], param.grad, rtol=1e-4, atol=1e-6), name


@thorough_only("slow; smaller tests beside it cover the same code")
def test_gradients_of_some_tensors_alone() -> None:
    """`torch.autograd.grad` of an input, and of a bias without its weight."""
    names = ("blocks.0.norm1.weight", "blocks.1.attn.k.bias", "blocks.0.up.weight")
    twin = seeded(Apart)
    expected = [torch.autograd.grad(twin(tokens(0)), [twin.get_parameter(name)])[0] for name in names]
    plan = {"preset": "ddp", "mesh": {"dp": 1, "tp": 2}, "tensor": SEQUENCE}

    def work(engine: sw.Engine) -> list[Tensor]:
        engine.backward(engine(tokens(0)))
        engine.zero_grad()
        found = []
        for name in names:
            loss = engine.module(tokens(0))
            found += torch.autograd.grad(loss, [engine.module.get_parameter(name)])
        return found

    first, second = work_on_ranks(2, work, plan, lambda: seeded(Apart), None, hosts="ab")
    for place, (one, other, whole) in enumerate(zip(first, second, expected, strict=True)):
        made = torch.cat([one, other]) if place else one
        assert torch.allclose(made, whole, rtol=1e-4, atol=1e-6), names[place]


def test_a_backward_that_raises_leaves_nothing_behind() -> None:
    """The next forward waits for a collective that was running on all ranks."""
    twin = seeded(Apart)
    twin(tokens(1)).backward()
    plan = {"preset": "ddp", "mesh": {"dp": 1, "tp": 2}, "tensor": SEQUENCE}

    def work(engine: sw.Engine) -> dict[str, Tensor | None]:
        model = engine.module
        engine.backward(engine(tokens(0)))
        engine.zero_grad()
        handle = model.blocks[1].attn.q.weight.register_hook(fails)
        with pytest.raises(InjectedError):
            engine.backward(engine(tokens(0)))
        handle.remove()
        engine.zero_grad()
        engine.backward(engine(tokens(1)))
        return {name: engine.get(name, "grad") for name, _ in model.named_parameters()}

    for grads in work_on_ranks(2, work, plan, lambda: seeded(Apart), None, hosts="ab"):
        for name, param in twin.named_parameters():
            assert torch.allclose(grads[name], param.grad, rtol=1e-4, atol=1e-6), name


def fails(_: Tensor) -> None:
    raise InjectedError("a hook")


def test_a_rank_that_fails_during_an_overlap_is_reported() -> None:
    """The others raise where they wait for the sum."""
    plan = {"preset": "ddp", "mesh": {"dp": 1, "tp": 2}, "tensor": APART}

    def work(engine: sw.Engine) -> None:
        model = engine.module
        engine.backward(engine(tokens(0)))
        if engine.world.rank == 1:
            model.blocks[1].attn.q.weight.register_hook(fails)
            engine.backward(engine(tokens(0)))
        with pytest.raises(CommError, match="rank 1"):
            engine.backward(engine(tokens(0)))

    with pytest.raises(InjectedError):
        work_on_ranks(2, work, plan, lambda: seeded(Apart), None, hosts="ab")


def test_a_backward_with_create_graph() -> None:
    """The gradients are differentiable, so everything is done at once."""
    inner = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
    x = torch.randn(3, 6)

    def penalty(model: nn.Module, given: Tensor) -> Tensor:
        loss = model(given).square().mean()
        [grad] = torch.autograd.grad(loss, [given], create_graph=True)
        return loss + grad.square().sum()

    whole = x.clone().requires_grad_()
    penalty(inner, whole).backward()
    expected = {name: param.grad for name, param in inner.named_parameters()}
    models = [nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)) for _ in range(2)]
    for model in models:
        model.load_state_dict(inner.state_dict())

    def rank(world: sw.World) -> dict[str, Tensor | None]:
        model = models[world.rank]
        plan = {"preset": "ddp", "mesh": {"dp": 1, "tp": 2}, "tensor": {"plan": {"0": "column", "2": "row"}}}
        with sw.shard(model, plan, world=world) as engine:
            engine.backward(engine(x.clone()).square().mean())  # after it, columns that read the same tensor are known
            engine.zero_grad()
            engine.backward(penalty(engine, x.clone().requires_grad_()))
            return {name: engine.get(name, "grad") for name, _ in model.named_parameters()}

    for grads in run_ranks(2, rank, hosts="ab"):
        for name, grad in expected.items():
            assert torch.allclose(grads[name], grad, rtol=1e-4, atol=1e-6), name
