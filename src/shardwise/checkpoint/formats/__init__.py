"""Reads and writes checkpoints of other libraries: Hugging Face, torch DCP, DeepSpeed; and inspects checkpoints.

Names are imported on first use, so that sharding a model does not wait for these formats.

`formats` is below the engine, which streams a live model through the same writers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.system.first_use import imported_when_used

if TYPE_CHECKING:
    from shardwise.checkpoint.formats.conversion import (
        DTYPES,
        TARGETS,
        Conversion,
        carry_out,
        convert,
        dtype_of,
        file_bytes,
        plan_conversion,
    )
    from shardwise.checkpoint.formats.forms import FORMS, open_checkpoint, refuse_others
    from shardwise.checkpoint.formats.inspection import Inspection, dtype_word, inspect
    from shardwise.checkpoint.formats.live import WeightFolder, save_pretrained
    from shardwise.checkpoint.formats.merged_adapters import base_model
    from shardwise.checkpoint.formats.source import Source, Spec

__all__ = [
    "DTYPES",
    "FORMS",
    "TARGETS",
    "Conversion",
    "Inspection",
    "Source",
    "Spec",
    "WeightFolder",
    "base_model",
    "carry_out",
    "convert",
    "dtype_of",
    "dtype_word",
    "file_bytes",
    "inspect",
    "open_checkpoint",
    "plan_conversion",
    "refuse_others",
    "save_pretrained",
]

_HOMES = {
    "DTYPES": "shardwise.checkpoint.formats.conversion",
    "FORMS": "shardwise.checkpoint.formats.forms",
    "TARGETS": "shardwise.checkpoint.formats.conversion",
    "Conversion": "shardwise.checkpoint.formats.conversion",
    "Inspection": "shardwise.checkpoint.formats.inspection",
    "Source": "shardwise.checkpoint.formats.source",
    "Spec": "shardwise.checkpoint.formats.source",
    "base_model": "shardwise.checkpoint.formats.merged_adapters",
    "convert": "shardwise.checkpoint.formats.conversion",
    "inspect": "shardwise.checkpoint.formats.inspection",
    "carry_out": "shardwise.checkpoint.formats.conversion",
    "dtype_of": "shardwise.checkpoint.formats.conversion",
    "file_bytes": "shardwise.checkpoint.formats.conversion",
    "dtype_word": "shardwise.checkpoint.formats.inspection",
    "open_checkpoint": "shardwise.checkpoint.formats.forms",
    "plan_conversion": "shardwise.checkpoint.formats.conversion",
    "refuse_others": "shardwise.checkpoint.formats.forms",
    "save_pretrained": "shardwise.checkpoint.formats.live",
    "WeightFolder": "shardwise.checkpoint.formats.live",
}

__getattr__ = imported_when_used(__name__, _HOMES)
