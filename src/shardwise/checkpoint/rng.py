"""The random number generators of one rank, as values that `codec` can store."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from shardwise.system.devices import RankDevice


def capture(device: RankDevice) -> dict[str, Any]:
    """The states of Python's, numpy's and torch's generators, and of `device`'s, as arrays and numbers."""
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": [version, np.array(numbers, dtype=np.uint32), gauss],
        "numpy": [name, keys, position, has_gauss, cached],
        "torch": torch.get_rng_state(),
    }
    if device.accelerator is not None:
        with device.here():
            state[device.accelerator.kind] = device.accelerator.rng_state()
    return state


def restore(state: dict[str, Any], device: RankDevice) -> None:
    """Restore the generators from `capture`; that of `device` if it was of the same kind."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys, position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if device.accelerator is not None and device.accelerator.kind in state:
        with device.here():
            device.accelerator.set_rng_state(state[device.accelerator.kind])
