"""A rank is lost whose replica group shares the work along an axis, of a model with dropout. The others drop what the
ranks of a job would that changes its mesh between these two steps, and come to the same losses."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import warm
from tests.faults.dropping_rank import LOST_AT, NUM_STEPS, PLANS
from tests.patience import PATIENCE
from tests.thorough import sampled, thorough_only

SCRIPT = Path(__file__).with_name("dropping_rank.py")


def run(num_ranks: int, axis: str, out: Path, end: int, *fault: str) -> None:
    options = ["--elastic", "2:4", "--retries", "1:600" if "joins" in fault else "0:600"] if fault else []
    launch = [warm.python(), "-m", "shardwise", "launch", "--nproc", str(num_ranks), *options]
    done = subprocess.run(
        [*launch, str(SCRIPT), axis, str(out), str(end), *fault],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={**os.environ, **warm.RANKS_TOO, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def told(out: Path, rank: int | str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / f"told-{rank}.json").read_text())
    return found


@thorough_only("three jobs of processes")
@sampled
@pytest.mark.parametrize("axis", PLANS)
@pytest.mark.parametrize("victim", range(4))
@pytest.mark.parametrize("point", ["forward", "backward", "step"])
def test_the_others_drop_what_they_would_on_the_smaller_mesh(
    axis: str, victim: int, point: str, tmp_path: Path
) -> None:
    disturbed, changed = tmp_path / "disturbed", tmp_path / "changed"
    disturbed.mkdir()
    changed.mkdir()
    run(4, axis, disturbed, NUM_STEPS, str(victim), point)
    run(4, axis, changed, LOST_AT)
    staying = [2, 3] if victim < 2 else [0, 1]
    states = [told(changed, rank)["generator"] for rank in staying]
    before = [told(changed, rank)["steps"] for rank in staying]
    (changed / "generators.json").write_text(json.dumps(states))
    run(2, axis, changed, NUM_STEPS)
    for place, rank in enumerate(staying):
        found, wanted = told(disturbed, rank), told(changed, place)
        steps = {**before[place], **wanted["steps"]}
        assert found["steps"].keys() == steps.keys()
        for step, one in steps.items():
            other = found["steps"][step]
            assert other["size"] == one["size"], step
            assert any(map(any, one["masks"]))
            assert other["masks"] == one["masks"], f"step {step}"
            assert other["loss"] == pytest.approx(one["loss"], rel=1e-5), f"step {step}"
        assert found["generator"] == wanted["generator"]


@thorough_only("four jobs of processes")
@sampled
@pytest.mark.parametrize("axis", PLANS)
@pytest.mark.parametrize("victim", [0, 3])
def test_a_group_that_was_filled_up_drops_what_its_seed_says(axis: str, victim: int, tmp_path: Path) -> None:
    """A spare and a newcomer draw by the number of the step in which they join, and by their place among data ranks,
    which is the same for those that share layers or samples. The other group goes on with its numbers."""
    end = NUM_STEPS + 3
    disturbed, changed = tmp_path / "disturbed", tmp_path / "changed"
    disturbed.mkdir()
    changed.mkdir()
    run(4, axis, disturbed, end, str(victim), "forward", "joins")
    staying = [2, 3] if victim < 2 else [0, 1]
    filled = [rank for rank in range(4) if rank not in (*staying, victim)] + ["new"]
    found = {name: told(disturbed, name)["steps"] for name in (*staying, *filled)}
    joined = min(int(step) for step in found["new"])
    assert LOST_AT <= joined < end
    run(4, axis, changed, LOST_AT)
    states = [told(changed, rank)["generator"] for rank in staying]
    if joined > LOST_AT:
        write_generators(changed, dict(enumerate(states)))
        run(2, axis, changed, joined)
        states = [told(changed, place)["generator"] for place in range(2)]
    generators = {found[rank][str(joined)]["rank"]: state for rank, state in zip(staying, states, strict=True)}
    for name in filled:
        place, num_places = found[name][str(joined)]["data_rank"]
        torch.manual_seed(joined * num_places + place)
        generators[found[name][str(joined)]["rank"]] = torch.get_rng_state().tolist()
    write_generators(changed, generators)
    run(4, axis, changed, end)
    for name, steps in found.items():
        for step in range(joined, end):
            one, other = steps[str(step)], told(changed, steps[str(step)]["rank"])["steps"][str(step)]
            assert any(map(any, one["masks"]))
            assert one["masks"] == other["masks"], f"{name} in step {step}"
            assert one["generator"] == other["generator"], f"{name} after step {step}"
            assert one["loss"] == pytest.approx(other["loss"], rel=1e-5), f"step {step}"


def write_generators(out: Path, by_rank: dict[int, list[int]]) -> None:
    (out / "generators.json").write_text(json.dumps([by_rank[rank] for rank in sorted(by_rank)]))
