"""Models built in `deferred_init` have the same values as models built directly."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from constructors import Odd
from torch import nn
from twins import Run, adamw, assert_same, batches, engine_step, full_params, plain_run, plan_of

import shardwise as sw
from shardwise.errors import ConfigError, ModelError, StateError
from shardwise.init.deferred import Deferred
from shardwise.init.tape import values_of
from shardwise.testing import run_ranks
from tests import inside
from tests.models import Transformer
from tests.thorough import sampled


def deferred(build: Callable[[], nn.Module], num: int, seed: Callable[[int], int] = lambda _: 0) -> list[nn.Module]:
    """One model for each rank, built in this thread, because threads share a random generator."""
    models = []
    for rank in range(num):
        torch.manual_seed(seed(rank))
        with sw.deferred_init():
            models.append(build())
    return models


def plain(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return build()


def assert_equal(state: dict[str, torch.Tensor], twin: nn.Module) -> None:
    expected = twin.state_dict()
    assert list(state) == list(expected)
    for name, value in expected.items():
        assert torch.equal(state[name], value.to(state[name].dtype)), name


def num_bytes(model: nn.Module) -> int:
    return sum(param.untyped_storage().nbytes() for param in model.parameters())


@sampled
@pytest.mark.parametrize(("preset", "num_ranks"), [("zero3", 1), ("zero3", 3), ("zero1", 2), ("ddp", 2)])
def test_any_constructor_gives_the_same_values(preset: str, num_ranks: int) -> None:
    twin = plain(Odd)
    after = torch.get_rng_state()
    models = deferred(Odd, num_ranks)
    assert torch.equal(torch.get_rng_state(), after)
    assert num_bytes(models[0]) <= 4 * models[0].positive.numel()  # a boolean mask: its shape depends on values
    for name, buffer in twin.named_buffers():
        assert torch.equal(models[0].get_buffer(name), buffer), name
    assert torch.equal(models[0].slopes, twin.slopes)
    assert (models[0].rates, models[0].numbers) == (twin.rates, twin.numbers)

    def rank(world: sw.World) -> dict[str, torch.Tensor]:
        return sw.shard(models[world.rank], preset, world=world).state_dict()

    for state in run_ranks(num_ranks, rank):
        assert_equal(state, twin)
    assert torch.equal(torch.get_rng_state(), after)


@sampled
@pytest.mark.parametrize(
    ("preset", "num_ranks", "mesh"),
    [("zero3", 2, None), ("zero2", 2, None), ("hsdp", 4, {"node": 2, "local": 2}), ("hpz", 4, {"node": 2, "local": 2})],
)
def test_trains_as_the_plain_model(preset: str, num_ranks: int, mesh: dict[str, int] | None) -> None:
    data = batches(3)
    expected = plain_run(plain(Transformer), data)
    models = deferred(Transformer, num_ranks)

    def rank(world: sw.World) -> Run:
        model = models[world.rank]
        params = list(model.parameters())
        optimizer = adamw(model)
        engine = sw.shard(model, plan_of(preset, mesh), optimizer=optimizer, world=world)
        assert all(ours is theirs for ours, theirs in zip(params, model.parameters(), strict=True))
        assert all(isinstance(param, nn.Parameter) for param in params)
        run = Run()
        for x, y in data:
            rows = x.shape[0] // world.size
            mine = slice(world.rank * rows, (world.rank + 1) * rows)
            run.losses.append(world.mean(engine_step(engine, optimizer, (x[mine], y[mine])).item()))
            run.norms.append(engine.gradient_norm or 0.0)
        run.params = full_params(engine)
        return run

    for run in run_ranks(num_ranks, rank):
        assert_same(run, expected)


def test_bf16_keeps_the_values_that_were_drawn() -> None:
    models = deferred(Transformer, 2)

    def rank(world: sw.World) -> dict[str, torch.Tensor]:
        return sw.shard(models[world.rank], {"preset": "zero3", "precision": "bf16"}, world=world).state_dict()

    for state in run_ranks(2, rank):
        assert_equal(state, plain(Transformer))


def test_values_are_made_without_setting_the_default_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which belongs to the process: other threads would make tensors of it meanwhile, or restore what they found."""

    def build() -> nn.Module:
        model = nn.Linear(300, 200)
        model.register_buffer("scales", torch.full((300,), 2.5))
        model.register_buffer("noise", torch.randn(300) * 2)
        return model

    torch.set_default_dtype(torch.bfloat16)
    try:
        expected = plain(build)
        model = deferred(build, 1)[0]
    finally:
        torch.set_default_dtype(torch.float32)

    def refuse(dtype: torch.dtype) -> None:
        raise AssertionError(f"{dtype} is made the default of all threads")

    monkeypatch.setattr(torch, "set_default_dtype", refuse)
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert torch.equal(values_of(tensor), expected.state_dict()[name]), name


