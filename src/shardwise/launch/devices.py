"""What this machine has for ranks to run on."""

from __future__ import annotations

import torch


def count_gpus() -> int:
    """GPUs that torch sees here; asking does not create a context on any of them."""
    return torch.cuda.device_count()
