"""A forward and backward without memory and without arithmetic, to measure what activations a model will hold.

Formulas by layer would be a list of layers, and never complete. Here the model itself runs, on fake tensors and under
the hooks that train it.
"""

from shardwise.runtime.rehearsal.integers import is_small_integers
from shardwise.runtime.rehearsal.live_bytes import Heard
from shardwise.runtime.rehearsal.mixed_samples import MixedSamples, States, follow_backward, runs_other_code
from shardwise.runtime.rehearsal.numbers_used import NumbersUsed
from shardwise.runtime.rehearsal.rebound import note_empty, rebind
from shardwise.runtime.rehearsal.rehearse import (
    Around,
    Loss,
    RehearsedForwards,
    Watch,
    nothing_around,
    rehearse,
    rehearse_forward,
)
from shardwise.runtime.rehearsal.resized import resized, size_unlike_others, unlikely_size
from shardwise.runtime.rehearsal.twin import Twin

__all__ = [
    "Around",
    "Heard",
    "Loss",
    "MixedSamples",
    "NumbersUsed",
    "RehearsedForwards",
    "States",
    "Twin",
    "Watch",
    "follow_backward",
    "is_small_integers",
    "note_empty",
    "nothing_around",
    "rebind",
    "rehearse",
    "rehearse_forward",
    "resized",
    "runs_other_code",
    "size_unlike_others",
    "unlikely_size",
]
