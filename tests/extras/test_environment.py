"""The environment of these tests: the torch of `.venv`, and other people's libraries that work with it."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
IMPORTS = [
    "from transformers import Trainer",
    "import accelerate, diffusers, lightning, peft, ray, trl; diffusers.DiffusionPipeline, trl.SFTTrainer",
]


def test_torch_is_the_one_that_the_other_tests_have() -> None:
    pinned = dict(line.split("==") for line in CONSTRAINTS.read_text().split() if "==" in line)
    assert torch.__version__.split("+")[0] == pinned["torch"]
    assert version("transformers") == pinned["transformers"]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("line", IMPORTS)
def test_libraries_are_imported_as_people_import_them(line: str) -> None:
    """In a process of its own, in which nothing has been made ready for it."""
    done = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
