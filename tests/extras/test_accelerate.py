"""Accelerate on our engine, compared with Accelerate's own DDP; its config files."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import accelerate_jobs as jobs
import pytest
import torch
import yaml
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
from rank_processes import begin, on_ranks
from safetensors.torch import load_file

from shardwise.errors import ConfigError
from shardwise.integrations.accelerate import Accelerator
from shardwise.integrations.accelerate_config import read_accelerate_config
from shardwise.observe import read_record

pytestmark = pytest.mark.timeout(300)


def test_a_loop_with_everything_in_it(tmp_path: Path) -> None:
    plain = begin(2, jobs.looped, None, str(tmp_path / "plain"))
    runs = {
        plan: on_ranks(2, jobs.looped, plan, str(tmp_path / plan), apart=plan == "ddp")[0] for plan in ("zero3", "ddp")
    }
    expected = plain()[0]
    for plan, run in runs.items():
        for name in ("losses", "again", "norms", "evaluated"):
            assert run[name] == pytest.approx(expected[name], abs=1e-5), f"{plan}: {name}"
        assert run["again"] == pytest.approx(run["losses"][8:], abs=1e-6)
        assert (run["rate"], run["class"]) == (pytest.approx(expected["rate"]), "LlamaForCausalLM")
        assert run["state"].keys() == expected["state"].keys()
        for name, value in expected["state"].items():
            torch.testing.assert_close(torch.tensor(run["state"][name]), torch.tensor(value), rtol=1e-5, atol=1e-5)
        assert load_file(tmp_path / plan / "weights" / "model.safetensors").keys() == expected["state"].keys()


@pytest.mark.parametrize("mesh", [{"dp": 2, "tp": 2}, {"pp": 2, "dp": 2}], ids=str)
def test_a_loop_over_a_split_model(tmp_path: Path, mesh: dict[str, int]) -> None:
    """Ranks along tp and pp get the same batches, schedulers count batches, and metrics have each sample once."""
    plain = begin(2, jobs.looped, None, str(tmp_path / "plain"))
    plan = {"preset": "zero2", "mesh": mesh}
    ours, expected = on_ranks(4, jobs.looped, plan, str(tmp_path / "ours"))[0], plain()[0]
    for name in ("losses", "again", "norms", "evaluated", "rate"):
        assert ours[name] == pytest.approx(expected[name], abs=1e-5), name
    assert ours["state"].keys() == expected["state"].keys()
    for name, value in expected["state"].items():
        torch.testing.assert_close(torch.tensor(ours["state"][name]), torch.tensor(value), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("ranks", "peers", "plan"),
    [
        (2, 1, {"preset": "zero3", "mesh": {"sp": 2}}),
        (4, 2, {"preset": "zero2", "mesh": {"dp": 2, "sp": 2}, "sequence": {"attention": "ring"}}),
        (4, 1, {"preset": "zero1", "mesh": {"dp": 1, "tp": 2, "sp": 2}}),
    ],
)
def test_a_loop_over_split_sequences(tmp_path: Path, ranks: int, peers: int, plan: dict[str, Any]) -> None:
    """The loop gathers losses and logits of whole batches."""
    plain = begin(peers, jobs.looped, None, str(tmp_path / "plain"))
    ours, expected = on_ranks(ranks, jobs.looped, plan, str(tmp_path / "ours")), plain()[0]
    for run in ours:
        for name in ("losses", "again", "norms", "evaluated", "rate"):
            assert run[name] == pytest.approx(expected[name], abs=1e-5), name
    assert ours[0]["state"].keys() == expected["state"].keys()
    for name, value in expected["state"].items():
        torch.testing.assert_close(torch.tensor(ours[0]["state"][name]), torch.tensor(value), rtol=1e-5, atol=1e-5)


def test_an_own_model_over_split_sequences_is_given_parts() -> None:
    plain = begin(1, jobs.own_model, None)
    runs = on_ranks(2, jobs.own_model, {"preset": "zero3", "mesh": {"sp": 2}})
    expected = plain()[0]
    for run in runs:
        assert run == pytest.approx(expected, abs=1e-5)


def test_two_accelerators_in_one_process() -> None:
    """Each trains its own model, in either order of their ends; one refuses a model with the other's optimizer."""
    found = on_ranks(2, jobs.two_accelerators, "zero3")[0]
    assert found["losses"][0] == found["losses"][1] > found["losses"][2]
    assert len(found["refusals"]) == 1
    assert "prepared before, by another Accelerator" in found["refusals"][0]
    assert "Give this one a new optimizer" in found["refusals"][0]


