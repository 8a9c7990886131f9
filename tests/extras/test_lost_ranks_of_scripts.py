"""Scripts of Trainer, Accelerate and Lightning of which a rank is lost: they are refused where it would have to be made
up for, and restart from their last checkpoint where the launcher was told to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwise.errors import ConfigError
from shardwise.integrations.accelerate import Accelerator
from shardwise.integrations.fabric import ShardwiseStrategy as FabricStrategy
from shardwise.integrations.lightning import ShardwiseStrategy

pytestmark = pytest.mark.timeout(600)
SCRIPT, LIGHTNING_SCRIPT = (Path(__file__).with_name(f"{name}_script.py") for name in ("restarted", "lightning"))
CURE = "--max-restarts N instead of --elastic"


def launched(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shardwise", "launch", "--nproc", "2", "--timeout", "5", *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=environment)


@pytest.mark.parametrize(
    "make", [lambda: Accelerator(cpu=True), ShardwiseStrategy, FabricStrategy], ids=["Accelerate", "Trainer", "Fabric"]
)
def test_a_rank_that_others_may_join_is_refused_before_it_trains(
    make: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the only one: it would see one process for good, and read all samples, as the next one would."""
    monkeypatch.setenv("SHARDWISE_MEMBER", "0")
    with pytest.raises(ConfigError, match=CURE):
        make()


def test_a_job_of_lightning_ends_with_the_cure(tmp_path: Path) -> None:
    """Its ranks all raise the same, so that it is not tried again and again."""
    script = [LIGHTNING_SCRIPT, tmp_path / "told.json", "lightning.pytorch", "shardwise_zero3"]
    done = launched("--elastic", "1:2", "--retries", "100", *script)
    assert done.returncode == 1, done.stderr
    assert "The job is stopped, because a restart would not help." in done.stderr, done.stderr
    assert CURE in done.stderr
    assert not (tmp_path / "told.json").exists()


OURS = ("--shardwise", "zero3")


@pytest.mark.parametrize(
    ("library", "killed_at", "saved_at", "other"),
    [("transformers", 3, 2, (OURS, -1)), ("lightning", 4, 3, ((), 4))],
    ids=["transformers", "lightning"],
)
def test_all_ranks_restart_from_the_last_checkpoint_of_the_script(
    library: str, killed_at: int, saved_at: int, other: tuple[tuple[str, ...], int], tmp_path: Path
) -> None:
    """As if nothing had been, in Trainer of transformers; and as with Lightning's own DDP, which does not go on to the
    same losses either."""
    told = []
    for name, (options, dies_at) in (("killed", (OURS, killed_at)), ("other", other)):
        (tmp_path / name).mkdir()
        done = launched("--max-restarts", "1", *options, SCRIPT, tmp_path / name, library, dies_at)
        assert done.returncode == 0, done.stderr
        assert ("rank 1 of 2 was killed by SIGKILL" in done.stderr) == (dies_at >= 0), done.stderr
        told.append(json.loads((tmp_path / name / "told.json").read_text()))
    killed, expected = told
    assert (killed["first"], expected["first"]) == (saved_at, saved_at if other[1] >= 0 else 0)
    assert killed["losses"] == pytest.approx(expected["losses"], abs=1e-6)
    assert len(killed["losses"]) == 6
