"""Runs one case of the matrix in a forked child. Importing this module registers all actions."""

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
    """`race` with a script, a preset, and whether ranks share memory."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return race(*case)