def test_a_split_model_is_taken_over_by_another_accelerator() -> None:
    expected = on_ranks(2, jobs.taken_over, "zero3")[0]
    assert expected[0] > expected[1]
    for found in on_ranks(2, jobs.taken_over, {"preset": "zero3", "mesh": {"dp": -1, "tp": 2}}):
        assert found == pytest.approx(expected, rel=1e-5)


def test_a_state_is_loaded_by_another_world(tmp_path: Path) -> None:
    run = on_ranks(2, jobs.looped, "zero2", str(tmp_path))[0]
    alone = on_ranks(1, jobs.continued, "zero3", str(tmp_path))[0]
    assert alone["state"] == run["saved"] != run["state"]


@pytest.mark.parametrize(("accumulates", "ranks", "axis"), [(True, 2, "dp"), (False, 2, "pp"), (False, 1, "dp")])
def test_what_is_logged_stands_in_the_record(tmp_path: Path, accumulates: bool, ranks: int, axis: str) -> None:
    """Called by all ranks or by the main one alone; Accelerate's own trackers get the values too."""
    run = tmp_path / "run"
    plan = {"preset": "zero3", "mesh": {axis: ranks}, "run": str(run), "trackers": ["jsonl", "csv"]}
    first = on_ranks(ranks, jobs.logged, plan, str(tmp_path / "board"), accumulates=accumulates)[0]
    losses = {step: values["loss"] for step, values in first["told"] if "loss" in values}
    assert losses
    record = read_record(run / "record.jsonl")
    assert dict(record.column("loss")) == pytest.approx(losses)
    assert dict(record.column("epoch")) == dict.fromkeys(losses, 0)
    assert all(seconds > 0 for _, seconds in record.column("seconds"))
    assert set(dict(record.column("norm"))) == set(losses)
    assert dict(record.column("loss", "validation")) == pytest.approx({2: losses[2]})
    assert record.column("mine", "log") == [(2, 7.0)]
    assert record.column("last", "log") == [(first["num_steps"], 1.0)]
    (line, *_) = [line for line in record.lines if line["kind"] == "ranks"]
    assert len(line["ranks"]) == ranks
    assert record.lines[-1]["status"] == "ended"
    with (run / "metrics.csv").open(newline="") as file:
        assert {int(row["step"]): float(row["loss"]) for row in csv.DictReader(file) if row["loss"]} == losses
    (written,) = (tmp_path / "board").glob("run/events.out.tfevents.*")
    assert written.stat().st_size > 200


SCRIPT = """
import accelerate, torch
accelerator = accelerate.Accelerator()
model = torch.nn.Linear(4, 2)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(3):
    loss = model(torch.ones(3, 4)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    if accelerator.is_main_process:
        accelerator.log({"loss": loss}, step=step)
"""


