"""One rank of NCCL, and of gloo without a GPU: it takes what the fakes took in training, and records the same."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import recorded_calls
import torch
from one_device import OneDevice
from recorded_calls import Call, as_told, asked_of, environment_of, recorded
from test_training import muon
from torch import nn
from torch.torch_version import TorchVersion
from twins import MakeOptimizer, adamw, batches, share_of

import shardwise as sw
from shardwise.launch.port import listen
from tests.models import Transformer
from tests.thorough import thorough_only

pytestmark = pytest.mark.device
where_it_rehearses = (
    thorough_only("slow; smaller tests beside it cover the same code")
    if os.environ.get("DEVICE", "cpu") == "cpu"
    else lambda test: test
)
VERBS = {"gather", "gather together", "reduce_scatter", "swap_chunks", "all_reduce", "all_to_all", "broadcast"}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)


PROGRAMS: list[tuple[Any, ...]] = [
    ("ddp", "fp32", {"dp": 2}),
    ("ddp", "bf16", {"dp": 2}),
    ("zero1", "bf16", {"dp": 2}),
    ("zero2", "fp32", {"dp": 2}),
    ("zero3", "bf16", {"dp": 2}),
    ("hsdp", "bf16", {"node": 2, "local": 2}),
    ("hpz", "fp16", {"node": 2, "local": 2}),
    ("zero2", "fp32", {"dp": 2}, muon),
    ("zero3", "bf16", {"dp": 2}, sgd, True),
]


def trained(
    preset: str, precision: str, mesh: dict[str, int], make: MakeOptimizer = adamw, freezes: bool = False
) -> tuple[int, list[Call]]:
    """With `freezes` a unit has two buffers, which are gathered at one moment once the order of a step is known."""

    def work(world: sw.World) -> None:
        model = Transformer(tied=True, num_blocks=2)
        for param in model.blocks[0].parameters():
            param.requires_grad_(not freezes or param.dim() == 1)
        plan = {"preset": preset, "precision": precision, "mesh": mesh, "clip_grad_norm": 0.5}
        with sw.shard(model, plan, optimizer=make(model), world=world) as engine:
            for batch in batches(3 if freezes else 1, rows=8):
                engine.backward(engine(*share_of(engine, batch)))
                engine.step()

    return recorded(math.prod(mesh.values()), work)


@where_it_rehearses
def test_a_backend_records_what_fakes_recorded(device: OneDevice, tmp_path: Path) -> None:
    """Presets one after the other, each with groups of its own, as one job makes them."""
    num_groups, calls = 0, []
    for program in PROGRAMS:
        made, some = trained(*program)
        calls += [
            Call(one.verb, one.group + num_groups * (one.group > 0), one.dtypes, one.numels, one.in_place)
            for one in some
        ]
        num_groups += made
    verbs = Counter(call.verb for call in calls)
    assert set(verbs) == VERBS, verbs
    assert {dtype for call in calls for dtype in call.dtypes} >= {"float32", "bfloat16", "float16"}
    assert any(call.in_place for call in calls if call.verb == "gather")

    backend = "nccl" if device.is_real else "gloo"
    if backend == "gloo" and TorchVersion(torch.__version__) < "2.13":  # it has none of lists there
        calls = [call for call in calls if call.verb != "all_to_all"]
    file = tmp_path / "calls.json"
    file.write_text(asked_of(num_groups, calls))
    with listen(None) as listener:
        env = environment_of(listener.getsockname()[1])
    run = subprocess.run(
        [sys.executable, recorded_calls.__file__, backend, str(file)],
        env=env,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    told = json.loads(run.stdout.splitlines()[-1])
    assert told == [as_told(call, backend) for call in calls]
