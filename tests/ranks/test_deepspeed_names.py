"""What scripts import from DeepSpeed beside `initialize`: weights of checkpoints, optimizers, memory figures."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import shardwise as sw
import shardwise.integrations.deepspeed as deepspeed
from shardwise.errors import CheckpointError, ConfigError, StateError
from shardwise.integrations.deepspeed import facade, stored, topology, zero
from shardwise.integrations.deepspeed.accelerator import Accelerator
from shardwise.integrations.deepspeed.autotuning import _counted_as
from shardwise.integrations.deepspeed.config import ComponentConfig
from shardwise.integrations.deepspeed.initialization import _KNOWN, make_optimizer
from shardwise.optim import Cooperative
from shardwise.program import OPTIMIZERS, update_by
from shardwise.testing import run_ranks
from tests.drawing import drawing
from tests.models import VOCAB, Transformer

Tensor = torch.Tensor


def _is_optimizer(name: str) -> bool:
    found = getattr(sw.optim, name)
    return isinstance(found, type) and issubclass(found, torch.optim.Optimizer) and found is not Cooperative


THEIRS = Path(__file__).parent.parent / "fixtures" / "deepspeed" / "zero3"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint of two ranks, of which a part is frozen, and the weights in it."""
    folder = tmp_path_factory.mktemp("saved")
    torch.manual_seed(0)
    model = Transformer().requires_grad_(False)
    model.head.requires_grad_(True)
    models = [copy.deepcopy(model) for _ in range(2)]
    config = {"zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW"}, "bf16": {"enabled": True}}

    def rank_of(world: sw.World) -> dict[str, Tensor]:
        engine, *_ = deepspeed.initialize(model=models[world.rank], config=config, world=world)
        engine.save_checkpoint(folder)
        part = engine.module_state_dict(prefix="model.", exclude_frozen_parameters=True)
        assert list(part) == ["model.head.weight"]
        return engine.module_state_dict()

    return folder, run_ranks(2, rank_of)[1]


def test_weights_of_a_checkpoint_are_read_whole(saved: tuple[Path, dict[str, Tensor]]) -> None:
    folder, expected = saved
    for is_lazy in (False, True):
        found = stored.get_fp32_state_dict_from_zero_checkpoint(folder, lazy_mode=is_lazy)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name].dtype == torch.float32
            torch.testing.assert_close(found[name], value.float(), rtol=2**-8, atol=0)
    trained = stored.get_fp32_state_dict_from_zero_checkpoint(folder, "global_step0", exclude_frozen_parameters=True)
    assert list(trained) == ["head.weight"]
    model = stored.load_state_dict_from_zero_checkpoint(Transformer(), folder)
    assert all(torch.equal(value, found[name]) for name, value in model.state_dict().items())
    with pytest.raises(CheckpointError, match="no file latest"):
        stored.get_fp32_state_dict_from_zero_checkpoint(folder.parent / "nothing")


def test_deepspeeds_own_checkpoints_are_read_too() -> None:
    found = stored.get_fp32_state_dict_from_zero_checkpoint(THEIRS)
    assert found
    assert all(value.dtype == torch.float32 for value in found.values())


@pytest.mark.parametrize("is_safe", [False, True])
@pytest.mark.parametrize("limit", ["5GB", "20KB", None])
def test_weights_of_a_checkpoint_are_converted(
    saved: tuple[Path, dict[str, Tensor]], tmp_path: Path, is_safe: bool, limit: str | None
) -> None:
    folder, expected = saved
    stored.convert_zero_checkpoint_to_fp32_state_dict(folder, tmp_path, limit, safe_serialization=is_safe)
    stem = "model.safetensors" if is_safe else "pytorch_model.bin"
    files = [stem]
    if limit == "20KB":
        index = json.loads((tmp_path / f"{stem}.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(4 * value.numel() for value in expected.values())
        files = sorted(set(index["weight_map"].values()))
        assert len(files) > 1
    found: dict[str, Tensor] = {}
    for file in files:
        found |= load_file(tmp_path / file) if is_safe else torch.load(tmp_path / file, weights_only=True)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value.float(), rtol=2**-8, atol=0)


def test_a_model_built_on_a_device() -> None:
    def rank_of(world: sw.World) -> Tensor:
        with drawing(), zero.OnDevice(torch.float64):
            torch.manual_seed(3)
            model = Transformer()
        assert {param.dtype for param in model.parameters()} == {torch.float64}
        assert model.head.weight.untyped_storage().size() == 0
        engine, *_ = deepspeed.initialize(model=model, config={"zero_optimization": {"stage": 3}}, world=world)
        return engine.shardwise.get("blocks.1.up.weight").clone()

    torch.manual_seed(3)
    with zero.OnDevice(torch.float64, "cpu"):
        whole = Transformer()
    assert torch.get_default_dtype() == torch.float32
    assert whole.head.weight.dtype == torch.float64
    assert torch.equal(run_ranks(1, rank_of)[0], whole.blocks[1].up.weight)


def test_batch_sizes_stay() -> None:
    def rank_of(world: sw.World) -> None:
        config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}
        engine, *_ = deepspeed.initialize(model=nn.Linear(4, 4), config=config, world=world)
        engine.set_train_batch_size(6)
        engine.set_train_micro_batch_size(2)
        with pytest.raises(StateError, match="train_batch_size is 6 and cannot be changed to 12"):
            engine.set_train_batch_size(12)

    run_ranks(1, rank_of)