def test_the_same_seeds_send_nothing_and_others_take_rank_0s() -> None:
    for seeds, sends in ((lambda _: 7, False), (lambda rank: 7 + rank, True)):
        models = deferred(Transformer, 3, seeds)

        def rank(world: sw.World, models: list[nn.Module] = models) -> tuple[dict[str, torch.Tensor], int]:
            engine = sw.shard(models[world.rank], "zero3", world=world)
            return engine.state_dict(), inside.ledger(engine).calls["broadcast", "world"]

        for state, num_calls in run_ranks(3, rank):
            assert_equal(state, plain(Transformer, seed=7))
            assert bool(num_calls) == sends


def test_a_deferred_parameter_is_known_from_outside_only() -> None:
    with sw.deferred_init():
        model = Transformer()
    param = model.head.weight
    assert isinstance(param, Deferred)
    assert (param.shape, param.dtype, param.device.type, param.numel()) == ((67, 32), torch.float32, "cpu", 67 * 32)
    assert "deferred" in repr(param)
    model.requires_grad_(False)
    assert not param.requires_grad
    uses: dict[str, Callable[[], Any]] = {
        "sum()": lambda: param.sum(),
        "linear()": lambda: model.head(torch.ones(1, 32)),
        ".data": lambda: param.data,
        "to()": lambda: model.half(),
        "detach()": lambda: model.state_dict(),
        "tolist()": lambda: param.tolist(),
    }
    for word, use in uses.items():
        with pytest.raises(StateError, match="has none yet") as caught:
            use()
        assert str(caught.value).startswith((word, "embedding()", "half()")), word
    with pytest.raises(StateError, match="deferred_init"):
        copy.deepcopy(model)


SHARED: dict[str, Callable[[nn.Parameter], torch.Tensor]] = {
    "data": lambda weight: weight.data,
    "detach": lambda weight: weight.detach(),
    "row": lambda weight: weight[0],
    "transposed": lambda weight: weight.T,
    "one of several": lambda weight: weight.unbind()[1],
    "view of a view": lambda weight: weight.data.view(-1)[2:5],
    "parameter": lambda weight: nn.Parameter(weight.data),
    "copy": copy.copy,
    "copied data": lambda weight: copy.copy(weight.data),
}


@sampled
@pytest.mark.parametrize("take", SHARED)
def test_views_that_outlive_it_refuse_to_be_computed_with(take: str) -> None:
    """Their memory never gets values: reading it used to end the process."""
    with sw.deferred_init():
        model = nn.Linear(4, 3)
        taken = SHARED[take](model.weight)
        copied = model.weight.detach().clone()
        total = taken.detach().sum().item()
    with pytest.raises(StateError, match=r"sum\(\) needs the values of a .*deferred_init"):
        taken.sum()
    state = sw.shard(model, "zero3").state_dict()
    with pytest.raises(StateError, match=r"add_\(\) needs the values of a"):
        taken.add_(1)
    assert total == pytest.approx(SHARED[take](nn.Parameter(copied)).detach().sum().item())
    assert torch.equal(state["weight"], copied)


def test_a_constructor_that_raises_leaves_nothing_that_cannot_be_shown() -> None:
    """As a debugger, or pytest, shows the tensors of a traceback: without memory that used to end the process."""
    kept: list[torch.Tensor] = []

    def build() -> None:
        model = nn.Linear(4, 3)
        kept.extend([model.weight, model.bias.data, torch.ones(2), nn.Parameter(torch.randn(3)), torch.randn(3)[1:]])
        raise KeyError

    with pytest.raises(KeyError), sw.deferred_init():
        build()
    shown = [repr(one) for one in kept]
    assert shown[0] == "Parameter [3, 4] torch.float32, deferred"
    for one in kept:
        with pytest.raises(StateError, match="needs the values of a"):
            one.sum()


