"""What scripts call beside training: moving states, loading into other heads, tags, timers, tiles, schedules."""

from __future__ import annotations

import argparse
import copy
import errno
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import shardwise as sw
import shardwise.integrations.deepspeed as deepspeed
from shardwise.errors import CheckpointError, ConfigError, ModelError, StateError
from shardwise.integrations.deepspeed import (
    collectives,
    elasticity,
    enums,
    facade,
    leaf_modules,
    logging,
    monitor,
    tensors,
    tiling,
    timers,
    zero,
)
from shardwise.integrations.deepspeed.stored import get_fp32_state_dict_from_zero_checkpoint
from shardwise.observe.trackers import CSV
from shardwise.testing import run_ranks
from tests.models import VOCAB, Transformer
from tests.thorough import sampled

Tensor = torch.Tensor
RANKS = 2
ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "gradient_clipping": 0}


def batches(count: int) -> Tensor:
    return torch.randint(VOCAB, (count, RANKS, 2, 6), generator=torch.Generator().manual_seed(5))


def step(engine: deepspeed.DeepSpeedEngine, tokens: Tensor) -> None:
    mine = tokens[engine.global_rank]
    engine.backward(engine(mine, mine.roll(1, 0)))
    engine.step()


def plain(model: nn.Module, steps: Tensor, optimizer: torch.optim.Optimizer) -> None:
    for tokens in steps:
        torch.stack([model(mine, mine.roll(1, 0)) for mine in tokens]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_weights(found: dict[str, Tensor], wanted: nn.Module) -> None:
    for name, value in wanted.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


@sampled
@pytest.mark.parametrize("stage", [1, 3])
def test_states_may_be_away_for_a_while(stage: int) -> None:
    """Between steps, and also in a step, which goes on from the host."""
    model, steps = Transformer(), batches(4)
    twin = copy.deepcopy(model)
    plain(twin, steps, torch.optim.AdamW(twin.parameters(), lr=0.01, weight_decay=0))
    models = [copy.deepcopy(model) for _ in range(RANKS)]
    config = {**ADAM, "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}

    def rank_of(world: sw.World) -> dict[str, Tensor]:
        engine, *_ = deepspeed.initialize(model=models[world.rank], config=config, world=world)
        step(engine, steps[0])
        before = engine.shardwise.table
        engine.offload_states(include={enums.OffloadStateTypeEnum.lp_grads})
        assert engine.shardwise.table == before
        engine.offload_states(pin_memory=False)
        engine.offload_states()
        table = engine.shardwise.table
        assert table.optim.tier == "host"
        assert (table.param.tier == "host") == (stage == 3)
        step(engine, steps[1])
        engine.reload_states()
        engine.reload_states(non_blocking=True)
        assert engine.shardwise.table == before
        step(engine, steps[2])
        engine.offload_states(include=[enums.OffloadStateTypeEnum.optim_states], device="cpu")
        engine.reload_states()
        step(engine, steps[3])
        with pytest.raises(ConfigError, match="nvme"):
            engine.offload_states(device=enums.OffloadDeviceEnum.nvme)
        return engine.module_state_dict()

    for found in run_ranks(RANKS, rank_of):
        assert_weights(found, twin)


@sampled
@pytest.mark.parametrize("stage", [0, 3])
def test_initialize_again_goes_on_with_the_weights(stage: int) -> None:
    """With a new optimizer, whether the script has kept its first engine or not."""
    model, steps = Transformer(), batches(3)
    twin = copy.deepcopy(model)
    for tokens in steps:
        plain(twin, tokens[None], torch.optim.AdamW(twin.parameters(), lr=0.01, weight_decay=0))
    models = [copy.deepcopy(model) for _ in range(RANKS)]
    config = {**ADAM, "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}

    def rank_of(world: sw.World) -> dict[str, Tensor]:
        mine = models[world.rank]
        first, *_ = deepspeed.initialize(model=mine, config=config, world=world)
        step(first, steps[0])
        engine, *_ = deepspeed.initialize(model=mine, config=config, world=world)
        with pytest.raises(StateError, match="closed"):
            step(first, steps[1])
        step(engine, steps[1])
        del engine
        engine, *_ = deepspeed.initialize(model=mine, config=config, world=world)
        step(engine, steps[2])
        return engine.module_state_dict()

    for found in run_ranks(RANKS, rank_of):
        assert_weights(found, twin)


def heads(name: str, width: int) -> nn.ModuleDict:
    body = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    return nn.ModuleDict({"body": body, name: nn.Linear(4, width)})


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_common_part_of_a_checkpoint_is_loaded(stage: int, tmp_path: Path) -> None:
    config = {**ADAM, "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    firsts, others = ([heads(name, 3) for _ in range(RANKS)] for name in ("old", "new"))
    wider = [heads("old", 5) for _ in range(RANKS)]
    options = {"load_optimizer_states": False, "load_lr_scheduler_states": False}

    def rank_of(world: sw.World) -> None:
        first, *_ = deepspeed.initialize(model=firsts[world.rank], config=config, world=world)
        first.module.body[1].running_mean.fill_(3.0)
        first.save_checkpoint(tmp_path)
        other, *_ = deepspeed.initialize(model=others[world.rank], config=config, world=world)
        before = other.module_state_dict()
        with pytest.raises(ModelError, match=r"lacks new\.bias, new\.weight"):
            other.load_checkpoint(tmp_path, **options)
        with pytest.raises(CheckpointError, match=r"load_module_strict=False, load_optimizer_states=False"):
            other.load_checkpoint(tmp_path, load_module_strict=False)
        other.load_checkpoint(tmp_path, load_module_strict=False, **options)
        saved, found = first.module_state_dict(), other.module_state_dict()
        for name, value in found.items():
            assert torch.equal(value, before[name] if name.startswith("new") else saved[name]), name
        third, *_ = deepspeed.initialize(model=wider[world.rank], config=config, world=world)
        with pytest.raises(ModelError, match=r"has old\.\w+ with shape"):
            third.load_checkpoint(tmp_path, load_module_strict=False, **options)

    run_ranks(RANKS, rank_of)


def test_a_part_of_a_state_is_loaded_into_a_pipeline() -> None:
    models = [deepspeed.PipelineModule([nn.Linear(4, 4) for _ in range(4)], num_stages=2) for _ in range(RANKS)]

    def rank_of(world: sw.World) -> None:
        config = {"gradient_accumulation_steps": 2, **ADAM}
        engine, *_ = deepspeed.initialize(model=models[world.rank], config=config, world=world)
        before = engine.module_state_dict()
        state = {"0.weight": torch.ones(4, 4), "3.bias": torch.ones(4), "9.bias": torch.ones(4)}
        engine.shardwise.load_state_dict(state, strict=False)
        after = engine.module_state_dict()
        assert all(torch.equal(value, state.get(name, before[name])) for name, value in after.items())
        with pytest.raises(ModelError, match=r"9\.bias"):
            engine.shardwise.load_state_dict({**before, "9.bias": torch.ones(4)})

    run_ranks(RANKS, rank_of)


@pytest.mark.parametrize("validation", ["Ignore", "WARN", "fail"])
def test_ranks_that_give_different_tags(validation: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {**ADAM, "checkpoint": {"tag_validation": validation}}

    def rank_of(world: sw.World) -> None:
        engine, *_ = deepspeed.initialize(model=nn.Linear(4, 4), config=config, world=world)
        engine.save_checkpoint(tmp_path, tag="same")
        if validation == "fail":
            with pytest.raises(AssertionError, match="Ranks gave different tags"):
                engine.save_checkpoint(tmp_path, tag=f"tag{world.rank}")
        else:
            engine.save_checkpoint(tmp_path, tag=f"tag{world.rank}")
            assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / "tag0")
        for empty in (None, ""):
            with pytest.raises(ValueError, match="needs a folder"):
                engine.save_checkpoint(empty)

    run_ranks(RANKS, rank_of)
    assert ("gets rank 0's, tag0" in capsys.readouterr().out) == (validation == "WARN")


def test_tied_weights_of_a_checkpoint_are_one_tensor(tmp_path: Path) -> None:
    def rank_of(world: sw.World) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = model[0].weight
        engine, *_ = deepspeed.initialize(model=model, config={"zero_optimization": {"stage": 3}}, world=world)
        engine.save_checkpoint(tmp_path)

    run_ranks(1, rank_of)
    state = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert state["0.weight"] is state["1.weight"]
    facade.stored.convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "out")
    written = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    assert written["0.weight"].data_ptr() == written["1.weight"].data_ptr()


def test_extra_states_are_in_a_state_dict_and_refused_where_only_tensors_are(tmp_path: Path) -> None:
    class Counting(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"seen": 3}

        def set_extra_state(self, state: Any) -> None:
            assert state == {"seen": 3}

    def rank_of(world: sw.World) -> None:
        config = {"zero_optimization": {"stage": 3}}
        engine, *_ = deepspeed.initialize(model=nn.Sequential(Counting(4, 4)), config=config, world=world)
        engine.save_checkpoint(tmp_path)

    run_ranks(1, rank_of)
    convert = facade.stored.convert_zero_checkpoint_to_fp32_state_dict
    convert(tmp_path, tmp_path / "out", max_shard_size="1KB")
    written = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    nn.Sequential(Counting(4, 4)).load_state_dict(written)
    with pytest.raises(CheckpointError, match=r"has 0\._extra_state, from get_extra_state"):
        convert(tmp_path, tmp_path / "safe", safe_serialization=True)


@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_are_updated_one_by_one(stage: int) -> None:
    models = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)) for _ in range(RANKS)]
    for model in models:
        model[0].bias.requires_grad_(False)

    def rank_of(world: sw.World) -> None:
        config = {"zero_optimization": {"stage": stage}, **ADAM}
        engine, *_ = deepspeed.initialize(model=models[world.rank], config=config, world=world)
        engine.backward(engine(torch.ones(1, 4)).sum())
        before = {name: tensors.safe_get_full_grad(param) for name, param in engine.module.named_parameters()}
        named = {id(param): name for name, param in engine.module.named_parameters()}
        tensors.safe_update_full_grad_vectorized(
            list(engine.module.parameters()), lambda gradient, param: gradient * len(named[id(param)])
        )
        assert tensors.safe_get_full_fp32_param(engine.module[0].bias) is None
        for name, param in engine.module.named_parameters():
            if before[name] is not None and param.requires_grad:
                torch.testing.assert_close(tensors.safe_get_full_grad(param), before[name] * len(name))

    run_ranks(RANKS, rank_of)


