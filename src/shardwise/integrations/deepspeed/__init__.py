"""DeepSpeed's API on shardwise's engine: `import shardwise.integrations.deepspeed as deepspeed`.

DeepSpeed itself is not needed. `config.py` translates configs, with each field listed in `fields.py`;
docs/deepspeed.md lists the equivalents. Names are imported lazily, because command lines and configs are also parsed
from here, without importing torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise.integrations.deepspeed import moe, pipe, zero
    from shardwise.integrations.deepspeed import schedules as lr_schedules
    from shardwise.integrations.deepspeed import tensors as utils
    from shardwise.integrations.deepspeed.config import Note, TranslatedConfig, load_config, read_config
    from shardwise.integrations.deepspeed.engine import DeepSpeedEngine
    from shardwise.integrations.deepspeed.hybrid_engine import DeepSpeedHybridEngine
    from shardwise.integrations.deepspeed.inference import InferenceEngine, init_inference
    from shardwise.integrations.deepspeed.inference_config import default_inference_config
    from shardwise.integrations.deepspeed.initialization import add_config_arguments, init_distributed, initialize
    from shardwise.integrations.deepspeed.pipe import LayerSpec, PipelineEngine, PipelineModule, TiedLayerSpec

__all__ = [
    "DeepSpeedEngine",
    "DeepSpeedHybridEngine",
    "InferenceEngine",
    "LayerSpec",
    "Note",
    "PipelineEngine",
    "PipelineModule",
    "TiedLayerSpec",
    "TranslatedConfig",
    "add_config_arguments",
    "default_inference_config",
    "init_distributed",
    "init_inference",
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
_MODULE_OF = {
    "DeepSpeedEngine": "engine",
    "DeepSpeedHybridEngine": "hybrid_engine",
    "InferenceEngine": "inference",
    "LayerSpec": "pipe",
    "Note": "config",
    "PipelineEngine": "pipe",
    "PipelineModule": "pipe",
    "TranslatedConfig": "config",
    "TiedLayerSpec": "pipe",
    "add_config_arguments": "initialization",
    "default_inference_config": "inference_config",
    "init_distributed": "initialization",
    "init_inference": "inference",
    "initialize": "initialization",
    "load_config": "config",
    "read_config": "config",
}


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{_MODULES[name]}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
