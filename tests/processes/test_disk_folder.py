"""A process that is killed while it writes to its folder on a disk: the next one finds out, and all of the space."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

import warm
from shardwise.errors import TierError
from shardwise.system.disk import TierFolder
from tests.patience import PATIENCE

WRITES_WITHOUT_END = """
import os, sys
from pathlib import Path
from shardwise.system.disk import PAGE, BufferPool, IoQueue, TierFolder

home = Path(sys.argv[1])
file = TierFolder(home).create("states", 2**24, IoQueue(depth=2, block_bytes=PAGE))
buffer = BufferPool(1, 2**24).take()
(home / "shardwise-rank-0.half-made").write_bytes(b"x" * 100)  # as if it had been killed before it lost its name
print(os.getpid(), flush=True)
while True:
    file.write(0, buffer).wait()
"""


STEPS_IN_LITTLE_MEMORY = """
import os, sys, torch
from shardwise.optim.disk_states import DiskStates
from shardwise.system.disk import BufferPool, IoQueue, TierFolder

def held(what):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what))

numel = 2**23
optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.empty(0))], lr=0.01)
group = optimizer.param_groups[0]
place = TierFolder(sys.argv[1])
empty = torch.empty(numel, device="meta")
states = DiskStates(place, "h.0", empty, optimizer, group, IoQueue(depth=2), slice_numel=2**17)
for start in range(0, numel, 2**20):
    states.put("param", torch.full((2**20,), float(start)), start)
grad = torch.ones(numel, dtype=torch.bfloat16)
pool = BufferPool(3, states.buffer_bytes)
states.step(grad, group, pool)
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
before = held("VmRSS")
states.step(grad, group, pool)
print(states.num_bytes, held("VmHWM") - before)
print(float(states.get("param", numel - 1)), float(states.get("exp_avg", 5, 6)))
"""


GIVES_A_DISK_UP = """
import os, sys, threading
from shardwise.system.disk import PAGE, BufferPool, IoQueue, Patience, SystemCalls, TierFolder

class Silent(SystemCalls):
    def read(self, handle, into, offset):
        threading.Event().wait()

patience = Patience("The disk", 0.0)
folder = TierFolder(sys.argv[1], calls=Silent(), patience=patience)
file = folder.create("states", 2**24, IoQueue(depth=2, block_bytes=PAGE, patience=patience))
buffer = BufferPool(1, 2**24).take()
file.write(0, buffer).join()
os.unlink = lambda path: print("removes a file there")
file.read(0, buffer).wait()
"""


@pytest.mark.parametrize("closes", [False, True])
def test_a_process_ends_whose_disk_answers_nothing(closes: bool, tmp_path: Path) -> None:
    """Python itself does not wait for the threads whose reads never return, nor does it touch that disk at exit."""
    script = tmp_path / "script.py"
    by_hand = "try:\n    file.read(0, buffer).wait()\nfinally:\n    file.queue.close()\n    folder.close()\n"
    script.write_text(GIVES_A_DISK_UP + by_hand if closes else GIVES_A_DISK_UP)
    command = [warm.python(), str(script), str(tmp_path / "home")]
    done = subprocess.run(command, check=False, timeout=PATIENCE, capture_output=True, text=True)
    assert done.returncode == 1
    assert "TierError: The disk has answered nothing for 0 s" in done.stderr
    assert done.stdout == ""


def test_states_on_a_disk_take_no_more_memory_than_their_buffers(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(STEPS_IN_LITTLE_MEMORY)
    command = [warm.python(), str(script), str(tmp_path / "home")]
    done = subprocess.run(command, check=True, timeout=PATIENCE, capture_output=True, text=True)
    on_disk, more, last_param, exp_avg = (float(word) for word in done.stdout.split())
    assert on_disk == 3 * 4 * 2**23
    assert more < on_disk / 8, "a few slices of 1.5 MiB, of 96 MiB"
    assert last_param != 2**23 - 2**20
    assert exp_avg == pytest.approx(0.19)


def test_a_folder_of_a_killed_process_is_recognised_and_empty(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    home, script = tmp_path / "home", tmp_path / "script.py"
    script.write_text(WRITES_WITHOUT_END)
    with subprocess.Popen([warm.python(), str(script), str(home)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = process.stdout.readline().strip()
        with pytest.raises(TierError, match=f"being used by process {pid} on"):
            TierFolder(home)
        held = [path.stat() for path in Path(f"/proc/{pid}/fd").iterdir() if home in path.readlink().parents]
        assert {one.st_nlink for one in held if one.st_size >= 2**23} == {0}, "the file goes with its process"
        os.kill(int(pid), signal.SIGKILL)
        assert process.wait(PATIENCE) != 0
    assert sorted(path.name for path in home.iterdir()) == ["shardwise-rank-0.half-made", "shardwise-rank-0.lock"]
    folder = TierFolder(home)
    assert f"left by process {pid}" in caplog.text
    folder.close()
    assert not list(home.iterdir())


def test_a_normal_end_leaves_nothing_though_nobody_closes(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(WRITES_WITHOUT_END.replace("while True:", "for _ in range(2):"))
    subprocess.run(
        [warm.python(), str(script), str(tmp_path / "home")], check=True, timeout=PATIENCE, capture_output=True
    )
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["shardwise-rank-0.half-made"]