def test_last_logged_values_are_kept_without_end_training(tmp_path: Path) -> None:
    """The script ends without `end_training()`, so there is no further collective call."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "plan.yaml").write_text("{preset: zero1, run: run}")
    command = [sys.executable, "-m", "shardwise", "launch", "--nproc", "2", "--shardwise", "plan.yaml", "script.py"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    record = read_record(tmp_path / "run" / "record.jsonl")
    assert [step for step, _ in record.column("loss")] == [1, 2]
    assert [step for step, _ in record.column("loss", "log")] == [3]
    assert record.lines[-1]["status"] == "ended"


def test_several_models() -> None:
    plain = begin(2, jobs.adversaries, None)
    ours = on_ranks(2, jobs.adversaries, "zero3")[0]
    assert ours["losses"] == pytest.approx(plain()[0]["losses"], abs=1e-6)


@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero3", "zero3-offload"])
def test_one_optimizer_of_two_models(preset: str, tmp_path: Path) -> None:
    plain = begin(2, jobs.together, None, str(tmp_path / "plain"))
    ours = on_ranks(2, jobs.together, preset, str(tmp_path / "ours"))[0]
    expected = plain()[0]
    assert ours["losses"] == pytest.approx(expected["losses"], abs=1e-6)
    assert ours["norms"] == pytest.approx(expected["norms"], abs=1e-6)
    assert ours["has_repeated"]
    assert ours["have_gradients"] == expected["have_gradients"] == [False, True]
    for state, other in zip(ours["states"], expected["states"], strict=True):
        assert state.keys() == other.keys()
        for name in state:
            torch.testing.assert_close(torch.tensor(state[name]), torch.tensor(other[name]), rtol=1e-5, atol=1e-6)


REFUSED = {
    "plugin": "fsdp_plugin= selects FSDP",
    "clipping": "with Accelerate the script clips",
    "accumulation": "accumulate 2 .* is 1",
    "axes": "Set the size of pp, and let a data axis take the rest",
    "spread": "SGD has parameters of Linear and of modules that are not prepared with it",
    "together": "SGD trains Linear and Linear together, and pipeline stages and preset: auto are for one model",
    "strange state": "was not saved by this Accelerator",
    "alone": "Linear was prepared without its optimizer",
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_with_a_sentence(what: str) -> None:
    with pytest.raises(RuntimeError, match=f"(?s)(ConfigError|StateError).*{REFUSED[what]}"):
        on_ranks(1, jobs.refused, what)


def test_what_belongs_to_ddp_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"join_uneven_inputs\(\) needs DistributedDataParallel"):
        on_ranks(2, jobs.refused, "uneven")
    with pytest.raises(RuntimeError, match=r"(?s)ConfigError.*use accelerator.no_sync\(model\).*leave LocalSGD out"):
        on_ranks(2, jobs.refused, "local")


def test_a_layer_is_unfrozen_and_a_state_saved_between_micro_batches(tmp_path: Path) -> None:
    """DDP would not sum gradients of what was frozen when it was wrapped, so one process is what counts."""
    begun = begin(1, jobs.unfrozen, None, str(tmp_path / "theirs"), rows_of_a_batch=4)
    runs = {plan: on_ranks(2, jobs.unfrozen, plan, str(tmp_path / plan))[0] for plan in ("zero3", "zero1")}
    plain = begun()[0]
    for run in runs.values():
        assert run["losses"] == pytest.approx(plain["losses"], abs=1e-5)
        for name in ("ended", "loaded"):
            for key, value in plain[name].items():
                torch.testing.assert_close(torch.tensor(run[name][key]), torch.tensor(value), rtol=1e-5, atol=1e-5)
    assert plain["ended"] != plain["loaded"]


def test_local_sgd_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)ConfigError.*use accelerator.no_sync\(model\).*leave LocalSGD out"):
        on_ranks(2, jobs.refused, "local")


@pytest.mark.parametrize(
    ("settings", "cure"),
    [
        ({"comm_hook": DDPCommunicationHookType.BF16}, r"comm_hook is bf16, .*set wire: \{grad: bf16\} in the plan"),
        ({"comm_wrapper": DDPCommunicationHookType.FP16}, r"comm_wrapper is fp16, .*set wire: \{grad: bf16\}"),
        (
            {
                "comm_hook": DDPCommunicationHookType.POWER_SGD,
                "comm_state_option": {"matrix_approximation_rank": 4, "start_powerSGD_iter": 50},
            },
            r"comm_hook is power_sgd, .*preset: ddp and powersgd: \{rank: 4, start_step: 50\}",
        ),
    ],
)
def test_hooks_that_compress_gradients_are_refused(settings: dict[str, Any], cure: str) -> None:
    """Nothing would call them."""
    for state in (AcceleratorState, PartialState):
        state._reset_state()
    with pytest.raises(ConfigError, match=cure):
        Accelerator(plan="ddp", cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(**settings)])
    AcceleratorState._reset_state()


ON_HOST = {"optim": {"tier": "host"}, "grad": {"tier": "host"}}
FILES = {
    "ddp": ({"distributed_type": "MULTI_GPU", "num_processes": 4, "mixed_precision": "bf16"}, {"preset": "ddp"}),
    "full shard": (
        {
            "distributed_type": "FSDP",
            "fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_transformer_layer_cls_to_wrap": "Block"},
        },
        {"preset": "zero3", "units": {"class": "Block"}},
    ),
    "fsdp2": (
        {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": False}},
        {"preset": "zero3-kept"},
    ),
    "fsdp offload": (
        {"distributed_type": "FSDP", "fsdp_config": {"fsdp_offload_params": True, "fsdp_sharding_strategy": 1}},
        {"preset": "zero3-offload"},
    ),
    "stage 2, offloaded": (
        {"distributed_type": "DEEPSPEED", "deepspeed_config": {"offload_optimizer_device": "cpu", "zero_stage": 2}},
        {"preset": "zero2", "rows": ON_HOST},
    ),
    "stage 3, offloaded": (
        {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3, "offload_optimizer_device": "cpu"}},
        {"preset": "zero3", "rows": ON_HOST},
    ),
    "stage 1, offloaded": (
        {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 1, "offload_optimizer_device": "cpu"}},
        {"preset": "zero1", "rows": {"optim": {"tier": "host"}}},
    ),
    "no stage, on a disk": (
        {
            "distributed_type": "DEEPSPEED",
            "deepspeed_config": {"offload_optimizer_device": "nvme", "offload_optimizer_nvme_path": "/nvme"},
        },
        {"preset": "zero2", "rows": {"optim": {"tier": "disk"}, "grad": {"tier": "host"}}, "disk": "/nvme"},
    ),
    "stage 3, parameters too": (
        {
            "distributed_type": "DEEPSPEED",
            "deepspeed_config": {"zero_stage": 3, "offload_optimizer_device": "cpu", "offload_param_device": "cpu"},
        },
        {"preset": "zero3", "rows": {**ON_HOST, "param": {"tier": "host"}}},
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_config_file_becomes_a_plan(name: str, tmp_path: Path) -> None:
    values, plan = FILES[name]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"compute_environment": "LOCAL_MACHINE", **values}))
    found = read_accelerate_config(tmp_path / "config.yaml")
    assert (found.plan, found.unsupported) == (plan, [])
    assert found.nproc == values.get("num_processes")
    assert found.environment == ({"ACCELERATE_MIXED_PRECISION": "bf16"} if "mixed_precision" in values else {})


def test_unsupported_settings_of_a_config_file_are_listed(tmp_path: Path) -> None:
    values = {
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {"zero_stage": 3, "gradient_clipping": 1.0, "transformer_moe_cls_names": "A"},
        "fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD"},
        "something_new": 3,
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    found = read_accelerate_config(tmp_path / "config.yaml")
    assert found.plan == {"preset": "zero3"}
    listed = [line.partition(":")[0] for line in found.unsupported]
    assert set(listed) == {
        "transformer_moe_cls_names",
        "gradient_clipping",
        "fsdp_config.fsdp_sharding_strategy",
        "something_new",
    }


def test_a_deepspeed_config_that_a_file_names_is_the_plan(tmp_path: Path) -> None:
    inner = {"deepspeed_config_file": "ds.json", "zero3_init_flag": True, "zero_stage": 3}
    values = {"distributed_type": "DEEPSPEED", "num_processes": 2, "deepspeed_config": inner}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    found = read_accelerate_config(tmp_path / "config.yaml")
    assert (found.plan, found.nproc, found.names_deepspeed_config) == ({}, 2, True)
    assert found.environment == {
        "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds.json",
    }  # fmt: skip
    assert found.unsupported == ["zero_stage: 3 (the DeepSpeed config ds.json counts)"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("- a", "no distributed_type"),
        ("distributed_type: MEGATRON_LM", "is not supported: Megatron-LM is another engine .* Use this plan"),
        ("distributed_type: FSDP\nnum_machines: 2", "machine_rank is missing"),
        ("distributed_type: [", "cannot be read"),
        ("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 4}", "it must be 0, 1, 2 or 3"),
    ],
)
def test_an_invalid_config_file(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        read_accelerate_config(tmp_path / "config.yaml")
