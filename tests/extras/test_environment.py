"""The environment of these tests: the torch of `.venv`, and other people's libraries that work with it."""

from __future__ import annotations

import importlib
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
LIBRARIES = ["accelerate", "diffusers", "lightning", "peft", "ray", "timm", "torchvision", "transformers", "trl"]


def test_torch_is_the_one_that_the_other_tests_have() -> None:
    pinned = dict(line.split("==") for line in CONSTRAINTS.read_text().split() if "==" in line)
    assert torch.__version__.split("+")[0] == pinned["torch"]
    assert version("transformers") == pinned["transformers"]


@pytest.mark.parametrize("name", LIBRARIES)
def test_libraries_import(name: str) -> None:
    importlib.import_module(name)


def test_torchvision_has_models_that_compute() -> None:
    from torchvision.models import resnet18

    assert resnet18(num_classes=3)(torch.zeros(2, 3, 32, 32)).shape == (2, 3)
