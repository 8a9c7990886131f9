"""Training with states on a disk, in a process of its own, in little memory."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

import warm
from tests.patience import PATIENCE
from tests.thorough import thorough_only

TRAINS = """
import ctypes, resource, sys, threading
from pathlib import Path
import torch
from torch import nn
import shardwise as sw

threading.stack_size(2**18)  # which is private memory, too
ctypes.CDLL(None).mallopt(-3, 2**17)  # M_MMAP_THRESHOLD: what is freed is gone, and not kept for later
how, preset, home, more = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
WIDTH, LAYERS = int(sys.argv[5]), 16

def rss(what):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what))

torch.manual_seed(0)
with sw.deferred_init():
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
units = [str(index) for index in range(LAYERS)]
plan = {"preset": preset, "precision": "bf16", "units": units, "disk": str(home / f"scratch-{how}")}
engine = sw.shard(model, plan, optimizer=optimizer)

def step(number):
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))
    loss = engine(x).float().square().mean()
    engine.backward(loss)
    engine.step()
    return loss.item()

if more:
    held = rss("VmData")
    resource.setrlimit(resource.RLIMIT_DATA, (held + more, resource.RLIM_INFINITY))
def growth(work):
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = rss("VmRSS")
    work()
    return rss("VmHWM") - before

losses = [step(0), step(1)]
in_save = growth(lambda: engine.save(home / how))
losses += [step(2), step(3)]
resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
in_resume = growth(lambda: engine.resume(home / how))
again = [step(2), step(3)]
assert again == losses[2:], (again, losses)
report = engine.memory()
engine.close()
print(in_save, in_resume, report.measured_on_disk.get("optim", 0), report.measured_on_host.get("optim", 0), *losses)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(TRAINS)
    return path


def command(script: Path, how: str, preset: str, more: int = 0, width: int = 256) -> list[str]:
    return [warm.python(), str(script), how, preset, str(script.parent), str(more), str(width)]


def run(words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, check=False, timeout=PATIENCE, capture_output=True, text=True)


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_trains_in_less_memory_than_its_states_take(script: Path) -> None:
    """192 MiB for 16 M parameters are on the disk. Private memory may grow by less than that in training, for gradients
    and all else, and on the host the same states do not fit into it. A save and a resume pass them on piece by piece:
    what they take at most is metered with the pages of files that this process maps."""
    numel, allowed = 16 * 1024**2, 160 * 2**20
    limited = run(command(script, "limited", "infinity", allowed, width=1024))
    assert limited.returncode == 0, limited.stderr
    in_save, in_resume, on_disk, on_host, *losses = limited.stdout.split()
    assert (int(on_disk), int(on_host)) == (12 * numel, 0)
    assert 12 * numel > allowed
    assert max(int(in_save), int(in_resume)) < 48 * 2**20, "windows of 16 MiB, whatever there is to save"
    assert all(math.isfinite(float(loss)) for loss in losses)
    control = run(command(script, "control", "zero3-offload", allowed, width=1024))
    assert control.returncode != 0
    assert "can't allocate memory" in control.stderr