@pytest.mark.parametrize(
    ("kind", "argument"),
    [
        (facade.FusedAdam, "params"),
        (facade.CPUAdam, "model_params"),
        (facade.FusedLamb, "params"),
        (facade.FusedLion, "params"),
        (facade.CPULion, "model_params"),
        (facade.CPUAdagrad, "model_params"),
    ],
)
def test_optimizers_call_their_parameters_as_deepspeeds_do(kind: Any, argument: str) -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    for optimizer in (kind(**{argument: [weight]}, lr=0.5), kind([weight], 0.5)):
        assert isinstance(optimizer, kind)
        assert optimizer.param_groups[0]["params"] == [weight]
        assert optimizer.defaults["lr"] == 0.5
    if kind is facade.CPUAdam:
        assert type(kind([weight], adamw_mode=False)) is torch.optim.Adam


def test_classes_of_optimizers_tell_them_apart() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    assert not isinstance(torch.optim.SGD([weight]), facade.FusedAdam)
    assert not isinstance(facade.FusedLion([weight]), facade.FusedLamb)
    assert not isinstance(facade.FusedAdam([weight]), facade.CPUAdagrad)


def test_optimizers_of_mup_are_made_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def half_rates(params: list[nn.Parameter], lr: float, **options: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([{"params": params, "lr": lr / 2}], **options)

    config = {"optimizer": {"type": "MuAdamW", "params": {"lr": 0.4, "eps": 1e-6}}, "zero_optimization": {"stage": 2}}

    def rank_of(world: sw.World) -> None:
        engine, optimizer, *_ = deepspeed.initialize(model=nn.Linear(4, 4), config=config, world=world)
        assert (optimizer.param_groups[0]["lr"], optimizer.defaults["eps"]) == (0.2, 1e-6)
        engine.destroy()

    monkeypatch.setitem(sys.modules, "mup", SimpleNamespace(MuAdamW=half_rates))
    run_ranks(1, rank_of)
    monkeypatch.setitem(sys.modules, "mup", None)
    with pytest.raises(ConfigError, match="MuAdamW needs the package mup, which is not installed"):
        run_ranks(1, rank_of)


def test_defaults_of_optimizers_are_deepspeeds() -> None:
    weight = nn.Parameter(torch.full((2, 2), 100.0))
    lamb, lion = facade.FusedLamb([weight]), facade.FusedLion([weight])
    expected = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "ratio_bounds": (0.01, 10.0)}
    assert expected.items() <= lamb.defaults.items()
    assert {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}.items() <= lion.defaults.items()
    weight.grad = torch.ones(2, 2)
    lamb.step()  # the norm of the weight is 200, that of the direction 2
    torch.testing.assert_close(weight.data, torch.full((2, 2), 100 - 1e-3 * 10.0))
    wider = facade.FusedLamb([weight], max_coeff=1e6, min_coeff=0)
    wider.step()
    torch.testing.assert_close(weight.data, torch.full((2, 2), 99.99 * (1 - 1e-3)))


def test_adagrad() -> None:
    model = nn.Linear(4, 4)
    optimizer = facade.CPUAdagrad(model.parameters(), eps=1e-6, fp32_optimizer_states=True)
    assert isinstance(optimizer, torch.optim.Adagrad)
    assert (optimizer.defaults["lr"], optimizer.defaults["eps"]) == (1e-2, 1e-6)


