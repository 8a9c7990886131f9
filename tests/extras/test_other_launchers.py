"""`World.join()` under launchers of others: it finds its rank by their variables."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import shardwise

SCRIPT = """
import os
import shardwise as sw

with sw.World.join() as world:
    assert world.exchange(str(os.environ["LOCAL_RANK"]).encode()) == [b"0", b"1"]
    print(f"rank {world.rank} of {world.size}, {world.local_size} here\\n", end="", flush=True)
"""
OF_ACCELERATE = "--multi_gpu --num_machines 1 --num_processes 2 --main_process_port 0 --mixed_precision no"
LAUNCHERS = {
    "torchrun": "torch.distributed.run --standalone --nproc-per-node 2",
    "accelerate launch": f"accelerate.commands.launch {OF_ACCELERATE} --dynamo_backend no",
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_find_each_other(launcher: str, tmp_path: Path) -> None:
    (tmp_path / "join.py").write_text(SCRIPT)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE", "RANK"))}
    given = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(shardwise.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-m", *LAUNCHERS[launcher].split(), "join.py"],
        cwd=tmp_path,
        env=inherited | given | {"ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == ["", "rank 0 of 2, 2 here", "rank 1 of 2, 2 here"], done.stdout