def test_generation_under_an_engine() -> None:
    models = [nn.Linear(4, 4) for _ in range(RANKS)]

    def rank_of(world: sw.World) -> None:
        config = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}, **ADAM}
        engine, *_ = deepspeed.initialize(model=models[world.rank], config=config, world=world)
        with zero.unwrap_model_for_generation(engine) as unwrapped:
            outputs = [unwrapped(torch.ones(1, 4)) for _ in range(world.rank + 1)]
        assert not outputs[0].requires_grad
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()

    run_ranks(RANKS, rank_of)


class Labels(NamedTuple):
    target: Tensor
    rest: dict[str, Tensor]


def test_a_pipeline_is_given_labels_by_name() -> None:
    def loss_of(output: Tensor, labels: Labels) -> Tensor:
        return nn.functional.mse_loss(output, labels.target + labels.rest["more"])

    layers = deepspeed.PipelineModule([nn.Linear(4, 4)], num_stages=1, loss_fn=loss_of)
    labels = Labels(torch.zeros(2, 4), {"more": torch.ones(2, 4)})
    wanted = loss_of(layers(torch.ones(2, 4)), labels).item()

    def rank_of(world: sw.World) -> None:
        engine, *_ = deepspeed.initialize(model=layers, config=ADAM, world=world)
        assert engine.train_batch(iter([(torch.ones(2, 4), labels)])).item() == pytest.approx(wanted, rel=1e-5)

    run_ranks(1, rank_of)


