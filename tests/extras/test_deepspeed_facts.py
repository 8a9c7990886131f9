"""Names, defaults and schedules beside DeepSpeed's own, where that is installed: `make bench` does so in .venv-bench.

Run with that environment's `python -m pytest tests/extras/test_deepspeed_facts.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwise.integrations.deepspeed import schedules
from shardwise.integrations.deepspeed.fields import FIELDS, INFERENCE, INFERENCE_RENAMED, RENAMED

pytest.importorskip("deepspeed")

SECTIONS = {
    "zero_optimization": ("deepspeed.runtime.zero.config", "DeepSpeedZeroConfig"),
    "zero_optimization.offload_param": ("deepspeed.runtime.zero.offload_config", "DeepSpeedZeroOffloadParamConfig"),
    "zero_optimization.offload_optimizer": (
        "deepspeed.runtime.zero.offload_config",
        "DeepSpeedZeroOffloadOptimizerConfig",
    ),
    "fp16": ("deepspeed.runtime.precision_config", "DeepSpeedFP16Config"),
    "bf16": ("deepspeed.runtime.precision_config", "DeepSpeedBF16Config"),
    "tensorboard": ("deepspeed.monitor.config", "TensorBoardConfig"),
    "csv_monitor": ("deepspeed.monitor.config", "CSVConfig"),
    "wandb": ("deepspeed.monitor.config", "WandbConfig"),
    "comet": ("deepspeed.monitor.config", "CometConfig"),
}
OTHERWISE = {
    "zero_optimization.stage3_model_persistence_threshold",  # theirs is the largest integer
    "zero_optimization.leaf_module",  # a mapping of classes and names
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("WarmupLR", {}),
    ("WarmupLR", {"warmup_min_lr": [1e-4, 1e-5], "warmup_num_steps": 10}),
    ("WarmupLR", {"warmup_num_steps": 7, "warmup_type": "linear"}),
    ("WarmupDecayLR", {"total_num_steps": 30, "warmup_num_steps": 5}),
    ("WarmupCosineLR", {"total_num_steps": 30, "warmup_num_steps": 5}),
    (
        "WarmupCosineLR",
        {"total_num_steps": 30, "warmup_num_steps": 5, "warmup_type": "linear", "warmup_min_ratio": 0.1},
    ),
    ("LRRangeTest", {"lr_range_test_step_size": 4}),
    ("LRRangeTest", {"lr_range_test_step_size": 4, "lr_range_test_staircase": True}),
    ("OneCycle", {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 8}),
    (
        "OneCycle",
        {
            "cycle_min_lr": 1e-3,
            "cycle_max_lr": 1e-2,
            "cycle_first_step_size": 8,
            "cycle_second_step_size": 11,
            "cycle_first_stair_count": 3,
            "decay_step_size": 4,
            "decay_lr_rate": 0.3,
            "decay_mom_rate": 0.1,
        },
    ),
]


@pytest.mark.parametrize("section", SECTIONS)
def test_fields_have_the_names_and_defaults_of_deepspeed(section: str) -> None:
    home, name = SECTIONS[section]
    for field, info in getattr(__import__(home, fromlist=[name]), name).model_fields.items():
        path = f"{section}.{info.alias or field}"
        known = FIELDS[RENAMED.get(path, path)]
        default = info.get_default(call_default_factory=True)
        if path not in OTHERWISE:
            assert known.default == getattr(default, "value", default) or (known.default is None and not default), path


def test_arguments_of_init_inference_have_the_names_and_defaults_of_deepspeed() -> None:
    config = __import__("deepspeed.inference.config", fromlist=["DeepSpeedInferenceConfig"])
    sections = {
        "": config.DeepSpeedInferenceConfig,
        "tensor_parallel.": config.DeepSpeedTPConfig,
        "moe.": config.DeepSpeedMoEConfig,
        "quant.": config.QuantizationConfig,
        "quant.weight.": config.WeightQuantConfig,
        "quant.activation.": config.ActivationQuantConfig,
        "quant.qkv.": config.QKVQuantConfig,
        "checkpoint_config.": config.InferenceCheckpointConfig,
    }
    found = set()
    for section, kind in sections.items():
        for field, info in kind.model_fields.items():
            for name in filter(None, (field, info.alias)):
                path = INFERENCE_RENAMED.get(f"{section}{name}", f"{section}{name}")
                if f"{path}." in sections:
                    continue
                found.add(path)
                default = info.get_default(call_default_factory=True)
                expected = "fp16" if default is torch.float16 else getattr(default, "value", default)
                assert INFERENCE[path].default == expected, path
    assert found == INFERENCE.keys()


@pytest.mark.parametrize(("name", "options"), CASES, ids=[f"{name}-{place}" for place, (name, _) in enumerate(CASES)])
def test_schedules_have_the_rates_of_deepspeed(name: str, options: dict[str, Any]) -> None:
    theirs = __import__("deepspeed.runtime.lr_schedules", fromlist=[name])
    found = []
    for kind in (getattr(schedules, name), getattr(theirs, name)):
        params = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
        optimizer = torch.optim.AdamW([{"params": [params[0]], "lr": 1e-2}, {"params": [params[1]], "lr": 3e-3}])
        schedule, rates = kind(optimizer, **options), []
        for _ in range(41):
            rates.append([*(group["lr"] for group in optimizer.param_groups), *optimizer.param_groups[0]["betas"]])
            schedule.step()
        found.append(torch.tensor(rates, dtype=torch.float64))
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-15)


GATES: list[dict[str, Any]] = [
    {"k": 1, "use_rts": False},
    {"k": 1, "capacity_factor": 0.6, "noisy_gate_policy": "RSample"},
    {"k": 1, "capacity_factor": 0.5, "min_capacity": 2, "noisy_gate_policy": "Jitter"},
    {"k": 1, "drop_tokens": False},
    {"k": 2, "capacity_factor": 0.6},
    {"k": 2, "capacity_factor": 0.6, "top2_2nd_expert_sampling": False, "eval_capacity_factor": 2.0},
    {"k": 2, "drop_tokens": False},
    {"k": 3, "capacity_factor": 0.5, "min_capacity": 1},
    {"k": 3, "drop_tokens": False},
]


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("settings", GATES)
def test_a_layer_of_experts_is_theirs(settings: dict[str, Any], is_training: bool) -> None:
    """Output, loss, counts and gradients of the layer, with the same weights and the same draws of random numbers."""
    from deepspeed.moe.layer import MoE as Theirs

    from shardwise.integrations.deepspeed.moe import MoE as Ours

    hidden, num_experts = torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(2)), 4
    layers = []
    for kind in (Theirs, Ours):
        torch.manual_seed(0)
        expert = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 6))
        layers.append(kind(6, expert, num_experts=num_experts, use_residual=True, **settings).train(is_training))
    theirs, ours = layers
    draw = torch.Generator().manual_seed(3)
    stacked = dict(ours.deepspeed_moe.experts.named_parameters())
    with torch.no_grad():
        for number, expert in enumerate(theirs.deepspeed_moe.experts.deepspeed_experts):
            for name, param in expert.named_parameters():
                param.add_(torch.randn(param.shape, generator=draw))
                stacked[name.replace(".", "_")][number] = param
    told = []
    for layer in layers:
        given = hidden.clone().requires_grad_()
        torch.manual_seed(5)
        out, l_aux, counts = layer(given)
        (out.square().mean() + l_aux).backward()
        told.append((out, l_aux, counts.long(), given.grad, layer.deepspeed_moe.gate.wg.weight.grad))
    for own, expected in zip(told[1], told[0], strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-6)
    for number, expert in enumerate(theirs.deepspeed_moe.experts.deepspeed_experts):
        for name, param in expert.named_parameters():
            found = stacked[name.replace(".", "_")].grad[number]
            torch.testing.assert_close(found, torch.zeros_like(param) if param.grad is None else param.grad)
