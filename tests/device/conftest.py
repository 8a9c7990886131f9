"""What the tests of devices share: the device, and ranks on it.

They run on the GPU if there is one (`DEVICE=cuda`, the default there). Elsewhere the same tests rehearse themselves on
a pretended accelerator (`DEVICE=cpu`), so that a slip in them is found before a GPU is at hand.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "ranks"))

from one_device import OneDevice


@pytest.fixture(scope="session")
def device() -> OneDevice:
    kind = os.environ.get("DEVICE") or ("cuda" if torch.cuda.is_available() else "cpu")
    return OneDevice(kind)
