"""Loops of Accelerate, Fabric and Lightning whose models are in pipeline stages, with every other way to split a model
inside them: the same as under their own DDP, and from each other's checkpoints with another number of stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import loop_jobs as jobs
import pytest
import torch
from rank_processes import begin, on_ranks

from tests.thorough import sampled

pytestmark = pytest.mark.timeout(300)

LOOPS = {"accelerate": jobs.by_accelerate, "fabric": jobs.by_fabric, "lightning": jobs.by_lightning}
MESHES: dict[str, tuple[str, int, int, dict[str, int]]] = {
    # model, ranks, ranks of DDP, mesh
    "pp": ("llama", 2, 1, {"pp": 2}),
    "pp x dp": ("llama", 4, 2, {"pp": 2, "dp": 2}),
    "pp x tp": ("llama", 4, 1, {"pp": 2, "dp": 1, "tp": 2}),
    "pp x ep": ("mixtral", 4, 2, {"pp": 2, "ep": 2}),
    "pp x dp x ep": ("mixtral", 8, 4, {"pp": 2, "dp": 2, "ep": 2}),
}
STAGES: dict[int, Any] = {
    1: {"preset": "zero3"},
    2: {"preset": "zero2", "mesh": {"pp": 2}},
    4: {"preset": "zero1", "mesh": {"pp": 4}},
}


def assert_same(run: dict[str, Any], plain: dict[str, Any], *, is_half: bool = False) -> None:
    for name in ("losses", "norms", "evaluated"):
        expected = plain[name][-len(run[name]) :] if is_half else plain[name]
        assert len(run[name]) > 1
        assert run[name] == pytest.approx(expected, abs=1e-5), name
    for name, value in run["state"].items():  # of the main process alone with Accelerate
        torch.testing.assert_close(torch.tensor(value), torch.tensor(plain["state"][name]), rtol=1e-5, atol=1e-5)


@sampled
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_trains_as_without_stages(loop: str, mesh: str, tmp_path: Path) -> None:
    model, ranks, peers, axes = MESHES[mesh]
    plain = begin(peers, LOOPS[loop], None, model, peers, str(tmp_path / "theirs"))
    ours = on_ranks(ranks, LOOPS[loop], {"preset": "zero2", "mesh": axes}, model, peers, str(tmp_path / "ours"))
    expected = plain()[0]
    assert ours[0]["state"].keys() == expected["state"].keys()
    for run in ours:
        assert_same(run, expected)


@sampled
@pytest.mark.parametrize(("stages", "then"), [(2, 1), (2, 4), (4, 2), (1, 2)])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_goes_on_with_another_number_of_stages(loop: str, stages: int, then: int, tmp_path: Path) -> None:
    folder = str(tmp_path / "ours")
    plain = begin(1, LOOPS[loop], None, "deep", 1, str(tmp_path / "theirs"))
    on_ranks(stages, LOOPS[loop], STAGES[stages], "deep", 1, folder)
    half = min((tmp_path / "ours").glob("half*"))  # Lightning saves the second epoch too
    rest = on_ranks(then, LOOPS[loop], STAGES[then], "deep", 1, str(tmp_path / "rest"), start=str(half))
    expected = plain()[0]
    for run in rest:
        assert_same(run, expected, is_half=True)
