"""Checkpoints of others, in and out: Hugging Face, torch DCP, DeepSpeed; and what is in a checkpoint."""

from shardwise.formats.convert import DTYPES, MAX_FILE_BYTES, TARGETS, Conversion, carry_out, convert, plan_conversion
from shardwise.formats.forms import FORMS, form_of, open_checkpoint
from shardwise.formats.inspect import Inspection, dtype_word, inspect
from shardwise.formats.live import save_pretrained
from shardwise.formats.source import Source, Spec

__all__ = [
    "DTYPES",
    "FORMS",
    "MAX_FILE_BYTES",
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
