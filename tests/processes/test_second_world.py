"""Worlds one after the other in one process: rank 0 has the store at a port, which the next world needs."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.free_port import free_port
from tests.patience import PATIENCE
from tests.thorough import thorough_only

SCRIPT = """
import gc

import torch

import shardwise as sw

gc.disable()  # what is left to it is left for an unknown time


def train():
    with sw.World.join() as world:
        model = torch.nn.Linear(4, 4)
        with sw.shard(model, "zero3", optimizer=torch.optim.AdamW(model.parameters()), world=world) as engine:
            engine.backward(engine(torch.ones(2, 4)).sum())
            engine.step()


train()
train()
print("twice")
"""


@thorough_only("a process that imports torch")
def test_a_process_joins_a_second_world_at_the_same_port() -> None:
    env = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    env["MASTER_PORT"] = str(free_port())
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert run.stdout.endswith("twice\n"), run.stderr