def test_a_pipeline_reads_from_what_it_is_given() -> None:
    layers = deepspeed.PipelineModule([nn.Linear(4, 4)], num_stages=1, loss_fn=nn.functional.mse_loss)
    pairs = [(torch.full((2, 4), float(number)), torch.zeros(2, 4)) for number in range(4)]

    def rank_of(world: sw.World) -> None:
        engine, *_ = deepspeed.initialize(model=layers, config={"gradient_accumulation_steps": 2, **ADAM}, world=world)
        engine.set_dataiterator(iter(pairs[:2]))
        first = layers(pairs[0][0]).square().mean() + layers(pairs[1][0]).square().mean()
        assert engine.train_batch().item() == pytest.approx(first.item() / 2, rel=1e-5)
        engine.set_dataloader([{"x": inputs, "y": labels} for inputs, labels in pairs])
        engine.set_batch_fn(lambda batch: (batch["x"], batch["y"]))
        assert engine.train_batch().isfinite()
        assert (engine.num_stages, engine.micro_batches, engine.get_pipeline_parallel_rank()) == (1, 2, 0)
        assert layers.num_pipeline_stages() == 1
        layers.set_checkpoint_interval(1)
        assert engine.train_batch().isfinite()

    run_ranks(1, rank_of)


def test_embeddings_with_sparse_gradients_are_known_by_name() -> None:
    def rank_of(world: sw.World) -> None:
        model = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 2))
        for is_sparse, names in ((False, set()), (True, {"0.weight"})):
            config = {"sparse_gradients": is_sparse, **ADAM}
            engine, *_ = deepspeed.initialize(model=model, config=config, world=world)
            assert engine.sparse_tensor_module_names == names

    run_ranks(1, rank_of)


