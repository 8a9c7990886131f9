"""Trainers of TRL over our engine, beside themselves."""

from __future__ import annotations

import pytest
import torch
import trl_jobs as jobs
from rank_processes import begin, on_ranks

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("name", ["supervised", "preferred"])
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
