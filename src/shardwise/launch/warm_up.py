"""What a rank does before it asks to be let in to others, who wait for it from then on: whatever takes long the first
time that a process does it."""

from __future__ import annotations

import importlib

import torch
from torch import nn

_MODULES = ("shardwise.engine", "shardwise.elastic.session", "shardwise.data", "shardwise.optim", "numpy.ma")
"""What a loop comes to import between `World.join` and the end of its first step."""


def warm_up() -> None:
    """Import what training needs, and let torch take a step of a model of its own.

    Random numbers are as before. `numpy.ma` is what numpy imports when a loader first draws rows.
    """
    for name in _MODULES:
        importlib.import_module(name)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        model = nn.Linear(2, 2, device="cpu")
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 2, device="cpu")).sum().backward()
        optimizer.step()
