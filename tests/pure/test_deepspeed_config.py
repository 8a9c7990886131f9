"""A DeepSpeed config becomes a plan: every field honoured, explained or refused."""

from __future__ import annotations

import base64
import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwise.cli.main import main
from shardwise.errors import ConfigError
from shardwise.integrations.deepspeed import hjson
from shardwise.integrations.deepspeed.config import load_config, read_config
from shardwise.integrations.deepspeed.fields import FIELDS, FieldStatus
from shardwise.plan import load_plan

FP16 = {"dynamic": True, "initial": 2.0**16, "window": 1000, "hysteresis": 2, "minimum": 1.0}
STAGE_3: dict[str, Any] = {
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "stage3_prefetch_bucket_size": 1000,
        "stage3_param_persistence_threshold": 500,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu"},
    },
    "gradient_clipping": 0.5,
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 2,
}
OFFLOADED = ("optim", "grad", "param")
PLANS = {
    "nothing": ({}, {"preset": "ddp", "clip_grad_norm": 1.0}),
    "stage 1": ({"zero_optimization": {"stage": 1}}, {"preset": "zero1", "clip_grad_norm": 1.0}),
    "stage 2, no clipping": ({"zero_optimization": {"stage": 2}, "gradient_clipping": 0}, {"preset": "zero2"}),
    "fp16": (
        {"fp16": {"enabled": True}, "gradient_clipping": 0.0},
        {"preset": "ddp", "precision": "fp16", "loss_scale": FP16},
    ),
    "fixed scale": (
        {"fp16": {"enabled": True, "loss_scale": 128}, "gradient_clipping": 0},
        {"preset": "ddp", "precision": "fp16", "loss_scale": {**FP16, "dynamic": False, "initial": 128.0}},
    ),
    "stage 3": (
        STAGE_3,
        {
            "preset": "zero3",
            "precision": "bf16",
            "resident_below": 500,
            "prefetch_bytes": 2000,
            "rows": {"optim": {"tier": "host"}, "grad": {"tier": "host"}, "param": {"tier": "host"}},
            "clip_grad_norm": 0.5,
            "accumulate": 4,
        },
    ),
    "nvme": (
        {
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}},
            "gradient_clipping": 0,
        },
        {
            "preset": "zero3",
            "resident_below": 100_000,
            "rows": {"optim": {"tier": "disk"}, "grad": {"tier": "host"}},
            "disk": "/nvme",
        },
    ),
    "twin flow": (
        {
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.3}},
            "gradient_clipping": 0,
        },
        {"preset": "zero2", "offload": {"optim": 0.3, "param": 0.0}},
    ),
    "hpz": (
        {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}, "gradient_clipping": 0},
        {"preset": "hpz", "resident_below": 100_000, "mesh": {"node": -1, "local": 2}},
    ),
    "mics": (
        {"zero_optimization": {"stage": 3, "mics_shard_size": 2}, "gradient_clipping": 0},
        {"preset": "hsdp", "resident_below": 100_000, "mesh": {"node": -1, "local": 2}},
    ),
    "codes": (
        {
            "zero_optimization": {"stage": 3, "zero_quantized_weights": True, "zero_quantized_gradients": True},
            "gradient_clipping": 0,
        },
        {
            "preset": "zero3",
            "resident_below": 100_000,
            "wire": {"param": {"dtype": "int8"}, "grad": {"dtype": "int4"}},
        },
    ),
    "codes of weights within hosts": (
        {
            "zero_optimization": {"stage": 3, "mics_shard_size": 2, "zero_quantized_weights": True},
            "gradient_clipping": 0,
        },
        {
            "preset": "hsdp",
            "resident_below": 100_000,
            "mesh": {"node": -1, "local": 2},
            "wire": {"param": {"dtype": "int8", "axes": ["local"]}},
        },
    ),
    "LoCo": (
        {
            "zero_optimization": {
                "stage": 3,
                "zero_quantized_gradients": True,
                "zeropp_loco_param": {"err_beta": 0.9},
            },
            "gradient_clipping": 0,
        },
        {
            "preset": "zero3",
            "resident_below": 100_000,
            "wire": {"grad": {"dtype": "int4"}, "feedback": {"beta": 0.9, "reset": 1024}},
        },
    ),
    "LoCo that DeepSpeed does not use": (
        {"zero_optimization": {"stage": 2, "zeropp_loco_param": {"err_beta": 0.9}}, "gradient_clipping": 0},
        {"preset": "zero2"},
    ),
    "codes of frozen weights": (
        {"zero_optimization": {"stage": 3, "zero_quantized_nontrainable_weights": True}, "gradient_clipping": 0},
        {"preset": "zero3", "resident_below": 100_000, "storage": {"frozen": {"dtype": "int8"}}},
    ),
    "codes that DeepSpeed does not send": (
        {"zero_optimization": {"stage": 2, "zero_quantized_gradients": True}, "gradient_clipping": 0},
        {"preset": "zero2"},
    ),
    "the oldest form of stage 1": ({"zero_optimization": True, "gradient_clipping": 0}, {"preset": "zero1"}),
    "the oldest form of stage 0": ({"zero_optimization": False, "gradient_clipping": 0}, {"preset": "ddp"}),
    "sections that are null": (
        {"zero_optimization": {"stage": 2, "offload_param": None}, "fp16": None, "optimizer": None},
        {"preset": "zero2", "clip_grad_norm": 1.0},
    ),
    "parameters away in stage 2": (
        {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}, "gradient_clipping": 0},
        {"preset": "zero2"},
    ),
    "parameters and states away in stage 2": (
        {
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu"},
                "offload_param": {"device": "nvme"},
            },
            "gradient_clipping": 0,
        },
        {"preset": "zero2", "rows": {"optim": {"tier": "host"}, "grad": {"tier": "host"}}},
    ),
    "parameters alone away": (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}, "gradient_clipping": 0},
        {"preset": "zero3", "resident_below": 100_000, "rows": {row: {"tier": "host"} for row in OFFLOADED}},
    ),
    "activations that are partitioned where the script asks for it": (
        {"activation_checkpointing": {"partition_activations": True}, "gradient_clipping": 0},
        {"preset": "ddp"},
    ),
    "splits": (
        {"tensor_parallel": {"autotp_size": 2}, "sequence_parallel_size": 2, "gradient_clipping": 0},
        {"preset": "ddp", "mesh": {"dp": -1, "sp": 2, "tp": 2}},
    ),
    "stages of a model that is no PipelineModule": (
        {"pipeline": {"stages": 2, "partition": "parameters"}, "zero_optimization": {"stage": 1}},
        {"preset": "zero1", "mesh": {"pp": 2, "dp": -1}, "clip_grad_norm": 1.0},
    ),
    "stages that compute again, among other splits": (
        {"pipeline": {"stages": 2, "activation_checkpoint_interval": 1}, "sequence_parallel_size": 2},
        {"preset": "ddp", "activations": "recompute", "mesh": {"pp": 2, "dp": -1, "sp": 2}, "clip_grad_norm": 1.0},
    ),
    "stages that are not asked for": (
        {"pipeline": {"stages": "auto", "partition": "uniform"}, "gradient_clipping": 0},
        {"preset": "ddp"},
    ),
    "wire": (
        {"communication_data_type": "bf16", "data_types": {"grad_accum_dtype": "fp32"}, "gradient_clipping": 0},
        {"preset": "ddp", "wire": {"grad": "bf16"}, "rows": {"grad": {"dtype": "fp32"}}},
    ),
}
BF16: dict[str, Any] = {"bf16": {"enabled": True}, "gradient_clipping": 0}
ACCUMULATED = {"data_types": {"grad_accum_dtype": "fp32"}}
SKIPS: dict[str, tuple[dict[str, Any], bool]] = {
    "stage 0": ({}, False),
    "stage 1": ({"zero_optimization": {"stage": 1}}, True),
    "stage 2": ({"zero_optimization": {"stage": 2}}, True),
    "stage 3": ({"zero_optimization": {"stage": 3}}, False),
    "stage 2 that does not look": (
        {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True, "check_grad_overflow": False}},
        False,
    ),
    "stage 1 that accumulates in fp32": ({"zero_optimization": {"stage": 1}, **ACCUMULATED}, False),
    "stage 1 that accumulates in fp32 on the host": (
        {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}, **ACCUMULATED},
        True,
    ),
    "stage 2 that accumulates in fp32": ({"zero_optimization": {"stage": 2}, **ACCUMULATED}, True),
    "stage 2 in fp32": ({"zero_optimization": {"stage": 2}, "bf16": {"enabled": False}}, False),
}
"""Which configs in bf16 leave out steps whose gradients are not finite, by what DeepSpeed 0.19 does."""
REFUSED = {
    "both precisions": ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "Keep one"),
    "a batch that does not divide": ({"train_batch_size": 6}, "train_batch_size 6 is not a multiple of"),
    "three numbers that do not fit": (
        {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3},
        "Remove one of the three",
    ),
    "a micro-batch that does not divide": (
        {"train_batch_size": 20, "train_micro_batch_size_per_gpu": 2},
        "Remove one of the three",
    ),
    "stage 4": ({"zero_optimization": {"stage": 4}}, "it must be 0, 1, 2 or 3"),
    "states away in stage 0": (
        {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
        "needs stage 1, 2 or 3",
    ),
    "a section that is a flag": ({"fp16": True}, "fp16 is true; it must be an object"),
    "a section that is a name": ({"optimizer": "Adam"}, 'optimizer is "Adam"; it must be an object'),
    "a tag that is checked otherwise": ({"checkpoint": {"tag_validation": "foo"}}, "one of ignore, warn, fail"),
    "a share of parameters on nvme": (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "cpu", "ratio": 0.5},
                "offload_param": {"device": "nvme", "nvme_path": "/nvme"},
            }
        },
        r"ratio is 0\.5, and offload_param\.device is nvme",
    ),
    "a share of states on nvme": (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/n", "ratio": 0.5}}},
        r"ratio is 0\.5, and offload_optimizer\.device is nvme",
    ),
    "nvme without a folder": (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}},
        "needs one nvme_path",
    ),
    "LoCo in fp16": (
        {
            "zero_optimization": {"stage": 3, "zero_quantized_gradients": True, "zeropp_loco_param": {"err_beta": 0.8}},
            "fp16": {"enabled": True},
        },
        "zeropp_loco_param is given, and fp16 is enabled",
    ),
    "LoCo with another key": (
        {"zero_optimization": {"stage": 3, "zeropp_loco_param": {"beta": 0.8}}},
        "it must be an object with err_beta and reset_T",
    ),
    "a batch said twice": (
        {"elasticity": {"enabled": True}, "train_batch_size": 8},
        "Both elasticity and train_batch_size set the batch size",
    ),
    "ranks that cannot share an elastic batch": (
        {"elasticity": {"enabled": True, "version": 0.1, "min_gpus": 5}},
        "elastic batch of 1680 cannot be shared by 4 data-parallel ranks; the nearest numbers that can are 5",
    ),
    "sums": ({"gradient_allreduce_op": "sum"}, "multiply the loss"),
    "another reduction": ({"gradient_allreduce_op": "max"}, "it must be one of mean, sum"),
    "a number that is text": ({"gradient_clipping": "much"}, "gradient_clipping is 'much', which is not a number"),
    "a flag that is a number": ({"fp16": {"enabled": 1}}, "true or false"),
    "stages that do not divide": ({"pipeline": {"stages": 3}}, "ranks, 4, is not a multiple"),
    "stages that are no number": ({"pipeline": {"stages": "two"}}, "pipeline.stages is 'two'; it must be an integer"),
    "stages by the layers of a PipelineModule": (
        {"pipeline": {"stages": 2, "partition": "uniform"}},
        "pipeline.partition is 'uniform', which counts the layers of a PipelineModule",
    ),
    "ranks that do not divide": ({"tensor_parallel": {"autotp_size": 3}}, "ranks, 4, is not a multiple"),
}


