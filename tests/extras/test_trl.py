"""Trainers of TRL over our engine, beside themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import trl_jobs as jobs
from rank_processes import begin, on_ranks
from safetensors.torch import load_file

from tests.thorough import each_value, sampled

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


MESHES = [{"dp": -1, "sp": 2}, {"pp": 2}, {"dp": -1, "tp": 2}, {"pp": 2, "dp": -1, "tp": 2}]


@each_value
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", ["supervised", "preferred"])
def test_split_models_are_trained_as_whole_ones(name: str, mesh: dict[str, int]) -> None:
    job = getattr(jobs, name)
    settings = {"eval_strategy": "steps", "eval_steps": 2} if name == "supervised" else {}
    plain = begin(1, job, None, **settings)
    ours = on_ranks(2 if len(mesh) < 3 else 4, job, {"preset": "zero3", "mesh": mesh}, **settings)[0]
    expected = plain()[0]
    for figure in ("losses", "norms", "rates"):
        assert ours[figure] == pytest.approx(expected[figure], abs=1e-5), figure
    assert ours["evaluations"] == pytest.approx(expected["evaluations"], abs=1e-5)
    assert len(ours["evaluations"]) == (2 if name == "supervised" else 0)
    assert ours["by_token"] == pytest.approx(expected["by_token"], abs=1e-5)
    assert len(ours["losses"]) == len(ours["by_token"]) // (2 if name == "preferred" else 1) == 4
    for parameter, value in expected["state"].items():
        torch.testing.assert_close(torch.tensor(ours["state"][parameter]), torch.tensor(value), rtol=1e-5, atol=1e-5)


@sampled
@pytest.mark.parametrize(
    "plan",
    ["zero2", "zero3", {"preset": "zero3", "mesh": {"dp": -1, "tp": 2}}, {"preset": "zero1", "mesh": {"pp": 2}}],
    ids=str,
)
@pytest.mark.parametrize("name", ["kto", "orpo", "cpo", "compared"])
def test_other_preferences(name: str, plan: Any) -> None:
    job, settings = (jobs.compared, {}) if name == "compared" else (jobs.judged, {"name": name})
    plain = begin(2 if isinstance(plan, str) else 1, job, None, **settings)
    runs = on_ranks(2, job, plan, **settings)
    expected = plain()[0]
    assert len(expected["losses"]) == 4
    for run in runs:
        for figure in ("losses", "norms", "rates", "by_token"):
            assert run[figure] == pytest.approx(expected[figure], abs=1e-5), figure
        for parameter, value in expected["state"].items():
            torch.testing.assert_close(torch.tensor(run["state"][parameter]), torch.tensor(value), rtol=1e-5, atol=1e-5)


STAGES = {"preset": "zero3", "mesh": {"pp": 2}}


@sampled
@pytest.mark.parametrize("name", ["adapted", "preferred_to_itself", "compared"])
def test_adapters_and_rewards_in_stages(name: str, tmp_path: Path) -> None:
    """SFT with LoRA, DPO whose reference is the model without its adapters, and a reward model."""
    folders = tmp_path / "theirs", tmp_path / "ours"
    for folder in folders:
        folder.mkdir()

    def job_of(folder: Path) -> Any:
        if name == "adapted":
            return jobs.supervised, {"peft_config": jobs.adapters(), "eval_strategy": "steps", "eval_steps": 2}
        return getattr(jobs, name), {"folder": str(folder)}

    (theirs, settings), (mine, own) = map(job_of, folders)
    plain = begin(1, theirs, None, **settings)
    runs = on_ranks(2, mine, STAGES, **own)
    expected = plain()[0]
    for run in runs:
        for figure in ("losses", "norms", "rates", "evaluations", "by_token"):
            assert run[figure] == pytest.approx(expected[figure], abs=1e-5), figure
        for parameter, value in expected["state"].items():
            torch.testing.assert_close(torch.tensor(run["state"][parameter]), torch.tensor(value), rtol=1e-5, atol=1e-5)
    assert len(expected["losses"]) == 4
    if name == "preferred_to_itself":
        files = [load_file(folder / "adapter_model.safetensors") for folder in folders]
        assert files[0].keys() == files[1].keys()
        for parameter, value in files[0].items():
            torch.testing.assert_close(files[1][parameter], value, rtol=1e-5, atol=1e-5)


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
