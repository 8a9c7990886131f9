"""What a forked child runs of the matrix, whose actions are all known here."""

from __future__ import annotations

import warnings

import loops_gradients
import loops_models
import loops_values
import torch
from loops_matrix import Verdict, race

__all__ = ["cell", "loops_gradients", "loops_models", "loops_values"]
torch.set_num_threads(1)


def cell(case: tuple[tuple[str, ...], str, bool]) -> Verdict:
    """`race` of a script, a preset, and whether memory is shared."""
    warnings.simplefilter("ignore")
    return race(*case)
