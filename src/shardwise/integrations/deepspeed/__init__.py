"""Scripts written for DeepSpeed, on shardwise's engine: `import shardwise.integrations.deepspeed as deepspeed`.

DeepSpeed itself is not needed. What a config becomes is in `config.py`, field by field in `fields.py`;
docs/deepspeed.md has both sides beside each other. Names are imported when they are first used: command lines and
configs are read here too, and wait for no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise.integrations.deepspeed import moe, pipe, zero
    from shardwise.integrations.deepspeed import schedules as lr_schedules
    from shardwise.integrations.deepspeed import tensors as utils
    from shardwise.integrations.deepspeed.config import Note, Reading, load_config, read_config
    from shardwise.integrations.deepspeed.engine import DeepSpeedEngine
    from shardwise.integrations.deepspeed.making import add_config_arguments, init_distributed, initialize
    from shardwise.integrations.deepspeed.pipe import LayerSpec, PipelineEngine, PipelineModule, TiedLayerSpec

__all__ = [
    "DeepSpeedEngine",
    "LayerSpec",
    "Note",
    "PipelineEngine",
    "PipelineModule",
    "Reading",
    "TiedLayerSpec",
    "add_config_arguments",
    "init_distributed",
    "initialize",
    "load_config",
    "lr_schedules",
    "moe",
    "pipe",
    "read_config",
    "utils",
    "zero",
]

_MODULES = {"lr_schedules": "schedules", "moe": "moe", "pipe": "pipe", "utils": "tensors", "zero": "zero"}
_HOMES = {
    "DeepSpeedEngine": "engine",
    "LayerSpec": "pipe",
    "Note": "config",
    "PipelineEngine": "pipe",
    "PipelineModule": "pipe",
    "Reading": "config",
    "TiedLayerSpec": "pipe",
    "add_config_arguments": "making",
    "init_distributed": "making",
    "initialize": "making",
    "load_config": "config",
    "read_config": "config",
}


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{_MODULES[name]}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