class Leaf(nn.Linear):
    pass


def test_leaf_modules_are_remembered() -> None:
    model = nn.Sequential(Leaf(2, 2), nn.Sequential(nn.Linear(2, 2), Leaf(2, 2)), nn.ReLU())
    assert leaf_modules.set_z3_leaf_modules(model, [Leaf]) == [model[0], model[1][1]]
    assert leaf_modules.get_z3_leaf_modules(model) == [model[0], model[1][1]]
    assert leaf_modules.z3_leaf_parameter(model[0].bias)
    assert not leaf_modules.z3_leaf_parameter(model[1][0].bias)
    assert leaf_modules.unset_z3_leaf_modules(model, ["Leaf"]) == [model[0], model[1][1]]
    assert leaf_modules.get_z3_leaf_modules(model) == []
    assert leaf_modules.set_z3_leaf_modules(model, [f"{Leaf.__module__}.Leaf"]) == [model[0], model[1][1]]
    assert leaf_modules.set_z3_leaf_modules_by_name(model, ["1.0"]) == ([model[1][0]], [])
    assert leaf_modules.set_z3_leaf_modules_by_name(model, ["x", "2"], raise_if_not_found=False) == ([model[2]], ["x"])
    assert leaf_modules.set_z3_leaf_modules_by_name(model, ["2"], flag=False) == ([model[2]], [])
    assert not leaf_modules.z3_leaf_module(model[2])
    suffixes = [".1", "1.1", "x"]
    found = leaf_modules.set_z3_leaf_modules_by_suffix(model, suffixes, raise_if_not_found=False)
    assert found == ([model[1][1]], ["x"])
    assert leaf_modules.z3_leaf_module(model[1][0])
    assert leaf_modules.set_z3_leaf_modules(model, [nn.Conv2d], raise_if_not_found=False) == []
    for call, words in (
        (lambda: leaf_modules.set_z3_leaf_modules(model, [nn.Conv2d]), "no modules of the classes"),
        (lambda: leaf_modules.set_z3_leaf_modules_by_name(model, ["x", "2"]), r"no modules named \['x'\]"),
        (lambda: leaf_modules.set_z3_leaf_modules_by_suffix(model, ["x"]), "whose names end with"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def test_leaf_modules_of_the_config() -> None:
    model = nn.Sequential(Leaf(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    section = {"classes": ["Leaf"], "names": ["1.0", "absent"]}

    def rank_of(world: sw.World) -> None:
        config = {"zero_optimization": {"stage": 3, "leaf_module": section}}
        deepspeed.initialize(model=model, config=config, world=world)

    run_ranks(1, rank_of)
    assert leaf_modules.get_z3_leaf_modules(model) == [model[0], model[1][0]]


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 2), (2, 5)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_in_tiles(rows: int, columns: int, bias: bool) -> None:
    whole = nn.Linear(5, 7, bias=bias)
    tiled = tiling.TiledLinear(5, 7, bias, in_splits=columns, out_splits=rows, init_linear=whole)
    inputs, twin = (torch.ones(3, 5, requires_grad=True) for _ in range(2))
    found, wanted = tiled(inputs), whole(twin)
    torch.testing.assert_close(found, wanted)
    found.square().sum().backward()
    wanted.square().sum().backward()
    torch.testing.assert_close(inputs.grad, twin.grad)
    parts = tiling.TiledLinear(
        5, 7, bias, columns, rows, init_linear=whole, input_is_already_split=True, combine_out_splits=False
    )
    sizes = [end - start for start, end in zip(parts.in_parts, parts.in_parts[1:], strict=False)]
    torch.testing.assert_close(torch.cat(parts(inputs.split(sizes, dim=-1)), dim=-1), wanted)
    for wrong in ({"in_splits": 6}, {"out_splits": 0}):
        with pytest.raises(RuntimeError, match="_splits is"):
            tiling.TiledLinear(5, 7, **wrong)


class Apart(nn.Linear):
    def forward(self, value: Tensor) -> Any:
        return value @ self.weight.T, self.bias


def test_tiles_that_return_their_bias() -> None:
    whole = nn.Linear(4, 6)
    tiled = tiling.TiledLinearReturnBias(4, 6, True, 2, 3, linear_cls=Apart, init_linear=whole)
    output, bias = tiled(torch.ones(2, 4))
    torch.testing.assert_close(output + bias, whole(torch.ones(2, 4)))


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_timers() -> None:
    clock = Clock()
    named = timers.SynchronizedWallClockTimer(clock)
    for seconds in (1, 2, 3):
        named("forward").start()
        clock.now += seconds
        named("forward").stop(record=True)
    assert named.get_mean(["forward", "none"], reset=False) == {"forward": 2000.0}
    assert named("forward").elapsed(reset=False) == 6000
    named.log(["forward", "none"])
    assert named("forward").elapsed() == 0
    assert timers.trim_mean([1, 2, 9], 0.34) == 2
    assert timers.trim_mean([], 0.1) == 0
    rates = timers.ThroughputTimer(batch_size=8, start_step=1, steps_per_output=2, clock=clock)
    assert rates.avg_samples_per_sec() == float("-inf")
    for _ in range(3):
        rates.start()
        clock.now += 2
        rates.stop(global_step=True)
    assert rates.avg_samples_per_sec() == 4
    rates.update_epoch_count()
    assert rates.epoch_count == 1
    nothing = timers.NoopTimer()
    nothing("x").start()
    assert nothing.get_mean(["x"]) == {}


def test_elastic_batches_before_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    section = {"enabled": True, "max_train_batch_size": 10000, "micro_batch_sizes": [8, 12, 16, 17], "version": 0.1}
    config = {"elasticity": {**section, "min_gpus": 32, "max_gpus": 1500}}
    batch, ranks = elasticity.compute_elastic_config(config, "0.19.8")
    assert batch == 9792
    assert all(batch % count == 0 and 32 <= count <= 1500 for count in ranks)
    assert elasticity.compute_elastic_config(config, "0.19.8", world_size=64) == (batch, ranks, 17)
    with pytest.raises(elasticity.ElasticityIncompatibleWorldSize, match="cannot be shared by 128"):
        elasticity.compute_elastic_config(config, "0.19.8", world_size=128)
    newer = {"elasticity": {**section, "version": 0.2}}
    with pytest.raises(elasticity.ElasticityConfigError, match="needs a number of ranks"):
        elasticity.compute_elastic_config(newer, "0.19.8")
    monkeypatch.setenv("WORLD_SIZE", "64")
    batch, _, micro = elasticity.compute_elastic_config(newer, "0.19.8", return_microbatch=True)
    assert micro in section["micro_batch_sizes"]
    assert batch % (64 * micro) == 0
    for wrong, version, words in (
        ({}, "0.19.8", "no elasticity section"),
        ({"elasticity": {"enabled": True, "micro_batch_sizes": [2]}}, "0.19.8", "max_train_batch_size is not set"),
        (config, "0.2", "has no elastic batches"),
    ):
        with pytest.raises(elasticity.ElasticityError, match=words):
            elasticity.compute_elastic_config(wrong, version)
    monkeypatch.setenv("DEEPSPEED_ELASTICITY_CONFIG", json.dumps({**section, "max_train_batch_size": 5000}))
    with pytest.raises(elasticity.ElasticityConfigError, match="scheduled with another elasticity section"):
        elasticity.ensure_immutable_elastic_config(section)


def test_the_level_of_messages_and_the_former_name_of_the_config(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"log_level": "ERROR", **ADAM}))
    before = logging.logger.level

    def rank_of(world: sw.World) -> None:
        args = argparse.Namespace(deepscale_config=str(path))
        engine, *_ = deepspeed.initialize(args, nn.Linear(4, 4), world=world)
        assert engine.log_level() == "ERROR"

    try:
        run_ranks(1, rank_of)
        assert logging.logger.getEffectiveLevel() == 40
    finally:
        logging.logger.setLevel(before)


def test_a_config_by_itself() -> None:
    config = enums.DeepSpeedConfig({"train_batch_size": 8, "zero_optimization": {"stage": 2}, **ADAM})
    assert (config.train_batch_size, config.gradient_accumulation_steps, config.optimizer_name) == (8, 1, "AdamW")
    assert config.zero_optimization_stage == 2
    assert (config.gradient_allreduce_op, config.zero_overlap_comm, config.dataloader_drop_last) == (
        "mean",
        None,
        False,
    )
    with pytest.raises(AttributeError, match=r"DeepSpeedConfig.zero_config is not supported .* use .translated.value"):
        _ = config.zero_config
    assert copy.copy(config).train_batch_size == 8
    with pytest.raises(ConfigError, match="train_batch_size"):
        enums.DeepSpeedConfig({"train_batch_size": 0})


def test_monitors_without_an_engine(tmp_path: Path) -> None:
    config = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "own"}}
    config["pipeline"] = {"stages": 2}  # of more ranks than this
    master = monitor.MonitorMaster(monitor.get_monitor_config(config))
    assert master.enabled
    master.write_events([("loss", 2.0, 1), ("loss", 1.5, 2)])
    master.close()
    assert (tmp_path / "own" / "metrics.csv").read_text().count("\n") == 3
    assert not monitor.MonitorMaster(monitor.get_monitor_config({})).enabled


