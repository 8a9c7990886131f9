"""Whose code a frame is in, by the name of its file."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from shardwise import system
from shardwise.system.whose_code import whose

SITE_PACKAGES = Path(torch.__file__).parent.parent


@pytest.mark.parametrize("library", ["torchvision/ops.py", "torch_geometric/pool.py", "transformers/trainer.py"])
def test_a_library_named_after_torch_is_not_torch(library: str) -> None:
    """Errors would otherwise name the line that called the library, not the line in it that they are about."""
    assert whose(str(SITE_PACKAGES / library)) == "the user's"


def test_files_of_this_library_and_of_torch_and_those_between_are_known_as_such() -> None:
    assert whose(str(system.__file__)) == "ours"
    assert whose(str(nn.__file__)) == "others'"
    assert {whose(name) for name in (threading.__file__, contextlib.__file__, "<string>")} == {"others'"}
    assert whose("/home/me/train.py") == "the user's"
