"""Modes that look at what a model's forward calls see the model's calls alone, whatever a plan does beside them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from twins import adamw

import shardwise as sw
from shardwise.testing import run_ranks
from tests.models import Decoder

IDS = torch.zeros(2, 8, dtype=torch.long)
LOOKS = {"untyped_storage", "__get__"}
"""What asks a tensor about itself; a few such looks are seen for each unit."""
MOST_LOOKS = 26
"""In a forward of a Decoder of two blocks and 26 parameters. They were 90 to 145 while each parameter was asked whether
it had been written to, and each tensor that is offloaded what it is."""


class Seen(TorchFunctionMode):
    """Counts what is called inside, as `FlopCounterMode` and checks of a model do."""

    def __init__(self) -> None:
        super().__init__()
        self.called = Counter[str]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called[func.__name__] += 1
        return func(*args, **(kwargs or {}))


def seen_in_forward(model: nn.Module) -> tuple[torch.Tensor, Counter[str]]:
    with Seen() as seen:
        return model(IDS, IDS), seen.called


@pytest.mark.parametrize("policy", ["keep", "offload", "recompute", "selective", "disk"])
@pytest.mark.parametrize("preset", ["ddp", "zero3"])
def test_a_mode_sees_what_the_model_calls(preset: str, policy: str, tmp_path: Path) -> None:
    plain = seen_in_forward(Decoder(num_blocks=2))[1]
    plan = {"preset": preset, "activations": policy, "disk": str(tmp_path) if policy == "disk" else None}

    def rank(world: sw.World) -> Counter[str]:
        model = Decoder(num_blocks=2)
        with sw.shard(model, plan, optimizer=adamw(model), world=world) as engine:
            for _ in range(2):
                loss, called = seen_in_forward(model)
                engine.backward(loss)
                engine.step()
        return called

    for called in run_ranks(2, rank):
        extra = called - plain
        assert not plain - called
        assert set(extra) <= LOOKS, "what the library computes beside the model is no call of the model's"
        assert extra.total() <= MOST_LOOKS
