"""Reads and writes checkpoints of other libraries: Hugging Face, torch DCP, DeepSpeed; and inspects checkpoints.

Names are imported on first use, so that sharding a model does not wait for these formats.

`formats` is below the engine, which streams a live model through the same writers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise.formats.conversion import DTYPES, TARGETS, Conversion, carry_out, convert, plan_conversion
    from shardwise.formats.forms import FORMS, form_of, open_checkpoint
    from shardwise.formats.inspection import Inspection, dtype_word, inspect
    from shardwise.formats.live import save_pretrained
    from shardwise.formats.source import Source, Spec

__all__ = [
    "DTYPES",
    "FORMS",
    "TARGETS",
    "Conversion",
    "Inspection",
    "Source",
    "Spec",
    "carry_out",
    "convert",
    "dtype_word",
    "form_of",
    "inspect",
    "open_checkpoint",
    "plan_conversion",
    "save_pretrained",
]

_HOMES = {
    "DTYPES": "shardwise.formats.conversion",
    "FORMS": "shardwise.formats.forms",
    "TARGETS": "shardwise.formats.conversion",
    "Conversion": "shardwise.formats.conversion",
    "Inspection": "shardwise.formats.inspection",
    "Source": "shardwise.formats.source",
    "Spec": "shardwise.formats.source",
    "convert": "shardwise.formats.conversion",
    "inspect": "shardwise.formats.inspection",
    "carry_out": "shardwise.formats.conversion",
    "dtype_word": "shardwise.formats.inspection",
    "form_of": "shardwise.formats.forms",
    "open_checkpoint": "shardwise.formats.forms",
    "plan_conversion": "shardwise.formats.conversion",
    "save_pretrained": "shardwise.formats.live",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'shardwise.formats' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
