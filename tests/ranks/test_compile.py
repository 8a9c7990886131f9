"""Compiled units have the results of the plain model, one graph without breaks per block class, and can be undone."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from small_transformers import VOCAB, llama
from test_transformers import losses_of
from torch import nn
from torch._dynamo.utils import counters
from twins import adamw, assert_same, batches, plain_run, sharded_run

import shardwise as sw
from shardwise.errors import ConfigError
from shardwise.runtime.compiled import _compiled
from shardwise.testing import run_ranks
from tests.models import Transformer
from tests.thorough import sampled, thorough_only

NUM_RANKS = 2 if torch.torch_version.TorchVersion(torch.__version__) >= "2.13" else 1
"""Torch 2.11 cannot trace in two threads at once: it takes the other thread's trace for a surrounding one."""
BACKEND = "aot_eager"  # traces forward and backward like inductor, and needs no C++ compiler


@sampled
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo reads .grad of an input that is no leaf
@pytest.mark.parametrize(("preset", "num_ranks"), [("zero3", NUM_RANKS), ("zero2", NUM_RANKS)])
def test_compiled_units_train_like_the_plain_model(preset: str, num_ranks: int) -> None:
    torch._dynamo.reset()
    counters.clear()
    model, data = Transformer(), batches(5, rows=12)

    def after(engine: sw.Engine) -> dict[str, Any]:
        return {"model": engine.module, "compiled": "forward" in engine.module.blocks[0].__dict__}

    run = sharded_run(model, data, preset, num_ranks, None, compile=BACKEND, after=after)
    assert_same(run, plain_run(model, data))
    assert run.extra["compiled"]
    assert "forward" not in run.extra["model"].blocks[0].__dict__  # closing the engine restores it
    assert not counters["graph_break"]
    assert 1 <= counters["stats"]["unique_graphs"] <= 2  # the three blocks share one


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "no-cache"])
def test_more_blocks_than_torch_recompiles_for_are_all_compiled(use_cache: bool) -> None:
    torch._dynamo.reset()
    counters.clear()
    num_blocks = torch._dynamo.config.recompile_limit + 2
    torch.manual_seed(0)
    model = llama(num_hidden_layers=num_blocks, use_cache=use_cache)
    twin = copy.deepcopy(model)
    tokens = torch.randint(0, VOCAB, (2, 2, 8))

    def rank(world: sw.World) -> list[float]:
        engine = sw.shard(model, {"preset": "zero3", "compile": "eager"}, optimizer=adamw(model), world=world)
        losses = []
        for batch in tokens:
            losses.append(loss := engine(input_ids=batch, labels=batch).loss)
            engine.backward(loss)
            engine.step()
        return [loss.item() for loss in losses]

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", UserWarning)
        (losses,) = run_ranks(1, rank)
    told = [str(one.message) for one in said if "use_cache=False" in str(one.message)]
    assert len(told) == use_cache
    assert all(
        f"LlamaDecoderLayer is given a DynamicCache, for which torch.compile makes a graph for each of "
        f"{num_blocks} blocks" in one
        for one in told
    )
    assert counters["stats"]["unique_graphs"] == (num_blocks if use_cache else 1)
    assert losses == pytest.approx(losses_of(twin, tokens), rel=2e-6)


def test_room_for_graphs_is_made_where_torch_compile_has_no_argument_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    counters.clear()
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, *, backend: compile_(model, backend=backend))
    num_calls = torch._dynamo.config.recompile_limit + 2

    def forward(x: torch.Tensor, number: list[int]) -> torch.Tensor:
        return x * number[0]

    compiled = _compiled(forward, "eager", num_calls)
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        for number in range(num_calls):
            assert compiled(torch.ones(2), [number]).tolist() == [number, number]
    assert counters["stats"]["unique_graphs"] == num_calls


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_hooks_of_units_inside_others_are_not_traced() -> None:
    """Units by size: a decoder's layer has other units inside, and is not compiled; its attention is."""
    torch._dynamo.reset()
    model = llama(use_cache=False)
    twin, models = copy.deepcopy(model), [copy.deepcopy(model) for _ in range(2)]
    tokens = torch.randint(0, VOCAB, (3, 2, 8))
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for batch in tokens:
        twin(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def rank(world: sw.World) -> dict[str, torch.Tensor]:
        mine = models[world.rank]
        plan = {"preset": "zero3", "compile": "eager", "units": {"min_numel": 1500}}
        engine = sw.shard(mine, plan, optimizer=torch.optim.SGD(mine.parameters(), lr=0.1), world=world)
        for batch in tokens:
            own = batch[world.rank : world.rank + 1]
            engine.backward(mine(input_ids=own, labels=own).loss)
            engine.step()
        assert "forward" in mine.model.layers[0].self_attn.__dict__
        assert "forward" not in mine.model.layers[0].__dict__
        return engine.state_dict()

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="torch.compile around a sharded model")
        for state in run_ranks(2, rank):
            for name, value in twin.state_dict().items():
                assert (state[name] - value).abs().max() < 1e-6, name


def test_a_compile_of_nothing_is_told() -> None:
    model = Transformer(num_blocks=1)
    with pytest.warns(UserWarning, match="eager finds nothing to compile.*units: {class: Block}"):
        sharded_run(model, batches(3), "zero3", 1, None, compile="eager", units={"min_numel": 1})


