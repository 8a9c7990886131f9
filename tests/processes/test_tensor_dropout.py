"""Dropout where a model is cut: the same elements where ranks compute the same, others where they do not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.thorough import one_in

pytestmark = one_in(6)

SCRIPT = Path(__file__).with_name("dropping.py")


KINDS = ["plain", "recomputed", "early recomputed", "sequence", "sequence recomputed", "sequence early recomputed"]
KINDS += ["adapted", "adapted recomputed"]
"""Early: nothing behind the row module has to be computed again, so that torch ends a recomputation inside it."""


def told(folder: Path, kind: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "shardwise", "launch", "--nproc", "2", str(SCRIPT), str(folder), kind]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_drop_the_same_where_they_compute_the_same(kind: str, tmp_path: Path) -> None:
    one, other = told(tmp_path, kind)
    assert one["norms"] == other["norms"]
    assert one["next"] == other["next"]
    for name, masks in one["dropped"].items():
        is_common = name.endswith(("outer", "up.lora_dropout.default")) and "sequence" not in kind
        for mask, theirs in zip(masks, other["dropped"][name], strict=True):
            assert 0.2 < sum(mask) / len(mask) < 0.8
            assert (mask == theirs) == is_common, name
        calls = masks[: len(masks) // 2]  # of the first step
        if "recomputed" in kind and name.endswith(("inner", "lora_dropout.default")):
            assert calls[0] == calls[1]  # the forward, and once more in the backward
        assert masks[0] != masks[len(masks) // 2]
    inner = "down.lora_dropout.default" if "adapted" in kind else "inner"
    first, second = (one["dropped"][f"blocks.{index}.{inner}"][0] for index in range(2))
    assert first != second
