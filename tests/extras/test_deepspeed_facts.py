"""Names, defaults and schedules beside DeepSpeed's own, where that is installed: `make bench` does so in .venv-bench.

Run with that environment's `python -m pytest tests/extras/test_deepspeed_facts.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwise.integrations.deepspeed import schedules
from shardwise.integrations.deepspeed.fields import FIELDS, RENAMED

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