def test_an_unknown_backend_is_named() -> None:
    with pytest.raises(ConfigError, match="compile is 'inductr'"):
        sw.shard(Transformer(), {"compile": "inductr"})


def around(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def in_place(model: nn.Module) -> Any:
    model.compile(backend="eager")
    return model


@pytest.mark.parametrize("compile_by", [around, in_place], ids=lambda compile_by: compile_by.__name__)
@pytest.mark.parametrize("is_before", [True, False], ids=["before", "after"])
def test_a_compile_around_the_sharded_model_is_answered_with_a_warning(compile_by: Any, is_before: bool) -> None:
    model = Transformer(num_blocks=1)
    model = compile_by(model) if is_before else model
    (batch,) = batches(1)

    def rank(world: sw.World) -> None:
        engine = sw.shard(model, "zero3", optimizer=adamw(model), world=world)
        called = model if is_before else compile_by(model)
        called(*batch).backward()
        engine.step()

    with pytest.warns(UserWarning, match=r"compiles next to nothing.*compile: inductor") as said:
        run_ranks(1, rank)
    assert len([one for one in said if "compiles next to nothing" in str(one.message)]) == 1


@pytest.mark.parametrize("preset", ["zero1", "zero3"])
def test_a_compiled_step_of_the_optimizer_is_taken_as_it_is(preset: str) -> None:
    """As in torch's tutorial on compiled optimizers: `torch.compile(lambda: optimizer.step())`."""
    twin = Transformer(num_blocks=1)
    models = [copy.deepcopy(twin) for _ in range(2)]
    (batch,) = batches(1)

    def train(model: nn.Module, step: Any) -> dict[str, torch.Tensor]:
        for _ in range(2):
            model(*batch).backward()
            step()
            model.zero_grad()
        return {name: value.clone() for name, value in model.state_dict().items()}

    def rank(world: sw.World) -> dict[str, torch.Tensor]:
        model = models[world.rank]
        optimizer = adamw(model)
        with sw.shard(model, preset, optimizer=optimizer, world=world):
            return train(model, torch.compile(lambda: optimizer.step(), backend="eager"))

    plain = train(twin, adamw(twin).step)
    for state in run_ranks(2, rank):
        torch.testing.assert_close(state, plain)


@pytest.mark.filterwarnings("ignore:torch.compile around a sharded model:UserWarning")
def test_a_model_that_is_to_be_one_graph_is_refused_with_the_remedy() -> None:
    torch.compiler.reset()  # a frame that another test has made it skip would not be traced
    model = Transformer(num_blocks=1)
    (batch,) = batches(1)

    def rank(world: sw.World) -> None:
        with sw.shard(model, "zero3", world=world):
            torch.compile(model, backend="eager", fullgraph=True)(*batch)

    with pytest.raises(Exception, match=r"cannot be one graph.*compile: inductor"):
        run_ranks(1, rank)


def in_its_model(model: Any) -> Any:
    model.blocks[0].compile(backend="eager", fullgraph=True)
    return model


def inside_a_unit(model: Any) -> Any:
    model.blocks[0].up.compile(backend="eager", fullgraph=True)
    return model


def by_itself(model: Any) -> Any:
    block = torch.compile(model.blocks[0], backend="eager", fullgraph=True)
    return lambda *batch: block(torch.ones(1, 3, 32))


@pytest.mark.filterwarnings("ignore:torch.compile around a sharded model:UserWarning")
@pytest.mark.parametrize("compile_by", [in_its_model, inside_a_unit, by_itself], ids=lambda one: one.__name__)
def test_a_part_that_is_to_be_one_graph_is_refused_with_the_remedy_or_right(compile_by: Any) -> None:
    """Torch's own error, which says nothing of the model's plan, has ours in it or as a note. Torch 2.11 computes what
    it does not compile, without an error."""
    torch.compiler.reset()
    model = Transformer(num_blocks=1)
    (batch,) = batches(1)
    expected = model.blocks[0](torch.ones(1, 3, 32)) if compile_by is by_itself else model(*batch)

    def rank(world: sw.World) -> torch.Tensor:
        with sw.shard(model, "zero3", world=world):
            found: torch.Tensor = compile_by(model)(*batch)
            return found

    error = found = None
    try:
        (found,) = run_ranks(1, rank)
    except RuntimeError as refused:
        error = refused
    if error is None:
        assert torch.__version__ < "2.13"
        assert found is not None
        assert torch.equal(found, expected)
        return
    said = "\n".join([str(error), *getattr(error, "__notes__", [])])
    assert "fullgraph=True" in str(error)
    assert "part of a sharded model cannot be one graph" in said
    assert "compile: inductor" in said


def test_nobody_is_warned_of_modules_inside_a_unit() -> None:
    model = Transformer(num_blocks=1)
    model.blocks[0].up.compile(backend="eager")
    (batch,) = batches(1)

    def rank(world: sw.World) -> None:
        engine = sw.shard(model, {"preset": "zero3", "units": ["blocks.*"]}, optimizer=adamw(model), world=world)
        engine.backward(engine(*batch))
        engine.step()

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        run_ranks(1, rank)