@pytest.mark.parametrize("stage", [0, 3])
def test_muon_of_a_config_trains_as_on_one_process(stage: int) -> None:
    """Matrices by Muon; embeddings, norms and biases by AdamW, at a rate of their own."""
    model = Transformer()
    batch = torch.randint(VOCAB, (2, 2, 6), generator=torch.Generator().manual_seed(1))
    options = {"muon_lr": 0.05, "adam_lr": 0.01, "betas": [0.8, 0.9], "ns_method": "standard", "weight_decay": 0.1}
    twin, models = copy.deepcopy(model), [copy.deepcopy(model) for _ in range(2)]
    for one in models:
        for module in (one.tokens, one.positions, one.head):
            module.weight.use_muon = False
    matrices = [param for name, param in twin.named_parameters() if param.dim() == 2 and name.startswith("blocks")]
    others = [param for param in twin.parameters() if all(param is not one for one in matrices)]
    alone = [
        torch.optim.Muon(matrices, lr=0.05, weight_decay=0.1),
        torch.optim.AdamW(others, lr=0.01, betas=(0.8, 0.9), eps=1e-10, weight_decay=0.1),
    ]
    for _ in range(3):
        torch.stack([twin(tokens, tokens.roll(1, 0)) for tokens in batch]).mean().backward()
        for optimizer in alone:
            optimizer.step()
            optimizer.zero_grad()

    def rank_of(world: sw.World) -> dict[str, Tensor]:
        config = {
            "optimizer": {"type": "Muon", "params": options},
            "zero_optimization": {"stage": stage},
            "gradient_clipping": 0,
        }
        mine = models[world.rank]
        engine, *_ = deepspeed.initialize(model=mine, config=config, world=world)
        tokens = batch[world.rank]
        for _ in range(3):
            engine.backward(engine(tokens, tokens.roll(1, 0)))
            engine.step()
        return engine.module_state_dict()

    found = run_ranks(2, rank_of)[0]
    for name, value in twin.state_dict().items():  # directions, of at most 1, are rounded to bf16 several times
        torch.testing.assert_close(found[name], value, rtol=0, atol=3 * 0.05 * 2**-5)


def test_muon_of_a_config_needs_names() -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(ConfigError, match=r"Set param\.use_muon to True or False"):
        make_optimizer(ComponentConfig("Muon", {}), [weight])
    with pytest.raises(ConfigError, match="not valid for Muon: per_head_muon"):
        make_optimizer(ComponentConfig("Muon", {"per_head_muon": True}), [weight])
    model = nn.ModuleDict({"embedding": nn.Linear(4, 4), "hidden": nn.Linear(4, 4)})
    made = make_optimizer(ComponentConfig("Muon", {}), list(model.parameters()), model)
    assert [len(group["params"]) for group in made.param_groups] == [1, 3]
    assert made.param_groups[0]["params"][0] is model["hidden"].weight
    assert [group["lr"] for group in made.param_groups] == [0.02, 3e-4]


def test_memory_figures() -> None:
    """On a CPU they are those of the process, as in DeepSpeed."""
    accelerator = Accelerator()
    accelerator.empty_cache()
    before = accelerator.memory_allocated()
    large = torch.ones(2**24)
    assert accelerator.memory_allocated() > before + 2**25
    del large
    assert Accelerator().max_memory_allocated() > before + 2**25
    accelerator.reset_peak_memory_stats()
    assert accelerator.max_memory_allocated() == pytest.approx(accelerator.memory_allocated(), rel=0.1)


@pytest.mark.parametrize(
    ("method", "stages"),
    [
        ("parameters", None),
        ("uniform", [["0", "1", "2"], ["3", "4"], ["6"]]),
        ("type:linear", [["0", "1", "2"], ["3"], ["4", "6"]]),
        ("Type:^(Linear|tanh)$", [["0", "1", "2", "3"], ["4"], ["6"]]),
    ],
)
def test_partition_methods_of_a_pipeline(method: str, stages: list[list[str]] | None) -> None:
    linear = deepspeed.LayerSpec(nn.Linear, 2, 2)
    layers = [nn.Embedding(4, 2), linear, nn.LayerNorm(2), linear, linear, torch.tanh, nn.LayerNorm(2)]
    assert deepspeed.PipelineModule(layers, num_stages=3, partition_method=method).stages == stages


def test_partition_methods_that_cannot_be_had() -> None:
    layers = [nn.Embedding(4, 2), nn.Linear(2, 2)]
    cases = {
        "profile": "must be 'parameters'",
        "type:linear": "counts 1 layers, too few for 2",
        "type:(": "which is no regular expression: missing",
    }
    for method, words in cases.items():
        with pytest.raises(ConfigError, match=words):
            deepspeed.PipelineModule(layers, num_stages=2, partition_method=method)


