"""Loops written with DeepSpeed's calls, compared with the same loop in plain PyTorch."""

from __future__ import annotations

import argparse
import copy
import csv
import json
import math
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
import shardwise.integrations.deepspeed as deepspeed
from shardwise.errors import CheckpointError, ConfigError, StateError
from shardwise.integrations.deepspeed import topology
from shardwise.integrations.deepspeed.engine import engines_of
from shardwise.integrations.deepspeed.monitor import Monitor
from shardwise.testing import run_ranks
from tests import inside
from tests.models import VOCAB, Transformer
from tests.ranks.threads_as_members import ThreadMembership, run_members
from tests.thorough import sampled, thorough_only

Tensor = torch.Tensor
RANKS, MICRO, GAS, LENGTH = 2, 2, 2, 6
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": MICRO,
    "gradient_accumulation_steps": GAS,
    "gradient_clipping": 0.05,
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 4}},
}


def batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(VOCAB, (GAS, RANKS, MICRO, LENGTH), generator=generator) for _ in range(count)]


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(tokens, tokens.roll(1, 0))


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def plain(model: nn.Module, steps: list[Tensor]) -> tuple[list[float], list[float]]:
    """Losses and norms, in one process, of the training that DeepSpeed's config describes."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = deepspeed.lr_schedules.WarmupLR(optimizer, warmup_max_lr=0.01, warmup_num_steps=4)
    losses, norms = [], []
    for step in steps:
        parts = [loss_of(model, step[micro, rank]) for micro in range(GAS) for rank in range(RANKS)]
        loss = torch.stack(parts).mean()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    return losses, norms


def trained(engine: deepspeed.DeepSpeedEngine, steps: list[Tensor], rank: int) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for step in steps:
        total = 0.0
        for micro in range(GAS):
            assert engine.is_gradient_accumulation_boundary() == (micro == GAS - 1)
            loss = loss_of(engine, step[micro, rank])
            total += float(engine.backward(loss))
            engine.step()
        losses.append(engine.shardwise.mean(total))
        norms.append(float(engine.get_global_grad_norm() or 0.0))
    return losses, norms


@sampled
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_trains_as_the_plain_loop(stage: int, tmp_path: Path) -> None:
    """Six steps, the last three after an engine with another ZeRO stage has loaded a checkpoint."""
    model = Transformer()
    steps = batches(6)
    twin = copy.deepcopy(model)
    wanted = plain(twin, steps)
    models = [[copy.deepcopy(model) for _ in range(RANKS)] for _ in range(2)]

    def config(stage: int) -> dict[str, Any]:
        return {**CONFIG, "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 100}}

    def rank_of(world: sw.World) -> tuple[list[float], list[float], list[Tensor], dict[str, Any]]:
        first, *_ = deepspeed.initialize(model=models[0][world.rank], config=config(stage), world=world)
        losses, norms = trained(first, steps[:3], world.rank)
        assert first.global_steps == 3
        assert first.micro_steps == 3 * GAS
        first.save_checkpoint(tmp_path, client_state={"epoch": 4})
        first.destroy()
        engine, optimizer, loader, schedule = deepspeed.initialize(
            model=models[1][world.rank], config_params=config((stage + 1) % 4), world=world
        )
        assert optimizer is engine.optimizer
        assert loader is None
        assert schedule is engine.lr_scheduler
        where, client = engine.load_checkpoint(tmp_path)
        assert where == str(tmp_path / "global_step3")
        assert engine.global_steps == 3
        more = trained(engine, steps[3:], world.rank)
        params = [engine.shardwise.get(name).clone() for name, _ in engine.module.named_parameters()]
        return losses + more[0], norms + more[1], params, client

    for losses, norms, params, client in run_ranks(RANKS, rank_of):
        assert losses == pytest.approx(wanted[0], rel=1e-5)
        assert norms == pytest.approx(wanted[1], rel=1e-4)
        assert client == {"epoch": 4}
        for ours, theirs in zip(params, twin.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_whole_tensors_of_a_parameter(tmp_path: Path) -> None:
    model = Transformer()
    twin = copy.deepcopy(model)
    step = batches(1)[0]
    torch.stack([loss_of(twin, step[0, rank]) for rank in range(RANKS)]).mean().backward()
    config = {"zero_optimization": {"stage": 3}, "gradient_clipping": 0, "bf16": {"enabled": False}}
    models = [copy.deepcopy(model) for _ in range(RANKS)]

    def rank_of(world: sw.World) -> None:
        mine = models[world.rank]
        args = deepspeed.add_config_arguments(argparse.ArgumentParser()).parse_args(["--deepspeed"])
        args.deepspeed_config = str(tmp_path / "ds.json")
        params = mine.parameters()
        engine, *_ = deepspeed.initialize(args, mine, optimizer=sgd, model_parameters=params, world=world)
        weight, theirs = mine.blocks[0].up.weight, twin.blocks[0].up.weight
        engine.backward(loss_of(engine, step[0, world.rank]))
        torch.testing.assert_close(deepspeed.utils.safe_get_full_grad(weight), theirs.grad)
        deepspeed.utils.safe_set_full_grad(weight, torch.ones_like(theirs))
        engine.step()
        torch.testing.assert_close(deepspeed.utils.safe_get_full_fp32_param(weight), theirs - 0.1)
        deepspeed.utils.safe_set_full_fp32_param(weight, torch.full_like(theirs, 2.0))
        with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
            assert weight.shape == theirs.shape
            assert weight[0, 0].item() == 2.0
            if world.rank == 0:
                weight.data[0, 0] = 3.0
        assert deepspeed.utils.safe_get_full_fp32_param(weight)[0, 0].item() == 3.0
        engine.save_16bit_model(tmp_path)
        engine.destroy()

    (tmp_path / "ds.json").write_text(json.dumps(config))
    run_ranks(RANKS, rank_of)
    saved = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert list(saved) == list(model.state_dict())
    assert float(saved["blocks.0.up.weight"][0, 0]) == 3.0


def test_what_fails_while_rank_0_writes_fails_on_all(tmp_path: Path) -> None:
    tokens = batches(1)[0]
    models = [Transformer() for _ in range(RANKS)]
    (tmp_path / "taken").write_text("a file")
    (tmp_path / "saved" / "latest").mkdir(parents=True)

    def rank_of(world: sw.World) -> list[str]:
        engine, *_ = deepspeed.initialize(model=models[world.rank], config=CONFIG, world=world)
        said = []
        for save in (engine.save_16bit_model, engine.save_checkpoint):
            with pytest.raises(CheckpointError) as raised:
                save(tmp_path / ("saved" if save == engine.save_checkpoint else "taken"))
            said.append(str(raised.value))
            engine.backward(loss_of(engine, tokens[0, world.rank]))  # none waits for another
        engine.destroy()
        return said

    first, second = run_ranks(RANKS, rank_of)
    assert first == second
    assert first[0].startswith("FileExistsError: ")
    assert "latest" in first[1]


@pytest.mark.parametrize("stage", [1, 3])
def test_backwards_of_other_kinds(stage: int) -> None:
    """A graph that is retained for a second backward, and a loss that is not divided by the number of micro-batches."""
    model, tokens = Transformer(), batches(1)[0]
    twin = copy.deepcopy(model)
    torch.stack([loss_of(twin, tokens[0, rank]) for rank in range(RANKS)]).mean().backward()
    models = [copy.deepcopy(model) for _ in range(RANKS)]
    config = {**CONFIG, "zero_optimization": {"stage": stage}, "gradient_clipping": 0}

    def rank_of(world: sw.World) -> None:
        engine, *_ = deepspeed.initialize(model=models[world.rank], config=config, world=world)
        weight, theirs = engine.module.blocks[0].up.weight, twin.blocks[0].up.weight
        loss = loss_of(engine, tokens[0, world.rank])
        engine.backward(loss, retain_graph=True)
        torch.testing.assert_close(deepspeed.utils.safe_get_full_grad(weight), theirs.grad / GAS)
        engine.zero_grad()
        engine.backward(loss, scale_wrt_gas=False)
        torch.testing.assert_close(deepspeed.utils.safe_get_full_grad(weight), theirs.grad)
        engine.destroy()

    run_ranks(RANKS, rank_of)


@sampled
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_backwards_whose_gradients_are_summed_once(stage: int) -> None:
    """Two backwards in `coalesce_grad_reduction` leave the sum of their gradients, and the step takes it."""
    model, tokens = Transformer(), batches(1)[0]
    twin = copy.deepcopy(model)
    for micro in range(GAS):
        torch.stack([loss_of(twin, tokens[micro, rank]) for rank in range(RANKS)]).mean().backward()
    models = [copy.deepcopy(model) for _ in range(RANKS)]
    config = {"zero_optimization": {"stage": stage}, "gradient_clipping": 0}
    config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}

    def rank_of(world: sw.World) -> None:
        engine, *_ = deepspeed.initialize(model=models[world.rank], config=config, world=world)
        with engine.coalesce_grad_reduction():
            for micro in range(GAS):
                engine.backward(loss_of(engine, tokens[micro, world.rank]))
        weight, theirs = engine.module.blocks[0].up.weight, twin.blocks[0].up.weight
        torch.testing.assert_close(deepspeed.utils.safe_get_full_grad(weight), theirs.grad)
        before = deepspeed.utils.safe_get_full_fp32_param(weight).clone()
        engine.step()
        torch.testing.assert_close(deepspeed.utils.safe_get_full_fp32_param(weight), before - 0.1 * theirs.grad)
        assert engine.global_steps == 1

    run_ranks(RANKS, rank_of)


def test_a_model_that_is_never_whole() -> None:
    """A part of it gets its values between its construction and `initialize`: those of rank 0 on all ranks."""

    def built() -> nn.Module:
        torch.manual_seed(3)
        with deepspeed.zero.Init(config_dict_or_path={}):
            return Transformer()

    def rank_of(world: sw.World) -> tuple[float, ...]:
        model = models[world.rank]
        head = model.head.weight
        with deepspeed.zero.GatheredParameters([head], modifier_rank=0):
            if world.rank == 0:
                head.data.copy_(torch.arange(head.numel()).view_as(head) / head.numel())
        with pytest.raises(StateError, match="needs the values"):
            head.sum()
        engine, *_ = deepspeed.initialize(model=model, config={"zero_optimization": {"stage": 3}}, world=world)
        return tuple(engine.shardwise.get(name).sum().item() for name in ("blocks.1.up.weight", "head.weight"))

    torch.manual_seed(3)
    whole = Transformer()
    head = whole.head.weight
    expected = (whole.blocks[1].up.weight.sum().item(), (torch.arange(head.numel()) / head.numel()).sum().item())
    for ranks in (1, 2):
        models = [built() for _ in range(ranks)]
        assert run_ranks(ranks, rank_of) == [pytest.approx(expected)] * ranks
    meta = nn.Linear(2, 2, device="meta")
    for wrong, words in (({}, "on the meta device"), ({"modifier_rank": 1}, "changes by others would be lost")):
        with pytest.raises(StateError, match=words), deepspeed.zero.GatheredParameters(meta, **wrong):
            pass


def test_a_model_that_is_never_whole_may_be_built_inside_of_another() -> None:
    """As `from_pretrained`, which opens one of its own, inside of a script's."""

    def built() -> nn.Module:
        torch.manual_seed(3)
        with deepspeed.zero.Init(config_dict_or_path={}):
            first = nn.Linear(4, 4)
            with deepspeed.zero.Init(config_dict_or_path={}):
                return nn.Sequential(first, nn.Linear(4, 2))

    def rank_of(world: sw.World) -> dict[str, Tensor]:
        model = models[world.rank]
        engine, *_ = deepspeed.initialize(model=model, config={"zero_optimization": {"stage": 3}}, world=world)
        return engine.module_state_dict()

    models = [built() for _ in range(RANKS)]
    torch.manual_seed(3)
    whole = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).state_dict()
    for values in run_ranks(RANKS, rank_of):
        assert all(torch.equal(values[name], value) for name, value in whole.items())


