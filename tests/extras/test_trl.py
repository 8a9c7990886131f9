"""Trainers of TRL over our engine, beside themselves."""

from __future__ import annotations

import pytest
import torch
import trl_jobs as jobs
from rank_processes import begin, on_ranks

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("name", ["supervised", "preferred", "supervised_then_preferred"])
def test_a_run_is_that_of_ddp(name: str) -> None:
    job = getattr(jobs, name)
    plain = begin(2, job, None)
    ours = on_ranks(2, job, "zero3")[0]
    expected = plain()[0]
    assert len(expected["losses"]) == 4
    for figure in ("losses", "norms", "rates"):
        assert ours[figure] == pytest.approx(expected[figure], abs=1e-5), figure
    for parameter, value in expected["state"].items():
        torch.testing.assert_close(torch.tensor(ours["state"][parameter]), torch.tensor(value), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["supervised", "preferred"])
def test_split_sequences_are_trained_as_whole_ones(name: str) -> None:
    job = getattr(jobs, name)
    settings = {"eval_strategy": "steps", "eval_steps": 2} if name == "supervised" else {}
    plain = begin(1, job, None, **settings)
    ours = on_ranks(2, job, {"preset": "zero3", "mesh": {"dp": -1, "sp": 2}}, **settings)[0]
    expected = plain()[0]
    for figure in ("losses", "norms", "rates"):
        assert ours[figure] == pytest.approx(expected[figure], abs=1e-5), figure
    assert ours["evaluations"] == pytest.approx(expected["evaluations"], abs=1e-5)
    assert len(ours["evaluations"]) == (2 if name == "supervised" else 0)
    assert ours["by_token"] == pytest.approx(expected["by_token"], abs=1e-5)
    assert len(ours["losses"]) == len(ours["by_token"]) // (2 if name == "preferred" else 1) == 4
    for parameter, value in expected["state"].items():
        torch.testing.assert_close(torch.tensor(ours["state"][parameter]), torch.tensor(value), rtol=1e-5, atol=1e-5)


def test_a_head_that_trl_reads_by_itself_cannot_be_split_by_words() -> None:
    with pytest.raises(RuntimeError, match="compute log-probabilities from the head's weight themselves"):
        on_ranks(2, jobs.supervised, {"preset": "zero1", "mesh": {"dp": 1, "tp": 2}})


def test_completions_are_generated_and_rewarded_as_under_ddp() -> None:
    plain = begin(2, jobs.rewarded, None)
    ours = on_ranks(2, jobs.rewarded, "zero3")
    by_units = on_ranks(2, jobs.rewarded, "zero3", ds3_gather_for_generation=False)
    expected = plain()
    for runs in (ours, by_units):
        for rank, run in enumerate(runs):
            assert run["generated"] == expected[rank]["generated"]
    assert by_units[0]["losses"] == pytest.approx(ours[0]["losses"], abs=1e-6)
    assert len({str(run["generated"]) for run in ours}) == 2
    assert len(ours[0]["losses"]) == 6
    for figure in ("losses", "norms", "rates"):
        assert ours[0][figure] == pytest.approx(expected[0][figure], abs=1e-5), figure
    for figure, values in expected[0]["logs"].items():
        assert ours[0]["logs"][figure] == pytest.approx(values, abs=1e-5), figure
    for parameter, value in expected[0]["state"].items():
        torch.testing.assert_close(torch.tensor(ours[0]["state"][parameter]), torch.tensor(value), rtol=1e-4, atol=1e-5)