@pytest.mark.parametrize(("section", "stages"), [({}, 2), ({"sequence_parallel_size": 2}, 1)])
def test_sums_need_ranks_that_differ_by_data_alone(section: dict[str, Any], stages: int) -> None:
    config = {"gradient_allreduce_op": "sum", **section}
    with pytest.raises(ConfigError, match="without pipelines or split sequences"):
        read_config(config, world_size=4, num_stages=stages, may_sum=True)
    assert read_config({"gradient_allreduce_op": "sum"}, world_size=4, may_sum=True).sums_gradients


def test_a_pipeline_module_has_its_own_stages() -> None:
    read = read_config({"pipeline": {"stages": 4, "partition": "uniform"}}, world_size=4, num_stages=2)
    assert (read.plan["mesh"], read.num_replicas) == ({"pp": 2, "dp": -1}, 2)
    assert "pipeline.stages: not needed; the arguments of PipelineModule are used" in read.report()


@pytest.mark.parametrize("name", PLANS)
def test_becomes_a_plan(name: str) -> None:
    config, plan = PLANS[name]
    read = read_config(config, world_size=4)
    assert read.plan == plan
    load_plan(read.plan)


@pytest.mark.parametrize("name", SKIPS)
def test_steps_in_bf16_that_are_left_out(name: str) -> None:
    config, skips = SKIPS[name]
    plan = load_plan(read_config({**BF16, **config}, world_size=1).plan)
    assert plan.takes_only_finite == skips


