"""What the tests of devices share: the device, and ranks on it.

`make device` runs them on a GPU, by `DEVICE=cuda`. Without it the same tests rehearse themselves on a pretended
accelerator, so that a slip in them is found before a GPU is at hand.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "ranks"))

from one_device import OneDevice


@pytest.fixture(scope="session")
def device() -> OneDevice:
    return OneDevice(os.environ.get("DEVICE", "cpu"))