def test_a_buffer_that_is_a_view_is_refused_by_name() -> None:
    with sw.deferred_init():
        model = nn.Linear(4, 3)
        model.register_buffer("first", model.weight.data[0])
    assert "a view of a deferred parameter" in repr(model.first)
    with pytest.raises(ModelError, match="The buffer first shares memory with the parameter weight"):
        sw.shard(model, "zero3")


def test_ranks_may_exchange_messages_inside() -> None:
    def rank(world: sw.World) -> tuple[float, bool, list[bytes], int, dict[str, torch.Tensor]]:
        with sw.deferred_init():
            model = models[world.rank]
            mean = world.mean(float(world.rank), weight=float(world.rank + 1))
            told = mean, world.any_rank(world.rank == 1), world.exchange(b"%d" % world.rank)
        return *told, num_bytes(model), sw.shard(model, "zero3", world=world).state_dict()

    models = deferred(two_of_torch, 2)
    for mean, is_any, messages, size, state in run_ranks(2, rank):
        assert (mean, is_any, messages, size) == (pytest.approx(2 / 3), True, [b"0", b"1"], 0)
        assert_equal(state, plain(two_of_torch))


def test_what_is_sent_by_torch_has_its_values_then(tmp_path: Path) -> None:
    """A message that waits until somebody replays it is not sent by all: see `processes/test_deferred_messages.py`."""
    twin = plain(two_of_torch)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        with sw.deferred_init():
            model = two_of_torch()
            dist.broadcast(model[0].weight.data, 0)
            dist.all_reduce(model[2].bias.data, async_op=True).wait()
            told: list[Any] = [None]
            dist.all_gather_object(told, {"rank": 0})
        assert told == [{"rank": 0}]
    finally:
        dist.destroy_process_group()
    assert not isinstance(model[0].weight, Deferred)
    assert isinstance(model[2].weight, Deferred)
    assert_equal(sw.shard(model, "zero3").state_dict(), twin)


def test_values_that_a_constructor_is_given_are_kept() -> None:
    table = torch.arange(12.0).view(4, 3)

    def build() -> nn.Module:
        model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 2))
        model[0].weight.data.copy_(table)
        return model

    with sw.deferred_init():
        model = build()
    table.zero_()
    state = sw.shard(model, "zero3").state_dict()
    assert torch.equal(state["0.weight"], torch.arange(12.0).view(4, 3))


def two_of_torch() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))


def first_changed(first: nn.Module, other: nn.Module) -> nn.Module:
    """`first` after a change that reads a value of both models."""
    first[0].weight.data.add_(other[0].weight.data)
    return first


def test_one_inside_another_is_part_of_it() -> None:
    """As with `from_pretrained` under stage 3, which is called inside a script's own `zero.Init`."""
    twin = plain(lambda: first_changed(two_of_torch(), two_of_torch()))
    torch.manual_seed(0)
    with sw.deferred_init():
        with sw.deferred_init():
            model = two_of_torch()
        with sw.deferred_init() as building:
            other = two_of_torch()
            assert building is not None
        with sw.deferred_init(model):
            first_changed(model, other)
        with pytest.raises(KeyError), sw.deferred_init():
            raise KeyError
        assert model[0].weight.untyped_storage().nbytes() == 0
    assert all(isinstance(param, Deferred) for param in model.parameters())
    assert_equal(sw.shard(model, "zero3").state_dict(), twin)


def test_values_may_be_shown_inside() -> None:
    """Torch shows tensors, and gives them to numpy, below what a recording sees: that used to end the process."""
    twin = nn.Linear(3, 2)
    torch.manual_seed(0)
    with sw.deferred_init():
        model = nn.Linear(3, 2)
        shown = repr(model.weight), f"{model.weight.data}", np.asarray(model.weight.data)
        assert model.weight.untyped_storage().nbytes() == 0
    assert shown[:2] == (repr(twin.weight), f"{twin.weight.data}")
    np.testing.assert_array_equal(shown[2], twin.weight.detach().numpy())


def test_shard_inside_ends_it() -> None:
    """As scripts call `deepspeed.initialize` inside `zero.Init`. Messages between ranks used to be put off, too."""
    twin = plain(two_of_torch)
    torch.manual_seed(0)

    def build(world: sw.World) -> tuple[dict[str, torch.Tensor], list[bool]]:
        with sw.deferred_init():
            model = models[world.rank]
            with sw.deferred_init(model):
                model[0].weight.data.mul_(1)
            engine = sw.shard(model, "zero3", world=world)
            state = engine.state_dict()
            later = nn.Linear(2, 2)
            has_values = [bool(later.weight.isfinite().all()), world.any_rank(False)]
            with sw.deferred_init():
                last = nn.Linear(2, 2)
                has_values.append(last.weight.untyped_storage().nbytes() > 0)
        assert isinstance(last.weight, Deferred)
        assert not isinstance(later.weight, Deferred)
        return state, has_values

    models = []
    for _ in range(2):
        torch.manual_seed(0)
        with sw.deferred_init():
            models.append(two_of_torch())
    for state, has_values in run_ranks(2, build):
        assert_equal(state, twin)
        assert has_values == [True, False, False]