@pytest.mark.parametrize("name", REFUSED)
def test_a_config_is_refused(name: str) -> None:
    config, words = REFUSED[name]
    with pytest.raises(ConfigError, match=words):
        read_config(config, world_size=4)


@pytest.mark.parametrize("value", [[], {}, [1, "a"], {"a": 1}, math.nan, 10**30, "1e-4"], ids=repr)
def test_whatever_a_field_says_is_taken_or_refused_by_a_sentence(value: Any) -> None:
    """Any field, in a section that is on where its fields count only then."""
    for path in FIELDS:
        *sections, name = path.split(".")
        config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1}
        here = config
        for section in sections:
            here = here.setdefault(section, {})
        if sections and f"{sections[0]}.enabled" in FIELDS and len(sections) == 1:
            here["enabled"] = True
        here[name] = value
        with suppress(ConfigError):
            load_plan(read_config(config, world_size=2).plan)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"zero_optimization": {"stage": [3]}}, r"zero_optimization.stage is \[3\]; it must be 0, 1, 2 or 3"),
        ({"communication_data_type": ["fp16"]}, r"communication_data_type is \['fp16'\]; it must be one of"),
        ({"zero_optimization": {"offload_optimizer": {"device": ["cpu"]}}}, "it must be none, cpu or nvme"),
        ({"gradient_clipping": math.nan}, "gradient_clipping is nan, which is not a finite number"),
        ({"fp16": {"enabled": True, "hysteresis": math.inf}}, "fp16.hysteresis is inf, which is not a finite number"),
        ({"fp16": {"enabled": True, "initial_scale_power": 10**6}}, "initial_scale_power is 1000000, and no number"),
        ({"tensorboard": {"enabled": "yes"}}, "tensorboard.enabled is 'yes'; it must be true or false"),
        ({"csv_monitor": {"enabled": True, "job_name": 3}}, "csv_monitor.job_name is 3, which is not text"),
    ],
)
def test_a_value_of_another_kind_is_named(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_config(config, world_size=2)


def test_all_that_cannot_be_granted_is_said_at_once() -> None:
    with pytest.raises(ConfigError, match=r"(?s)graph_harvesting.*zenflow.*torch_autocast"):
        read_config(
            {
                "graph_harvesting": True,
                "zero_optimization": {"zenflow": {"topk_ratio": 0.1}},
                "torch_autocast": {"enabled": True},
            },
            world_size=1,
        )


def test_no_field_is_left_out_of_the_report() -> None:
    read = read_config({**STAGE_3, "flibber": 1, "grad_clipping": 2, "fp16": {"enabled": "auto"}}, world_size=4)
    statuses = {note.path: note.status for note in read.notes}
    assert statuses["flibber"] is FieldStatus.UNKNOWN
    assert statuses["fp16.enabled"] is FieldStatus.AUTO
    assert statuses["zero_optimization.overlap_comm"] is FieldStatus.NOT_NEEDED
    assert statuses["zero_optimization.offload_param.device"] is FieldStatus.HONOURED
    assert len(statuses) == 14
    first, second, *_ = read.report().splitlines()
    assert first.startswith("flibber: unknown")
    assert second == "grad_clipping: unknown; did you mean gradient_clipping?"


def test_auto_takes_what_the_caller_knows() -> None:
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "bf16": {"enabled": "auto"},
    }
    auto = {"train_micro_batch_size_per_gpu": 3, "bf16.enabled": True}
    read = read_config(config, world_size=2, auto=auto)
    assert (read.micro_batch, read.accumulate, read.global_batch) == (3, 1, 6)
    assert read.plan["precision"] == "bf16"