def test_fp16_counts_what_it_skipped() -> None:
    models = [Transformer() for _ in range(RANKS)]
    config = {**CONFIG, "fp16": {"enabled": True, "initial_scale_power": 40}, "zero_optimization": {"stage": 2}}
    steps = batches(2)

    def rank_of(world: sw.World) -> None:
        engine, *_ = deepspeed.initialize(model=models[world.rank], config=config, world=world)
        rates = engine.get_lr()
        trained(engine, steps, world.rank)
        assert engine.overflow
        assert not engine.was_step_applied()
        assert (engine.global_steps, engine.skipped_steps) == (2, 2)
        assert engine.get_lr() == rates  # the schedule advances only with steps that are taken
        assert engine.cur_scale < 2.0**40

    run_ranks(RANKS, rank_of)


@sampled
@pytest.mark.parametrize(("stage", "skips"), [(0, False), (1, True), (2, True), (3, False)])
def test_bf16_skips_gradients_that_are_not_finite_where_deepspeed_does(stage: int, skips: bool) -> None:
    """One rank's loss is NaN in the first step. Where it is skipped, the schedule does not advance."""
    models = [Transformer() for _ in range(RANKS)]
    config = {**CONFIG, "bf16": {"enabled": True}, "zero_optimization": {"stage": stage}}
    steps = batches(2)

    def rank_of(world: sw.World) -> None:
        engine, *_ = deepspeed.initialize(model=models[world.rank], config=config, world=world)
        before = engine.lr_scheduler.last_batch_iteration
        for micro in range(GAS):
            loss = loss_of(engine, steps[0][micro, world.rank])
            engine.backward(loss * math.nan if world.rank == 1 and micro == 0 else loss)
            engine.step()
        assert not math.isfinite(engine.get_global_grad_norm() or 0.0)
        assert (engine.overflow, engine.was_step_applied(), engine.skipped_steps) == (skips, not skips, int(skips))
        assert (engine.lr_scheduler.last_batch_iteration == before) == skips
        trained(engine, steps[1:], world.rank)
        params = [engine.shardwise.get(name) for name, _ in engine.module.named_parameters()]
        assert all(bool(param.isfinite().all()) for param in params) == skips
        assert (engine.global_steps, engine.skipped_steps) == (2, int(skips))

    run_ranks(RANKS, rank_of)


