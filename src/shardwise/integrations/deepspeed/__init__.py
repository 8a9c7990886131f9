"""Scripts written for DeepSpeed, on shardwise's engine: `import shardwise.integrations.deepspeed as deepspeed`.

DeepSpeed itself is not needed. What a config becomes is in `config.py`, field by field in `fields.py`;
docs/deepspeed.md has both sides beside each other.
"""

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
