"""Real processes and real gloo: the same races as on threads, and what happens when a rank fails."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from launching import launch

import warm
from tests.patience import PATIENCE
from tests.thorough import sampled, thorough_only

RACE = Path(__file__).with_name("preset_races.py")


@sampled
@pytest.mark.parametrize(("num_ranks", "num_cases"), [(2, 5), (4, 4)])
def test_presets_race_over_gloo(num_ranks: int, num_cases: int) -> None:
    run = launch(RACE, num_ranks)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count(": same") == num_cases


@thorough_only("slow; smaller tests beside it cover the same code")
def test_collectives_on_devices_over_torchs_own_groups() -> None:
    run = launch(RACE.with_name("device_groups.py"), 2)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count(": same") == 5


BY_HAND = """
import inspect, torch, torch.distributed as dist, shardwise as sw
from torch import nn

def reduced(grad):
    dist.reduce(grad, 0)
    dist.broadcast(grad, 0)

def reduced_by_name(grad):
    dist.reduce(tensor=grad, dst=1)
    dist.broadcast(tensor=grad, src=1)

dist.init_process_group("gloo")
ways = [dist.all_reduce, lambda grad: dist.all_reduce(tensor=grad)]
if "has_torch_function" in inspect.getsource(inspect.unwrap(dist.reduce)):  # not in torch 2.11, where it is refused
    ways += [reduced, reduced_by_name]
for preset in ("ddp", "zero3"):
    model = nn.Linear(3, 2)
    world = sw.World.join()
    engine = sw.shard(model, preset, world=world)
    (model.weight * (world.rank + 1) * torch.arange(3.0)).sum().backward()
    for way in ways:  # averages already, of which a sum over the ranks is twice as much
        way(model.weight.grad)
        model.weight.grad /= 2
        assert torch.equal(model.weight.grad.clone(), 1.5 * torch.arange(3.0).expand(2, 3)), (preset, way)
    engine.close()
    world.close()
print("averages")
"""


def test_gradients_that_are_averaged_by_hand_are_averages(tmp_path: Path) -> None:
    """By `reduce` and `broadcast`, too, and where tensors are given by name."""
    script = tmp_path / "train.py"
    script.write_text(BY_HAND)
    run = launch(script, 2)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("averages") == 2


ALONE = """
import torch.distributed as dist, shardwise as sw
from shardwise.comm import bootstrap

bootstrap.LATER_SECONDS = 0
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    try:
        sw.World.join(timeout_seconds=0.5)
    except sw.errors.CommError as error:
        print(error)
dist.barrier()
"""


@thorough_only("slow; waits for a timeout in processes")
def test_some_ranks_of_a_process_group_do_not_wait_for_the_others_for_ever(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(ALONE)
    run = launch(script, 2)
    assert run.returncode == 0, run.stderr
    assert "Not all 2 ranks of the existing process group have come to World.join()" in run.stdout


FAILS = """
import os, signal, sys
import torch, shardwise as sw
from torch import nn

world = sw.World.join()
model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
engine = sw.shard(model, "zero3", optimizer=torch.optim.SGD(model.parameters(), lr=0.1), world=world)
for step in range(1000):
    if step == 3 and world.rank == 1:
        {what}
    engine.backward(engine(torch.ones(2, 16)).sum())
    engine.step()
"""


@sampled
@pytest.mark.parametrize(
    ("what", "words", "code"),
    [
        ("raise ValueError('a bad batch')", "ValueError: a bad batch", 1),
        ("os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL", 137),
        ("sys.exit(7)", "7", 7),
    ],
    ids=["raises", "killed", "exits"],
)
def test_a_rank_that_fails_ends_the_job(what: str, words: str, code: int, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(FAILS.format(what=what))
    run = launch(script, 2)
    assert run.returncode == code, run.stderr
    assert "rank 1" in run.stderr.lower()
    assert words in run.stderr


def test_a_world_of_one_needs_no_launcher(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(FAILS.format(what="pass").replace("range(1000)", "range(3)"))
    run = subprocess.run([warm.python(), str(script)], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert run.returncode == 0, run.stderr


def test_our_error_is_the_last_line_of_the_report(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(FAILS.format(what="pass").replace('"zero3"', '"zero33"'))
    run = launch(script, 2)
    assert run.returncode != 0
    assert "There is no preset 'zero33'. Did you mean 'zero3'?" in run.stderr