def events(path: Path) -> list[dict[str, float]]:
    """The rows of a CSV file of events, without empty cells."""
    with path.open(newline="") as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


def test_a_csv_monitor_is_told_of_losses_and_rates_against_samples(tmp_path: Path) -> None:
    """Four steps. After the third, a new engine loads the second one's checkpoint: its events replace older ones."""
    model, steps = Transformer(), batches(4)
    twin = copy.deepcopy(model)
    wanted, _ = plain(twin, steps)
    models = [[copy.deepcopy(model) for _ in range(RANKS)] for _ in range(2)]
    section = {"enabled": True, "output_path": str(tmp_path / "logs"), "job_name": "first"}
    config = {**CONFIG, "zero_optimization": {"stage": 2}, "csv_monitor": section}

    def rank_of(world: sw.World) -> list[float]:
        engine, *_ = deepspeed.initialize(model=models[0][world.rank], config=config, world=world)
        assert engine.monitor.enabled
        rates = []
        for number, step in enumerate(steps[:3]):
            trained(engine, [step], world.rank)
            rates += engine.get_lr()
            if number == 1:
                engine.save_checkpoint(tmp_path / "kept")
                engine.monitor.write_events([("mine", torch.tensor(7.0), engine.global_samples)])
        engine.destroy()
        again, *_ = deepspeed.initialize(model=models[1][world.rank], config=config, world=world)
        again.load_checkpoint(tmp_path / "kept")
        for step in steps[2:]:
            trained(again, [step], world.rank)
        return [*rates, *again.get_lr()]

    rates, others = run_ranks(RANKS, rank_of)
    assert rates == others
    rows = events(tmp_path / "logs" / "first" / "metrics.csv")
    batch = RANKS * MICRO * GAS
    assert [row["step"] for row in rows] == [batch, 2 * batch, 2 * batch, 3 * batch, 4 * batch]
    assert rows.pop(2) == {"step": 2 * batch, "mine": 7.0}
    for row, loss, rate in zip(rows, wanted, rates, strict=True):
        assert row["Train/Samples/train_loss"] == pytest.approx(loss, rel=1e-5)
        assert row["Train/Samples/lr"] == rate
        assert "Train/Samples/loss_scale" not in row


def test_a_monitor_is_told_of_the_loss_scale(tmp_path: Path) -> None:
    section = {"enabled": True, "output_path": str(tmp_path)}
    config = {**CONFIG, "fp16": {"enabled": True, "initial_scale_power": 4}, "csv_monitor": section}
    steps = batches(2)

    def rank_of(world: sw.World) -> None:
        engine, *_ = deepspeed.initialize(model=Transformer(), config=config, world=world)
        for step in steps:
            for micro in range(GAS):  # whose losses the engine never sees
                engine.scale(loss_of(engine, step[micro, world.rank])).backward()
                engine.step()

    run_ranks(RANKS, rank_of)
    rows = events(tmp_path / "DeepSpeedJobName" / "metrics.csv")
    assert [row["Train/Samples/loss_scale"] for row in rows] == [16.0, 16.0]
    assert not any("Train/Samples/train_loss" in row for row in rows)


