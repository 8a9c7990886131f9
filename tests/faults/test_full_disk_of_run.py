"""A disk that is full has no room for a run's record, trackers and timeline: training continues and says so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE
from tests.thorough import sampled, thorough_only

SCRIPT = Path(__file__).with_name("full_disk_rank.py")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("first", ["before", "later"])
def test_training_continues_on_a_full_disk(first: str, tmp_path: Path) -> None:
    """On a file system of its own; only where this user may make one."""
    mounted = f"mount -t tmpfs -o size=1m tmpfs {tmp_path}"
    if run("unshare", "-rm", "sh", "-c", mounted).returncode:
        pytest.skip("mounting is not allowed here")
    done = run("unshare", "-rm", "sh", "-c", f"{mounted} && {sys.executable} {SCRIPT} {tmp_path} {first}")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["num_steps"] == [12, 12]
    assert found["damaged"] == 0
    record = "The run's record" if first == "later" else "record.jsonl cannot be written"
    assert [text for text in found["warnings"] if record in text], found["warnings"]
    assert [text for text in found["warnings"] if "the tracker csv cannot be written" in text], found["warnings"]
    of_the_disk = [text for text in found["warnings"] if "cannot be written" in text or "No space left" in text]
    assert len(of_the_disk) <= 6, f"said once, not in each step: {of_the_disk}"
    if first == "later":
        assert found["steps"] == [1, 2, 3, 4, 9, 10, 11, 12], "what there was no room for is missing, and nothing else"
        assert [text for text in found["warnings"] if "is written again; " in text], found["warnings"]
