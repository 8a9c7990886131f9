"""Messages of torch.distributed inside `deferred_init`, between processes."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from launching import launch
from torch import nn


def test_messages_of_torch_are_sent_inside_deferred_init() -> None:
    """They used to be put off with all else: ranks read zeros, and those that replayed one waited for the others."""
    run = launch(Path(__file__).with_name("deferred_messages_rank.py"), 2)
    assert run.returncode == 0, run.stderr
    line = next(line for line in run.stdout.splitlines() if line.startswith("TOLD "))
    facts, kept, num_kept, state = json.loads(line.removeprefix("TOLD "))
    assert facts == [[0.0, 1.0], [0, 1], [1.0, 1.0]]
    assert kept == ["0.weight", "0.bias"]
    assert num_kept == [2, 0], "one rank has all values of the other model, and the other rank none"
    torch.manual_seed(0)
    twin, theirs = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), nn.Linear(3, 2)
    expected = {**twin.state_dict(), "0.weight": torch.full((3, 4), 7.0), "0.bias": 2 * twin[0].bias.detach()}
    expected |= {f"theirs.{name}": value for name, value in theirs.state_dict().items()}
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(torch.tensor(state[name]), value, rtol=0, atol=1e-7)