@pytest.mark.parametrize("is_inside", [False, True])
def test_models_of_two_recordings_may_be_computed_with_together(is_inside: bool) -> None:
    twin = plain(lambda: first_changed(two_of_torch(), two_of_torch()))
    torch.manual_seed(0)
    with sw.deferred_init():
        model = two_of_torch()
    with sw.deferred_init():
        other = two_of_torch()
        if is_inside:
            with sw.deferred_init(model):
                first_changed(model, other)
    if not is_inside:
        with sw.deferred_init(nn.ModuleList([model, other])):
            first_changed(model, other)
    assert_equal(sw.shard(model, "zero3").state_dict(), twin)


def test_ranks_whose_models_have_their_values_exchanged_are_found_out() -> None:
    def rank(world: sw.World) -> dict[str, torch.Tensor]:
        return sw.shard(models[world.rank], "zero3", world=world).state_dict()

    def build(swapped: bool) -> nn.Module:
        one, two = (nn.Linear(4, 4, bias=False) for _ in range(2))
        return nn.Sequential(two, one) if swapped else nn.Sequential(one, two)

    models = []
    for swapped in (False, True):
        torch.manual_seed(0)
        with sw.deferred_init():
            models.append(build(swapped))
    twin = plain(lambda: build(False))
    for state in run_ranks(2, rank):
        assert_equal(state, twin)


def test_what_cannot_be_put_off_is_refused() -> None:
    def grows() -> None:
        torch.zeros(3).resize_(9)

    with pytest.raises(ModelError, match="made larger in place"), sw.deferred_init():
        grows()
    with pytest.raises(RuntimeError, match="shape"), sw.deferred_init():
        torch.randn(3, 4) @ torch.randn(3, 4)  # torch's own error, raised where it belongs


# -- the meta device ---------------------------------------------------------------------------------------


def on_meta(build: Callable[[], nn.Module], num: int) -> list[nn.Module]:
    with torch.device("meta"):
        return [build() for _ in range(num)]


MADE: dict[str, Callable[[int], nn.Module]] = {
    "with values": lambda seed: plain(two_of_torch, seed),
    "deferred": lambda seed: deferred(two_of_torch, 1, lambda _: seed)[0],
    "on meta": lambda _: on_meta(two_of_torch, 1)[0],
}


@sampled
@pytest.mark.parametrize(
    ("first", "other"), [("with values", "with values"), ("deferred", "deferred"), *itertools.permutations(MADE, 2)]
)
def test_ranks_that_come_by_their_values_in_different_ways_take_rank_0s(first: str, other: str) -> None:
    """One rank sent values where the other compared digests."""
    for preset in ("zero3", "ddp"):
        models = [MADE[first](7), MADE[other](8)]

        def rank(world: sw.World, models: list[nn.Module] = models, preset: str = preset) -> dict[str, torch.Tensor]:
            return sw.shard(models[world.rank], preset, world=world).state_dict()

        torch.manual_seed(7)  # the meta model draws when it is sharded
        states = run_ranks(2, rank)
        for state in states:
            assert_equal(state, plain(two_of_torch, seed=7))


def test_stages_of_such_ranks_are_refused() -> None:
    plan = {"preset": "zero1", "mesh": {"pp": 2, "dp": 1}}
    pairs = set(itertools.permutations(MADE, 2)) - {("with values", "on meta")}  # which takes rank 0's, below
    for first, other in sorted(pairs):
        models = [MADE[first](7), MADE[other](7)]

        def rank(world: sw.World, models: list[nn.Module] = models) -> None:
            with pytest.raises(ModelError, match="different first values, and with pipeline stages"):
                sw.shard(models[world.rank], plan, world=world)

        run_ranks(2, rank)


def of_torch() -> nn.Module:
    layers = (nn.Linear(8, 8), nn.BatchNorm1d(8), nn.LayerNorm(8), nn.Embedding(9, 8), nn.MultiheadAttention(8, 2))
    return nn.Sequential(*layers, nn.Linear(8, 4))


