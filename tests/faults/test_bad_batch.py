"""A batch that fails on whichever rank has it is left out where the plan says so, and all go on behind it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

import warm
from shardwise.observe import read_record
from tests.faults.bad_batch import BAD_STEP, NUM_STEPS, bad_sample, build, loader
from tests.patience import PATIENCE
from tests.thorough import thorough_only

SCRIPT = Path(__file__).with_name("bad_batch.py")


def ran(out: Path, where: str, plan: dict[str, object], retries: str = "0:10") -> subprocess.CompletedProcess[str]:
    launch = ["launch", "--nproc", "4", "--elastic", "1:4", "--retries", retries]
    return subprocess.run(
        [warm.python(), "-m", "shardwise", *launch, str(SCRIPT), str(out), where, json.dumps(plan)],
        env={**os.environ, **warm.RANKS_TOO, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def oracle(bad_step: int = BAD_STEP) -> list[float]:
    """Of a loop that knows which batch is bad."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step, batch in enumerate(loader("", (0, 1), -1)):
        if step == bad_step:
            continue
        loss = ((model(batch["x"]) - batch["y"]) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        optimizer.step()
        losses.append(loss.item())
        if len(losses) == NUM_STEPS:
            break
    return losses


@thorough_only("starts many processes")
@pytest.mark.parametrize(("where", "num_dead", "retries"), [("forward", 2, "3:600"), ("source", 1, "0:10")])
def test_a_bad_batch_is_left_out_on_all_ranks(where: str, num_dead: int, retries: str, tmp_path: Path) -> None:
    done = ran(tmp_path, where, {"preset": "zero3", "bad_batch": "skip", "run": str(tmp_path / "run")}, retries)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "The batch is skipped." in said
    losses = oracle()
    found = [json.loads(path.read_text()) for path in tmp_path.glob("member-*.json")]
    assert len(found) >= 4 - num_dead, said
    for one in found:
        assert one["step"] == NUM_STEPS + 1, "one batch more than steps"
        pairs = [(loss, losses[int(step)]) for step, loss in one["losses"].items()]
        assert all(abs(loss - wanted) <= 1e-5 * wanted for loss, wanted in pairs), (pairs, said)
    verdicts = [line for line in read_record(tmp_path / "run" / "record.jsonl").lines if line["kind"] == "fault"]
    assert verdicts[-1]["cause"] == "data"
    assert verdicts[-1]["action"] == "skip"
    assert str(bad_sample()) in verdicts[-1]["evidence"]
    assert verdicts[-1]["at_step"] == BAD_STEP


@thorough_only("starts many processes")
def test_a_worker_process_that_the_kernel_kills_is_no_bad_batch(tmp_path: Path) -> None:
    """As it does where memory runs out. Nothing is skipped, and the job does not end."""
    done = ran(tmp_path, "worker", {"preset": "zero3", "bad_batch": "skip", "run": str(tmp_path / "run")})
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "killed").exists()
    losses = oracle(bad_step=-1)
    found = [json.loads(path.read_text()) for path in tmp_path.glob("member-*.json")]
    assert [one["step"] for one in found] == [NUM_STEPS] * 3
    for one in found:
        wrong = [step for step, loss in one["losses"].items() if abs(loss - losses[int(step)]) > 1e-5 * loss]
        assert not wrong, done.stderr
    (fault,) = (line for line in read_record(tmp_path / "run" / "record.jsonl").lines if line["kind"] == "fault")
    assert (fault["cause"], fault["action"]) == ("node", "shrink")
    assert "Worker process 0 of the data loader was killed by SIGKILL" in fault["evidence"]


@thorough_only("starts many processes")
def test_without_a_loader_that_can_go_on_behind_a_batch_it_is_refused(tmp_path: Path) -> None:
    done = ran(tmp_path, "own", {"preset": "zero1", "bad_batch": "skip"})
    assert done.returncode != 0
    assert "no loader with samples by index follows this engine" in done.stdout + done.stderr