def test_a_topology_counts_ranks_as_deepspeed_does() -> None:
    grid = topology.PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=3)
    assert (grid.world_size(), grid.get_axis_names()) == (12, ["pipe", "data", "model"])
    assert (grid.get_dim("pipe"), grid.get_dim("data"), grid.get_dim("expert")) == (2, 3, 0)
    assert [grid.get_rank(pipe=pp, data=dp, model=mp) for pp in range(2) for dp in range(3) for mp in range(2)] == list(
        range(12)
    )
    assert grid.get_coord(9) == grid.ProcessCoord(pipe=1, data=1, model=1)
    assert [grid.get_rank(**grid.get_coord(rank)._asdict()) for rank in range(12)] == list(range(12))
    assert grid.get_axis_list("pipe", 1) == [6, 7, 8, 9, 10, 11]
    assert grid.filter_match(pipe=0, model=1) == [1, 3, 5]
    assert grid.filter_match(pipe=2) == []
    with pytest.raises(ValueError, match="There is no axis expert among pipe, data, model"):
        grid.filter_match(expert=0)
    assert grid.get_axis_comm_lists("pipe") == [[rank, rank + 6] for rank in range(6)]
    assert grid.get_axis_comm_lists("expert") == []
    assert grid.get_rank_repr(9) == "model_01"
    assert grid.get_rank_repr(9, omit_axes=["model"]) == "pipe_01-data_01"
    with pytest.raises(ValueError, match="takes an index of each of"):
        grid.get_rank(pipe=2, data=0, model=0)
    with pytest.raises(ValueError, match="no rank 12 among 12"):
        grid.get_coord(12)
    with pytest.raises(ConfigError, match="one size of 1 or more for each"):
        topology.ProcessTopology(["pipe"], [2, 3])


def test_a_pipeline_without_a_topology_has_one_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    module = deepspeed.PipelineModule([nn.Linear(2, 2), nn.Linear(2, 2)], num_stages=2)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 6)
    grid = module.topology()
    assert type(grid) is facade._modules()["deepspeed.runtime.pipe.topology"]["PipeDataParallelTopology"]
    assert grid.get_axis_comm_lists("data") == [[0, 1, 2], [3, 4, 5]]


def test_topologies_that_a_pipeline_cannot_have() -> None:
    layers = [nn.Embedding(4, 2), nn.Linear(2, 2)]
    with pytest.raises(ConfigError, match="needs num_stages or a topology"):
        deepspeed.PipelineModule(layers)
    with pytest.raises(ConfigError, match="num_stages is 1, but the topology has 2"):
        deepspeed.PipelineModule(layers, num_stages=1, topology=topology.PipeDataParallelTopology(2, 1))
    with pytest.raises(
        ConfigError, match=r"has the axes data, pipe\. Supported are pipe, data and model, in this order"
    ):
        deepspeed.PipelineModule(layers, topology=topology.ProcessTopology(["data", "pipe"], [2, 2]))
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    for grid, words in [
        (topology.PipeDataParallelTopology(1, 2), "has 2 ranks along data, but 1 take part"),
        (topology.PipeModelDataParallelTopology(1, 2, 1), "has 2 ranks along model, the config 1. Set tensor_parallel"),
    ]:
        module = deepspeed.PipelineModule(layers, topology=grid)
        with pytest.raises(ConfigError, match=words):
            run_ranks(1, lambda world, module=module: deepspeed.initialize(model=module, config=config, world=world))


@pytest.mark.parametrize("name", sorted({*_KNOWN, *(name for name in sw.optim.__all__ if _is_optimizer(name))}))
def test_explain_counts_every_optimizer_that_a_config_or_this_library_names(name: str) -> None:
    (key,) = (key for key in OPTIMIZERS if key.replace("-", "") == name.lower())
    model = nn.Linear(6, 4, bias=False)
    named = make_optimizer(ComponentConfig(name, {"lr": 1e-3}), list(model.parameters()), model)
    optimizer = named if name in _KNOWN else getattr(sw.optim, name)(model.parameters())
    counted = update_by(key, (4, 6), is_hidden=True)
    if isinstance(optimizer, Cooperative):
        update = optimizer.update_of(model.weight, optimizer.param_groups[0])
        assert (update.states, update.sends_signs) == (counted.states, counted.sends_signs)
        return
    model(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    kept = [state for state in optimizer.state[model.weight].values() if state is not None and state.shape == (4, 6)]
    assert len(kept) == counted.states.copies


def test_momentum_is_a_state_to_autotuning() -> None:
    params = [nn.Parameter(torch.zeros(3))]
    for optimizer, key in (
        (torch.optim.SGD(params, 0.1), "sgd"),
        (torch.optim.SGD(params, 0.1, momentum=0.9), "momentum"),
        (torch.optim.Adam(params), "adam"),
        (sw.optim.Adafactor(params), "adafactor"),
        (torch.optim.RMSprop(params), None),
    ):
        assert _counted_as(optimizer) == key
