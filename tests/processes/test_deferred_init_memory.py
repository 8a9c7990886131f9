"""What a birth takes, in the resident memory of real processes."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from launching import launch

from tests.thorough import thorough_only

MODEL, UNIT = 256, 16
"""MiB; a unit of the model is one tensor."""
SLACK = 16
"""MiB for histories, sockets and the allocator."""


def write_zeros(path: Path, *, num_blocks: int, width: int) -> None:
    """A file of so many square matrices, of which the disk keeps only the header."""
    size = width * width * 4
    entries = {
        f"{index}.weight": {"dtype": "F32", "shape": [width, width], "data_offsets": [index * size, (index + 1) * size]}
        for index in range(num_blocks)
    }
    header = json.dumps(entries).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(file.tell() + num_blocks * size)


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_deferred_init_takes_a_shard_a_unit_and_a_tensor(tmp_path: Path) -> None:
    zeros = tmp_path / "model.safetensors"
    write_zeros(zeros, num_blocks=16, width=2048)
    run = launch(Path(__file__).with_name("deferred_init_rank.py"), 2, str(zeros), by_forks=False)
    assert run.returncode == 0, run.stderr
    taken: dict[str, list[int]] = {}
    for way, mib in re.findall(r"(\w+) (\d+) MiB", run.stdout):
        taken.setdefault(way, []).append(int(mib))
    assert {way: len(all_ranks) for way, all_ranks in taken.items()} == {"deferred": 2, "plain": 2, "file": 2}
    assert max(taken["deferred"]) < MODEL / 2 + 2 * UNIT + SLACK
    assert max(taken["file"]) < MODEL / 2 + 2 * UNIT + SLACK
    assert min(taken["plain"]) > 0.9 * MODEL  # so the measurement sees what it should
