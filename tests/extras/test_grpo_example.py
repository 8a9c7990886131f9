"""`examples/grpo` as a person runs it: two ranks, a sampler that reads from shared memory, a record and plots."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardwise.observe import read_record
from tests.thorough import soak

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo"


def run(out: Path, *more: str) -> str:
    command = [sys.executable, "-m", "shardwise", "launch", "--nproc", "2", str(EXAMPLE / "grpo.py")]
    done = subprocess.run(
        [*command, "--out", str(out), *more], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(120)
def test_a_short_run_leaves_its_artefacts(tmp_path: Path) -> None:
    said = run(tmp_path, "--steps", "3", "--report-every", "2", "--prompts", "4", "--group", "4")
    assert "mismatch: KL" in said
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    record = read_record(tmp_path / "record.jsonl")
    for name in ("reward", "all_right", "kl"):
        assert [step for step, _ in record.column(name)] == [1, 2, 3]
    assert [step for step, _ in record.column("kl", "mismatch")] == [2, 3]
    assert all(0 <= behind <= 1 for _, behind in record.column("steps_behind"))
    assert record.column("kl")[0][1] == pytest.approx(0, abs=1e-6), "the first policy is the reference"


@soak("learns for a minute, beside a sampler of its own pace")
@pytest.mark.timeout(300)
def test_it_learns(tmp_path: Path) -> None:
    run(tmp_path, "--steps", "120")
    rewards = [reward for _, reward in read_record(tmp_path / "record.jsonl").column("reward")]
    assert sum(rewards[:5]) / 5 < 0.2
    assert sum(rewards[-5:]) / 5 > 0.95


def test_rewards_and_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import policy

    draw = torch.Generator().manual_seed(0)
    asked = policy.prompts(6, draw)
    right = torch.cat([asked, asked[:, : policy.LENGTH].flip(1)], 1)
    assert policy.rewards(right).tolist() == [1.0] * 6
    right[:, -1] = policy.EQUALS
    assert policy.rewards(right).tolist() == [0.75] * 6
    model = policy.Policy()
    rows, sampled = policy.answers(model, asked, draw)
    assert torch.equal(rows[:, : policy.PROMPT], asked)
    again = policy.log_probs(model, rows)
    assert torch.allclose(sampled[:, policy.PROMPT :], again[:, policy.PROMPT :], atol=1e-5)