def test_a_monitor_whose_disk_is_full_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(CSV, "log", refuse)
    config = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "own"}}
    master = monitor.MonitorMaster(monitor.get_monitor_config(config))
    for samples in (1, 2):
        master.write_events([("loss", 2.0, samples)])
    master.close()
    (told,) = caplog.messages
    assert (
        told == "The log of the tracker csv cannot be written: No space left on device. Training continues without it."
    )


def test_small_functions(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    assert facade.recursive_getattr(model, "0.0.weight") is model[0][0].weight
    facade.recursive_setattr(model, "0.0", nn.ReLU())
    assert isinstance(model[0][0], nn.ReLU)
    assert facade.required_torch_version(min_version=1.8)
    assert not facade.required_torch_version(max_version="2.0")
    moved = facade.pipe.move_to_device({"a": [torch.ones(1)], "b": (1, "x")}, "meta")
    assert moved["a"][0].is_meta
    assert moved["b"] == (1, "x")
    assert facade.instrument_w_nvtx(lambda value: value + 1)(1) == 2
    with caplog.at_level("INFO", logger="DeepSpeed"):
        logging.log_dist_once("once")
        logging.log_dist_once("once")
    assert caplog.text.count("once") == 1
    logging.print_json_dist({"a": 1}, [0], tmp_path / "x.json")
    assert json.loads((tmp_path / "x.json").read_text()) == {"rank": 0, "a": 1}
    with pytest.raises(ValueError, match="loud is not one of"):
        logging.set_log_level_from_string("loud")
    assert collectives.get_local_rank() == 0
    with pytest.raises(ConfigError, match="nothing is compiled"):
        facade._modules()["deepspeed.ops.op_builder"]["CPUAdamBuilder"]().load()
    with pytest.raises(ConfigError, match=r"configure\(partition_activations\) is not supported"):
        facade.configure_recomputing(None, {"activation_checkpointing": {"partition_activations": True}})


def test_schedules_tell_their_settings() -> None:
    optimizer = torch.optim.SGD([{"params": [nn.Parameter(torch.ones(1))], "lr": lr} for lr in (0.1, 0.2)], lr=1.0)
    warmup = deepspeed.lr_schedules.WarmupLR(optimizer, warmup_min_lr=0.05, warmup_num_steps=4, warmup_type="linear")
    assert (warmup.min_lrs, warmup.max_lrs) == ([0.05, 0.05], [0.1, 0.2])
    assert warmup.delta_lrs == pytest.approx([0.05, 0.15])
    assert (warmup.warmup_num_steps, warmup.warmup_type) == (4, "linear")
    cosine = deepspeed.lr_schedules.WarmupCosineLR(optimizer, 10, warmup_min_ratio=0.5, warmup_num_steps=4)
    assert (cosine.warmup_num_steps, cosine.warmup_type, cosine.get_lr_ratio()) == (4, "log", 0.0)
    cosine.step()
    assert cosine.get_lr_ratio() == pytest.approx(0.5)  # log(1) of the way from 0.5 to 1
    cycle = deepspeed.lr_schedules.OneCycle(optimizer, cycle_min_lr=[0.1, 0.2], cycle_max_lr=1.0)
    assert (cycle.min_lrs, cycle.max_lrs) == ([0.1, 0.2], [1.0, 1.0])


def test_momenta_of_groups_move_apart() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.Adam([{"params": layer.parameters()} for layer in model])
    schedule = deepspeed.lr_schedules.OneCycle(
        optimizer,
        cycle_min_lr=[1e-4, 1e-3],
        cycle_max_lr=[1e-3, 1e-2],
        cycle_first_step_size=2,
        cycle_min_mom=[0.7, 0.8],
        cycle_max_mom=[0.9, 1.0],
    )
    assert [group["betas"] for group in optimizer.param_groups] == [(0.7, 0.99), (0.8, 0.99)]
    assert schedule.get_mom() == [(0.9, 0.99), (1.0, 0.99)]  # as in DeepSpeed, not what the groups have yet
    schedule.step()
    assert [group["betas"] for group in optimizer.param_groups] == schedule.get_mom()
    assert [betas[0] for betas in schedule.get_mom()] == pytest.approx([0.8, 0.9])
    schedule.step()
    assert [betas[0] for betas in schedule.get_mom()] == pytest.approx([0.7, 0.8])
    still = deepspeed.lr_schedules.OneCycle(optimizer, cycle_min_lr=0.1, cycle_max_lr=0.2, cycle_momentum=False)
    assert still.get_mom() is None
    with pytest.raises(ConfigError, match="cycle_max_mom has 1 values, but the optimizer has 2 groups"):
        deepspeed.lr_schedules.OneCycle(optimizer, cycle_min_lr=0.1, cycle_max_lr=0.2, cycle_max_mom=[0.9])
