"""Ranks that share a sample draw the same tokens, whatever their own random numbers are."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import told_by_ranks

from tests.thorough import sampled, thorough_only

MESHES = [{"pp": 2}, {"pp": 2, "tp": 2}, {"pp": 2, "dp": 2}, {"dp": 2, "tp": 2}]
PLANS: list[dict[str, Any]] = [
    *({"mesh": mesh} for mesh in MESHES),
    *({"mesh": mesh, "tensor": {"sequence": True}} for mesh in MESHES if "tp" in mesh),
]
SCRIPT = Path(__file__).with_name("sampling_rank.py")


@thorough_only("starts processes that import transformers")
@sampled
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: " ".join([*plan["mesh"], *plan.get("tensor", ())]))
def test_ranks_that_share_a_sample_draw_the_same_tokens(plan: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from sampling_rank import SEED, build, sampled

    twin = build()
    torch.manual_seed(SEED)
    expected = [sampled(twin), sampled(twin)]
    every, mesh = told(tmp_path, plan), plan["mesh"]
    assert [every[0]["first"], every[0]["second"]] == expected
    assert expected[0] != expected[1]
    for rank, one in enumerate(every):
        first = next(other for other in every if other["data"] == one["data"])
        for name in ("first", "second", "with dropout", "without an engine"):
            assert one.get(name) == first.get(name), (rank, name)
    if "pp" not in mesh:
        assert every[0]["without an engine"] == expected[0]
    num_first = len(every) // mesh.get("pp", 1)  # pp is the outermost axis
    assert [one["is_restored"] for one in every] == [False] * num_first + [True] * (len(every) - num_first)
    if "dp" in mesh:
        other = next(one for one in every if one["data"] != every[0]["data"])
        assert every[0]["first"] != other["first"]


def told(folder: Path, plan: dict[str, Any]) -> list[dict[str, Any]]:
    return told_by_ranks(SCRIPT, folder, math.prod(plan["mesh"].values()), json.dumps(plan))