def test_monitors_become_trackers_with_places_of_their_own() -> None:
    config = {
        "tensorboard": {"enabled": True, "output_path": "logs/tb", "job_name": "first"},
        "csv_monitor": {"enabled": True},
        "wandb": {"enabled": True, "team": "ours", "project": "much"},
        "comet": {"enabled": True, "workspace": "ours", "experiment_name": "first", "online": False},
    }
    read = read_config(config, world_size=1)
    theirs = {"project": None, "api_key": None, "experiment_key": None, "mode": None, "offline_directory": None}
    assert read.monitors == {
        "tensorboard": {"log_dir": "logs/tb/first"},
        "csv": {"file": "DeepSpeedJobName/metrics.csv"},
        "wandb": {"project": "much", "entity": "ours", "group": None, "name": None, "mode": None, "dir": None},
        "comet": {"workspace": "ours", "name": "first", "online": False, "samples_log_interval": 100, **theirs},
    }
    assert read.report() == ""
    assert read.report(monitors_by="report_to has them").splitlines() == [
        f"{section}.enabled: available elsewhere; report_to has them" for section in config
    ]
    off = read_config({"wandb": {"enabled": False}, "tensorboard": {}, "csv_monitor": {"job_name": "x"}}, world_size=1)
    assert off.monitors == {}
    assert off.report(monitors_by="report_to has them") == ""


