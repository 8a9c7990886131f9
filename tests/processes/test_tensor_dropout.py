"""Dropout where a model is cut: the same elements where ranks compute the same, others where they do not."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from launching import told_by_ranks

from tests.thorough import sampled, thorough_only

pytestmark = sampled

SCRIPT = Path(__file__).with_name("dropout_rank.py")


KINDS = ["plain", "recomputed", "early recomputed", "sequence", "sequence recomputed", "sequence early recomputed"]
KINDS += ["adapted", "adapted recomputed", "sequence in stages", "sequence in stages recomputed"]
"""Early: nothing behind the row module has to be computed again, so that torch ends a recomputation inside it."""


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_drop_the_same_where_they_compute_the_same(kind: str, tmp_path: Path) -> None:
    num_ranks = 4 if "stages" in kind else 2
    every = told_by_ranks(SCRIPT, tmp_path, num_ranks, kind)
    for first in range(0, num_ranks, 2):
        check_pair(*every[first : first + 2], kind)


def check_pair(one: dict[str, Any], other: dict[str, Any], kind: str) -> None:
    assert one["norms"] == other["norms"]
    assert one["next"] == other["next"]
    for name, masks in one["dropped"].items():
        is_common = name.endswith(("outer", "up.lora_dropout.default")) and "sequence" not in kind
        for mask, theirs in zip(masks, other["dropped"][name], strict=True):
            assert 0.2 < sum(mask) / len(mask) < 0.8
            assert (mask == theirs) == is_common, name
        calls = masks[: len(masks) // 2]  # of the first step
        if "recomputed" in kind and name.endswith(("inner", "lora_dropout.default")):
            # the forward of each micro-batch, and once more in its backward
            assert set(Counter(map(tuple, calls)).values()) == {2}, name
        assert masks[0] != masks[len(masks) // 2]
    if "stages" in kind:
        return
    inner = "down.lora_dropout.default" if "adapted" in kind else "inner"
    first, second = (one["dropped"][f"blocks.{index}.{inner}"][0] for index in range(2))
    assert first != second