def test_whoever_becomes_rank_0_goes_on_with_the_events(tmp_path: Path) -> None:
    path, ranks, samples = tmp_path / "metrics.csv", [0, 1], [0]
    monitors = [
        Monitor({"csv": {"file": str(path)}}, lambda own=own: ranks[own], lambda: samples[0], {}) for own in range(2)
    ]
    for number in (4, 8, 12):
        if number == 12:
            ranks[:] = [-1, 0]  # the first rank has left
        for monitor in monitors:
            monitor.begin()
            monitor.write_events([("loss", float(monitors.index(monitor)), number)])
        samples[0] = number
    assert [(row["step"], row["loss"]) for row in events(path)] == [(4, 0), (8, 0), (12, 1)]


def test_monitors_that_cannot_be_had_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "DeepSpeedJobName").mkdir()
    foreign = tmp_path / "DeepSpeedJobName" / "metrics.csv"
    foreign.write_text("epoch\n1\n")

    def rank_of(world: sw.World, section: str, words: str) -> None:
        with pytest.raises(ConfigError, match=words):
            deepspeed.initialize(model=nn.Linear(4, 4), config={section: {"enabled": True}}, world=world)

    run_ranks(1, lambda world: rank_of(world, "csv_monitor", "is not a table of this tracker"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    words = r"the DeepSpeed config enables wandb, but the package wandb is not installed"
    run_ranks(2, lambda world: rank_of(world, "wandb", words))
    assert foreign.read_text() == "epoch\n1\n"


def test_refusals(tmp_path: Path) -> None:
    def rank_of(world: sw.World) -> None:
        model = nn.Linear(4, 4)
        for wrong, words in (
            ({}, "no DeepSpeed config"),
            ({"config": {}, "mpu": object()}, "mpu and mesh_param"),
            (
                {"config": {"optimizer": {"type": "OneBitAdam"}, "zero_optimization": {"stage": 1}}},
                "optimizer.type is 'OneBitAdam', .* pull request 1169",
            ),
            (
                {"config": {"optimizer": {"type": "OneBitLamb", "params": {"max_grad_norm": 1.0}}}},
                "max_grad_norm is not supported for OneBitLamb. To clip gradients, set gradient_clipping",
            ),
            ({"config": {"optimizer": {"type": "AdamW", "params": {"lrr": 1}}}}, "params are not valid for AdamW"),
            ({"config": {"scheduler": {"type": "WarmUp", "params": {}}, "optimizer": {"type": "SGD"}}}, "WarmupLR"),
        ):
            with pytest.raises(ConfigError, match=words):
                deepspeed.initialize(model=model, world=world, **wrong)
        with pytest.raises(ConfigError, match=r"not a torch\.optim\.Optimizer"):
            deepspeed.initialize(model=model, world=world, config={}, optimizer=lambda params: object())

    run_ranks(1, rank_of)

    def checkpoints(world: sw.World) -> None:
        engine, *_ = deepspeed.initialize(model=nn.Linear(4, 4), config=CONFIG, world=world)
        assert engine.load_checkpoint(tmp_path) == (None, {})
        theirs = tmp_path / "theirs" / "global_step5"
        theirs.mkdir(parents=True)
        (theirs / "mp_rank_00_model_states.pt").touch()
        (theirs.parent / "latest").write_text("global_step5")
        with pytest.raises(CheckpointError, match="shardwise convert"):
            engine.load_checkpoint(theirs.parent)
        (theirs.parent / "latest").write_text("../elsewhere")
        with pytest.raises(CheckpointError, match="not the name of a folder in"):
            engine.load_checkpoint(theirs.parent)
        with pytest.raises(StateError, match="does not belong to an open engine"):
            deepspeed.utils.safe_get_full_grad(nn.Parameter(torch.ones(1)))

    run_ranks(1, checkpoints)


def test_arguments_of_init_distributed_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *args, **options: calls.append((args, options)))
    options = {"timeout": timedelta(hours=1), "init_method": "tcp://localhost:2", "rank": 1, "world_size": 3}
    deepspeed.init_distributed("gloo", distributed_port=2, verbose=False, **options)
    assert calls == [(("gloo",), options)]
    with pytest.raises(StateError, match="needs a process group"):
        deepspeed.init_distributed(dist_init_required=False)
    with pytest.raises(TypeError, match="time_out"):
        deepspeed.init_distributed(time_out=3)


def test_init_initializes_torch_where_a_launcher_says_how_ranks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend, **_: calls.append(backend))

    def init(**options: Any) -> int:
        with deepspeed.zero.Init(**options):
            pass
        return len(calls)

    assert init() == 0
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    assert init() == 1
    assert init(enabled=False) == 1
    monkeypatch.setenv("SHARDWISE_MEMBER", "0")  # in an elastic job, a world opens a process group of its own
    assert init() == 1


def test_mics_init_is_init() -> None:
    with deepspeed.zero.MiCS_Init(config_dict_or_path={"zero_optimization": {"mics_shard_size": 1}}):
        model = nn.Linear(4, 4)
    with pytest.raises(StateError, match="needs the values"):
        model.weight.sum()
    groups = deepspeed.zero.MiCS_Init(None, object())
    with pytest.raises(ConfigError, match=r"with groups of ranks is not supported"), groups:
        pass


def test_arguments_without_effect_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"type": "AdamW", "params": {"fp32_optimizer_states": False}}

    def rank_of(world: sw.World) -> None:
        engine, *_ = deepspeed.initialize(model=nn.Linear(4, 4), config={"optimizer": options}, world=world)
        for _ in range(2):
            engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
        with pytest.raises(CheckpointError, match=r"custom_load_fn=.* is not supported"):
            engine.load_checkpoint(tmp_path, custom_load_fn=print)
        with pytest.raises(TypeError, match="unknown"):
            engine.load_checkpoint(tmp_path, unknown=1)
        with pytest.raises(TypeError, match="unknown"):
            engine.backward(torch.ones(()), unknown=1)

    run_ranks(1, rank_of)
    said = capsys.readouterr().out
    assert said.count("exclude_frozen_parameters=True) saves frozen parameters, too") == 1
    assert "optimizer.params.fp32_optimizer_states: not needed; states always have" in said


