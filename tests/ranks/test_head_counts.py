"""Forwards with a hard-coded number of heads are refused at the first batch."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import split_models
import torch
from split_models import TENSOR, Transformer, tokens
from torch import nn
from torch.nn import functional
from twins import adamw

import shardwise as sw
from shardwise.errors import ModelError
from shardwise.parallel.tensor import views
from shardwise.parallel.tensor.views import View, difference
from shardwise.testing import run_ranks
from tests.drawing import drawing
from tests.ranks.test_lost_ranks import DiesAt
from tests.ranks.threads_as_members import run_members
from tests.thorough import sampled, thorough_only

Tensor = torch.Tensor
WIDTH, HEADS, SIZE = 24, 4, 6
Heads = Callable[[nn.Module, Tensor], Any]


def fused_by_literal(_: nn.Module, qkv: Tensor) -> Any:
    return qkv.unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)


def chunks_by_literal(_: nn.Module, qkv: Tensor) -> Any:
    rows, length = qkv.shape[:2]
    return [part.view(rows, length, HEADS, -1).transpose(1, 2) for part in qkv.chunk(3, -1)]


def tokens_absorb_the_difference(_: nn.Module, qkv: Tensor) -> Any:
    return [part.reshape(part.shape[0], -1, HEADS, SIZE).transpose(1, 2) for part in qkv.chunk(3, -1)]


def fused_by_width(_: nn.Module, qkv: Tensor) -> Any:
    return qkv.unflatten(-1, (3, -1, SIZE)).permute(2, 0, 3, 1, 4)


def chunks_by_width(_: nn.Module, qkv: Tensor) -> Any:
    rows, length = qkv.shape[:2]
    return [part.view(rows, length, -1, SIZE).transpose(1, 2) for part in qkv.chunk(3, -1)]


def by_an_attribute(module: nn.Module, qkv: Tensor) -> Any:
    return [torch.unflatten(part, -1, (module.num_heads, -1)).transpose(1, 2) for part in qkv.chunk(3, -1)]


def plainly(mixed: Tensor, x: Tensor) -> Tensor:
    return mixed.transpose(1, 2).reshape(x.shape[0], x.shape[1], -1)


class Attention(split_models.Attention):
    def __init__(self, heads: Heads) -> None:
        super().__init__(WIDTH, HEADS)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.heads(self, self.qkv(x))
        mixed = functional.scaled_dot_product_attention(query, key, value)
        out: Tensor = self.out(plainly(mixed, x))
        return out


def model(heads: Heads) -> Transformer:
    torch.manual_seed(0)
    built = Transformer()
    for block in built.blocks:
        block.attn = Attention(heads)
    for param in built.parameters():
        if param.dim() > 1:
            nn.init.normal_(param, std=0.1)
    return built


class GroupedAttention(nn.Module):
    """Two query heads for each key and value head."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k = nn.Linear(WIDTH, WIDTH // 2, bias=False)  # the gradient of a key's bias is only rounding
        self.v = nn.Linear(WIDTH, WIDTH // 2)
        self.num_key_value_groups = 2

    def forward(self, x: Tensor) -> Tensor:
        query, *others = (part(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for part in (self.q, self.k, self.v))
        key, value = (one.repeat_interleave(self.num_key_value_groups, 1) for one in others)
        out: Tensor = self.out(plainly(functional.scaled_dot_product_attention(query, key, value), x))
        return out


def grouped() -> Transformer:
    torch.manual_seed(0)
    built = Transformer()
    for block in built.blocks:
        block.attn = GroupedAttention()
    return built


GROUPED: dict[str, Any] = {
    "plan": {
        "blocks.*.attn.q": {"style": "column", "heads": HEADS},
        "blocks.*.attn.k": {"style": "column", "heads": HEADS // 2},
        "blocks.*.attn.v": {"style": "column", "heads": HEADS // 2},
        "blocks.*.attn.out": {"style": "row", "heads": HEADS},
    }
}


def run(
    build: Callable[[], nn.Module],
    tensor: dict[str, Any],
    num_ranks: int = 2,
    folder: Path | None = None,
    mesh: dict[str, int] | None = None,
) -> list[list[float]]:
    """The losses of each rank in two steps; the result is saved in `folder`."""
    mesh = mesh or {"tp": num_ranks}
    num_ranks = math.prod(mesh.values())
    models = [build() for _ in range(num_ranks)]
    plan = {"preset": "zero3", "mesh": mesh, "tensor": tensor}

    def rank(world: sw.World) -> list[float]:
        mine = models[world.rank]
        with sw.shard(mine, plan, optimizer=adamw(mine), world=world) as engine:
            losses = []
            for step in range(2):
                loss = engine(tokens(step))
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            if folder is not None:
                engine.save(folder)
            return losses

    return run_ranks(num_ranks, rank)


def alone(build: Callable[[], nn.Module]) -> tuple[list[float], nn.Module]:
    twin, losses = build(), []
    optimizer = adamw(twin)
    for step in range(2):
        loss = twin(tokens(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, twin


UNDIVIDED = {key: value for key, value in TENSOR.items() if key != "divide"}
WITHOUT_PARTS = copy.deepcopy(UNDIVIDED)
WITHOUT_PARTS["plan"]["blocks.*.attn.qkv"] = "column"


@sampled
@pytest.mark.parametrize(
    ("heads", "tensor", "said"),
    [
        (fused_by_literal, UNDIVIDED, r"as \[4, 12, 3, 4, 6\].*\[4, 12, 36\], as \[4, 12, 3, 4, 3\]"),
        (chunks_by_literal, UNDIVIDED, r"as \[4, 12, 4, 3\]"),
        (tokens_absorb_the_difference, UNDIVIDED, r"as \[4, 6, 4, 6\]"),
        (by_an_attribute, UNDIVIDED, r"tensor.divide"),
        (fused_by_width, WITHOUT_PARTS, r"or declare fused matrices with parts"),
    ],
    ids=["fused", "chunks", "tokens", "attribute", "parts"],
)
def test_a_hard_coded_number_of_heads_is_refused_at_the_first_batch(
    heads: Heads, tensor: dict[str, Any], said: str
) -> None:
    with pytest.raises(ModelError, match=rf"blocks.0.attn views .*{said}"):
        run(partial(model, heads), tensor)


def selects(_: nn.Module, args: tuple[Tensor]) -> Tensor:
    """As a model that leaves out tokens does, here none."""
    (x,) = args
    return x[torch.ones(x.shape[:2], dtype=torch.bool)].view(x.shape)


def reads(_: nn.Module, args: tuple[Tensor]) -> None:
    if not args[0].sum() == args[0].sum():
        raise ArithmeticError


@sampled
@pytest.mark.parametrize(("place", "looks"), [(0, selects), (1, reads)], ids=["selects", "reads"])
@pytest.mark.parametrize("heads", [chunks_by_literal, chunks_by_width], ids=["literal", "width"])
def test_so_are_those_of_models_that_look_at_values(place: int, looks: Callable[..., Any], heads: Heads) -> None:
    """A mask has values in a rehearsal; where what was computed has none, all before that is compared."""

    def build() -> nn.Module:
        built = model(heads)
        built.blocks[place].register_forward_pre_hook(looks)
        return built

    if heads is chunks_by_width:
        assert run(build, UNDIVIDED)[0] == pytest.approx(alone(build)[0], rel=1e-5)
        return
    with pytest.raises(ModelError, match=r"blocks.0.attn views .*as \[4, 12, 4, 3\]"):
        run(build, UNDIVIDED)


@sampled
@pytest.mark.parametrize("length", [1, 7])
def test_it_is_refused_too_if_the_first_batch_is_one_of_inference_that_tensor_sequence_cannot_divide(
    length: int,
) -> None:
    models = [model(fused_by_literal) for _ in range(2)]
    plan = {"preset": "zero3", "mesh": {"tp": 2}, "tensor": {**UNDIVIDED, "sequence": True}}

    def rank(world: sw.World) -> None:
        mine = models[world.rank]
        with sw.shard(mine, plan, world=world) as engine, engine.inference(), torch.no_grad():
            mine(tokens(0)[:, :length])

    with pytest.raises(ModelError, match=rf"blocks.0.attn views .*as \[4, {length}, 3, 4, 3\]"):
        run_ranks(2, rank)


@sampled
@pytest.mark.parametrize("is_on_meta", [False, True], ids=["deferred", "meta"])
@pytest.mark.parametrize("is_right", [False, True], ids=["literal", "width"])
def test_so_are_those_of_models_that_are_whole_nowhere(is_on_meta: bool, is_right: bool) -> None:
    heads = fused_by_width if is_right else fused_by_literal

    def rank(world: sw.World) -> float:
        with drawing(), torch.device("meta") if is_on_meta else sw.deferred_init():
            mine = model(heads)
        with sw.shard(mine, {"preset": "zero3", "mesh": {"tp": 2}, "tensor": UNDIVIDED}, world=world) as engine:
            return engine(tokens(0)).item()

    if is_right:
        losses = run_ranks(2, rank)
        assert losses == [losses[0]] * 2
    else:
        with pytest.raises(ModelError, match=r"blocks.0.attn views .*as \[4, 12, 3, 4, 3\]"):
            run_ranks(2, rank)


@sampled
@pytest.mark.parametrize(
    ("heads", "tensor", "num_ranks"),
    [
        (fused_by_width, UNDIVIDED, 2),
        (chunks_by_width, UNDIVIDED, 3),
        (by_an_attribute, {**UNDIVIDED, "divide": {"blocks.*.attn": ["num_heads"]}}, 4),
        (chunks_by_width, {**UNDIVIDED, "sequence": True}, 2),
    ],
    ids=["fused", "uneven chunks", "attribute", "sequence"],
)
def test_a_forward_that_derives_its_number_of_heads_is_accepted(
    heads: Heads, tensor: dict[str, Any], num_ranks: int
) -> None:
    expected, _ = alone(partial(model, heads))
    for losses in run(partial(model, heads), tensor, num_ranks):
        assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("num_ranks", "num_looking"), [(2, 1), (3, 3)])
def test_of_ranks_with_equal_parts_one_looks(num_ranks: int, num_looking: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three share four heads, and have parts of their own. Each compares the split forward with the unsplit one."""
    looking: list[threading.Thread] = []
    steps = views._steps

    def noted(*args: Any) -> Any:
        looking.append(threading.current_thread())
        return steps(*args)

    monkeypatch.setattr(views, "_steps", noted)
    run(partial(model, chunks_by_width), UNDIVIDED, num_ranks)
    assert (len(looking), len(set(looking))) == (2 * num_looking, num_looking)


@thorough_only("slow; smaller tests beside it cover the same code")
def test_more_ranks_than_key_heads(tmp_path: Path) -> None:
    """Each of two neighbours has the key head that belongs to its query heads; a checkpoint has it once."""
    expected, twin = alone(grouped)
    for losses in run(grouped, GROUPED, num_ranks=4, folder=tmp_path):
        assert losses == pytest.approx(expected, rel=1e-5)
    whole = grouped()
    with sw.shard(whole, "ddp", optimizer=adamw(whole)) as engine:
        engine.resume(tmp_path)
        for name, param in twin.named_parameters():
            # AdamW makes more of rounding where a gradient is nearly zero; a copy left behind is off by the rate.
            assert torch.allclose(engine.get(name), param, atol=1e-5), name


class Wide(split_models.Block):
    """A block that computes something of its wide features by code of its own."""

    def __init__(self, compute: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__(WIDTH, HEADS)
        self.compute = compute
        self.gain = nn.Parameter(torch.ones(3 * WIDTH))
        self.middle = nn.LayerNorm(3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        out: Tensor = x + self.down(self.compute(self, self.up(self.norm2(x))))
        return out


def wide(compute: Callable[[Any, Tensor], Tensor]) -> Transformer:
    torch.manual_seed(0)
    built = Transformer()
    built.blocks[0] = Wide(compute)
    return built


def halves(_: Any, y: Tensor) -> Tensor:
    gate, other = y.chunk(2, -1)
    return torch.cat([gate.sigmoid() * other, other], -1)


def quarters(_: Any, y: Tensor) -> Tensor:
    one, two, *others = y.split(18, -1)
    assert len(others) == 2
    return torch.cat([one.sigmoid(), two, *others], -1)


def asserted(_: Any, y: Tensor) -> Tensor:
    doubled = 2 * y
    assert y.shape[-1] == 72, "72 features"
    return doubled


class Fused(torch.autograd.Function):
    """A product whose gradients are computed in the forward, as fused losses do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        weight = weight.detach().clone()
        ctx.save_for_backward(x, weight)
        return x.detach() @ weight.mT

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, -2).mT @ x.flatten(0, -2)


FOREIGN = r"blocks.0 computes with blocks.0.up.weight, \[72, 24\], of which tensor.plan leaves \[36, 24\]"
OF_ALL_FEATURES: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "mean": (
        lambda _, y: y * (y.square().mean(-1, keepdim=True) + 1e-5).rsqrt(),
        r"blocks.0 computes mean over \[72\] entries, of which tensor.plan leaves \[36\]",
    ),
    "softmax": (lambda _, y: y * y.softmax(-1), r"blocks.0 computes softmax over \[72\]"),
    "norm": (lambda _, y: functional.normalize(y, dim=-1), r"blocks.0 computes normalize over \[72\]"),
    "halves": (halves, r"blocks.0 takes 36 of 72 features, .* Declare fused matrices of equal size with parts"),
    "quarters": (quarters, r"blocks.0 takes 18 of 72 features, .* Declare fused matrices of equal size with parts"),
    "an assertion": (asserted, r"The forward of blocks.0 fails on the part of the features, .*: 72 features"),
    "a slice": (
        lambda _, y: torch.cat([y[..., : y.shape[-1] // 2], y[..., y.shape[-1] // 2 :].neg()], -1),
        r"blocks.0 takes 36 of 72 features",
    ),
    "a foreign weight": (
        lambda module, y: y + functional.linear(module.norm1(module.down(y)), module.up.weight),
        FOREIGN,
    ),
    "a foreign weight, turned": (lambda module, y: y + module.norm1(module.down(y)) @ module.up.weight.t(), FOREIGN),
    "a foreign weight, widened": (
        lambda module, y: (
            y + functional.linear(module.norm1(module.down(y)).double(), module.up.weight.double()).float()
        ),
        FOREIGN,
    ),
    "a foreign weight in a function": (
        lambda module, y: y + Fused.apply(module.norm1(module.down(y)), module.up.weight),
        FOREIGN,
    ),
    "a sum over a foreign weight": (lambda module, y: y * (1 + module.up.weight.square().sum()), FOREIGN),
    "rows of a foreign weight": (lambda module, y: y * module.up.weight[:3].amax(), FOREIGN),
    "their number": (
        lambda _, y: y / y.shape[-1] ** 0.5,
        r"blocks.0 computes \w+ with 8.485.*, and with 6.0 on the part of the features",
    ),
    "a number for each": (
        lambda module, y: y * module.gain,
        r"The forward of blocks.0 fails on the part of the features",
    ),
    "a layer norm": (lambda module, y: module.middle(y), r"The forward of blocks.0.middle fails on the part"),
}


@sampled
@pytest.mark.parametrize("code", OF_ALL_FEATURES)
def test_code_that_takes_a_part_of_the_features_for_all_of_them_is_refused_at_the_first_batch(code: str) -> None:
    compute, said = OF_ALL_FEATURES[code]
    with pytest.raises(ModelError, match=said):
        run(partial(wide, compute), TENSOR)


IN_STAGES = {"pp": 2, "tp": 2}


@sampled
@pytest.mark.parametrize("code", OF_ALL_FEATURES)
def test_it_is_refused_in_pipeline_stages_too(code: str) -> None:
    compute, said = OF_ALL_FEATURES[code]
    with pytest.raises(ModelError, match=said):
        run(partial(wide, compute), TENSOR, mesh=IN_STAGES)


@sampled
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("steps_itself", [False, True], ids=["loop", "train_step"])
def test_heads_that_are_counted_in_one_block_are_refused_in_its_stage(place: int, steps_itself: bool) -> None:
    def build() -> Transformer:
        built = model(fused_by_width)
        built.blocks[place].attn.heads = fused_by_literal
        return built

    models = [build() for _ in range(4)]
    plan = {"preset": "zero1", "mesh": IN_STAGES, "tensor": UNDIVIDED, "accumulate": 2 if steps_itself else 1}

    def rank(world: sw.World) -> None:
        mine = models[world.rank]
        with sw.shard(mine, plan, optimizer=adamw(mine), world=world) as engine:
            if steps_itself:
                engine.train_step(tokens(0))
            else:
                engine(tokens(0))

    with pytest.raises(ModelError, match=rf"blocks.{place}.attn views .*hard-coded number of heads"):
        run_ranks(4, rank)


LOST_EARLY: dict[str, tuple[dict[str, int], int]] = {
    "a group leaves": ({"dp": 2, "tp": 2}, 0),
    "a group comes back": ({"dp": 2, "tp": 2}, 1),
    "fewer split the layers": ({"tp": 4}, 0),
    "fewer have the stages": ({"pp": 2, "tp": 2}, 0),
    "a group of stages leaves": ({"dp": 2, "pp": 2, "tp": 2}, 0),
}
"""Meshes of which a rank is lost in the first step, and how many come."""


@sampled
@pytest.mark.parametrize("place", LOST_EARLY)
@pytest.mark.parametrize("number", [1, 2, 4])
@pytest.mark.parametrize("is_right", [False, True], ids=["literal", "width"])
def test_heads_are_counted_where_a_rank_is_lost_before_all_have_compared(
    place: str, number: int, is_right: bool, tmp_path: Path
) -> None:
    """It dies when it begins its first communication after `shard`, or a later one, of which one compares."""
    mesh, num_newcomers = LOST_EARLY[place]
    num_ranks = math.prod(mesh.values())
    fault = DiesAt({1: number})
    built = [model(fused_by_width if is_right else fused_by_literal) for _ in range(num_ranks + num_newcomers)]
    plan = {"preset": "zero1", "mesh": mesh, "tensor": UNDIVIDED}

    def rank(world: sw.World, member: int) -> float | str:
        mine, loss = built[member], torch.zeros(())
        with sw.shard(mine, plan, optimizer=adamw(mine), world=world) as engine:
            fault(engine, member)
            while engine.num_steps < 2:
                try:
                    loss = engine.train_step(tokens(engine.num_steps))
                except ModelError as error:
                    return str(error)
        return loss.item()

    least = num_ranks if num_newcomers else 1
    found = run_members(num_ranks, rank, tmp_path, num_newcomers=num_newcomers, least=least)
    assert found
    expected, _ = alone(partial(model, fused_by_width))
    for one in found.values():
        if isinstance(one, str):
            assert not is_right, one
            assert "blocks.0.attn" in one
        else:  # also one that was left alone, with the whole model
            assert one == pytest.approx(expected[1], rel=1e-5)


@sampled
@pytest.mark.parametrize("sequence", [False, True])
def test_a_right_forward_is_accepted_in_pipeline_stages(sequence: bool) -> None:
    expected, _ = alone(partial(model, fused_by_width))
    tensor = {**UNDIVIDED, "sequence": sequence}
    for losses in run(partial(model, fused_by_width), tensor, mesh=IN_STAGES):
        assert losses == pytest.approx(expected, rel=1e-5)


@sampled
@pytest.mark.parametrize(
    "compute",
    [
        lambda _, y: y[..., ::2].repeat_interleave(2, -1) + y.unsqueeze(1).mean(1),
        lambda _, y: y * y.softmax(1),  # over tokens
        lambda _, y: 2 * y / y.shape[1] ** 0.5,
    ],
    ids=["interleaved", "tokens", "number of tokens"],
)
def test_code_that_is_right_for_a_part_is_accepted(compute: Callable[[Any, Tensor], Tensor]) -> None:
    expected, _ = alone(partial(wide, compute))
    for losses in run(partial(wide, compute), TENSOR):
        assert losses == pytest.approx(expected, rel=1e-5)


class OverTokens(nn.Module):
    """Mixes tokens by `mix`, of three projections of them."""

    def __init__(self, mix: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.mix = mix

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(*(part(x) for part in self.parts))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer = kind(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)[0]
        return out


def by_equation(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("...td,...de->...te", q, torch.einsum("bsd,bse->bde", k, v))


OVER_TOKENS: dict[str, Callable[[], nn.Module]] = {
    "weights": lambda: OverTokens(lambda q, k, v: (q @ k.transpose(1, 2)).sigmoid() @ v),
    "a state": lambda: OverTokens(lambda q, k, v: torch.bmm(q, torch.bmm(k.transpose(1, 2), v))),
    "equations": lambda: OverTokens(by_equation),
    "LSTM": lambda: Recurrent(nn.LSTM),
    "GRU": lambda: Recurrent(nn.GRU),
    "RNN": lambda: Recurrent(nn.RNN),
}
WITHOUT_ATTENTION = {"plan": {name: rule for name, rule in TENSOR["plan"].items() if ".attn." not in name}}


@sampled
@pytest.mark.parametrize("mesh", [{"tp": 2}, IN_STAGES], ids=["tp", "pp x tp"])
@pytest.mark.parametrize("kind", OVER_TOKENS)
def test_what_mixes_the_tokens_of_a_part_is_refused(kind: str, mesh: dict[str, int]) -> None:
    def build() -> Transformer:
        torch.manual_seed(0)
        built = Transformer()
        built.blocks[1].attn = OVER_TOKENS[kind]()
        return built

    with pytest.raises(ModelError, match=r"blocks.1.attn.* computes .* over .* of which tensor\."):
        run(build, {**TENSOR, "divide": {"blocks.0.attn": ["num_heads", "width"]}, "sequence": True}, mesh=mesh)
    expected, _ = alone(build)
    for losses in run(build, WITHOUT_ATTENTION, mesh=mesh):
        assert losses == pytest.approx(expected, rel=1e-4)


class Locked(nn.Sequential):
    """A module with an attribute that cannot be copied."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__(*modules)
        self.lock = threading.Lock()


def test_a_model_that_cannot_be_copied_trains_unchecked() -> None:
    models = [Locked(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2)]
    plan = {"preset": "zero1", "mesh": {"tp": 2}, "tensor": {"plan": {"0": "column", "1": "row"}}}

    def rank(world: sw.World) -> tuple[int, ...]:
        with sw.shard(models[world.rank], plan, world=world) as engine, torch.no_grad():
            return tuple(engine(torch.ones(2, 8)).shape)

    assert run_ranks(2, rank) == [(2, 8)] * 2


RIGHT: list[tuple[tuple[int, ...], ...]] = [
    # unsplit: from, to; split: from, to
    ((2, 8, 768), (2, 8, 12, 64), (2, 8, 384), (2, 8, 6, 64)),
    ((2, 8, 2304), (2, 8, 3, 12, 64), (2, 8, 1152), (2, 8, 3, 6, 64)),
    ((2, 8, 768), (16, 768), (2, 8, 384), (16, 384)),
    ((2, 8, 12, 64), (2, 8, 768), (2, 8, 6, 64), (2, 8, 384)),
    ((2, 4, 3, 8, 64), (2, 12, 8, 64), (2, 2, 3, 8, 64), (2, 6, 8, 64)),
    ((2, 12, 8, 64), (24, 8, 64), (2, 6, 8, 64), (12, 8, 64)),
    ((2, 8, 64), (2, 8, 32, 2), (2, 8, 32), (2, 8, 16, 2)),
    ((2, 8, 2, 64), (2, 8, 128), (2, 8, 1, 64), (2, 8, 64)),
    ((1, 1, 128), (1, 1, 2, 64), (1, 1, 64), (1, 1, 1, 64)),
    ((2, 8, 64), (2, 8, 64), (2, 4, 64), (2, 4, 64)),
]
WRONG: list[tuple[tuple[int, ...], ...]] = [
    ((2, 8, 768), (2, 8, 12, 64), (2, 8, 384), (2, 8, 12, 32)),
    ((2, 8, 768), (2, 8, 12, 64), (2, 8, 384), (2, 4, 12, 64)),
    ((2, 8, 768), (16, 12, 64), (2, 8, 384), (8, 12, 64)),
    ((2, 8, 768), (2, 8, 64, 12), (2, 8, 384), (2, 8, 64, 6)),
    ((2, 8, 768), (2, 8, 12, 64), (2, 8, 768), (2, 8, 6, 128)),
]


@pytest.mark.parametrize("shapes", RIGHT + WRONG, ids=str)
def test_views_of_parts(shapes: tuple[tuple[int, ...], ...]) -> None:
    source, target, own_source, own_target = shapes
    said = difference([View("attn", source, target)], [View("attn", own_source, own_target)], {1, 3})
    assert bool(said) == (shapes in WRONG)
    assert difference([View("attn", source, target)], [], {1}) == ""  # the forwards took different paths