def test_meta_models_are_filled_by_their_modules() -> None:
    torch.manual_seed(3)
    twin = of_torch().to_empty(device="cpu")
    torch.manual_seed(3)
    twin.apply(_reset)
    models = on_meta(of_torch, 1)
    optimizer = adamw(models[0])
    params = list(models[0].parameters())
    torch.manual_seed(3)
    engine = sw.shard(models[0], "zero3", optimizer=optimizer)
    assert_equal(engine.state_dict(), twin)
    assert all(ours is theirs for ours, theirs in zip(params, models[0].parameters(), strict=True))


def _reset(module: nn.Module) -> None:
    for name in ("reset_parameters", "_reset_parameters"):
        if hasattr(module, name):
            getattr(module, name)()
            return


@pytest.mark.parametrize(
    ("given", "difference"),
    [
        ({"weights": "nowhere"}, "weights given is False on rank 0 and True on rank 1"),
        ({"init": _reset}, "init given is False on rank 0 and True on rank 1"),
        ({"device": "meta"}, "device is 'cpu' on rank 0 and 'meta' on rank 1"),
    ],
)
def test_what_only_some_ranks_are_given_is_named_on_all(given: dict[str, Any], difference: str) -> None:
    def rank(world: sw.World) -> None:
        with pytest.raises(ConfigError, match=difference):
            sw.shard(two_of_torch(), world=world, **(given if world.rank else {}))

    run_ranks(2, rank)


class Scale(nn.Module):
    """A module with parameters and a buffer, and without a method that initializes them."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(3))
        self.register_buffer("far", torch.ones(3), persistent=False)


def test_meta_models_that_nobody_fills_are_refused_by_name() -> None:
    for num_ranks in (1, 2):
        models = on_meta(lambda: nn.Sequential(nn.Linear(3, 3), Scale()), num_ranks)

        def rank(world: sw.World, models: list[nn.Module] = models) -> None:
            with pytest.raises(ModelError, match=r"values for 1\.by, 1\.far: they are on the meta.*deferred_init"):
                sw.shard(models[world.rank], world=world)

        run_ranks(num_ranks, rank)
        assert all(param.is_meta for param in models[0].parameters())

    class Half(Scale):
        def reset_parameters(self) -> None:
            self.by.data.fill_(2)

    with pytest.raises(ModelError, match=r"initial values for far"):
        sw.shard(on_meta(Half, 1)[0])


@pytest.mark.parametrize("plan", ["zero1", "zero3", {"preset": "zero2", "mesh": {"pp": 2}}])
def test_ranks_whose_models_are_empty_take_the_first_rank_s_values(plan: Any) -> None:
    """As verl and FSDP's recipes load a model: rank 0 reads the files, the others have it on the meta device. What its
    modules' own methods would do, or that they have none, is of no matter then."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 3), Scale(), nn.Linear(3, 3))

    first = build()
    for value, tensor in enumerate((*first.parameters(), *first.buffers())):
        tensor.data.fill_(value)
    twin = copy.deepcopy(first)
    models = [first, on_meta(build, 1)[0]]

    def rank(world: sw.World) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
        model = models[world.rank]
        engine = sw.shard(model, plan, world=world)
        far = getattr(model[1], "far", None)
        return engine.state_dict(), far

    for state, far in run_ranks(2, rank):
        assert_equal(state, twin)
        assert far is None or torch.equal(far, torch.full((3,), 5.0))


def test_init_fills_meta_models() -> None:
    def init(module: nn.Module) -> None:
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.data.fill_(3)

    model = on_meta(lambda: nn.Sequential(nn.Linear(3, 3), Scale()), 1)[0]
    state = sw.shard(model, init=init).state_dict()
    assert all(bool((value == 3).all()) for value in state.values())
    assert torch.equal(model[1].far, torch.full((3,), 3.0))
    with pytest.raises(ModelError, match="has values already"):
        sw.shard(Transformer(), init=init)


def test_a_deferred_model_can_be_sharded_anew() -> None:
    models = deferred(Transformer, 2)

    def rank(world: sw.World) -> dict[str, torch.Tensor]:
        engine = sw.shard(models[world.rank], "zero3", world=world)
        engine.reshard("zero2")
        return engine.state_dict()

    for state in run_ranks(2, rank):
        assert_equal(state, plain(Transformer))