@pytest.mark.parametrize("route", ["train", "eval"])
def test_loaders_shuffle_what_is_trained_on(route: str) -> None:
    def rank_of(world: sw.World) -> bool:
        engine, *_ = deepspeed.initialize(model=nn.Linear(4, 4), config={}, world=world)
        samples = [sample.item() for sample in engine.deepspeed_io(list(range(64)), route=route)]
        assert sorted(samples) == list(range(world.rank, 64, 2)) or route == "train"
        return samples == sorted(samples)

    assert run_ranks(RANKS, rank_of) == [route == "eval"] * RANKS


@sampled
@pytest.mark.parametrize("stage", [0, 3])
def test_parts_of_a_checkpoint_are_loaded(stage: int, tmp_path: Path) -> None:
    """Weights alone, into an engine with another optimizer; or all but the optimizer, or all but the schedule."""
    model, steps = Transformer(), batches(4)
    models = [[copy.deepcopy(model) for _ in range(RANKS)] for _ in range(4)]
    config = {**CONFIG, "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 100}}
    others = {"zero_optimization": {"stage": 3}, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}

    def rank_of(world: sw.World) -> None:
        def made(number: int, config: dict[str, Any] = config) -> deepspeed.DeepSpeedEngine:
            return deepspeed.initialize(model=models[number][world.rank], config=config, world=world)[0]

        def has_weights(engine: deepspeed.DeepSpeedEngine) -> bool:
            found = engine.shardwise.state_dict()
            return all(torch.equal(value, found[name]) for name, value in saved.items())

        first = made(0)
        trained(first, steps, world.rank)
        first.save_checkpoint(tmp_path, client_state={"epoch": 4})
        saved, rates = first.shardwise.state_dict(), first.get_lr()
        alone = made(1, others)
        untrained = made(2)
        weight = untrained.module.blocks[0].up.weight
        for engine, options in (alone, {"load_module_only": True}), (untrained, {"load_optimizer_states": False}):
            assert not has_weights(engine)
            assert engine.load_checkpoint(tmp_path, load_module_strict=False, **options)[1] == {"epoch": 4}
            assert has_weights(engine)
        assert (alone.global_steps, alone.get_lr()) == (0, [0.1])
        assert untrained.global_steps == 4
        assert untrained.lr_scheduler.state_dict() == first.lr_scheduler.state_dict()
        assert deepspeed.utils.safe_get_full_optimizer_state(weight, "exp_avg") is None
        unscheduled = made(3)
        before = unscheduled.lr_scheduler.state_dict()
        unscheduled.load_checkpoint(tmp_path, load_lr_scheduler_states=False)
        assert has_weights(unscheduled)
        assert unscheduled.lr_scheduler.state_dict() == before != first.lr_scheduler.state_dict()
        weight = unscheduled.module.blocks[0].up.weight
        assert deepspeed.utils.safe_get_full_optimizer_state(weight, "exp_avg").any()
        assert unscheduled.get_lr() == rates

    run_ranks(RANKS, rank_of)


class Tokens(nn.Embedding):
    """An embedding that shares its weight with the head."""


def as_head(layer: nn.Module, hidden: Tensor) -> Tensor:
    return hidden @ layer.weight.T


def layers() -> list[Any]:
    spec = deepspeed.LayerSpec
    tied = deepspeed.TiedLayerSpec
    hidden = [spec(nn.Linear, 16, 16) for _ in range(4)]
    return [
        tied("tokens", Tokens, VOCAB, 16),
        *hidden,
        torch.tanh,
        tied("tokens", Tokens, VOCAB, 16, forward_fn=as_head),
    ]


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def losses_of(
    model: nn.Module,
    steps: Tensor,
    loss_fn: Callable[[Tensor, Any], Tensor] = cross_entropy,
    pair: Callable[[Tensor], tuple[Any, Any]] = lambda tokens: (tokens, tokens.roll(1, 1)),
) -> list[float]:
    """The loss of each step of plain training, the mean over its micro-batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in steps:
        loss = torch.stack([loss_fn(model(inputs), labels) for inputs, labels in map(pair, step)]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@sampled
@pytest.mark.parametrize("grid", [None, topology.PipeDataParallelTopology(num_pp=2, num_dp=1)])
@pytest.mark.parametrize("stages", [1, 2])
def test_a_list_of_layers_trains_in_stages(stages: int, grid: topology.ProcessTopology | None, tmp_path: Path) -> None:
    if grid is not None and stages == 1:
        grid = topology.PipeDataParallelTopology(num_pp=1, num_dp=2)
    torch.manual_seed(1)
    defaults = {"seed_layers": False, "seed_fn": None, "base_seed": 1234, "checkpointable_layers": None}
    model = deepspeed.PipelineModule(layers(), None if grid else stages, grid, loss_fn=cross_entropy, **defaults)
    assert grid is None or model.topology() is grid
    assert model[0].weight is model[-1].weight
    twin = copy.deepcopy(model)
    models = [copy.deepcopy(model) for _ in range(2)]
    for copied in [twin, *models]:
        copied[-1].forward = lambda hidden, own=copied[-1]: as_head(own, hidden)
    steps = torch.randint(VOCAB, (3, 4, 2, LENGTH), generator=torch.Generator().manual_seed(3))
    wanted = losses_of(twin, steps)
    replicas = 2 // stages
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4 // replicas,
        "gradient_clipping": 0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 1},
        "csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "staged"},
    }

    def rank_of(world: sw.World) -> list[float]:
        engine, *_ = deepspeed.initialize(model=models[world.rank], config=config, world=world)
        assert isinstance(engine, deepspeed.PipelineEngine)
        place = engine.shardwise.data_ranks[0]
        losses = []
        for step in steps:
            share = step.chunk(replicas)[place]
            pairs = iter([(tokens, tokens.roll(1, 1)) for tokens in share])
            losses.append(engine.train_batch(pairs).item())
        assert engine.global_steps == 3
        pairs = iter([(tokens, tokens.roll(1, 1)) for tokens in steps[0].chunk(replicas)[place]])
        defaults = {"return_logits": False, "compute_loss": True, "reduce_output": "avg", "num_micro_batches": None}
        assert engine.eval_batch(pairs, bcast_loss=True, **defaults).item() < wanted[0]
        for name, value in ("compute_loss", False), ("reduce_output", "sum"), ("num_micro_batches", 3):
            with pytest.raises(ConfigError, match=f"does not support {name}: it returns the mean loss"):
                engine.eval_batch(pairs, **{**defaults, name: value})
        engine.save_checkpoint(tmp_path / "saved")
        trained_weights = engine.shardwise.state_dict()
        engine.shardwise.load_state_dict({name: value + 1 for name, value in trained_weights.items()})
        engine.load_checkpoint(tmp_path / "saved", load_module_only=True)
        loaded = engine.shardwise.state_dict()
        assert all(torch.equal(loaded[name], value) for name, value in trained_weights.items())
        with pytest.raises(StateError, match="train_batch"):
            engine(steps[0, 0])
        return losses

    for losses in run_ranks(2, rank_of):
        assert losses == pytest.approx(wanted, rel=1e-5)
    rows = events(tmp_path / "staged" / "metrics.csv")
    assert [(row["step"], row.get("Train/Samples/lr")) for row in rows] == [(8, 0.1), (16, 0.1), (24, 0.1), (24, None)]
    assert [row["Train/Samples/train_loss"] for row in rows[:-1]] == pytest.approx(wanted, rel=1e-5)
    assert rows[-1]["Train/Samples/eval_loss"] < wanted[0]


class OneArgument(nn.Module):
    """A loss that does not fail if it is called as a layer."""

    def forward(self, output: Tensor, label: Tensor | None = None) -> Tensor:
        return output * 2 if label is None else (output - label).square().mean()


class WithParameters(nn.Module):
    """A loss with parameters of its own, more of them than the layers have, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.proxies = nn.Linear(4, 60)
        self.register_buffer("weights", torch.linspace(0, 1, 4))

    def forward(self, output: Tensor, label: Tensor) -> Tensor:
        return (self.weights * (output - label) ** 2).mean() + self.proxies(output).logsumexp(-1).mean()


@sampled
@pytest.mark.parametrize("method", ["parameters", "uniform", "type:linear"])
@pytest.mark.parametrize(("stages", "zero"), [(1, 0), (1, 2), (1, 3), (2, 0), (2, 1)])
@pytest.mark.parametrize("kind", [nn.MSELoss, OneArgument, WithParameters])
def test_the_loss_may_be_a_module(kind: type[nn.Module], stages: int, zero: int, method: str) -> None:
    """It is no layer, and its parameters are trained. There are fewer micro-batches than stages."""
    torch.manual_seed(1)
    layers = [nn.Linear(4, 4), torch.tanh, nn.Linear(4, 4), nn.Linear(4, 4)]
    model = deepspeed.PipelineModule(layers, stages, loss_fn=kind(), partition_method=method)
    assert [len(model), len(list(model)), model[-1]] == [4, 4, layers[-1]]
    twin, models = copy.deepcopy(model), [copy.deepcopy(model) for _ in range(2)]
    replicas = 2 // stages
    steps = torch.randn(2, replicas, 2, 3, 4, generator=torch.Generator().manual_seed(3))
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    wanted = []
    for step in steps:
        loss = torch.stack([twin.loss_fn(twin(value), label) for value, label in step]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(loss.item())
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_clipping": 0,
        "zero_optimization": {"stage": zero, "stage3_param_persistence_threshold": 0},
    }

    def rank_of(world: sw.World) -> tuple[list[float], dict[str, Tensor]]:
        mine = models[world.rank]
        engine, *_ = deepspeed.initialize(model=mine, optimizer=sgd, config=config, world=world)
        place = engine.shardwise.data_ranks[0]
        losses = [engine.train_batch(iter([tuple(step[place])])).item() for step in steps]
        evaluated = engine.eval_batch(iter([tuple(steps[0, 0])])).item()
        assert evaluated == pytest.approx(twin.loss_fn(twin(steps[0, 0, 0]), steps[0, 0, 1]).item(), rel=1e-5)
        return losses, engine.module_state_dict()

    for losses, state in run_ranks(2, rank_of):
        assert losses == pytest.approx(wanted, rel=1e-5)
        for name, value in twin.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


def test_shapes_may_change_from_step_to_step() -> None:
    models = [counted_layers(0, dynamic_shape=True) for _ in range(2)]

    def rank_of(world: sw.World) -> None:
        engine, *_ = deepspeed.initialize(model=models[world.rank], config=CONFIG, world=world)
        for length in (LENGTH, LENGTH + 2, LENGTH):
            micros = torch.randint(VOCAB, (GAS, 2, length), generator=torch.Generator().manual_seed(length))
            loss = engine.train_batch(iter([(tokens, tokens.roll(1, 1)) for tokens in micros]))
            assert loss.isfinite()

    run_ranks(2, rank_of)


class Gated(nn.Module):
    """Passes on two tensors and a mask; a part of a pipeline of such."""

    def __init__(self, mark: float) -> None:
        super().__init__()
        self.up, self.gate, self.mark = nn.Linear(16, 16), nn.Linear(16, 16), mark

    def forward(self, parts: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        hidden, residual, mask = parts
        inner = torch.tanh(self.up(hidden)) * torch.sigmoid(self.gate(residual))
        return inner * mask[..., None], residual + hidden * self.mark, mask


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, 16)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.tokens(tokens), self.tokens(tokens + 1), tokens % 2 == 0


class Last(nn.Linear):
    def forward(self, parts: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        hidden, residual, _ = parts
        return super().forward(hidden + residual)


def test_a_plain_model_is_trained_in_the_stages_of_the_config(tmp_path: Path) -> None:
    """In whole batches, as one process does; and from the checkpoint on one rank."""
    steps = [step.flatten(1, 2)[:, None].expand(-1, RANKS, -1, -1) for step in batches(4)]
    twin = Transformer()
    models = [copy.deepcopy(twin) for _ in range(3)]
    wanted = plain(twin, steps)
    config = {**CONFIG, "zero_optimization": {"stage": 2}}
    config["train_micro_batch_size_per_gpu"] = RANKS * MICRO

    def rank_of(world: sw.World) -> tuple[list[float], list[float]]:
        engine, *_ = deepspeed.initialize(
            model=models[world.rank], config={**config, "pipeline": {"stages": 2}}, world=world
        )
        assert (engine.dp_world_size, engine.shardwise.plan.mesh) == (1, {"pp": 2, "dp": -1})
        assert engine.train_batch_size() == GAS * RANKS * MICRO
        first = trained(engine, steps[:2], 0)
        engine.save_checkpoint(tmp_path)
        losses, norms = (one + other for one, other in zip(first, trained(engine, steps[2:], 0), strict=True))
        assert engine.module_state_dict().keys() == twin.state_dict().keys()
        return losses, norms

    for losses, norms in run_ranks(2, rank_of):
        assert losses == pytest.approx(wanted[0], rel=1e-5)
        assert norms == pytest.approx(wanted[1], rel=1e-5)

    def alone(world: sw.World) -> None:
        engine, *_ = deepspeed.initialize(model=models[2], config=config, world=world)
        assert engine.load_checkpoint(tmp_path)[0] is not None
        losses, norms = trained(engine, steps[2:], 0)
        assert losses == pytest.approx(wanted[0][2:], rel=1e-5)
        assert norms == pytest.approx(wanted[1][2:], rel=1e-5)

    run_ranks(1, alone)


class FirstOfTwo(First):
    """Is given tokens and a mask, as `train_batch` reads them."""

    def forward(self, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        tokens, mask = given
        return self.tokens(tokens), self.tokens(tokens + 1), mask


def counted_cross_entropy(logits: Tensor, given: tuple[Tensor, Tensor]) -> Tensor:
    labels, counted = given
    return (nn.functional.cross_entropy(logits.mT, labels, reduction="none") * counted).mean()


@pytest.mark.parametrize("kind", [tuple, list, None])
@pytest.mark.parametrize("interval", [0, 2])
def test_layers_may_pass_tuples_between_stages(interval: int, kind: type[Any] | None) -> None:
    """With `kind`, inputs and labels are such things too, which are one argument of the first layer and of the loss."""
    torch.manual_seed(1)
    loss_fn: Callable[[Tensor, Any], Tensor] = cross_entropy if kind is None else counted_cross_entropy
    layers = [
        First() if kind is None else FirstOfTwo(),
        *(Gated(mark) for mark in (0.5, 0.7, 0.9, 1.1)),
        Last(16, VOCAB),
    ]
    model = deepspeed.PipelineModule(layers, num_stages=2, loss_fn=loss_fn, activation_checkpoint_interval=interval)
    twin, models = copy.deepcopy(model), [copy.deepcopy(model) for _ in range(2)]
    steps = torch.randint(VOCAB - 1, (3, GAS, 2, LENGTH), generator=torch.Generator().manual_seed(3))
    config = {"gradient_accumulation_steps": GAS, "gradient_clipping": 0, "zero_optimization": {"stage": 1}}

    def pair(tokens: Tensor) -> tuple[Any, Any]:
        labels = tokens.roll(1, 1)
        return (tokens, labels) if kind is None else (kind((tokens, tokens % 2 == 0)), kind((labels, labels % 3 > 0)))

    wanted = losses_of(twin, steps, loss_fn, pair)

    def rank_of(world: sw.World) -> tuple[list[float], float, dict[str, Tensor]]:
        engine, *_ = deepspeed.initialize(model=models[world.rank], optimizer=sgd, config=config, world=world)
        losses = [engine.train_batch(map(pair, step)).item() for step in steps]
        return losses, engine.eval_batch(map(pair, steps[0])).item(), engine.module_state_dict()

    with torch.no_grad():
        evaluated = torch.stack([loss_fn(twin(inputs), labels) for inputs, labels in map(pair, steps[0])]).mean().item()
    for losses, found, state in run_ranks(2, rank_of):
        assert losses == pytest.approx(wanted, rel=1e-5)
        assert found == pytest.approx(evaluated, rel=1e-5)
        for name, value in twin.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-6)


class Counted(nn.Linear):
    """A layer that counts its forwards."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(super().forward(x))


def counted_layers(interval: int, **options: Any) -> deepspeed.PipelineModule:
    torch.manual_seed(1)
    return deepspeed.PipelineModule(
        [nn.Embedding(VOCAB, 16), *(Counted(16) for _ in range(6)), torch.tanh, nn.Linear(16, VOCAB)],
        num_stages=2,
        loss_fn=cross_entropy,
        activation_checkpoint_interval=interval,
        **options,
    )


def one_step(world: sw.World, model: nn.Module, section: dict[str, int]) -> tuple[set[int], list[float | None]]:
    """How often each of this rank's counted layers has run in a step; the loss and the gradients' norm."""
    micros = torch.randint(VOCAB, (2, 2, LENGTH), generator=torch.Generator().manual_seed(3))
    config = {**CONFIG, "zero_optimization": {"stage": 1}, "pipeline": section}
    engine, *_ = deepspeed.initialize(model=model, config=config, world=world)
    loss = engine.train_batch(iter([(tokens, tokens.roll(1, 1)) for tokens in micros]))
    calls = {layer.calls for layer in engine.module.modules() if type(layer) is Counted}
    return calls, [loss.item(), engine.get_global_grad_norm()]


@sampled
@pytest.mark.parametrize(("interval", "section"), [(1, {}), (2, {}), (9, {"activation_checkpoint_interval": 2})])
def test_runs_of_layers_are_computed_again(interval: int, section: dict[str, int]) -> None:
    """On each of two stages, once for each of two micro-batches, and once more in its backward."""
    kept, again = [[counted_layers(every) for _ in range(2)] for every in (0, interval)]
    others = [counted_layers(interval, checkpointable_layers=["Embedding"]) for _ in range(2)]

    def rank_of(world: sw.World) -> None:
        calls, expected = one_step(world, kept[world.rank], {})
        assert calls == {2}
        assert one_step(world, again[world.rank], section) == ({4}, expected)
        assert one_step(world, others[world.rank], section) == ({2}, expected)

    run_ranks(2, rank_of)


def test_an_elastic_job_restarts_from_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch sizes and loops of DeepSpeed scripts fit one world size only, so the engine needs all ranks to continue."""
    needing: list[int] = []
    monkeypatch.setattr(ThreadMembership, "needs_all", lambda self: needing.append(self.member))
    models = [Transformer() for _ in range(RANKS)]

    def rank_of(world: sw.World, member: int) -> str | None:
        engine, *_ = deepspeed.initialize(model=models[member], config=CONFIG, world=world)
        engine.shardwise.close()
        return engine.shardwise.plan.survive

    assert set(run_members(RANKS, rank_of, tmp_path).values()) == {"checkpoint"}
    assert sorted(needing) == list(range(RANKS))


@thorough_only("the plan is compared in tests/pure/test_deepspeed_config.py")
@pytest.mark.parametrize("hpz", [1, 2])
def test_quantized_weights_and_gradients(hpz: int) -> None:
    """ZeRO++: sent as codes between hosts if the config says where these are, and trains nearly like the plain loop."""
    model = Transformer()
    steps = batches(3)
    losses, _ = plain(copy.deepcopy(model), steps)
    models = [copy.deepcopy(model) for _ in range(RANKS)]
    zero = {"zero_quantized_weights": True, "zero_quantized_gradients": True, "zero_hpz_partition_size": hpz}
    zero |= {"zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024}}
    config = {**CONFIG, "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100, **zero}}

    def rank_of(world: sw.World) -> tuple[list[float], set[str]]:
        engine, *_ = deepspeed.initialize(model=models[world.rank], config=config, world=world)
        found, _ = trained(engine, steps, world.rank)
        program = inside.program(engine.shardwise)
        sent = {action.codes for block in (*program.micro_batch, *program.step) for action in block.actions}
        return found, sent - {""}

    for found, sent in run_ranks(RANKS, rank_of):
        assert found == pytest.approx(losses, rel=0.01)
        assert sent == ({"int8/256", "int4/128"} if hpz < RANKS else set())


def test_what_init_cannot_do_is_refused() -> None:
    for wrong in ({"mpu": object()}, {"data_parallel_group": object()}):
        with pytest.raises(ConfigError, match=r"zero.Init\(\) with .* is not supported"), deepspeed.zero.Init(**wrong):
            pass
    with pytest.raises(TypeError), deepspeed.zero.Init(config_dict={}):
        pass


@pytest.mark.parametrize("stage", [2, 3])
def test_gathers_parameters_of_several_engines(stage: int) -> None:
    """A moving average beside its model; ranks list the engines in one order wherever their objects lie in memory. Any
    rank may write."""
    writer = stage - 2
    tokens = batches(1)[0]
    nets = [[Transformer(num_blocks=1) for _ in range(2)] for _ in range(2)]
    for others in nets[1:]:
        for one, other in zip(nets[0], others, strict=True):
            other.load_state_dict(one.state_dict())
    config = {**CONFIG, "zero_optimization": {"stage": stage}, "gradient_accumulation_steps": 1}
    config.pop("scheduler")
    frozen = {"train_micro_batch_size_per_gpu": MICRO, "zero_optimization": {"stage": stage}}

    def of_rank(world: sw.World) -> float:
        net, average = nets[world.rank]
        average.requires_grad_(False)
        engine, *_ = deepspeed.initialize(model=net, config={**config, "gradient_clipping": 0.0}, world=world)
        shadow, *_ = deepspeed.initialize(model=average, config=frozen, world=world)
        wanted = shadow.module_state_dict()
        engine.backward(loss_of(engine, tokens[0, world.rank]))
        engine.step()
        wanted = {name: 0.9 * value + 0.1 * engine.module_state_dict()[name] for name, value in wanted.items()}
        both = [*net.parameters(), *average.parameters()]
        with deepspeed.zero.GatheredParameters(both, modifier_rank=writer):
            if world.rank == writer:
                for param, mean in zip(net.parameters(), average.parameters(), strict=True):
                    mean.data.mul_(0.9).add_(param.data, alpha=0.1)
        got = shadow.module_state_dict()
        return max(float((got[name] - value).abs().max()) for name, value in wanted.items())

    assert max(run_ranks(RANKS, of_rank)) < 1e-6


def test_engines_are_found_in_the_order_in_which_they_were_made() -> None:
    def of_rank(world: sw.World) -> None:
        config = {"train_micro_batch_size_per_gpu": 1}
        nets = [nn.Linear(2, 2) for _ in range(20)]
        engines = [deepspeed.initialize(model=net, config=config, world=world)[0] for net in nets]
        params = [param for net in reversed(nets) for param in net.parameters()]
        found = engines_of(params)
        assert [engine for engine, _ in found] == engines
        assert [names for _, names in found] == [["weight", "bias"]] * len(nets)

    run_ranks(RANKS, of_rank)