def test_every_field_has_its_reason() -> None:
    assert all(field.why for field in FIELDS.values() if field.status is not FieldStatus.HONOURED)


def test_a_plan_file_comes_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "ds_config.json", tmp_path / "plan.yaml"
    more = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "csv_monitor": {"enabled": True}}
    source.write_text(json.dumps({**STAGE_3, **more}))
    assert main(["convert", str(source), str(out), "--world", "4"]) == 0
    assert yaml.safe_load(out.read_text()) == PLANS["stage 3"][1]
    assert "AdamW(lr=0.001)" in out.read_text()
    told = capsys.readouterr().err
    assert "overlap_comm: not needed" in told
    assert "csv_monitor.enabled: available elsewhere; set run and trackers in the plan" in told
    assert main(["convert", str(source), str(out), "--world", "4"]) == 2
    assert "already exists" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", "[]", '{"a": 1, "a": 2}', "[" * 10_000])
def test_a_file_that_is_none(tmp_path: Path, text: str) -> None:
    source = tmp_path / "ds.json"
    source.write_text(text)
    with pytest.raises(ConfigError, match=r"ds\.json"):
        read_config(source, world_size=1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--num_nodes", "2"), "--nodes has no effect on this machine alone"),
        (("--num_gpus", "2", "--nproc", "3"), "are the same option with two values"),
        (("--shardwise", "zero3"), "takes its plan from the DeepSpeed config"),
    ],
)
def test_a_launch_that_cannot_be_meant(
    arguments: tuple[str, ...], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").touch()
    assert main(["launch", "--as-deepspeed", *arguments, str(tmp_path / "train.py")]) == 2
    assert words in capsys.readouterr().err


def test_a_world_of_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="world_size is 0"):
        read_config({}, world_size=0)


def test_offload_that_goes_further_or_has_no_effect_is_said() -> None:
    for stage, words in ((2, "no effect below stage 3, as in DeepSpeed"), (3, "together with gradients and optimizer")):
        config = {"zero_optimization": {"stage": stage, "offload_param": {"device": "cpu"}}}
        assert words in read_config(config, world_size=2).report()


HJSON = """
# a config
zero_optimization: {
    stage: 2   // gradients
    "overlap_comm": false,
}
optimizer: {type: AdamW, 'params': {lr: 1e-3, betas: [0.9, 0.95,]}, }
/* sizes */
train_micro_batch_size_per_gpu: 2
wandb: {
    project: it's a project # of ours
    group: '''
      two
      lines
    '''
}
"""


def test_a_config_may_be_hjson(tmp_path: Path) -> None:
    braces = "{" + HJSON.replace("type: AdamW,", 'type: "AdamW",') + "}"
    for text in (HJSON.replace("type: AdamW,", "type: AdamW\n"), braces):
        (tmp_path / "ds.json").write_text(text)
        found = load_config(tmp_path / "ds.json")
        assert found == {
            "zero_optimization": {"stage": 2, "overlap_comm": False},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}},
            "train_micro_batch_size_per_gpu": 2,
            "wandb": {"project": "it's a project # of ours", "group": "two\nlines"},
        }


@pytest.mark.parametrize("value", [{}, [], {"a": [1, -2.5e3, True, None, 'q"\u00e9\n', {"b": {}}]}])
def test_json_is_hjson(value: Any) -> None:
    for indent in (None, 2):
        assert hjson.parse(json.dumps(value, indent=indent)) == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{a 1}", r"no colon after 'a' \(line 1, column 4\)"),
        ("{\n  a: ,\n}", r"a value is missing"),
        ('{a: "b', "no closing quote"),
        ("{a: 1} }", "more after the end"),
        ("{a: 1", "a key is missing"),
        ("[[" * 50_000, "recursion"),
        ("{a: 1, a: 2}", "'a' is there twice"),
    ],
)
def test_what_is_no_hjson(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_config(tmp_path / "ds.json")


def test_a_config_in_base64() -> None:
    text = json.dumps({"zero_optimization": {"stage": 2}})
    assert read_config(base64.urlsafe_b64encode(text.encode()).decode(), world_size=1).plan["preset"] == "zero2"
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(base64.urlsafe_b64encode(b"no config").decode())
